//! What Python sees of the process's allocator: the functions of `rallocator._core`.
//!
//! They are documented for Python in `python/rallocator/_core.pyi`.

use std::collections::BTreeMap;

use alloc_core::config::Config;
use alloc_core::id::PoolId;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::backend::Backend;
use crate::process::{Settings, Simulated};
use crate::{config, ffi, hooks, pools, probe, process, snapshot};

pyo3::import_exception!(rallocator.errors, ConfigError);
pyo3::import_exception!(rallocator.errors, RallocatorError);

/// Adds the functions to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_install, module)?)?;
    module.add_function(wrap_pyfunction!(_is_installed, module)?)?;
    module.add_function(wrap_pyfunction!(_hook_addresses, module)?)?;
    module.add_function(wrap_pyfunction!(_malloc_address, module)?)?;
    module.add_function(wrap_pyfunction!(_api_address, module)?)?;
    module.add_function(wrap_pyfunction!(_answer_cache_info, module)?)?;
    module.add_function(wrap_pyfunction!(_tell_profiler, module)?)?;
    module.add_function(wrap_pyfunction!(_probe_hooks, module)?)?;
    module.add_function(wrap_pyfunction!(_quiet_counters, module)?)?;
    module.add_function(wrap_pyfunction!(_stats, module)?)?;
    module.add_function(wrap_pyfunction!(_private_reserved, module)?)?;
    module.add_function(wrap_pyfunction!(_reset_peak_stats, module)?)?;
    module.add_function(wrap_pyfunction!(_reset_accumulated_stats, module)?)?;
    module.add_function(wrap_pyfunction!(_memory_fraction, module)?)?;
    module.add_function(wrap_pyfunction!(_restrict_moves, module)?)?;
    module.add_function(wrap_pyfunction!(_snapshot, module)?)?;
    module.add_function(wrap_pyfunction!(_empty_cache, module)?)
}

/// Makes the process's allocator; false if the same one is there already. Touches no driver.
#[pyfunction]
#[pyo3(signature = (config, *, simulated_bytes=None, simulated_devices=1))]
fn _install(config: &str, simulated_bytes: Option<u64>, simulated_devices: u32) -> PyResult<bool> {
    let parsed = config::parse(config)?;
    let simulated = simulated_bytes.map(|capacity_bytes| Simulated { capacity_bytes, devices: simulated_devices });
    let settings = Settings { config: config.to_owned(), simulated };
    let backend = Backend::new(parsed.config, simulated);
    process::install(&settings, backend).map_err(|present| {
        ConfigError::new_err(format!(
            "this process has an allocator with the settings '{}', which cannot be changed to '{config}'",
            present.config
        ))
    })
}

/// Whether this process has an allocator.
#[pyfunction]
fn _is_installed() -> bool {
    process::installed().is_some()
}

/// The addresses of the hooks, by the name of the setter in torch that takes them.
#[pyfunction]
fn _hook_addresses() -> BTreeMap<&'static str, usize> {
    ffi::hook_addresses().into_iter().collect()
}

/// The address of the malloc hook in this very library.
#[pyfunction]
fn _malloc_address() -> usize {
    ffi::malloc_address()
}

/// The address of the table of functions that a bridge is given.
#[pyfunction]
fn _api_address() -> usize {
    ffi::api_address()
}

/// Has torch's present allocator answer for its largest free block; false if this torch is built otherwise.
#[pyfunction]
fn _answer_cache_info() -> bool {
    ffi::answer_cache_info()
}

/// Tells torch's profiler of allocations and frees from now on; false if this torch is built otherwise.
#[pyfunction]
fn _tell_profiler() -> bool {
    ffi::tell_profiler()
}

/// Runs `calls` with this thread's hooks only noting what reaches them; returns what did.
#[pyfunction]
fn _probe_hooks(calls: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let (result, seen) = probe::probe(|| calls.call0());
    result.map(|_| seen)
}

/// How often a hook quietly did nothing, by reason.
#[pyfunction]
fn _quiet_counters() -> BTreeMap<&'static str, u64> {
    hooks::counters().into_iter().collect()
}

/// All statistics of a device.
#[pyfunction]
fn _stats(py: Python<'_>, device: i32) -> BTreeMap<String, i64> {
    // Without the GIL: another thread may hold the allocator's lock and wait for the GIL.
    py.detach(|| hooks::stats(device).into_iter().collect())
}

/// What each private pool of a device has reserved, by the pool: its statistics, flat with dots.
#[pyfunction]
fn _private_reserved(py: Python<'_>, device: i32) -> BTreeMap<(u64, u64), BTreeMap<String, i64>> {
    let pools = py.detach(|| hooks::private_reserved(device));
    let entries = pools.into_iter().map(|(pool, reserved)| {
        let mut entries = Vec::new();
        reserved.entries("", &mut entries);
        let entries = entries.into_iter().map(|(key, value)| (key.trim_start_matches('.').to_owned(), value));
        ((pool.0, pool.1), entries.collect())
    });
    entries.collect()
}

/// Sets each peak of a device to the present value.
#[pyfunction]
fn _reset_peak_stats(py: Python<'_>, device: i32) {
    py.detach(|| hooks::reset_peak_stats(device));
}

/// Sets the totals of a device since the start to zero.
#[pyfunction]
fn _reset_accumulated_stats(py: Python<'_>, device: i32) {
    py.detach(|| hooks::reset_accumulated_stats(device));
}

/// The part of its memory that a device is limited to.
#[pyfunction]
fn _memory_fraction(py: Python<'_>, device: i32) -> f64 {
    py.detach(|| hooks::memory_fraction(device))
}

/// Has a private pool's memory change its address no more than `moving` lets it.
#[pyfunction]
fn _restrict_moves(py: Python<'_>, device: i32, pool: (u64, u64), moving: &str) -> PyResult<()> {
    let moving = config::moving(moving)?;
    let restricted = py.detach(|| pools::restrict_moves(device, PoolId(pool.0, pool.1), moving));
    restricted.map_err(|failure| RallocatorError::new_err(failure.to_string()))
}

/// A picture of all memory, or of one pool's, as torch lays it out.
#[pyfunction]
#[pyo3(signature = (*, pool=None, events=true))]
fn _snapshot(py: Python<'_>, pool: Option<(u64, u64)>, events: bool) -> PyResult<Bound<'_, PyDict>> {
    let pool = pool.map(|(first, second)| PoolId(first, second));
    let mut pictures = Vec::new();
    let mut config = Config::default();
    if let Some(backend) = process::for_notice() {
        pictures = py.detach(|| backend.pictures(true));
        config = backend.config().clone();
    }
    snapshot::to_python(py, &pictures, hooks::device_count(), &config, &snapshot::Part { pool, events })
}

/// Gives cached memory back to the driver.
#[pyfunction]
fn _empty_cache(py: Python<'_>) -> PyResult<()> {
    py.detach(hooks::empty_cache).map_err(|failure| RallocatorError::new_err(failure.to_string()))
}
