//! The program's side of the simulated GPU: what a test does that a training script would do.

#![expect(clippy::missing_errors_doc, reason = "any of these calls may return what work that ran meanwhile did wrong")]

use super::SimDriver;
use super::access::Access;
use super::capture::GraphId;
use super::clock::StreamIndex;
use super::cost::NANOSECONDS_PER_MICROSECOND;
use super::error::{AccessKind, SimError, UseAfterFreeError, UseInfo, Work};
use super::simulation::{Life, Simulation};
use crate::driver::{CaptureMode, CaptureStatus, Status};
use crate::id::{DeviceId, DevicePtr, PoolId, Stream, StreamHandle};

type Result<T> = std::result::Result<T, SimError>;

/// CUDA's names of the calls that a program makes itself.
const LAUNCH: &str = "cuLaunchKernel";
const WAIT: &str = "cuStreamWaitEvent";
const BEGIN_CAPTURE: &str = "cuStreamBeginCapture";
const END_CAPTURE: &str = "cuStreamEndCapture";
const REPLAY: &str = "cuGraphLaunch";
const DESTROY_GRAPH: &str = "cuGraphExecDestroy";
const DESTROY_STREAM: &str = "cuStreamDestroy";
const SET_DEVICE: &str = "cuCtxSetCurrent";

/// Streams and kernels.
///
/// A stream is made by the first call that names it and belongs to the device that is current then; handles 0 and 1
/// name one stream on each device, handle 2 another one for each thread. No stream waits for another by itself. The
/// handle of a destroyed stream names a new stream from the next of these calls on.
///
/// Every method also returns what went wrong since the last one: a kernel that touched unmapped memory, a violation.
impl SimDriver {
    /// Queues a kernel on `stream` that reads and writes whole allocations and takes `duration_us`. No time passes.
    ///
    /// Each address may lie anywhere in its allocation. On a stream that is capturing, the kernel is captured.
    ///
    /// # Errors
    /// [`SimError::UseAfterFree`] and [`SimError::Race`]: the kernel was not queued.
    pub fn launch(
        &self,
        stream: StreamHandle,
        reads: &[DevicePtr],
        writes: &[DevicePtr],
        duration_us: u64,
    ) -> Result<()> {
        self.program(LAUNCH, |simulation| {
            let stream = simulation.program_stream(stream);
            require_context(simulation, stream, LAUNCH)?;
            let number = simulation.next_launch();
            let is_capturing = is_capturing(simulation, stream, LAUNCH)?;
            let work = if is_capturing { Work::CapturedKernel(number) } else { Work::Kernel(number) };
            let accesses = resolve(simulation, stream, work, reads, writes)?;
            let kernel_ns = duration_us.saturating_mul(NANOSECONDS_PER_MICROSECOND);
            if is_capturing {
                simulation.capture(stream, work, &accesses, kernel_ns)
            } else {
                simulation.launch(stream, work, accesses, kernel_ns)
            }
        })
    }

    /// Makes what `stream` gets from now on wait for what is queued on `on` now, as an event record and a stream wait do.
    ///
    /// If `on` is capturing, `stream` joins the capture.
    ///
    /// # Errors
    /// [`SimError::Refused`] if `stream` is capturing and `on` is not, or another capture; both captures are spoiled.
    pub fn wait(&self, stream: StreamHandle, on: StreamHandle) -> Result<()> {
        self.program(WAIT, |simulation| {
            let awaited = simulation.program_stream(on);
            let waiting = simulation.program_stream(stream);
            require_context(simulation, waiting, WAIT)?;
            require_context(simulation, awaited, WAIT)?;
            if simulation.captures.of(waiting).is_some() || simulation.captures.of(awaited).is_some() {
                return simulation.captures.wait(waiting, awaited).map_err(refused(WAIT));
            }
            let mark = simulation.timeline.mark(awaited);
            simulation.timeline.wait(waiting, &mark);
            Ok(())
        })
    }

