//! A program on a simulated GPU: the real allocator over the simulated driver, with the race oracle watching.
//!
//! [`SimulatedGpu`] is what tests and Python's `rallocator.testing.SimulatedGpu` play programs on. Each method is a call
//! that a training script would make, tells the oracle of it, and returns as its error what that call brought to light.
//!
//! ```
//! use alloc_core::config::Config;
//! use alloc_core::driver::sim::SimOptions;
//! use alloc_core::id::{DeviceId, StreamHandle};
//! use alloc_core::simulated_gpu::SimulatedGpu;
//!
//! let gpu = SimulatedGpu::new(SimOptions::default(), Config::default());
//! let (device, compute, copy) = (DeviceId(0), StreamHandle(0x10), StreamHandle(0x20));
//! let block = gpu.malloc(4096, device, compute)?.expect("not a request for nothing");
//! gpu.launch(copy, &[], &[block], 100)?;
//! gpu.record_stream(block, copy)?; // Without it, whoever gets the memory next on `compute` would race with the copy.
//! gpu.free(block, device)?;
//! let next = gpu.malloc(4096, device, compute)?.expect("not a request for nothing");
//! gpu.launch(compute, &[], &[next], 100)?;
//! gpu.close()?;
//! # Ok::<(), alloc_core::simulated_gpu::SimulatedGpuError>(())
//! ```

use std::sync::Arc;

use crate::allocator::{Allocator, FreeOutcome, RecordOutcome};
use crate::check::InvariantError;
use crate::config::{Config, Move};
use crate::driver::sim::{GraphId, SimDriver, SimError, SimOptions, Violation};
use crate::driver::{CaptureMode, Status};
use crate::error::AllocError;
use crate::id::{DeviceId, DevicePtr, PoolId, Stream, StreamHandle};

#[cfg(test)]
mod programs;
#[cfg(test)]
mod tests;

