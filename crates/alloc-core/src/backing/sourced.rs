//! Segments of private pools that have a [source](crate::source) of their own: what is particular to them.
//!
//! A source is foreign code and called under no lock. So what it is asked for counts against the limit from the plan on,
//! and a segment leaves the tables *before* it is given back: once the source has it, anybody may obtain the same
//! addresses anew, and be first to say so. Until its source has answered, such a segment is *departing*: it has no block
//! and no span any more, but counts as before.

use crate::{
    backing::{Span, SpanKind},
    block::BlockId,
    device::DeviceState,
    history::Action,
    id::{DevicePtr, PoolId},
    plan::{Departure, Obtain, Plan, User},
    pool_set::PoolIx,
    size::BLOCK_GRANULARITY,
    source::{Origin, SourceFailed},
    stats::is_oversize,
};

impl DeviceState {
    /// Whether the pool's memory comes from address ranges; else it comes from segments.
    pub(crate) fn is_paged(&self, pool: PoolIx) -> bool {
        self.pools[pool].terms.is_paged()
    }

    /// Whether the pool's segments come from a source of its own.
    pub(crate) fn is_sourced(&self, pool: PoolIx) -> bool {
        !self.pools[pool].terms.origin.is_driver()
    }

    /// A source has answered: what it was asked for counts as reserved now, or not at all.
    pub(crate) fn keep_promise(&mut self, obtain: &Obtain) {
        if !obtain.origin.is_driver() {
            self.promised -= obtain.size;
        }
    }

    /// Whose requests a pool serves, as foreign code is told.
    pub(super) fn user_of(&self, pool: PoolIx) -> User {
        User { pool: self.pool_id(pool), stream: self.streams.target(self.pools[pool].stream).handle }
    }

    /// Whether a segment can lie there.
    pub(super) fn is_usable(&self, address: DevicePtr, size: u64) -> bool {
        let end = address.0.checked_add(size);
        address.0 != 0
            && address.0.is_multiple_of(BLOCK_GRANULARITY)
            && end.is_some_and(|end| self.spans.overlapping(address.0, end).next().is_none())
    }

    /// What a source gave and cannot be used, if it may have that back: not where it gave the same memory before, which it
    /// would take away from under the segment that lies there.
    pub(crate) fn rejected(&self, obtain: Obtain, address: DevicePtr) -> Option<Departure> {
        let end = address.0.saturating_add(obtain.size);
        // Of any source, since several pools may have one library behind them.
        let is_of_source = |span: &Span| matches!(span.kind, SpanKind::Segment(Origin::Source(_)));
        let gives_twice = self.spans.overlapping(address.0, end).any(is_of_source);
        if gives_twice { None } else { Departure::of(obtain, address) }
    }

    /// Idle segments that may go back to their sources: those of all pools, or of the private pool of this name.
    pub(crate) fn plan_hand_back(&mut self, only: Option<PoolId>) -> Option<Plan> {
        let is_meant = |pool: &PoolIx| {
            self.is_sourced(*pool)
                && self.pools.is_releasable(*pool)
                && only.is_none_or(|only| self.pool_id(*pool) == only)
        };
        let pools: Vec<PoolIx> = self.pools.ids().filter(is_meant).collect();
        let idle: Vec<BlockId> =
            pools.into_iter().flat_map(|pool| self.pools[pool].index.iter()).map(|entry| entry.id).collect();
        let departures: Vec<Departure> = idle.into_iter().filter_map(|block| self.depart(block)).collect();
        (!departures.is_empty()).then_some(Plan::HandBack(departures))
    }

    /// Takes an idle block that is a whole segment out of the tables, if every use of it is known to be over and nothing
    /// pins it: a source, unlike the driver, may take the memory away without waiting.
    fn depart(&mut self, id: BlockId) -> Option<Departure> {
        let block = &self.blocks[id];
        let (span, pool, base, size) = (block.span, block.pool, DevicePtr(block.address), block.size);
        let is_over = block.last_use.iter().all(|(stream, epoch)| self.streams.is_done(stream, epoch));
        if block.is_split() || !is_over || self.pins.has_any(block.address, block.end()) {
            return None;
        }
        let source = self.pools[pool].terms.origin.source()?.clone();
        self.unindex(id);
        self.blocks.remove(id);
        self.spans.remove(span);
        self.departing.push((pool, size));
        self.record(Action::SegmentFree, base.0, size, pool);
        Some(Departure { device: self.id, pool, base, size, source, user: self.user_of(pool) })
    }

    /// Whether a segment is still there. A source that has given the same addresses out meanwhile did take it back,
    /// whatever it says.
    pub(crate) fn is_kept(&self, departure: &Departure, result: Result<(), SourceFailed>) -> bool {
        result.is_err() && self.is_usable(departure.base, departure.size)
    }

    /// Takes note of what sources took back. What they did not is idle as before: it came again, says the history.
    pub(crate) fn commit_hand_back(&mut self, departures: Vec<(Departure, Result<(), SourceFailed>)>) {
        for (departure, result) in departures {
            let Departure { pool, size, .. } = departure;
            let departed = self.departing.iter().position(|departing| *departing == (pool, size));
            self.departing.swap_remove(departed.expect("it was planned"));
            if self.is_kept(&departure, result) {
                let Departure { pool, base, size, source, .. } = departure;
                let block = self.add_segment(base, size, pool, Origin::Source(source));
                self.record(Action::SegmentAlloc, base.0, size, pool);
                self.index(block);
                continue;
            }
            let class = self.pools[pool].class;
            self.stats.on_segment_released(class, size, is_oversize(size, self.config.max_split_size));
            self.pools.on_returned(pool, size);
            self.pools[pool].spans -= 1;
        }
        self.pools.drop_empty_privates();
    }
}
