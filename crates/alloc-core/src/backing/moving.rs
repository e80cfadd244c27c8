//! Growing by moving: whole idle handles go to where memory is needed, before the driver is asked for more.
//!
//! A *target* is a gap that becomes wide enough when its holes are filled; a *donor* is a whole handle inside idle memory.
//! A donor is mapped at the target at once, and for a while stands at both addresses. Its old mapping becomes *stale*: an
//! address that nobody gets, removed once the host knows that the last use there is over. That is safe because
//!
//! - the donor's last use comes before whatever the asking stream does next: it was on that stream, or is known to be over,
//!   or the asking stream waits for it on the GPU;
//! - the stale addresses are in no index, so nothing new is ever queued on them.
//!
//! Memory of live private pools and pinned memory are never donors.

use std::{cell::OnceCell, cmp::Reverse, collections::BTreeMap};

use rustc_hash::FxHashSet;

use crate::{
    backing::{
        gap::{Gap, Means, Piece},
        mapping::Mapping,
    },
    block::{BlockId, BlockState},
    config::{CrossStreamReuse, Move, Policy},
    device::{DeviceState, Request},
    event::{Mark, StreamIx},
    id::PhysicalHandle,
    last_use::Epoch,
    plan::{Donor, Hole, Map, Plan, Return, Source},
    pool_set::{PoolIx, Terms},
    size::{MIB, SMALL_SEGMENT, SizeClass},
};

/// New large handles grow with what is reserved, so that one of which only a part is used is a small share of it …
const HANDLES_PER_RESERVED: u64 = 1024;
/// … and with the gap to be filled, since each handle costs some 40 µs to map and unmap again.
const HANDLES_PER_GAP: u64 = 7;
/// Up to this many bytes: larger ones are idle as a whole less often.
const HANDLE_MAX: u64 = 32 * MIB;
/// And to this share of what the limit leaves to be reserved, or the device as far as the driver has not refused it: where
/// that is little, memory counts more than calls do.
const HANDLES_PER_ROOM: u64 = 512;
/// But a very large gap is filled with this many handles, or twice as many where much is idle, whatever their size …
const HANDLES_PER_LARGE_GAP: u64 = 112;
/// … up to this one.
const LARGE_HANDLE_MAX: u64 = 128 * MIB;
/// The last handles of a gap halve down to the driver's granularity: a later request that is a little smaller then
/// leaves little behind in a handle that is used in part, and there is small change to fill other gaps exactly.
const HANDLES_PER_REST: u64 = 2;
/// All of them are half as large while more than this many thousandths of what is reserved are idle: most of
/// what could move has moved when much new memory is needed, so what is idle then lies in handles that are used in part.
const IDLE_PERMILLE: u64 = 12;
/// Memory may grow without a second thought up to this many thousandths of what the program needs at once.
const GROWTH_PERMILLE: u64 = 1006;
/// Where new memory is needed besides, a stream waits for others only if they spare this part of the request.
const WAITS_FOR_SHARE: u64 = 4;

/// Which idle memory may be moved for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lenders {
    /// None: all of it is new.
    Nobody,
    /// What was last used on the asking stream, or is known to be over.
    Ordered,
    /// Also what other streams used last: the asking stream waits for them on the GPU.
    AfterWait,
}

/// How much new memory may be obtained besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// None.
    None,
    /// As long as hardly more is reserved than the program is known to need, this request included.
    WithinNeed,
    /// Up to the limit.
    ToLimit,
}

/// What shall fill a gap: for each of its holes, in order, the handles from first to last.
#[derive(Debug, Default)]
struct Filling {
    holes: Vec<Vec<Source>>,
    new_bytes: u64,
}

impl Filling {
    /// The bytes that each hole gets.
    fn sizes(&self) -> impl Iterator<Item = u64> + '_ {
        self.holes.iter().map(|sources| sources.iter().map(Source::size).sum())
    }

    fn donors(&self) -> impl Iterator<Item = Donor> + '_ {
        self.holes.iter().flatten().filter_map(|source| match source {
            Source::Moved(donor) => Some(*donor),
            Source::New(_) => None,
        })
    }
}

/// What was found for a request, by [`Lenders`], if it was searched for. It holds as long as nothing changes, so rungs
/// that are tried under one lock, each after one that has no plan, search once.
#[derive(Debug, Default)]
pub(crate) struct Findings([OnceCell<Option<(Gap, Filling)>>; 3]);

