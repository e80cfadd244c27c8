//! What every driver has to do: one suite, run against the simulated GPU and against real ones.
//!
//! A clause is one sentence of the [`Driver`] trait's documentation, or one measured fact about CUDA that the allocator
//! builds on, as a function of that name. [`clauses`] lists them all. A driver is put to the suite by a [`Rig`]: the
//! driver, and a program beside it that uses the GPU. The suite only looks at what such a program could see, so the
//! same clauses hold the simulator to what the real driver does.
//!
//! Whether a call waited for queued work is seen without a clock: an event behind long work is still pending after a
//! call that did not wait, and done after one that did.

use std::time::Duration;

use super::{CaptureMode, Completion, Driver, DriverError, Status};
use crate::id::{DeviceId, DevicePtr, Event, Stream};

/// A list of clauses, each named as its function.
macro_rules! clauses {
    ($($check:ident),* $(,)?) => {
        &[$($crate::driver::contract::Clause { name: stringify!($check), check: $check },)*]
    };
}

/// Fails the clause unless something holds.
macro_rules! ensure {
    ($holds:expr, $($explanation:tt)+) => {
        if !$holds {
            return Err($crate::driver::contract::Stop::Failed(format!($($explanation)+)));
        }
    };
}

mod capture;
mod devices;
mod events;
mod mapping;
mod memory;
mod refusals;
mod waiting;

/// A driver, and a program that uses the GPU beside it.
///
/// What the rig itself needs from the GPU has to work; a rig panics where it does not.
pub trait Rig: Sync {
    /// The driver under test.
    fn driver(&self) -> &dyn Driver;

    /// A new stream of `device` that does not synchronise with the default stream.
    fn make_stream(&self, device: DeviceId) -> Stream;

    /// Destroys a stream.
    fn destroy_stream(&self, stream: Stream);

    /// Makes `device` current on the calling thread.
    fn set_current_device(&self, device: DeviceId);

    /// Enqueues a kernel that runs for `duration`.
    fn work(&self, stream: Stream, duration: Duration);

    /// Enqueues a kernel that writes `value` to every 32-bit word of `size` bytes at `address`.
    fn write(&self, stream: Stream, address: DevicePtr, size: u64, value: u32);

    /// The 32-bit word at `address`, read by `device` when all work queued on it has ended.
    fn read(&self, device: DeviceId, address: DevicePtr) -> u32;

    /// Starts a capture of `stream` by the calling thread.
    fn begin_capture(&self, stream: Stream, mode: CaptureMode);

    /// Ends it and throws the graph away; false if the capture had been spoiled.
    fn end_capture(&self, stream: Stream) -> bool;
}

/// One promise of the contract.
#[derive(Clone, Copy, Debug)]
pub struct Clause {
    /// The promise, as a sentence with underscores.
    pub name: &'static str,
    /// Holds a rig's driver to it. Leaves nothing allocated when it succeeds.
    pub check: fn(&dyn Rig) -> Verdict,
}

/// Why a clause did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It could not be tried: what the machine lacks.
    Skipped(String),
    /// The driver broke it: what was seen.
    Failed(String),
}

impl From<DriverError> for Stop {
    /// A driver call that the clause needed and that had to succeed.
    fn from(error: DriverError) -> Self {
        Self::Failed(format!("a call that must succeed did not: {error}"))
    }
}

/// Whether a clause held.
pub type Verdict = Result<(), Stop>;

/// All clauses. The first has to be the first thing that a process does with the GPU; the last ones are the most
/// likely to upset a driver that does not keep them.
pub fn clauses() -> impl Iterator<Item = &'static Clause> {
    let lists = [
        devices::CLAUSES,
        memory::CLAUSES,
        mapping::CLAUSES,
        refusals::CLAUSES,
        waiting::CLAUSES,
        capture::CLAUSES,
        events::CLAUSES,
    ];
    lists.into_iter().flatten()
}

/// The device that clauses use.
const DEVICE: DeviceId = DeviceId(0);

/// How long work runs that must outlast a few driver calls: 500 times the slowest that does not wait.
const LONG: Duration = Duration::from_millis(400);

const MIB: u64 = 1 << 20;

/// What a driver may keep for itself, as page tables: little beside the 64 MiB and more that clauses take and return.
const BOOKKEEPING_BYTES: u64 = 8 * MIB;

/// A device other than [`DEVICE`].
fn second_device(rig: &dyn Rig) -> Result<DeviceId, Stop> {
    if rig.driver().device_count()? < 2 {
        return Err(Stop::Skipped("needs two devices".to_owned()));
    }
    Ok(DeviceId(1))
}

/// The granularity of mappings.
fn granularity(rig: &dyn Rig) -> Result<u64, Stop> {
    let capabilities = rig.driver().capabilities(DEVICE)?;
    if !capabilities.virtual_memory {
        return Err(Stop::Skipped(format!("needs virtual memory: {}", capabilities.virtual_memory_missing)));
    }
    Ok(capabilities.granularity_bytes)
}

fn free_bytes(rig: &dyn Rig) -> Result<u64, Stop> {
    Ok(rig.driver().memory_info(DEVICE)?.free_bytes)
}

/// Checks that as much memory is free as was `before`, but for the driver's own bookkeeping.
fn expect_free(rig: &dyn Rig, what: &str, before: u64) -> Verdict {
    let now = free_bytes(rig)?;
    ensure!(now + BOOKKEEPING_BYTES >= before, "{what}: of {before} free bytes, {now} are left");
    Ok(())
}

/// Checks that a call was refused, and why.
#[expect(clippy::needless_pass_by_value, reason = "what is checked is the outcome of a call made in the argument")]
fn refused<T>(what: &str, outcome: super::Result<T>, status: Status) -> Verdict {
    match outcome {
        Err(error) if error.status == status => Ok(()),
        Err(error) => Err(Stop::Failed(format!("{what}: expected {status}, but {error}"))),
        Ok(_) => Err(Stop::Failed(format!("{what}: expected {status}, but it was allowed"))),
    }
}

/// Checks how far an event is.
fn expect_completion(rig: &dyn Rig, what: &str, device: DeviceId, event: Event, expected: Completion) -> Verdict {
    let found = rig.driver().query_event(device, event)?;
    ensure!(found == expected, "{what}: the event should be {expected:?} and is {found:?}");
    Ok(())
}

/// Keeps `stream` busy for [`LONG`]: the event behind that work.
fn keep_busy(rig: &dyn Rig, stream: Stream) -> Result<Event, Stop> {
    let event = rig.driver().create_event(stream.device)?;
    rig.work(stream, LONG);
    rig.driver().record_event(event, stream)?;
    expect_completion(rig, "right behind long work", stream.device, event, Completion::Pending)?;
    Ok(event)
}

/// Waits for the work that [`keep_busy`] queued, and gives all up.
fn let_finish(rig: &dyn Rig, stream: Stream, event: Event) -> Verdict {
    rig.driver().synchronize_event(stream.device, event)?;
    rig.driver().destroy_event(stream.device, event)?;
    rig.destroy_stream(stream);
    Ok(())
}

/// Runs a part of a clause on a thread that has made no call yet.
fn on_new_thread(body: impl FnOnce() -> Verdict + Send) -> Verdict {
    std::thread::scope(|scope| scope.spawn(body).join())
        .unwrap_or_else(|_| Err(Stop::Failed("the other thread panicked".to_owned())))
}
