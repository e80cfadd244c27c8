//! The latest events of a device, for snapshots: a bounded ring, filled under the lock of the state it tells of.
//!
//! The core has no clock and sees no call stack. Whoever records hands in a [`Witness`] that knows both.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::Arc,
};

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
    /// A segment was obtained.
    SegmentAlloc,
    /// A segment was returned.
    SegmentFree,
    /// Handles were mapped.
    SegmentMap,
    /// Handles were unmapped.
    SegmentUnmap,
    /// A request failed for want of memory; the size is the requested one, the address what the driver had free.
    Oom,
    /// A snapshot was taken; the size is that of the active blocks, and there is no address.
    Snapshot,
    /// The program said something about memory that it holds.
    Annotate,
}

impl Action {
    /// Every action.
    pub const ALL: [Self; 10] = [
        Self::Alloc,
        Self::FreeRequested,
        Self::FreeCompleted,
        Self::SegmentAlloc,
        Self::SegmentFree,
        Self::SegmentMap,
        Self::SegmentUnmap,
        Self::Oom,
        Self::Snapshot,
        Self::Annotate,
    ];

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
            Self::Snapshot => "snapshot",
            Self::Annotate => "annotate",
        }
    }

    /// The action of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == name)
    }
}

/// A call stack, by the number that its owner keeps it under.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct StackId(pub u32);

impl StackId {
    /// No stack was taken.
    pub const NONE: Self = Self(0);
}

/// What the program says about what it does, by the number that the text's owner keeps it under; 0 for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LabelId(pub u32);

/// When and by whom an event was caused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// Microseconds since 1970; 0 if there is no clock. Never less than that of an earlier event of the device.
    pub time_us: u64,
    /// The stack of the call that causes the event.
    pub stack: StackId,
    /// What the program has said of this thread's events.
    pub label: LabelId,
}

/// Tells the present moment. Called under the lock of a device, so it must be quick and take no lock.
pub type Witness = Arc<dyn Fn() -> Moment + Send + Sync>;

/// What is recorded.
#[derive(Clone)]
pub struct Recording {
    /// How many of the latest events are kept.
    pub limit: usize,
    /// Events that are not kept.
    pub skipped: Vec<Action>,
    /// Whether events carry stacks; those of held blocks and of segments are known in any case.
    pub events_have_stacks: bool,
    /// Where times and stacks come from.
    pub witness: Witness,
}

impl Recording {
    /// Records all events, without times and stacks.
    pub fn new(limit: usize) -> Self {
        Self { limit, skipped: Vec::new(), events_have_stacks: true, witness: Arc::new(Moment::default) }
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, skipped, events_have_stacks, witness: _ } = self;
        formatter
            .debug_struct("Recording")
            .field("limit", limit)
            .field("skipped", skipped)
            .field("events_have_stacks", events_have_stacks)
            .finish_non_exhaustive()
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
    /// When and by whom it was caused. A free of which no stack was taken has that of the block's allocation.
    pub moment: Moment,
}

/// The ring, and the stacks of what there is now. Nothing is kept while nothing is recorded.
#[derive(Debug)]
pub(crate) struct History {
    recording: Option<Recording>,
    next_sequence: u64,
    events: VecDeque<HistoryEvent>,
    /// By whom the active blocks were allocated, by address; those without a stack are absent.
    block_stacks: BTreeMap<u64, StackId>,
    /// By whom segments and mapped runs were obtained, by address.
    segment_stacks: BTreeMap<u64, StackId>,
}

impl History {
    pub(crate) fn new(recording: Option<Recording>) -> Self {
        Self {
            recording,
            next_sequence: 0,
            events: VecDeque::new(),
            block_stacks: BTreeMap::new(),
            segment_stacks: BTreeMap::new(),
        }
    }

    /// Whether events are kept at all: ask before gathering one.
    pub(crate) fn is_on(&self) -> bool {
        self.recording.is_some()
    }

    /// Goes on with another recording. `None` forgets everything; events beyond a lower limit are dropped.
    pub(crate) fn set_recording(&mut self, recording: Option<Recording>, forget_events: bool) {
        if recording.is_none() {
            self.block_stacks.clear();
            self.segment_stacks.clear();
        }
        let limit = recording.as_ref().map_or(0, |recording| if forget_events { 0 } else { recording.limit });
        self.events.drain(..self.events.len().saturating_sub(limit));
        self.recording = recording;
    }

    pub(crate) fn push(&mut self, action: Action, address: u64, size: u64, stream: StreamHandle, pool: PoolId) {
        let Some(recording) = &self.recording else { return };
        let mut moment = (recording.witness)();
        let (limit, events_have_stacks) = (recording.limit, recording.events_have_stacks);
        let is_skipped = recording.skipped.contains(&action);
        moment.stack = self.follow(action, address, size, moment.stack);
        if is_skipped || limit == 0 {
            return;
        }
        if !events_have_stacks {
            moment.stack = StackId::NONE;
        }
        if self.events.len() >= limit {
            self.events.pop_front();
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.events.push_back(HistoryEvent {
            sequence,
            action,
            address: DevicePtr(address),
            size,
            stream,
            pool,
            moment,
        });
    }

    /// The stacks that an event, a block or a segment still names; one may come more than once.
    pub(crate) fn stacks(&self) -> impl Iterator<Item = StackId> + '_ {
        let of_events = self.events.iter().map(|event| event.moment.stack);
        let of_memory = self.block_stacks.values().chain(self.segment_stacks.values()).copied();
        of_events.chain(of_memory).filter(|stack| *stack != StackId::NONE)
    }

