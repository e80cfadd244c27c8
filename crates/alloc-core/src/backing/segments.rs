//! Segments: one driver allocation each, as torch's default.

use crate::{
    backing::{Span, SpanKind},
    block::BlockState,
    device::{DeviceState, Request},
    history::Action,
    id::DevicePtr,
    plan::{Obtain, Plan},
    size,
    stats::is_oversize,
};

impl DeviceState {
    /// A new segment for the request, unless the limit forbids it.
    pub(crate) fn plan_obtain(&self, request: &Request) -> Option<Plan> {
        let size = size::segment_size(request.rounded, &self.config);
        self.may_reserve(size).then_some(Plan::Obtain(Obtain { device: self.id, pool: request.pool, size }))
    }

    /// Whether `size` more bytes may be reserved.
    pub(crate) fn may_reserve(&self, size: u64) -> bool {
        self.stats.reserved_bytes.all.current.saturating_add(size) <= self.limit
    }

    /// Takes note of a new segment and serves the request from it.
    pub(crate) fn commit_obtain(&mut self, obtain: &Obtain, address: DevicePtr, request: &Request) -> DevicePtr {
        let Obtain { pool, size, .. } = *obtain;
        let span = self.spans.insert(Span { base: address.0, size, pool, kind: SpanKind::Segment });
        let block = self.blocks.insert(address.0, size, span, pool, BlockState::Free);
        self.pools[pool].spans += 1;
        let oversize = is_oversize(size, self.config.max_split_size);
        self.stats.on_segment_obtained(self.pools[pool].class, size, oversize);
        self.pools.on_reserved(pool, size);
        self.record(Action::SegmentAlloc, address.0, size, pool);
        self.index(block);
        self.hand_out(block, request)
    }
}
