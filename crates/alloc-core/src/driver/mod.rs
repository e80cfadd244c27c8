//! The seam between the allocator and a GPU.
//!
//! The allocator reaches memory, events and streams through [`Driver`] alone, so the same core runs on a real GPU
//! (`cuda`) and on the simulated one (`sim`). What each method promises is written at the method and tested for every
//! implementation by one suite (`contract`).
//!
//! Rules that hold for all methods:
//!
//! - They may be called from any thread. The calling thread's current context is the same after a call as before it.
//! - A call that fails has changed nothing, and the failure belongs to that call alone: the next call does not see it.
//! - None of them waits for queued work, except where the text says so.

#[cfg(any(test, feature = "sim", feature = "cuda"))]
pub mod contract;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cuda")]
mod cuda_library;
#[cfg(feature = "cuda")]
mod cuda_vmm;
#[cfg(feature = "sim")]
pub mod sim;

use std::fmt;

use crate::id::{DeviceId, DevicePtr, Event, PhysicalHandle, Stream, StreamHandle};

/// What drivers say for [`Capabilities::stale_mappings_max`], since none is known to have a limit of its own.
pub const STALE_MAPPINGS_MAX: usize = 4096;

/// What a device can do, asked once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Bytes of memory on the device.
    pub total_bytes: u64,
    /// Whether address ranges and physical handles may be used (`cuMemCreate` and its family).
    pub virtual_memory: bool,
    /// Why not, in the user's words; empty when `virtual_memory` is true.
    pub virtual_memory_missing: String,
    /// Handles and mappings are multiples of this many bytes (2 MiB on every card so far); 0 without virtual memory.
    pub granularity_bytes: u64,
    /// How many mappings may be kept whose memory lives elsewhere now. Each takes addresses and room in page tables, and
    /// a look whenever memory moves.
    pub stale_mappings_max: usize,
}

/// Bytes of a device's memory, as the driver sees them: other processes count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that could still be obtained.
    pub free_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// Memory of another process, as CUDA names it between processes (`CUipcMemHandle`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub [u8; Ticket::BYTES]);

impl Ticket {
    /// How long one is.
    pub const BYTES: usize = 64;
}

/// Whether queued work has ended. An error is neither, and is never folded into one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// All work before the event has ended.
    Done,
    /// Some of it has not.
    Pending,
}

/// What a stream's operations do at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// They run.
    None,
    /// They are captured into a graph: a record would be captured, a wait on an outside event would spoil the capture.
    Active,
    /// They fail: the capture was spoiled and has to be ended first.
    Invalidated,
}

/// What a thread's own calls may do while some stream is capturing (`cuThreadExchangeStreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// Unsafe calls are refused, and spoil a capture, while any thread captures in this mode.
    Global,
    /// Unsafe calls are refused, and spoil a capture, while this thread captures.
    ThreadLocal,
    /// Nothing is refused, except on a stream that is itself capturing.
    Relaxed,
}

macro_rules! driver_calls {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A driver call, by its name in CUDA's driver API: for errors, counters and injected faults.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Call { $($(#[$doc])* $variant,)* }

        impl Call {
            /// Every call, in the order of the trait.
            pub const ALL: &[Call] = &[$(Call::$variant,)*];

            /// CUDA's name of the call.
            pub fn name(self) -> &'static str {
                match self { $(Call::$variant => $name,)* }
            }

            /// The call that CUDA names so.
            pub fn from_name(name: &str) -> Option<Call> {
                match name { $($name => Some(Call::$variant),)* _ => None }
            }
        }
    };
}

