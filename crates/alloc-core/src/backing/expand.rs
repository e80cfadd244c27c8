//! Growing a range as torch's expandable segments do: at the lowest gap that is wide enough, with handles of one size.

use crate::{
    block::{BlockId, BlockState},
    device::{DeviceState, Request},
    plan::{Hole, Map, Plan, Source},
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
        let handle_size = self.handle_size(self.pools[request.pool].class);
        let Some(pieces) = self.lowest_gap(request) else { return self.plan_reserve(request, handle_size) };
        let mut missing = request.rounded;
        let mut holes = Vec::new();
        for piece in &pieces {
            let state = self.blocks[*piece].state;
            if state == BlockState::Unmapped {
                holes.push(self.claim_hole(*piece, round_up(missing, handle_size), handle_size));
            } else {
                self.unindex(*piece);
                self.blocks[*piece].state = BlockState::Claimed;
            }
            missing = missing.saturating_sub(self.blocks[*piece].size);
        }
        let stream = self.streams.target(self.pools[request.pool].stream);
        let (waits, returns, access) = (Vec::new(), Vec::new(), self.access.clone());
        Some(Plan::Map(Map { device: self.id, stream, waits, pieces, holes, returns, access }))
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

    /// Claims the first `size` bytes of an unmapped block, or all of it if it has no more, for handles of one size: both
    /// are whole numbers of them.
    fn claim_hole(&mut self, id: BlockId, size: u64, handle_size: u64) -> Hole {
        let address = self.blocks[id].address;
        let size = size.min(self.blocks[id].size);
        debug_assert!(size.is_multiple_of(handle_size), "the hole at {address:#x} is no whole number of handles");
        self.claim_unmapped(id, size);
        Hole { block: id, address, sources: vec![Source::New(handle_size); (size / handle_size) as usize] }
    }

    /// The size of the handles of one class.
    pub(crate) fn handle_size(&self, class: SizeClass) -> u64 {
        let wanted = match class {
            SizeClass::Small => SMALL_SEGMENT,
            SizeClass::Large => self.config.large_segment_size,
        };
        round_up(wanted, self.capabilities.granularity_bytes)
    }
}
