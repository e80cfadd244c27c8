//! Raising C++ exceptions from Rust, above all the one that Python sees as `torch.OutOfMemoryError`.
//!
//! There is no C++ compiler at work here. What a `throw` expression does is done by hand, by the rules of the Itanium
//! C++ ABI (<https://itanium-cxx-abi.github.io/cxx-abi/abi-eh.html>), with functions looked up in the libraries that
//! torch has loaded: obtain memory for the exception, construct it, hand it to the unwinder with its type and its
//! destructor.
//!
//! `c10::OutOfMemoryError` is a `c10::Error` with another vtable. Its own constructor is exported only from torch 2.13
//! on, that of `c10::Error` by every release: so the base is constructed and the vtable pointer set.
//! <https://github.com/pytorch/pytorch/blob/v2.9.0/c10/util/Exception.h>

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::MaybeUninit;

use super::library::Library;
use crate::failure::Failure;

/// Bytes obtained for a `c10::OutOfMemoryError`. It has 128 in torch 2.9 to 2.15; the rest is room for later ones.
const C10_ERROR_BYTES: usize = 1024;
/// `sizeof(std::runtime_error)`: its vtable pointer and its shared string.
const RUNTIME_ERROR_BYTES: usize = 16;
/// Words before the address that a vtable pointer holds: the offset to the top, and the type information.
const VTABLE_HEADER_WORDS: usize = 2;

type AllocateException = unsafe extern "C-unwind" fn(bytes: usize) -> *mut c_void;
type Destructor = unsafe extern "C-unwind" fn(*mut c_void);
type Throw = unsafe extern "C-unwind" fn(*mut c_void, type_info: *const c_void, Option<Destructor>) -> !;
type OperatorNew = unsafe extern "C-unwind" fn(bytes: usize) -> *mut c_void;
type OperatorDelete = unsafe extern "C-unwind" fn(*mut c_void);
/// `c10::Error::Error(c10::SourceLocation, std::string)`. The string is passed by address, as a type with a
/// destructor is: the callee moves from it, the caller destroys what is left.
type ErrorConstructor = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut CxxString);
/// `std::runtime_error::runtime_error(char const*)`.
type RuntimeErrorConstructor = unsafe extern "C-unwind" fn(*mut c_void, *const c_char);

/// `c10::SourceLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// `std::string` of libstdc++: where the text is, its length, and either the capacity or, for up to 15 bytes, the text.
#[repr(C)]
struct CxxString {
    text: *mut c_void,
    length: usize,
    capacity_or_short_text: [usize; 2],
}

/// Raises `failure`: as `torch.OutOfMemoryError` if it is one and torch is loaded, else as a `RuntimeError`.
///
/// The caller must hold nothing that has to be dropped: no lock, no value. This frame drops its own before it throws.
#[cold]
pub(super) fn throw(failure: Failure) -> ! {
    let out_of_memory = failure.is_out_of_memory();
    let message = failure.to_string().replace('\0', "");
    drop(failure);
    let Some(runtime) = CxxRuntime::find() else {
        // No C++ library is loaded, hence no torch, and there is no way to raise. Returning null would have the caller
        // work on memory that is not there.
        std::process::abort();
    };
    let exception = match TorchError::find().filter(|_| out_of_memory) {
        Some(torch) => runtime.construct_out_of_memory_error(&torch, &message),
        None => runtime.construct_runtime_error(&message),
    };
    drop(message);
    // SAFETY: the exception was obtained from the same runtime's allocator and constructed, and its type information
    // and destructor are those of its type. Nothing in this frame needs dropping any more.
    unsafe { (runtime.throw)(exception.object, exception.type_info, Some(exception.destructor)) }
}

/// An exception that is ready to be thrown.
struct Exception {
    object: *mut c_void,
    type_info: *const c_void,
    destructor: Destructor,
}

/// What libstdc++ provides.
struct CxxRuntime {
    allocate_exception: AllocateException,
    throw: Throw,
    operator_new: OperatorNew,
    operator_delete: OperatorDelete,
    runtime_error_constructor: RuntimeErrorConstructor,
    runtime_error_destructor: Destructor,
    runtime_error_type_info: *const c_void,
}

/// What torch's libraries provide.
struct TorchError {
    constructor: ErrorConstructor,
    type_info: *const c_void,
    vtable: *const Destructor,
}

impl CxxRuntime {
    /// Looks the functions up; `None` if libstdc++ is not loaded in this process.
    fn find() -> Option<Self> {
        let library = Library::loaded(c"libstdc++.so.6")?;
        Some(Self {
            // SAFETY: the C++ ABI gives the function of this name this type.
            allocate_exception: unsafe { library.symbol(c"__cxa_allocate_exception") }?,
            // SAFETY: as above.
            throw: unsafe { library.symbol(c"__cxa_throw") }?,
            // SAFETY: the mangled name spells out `operator new(unsigned long)`.
            operator_new: unsafe { library.symbol(c"_Znwm") }?,
            // SAFETY: the mangled name spells out `operator delete(void*)`.
            operator_delete: unsafe { library.symbol(c"_ZdlPv") }?,
            // SAFETY: the mangled name spells out `std::runtime_error::runtime_error(char const*)`.
            runtime_error_constructor: unsafe { library.symbol(c"_ZNSt13runtime_errorC1EPKc") }?,
            // SAFETY: the mangled name spells out `std::runtime_error::~runtime_error()`.
            runtime_error_destructor: unsafe { library.symbol(c"_ZNSt13runtime_errorD1Ev") }?,
            // SAFETY: type information is data, of which only the address is used.
            runtime_error_type_info: unsafe { library.symbol(c"_ZTISt13runtime_error") }?,
        })
    }

