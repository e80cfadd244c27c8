//! Replays for Python: the look through a pickle before it is loaded, and the way from columns of steps to figures.

use std::collections::HashMap;
use std::sync::Arc;

use alloc_core::config::{Config, Policy};
use alloc_core::id::{PoolId, StreamHandle};
use alloc_core::replay::{Action, Holder, Options, Outcome, PlacedPiece, PlacedSegment, ReplayError, Step, Timeline};
use alloc_core::size::{REQUEST_MAX, SizeClass, block_size, segment_size};
use alloc_core::snapshot::SegmentPicture;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

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

/// The steps of a recorded program, packed once and replayed many times.
#[pyclass(module = "rallocator._core", frozen)]
pub(crate) struct ReplaySteps {
    steps: Arc<Vec<Step>>,
    /// The memory that the recording began with, if that is known.
    layout: Option<Arc<Vec<PlacedSegment>>>,
}

/// How to replay, as Python says it: [`Options`] by their names, and the policy besides.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Asked {
    policy: String,
    config: String,
    budget_bytes: Option<u64>,
    lag_us: u64,
    handle_granularity_bytes: u64,
    empty_cache_before: Vec<usize>,
    late_from: Option<usize>,
    with_layout: bool,
}

impl Asked {
    fn options(self, layout: Option<&Arc<Vec<PlacedSegment>>>) -> PyResult<Options> {
        let mut config = crate::config::parse(&self.config)?.config;
        config.policy = Policy::from_name(&self.policy)
            .ok_or_else(|| PyValueError::new_err(format!("there is no policy {}", self.policy)))?;
        if !self.handle_granularity_bytes.is_power_of_two() {
            return Err(PyValueError::new_err("the sizes of handles are multiples of a power of two"));
        }
        Ok(Options {
            config,
            budget_bytes: self.budget_bytes,
            lag_us: self.lag_us,
            handle_granularity_bytes: self.handle_granularity_bytes,
            stop_at_failure: false,
            empty_cache_before: self.empty_cache_before,
            late_from: self.late_from,
            layout: layout.filter(|_| self.with_layout).cloned(),
        })
    }
}

#[pymethods]
impl ReplaySteps {
    /// Packs columns of equal length. What they mean is written at `rallocator._replay.steps.Steps`.
    #[new]
    #[pyo3(signature = (*, kinds, allocations, sizes, streams, pools, times_us, uses_end_us))]
    #[expect(clippy::needless_pass_by_value, reason = "the columns come from Python's lists and have no other owner")]
    fn new(
        kinds: Vec<u8>,
        allocations: Vec<usize>,
        sizes: Vec<u64>,
        streams: Vec<u64>,
        pools: Vec<u64>,
        times_us: Vec<u64>,
        uses_end_us: Vec<u64>,
    ) -> PyResult<Self> {
        let count = kinds.len();
        if [allocations.len(), sizes.len(), streams.len(), pools.len(), times_us.len(), uses_end_us.len()] != [count; 6]
        {
            return Err(PyValueError::new_err("the columns differ in length"));
        }
        let step = |index: usize| {
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
        };
        let steps = (0..count).map(step).collect::<PyResult<_>>()?;
        Ok(Self { steps: Arc::new(steps), layout: None })
    }

    /// The same steps, after the memory that the recording began with: of each segment its address, size, stream, pool,
    /// whether it is a range for small requests, and pieces, and of each piece its size, the allocation that had it, and
    /// whether there was memory.
    fn after(&self, layout: Vec<PlainPlaced>) -> Self {
        let piece = |(size, allocation, is_memory): PlainPiece| {
            let unheld = if is_memory { Holder::Cache } else { Holder::Hole };
            PlacedPiece { size, holder: allocation.map_or(unheld, Holder::Allocation) }
        };
        let segment = |(address, size, of_stream, of_pool, is_small_range, pieces): PlainPlaced| PlacedSegment {
            address,
            size,
            stream: stream(of_stream),
            pool: pool(of_pool),
            range: is_small_range.map(|is_small: bool| if is_small { SizeClass::Small } else { SizeClass::Large }),
            pieces: pieces.into_iter().map(piece).collect(),
        };
        let layout: Vec<_> = layout.into_iter().map(segment).collect();
        Self { steps: Arc::clone(&self.steps), layout: (!layout.is_empty()).then(|| Arc::new(layout)) }
    }

