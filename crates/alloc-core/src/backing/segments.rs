//! Segments: one allocation each, as torch's default, of the driver or of the pool's own [source](crate::source).

use crate::{
    backing::{Span, SpanKind},
    block::BlockId,
    device::{DeviceState, Request},
    history::Action,
    id::DevicePtr,
    plan::{Obtain, Plan},
    pool_set::PoolIx,
    size,
    source::{Origin, SourceError},
    stats::is_oversize,
};

impl DeviceState {
    /// A new segment for the request, unless the limit forbids it.
    pub(crate) fn plan_obtain(&mut self, request: &Request) -> Option<Plan> {
        let size = size::segment_size(request.rounded, &self.config);
        if !self.may_reserve(size) {
            return None;
        }
        let origin = self.pools[request.pool].terms.origin.clone();
        if !origin.is_driver() {
            self.promised += size;
        }
        Some(Plan::Obtain(Obtain {
            device: self.id,
            pool: request.pool,
            size,
            origin,
            user: self.user_of(request.pool),
        }))
    }

    /// Whether `size` more bytes may be reserved.
    pub(crate) fn may_reserve(&self, size: u64) -> bool {
        let taken = self.stats.reserved_bytes.all.current.saturating_add(self.promised);
        taken.saturating_add(size) <= self.limit
    }

    /// Takes note of a new segment and serves the request from it.
    ///
    /// # Errors
    ///
    /// [`SourceError::Unusable`]: what a source gave is no segment, and the state is as before.
    pub(crate) fn commit_obtain(
        &mut self,
        obtain: &Obtain,
        address: DevicePtr,
        request: &Request,
    ) -> Result<DevicePtr, SourceError> {
        let Obtain { pool, size, .. } = *obtain;
        if !obtain.origin.is_driver() && !self.is_usable(address, size) {
            return Err(SourceError::Unusable { pool: self.pool_id(pool), address, size });
        }
        let block = self.add_segment(address, size, pool, obtain.origin.clone());
        self.pools[pool].spans += 1;
        let oversize = is_oversize(size, self.config.max_split_size);
        self.stats.on_segment_obtained(self.pools[pool].class, size, oversize);
        self.pools.on_reserved(pool, size);
        self.record(Action::SegmentAlloc, address.0, size, pool);
        self.index(block);
        Ok(self.hand_out(block, request))
    }

    /// A span of one idle block, which is in no index yet. The pool may have been released meanwhile.
    pub(super) fn add_segment(&mut self, address: DevicePtr, size: u64, pool: PoolIx, origin: Origin) -> BlockId {
        let span = self.spans.insert(Span { base: address.0, size, pool, kind: SpanKind::Segment(origin) });
        self.blocks.insert(address.0, size, span, pool, self.pools.idle_state(pool))
    }
}
