//! Counters, one `on_*` function for each transition of memory.
//!
//! They are torch's: [`torch.cuda.memory_stats`](https://docs.pytorch.org/docs/2.11/generated/torch.cuda.memory_stats.html)
//! has the same families, pools and kinds. At any moment `allocated ≤ active ≤ reserved`, and for every counter
//! `allocated − freed = current ≤ peak`.

use std::ops::AddAssign;

use crate::{ladder::Rung, size::SizeClass};

/// A quantity over time. What was ever added is `current + freed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// The quantity now.
    pub current: u64,
    /// Its largest value since the last [`Stats::reset_peaks`].
    pub peak: u64,
    /// All that was ever taken away, since the last [`Stats::reset_accumulated`].
    pub freed: u64,
    /// What `current + freed` was at the last [`Stats::reset_accumulated`].
    forgotten: u64,
}

impl Counter {
    /// All that was ever added, since the last [`Stats::reset_accumulated`].
    pub fn allocated(&self) -> u64 {
        self.current + self.freed - self.forgotten
    }

    fn add(&mut self, amount: u64) {
        self.current += amount;
        self.peak = self.peak.max(self.current);
    }

    fn take(&mut self, amount: u64) {
        debug_assert!(amount <= self.current, "taking {amount} of {}", self.current);
        self.current -= amount;
        self.freed += amount;
    }

    fn change(&mut self, before: u64, after: u64) {
        if after >= before { self.add(after - before) } else { self.take(before - after) }
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    fn reset_accumulated(&mut self) {
        self.freed = 0;
        self.forgotten = self.current;
    }

    fn entries(&self, prefix: &str, into: &mut Vec<(String, i64)>) {
        let values =
            [("current", self.current), ("peak", self.peak), ("allocated", self.allocated()), ("freed", self.freed)];
        into.extend(values.map(|(kind, value)| (format!("{prefix}.{kind}"), signed(value))));
    }
}

/// One quantity of both size classes and of both together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Family {
    /// Small and large together: `all.current = small.current + large.current`, but the peaks fall where they fall.
    pub all: Counter,
    /// By [`SizeClass`].
    classes: [Counter; 2],
}

impl Family {
    /// The part of one size class.
    pub fn class(&self, class: SizeClass) -> &Counter {
        &self.classes[class.index()]
    }

    fn each(&mut self, class: SizeClass, mut update: impl FnMut(&mut Counter)) {
        update(&mut self.all);
        update(&mut self.classes[class.index()]);
    }

    pub(crate) fn add(&mut self, class: SizeClass, amount: u64) {
        self.each(class, |counter| counter.add(amount));
    }

    pub(crate) fn take(&mut self, class: SizeClass, amount: u64) {
        self.each(class, |counter| counter.take(amount));
    }

    fn change(&mut self, class: SizeClass, before: u64, after: u64) {
        if before != after {
            self.each(class, |counter| counter.change(before, after));
        }
    }

    fn counters(&mut self) -> impl Iterator<Item = &mut Counter> {
        std::iter::once(&mut self.all).chain(&mut self.classes)
    }

    /// Starts the peaks anew from the present values.
    pub(crate) fn reset_peaks(&mut self) {
        self.counters().for_each(Counter::reset_peak);
    }

    /// Starts the totals anew from zero.
    pub(crate) fn reset_accumulated(&mut self) {
        self.counters().for_each(Counter::reset_accumulated);
    }

    /// Adds the values to a list, under keys that begin with `family`.
    pub fn entries(&self, family: &str, into: &mut Vec<(String, i64)>) {
        self.all.entries(&format!("{family}.all"), into);
        self.class(SizeClass::Small).entries(&format!("{family}.small_pool"), into);
        self.class(SizeClass::Large).entries(&format!("{family}.large_pool"), into);
    }
}

/// A block's size and class: what every transition counts by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weight {
    pub(crate) class: SizeClass,
    /// The block's own bytes.
    pub(crate) size: u64,
    /// The bytes that the program asked for.
    pub(crate) requested: u64,
}

/// Free pieces of split segments.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
}

impl Pieces {
    /// One piece of so many bytes.
    pub(crate) fn one(bytes: u64) -> Self {
        Self { blocks: 1, bytes }
    }
}

impl AddAssign for Pieces {
    fn add_assign(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.bytes += other.bytes;
    }
}