    /// The steps in which more memory was obtained from the driver than there was before.
    fn growth(&self, py: Python<'_>, asked: Asked) -> PyResult<Vec<usize>> {
        let options = asked.options(self.layout.as_ref())?;
        py.detach(|| alloc_core::replay::growth(&self.steps, &options)).map_err(|error| defect(&error))
    }

    /// Follows the recording; see `rallocator._core.pyi`.
    #[pyo3(signature = (asked, *, places, most_steps))]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the column comes from a list of Python's and has no other owner"
    )]
    fn follow(
        &self,
        py: Python<'_>,
        asked: Asked,
        places: Vec<Option<u64>>,
        most_steps: usize,
    ) -> PyResult<PlainFollowed> {
        let options = asked.options(self.layout.as_ref())?;
        let followed = py
            .detach(|| alloc_core::replay::follow(&self.steps, &places, &options, most_steps))
            .map_err(|error| defect(&error))?;
        let emptied = followed.emptied.iter().map(|one| (one.step, one.wanted)).collect();
        Ok((emptied, followed.peak_reserved, followed.contradictions))
    }

    fn __len__(&self) -> usize {
        self.steps.len()
    }

    /// The same program with something changed: one stream for all, no private pools (their requests go to the default
    /// stream too), every free done at once.
    #[pyo3(signature = (*, merge_streams = false, merge_pools = false, free_at_once = false))]
    fn changed(&self, merge_streams: bool, merge_pools: bool, free_at_once: bool) -> Self {
        let place = |stream: StreamHandle, pool: Option<PoolId>| {
            let is_merged = merge_streams || (merge_pools && pool.is_some());
            (if is_merged { StreamHandle::DEFAULT } else { stream }, pool.filter(|_| !merge_pools))
        };
        let change = |step: &Step| {
            let action = match step.action {
                Action::Allocate { allocation, size, stream, pool } => {
                    let (stream, pool) = place(stream, pool);
                    Action::Allocate { allocation, size, stream, pool }
                }
                Action::Free { allocation, .. } if free_at_once => {
                    Action::Free { allocation, used_elsewhere_until_us: None }
                }
                Action::Free { .. } => step.action,
                Action::Try { size, stream, pool } => {
                    let (stream, pool) = place(stream, pool);
                    Action::Try { size, stream, pool }
                }
            };
            Step { action, ..*step }
        };
        Self { steps: Arc::new(self.steps.iter().map(change).collect()), layout: None }
    }

    /// Replays and returns the figures by their names in the JSON. Other Python threads run meanwhile, here and below.
    fn replay<'py>(&self, py: Python<'py>, asked: Asked) -> PyResult<Bound<'py, PyDict>> {
        let options = asked.options(self.layout.as_ref())?;
        let outcome = py.detach(|| alloc_core::replay::replay(&self.steps, &options));
        figures(py, &outcome.map_err(|error| defect(&error))?)
    }

    /// The smallest budget under which nothing fails; None if there is none.
    fn minimum_budget(&self, py: Python<'_>, asked: Asked) -> PyResult<Option<u64>> {
        let options = asked.options(self.layout.as_ref())?;
        py.detach(|| alloc_core::replay::minimum_budget(&self.steps, &options)).map_err(|error| defect(&error))
    }

    /// Replays and returns what was where at every moment, as columns of little-endian numbers.
    fn timeline<'py>(&self, py: Python<'py>, asked: Asked) -> PyResult<Bound<'py, PyDict>> {
        let options = asked.options(self.layout.as_ref())?;
        let (_, timeline) = py
            .detach(|| alloc_core::replay::replay_with_timeline(&self.steps, &options))
            .map_err(|error| defect(&error))?;
        columns(py, &timeline)
    }

    /// The allocator's memory after the first `count` steps: segments as (address, size, blocks), and blocks as (address,
    /// size, state).
    fn state_after(&self, py: Python<'_>, count: usize, asked: Asked) -> PyResult<Vec<PlainSegment>> {
        let options = asked.options(self.layout.as_ref())?;
        let count = count.min(self.steps.len());
        let picture = py
            .detach(|| alloc_core::replay::picture_after(&self.steps, count, &options))
            .map_err(|error| defect(&error))?;
        let plain = |segment: SegmentPicture| {
            let blocks = segment.blocks.iter().map(|block| (block.address.0, block.size, block.state.name())).collect();
            (segment.address.0, segment.size, blocks)
        };
        Ok(picture.into_iter().map(plain).collect())
    }

    /// After each step, the bytes that the program holds, each request rounded up to 512 bytes.
    fn held<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let mut sizes: HashMap<usize, u64> = HashMap::new();
        let mut held: u64 = 0;
        let levels = self.steps.iter().map(|step| {
            match step.action {
                Action::Allocate { allocation, size, .. } => {
                    let size = size.next_multiple_of(512);
                    sizes.insert(allocation, size);
                    held = held.saturating_add(size);
                }
                Action::Free { allocation, .. } => {
                    held = held.saturating_sub(sizes.remove(&allocation).unwrap_or(0));
                }
                Action::Try { .. } => {}
            }
            held
        });
        bytes(py, levels.map(u64::to_le_bytes))
    }
}

