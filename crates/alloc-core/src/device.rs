//! The state of one device: pure, without a driver and without locks.
//!
//! This file is the cached path. [`DeviceState::malloc`] looks for a free block and hands it out; [`DeviceState::free`]
//! takes it back. When nothing fits, [`ladder`](crate::ladder) says what to try; the plans for that are made in
//! [`settle`](crate::settle) (events), [`backing`](crate::backing) (growth) and [`release`](crate::release).

use crate::{
    backing::SpanTable,
    block::{BlockId, BlockState},
    block_table::BlockTable,
    config::{Config, Policy},
    driver::Capabilities,
    event::{StreamIx, StreamTable},
    history::{Action, History, Recording},
    id::{DeviceId, DevicePtr, PoolId},
    pin::PinTable,
    plan::{ReleaseRun, Stray},
    pool::FreeBlock,
    pool_set::{PoolIx, PoolSet, PrivateIx},
    size::{self, SizeClass},
    stale::StaleTable,
    stats::{Pieces, Stats, Weight, is_oversize},
};

/// A request for memory, rounded and routed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// The bytes that the program asked for.
    pub(crate) requested: u64,
    /// The bytes of the block that serves it.
    pub(crate) rounded: u64,
    pub(crate) pool: PoolIx,
}

/// What a call to free came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    /// The block is free, or will be once other streams are done.
    Done,
    /// As `Done`; and the block's streams should be given an event now.
    CloseDue(BlockId),
    /// No block starts at this address.
    Unknown,
    /// A block starts at this address, but the program does not hold it.
    NotHeld,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) id: DeviceId,
    pub(crate) config: Config,
    pub(crate) capabilities: Capabilities,
    /// The rules in force: the policy's, unless the device cannot do what they need.
    pub(crate) rules: Policy,
    /// Reserved bytes may not exceed this.
    pub(crate) limit: u64,
    /// The fraction of the device that `limit` was computed from.
    pub(crate) fraction: f64,
    /// The reserved bytes that the driver refused when it was last asked for so many: others use the rest of the device.
    pub(crate) refused: Option<u64>,
    /// The devices that reach mapped memory, this one first.
    pub(crate) access: Vec<DeviceId>,
    pub(crate) blocks: BlockTable,
    pub(crate) pools: PoolSet,
    pub(crate) spans: SpanTable,
    pub(crate) streams: StreamTable,
    pub(crate) pins: PinTable,
    /// Addresses whose memory has moved away.
    pub(crate) stale: StaleTable,
    /// Handles that the driver did not take back; see [`Stray`].
    pub(crate) strays: Vec<Stray>,
    /// Mappings that nobody can use and that the driver did not undo when asked; see [`ReleaseRun::is_stuck`].
    pub(crate) stuck: Vec<ReleaseRun>,
    /// Segments that their sources are being given back: pool and bytes.
    pub(crate) departing: Vec<(PoolIx, u64)>,
    /// Bytes that sources are being asked for.
    pub(crate) promised: u64,
    pub(crate) stats: Stats,
    pub(crate) history: History,
    /// Whether somebody is told of memory that comes and goes: then none moves.
    pub(crate) is_tracked: bool,
}

impl DeviceState {
    pub(crate) fn new(id: DeviceId, capabilities: Capabilities, config: &Config, recording: Option<Recording>) -> Self {
        let rules = if capabilities.virtual_memory { config.policy } else { Policy::Native };
        let mut state = Self {
            id,
            rules,
            limit: u64::MAX,
            fraction: 1.0,
            refused: None,
            access: vec![id],
            blocks: BlockTable::default(),
            pools: PoolSet::new(rules),
            spans: SpanTable::default(),
            streams: StreamTable::default(),
            pins: PinTable::default(),
            stale: StaleTable::default(),
            strays: Vec::new(),
            stuck: Vec::new(),
            departing: Vec::new(),
            promised: 0,
            stats: Stats::default(),
            history: History::new(recording),
            is_tracked: false,
            config: config.clone(),
            capabilities,
        };
        if config.per_process_memory_fraction < 1.0 {
            state.set_fraction(config.per_process_memory_fraction);
        }
        state
    }

    /// Whether the driver's memory comes from address ranges; else it comes from segments.
    pub(crate) fn has_ranges(&self) -> bool {
        self.rules != Policy::Native
    }

