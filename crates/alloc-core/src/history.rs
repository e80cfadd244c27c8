//! The latest events of a device, for snapshots: a bounded ring, filled under the lock of the state it tells of.

use std::collections::VecDeque;

use crate::id::{DevicePtr, PoolId, StreamHandle};

/// What happened, by torch's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// A block was handed out; the size is the requested one.
    Alloc,
    /// The program freed it; the size is the requested one.
    FreeRequested,
    /// It became reusable, at once or when other streams were done; the size is the requested one.
    FreeCompleted,
    /// A segment was obtained from the driver.
    SegmentAlloc,
    /// A segment was returned to the driver.
    SegmentFree,
    /// Handles were mapped.
    SegmentMap,
    /// Handles were unmapped.
    SegmentUnmap,
    /// A request failed for want of memory; the size is the requested one, the address what the driver had free.
    Oom,
}

impl Action {
    /// The name in a snapshot.
    pub fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::FreeRequested => "free_requested",
            Self::FreeCompleted => "free_completed",
            Self::SegmentAlloc => "segment_alloc",
            Self::SegmentFree => "segment_free",
            Self::SegmentMap => "segment_map",
            Self::SegmentUnmap => "segment_unmap",
            Self::Oom => "oom",
        }
    }
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryEvent {
    /// Counts all events of the device from 0, those that the ring has dropped too.
    pub sequence: u64,
    /// What happened.
    pub action: Action,
    /// To which memory.
    pub address: DevicePtr,
    /// In bytes; see [`Action`] for which bytes.
    pub size: u64,
    /// The stream of the block or segment.
    pub stream: StreamHandle,
    /// The private pool that it belongs to, or [`PoolId::DEFAULT`].
    pub pool: PoolId,
}

/// The ring. With a limit of 0 nothing is kept.
#[derive(Debug)]
pub(crate) struct History {
    limit: usize,
    next_sequence: u64,
    events: VecDeque<HistoryEvent>,
}

impl History {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, next_sequence: 0, events: VecDeque::new() }
    }

    /// Whether events are kept at all: ask before gathering one.
    pub(crate) fn is_on(&self) -> bool {
        self.limit > 0
    }

    pub(crate) fn push(&mut self, action: Action, address: u64, size: u64, stream: StreamHandle, pool: PoolId) {
        if self.events.len() == self.limit {
            self.events.pop_front();
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.events.push_back(HistoryEvent { sequence, action, address: DevicePtr(address), size, stream, pool });
    }

    pub(crate) fn events(&self) -> impl Iterator<Item = HistoryEvent> + '_ {
        self.events.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_ring_drops_the_oldest_event() {
        let mut history = History::new(2);
        for size in 1..=3 {
            history.push(Action::Alloc, 512, size, StreamHandle::DEFAULT, PoolId::DEFAULT);
        }
        let kept: Vec<_> = history.events().map(|event| (event.sequence, event.size)).collect();
        assert_eq!(kept, [(1, 2), (2, 3)]);
    }
}