/// What a call of the program failed with, or brought to light.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SimulatedGpuError {
    /// The allocator refused the program's request.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The simulator found something wrong, or refused the program's call.
    #[error(transparent)]
    Sim(#[from] SimError),
    /// The allocator's state contradicts itself.
    #[error(transparent)]
    Invariant(#[from] InvariantError),
    /// The program names memory that it never allocated.
    #[error("nothing was ever allocated at {0:?}")]
    UnknownPointer(DevicePtr),
    /// The program names a private pool that it has not begun, or has released.
    #[error("private pool {0:?} was not begun, or is released")]
    UnknownPool(PoolId),
}

impl From<Violation> for SimulatedGpuError {
    fn from(violation: Violation) -> Self {
        Self::Sim(Box::new(violation).into())
    }
}

type Result<T> = std::result::Result<T, SimulatedGpuError>;

/// A program's view of a simulated GPU. See the [module](self).
///
/// A stream belongs to the device that is current at its first use. May be shared between threads, each of which has a
/// current device of its own: device 0 until it sets another.
pub struct SimulatedGpu {
    allocator: Allocator<SimDriver>,
}

/// Memory.
#[expect(clippy::missing_errors_doc, reason = "any call may bring to light what went wrong before it")]
impl SimulatedGpu {
    /// A machine with idle, empty devices, on which device 0 is current.
    ///
    /// # Panics
    /// If the options say that there is no device.
    pub fn new(options: SimOptions, config: Config) -> Self {
        let driver = SimDriver::new(options);
        driver.set_current_device(DeviceId(0)).expect("a machine has at least one device");
        Self { allocator: Allocator::new(driver, config) }
    }

    /// The allocator, for questions that are no part of a program.
    pub fn allocator(&self) -> &Allocator<SimDriver> {
        &self.allocator
    }

    /// The simulated driver, for its figures and for failures to inject.
    pub fn driver(&self) -> &SimDriver {
        self.allocator.driver()
    }

    /// `size` bytes on `device` for `stream`, from the private pool that the stream's requests go to; `None` for 0 bytes.
    ///
    /// In a forked child it fails before it comes to the allocator, as the real hooks do.
    pub fn malloc(&self, size: u64, device: DeviceId, stream: StreamHandle) -> Result<Option<DevicePtr>> {
        let driver = self.driver();
        if driver.is_forked() {
            return Err(SimError::Refused { operation: "malloc", status: Status::NotInitialized }.into());
        }
        driver.open_stream(stream)?;
        let pool = self.allocator.route(device, stream);
        let address = self.allocator.malloc(size, device, stream, pool)?;
        if let Some(address) = address {
            driver.allocated(address, size, Stream { device, handle: stream }, pool)?;
        }
        Ok(address)
    }

    /// Frees the allocation that starts at `address`, which the program believes to be on `device`.
    ///
    /// The memory may be in use. Null, foreign and repeated frees do nothing, as in the allocator; in a forked child
    /// every free does.
    pub fn free(&self, address: DevicePtr, device: DeviceId) -> Result<FreeOutcome> {
        let driver = self.driver();
        if driver.is_forked() {
            return Ok(FreeOutcome::Leaked);
        }
        // The oracle first: once the allocator has the memory, another thread may get it.
        let is_live = driver.freed(address)?;
        let outcome = self.allocator.free(address, device);
        let misjudged = match outcome {
            FreeOutcome::Freed if !is_live => Some("a free"),
            FreeOutcome::Null if is_live => Some("nothing"),
            FreeOutcome::NotOurs if is_live => Some("a foreign free"),
            FreeOutcome::Repeated if is_live => Some("a repeated free"),
            _ => None,
        };
        if let Some(outcome) = misjudged {
            return Err(Violation::FreeMisjudged { address, outcome, is_live }.into());
        }
        driver.verdict()?;
        Ok(outcome)
    }

    /// Says that the program uses the allocation at `address` on `stream` too, until it frees it.
    pub fn record_stream(&self, address: DevicePtr, stream: StreamHandle) -> Result<RecordOutcome> {
        self.driver().touch_stream(stream)?;
        let outcome = self.allocator.record_stream(address, stream);
        self.driver().verdict()?;
        Ok(outcome)
    }

    /// Returns cached memory to the device.
    pub fn empty_cache(&self) -> Result<()> {
        self.allocator.empty_cache()?;
        Ok(self.driver().verdict()?)
    }

    /// Routes the requests of `stream`, and of all streams that are captured together with it, to a private pool.
    pub fn begin_pool(&self, pool: PoolId, stream: StreamHandle) -> Result<()> {
        let driver = self.driver().clone();
        let device = driver.device_of(stream);
        let takes = move |other| other == stream || driver.are_captured_together(other, stream);
        self.allocator.begin_pool(device, pool, Arc::new(takes))?;
        self.driver().pool_begun(device, pool);
        Ok(self.driver().verdict()?)
    }

    /// Ends the last routing to a private pool, which lives on.
    pub fn end_pool(&self, pool: PoolId) -> Result<()> {
        self.allocator.end_pool(self.device_of_pool(pool)?, pool);
        Ok(self.driver().verdict()?)
    }

    /// Answers one [`begin_pool`](Self::begin_pool); with the last, the pool's memory may be used for something else.
    pub fn release_pool(&self, pool: PoolId) -> Result<()> {
        let device = self.device_of_pool(pool)?;
        self.driver().pool_released(device, pool);
        self.allocator.release_pool(device, pool);
        Ok(self.driver().verdict()?)
    }

    /// See [`Allocator::restrict_moves`](crate::allocator::Allocator::restrict_moves).
    pub fn restrict_moves(&self, pool: PoolId, moving: Move) -> Result<()> {
        Ok(self.allocator.restrict_moves(self.device_of_pool(pool)?, pool, moving)?)
    }

    /// The device that a private pool was begun on: the current one, if it was begun on several.
    fn device_of_pool(&self, pool: PoolId) -> Result<DeviceId> {
        let current = self.driver().device_of(StreamHandle::DEFAULT);
        let held = self.driver().held_pools();
        let on = held.iter().filter(|(_, id, _)| *id == pool).map(|(device, _, _)| *device);
        on.min_by_key(|device| (*device != current, *device)).ok_or(SimulatedGpuError::UnknownPool(pool))
    }
}

/// Streams, kernels and graphs.
#[expect(clippy::missing_errors_doc, reason = "any call may bring to light what went wrong before it")]
impl SimulatedGpu {
    /// Queues a kernel that reads and writes whole allocations. No time passes. A null address touches nothing.
    pub fn launch(
        &self,
        stream: StreamHandle,
        reads: &[DevicePtr],
        writes: &[DevicePtr],
        duration_us: u64,
    ) -> Result<()> {
        let not_null = |addresses: &[DevicePtr]| -> Vec<DevicePtr> {
            addresses.iter().copied().filter(|address| address.0 != 0).collect()
        };
        let (reads, writes) = (not_null(reads), not_null(writes));
        let unknown = reads.iter().chain(&writes).find(|address| !self.driver().is_known(**address));
        if let Some(unknown) = unknown {
            return Err(SimulatedGpuError::UnknownPointer(*unknown));
        }
        Ok(self.driver().launch(stream, &reads, &writes, duration_us)?)
    }

    /// Makes what `stream` gets from now on wait for what is queued on `on` now.
    pub fn wait(&self, stream: StreamHandle, on: StreamHandle) -> Result<()> {
        Ok(self.driver().wait(stream, on)?)
    }

    /// Ends all that is queued on `stream`, or on every stream, and what it waits for. The host learns nothing of it.
    pub fn complete(&self, stream: Option<StreamHandle>) -> Result<()> {
        Ok(self.driver().complete(stream)?)
    }

    /// Lets time pass.
    pub fn advance(&self, duration_us: u64) -> Result<()> {
        Ok(self.driver().advance(duration_us)?)
    }

    /// Starts to capture what `stream` gets. The mode that torch uses by default is global.
    pub fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> Result<()> {
        Ok(self.driver().begin_capture(stream, mode)?)
    }

    /// Ends the capture that began on `stream`; fails if it was spoiled.
    pub fn end_capture(&self, stream: StreamHandle) -> Result<GraphId> {
        Ok(self.driver().end_capture(stream)?)
    }

    /// Gives up the capture that `stream` takes part in.
    pub fn abort_capture(&self, stream: StreamHandle) -> Result<()> {
        Ok(self.driver().abort_capture(stream)?)
    }

    /// Queues all that `graph` captured, as one launch.
    pub fn replay(&self, graph: GraphId, stream: StreamHandle) -> Result<()> {
        Ok(self.driver().replay(graph, stream)?)
    }

    /// Destroys a graph, though not its pool.
    pub fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        Ok(self.driver().destroy_graph(graph)?)
    }

    /// Destroys a stream, without a word to the allocator. Its handle may come back for another one, so a correct program
    /// has called [`retire_stream`](Allocator::retire_stream) before; no call of the allocator that begins after that names
    /// the stream.
    pub fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        Ok(self.driver().destroy_stream(stream)?)
    }

    /// Makes `device` the calling thread's current one.
    pub fn set_current_device(&self, device: DeviceId) -> Result<()> {
        Ok(self.driver().set_current_device(device)?)
    }
}