    /// Ends all that is queued on `stream`, or on every stream, and what that waits for. The clock stays.
    ///
    /// A destroyed stream that still has work can be named as long as its handle names no new stream.
    /// The host learns nothing from it: the allocator still has to ask.
    pub fn complete(&self, stream: Option<StreamHandle>) -> Result<()> {
        self.program(WAIT, |simulation| {
            match stream {
                Some(handle) => {
                    let device = simulation.current_device();
                    let stream = simulation.timeline.find_or_create(handle, device);
                    simulation.finish(stream);
                }
                None => simulation.timeline.indices().for_each(|stream| simulation.finish(stream)),
            }
            Ok(())
        })
    }

    /// Ends everything, as [`complete`](Self::complete), and lets the host see it: the program synchronises all devices.
    pub fn synchronize(&self) -> Result<()> {
        self.complete(None)?;
        let mut simulation = self.lock();
        for device in (0..simulation.options.devices).map(DeviceId) {
            simulation.timeline.see_device(device);
        }
        Ok(())
    }

    /// Lets `duration_us` pass.
    pub fn advance(&self, duration_us: u64) -> Result<()> {
        self.program(WAIT, |simulation| {
            let now_ns = simulation.timeline.now_ns();
            simulation.advance_to(now_ns.saturating_add(duration_us.saturating_mul(NANOSECONDS_PER_MICROSECOND)));
            Ok(())
        })
    }

    /// Lets time pass until `time_us`, if that is later than now.
    pub fn advance_to(&self, time_us: u64) -> Result<()> {
        self.program(WAIT, |simulation| {
            simulation.advance_to(time_us.saturating_mul(NANOSECONDS_PER_MICROSECOND));
            Ok(())
        })
    }

    /// The simulator's clock. Moved by [`advance`](Self::advance) and by waits of the host, by nothing else.
    pub fn now_us(&self) -> u64 {
        self.lock().timeline.now_ns() / NANOSECONDS_PER_MICROSECOND
    }

    /// Makes sure that `stream` is a live stream, a new one if it was destroyed: for a program that is about to use it.
    pub fn open_stream(&self, stream: StreamHandle) -> Result<()> {
        self.note(|simulation| {
            simulation.program_stream(stream);
            Ok(())
        })
    }

    /// Makes sure that `stream` exists, unless it was destroyed: for calls that only name it.
    pub fn touch_stream(&self, stream: StreamHandle) -> Result<()> {
        self.note(|simulation| {
            let device = simulation.current_device();
            simulation.timeline.find_or_create(stream, device);
            Ok(())
        })
    }

    /// Destroys a stream. Its work goes on; its capture is spoiled.
    ///
    /// From now on until the handle names a new stream, a driver call that is given it is a
    /// [`DeadStream`](super::Violation::DeadStream).
    pub fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        self.program(DESTROY_STREAM, |simulation| {
            let device = simulation.current_device();
            let index = simulation.timeline.find_or_create(stream, device);
            if stream.is_default() || !simulation.timeline.stream(index).alive {
                return Err(refused(DESTROY_STREAM)(Status::InvalidHandle));
            }
            if let Some(capture) = simulation.captures.of(index) {
                simulation.captures.spoil(capture);
            }
            simulation.timeline.destroy(index);
            Ok(())
        })
    }

    /// The device that `stream` belongs to, or would belong to if it were used now. Not a call of the driver.
    pub fn device_of(&self, stream: StreamHandle) -> DeviceId {
        let mut simulation = self.lock();
        let device = simulation.current_device();
        let index = simulation.timeline.find_or_create(stream, device);
        simulation.timeline.stream(index).stream.device
    }

    /// Makes `device` the calling thread's current one, and its context active.
    pub fn set_current_device(&self, device: DeviceId) -> Result<()> {
        self.program(SET_DEVICE, |simulation| {
            let context = simulation.contexts.get_mut(device.index());
            context.ok_or(Status::InvalidDevice).map_err(refused(SET_DEVICE))?.is_active = true;
            simulation.thread().device = Some(device);
            Ok(())
        })
    }
}

