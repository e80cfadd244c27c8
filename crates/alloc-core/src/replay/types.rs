//! What goes into a replay, and what comes out.

use std::sync::Arc;

use super::PlacedSegment;
use crate::config::Config;
use crate::driver::sim::{SimError, SimOptions};
use crate::error::AllocError;
use crate::id::{PoolId, StreamHandle};

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
    /// Give all cached memory back to the driver before each step of these positions, as the program did.
    pub empty_cache_before: Vec<usize>,
    /// Whether and from which step on to keep [`Outcome::peak_reserved_late`].
    pub late_from: Option<usize>,
    /// Segments to begin with, for policy native; not used if they cannot be had, under a budget for example.
    pub layout: Option<Arc<Vec<PlacedSegment>>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            config: Config::default(),
            budget_bytes: None,
            lag_us: 20_000,
            handle_granularity_bytes: SimOptions::default().granularity_bytes,
            stop_at_failure: false,
            empty_cache_before: Vec::new(),
            late_from: None,
            layout: None,
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
