//! Recording of what happens to memory: when, by which Python code, and under which label of the program's.
//!
//! Call stacks are taken in the hooks, before the allocator is called: there no lock is held, so the GIL may be waited
//! for. What was taken waits in a variable of the thread until the allocator, under its lock, asks for it.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use alloc_core::error::AllocError;
use alloc_core::history::{Action, LabelId, Moment, Recording, StackId};
use alloc_core::id::DevicePtr;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::{process, stacks};

/// Adds the functions to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_record_history, module)?)?;
    module.add_function(wrap_pyfunction!(_is_recording, module)?)?;
    module.add_function(wrap_pyfunction!(_stop_taking_stacks, module)?)?;
    module.add_function(wrap_pyfunction!(_allocation_stack, module)?)?;
    module.add_function(wrap_pyfunction!(_annotate, module)?)?;
    module.add_function(wrap_pyfunction!(_set_label, module)?)?;
    module.add_function(wrap_pyfunction!(_label, module)?)
}

/// A call of the program's that takes a stack if [`TAKES`] is at least this.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(crate) enum Call {
    Malloc = 1,
    Free = 2,
}

/// Which calls take a stack: 0 none, or up to which [`Call`].
static TAKES: AtomicU8 = AtomicU8::new(0);
/// Whether anything is recorded.
static IS_RECORDING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// By whom the allocator is being called on this thread.
    static STACK: Cell<StackId> = const { Cell::new(StackId::NONE) };
    /// What the program says of the events that this thread causes.
    static LABEL: Cell<LabelId> = const { Cell::new(LabelId(0)) };
}

/// Keeps call stacks of its own, in place of Python's that this extension takes. Must answer under no lock of its caller's.
pub(crate) trait StackSource: Send + Sync {
    /// The number that it keeps the present stack under, below [`FOREIGN`]; [`StackId::NONE`] for none.
    fn take(&self) -> StackId;
    /// The allocator has noted the number, or will not.
    fn noted(&self, stack: StackId);
}

/// Set in the numbers of a [`StackSource`]'s stacks, so that they are never taken for those of [`stacks`].
const FOREIGN: u32 = 1 << 31;

/// Where stacks come from; `None` for Python's.
static SOURCE: RwLock<Option<Arc<dyn StackSource>>> = RwLock::new(None);

/// The number that a [`StackSource`] knows a stack by; `None` for Python's and for none.
pub(crate) fn foreign(stack: StackId) -> Option<u32> {
    (stack.0 & FOREIGN != 0).then_some(stack.0 & !FOREIGN)
}

/// While it lives, events of this thread carry the stack that was taken for it.
pub(crate) struct Caller {
    /// Where the stack came from, and its number there.
    foreign: Option<(Arc<dyn StackSource>, StackId)>,
}

impl Drop for Caller {
    fn drop(&mut self) {
        set_stack(StackId::NONE);
        if let Some((source, stack)) = self.foreign.take() {
            source.noted(stack);
        }
    }
}

/// Takes the stack of the present call, if such calls do; [`end`] says that the call is over. Must be called under no
/// lock: it may wait for the GIL.
#[inline]
pub(crate) fn caller(call: Call) -> Option<Caller> {
    if TAKES.load(Ordering::Relaxed) < call as u8 {
        return None;
    }
    Some(take_stack())
}

/// The call that [`caller`] was asked about is over.
#[inline]
pub(crate) fn end(caller: Option<Caller>) {
    // Dropping an option would call a function whatever it holds.
    if let Some(caller) = caller {
        end_taken(caller);
    }
}

/// Runs the program's own code in the middle of a call. What that asks of the allocator is recorded for itself, and then
/// the call goes on with its own stack.
pub(crate) fn interrupted<T>(code: impl FnOnce() -> T) -> T {
    let own = STACK.try_with(|current| current.replace(StackId::NONE)).unwrap_or(StackId::NONE);
    let answer = code();
    set_stack(own);
    answer
}

#[cold]
fn end_taken(caller: Caller) {
    drop(caller);
}

#[cold]
fn take_stack() -> Caller {
    let source = SOURCE.read().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(source) = source {
        let stack = source.take();
        if stack != StackId::NONE {
            set_stack(StackId(stack.0 | FOREIGN));
        }
        return Caller { foreign: (stack != StackId::NONE).then_some((source, stack)) };
    }
    // Without an interpreter, or when it is ending, there is no stack to be had.
    if let Some(stack) = Python::try_attach(stacks::capture) {
        set_stack(stack);
    }
    Caller { foreign: None }
}

fn set_stack(stack: StackId) {
    // Hooks are called until the very end of a thread, when its variables are gone already.
    let _ = STACK.try_with(|current| current.set(stack));
}

/// The present moment of this thread. Called by the allocator, under its lock.
fn moment() -> Moment {
    Moment {
        time_us: now_us(),
        stack: STACK.try_with(Cell::get).unwrap_or_default(),
        label: LABEL.try_with(Cell::get).unwrap_or_default(),
    }
}

/// Microseconds since 1970, by a clock that is never put back.
fn now_us() -> u64 {
    static START: OnceLock<(Instant, u64)> = OnceLock::new();
    let (start, start_us) = START.get_or_init(|| {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), since_1970.as_micros() as u64)
    });
    start_us + start.elapsed().as_micros() as u64
}

/// A recording with times, stacks and labels.
pub(crate) fn recording(limit: usize) -> Recording {
    IS_RECORDING.store(true, Ordering::Relaxed);
    Recording { witness: Arc::new(moment), ..Recording::new(limit) }
}

