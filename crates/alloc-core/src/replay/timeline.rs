//! What was where at every moment of a replay, for pictures of it.
//!
//! The allocator's own history tells of every block and every piece of memory; here it becomes lives: from which step to
//! which. A picture of any moment is then all that lives at it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHashMap;

use crate::history::{Action, HistoryEvent, Moment, Recording};
use crate::stats::Stats;

/// The end of what is still there when the replay is over.
const NEVER: u32 = u32::MAX;

/// What was where, in steps: something is there after step `s` if `begin <= s < end`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// In the order in which they were handed out.
    pub blocks: Vec<BlockLife>,
    /// In the order in which they ended, and then by address.
    pub segments: Vec<SegmentLife>,
    /// After each step that changed one of them.
    pub levels: Vec<Levels>,
}

/// A block that the program had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLife {
    /// Its first byte.
    pub address: u64,
    /// Bytes, with what the request was rounded up by.
    pub size: u64,
    /// The step that it was handed out in.
    pub begin: u32,
    /// The step in which the program gave it back; `u32::MAX` for never.
    pub freed: u32,
    /// The step from which on it could be used again; `u32::MAX` for never.
    pub end: u32,
}

/// Memory from the driver at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentLife {
    /// Its first byte.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// The step that it came in.
    pub begin: u32,
    /// The step that it went in; `u32::MAX` for never.
    pub end: u32,
}

/// How much there was after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// The step.
    pub step: u32,
    /// Bytes of blocks that the program held.
    pub allocated: u64,
    /// Those, and the pending ones.
    pub active: u64,
    /// Bytes that were obtained from the driver.
    pub reserved: u64,
}

/// Follows a replay, step by step.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    /// What the history is told as the time: the step under way.
    step: Arc<AtomicU64>,
    /// The bytes of each block that was handed out, in order.
    sizes: Vec<u64>,
    levels: Vec<Levels>,
}

impl Recorder {
    pub(super) fn recording(&self) -> Recording {
        let step = Arc::clone(&self.step);
        let witness = move || Moment { time_us: step.load(Ordering::Relaxed), ..Moment::default() };
        Recording { witness: Arc::new(witness), ..Recording::new(usize::MAX) }
    }

    pub(super) fn begin(&self, step: usize) {
        self.step.store(step as u64, Ordering::Relaxed);
    }

    pub(super) fn handed_out(&mut self, size: u64) {
        self.sizes.push(size);
    }

    pub(super) fn end(&mut self, step: usize, stats: &Stats) {
        let levels = Levels {
            step: step as u32,
            allocated: stats.allocated_bytes.all.current,
            active: stats.active_bytes.all.current,
            reserved: stats.reserved_bytes.all.current,
        };
        if self.levels.last().is_none_or(|last| Levels { step: levels.step, ..*last } != levels) {
            self.levels.push(levels);
        }
    }

    pub(super) fn timeline(self, events: &[HistoryEvent]) -> Timeline {
        let mut blocks: Vec<BlockLife> = Vec::with_capacity(self.sizes.len());
        let mut active: FxHashMap<u64, usize> = FxHashMap::default();
        let mut sizes = self.sizes.into_iter();
        let mut mapped = Mapped::default();
        for event in events {
            let (address, step) = (event.address.0, event.moment.time_us as u32);
            match event.action {
                Action::Alloc => {
                    active.insert(address, blocks.len());
                    let size = sizes.next().unwrap_or(event.size);
                    blocks.push(BlockLife { address, size, begin: step, freed: NEVER, end: NEVER });
                }
                Action::FreeRequested => {
                    if let Some(index) = active.get(&address) {
                        blocks[*index].freed = step;
                    }
                }
                Action::FreeCompleted => {
                    if let Some(index) = active.remove(&address) {
                        blocks[index].end = step;
                    }
                }
                Action::SegmentAlloc | Action::SegmentMap => mapped.add(address, event.size, step),
                Action::SegmentFree | Action::SegmentUnmap => mapped.remove(address, event.size, step),
                Action::Oom | Action::Snapshot | Action::Annotate => {}
            }
        }
        Timeline { blocks, segments: mapped.finish(), levels: self.levels }
    }
}

/// Memory that is there, by address, and that was.
#[derive(Debug, Default)]
struct Mapped {
    /// The address behind the last byte, and the step that it came in.
    now: BTreeMap<u64, (u64, u32)>,
    lives: Vec<SegmentLife>,
}

impl Mapped {
    fn add(&mut self, address: u64, size: u64, step: u32) {
        self.now.insert(address, (address + size, step));
    }

    /// Memory may go in other pieces than it came in.
    fn remove(&mut self, address: u64, size: u64, step: u32) {
        let end = address + size;
        let first = self.now.range(..=address).next_back().map_or(address, |(start, _)| *start);
        let overlapping: Vec<_> = self
            .now
            .range(first..end)
            .map(|(start, piece)| (*start, *piece))
            .filter(|(_, (to, _))| *to > address)
            .collect();
        for (start, (piece_end, begin)) in overlapping {
            self.now.remove(&start);
            if start < address {
                self.now.insert(start, (address, begin));
            }
            if piece_end > end {
                self.now.insert(end, (piece_end, begin));
            }
            let (from, to) = (start.max(address), piece_end.min(end));
            // What came and went within one step was never there after one.
            if begin < step {
                self.lives.push(SegmentLife { address: from, size: to - from, begin, end: step });
            }
        }
    }

    fn finish(mut self) -> Vec<SegmentLife> {
        let rest = self.now.iter().map(|(start, (end, begin))| SegmentLife {
            address: *start,
            size: end - start,
            begin: *begin,
            end: NEVER,
        });
        self.lives.extend(rest);
        self.lives
    }
}
