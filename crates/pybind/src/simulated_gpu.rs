//! The simulated GPU for Python: `rallocator.testing.SimulatedGpu` without its documentation and its units.
//!
//! A Python program numbers its streams: 0 is the default stream and any other number a stream of its own. To CUDA, 1
//! and 2 are default streams too, so [`handle_of`] gives these two numbers other handles, and [`in_numbers`] takes those
//! back out of what is told to the program.

use std::collections::BTreeMap;

use alloc_core::driver::sim::{GraphId, SimError, SimOptions};
use alloc_core::driver::{Call, CaptureMode, Status};
use alloc_core::error::AllocError;
use alloc_core::id::{DeviceId, DevicePtr, PoolId, StreamHandle};
use alloc_core::simulated_gpu::{SimulatedGpu, SimulatedGpuError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::{config, snapshot};

pyo3::import_exception!(rallocator.errors, InvariantError);
pyo3::import_exception!(rallocator.errors, OutOfMemoryError);
pyo3::import_exception!(rallocator.errors, RaceError);
pyo3::import_exception!(rallocator.errors, RallocatorError);
pyo3::import_exception!(rallocator.errors, UnmappedAccessError);
pyo3::import_exception!(rallocator.errors, UseAfterFreeError);

/// Adds the class to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PySimulatedGpu>()
}

/// More devices than this cannot be simulated: the allocator knows no more.
const DEVICES_MAX: u32 = 64;

/// Added to the stream numbers that are default streams to CUDA.
const RENAMED: u64 = 0xffff_0000_0000_0000;

/// The handle that stands for a program's stream number.
fn handle_of(stream: u64) -> StreamHandle {
    match stream {
        1 | 2 => StreamHandle(RENAMED + stream),
        other => StreamHandle(other),
    }
}

/// The program's number of a stream.
fn number_of(stream: StreamHandle) -> StreamHandle {
    StreamHandle(stream.0 - if stream == handle_of(1) || stream == handle_of(2) { RENAMED } else { 0 })
}

/// A text in which streams have the program's numbers.
fn in_numbers(text: &str) -> String {
    [1, 2].iter().fold(text.to_owned(), |text, &stream| {
        let handle = handle_of(stream);
        text.replace(&format!("{handle:?}"), &format!("{:?}", number_of(handle)))
    })
}

/// The exception that a program sees for an error.
fn exception(error: &SimulatedGpuError) -> PyErr {
    let text = in_numbers(&error.to_string());
    match error {
        SimulatedGpuError::Alloc(AllocError::OutOfMemory(_)) => OutOfMemoryError::new_err(text),
        SimulatedGpuError::Sim(SimError::Race(_)) => RaceError::new_err(text),
        SimulatedGpuError::Sim(SimError::UseAfterFree(_)) => UseAfterFreeError::new_err(text),
        SimulatedGpuError::Sim(SimError::UnmappedAccess(_) | SimError::UnorderedUnmap(_)) => {
            UnmappedAccessError::new_err(text)
        }
        SimulatedGpuError::Sim(SimError::Violation(_)) | SimulatedGpuError::Invariant(_) => {
            InvariantError::new_err(text)
        }
        SimulatedGpuError::UnknownPointer(_)
        | SimulatedGpuError::UnknownPool(_)
        | SimulatedGpuError::Alloc(AllocError::NoSuchDevice { .. } | AllocError::InvalidFraction { .. }) => {
            PyValueError::new_err(text)
        }
        SimulatedGpuError::Alloc(_) | SimulatedGpuError::Sim(SimError::Refused { .. }) => {
            RallocatorError::new_err(text)
        }
    }
}

/// A program's view of a simulated GPU; see [`SimulatedGpu`].
#[pyclass(frozen, name = "SimulatedGpu", module = "rallocator._core")]
struct PySimulatedGpu {
    gpu: SimulatedGpu,
    devices: u32,
}

impl PySimulatedGpu {
    /// Makes one call of the program, without Python's lock: it may wait for another thread's.
    fn play<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&SimulatedGpu) -> Result<T, SimulatedGpuError> + Send,
    ) -> PyResult<T> {
        py.detach(|| call(&self.gpu)).map_err(|error| exception(&error))
    }

    fn device(&self, device: u32) -> PyResult<DeviceId> {
        if device < self.devices {
            return Ok(DeviceId(device));
        }
        let count = self.devices;
        Err(PyValueError::new_err(format!("device {device} does not exist: this machine has {count} device(s)")))
    }
}

