//! What a test asks the simulated GPU for: failures, figures and verdicts.

use std::collections::BTreeSet;

use super::SimDriver;
use super::cost::NANOSECONDS_PER_MICROSECOND;
use super::error::SimError;
use super::memory::{Level, Piece};
use super::simulation::Life;
use crate::driver::{Call, Status};
use crate::id::{DeviceId, DevicePtr, Stream};

/// Bytes of physical memory, whatever address they are mapped at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhysicalBytes {
    /// Which memory: a handle's or a segment's. Never reused.
    pub memory: u64,
    /// Where in it the bytes begin.
    pub offset: u64,
    /// How many they are.
    pub size: u64,
}

/// Failures that a test asks for, and the end of the driver.
impl SimDriver {
    /// Lets `after` more calls to `call` succeed, then fails one with `status`.
    pub fn fail_next(&self, call: Call, after: u64, status: Status) {
        self.lock().faults.fail_next(call, after, status);
    }

    /// Fails the `nth` driver call from now, of whatever kind, with a status that fits it. 1 is the next one.
    pub fn fail_nth(&self, nth: u64) {
        self.lock().faults.fail_any(nth.saturating_sub(1));
    }

    /// How many failures were asked for and have not happened yet.
    pub fn pending_faults(&self) -> usize {
        self.lock().faults.pending()
    }

    /// Continues as the child of a fork, in which the driver answers nothing.
    pub fn fork_child(&self) {
        self.lock().life = Life::Forked;
    }

    /// Continues as the parent again.
    pub fn fork_parent(&self) {
        self.lock().life = Life::Running;
    }

    /// Shuts the driver down, as at process exit. It never comes back.
    pub fn shutdown_driver(&self) {
        self.lock().life = Life::ShutDown;
    }
}

/// Figures, and the simulator's verdicts.
impl SimDriver {
    /// How often each driver call was made, failed ones too, by CUDA's name; without those never made.
    pub fn calls(&self) -> Vec<(&'static str, u64)> {
        let simulation = self.lock();
        let counted = Call::ALL.iter().map(|&call| (call.name(), simulation.ledger.calls_of(call)));
        counted.filter(|&(_, count)| count > 0).collect()
    }

    /// How often `call` was made.
    pub fn call_count(&self, call: Call) -> u64 {
        self.lock().ledger.calls_of(call)
    }

    /// How often `call` failed, because a test asked for it or for a reason of its own.
    pub fn failure_count(&self, call: Call) -> u64 {
        self.lock().ledger.failures_of(call)
    }

    /// Host time spent in driver calls, in microseconds, without the time spent waiting for the GPU.
    pub fn elapsed_us(&self) -> f64 {
        self.lock().ledger.elapsed_ns as f64 / NANOSECONDS_PER_MICROSECOND as f64
    }

    /// The streams that the driver's `wait_event` made another one wait for. The program's own waits do not count.
    pub fn awaited_streams(&self) -> BTreeSet<Stream> {
        self.lock().awaited.clone()
    }

    /// How often a driver call had to wait for the GPU.
    pub fn host_waits(&self) -> u64 {
        self.lock().ledger.host_waits
    }

    /// Host time spent waiting for the GPU, in microseconds.
    pub fn host_wait_us(&self) -> f64 {
        self.lock().ledger.host_wait_ns as f64 / NANOSECONDS_PER_MICROSECOND as f64
    }

    /// Bytes obtained from `device` and not returned, mapped or not.
    pub fn physical_bytes(&self, device: DeviceId) -> Level {
        self.lock().memory.usage(device).physical
    }

    /// Bytes of addresses at which a handle of `device` is mapped; one that is mapped twice counts twice.
    pub fn mapped_bytes(&self, device: DeviceId) -> Level {
        self.lock().memory.usage(device).mapped
    }

    /// Bytes of address ranges reserved through `device`.
    pub fn reserved_address_bytes(&self, device: DeviceId) -> Level {
        self.lock().memory.usage(device).reserved
    }

    /// The physical memory behind `size` bytes at `address`, in the order of addresses, without what is backed by nothing.
    pub fn backing(&self, address: DevicePtr, size: u64) -> Vec<PhysicalBytes> {
        let pieces = self.lock().memory.backing(address.0, size);
        let bytes = |piece: Piece| PhysicalBytes { memory: piece.physical.0, offset: piece.offset, size: piece.size };
        pieces.into_iter().map(bytes).collect()
    }

    /// Handles that were created and not released.
    pub fn live_handles(&self) -> usize {
        self.lock().memory.live_handles()
    }

    /// Events that were created and not destroyed.
    pub fn live_events(&self) -> usize {
        self.lock().events.live()
    }

    /// Whether an illegal access has destroyed some device's context.
    pub fn is_any_lost(&self) -> bool {
        self.lock().contexts.iter().any(|context| context.is_lost)
    }

    /// Whether an illegal access has destroyed `device`'s context.
    pub fn is_lost(&self, device: DeviceId) -> bool {
        self.lock().contexts[device.index()].is_lost
    }

    /// Whether the driver answers: not in a forked child, and not once it has shut down.
    pub fn is_running(&self) -> bool {
        self.lock().life == Life::Running
    }

    /// Whether this is the child of a fork.
    pub fn is_forked(&self) -> bool {
        self.lock().life == Life::Forked
    }

    /// What went wrong since the last call of the program, for calls that are not the program's own.
    ///
    /// # Errors
    /// [`SimError::Violation`], [`SimError::UnmappedAccess`] and [`SimError::UnorderedUnmap`], once.
    pub fn verdict(&self) -> Result<(), SimError> {
        self.note(|_| Ok(()))
    }

    /// The first violation, unmapped access or unordered unmap there ever was.
    ///
    /// # Errors
    /// [`SimError::Violation`], [`SimError::UnmappedAccess`] and [`SimError::UnorderedUnmap`], again at each call.
    pub fn check(&self) -> Result<(), SimError> {
        self.lock().first_failure.clone().map_or(Ok(()), Err)
    }

    /// Proves that nothing is left on any device: no memory, no address range, no event.
    ///
    /// # Errors
    /// [`Violation::Leak`](super::Violation::Leak), which says how much is left.
    pub fn check_empty(&self) -> Result<(), SimError> {
        self.lock().leak().map_or(Ok(()), |leak| Err(Box::new(leak).into()))
    }
}
