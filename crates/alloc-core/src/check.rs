//! A full scan of a device's state for contradictions: every equation that the other modules state, checked.
//!
//! Costs time in the number of all blocks, so it runs in tests after every operation, and when a user asks for it.

use std::sync::Arc;

use crate::{
    backing::{Span, SpanIx, SpanKind},
    block::{BlockId, BlockState},
    config::{Move, Policy},
    device::DeviceState,
    id::DeviceId,
    pool::FreeBlock,
    size::{BLOCK_GRANULARITY, SizeClass},
};

/// Two things that the allocator believes contradict each other: a bug of ours, not of the program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device}: {contradiction}")]
pub struct InvariantError {
    /// The device whose state is contradictory.
    pub device: DeviceId,
    /// What contradicts what.
    pub contradiction: String,
}

impl InvariantError {
    /// The state cannot even be looked at.
    pub(crate) fn broken(device: DeviceId) -> Self {
        Self { device, contradiction: "a call panicked while it held the state".to_owned() }
    }
}

/// What the blocks add up to, to be compared with the statistics.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sums {
    allocation: [u64; 2],
    allocated: [u64; 2],
    active: [u64; 2],
    active_bytes: [u64; 2],
    requested: [u64; 2],
    inactive_split: [u64; 2],
    inactive_split_bytes: [u64; 2],
    segments: [u64; 2],
    reserved: [u64; 2],
}

macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err(format!($($text)+));
        }
    };
}

impl DeviceState {
    /// The first contradiction found, if there is one.
    pub(crate) fn check(&self) -> Result<(), InvariantError> {
        self.scan().map_err(|contradiction| InvariantError { device: self.id, contradiction })
    }

    fn scan(&self) -> Result<(), String> {
        self.streams.check()?;
        let mut sums = Sums::default();
        for (pool, size) in &self.departing {
            let class = self.pools[*pool].class.index();
            sums.segments[class] += 1;
            sums.reserved[class] += size;
        }
        let mut seen = 0;
        let mut end_of_last = 0;
        for span in self.spans.by_address() {
            ensure!(self.spans[span].base >= end_of_last, "spans overlap at {:#x}", self.spans[span].base);
            end_of_last = self.spans[span].base + self.spans[span].size;
            seen += self.scan_span(span, &mut sums)?;
        }
        ensure!(seen == self.blocks.len(), "{} blocks exist, {seen} of them in spans", self.blocks.len());
        self.scan_pools()?;
        self.scan_waiting()?;
        for stray in &self.strays {
            sums.reserved[stray.class.index()] += stray.size;
        }
        self.compare(&sums)
    }

    /// Follows a span's blocks from first to last. Returns how many there are.
    fn scan_span(&self, span_ix: SpanIx, sums: &mut Sums) -> Result<usize, String> {
        let span = &self.spans[span_ix];
        let (mut address, mut previous, mut count) = (span.base, None, 0);
        let mut next = self.blocks.at(span.base);
        ensure!(next.is_some(), "no block at the start of the span at {:#x}", span.base);
        while let Some(id) = next {
            let block = &self.blocks[id];
            ensure!(block.address == address, "a gap before block {address:#x}");
            ensure!(self.blocks.at(address) == Some(id), "block {address:#x} is not found by its address");
            ensure!(
                block.size > 0 && block.size.is_multiple_of(BLOCK_GRANULARITY),
                "block {address:#x}: size {}",
                block.size
            );
            ensure!(block.previous == previous, "block {address:#x} does not know the one before it");
            ensure!(block.span == span_ix && block.pool == span.pool, "block {address:#x} lies in another span");
            self.scan_block(id)?;
            if let Some(previous) = previous.map(|previous: BlockId| self.blocks[previous].state) {
                let unites = previous.is_idle() || previous == BlockState::Unmapped;
                ensure!(!(unites && previous == block.state), "block {address:#x} was not united with the one before");
            }
            self.add_block(id, sums);
            (address, previous, next, count) = (block.end(), Some(id), block.next, count + 1);
        }
        ensure!(address == span.base + span.size, "the blocks of span {:#x} end at {address:#x}", span.base);
        self.scan_mappings(span_ix)?;
        self.scan_origin(span)?;
        let class = self.pools[span.pool].class.index();
        sums.segments[class] += u64::from(matches!(span.kind, SpanKind::Segment(_)));
        sums.reserved[class] += span.reserved();
        Ok(count)
    }

