//! Replays for Python: the look through a pickle before it is loaded, and the way from columns of steps to figures.

use alloc_core::config::Policy;
use alloc_core::id::{PoolId, StreamHandle};
use alloc_core::replay::{Action, Options, Outcome, Step};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::pickle::Scanner;

/// The handle of the first stream that is not a default one. Lower numbers name no stream object in CUDA.
const FIRST_STREAM: u64 = 0x10;

/// Looks through a pickle, chunk by chunk, for anything that a memory snapshot does not hold.
#[pyclass(module = "rallocator._core")]
#[derive(Default)]
pub(crate) struct PickleScanner {
    scanner: Scanner,
}

#[pymethods]
impl PickleScanner {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Looks at the next bytes; returns the pickle's length once its end was seen, and raises `ValueError` at what
    /// makes it unfit.
    fn feed(&mut self, chunk: &[u8]) -> PyResult<Option<u64>> {
        self.scanner.feed(chunk).map_err(|refusal| PyValueError::new_err(refusal.to_string()))
    }
}

/// Replays steps, given as columns of equal length, and returns the figures by their names in the JSON.
///
/// What the columns mean is written at `rallocator._replay.steps.Steps`. Other Python threads run meanwhile.
#[pyfunction]
#[pyo3(signature = (*, kinds, allocations, sizes, streams, pools, times_us, uses_end_us, policy, config, budget_bytes, lag_us))]
#[expect(clippy::too_many_arguments, reason = "they are columns and options, each by its name")]
#[expect(clippy::needless_pass_by_value, reason = "the columns come from Python's lists and have no other owner")]
fn replay<'py>(
    py: Python<'py>,
    kinds: Vec<u8>,
    allocations: Vec<usize>,
    sizes: Vec<u64>,
    streams: Vec<u64>,
    pools: Vec<u64>,
    times_us: Vec<u64>,
    uses_end_us: Vec<u64>,
    policy: &str,
    config: &str,
    budget_bytes: Option<u64>,
    lag_us: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let mut config = crate::config::parse(config)?.config;
    config.policy =
        Policy::from_name(policy).ok_or_else(|| PyValueError::new_err(format!("there is no policy {policy}")))?;
    let count = kinds.len();
    if [allocations.len(), sizes.len(), streams.len(), pools.len(), times_us.len(), uses_end_us.len()] != [count; 6] {
        return Err(PyValueError::new_err("the columns differ in length"));
    }
    let steps = (0..count)
        .map(|index| {
            let (allocation, size) = (allocations[index], sizes[index]);
            let (stream, pool) = (stream(streams[index]), pool(pools[index]));
            let action = match kinds[index] {
                0 => Action::Allocate { allocation, size, stream, pool },
                1 => Action::Free { allocation, used_elsewhere_until_us: None },
                2 => Action::Free { allocation, used_elsewhere_until_us: Some(uses_end_us[index]) },
                3 => Action::Try { size, stream, pool },
                kind => return Err(PyValueError::new_err(format!("there is no kind of step {kind}"))),
            };
            Ok(Step { time_us: times_us[index], action })
        })
        .collect::<PyResult<Vec<_>>>()?;
    let options = Options { config, budget_bytes, lag_us };
    let outcome = py.detach(|| alloc_core::replay::replay(&steps, &options));
    figures(py, &outcome.map_err(|error| PyRuntimeError::new_err(error.to_string()))?)
}

/// The handle of a stream by its number: 0 is the default stream.
fn stream(number: u64) -> StreamHandle {
    if number == 0 { StreamHandle::DEFAULT } else { StreamHandle(FIRST_STREAM + number) }
}

/// A private pool by its number: 0 is the default pool.
fn pool(number: u64) -> Option<PoolId> {
    (number > 0).then_some(PoolId(0, number))
}

fn figures<'py>(py: Python<'py>, outcome: &Outcome) -> PyResult<Bound<'py, PyDict>> {
    let figures = PyDict::new(py);
    let utilization = (outcome.peak_reserved > 0).then(|| outcome.peak_allocated as f64 / outcome.peak_reserved as f64);
    let calls = PyDict::new(py);
    for &(name, count) in &outcome.driver_calls {
        calls.set_item(name, count)?;
    }
    figures.set_item("utilization", utilization)?;
    figures.set_item("driver_calls", calls)?;
    for (name, value) in [
        ("peak_requested", outcome.peak_requested),
        ("peak_allocated", outcome.peak_allocated),
        ("peak_active", outcome.peak_active),
        ("peak_reserved", outcome.peak_reserved),
        ("peak_device", outcome.peak_device),
        ("ooms", outcome.ooms),
        ("retries", outcome.retries),
        ("host_waits", outcome.host_waits),
        ("host_wait_us", outcome.host_wait_us),
        ("gpu_waits", outcome.gpu_waits),
        ("driver_time_us", outcome.driver_time_us),
        ("handles_moved", outcome.handles_moved),
        ("peak_address_bytes", outcome.peak_address_bytes),
    ] {
        figures.set_item(name, value)?;
    }
    Ok(figures)
}

/// Adds this module's names to the extension.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PickleScanner>()?;
    module.add_function(wrap_pyfunction!(replay, module)?)
}
