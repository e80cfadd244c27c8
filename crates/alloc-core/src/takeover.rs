//! Handing a pending block on before its streams are done: the asking stream waits for them on the GPU.
//! A [guest](crate::guest) is handed out by the same plan.

use rustc_hash::FxHashSet;

use crate::{
    block::{BlockId, BlockState},
    device::{DeviceState, Request},
    event::{Mark, StreamIx},
    id::DevicePtr,
    last_use::Epoch,
    plan::{Plan, TakeOver},
    pool_set::PoolIx,
    size::{SMALL_SEGMENT, SizeClass},
};

/// So many blocks that others still use a stream may leave to them before it waits for the first to come back. One that
/// gathers weights or copies batches for others works ahead of them while it writes a third.
const IN_FLIGHT: usize = 2;

impl DeviceState {
    /// The smallest pending block of the request's pool that fits, if the asking stream may wait for all its streams.
    pub(crate) fn plan_take_over(&mut self, request: &Request) -> Option<Plan> {
        self.plan_take_over_in(request, |_, pool| pool == request.pool)
    }

    /// As [`plan_take_over`](Self::plan_take_over), if so many are pending that the wait is for work before the latest. A small
    /// request gets a handle instead, which serves many.
    pub(crate) fn plan_take_over_early(&mut self, request: &Request) -> Option<Plan> {
        let is_small = self.pools[request.pool].class == SizeClass::Small;
        if is_small || self.in_flight(request) < IN_FLIGHT { None } else { self.plan_take_over(request) }
    }

    /// The bytes that a stream needs besides the request, to work ahead of those that still use what it handed on.
    pub(crate) fn ahead_bytes(&self, request: &Request) -> u64 {
        let is_small = self.pools[request.pool].class == SizeClass::Small;
        self.in_flight(request) as u64 * if is_small { SMALL_SEGMENT } else { request.rounded }
    }

    /// How many pending blocks of the request's pool could serve it once they are idle, up to [`IN_FLIGHT`].
    fn in_flight(&self, request: &Request) -> usize {
        let could_serve = |id: &BlockId| {
            let block = &self.blocks[*id];
            block.pool == request.pool && block.size >= request.rounded
        };
        let found: FxHashSet<BlockId> = self.pending().filter(could_serve).collect();
        found.len().min(IN_FLIGHT)
    }

    /// The pending blocks, each as often as there are streams that it waits for.
    fn pending(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.streams.ids().flat_map(|stream| self.streams.waiting(stream)).map(|(_, block)| block)
    }

    /// As [`plan_take_over`](Self::plan_take_over), of all pools of the asking stream that `lends` names.
    pub(crate) fn plan_take_over_in(
        &mut self,
        request: &Request,
        lends: impl Fn(&Self, PoolIx) -> bool,
    ) -> Option<Plan> {
        if self.pools[request.pool].owner.is_some() {
            return None;
        }
        let own = self.pools[request.pool].stream;
        let fits = |id: &BlockId| {
            let block = &self.blocks[*id];
            self.pools[block.pool].stream == own && block.size >= request.rounded && lends(self, block.pool)
        };
        // Of equal ones the first in its stream's queue: what was freed first is over first.
        let smallest = self.pending().filter(fits).min_by_key(|id| self.blocks[*id].size);
        let block = smallest?;
        let uses = self.undone_uses(block);
        if !uses.iter().all(|(stream, _)| self.may_wait_for(*stream)) {
            return None;
        }
        let waits: Option<Vec<Mark>> =
            uses.iter().map(|(stream, epoch)| self.streams.mark_for(*stream, *epoch)).collect();
        let waits = waits?;
        for (stream, _) in &uses {
            self.streams.cancel_wait(*stream, block);
        }
        self.blocks[block].state = BlockState::Claimed;
        let stream = self.streams.target(self.pools[request.pool].stream);
        Some(Plan::TakeOver(TakeOver { block, stream, waits, uses }))
    }

    /// The streams besides its own that a pending block waits for.
    fn undone_uses(&self, block: BlockId) -> Vec<(StreamIx, Epoch)> {
        let own = self.pools[self.blocks[block].pool].stream;
        let uses = self.blocks[block].last_use.iter();
        uses.filter(|(stream, epoch)| *stream != own && !self.streams.is_done(*stream, *epoch)).collect()
    }

    /// The asking stream waits: whatever it gets from now on comes after all uses of the block.
    pub(crate) fn commit_take_over(&mut self, taken: &TakeOver, request: &Request) -> DevicePtr {
        self.stats.gpu_waits += taken.waits.len() as u64;
        if taken.uses.is_empty() {
            return self.commit_borrow(taken.block, request);
        }
        let (own, pool) = (self.pools[request.pool].stream, self.blocks[taken.block].pool);
        self.blocks[taken.block].last_use.set(own, self.streams.current_epoch(own));
        self.on_free_completed(taken.block);
        self.blocks[taken.block].state = BlockState::Free;
        let block = self.coalesce_and_index(taken.block);
        self.hand_out(block, &Request { pool, ..*request })
    }

    /// Nothing was waited for: the block is idle or pending as before, or free if its streams are done meanwhile.
    pub(crate) fn commit_take_over_failed(&mut self, taken: &TakeOver) {
        if taken.uses.is_empty() {
            self.make_idle_again(taken.block);
            return;
        }
        let undone = taken.uses.iter().filter(|(stream, epoch)| !self.streams.is_done(*stream, *epoch));
        let undone: Vec<_> = undone.copied().collect();
        for (stream, epoch) in &undone {
            self.streams.wait_again(*stream, *epoch, taken.block);
        }
        if undone.is_empty() {
            self.make_idle(taken.block);
        } else {
            self.blocks[taken.block].state = BlockState::Pending { streams: undone.len() as u16 };
        }
    }
}