/// Proofs.
impl SimulatedGpu {
    /// Checks everything that holds at any time.
    ///
    /// # Errors
    /// A contradiction in the allocator's state, a difference between its count of reserved bytes and the device's, or
    /// the first violation, unmapped access or unordered unmap there ever was.
    pub fn check(&self) -> Result<()> {
        self.driver().check()?;
        self.check_state()
    }

    /// Frees all that the program still holds, graphs and pools too, and proves that nothing is left on any device.
    ///
    /// A driver that is gone, or a context that was lost, has taken everything with it: there is nothing to prove then.
    ///
    /// # Errors
    /// As [`check`](Self::check), but nothing that an earlier call returned; [`Violation::Leak`].
    pub fn close(&self) -> Result<()> {
        let driver = self.driver();
        driver.drop_graphs();
        for (address, device) in driver.live_allocations() {
            self.free(address, device)?;
        }
        for (device, pool, holders) in driver.held_pools() {
            for _ in 0..holders {
                self.allocator.end_pool(device, pool);
                self.allocator.release_pool(device, pool);
                driver.pool_released(device, pool);
            }
        }
        if !driver.is_running() || driver.is_any_lost() {
            return Ok(driver.verdict()?);
        }
        // The program waits for its work before it ends, also for work that it never told the allocator of.
        driver.synchronize()?;
        self.empty_cache()?;
        self.check_state()?;
        Ok(driver.check_empty()?)
    }

    fn check_state(&self) -> Result<()> {
        self.allocator.check()?;
        for device in self.allocator.devices_in_use() {
            let reserved = self.allocator.stats(device).reserved_bytes.all.current;
            let physical = self.driver().physical_bytes(device).current;
            if reserved != physical {
                return Err(Violation::Miscounted { device, reserved, physical }.into());
            }
        }
        Ok(())
    }
}
