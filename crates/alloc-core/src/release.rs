//! Giving memory back to the driver: whole segments, whole handles, empty ranges.
//!
//! A segment may be freed at any time, since the driver waits for all queued work first. Handles may be unmapped only
//! when the host knows that every last use of the block over them is over. Memory of a live private pool stays.

use crate::{
    backing::mapping::{Mapping, Runs},
    block::{BlockId, BlockState},
    device::{DeviceState, Request},
    history::Action,
    id::{DevicePtr, PoolId},
    plan::{Plan, Release, ReleaseRange, ReleaseRun, ReleaseSegment, Released, RunOutcome, Stray},
    pool::FreeBlock,
    pool_set::PoolIx,
    size::SizeClass,
    stats::is_oversize,
};

impl DeviceState {
    /// All cached memory that may go back, and with `events` the idle events too.
    pub(crate) fn plan_release_all(&mut self, events: bool) -> Option<Plan> {
        let is_held = |run: &ReleaseRun| run.handles.iter().any(|mapping| self.stale.holds(mapping.handle));
        let (held, runs) = std::mem::take(&mut self.stuck).into_iter().partition(is_held);
        self.stuck = held;
        let strays = std::mem::take(&mut self.strays);
        let mut release = Release { runs, strays, ..Release::default() };
        let pools: Vec<PoolIx> = self.pools.ids().filter(|pool| self.may_go_back(*pool)).collect();
        self.claim_all_of(pools, &mut release);
        if events {
            release.events = self.streams.take_idle_events();
        }
        (!release.is_empty()).then_some(Plan::Release(release))
    }

    /// What a released private pool holds that may go back.
    pub(crate) fn plan_release_of(&mut self, id: PoolId) -> Option<Plan> {
        let of_pool = |pool: &PoolIx| self.pool_id(*pool) == id && self.may_go_back(*pool);
        let pools: Vec<PoolIx> = self.pools.ids().filter(of_pool).collect();
        let mut release = Release::default();
        self.claim_all_of(pools, &mut release);
        (!release.is_empty()).then_some(Plan::Release(release))
    }

    /// Whether idle memory of the pool may go back to the driver: it is the driver's, and no graph runs on it.
    fn may_go_back(&self, pool: PoolIx) -> bool {
        !self.is_sourced(pool) && self.pools.is_releasable(pool)
    }

    /// Claims all idle memory of these pools that may go back, and their empty ranges.
    fn claim_all_of(&mut self, pools: Vec<PoolIx>, release: &mut Release) {
        for pool in pools {
            let idle: Vec<FreeBlock> = self.pools[pool].index.iter().collect();
            for entry in idle {
                if self.is_paged(pool) {
                    self.claim_runs(entry.id, &mut release.runs);
                } else {
                    release.segments.extend(self.claim_segment(entry.id));
                }
            }
            let empty: Vec<BlockId> = self.pools[pool].unmapped.values().copied().collect();
            release.ranges.extend(empty.into_iter().filter_map(|block| self.claim_range(block)));
        }
    }

    /// Cached segments that are too large to be split, enough of them for the request: torch's
    /// `release_available_cached_blocks`. They come from the request's own pool, which may be a graph's.
    pub(crate) fn plan_release_oversize(&mut self, request: &Request) -> Option<Plan> {
        let limit = self.config.max_split_size.filter(|_| !self.has_ranges() && self.may_go_back(request.pool))?;
        let wanted = request.rounded.max(limit);
        let index = &self.pools[request.pool].index;
        let chosen = if let Some(single) = index.best_fit(wanted) {
            vec![single.id]
        } else {
            let oversize: Vec<FreeBlock> = index.iter_from(limit).collect();
            let mut bytes = 0;
            let largest_first = oversize.iter().rev().take_while(|entry| {
                let is_needed = bytes < wanted;
                bytes += entry.size;
                is_needed
            });
            let chosen = largest_first.map(|entry| entry.id).collect();
            if bytes < wanted {
                return None;
            }
            chosen
        };
        let segments: Vec<_> = chosen.into_iter().filter_map(|block| self.claim_segment(block)).collect();
        (!segments.is_empty()).then(|| Plan::Release(Release { segments, ..Release::default() }))
    }

