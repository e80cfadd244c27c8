//! An answer to `cacheInfo`, the one question of torch's C++ side that a program cannot do without.
//!
//! cuDNN's benchmark asks how large a workspace it may try, and `CUDAPluggableAllocator` raises an error: with
//! `torch.backends.cudnn.benchmark` each convolution would fail. torch has no setter for it, and no name of Python's
//! leads there. So the object that stands for rallocator in torch gets a table of virtual functions of its own: a copy of
//! its class's, in which this one function is another. No other object is touched.
//!
//! What is relied on is checked at run time: the object's table is its class's, and the function's address stands in it
//! exactly once. Where anything is otherwise, nothing is changed. The layout of the table is that of the C++ ABI:
//! <https://itanium-cxx-abi.github.io/cxx-abi/abi.html#vtable>

use std::ffi::c_void;
use std::mem::MaybeUninit;

use super::library::Library;
use crate::hooks;

/// Words before the address that an object holds: the offset to the top, and the type information.
const HEADER_WORDS: usize = 2;

/// Asks `dladdr1` for the entry of the symbol (`dlfcn.h` of glibc; the `libc` crate lacks the name).
const RTLD_DL_SYMENT: libc::c_int = 1;

/// `void CUDAPluggableAllocator::cacheInfo(c10::DeviceIndex, size_t*)`.
type CacheInfo = unsafe extern "C" fn(this: *mut c_void, device: i8, largest: *mut usize);

/// Has torch's present allocator, which must be rallocator's, answer `cacheInfo`. False if this torch is built otherwise.
pub(crate) fn answer_cache_info() -> bool {
    try_to_answer().is_some()
}

fn try_to_answer() -> Option<()> {
    let class = ["libtorch_cuda.so", "libtorch_python.so"].into_iter().find_map(Class::find)?;
    let c10 = Library::loaded(c"libc10_cuda.so")?;
    // SAFETY: the mangled name spells out `std::atomic<CUDAAllocator*> c10::cuda::CUDACachingAllocator::allocator`, and
    // such an atomic is a pointer.
    let current: *const *mut *const usize = unsafe { c10.symbol(c"_ZN3c104cuda20CUDACachingAllocator9allocatorE") }?;
    // SAFETY: the variable lives as long as the library, and is written only when an allocator is installed, by the
    // thread that called this.
    let object = unsafe { current.read() };
    // SAFETY: an object with virtual functions begins with the pointer to them.
    if object.is_null() || unsafe { object.read() } != class.functions() {
        return None;
    }
    let mut own = class.words.to_vec();
    let mut places = own.iter_mut().skip(HEADER_WORDS).filter(|word| **word == class.cache_info);
    let place = places.next()?;
    if places.next().is_some() {
        return None;
    }
    *place = cache_info as CacheInfo as usize;
    let own: &'static [usize] = own.leak();
    // SAFETY: the object is alive, not used by anybody yet, and the copy has all that its class's table has.
    unsafe { object.write(own[HEADER_WORDS..].as_ptr()) };
    Some(())
}

/// `CUDAPluggableAllocator`, as a library exports it.
struct Class {
    /// Its table of virtual functions, with the header.
    words: &'static [usize],
    /// The address of its `cacheInfo`.
    cache_info: usize,
}

impl Class {
    fn find(library: &str) -> Option<Self> {
        let name = std::ffi::CString::new(library).ok()?;
        let library = Library::loaded(&name)?;
        // SAFETY: the mangled name is that of a table of virtual functions.
        let table: *const usize =
            unsafe { library.symbol(c"_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE") }?;
        // SAFETY: the mangled name spells out the function of this type; only its address is used.
        let cache_info: *const c_void =
            unsafe { library.symbol(c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator9cacheInfoEaPm") }?;
        let length = symbol_bytes(table.cast())? / size_of::<usize>();
        // SAFETY: the symbol is data of this many bytes, never written, in a library that is never unloaded.
        let words = unsafe { std::slice::from_raw_parts(table, length) };
        (length > HEADER_WORDS).then_some(Self { words, cache_info: cache_info as usize })
    }

    /// What an object of exactly this class begins with.
    fn functions(&self) -> *const usize {
        self.words[HEADER_WORDS..].as_ptr()
    }
}

/// How many bytes the symbol at this very address has, as its library's table of symbols says.
fn symbol_bytes(address: *const c_void) -> Option<usize> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    let mut symbol: *mut libc::Elf64_Sym = std::ptr::null_mut();
    let found =
        // SAFETY: both places may be written, and with this flag a pointer to the library's own entry is written.
        unsafe { libc::dladdr1(address, info.as_mut_ptr(), (&raw mut symbol).cast(), RTLD_DL_SYMENT) };
    if found == 0 || symbol.is_null() {
        return None;
    }
    // SAFETY: the call succeeded, so it is written.
    let info = unsafe { info.assume_init() };
    // SAFETY: it points to an entry of the library's table, which is never unloaded.
    let bytes = unsafe { (*symbol).st_size };
    (info.dli_saddr.cast_const() == address).then_some(bytes as usize)
}

/// At `largest` the bytes of the largest block that could be had.
unsafe extern "C" fn cache_info(_this: *mut c_void, device: i8, largest: *mut usize) {
    let bytes = hooks::largest_available(device.into());
    // SAFETY: torch passes the address of a variable of its own.
    unsafe { largest.write(bytes as usize) };
}