    fn scan_block(&self, id: BlockId) -> Result<(), String> {
        let block = &self.blocks[id];
        let (address, pool) = (block.address, &self.pools[block.pool]);
        let entry = FreeBlock { size: block.size, address, id };
        let is_indexed = pool.index.contains(entry);
        ensure!(
            is_indexed == block.state.is_idle(),
            "block {address:#x} in state {:?}: indexed {is_indexed}",
            block.state
        );
        let is_hole = pool.unmapped.get(&address) == Some(&id);
        ensure!(is_hole == (block.state == BlockState::Unmapped), "block {address:#x}: among the holes {is_hole}");
        if let Some(guest) = block.guest_of {
            let is_held = matches!(
                block.state,
                BlockState::Allocated | BlockState::Pending { .. } | BlockState::Deferred { .. } | BlockState::Claimed
            );
            ensure!(is_held, "block {address:#x} in state {:?} is a guest", block.state);
            ensure!(pool.owner.is_none(), "block {address:#x} is a guest among a private pool's");
            ensure!(guest != pool.stream, "block {address:#x} is a guest of its own stream");
            let is_known = block.last_use.iter().any(|(stream, _)| stream == guest);
            ensure!(is_known, "guest {address:#x} would not wait for the stream that it was handed out to");
        }
        match block.state {
            BlockState::Unmapped | BlockState::Claimed => {}
            BlockState::Stale => ensure!(
                self.stale.at(block.pool, address).is_some_and(|stale| stale.block == id),
                "stale block {address:#x} is not known"
            ),
            BlockState::Free => {
                ensure!(self.pools.is_live(block.pool), "block {address:#x} is free in a released pool");
                ensure!(block.requested == 0, "free block {address:#x} has a request");
                // Whoever has the block next is ordered after its own stream only.
                let is_foreign = block.last_use.iter().any(|(stream, _)| stream != pool.stream);
                ensure!(!is_foreign, "free block {address:#x} is in use on another stream");
            }
            BlockState::Quarantined => {
                ensure!(!self.pools.is_live(block.pool), "block {address:#x} is quarantined in a live pool");
            }
            BlockState::Allocated => {
                ensure!(0 < block.requested, "block {address:#x} was handed out for nothing");
                ensure!(block.requested <= block.size, "block {address:#x} is smaller than its request");
            }
            BlockState::Pending { streams } | BlockState::Deferred { streams } => {
                let undone = block
                    .last_use
                    .iter()
                    .filter(|(stream, epoch)| *stream != pool.stream && !self.streams.is_done(*stream, *epoch));
                let undone = undone.count();
                ensure!(undone == usize::from(streams), "block {address:#x} waits for {streams} streams, not {undone}");
            }
        }
        Ok(())
    }

    /// Memory and handles agree. A claimed block may be on its way from one to the other.
    fn scan_mappings(&self, span_ix: SpanIx) -> Result<(), String> {
        let span = &self.spans[span_ix];
        let SpanKind::Range(mappings) = &span.kind else { return Ok(()) };
        let mut end_of_last = span.base;
        for mapping in mappings.iter() {
            ensure!(mapping.address >= end_of_last, "handles overlap at {:#x}", mapping.address);
            end_of_last = mapping.end();
        }
        let pool = &self.pools[span.pool];
        let (is_expandable, handle_size) = (pool.terms.rules == Policy::Expandable, self.handle_size(pool.class));
        let mut next = self.blocks.at(span.base);
        while let Some(id) = next {
            let block = &self.blocks[id];
            next = block.next;
            match block.state {
                BlockState::Claimed => {}
                BlockState::Unmapped | BlockState::Stale => {
                    let is_whole = !is_expandable || block.size.is_multiple_of(handle_size);
                    ensure!(is_whole, "hole {:#x} is no whole number of handles", block.address);
                    ensure!(mappings.is_free(block.address, block.end()), "hole {:#x} has memory", block.address);
                }
                _ => {
                    ensure!(mappings.covers(block.address, block.end()), "block {:#x} lacks memory", block.address);
                    let is_in_one = mappings.overlapping(block.address, block.end()).count() == 1;
                    let is_contiguous = self.moving_of(block.pool) == Move::Contiguous;
                    ensure!(is_in_one || !is_contiguous, "block {:#x} lies in several handles", block.address);
                }
            }
        }
        Ok(())
    }

    /// A pool with a source of its own has the segments of that source, and no other pool has any of a source.
    fn scan_origin(&self, span: &Span) -> Result<(), String> {
        let of_pool = self.pools[span.pool].terms.origin.source();
        let of_span = match &span.kind {
            SpanKind::Segment(origin) => origin.source(),
            SpanKind::Range(_) => None,
        };
        let agree = match (of_pool, of_span) {
            (None, None) => true,
            (Some(of_pool), Some(of_span)) => Arc::ptr_eq(of_pool, of_span),
            _ => false,
        };
        ensure!(agree, "the span at {:#x} lies in a pool of another source", span.base);
        Ok(())
    }

