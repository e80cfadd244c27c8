//! Streams, their epochs, and the events that prove an epoch over.
//!
//! Each stream counts *epochs*. What the program frees belongs to the open epoch. Closing an epoch records one event,
//! which comes after all work that the stream was given before, so that one event answers for any number of frees.
//! Epochs end in order: once the event of epoch 5 is done, epochs 1 to 5 are over, whether they had events or not.
//!
//! Each stream has its own queue of closed epochs and of blocks that wait for one, so a slow stream never holds up the
//! blocks of another. This module decides what to record, query or wait for; it calls no driver itself.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use crate::{
    block::BlockId,
    id::{DeviceId, Event, Stream, StreamHandle},
    last_use::Epoch,
    size::MIB,
};

/// An epoch is closed without being asked for once this many frees wait for it: an event then frees what is done soon,
/// not what was done when somebody ran out of memory.
const CLOSE_AFTER_FREES: u32 = 16;
/// The same, in bytes.
const CLOSE_AFTER_BYTES: u64 = MIB;
/// But never with more than this many events queued on the stream already.
const EVENTS_QUEUED_MAX: usize = 64;
/// Events of one stream that one poll asks about at most.
const QUERIES_PER_STREAM: usize = 8;

/// A stream's place in the [`StreamTable`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StreamIx(pub(crate) u32);

impl StreamIx {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// What makes two calls speak of one stream: the words in which they name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamKey {
    pub(crate) handle: StreamHandle,
    /// For the default streams, the device of the call, which is theirs too; for others the device of the state.
    pub(crate) device: DeviceId,
    /// The calling thread, for the per-thread default stream, else 0.
    pub(crate) thread: u64,
}

/// A stream as a driver call names it. What the per-thread default stream's handle names depends on the thread that calls,
/// so that no other thread than its own has a name for such a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Target {
    pub(crate) stream: Stream,
    /// The thread that can name it; 0 if all can.
    pub(crate) thread: u64,
}

/// One stream. At any moment `done ≤ recorded < open`.
#[derive(Debug)]
struct StreamState {
    key: StreamKey,
    /// The stream itself, with the device that it belongs to, which may be another one than the state's.
    target: Stream,
    /// Whether the program said that the stream is gone: no driver call may name it any more, and its handle may come
    /// back for another stream.
    retired: bool,
    /// The epoch that frees belong to now, unless the stream is retired.
    open: Epoch,
    /// The last epoch that an event, or a device synchronise, answers for.
    recorded: Epoch,
    /// The last epoch that is known to be over.
    done: Epoch,
    /// The last epoch of which it was found that no event can answer for it: a synchronise of the device has to, unless a
    /// later event can be recorded after all.
    refused: Epoch,
    /// Events of epochs not known to be over, oldest first.
    closed: VecDeque<(Epoch, Event)>,
    /// Blocks that wait for this stream, oldest epoch first.
    waiting: VecDeque<(Epoch, BlockId)>,
    /// Frees that wait for the open epoch.
    open_frees: u32,
    /// Their bytes.
    open_bytes: u64,
}

impl StreamState {
    /// The epoch that frees belong to now. A retired stream gets no more work, so all that it did lies in the epochs up
    /// to the one that was open last.
    fn current(&self) -> Epoch {
        if self.retired { self.open - 1 } else { self.open }
    }

    fn target(&self) -> Target {
        Target { stream: self.target, thread: self.key.thread }
    }

    /// Whether only a synchronise of the whole device can tell that the stream is over: it is retired and nothing could be
    /// recorded on it, or somebody asked for an event and none can be recorded.
    fn is_unanswered(&self) -> bool {
        self.recorded < self.refused || (self.retired && self.recorded < self.current())
    }
}

/// An epoch to be closed: record an event on `target`, unless that stream is capturing or another thread's own.
#[derive(Debug)]
pub(crate) struct Closing {
    pub(crate) stream: StreamIx,
    pub(crate) target: Target,
    pub(crate) epoch: Epoch,
    /// An event to use; `None` if one has to be created.
    pub(crate) event: Option<Event>,
}

/// What came of a [`Closing`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Closed {
    /// The event stands at the end of the stream's queue.
    Recorded(Event),
    /// Nothing was recorded, since the stream is capturing.
    Capturing,
    /// Nothing was recorded, since only the stream's own thread can: until it does, the device has to be synchronised.
    Elsewhere,
    /// Nothing was recorded, since the stream is gone: the device has to be synchronised.
    Gone,
    /// Nothing was recorded. A later event will answer for this epoch too.
    Failed,
}

/// A closed epoch and its event, to be asked about or waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) stream: StreamIx,
    pub(crate) device: DeviceId,
    pub(crate) epoch: Epoch,
    pub(crate) event: Event,
}

