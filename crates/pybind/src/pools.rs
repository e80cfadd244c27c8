//! What is asked of private pools besides beginning and ending them, in safe code: see [`crate::hooks`] for the rules.

use alloc_core::checkpoint::{Checkpoint, Restored};
use alloc_core::id::PoolId;

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

/// Gives what a released pool holds back to the driver.
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
