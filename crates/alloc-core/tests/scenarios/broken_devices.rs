//! Devices whose state a panic has broken.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use alloc_core::{
    allocator::{Allocator, FreeOutcome},
    checkpoint::RestoreError,
    config::Move,
    driver::sim::SimDriver,
    error::AllocError,
    history::{Moment, Recording},
    id::{DevicePtr, PoolId},
};

use crate::rig::{DEVICE, MAIN, MIB, Rig};

/// Panics under the lock of the device that has `held`.
fn break_with(allocator: &Allocator<SimDriver>, held: DevicePtr) {
    let witness: Arc<dyn Fn() -> Moment + Send + Sync> = Arc::new(|| panic!("under the lock"));
    let recording = Recording { witness, ..Recording::new(100) };
    allocator.record_history(Some(&recording), false).expect("nothing is broken yet");
    assert!(catch_unwind(AssertUnwindSafe(|| allocator.free(held, DEVICE))).is_err(), "it passes on");
}

#[test]
fn device_whose_state_a_panic_has_broken_is_called_broken_and_nothing_else() {
    const POOL: PoolId = PoolId(0, 7);
    let mut rig = Rig::new("policy:rallocator");
    let held = rig.malloc(MIB, MAIN);
    rig.allocator.create_pool(DEVICE, POOL).expect("the device is in use");
    let checkpoint = rig.allocator.checkpoint_pool(DEVICE, POOL).expect("the pool is there");
    break_with(&rig.allocator, held);
    let broken = AllocError::Broken { device: DEVICE };
    assert_eq!(rig.allocator.malloc(MIB, DEVICE, MAIN, None), Err(broken.clone()));
    assert_eq!(rig.allocator.free(held, DEVICE), FreeOutcome::Leaked);
    assert_eq!(rig.allocator.restrict_moves(DEVICE, POOL, Move::Off), Err(broken.clone()));
    assert_eq!(rig.allocator.restore_pool(DEVICE, &checkpoint), Err(RestoreError::Broken(DEVICE)));
    assert_eq!(rig.allocator.create_pool(DEVICE, POOL), Err(broken.clone()));
    assert_eq!(rig.allocator.empty_pool(POOL), Err(broken));
}
