//! Serving a request where idle memory lies, in a pool that is not the request's own: the last way before waiting or
//! failing.
//!
//! Pools are kept apart so that whole handles stay idle and can move. When memory can neither move nor be obtained, an
//! idle piece is worth more in use than kept apart. It stays in its own pool, whose figures count it, and comes back
//! there.
//!
//! - A block of the asking stream's other size class needs nothing more: whoever has it next comes after the stream.
//! - A block of another stream is a *guest*: its last use is over, or the asking stream waits for it on the GPU; and it
//!   goes home as one that was used on a second stream, when the host has seen that stream's work end.
//!
//! A private pool lends nothing, and borrows from itself only: a graph runs again at the addresses that it captured.

use crate::{
    block::{BlockId, BlockState},
    device::{DeviceState, Request},
    event::Mark,
    id::DevicePtr,
    plan::{Plan, TakeOver},
    pool_set::PoolIx,
};

impl DeviceState {
    /// Takes the smallest idle block of any pool that fits: one that may be used at once, or else one for which the
    /// asking stream has to wait.
    pub(crate) fn plan_borrow(&mut self, request: &Request) -> Option<Plan> {
        let lenders: Vec<PoolIx> = self.pools.ids().filter(|pool| self.lends(*pool, request)).collect();
        let fits = lenders.into_iter().flat_map(|pool| self.pools[pool].index.iter_from(request.rounded));
        let usable = fits.filter_map(|entry| Some((self.waits_before(entry.id, request)?, entry)));
        let Some((waits, entry)) = usable.min_by_key(|(waits, entry)| (!waits.is_empty(), *entry)) else {
            return self.plan_take_over_in(request, |state, pool| state.lends(pool, request));
        };
        self.unindex(entry.id);
        self.blocks[entry.id].state = BlockState::Claimed;
        let stream = self.streams.target(self.pools[request.pool].stream);
        Some(Plan::TakeOver(TakeOver { block: entry.id, stream, waits, uses: Vec::new() }))
    }

    /// Whether the request may be served among the blocks of `pool`.
    fn lends(&self, pool: PoolIx, request: &Request) -> bool {
        let (lender, own) = (&self.pools[pool], &self.pools[request.pool]);
        lender.owner == own.owner && (own.owner.is_none() || lender.stream == own.stream)
    }

    /// What the asking stream has to wait for before it may have an idle block. `None` if it may not wait for that.
    fn waits_before(&self, id: BlockId, request: &Request) -> Option<Vec<Mark>> {
        let own = self.pools[request.pool].stream;
        let uses = self.blocks[id].last_use.iter();
        let undone = uses.filter(|(stream, epoch)| *stream != own && !self.streams.is_done(*stream, *epoch));
        undone
            .map(|(stream, epoch)| self.streams.mark_for(stream, epoch).filter(|_| self.may_wait_for(stream)))
            .collect()
    }

    /// Hands a claimed idle block to the request, in the block's own pool.
    pub(crate) fn commit_borrow(&mut self, id: BlockId, request: &Request) -> DevicePtr {
        let home = self.blocks[id].pool;
        let own = self.pools[request.pool].stream;
        let guest = (self.pools[home].stream != own).then_some(own);
        self.blocks[id].state = self.pools.idle_state(home);
        // Not united with its neighbours first: the proof is about this block, and not about what was freed since.
        self.index(id);
        let address = self.hand_out_to(id, &Request { pool: home, ..*request }, guest);
        let lent = self.blocks.at(address.0).expect("it was handed out just now");
        for rest in [self.blocks[lent].previous, self.blocks[lent].next].into_iter().flatten() {
            if self.blocks[rest].state.is_idle() {
                self.unindex(rest);
                self.coalesce_and_index(rest);
            }
        }
        address
    }
}
