//! The state behind a simulated driver, and the rules that concern several of its parts at once.

use std::collections::{BTreeSet, HashMap};
use std::thread::ThreadId;

use super::SimOptions;
use super::access::Access;
use super::capture::{Captured, Captures, GraphId};
use super::clock::StreamIndex;
use super::cost::Ledger;
use super::error::{SimError, UnmappedAccessError, Violation, Work};
use super::event::Events;
use super::faults::Faults;
use super::memory::Memory;
use super::oracle::{Launch, Oracle, used_by};
use super::timeline::{Ended, Kernel, Timeline};
use crate::driver::{Call, CaptureMode, Status};
use crate::id::{DeviceId, DevicePtr, Stream, StreamHandle};

/// Whether the driver answers in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Running,
    /// As in the child of a fork.
    Forked,
    /// As at process exit.
    ShutDown,
}

/// One device's context.
#[derive(Clone, Debug, Default)]
pub(super) struct Context {
    /// Whether somebody made it.
    pub(super) is_active: bool,
    /// Whether an illegal access has destroyed it.
    pub(super) is_lost: bool,
}

/// What CUDA keeps for each thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct ThreadState {
    pub(super) device: Option<DeviceId>,
    pub(super) capture_mode: CaptureMode,
}

/// Everything that one simulated driver knows.
#[derive(Debug)]
pub(super) struct Simulation {
    pub(super) options: SimOptions,
    pub(super) life: Life,
    pub(super) contexts: Vec<Context>,
    threads: HashMap<ThreadId, ThreadState>,
    pub(super) memory: Memory,
    pub(super) timeline: Timeline,
    pub(super) events: Events,
    pub(super) captures: Captures,
    pub(super) oracle: Oracle,
    pub(super) faults: Faults,
    pub(super) ledger: Ledger,
    launches: u64,
    /// The streams that `wait_event` made another one wait for.
    pub(super) awaited: BTreeSet<Stream>,
    /// The first thing that went wrong outside a call of the program, for as long as the simulation lives.
    pub(super) first_failure: Option<SimError>,
    /// Such a thing that no call of the program has returned yet.
    pub(super) unreported: Option<SimError>,
}

impl Simulation {
    pub(super) fn new(options: SimOptions) -> Self {
        let lag_ns = options.lag_us.map(|lag_us| lag_us * super::cost::NANOSECONDS_PER_MICROSECOND);
        Self {
            life: Life::Running,
            contexts: vec![Context::default(); options.devices as usize],
            threads: HashMap::new(),
            memory: Memory::new(&options),
            timeline: Timeline::new(lag_ns),
            events: Events::default(),
            captures: Captures::default(),
            oracle: Oracle::default(),
            faults: Faults::default(),
            ledger: Ledger::new(),
            launches: 0,
            awaited: BTreeSet::new(),
            first_failure: None,
            unreported: None,
            options,
        }
    }

    /// The calling thread's state. A thread has no device until it sets one, and starts in global capture mode.
    pub(super) fn thread(&mut self) -> &mut ThreadState {
        let fresh = ThreadState { device: None, capture_mode: CaptureMode::Global };
        self.threads.entry(std::thread::current().id()).or_insert(fresh)
    }

    /// The device that a new stream of the calling thread belongs to: device 0 before the thread has set one.
    pub(super) fn current_device(&mut self) -> DeviceId {
        self.thread().device.unwrap_or_default()
    }

    /// The stream of that device that a driver call names.
    pub(super) fn live_stream(&mut self, call: Call, stream: Stream) -> Result<StreamIndex, Status> {
        let device = if stream.handle.is_default() { stream.device } else { self.current_device() };
        let index = self.live_handle(call, stream.handle, device)?;
        let is_of_device = self.timeline.stream(index).stream.device == stream.device;
        if is_of_device { Ok(index) } else { Err(Status::InvalidHandle) }
    }

    /// The stream that a driver call names by its handle; one that has to be made belongs to `device`. The handle of a
    /// destroyed stream would crash a real driver: the call fails, and its caller has broken a rule.
    pub(super) fn live_handle(
        &mut self,
        call: Call,
        handle: StreamHandle,
        device: DeviceId,
    ) -> Result<StreamIndex, Status> {
        let index = self.timeline.find_or_create(handle, device);
        let state = self.timeline.stream(index);
        if state.alive {
            return Ok(index);
        }
        let violation = Violation::DeadStream { call, stream: state.stream };
        self.report(Box::new(violation).into());
        Err(Status::InvalidHandle)
    }

    /// The stream that a call of the program uses. A destroyed stream's handle now names a new stream.
    pub(super) fn program_stream(&mut self, handle: StreamHandle) -> StreamIndex {
        let device = self.current_device();
        let index = self.timeline.find_or_create(handle, device);
        if self.timeline.stream(index).alive {
            return index;
        }
        self.timeline.forget_name(handle);
        self.timeline.find_or_create(handle, device)
    }

    /// Refuses a call that the calling thread may not make because of a capture, and spoils that capture.
    pub(super) fn refuse_unsafe(&mut self) -> Result<(), Status> {
        let mode = self.thread().capture_mode;
        self.captures.refuse_unsafe(mode)
    }

    /// The number of a new launch, in the order of launches.
    pub(super) fn next_launch(&mut self) -> u64 {
        self.launches += 1;
        self.launches
    }