    /// Limits reserved memory to a part of the device. A limit below what is reserved already stops growth only.
    pub(crate) fn set_fraction(&mut self, fraction: f64) {
        self.fraction = fraction;
        self.limit = (self.capabilities.total_bytes as f64 * fraction) as u64;
    }

    /// Limits reserved memory to so many bytes.
    pub(crate) fn set_limit(&mut self, bytes: u64) {
        self.fraction = (bytes as f64 / self.capabilities.total_bytes as f64).min(1.0);
        self.limit = bytes;
    }

    /// The request for `requested` bytes, at most [`size::REQUEST_MAX`], on a stream, for a private pool or the default.
    #[inline]
    pub(crate) fn request(&mut self, requested: u64, stream: StreamIx, owner: Option<PrivateIx>) -> Request {
        let rounded = size::block_size(requested, &self.config);
        let pool = self.pools.of(owner, stream, SizeClass::of(rounded));
        self.pools[pool].requests += 1;
        Request { requested, rounded, pool }
    }

    /// Serves the request from a free block of its pool, if one fits.
    #[inline]
    pub(crate) fn malloc(&mut self, request: &Request) -> Option<DevicePtr> {
        let block = self.best_cut(self.best_fit(request)?, request);
        Some(self.hand_out_whole(block, request, None))
    }

    /// The block that torch's rules choose for the request.
    #[inline]
    fn best_fit(&self, request: &Request) -> Option<FreeBlock> {
        let index = &self.pools[request.pool].index;
        let mut block = index.best_fit(request.rounded)?;
        if self.rules == Policy::Expandable {
            // A block that can grow counts as large as it can become, so the one before a large hole comes last.
            while let Some(hole) = self.hole_after(block.id)
                && let Some(next) = index.after(block)
                && next.size + self.hole_after(next.id).unwrap_or(0) < block.size + hole
            {
                block = next;
            }
        }
        if self.is_spared(block, request) { None } else { Some(block) }
    }

    /// Whether `max_split_size` keeps the block from serving the request: then it keeps each larger one from that too.
    #[inline]
    pub(crate) fn is_spared(&self, block: FreeBlock, request: &Request) -> bool {
        let Some(limit) = self.config.max_split_size else { return false };
        if request.rounded < limit {
            block.size >= limit
        } else {
            block.size >= request.rounded.saturating_add(self.config.max_non_split_rounding)
        }
    }

    /// The bytes that an unmapped block right after this one has.
    fn hole_after(&self, id: BlockId) -> Option<u64> {
        let next = &self.blocks[self.blocks[id].next?];
        (next.state == BlockState::Unmapped).then_some(next.size)
    }

    /// Gives a free block, which is in the index of the request's pool, to the request; what is left of it stays there.
    pub(crate) fn hand_out(&mut self, id: BlockId, request: &Request) -> DevicePtr {
        self.hand_out_to(id, request, None)
    }

    /// As [`hand_out`](Self::hand_out), to a guest if one is named: a stream that is not the pool's.
    pub(crate) fn hand_out_to(&mut self, id: BlockId, request: &Request, guest: Option<StreamIx>) -> DevicePtr {
        self.hand_out_whole(self.blocks.entry(id), request, guest)
    }

    #[inline]
    fn hand_out_whole(&mut self, whole: FreeBlock, request: &Request, guest: Option<StreamIx>) -> DevicePtr {
        let pool = &mut self.pools[request.pool];
        let (class, is_paged) = (pool.class, pool.terms.is_paged());
        let before = if is_paged { Pieces::default() } else { self.blocks[whole.id].free_pieces() };
        let mut after = Pieces::default();
        let (mut id, mut size) = (whole.id, whole.size);
        pool.index.remove(whole);
        let rest = size - request.rounded;
        if pool.is_worth_splitting(request.rounded, rest, self.config.max_split_size) {
            id = self.cut(whole, request);
            size = request.rounded;
            after = Pieces::one(rest);
        }
        if !is_paged {
            self.stats.on_inactive_split(class, before, after);
        }
        self.occupy(id, Weight { class, size, requested: request.requested }, guest)
    }

