//! Private pools in the table of functions: `include/rallocator.h` says what each function does.

use std::ffi::c_void;

use alloc_core::checkpoint::Checkpoint;
use alloc_core::config::Move;
use alloc_core::id::{DevicePtr, PoolId};

use super::api_table::{Status, failed, status};
use super::raw_address;
use crate::failure::Failure;
use crate::{hooks, pools};

/// Receives an address: `rallocator_address_visitor`.
pub(super) type AddressVisitor = unsafe extern "C" fn(*mut c_void, *mut c_void);

pub(super) extern "C" fn create_pool(device: i32, first: u64, second: u64) -> Status {
    status(pools::create(device, PoolId(first, second)))
}

pub(super) extern "C" fn pool_users(device: i32, first: u64, second: u64) -> u32 {
    pools::users(device, PoolId(first, second))
}

pub(super) extern "C" fn serve_when_out_of_memory(device: i32, first: u64, second: u64, serves: bool) -> bool {
    pools::serve_when_out_of_memory(device, PoolId(first, second), serves)
}

pub(super) extern "C" fn forbid_splits(device: i32, first: u64, second: u64) -> bool {
    pools::forbid_splits(device, PoolId(first, second))
}

pub(super) extern "C" fn restrict_moves(device: i32, first: u64, second: u64, moving: u32) -> Status {
    // The header numbers the choices in the order of this list.
    let known = Move::ALL.get(moving as usize).copied().ok_or(Failure::Moving(moving));
    status(known.and_then(|moving| pools::restrict_moves(device, PoolId(first, second), moving)))
}

pub(super) extern "C" fn empty_pool(first: u64, second: u64) -> Status {
    status(pools::empty(PoolId(first, second)))
}

pub(super) extern "C" fn checkpoint_pool(device: i32, first: u64, second: u64) -> *mut Checkpoint {
    let checkpoint = pools::checkpoint(device, PoolId(first, second));
    checkpoint.map_or(std::ptr::null_mut(), |checkpoint| Box::into_raw(Box::new(checkpoint)))
}

pub(super) unsafe extern "C" fn drop_checkpoint(checkpoint: *mut Checkpoint) {
    if !checkpoint.is_null() {
        // SAFETY: the header asks for a checkpoint that was made above and not dropped yet.
        drop(unsafe { Box::from_raw(checkpoint) });
    }
}

pub(super) unsafe extern "C" fn restore_pool(
    device: i32,
    checkpoint: *const Checkpoint,
    freed: AddressVisitor,
    allocated: AddressVisitor,
    context: *mut c_void,
) -> Status {
    // SAFETY: the header asks for a checkpoint that was made above and not dropped yet.
    let checkpoint = unsafe { &*checkpoint };
    match pools::restore(device, checkpoint) {
        Ok(restored) => {
            // SAFETY: the header asks for a function that takes this context.
            unsafe { visit_each(restored.freed, freed, context) };
            // SAFETY: as above.
            unsafe { visit_each(restored.allocated, allocated, context) };
            Status::Ok
        }
        Err(failure) => failed(&failure),
    }
}

pub(super) unsafe extern "C" fn visit_pool(
    device: i32,
    first: u64,
    second: u64,
    visit: AddressVisitor,
    context: *mut c_void,
) -> bool {
    let Some(checkpoint) = pools::checkpoint(device, PoolId(first, second)) else { return false };
    // SAFETY: the header asks for a function that takes this context.
    unsafe { visit_each(checkpoint.addresses(), visit, context) };
    true
}

pub(super) extern "C" fn reach_peer(device: i32, peer: i32) -> Status {
    status(hooks::reach_peer(device, peer))
}

/// # Safety
///
/// `visit` takes this context.
unsafe fn visit_each(addresses: impl IntoIterator<Item = DevicePtr>, visit: AddressVisitor, context: *mut c_void) {
    for address in addresses {
        // SAFETY: the caller promises that the function takes this context.
        unsafe { visit(context, raw_address(Some(address))) };
    }
}
