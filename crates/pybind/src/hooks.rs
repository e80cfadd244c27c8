//! What each hook does, in safe code: the layer between the C functions and the allocator.
//!
//! - A hook that obtains something returns a [`Failure`], which the C layer throws as its last act.
//! - A hook that gives something back never fails: there is nobody who could act on it, and torch calls these from
//!   destructors, where an exception ends the process. What they could not do is counted ([`counters`]).
//! - A panic never leaves a hook.
//!
//! An exception of C++ may pass through [`malloc`], out of torch's own filter of streams. Nothing on its way may catch
//! it, since Rust ends a process that tries to; so the filter runs outside the `catch_unwind`, and under no lock.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use alloc_core::allocator::{FreeOutcome, RecordOutcome, StreamFilter, Tracker};
use alloc_core::error::AllocError;
use alloc_core::id::{DeviceId, DevicePtr, PoolId, StreamHandle};
use alloc_core::stats::{Family, Stats};

use crate::backend::Backend;
use crate::failure::Failure;
use crate::recording::Call;
use crate::{observers, pools, probe, process, recording, sharing};

/// Calls that were answered by doing nothing, since no error may be raised from them.
static FOREIGN_POINTERS: AtomicU64 = AtomicU64::new(0);
static REPEATED_FREES: AtomicU64 = AtomicU64::new(0);
static LEAKED_FREES: AtomicU64 = AtomicU64::new(0);
static CAUGHT_PANICS: AtomicU64 = AtomicU64::new(0);
static IGNORED_ERRORS: AtomicU64 = AtomicU64::new(0);

/// How many devices torch knows of; 0 until it has initialised CUDA.
static DEVICE_COUNT: AtomicU32 = AtomicU32::new(0);

/// How many devices torch knows of; 0 until it has initialised CUDA.
pub(crate) fn device_count() -> u32 {
    DEVICE_COUNT.load(Ordering::Relaxed)
}