    /// Cached segments that went unused longest, until the rest is below the collection threshold: torch's
    /// `garbage_collect_cached_blocks`.
    pub(crate) fn plan_collect(&mut self) -> Option<Plan> {
        let threshold = self.config.garbage_collection_threshold;
        let limit = self.limit.min(self.capabilities.total_bytes);
        let keep = (limit as f64 * threshold) as u64;
        let excess = self.stats.reserved_bytes.all.current.saturating_sub(keep);
        if threshold == 0.0 || excess == 0 || self.has_ranges() {
            return None;
        }
        let mut candidates: Vec<(u64, FreeBlock)> = Vec::new();
        for pool in self.pools.ids() {
            let pool = &self.pools[pool];
            if pool.owner.is_none() && pool.class == SizeClass::Large {
                let whole = pool.index.iter().filter(|entry| !self.blocks[entry.id].is_split());
                candidates.extend(whole.map(|entry| (pool.requests - self.blocks[entry.id].idle_since, entry)));
            }
        }
        let mut segments = Vec::new();
        let mut bytes = 0;
        while bytes < excess && !candidates.is_empty() {
            let total_age: u64 = candidates.iter().map(|(age, _)| age).sum();
            let average_age = total_age / candidates.len() as u64;
            let (old, young): (Vec<_>, Vec<_>) = candidates.into_iter().partition(|(age, _)| *age >= average_age);
            bytes += old.iter().map(|(_, entry)| entry.size).sum::<u64>();
            segments.extend(old.into_iter().filter_map(|(_, entry)| self.claim_segment(entry.id)));
            candidates = young;
        }
        (!segments.is_empty()).then(|| Plan::Release(Release { segments, ..Release::default() }))
    }

    /// Claims an idle block that is a whole segment.
    fn claim_segment(&mut self, id: BlockId) -> Option<ReleaseSegment> {
        let block = &self.blocks[id];
        if block.is_split() || self.pins.has_any(block.address, block.end()) {
            return None;
        }
        let base = DevicePtr(block.address);
        self.unindex(id);
        self.blocks[id].state = BlockState::Claimed;
        Some(ReleaseSegment { device: self.id, block: id, base })
    }

    /// Claims the whole handles inside an idle block, if every use of it is known to be over and nothing pins them.
    fn claim_runs(&mut self, id: BlockId, runs: &mut Vec<ReleaseRun>) {
        let block = &self.blocks[id];
        let is_over = block.last_use.iter().all(|(stream, epoch)| self.streams.is_done(stream, epoch));
        let mut pieces = Runs::default();
        let movable = self.movable_within(id).filter(|mapping| !self.stale.holds(mapping.handle));
        movable.for_each(|mapping| pieces.push(mapping.address, mapping.size));
        if !is_over || pieces.0.is_empty() {
            return;
        }
        self.unindex(id);
        let mut rest = Some(id);
        for (address, size) in pieces.0 {
            let id = rest.take().expect("the pieces lie inside the block, in order");
            let run = self.cut_off_front(id, address);
            if size < self.blocks[run].size {
                rest = Some(self.blocks.split(run, size));
            }
            runs.push(self.claim_run(run));
        }
        if let Some(rest) = rest {
            self.index(rest);
        }
    }

