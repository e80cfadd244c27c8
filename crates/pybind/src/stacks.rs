//! Python's call stacks, each kept once under a number.
//!
//! A stack is taken as pairs of a code object and a position in it, which costs some tens of nanoseconds a frame; names
//! and lines are looked up only when a snapshot is made. Programs allocate from few places, so few stacks are kept.
//!
//! The table's lock is only ever taken by a thread that holds the GIL, and nothing under it calls Python: so whoever
//! waits for it waits for code that waits for nothing.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use alloc_core::history::StackId;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pyo3::{ffi, intern};

/// One call: a code object, and the position of the instruction that made the next call.
struct Frame {
    /// Held, so that its address stays its own.
    code: Py<PyAny>,
    position: i32,
}

#[derive(Default)]
struct Table {
    frames: Vec<Frame>,
    frame_numbers: HashMap<(usize, i32), u32>,
    stacks: Vec<Box<[u32]>>,
    stack_numbers: HashMap<Box<[u32]>, u32>,
    /// How many stacks were forgotten: their numbers are not used again.
    forgotten: u32,
}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);

fn table() -> MutexGuard<'static, Option<Table>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The calling thread's Python stack, innermost call first; [`StackId::NONE`] if it runs no Python.
pub(crate) fn capture(py: Python<'_>) -> StackId {
    // Memory is freed while exceptions are on their way, too: what is pending must be so again afterwards.
    let pending = PyErr::take(py);
    let stack = walk(py).map_or(StackId::NONE, |frames| table().get_or_insert_default().intern(frames));
    if let Some(pending) = pending {
        pending.restore(py);
    }
    stack
}

/// The frames of the stack, innermost first.
fn walk(py: Python<'_>) -> PyResult<Vec<Frame>> {
    let Some(mut next) = running_frame(py) else { return Ok(Vec::new()) };
    let mut frames = Vec::with_capacity(32);
    while !next.is_none() {
        let position = next.getattr(intern!(py, "f_lasti"))?.extract()?;
        let code = next.getattr(intern!(py, "f_code"))?.unbind();
        frames.push(Frame { code, position });
        next = next.getattr(intern!(py, "f_back"))?;
    }
    Ok(frames)
}

/// The frame that runs, if the thread runs Python.
///
/// Memory is freed while a function's names are forgotten, too. If it was C that called the function, `sys._getframe` of
/// Python 3.12 then makes a frame of what is none, and crashes.
#[expect(unsafe_code, reason = "no safe function of pyo3 asks for the frame")]
fn running_frame(py: Python<'_>) -> Option<Bound<'_, PyAny>> {
    // SAFETY: the GIL is held.
    let frame = unsafe { ffi::PyEval_GetFrame() };
    // SAFETY: it is null or borrowed from the thread's state.
    unsafe { Bound::from_borrowed_ptr_or_opt(py, frame.cast()) }
}

impl Table {
    fn intern(&mut self, frames: Vec<Frame>) -> StackId {
        let stack: Box<[u32]> = frames.into_iter().map(|frame| self.intern_frame(frame)).collect();
        let next = self.forgotten + self.stacks.len() as u32 + 1;
        let number = *self.stack_numbers.entry(stack).or_insert_with_key(|stack| {
            self.stacks.push(stack.clone());
            next
        });
        StackId(number)
    }

    fn intern_frame(&mut self, frame: Frame) -> u32 {
        let next = self.frames.len() as u32;
        let key = (frame.code.as_ptr() as usize, frame.position);
        *self.frame_numbers.entry(key).or_insert_with(|| {
            self.frames.push(frame);
            next
        })
    }

    /// The frames of a stack by their numbers; none if it is unknown or forgotten.
    fn stack(&self, stack: StackId) -> &[u32] {
        let index = stack.0.checked_sub(self.forgotten + 1);
        index.and_then(|index| self.stacks.get(index as usize)).map_or(&[], |frames| frames)
    }
}

/// Forgets all stacks, once no event carries one any more. They are dropped after the lock: that may run Python.
pub(crate) fn forget() {
    let mut guard = table();
    let forgotten = guard.as_ref().map_or(0, |table| table.forgotten + table.stacks.len() as u32);
    let old = guard.replace(Table { forgotten, ..Table::default() });
    drop(guard);
    drop(old);
}

/// Stacks as Python lists, each made once, so that a pickle of many events stays small.
pub(crate) struct Written<'py> {
    py: Python<'py>,
    stacks: HashMap<u32, Bound<'py, PyList>>,
    frames: HashMap<u32, Bound<'py, PyDict>>,
}

impl<'py> Written<'py> {
    pub(crate) fn new(py: Python<'py>) -> Self {
        Self { py, stacks: HashMap::new(), frames: HashMap::new() }
    }

    /// The stack as a list of frames; an empty one for none.
    pub(crate) fn list(&mut self, stack: StackId) -> PyResult<Bound<'py, PyList>> {
        if stack == StackId::NONE {
            return Ok(PyList::empty(self.py));
        }
        if let Some(list) = self.stacks.get(&stack.0) {
            return Ok(list.clone());
        }
        let numbers = table().as_ref().map_or_else(Vec::new, |table| table.stack(stack).to_vec());
        let frames = numbers.into_iter().map(|number| self.frame(number)).collect::<PyResult<Vec<_>>>()?;
        let list = PyList::new(self.py, frames)?;
        self.stacks.insert(stack.0, list.clone());
        Ok(list)
    }

    fn frame(&mut self, number: u32) -> PyResult<Bound<'py, PyDict>> {
        if let Some(frame) = self.frames.get(&number) {
            return Ok(frame.clone());
        }
        let found = {
            let guard = table();
            let frame = guard.as_ref().and_then(|table| table.frames.get(number as usize));
            frame.map(|frame| (frame.code.clone_ref(self.py), frame.position))
        };
        let dict = PyDict::new(self.py);
        if let Some((code, position)) = found {
            let code = code.bind(self.py);
            dict.set_item(intern!(self.py, "name"), code.getattr(intern!(self.py, "co_name"))?)?;
            dict.set_item(intern!(self.py, "filename"), code.getattr(intern!(self.py, "co_filename"))?)?;
            dict.set_item(intern!(self.py, "line"), line(code, position)?)?;
        }
        self.frames.insert(number, dict.clone());
        Ok(dict)
    }
}

/// The line that an instruction belongs to; 0 for one that belongs to none.
fn line(code: &Bound<'_, PyAny>, position: i32) -> PyResult<i64> {
    for piece in code.call_method0(intern!(code.py(), "co_lines"))?.try_iter()? {
        let (start, end, line): (i32, i32, Option<i64>) = piece?.extract()?;
        if (start..end).contains(&position) {
            return Ok(line.unwrap_or(0));
        }
    }
    Ok(0)
}
