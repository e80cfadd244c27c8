//! A picture of all memory as Python data, in the layout that torch's own tools read.
//!
//! The layout is that of `torch.cuda.memory._snapshot()`, whose fields are described in torch's documentation of that
//! function: <https://github.com/pytorch/pytorch/blob/v2.9.0/torch/cuda/memory.py>. Two things are left out, as some
//! releases of torch do: call stacks, which are empty lists, and the times of events, since the core has no clock.

use alloc_core::config::{Config, Policy};
use alloc_core::history::{Action, HistoryEvent};
use alloc_core::id::PoolId;
use alloc_core::size::SizeClass;
use alloc_core::snapshot::{BlockPicture, PictureState, SegmentPicture};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// The dictionary for segments, for the events of each device (by its index), and for the settings in force.
pub(crate) fn to_python<'py>(
    py: Python<'py>,
    segments: &[SegmentPicture],
    traces: &[Vec<HistoryEvent>],
    config: &Config,
) -> PyResult<Bound<'py, PyDict>> {
    let snapshot = PyDict::new(py);
    snapshot.set_item("segments", list(py, segments, segment)?)?;
    let device_traces = traces.iter().map(|events| list(py, events, event)).collect::<PyResult<Vec<_>>>()?;
    snapshot.set_item("device_traces", device_traces)?;
    snapshot.set_item("external_annotations", PyList::empty(py))?;
    snapshot.set_item("allocator_settings", settings(py, config)?)?;
    Ok(snapshot)
}

fn list<'py, T>(
    py: Python<'py>,
    items: &[T],
    convert: fn(Python<'py>, &T) -> PyResult<Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, items.iter().map(|item| convert(py, item)).collect::<PyResult<Vec<_>>>()?)
}

fn segment<'py>(py: Python<'py>, segment: &SegmentPicture) -> PyResult<Bound<'py, PyDict>> {
    let is_active = |block: &&BlockPicture| block.state != PictureState::Inactive;
    let active = || segment.blocks.iter().filter(is_active);
    let is_allocated = |block: &&BlockPicture| block.state == PictureState::Allocated;
    let dict = PyDict::new(py);
    dict.set_item("device", segment.device.0)?;
    dict.set_item("address", segment.address.0)?;
    dict.set_item("total_size", segment.size)?;
    dict.set_item("allocated_size", active().filter(is_allocated).map(|block| block.size).sum::<u64>())?;
    dict.set_item("active_size", active().map(|block| block.size).sum::<u64>())?;
    dict.set_item("requested_size", active().map(|block| block.requested).sum::<u64>())?;
    dict.set_item("stream", segment.stream.0)?;
    dict.set_item(
        "segment_type",
        match segment.class {
            SizeClass::Small => "small",
            SizeClass::Large => "large",
        },
    )?;
    dict.set_item("segment_pool_id", pool(segment.pool))?;
    dict.set_item("is_expandable", segment.is_expandable)?;
    dict.set_item("frames", PyList::empty(py))?;
    dict.set_item("blocks", list(py, &segment.blocks, block)?)?;
    Ok(dict)
}

fn block<'py>(py: Python<'py>, block: &BlockPicture) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("address", block.address.0)?;
    dict.set_item("size", block.size)?;
    dict.set_item("requested_size", block.requested)?;
    dict.set_item("state", block.state.name())?;
    dict.set_item("frames", PyList::empty(py))?;
    Ok(dict)
}

fn event<'py>(py: Python<'py>, event: &HistoryEvent) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("action", event.action.name())?;
    // An event of this kind has no address; the core keeps what the driver had free in its place, as torch names it.
    let address = if event.action == Action::Oom { "device_free" } else { "addr" };
    dict.set_item(address, event.address.0)?;
    dict.set_item("size", event.size)?;
    dict.set_item("stream", event.stream.0)?;
    dict.set_item("pool_id", pool(event.pool))?;
    dict.set_item("compile_context", "N/A")?;
    dict.set_item("user_metadata", "")?;
    dict.set_item("frames", PyList::empty(py))?;
    Ok(dict)
}

fn pool(pool: PoolId) -> (u64, u64) {
    (pool.0, pool.1)
}

/// torch's settings by torch's names, and under `rallocator` our own in words.
fn settings<'py>(py: Python<'py>, config: &Config) -> PyResult<Bound<'py, PyDict>> {
    let divisions = PyDict::new(py);
    for (lower_mib, division) in config.roundup_power2_divisions.intervals() {
        divisions.set_item(lower_mib.to_string(), division)?;
    }
    let own = PyDict::new(py);
    for (key, value) in config.describe() {
        own.set_item(key, value)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("PYTORCH_CUDA_ALLOC_CONF", config.to_string())?;
    dict.set_item("max_split_size", config.max_split_size.map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(-1)))?;
    dict.set_item("garbage_collection_threshold", config.garbage_collection_threshold)?;
    dict.set_item("expandable_segments", config.policy != Policy::Native)?;
    dict.set_item("pinned_num_register_threads", 1)?;
    dict.set_item("release_lock_on_cudamalloc", false)?;
    dict.set_item("pinned_use_cuda_host_register", false)?;
    dict.set_item("roundup_power2_divisions", divisions)?;
    dict.set_item("graph_capture_record_stream_reuse", false)?;
    dict.set_item("rallocator", own)?;
    Ok(dict)
}
