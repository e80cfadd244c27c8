//! The program beside the real driver: its own streams, kernels and captures, made with plain driver calls.
//!
//! It makes no call before a clause asks for something, so that clauses see a device nobody has used yet; its first one
//! has the driver initialised.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::time::Duration;

use alloc_core::driver::contract::Rig;
use alloc_core::driver::cuda::CudaDriver;
use alloc_core::driver::{CaptureMode, Driver};
use alloc_core::id::{DeviceId, DevicePtr, Stream, StreamHandle};
use cudarc::driver::sys::{self, CUcontext, CUfunction, CUgraph, CUmodule, CUresult, CUstream, CUstreamCaptureMode};

/// The suite uses at most two devices.
const DEVICES: usize = 2;

/// Threads of a kernel that writes memory.
const FILL_THREADS: u32 = 256;

/// A real GPU and a program on it.
pub(crate) struct CudaRig {
    driver: CudaDriver,
    programs: [OnceLock<Program>; DEVICES],
}

/// The program's part on one device. Handles of the driver, as numbers so that threads may share them.
struct Program {
    context: usize,
    spin: usize,
    fill: usize,
}

/// Panics unless a call of the program itself worked.
pub(crate) fn must(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS, "a call of the program beside the driver failed");
}

fn raw<T>(number: usize) -> *mut T {
    ptr::with_exposed_provenance_mut(number)
}

fn raw_stream(stream: Stream) -> CUstream {
    raw(stream.handle.0 as usize)
}

fn current_context() -> CUcontext {
    let mut context = ptr::null_mut();
    // SAFETY: `context` is a local that outlives the call. The driver is initialised: see `CudaRig::program`.
    must(unsafe { sys::cuCtxGetCurrent(&raw mut context) });
    context
}

fn set_context(context: CUcontext) {
    // SAFETY: The context is null, or a primary one that is never released.
    must(unsafe { sys::cuCtxSetCurrent(context) });
}

impl CudaRig {
    pub(crate) fn new() -> Self {
        Self { driver: CudaDriver::new(), programs: [const { OnceLock::new() }; DEVICES] }
    }

    /// The program on `device`. In a child that begins with a later clause, the driver may not have been initialised yet.
    fn program(&self, device: DeviceId) -> &Program {
        self.programs[device.index()].get_or_init(|| {
            self.driver.device_count().expect("the parent process found devices");
            Program::load(device)
        })
    }

    /// Runs `body` with the device's context current, and puts back the former one.
    fn on<T>(&self, device: DeviceId, body: impl FnOnce(&Program) -> T) -> T {
        let program = self.program(device);
        let former = current_context();
        set_context(raw(program.context));
        let outcome = body(program);
        set_context(former);
        outcome
    }
}

impl Program {
    /// Loads the kernels and runs each once: the driver finishes loading a kernel at its first launch, which may wait
    /// and is not allowed during a capture.
    fn load(device: DeviceId) -> Self {
        let former = current_context();
        let mut context = ptr::null_mut();
        // SAFETY: `context` is a local that outlives the call; the device's index was counted by the driver.
        must(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device.0.cast_signed()) });
        set_context(context);
        let text = CString::new(include_str!("kernels.ptx")).expect("the kernels hold no zero byte");
        let mut module: CUmodule = ptr::null_mut();
        // SAFETY: `module` is a local that outlives the call; the text is PTX and ends in a zero byte.
        must(unsafe { sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast()) });
        let program = Self {
            context: context.expose_provenance(),
            spin: function(module, "spin").expose_provenance(),
            fill: function(module, "fill").expose_provenance(),
        };
        program.spin(ptr::null_mut(), Duration::ZERO);
        program.fill(ptr::null_mut(), DevicePtr(0), 0, 0);
        // SAFETY: The call takes nothing; the context to wait for is current.
        must(unsafe { sys::cuCtxSynchronize() });
        set_context(former);
        program
    }

    fn spin(&self, stream: CUstream, duration: Duration) {
        let mut nanoseconds = duration.as_nanos() as u64;
        launch(raw(self.spin), 1, stream, &mut [(&raw mut nanoseconds).cast()]);
    }

    fn fill(&self, stream: CUstream, address: DevicePtr, words: u64, value: u32) {
        let (mut address, mut words, mut value) = (address.0, words, value);
        let mut parameters = [(&raw mut address).cast(), (&raw mut words).cast(), (&raw mut value).cast()];
        launch(raw(self.fill), FILL_THREADS, stream, &mut parameters);
    }
}

