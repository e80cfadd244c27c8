//! Drives an allocator over the simulated GPU, through the steps of a recorded program.
//!
//! A recording tells when memory was asked for and given back, not what the GPU did with it. So with each step some work
//! is queued on its stream, and taken to end a fixed lag later, on a clock that follows the recorded times: what asks the
//! simulated driver whether work has ended, or waits for it, sees that clock. Only of a block that a second stream used
//! the recording tells more, since torch notes when that use had ended.
//!
//! It owns neither the reading of recordings (`python/rallocator/_replay` does that) nor any rule of allocation: the
//! allocator is the one that runs on a real GPU.
//!
//! ```
//! use alloc_core::config::{Config, Policy};
//! use alloc_core::id::{PoolId, StreamHandle};
//! use alloc_core::replay::{Action, Options, Step, replay};
//!
//! let steps = [
//!     Step {
//!         time_us: 0,
//!         action: Action::Allocate { allocation: 0, size: 1000, stream: StreamHandle::DEFAULT, pool: None },
//!     },
//!     Step { time_us: 10, action: Action::Free { allocation: 0, used_elsewhere_until_us: None } },
//! ];
//! let config = Config { policy: Policy::Native, ..Config::default() };
//! let outcome = replay(&steps, &Options { config, ..Options::default() })?;
//! assert_eq!(outcome.peak_requested, 1000);
//! assert_eq!(outcome.peak_allocated, 1024, "a request is rounded up to 512 bytes");
//! assert_eq!(outcome.peak_reserved, 2 << 20, "small requests are cut from segments of 2 MiB");
//! # Ok::<(), alloc_core::replay::ReplayError>(())
//! ```

mod minimum;
mod queues;
#[cfg(test)]
mod tests;
mod timeline;
#[cfg(test)]
mod timeline_tests;

use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::allocator::Allocator;
use crate::config::Config;
use crate::driver::DriverError;
use crate::driver::sim::{SimDriver, SimError, SimOptions};
use crate::error::AllocError;
use crate::id::{DeviceId, DevicePtr, PoolId, StreamHandle};
use crate::snapshot::SegmentPicture;
pub use minimum::minimum_budget;
use queues::Queues;
use timeline::Recorder;
pub use timeline::{BlockLife, Levels, SegmentLife, Timeline};

/// The only device of the simulated machine: recordings of several are replayed one by one.
const DEVICE: DeviceId = DeviceId(0);

/// What every request is rounded up to in [`Outcome::peak_allocated`], whatever the policy does: torch's smallest block.
const REQUEST_GRANULE_BYTES: u64 = 512;

/// The first simulated card that is tried without a budget, and the largest. Address ranges grow with the card, so it is
/// no larger than need be; the largest is beyond any card there is.
const CARD_BYTES: (u64, u64) = (256 << 30, 8 << 40);

/// One thing that the program did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// When, in microseconds since the recording began.
    pub time_us: u64,
    /// What.
    pub action: Action,
}

/// What a program does with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Asks for memory.
    Allocate {
        /// The number by which the free will name it: below the number of steps, and never given twice.
        allocation: usize,
        /// Bytes.
        size: u64,
        /// The stream that it is for: any but the last few handles there are, which the replay uses itself.
        stream: StreamHandle,
        /// The private pool that it is for.
        pool: Option<PoolId>,
    },
    /// Gives memory back.
    Free {
        /// Which.
        allocation: usize,
        /// When the work has ended with which another stream uses it too, on the clock of [`Step::time_us`].
        used_elsewhere_until_us: Option<u64>,
    },
    /// Asks for memory that the recorded program was refused, and gives it back at once if it is there: to see whether
    /// it would have been. Without a budget nothing is refused, and this does nothing.
    Try {
        /// Bytes.
        size: u64,
        /// The stream that it is for.
        stream: StreamHandle,
        /// The private pool that it is for.
        pool: Option<PoolId>,
    },
}

/// How to replay.
#[derive(Clone, Debug)]
pub struct Options {
    /// The settings. The memory fraction does not count: the budget stands in its place.
    pub config: Config,
    /// Bytes that the allocator may reserve, at most 2⁶²; none is as many as it takes.
    pub budget_bytes: Option<u64>,
    /// How many microseconds after it was queued work is taken to end.
    pub lag_us: u64,
    /// What sizes of physical handles are multiples of: a power of two. A real device says 2 MiB.
    pub handle_granularity_bytes: u64,
    /// Whether to stop at the first allocation that fails: the figures are those up to it.
    pub stop_at_failure: bool,
    /// Give all cached memory back to the driver once, before the step of this position.
    pub empty_cache_before: Option<usize>,
    /// Whether and from which step on to keep [`Outcome::peak_reserved_late`].
    pub late_from: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            config: Config::default(),
            budget_bytes: None,
            lag_us: 20_000,
            handle_granularity_bytes: SimOptions::default().granularity_bytes,
            stop_at_failure: false,
            empty_cache_before: None,
            late_from: None,
        }
    }
}

