//! Telling torch's profiler of memory: `torch.profiler` with `profile_memory=True`.
//!
//! torch's own allocator calls a function of libc10 for each allocation and each free while a profiler listens;
//! `CUDAPluggableAllocator` does not. The two functions, by the declarations that they have had since torch 2.0:
//! <https://github.com/pytorch/pytorch/blob/v2.9.0/c10/core/Allocator.h>

use std::ffi::c_void;
use std::sync::OnceLock;

use super::library::Library;
use crate::hooks;

/// `bool c10::memoryProfilingEnabled()`: of this thread.
type IsListening = unsafe extern "C" fn() -> bool;
/// `void c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device)`: the address, the bytes that
/// it gained or lost, what is allocated and reserved in all, and the device, whose two bytes are its kind and index.
type Report = unsafe extern "C" fn(*mut c_void, i64, usize, usize, u16);

/// `c10::DeviceType::CUDA`.
const CUDA: u8 = 1;

struct Profiler {
    is_listening: IsListening,
    report: Report,
}

static PROFILER: OnceLock<Profiler> = OnceLock::new();

/// Has the profiler told from now on. False if this torch is built otherwise.
pub(crate) fn tell_profiler() -> bool {
    let find = || {
        let library = Library::loaded(c"libc10.so")?;
        // SAFETY: the mangled name spells out the function of this type.
        let is_listening = unsafe { library.symbol(c"_ZN3c1022memoryProfilingEnabledEv") }?;
        // SAFETY: as above.
        let report = unsafe { library.symbol(c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE") }?;
        Some(Profiler { is_listening, report })
    };
    find().is_some_and(|profiler| {
        // Of two calls the second finds the same functions.
        let _ = PROFILER.set(profiler);
        true
    })
}

/// `bytes` were obtained at an address, or given back if they are negative. Called under no lock.
#[inline]
pub(super) fn report(address: *mut c_void, bytes: i64, device: i32) {
    let Some(profiler) = PROFILER.get() else { return };
    // SAFETY: the function takes nothing and looks at a variable of the thread.
    if unsafe { (profiler.is_listening)() } {
        tell(profiler, address, bytes, device);
    }
}

#[cold]
fn tell(profiler: &Profiler, address: *mut c_void, bytes: i64, device: i32) {
    let (allocated, reserved) = hooks::allocated_and_reserved(device);
    let device = u16::from_le_bytes([CUDA, device.to_le_bytes()[0]]);
    // SAFETY: the function only notes what it is told; a `c10::Device` of two bytes is passed as they are.
    unsafe { (profiler.report)(address, bytes, allocated as usize, reserved as usize, device) };
}