    fn scan_pools(&self) -> Result<(), String> {
        for pool in self.pools.ids() {
            let index = &self.pools[pool].index;
            index.check().map_err(|contradiction| format!("index of pool {pool:?}: {contradiction}"))?;
            for entry in index.iter() {
                let block = &self.blocks[entry.id];
                let agrees = (block.size, block.address, block.pool) == (entry.size, entry.address, pool);
                ensure!(agrees, "pool {pool:?}: the index has a stale entry {:#x}", entry.address);
            }
            let terms = &self.pools[pool].terms;
            let rules = if terms.origin.is_driver() { self.rules } else { Policy::Native };
            ensure!(terms.rules == rules, "pool {pool:?} goes by {:?}, not by {rules:?}", terms.rules);
            if let Some(owner) = self.pools[pool].owner {
                let (own, of_owner) = (&self.pools[pool].terms, &self.pools.private(owner).terms);
                let agree = (own.may_split, own.moving) == (of_owner.may_split, of_owner.moving);
                ensure!(agree, "pool {pool:?} has other terms than its owner");
            }
            let departing = self.departing.iter().filter(|(of, _)| *of == pool).count();
            let spans = self.spans.ids().filter(|span| self.spans[*span].pool == pool).count() + departing;
            ensure!(spans == self.pools[pool].spans, "pool {pool:?}: {spans} spans, not {}", self.pools[pool].spans);
        }
        for (private, pool) in self.pools.privates() {
            let spans = self.spans.ids().map(|span| &self.spans[span]);
            let own = spans.filter(|span| self.pools[span.pool].owner == Some(private));
            let departing = self.departing.iter().filter(|(of, _)| self.pools[*of].owner == Some(private));
            let found: u64 = own.map(Span::reserved).chain(departing.map(|(_, size)| *size)).sum();
            let counted = pool.reserved.all.current;
            ensure!(counted == found, "private pool {:?}: counted {counted} bytes, found {found}", pool.id);
        }
        Ok(())
    }

    /// Every wait in a stream's queue is one that its block knows of.
    fn scan_waiting(&self) -> Result<(), String> {
        for stream in self.streams.ids() {
            for (epoch, id) in self.streams.waiting(stream) {
                let block = &self.blocks[id];
                let waits = matches!(block.state, BlockState::Pending { .. } | BlockState::Deferred { .. });
                ensure!(waits, "block {:#x} in state {:?} waits for a stream", block.address, block.state);
                let known = block.last_use.iter().any(|of_block| of_block == (stream, epoch));
                ensure!(known, "block {:#x} waits for a stream that it was not used on", block.address);
            }
        }
        Ok(())
    }

    fn add_block(&self, id: BlockId, sums: &mut Sums) {
        let block = &self.blocks[id];
        let class = self.class(id).index();
        match block.state {
            BlockState::Allocated => {
                sums.allocation[class] += 1;
                sums.allocated[class] += block.size;
            }
            BlockState::Pending { .. } | BlockState::Deferred { .. } => {}
            BlockState::Free | BlockState::Quarantined => {
                let pieces = self.inactive_split(id);
                sums.inactive_split[class] += pieces.blocks;
                sums.inactive_split_bytes[class] += pieces.bytes;
                return;
            }
            BlockState::Unmapped | BlockState::Claimed | BlockState::Stale => return,
        }
        sums.active[class] += 1;
        sums.active_bytes[class] += block.size;
        sums.requested[class] += block.requested;
    }

    fn compare(&self, sums: &Sums) -> Result<(), String> {
        let stats = &self.stats;
        let families = [
            ("allocation", &stats.allocation, sums.allocation),
            ("allocated_bytes", &stats.allocated_bytes, sums.allocated),
            ("active", &stats.active, sums.active),
            ("active_bytes", &stats.active_bytes, sums.active_bytes),
            ("requested_bytes", &stats.requested_bytes, sums.requested),
            ("inactive_split", &stats.inactive_split, sums.inactive_split),
            ("inactive_split_bytes", &stats.inactive_split_bytes, sums.inactive_split_bytes),
            ("segment", &stats.segment, sums.segments),
            ("reserved_bytes", &stats.reserved_bytes, sums.reserved),
        ];
        for (name, family, sum) in families {
            for class in [SizeClass::Small, SizeClass::Large] {
                let (counted, found) = (family.class(class).current, sum[class.index()]);
                ensure!(counted == found, "{name} of {class:?}: counted {counted}, found {found}");
            }
            let all = family.all.current;
            ensure!(all == sum[0] + sum[1], "{name}: counted {all}, found {}", sum[0] + sum[1]);
            ensure!(family.all.current <= family.all.peak, "{name}: above its peak");
        }
        let (allocated, active) = (stats.allocated_bytes.all.current, stats.active_bytes.all.current);
        ensure!(allocated <= active && active <= stats.reserved_bytes.all.current, "allocated ≤ active ≤ reserved");
        Ok(())
    }
}
