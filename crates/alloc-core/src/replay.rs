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

mod follow;
#[cfg(test)]
mod follow_tests;
mod layout;
mod minimum;
mod queues;
#[cfg(test)]
mod tests;
mod timeline;
#[cfg(test)]
mod timeline_tests;
mod types;

use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::allocator::Allocator;
use crate::config::Config;
use crate::driver::DriverError;
use crate::driver::sim::{SimDriver, SimError, SimOptions};
use crate::error::AllocError;
use crate::id::{DeviceId, DevicePtr, PoolId, StreamHandle};
use crate::snapshot::SegmentPicture;
pub use follow::{Emptied, Followed, follow};
pub use layout::{Holder, PlacedPiece, PlacedSegment};
pub use minimum::minimum_budget;
use queues::Queues;
use timeline::Recorder;
pub use timeline::{BlockLife, Levels, SegmentLife, Timeline};
pub use types::{Action, Options, Outcome, ReplayError, Step};

/// The only device of the simulated machine: recordings of several are replayed one by one.
const DEVICE: DeviceId = DeviceId(0);

/// What every request is rounded up to in [`Outcome::peak_allocated`], whatever the policy does: torch's smallest block.
const REQUEST_GRANULE_BYTES: u64 = 512;

/// The first simulated card that is tried without a budget, and the largest. Address ranges grow with the card, so it is
/// no larger than need be; the largest is beyond any card there is.
const CARD_BYTES: (u64, u64) = (256 << 30, 8 << 40);

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

/// The steps in which more was obtained from the driver than there was before.
///
/// # Errors
/// [`ReplayError`].
pub fn growth(steps: &[Step], options: &Options) -> Result<Vec<usize>, ReplayError> {
    let (_, timeline) = replay_with_timeline(steps, options)?;
    let before = std::iter::once(0).chain(timeline.levels.iter().map(|levels| levels.reserved));
    let grown = timeline.levels.iter().zip(before).filter(|(levels, before)| levels.reserved > *before);
    Ok(grown.map(|(levels, _)| levels.step as usize).collect())
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
        // With a layout, that has room for its holes too.
        let placed = options.layout.iter().flat_map(|layout| layout.iter()).map(|segment| segment.size).sum();
        let card_bytes = budget_bytes.max(placed).saturating_mul(2).next_power_of_two();
        let fraction = budget_bytes as f64 / card_bytes as f64;
        return Replay::begin(steps.len(), options, card_bytes, fraction, with_timeline)?.run(&steps[..count]);
    }
    let mut card_bytes = smallest_bytes;
    loop {
        let replay = Replay::begin(steps.len(), options, card_bytes, 1.0, with_timeline)?.run(steps)?;
        // A card that ran short was too small to say what the policy takes.
        if replay.allocator.stats(DEVICE).num_alloc_retries == 0 || card_bytes >= largest_bytes {
            if count == steps.len() {
                return Ok(replay);
            }
            return Replay::begin(steps.len(), options, card_bytes, 1.0, with_timeline)?.run(&steps[..count]);
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
    /// Older than the recording, and where it was; its step comes yet.
    Placed(DevicePtr),
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
    budget_bytes: Option<u64>,
    stops_at_failure: bool,
    /// Positions that are still to come, the next one last.
    empty_cache_before: Vec<usize>,
    late_from: Option<usize>,
    peak_reserved_late: u64,
    recorder: Option<Recorder>,
}

impl Replay {
    /// A replay that is about to take its first step.
    fn begin(
        steps: usize,
        options: &Options,
        card_bytes: u64,
        fraction: f64,
        with_timeline: bool,
    ) -> Result<Self, ReplayError> {
        if let Some(layout) = &options.layout {
            let mut replay = Self::new(steps, options, card_bytes, fraction, with_timeline)?;
            if replay.place(layout, &options.config).map_err(|failure| failure.at(0))? {
                return Ok(replay);
            }
        }
        Self::new(steps, options, card_bytes, fraction, with_timeline)
    }

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
            budget_bytes: options.budget_bytes,
            stops_at_failure: options.stop_at_failure,
            empty_cache_before: ordered(&options.empty_cache_before),
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
            if self.is_emptied_before(step) {
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

    /// Whether the cache is to be emptied before `step`; to be asked step by step.
    fn is_emptied_before(&mut self, step: usize) -> bool {
        self.empty_cache_before.pop_if(|next| *next <= step).is_some()
    }

    fn take(&mut self, action: Action) -> Result<(), Failure> {
        match action {
            Action::Allocate { allocation, size, stream, pool } => {
                self.allocations[allocation] = match self.allocations.get(allocation) {
                    None => return Err(Failure::Allocation(allocation, "is not below the number of steps")),
                    Some(State::NotYet) => self.allocate(size, stream, pool)?,
                    Some(State::Placed(address)) => {
                        let address = *address;
                        self.hold(size);
                        State::Live { address, size, stream }
                    }
                    Some(_) => return Err(Failure::Allocation(allocation, "was made before")),
                };
            }
            Action::Free { allocation, used_elsewhere_until_us } => {
                let never_made = Failure::Allocation(allocation, "was never made");
                let Some(state) = self.allocations.get_mut(allocation) else { return Err(never_made) };
                match std::mem::replace(state, State::Freed) {
                    State::Live { address, size, stream } => {
                        self.free(address, size, stream, used_elsewhere_until_us)?;
                    }
                    State::Without => {}
                    State::NotYet | State::Placed(_) => return Err(never_made),
                    State::Freed => return Err(Failure::Allocation(allocation, "was freed before")),
                }
            }
            Action::Try { size, stream, pool } if self.budget_bytes.is_some() => {
                if let State::Live { address, .. } = self.allocate(size, stream, pool)? {
                    self.free(address, size, stream, None)?;
                }
            }
            Action::Try { .. } => {}
        }
        Ok(())
    }

    fn allocate(&mut self, size: u64, stream: StreamHandle, pool: Option<PoolId>) -> Result<State, Failure> {
        self.begin_pool(pool)?;
        let answer = self.allocator.malloc(size, DEVICE, stream, pool);
        self.queue_work(stream)?;
        match answer {
            Ok(Some(address)) => {
                self.note_handed_out(address, size);
                self.hold(size);
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

    /// Makes a private pool known before its first use.
    fn begin_pool(&mut self, pool: Option<PoolId>) -> Result<(), Failure> {
        if let Some(pool) = pool
            && self.pools.insert(pool)
        {
            // The pool lives to the end: a recording does not tell when its graphs are gone. Requests name it, so that
            // no stream need be sent to it.
            self.allocator.begin_pool(DEVICE, pool, Arc::new(|_| false))?;
            self.allocator.end_pool(DEVICE, pool);
        }
        Ok(())
    }

    fn note_handed_out(&mut self, address: DevicePtr, size: u64) {
        if let Some(recorder) = &mut self.recorder {
            recorder.handed_out(self.allocator.block_at(address).map_or(size, |block| block.size));
        }
    }

    fn hold(&mut self, size: u64) {
        self.allocated += rounded(size);
        self.peak_allocated = self.peak_allocated.max(self.allocated);
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

/// Each position once, from the last to the first.
fn ordered(positions: &[usize]) -> Vec<usize> {
    let mut positions = positions.to_vec();
    positions.sort_unstable_by(|one, other| other.cmp(one));
    positions.dedup();
    positions
}

fn rounded(size: u64) -> u64 {
    size.next_multiple_of(REQUEST_GRANULE_BYTES)
}
