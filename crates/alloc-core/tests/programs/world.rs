//! A program while it runs: the machine, the model, and what is checked after every operation.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use alloc_core::{
    driver::{Call, Status},
    error::AllocError,
    id::{DeviceId, DevicePtr, Stream, StreamHandle},
    simulated_gpu::{SimulatedGpu, SimulatedGpuError},
    snapshot::{PictureState, SegmentPicture},
    stats::Stats,
};

use crate::{
    coverage::Coverage,
    machine::Machine,
    model::{Capture, Graph, Held, Pool, ProgramStream, Route, Slot},
    operation::Operation,
    sources::ProgramSource,
};

/// Why a program failed its checks.
pub(crate) type Failure = String;

/// Whether an operation applied to what there was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Executed,
    Skipped,
}

/// What the out-of-memory callback may free: address and device.
pub(crate) type Hoard = Arc<Mutex<Vec<(DevicePtr, DeviceId)>>>;

pub(crate) const DEVICES: [DeviceId; 2] = [DeviceId(0), DeviceId(1)];

/// Four streams on the first device, of which one is its default stream and one the thread's, and three on the second.
const STREAMS: [(DeviceId, StreamHandle); 7] = [
    (DEVICES[0], StreamHandle::DEFAULT),
    (DEVICES[0], StreamHandle(0x10)),
    (DEVICES[0], StreamHandle(0x20)),
    (DEVICES[0], StreamHandle::PER_THREAD),
    (DEVICES[1], StreamHandle::DEFAULT),
    (DEVICES[1], StreamHandle(0x30)),
    (DEVICES[1], StreamHandle(0x40)),
];

/// See the [module](self).
pub(crate) struct World {
    pub(crate) machine: Machine,
    pub(crate) gpu: Arc<SimulatedGpu>,
    pub(crate) streams: Vec<ProgramStream>,
    pub(crate) held: Vec<Held>,
    pub(crate) pools: Vec<Pool>,
    pub(crate) sources: Vec<ProgramSource>,
    pub(crate) routes: Vec<Route>,
    pub(crate) captures: Vec<Capture>,
    pub(crate) graphs: Vec<Graph>,
    pub(crate) pins: Vec<DevicePtr>,
    pub(crate) hoard: Hoard,
    /// The streams that have asked for memory.
    pub(crate) owners: BTreeSet<Stream>,
    /// Numbers given to blocks and captures so far.
    pub(crate) last_number: u64,
    pub(crate) coverage: Coverage,
    /// Driver calls that were asked to fail.
    faults_asked: usize,
    /// Blocks on all devices after the last operation.
    blocks: usize,
    /// Driver calls until then that obtained or returned memory.
    growth: u64,
}

impl World {
    pub(crate) fn new(machine: &Machine) -> Self {
        let gpu = Arc::new(machine.start());
        let hoard = Hoard::default();
        let of_callback = (Arc::downgrade(&gpu), Arc::clone(&hoard));
        gpu.allocator().set_oom_callback(Some(Arc::new(move || {
            let (gpu, hoard) = &of_callback;
            let freed = hoard.lock().expect("one thread").pop();
            // What goes wrong is found by the check after the operation.
            freed.is_some_and(|(address, device)| gpu.upgrade().is_some_and(|gpu| gpu.free(address, device).is_ok()))
        })));
        let stream = |(device, handle)| ProgramStream { device, handle, generation: 0 };
        let mut world = Self {
            machine: machine.clone(),
            gpu,
            streams: STREAMS.into_iter().map(stream).collect(),
            held: Vec::new(),
            pools: Vec::new(),
            sources: Vec::new(),
            routes: Vec::new(),
            captures: Vec::new(),
            graphs: Vec::new(),
            pins: Vec::new(),
            hoard,
            owners: BTreeSet::new(),
            last_number: 0,
            coverage: Coverage::default(),
            faults_asked: 0,
            blocks: 0,
            growth: 0,
        };
        for slot in 0..world.streams.len() {
            let handle = world.enter(slot);
            world.gpu.driver().touch_stream(handle).expect("nothing has run yet");
        }
        if let Some((call, status)) = machine.early_fault {
            world.fail_next(call, status, 0);
        }
        world
    }

    /// Runs one operation and checks everything that holds at any time.
    pub(crate) fn step(&mut self, operation: &Operation) -> Result<Step, Failure> {
        let step = self.execute(operation)?;
        if step == Step::Executed {
            self.check()?;
        }
        Ok(step)
    }

