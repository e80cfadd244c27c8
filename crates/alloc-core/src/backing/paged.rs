//! Address ranges with physical handles mapped where they are needed.
//!
//! What both kinds of growth share: a range is set aside, holes of it are filled, and what was unmapped becomes one hole
//! again. Where to grow is decided in [`expand`](super::expand) and [`moving`](super::moving).

use crate::{
    backing::{
        Span, SpanKind,
        mapping::{Mapping, Mappings, Runs},
    },
    block::{Block, BlockId, BlockState},
    config::Move,
    device::{DeviceState, Request},
    driver::Call,
    history::Action,
    id::{DevicePtr, PhysicalHandle},
    plan::{Donor, Map, MapFailure, Plan, ReleaseRun, Reserve, Return, Source, Stray},
    size::{SizeClass, round_up},
};

/// Ranges are rounded up to this many bytes, and from there to whole handles.
const RANGE_GRANULARITY: u64 = 64 << 20;

impl DeviceState {
    /// A range for the request's pool, in which each handle takes a multiple of `handle_unit` bytes, and no remainder
    /// is left where none fits. It is an eighth larger than the device, so that it need not be full of memory before the
    /// lowest gap is wide enough.
    pub(super) fn plan_reserve(&self, request: &Request, handle_unit: u64) -> Option<Plan> {
        let total = self.capabilities.total_bytes;
        if request.rounded.max(handle_unit) > total {
            return None;
        }
        let size = round_up(round_up(total + total / 8, RANGE_GRANULARITY), handle_unit);
        Some(Plan::Reserve(Reserve { device: self.id, pool: request.pool, size }))
    }

    /// Takes note of a new range.
    pub(crate) fn commit_reserve(&mut self, reserve: &Reserve, base: DevicePtr) {
        let Reserve { pool, size, .. } = *reserve;
        let kind = SpanKind::Range(Mappings::default());
        let span = self.spans.insert(Span { base: base.0, size, pool, kind });
        let block = self.blocks.insert(base.0, size, span, pool, BlockState::Unmapped);
        self.pools[pool].spans += 1;
        self.pools[pool].unmapped.insert(base.0, block);
    }

    /// Takes note of new handles, and serves the request from the block that they complete.
    pub(crate) fn commit_map(&mut self, map: &Map, created: Vec<PhysicalHandle>, request: &Request) -> DevicePtr {
        let block = map.pieces[0];
        let span = self.blocks[block].span;
        let class = self.pools[request.pool].class;
        let mut created = created.into_iter();
        for hole in &map.holes {
            let mappings = hole.filled_with(&mut created);
            for (mapping, source) in mappings.into_iter().zip(&hole.sources) {
                match source {
                    Source::Moved(donor) => self.take_from_donor(donor, class),
                    Source::New(size) => self.stats.on_handles_created(class, *size, 1),
                }
                self.pools.on_reserved(request.pool, mapping.size);
                self.spans[span].mappings_mut().insert(mapping);
            }
            self.record(Action::SegmentMap, hole.address, hole.size(), request.pool);
        }
        for Return { block: back, donor } in &map.returns {
            self.take_from_donor(donor, class);
            let mapping = Mapping { address: self.blocks[*back].address, ..donor.mapping };
            self.pools.on_reserved(request.pool, mapping.size);
            self.spans[span].mappings_mut().insert(mapping);
            self.record(Action::SegmentMap, mapping.address, mapping.size, request.pool);
        }
        if self.refused.is_some_and(|refused| self.stats.reserved_bytes.all.current >= refused) {
            self.refused = None;
        }
        self.stats.gpu_waits += map.waits.len() as u64;
        for piece in &map.pieces[1..] {
            debug_assert_eq!(self.blocks[block].next, Some(*piece), "nobody coalesces claimed blocks");
            self.blocks.absorb_next(block);
        }
        self.blocks[block].state = self.pools.idle_state(self.blocks[block].pool);
        if map.moves() {
            debug_assert_eq!(self.moving_of(request.pool), Move::On, "nothing moves into this pool");
            // The donors' last uses are over, or come before what the asking stream does from now on.
            let own = self.pools[request.pool].stream;
            self.blocks[block].last_use.add(own, self.streams.current_epoch(own));
        }
        let block = self.coalesce_and_index(block);
        self.hand_out(block, request)
    }

    /// The donor's handle leaves its old address, which is stale from now on.
    fn take_from_donor(&mut self, donor: &Donor, class: SizeClass) {
        let Donor { block, mapping: Mapping { address, size, handle } } = *donor;
        let (span, pool) = (self.blocks[block].span, self.blocks[block].pool);
        debug_assert_eq!(self.moving_of(pool), Move::On, "memory of this pool stays where it is");
        self.spans[span].mappings_mut().remove(address);
        self.stats.on_handle_moved(self.pools[pool].class, class, size);
        self.pools.on_returned(pool, size);
        self.record(Action::SegmentUnmap, address, size, pool);
        self.make_stale(block, handle);
    }

