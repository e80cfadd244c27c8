//! NVIDIA's driver library: found at run time, and its answers turned into results.
//!
//! Building and importing need no CUDA: [`start`] opens the library and looks for every function before any is called.
//!
//! The functions are cudarc's, argument by argument, but for what they return. cudarc calls it an enum, and a number that
//! is none of its variants, from a driver newer than the bindings, would be undefined behaviour before anybody could look
//! at it. Here it is a number. The same holds for enums that the driver writes: callers give it the place of a number.

#![expect(unsafe_code, reason = "opening a library runs its constructors, and every function in it is foreign code")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUipcMemHandle, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp, CUmemGenericAllocationHandle,
    CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};

use super::{Call, DriverError, Result, Status};

/// Declares each function with the call to blame when the library lacks it.
macro_rules! functions {
    ($($call:ident: $name:ident($($argument:ident: $type:ty),*),)*) => {
        /// The library's functions.
        #[expect(non_snake_case, reason = "functions keep the names under which CUDA's manual has them")]
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl Functions {
            /// Looks for all functions in the library, which has to be there.
            fn find() -> Result<Self> {
                // SAFETY: See `start`, which has found the library; now it is opened again, and kept.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $($name: {
                        // SAFETY: The arguments are those of cudarc's binding, which is compared below, and the answer
                        // is an enum in C, which has the size and the place of an `int`.
                        let found = unsafe { library.get(stringify!($name).as_bytes()) };
                        *found.map_err(|_| DriverError { call: Call::$call, status: Status::NotFound })?
                    },)*
                })
            }
        }

        $(
            // Does not compile unless the arguments are those of cudarc's binding.
            const _: unsafe fn($($type),*) -> CUresult = sys::$name;

            /// The function of that name in CUDA's manual, which says what its callers have to keep.
            #[expect(non_snake_case, reason = "functions keep the names under which CUDA's manual has them")]
            pub(super) unsafe fn $name($($argument: $type),*) -> c_int {
                let function = FUNCTIONS.get().expect("no call is made before `start` has succeeded").$name;
                // SAFETY: The caller keeps what the manual asks for.
                unsafe { function($($argument),*) }
            }
        )*
    };
}

// All of them exist since CUDA 11.2; torch 2.9 needs a driver of CUDA 12 or newer.
functions! {
    Initialize: cuInit(flags: c_uint),
    Initialize: cuDeviceGetCount(count: *mut c_int),
    Initialize: cuDeviceGet(device: *mut CUdevice, index: c_int),
    Attribute: cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice),
    Attribute: cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice),
    Attribute: cuMemGetAllocationGranularity(
        bytes: *mut usize, properties: *const CUmemAllocationProp, which: CUmemAllocationGranularity_flags
    ),
    CurrentContext: cuCtxGetCurrent(context: *mut CUcontext),
    CurrentContext: cuCtxGetDevice(device: *mut CUdevice),
    PrimaryContextState: cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut c_uint, active: *mut c_int),
    RetainContext: cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice),
    SetContext: cuCtxSetCurrent(context: CUcontext),
    CanAccessPeer: cuDeviceCanAccessPeer(accessible: *mut c_int, device: CUdevice, peer: CUdevice),
    MemoryInfo: cuMemGetInfo_v2(free: *mut usize, total: *mut usize),
    Allocate: cuMemAlloc_v2(address: *mut CUdeviceptr, size: usize),
    Free: cuMemFree_v2(address: CUdeviceptr),
    ReserveRange: cuMemAddressReserve(
        base: *mut CUdeviceptr, size: usize, alignment: usize, wanted: CUdeviceptr, flags: c_ulonglong
    ),
    FreeRange: cuMemAddressFree(base: CUdeviceptr, size: usize),
    CreateHandle: cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle, size: usize, properties: *const CUmemAllocationProp,
        flags: c_ulonglong
    ),
    ReleaseHandle: cuMemRelease(handle: CUmemGenericAllocationHandle),
    Map: cuMemMap(
        address: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong
    ),
    SetAccess: cuMemSetAccess(address: CUdeviceptr, size: usize, access: *const CUmemAccessDesc, count: usize),
    Unmap: cuMemUnmap(address: CUdeviceptr, size: usize),
    ExportHandle: cuMemExportToShareableHandle(
        descriptor: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType,
        flags: c_ulonglong
    ),
    ImportHandle: cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle, descriptor: *mut c_void, kind: CUmemAllocationHandleType
    ),
    GetTicket: cuIpcGetMemHandle(ticket: *mut CUipcMemHandle, address: CUdeviceptr),
    OpenTicket: cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, ticket: CUipcMemHandle, flags: c_uint),
    CloseTicket: cuIpcCloseMemHandle(address: CUdeviceptr),
    CreateEvent: cuEventCreate(event: *mut CUevent, flags: c_uint),
    DestroyEvent: cuEventDestroy_v2(event: CUevent),
    RecordEvent: cuEventRecord(event: CUevent, stream: CUstream),
    QueryEvent: cuEventQuery(event: CUevent),
    SynchronizeEvent: cuEventSynchronize(event: CUevent),
    WaitEvent: cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint),
    StreamContext: cuStreamGetCtx(stream: CUstream, context: *mut CUcontext),
    CaptureStatus: cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus),
    ExchangeCaptureMode: cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode),
    SynchronizeDevice: cuCtxSynchronize(),
}

/// Found once, by the first [`start`] that succeeds in it.
static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Opens the library and initialises the driver. Repeating it is harmless.
///
/// Fails with [`Status::NotFound`] when the library is missing ([`Call::Initialize`]) or too old (the call that it
/// lacks), with [`Status::NoDevice`] when it finds no GPU, with [`Status::NotInitialized`] in a child forked from a
/// process that had initialised it.
pub(super) fn start() -> Result<()> {
    if FUNCTIONS.get().is_none() {
        // SAFETY: The library that the loader finds under libcuda's names is NVIDIA's, whose constructors may run on any
        // thread; the administrator of the machine guarantees that.
        let present = unsafe { sys::is_culib_present() };
        if !present {
            return Err(DriverError { call: Call::Initialize, status: Status::NotFound });
        }
        let found = Functions::find()?;
        FUNCTIONS.get_or_init(|| found);
    }
    // SAFETY: The flags must be 0.
    check(Call::Initialize, unsafe { cuInit(0) })
}

/// Success, or the error that blames `call`. `code` is a `CUresult`, known here or not.
pub(super) fn check(call: Call, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(DriverError { call, status: Status::from_code(code) }) }
}

/// What a driver call writes: `ask` receives a place that holds `initial`.
pub(super) fn read<T>(call: Call, initial: T, ask: impl FnOnce(&mut T) -> c_int) -> Result<T> {
    let mut answer = initial;
    check(call, ask(&mut answer))?;
    Ok(answer)
}
