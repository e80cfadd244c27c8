//! The versioned table of functions for other programs than torch: `rallocator_api_v1()` in `include/rallocator.h`.
//!
//! Nothing in it raises: a call that can fail returns a [`Status`] and leaves its text for [`last_error`]. The one thing
//! that may pass through is an exception out of the caller's own filter of streams, in `allocate`.
//!
//! Fields are only ever added at the end, and `size` tells how far the table reaches. A change of meaning would be a
//! new function, `rallocator_api_v2()`.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use alloc_core::checkpoint::Checkpoint;
use alloc_core::id::{PoolId, StreamHandle};

use super::api_memory::{Block, MemoryVisitor, RecordingOptions, StackVisitor, TrackerCallback};
use super::api_pools::AddressVisitor;
use super::api_sources::SourceTable;
use super::api_stats::{DeviceStats, OutOfMemoryDetails, PoolVisitor, Settings};
use super::{api_memory, api_pools, api_sharing, api_sources, api_stats};
use super::{device_pointer, rallocator_base_allocation, raw_address, stream_handle};
use crate::failure::Failure;
use crate::hooks;

/// How a call ended: `rallocator_status`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    /// Done.
    Ok = 0,
    /// The device has too little memory for it.
    OutOfMemory = 1,
    /// Any other failure.
    Failed = 2,
    /// A source of a private pool failed.
    SourceFailed = 3,
}

/// Whether requests on `stream` go to the pool: `rallocator_stream_filter`.
type FilterCallback = unsafe extern "C-unwind" fn(context: *mut c_void, stream: *mut c_void) -> bool;
/// Called once, when the filter is no longer needed.
type ReleaseCallback = unsafe extern "C" fn(context: *mut c_void);
/// Called for each statistic: `rallocator_stat_visitor`.
type StatCallback = unsafe extern "C" fn(context: *mut c_void, key: *const c_char, value: i64);

/// `struct rallocator_api`, field by field; the header says what each does.
#[repr(C)]
pub(crate) struct ApiTable {
    version: u32,
    size: u32,
    last_error: extern "C" fn() -> *const c_char,
    allocate: unsafe extern "C-unwind" fn(usize, i32, *mut c_void, *mut *mut c_void) -> Status,
    free: extern "C" fn(*mut c_void, i32),
    record_stream: extern "C" fn(*mut c_void, *mut c_void),
    empty_cache: extern "C" fn() -> Status,
    base_allocation: unsafe extern "C" fn(*mut c_void, *mut usize) -> *mut c_void,
    begin_pool:
        unsafe extern "C" fn(i32, u64, u64, Option<FilterCallback>, *mut c_void, Option<ReleaseCallback>) -> Status,
    end_pool: extern "C" fn(i32, u64, u64),
    release_pool: extern "C" fn(i32, u64, u64),
    retire_stream: extern "C" fn(*mut c_void),
    pin: extern "C" fn(*mut c_void) -> bool,
    unpin: extern "C" fn(*mut c_void) -> bool,
    set_memory_fraction: extern "C" fn(i32, f64) -> Status,
    memory_fraction: extern "C" fn(i32) -> f64,
    visit_stats: unsafe extern "C" fn(i32, StatCallback, *mut c_void),
    reset_peak_stats: extern "C" fn(i32),
    reset_accumulated_stats: extern "C" fn(i32),
    init: extern "C" fn(i32),
    device_count: extern "C" fn() -> i32,
    take_back: extern "C" fn(*mut c_void, i32) -> bool,
    find_block: unsafe extern "C" fn(*mut c_void, *mut Block) -> bool,
    memory_in_use: unsafe extern "C" fn(i32, *mut u64, *mut u64),
    largest_available: extern "C" fn(i32) -> u64,
    last_out_of_memory: unsafe extern "C" fn(*mut OutOfMemoryDetails) -> bool,
    device_stats: unsafe extern "C" fn(i32, *mut DeviceStats),
    visit_private_pools: unsafe extern "C" fn(i32, PoolVisitor, *mut c_void),
    settings: unsafe extern "C" fn(*mut Settings),
    create_pool: extern "C" fn(i32, u64, u64) -> Status,
    pool_users: extern "C" fn(i32, u64, u64) -> u32,
    serve_when_out_of_memory: extern "C" fn(i32, u64, u64, bool) -> bool,
    forbid_splits: extern "C" fn(i32, u64, u64) -> bool,
    empty_pool: extern "C" fn(u64, u64) -> Status,
    checkpoint_pool: extern "C" fn(i32, u64, u64) -> *mut Checkpoint,
    drop_checkpoint: unsafe extern "C" fn(*mut Checkpoint),
    restore_pool: unsafe extern "C" fn(i32, *const Checkpoint, AddressVisitor, AddressVisitor, *mut c_void) -> Status,
    visit_pool: unsafe extern "C" fn(i32, u64, u64, AddressVisitor, *mut c_void) -> bool,
    reach_peer: extern "C" fn(i32, i32) -> Status,
    visit_memory: unsafe extern "C" fn(u64, u64, *const MemoryVisitor),
    record_history: unsafe extern "C" fn(*const RecordingOptions, bool) -> Status,
    is_recording: extern "C" fn() -> bool,
    visit_stacks: unsafe extern "C" fn(StackVisitor, *mut c_void),
    stack_of: extern "C" fn(*mut c_void) -> u32,
    annotate: unsafe extern "C" fn(*mut c_void, *const c_char),
    set_label: unsafe extern "C" fn(*const c_char),
    label: extern "C" fn() -> *const c_char,
    set_compile_context: unsafe extern "C" fn(*const c_char),
    add_tracker: unsafe extern "C" fn(TrackerCallback, *mut c_void) -> Status,
    share: unsafe extern "C" fn(*mut c_void, *mut u64) -> *const c_char,
    open_shared: unsafe extern "C" fn(*const c_char, i32, *mut *mut c_void) -> Status,
    close_shared: extern "C" fn(*mut c_void),
    create_pool_from: unsafe extern "C" fn(i32, u64, u64, *const SourceTable) -> Status,
    restrict_moves: extern "C" fn(i32, u64, u64, u32) -> Status,
    device_of: extern "C" fn(*mut c_void) -> i32,
}