    fn execute(&mut self, operation: &Operation) -> Result<Step, Failure> {
        use Operation as O;
        match *operation {
            O::Malloc { size, stream } => self.malloc(size, stream),
            O::Free { block, by } => self.free_picked(block, by),
            O::FreeBadly { block, how } => self.free_badly(block, how),
            O::Use { block, duration_us } => self.use_on_own(block, duration_us),
            O::Share { stream, read, write, duration_us } => self.share(stream, read, write, duration_us),
            O::HandOn { size, stream, to, blocks, duration_us } => self.hand_on(size, stream, to, blocks, duration_us),
            O::Record { block, stream } => self.record(block, stream),
            O::Wait { stream, on } => self.wait_picked(stream, on),
            O::Advance { duration_us } => self.gpu.advance(duration_us).map_err(text).map(|()| Step::Executed),
            O::Complete { stream } => self.complete(stream),
            O::Synchronize => self.synchronize(),
            O::EmptyCache => self.empty_cache(),
            O::SetFraction { device, percent } => self.set_fraction(device, percent),
            O::BeginCapture { stream, pool, mode } => self.begin_capture(stream, pool, mode),
            O::Join { capture, stream } => self.join(capture, stream),
            O::Spoil { capture, on } => self.spoil(capture, on),
            O::EndCapture { capture, how } => self.end_capture(capture, how),
            O::Replay { graph, stream } => self.replay(graph, stream),
            O::DestroyGraph { graph } => self.destroy_graph(graph),
            O::BeginPool { pool, stream } => self.begin_pool(pool, stream),
            O::EndPool { pool } => self.end_pool(pool),
            O::RestrictMoves { pool, moving } => self.restrict_moves(pool, moving),
            O::ReleasePool { pool } => self.release_pool(pool),
            O::BeginSourced { pool, stream } => self.begin_sourced(pool, stream),
            O::Mishap { source, what } => Ok(self.mishap(source, what)),
            O::Pin { block } => self.pin(block),
            O::Unpin { pin } => self.unpin(pin),
            O::DestroyStream { stream } => self.destroy_stream(stream),
            O::Hoard { size, stream } => self.hoard(size, stream),
            O::Fault { call, status, after } => {
                self.fail_next(call, status, after);
                // It is the calls that meet it that count.
                Ok(Step::Skipped)
            }
        }
    }

    /// Lets a driver call fail later on.
    pub(crate) fn fail_next(&mut self, call: Call, status: Status, after: u8) {
        self.faults_asked += 1;
        self.gpu.driver().fail_next(call, u64::from(after), status);
    }

    /// Lets the `nth` driver call of the program fail, whichever it is.
    pub(crate) fn fail_nth(&mut self, nth: u64) {
        self.faults_asked += 1;
        self.gpu.driver().fail_nth(nth);
    }

    /// How many of the driver calls that were asked to fail have failed.
    pub(crate) fn faults_hit(&self) -> usize {
        self.faults_asked - self.gpu.driver().pending_faults()
    }

    /// Everything that holds at any time: the allocator's own scan, the oracle's verdict, and the model's figures.
    fn check(&mut self) -> Result<(), Failure> {
        self.gpu.check().map_err(text)?;
        let snapshot = self.gpu.allocator().snapshot();
        for device in DEVICES {
            self.compare_figures(device, &self.gpu.allocator().stats(device))?;
        }
        self.compare_blocks(&snapshot)?;
        self.check_sources()?;
        self.check_waits()?;
        let blocks = snapshot.iter().map(|segment| segment.blocks.len()).sum();
        let growth = [Call::Allocate, Call::Free, Call::CreateHandle, Call::Unmap];
        let growth = growth.map(|call| self.gpu.driver().call_count(call)).iter().sum();
        if std::mem::replace(&mut self.growth, growth) == growth {
            self.coverage.on_blocks(self.blocks, blocks);
        }
        self.blocks = blocks;
        Ok(())
    }

    fn compare_figures(&self, device: DeviceId, stats: &Stats) -> Result<(), Failure> {
        let hoarded = self.hoard.lock().expect("one thread").iter().filter(|(_, on)| *on == device).count();
        let held: Vec<&Held> = self.held.iter().filter(|held| held.device == device).collect();
        let count = (held.len() + hoarded) as u64;
        let counted = stats.allocation.all.current;
        ensure(counted == count, || format!("{device} counts {counted} allocations, the program {count}"))?;
        let is_exact = hoarded == 0 && stats.active.all.current == counted;
        let requested: u64 = held.iter().map(|held| held.size).sum();
        let counted = stats.requested_bytes.all.current;
        let agrees = if is_exact { counted == requested } else { counted >= requested };
        ensure(agrees, || format!("{device} counts {counted} requested bytes, the program {requested}"))
    }