/// The figures of one replay. Bytes unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The most that the program had asked for, of blocks in use or pending.
    pub peak_requested: u64,
    /// The most that the program held, each request rounded up to 512 bytes: the same for every policy, as long as
    /// none fails.
    pub peak_allocated: u64,
    /// The most in blocks that were in use or pending.
    pub peak_active: u64,
    /// The most that was obtained from the driver and not returned, by the allocator's count.
    pub peak_reserved: u64,
    /// The same by the simulated GPU's count.
    pub peak_device: u64,
    /// Number of allocations that failed. Each is left out, with its free.
    pub ooms: u64,
    /// Number of times that cached memory went back to the driver before another try.
    pub retries: u64,
    /// Number of times that the host had to wait for the GPU.
    pub host_waits: u64,
    /// Microseconds that it waited.
    pub host_wait_us: u64,
    /// Number of times that a stream was made to wait for another.
    pub gpu_waits: u64,
    /// Calls of the driver by CUDA's name, those never made left out.
    pub driver_calls: Vec<(&'static str, u64)>,
    /// Microseconds that the host spent in them, without waiting.
    pub driver_time_us: u64,
    /// Number of physical handles that were moved to another address.
    pub handles_moved: u64,
    /// The most addresses that had memory behind them; a handle at two addresses counts twice.
    pub peak_address_bytes: u64,
    /// The most that was reserved after each of the steps from [`Options::late_from`] on; 0 without one.
    pub peak_reserved_late: u64,
}

