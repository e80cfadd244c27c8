//! The one allocator of this process, and what the process may still do with it.
//!
//! The allocator is made once and never destroyed: torch frees tensors from static destructors, in no useful order, so
//! whatever they reach must still be there. What changes is the [`Phase`]. Every hook reads it before anything else,
//! above all before any lock: in a forked child a lock may be held for ever by a thread that was not copied.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::backend::Backend;
use crate::failure::Failure;
use crate::ffi;

/// How far this process has come with the allocator. Phases only ever go forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Phase {
    /// No allocator was installed.
    Absent = 0,
    /// Installed, but no memory was asked for and the driver was not touched: a fork still gives a child that may
    /// use the GPU.
    Idle = 1,
    /// The driver is in use.
    InUse = 2,
    /// This is the child of a process that was in use. The driver refuses to work here, and nothing that was
    /// inherited is ours to free.
    Forked = 3,
    /// The process is ending. Memory goes back to the system with the process, so nothing more is done.
    Exiting = 4,
}

/// The installed allocator, with the settings that it was made from.
pub(crate) struct Installed {
    /// The allocator over its driver.
    pub(crate) backend: Backend,
    /// What the allocator was made from: a second installation must ask for the same.
    pub(crate) settings: Settings,
}

/// What decides which allocator is installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The configuration, in the grammar of `RALLOCATOR_CONF`.
    pub(crate) config: String,
    /// Run on a simulated GPU instead of a real one. For tests only.
    pub(crate) simulated: Option<Simulated>,
}

/// The simulated GPU that an allocator runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Simulated {
    /// Bytes of memory of each device.
    pub(crate) capacity_bytes: u64,
    /// How many devices there are.
    pub(crate) devices: u32,
}

static PHASE: AtomicU8 = AtomicU8::new(Phase::Absent as u8);
static INSTALLED: OnceLock<Installed> = OnceLock::new();

/// The phase that the process is in.
pub(crate) fn phase() -> Phase {
    match PHASE.load(Ordering::Acquire) {
        0 => Phase::Absent,
        1 => Phase::Idle,
        2 => Phase::InUse,
        3 => Phase::Forked,
        _ => Phase::Exiting,
    }
}

/// The installed allocator, whatever the phase. It may not be locked in [`Phase::Forked`].
pub(crate) fn installed() -> Option<&'static Installed> {
    INSTALLED.get()
}

/// Makes the allocator. Touches neither the driver nor a GPU.
///
/// Returns false if an allocator with these very settings is there already.
///
/// # Errors
///
/// The settings of the allocator that is there, if they are others.
pub(crate) fn install(settings: &Settings, backend: Backend) -> Result<bool, Settings> {
    let mut made = false;
    let installed = INSTALLED.get_or_init(|| {
        made = true;
        Installed { backend, settings: settings.clone() }
    });
    if installed.settings != *settings {
        return Err(installed.settings.clone());
    }
    if made {
        ffi::call_at_fork();
        advance(Phase::Absent, Phase::Idle);
    }
    Ok(made)
}

/// The allocator, for a call that obtains memory or must report its failure.
///
/// # Errors
///
/// [`Failure`] if there is no allocator or none that may be used any more.
#[inline]
pub(crate) fn for_request() -> Result<&'static Backend, Failure> {
    for_notice().ok_or_else(refusal)
}

/// Why there is no allocator that may be used.
#[cold]
fn refusal() -> Failure {
    match phase() {
        Phase::Absent | Phase::Idle | Phase::InUse => Failure::NotEnabled,
        Phase::Forked => Failure::Forked,
        Phase::Exiting => Failure::Exiting,
    }
}

/// The allocator, for a call that has nothing to report and is skipped where it would be of no use.
#[inline]
pub(crate) fn for_notice() -> Option<&'static Backend> {
    match phase() {
        Phase::Idle | Phase::InUse => INSTALLED.get().map(|installed| &installed.backend),
        Phase::Absent | Phase::Forked | Phase::Exiting => None,
    }
}

/// Notes that the driver is in use from now on: a forked child can no longer use it, and the end of the process has to
/// be heard of.
#[inline]
pub(crate) fn mark_in_use() {
    if phase() == Phase::Idle {
        begin_use();
    }
}

#[cold]
fn begin_use() {
    if advance(Phase::Idle, Phase::InUse) {
        // Registered only now, because such handlers run in reverse order: CUDA has registered its own before, when
        // torch initialised it, so ours runs while the driver is still whole.
        ffi::call_at_exit();
    }
}

/// Called in a forked child, before anything else runs there.
pub(crate) fn on_forked_child() {
    // A parent that never used the GPU leaves a child that may.
    advance(Phase::InUse, Phase::Forked);
}

/// Called when the process begins to end.
pub(crate) fn on_exit() {
    advance(Phase::InUse, Phase::Exiting);
}

/// Goes from one phase to another; false if the process was in neither the one nor, by this call, in the other.
fn advance(from: Phase, to: Phase) -> bool {
    PHASE.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
}