/// How often a hook quietly did nothing, by reason. Diagnostics: each of them should be 0.
pub(crate) fn counters() -> [(&'static str, u64); 5] {
    [
        ("foreign_pointers", FOREIGN_POINTERS.load(Ordering::Relaxed)),
        ("repeated_frees", REPEATED_FREES.load(Ordering::Relaxed)),
        ("leaked_frees", LEAKED_FREES.load(Ordering::Relaxed)),
        ("caught_panics", CAUGHT_PANICS.load(Ordering::Relaxed)),
        ("ignored_errors", IGNORED_ERRORS.load(Ordering::Relaxed)),
    ]
}

/// `size` bytes on `device` for work on `stream`; `None` for size 0, which costs nothing and needs no free.
pub(crate) fn malloc(size: usize, device: i32, stream: StreamHandle) -> Result<Option<DevicePtr>, Failure> {
    let backend = process::for_request()?;
    if size == 0 {
        return Ok(None);
    }
    let device = device_id(device)?;
    process::mark_in_use();
    let pool = backend.route(device, stream).filter(|_| !pools::is_asking_source());
    let caller = recording::caller(Call::Malloc);
    let result = guarded(|| Ok(backend.malloc(size as u64, device, stream, pool)?));
    recording::end(caller);
    if let Err(Failure::Allocator(AllocError::OutOfMemory(report))) = &result {
        observers::notify(report);
    }
    result
}

/// Takes back what [`malloc`] gave; returns whether there was something to take. Null, foreign and repeated pointers are
/// counted and otherwise ignored.
///
/// The device is only a hint: torch may pass a stale one.
pub(crate) fn free(pointer: Option<DevicePtr>, device: i32) -> bool {
    let Some(pointer) = pointer else { return false };
    // Where nothing may be done any more, all that was inherited or is left counts as taken.
    let Some(backend) = process::for_notice() else { return true };
    let hint = DeviceId(u32::try_from(device).unwrap_or(0));
    let caller = recording::caller(Call::Free);
    let freed = catch_unwind(AssertUnwindSafe(|| {
        sharing::on_free(pointer);
        backend.free(pointer, hint)
    }));
    recording::end(caller);
    match freed {
        Ok(FreeOutcome::Freed | FreeOutcome::Null) => return true,
        Ok(FreeOutcome::Leaked) => count(&LEAKED_FREES),
        Err(_) => count(&CAUGHT_PANICS),
        Ok(FreeOutcome::NotOurs) => {
            count(&FOREIGN_POINTERS);
            return false;
        }
        Ok(FreeOutcome::Repeated) => {
            count(&REPEATED_FREES);
            return false;
        }
    }
    true
}

/// Notes that work on `stream` uses the memory at `pointer`, so that its free waits for that work.
pub(crate) fn record_stream(pointer: Option<DevicePtr>, stream: StreamHandle) {
    let Some(pointer) = pointer else { return };
    notice(|backend| match backend.record_stream(pointer, stream) {
        // A use on a stream that the driver does not name is kept too, and a broken device hands out nothing any more.
        RecordOutcome::Recorded | RecordOutcome::UnknownStream | RecordOutcome::Broken => {}
        RecordOutcome::NotOurs => count(&FOREIGN_POINTERS),
    });
}

/// torch has initialised CUDA with so many devices.
pub(crate) fn init(device_count: i32) {
    if device_count > 0 && process::for_notice().is_some() {
        DEVICE_COUNT.store(device_count.unsigned_abs(), Ordering::Relaxed);
        process::mark_in_use();
    }
}

/// Gives cached memory back to where it came from.
pub(crate) fn empty_cache() -> Result<(), Failure> {
    if probe::notes(format_args!("empty_cache")) || process::phase() != process::Phase::InUse {
        // Before the first request there is nothing to release, and after a fork or at exit nothing may be.
        return Ok(());
    }
    let backend = process::for_request()?;
    let caller = recording::caller(Call::Free);
    let result = guarded(|| Ok(backend.empty_cache()?));
    recording::end(caller);
    result
}

/// Lets work on `device` use the memory of `peer`, as far as the settings let it: both are in use from now on.
pub(crate) fn reach_peer(device: i32, peer: i32) -> Result<(), Failure> {
    let backend = process::for_request()?;
    let (device, peer) = (device_id(device)?, device_id(peer)?);
    process::mark_in_use();
    guarded(|| Ok(backend.reach_peer(device, peer)?))
}

/// Has a tracker told of all memory that comes and goes from now on.
pub(crate) fn add_tracker(tracker: Tracker) -> Result<(), Failure> {
    let backend = process::for_request()?;
    guarded(|| Ok(backend.add_tracker(tracker)?))
}

/// Limits `device` to a fraction of its memory.
pub(crate) fn set_memory_fraction(device: i32, fraction: f64) -> Result<(), Failure> {
    if probe::notes(format_args!("set_memory_fraction {fraction} {device}")) {
        return Ok(());
    }
    let backend = process::for_request()?;
    let device = device_id(device)?;
    process::mark_in_use();
    guarded(|| Ok(backend.set_memory_fraction(device, fraction)?))
}

/// The fraction of its memory that `device` is limited to; 1 where no limit was set or can be asked for.
pub(crate) fn memory_fraction(device: i32) -> f64 {
    ask(device, |backend, device| Some(backend.memory_fraction(device))).unwrap_or(1.0)
}

/// The segment that holds the memory at an allocated address, as base and size in bytes; `None` for any other.
pub(crate) fn base_allocation(pointer: DevicePtr) -> Option<(DevicePtr, u64)> {
    let mut segment = None;
    notice(|backend| segment = backend.base_allocation(pointer));
    segment
}

/// The bytes that are allocated and reserved on `device`.
pub(crate) fn allocated_and_reserved(device: i32) -> (u64, u64) {
    ask(device, Backend::allocated_and_reserved)
}

/// The bytes of the largest block that a request on `device` could get without giving anything back.
pub(crate) fn largest_available(device: i32) -> u64 {
    ask(device, Backend::largest_available)
}

/// From now on requests on streams that `filter` accepts are met from `pool`. Each begin needs its own release.
pub(crate) fn begin_pool(device: i32, pool: PoolId, filter: StreamFilter) -> Result<(), Failure> {
    if probe::notes(format_args!("begin_pool {device} {} {}", pool.0, pool.1)) {
        return Ok(());
    }
    let backend = process::for_request()?;
    let device = device_id(device)?;
    process::mark_in_use();
    guarded(move || Ok(backend.begin_pool(device, pool, filter)?))
}

/// Requests go to the default pool again.
pub(crate) fn end_pool(device: i32, pool: PoolId) {
    if probe::notes(format_args!("end_pool {device} {} {}", pool.0, pool.1)) {
        return;
    }
    ask(device, |backend, device| backend.end_pool(device, pool));
}

/// One user of the pool is gone. With the last one its memory can be used for other things.
pub(crate) fn release_pool(device: i32, pool: PoolId) {
    if probe::notes(format_args!("release_pool {device} {} {}", pool.0, pool.1)) {
        return;
    }
    ask(device, |backend, device| backend.release_pool(device, pool));
}

/// `stream` is about to be destroyed: its handle may come back for another one.
pub(crate) fn retire_stream(stream: StreamHandle) {
    notice(|backend| {
        if backend.retire_stream(stream).is_err() {
            count(&IGNORED_ERRORS);
        }
    });
}

/// Keeps the pages of the memory at `pointer` where they are; false for an address that is not ours.
pub(crate) fn pin(pointer: DevicePtr) -> bool {
    let mut pinned = false;
    notice(|backend| pinned = backend.pin(pointer));
    pinned
}

/// Takes one [`pin`] back; false for an address that is not ours or not pinned.
pub(crate) fn unpin(pointer: DevicePtr) -> bool {
    let mut unpinned = false;
    notice(|backend| unpinned = backend.unpin(pointer));
    unpinned
}

/// All counters of `device`; all zero where there are none.
pub(crate) fn counted(device: i32) -> Stats {
    ask(device, Backend::counted)
}

/// All statistics of `device`, as torch names them; empty where there are none.
pub(crate) fn stats(device: i32) -> Vec<(String, i64)> {
    ask(device, Backend::stats)
}

/// What each private pool of `device` has reserved.
pub(crate) fn private_reserved(device: i32) -> Vec<(PoolId, Family)> {
    ask(device, Backend::private_reserved)
}

/// Sets each peak of `device` to the present value.
pub(crate) fn reset_peak_stats(device: i32) {
    ask(device, Backend::reset_peak_stats);
}

/// Sets the totals of `device` since the start to zero.
pub(crate) fn reset_accumulated_stats(device: i32) {
    ask(device, Backend::reset_accumulated_stats);
}

pub(crate) fn device_id(device: i32) -> Result<DeviceId, Failure> {
    u32::try_from(device).map(DeviceId).map_err(|_| Failure::Device(device))
}

/// Runs a call that may fail; a panic becomes a failure as well.
pub(crate) fn guarded<T>(call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // The allocator marks a device as broken when a panic passes through it under a lock, so what is seen after a
    // caught panic is never half changed.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        count(&CAUGHT_PANICS);
        Err(Failure::from_panic(&*payload))
    })
}

/// What is answered about `device` by a call that must not fail; the default where there is no such device, or no
/// allocator that may be used.
pub(crate) fn ask<T: Default>(device: i32, question: impl FnOnce(&'static Backend, DeviceId) -> T) -> T {
    let mut answer = T::default();
    if let Ok(device) = device_id(device) {
        notice(|backend| answer = question(backend, device));
    }
    answer
}

/// Runs a call that must not fail, if there is an allocator that may be used; a panic is counted.
pub(crate) fn notice(call: impl FnOnce(&'static Backend)) {
    if let Some(backend) = process::for_notice()
        && catch_unwind(AssertUnwindSafe(|| call(backend))).is_err()
    {
        count(&CAUGHT_PANICS);
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