static TABLE: ApiTable = ApiTable {
    version: 1,
    size: size_of::<ApiTable>() as u32,
    last_error,
    allocate,
    free,
    record_stream: super::rallocator_record_stream,
    empty_cache,
    base_allocation: rallocator_base_allocation,
    begin_pool,
    end_pool: super::rallocator_end_pool,
    release_pool: super::rallocator_release_pool,
    retire_stream,
    pin,
    unpin,
    set_memory_fraction,
    memory_fraction,
    visit_stats,
    reset_peak_stats,
    reset_accumulated_stats,
    init: api_stats::init,
    device_count: api_stats::device_count,
    take_back,
    find_block: api_memory::find_block,
    memory_in_use: api_stats::memory_in_use,
    largest_available: api_stats::largest_available,
    last_out_of_memory: api_stats::last_out_of_memory,
    device_stats: api_stats::device_stats,
    visit_private_pools: api_stats::visit_private_pools,
    settings: api_stats::settings,
    create_pool: api_pools::create_pool,
    pool_users: api_pools::pool_users,
    serve_when_out_of_memory: api_pools::serve_when_out_of_memory,
    forbid_splits: api_pools::forbid_splits,
    empty_pool: api_pools::empty_pool,
    checkpoint_pool: api_pools::checkpoint_pool,
    drop_checkpoint: api_pools::drop_checkpoint,
    restore_pool: api_pools::restore_pool,
    visit_pool: api_pools::visit_pool,
    reach_peer: api_pools::reach_peer,
    visit_memory: api_memory::visit_memory,
    record_history: api_memory::record_history,
    is_recording: api_memory::is_recording,
    visit_stacks: api_memory::visit_stacks,
    stack_of: api_memory::stack_of,
    annotate: api_memory::annotate,
    set_label: api_memory::set_label,
    label: api_memory::label,
    set_compile_context: api_memory::set_compile_context,
    add_tracker: api_memory::add_tracker,
    share: api_sharing::share,
    open_shared: api_sharing::open_shared,
    close_shared: api_sharing::close_shared,
    create_pool_from: api_sources::create_pool_from,
    restrict_moves: api_pools::restrict_moves,
    device_of: api_memory::device_of,
};