driver_calls! {
    /// Loading the library and `cuInit`.
    Initialize = "cuInit",
    /// [`Driver::capabilities`].
    Attribute = "cuDeviceGetAttribute",
    /// [`Driver::current_device`].
    CurrentContext = "cuCtxGetCurrent",
    /// [`Driver::is_active`].
    PrimaryContextState = "cuDevicePrimaryCtxGetState",
    /// Making a device's primary context usable.
    RetainContext = "cuDevicePrimaryCtxRetain",
    /// Making a context current, and back.
    SetContext = "cuCtxSetCurrent",
    /// [`Driver::can_access_peer`].
    CanAccessPeer = "cuDeviceCanAccessPeer",
    /// [`Driver::memory_info`].
    MemoryInfo = "cuMemGetInfo",
    /// [`Driver::allocate`].
    Allocate = "cuMemAlloc",
    /// [`Driver::free`].
    Free = "cuMemFree",
    /// [`Driver::reserve_range`].
    ReserveRange = "cuMemAddressReserve",
    /// [`Driver::free_range`].
    FreeRange = "cuMemAddressFree",
    /// [`Driver::create_handle`].
    CreateHandle = "cuMemCreate",
    /// [`Driver::release_handle`].
    ReleaseHandle = "cuMemRelease",
    /// [`Driver::map`].
    Map = "cuMemMap",
    /// [`Driver::set_access`].
    SetAccess = "cuMemSetAccess",
    /// [`Driver::unmap`].
    Unmap = "cuMemUnmap",
    /// [`Driver::export_handle`].
    ExportHandle = "cuMemExportToShareableHandle",
    /// [`Driver::import_handle`].
    ImportHandle = "cuMemImportFromShareableHandle",
    /// [`Driver::ticket`].
    GetTicket = "cuIpcGetMemHandle",
    /// [`Driver::open_ticket`].
    OpenTicket = "cuIpcOpenMemHandle",
    /// [`Driver::close_ticket`].
    CloseTicket = "cuIpcCloseMemHandle",
    /// [`Driver::create_event`].
    CreateEvent = "cuEventCreate",
    /// [`Driver::destroy_event`].
    DestroyEvent = "cuEventDestroy",
    /// [`Driver::record_event`].
    RecordEvent = "cuEventRecord",
    /// [`Driver::query_event`].
    QueryEvent = "cuEventQuery",
    /// [`Driver::synchronize_event`].
    SynchronizeEvent = "cuEventSynchronize",
    /// [`Driver::wait_event`].
    WaitEvent = "cuStreamWaitEvent",
    /// [`Driver::stream_device`].
    StreamContext = "cuStreamGetCtx",
    /// [`Driver::capture_status`].
    CaptureStatus = "cuStreamIsCapturing",
    /// [`Driver::exchange_capture_mode`].
    ExchangeCaptureMode = "cuThreadExchangeStreamCaptureMode",
    /// [`Driver::synchronize_device`].
    SynchronizeDevice = "cuCtxSynchronize",
}

macro_rules! statuses {
    ($($(#[$doc:meta])* $variant:ident = $code:literal $name:literal,)*) => {
        /// Why a driver call failed. The ones that the allocator tells apart have a name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Status {
            $($(#[$doc])* $variant,)*
            /// Any other `CUresult`.
            Other(i32),
        }

        impl Status {
            /// The status of a `CUresult` that is neither success nor not-ready.
            pub fn from_code(code: i32) -> Self {
                match code { $($code => Status::$variant,)* other => Status::Other(other) }
            }

            /// The `CUresult`.
            pub fn code(self) -> i32 {
                match self { $(Status::$variant => $code,)* Status::Other(code) => code }
            }

            /// The status that CUDA names so, as `CUDA_ERROR_OUT_OF_MEMORY`.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Status::$variant),)* _ => None }
            }
        }

        impl fmt::Display for Status {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Status::$variant => formatter.write_str($name),)*
                    Status::Other(code) => write!(formatter, "CUresult {code}"),
                }
            }
        }
    };
}

statuses! {
    /// An argument was refused: unmapped address, unaligned size, double map, host wait for a captured event.
    InvalidValue = 1 "CUDA_ERROR_INVALID_VALUE",
    /// The device has no memory left for this.
    OutOfMemory = 2 "CUDA_ERROR_OUT_OF_MEMORY",
    /// The driver was never initialised in this process; also in a forked child.
    NotInitialized = 3 "CUDA_ERROR_NOT_INITIALIZED",
    /// The driver is shutting down.
    Deinitialized = 4 "CUDA_ERROR_DEINITIALIZED",
    /// There is no GPU.
    NoDevice = 100 "CUDA_ERROR_NO_DEVICE",
    /// There is no such device.
    InvalidDevice = 101 "CUDA_ERROR_INVALID_DEVICE",
    /// No context, or one of another device.
    InvalidContext = 201 "CUDA_ERROR_INVALID_CONTEXT",
    /// An event that is destroyed or of another context, or a handle that names no stream, if the driver notices.
    InvalidHandle = 400 "CUDA_ERROR_INVALID_HANDLE",
    /// The driver is too old for the call, or the library lacks it.
    NotFound = 500 "CUDA_ERROR_NOT_FOUND",
    /// An earlier kernel touched an address that was not mapped; the context is lost.
    IllegalAddress = 700 "CUDA_ERROR_ILLEGAL_ADDRESS",
    /// The primary context is gone.
    ContextIsDestroyed = 709 "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    /// The process or container may not do this.
    NotPermitted = 800 "CUDA_ERROR_NOT_PERMITTED",
    /// The device or driver cannot do this; part of a handle was to be mapped.
    NotSupported = 801 "CUDA_ERROR_NOT_SUPPORTED",
    /// Not while this capture is under way; the capture is spoiled.
    CaptureUnsupported = 900 "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    /// The capture was spoiled earlier.
    CaptureInvalidated = 901 "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    /// The call would make captured work depend on work outside the capture.
    CaptureIsolation = 905 "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
    /// The event was last recorded inside a capture, and is asked about.
    CapturedEvent = 907 "CUDA_ERROR_CAPTURED_EVENT",
    /// The driver failed in a way it does not explain.
    Unknown = 999 "CUDA_ERROR_UNKNOWN",
}

