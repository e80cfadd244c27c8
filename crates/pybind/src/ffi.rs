//! The C boundary: what torch loads from this library, and all of this crate's `unsafe` code.
//!
//! The functions here only translate: arguments into the newtypes of the core, results into what C expects. What they
//! do is in [`crate::hooks`]. `include/rallocator.h` declares each of them for C.
//!
//! Functions that may raise are `extern "C-unwind"` and raise as their last act, with nothing left to drop.
//! The declarations that torch expects are the members of `CUDAPluggableAllocator`:
//! <https://github.com/pytorch/pytorch/blob/v2.9.0/torch/csrc/cuda/CUDAPluggableAllocator.h>

mod api_memory;
mod api_pools;
mod api_sharing;
mod api_sources;
mod api_stats;
mod api_table;
mod cxx_exception;
pub(crate) mod descriptors;
mod largest_block;
mod library;
mod profiler;
mod std_function;

use std::ffi::c_void;

use alloc_core::id::{DevicePtr, PoolId, StreamHandle};

use crate::{hooks, process};
pub(crate) use largest_block::answer_cache_info;
pub(crate) use profiler::tell_profiler;
use std_function::StdFunction;

/// The address of the table of functions.
pub(crate) fn api_address() -> usize {
    std::ptr::from_ref(api_table::rallocator_api_v1()) as usize
}

/// The addresses of the functions for which torch has setters, by the setter's name.
pub(crate) fn hook_addresses() -> [(&'static str, usize); 8] {
    [
        ("set_init_fn", rallocator_init as *const () as usize),
        ("set_reset_fn", rallocator_reset as *const () as usize),
        ("set_memory_fraction_fn", rallocator_set_memory_fraction as *const () as usize),
        ("set_base_alloc_fn", rallocator_base_allocation as *const () as usize),
        ("set_record_stream_fn", rallocator_record_stream as *const () as usize),
        ("set_begin_allocate_to_pool", rallocator_begin_pool as *const () as usize),
        ("set_end_allocate_to_pool_fn", rallocator_end_pool as *const () as usize),
        ("set_release_pool", rallocator_release_pool as *const () as usize),
    ]
}

/// The address of [`rallocator_malloc`], to compare with the one that torch finds in the library that it loads.
pub(crate) fn malloc_address() -> usize {
    rallocator_malloc as *const () as usize
}

/// `size` bytes on `device` for work on `stream`; null only for size 0.
///
/// Raises `c10::OutOfMemoryError` or, for any other failure, `std::runtime_error`.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn rallocator_malloc(size: usize, device: i32, stream: *mut c_void) -> *mut c_void {
    match hooks::malloc(size, device, stream_handle(stream)) {
        Ok(address) => {
            let address = raw_address(address);
            profiler::report(address, signed(size), device);
            address
        }
        Err(failure) => cxx_exception::throw(failure),
    }
}

/// Takes back memory from [`rallocator_malloc`]. Never raises; `size` and `stream` are not trusted, and only the
/// profiler is told of the size.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rallocator_free(address: *mut c_void, size: usize, device: i32, _stream: *mut c_void) {
    hooks::free(device_pointer(address), device);
    profiler::report(address, -signed(size), device);
}

/// Notes that work on `stream` uses the memory at `address`. Never raises.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rallocator_record_stream(address: *mut c_void, stream: *mut c_void) {
    hooks::record_stream(device_pointer(address), stream_handle(stream));
}

/// torch has initialised CUDA. Never raises.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rallocator_init(device_count: i32) {
    hooks::init(device_count);
}

/// `torch.cuda.empty_cache()`: gives cached memory back to the driver. Raises `std::runtime_error`.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn rallocator_reset() {
    if let Err(failure) = hooks::empty_cache() {
        cxx_exception::throw(failure);
    }
}

/// `torch.cuda.set_per_process_memory_fraction(fraction, device)`. Raises `std::runtime_error`.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn rallocator_set_memory_fraction(fraction: f64, device: i32) {
    if let Err(failure) = hooks::set_memory_fraction(device, fraction) {
        cxx_exception::throw(failure);
    }
}

/// The base of the segment that holds the memory at `address`, and at `size` its bytes. Never raises.
///
/// Any other address is returned as it came, with size 0.
///
/// # Safety
///
/// `size` is null or points to a `size_t` that may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rallocator_base_allocation(address: *mut c_void, size: *mut usize) -> *mut c_void {
    let segment = device_pointer(address).and_then(hooks::base_allocation);
    if !size.is_null() {
        let bytes = segment.map_or(0, |(_, bytes)| bytes);
        // SAFETY: it is not null, and the caller promises that it may then be written.
        unsafe { size.write(bytes as usize) };
    }
    segment.map_or(address, |(base, _)| raw_address(Some(base)))
}

/// Requests on streams that `filter` accepts are met from the pool until its end. Raises `std::runtime_error`.
///
/// # Safety
///
/// `filter` points to a `std::function<bool(cudaStream_t)>` of libstdc++ that lives during this call.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn rallocator_begin_pool(
    device: i32,
    first: u64,
    second: u64,
    filter: *const [u64; 4],
) {
    // SAFETY: the caller promises that it is such a function and alive.
    let filter = unsafe { StdFunction::copy(filter) };
    if let Err(failure) = hooks::begin_pool(device, PoolId(first, second), filter.into_stream_filter()) {
        cxx_exception::throw(failure);
    }
}

/// Requests go to the default pool again. Never raises.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rallocator_end_pool(device: i32, first: u64, second: u64) {
    hooks::end_pool(device, PoolId(first, second));
}

/// One user of the pool is gone. Never raises.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rallocator_release_pool(device: i32, first: u64, second: u64) {
    hooks::release_pool(device, PoolId(first, second));
}

/// Has [`process::on_forked_child`] called in each forked child from now on.
pub(crate) fn call_at_fork() {
    extern "C" fn child() {
        process::on_forked_child();
    }
    // SAFETY: the handler is a static function that does one atomic operation, which is allowed in a forked child.
    // A failure (no memory for the list of handlers) leaves a child without the clear message, and the driver's own
    // refusal to work there; nothing else could be done about it here.
    unsafe { libc::pthread_atfork(None, None, Some(child)) };
}

/// Has [`process::on_exit`] called when the process begins to end.
pub(crate) fn call_at_exit() {
    extern "C" fn ending() {
        process::on_exit();
    }
    // SAFETY: the handler is a static function, and this library is never unloaded: Python keeps extensions.
    unsafe { libc::atexit(ending) };
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn device_pointer(address: *mut c_void) -> Option<DevicePtr> {
    (!address.is_null()).then_some(DevicePtr(address as u64))
}

fn raw_address(pointer: Option<DevicePtr>) -> *mut c_void {
    pointer.map_or(0, |pointer| pointer.0) as *mut c_void
}

fn stream_handle(stream: *mut c_void) -> StreamHandle {
    StreamHandle(stream as u64)
}
