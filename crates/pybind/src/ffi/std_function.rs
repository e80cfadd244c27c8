//! A `std::function<bool(cudaStream_t)>` of libstdc++, owned by Rust.
//!
//! torch passes one by value when a pool begins, and destroys it when that call returns; the allocator asks it later.
//! So it is copied through its own manager, the function that libstdc++ stores in each `std::function` for this.
//! Source of the layout: `bits/std_function.h` of GCC, unchanged since GCC 4:
//! <https://gcc.gnu.org/git/?p=gcc.git;a=blob;f=libstdc%2B%2B-v3/include/bits/std_function.h;hb=releases/gcc-13.2.0>

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use alloc_core::allocator::StreamFilter;
use alloc_core::id::StreamHandle;

/// The stored function object, or a pointer to it: 16 bytes that only the manager and the invoker understand.
///
/// libstdc++ stores an object in place only if it may be moved byte by byte, so Rust may move this.
type Storage = [u64; 2];
/// Copies or destroys what is stored, and answers nothing that matters here.
type Manager = unsafe extern "C-unwind" fn(destination: *mut Storage, source: *const Storage, operation: c_int) -> bool;
/// Calls what is stored. The argument comes by address, since it is passed on as a reference.
type Invoker = unsafe extern "C-unwind" fn(stored: *const Storage, stream: *mut *mut c_void) -> bool;

/// `std::_Manager_operation`: copy `source` into the raw `destination`.
const CLONE: c_int = 2;
/// `std::_Manager_operation`: destroy `destination`.
const DESTROY: c_int = 3;

/// A copy of the caller's `std::function`.
#[repr(C)]
pub(super) struct StdFunction {
    storage: Storage,
    /// `None` in an empty function.
    manager: Option<Manager>,
    invoker: Option<Invoker>,
}

const _: () = assert!(size_of::<StdFunction>() == 32);

// SAFETY: torch calls and destroys these functions from whichever thread allocates or ends the pool, under its native
// allocator as well as here, so what they hold may be moved between threads.
unsafe impl Send for StdFunction {}
// SAFETY: as above; torch's native allocator calls one function from several threads, and calling does not change it.
unsafe impl Sync for StdFunction {}

impl StdFunction {
    /// A copy of the function at `source`, or an empty one for null.
    ///
    /// # Safety
    ///
    /// - `source` is null or points to a `std::function<bool(cudaStream_t)>` of libstdc++ that lives during this call.
    pub(super) unsafe fn copy(source: *const [u64; 4]) -> Self {
        let source = source.cast::<StdFunction>();
        // SAFETY: the caller promises that a non-null pointer is to a live function, of which this is the layout.
        let Some(source) = (unsafe { source.as_ref() }) else {
            return Self { storage: [0; 2], manager: None, invoker: None };
        };
        let mut storage = [0; 2];
        if let Some(manager) = source.manager {
            // SAFETY: the manager belongs to what `source` stores, and `storage` is raw memory of the right size.
            unsafe { manager(&raw mut storage, &raw const source.storage, CLONE) };
        }
        Self { storage, manager: source.manager, invoker: source.invoker }
    }

    /// The function as the allocator asks for it. An empty function accepts every stream.
    pub(super) fn into_stream_filter(self) -> StreamFilter {
        Arc::new(move |stream| self.accepts(stream))
    }

    /// Calls the function. An exception that it throws passes through.
    fn accepts(&self, stream: StreamHandle) -> bool {
        let (Some(_), Some(invoker)) = (self.manager, self.invoker) else {
            return true;
        };
        let mut argument = stream.0 as *mut c_void;
        // SAFETY: the invoker belongs to what is stored, which was cloned and lives as long as `self`.
        unsafe { invoker(&raw const self.storage, &raw mut argument) }
    }
}

impl Drop for StdFunction {
    fn drop(&mut self) {
        if let Some(manager) = self.manager {
            // SAFETY: the manager belongs to what is stored, which was cloned once and is destroyed once.
            unsafe { manager(&raw mut self.storage, &raw const self.storage, DESTROY) };
        }
    }
}