    /// Keeps the stacks of what there is up to date. Returns the stack that the event is to carry.
    fn follow(&mut self, action: Action, address: u64, size: u64, stack: StackId) -> StackId {
        match action {
            Action::Alloc => replace(&mut self.block_stacks, address, stack),
            Action::SegmentAlloc | Action::SegmentMap => replace(&mut self.segment_stacks, address, stack),
            Action::SegmentFree | Action::SegmentUnmap => {
                let unmapped: Vec<u64> =
                    self.segment_stacks.range(address..address + size).map(|(at, _)| *at).collect();
                for at in unmapped {
                    self.segment_stacks.remove(&at);
                }
            }
            Action::FreeRequested if stack == StackId::NONE => return self.block_stack(address),
            Action::FreeCompleted => {
                let allocated_by = self.block_stacks.remove(&address).unwrap_or_default();
                return if stack == StackId::NONE { allocated_by } else { stack };
            }
            Action::FreeRequested | Action::Oom | Action::Snapshot | Action::Annotate => {}
        }
        stack
    }

    pub(crate) fn events(&self) -> impl Iterator<Item = HistoryEvent> + '_ {
        self.events.iter().copied()
    }

    /// By whom the active block at this address was allocated.
    pub(crate) fn block_stack(&self, address: u64) -> StackId {
        self.block_stacks.get(&address).copied().unwrap_or_default()
    }

    /// By whom the segment at this address, or the first mapping of the run there, was obtained.
    pub(crate) fn segment_stack(&self, address: u64) -> StackId {
        self.segment_stacks.get(&address).copied().unwrap_or_default()
    }
}

/// Puts a stack in the place of whichever was there; no stack leaves none.
fn replace(stacks: &mut BTreeMap<u64, StackId>, address: u64, stack: StackId) {
    if stack == StackId::NONE {
        stacks.remove(&address);
    } else {
        stacks.insert(address, stack);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(history: &mut History, action: Action, size: u64) {
        history.push(action, 512, size, StreamHandle::DEFAULT, PoolId::DEFAULT);
    }

    /// Records with a witness whose moments are 1, 2, 3 and so on, in time and in stack.
    fn counting(limit: usize) -> Recording {
        let count = std::sync::atomic::AtomicU32::new(0);
        let witness = move || {
            let number = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
            Moment { time_us: number.into(), stack: StackId(number), label: LabelId(0) }
        };
        Recording { witness: Arc::new(witness), ..Recording::new(limit) }
    }

    #[test]
    fn full_ring_drops_the_oldest_event() {
        let mut history = History::new(Some(Recording::new(2)));
        for size in 1..=3 {
            push(&mut history, Action::Alloc, size);
        }
        let kept: Vec<_> = history.events().map(|event| (event.sequence, event.size)).collect();
        assert_eq!(kept, [(1, 2), (2, 3)]);
    }

    #[test]
    fn skipped_action_is_not_kept_but_its_stack_is_known() {
        let mut history = History::new(Some(Recording { skipped: vec![Action::Alloc], ..counting(9) }));
        push(&mut history, Action::Alloc, 1);
        push(&mut history, Action::FreeRequested, 1);
        assert_eq!(history.events().map(|event| event.action).collect::<Vec<_>>(), [Action::FreeRequested]);
        assert_eq!(history.block_stack(512), StackId(1));
    }

    #[test]
    fn free_without_a_stack_has_that_of_its_allocation() {
        let mut history = History::new(Some(counting(9)));
        push(&mut history, Action::Alloc, 1);
        history.set_recording(Some(Recording::new(9)), false);
        push(&mut history, Action::FreeRequested, 1);
        push(&mut history, Action::FreeCompleted, 1);
        assert!(history.events().all(|event| event.moment.stack == StackId(1)));
        assert_eq!(history.block_stack(512), StackId::NONE, "it holds nothing any more");
    }

    #[test]
    fn events_without_stacks_still_leave_those_of_blocks() {
        let mut history = History::new(Some(Recording { events_have_stacks: false, ..counting(9) }));
        push(&mut history, Action::Alloc, 1);
        assert_eq!(history.events().map(|event| event.moment.stack).collect::<Vec<_>>(), [StackId::NONE]);
        assert_eq!(history.block_stack(512), StackId(1));
    }

    #[test]
    fn new_recording_keeps_the_latest_events_up_to_its_limit_unless_told_to_forget() {
        let mut history = History::new(Some(Recording::new(9)));
        for size in 1..=3 {
            push(&mut history, Action::Alloc, size);
        }
        history.set_recording(Some(Recording::new(2)), false);
        assert_eq!(history.events().map(|event| event.size).collect::<Vec<_>>(), [2, 3]);
        history.set_recording(Some(Recording::new(2)), true);
        assert_eq!(history.events().count(), 0);
        push(&mut history, Action::Alloc, 4);
        history.set_recording(None, false);
        assert!(!history.is_on() && history.events().count() == 0);
    }

    #[test]
    fn every_action_is_found_by_its_name() {
        for action in Action::ALL {
            assert_eq!(Action::from_name(action.name()), Some(action));
        }
        assert_eq!(Action::from_name("free"), None);
    }
}
