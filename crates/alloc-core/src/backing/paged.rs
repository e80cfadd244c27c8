//! Address ranges with physical handles mapped where they are needed, as torch's expandable segments.
//!
//! A pool has one range, larger than the device, and grows at the lowest gap that is wide enough. A handle stays where
//! it was mapped until it is released: moving handles to where they are needed would be one more plan here, beside
//! [`Map`], with donors chosen in [`release`](crate::release).

use crate::{
    backing::{Span, SpanIx, SpanKind},
    block::{BlockId, BlockState},
    device::{DeviceState, Request},
    history::Action,
    id::{DevicePtr, PhysicalHandle},
    plan::{Hole, Map, MapFailure, Plan, Reserve, Stray},
    size::{self, SMALL_SEGMENT, SizeClass, round_up},
};

impl DeviceState {
    /// Handles for the request where the pool's range has room, or a range if it has none. `None` if the limit or the
    /// device's size forbids it.
    pub(crate) fn plan_map(&mut self, request: &Request) -> Option<Plan> {
        // Torch counts a whole segment here even where fewer handles are missing, and so do its limits.
        if !self.may_reserve(size::segment_size(request.rounded, &self.config)) {
            return None;
        }
        let Some(pieces) = self.lowest_gap(request) else { return self.plan_reserve(request) };
        let span = self.blocks[pieces[0]].span;
        let handle_size = self.handle_size(span);
        let mut missing = request.rounded;
        let mut holes = Vec::new();
        for piece in &pieces {
            let state = self.blocks[*piece].state;
            if state == BlockState::Unmapped {
                holes.push(self.claim_hole(*piece, round_up(missing, handle_size)));
            } else {
                self.unindex(*piece);
                self.blocks[*piece].state = BlockState::Claimed;
            }
            missing = missing.saturating_sub(self.blocks[*piece].size);
        }
        Some(Plan::Map(Map { device: self.id, span, pieces, holes, handle_size, access: self.access.clone() }))
    }

    /// Neighbouring blocks, free or unmapped, that hold the request together: those at the lowest address.
    fn lowest_gap(&self, request: &Request) -> Option<Vec<BlockId>> {
        let usable = |id: &BlockId| matches!(self.blocks[*id].state, BlockState::Free | BlockState::Unmapped);
        for hole in self.pools[request.pool].unmapped.values() {
            let first = self.blocks[*hole].previous.filter(usable).unwrap_or(*hole);
            let (mut pieces, mut bytes, mut next) = (Vec::new(), 0, Some(first));
            while let Some(piece) = next.filter(usable)
                && bytes < request.rounded
            {
                pieces.push(piece);
                bytes += self.blocks[piece].size;
                next = self.blocks[piece].next;
            }
            if bytes >= request.rounded {
                return Some(pieces);
            }
        }
        None
    }

    /// Claims the first `size` bytes of an unmapped block, or all of it if it has no more.
    fn claim_hole(&mut self, id: BlockId, size: u64) -> Hole {
        let (address, pool) = (self.blocks[id].address, self.blocks[id].pool);
        self.pools[pool].unmapped.remove(&address);
        if size < self.blocks[id].size {
            let rest = self.blocks.split(id, size);
            self.pools[pool].unmapped.insert(self.blocks[rest].address, rest);
        }
        self.blocks[id].state = BlockState::Claimed;
        Hole { block: id, address, size: self.blocks[id].size }
    }

    /// A range for the request's pool. It is an eighth larger than the device, so that it need not be full of memory
    /// before the lowest gap is wide enough.
    fn plan_reserve(&self, request: &Request) -> Option<Plan> {
        let total = self.capabilities.total_bytes;
        let wanted = match self.pools[request.pool].class {
            SizeClass::Small => SMALL_SEGMENT,
            SizeClass::Large => self.config.large_segment_size,
        };
        let handle_size = round_up(wanted, self.capabilities.granularity_bytes);
        let size = round_up(total + total / 8, handle_size);
        let reserve = Reserve { device: self.id, pool: request.pool, size, handle_size };
        (request.rounded <= total).then_some(Plan::Reserve(reserve))
    }

