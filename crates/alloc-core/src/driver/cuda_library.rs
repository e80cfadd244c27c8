//! NVIDIA's driver library: found at run time, checked before its first use, and its answers turned into results.
//!
//! Building and importing need no CUDA, because cudarc opens the library when a function is first called. It panics when
//! the library or a function is missing, so [`start`] looks for all of them first: no call made after it can panic.

#![expect(unsafe_code, reason = "opening a library runs its constructors, and every function in it is foreign code")]

use cudarc::driver::sys::{self, CUresult};

use super::{Call, DriverError, Result, Status};

/// Every function that this crate calls, by its name in the library, and the call to blame when it is missing.
///
/// All of them exist since CUDA 11.2; torch 2.9 needs a driver of CUDA 12 or newer.
const FUNCTIONS: &[(&str, Call)] = &[
    ("cuInit", Call::Initialize),
    ("cuDeviceGetCount", Call::Initialize),
    ("cuDeviceGet", Call::Initialize),
    ("cuDeviceTotalMem_v2", Call::Attribute),
    ("cuDeviceGetAttribute", Call::Attribute),
    ("cuMemGetAllocationGranularity", Call::Attribute),
    ("cuCtxGetCurrent", Call::CurrentContext),
    ("cuCtxGetDevice", Call::CurrentContext),
    ("cuDevicePrimaryCtxGetState", Call::PrimaryContextState),
    ("cuDevicePrimaryCtxRetain", Call::RetainContext),
    ("cuCtxSetCurrent", Call::SetContext),
    ("cuDeviceCanAccessPeer", Call::CanAccessPeer),
    ("cuMemGetInfo_v2", Call::MemoryInfo),
    ("cuMemAlloc_v2", Call::Allocate),
    ("cuMemFree_v2", Call::Free),
    ("cuMemAddressReserve", Call::ReserveRange),
    ("cuMemAddressFree", Call::FreeRange),
    ("cuMemCreate", Call::CreateHandle),
    ("cuMemRelease", Call::ReleaseHandle),
    ("cuMemMap", Call::Map),
    ("cuMemSetAccess", Call::SetAccess),
    ("cuMemUnmap", Call::Unmap),
    ("cuEventCreate", Call::CreateEvent),
    ("cuEventDestroy_v2", Call::DestroyEvent),
    ("cuEventRecord", Call::RecordEvent),
    ("cuEventQuery", Call::QueryEvent),
    ("cuEventSynchronize", Call::SynchronizeEvent),
    ("cuStreamWaitEvent", Call::WaitEvent),
    ("cuStreamGetCtx", Call::StreamContext),
    ("cuStreamIsCapturing", Call::CaptureStatus),
    ("cuThreadExchangeStreamCaptureMode", Call::ExchangeCaptureMode),
    ("cuCtxSynchronize", Call::SynchronizeDevice),
];

/// Opens the library and initialises the driver. Repeating it is harmless.
///
/// Fails with [`Status::NotFound`] when the library is missing ([`Call::Initialize`]) or too old (the call that it
/// lacks), with [`Status::NoDevice`] when it finds no GPU, with [`Status::NotInitialized`] in a child forked from a
/// process that had initialised it.
pub(super) fn start() -> Result<()> {
    // SAFETY: The library that the loader finds under libcuda's names is NVIDIA's, whose constructors may run on any
    // thread; the administrator of the machine guarantees that.
    let present = unsafe { sys::is_culib_present() };
    if !present {
        return Err(DriverError { call: Call::Initialize, status: Status::NotFound });
    }
    // SAFETY: As above: the same library is opened again, and now kept.
    let library = unsafe { sys::culib() };
    for &(name, call) in FUNCTIONS {
        // SAFETY: The symbol is only looked for and never called through this type.
        let function = unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
        if function.is_err() {
            return Err(DriverError { call, status: Status::NotFound });
        }
    }
    // SAFETY: `cuInit` was found above; its flags must be 0.
    check(Call::Initialize, unsafe { sys::cuInit(0) })
}

/// Success, or the error that blames `call`.
pub(super) fn check(call: Call, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        failure => Err(DriverError { call, status: Status::from_code(failure as i32) }),
    }
}

/// What a driver call writes: `ask` receives a place that holds `initial`.
pub(super) fn read<T>(call: Call, initial: T, ask: impl FnOnce(&mut T) -> CUresult) -> Result<T> {
    let mut answer = initial;
    check(call, ask(&mut answer))?;
    Ok(answer)
}
