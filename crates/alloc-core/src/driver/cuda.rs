//! The real driver: NVIDIA's libcuda, loaded at run time.
//!
//! It owns the library's initialisation and one reference to each device's primary context, the context that torch and
//! the CUDA runtime use too. It never caches memory, never retries, and never calls the driver on its own: not when it
//! is made (a process that only enabled the allocator may fork and use CUDA in the child), and not when it is dropped
//! (at process exit the driver may be gone already, so contexts are kept on purpose).
//!
//! There is no protection against the handle of a destroyed stream. Driver 580.159.04 on an H200 crashed the process;
//! that the calls which only ask about a stream (`cuStreamGetCtx`, `cuStreamGetId`) have undefined behaviour too is said
//! in [CUDA's manual](https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html), and no call lists the
//! streams there are. [`Driver`] says what keeps such handles away.
//!
//! Most calls act on the calling thread's current context, so each makes its device's context current and puts the
//! former one back. In the usual case they are the same and that costs one question to the driver.

#![expect(unsafe_code, reason = "every call of the driver is foreign code")]

use std::ffi::{c_char, c_int, c_uint};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use cudarc::driver::sys::{
    CUcontext, CUctx_st, CUdevice, CUdevice_attribute, CUevent, CUevent_flags, CUipcMemHandle, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};

use super::cuda_library::{self as library, check, read, start};
use super::cuda_vmm::{self, HandleUses};
use super::{
    Call, Capabilities, CaptureMode, CaptureStatus, Completion, Driver, DriverError, MemoryInfo, Result,
    STALE_MAPPINGS_MAX, Status, Ticket,
};
use crate::id::{DeviceId, DevicePtr, Event, PhysicalHandle, Stream, StreamHandle};

/// Answers that are no failures.
const NOT_READY: c_int = CUresult::CUDA_ERROR_NOT_READY as c_int;
const CAPTURE_IMPLICIT: c_int = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as c_int;

/// The GPUs of this machine.
///
/// The first call that needs the driver loads and initialises it. Until that has succeeded each call tries again, and
/// fails with [`Call::Initialize`]: [`Status::NotFound`] without the library, [`Status::NoDevice`] without a GPU,
/// [`Status::NotInitialized`] in a child forked from a process that had initialised the driver.
#[derive(Debug, Default)]
pub struct CudaDriver {
    devices: OnceLock<Box<[Device]>>,
}

/// A GPU.
#[derive(Debug)]
struct Device {
    ordinal: CUdevice,
    /// The primary context, null before the first call that needs it. Never released, so that it outlives all memory.
    context: AtomicPtr<CUctx_st>,
    handle_uses: HandleUses,
}

impl CudaDriver {
    /// A driver that has made no call yet.
    pub const fn new() -> Self {
        Self { devices: OnceLock::new() }
    }

    /// All devices; the driver is initialised when this succeeds.
    fn devices(&self) -> Result<&[Device]> {
        if let Some(devices) = self.devices.get() {
            return Ok(devices);
        }
        start()?;
        let found = find_devices()?;
        Ok(self.devices.get_or_init(|| found))
    }

    fn device(&self, device: DeviceId, call: Call) -> Result<&Device> {
        self.devices()?.get(device.index()).ok_or(DriverError { call, status: Status::InvalidDevice })
    }

    /// Runs `body` with the primary context of `device` current, and puts back the former one.
    fn in_context<T>(&self, device: DeviceId, call: Call, body: impl FnOnce(&Device) -> Result<T>) -> Result<T> {
        let device = self.device(device, call)?;
        in_context(device.primary_context()?, || body(device))
    }
}

impl Device {
    fn primary_context(&self) -> Result<CUcontext> {
        let known = self.context.load(Ordering::Acquire);
        if !known.is_null() {
            return Ok(known);
        }
        let context = read(Call::RetainContext, ptr::null_mut(), |context| {
            // SAFETY: `context` is a local that outlives the call, and the driver gave us the device.
            unsafe { library::cuDevicePrimaryCtxRetain(context, self.ordinal) }
        })?;
        // Two threads may both get here: the context is the same, and a second reference to it does no harm.
        self.context.store(context, Ordering::Release);
        Ok(context)
    }
}