/// Captures and graphs. What a private pool does with them is the allocator's business.
impl SimDriver {
    /// Starts to capture what `stream` gets, in the calling thread.
    ///
    /// # Errors
    /// [`SimError::Refused`] on the legacy default stream and on a stream that is capturing.
    pub fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> Result<()> {
        self.program(BEGIN_CAPTURE, |simulation| {
            if matches!(stream, StreamHandle::DEFAULT | StreamHandle::LEGACY) {
                return Err(refused(BEGIN_CAPTURE)(Status::CaptureUnsupported));
            }
            let stream = simulation.program_stream(stream);
            require_context(simulation, stream, BEGIN_CAPTURE)?;
            simulation.captures.begin(stream, mode).map_err(refused(BEGIN_CAPTURE))
        })
    }

    /// Ends the capture that began on `stream`.
    ///
    /// # Errors
    /// [`SimError::Refused`] if the capture was spoiled, or a stream that joined it was not waited for. It is over.
    pub fn end_capture(&self, stream: StreamHandle) -> Result<GraphId> {
        self.program(END_CAPTURE, |simulation| {
            let stream = simulation.program_stream(stream);
            simulation.captures.end(stream).map_err(refused(END_CAPTURE))
        })
    }

    /// Gives up the capture that `stream` takes part in, spoiled or not.
    pub fn abort_capture(&self, stream: StreamHandle) -> Result<()> {
        self.program(END_CAPTURE, |simulation| {
            let stream = simulation.program_stream(stream);
            simulation.captures.abort(stream).map_err(refused(END_CAPTURE))
        })
    }

    /// Whether two streams take part in the same capture.
    pub fn are_captured_together(&self, first: StreamHandle, second: StreamHandle) -> bool {
        let mut simulation = self.lock();
        let device = simulation.current_device();
        let [first, second] = [first, second].map(|stream| simulation.timeline.find_or_create(stream, device));
        let capture = simulation.captures.of(first);
        capture.is_some() && capture == simulation.captures.of(second)
    }

    /// Gives up all captures and destroys all graphs.
    pub fn drop_graphs(&self) {
        self.lock().captures.clear();
    }

    /// Queues all that `graph` captured on `stream`, as one launch, which starts after the graph's last replay has ended.
    ///
    /// # Errors
    /// As [`launch`](Self::launch); also [`GraphMemoryHandedOut`](super::Violation::GraphMemoryHandedOut).
    pub fn replay(&self, graph: GraphId, stream: StreamHandle) -> Result<()> {
        self.program(REPLAY, |simulation| {
            let stream = simulation.program_stream(stream);
            require_context(simulation, stream, REPLAY)?;
            let captured = simulation.captures.graph(graph).map_err(refused(REPLAY))?.clone();
            let work = Work::Replay { graph: graph.0, launch: simulation.next_launch() };
            if is_capturing(simulation, stream, REPLAY)? {
                simulation.capture(stream, work, &captured.accesses, captured.duration_ns)
            } else {
                simulation.replay(graph, stream, work, captured)
            }
        })
    }

    /// Destroys a graph. Replays that are queued still run.
    pub fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        self.program(DESTROY_GRAPH, |simulation| {
            simulation.captures.destroy_graph(graph).map_err(refused(DESTROY_GRAPH))
        })
    }
}

/// What the program tells the race oracle of its allocations.
impl SimDriver {
    /// The program got `size` bytes at `address`, on `stream`, from private pool `pool` or the default one.
    ///
    /// # Errors
    /// [`SimError::Violation`] if a live allocation has some of these bytes, or no memory is behind them.
    pub fn allocated(&self, address: DevicePtr, size: u64, stream: Stream, pool: Option<PoolId>) -> Result<()> {
        self.note(|simulation| {
            let Simulation { oracle, memory, .. } = simulation;
            Ok(oracle.on_allocated(memory, address.0, size, stream, pool)?)
        })
    }