/// Starts, changes or stops the recording.
#[pyfunction]
#[pyo3(signature = (*, limit, stacks, skipped, forget))]
fn _record_history(
    py: Python<'_>,
    limit: Option<usize>,
    stacks: &str,
    skipped: Vec<String>,
    forget: bool,
) -> PyResult<()> {
    let (takes, events_have_stacks) = match stacks {
        "none" => (0, false),
        "state" => (Call::Malloc as u8, false),
        "alloc" => (Call::Malloc as u8, true),
        "all" => (Call::Free as u8, true),
        other => return Err(PyValueError::new_err(format!("{other:?} is none of 'none', 'state', 'alloc', 'all'"))),
    };
    let skipped = skipped.into_iter().map(|name| {
        let known = || Action::ALL.map(Action::name).join(", ");
        let unknown = || PyValueError::new_err(format!("there is no action {name:?} to skip; there are {}", known()));
        Action::from_name(&name).ok_or_else(unknown)
    });
    let skipped = skipped.collect::<PyResult<Vec<_>>>()?;
    let recording = limit.map(|limit| Recording { skipped, events_have_stacks, ..recording(limit) });
    // Without the GIL: another thread may hold the allocator's lock and wait for the GIL.
    let result = py.detach(|| record(recording.as_ref(), takes, None, forget));
    if limit.is_none() {
        stacks::forget();
    }
    result.map_err(|error| crate::extension::RallocatorError::new_err(error.to_string()))
}

/// Starts, changes or stops the recording. `takes` is the last [`Call`] that takes a stack, 0 for none.
pub(crate) fn record(
    recording: Option<&Recording>,
    takes: u8,
    source: Option<Arc<dyn StackSource>>,
    forget: bool,
) -> Result<(), AllocError> {
    let Some(backend) = process::for_notice() else { return Ok(()) };
    TAKES.store(if recording.is_some() { takes } else { 0 }, Ordering::Relaxed);
    *SOURCE.write().unwrap_or_else(PoisonError::into_inner) = source;
    IS_RECORDING.store(recording.is_some(), Ordering::Relaxed);
    backend.record_history(recording, forget)
}

/// Whether anything is recorded.
pub(crate) fn is_recording() -> bool {
    IS_RECORDING.load(Ordering::Relaxed)
}

/// Whether anything is recorded.
#[pyfunction]
fn _is_recording() -> bool {
    is_recording()
}

/// Takes no stacks any more: Python is ending, and its threads may not wait for it.
#[pyfunction]
fn _stop_taking_stacks() {
    TAKES.store(0, Ordering::Relaxed);
}

/// The stack by which the memory at an address was allocated, if it is held and that was recorded.
#[pyfunction]
fn _allocation_stack(py: Python<'_>, address: u64) -> PyResult<Option<Bound<'_, PyList>>> {
    let Some(backend) = process::for_notice() else { return Ok(None) };
    match py.detach(|| backend.stack_of(DevicePtr(address))) {
        StackId::NONE => Ok(None),
        stack => stacks::Written::new(py).list(stack).map(Some),
    }
}

/// Records that the program says something of memory that it holds.
#[pyfunction]
fn _annotate(py: Python<'_>, address: u64, text: &str) {
    py.detach(|| annotate(DevicePtr(address), text));
}

/// Records that the program says something of memory that it holds.
pub(crate) fn annotate(address: DevicePtr, text: &str) {
    let Some(backend) = process::for_notice().filter(|_| is_recording()) else { return };
    let before = LABEL.get();
    set_label(text);
    let caller = caller(Call::Malloc);
    backend.annotate(address);
    end(caller);
    LABEL.set(before);
}

/// Labels the events that the calling thread causes from now on; an empty text for none.
#[pyfunction]
fn _set_label(text: &str) {
    set_label(text);
}

/// The label of the calling thread's events.
#[pyfunction]
fn _label() -> String {
    label()
}

/// Labels the events that the calling thread causes from now on; an empty text for none.
pub(crate) fn set_label(text: &str) {
    LABEL.set(label_id(Words { label: text.to_owned(), ..words(LABEL.get()) }));
}

/// The label of the calling thread's events.
pub(crate) fn label() -> String {
    words(LABEL.get()).label
}

/// Notes what torch's compiler says of the code that the calling thread runs from now on; an empty text for nothing.
pub(crate) fn set_compile_context(text: &str) {
    LABEL.set(label_id(Words { compile_context: text.to_owned(), ..words(LABEL.get()) }));
}

/// What is said of a thread's events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Words {
    /// By the program.
    pub(crate) label: String,
    /// By torch's compiler.
    pub(crate) compile_context: String,
}

/// What was said, by numbers from 1 on.
#[derive(Default)]
struct Labels {
    words: Vec<Words>,
    numbers: HashMap<Words, u32>,
}

static LABELS: Mutex<Option<Labels>> = Mutex::new(None);

fn label_id(said: Words) -> LabelId {
    if said == Words::default() {
        return LabelId(0);
    }
    let mut guard = LABELS.lock().unwrap_or_else(PoisonError::into_inner);
    let Labels { words, numbers } = guard.get_or_insert_default();
    let next = words.len() as u32 + 1;
    LabelId(*numbers.entry(said).or_insert_with_key(|said| {
        words.push(said.clone());
        next
    }))
}

/// What a label stands for.
pub(crate) fn words(label: LabelId) -> Words {
    let guard = LABELS.lock().unwrap_or_else(PoisonError::into_inner);
    let index = label.0.checked_sub(1).map(|index| index as usize);
    index.and_then(|index| guard.as_ref()?.words.get(index).cloned()).unwrap_or_default()
}
