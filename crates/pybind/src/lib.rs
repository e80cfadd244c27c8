//! The Python extension `rallocator._core`.

mod config;

use pyo3::prelude::*;

/// The compiled core of rallocator.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    config::add_to(module)
}
