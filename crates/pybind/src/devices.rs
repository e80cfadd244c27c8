//! What the GPUs of this machine are, for `rallocator doctor`.

use alloc_core::driver::Driver;
use alloc_core::driver::cuda::CudaDriver;
use alloc_core::id::DeviceId;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Each GPU's bytes of memory, and why its memory cannot be mapped (empty where it can).
///
/// Initialises the driver, so that a child forked from now on cannot use a GPU.
#[pyfunction]
fn devices() -> PyResult<Vec<(u64, String)>> {
    let driver = CudaDriver::new();
    let found = driver.device_count().and_then(|count| {
        let capabilities = (0..count).map(|index| driver.capabilities(DeviceId(index)));
        capabilities.map(|known| known.map(|known| (known.total_bytes, known.virtual_memory_missing))).collect()
    });
    found.map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

/// Adds this module's names to the extension.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(devices, module)?)
}
