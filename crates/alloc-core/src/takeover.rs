//! Handing a pending block on before its streams are done: the asking stream waits for them on the GPU.
//! A [guest](crate::guest) is handed out by the same plan.

use crate::{
    block::{BlockId, BlockState},
    device::{DeviceState, Request},
    event::{Mark, StreamIx},
    id::DevicePtr,
    last_use::Epoch,
    plan::{Plan, TakeOver},
    pool_set::PoolIx,
};

impl DeviceState {
    /// The smallest pending block of the request's pool that fits, if the asking stream may wait for all its streams.
    pub(crate) fn plan_take_over(&mut self, request: &Request) -> Option<Plan> {
        self.plan_take_over_in(request, |_, pool| pool == request.pool)
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
        let waiting = self.streams.ids().flat_map(|stream| self.streams.waiting(stream)).map(|(_, block)| block);
        // Of equal ones the first in its stream's queue: what was freed first is over first.
        let smallest = waiting.filter(fits).min_by_key(|id| self.blocks[*id].size);
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
