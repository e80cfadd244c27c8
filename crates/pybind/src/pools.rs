//! What is asked of private pools besides beginning and ending them, in safe code: see [`crate::hooks`] for the rules.

use std::cell::Cell;

use alloc_core::checkpoint::{Checkpoint, Restored};
use alloc_core::config::Move;
use alloc_core::id::PoolId;
use alloc_core::source::SharedSource;

use crate::failure::Failure;
use crate::hooks::{ask, device_id, guarded};
use crate::process;
use crate::recording::{self, Call};

/// Makes a private pool, or gives it one more user, without sending requests there.
pub(crate) fn create(device: i32, pool: PoolId) -> Result<(), Failure> {
    let backend = process::for_request()?;
    let device = device_id(device)?;
    process::mark_in_use();
    guarded(|| Ok(backend.create_pool(device, pool)?))
}

/// Makes a private pool whose segments come from `source`.
pub(crate) fn create_from(device: i32, pool: PoolId, source: SharedSource) -> Result<(), Failure> {
    let backend = process::for_request()?;
    let device = device_id(device)?;
    process::mark_in_use();
    guarded(|| Ok(backend.create_pool_from(device, pool, source)?))
}

thread_local! {
    /// Whether this thread is asking a source for memory, or giving it back.
    static IS_ASKING_SOURCE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside a source. What that allocates here may not come from a pool that has a source, or each
/// request would make another one.
pub(crate) fn is_asking_source() -> bool {
    IS_ASKING_SOURCE.get()
}

/// Calls a source.
pub(crate) fn while_asking_source<T>(call: impl FnOnce() -> T) -> T {
    let was_asking = IS_ASKING_SOURCE.replace(true);
    let answer = recording::interrupted(call);
    IS_ASKING_SOURCE.set(was_asking);
    answer
}

/// How many users the pool has; 0 for no such pool.
pub(crate) fn users(device: i32, pool: PoolId) -> u32 {
    ask(device, |backend, device| backend.pool_users(device, pool))
}

/// Whether the pool's idle memory serves requests that would fail otherwise; false for no such pool.
pub(crate) fn serve_when_out_of_memory(device: i32, pool: PoolId, serves: bool) -> bool {
    ask(device, |backend, device| backend.serve_when_out_of_memory(device, pool, serves))
}

/// Has the pool's blocks handed out whole; false for no such pool.
pub(crate) fn forbid_splits(device: i32, pool: PoolId) -> bool {
    ask(device, |backend, device| backend.forbid_splits(device, pool))
}

/// Has the pool's memory change its address no more than `moving` lets it.
pub(crate) fn restrict_moves(device: i32, pool: PoolId, moving: Move) -> Result<(), Failure> {
    let backend = process::for_request()?;
    let device = device_id(device)?;
    guarded(|| Ok(backend.restrict_moves(device, pool, moving)?))
}

/// Gives what a released pool holds back.
pub(crate) fn empty(pool: PoolId) -> Result<(), Failure> {
    if process::phase() != process::Phase::InUse {
        // As for the whole cache: there is nothing yet, or nothing may be done any more.
        return Ok(());
    }
    let backend = process::for_request()?;
    let caller = recording::caller(Call::Free);
    let result = guarded(|| Ok(backend.empty_pool(pool)?));
    recording::end(caller);
    result
}

/// What the pool holds now; `None` for no such pool.
pub(crate) fn checkpoint(device: i32, pool: PoolId) -> Option<Checkpoint> {
    ask(device, |backend, device| backend.checkpoint_pool(device, pool))
}

/// Has the pool hold what it held at the checkpoint.
pub(crate) fn restore(device: i32, checkpoint: &Checkpoint) -> Result<Restored, Failure> {
    let backend = process::for_request()?;
    let device = device_id(device)?;
    guarded(|| Ok(backend.restore_pool(device, checkpoint)?))
}
