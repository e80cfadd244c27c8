//! Which hooks torch reaches, and with which arguments: how `enable` verifies that they are wired.
//!
//! While a thread is probing, its hooks note the call and do nothing. So the check needs no GPU, touches no driver and
//! leaves no trace in the allocator, and it also proves that arguments arrive where this library looks for them.

use std::cell::RefCell;
use std::fmt;

thread_local! {
    /// The calls seen so far; `None` when this thread is not probing.
    static SEEN: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Runs `calls` with this thread's hooks only noting what reaches them, and returns what did, in order.
pub(crate) fn probe<T>(calls: impl FnOnce() -> T) -> (T, Vec<String>) {
    SEEN.set(Some(Vec::new()));
    let result = calls();
    (result, SEEN.take().unwrap_or_default())
}

/// Notes a call and returns true if this thread is probing. The hook then has to do nothing more.
pub(crate) fn notes(call: fmt::Arguments<'_>) -> bool {
    let note = |seen: &RefCell<Option<Vec<String>>>| match seen.borrow_mut().as_mut() {
        Some(calls) => {
            calls.push(call.to_string());
            true
        }
        None => false,
    };
    // Hooks are called until the very end of a thread, when its variables are gone already.
    SEEN.try_with(note).unwrap_or(false)
}