    /// Takes note of a new range.
    pub(crate) fn commit_reserve(&mut self, reserve: &Reserve, base: DevicePtr) {
        let Reserve { pool, size, handle_size, .. } = *reserve;
        let kind = SpanKind::Range { handle_size, slots: Vec::new() };
        let span = self.spans.insert(Span { base: base.0, size, pool, kind });
        let block = self.blocks.insert(base.0, size, span, pool, BlockState::Unmapped);
        self.pools[pool].spans += 1;
        self.pools[pool].unmapped.insert(base.0, block);
    }

    /// Takes note of new handles, and serves the request from the block that they complete.
    pub(crate) fn commit_map(&mut self, map: &Map, handles: Vec<PhysicalHandle>, request: &Request) -> DevicePtr {
        let count = handles.len();
        let mut handles = handles.into_iter();
        for hole in &map.holes {
            for offset in (0..hole.size).step_by(map.handle_size as usize) {
                let handle = handles.next().expect("one handle for each slot of each hole");
                *self.slot(map.span, hole.address + offset) = Some(handle);
            }
            self.record(Action::SegmentMap, hole.address, hole.size, request.pool);
        }
        let bytes = map.holes.iter().map(|hole| hole.size).sum();
        self.stats.on_handles_created(self.pools[request.pool].class, bytes, count);

        let block = map.pieces[0];
        for piece in &map.pieces[1..] {
            debug_assert_eq!(self.blocks[block].next, Some(*piece), "nobody coalesces claimed blocks");
            self.blocks.absorb_next(block);
        }
        self.blocks[block].state = BlockState::Free;
        let block = self.coalesce_and_index(block);
        self.unindex(block);
        self.hand_out(block, request)
    }

    /// Takes note that holes could not be filled: all is as before, but for what the driver did not take back.
    pub(crate) fn commit_map_failed(&mut self, map: &Map, failure: &MapFailure) {
        let pool = self.spans[map.span].pool;
        let class = self.pools[pool].class;
        for handle in &failure.strays {
            self.stats.on_handles_created(class, map.handle_size, 1);
            self.strays.push(Stray { device: self.id, handle: *handle, size: map.handle_size, class });
        }
        for piece in &map.pieces {
            let is_hole = map.holes.iter().any(|hole| hole.block == *piece);
            if !is_hole {
                self.blocks[*piece].state = BlockState::Free;
                self.coalesce_and_index(*piece);
            } else if !failure.stuck {
                self.make_unmapped(*piece);
            }
        }
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

    /// The size of a range's handles.
    pub(crate) fn handle_size(&self, span: SpanIx) -> u64 {
        match &self.spans[span].kind {
            SpanKind::Range { handle_size, .. } => *handle_size,
            SpanKind::Segment => self.spans[span].size,
        }
    }

    /// The slot of a range that backs `address`.
    pub(crate) fn slot(&mut self, span: SpanIx, address: u64) -> &mut Option<PhysicalHandle> {
        let span = &mut self.spans[span];
        let SpanKind::Range { handle_size, slots } = &mut span.kind else {
            unreachable!("only ranges are mapped");
        };
        let index = ((address - span.base) / *handle_size) as usize;
        if slots.len() <= index {
            slots.resize(index + 1, None);
        }
        &mut slots[index]
    }

    /// Every mapped run of whole handles on this device, in address order: what a new peer must be let into.
    pub(crate) fn mapped_runs(&self) -> Vec<(DevicePtr, u64)> {
        let mut runs: Vec<(DevicePtr, u64)> = Vec::new();
        for span in self.spans.by_address() {
            let span = &self.spans[span];
            let SpanKind::Range { handle_size, slots } = &span.kind else { continue };
            for (index, _) in slots.iter().enumerate().filter(|(_, slot)| slot.is_some()) {
                let address = span.base + index as u64 * handle_size;
                match runs.last_mut() {
                    Some((base, size)) if base.0 + *size == address => *size += handle_size,
                    _ => runs.push((DevicePtr(address), *handle_size)),
                }
            }
        }
        runs
    }
}
