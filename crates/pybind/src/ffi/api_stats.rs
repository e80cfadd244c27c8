//! Statistics and settings of the table of functions, as C lays them out: `include/rallocator.h` says what each field is.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_void};
use std::sync::OnceLock;

use alloc_core::config::{Config, Policy, Roundup};
use alloc_core::error::{AllocError, OutOfMemory};
use alloc_core::size::SizeClass;
use alloc_core::stats;

use crate::config::recorded;
use crate::failure::Failure;
use crate::{hooks, process};

/// `rallocator_counter`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Counter {
    current: i64,
    peak: i64,
    allocated: i64,
    freed: i64,
}

impl From<&stats::Counter> for Counter {
    fn from(counter: &stats::Counter) -> Self {
        Self {
            current: signed(counter.current),
            peak: signed(counter.peak),
            allocated: signed(counter.allocated()),
            freed: signed(counter.freed),
        }
    }
}

/// `rallocator_family`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Family {
    all: Counter,
    small_pool: Counter,
    large_pool: Counter,
}

impl From<&stats::Family> for Family {
    fn from(family: &stats::Family) -> Self {
        Self {
            all: (&family.all).into(),
            small_pool: family.class(SizeClass::Small).into(),
            large_pool: family.class(SizeClass::Large).into(),
        }
    }
}

/// `rallocator_device_stats`.
#[repr(C)]
pub(super) struct DeviceStats {
    allocation: Family,
    segment: Family,
    active: Family,
    inactive_split: Family,
    allocated_bytes: Family,
    reserved_bytes: Family,
    active_bytes: Family,
    inactive_split_bytes: Family,
    requested_bytes: Family,
    oversize_allocations: Counter,
    oversize_segments: Counter,
    num_alloc_retries: i64,
    num_ooms: i64,
    num_sync_all_streams: i64,
    num_device_alloc: i64,
    num_device_free: i64,
    num_oom_rejections: i64,
    max_split_size: i64,
}

impl DeviceStats {
    fn new(stats: &stats::Stats, max_split_size: Option<u64>) -> Self {
        Self {
            allocation: (&stats.allocation).into(),
            segment: (&stats.segment).into(),
            active: (&stats.active).into(),
            inactive_split: (&stats.inactive_split).into(),
            allocated_bytes: (&stats.allocated_bytes).into(),
            reserved_bytes: (&stats.reserved_bytes).into(),
            active_bytes: (&stats.active_bytes).into(),
            inactive_split_bytes: (&stats.inactive_split_bytes).into(),
            requested_bytes: (&stats.requested_bytes).into(),
            oversize_allocations: (&stats.oversize_allocations).into(),
            oversize_segments: (&stats.oversize_segments).into(),
            num_alloc_retries: signed(stats.num_alloc_retries),
            num_ooms: signed(stats.num_ooms),
            num_sync_all_streams: signed(stats.num_sync_all_streams),
            num_device_alloc: signed(stats.num_device_alloc),
            num_device_free: signed(stats.num_device_free),
            // Nothing here rejects a request before it is tried.
            num_oom_rejections: 0,
            max_split_size: max_split_size.map_or(-1, signed),
        }
    }
}

/// `rallocator_out_of_memory`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct OutOfMemoryDetails {
    requested: u64,
    total: u64,
    free: u64,
}

impl From<&OutOfMemory> for OutOfMemoryDetails {
    fn from(report: &OutOfMemory) -> Self {
        Self {
            requested: report.requested,
            total: report.limit.unwrap_or(report.total),
            free: report.device_free.unwrap_or(0),
        }
    }
}

thread_local! {
    /// Of this thread's last failure for want of memory.
    static LAST_OUT_OF_MEMORY: Cell<Option<OutOfMemoryDetails>> = const { Cell::new(None) };
}

/// Keeps the details of a failure for want of memory.
pub(super) fn keep_details(failure: &Failure) {
    if let Failure::Allocator(AllocError::OutOfMemory(report)) = failure {
        LAST_OUT_OF_MEMORY.set(Some((&**report).into()));
    }
}

/// `rallocator_settings`.
#[repr(C)]
pub(super) struct Settings {
    garbage_collection_threshold: f64,
    max_split_size: i64,
    expandable_segments: bool,
    roundup_power2_divisions: [u64; Roundup::INTERVALS],
    text: *const c_char,
}

/// Receives what a private pool has reserved: `rallocator_pool_visitor`.
pub(super) type PoolVisitor = unsafe extern "C" fn(*mut c_void, u64, u64, *const Family);

pub(super) extern "C" fn init(device_count: i32) {
    hooks::init(device_count);
}

pub(super) extern "C" fn device_count() -> i32 {
    i32::try_from(hooks::device_count()).unwrap_or(i32::MAX)
}

pub(super) unsafe extern "C" fn memory_in_use(device: i32, allocated: *mut u64, reserved: *mut u64) {
    let bytes = hooks::allocated_and_reserved(device);
    // SAFETY: the header asks for a place that may be written.
    unsafe { allocated.write(bytes.0) };
    // SAFETY: as above.
    unsafe { reserved.write(bytes.1) };
}

pub(super) extern "C" fn largest_available(device: i32) -> u64 {
    hooks::largest_available(device)
}

pub(super) unsafe extern "C" fn last_out_of_memory(details: *mut OutOfMemoryDetails) -> bool {
    let Some(last) = LAST_OUT_OF_MEMORY.get() else { return false };
    // SAFETY: the header asks for a place that may be written.
    unsafe { details.write(last) };
    true
}

pub(super) unsafe extern "C" fn device_stats(device: i32, stats: *mut DeviceStats) {
    let max_split_size = config().and_then(|config| config.max_split_size);
    let counted = DeviceStats::new(&hooks::counted(device), max_split_size);
    // SAFETY: the header asks for a place that may be written.
    unsafe { stats.write(counted) };
}

pub(super) unsafe extern "C" fn visit_private_pools(device: i32, visit: PoolVisitor, context: *mut c_void) {
    for (pool, reserved) in hooks::private_reserved(device) {
        let reserved = Family::from(&reserved);
        // SAFETY: the header asks for a function that takes these, and for the context that it expects.
        unsafe { visit(context, pool.0, pool.1, &raw const reserved) };
    }
}

pub(super) unsafe extern "C" fn settings(settings: *mut Settings) {
    static TEXT: OnceLock<CString> = OnceLock::new();
    let present = config().cloned().unwrap_or_default();
    let mut divisions = [0; Roundup::INTERVALS];
    for (division, (_, value)) in divisions.iter_mut().zip(present.roundup_power2_divisions.intervals()) {
        *division = value;
    }
    let value = Settings {
        garbage_collection_threshold: present.garbage_collection_threshold,
        max_split_size: present.max_split_size.map_or(-1, signed),
        expandable_segments: present.policy != Policy::Native,
        roundup_power2_divisions: divisions,
        text: match config() {
            Some(config) => TEXT.get_or_init(|| CString::new(recorded(config)).unwrap_or_default()).as_ptr(),
            None => c"".as_ptr(),
        },
    };
    // SAFETY: the header asks for a place that may be written.
    unsafe { settings.write(value) };
}

/// The settings in force; `None` without an allocator that may be used.
fn config() -> Option<&'static Config> {
    process::for_notice().map(crate::backend::Backend::config)
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
