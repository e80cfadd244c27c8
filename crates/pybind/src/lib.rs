//! The Python extension `rallocator._core`, and in the same file the C functions that torch loads.
//!
//! ```text
//! torch ──► ffi ──► hooks ──► process ──► backend ──► alloc_core
//!                    ▲
//! Python ──► extension
//! ```
//!
//! - `ffi` is the C boundary and holds all `unsafe` code; `hooks` is what its functions do, in safe code.
//! - `process` owns the one allocator and knows whether the process may still use it; `backend` is that allocator.
//! - `extension` is what Python sees; `recording` and `stacks` are what it sees of the past.

#![deny(unsafe_code)]

mod backend;
mod chrome_trace;
mod config;
mod devices;
mod extension;
mod failure;
#[expect(unsafe_code, reason = "the C boundary: raw pointers come in, and exported names are unsafe attributes")]
mod ffi;
mod hooks;
mod observers;
mod pickle;
mod pools;
mod probe;
mod process;
mod recording;
mod replay;
mod sharing;
mod simulated_gpu;
mod snapshot;
mod stacks;

use pyo3::prelude::*;

/// The compiled core of rallocator. Everything in it is private to the package.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    config::add_to(module)?;
    devices::add_to(module)?;
    extension::add_to(module)?;
    observers::add_to(module)?;
    recording::add_to(module)?;
    replay::add_to(module)?;
    simulated_gpu::add_to(module)
}