/// Marks that the driver was asked about or that were waited for.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// After a poll those that are reached, after a wait all that can be.
    pub(crate) marks: Vec<Mark>,
    /// Those that are no marks: a capture had begun on the stream just before the record, and has it.
    pub(crate) captured: Vec<Mark>,
}

/// All streams that a device's memory was used on, of other devices too.
#[derive(Debug, Default)]
pub(crate) struct StreamTable {
    streams: Vec<StreamState>,
    /// The stream of the last call, which is nearly always that of the next.
    recent: usize,
    /// What stands for every stream of which it could not be found out which one it is.
    unnamed: Option<StreamIx>,
    /// Events that nobody needs now, with the device whose context they live in.
    idle: Vec<(DeviceId, Event)>,
    /// Events that some thread waits for on the host: not to be recorded again before it is back.
    awaited: Vec<Awaited>,
}

#[derive(Debug)]
struct Awaited {
    event: Event,
    threads: u32,
    /// Whether the epoch is over, and only the waiting threads keep the event from being idle.
    retired: bool,
}

impl StreamTable {
    pub(crate) fn find(&mut self, key: StreamKey) -> Option<StreamIx> {
        let is_it = |state: &StreamState| state.key == key && !state.retired;
        if !self.streams.get(self.recent).is_some_and(is_it) {
            self.recent = self.streams.iter().position(is_it)?;
        }
        Some(StreamIx(self.recent as u32))
    }

    pub(crate) fn add(&mut self, key: StreamKey, target: Stream) -> StreamIx {
        self.streams.push(StreamState {
            key,
            target,
            retired: false,
            open: 1,
            recorded: 0,
            done: 0,
            refused: 0,
            closed: VecDeque::new(),
            waiting: VecDeque::new(),
            open_frees: 0,
            open_bytes: 0,
        });
        StreamIx(self.streams.len() as u32 - 1)
    }

