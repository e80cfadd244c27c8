//! A simulated GPU, to run the allocator's real code without one.
//!
//! [`SimDriver`] implements [`Driver`](super::Driver) to the letter of its contract and is never kinder than a real
//! device: it refuses what the real driver refuses, spoils captures, hands freed addresses out again at once, and
//! loses the context when a kernel touches unmapped memory. A test or a replayed recording plays the program through
//! the methods in `program.rs`: it launches kernels, moves the clock, captures graphs, and tells of its allocations,
//! whose every use is judged by a race oracle.
//!
//! All is deterministic, and two simulated drivers share nothing.
//!
//! ```
//! use alloc_core::driver::sim::{SimDriver, SimOptions};
//! use alloc_core::driver::{Completion, Driver};
//! use alloc_core::id::{DeviceId, Stream, StreamHandle};
//!
//! let driver = SimDriver::new(SimOptions::default());
//! let device = DeviceId(0);
//! let stream = StreamHandle(0x10);
//! let memory = driver.allocate(device, 1024)?;
//! driver.launch(stream, &[], &[memory], 100).expect("the memory is there");
//! let event = driver.create_event(device)?;
//! driver.record_event(event, Stream { device, handle: stream })?;
//! assert_eq!(driver.query_event(device, event)?, Completion::Pending);
//! driver.advance(100).expect("no kernel touched unmapped memory");
//! assert_eq!(driver.query_event(device, event)?, Completion::Done);
//! # Ok::<(), alloc_core::driver::DriverError>(())
//! ```

mod access;
mod address_space;
mod capture;
mod clock;
mod cost;
mod driver_calls;
mod error;
mod event;
mod faults;
mod inspect;
mod interval_map;
mod memory;
mod oracle;
mod program;
mod shadow;
mod simulation;
mod source;
mod timeline;

#[cfg(test)]
mod tests;

use std::sync::{Arc, PoisonError};

pub use capture::GraphId;
pub use error::{
    AccessKind, AllocationInfo, RaceError, SimError, UnmappedAccessError, UnorderedUnmapError, UseAfterFreeError,
    UseInfo, Violation, Work,
};
pub use inspect::PhysicalBytes;
pub use memory::Level;
use simulation::Simulation;
pub use source::{Mishap, SimSource, SourceCounts};

use crate::driver::STALE_MAPPINGS_MAX;
use crate::sync::{Mutex, MutexGuard};

/// What kind of machine to simulate.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Bytes of memory on each device.
    pub capacity_bytes: u64,
    /// How many devices there are.
    pub devices: u32,
    /// Whether the devices have address ranges and physical handles (`cuMemCreate` and its family).
    pub virtual_memory: bool,
    /// What sizes of handles and ranges are multiples of. A real device says 2 MiB; tests may take less.
    pub granularity_bytes: u64,
    /// See [`Capabilities::stale_mappings_max`](crate::driver::Capabilities::stale_mappings_max).
    pub stale_mappings_max: usize,
    /// Whether the devices can reach each other's memory.
    pub peers: bool,
    /// For replays of a recording, whose kernels are unknown: everything queued is taken to end this many microseconds
    /// later, on a clock that [`SimDriver::advance_to`] moves.
    pub lag_us: Option<u64>,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            capacity_bytes: 8 << 30,
            devices: 1,
            virtual_memory: true,
            granularity_bytes: 2 << 20,
            stale_mappings_max: STALE_MAPPINGS_MAX,
            peers: true,
            lag_us: None,
        }
    }
}

/// A simulated driver. Clones are the same driver.
#[derive(Clone, Debug)]
pub struct SimDriver {
    simulation: Arc<Mutex<Simulation>>,
}

impl Default for SimDriver {
    fn default() -> Self {
        Self::new(SimOptions::default())
    }
}

impl SimDriver {
    /// A driver with idle, empty devices. No thread has a current device yet.
    pub fn new(options: SimOptions) -> Self {
        Self { simulation: Arc::new(Mutex::new(Simulation::new(options))) }
    }

    /// The state. A test that panicked while it held the lock has failed already; others may go on.
    fn lock(&self) -> MutexGuard<'_, Simulation> {
        self.simulation.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
