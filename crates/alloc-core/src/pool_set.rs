//! Which pool a request is served from, and what becomes of the pools of graphs.
//!
//! A pool belongs to one owner (the default, or a private pool), one stream and one size class. A block stays in its pool,
//! even when it serves another stream for a while; a whole idle handle may leave it, to another pool or to the driver.

use std::{
    collections::BTreeMap,
    ops::{Index, IndexMut},
};

use crate::{
    block::{BlockId, BlockState},
    config::{Move, Policy},
    event::StreamIx,
    id::PoolId,
    pool::FreeIndex,
    size::{BLOCK_GRANULARITY, SMALL_REQUEST_MAX, SizeClass},
    source::{Origin, SourceError},
    stats::{Family, is_oversize},
};

/// A pool's place in the [`PoolSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PoolIx(pub(crate) u32);

/// A private pool's place in the [`PoolSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PrivateIx(pub(crate) u32);

/// What is said of a pool's memory. A private pool's stream pools all have its terms; the default pools have the default.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Where segments come from. The driver's pools may have ranges instead.
    pub(crate) origin: Origin,
    /// The rules by which its memory comes: the device's, or those of segments where it has a source of its own.
    pub(crate) rules: Policy,
    /// Whether a block may be cut to serve a smaller request.
    pub(crate) may_split: bool,
    /// Whether memory may change its address, as far as the settings let it.
    pub(crate) moving: Move,
}

impl Terms {
    /// What holds for memory from there, on a device with these rules, as long as nothing else is said.
    fn new(origin: Origin, rules: Policy) -> Self {
        let rules = if origin.is_driver() { rules } else { Policy::Native };
        Self { origin, rules, may_split: true, moving: Move::On }
    }

    /// Whether memory comes from address ranges; else it comes from segments.
    pub(crate) fn is_paged(&self) -> bool {
        self.rules != Policy::Native
    }
}

/// Blocks of one owner, stream and size class.
#[derive(Debug)]
pub(crate) struct Pool {
    /// `None` for the default pools.
    pub(crate) owner: Option<PrivateIx>,
    pub(crate) stream: StreamIx,
    pub(crate) class: SizeClass,
    /// The idle blocks: those in state `Free`, or `Quarantined` once the owner is released.
    pub(crate) index: FreeIndex,
    /// The blocks in state `Unmapped`, by address.
    pub(crate) unmapped: BTreeMap<u64, BlockId>,
    /// Segments and ranges that belong to this pool, departing ones too.
    pub(crate) spans: usize,
    /// Requests that came to this pool: its clock, by which the age of idle blocks is told.
    pub(crate) requests: u64,
    /// Requests that are climbing the ladder with this pool in their hands, which so stays where it is.
    pub(crate) climbers: usize,
    /// Its owner's, here too, so that the cached path need not look the owner up.
    pub(crate) terms: Terms,
}

impl Pool {
    /// Whether a block that serves `rounded` bytes is cut if it has `rest` bytes more.
    pub(crate) fn is_worth_splitting(&self, rounded: u64, rest: u64, max_split_size: Option<u64>) -> bool {
        if !self.terms.may_split {
            false
        } else if self.class == SizeClass::Small || self.terms.is_paged() {
            rest >= BLOCK_GRANULARITY
        } else {
            !is_oversize(rounded, max_split_size) && rest > SMALL_REQUEST_MAX
        }
    }

    /// Whether it matters which of a free block's handles are whole: those can move.
    pub(crate) fn keeps_handles_whole(&self) -> bool {
        self.terms.rules == Policy::Rallocator && self.class == SizeClass::Large
    }
}

/// Whether a private pool's memory may be handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrivateState {
    /// This many begins are not yet answered by a release.
    Live {
        /// Never 0.
        users: u32,
    },
    /// Released: idle memory is quarantined, for a graph may still be running on it.
    Released {
        /// How many private pools had been released, this one included.
        order: u64,
    },
    /// A device synchronise after the release proved that no graph runs on it: idle memory may go back.
    Proven,
}

/// What torch calls a private pool: memory for the graphs of one capture pool, or of one `MemPool`.
#[derive(Debug)]
pub(crate) struct PrivatePool {
    pub(crate) id: PoolId,
    pub(crate) state: PrivateState,
    pub(crate) pools: Vec<PoolIx>,
    /// Bytes of the segments and mapped handles of its pools.
    pub(crate) reserved: Family,
    /// Begins that have not ended: requests are being routed here, perhaps those of a capture.
    open: u32,
    /// Whether no request has come since the last begin, so that a capture's streams may not be known yet.
    is_silent: bool,
    /// Whether its idle memory serves other requests that would fail without.
    pub(crate) serves_when_out: bool,
    pub(crate) terms: Terms,
}