/// Everything that is counted on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of blocks that the program holds.
    pub allocation: Family,
    /// Number of segments obtained from the driver, address ranges not counted.
    pub segment: Family,
    /// Number of blocks that are held or pending.
    pub active: Family,
    /// Number of free pieces of segments that have other pieces.
    pub inactive_split: Family,
    /// Bytes of the blocks that the program holds.
    pub allocated_bytes: Family,
    /// Bytes obtained from the driver and not returned.
    pub reserved_bytes: Family,
    /// Bytes of the blocks that are held or pending.
    pub active_bytes: Family,
    /// Bytes of the free pieces of segments that have other pieces.
    pub inactive_split_bytes: Family,
    /// Bytes that the program asked for, of the blocks that are held or pending.
    pub requested_bytes: Family,
    /// Number of blocks of at least `max_split_size` that are held.
    pub oversize_allocations: Counter,
    /// Number of segments of at least `max_split_size`.
    pub oversize_segments: Counter,
    /// Requests that succeeded only after memory was given back to the driver, or failed then.
    pub num_alloc_retries: u64,
    /// Requests that failed.
    pub num_ooms: u64,
    /// Times that all pending work was to be waited for on the host, if there was any: before memory was given back.
    pub num_sync_all_streams: u64,
    /// Segments and handles obtained from the driver.
    pub num_device_alloc: u64,
    /// Segments and handles returned to it.
    pub num_device_free: u64,
    /// Host waits of any kind, device synchronises among them.
    pub host_waits: u64,
    /// Events that could not be recorded because the stream is gone: the device has to be synchronised instead.
    pub dead_streams: u64,
    /// Handles that were moved to another address.
    pub handles_moved: u64,
    /// Marks that a stream was made to wait for on the GPU.
    pub gpu_waits: u64,
    /// How often each [`Rung`] of the ladder asked something of the driver, in the order of [`Rung::ALL`].
    pub rungs: [u64; Rung::ALL.len()],
    /// Frees that had to wait for other streams.
    pub pending_frees: u64,
    /// Times that such a free found its stream capturing.
    pub deferred_frees: u64,
    /// Blocks that were quarantined with their private pool.
    pub quarantined_blocks: u64,
    /// Frees of addresses that were not allocated here, or not any more.
    pub invalid_frees: u64,
}

impl Stats {
    pub(crate) fn on_segment_obtained(&mut self, class: SizeClass, size: u64, oversize: bool) {
        self.segment.add(class, 1);
        self.reserved_bytes.add(class, size);
        self.num_device_alloc += 1;
        if oversize {
            self.oversize_segments.add(1);
        }
    }

    pub(crate) fn on_segment_released(&mut self, class: SizeClass, size: u64, oversize: bool) {
        self.segment.take(class, 1);
        self.reserved_bytes.take(class, size);
        self.num_device_free += 1;
        if oversize {
            self.oversize_segments.take(1);
        }
    }

    pub(crate) fn on_handles_created(&mut self, class: SizeClass, bytes: u64, handles: usize) {
        self.reserved_bytes.add(class, bytes);
        self.num_device_alloc += handles as u64;
    }

    pub(crate) fn on_handles_released(&mut self, class: SizeClass, bytes: u64, handles: usize) {
        self.reserved_bytes.take(class, bytes);
        self.num_device_free += handles as u64;
    }

    pub(crate) fn on_handle_moved(&mut self, from: SizeClass, to: SizeClass, size: u64) {
        self.handles_moved += 1;
        if from != to {
            self.reserved_bytes.classes[from.index()].take(size);
            self.reserved_bytes.classes[to.index()].add(size);
        }
    }

    #[inline]
    pub(crate) fn on_allocated(&mut self, weight: Weight, oversize: bool) {
        let Weight { class, size, requested } = weight;
        self.allocation.add(class, 1);
        self.active.add(class, 1);
        self.allocated_bytes.add(class, size);
        self.active_bytes.add(class, size);
        self.requested_bytes.add(class, requested);
        if oversize {
            self.oversize_allocations.add(1);
        }
    }

    pub(crate) fn on_free_requested(&mut self, weight: Weight, oversize: bool) {
        self.allocation.take(weight.class, 1);
        self.allocated_bytes.take(weight.class, weight.size);
        if oversize {
            self.oversize_allocations.take(1);
        }
    }

