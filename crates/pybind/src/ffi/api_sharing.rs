//! Memory between processes in the table of functions: `include/rallocator.h` says what each function does.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};

use super::api_table::{Status, failed};
use super::{device_pointer, raw_address};
use crate::failure::Failure;
use crate::sharing;

pub(super) unsafe extern "C" fn share(address: *mut c_void, offset: *mut u64) -> *const c_char {
    thread_local!(static TEXT: RefCell<CString> = RefCell::default());
    let shared = device_pointer(address).map_or(Err(Failure::NotEnabled), sharing::share);
    match shared {
        Ok((text, from)) => {
            // SAFETY: the header asks for a place that may be written.
            unsafe { offset.write(from) };
            let keep = |kept: &RefCell<CString>| {
                kept.replace(CString::new(text).unwrap_or_default());
                kept.borrow().as_ptr()
            };
            TEXT.try_with(keep).unwrap_or(std::ptr::null())
        }
        Err(failure) => {
            failed(&failure);
            std::ptr::null()
        }
    }
}

pub(super) unsafe extern "C" fn open_shared(text: *const c_char, device: i32, base: *mut *mut c_void) -> Status {
    // SAFETY: the header asks for a text that ends with a 0 and may be read.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    match sharing::open(&text, device) {
        Ok(address) => {
            // SAFETY: the header asks for a place that may be written.
            unsafe { base.write(raw_address(Some(address))) };
            Status::Ok
        }
        Err(failure) => failed(&failure),
    }
}

pub(super) extern "C" fn close_shared(base: *mut c_void) {
    if let Some(base) = device_pointer(base) {
        sharing::close(base);
    }
}