impl PrivatePool {
    /// A pool with one user and no memory.
    fn new(id: PoolId, terms: Terms) -> Self {
        Self {
            id,
            state: PrivateState::Live { users: 1 },
            pools: Vec::new(),
            reserved: Family::default(),
            open: 0,
            is_silent: false,
            serves_when_out: false,
            terms,
        }
    }

    /// Begins and creations that are not yet answered by a release; 0 once it is released.
    pub(crate) fn users(&self) -> u32 {
        match self.state {
            PrivateState::Live { users } => users,
            PrivateState::Released { .. } | PrivateState::Proven => 0,
        }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct PoolSet {
    /// The device's.
    rules: Policy,
    pools: Vec<Option<Pool>>,
    /// The default pools of each stream, by size class.
    defaults: Vec<[Option<PoolIx>; 2]>,
    privates: Vec<Option<PrivatePool>>,
    /// Private pools released so far.
    releases: u64,
}

impl PoolSet {
    /// No pools, on a device with these rules.
    pub(crate) fn new(rules: Policy) -> Self {
        Self { rules, pools: Vec::new(), defaults: Vec::new(), privates: Vec::new(), releases: 0 }
    }

    /// The pool for requests on `stream`, made if it is the first.
    #[inline]
    pub(crate) fn of(&mut self, owner: Option<PrivateIx>, stream: StreamIx, class: SizeClass) -> PoolIx {
        match owner {
            None => self.of_default(stream, class),
            Some(private) => self.of_private(private, stream, class),
        }
    }

    fn of_default(&mut self, stream: StreamIx, class: SizeClass) -> PoolIx {
        if let Some(Some(pool)) = self.defaults.get(stream.index()).map(|pools| pools[class.index()]) {
            return pool;
        }
        self.add_default(stream, class)
    }

    #[cold]
    fn add_default(&mut self, stream: StreamIx, class: SizeClass) -> PoolIx {
        let pool = self.add(None, stream, class);
        if self.defaults.len() <= stream.index() {
            self.defaults.resize(stream.index() + 1, [None; 2]);
        }
        self.defaults[stream.index()][class.index()] = Some(pool);
        pool
    }

    #[cold]
    fn of_private(&mut self, private: PrivateIx, stream: StreamIx, class: SizeClass) -> PoolIx {
        self.private_mut(private).is_silent = false;
        let is_it = |pool: &&PoolIx| self[**pool].stream == stream && self[**pool].class == class;
        if let Some(pool) = self.private(private).pools.iter().find(is_it) {
            return *pool;
        }
        let pool = self.add(Some(private), stream, class);
        self[pool].terms = self.private(private).terms.clone();
        self.private_mut(private).pools.push(pool);
        pool
    }

    fn add(&mut self, owner: Option<PrivateIx>, stream: StreamIx, class: SizeClass) -> PoolIx {
        let pool = Pool {
            owner,
            stream,
            class,
            index: FreeIndex::default(),
            unmapped: BTreeMap::new(),
            spans: 0,
            requests: 0,
            climbers: 0,
            terms: Terms::new(Origin::Driver, self.rules),
        };
        PoolIx(place(&mut self.pools, pool))
    }

    /// Whether the program asked for memory on the stream, and did not only name it.
    pub(crate) fn has_pool_of(&self, stream: StreamIx) -> bool {
        self.defaults.get(stream.index()).is_some_and(|pools| pools.iter().any(Option::is_some))
    }

    /// All pools there are.
    pub(crate) fn ids(&self) -> impl Iterator<Item = PoolIx> + '_ {
        (0..self.pools.len()).filter(|index| self.pools[*index].is_some()).map(|index| PoolIx(index as u32))
    }

    /// Whether idle memory of the pool may be handed out.
    pub(crate) fn is_live(&self, pool: PoolIx) -> bool {
        self[pool].owner.is_none_or(|owner| matches!(self.private(owner).state, PrivateState::Live { .. }))
    }

    /// The state of idle memory of the pool.
    #[inline]
    pub(crate) fn idle_state(&self, pool: PoolIx) -> BlockState {
        if self.is_live(pool) { BlockState::Free } else { BlockState::Quarantined }
    }

    /// Whether idle memory of the pool may go back: a live graph's may not.
    pub(crate) fn is_releasable(&self, pool: PoolIx) -> bool {
        self[pool].owner.is_none_or(|owner| self.private(owner).state == PrivateState::Proven)
    }

    /// The private pools there are.
    pub(crate) fn privates(&self) -> impl Iterator<Item = (PrivateIx, &PrivatePool)> {
        let at = |(index, slot): (usize, &'_ Option<PrivatePool>)| slot.as_ref().map(|_| PrivateIx(index as u32));
        self.privates.iter().enumerate().filter_map(at).map(|ix| (ix, self.private(ix)))
    }

    /// The live private pool that the program calls `id`.
    pub(crate) fn find_live(&self, id: PoolId) -> Option<PrivateIx> {
        let is_it =
            |(_, pool): &(PrivateIx, &PrivatePool)| pool.id == id && matches!(pool.state, PrivateState::Live { .. });
        self.privates().find(is_it).map(|(ix, _)| ix)
    }

    /// Creates a private pool, or counts one more user. A released pool of the same name stays released.
    pub(crate) fn create(&mut self, id: PoolId) -> PrivateIx {
        if let Some(private) = self.find_live(id) {
            if let PrivateState::Live { users } = &mut self.private_mut(private).state {
                *users += 1;
            }
            return private;
        }
        PrivateIx(place(&mut self.privates, PrivatePool::new(id, Terms::new(Origin::Driver, self.rules))))
    }

    /// Creates a private pool whose segments come from elsewhere.
    ///
    /// # Errors
    ///
    /// [`SourceError::PoolExists`]: a live pool has its segments from where it has them.
    pub(crate) fn create_from(&mut self, id: PoolId, origin: Origin) -> Result<PrivateIx, SourceError> {
        match self.find_live(id) {
            Some(_) => Err(SourceError::PoolExists { pool: id }),
            None => Ok(PrivateIx(place(&mut self.privates, PrivatePool::new(id, Terms::new(origin, self.rules))))),
        }
    }

    /// As [`create`](Self::create), for a user whose requests are routed to the pool from now on.
    pub(crate) fn begin(&mut self, id: PoolId) -> PrivateIx {
        let private = self.create(id);
        let pool = self.private_mut(private);
        pool.open += 1;
        pool.is_silent = true;
        private
    }

    /// From now on the blocks of the pool, those that it has too, are handed out whole.
    pub(crate) fn forbid_splits(&mut self, private: PrivateIx) {
        self.change_terms(private, |terms| terms.may_split = false);
    }

    /// From now on the memory of the pool, which has none yet, changes its address no more than `moving` lets it, and no
    /// more than it was let before.
    pub(crate) fn restrict_moves(&mut self, private: PrivateIx, moving: Move) {
        self.change_terms(private, |terms| terms.moving = moving.max(terms.moving));
    }

    fn change_terms(&mut self, private: PrivateIx, change: impl FnOnce(&mut Terms)) {
        change(&mut self.private_mut(private).terms);
        let terms = self.private(private).terms.clone();
        for pool in self.private(private).pools.clone() {
            self[pool].terms = terms.clone();
        }
    }

    /// Whether a private pool has memory, or a request for it may be getting some.
    pub(crate) fn has_memory(&self, private: PrivateIx) -> bool {
        let private = self.private(private);
        private.reserved.all.current > 0 || private.pools.iter().any(|pool| self[*pool].climbers > 0)
    }

    /// The pools of live private pools that serve a request of `stream` and `class` that nothing else can.
    pub(crate) fn last_resorts(&self, stream: StreamIx, class: SizeClass) -> Vec<PoolIx> {
        let serving = |pool: &&PrivatePool| pool.serves_when_out && matches!(pool.state, PrivateState::Live { .. });
        let privates = self.privates().map(|(_, pool)| pool);
        let pools = privates.filter(serving).flat_map(|private| private.pools.iter().copied());
        pools.filter(|pool| self[*pool].stream == stream && self[*pool].class == class).collect()
    }

    /// Answers one begin: its requests are no longer routed to the pool.
    pub(crate) fn end(&mut self, id: PoolId) {
        if let Some(private) = self.find_live(id) {
            let pool = self.private_mut(private);
            pool.open = pool.open.saturating_sub(1);
        }
    }

    /// Whether streams that have asked for nothing yet may be capturing: a pool has begun, and no request has come.
    pub(crate) fn has_silent_route(&self) -> bool {
        self.privates().any(|(_, pool)| pool.open > 0 && pool.is_silent)
    }

    /// Counts one user less; returns whether it was the last.
    pub(crate) fn release(&mut self, private: PrivateIx) -> bool {
        let order = self.releases + 1;
        let state = &mut self.private_mut(private).state;
        match state {
            PrivateState::Live { users } if *users > 1 => {
                *users -= 1;
                false
            }
            PrivateState::Live { .. } => {
                *state = PrivateState::Released { order };
                self.releases = order;
                true
            }
            PrivateState::Released { .. } | PrivateState::Proven => false,
        }
    }

    /// How many private pools have been released so far.
    pub(crate) fn releases(&self) -> u64 {
        self.releases
    }

    /// Whether a released private pool still waits for the proof that no graph runs on it.
    pub(crate) fn has_unproven(&self) -> bool {
        self.privates().any(|(_, private)| matches!(private.state, PrivateState::Released { .. }))
    }

    /// No graph runs on the first `order` private pools that were released.
    pub(crate) fn prove(&mut self, order: u64) {
        for private in self.privates.iter_mut().flatten() {
            if matches!(private.state, PrivateState::Released { order: own } if own <= order) {
                private.state = PrivateState::Proven;
            }
        }
    }

    /// Counts memory that came to a pool, if it is a private one's.
    pub(crate) fn on_reserved(&mut self, pool: PoolIx, bytes: u64) {
        let Pool { owner, class, .. } = self[pool];
        if let Some(owner) = owner {
            self.private_mut(owner).reserved.add(class, bytes);
        }
    }

    /// Counts memory that left a pool, if it is a private one's.
    pub(crate) fn on_returned(&mut self, pool: PoolIx, bytes: u64) {
        let Pool { owner, class, .. } = self[pool];
        if let Some(owner) = owner {
            self.private_mut(owner).reserved.take(class, bytes);
        }
    }

    /// Updates what the private pools have reserved.
    pub(crate) fn for_each_reserved(&mut self, update: impl FnMut(&mut Family)) {
        self.privates.iter_mut().flatten().map(|private| &mut private.reserved).for_each(update);
    }

    /// Forgets released private pools that hold nothing any more.
    pub(crate) fn drop_empty_privates(&mut self) {
        for index in 0..self.privates.len() {
            let Some(private) = &self.privates[index] else { continue };
            let is_live = matches!(private.state, PrivateState::Live { .. });
            let is_unused = |pool: &PoolIx| self[*pool].spans == 0 && self[*pool].climbers == 0;
            if !is_live && private.pools.iter().all(is_unused) {
                let private = self.privates[index].take().expect("seen above");
                for pool in private.pools {
                    self.pools[pool.0 as usize] = None;
                }
            }
        }
    }

    pub(crate) fn private(&self, private: PrivateIx) -> &PrivatePool {
        self.privates[private.0 as usize].as_ref().expect("a private pool outlives its pools")
    }

    pub(crate) fn private_mut(&mut self, private: PrivateIx) -> &mut PrivatePool {
        self.privates[private.0 as usize].as_mut().expect("a private pool outlives its pools")
    }
}

/// Puts `value` into the first vacant slot.
fn place<T>(slots: &mut Vec<Option<T>>, value: T) -> u32 {
    let index = slots.iter().position(Option::is_none).unwrap_or_else(|| {
        slots.push(None);
        slots.len() - 1
    });
    slots[index] = Some(value);
    index as u32
}

impl Index<PoolIx> for PoolSet {
    type Output = Pool;

    fn index(&self, pool: PoolIx) -> &Pool {
        self.pools[pool.0 as usize].as_ref().expect("a pool outlives its blocks")
    }
}

impl IndexMut<PoolIx> for PoolSet {
    fn index_mut(&mut self, pool: PoolIx) -> &mut Pool {
        self.pools[pool.0 as usize].as_mut().expect("a pool outlives its blocks")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_is_made_once_for_each_stream_and_class() {
        let mut set = PoolSet::new(Policy::Native);
        let small = set.of(None, StreamIx(1), SizeClass::Small);
        assert_eq!(set.of(None, StreamIx(1), SizeClass::Small), small);
        assert_ne!(set.of(None, StreamIx(1), SizeClass::Large), small);
        assert_ne!(set.of(None, StreamIx(0), SizeClass::Small), small);
    }

    #[test]
    fn released_pool_is_not_revived_by_a_begin_with_its_name() {
        let mut set = PoolSet::new(Policy::Native);
        let first = set.begin(PoolId(1, 0));
        let pool = set.of(Some(first), StreamIx(0), SizeClass::Small);
        set[pool].spans = 1;
        assert!(set.release(first));
        let second = set.begin(PoolId(1, 0));
        assert_ne!(first, second);
        assert!(!set.is_live(pool) && !set.is_releasable(pool));
    }

    #[test]
    fn every_begin_wants_its_release() {
        let mut set = PoolSet::new(Policy::Native);
        let private = set.begin(PoolId(1, 0));
        assert_eq!(set.begin(PoolId(1, 0)), private);
        assert!(!set.release(private));
        assert!(set.release(private));
        set.drop_empty_privates();
        assert_eq!(set.privates().count(), 0);
    }
}