    /// A `c10::OutOfMemoryError` with this message.
    fn construct_out_of_memory_error(&self, torch: &TorchError, message: &str) -> Exception {
        let location =
            SourceLocation { function: c"rallocator_malloc".as_ptr(), file: c"rallocator".as_ptr(), line: 0 };
        let mut text = MaybeUninit::<CxxString>::uninit();
        let text = text.as_mut_ptr();
        self.write_string(text, message);
        // SAFETY: any number of bytes may be asked for; the runtime ends the process rather than return null.
        let object = unsafe { (self.allocate_exception)(C10_ERROR_BYTES) };
        // SAFETY: the object has this many bytes. They are cleared so that a later torch finds no stale ones.
        unsafe { object.cast::<u8>().write_bytes(0, C10_ERROR_BYTES) };
        // SAFETY: the mangled name spells out these arguments; the object is large enough for a `c10::Error`.
        unsafe { (torch.constructor)(object, location, text) };
        self.destroy_string(text);
        // SAFETY: a vtable is at least its header and the two destructors long.
        let functions = unsafe { torch.vtable.add(VTABLE_HEADER_WORDS) };
        // SAFETY: an object with virtual functions begins with the pointer to them, and `c10::OutOfMemoryError` adds
        // no member to `c10::Error`.
        unsafe { object.cast::<*const Destructor>().write(functions) };
        // SAFETY: the first virtual function of `c10::Error`, as of `std::exception`, is the destructor that leaves
        // the object's memory alone.
        let destructor = unsafe { functions.read() };
        Exception { object, type_info: torch.type_info, destructor }
    }

    /// A `std::runtime_error` with this message.
    fn construct_runtime_error(&self, message: &str) -> Exception {
        let message = CString::new(message).unwrap_or_default();
        // SAFETY: any number of bytes may be asked for; the runtime ends the process rather than return null.
        let object = unsafe { (self.allocate_exception)(RUNTIME_ERROR_BYTES) };
        // SAFETY: the object is as large as a `std::runtime_error`, which copies the text.
        unsafe { (self.runtime_error_constructor)(object, message.as_ptr()) };
        Exception { object, type_info: self.runtime_error_type_info, destructor: self.runtime_error_destructor }
    }

    /// Makes a `std::string` with this text at `string`, always with the text in memory of its own.
    fn write_string(&self, string: *mut CxxString, text: &str) {
        // SAFETY: any number of bytes may be asked for; failure is an exception, which passes through.
        let copy = unsafe { (self.operator_new)(text.len() + 1) };
        // SAFETY: the copy has room for the text, and is new, so that they do not overlap.
        unsafe { copy.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len()) };
        // SAFETY: one byte was asked for beyond the text.
        let end = unsafe { copy.cast::<u8>().add(text.len()) };
        // SAFETY: as above.
        unsafe { end.write(0) };
        let value = CxxString { text: copy, length: text.len(), capacity_or_short_text: [text.len(), 0] };
        // SAFETY: the caller passes memory for a string.
        unsafe { string.write(value) };
    }

    /// Destroys what a callee that moved from the string, or did not, has left of it.
    fn destroy_string(&self, string: *mut CxxString) {
        // SAFETY: the string was written above, and a string that was moved from is still a string.
        let text = unsafe { (*string).text };
        // SAFETY: only the address of the member is taken.
        let short_text = unsafe { &raw mut (*string).capacity_or_short_text };
        if text != short_text.cast::<c_void>() {
            // SAFETY: a string whose text is not inside itself owns it, from operator new.
            unsafe { (self.operator_delete)(text) };
        }
    }
}

impl TorchError {
    /// Looks the symbols up; `None` without torch, or if a later torch has renamed them.
    fn find() -> Option<Self> {
        const CONSTRUCTOR: &CStr =
            c"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
        // Asked of libc10_cuda, a name is also looked for in libc10, on which it depends: up to 2.12 the type lives in
        // the one, from 2.13 on in the other.
        let library = Library::loaded(c"libc10_cuda.so")?;
        Some(Self {
            // SAFETY: the mangled name spells out `c10::Error::Error(c10::SourceLocation, std::string)`.
            constructor: unsafe { library.symbol(CONSTRUCTOR) }?,
            // SAFETY: type information is data, of which only the address is used.
            type_info: unsafe { library.symbol(c"_ZTIN3c1016OutOfMemoryErrorE") }?,
            // SAFETY: a vtable is an array of words, of which those after the header are functions.
            vtable: unsafe { library.symbol(c"_ZTVN3c1016OutOfMemoryErrorE") }?,
        })
    }
}
