//! Sources of segments in the table of functions: `include/rallocator.h` says what each function does.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use alloc_core::id::{DeviceId, DevicePtr, PoolId, StreamHandle};
use alloc_core::source::{SegmentSource, SourceFailed};

use super::api_table::{Status, status};
use super::{device_pointer, raw_address};
use crate::pools;

/// A `rallocator_status` that the caller returns: any number.
type ForeignStatus = u32;

/// `rallocator_source`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SourceTable {
    context: *mut c_void,
    obtain: unsafe extern "C" fn(*mut c_void, usize, i32, *mut c_void, *mut *mut c_void) -> ForeignStatus,
    give_back: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i32, *mut c_void) -> ForeignStatus,
    release_context: Option<unsafe extern "C" fn(*mut c_void)>,
}

pub(super) unsafe extern "C" fn create_pool_from(
    device: i32,
    first: u64,
    second: u64,
    source: *const SourceTable,
) -> Status {
    // SAFETY: the header asks for a source that lives during this call.
    let source = ForeignSource(unsafe { source.read() });
    status(pools::create_from(device, PoolId(first, second), Arc::new(source)))
}

/// A source that the caller passed as functions and their context. Released once, on drop.
struct ForeignSource(SourceTable);

// SAFETY: the header asks for functions that may be called from any thread.
unsafe impl Send for ForeignSource {}
// SAFETY: as above, also from several at once.
unsafe impl Sync for ForeignSource {}

impl SegmentSource for ForeignSource {
    fn obtain(&self, device: DeviceId, size: u64, stream: StreamHandle) -> Result<Option<DevicePtr>, SourceFailed> {
        let SourceTable { context, obtain, .. } = self.0;
        let mut address = ptr::null_mut();
        let status = pools::while_asking_source(|| {
            // SAFETY: the header asks for a function that takes this context, which is not released before the drop, and
            // an address that may be written.
            unsafe { obtain(context, size as usize, device.0.cast_signed(), stream.0 as *mut c_void, &raw mut address) }
        });
        match status {
            status if status == Status::Ok as ForeignStatus => Ok(device_pointer(address)),
            status if status == Status::OutOfMemory as ForeignStatus => Ok(None),
            _ => Err(SourceFailed),
        }
    }

    fn give_back(
        &self,
        device: DeviceId,
        address: DevicePtr,
        size: u64,
        stream: StreamHandle,
    ) -> Result<(), SourceFailed> {
        let SourceTable { context, give_back, .. } = self.0;
        let address = raw_address(Some(address));
        let status = pools::while_asking_source(|| {
            // SAFETY: the header asks for a function that takes this context, which is not released before the drop.
            unsafe { give_back(context, address, size as usize, device.0.cast_signed(), stream.0 as *mut c_void) }
        });
        if status == Status::Ok as ForeignStatus { Ok(()) } else { Err(SourceFailed) }
    }
}

impl Drop for ForeignSource {
    fn drop(&mut self) {
        if let Some(release) = self.0.release_context {
            // SAFETY: the header asks for a function that takes this context; it is called only here.
            unsafe { release(self.0.context) };
        }
    }
}
