//! Python functions that are told of each request that fails for want of memory, before its error is raised.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use alloc_core::error::OutOfMemory;
use pyo3::prelude::*;

static OBSERVERS: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());
/// How many there are, so that a failure without any need not wait for the GIL.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Adds the function to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_attach_out_of_memory_observer, module)?)
}

/// Has `observer` called at each failure from now on.
#[pyfunction]
fn _attach_out_of_memory_observer(observer: Py<PyAny>) {
    let mut observers = OBSERVERS.lock().unwrap_or_else(PoisonError::into_inner);
    observers.push(observer);
    COUNT.store(observers.len(), Ordering::Release);
}

/// Tells all observers. Must be called under no lock: they may do anything, allocate memory too.
pub(crate) fn notify(report: &OutOfMemory) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    let limit = report.limit.unwrap_or(report.total);
    let arguments = (report.device.0, report.requested, limit, report.device_free.unwrap_or(0));
    Python::try_attach(|py| {
        let pending = PyErr::take(py);
        let observers: Vec<_> = {
            let observers = OBSERVERS.lock().unwrap_or_else(PoisonError::into_inner);
            observers.iter().map(|observer| observer.clone_ref(py)).collect()
        };
        for observer in observers {
            // The request's own error is what its caller has to see, so this one is only printed.
            if let Err(error) = observer.call1(py, arguments) {
                error.write_unraisable(py, Some(observer.bind(py)));
            }
        }
        if let Some(pending) = pending {
            pending.restore(py);
        }
    });
}