/// The bytes of the segment that torch's default rules obtain for a request of `size` bytes.
#[pyfunction]
pub(crate) fn native_segment_size(size: u64) -> u64 {
    let config = Config::default();
    segment_size(block_size(size.min(REQUEST_MAX), &config), &config)
}

/// Address, size, stream, pool, whether it is a range for small requests (or no range), pieces.
type PlainPlaced = (u64, u64, u64, u64, Option<bool>, Vec<PlainPiece>);

/// Size, allocation, whether there was memory.
type PlainPiece = (u64, Option<usize>, bool);

/// When the cache was emptied, as step and bytes that were wanted; the most reserved; blocks that cannot be explained.
type PlainFollowed = (Vec<(usize, u64)>, u64, usize);

/// Address, size, blocks; and of each its address, size and state.
type PlainSegment = (u64, u64, Vec<(u64, u64, &'static str)>);

fn defect(error: &ReplayError) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

fn bytes<const WIDTH: usize>(py: Python<'_>, numbers: impl Iterator<Item = [u8; WIDTH]>) -> Bound<'_, PyBytes> {
    PyBytes::new(py, &numbers.flatten().collect::<Vec<u8>>())
}

fn columns<'py>(py: Python<'py>, timeline: &Timeline) -> PyResult<Bound<'py, PyDict>> {
    let Timeline { blocks, segments, levels } = timeline;
    let columns = PyDict::new(py);
    columns.set_item("block_address", bytes(py, blocks.iter().map(|block| block.address.to_le_bytes())))?;
    columns.set_item("block_size", bytes(py, blocks.iter().map(|block| block.size.to_le_bytes())))?;
    columns.set_item("block_begin", bytes(py, blocks.iter().map(|block| block.begin.to_le_bytes())))?;
    columns.set_item("block_freed", bytes(py, blocks.iter().map(|block| block.freed.to_le_bytes())))?;
    columns.set_item("block_end", bytes(py, blocks.iter().map(|block| block.end.to_le_bytes())))?;
    columns.set_item("segment_address", bytes(py, segments.iter().map(|segment| segment.address.to_le_bytes())))?;
    columns.set_item("segment_size", bytes(py, segments.iter().map(|segment| segment.size.to_le_bytes())))?;
    columns.set_item("segment_begin", bytes(py, segments.iter().map(|segment| segment.begin.to_le_bytes())))?;
    columns.set_item("segment_end", bytes(py, segments.iter().map(|segment| segment.end.to_le_bytes())))?;
    columns.set_item("level_step", bytes(py, levels.iter().map(|level| level.step.to_le_bytes())))?;
    columns.set_item("level_allocated", bytes(py, levels.iter().map(|level| level.allocated.to_le_bytes())))?;
    columns.set_item("level_active", bytes(py, levels.iter().map(|level| level.active.to_le_bytes())))?;
    columns.set_item("level_reserved", bytes(py, levels.iter().map(|level| level.reserved.to_le_bytes())))?;
    Ok(columns)
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
        ("peak_reserved_late", outcome.peak_reserved_late),
    ] {
        figures.set_item(name, value)?;
    }
    Ok(figures)
}

/// Adds this module's names to the extension.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(native_segment_size, module)?)?;
    module.add_class::<PickleScanner>()?;
    module.add_class::<ReplaySteps>()?;
    module.add_function(wrap_pyfunction!(crate::chrome_trace::read_chrome_trace, module)?)
}