/// The table, which lives as long as the process.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rallocator_api_v1() -> &'static ApiTable {
    &TABLE
}

thread_local! {
    /// The text of this thread's last failure.
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

extern "C" fn last_error() -> *const c_char {
    // A thread that is ending has lost its text already.
    LAST_ERROR.try_with(|text| text.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

unsafe extern "C-unwind" fn allocate(
    size: usize,
    device: i32,
    stream: *mut c_void,
    address: *mut *mut c_void,
) -> Status {
    let (status, memory) = match hooks::malloc(size, device, stream_handle(stream)) {
        Ok(memory) => (Status::Ok, memory),
        Err(failure) => (failed(&failure), None),
    };
    // SAFETY: the header asks for an address that may be written.
    unsafe { address.write(raw_address(memory)) };
    status
}

extern "C" fn free(address: *mut c_void, device: i32) {
    hooks::free(device_pointer(address), device);
}

extern "C" fn take_back(address: *mut c_void, device: i32) -> bool {
    hooks::free(device_pointer(address), device)
}

extern "C" fn empty_cache() -> Status {
    status(hooks::empty_cache())
}

unsafe extern "C" fn begin_pool(
    device: i32,
    first: u64,
    second: u64,
    filter: Option<FilterCallback>,
    context: *mut c_void,
    release: Option<ReleaseCallback>,
) -> Status {
    let filter = CallbackFilter { filter, context, release };
    status(hooks::begin_pool(device, PoolId(first, second), Arc::new(move |stream| filter.accepts(stream))))
}

extern "C" fn retire_stream(stream: *mut c_void) {
    hooks::retire_stream(stream_handle(stream));
}

extern "C" fn pin(address: *mut c_void) -> bool {
    device_pointer(address).is_some_and(hooks::pin)
}

extern "C" fn unpin(address: *mut c_void) -> bool {
    device_pointer(address).is_some_and(hooks::unpin)
}

extern "C" fn set_memory_fraction(device: i32, fraction: f64) -> Status {
    status(hooks::set_memory_fraction(device, fraction))
}

extern "C" fn memory_fraction(device: i32) -> f64 {
    hooks::memory_fraction(device)
}

unsafe extern "C" fn visit_stats(device: i32, visit: StatCallback, context: *mut c_void) {
    for (key, value) in hooks::stats(device) {
        let Ok(key) = CString::new(key) else { continue };
        // SAFETY: the header asks for a function that takes these, and for the context that it expects.
        unsafe { visit(context, key.as_ptr(), value) };
    }
}

extern "C" fn reset_peak_stats(device: i32) {
    hooks::reset_peak_stats(device);
}

extern "C" fn reset_accumulated_stats(device: i32) {
    hooks::reset_accumulated_stats(device);
}

pub(super) fn status(result: Result<(), Failure>) -> Status {
    result.map_or_else(|failure| failed(&failure), |()| Status::Ok)
}

/// Keeps the failure's text for [`last_error`].
pub(super) fn failed(failure: &Failure) -> Status {
    api_stats::keep_details(failure);
    let text = CString::new(failure.to_string().replace('\0', "")).unwrap_or_default();
    // A thread that is ending has nowhere to keep it any more; the status still tells of the failure.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    if failure.is_out_of_memory() {
        Status::OutOfMemory
    } else if failure.is_of_source() {
        Status::SourceFailed
    } else {
        Status::Failed
    }
}

/// A filter that the caller passed as a function and its context. Released once, on drop.
struct CallbackFilter {
    filter: Option<FilterCallback>,
    context: *mut c_void,
    release: Option<ReleaseCallback>,
}

// SAFETY: the header asks for functions that may be called from any thread.
unsafe impl Send for CallbackFilter {}
// SAFETY: as above, also from several at once.
unsafe impl Sync for CallbackFilter {}

impl CallbackFilter {
    /// Asks the caller's function; without one every stream is accepted.
    fn accepts(&self, stream: StreamHandle) -> bool {
        let Some(filter) = self.filter else { return true };
        // SAFETY: the header asks for a function that takes this context, which is not released before the drop.
        unsafe { filter(self.context, stream.0 as *mut c_void) }
    }
}

impl Drop for CallbackFilter {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the header asks for a function that takes this context; it is called only here.
            unsafe { release(self.context) };
        }
    }
}
