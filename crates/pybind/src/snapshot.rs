//! A picture of all memory as Python data, in the layout that torch's own tools read.
//!
//! The layout is that of `torch.cuda.memory._snapshot()`, whose fields are described in torch's documentation of that
//! function: <https://github.com/pytorch/pytorch/blob/v2.9.0/torch/cuda/memory.py>. Events of a recording without a
//! clock have no time, as in releases before 2.2.

use alloc_core::config::{Config, Policy};
use alloc_core::history::{Action, HistoryEvent};
use alloc_core::id::PoolId;
use alloc_core::size::SizeClass;
use alloc_core::snapshot::{BlockPicture, DevicePicture, PictureState, SegmentPicture};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::config::recorded;
use crate::recording;
use crate::stacks::Written;

/// Which part of a picture is wanted.
pub(crate) struct Part {
    /// The segments of this pool only; `None` for all.
    pub(crate) pool: Option<PoolId>,
    /// Whether the events are wanted. They are those of all pools.
    pub(crate) events: bool,
}

impl Part {
    /// Everything.
    pub(crate) const ALL: Self = Self { pool: None, events: true };
}

/// The dictionary for pictures of devices and for the settings in force, with a list of events for each of at least
/// `device_count` devices.
pub(crate) fn to_python<'py>(
    py: Python<'py>,
    pictures: &[DevicePicture],
    device_count: u32,
    config: &Config,
    part: &Part,
) -> PyResult<Bound<'py, PyDict>> {
    let mut stacks = Written::new(py);
    let segments = PyList::empty(py);
    let is_wanted = |segment: &&SegmentPicture| part.pool.is_none_or(|pool| segment.pool == pool);
    for picture in pictures.iter().flat_map(|picture| &picture.segments).filter(is_wanted) {
        segments.append(segment(py, picture, &mut stacks)?)?;
    }
    let traces = PyList::empty(py);
    let device_count = pictures.iter().map(|picture| picture.device.0 + 1).max().unwrap_or(0).max(device_count);
    for device in 0..device_count {
        let trace = PyList::empty(py);
        let picture = pictures.iter().find(|picture| picture.device.0 == device).filter(|_| part.events);
        for happened in picture.iter().flat_map(|picture| &picture.events) {
            trace.append(event(py, happened, &mut stacks)?)?;
        }
        traces.append(trace)?;
    }
    let snapshot = PyDict::new(py);
    snapshot.set_item("segments", segments)?;
    snapshot.set_item("device_traces", traces)?;
    snapshot.set_item("external_annotations", PyList::empty(py))?;
    snapshot.set_item("allocator_settings", settings(py, config)?)?;
    Ok(snapshot)
}

fn segment<'py>(py: Python<'py>, segment: &SegmentPicture, stacks: &mut Written<'py>) -> PyResult<Bound<'py, PyDict>> {
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
    dict.set_item("frames", stacks.list(segment.stack)?)?;
    let blocks = segment.blocks.iter().map(|picture| block(py, picture, stacks)).collect::<PyResult<Vec<_>>>()?;
    dict.set_item("blocks", blocks)?;
    Ok(dict)
}

fn block<'py>(py: Python<'py>, block: &BlockPicture, stacks: &mut Written<'py>) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("address", block.address.0)?;
    dict.set_item("size", block.size)?;
    dict.set_item("requested_size", block.requested)?;
    dict.set_item("state", block.state.name())?;
    dict.set_item("frames", stacks.list(block.stack)?)?;
    Ok(dict)
}

fn event<'py>(py: Python<'py>, event: &HistoryEvent, stacks: &mut Written<'py>) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item(intern!(py, "action"), event.action.name())?;
    // An event of this kind has no address; the core keeps what the driver had free in its place, as torch names it.
    let address = if event.action == Action::Oom { "device_free" } else { "addr" };
    dict.set_item(address, event.address.0)?;
    dict.set_item(intern!(py, "size"), event.size)?;
    dict.set_item(intern!(py, "stream"), event.stream.0)?;
    if event.moment.time_us > 0 {
        dict.set_item(intern!(py, "time_us"), event.moment.time_us)?;
    }
    dict.set_item(intern!(py, "pool_id"), pool(event.pool))?;
    let said = recording::words(event.moment.label);
    let compile_context = if said.compile_context.is_empty() { "N/A" } else { &said.compile_context };
    dict.set_item(intern!(py, "compile_context"), compile_context)?;
    dict.set_item(intern!(py, "user_metadata"), said.label)?;
    dict.set_item(intern!(py, "frames"), stacks.list(event.moment.stack)?)?;
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
    dict.set_item("PYTORCH_CUDA_ALLOC_CONF", recorded(config))?;
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