    /// What stands for every stream of which it could not be found out which one it is. No driver call names it; only when
    /// all devices were synchronised is it over.
    pub(crate) fn unnamed(&mut self, device: DeviceId) -> StreamIx {
        // No call can mean it: threads are counted.
        let key = StreamKey { handle: StreamHandle(u64::MAX), device, thread: u64::MAX };
        let unnamed = self.unnamed.unwrap_or_else(|| self.add(key, Stream { device, handle: key.handle }));
        self.unnamed = Some(unnamed);
        unnamed
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = StreamIx> + use<> {
        (0..self.streams.len() as u32).map(StreamIx)
    }

    /// The streams of `devices` that a driver call may name.
    pub(crate) fn live_targets(&self, devices: &[DeviceId]) -> Vec<Target> {
        let is_unnamed = |stream: &StreamIx| self.unnamed == Some(*stream);
        let named = self.ids().filter(|stream| !is_unnamed(stream)).map(|stream| self.state(stream));
        let live = named.filter(|state| !state.retired && devices.contains(&state.target.device));
        live.map(StreamState::target).collect()
    }

    /// The stream itself.
    pub(crate) fn target(&self, stream: StreamIx) -> Stream {
        self.state(stream).target
    }

    /// The epoch that a free belongs to now.
    pub(crate) fn current_epoch(&self, stream: StreamIx) -> Epoch {
        self.state(stream).current()
    }

    pub(crate) fn is_done(&self, stream: StreamIx, epoch: Epoch) -> bool {
        epoch <= self.state(stream).done
    }

    /// Whether all work of `stream` is known to have ended, for good: it is retired.
    pub(crate) fn is_over(&self, stream: StreamIx) -> bool {
        let state = self.state(stream);
        state.retired && state.current() <= state.done
    }

    /// The program is about to destroy the stream. Its last epoch has to be closing: nothing else can be recorded on it.
    pub(crate) fn retire(&mut self, stream: StreamIx) {
        self.state_mut(stream).retired = true;
    }

    /// The devices of streams on which nothing can be recorded: only a synchronise of the whole device can tell that such a
    /// stream is over.
    pub(crate) fn unanswered_devices(&self) -> Vec<DeviceId> {
        let unanswered =
            self.ids().filter(|stream| self.unnamed != Some(*stream) && self.state(*stream).is_unanswered());
        let mut devices: Vec<DeviceId> = unanswered.map(|stream| self.target(stream).device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// Whether something waits for a stream of which it is not known which one it is.
    pub(crate) fn awaits_unnamed(&self) -> bool {
        self.unnamed.is_some_and(|stream| self.state(stream).is_unanswered())
    }

    /// Whether synchronises of all devices, or of these alone, answer for the stream.
    pub(crate) fn is_answered_by(&self, stream: StreamIx, are_all: bool, devices: &[DeviceId]) -> bool {
        if self.unnamed == Some(stream) { are_all } else { devices.contains(&self.target(stream).device) }
    }

    /// Lets a block of `size` bytes wait for `stream`'s current epoch. Returns whether that epoch should be closed now.
    pub(crate) fn wait_for_current(&mut self, stream: StreamIx, block: BlockId, size: u64) -> bool {
        let state = self.state_mut(stream);
        state.waiting.push_back((state.current(), block));
        state.open_frees += 1;
        state.open_bytes += size;
        let due = state.open_frees >= CLOSE_AFTER_FREES || state.open_bytes >= CLOSE_AFTER_BYTES;
        due && state.closed.len() < EVENTS_QUEUED_MAX
    }

    /// Blocks that wait for `stream`, with their epochs, oldest first.
    pub(crate) fn waiting(&self, stream: StreamIx) -> impl Iterator<Item = (Epoch, BlockId)> + '_ {
        self.state(stream).waiting.iter().copied()
    }

    /// The blocks that wait for `stream` and that no event answers for yet.
    pub(crate) fn unanswered(&self, stream: StreamIx) -> impl Iterator<Item = BlockId> + '_ {
        let state = self.state(stream);
        state.waiting.iter().rev().take_while(|(epoch, _)| *epoch > state.recorded).map(|(_, block)| *block)
    }

    /// The first mark that answers for `epoch`, if there is one.
    pub(crate) fn mark_for(&self, stream: StreamIx, epoch: Epoch) -> Option<Mark> {
        self.marks(stream).find(|mark| mark.epoch >= epoch)
    }

    /// A block waits for `stream` no longer.
    pub(crate) fn cancel_wait(&mut self, stream: StreamIx, block: BlockId) {
        self.state_mut(stream).waiting.retain(|(_, waiting)| *waiting != block);
    }

    /// A block waits for `stream` after all, for an epoch that is not over.
    pub(crate) fn wait_again(&mut self, stream: StreamIx, epoch: Epoch, block: BlockId) {
        let waiting = &mut self.state_mut(stream).waiting;
        let position = waiting.partition_point(|(other, _)| *other <= epoch);
        waiting.insert(position, (epoch, block));
    }

    /// Starts to close the open epoch of `stream`, if no event answers for `epoch` yet. Nothing can be recorded on a
    /// retired stream, or on one without a name.
    pub(crate) fn begin_close(&mut self, stream: StreamIx, epoch: Epoch) -> Option<Closing> {
        let state = &mut self.streams[stream.index()];
        if epoch <= state.recorded || state.retired {
            return None;
        }
        if self.unnamed == Some(stream) {
            state.refused = state.refused.max(epoch);
            return None;
        }
        let closing = state.open;
        state.open += 1;
        state.open_frees = 0;
        state.open_bytes = 0;
        let target = state.target();
        let idle = self.idle.iter().rposition(|(device, _)| *device == target.stream.device);
        let event = idle.map(|position| self.idle.swap_remove(position).1);
        Some(Closing { stream, target, epoch: closing, event })
    }

    /// Takes note of what came of a closing. `spare` is an event that was not used.
    pub(crate) fn commit_close(&mut self, closing: &Closing, outcome: Closed, spare: Option<Event>) {
        if let Some(event) = spare {
            self.idle.push((closing.target.stream.device, event));
        }
        let state = self.state_mut(closing.stream);
        match outcome {
            // A device synchronise may have come between, which answered for this epoch first.
            Closed::Recorded(event) if closing.epoch <= state.done => {
                self.idle.push((closing.target.stream.device, event));
            }
            Closed::Recorded(event) => {
                state.recorded = state.recorded.max(closing.epoch);
                // Two threads may close two epochs at once, and the later one may come back first.
                let position = state.closed.partition_point(|(epoch, _)| *epoch < closing.epoch);
                state.closed.insert(position, (closing.epoch, event));
            }
            Closed::Elsewhere | Closed::Gone => state.refused = state.refused.max(closing.epoch),
            Closed::Capturing | Closed::Failed => {}
        }
    }

    /// The oldest marks of each stream, for a poll.
    pub(crate) fn oldest_marks(&self) -> Vec<Mark> {
        self.ids().flat_map(|stream| self.marks(stream).take(QUERIES_PER_STREAM)).collect()
    }

    /// The newest mark of each stream, for a wait; the threads that wait must say when they are back.
    pub(crate) fn await_newest_marks(&mut self) -> Vec<Mark> {
        let marks: Vec<Mark> = self.ids().filter_map(|stream| self.marks(stream).last()).collect();
        for mark in &marks {
            match self.awaited.iter_mut().find(|awaited| awaited.event == mark.event) {
                Some(awaited) => awaited.threads += 1,
                None => self.awaited.push(Awaited { event: mark.event, threads: 1, retired: false }),
            }
        }
        marks
    }

    /// A thread no longer waits for this mark.
    pub(crate) fn end_wait(&mut self, mark: &Mark) {
        let position = self.awaited.iter().position(|awaited| awaited.event == mark.event);
        let position = position.expect("a wait ends once");
        self.awaited[position].threads -= 1;
        if self.awaited[position].threads == 0 && self.awaited.swap_remove(position).retired {
            self.idle.push((mark.device, mark.event));
        }
    }

    /// All work of `stream` up to and including `epoch` is known to have ended.
    pub(crate) fn finish(&mut self, stream: StreamIx, epoch: Epoch) {
        let state = &mut self.streams[stream.index()];
        state.done = state.done.max(epoch);
        state.recorded = state.recorded.max(epoch);
        let device = state.target.device;
        while let Some((_, event)) = self.streams[stream.index()].closed.pop_front_if(|(closed, _)| *closed <= epoch) {
            self.recycle(device, event);
        }
    }

    /// The mark will never be reached: what it was to answer for is left to the next event.
    pub(crate) fn withdraw(&mut self, mark: &Mark) {
        let state = &mut self.streams[mark.stream.index()];
        // Another thread may have found that out first.
        let position = state.closed.iter().position(|closed| *closed == (mark.epoch, mark.event));
        let Some(position) = position else { return };
        state.closed.remove(position);
        state.recorded = state.closed.back().map_or(state.done, |(epoch, _)| *epoch);
        self.recycle(mark.device, mark.event);
    }

    /// An event that stands for no mark any more is idle once no thread waits for it.
    fn recycle(&mut self, device: DeviceId, event: Event) {
        match self.awaited.iter_mut().find(|awaited| awaited.event == event) {
            Some(awaited) => awaited.retired = true,
            None => self.idle.push((device, event)),
        }
    }

    /// Takes the next block whose wait for `stream` is over.
    pub(crate) fn next_released(&mut self, stream: StreamIx) -> Option<BlockId> {
        let state = self.state_mut(stream);
        let done = state.done;
        state.waiting.pop_front_if(|(epoch, _)| *epoch <= done).map(|(_, block)| block)
    }

    /// Starts a new epoch on every stream that may get more work, for a device synchronise: what it will prove.
    pub(crate) fn begin_synchronize(&mut self) -> Vec<(StreamIx, Epoch)> {
        self.ids()
            .map(|stream| {
                let state = self.state_mut(stream);
                if !state.retired {
                    state.open += 1;
                }
                (stream, state.open - 1)
            })
            .collect()
    }

    /// Takes all events that nobody needs, to be destroyed.
    pub(crate) fn take_idle_events(&mut self) -> Vec<(DeviceId, Event)> {
        std::mem::take(&mut self.idle)
    }

    /// Takes back events that could not be destroyed.
    pub(crate) fn put_idle_events(&mut self, events: Vec<(DeviceId, Event)>) {
        self.idle.extend(events);
    }

    fn marks(&self, stream: StreamIx) -> impl DoubleEndedIterator<Item = Mark> + '_ {
        let state = self.state(stream);
        let device = state.target.device;
        state.closed.iter().map(move |(epoch, event)| Mark { stream, device, epoch: *epoch, event: *event })
    }

    fn state(&self, stream: StreamIx) -> &StreamState {
        &self.streams[stream.index()]
    }

    fn state_mut(&mut self, stream: StreamIx) -> &mut StreamState {
        &mut self.streams[stream.index()]
    }

    /// The invariants that this module owns; the scan in [`check`](crate::check) calls it.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (index, state) in self.streams.iter().enumerate() {
            if !(state.done <= state.recorded && state.recorded < state.open) {
                return Err(format!(
                    "stream {index}: done {} recorded {} open {}",
                    state.done, state.recorded, state.open
                ));
            }
            if !state.closed.iter().is_sorted() || state.closed.front().is_some_and(|(epoch, _)| *epoch <= state.done) {
                return Err(format!("stream {index}: closed epochs out of order"));
            }
            if !state.waiting.iter().map(|(epoch, _)| epoch).is_sorted() {
                return Err(format!("stream {index}: waiting blocks out of order"));
            }
            if state.waiting.front().is_some_and(|(epoch, _)| *epoch <= state.done) {
                return Err(format!("stream {index}: a block waits for an epoch that is over"));
            }
        }
        Ok(())
    }
}
