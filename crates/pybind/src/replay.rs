//! What the reader of recorded histories needs from Rust: a look through a pickle before Python loads it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::pickle::Scanner;

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

/// Adds this module's names to the extension.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PickleScanner>()
}