    /// The program frees the allocation that starts at `address`; returns whether there is one.
    pub fn freed(&self, address: DevicePtr) -> Result<bool> {
        self.note(|simulation| Ok(simulation.oracle.on_freed(address.0)))
    }

    /// Whether `address` lies in an allocation, live or freed.
    pub fn is_known(&self, address: DevicePtr) -> bool {
        let resolved = self.lock().oracle.resolve(address.0, AccessKind::Read);
        resolved.map_or(true, |access| access.allocation.is_some())
    }

    /// Where the program's live allocations start, and the device of each.
    pub fn live_allocations(&self) -> Vec<(DevicePtr, DeviceId)> {
        self.lock().oracle.live_allocations()
    }

    /// Private pool `pool` was begun once more. A graph may go on using what is freed in it until it is released.
    pub fn pool_begun(&self, device: DeviceId, pool: PoolId) {
        self.lock().oracle.on_pool_begun(device, pool);
    }

    /// Private pool `pool` was released once more; as often as it was begun, and no graph may use its memory again.
    pub fn pool_released(&self, device: DeviceId, pool: PoolId) {
        self.lock().oracle.on_pool_released(device, pool);
    }

    /// The private pools that were begun more often than released, and by how much.
    pub fn held_pools(&self) -> Vec<(DeviceId, PoolId, u32)> {
        self.lock().oracle.held_pools()
    }
}

impl SimDriver {
    /// One call of the program, refused if the driver is gone; it returns what went wrong before or during it.
    fn program<T>(&self, operation: &'static str, body: impl FnOnce(&mut Simulation) -> Result<T>) -> Result<T> {
        self.note(|simulation| match simulation.life {
            Life::Running => body(simulation),
            Life::Forked => Err(refused(operation)(Status::NotInitialized)),
            Life::ShutDown => Err(refused(operation)(Status::Deinitialized)),
        })
    }

    /// Bookkeeping that makes no call of the driver, which therefore need not be there.
    pub(super) fn note<T>(&self, body: impl FnOnce(&mut Simulation) -> Result<T>) -> Result<T> {
        let mut simulation = self.lock();
        let outcome = body(&mut simulation);
        match simulation.unreported.take() {
            Some(failure) => Err(failure),
            None => outcome,
        }
    }
}

fn refused(operation: &'static str) -> impl Fn(Status) -> SimError {
    move |status| SimError::Refused { operation, status }
}

fn require_context(simulation: &mut Simulation, stream: StreamIndex, operation: &'static str) -> Result<()> {
    let device = simulation.timeline.stream(stream).stream.device;
    let context = &mut simulation.contexts[device.index()];
    context.is_active = true;
    if context.is_lost { Err(refused(operation)(Status::IllegalAddress)) } else { Ok(()) }
}

fn is_capturing(simulation: &Simulation, stream: StreamIndex, operation: &'static str) -> Result<bool> {
    match simulation.captures.status(stream) {
        CaptureStatus::None => Ok(false),
        CaptureStatus::Active => Ok(true),
        CaptureStatus::Invalidated => Err(refused(operation)(Status::CaptureInvalidated)),
    }
}

/// What a kernel touches.
fn resolve(
    simulation: &Simulation,
    stream: StreamIndex,
    work: Work,
    reads: &[DevicePtr],
    writes: &[DevicePtr],
) -> Result<Vec<Access>> {
    let reads = reads.iter().map(|&address| (address, AccessKind::Read));
    let writes = writes.iter().map(|&address| (address, AccessKind::Write));
    let accesses = reads.chain(writes).map(|(address, access)| {
        simulation.oracle.resolve(address.0, access).map_err(|freed| {
            let stream = simulation.timeline.stream(stream).stream;
            let used = UseInfo { allocation: simulation.oracle.info(freed), stream, work, access };
            Box::new(UseAfterFreeError(used)).into()
        })
    });
    accesses.collect()
}
