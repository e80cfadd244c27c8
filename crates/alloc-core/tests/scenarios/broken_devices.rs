//! Devices whose state a panic has broken.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use alloc_core::{
    allocator::{Allocator, FreeOutcome, RecordOutcome},
    checkpoint::RestoreError,
    config::{Config, Move},
    driver::{
        Driver,
        sim::{SimDriver, SimOptions},
    },
    error::AllocError,
    history::{Moment, Recording},
    id::{DeviceId, DevicePtr, PoolId, StreamHandle},
    simulated_gpu::SimulatedGpu,
};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

const BROKEN: AllocError = AllocError::Broken { device: DEVICE };

/// Panics under the lock of the device that has `held`.
fn break_with(allocator: &Allocator<SimDriver>, held: DevicePtr) {
    let witness: Arc<dyn Fn() -> Moment + Send + Sync> = Arc::new(|| panic!("under the lock"));
    let recording = Recording { witness, ..Recording::new(100) };
    allocator.record_history(Some(&recording), false).expect("nothing is broken yet");
    assert!(catch_unwind(AssertUnwindSafe(|| allocator.free(held, DEVICE))).is_err(), "it passes on");
    let result = allocator.record_history(None, false);
    assert_eq!(result, Err(BROKEN), "the others record no more");
}

/// The device that works on, and a stream of it.
const SOUND: DeviceId = DeviceId(1);
const OWN: StreamHandle = StreamHandle(0x40);

/// Devices of which two are in use, with a block of the first, by which it can be broken, and one of the second.
fn devices(config: &str, devices: u32) -> (SimulatedGpu, DevicePtr, DevicePtr) {
    let options = SimOptions { devices, capacity_bytes: 256 * MIB, ..SimOptions::default() };
    let gpu = SimulatedGpu::new(options, Config::parse(config).expect("a valid config").config);
    let held = malloc(&gpu, MIB, DEVICE, MAIN);
    gpu.set_current_device(SOUND).expect("it exists");
    let block = malloc(&gpu, 4 * MIB, SOUND, OWN);
    (gpu, held, block)
}

fn malloc(gpu: &SimulatedGpu, size: u64, device: DeviceId, stream: StreamHandle) -> DevicePtr {
    gpu.malloc(size, device, stream).expect("there is memory").expect("not a request for nothing")
}

#[test]
fn stream_is_recorded_on_memory_beside_a_broken_device() {
    for config in POLICIES {
        let (gpu, held, block) = devices(config, 2);
        break_with(gpu.allocator(), held);
        assert_eq!(gpu.record_stream(block, SIDE).expect("the driver knows it"), RecordOutcome::Recorded);
        gpu.launch(SIDE, &[block], &[], 1000).expect("no race");
        gpu.free(block, SOUND).expect("the block is held");
        let next = malloc(&gpu, 4 * MIB, SOUND, OWN);
        gpu.launch(OWN, &[], &[next], 10).expect("what the stream reads is not handed out");
        let nowhere = gpu.allocator().record_stream(DevicePtr(512), SIDE);
        assert_eq!(nowhere, RecordOutcome::Broken, "it may be the broken device's");
    }
}

#[test]
fn stream_is_retired_beside_a_broken_device() {
    for config in POLICIES {
        let (gpu, held, block) = devices(config, 2);
        gpu.record_stream(block, SIDE).expect("the driver knows it");
        break_with(gpu.allocator(), held);
        assert_eq!(gpu.allocator().retire_stream(SIDE), Err(BROKEN));
        gpu.destroy_stream(SIDE).expect("it exists");
        gpu.free(block, SOUND).expect("the handle of a stream that is gone is not given to the driver");
        malloc(&gpu, 40 * MIB, SOUND, OWN);
    }
}

#[test]
fn device_comes_into_use_beside_a_broken_one() {
    for config in POLICIES {
        let (gpu, held, _) = devices(config, 3);
        break_with(gpu.allocator(), held);
        // Another library uses the third, and a miss notices.
        gpu.driver().allocate(DeviceId(2), MIB).expect("there is memory");
        malloc(&gpu, 80 * MIB, SOUND, OWN);
        assert_eq!(gpu.allocator().devices_in_use(), [DEVICE, SOUND, DeviceId(2)]);
    }
}

#[test]
fn memory_is_shared_with_other_processes_beside_a_broken_device() {
    for config in POLICIES {
        let (gpu, held, block) = devices(config, 2);
        break_with(gpu.allocator(), held);
        let share = |address| gpu.allocator().share(address, |_| ());
        assert!(share(block).is_ok_and(|shared| shared.is_some()));
        assert_eq!(share(DevicePtr(512)).err(), Some(BROKEN), "it may be the broken device's");
    }
}

#[test]
fn released_pool_is_emptied_beside_a_broken_device() {
    const POOL: PoolId = PoolId(1, 0);
    for config in POLICIES {
        let (gpu, held, _) = devices(config, 2);
        gpu.begin_pool(POOL, OWN).expect("the device is in use");
        let of_pool = malloc(&gpu, 40 * MIB, SOUND, OWN);
        gpu.end_pool(POOL).expect("it has begun");
        gpu.release_pool(POOL).expect("it has begun");
        // No graph runs on it any more, as this finds out. Beside a broken device nobody could.
        gpu.empty_cache().expect("nothing is broken yet");
        break_with(gpu.allocator(), held);
        gpu.free(of_pool, SOUND).expect("the block is held");
        assert_eq!(gpu.allocator().empty_pool(POOL), Err(BROKEN));
        assert_eq!(gpu.allocator().private_reserved(SOUND), []);
    }
}

#[test]
fn device_whose_state_a_panic_has_broken_is_called_broken_and_nothing_else() {
    const POOL: PoolId = PoolId(0, 7);
    let mut rig = Rig::new("policy:rallocator");
    let held = rig.malloc(MIB, MAIN);
    rig.allocator.create_pool(DEVICE, POOL).expect("the device is in use");
    let checkpoint = rig.allocator.checkpoint_pool(DEVICE, POOL).expect("the pool is there");
    break_with(&rig.allocator, held);
    assert_eq!(rig.allocator.malloc(MIB, DEVICE, MAIN, None), Err(BROKEN));
    assert_eq!(rig.allocator.free(held, DEVICE), FreeOutcome::Leaked);
    assert_eq!(rig.allocator.restrict_moves(DEVICE, POOL, Move::Off), Err(BROKEN));
    assert_eq!(rig.allocator.restore_pool(DEVICE, &checkpoint), Err(RestoreError::Broken(DEVICE)));
    assert_eq!(rig.allocator.create_pool(DEVICE, POOL), Err(BROKEN));
    assert_eq!(rig.allocator.empty_pool(POOL), Err(BROKEN));
}