/// A driver call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} failed: {status}", call.name())]
pub struct DriverError {
    /// Which call.
    pub call: Call,
    /// Why.
    pub status: Status,
}

impl DriverError {
    /// Whether the device had no memory left: the one failure that releasing memory can cure.
    pub fn is_out_of_memory(self) -> bool {
        self.status == Status::OutOfMemory
    }
}

/// The result of a driver call.
pub type Result<T> = std::result::Result<T, DriverError>;

/// A GPU driver: the calls that the allocator needs, and no others.
///
/// See the [module](self) for the rules that hold for all methods.
///
/// # Destroyed streams
///
/// Streams belong to the program, which may destroy them. To hand the handle of a destroyed stream to
/// [`record_event`](Self::record_event), [`wait_event`](Self::wait_event), [`stream_device`](Self::stream_device) or
/// [`capture_status`](Self::capture_status) is undefined behaviour in the real driver: it may crash the process, answer
/// for a new stream that was given the same handle, or fail with [`Status::InvalidHandle`]. No call can ask first, since
/// each would have to be given the handle. So the caller has to be told before a stream is destroyed
/// ([`Allocator::retire_stream`](crate::allocator::Allocator::retire_stream)) and may rely on no error after it; the
/// simulator counts such a call as a violation.
#[expect(
    clippy::missing_errors_doc,
    reason = "any call may fail with any status; the texts name those that mean something"
)]
pub trait Driver: Send + Sync + 'static {
    /// The number of devices. Initialises the driver's library, but makes no context.
    fn device_count(&self) -> Result<u32>;

    /// What `device` can do. Makes no context; the answer never changes.
    fn capabilities(&self, device: DeviceId) -> Result<Capabilities>;

    /// The device of the calling thread's current context; `None` if it has none.
    fn current_device(&self) -> Result<Option<DeviceId>>;

    /// Whether somebody in this process has made `device`'s primary context. Makes none.
    fn is_active(&self, device: DeviceId) -> Result<bool>;

    /// Whether `device` can read and write memory that lives on `peer`.
    fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> Result<bool>;

    /// Free and total bytes of `device`.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;

    /// `size` bytes of memory at an address that the driver chooses, aligned to at least 512 bytes.
    ///
    /// Fails with [`Status::OutOfMemory`] when the device has too little, with [`Status::CaptureUnsupported`], spoiling
    /// the capture, when the thread's capture mode forbids it.
    fn allocate(&self, device: DeviceId, size: u64) -> Result<DevicePtr>;

    /// Gives back what [`allocate`](Self::allocate) returned. **Waits for all work queued on the device.**
    fn free(&self, device: DeviceId, address: DevicePtr) -> Result<()>;

    /// Sets `size` bytes of addresses aside, backed by nothing. `size` is a multiple of the granularity.
    fn reserve_range(&self, device: DeviceId, size: u64) -> Result<DevicePtr>;

    /// Gives back a whole range from [`reserve_range`](Self::reserve_range), in which nothing is mapped any more.
    fn free_range(&self, device: DeviceId, base: DevicePtr, size: u64) -> Result<()>;

    /// `size` bytes of physical memory on `device`, at no address yet. `size` is a multiple of the granularity.
    ///
    /// Allowed during a capture. Fails with [`Status::OutOfMemory`] when the device has too little.
    fn create_handle(&self, device: DeviceId, size: u64) -> Result<PhysicalHandle>;

    /// Gives the handle back. Its memory returns to the device once its last mapping is gone too.
    fn release_handle(&self, device: DeviceId, handle: PhysicalHandle) -> Result<()>;

    /// Maps a whole handle of `size` bytes at `address`, inside a reserved range, where nothing is mapped.
    ///
    /// Part of a handle is refused with [`Status::NotSupported`], any other misuse with [`Status::InvalidValue`]. The
    /// memory may not be touched before [`set_access`](Self::set_access). A handle may be mapped at two addresses.
    fn map(&self, device: DeviceId, address: DevicePtr, size: u64, handle: PhysicalHandle) -> Result<()>;

    /// Lets `devices` read and write `size` mapped bytes at `address`, which may span several handles.
    fn set_access(&self, device: DeviceId, address: DevicePtr, size: u64, devices: &[DeviceId]) -> Result<()>;

    /// Removes the mappings in `size` bytes at `address`: whole handles only. **Does not wait for queued work**: work
    /// that still touches these addresses faults, so the caller has to know that all of it has ended.
    ///
    /// Reserved addresses at which nothing is mapped are left alone, which is no error: success does not prove that
    /// something was mapped there.
    fn unmap(&self, device: DeviceId, address: DevicePtr, size: u64) -> Result<()>;

    /// A file descriptor that names the memory of a handle, for [`import_handle`](Self::import_handle) in this process or in
    /// another that was sent it. The caller closes it.
    ///
    /// Fails, with a status that differs from driver to driver, if the handle could not be made to be exported.
    fn export_handle(&self, device: DeviceId, handle: PhysicalHandle) -> Result<i32>;

    /// The memory that a descriptor names, as a handle to be mapped and released like one of [`create_handle`]'s. The
    /// memory goes back to the device when all handles of all processes are released and all mappings gone. The
    /// descriptor stays the caller's.
    ///
    /// [`create_handle`]: Self::create_handle
    fn import_handle(&self, device: DeviceId, descriptor: i32) -> Result<PhysicalHandle>;

    /// What names the memory that [`allocate`](Self::allocate) returned at `base` to other processes.
    fn ticket(&self, device: DeviceId, base: DevicePtr) -> Result<Ticket>;

    /// An address in this process for the memory that another process's ticket names, until it is
    /// [closed](Self::close_ticket). A process cannot open its own tickets ([`Status::InvalidContext`]).
    fn open_ticket(&self, device: DeviceId, ticket: &Ticket) -> Result<DevicePtr>;

    /// Gives up the address that [`open_ticket`](Self::open_ticket) returned. **Waits for all work queued on the device.**
    fn close_ticket(&self, device: DeviceId, address: DevicePtr) -> Result<()>;

    /// A new event in `device`'s context, without timing.
    fn create_event(&self, device: DeviceId) -> Result<Event>;

    /// Destroys an event. Work that was queued before still runs.
    fn destroy_event(&self, device: DeviceId, event: Event) -> Result<()>;

    /// Marks the present end of `stream`'s queue. A second record moves the mark.
    ///
    /// The stream must not be [destroyed](Self#destroyed-streams). The event must be of the stream's device, else
    /// [`Status::InvalidHandle`]. On a stream that is capturing, the record is captured and the event can be neither
    /// queried ([`Status::CapturedEvent`]) nor waited for on the host ([`Status::InvalidValue`]).
    fn record_event(&self, event: Event, stream: Stream) -> Result<()>;

    /// Whether all work before the event's mark has ended. An event never recorded is done.
    ///
    /// Fails with [`Status::CaptureUnsupported`], spoiling the capture, when the thread's capture mode forbids it.
    fn query_event(&self, device: DeviceId, event: Event) -> Result<Completion>;

    /// **Waits on the host** until all work before the event's mark has ended.
    fn synchronize_event(&self, device: DeviceId, event: Event) -> Result<()>;

    /// Makes work that `stream` gets from now on wait, on the GPU, for the event's mark. The host does not wait.
    ///
    /// The stream must not be [destroyed](Self#destroyed-streams). On one that is capturing this fails with
    /// [`Status::CaptureIsolation`] and spoils the capture.
    fn wait_event(&self, stream: Stream, event: Event) -> Result<()>;

    /// The device that a stream handle belongs to. Not for default handles, which every device has.
    ///
    /// The stream must not be [destroyed](Self#destroyed-streams).
    fn stream_device(&self, handle: StreamHandle) -> Result<DeviceId>;

    /// What `stream`'s operations do now. Allowed in every capture mode.
    ///
    /// The stream must not be [destroyed](Self#destroyed-streams).
    fn capture_status(&self, stream: Stream) -> Result<CaptureStatus>;

    /// Sets the calling thread's capture mode and returns the former one.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;

    /// **Waits on the host** until all work queued on `device` has ended. Refused while a stream of it is capturing
    /// ([`Status::CaptureUnsupported`], which spoils the capture).
    fn synchronize_device(&self, device: DeviceId) -> Result<()>;
}