fn function(module: CUmodule, name: &str) -> CUfunction {
    let name = CString::new(name).expect("names hold no zero byte");
    let mut function = ptr::null_mut();
    // SAFETY: All pointers outlive the call, and the module is loaded.
    must(unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) });
    function
}

/// Launches one block of a kernel in the current context.
fn launch(function: CUfunction, threads: u32, stream: CUstream, parameters: &mut [*mut c_void]) {
    let parameters = parameters.as_mut_ptr();
    // SAFETY: `parameters` points to one value of the right type for each parameter of the kernel, which the driver
    // copies before the call returns; what the kernel touches is the clause's to keep alive.
    must(unsafe { sys::cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, parameters, ptr::null_mut()) });
}

impl Rig for CudaRig {
    fn driver(&self) -> &dyn Driver {
        &self.driver
    }

    fn make_stream(&self, device: DeviceId) -> Stream {
        let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = ptr::null_mut();
        // SAFETY: `stream` is a local that outlives the call, and the flag is one of the documented ones.
        self.on(device, |_| must(unsafe { sys::cuStreamCreate(&raw mut stream, non_blocking) }));
        Stream { device, handle: StreamHandle(stream.expose_provenance() as u64) }
    }

    fn destroy_stream(&self, stream: Stream) {
        if stream.handle.is_default() {
            return;
        }
        // SAFETY: The stream came from `make_stream`, and the clause destroys it once.
        self.on(stream.device, |_| must(unsafe { sys::cuStreamDestroy_v2(raw_stream(stream)) }));
    }

    fn set_current_device(&self, device: DeviceId) {
        set_context(raw(self.program(device).context));
    }

    fn work(&self, stream: Stream, duration: Duration) {
        self.on(stream.device, |program| program.spin(raw_stream(stream), duration));
    }

    fn write(&self, stream: Stream, address: DevicePtr, size: u64, value: u32) {
        self.on(stream.device, |program| program.fill(raw_stream(stream), address, size / 4, value));
    }

    fn read(&self, device: DeviceId, address: DevicePtr) -> u32 {
        self.on(device, |_| {
            // SAFETY: The call takes nothing; the context to wait for is current.
            must(unsafe { sys::cuCtxSynchronize() });
            let mut word = 0_u32;
            // SAFETY: `word` is a local of four bytes that outlives the call; the driver refuses a bad address.
            must(unsafe { sys::cuMemcpyDtoH_v2((&raw mut word).cast(), address.0, size_of::<u32>()) });
            word
        })
    }

    fn begin_capture(&self, stream: Stream, mode: CaptureMode) {
        let mode = match mode {
            CaptureMode::Global => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        };
        // SAFETY: The stream came from `make_stream` and is alive.
        self.on(stream.device, |_| must(unsafe { sys::cuStreamBeginCapture_v2(raw_stream(stream), mode) }));
    }

    fn end_capture(&self, stream: Stream) -> bool {
        self.on(stream.device, |_| {
            let mut graph: CUgraph = ptr::null_mut();
            // SAFETY: `graph` is a local that outlives the call, and the stream is alive.
            let result = unsafe { sys::cuStreamEndCapture(raw_stream(stream), &raw mut graph) };
            if graph.is_null() {
                return false;
            }
            // SAFETY: The capture made the graph for us, and nothing else knows it.
            must(unsafe { sys::cuGraphDestroy(graph) });
            result == CUresult::CUDA_SUCCESS
        })
    }
}
