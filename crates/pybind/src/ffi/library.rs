//! Looking up what other libraries of this process export.

use std::ffi::{CStr, c_void};

/// A library that somebody else has loaded. It is never unloaded, so nothing is given back.
pub(super) struct Library(*mut c_void);

impl Library {
    /// The library of this name, if it is loaded.
    pub(super) fn loaded(name: &CStr) -> Option<Self> {
        // SAFETY: with this flag nothing is loaded, so no foreign initialiser runs.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then_some(Self(handle))
    }

    /// The function or data of this name, there or in a library that this one depends on.
    ///
    /// # Safety
    ///
    /// - `T` is a pointer to data or to a function, of the type that goes by this name.
    pub(super) unsafe fn symbol<T: Copy>(&self, name: &CStr) -> Option<T> {
        const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle is one that dlopen returned.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        // SAFETY: the address is not null, and the caller promises that it is of this type, of the size just checked.
        (!address.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut c_void, T>(&address) })
    }
}