impl DeviceState {
    /// Fills the gap that costs least with idle handles, and with new ones where `growth` allows. `None` if that is not
    /// enough; then nothing has changed.
    pub(crate) fn plan_move(
        &mut self,
        request: &Request,
        lenders: Lenders,
        growth: Growth,
        findings: &Findings,
    ) -> Option<Plan> {
        if self.moving_of(request.pool) == Move::Contiguous {
            return self.plan_single(request, growth);
        }
        if lenders == Lenders::Nobody && self.takes_more_than(request, growth) {
            return None;
        }
        let Some((gap, filling)) = self.finding(request, lenders, findings) else {
            return self.plan_reserve(request, self.capabilities.granularity_bytes);
        };
        if !self.may_grow(request, filling.new_bytes, growth) {
            return None;
        }
        if lenders == Lenders::AfterWait && !self.is_worth_waiting(request, filling, findings) {
            return None;
        }
        let waits = self.waits_for(request, filling.donors().chain(gap.returns()))?;
        let in_the_way = self.in_the_way_of(gap, filling.sizes(), request.pool);
        if !in_the_way.is_empty() {
            return self.plan_unmap(in_the_way);
        }
        Some(Plan::Map(self.claim(request, gap, filling, waits)))
    }

    /// Whether it is plain without a search that the request takes more new memory than `growth` allows, if nobody lends
    /// any: there is a gap, and every one takes a granule or more where no free block is wide enough by itself.
    fn takes_more_than(&self, request: &Request, growth: Growth) -> bool {
        let has_wide_block = || self.pools[request.pool].index.best_fit(request.rounded).is_some();
        !self.may_grow(request, self.capabilities.granularity_bytes, growth)
            && self.has_wide_hole(request)
            && !has_wide_block()
    }