#[pymethods]
impl PySimulatedGpu {
    #[new]
    fn new(
        capacity_bytes: u64,
        devices: u32,
        vmm: bool,
        config: &str,
        granularity_bytes: u64,
        peers: bool,
    ) -> PyResult<Self> {
        if !(1..=DEVICES_MAX).contains(&devices) {
            return Err(PyValueError::new_err(format!("devices must be from 1 to {DEVICES_MAX}, not {devices}")));
        }
        if !granularity_bytes.is_power_of_two() || granularity_bytes < 512 {
            return Err(PyValueError::new_err(format!(
                "granularity must be a power of two from 512 bytes on, not {granularity_bytes}"
            )));
        }
        let options = SimOptions {
            capacity_bytes,
            devices,
            virtual_memory: vmm,
            granularity_bytes,
            peers,
            ..SimOptions::default()
        };
        Ok(Self { gpu: SimulatedGpu::new(options, config::parse(config)?.config), devices })
    }

    fn malloc(&self, py: Python<'_>, size: u64, stream: u64, device: u32) -> PyResult<u64> {
        let address = self.play(py, |gpu| gpu.malloc(size, DeviceId(device), handle_of(stream)))?;
        Ok(address.map_or(0, |address| address.0))
    }

    fn free(&self, py: Python<'_>, address: u64, device: u32) -> PyResult<()> {
        self.play(py, |gpu| gpu.free(DevicePtr(address), DeviceId(device)).map(drop))
    }

    fn record_stream(&self, py: Python<'_>, address: u64, stream: u64) -> PyResult<()> {
        self.play(py, |gpu| gpu.record_stream(DevicePtr(address), handle_of(stream)).map(drop))
    }

    fn launch(&self, py: Python<'_>, stream: u64, reads: Vec<u64>, writes: Vec<u64>, us: u64) -> PyResult<()> {
        let [reads, writes] = [reads, writes].map(|list| list.into_iter().map(DevicePtr).collect::<Vec<_>>());
        self.play(py, |gpu| gpu.launch(handle_of(stream), &reads, &writes, us))
    }

    fn wait(&self, py: Python<'_>, stream: u64, on: u64) -> PyResult<()> {
        self.play(py, |gpu| gpu.wait(handle_of(stream), handle_of(on)))
    }

    fn complete(&self, py: Python<'_>, stream: Option<u64>) -> PyResult<()> {
        self.play(py, |gpu| gpu.complete(stream.map(handle_of)))
    }

    fn advance(&self, py: Python<'_>, us: u64) -> PyResult<()> {
        self.play(py, |gpu| gpu.advance(us))
    }

    fn begin_pool(&self, py: Python<'_>, pool: (u64, u64), stream: u64) -> PyResult<()> {
        self.play(py, |gpu| gpu.begin_pool(PoolId(pool.0, pool.1), handle_of(stream)))
    }

    fn end_pool(&self, py: Python<'_>, pool: (u64, u64)) -> PyResult<()> {
        self.play(py, |gpu| gpu.end_pool(PoolId(pool.0, pool.1)))
    }

    fn release_pool(&self, py: Python<'_>, pool: (u64, u64)) -> PyResult<()> {
        self.play(py, |gpu| gpu.release_pool(PoolId(pool.0, pool.1)))
    }

    fn restrict_moves(&self, py: Python<'_>, pool: (u64, u64), moving: &str) -> PyResult<()> {
        let moving = config::moving(moving)?;
        self.play(py, |gpu| gpu.restrict_moves(PoolId(pool.0, pool.1), moving))
    }

    fn begin_capture(&self, py: Python<'_>, stream: u64, mode: &str) -> PyResult<()> {
        let mode = match mode {
            "global" => CaptureMode::Global,
            "thread_local" => CaptureMode::ThreadLocal,
            "relaxed" => CaptureMode::Relaxed,
            other => {
                let text = format!("mode must be 'global', 'thread_local' or 'relaxed', not {other:?}");
                return Err(PyValueError::new_err(text));
            }
        };
        self.play(py, |gpu| gpu.begin_capture(handle_of(stream), mode))
    }