    /// The whole handles inside an idle block that nothing pins, in address order.
    pub(crate) fn movable_within(&self, id: BlockId) -> impl Iterator<Item = Mapping> + '_ {
        let block = &self.blocks[id];
        let inside = self.spans[block.span].mappings().within(block.address, block.end());
        inside.filter(|mapping| !self.pins.has_any(mapping.address, mapping.end()))
    }

    /// Splits a block at `address`, and puts what lies before into the index. Returns the block from `address` on.
    pub(crate) fn cut_off_front(&mut self, id: BlockId, address: u64) -> BlockId {
        let start = self.blocks[id].address;
        if start == address {
            return id;
        }
        let rest = self.blocks.split(id, address - start);
        self.index(id);
        rest
    }

    fn claim_run(&mut self, id: BlockId) -> ReleaseRun {
        let block = &mut self.blocks[id];
        block.state = BlockState::Claimed;
        let handles = self.spans[block.span].mappings().within(block.address, block.end()).collect();
        let (device, address, size) = (self.id, DevicePtr(block.address), block.size);
        ReleaseRun { device, block: id, address, size, handles, is_stuck: false }
    }

    /// Claims an unmapped block that is a whole range.
    fn claim_range(&mut self, id: BlockId) -> Option<ReleaseRange> {
        let block = &self.blocks[id];
        if block.is_split() {
            return None;
        }
        let (address, size, pool) = (block.address, block.size, block.pool);
        self.pools[pool].unmapped.remove(&address);
        self.blocks[id].state = BlockState::Claimed;
        Some(ReleaseRange { device: self.id, block: id, base: DevicePtr(address), size })
    }

    /// Takes note of what was given back; what was not is as before.
    pub(crate) fn commit_release(&mut self, released: Released) {
        for (segment, is_freed) in released.segments {
            if is_freed {
                self.on_segment_freed(&segment);
            } else {
                self.make_idle_again(segment.block);
            }
        }
        for (run, outcome) in released.runs {
            match outcome {
                RunOutcome::Kept if run.is_stuck => self.stuck.push(run),
                RunOutcome::Kept => self.make_idle_again(run.block),
                RunOutcome::Unmapped(strays) => self.on_run_unmapped(&run, &strays),
            }
        }
        for (range, is_freed) in released.ranges {
            if is_freed {
                self.remove_span(range.block);
            } else {
                self.make_unmapped(range.block);
            }
        }
        for (stray, is_released) in released.strays {
            if is_released {
                self.stats.on_handles_released(stray.class, stray.size, 1);
            } else {
                self.strays.push(stray);
            }
        }
        self.streams.put_idle_events(released.events);
        self.pools.drop_empty_privates();
    }

    fn on_segment_freed(&mut self, segment: &ReleaseSegment) {
        let (size, pool) = (self.blocks[segment.block].size, self.blocks[segment.block].pool);
        let oversize = is_oversize(size, self.config.max_split_size);
        self.stats.on_segment_released(self.pools[pool].class, size, oversize);
        self.pools.on_returned(pool, size);
        self.record(Action::SegmentFree, segment.base.0, size, pool);
        self.remove_span(segment.block);
    }

    fn on_run_unmapped(&mut self, run: &ReleaseRun, strays: &[Mapping]) {
        let (span, pool) = (self.blocks[run.block].span, self.blocks[run.block].pool);
        let class = self.pools[pool].class;
        for mapping in &run.handles {
            self.spans[span].mappings_mut().remove(mapping.address);
        }
        let kept: u64 = strays.iter().map(|mapping| mapping.size).sum();
        self.stats.on_handles_released(class, run.size - kept, run.handles.len() - strays.len());
        let stray = |mapping: &Mapping| Stray { device: run.device, handle: mapping.handle, size: mapping.size, class };
        self.strays.extend(strays.iter().map(stray));
        self.pools.on_returned(pool, run.size);
        self.record(Action::SegmentUnmap, run.address.0, run.size, pool);
        self.make_unmapped(run.block);
    }

    /// A claimed block was not given back.
    pub(crate) fn make_idle_again(&mut self, id: BlockId) {
        let pool = self.blocks[id].pool;
        self.blocks[id].state = self.pools.idle_state(pool);
        self.coalesce_and_index(id);
    }

    fn remove_span(&mut self, block: BlockId) {
        let (span, pool) = (self.blocks[block].span, self.blocks[block].pool);
        self.blocks.remove(block);
        self.spans.remove(span);
        self.pools[pool].spans -= 1;
    }
}