    /// What [`cheapest_filling`](Self::cheapest_filling) says.
    fn finding<'a>(&self, request: &Request, lenders: Lenders, known: &'a Findings) -> Option<&'a (Gap, Filling)> {
        let search = || self.cheapest_filling(request, lenders);
        let found = known.0[lenders as usize].get_or_init(search);
        debug_assert_eq!(format!("{found:?}"), format!("{:?}", search()), "a rung without a plan changed something");
        found.as_ref()
    }

    /// Of the gaps that are looked at, the one that takes the least new memory, and what fills it.
    fn cheapest_filling(&self, request: &Request, lenders: Lenders) -> Option<(Gap, Filling)> {
        let donors = self.donors(request, lenders);
        let gaps = self.cheapest_gap(request, &donors).into_iter().chain(self.widest_hole(request));
        let filled = gaps.map(|gap| {
            let filling = self.fill(request, &gap, &donors);
            (gap, filling)
        });
        filled.min_by_key(|(gap, filling)| (filling.new_bytes, gap.cost()))
    }

    /// Whether memory that other streams may still be using spares all new memory, or a good part of it: a wait ties two
    /// streams together, whatever it brings.
    fn is_worth_waiting(&self, request: &Request, after_wait: &Filling, findings: &Findings) -> bool {
        let spares_enough = |without: &Filling| {
            without.new_bytes.saturating_sub(after_wait.new_bytes) >= request.rounded / WAITS_FOR_SHARE
        };
        let without_wait = || self.finding(request, Lenders::Ordered, findings);
        after_wait.new_bytes == 0 || without_wait().is_some_and(|(_, without)| spares_enough(without))
    }

    pub(super) fn may_grow(&self, request: &Request, new: u64, growth: Growth) -> bool {
        let reserved = self.stats.reserved_bytes.all.current + new;
        match growth {
            _ if new == 0 => true,
            Growth::None => false,
            Growth::WithinNeed => {
                let allocated = &self.stats.allocated_bytes.all;
                let held = allocated.peak.max(allocated.current + request.rounded);
                let is_needed =
                    |bytes: u64| reserved <= self.stats.active_bytes.all.peak.max(bytes) / 1000 * GROWTH_PERMILLE;
                // What is pending can be taken over, so it is no need of now, but for what a stream needs to work ahead.
                let is_there = self.refused.is_none_or(|refused| reserved < refused) && self.may_reserve(new);
                is_there && (is_needed(held) || is_needed(held + self.ahead_bytes(request)))
            }
            Growth::ToLimit => self.may_reserve(new),
        }
    }

    /// Whether memory of the pool may change its address: by the rules, the settings, and what was said of its private
    /// pool.
    pub(crate) fn moving_of(&self, pool: PoolIx) -> Move {
        self.moving_under(&self.pools[pool].terms)
    }

    /// As [`moving_of`](Self::moving_of), of a pool with these terms.
    pub(crate) fn moving_under(&self, terms: &Terms) -> Move {
        match terms.rules {
            Policy::Native => Move::Contiguous,
            Policy::Expandable => Move::Off,
            Policy::Rallocator => self.config.moving.max(terms.moving),
        }
    }

    /// Whether idle handles of the pool may move to where other memory is needed.
    pub(crate) fn may_lend(&self, pool: PoolIx) -> bool {
        self.pools.is_releasable(pool) && self.moving_of(pool) == Move::On
    }

    /// Whole idle handles that may be moved for the request: large ones first, which take the fewest calls, and of those
    /// the ones in the smallest idle blocks, which serve few requests as they are.
    fn donors(&self, request: &Request, lenders: Lenders) -> Vec<Donor> {
        if lenders == Lenders::Nobody || self.is_tracked || self.moving_of(request.pool) != Move::On {
            return Vec::new();
        }
        // What a graph captures runs again later: order on the stream that captured it proves nothing.
        let asking = self.pools[request.pool].owner.is_none().then_some(self.pools[request.pool].stream);
        let is_ordered = |(stream, epoch): (StreamIx, Epoch)| {
            Some(stream) == asking
                || self.streams.is_done(stream, epoch)
                || (lenders == Lenders::AfterWait && asking.is_some() && self.may_wait_for(stream))
        };
        let mut donors: Vec<(u64, Donor)> = Vec::new();
        let lent = self.pools.ids().filter(|pool| self.may_lend(*pool));
        // No handle is smaller than the driver's granularity, and most idle blocks are.
        let handle_min = self.capabilities.granularity_bytes;
        for entry in lent.flat_map(|pool| self.pools[pool].index.iter_from(handle_min)) {
            if self.blocks[entry.id].last_use.iter().all(is_ordered) {
                let movable = self.movable_within(entry.id);
                donors.extend(movable.map(|mapping| (entry.size, Donor { block: entry.id, mapping })));
            }
        }
        donors.sort_by_key(|(size, Donor { mapping, .. })| (Reverse(mapping.size), *size, Reverse(mapping.address)));
        donors.into_iter().map(|(_, donor)| donor).collect()
    }

    /// Whether `cross_stream_reuse` lets other streams wait for this one.
    pub(crate) fn may_wait_for(&self, stream: StreamIx) -> bool {
        match self.config.cross_stream_reuse {
            CrossStreamReuse::Done => false,
            CrossStreamReuse::Owned => self.pools.has_pool_of(stream),
            CrossStreamReuse::All => true,
        }
    }

    /// Chooses what fills the gap's holes: donors in their order, then new handles.
    fn fill(&self, request: &Request, gap: &Gap, donors: &[Donor]) -> Filling {
        let new_size = self.new_handle_size(self.pools[request.pool].class, gap.missing);
        let returning: FxHashSet<PhysicalHandle> = gap.returns().map(|donor| donor.mapping.handle).collect();
        let is_busy = |donor: &Donor| gap.keeps(donor) || returning.contains(&donor.mapping.handle);
        let mut candidates: Vec<Donor> = donors.iter().filter(|donor| !is_busy(donor)).copied().collect();
        let mut filling = Filling::default();
        for (mut missing, spare) in gap.holes() {
            let mut sources = Vec::new();
            candidates.retain(|donor| {
                let fits = donor.mapping.size <= missing;
                if fits {
                    missing -= donor.mapping.size;
                    sources.push(Source::Moved(*donor));
                }
                !fits
            });
            // One handle may reach beyond what is missing, if the hole goes on there.
            let reaching = candidates.iter().enumerate().filter(|(_, donor)| donor.mapping.size <= missing + spare);
            if missing > 0
                && let Some((position, _)) = reaching.min_by_key(|(_, donor)| donor.mapping.size)
            {
                let donor = candidates.remove(position);
                missing = 0;
                sources.push(Source::Moved(donor));
            }
            filling.new_bytes += missing;
            while missing > 0 {
                let size = missing.min(new_size).min(self.whole_granules(missing.div_ceil(HANDLES_PER_REST)));
                sources.push(Source::New(size));
                missing -= size;
            }
            filling.holes.push(sources);
        }
        filling
    }

    /// The marks that the asking stream has to wait for before it may use the donors; `None` if some has no event yet.
    fn waits_for(&self, request: &Request, donors: impl Iterator<Item = Donor>) -> Option<Vec<Mark>> {
        let own = self.pools[request.pool].stream;
        let mut marks: Vec<Mark> = Vec::new();
        for donor in donors {
            for (stream, epoch) in self.blocks[donor.block].last_use.iter() {
                if stream != own && !self.streams.is_done(stream, epoch) {
                    let mark = self.streams.mark_for(stream, epoch)?;
                    match marks.iter_mut().find(|known| known.stream == stream) {
                        Some(known) if known.epoch < mark.epoch => *known = mark,
                        Some(_) => {}
                        None => marks.push(mark),
                    }
                }
            }
        }
        Some(marks)
    }

    /// Claims the gap and the donors.
    fn claim(&mut self, request: &Request, gap: &Gap, filling: &Filling, waits: Vec<Mark>) -> Map {
        let mut claimed = self.claim_donors(filling.donors().chain(gap.returns()).collect());
        let mut claimed_donor = |mut donor: Donor| {
            donor.block = claimed.remove(&donor.mapping.address).expect("every donor was claimed");
            donor
        };
        let mut fillings = filling.holes.iter();
        let (mut pieces, mut holes, mut returns) = (Vec::new(), Vec::new(), Vec::new());
        for Piece { mut block, last, means, .. } in gap.pieces.iter().copied() {
            match means {
                Means::Has => {
                    self.unindex(block);
                    self.blocks[block].state = BlockState::Claimed;
                }
                Means::Fill => {
                    let mut sources = fillings.next().expect("one filling for each hole").clone();
                    for source in &mut sources {
                        if let Source::Moved(donor) = source {
                            *donor = claimed_donor(*donor);
                        }
                    }
                    let size = sources.iter().map(Source::size).sum();
                    if gap.fills_end && pieces.is_empty() {
                        block = self.cut_hole(last, size);
                    }
                    self.claim_unmapped(block, size);
                    holes.push(Hole { block, address: self.blocks[block].address, sources });
                }
                Means::Return(donor) => {
                    self.claim_stale(block);
                    returns.push(Return { block, donor: claimed_donor(donor) });
                }
            }
            pieces.push(block);
        }
        let stream = self.streams.target(self.pools[request.pool].stream);
        Map { device: self.id, stream, waits, pieces, holes, returns, access: self.access.clone() }
    }

    /// Cuts the last `size` bytes off a hole; returns them as a hole of their own.
    pub(super) fn cut_hole(&mut self, id: BlockId, size: u64) -> BlockId {
        let rest = self.blocks[id].size - size;
        if rest == 0 {
            return id;
        }
        let end = self.blocks.split(id, rest);
        let pool = self.blocks[end].pool;
        self.pools[pool].unmapped.insert(self.blocks[end].address, end);
        end
    }

    /// Cuts each donor's handle out of the idle block that holds it, and claims it. Returns the blocks by address.
    fn claim_donors(&mut self, mut chosen: Vec<Donor>) -> BTreeMap<u64, BlockId> {
        chosen.sort_by_key(|donor| donor.mapping.address);
        let mut claimed = BTreeMap::new();
        let mut rest: Option<BlockId> = None;
        for Donor { block: holder, mapping: Mapping { address, size, .. } } in chosen {
            let in_rest = rest.filter(|rest| (self.blocks[*rest].address..self.blocks[*rest].end()).contains(&address));
            if in_rest.is_none() {
                self.unindex(holder);
                if let Some(rest) = rest {
                    self.index(rest);
                }
            }
            let block = self.cut_off_front(in_rest.unwrap_or(holder), address);
            rest = (size < self.blocks[block].size).then(|| self.blocks.split(block, size));
            self.blocks[block].state = BlockState::Claimed;
            claimed.insert(address, block);
        }
        if let Some(rest) = rest {
            self.index(rest);
        }
        claimed
    }

    /// The size of new handles for a gap of `missing` bytes.
    fn new_handle_size(&self, class: SizeClass, missing: u64) -> u64 {
        let size = match class {
            SizeClass::Small => SMALL_SEGMENT,
            SizeClass::Large => {
                let share = self.stats.reserved_bytes.all.peak / HANDLES_PER_RESERVED;
                let most = self.limit.min(self.refused.unwrap_or(self.capabilities.total_bytes));
                let room = most.saturating_sub(self.stats.reserved_bytes.all.current);
                let of_gap = share.max(missing / HANDLES_PER_GAP).min(HANDLE_MAX).min(room / HANDLES_PER_ROOM);
                let size = of_gap.max((missing / HANDLES_PER_LARGE_GAP).min(LARGE_HANDLE_MAX));
                if self.is_much_idle() { size / 2 } else { size }
            }
        };
        self.whole_granules(size.max(1))
    }

    /// Whether so much of what is reserved is idle that smaller handles are worth their calls.
    fn is_much_idle(&self) -> bool {
        let (reserved, active) = (self.stats.reserved_bytes.all.current, self.stats.active_bytes.all.current);
        reserved.saturating_sub(active) > reserved / 1000 * IDLE_PERMILLE
    }
}