/// Why a replay came to no result.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A step names an allocation that there is not, or one twice. The caller's mistake.
    #[error("step {step} names allocation {allocation}, which {reason}")]
    Allocation {
        /// The step's position.
        step: usize,
        /// The number that it names.
        allocation: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The allocator failed for another reason than lack of memory: a defect in it.
    #[error("the allocator failed: {0}")]
    Allocator(#[from] AllocError),
    /// The simulated GPU refused or condemned something: a defect in the allocator.
    #[error("the simulated GPU failed: {0}")]
    Gpu(#[from] SimError),
}

/// Replays `steps`, which are in the order of their times.
///
/// # Errors
/// [`ReplayError`]; running out of memory is none, but counted in the outcome.
pub fn replay(steps: &[Step], options: &Options) -> Result<Outcome, ReplayError> {
    Ok(run(steps, steps.len(), options, false)?.outcome())
}

/// Replays `steps` and returns what was where at every moment besides.
///
/// # Errors
/// [`ReplayError`].
pub fn replay_with_timeline(steps: &[Step], options: &Options) -> Result<(Outcome, Timeline), ReplayError> {
    let mut replay = run(steps, steps.len(), options, true)?;
    let events = replay.allocator.history(DEVICE);
    let timeline = replay.recorder.take().map_or_else(Timeline::default, |recorder| recorder.timeline(&events));
    Ok((replay.outcome(), timeline))
}

/// The allocator's own picture of its memory after the first `count` of `steps`.
///
/// # Errors
/// [`ReplayError`].
pub fn picture_after(steps: &[Step], count: usize, options: &Options) -> Result<Vec<SegmentPicture>, ReplayError> {
    Ok(run(steps, count, options, false)?.allocator.snapshot())
}

/// Replays the first `count` steps on a card that is large enough for all.
fn run(steps: &[Step], count: usize, options: &Options, with_timeline: bool) -> Result<Replay, ReplayError> {
    let (smallest_bytes, largest_bytes) = CARD_BYTES;
    if let Some(budget_bytes) = options.budget_bytes {
        // Twice the budget, so that it is the limit that is met, and a power of two, so that it is an exact fraction.
        let card_bytes = budget_bytes.saturating_mul(2).next_power_of_two();
        let fraction = budget_bytes as f64 / card_bytes as f64;
        return Replay::new(steps.len(), options, card_bytes, fraction, with_timeline)?.run(&steps[..count]);
    }
    let mut card_bytes = smallest_bytes;
    loop {
        let replay = Replay::new(steps.len(), options, card_bytes, 1.0, with_timeline)?.run(steps)?;
        // A card that ran short was too small to say what the policy takes.
        if replay.allocator.stats(DEVICE).num_alloc_retries == 0 || card_bytes >= largest_bytes {
            if count == steps.len() {
                return Ok(replay);
            }
            return Replay::new(steps.len(), options, card_bytes, 1.0, with_timeline)?.run(&steps[..count]);
        }
        card_bytes *= 2;
    }
}

/// Where an allocation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    NotYet,
    Live {
        address: DevicePtr,
        size: u64,
        stream: StreamHandle,
    },
    /// Refused, or of size 0: there is no memory, and its free does nothing.
    Without,
    Freed,
}

/// A replay under way.
struct Replay {
    allocator: Allocator<SimDriver>,
    allocations: Vec<State>,
    /// Pools that were begun.
    pools: FxHashSet<PoolId>,
    /// What the program has queued on the GPU.
    queues: Queues,
    lag_us: u64,
    /// Bytes that the program holds, each request rounded up.
    allocated: u64,
    peak_allocated: u64,
    ooms: u64,
    is_limited: bool,
    stops_at_failure: bool,
    empty_cache_before: Option<usize>,
    late_from: Option<usize>,
    peak_reserved_late: u64,
    recorder: Option<Recorder>,
}

impl Replay {
    fn new(
        steps: usize,
        options: &Options,
        card_bytes: u64,
        fraction: f64,
        with_timeline: bool,
    ) -> Result<Self, ReplayError> {
        let driver = SimDriver::new(SimOptions {
            capacity_bytes: card_bytes,
            devices: 1,
            granularity_bytes: options.handle_granularity_bytes,
            ..SimOptions::default()
        });
        driver.set_current_device(DEVICE)?;
        let config = Config { per_process_memory_fraction: fraction, history_limit: 0, ..options.config.clone() };
        let allocator = Allocator::new(driver, config);
        let recorder = with_timeline.then(Recorder::default);
        if let Some(recorder) = &recorder {
            allocator.record_history(Some(&recorder.recording()), true)?;
        }
        Ok(Self {
            allocator,
            allocations: vec![State::NotYet; steps],
            pools: FxHashSet::default(),
            queues: Queues::default(),
            lag_us: options.lag_us,
            allocated: 0,
            peak_allocated: 0,
            ooms: 0,
            is_limited: options.budget_bytes.is_some(),
            stops_at_failure: options.stop_at_failure,
            empty_cache_before: options.empty_cache_before,
            late_from: options.late_from,
            peak_reserved_late: 0,
            recorder,
        })
    }

    fn run(mut self, steps: &[Step]) -> Result<Self, ReplayError> {
        for (step, &Step { time_us, action }) in steps.iter().enumerate() {
            self.allocator.driver().advance_to(time_us)?;
            if let Some(recorder) = &self.recorder {
                recorder.begin(step);
            }
            if self.empty_cache_before == Some(step) {
                self.allocator.empty_cache()?;
            }
            self.take(action).map_err(|failure| failure.at(step))?;
            if let Some(recorder) = &mut self.recorder {
                recorder.end(step, &self.allocator.stats(DEVICE));
            }
            if self.late_from.is_some_and(|from| from <= step) {
                let reserved = self.allocator.driver().physical_bytes(DEVICE).current;
                self.peak_reserved_late = self.peak_reserved_late.max(reserved);
            }
            if self.ooms > 0 && self.stops_at_failure {
                break;
            }
        }
        self.allocator.driver().check()?;
        Ok(self)
    }

    fn take(&mut self, action: Action) -> Result<(), Failure> {
        match action {
            Action::Allocate { allocation, size, stream, pool } => {
                match self.allocations.get(allocation) {
                    None => return Err(Failure::Allocation(allocation, "is not below the number of steps")),
                    Some(State::NotYet) => {}
                    Some(_) => return Err(Failure::Allocation(allocation, "was made before")),
                }
                self.allocations[allocation] = self.allocate(size, stream, pool)?;
            }
            Action::Free { allocation, used_elsewhere_until_us } => {
                let never_made = Failure::Allocation(allocation, "was never made");
                let Some(state) = self.allocations.get_mut(allocation) else { return Err(never_made) };
                match std::mem::replace(state, State::Freed) {
                    State::Live { address, size, stream } => {
                        self.free(address, size, stream, used_elsewhere_until_us)?;
                    }
                    State::Without => {}
                    State::NotYet => return Err(never_made),
                    State::Freed => return Err(Failure::Allocation(allocation, "was freed before")),
                }
            }
            Action::Try { size, stream, pool } if self.is_limited => {
                if let State::Live { address, .. } = self.allocate(size, stream, pool)? {
                    self.free(address, size, stream, None)?;
                }
            }
            Action::Try { .. } => {}
        }
        Ok(())
    }

    fn allocate(&mut self, size: u64, stream: StreamHandle, pool: Option<PoolId>) -> Result<State, Failure> {
        if let Some(pool) = pool
            && self.pools.insert(pool)
        {
            // The pool lives to the end: a recording does not tell when its graphs are gone. Requests name it, so that
            // no stream need be sent to it.
            self.allocator.begin_pool(DEVICE, pool, Arc::new(|_| false))?;
            self.allocator.end_pool(DEVICE, pool);
        }
        let answer = self.allocator.malloc(size, DEVICE, stream, pool);
        self.queue_work(stream)?;
        match answer {
            Ok(Some(address)) => {
                if let Some(recorder) = &mut self.recorder {
                    recorder.handed_out(self.allocator.block_size(address).unwrap_or(size));
                }
                self.allocated += rounded(size);
                self.peak_allocated = self.peak_allocated.max(self.allocated);
                Ok(State::Live { address, size, stream })
            }
            Ok(None) => Ok(State::Without),
            Err(error) if is_out_of_memory(&error) => {
                self.ooms += 1;
                Ok(State::Without)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn free(
        &mut self,
        address: DevicePtr,
        size: u64,
        stream: StreamHandle,
        used_elsewhere_until_us: Option<u64>,
    ) -> Result<(), Failure> {
        self.queue_work(stream)?;
        if let Some(end_us) = used_elsewhere_until_us {
            let other = self.queues.queue_elsewhere(self.allocator.driver(), end_us)?;
            self.allocator.record_stream(address, other);
        }
        self.allocator.free(address, DEVICE);
        self.allocated -= rounded(size);
        Ok(())
    }

    /// Queues the work that a step stands for.
    fn queue_work(&mut self, stream: StreamHandle) -> Result<(), SimError> {
        let driver = self.allocator.driver();
        self.queues.queue_until(driver, stream, driver.now_us() + self.lag_us)
    }

    fn outcome(&self) -> Outcome {
        let stats = self.allocator.stats(DEVICE);
        let driver = self.allocator.driver();
        let peak_physical = driver.physical_bytes(DEVICE).peak;
        Outcome {
            peak_requested: stats.requested_bytes.all.peak,
            peak_allocated: self.peak_allocated,
            peak_active: stats.active_bytes.all.peak,
            peak_reserved: stats.reserved_bytes.all.peak,
            peak_device: peak_physical,
            ooms: self.ooms,
            retries: stats.num_alloc_retries,
            host_waits: driver.host_waits(),
            host_wait_us: driver.host_wait_us().round() as u64,
            gpu_waits: stats.gpu_waits,
            driver_calls: driver.calls(),
            driver_time_us: driver.elapsed_us().round() as u64,
            handles_moved: stats.handles_moved,
            // Segments have their addresses for as long as their memory; handles have those that they are mapped at.
            peak_address_bytes: driver.mapped_bytes(DEVICE).peak.max(peak_physical),
            peak_reserved_late: self.peak_reserved_late,
        }
    }
}

/// What went wrong in a step, before it is known which.
enum Failure {
    Allocation(usize, &'static str),
    Allocator(AllocError),
    Gpu(SimError),
}

impl Failure {
    fn at(self, step: usize) -> ReplayError {
        match self {
            Self::Allocation(allocation, reason) => ReplayError::Allocation { step, allocation, reason },
            Self::Allocator(error) => error.into(),
            Self::Gpu(error) => error.into(),
        }
    }
}

impl From<AllocError> for Failure {
    fn from(error: AllocError) -> Self {
        Self::Allocator(error)
    }
}

impl From<SimError> for Failure {
    fn from(error: SimError) -> Self {
        Self::Gpu(error)
    }
}

/// Whether the request failed for lack of memory, or of addresses to map memory at.
fn is_out_of_memory(error: &AllocError) -> bool {
    match error {
        AllocError::OutOfMemory(_) => true,
        AllocError::Driver(error) => DriverError::is_out_of_memory(*error),
        _ => false,
    }
}

fn rounded(size: u64) -> u64 {
    size.next_multiple_of(REQUEST_GRANULE_BYTES)
}