    pub(crate) fn on_idle(&mut self, weight: Weight) {
        self.active.take(weight.class, 1);
        self.active_bytes.take(weight.class, weight.size);
        self.requested_bytes.take(weight.class, weight.requested);
    }

    /// Free pieces of split segments before and after one malloc or free, as far as it touched them. As in torch, only
    /// the net change counts.
    pub(crate) fn on_inactive_split(&mut self, class: SizeClass, before: Pieces, after: Pieces) {
        self.inactive_split.change(class, before.blocks, after.blocks);
        self.inactive_split_bytes.change(class, before.bytes, after.bytes);
    }

    /// Starts every peak anew from the present value.
    pub fn reset_peaks(&mut self) {
        self.for_each_counter(Counter::reset_peak);
    }

    /// Starts every total anew from zero.
    pub fn reset_accumulated(&mut self) {
        self.for_each_counter(Counter::reset_accumulated);
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
    }

    /// Every key of `torch.cuda.memory_stats()` with its value, sorted. One of them is the setting `max_split_size`.
    pub fn entries(&self, max_split_size: Option<u64>) -> Vec<(String, i64)> {
        let mut entries = Vec::with_capacity(128);
        for (name, family) in self.families() {
            family.entries(name, &mut entries);
        }
        self.oversize_allocations.entries("oversize_allocations", &mut entries);
        self.oversize_segments.entries("oversize_segments", &mut entries);
        let scalars = [
            ("max_split_size", max_split_size.map_or(-1, signed)),
            ("num_alloc_retries", signed(self.num_alloc_retries)),
            ("num_device_alloc", signed(self.num_device_alloc)),
            ("num_device_free", signed(self.num_device_free)),
            ("num_oom_rejections", 0),
            ("num_ooms", signed(self.num_ooms)),
            ("num_sync_all_streams", signed(self.num_sync_all_streams)),
        ];
        entries.extend(scalars.map(|(key, value)| (key.to_owned(), value)));
        entries.sort();
        entries
    }

    fn families(&self) -> [(&'static str, &Family); 9] {
        [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &self.inactive_split),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
        ]
    }

    fn for_each_counter(&mut self, update: impl Fn(&mut Counter)) {
        let families = [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ];
        families.into_iter().flat_map(Family::counters).for_each(&update);
        update(&mut self.oversize_allocations);
        update(&mut self.oversize_segments);
    }
}

/// Whether a block or segment of `size` bytes must not be split. Without a limit none is oversize.
pub(crate) fn is_oversize(size: u64, max_split_size: Option<u64>) -> bool {
    max_split_size.is_some_and(|limit| size >= limit)
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::MIB;

    fn weight(size: u64) -> Weight {
        Weight { class: SizeClass::Large, size, requested: size - 1 }
    }

    #[test]
    fn freed_block_stays_active_until_it_is_idle() {
        let mut stats = Stats::default();
        stats.on_allocated(weight(4 * MIB), false);
        stats.on_free_requested(weight(4 * MIB), false);
        assert_eq!((stats.allocated_bytes.all.current, stats.active_bytes.all.current), (0, 4 * MIB));
        stats.on_idle(weight(4 * MIB));
        assert_eq!((stats.active_bytes.all.current, stats.requested_bytes.all.current), (0, 0));
        assert_eq!(stats.active_bytes.all.peak, 4 * MIB);
    }

    #[test]
    fn resets_start_from_the_present_value() {
        let mut stats = Stats::default();
        stats.on_allocated(weight(4 * MIB), false);
        stats.on_allocated(weight(2 * MIB), false);
        stats.on_free_requested(weight(4 * MIB), false);
        stats.reset_peaks();
        stats.reset_accumulated();
        let counter = stats.allocated_bytes.all;
        assert_eq!((counter.current, counter.peak, counter.allocated(), counter.freed), (2 * MIB, 2 * MIB, 0, 0));
    }

    #[test]
    fn entries_are_the_keys_of_torch() {
        let entries = Stats::default().entries(None);
        assert_eq!(entries.len(), 123);
        assert!(entries.contains(&("max_split_size".to_owned(), -1)));
        assert!(entries.contains(&("reserved_bytes.small_pool.peak".to_owned(), 0)));
    }
}