    /// A block, which is in no index any more, is the program's from now on.
    #[inline]
    pub(crate) fn occupy(&mut self, id: BlockId, weight: Weight, guest: Option<StreamIx>) -> DevicePtr {
        let block = &mut self.blocks[id];
        let address = block.address;
        block.state = BlockState::Allocated;
        block.requested = weight.requested;
        block.last_use.clear();
        if let Some(stream) = guest {
            block.guest_of = guest;
            block.last_use.set(stream, 0);
        }
        self.stats.on_allocated(weight, is_oversize(weight.size, self.config.max_split_size));
        self.record_use(Action::Alloc, id, weight.requested);
        DevicePtr(address)
    }

    /// The program no longer holds `address`, whatever else it says about it.
    pub(crate) fn free(&mut self, address: DevicePtr) -> Freed {
        let Some(id) = self.blocks.at(address.0) else { return Freed::Unknown };
        let block = &mut self.blocks[id];
        if block.state != BlockState::Allocated {
            return Freed::NotHeld;
        }
        let pool = &self.pools[block.pool];
        let (own, now, idle) = (pool.stream, pool.requests, self.pools.idle_state(block.pool));
        let weight = Weight { class: pool.class, size: block.size, requested: block.requested };
        let is_own_alone = block.last_use.is_empty();
        if is_own_alone {
            block.last_use.set(own, self.streams.current_epoch(own));
            block.turn_idle(idle, now);
        }
        self.stats.on_free_requested(weight, is_oversize(weight.size, self.config.max_split_size));
        self.record_use(Action::FreeRequested, id, weight.requested);
        if !is_own_alone {
            return self.make_pending(id, own);
        }
        self.stats.on_idle(weight);
        self.record_use(Action::FreeCompleted, id, weight.requested);
        self.coalesce_and_index(id);
        Freed::Done
    }

    /// The program used the block on other streams than its own: it waits for each of them that is not over for good.
    fn make_pending(&mut self, id: BlockId, own: StreamIx) -> Freed {
        let mut is_due = false;
        let mut streams = 0;
        let block = &mut self.blocks[id];
        for (stream, _) in block.last_use.iter() {
            // A guest goes home to its own stream, which comes after itself.
            if stream != own && !self.streams.is_over(stream) {
                is_due |= self.streams.wait_for_current(stream, id, block.size);
                streams += 1;
            }
        }
        block.last_use.stamp(|stream| self.streams.current_epoch(stream));
        if block.guest_of.is_none() {
            block.last_use.add(own, self.streams.current_epoch(own));
        }
        if streams == 0 {
            self.make_idle(id);
            return Freed::Done;
        }
        block.state = BlockState::Pending { streams };
        self.stats.pending_frees += 1;
        if is_due { Freed::CloseDue(id) } else { Freed::Done }
    }

    /// Notes that the program uses a block on `stream` too. Returns whether it holds such a block.
    pub(crate) fn record_stream(&mut self, address: DevicePtr, stream: StreamIx) -> bool {
        let Some(id) = self.blocks.at(address.0) else { return false };
        let block = &mut self.blocks[id];
        if block.state != BlockState::Allocated {
            return false;
        }
        if block.guest_of.is_some() || self.pools[block.pool].stream != stream {
            block.last_use.add(stream, 0);
        }
        true
    }

    /// One of the streams that a pending block waits for is done.
    pub(crate) fn on_stream_done(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        match &mut block.state {
            BlockState::Pending { streams: 1 } | BlockState::Deferred { streams: 1 } => self.make_idle(id),
            BlockState::Pending { streams } | BlockState::Deferred { streams } => *streams -= 1,
            state => unreachable!("a block in state {state:?} waits for no stream"),
        }
    }

    /// Nobody but the block's own stream can still be using it.
    pub(crate) fn make_idle(&mut self, id: BlockId) {
        self.on_free_completed(id);
        let block = &mut self.blocks[id];
        let pool = &self.pools[block.pool];
        block.last_use.keep_only(pool.stream);
        block.turn_idle(self.pools.idle_state(block.pool), pool.requests);
        self.coalesce_and_index(id);
    }

    /// Counts a block that the program freed as reusable.
    pub(crate) fn on_free_completed(&mut self, id: BlockId) {
        let weight = self.weight(id);
        self.stats.on_idle(weight);
        self.record_use(Action::FreeCompleted, id, weight.requested);
        let block = &mut self.blocks[id];
        block.requested = 0;
        block.guest_of = None;
    }