    fn end_capture(&self, py: Python<'_>, stream: u64) -> PyResult<u64> {
        self.play(py, |gpu| gpu.end_capture(handle_of(stream))).map(|graph| graph.0)
    }

    fn abort_capture(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        self.play(py, |gpu| gpu.abort_capture(handle_of(stream)))
    }

    fn replay(&self, py: Python<'_>, graph: u64, stream: u64) -> PyResult<()> {
        self.play(py, |gpu| gpu.replay(GraphId(graph), handle_of(stream)))
    }

    fn destroy_graph(&self, py: Python<'_>, graph: u64) -> PyResult<()> {
        self.play(py, |gpu| gpu.destroy_graph(GraphId(graph)))
    }

    fn destroy_stream(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        self.play(py, |gpu| gpu.destroy_stream(handle_of(stream)))
    }

    fn retire_stream(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        self.play(py, |gpu| Ok(gpu.allocator().retire_stream(handle_of(stream))?))
    }

    fn set_current_device(&self, py: Python<'_>, device: u32) -> PyResult<()> {
        let device = self.device(device)?;
        self.play(py, |gpu| gpu.set_current_device(device))
    }

    fn fork_child(&self) {
        self.gpu.driver().fork_child();
    }

    fn fork_parent(&self) {
        self.gpu.driver().fork_parent();
    }

    fn shutdown_driver(&self) {
        self.gpu.driver().shutdown_driver();
    }

    fn fail_next(&self, call: &str, after: u64, error: &str) -> PyResult<()> {
        let known = || Call::ALL.iter().map(|call| call.name()).collect::<Vec<_>>().join(", ");
        let call = Call::from_name(call).ok_or_else(|| {
            PyValueError::new_err(format!("the allocator makes no call {call:?}; it makes {}", known()))
        })?;
        let status = Status::from_name(error).ok_or_else(|| {
            PyValueError::new_err(format!("{error:?} is no error that the driver is known to return"))
        })?;
        self.gpu.driver().fail_next(call, after, status);
        Ok(())
    }

    #[getter]
    fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.gpu.driver().calls().into_iter().collect()
    }

    #[getter]
    fn elapsed_us(&self) -> f64 {
        self.gpu.driver().elapsed_us()
    }

    #[getter]
    fn host_waits(&self) -> u64 {
        self.gpu.driver().host_waits()
    }

    #[getter]
    fn host_wait_us(&self) -> f64 {
        self.gpu.driver().host_wait_us()
    }

    fn physical_bytes(&self, device: u32) -> PyResult<(u64, u64)> {
        let level = self.gpu.driver().physical_bytes(self.device(device)?);
        Ok((level.current, level.peak))
    }

    fn stats(&self, device: u32) -> PyResult<BTreeMap<String, i64>> {
        Ok(self.gpu.allocator().stats_entries(self.device(device)?).into_iter().collect())
    }

    fn reset_peak_stats(&self) {
        for device in (0..self.devices).map(DeviceId) {
            self.gpu.allocator().reset_peak_stats(device);
        }
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let allocator = self.gpu.allocator();
        let mut pictures = allocator.pictures(false);
        for picture in &mut pictures {
            for segment in &mut picture.segments {
                segment.stream = number_of(segment.stream);
            }
            for event in &mut picture.events {
                event.stream = number_of(event.stream);
            }
        }
        snapshot::to_python(py, &pictures, self.devices, allocator.config(), &snapshot::Part::ALL)
    }

    fn empty_cache(&self, py: Python<'_>) -> PyResult<()> {
        self.play(py, SimulatedGpu::empty_cache)
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.play(py, SimulatedGpu::check)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.play(py, SimulatedGpu::close)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_but_0_names_a_default_stream_and_texts_show_the_programs_numbers() {
        for number in [0, 1, 2, 3, 0x10] {
            let handle = handle_of(number);
            assert_eq!(handle.is_default(), number == 0);
            assert_eq!(number_of(handle), StreamHandle(number));
        }
        let text = format!("kernel on stream {:?} and {:?}", handle_of(1), handle_of(2));
        assert_eq!(in_numbers(&text), "kernel on stream 0x1 and 0x2");
    }
}