    /// Judges a launch outside any capture and queues it.
    pub(super) fn launch(
        &mut self,
        stream: StreamIndex,
        work: Work,
        accesses: Vec<Access>,
        duration_ns: u64,
    ) -> Result<(), SimError> {
        let epoch = self.timeline.tick(stream);
        let clock = self.timeline.stream(stream).clock.clone();
        let launch = Launch { stream, epoch, clock: &clock, work };
        if let Work::Replay { .. } = work {
            for access in &accesses {
                self.oracle.judge_replay(&self.memory, &self.timeline, launch, access)?;
            }
        }
        self.oracle.on_launch(&self.memory, &self.timeline, launch, &accesses)?;
        self.timeline.queue_kernel(stream, Kernel { work, accesses, unmapped: None }, duration_ns);
        Ok(())
    }

    /// Judges a replay of `graph` outside any capture and queues it.
    pub(super) fn replay(
        &mut self,
        graph: GraphId,
        stream: StreamIndex,
        work: Work,
        captured: Captured,
    ) -> Result<(), SimError> {
        if let Some(last) = self.captures.last_replay(graph) {
            self.timeline.wait(stream, last);
        }
        self.launch(stream, work, captured.accesses, captured.duration_ns)?;
        let end = self.timeline.mark(stream);
        self.captures.on_replayed(graph, end);
        Ok(())
    }

    /// Judges a launch on a stream that is capturing, and adds it to the capture.
    pub(super) fn capture(
        &mut self,
        stream: StreamIndex,
        work: Work,
        accesses: &[Access],
        duration_ns: u64,
    ) -> Result<(), SimError> {
        let Ok(Some(capture)) = self.captures.active(stream) else { return Ok(()) };
        let (epoch, clock) = capture.tick(stream);
        let launch = Launch { stream, epoch, clock: &clock, work };
        for access in accesses {
            self.oracle.judge(&capture.shadow, &self.memory, &self.timeline, launch, access)?;
        }
        for access in accesses {
            if let Some(used) = used_by(launch, access) {
                let pieces = self.memory.backing(access.address, access.size);
                capture.shadow.add(&pieces, used, &clock);
            }
        }
        capture.captured.accesses.extend_from_slice(accesses);
        capture.captured.duration_ns = capture.captured.duration_ns.saturating_add(duration_ns);
        Ok(())
    }

    /// Moves the clock on to `time_ns`; work that ends until then runs.
    pub(super) fn advance_to(&mut self, time_ns: u64) {
        let ended = self.timeline.advance_to(time_ns);
        self.run(ended);
    }

    /// Ends what is queued on `stream` and what it waits for, without moving the clock.
    pub(super) fn finish(&mut self, stream: StreamIndex) {
        let ended = self.timeline.finish(stream);
        self.run(ended);
    }

    /// Lets the host wait until `time_ns`, if that is later than now.
    pub(super) fn host_wait(&mut self, time_ns: u64) {
        let now_ns = self.timeline.now_ns();
        if time_ns > now_ns {
            self.ledger.on_host_wait(time_ns - now_ns);
            self.advance_to(time_ns);
        }
    }

    /// Judges the unmapping or freeing of `size` bytes at `address`.
    pub(super) fn on_unmap(&mut self, address: u64, size: u64) {
        self.timeline.on_unmap(address, size);
        if let Err(failure) = self.oracle.on_unmap(&self.timeline, address, size) {
            self.report(failure);
        }
    }

    /// Makes the oracle forget memory that has gone back to its device.
    pub(super) fn forget_gone(&mut self) {
        for physical in self.memory.take_gone() {
            self.oracle.forget(physical);
        }
    }

    /// Notes something that went wrong outside a call of the program.
    pub(super) fn report(&mut self, failure: SimError) {
        self.first_failure.get_or_insert_with(|| failure.clone());
        self.unreported.get_or_insert(failure);
    }

    /// What is left on the devices.
    pub(super) fn leak(&self) -> Option<Violation> {
        let [segments, ranges, handles, mappings] = self.memory.counts();
        let events = self.events.live();
        let is_empty = segments + ranges + handles + mappings + events == 0;
        (!is_empty).then_some(Violation::Leak { segments, handles, mappings, ranges, events })
    }

    /// Runs kernels that have just ended: they touch memory as it is mapped now.
    fn run(&mut self, ended: Vec<Ended>) {
        for Ended { stream, kernel } in ended {
            let device = self.timeline.stream(stream).stream.device;
            let touched = kernel.accesses.iter().find_map(|access| {
                let address = match kernel.unmapped {
                    Some(address) if access.overlaps(&(address..address + 1)) => Some(address),
                    _ => self.memory.first_inaccessible(device, access.address, access.size),
                };
                address.map(|address| (address, access.allocation))
            });
            if let Some((address, allocation)) = touched
                && !self.contexts[device.index()].is_lost
            {
                self.contexts[device.index()].is_lost = true;
                // A fault says more than the early unmap that led to it.
                self.unreported = None;
                self.report(SimError::UnmappedAccess(Box::new(UnmappedAccessError {
                    address: DevicePtr(address),
                    allocation: allocation.map(|allocation| self.oracle.info(allocation)),
                    work: kernel.work,
                    stream: self.timeline.stream(stream).stream,
                })));
            }
        }
    }
}