    /// Unites an idle block, which is in no index, with its idle neighbours, and puts the result into the index.
    #[inline]
    pub(crate) fn coalesce_and_index(&mut self, id: BlockId) -> BlockId {
        let size = self.blocks[id].size;
        let next = self.blocks.unite_with_next(id);
        let previous = self.blocks.unite_with_previous(id);
        let united = self.blocks.entry(previous.map_or(id, |previous| previous.id));
        let pool = &mut self.pools[self.blocks[united.id].pool];
        if let Some(next) = next {
            pool.index.remove(next);
        }
        if let Some(previous) = previous {
            pool.index.remove(previous);
        }
        pool.index.insert(united);
        if !pool.terms.is_paged() {
            // A neighbour was a piece in any case: it touched this block.
            let neighbours = u64::from(previous.is_some()) + u64::from(next.is_some());
            let before = Pieces { blocks: neighbours, bytes: united.size - size };
            self.stats.on_inactive_split(pool.class, before, self.blocks[united.id].free_pieces());
        }
        united.id
    }

    /// Puts an idle block into its pool's index.
    pub(crate) fn index(&mut self, id: BlockId) {
        let entry = self.blocks.entry(id);
        self.pools[self.blocks[id].pool].index.insert(entry);
    }

    /// Takes an idle block out of its pool's index.
    pub(crate) fn unindex(&mut self, id: BlockId) {
        let entry = self.blocks.entry(id);
        self.pools[self.blocks[id].pool].index.remove(entry);
    }

    /// What torch counts as `inactive_split` of an idle block: all of it, if it is a piece of a segment.
    pub(crate) fn inactive_split(&self, id: BlockId) -> Pieces {
        let block = &self.blocks[id];
        if self.is_paged(block.pool) { Pieces::default() } else { block.free_pieces() }
    }

    pub(crate) fn class(&self, id: BlockId) -> SizeClass {
        self.pools[self.blocks[id].pool].class
    }

    fn weight(&self, id: BlockId) -> Weight {
        let block = &self.blocks[id];
        Weight { class: self.class(id), size: block.size, requested: block.requested }
    }

    /// Adds an event about a pool's memory to the history, if one is kept.
    #[inline]
    pub(crate) fn record(&mut self, action: Action, address: u64, size: u64, pool: PoolIx) {
        if self.history.is_on() {
            self.record_kept(action, address, size, pool, self.pools[pool].stream);
        }
    }

    /// Adds an event about the use of a block to the history, if one is kept.
    #[inline]
    fn record_use(&mut self, action: Action, id: BlockId, size: u64) {
        if self.history.is_on() {
            self.record_use_kept(action, id, size);
        }
    }

    /// It is one of the stream that the block was handed out to.
    #[cold]
    fn record_use_kept(&mut self, action: Action, id: BlockId, size: u64) {
        let block = &self.blocks[id];
        let stream = block.guest_of.unwrap_or(self.pools[block.pool].stream);
        self.record_kept(action, block.address, size, block.pool, stream);
    }

    fn record_kept(&mut self, action: Action, address: u64, size: u64, pool: PoolIx, stream: StreamIx) {
        let stream = self.streams.target(stream).handle;
        self.history.push(action, address, size, stream, self.pool_id(pool));
    }

    /// The name of the private pool that a pool belongs to.
    pub(crate) fn pool_id(&self, pool: PoolIx) -> PoolId {
        self.pools[pool].owner.map_or(PoolId::DEFAULT, |owner| self.pools.private(owner).id)
    }

    /// One user less of a private pool. With the last, its idle memory is quarantined: the graphs that used it may
    /// still be running.
    pub(crate) fn release_pool(&mut self, id: PoolId) {
        let Some(private) = self.pools.find_live(id) else { return };
        if !self.pools.release(private) {
            return;
        }
        for pool in self.pools.private(private).pools.clone() {
            let idle: Vec<BlockId> = self.pools[pool].index.iter().map(|entry| entry.id).collect();
            for block in idle {
                self.blocks[block].state = BlockState::Quarantined;
                self.stats.quarantined_blocks += 1;
            }
        }
        self.pools.drop_empty_privates();
    }
}
