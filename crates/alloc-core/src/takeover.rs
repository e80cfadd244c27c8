//! Handing a pending block on before its streams are done: the asking stream waits for them on the GPU.
//! A [guest](crate::guest) is handed out by the same plan.

use rustc_hash::FxHashMap;

use crate::{
    block::{BlockId, BlockState},
    device::{DeviceState, Request},
    event::StreamIx,
    id::DevicePtr,
    last_use::Epoch,
    plan::{Plan, TakeOver},
    pool_set::PoolIx,
    size::{SMALL_SEGMENT, SizeClass},
};

/// A stream that gathers weights or copies batches for others works ahead of them if it may write a further block while
/// they use so many: docs/adr/0002 compares 0 to 3.
const IN_FLIGHT: usize = 2;

impl DeviceState {
    /// Hands on the smallest pending block of the request's pool that fits.
    pub(crate) fn plan_take_over(&mut self, request: &Request) -> Option<Plan> {
        let block = self.smallest_to_take_over(request, |_, pool| pool == request.pool)?;
        Some(self.plan_to_take_over(block, request))
    }

    /// As [`plan_take_over`](Self::plan_take_over), of the blocks after which the stream has handed on another one: what it
    /// waits for is not the latest work. Not for small requests, of which a handle serves many.
    pub(crate) fn plan_take_over_early(&mut self, request: &Request) -> Option<Plan> {
        if self.pools[request.pool].class == SizeClass::Small {
            return None;
        }
        let of_pool = self.pending().filter(|(_, _, id)| {
            let block = &self.blocks[*id];
            block.pool == request.pool && block.size >= request.rounded
        });
        // Queues are in order, so the last entry of each stream is what stays.
        let newest: FxHashMap<StreamIx, Epoch> = of_pool.map(|(stream, epoch, _)| (stream, epoch)).collect();
        let is_behind = |(stream, epoch)| newest.get(&stream).is_some_and(|newest| epoch < *newest);
        let block = self.smallest_to_take_over(request, |block, pool| {
            pool == request.pool && self.undone_uses(block).all(is_behind)
        })?;
        Some(self.plan_to_take_over(block, request))
    }

    /// As [`plan_take_over`](Self::plan_take_over), of all pools of the asking stream that `lends` names.
    pub(crate) fn plan_take_over_in(
        &mut self,
        request: &Request,
        lends: impl Fn(&Self, PoolIx) -> bool,
    ) -> Option<Plan> {
        let block = self.smallest_to_take_over(request, |_, pool| lends(self, pool))?;
        Some(self.plan_to_take_over(block, request))
    }

    /// The bytes that a stream needs besides the request, to work ahead of those that use what it handed on.
    pub(crate) fn ahead_bytes(&self, request: &Request) -> u64 {
        let mut in_flight: Vec<BlockId> = Vec::with_capacity(IN_FLIGHT);
        for (_, _, block) in self.pending() {
            if self.blocks[block].pool == request.pool
                && self.may_take_over(block, request)
                && !in_flight.contains(&block)
            {
                in_flight.push(block);
                if in_flight.len() == IN_FLIGHT {
                    break;
                }
            }
        }
        let is_small = self.pools[request.pool].class == SizeClass::Small;
        in_flight.len() as u64 * if is_small { SMALL_SEGMENT } else { request.rounded }
    }

    /// Whether the pending block would serve the request after a wait that is allowed and possible.
    fn may_take_over(&self, id: BlockId, request: &Request) -> bool {
        let (block, own) = (&self.blocks[id], self.pools[request.pool].stream);
        let may_wait = |(stream, epoch)| self.may_wait_for(stream) && self.streams.mark_for(stream, epoch).is_some();
        self.pools[request.pool].owner.is_none()
            && self.pools[block.pool].stream == own
            && block.size >= request.rounded
            && self.undone_uses(id).all(may_wait)
    }

    /// The smallest pending block that may be taken over, of those that `is_offered` names by block and pool.
    fn smallest_to_take_over(
        &self,
        request: &Request,
        is_offered: impl Fn(BlockId, PoolIx) -> bool,
    ) -> Option<BlockId> {
        let blocks = self.pending().map(|(_, _, block)| block);
        let fitting = blocks.filter(|id| is_offered(*id, self.blocks[*id].pool) && self.may_take_over(*id, request));
        // Of equal ones the first in its stream's queue: what was freed first is over first.
        fitting.min_by_key(|id| self.blocks[*id].size)
    }

    fn plan_to_take_over(&mut self, block: BlockId, request: &Request) -> Plan {
        let uses: Vec<_> = self.undone_uses(block).collect();
        let mark =
            |(stream, epoch): &(StreamIx, Epoch)| self.streams.mark_for(*stream, *epoch).expect("it may be waited for");
        let waits = uses.iter().map(mark).collect();
        for (stream, _) in &uses {
            self.streams.cancel_wait(*stream, block);
        }
        self.blocks[block].state = BlockState::Claimed;
        let stream = self.streams.target(self.pools[request.pool].stream);
        Plan::TakeOver(TakeOver { block, stream, waits, uses })
    }

    /// The streams besides its own that a pending block waits for, and until when.
    fn undone_uses(&self, block: BlockId) -> impl Iterator<Item = (StreamIx, Epoch)> + '_ {
        let own = self.pools[self.blocks[block].pool].stream;
        let uses = self.blocks[block].last_use.iter();
        uses.filter(move |(stream, epoch)| *stream != own && !self.streams.is_done(*stream, *epoch))
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
