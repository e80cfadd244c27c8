//! The Python extension `rallocator._core`.

use pyo3::prelude::*;

/// The compiled core of rallocator.
#[pymodule]
fn _core(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