    /// Takes note that holes could not be filled: all is as before, but for what the driver did not take back.
    pub(crate) fn commit_map_failed(&mut self, map: &Map, failure: &MapFailure) {
        if failure.error.is_out_of_memory() && failure.error.call == Call::CreateHandle {
            self.refused = Some(self.stats.reserved_bytes.all.current + map.new_bytes());
        }
        let class = self.class(map.pieces[0]);
        for (handle, size) in &failure.strays {
            self.stats.on_handles_created(class, *size, 1);
            self.strays.push(Stray { device: self.id, handle: *handle, size: *size, class });
        }
        for (block, mappings) in &failure.stuck {
            self.keep_stuck(map, *block, mappings);
        }
        let is_stuck = |donor: &Donor| {
            let mut mappings = failure.stuck.iter().flat_map(|(_, mappings)| mappings);
            mappings.any(|mapping| mapping.handle == donor.mapping.handle)
        };
        for donor in map.donors().filter(|donor| !is_stuck(donor)) {
            self.make_idle_again(donor.block);
        }
        for Return { block, donor } in &map.returns {
            self.make_stale(*block, donor.mapping.handle);
        }
        for piece in &map.pieces {
            if self.blocks[*piece].state == BlockState::Stale {
                continue;
            }
            if !map.holes.iter().any(|hole| hole.block == *piece) {
                self.make_idle_again(*piece);
            } else if !failure.stuck.iter().any(|(block, _)| block == piece) {
                self.make_unmapped(*piece);
            }
        }
    }

    /// Takes note of mappings at the start of a claimed hole that nobody can use or undo: they are memory that goes
    /// back the next time that any does. A donor's handle among them has moved.
    fn keep_stuck(&mut self, map: &Map, block: BlockId, mappings: &[Mapping]) {
        let Block { address, size: hole_size, span, pool, .. } = self.blocks[block];
        let class = self.pools[pool].class;
        let size = mappings.iter().map(|mapping| mapping.size).sum();
        for mapping in mappings {
            match map.donors().find(|donor| donor.mapping.handle == mapping.handle) {
                Some(donor) => self.take_from_donor(&donor, class),
                None => self.stats.on_handles_created(class, mapping.size, 1),
            }
            self.pools.on_reserved(pool, mapping.size);
            self.spans[span].mappings_mut().insert(*mapping);
        }
        self.record(Action::SegmentMap, address, size, pool);
        if size < hole_size {
            let rest = self.blocks.split(block, size);
            self.make_unmapped(rest);
        }
        let (device, address, handles) = (self.id, DevicePtr(address), mappings.to_vec());
        self.stuck.push(ReleaseRun { device, block, address, size, handles, is_stuck: true });
    }

    /// The block's addresses have no memory any more; unites it with its unmapped neighbours.
    pub(crate) fn make_unmapped(&mut self, id: BlockId) {
        let pool = self.blocks[id].pool;
        self.blocks[id].state = BlockState::Unmapped;
        self.blocks[id].last_use.clear();
        let is_unmapped = |state: &Self, id: &BlockId| state.blocks[*id].state == BlockState::Unmapped;
        if let Some(next) = self.blocks[id].next.filter(|next| is_unmapped(self, next)) {
            self.pools[pool].unmapped.remove(&self.blocks[next].address);
            self.blocks.absorb_next(id);
        }
        let mut id = id;
        if let Some(previous) = self.blocks[id].previous.filter(|previous| is_unmapped(self, previous)) {
            self.blocks.absorb_next(previous);
            id = previous;
        }
        self.pools[pool].unmapped.insert(self.blocks[id].address, id);
    }

    /// Claims the first `size` bytes of an unmapped block; the rest of it stays a hole.
    pub(super) fn claim_unmapped(&mut self, id: BlockId, size: u64) {
        let (address, pool) = (self.blocks[id].address, self.blocks[id].pool);
        self.pools[pool].unmapped.remove(&address);
        if size < self.blocks[id].size {
            let rest = self.blocks.split(id, size);
            self.pools[pool].unmapped.insert(self.blocks[rest].address, rest);
        }
        self.blocks[id].state = BlockState::Claimed;
    }

    /// Every mapped run of whole handles on this device: what a new peer must be let into. None reaches from one range
    /// into the next.
    pub(crate) fn mapped_runs(&self) -> Vec<(DevicePtr, u64)> {
        let mut found = Vec::new();
        for span in self.spans.by_address() {
            if let SpanKind::Range(mappings) = &self.spans[span].kind {
                let Span { base, size, pool, .. } = self.spans[span];
                let stale = self.stale.within(pool, base..base + size);
                let stale = stale.map(|(address, stale)| (address, self.blocks[stale.block].size));
                let live = mappings.iter().map(|mapping| (mapping.address, mapping.size));
                let mut all: Vec<(u64, u64)> = live.chain(stale).collect();
                all.sort_unstable();
                let mut runs = Runs::default();
                for (address, size) in all {
                    runs.push(address, size);
                }
                found.extend(runs.0.into_iter().map(|(address, size)| (DevicePtr(address), size)));
            }
        }
        found
    }
}
