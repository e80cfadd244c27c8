//! Streams, the work queued on them, and when it ends.
//!
//! When work is queued its end is already known: it starts once its stream, and all that the stream waits for, has
//! ended what came before. [`Timeline::finish`] ends work early; what was queued behind it elsewhere keeps the end it
//! was given, which is late but never wrong. Each stream also carries the vector clock of its next launch.

use std::collections::{HashMap, VecDeque};
use std::thread::ThreadId;

use super::access::Access;
use super::clock::{StreamIndex, VectorClock};
use super::error::Work;
use crate::id::{DeviceId, Stream, StreamHandle};

/// Work on a stream's queue.
#[derive(Debug)]
struct Queued {
    /// Its position among all that its stream was ever given, from 1.
    position: u64,
    /// When it ends, at the latest.
    ends_at_ns: u64,
    task: Task,
}

#[derive(Debug)]
enum Task {
    Kernel(Kernel),
    /// Nothing behind it starts before the mark is reached.
    Wait {
        stream: StreamIndex,
        position: u64,
    },
    /// Stands for the work of a recorded program, of which only the time is known.
    Lag,
}

/// A kernel or a whole graph.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    pub(super) work: Work,
    pub(super) accesses: Vec<Access>,
    /// An address that it was going to touch and that was unmapped while it was queued.
    pub(super) unmapped: Option<u64>,
}

/// A kernel that has just ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) stream: StreamIndex,
    pub(super) kernel: Kernel,
}

/// A point in a stream's queue, as an event marks it.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) stream: StreamIndex,
    position: u64,
    pub(super) ends_at_ns: u64,
    /// What has happened once the mark is reached.
    pub(super) clock: VectorClock,
}

/// One stream, from creation on; it stays after its destruction, with the work it still had.
#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) stream: Stream,
    /// Whether the program has not destroyed it.
    pub(super) alive: bool,
    queue: VecDeque<Queued>,
    /// The position of the last work queued.
    queued: u64,
    /// The position of the last work that ended. What lies between the two is `queue`.
    ended: u64,
    /// When the last work queued ends.
    ends_at_ns: u64,
    /// What happens before the next launch. Its own entry counts the launches so far.
    pub(super) clock: VectorClock,
}

/// All streams, and the time.
#[derive(Debug)]
pub(super) struct Timeline {
    streams: Vec<StreamState>,
    /// The stream that a handle names now; a later stream may get the handle of one that was destroyed.
    named: HashMap<StreamHandle, StreamIndex>,
    legacy: HashMap<DeviceId, StreamIndex>,
    per_thread: HashMap<(DeviceId, ThreadId), StreamIndex>,
    now_ns: u64,
    /// What the host has seen to have ended.
    pub(super) host: VectorClock,
    /// Set for replays: all that is queued ends this long after it was queued.
    lag_ns: Option<u64>,
}