    /// The blocks that a snapshot shows as allocated are those that the program holds.
    fn compare_blocks(&self, snapshot: &[SegmentPicture]) -> Result<(), Failure> {
        let hoard = self.hoard.lock().expect("one thread");
        let hoarded: BTreeSet<DevicePtr> = hoard.iter().map(|(address, _)| *address).collect();
        let blocks = snapshot.iter().flat_map(|segment| &segment.blocks);
        let allocated = blocks.filter(|block| block.state == PictureState::Allocated);
        let shown: BTreeSet<(DevicePtr, u64)> = allocated
            .filter(|block| !hoarded.contains(&block.address))
            .map(|block| (block.address, block.requested))
            .collect();
        let held: BTreeSet<(DevicePtr, u64)> = self.held.iter().map(|held| (held.address, held.size)).collect();
        ensure(shown == held, || format!("the snapshot shows {shown:?}, the program holds {held:?}"))
    }

    /// Ends the program: gives everything back, and proves that nothing is left.
    ///
    /// Faults that are still to come may make `empty_cache` fail; once they are spent, it has to succeed.
    pub(crate) fn finish(&mut self) -> Result<(), Failure> {
        self.let_go()?;
        let driver = self.gpu.driver().clone();
        loop {
            let faults = (driver.pending_faults(), self.mishaps());
            let result = self.gpu.empty_cache();
            self.gpu.check().map_err(text)?;
            if (driver.pending_faults(), self.mishaps()) == faults {
                result.map_err(|error| format!("the cache cannot be emptied: {error}"))?;
                break;
            }
        }
        for device in DEVICES {
            let stats = self.gpu.allocator().stats(device);
            let is_zero = currents(&stats).all(|current| current == 0);
            ensure(is_zero, || format!("{device} ends with {stats:?}"))?;
        }
        driver.check_empty().map_err(text)?;
        self.finish_sources()?;
        self.coverage.on_program(&self.gpu);
        Ok(())
    }
}

/// Every counter of what is there now.
fn currents(stats: &Stats) -> impl Iterator<Item = u64> {
    let Stats { allocation, segment, active, inactive_split, .. } = stats;
    let Stats { allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes, .. } = stats;
    let counts = [allocation, segment, active, inactive_split];
    let bytes = [allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes];
    let oversize = [stats.oversize_allocations.current, stats.oversize_segments.current];
    counts.into_iter().chain(bytes).map(|family| family.all.current).chain(oversize)
}

pub(crate) fn ensure(holds: bool, failure: impl FnOnce() -> Failure) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(failure()) }
}

pub(crate) fn text(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}

/// The thing that a pick means, among `count`.
pub(crate) fn picked(pick: u8, count: usize) -> Option<usize> {
    (count > 0).then(|| usize::from(pick) % count)
}

/// Whether an error is the driver's refusal, which only a fault explains.
pub(crate) fn is_refusal(error: &SimulatedGpuError) -> bool {
    matches!(error, SimulatedGpuError::Alloc(AllocError::Driver(_)))
}

impl World {
    /// The stream that a pick means.
    pub(crate) fn stream(&self, pick: u8) -> Slot {
        usize::from(pick) % self.streams.len()
    }

    /// The stream that a pick means, if it takes part in no capture.
    pub(crate) fn eager_stream(&self, pick: u8) -> Option<Slot> {
        Some(self.stream(pick)).filter(|slot| self.is_eager(*slot))
    }

    /// The capture that a stream takes part in.
    pub(crate) fn capture_of(&self, slot: Slot) -> Option<usize> {
        self.captures.iter().position(|capture| capture.members.contains(&slot))
    }

    /// Whether a stream takes part in no capture.
    pub(crate) fn is_eager(&self, slot: Slot) -> bool {
        self.capture_of(slot).is_none()
    }

    /// Makes a stream's device current, and returns its handle.
    pub(crate) fn enter(&self, slot: Slot) -> StreamHandle {
        let stream = &self.streams[slot];
        self.gpu.set_current_device(stream.device).expect("the device exists");
        stream.handle
    }
}