impl Driver for CudaDriver {
    fn device_count(&self) -> Result<u32> {
        Ok(self.devices()?.len() as u32)
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities> {
        let ordinal = self.device(device, Call::Attribute)?.ordinal;
        let total_bytes = total_memory(ordinal)?;
        let mapping = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        let granularity = if attribute(ordinal, mapping)? == 0 {
            Err("this GPU, or the virtual GPU profile or driver it runs under, cannot map memory".to_owned())
        } else {
            cuda_vmm::granularity(ordinal).map_err(|error| format!("the driver gives no mapping granularity: {error}"))
        };
        Ok(match granularity {
            Ok(granularity_bytes) => Capabilities {
                total_bytes,
                virtual_memory: true,
                virtual_memory_missing: String::new(),
                granularity_bytes,
                stale_mappings_max: STALE_MAPPINGS_MAX,
            },
            Err(virtual_memory_missing) => Capabilities {
                total_bytes,
                virtual_memory: false,
                virtual_memory_missing,
                granularity_bytes: 0,
                stale_mappings_max: 0,
            },
        })
    }

    fn current_device(&self) -> Result<Option<DeviceId>> {
        let devices = self.devices()?;
        if current_context()?.is_null() {
            return Ok(None);
        }
        device_of_current_context(devices, Call::CurrentContext).map(Some)
    }

    fn is_active(&self, device: DeviceId) -> Result<bool> {
        let ordinal = self.device(device, Call::PrimaryContextState)?.ordinal;
        let mut flags = 0;
        let active = read(Call::PrimaryContextState, 0, |active| {
            // SAFETY: Both pointers are to locals that outlive the call, and the driver gave us the device.
            unsafe { library::cuDevicePrimaryCtxGetState(ordinal, &raw mut flags, active) }
        })?;
        Ok(active != 0)
    }

    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool> {
        let device = self.device(device, Call::CanAccessPeer)?.ordinal;
        let peer = self.device(peer, Call::CanAccessPeer)?.ordinal;
        if device == peer {
            return Ok(true);
        }
        let accessible = read(Call::CanAccessPeer, 0, |accessible| {
            // SAFETY: `accessible` is a local that outlives the call, and the driver gave us both devices.
            unsafe { library::cuDeviceCanAccessPeer(accessible, device, peer) }
        })?;
        Ok(accessible != 0)
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.in_context(device, Call::MemoryInfo, |_| {
            let mut total = 0;
            let free = read(Call::MemoryInfo, 0, |free| {
                // SAFETY: Both pointers are to locals that outlive the call.
                unsafe { library::cuMemGetInfo_v2(free, &raw mut total) }
            })?;
            Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
        })
    }

    fn allocate(&self, device: DeviceId, size: u64) -> Result<DevicePtr> {
        self.in_context(device, Call::Allocate, |_| {
            let address = read(Call::Allocate, 0, |address| {
                // SAFETY: `address` is a local that outlives the call.
                unsafe { library::cuMemAlloc_v2(address, size as usize) }
            })?;
            Ok(DevicePtr(address))
        })
    }

    fn free(&self, device: DeviceId, address: DevicePtr) -> Result<()> {
        self.in_context(device, Call::Free, |_| {
            // SAFETY: The driver refuses an address that it did not hand out, and waits for the work that uses it.
            check(Call::Free, unsafe { library::cuMemFree_v2(address.0) })
        })
    }

    fn reserve_range(&self, device: DeviceId, size: u64) -> Result<DevicePtr> {
        self.in_context(device, Call::ReserveRange, |_| cuda_vmm::reserve(size))
    }

    fn free_range(&self, device: DeviceId, base: DevicePtr, size: u64) -> Result<()> {
        self.in_context(device, Call::FreeRange, |_| cuda_vmm::free_range(base, size))
    }

    fn create_handle(&self, device: DeviceId, size: u64) -> Result<PhysicalHandle> {
        self.in_context(device, Call::CreateHandle, |device| device.handle_uses.create(device.ordinal, size))
    }

    fn release_handle(&self, device: DeviceId, handle: PhysicalHandle) -> Result<()> {
        self.in_context(device, Call::ReleaseHandle, |_| cuda_vmm::release(handle))
    }

    fn map(&self, device: DeviceId, address: DevicePtr, size: u64, handle: PhysicalHandle) -> Result<()> {
        self.in_context(device, Call::Map, |_| cuda_vmm::map(address, size, handle))
    }

    fn set_access(&self, device: DeviceId, address: DevicePtr, size: u64, devices: &[DeviceId]) -> Result<()> {
        for &user in devices {
            self.device(user, Call::SetAccess)?;
        }
        let all = self.devices()?;
        let ordinals = devices.iter().map(|user| all[user.index()].ordinal);
        self.in_context(device, Call::SetAccess, |_| cuda_vmm::set_access(address, size, ordinals))
    }

    fn unmap(&self, device: DeviceId, address: DevicePtr, size: u64) -> Result<()> {
        self.in_context(device, Call::Unmap, |_| cuda_vmm::unmap(address, size))
    }

    fn export_handle(&self, device: DeviceId, handle: PhysicalHandle) -> Result<i32> {
        self.in_context(device, Call::ExportHandle, |_| cuda_vmm::export(handle))
    }

    fn import_handle(&self, device: DeviceId, descriptor: i32) -> Result<PhysicalHandle> {
        self.in_context(device, Call::ImportHandle, |_| cuda_vmm::import(descriptor))
    }

    fn ticket(&self, device: DeviceId, base: DevicePtr) -> Result<Ticket> {
        self.in_context(device, Call::GetTicket, |_| {
            let ticket = read(Call::GetTicket, CUipcMemHandle { reserved: [0; Ticket::BYTES] }, |ticket| {
                // SAFETY: `ticket` is a local that outlives the call; the driver refuses what it did not allocate.
                unsafe { library::cuIpcGetMemHandle(ticket, base.0) }
            })?;
            Ok(Ticket(ticket.reserved.map(|byte| byte.to_ne_bytes()[0])))
        })
    }

    fn open_ticket(&self, device: DeviceId, ticket: &Ticket) -> Result<DevicePtr> {
        // Peers may reach it too, and a process may have opened another ticket of the same memory.
        const LAZY_PEER_ACCESS: c_uint = 1;
        self.in_context(device, Call::OpenTicket, |_| {
            let ticket = CUipcMemHandle { reserved: ticket.0.map(|byte| c_char::from_ne_bytes([byte])) };
            let address = read(Call::OpenTicket, 0, |address| {
                // SAFETY: `address` is a local that outlives the call; the driver refuses a ticket that is not one.
                unsafe { library::cuIpcOpenMemHandle_v2(address, ticket, LAZY_PEER_ACCESS) }
            })?;
            Ok(DevicePtr(address))
        })
    }

    fn close_ticket(&self, device: DeviceId, address: DevicePtr) -> Result<()> {
        self.in_context(device, Call::CloseTicket, |_| {
            // SAFETY: The driver refuses an address that is of no ticket, and waits for the work that uses it.
            check(Call::CloseTicket, unsafe { library::cuIpcCloseMemHandle(address.0) })
        })
    }

    fn create_event(&self, device: DeviceId) -> Result<Event> {
        self.in_context(device, Call::CreateEvent, |_| {
            let event = read(Call::CreateEvent, ptr::null_mut(), |event| {
                // SAFETY: `event` is a local that outlives the call, and the flag is one of the documented ones.
                unsafe { library::cuEventCreate(event, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32) }
            })?;
            Ok(Event(event.expose_provenance() as u64))
        })
    }

    fn destroy_event(&self, device: DeviceId, event: Event) -> Result<()> {
        self.in_context(device, Call::DestroyEvent, |_| {
            // SAFETY: The event came from `create_event`, the trait's only source of events, and the allocator destroys
            // it once and uses it no more.
            check(Call::DestroyEvent, unsafe { library::cuEventDestroy_v2(raw_event(event)) })
        })
    }

    fn record_event(&self, event: Event, stream: Stream) -> Result<()> {
        self.in_context(stream.device, Call::RecordEvent, |_| {
            // SAFETY: The event came from `create_event` and is not destroyed. The stream is the program's: a default
            // one, which always exists, or one that the program made and has not destroyed without telling the
            // allocator, which then uses it no more.
            check(Call::RecordEvent, unsafe { library::cuEventRecord(raw_event(event), raw_stream(stream.handle)) })
        })
    }

    fn query_event(&self, device: DeviceId, event: Event) -> Result<Completion> {
        self.in_context(device, Call::QueryEvent, |_| {
            // SAFETY: The event came from `create_event` and is not destroyed, which the allocator guarantees.
            let code = unsafe { library::cuEventQuery(raw_event(event)) };
            if code == NOT_READY {
                return Ok(Completion::Pending);
            }
            check(Call::QueryEvent, code).map(|()| Completion::Done)
        })
    }

    fn synchronize_event(&self, device: DeviceId, event: Event) -> Result<()> {
        self.in_context(device, Call::SynchronizeEvent, |_| {
            // SAFETY: The event came from `create_event` and is not destroyed, which the allocator guarantees.
            check(Call::SynchronizeEvent, unsafe { library::cuEventSynchronize(raw_event(event)) })
        })
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.in_context(stream.device, Call::WaitEvent, |_| {
            // SAFETY: As for `record_event`; flags 0 is the default wait.
            check(Call::WaitEvent, unsafe {
                library::cuStreamWaitEvent(raw_stream(stream.handle), raw_event(event), 0)
            })
        })
    }

    fn stream_device(&self, handle: StreamHandle) -> Result<DeviceId> {
        let devices = self.devices()?;
        if handle.is_default() {
            return Err(DriverError { call: Call::StreamContext, status: Status::InvalidHandle });
        }
        let context = read(Call::StreamContext, ptr::null_mut(), |context| {
            // SAFETY: `context` is a local that outlives the call; for the stream see `record_event`.
            unsafe { library::cuStreamGetCtx(raw_stream(handle), context) }
        })?;
        let primary = devices.iter().position(|device| device.context.load(Ordering::Relaxed) == context);
        if let Some(index) = primary {
            return Ok(DeviceId(index as u32));
        }
        // A context of the program's own, or a primary one that we have not asked for.
        in_context(context, || device_of_current_context(devices, Call::StreamContext))
    }

    fn capture_status(&self, stream: Stream) -> Result<CaptureStatus> {
        self.in_context(stream.device, Call::CaptureStatus, |_| {
            let mut status: c_uint = 0;
            // SAFETY: `status` is a local of the enum's size that outlives the call; for the stream see `record_event`.
            let code = unsafe { library::cuStreamIsCapturing(raw_stream(stream.handle), (&raw mut status).cast()) };
            if code == CAPTURE_IMPLICIT {
                // The legacy default stream while another stream that synchronises with it is capturing: work on it
                // would join that capture, which the driver does not allow, so it is as good as capturing.
                return Ok(CaptureStatus::Active);
            }
            check(Call::CaptureStatus, code).map(|()| capture_status(status))
        })
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        self.devices()?;
        let former = read(Call::ExchangeCaptureMode, raw_capture_mode(mode), |mode| {
            // SAFETY: `mode` is a local of the enum's size that outlives the call and holds one of the documented modes.
            unsafe { library::cuThreadExchangeStreamCaptureMode(ptr::from_mut(mode).cast()) }
        })?;
        Ok(capture_mode(former))
    }

    fn synchronize_device(&self, device: DeviceId) -> Result<()> {
        self.in_context(device, Call::SynchronizeDevice, |_| {
            // SAFETY: The call takes nothing; the context to wait for is current.
            check(Call::SynchronizeDevice, unsafe { library::cuCtxSynchronize() })
        })
    }
}

fn find_devices() -> Result<Box<[Device]>> {
    let count = read(Call::Initialize, 0, |count| {
        // SAFETY: `count` is a local that outlives the call.
        unsafe { library::cuDeviceGetCount(count) }
    })?;
    let find = |index| {
        let ordinal = read(Call::Initialize, 0, |device| {
            // SAFETY: `device` is a local that outlives the call, and the index is below the count.
            unsafe { library::cuDeviceGet(device, index) }
        })?;
        Ok(Device { ordinal, context: AtomicPtr::new(ptr::null_mut()), handle_uses: HandleUses::default() })
    };
    (0..count).map(find).collect()
}

fn total_memory(device: CUdevice) -> Result<u64> {
    let bytes = read(Call::Attribute, 0, |bytes| {
        // SAFETY: `bytes` is a local that outlives the call, and the driver gave us the device.
        unsafe { library::cuDeviceTotalMem_v2(bytes, device) }
    })?;
    Ok(bytes as u64)
}

/// A number that the driver knows about `device`.
pub(super) fn attribute(device: CUdevice, attribute: CUdevice_attribute) -> Result<i32> {
    read(Call::Attribute, 0, |value| {
        // SAFETY: `value` is a local that outlives the call, and the driver gave us the device.
        unsafe { library::cuDeviceGetAttribute(value, attribute, device) }
    })
}

/// Runs `body` with `context` current, and puts back the former one.
fn in_context<T>(context: CUcontext, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let former = current_context()?;
    if former == context {
        return body();
    }
    set_context(context)?;
    let outcome = body();
    // This fails only when the former context was destroyed in the meantime or the driver is gone. Then there is nothing
    // to put back, and the outcome still holds: memory obtained must not be lost over it.
    let _ = set_context(former);
    outcome
}

fn current_context() -> Result<CUcontext> {
    read(Call::CurrentContext, ptr::null_mut(), |context| {
        // SAFETY: `context` is a local that outlives the call.
        unsafe { library::cuCtxGetCurrent(context) }
    })
}

/// Makes `context` current; null takes the current one away.
fn set_context(context: CUcontext) -> Result<()> {
    // SAFETY: The context is null, a primary one that is never released, or one that the driver named just before.
    check(Call::SetContext, unsafe { library::cuCtxSetCurrent(context) })
}

fn device_of_current_context(devices: &[Device], call: Call) -> Result<DeviceId> {
    let ordinal = read(call, 0, |device| {
        // SAFETY: `device` is a local that outlives the call, and a context is current.
        unsafe { library::cuCtxGetDevice(device) }
    })?;
    let index = devices.iter().position(|device| device.ordinal == ordinal);
    index.map(|index| DeviceId(index as u32)).ok_or(DriverError { call, status: Status::InvalidDevice })
}

fn raw_event(event: Event) -> CUevent {
    ptr::with_exposed_provenance_mut(event.0 as usize)
}

/// Default streams need no translation: their numbers are CUDA's own (`CU_STREAM_LEGACY` 1, `CU_STREAM_PER_THREAD` 2).
fn raw_stream(handle: StreamHandle) -> CUstream {
    ptr::with_exposed_provenance_mut(handle.0 as usize)
}

fn raw_capture_mode(mode: CaptureMode) -> c_uint {
    let mode = match mode {
        CaptureMode::Global => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        CaptureMode::ThreadLocal => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CaptureMode::Relaxed => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
    };
    mode as c_uint
}

/// A mode that is unknown here counts as the one that forbids most.
fn capture_mode(mode: c_uint) -> CaptureMode {
    let modes = [CaptureMode::Relaxed, CaptureMode::ThreadLocal];
    modes.into_iter().find(|&known| raw_capture_mode(known) == mode).unwrap_or(CaptureMode::Global)
}

/// A status that is unknown here is some kind of capture, and nothing may be recorded on the stream.
fn capture_status(status: c_uint) -> CaptureStatus {
    const NONE: c_uint = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint;
    const INVALIDATED: c_uint = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as c_uint;
    match status {
        NONE => CaptureStatus::None,
        INVALIDATED => CaptureStatus::Invalidated,
        _ => CaptureStatus::Active,
    }
}

#[cfg(test)]
#[path = "cuda_tests.rs"]
mod tests;