impl Timeline {
    pub(super) fn new(lag_ns: Option<u64>) -> Self {
        Self {
            streams: Vec::new(),
            named: HashMap::new(),
            legacy: HashMap::new(),
            per_thread: HashMap::new(),
            now_ns: 0,
            host: VectorClock::default(),
            lag_ns,
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    pub(super) fn stream(&self, index: StreamIndex) -> &StreamState {
        &self.streams[index.0]
    }

    /// All streams there ever were, oldest first.
    pub(super) fn indices(&self) -> impl Iterator<Item = StreamIndex> + use<> {
        (0..self.streams.len()).map(StreamIndex)
    }

    /// The stream that `handle` names on `device`, made if there is none yet.
    ///
    /// A default handle names one stream for each device, handle 2 one for each thread too. Any other names one
    /// stream, alive or destroyed, whatever its device.
    pub(super) fn find_or_create(&mut self, handle: StreamHandle, device: DeviceId) -> StreamIndex {
        let fresh = StreamIndex(self.streams.len());
        let index = match handle {
            StreamHandle::DEFAULT | StreamHandle::LEGACY => *self.legacy.entry(device).or_insert(fresh),
            StreamHandle::PER_THREAD => *self.per_thread.entry((device, std::thread::current().id())).or_insert(fresh),
            handle => *self.named.entry(handle).or_insert(fresh),
        };
        if index == fresh {
            self.streams.push(StreamState {
                stream: Stream { device, handle },
                alive: true,
                queue: VecDeque::new(),
                queued: 0,
                ended: 0,
                ends_at_ns: 0,
                clock: VectorClock::default(),
            });
        }
        index
    }

    /// Destroys a stream: its work goes on, its handle is free for another stream.
    pub(super) fn destroy(&mut self, index: StreamIndex) {
        self.streams[index.0].alive = false;
    }

    /// Makes the handle of a destroyed stream name no stream.
    pub(super) fn forget_name(&mut self, handle: StreamHandle) {
        self.named.remove(&handle);
    }

    /// Counts a launch on `stream` by the host, which happens after all that the host has seen; returns its number.
    pub(super) fn tick(&mut self, stream: StreamIndex) -> u64 {
        let state = &mut self.streams[stream.0];
        state.clock.join(&self.host);
        state.clock.tick(stream)
    }

    /// Queues a kernel that takes `duration_ns` once it starts.
    pub(super) fn queue_kernel(&mut self, stream: StreamIndex, kernel: Kernel, duration_ns: u64) {
        // Even an empty kernel is not over at the moment it is queued.
        let ends_at_ns = self.end_of(stream, duration_ns.max(1));
        self.push(stream, ends_at_ns, Task::Kernel(kernel));
    }

    /// Marks the present end of a stream's queue.
    pub(super) fn mark(&mut self, stream: StreamIndex) -> Mark {
        if self.lag_ns.is_some() {
            let ends_at_ns = self.end_of(stream, 0);
            self.push(stream, ends_at_ns, Task::Lag);
        }
        let state = &self.streams[stream.0];
        Mark { stream, position: state.queued, ends_at_ns: state.ends_at_ns, clock: state.clock.clone() }
    }

    /// Whether all work before a mark has ended.
    pub(super) fn is_reached(&self, mark: &Mark) -> bool {
        self.streams[mark.stream.0].ended >= mark.position
    }

    /// Makes what `stream` gets from now on wait for a mark.
    pub(super) fn wait(&mut self, stream: StreamIndex, mark: &Mark) {
        self.streams[stream.0].clock.join(&mark.clock);
        if mark.stream != stream && !self.is_reached(mark) {
            let ends_at_ns = self.streams[stream.0].ends_at_ns.max(mark.ends_at_ns);
            self.push(stream, ends_at_ns, Task::Wait { stream: mark.stream, position: mark.position });
        }
    }

    /// Moves the clock on to `time_ns`, if that is later than now, and returns the kernels that ended meanwhile.
    pub(super) fn advance_to(&mut self, time_ns: u64) -> Vec<Ended> {
        self.now_ns = self.now_ns.max(time_ns);
        let mut ended = Vec::new();
        for index in self.indices() {
            while self.streams[index.0].queue.front().is_some_and(|queued| queued.ends_at_ns <= self.now_ns) {
                ended.extend(self.end_first(index));
            }
        }
        ended
    }

    /// Ends all that is queued on `stream`, and what it waits for, at once; returns the kernels among it.
    ///
    /// What other streams have queued beyond that stays as it is.
    pub(super) fn finish(&mut self, stream: StreamIndex) -> Vec<Ended> {
        let mut ended = Vec::new();
        // Work waits only for what was queued before it, so the chain of waits is finite and has no loop.
        let mut goals = vec![(stream, self.streams[stream.0].queued)];
        while let Some(&(stream, position)) = goals.last() {
            match self.streams[stream.0].queue.front() {
                Some(first) if first.position <= position => {
                    if let Task::Wait { stream: awaited, position } = first.task
                        && self.streams[awaited.0].ended < position
                    {
                        goals.push((awaited, position));
                    } else {
                        ended.extend(self.end_first(stream));
                    }
                }
                _ => {
                    goals.pop();
                }
            }
        }
        ended
    }

    /// When the last work queued on any of `device`'s streams ends.
    pub(super) fn device_ends_at_ns(&self, device: DeviceId) -> u64 {
        let of_device = self.streams.iter().filter(|state| state.stream.device == device && !state.queue.is_empty());
        of_device.map(|state| state.ends_at_ns).max().unwrap_or(0)
    }

    /// Joins what all work queued on `device` so far has done into what the host has seen.
    pub(super) fn see_device(&mut self, device: DeviceId) {
        for state in self.streams.iter().filter(|state| state.stream.device == device) {
            self.host.join(&state.clock);
        }
    }

    /// Notes in queued kernels that `size` bytes at `address` have been unmapped under them.
    pub(super) fn on_unmap(&mut self, address: u64, size: u64) {
        let unmapped = address..address + size;
        for queued in self.streams.iter_mut().flat_map(|state| state.queue.iter_mut()) {
            if let Task::Kernel(kernel) = &mut queued.task
                && kernel.unmapped.is_none()
                && let Some(access) = kernel.accesses.iter().find(|access| access.overlaps(&unmapped))
            {
                kernel.unmapped = Some(access.address.max(address));
            }
        }
    }

    fn end_of(&self, stream: StreamIndex, duration_ns: u64) -> u64 {
        let stream_ends_at_ns = self.streams[stream.0].ends_at_ns;
        match self.lag_ns {
            Some(lag_ns) => stream_ends_at_ns.max(self.now_ns + lag_ns),
            None => stream_ends_at_ns.max(self.now_ns).saturating_add(duration_ns),
        }
    }

    fn push(&mut self, stream: StreamIndex, ends_at_ns: u64, task: Task) {
        let state = &mut self.streams[stream.0];
        state.queued += 1;
        state.ends_at_ns = ends_at_ns;
        state.queue.push_back(Queued { position: state.queued, ends_at_ns, task });
    }

    /// Ends the first work of a stream's queue.
    fn end_first(&mut self, stream: StreamIndex) -> Option<Ended> {
        let now_ns = self.now_ns;
        let state = &mut self.streams[stream.0];
        let queued = state.queue.pop_front()?;
        state.ended = queued.position;
        if state.queue.is_empty() {
            state.ends_at_ns = state.ends_at_ns.min(now_ns);
        }
        match queued.task {
            Task::Kernel(kernel) => Some(Ended { stream, kernel }),
            Task::Wait { .. } | Task::Lag => None,
        }
    }
}
