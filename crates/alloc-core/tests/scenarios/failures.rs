//! Every driver call fails once, at every place where a program comes by; nothing is lost.

use alloc_core::{
    driver::{Call, CaptureMode, Status, sim::SimOptions},
    error::AllocError,
    id::{DeviceId, PoolId},
};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

#[test]
fn failed_growth_leaves_the_state_as_it_was() {
    let calls = [Call::ReserveRange, Call::CreateHandle, Call::Map, Call::SetAccess];
    for (call, after) in calls.into_iter().flat_map(|call| (0..3).map(move |after| (call, after))) {
        let mut rig = Rig::new("policy:expandable");
        let held = rig.malloc(15 * MIB, MAIN);
        rig.gpu.fail_next(call, after, Status::OutOfMemory);
        let before = rig.stats();
        // The ladder tries again after it has given cached memory back, so one failure is survived.
        let survived = rig.try_malloc(60 * MIB, SIDE);
        assert!(survived.is_ok(), "{call:?} after {after}: {survived:?}");
        assert_eq!(rig.stats().allocated_bytes.all.current, before.allocated_bytes.all.current + 60 * MIB);
        rig.write(MAIN, held);
        rig.finish();
    }
}

#[test]
fn growth_that_fails_for_another_reason_is_reported_as_such() {
    for (config, call) in [("policy:native", Call::Allocate), ("policy:expandable", Call::CreateHandle)] {
        let mut rig = Rig::new(config);
        rig.gpu.fail_next(call, 0, Status::Unknown);
        let Err(AllocError::Driver(error)) = rig.try_malloc(4 * MIB, MAIN) else { panic!("the driver refused") };
        assert_eq!((error.call, error.status), (call, Status::Unknown));
        rig.malloc(4 * MIB, MAIN);
        rig.finish();
    }
}

#[test]
fn handle_that_could_not_be_released_is_counted_and_released_later() {
    let mut rig = Rig::new("policy:expandable");
    let block = rig.malloc(40 * MIB, MAIN);
    rig.free(block);
    // Emptying the cache asks for it a second time.
    rig.gpu.fail_next(Call::ReleaseHandle, 1, Status::Unknown);
    rig.gpu.fail_next(Call::ReleaseHandle, 2, Status::Unknown);
    assert!(rig.allocator.empty_cache().is_err());
    assert_eq!(rig.reserved(), 20 * MIB);
    assert_eq!(rig.gpu.physical_bytes(DEVICE).current, 20 * MIB);
    rig.finish();
}

#[test]
fn mapping_that_could_not_be_undone_is_counted_and_undone_later() {
    let mut rig = Rig::new("policy:expandable");
    let held = rig.malloc(15 * MIB, MAIN);
    rig.gpu.fail_next(Call::SetAccess, 0, Status::Unknown);
    rig.gpu.fail_next(Call::Unmap, 0, Status::Unknown);
    assert!(rig.try_malloc(60 * MIB, MAIN).is_err());
    assert_eq!(rig.reserved(), 80 * MIB, "the handles that were mapped are still there");
    assert_eq!(rig.gpu.physical_bytes(DEVICE).current, 80 * MIB);
    // Emptying the cache tries it a second time.
    rig.gpu.fail_next(Call::Unmap, 0, Status::Unknown);
    rig.gpu.fail_next(Call::Unmap, 1, Status::Unknown);
    assert!(rig.allocator.empty_cache().is_err());
    assert_eq!(rig.reserved(), 80 * MIB);
    let next = rig.malloc(60 * MIB, MAIN);
    rig.write(MAIN, next);
    rig.write(MAIN, held);
    rig.finish();
}

/// A program that comes by every kind of call: two devices, growth, pending frees, a capture, a full device.
fn program(rig: &mut Rig) {
    let main = rig.try_malloc(100 * MIB, MAIN);
    let small = rig.try_malloc(MIB / 2, MAIN);
    let _ = rig.malloc_on(MIB, DeviceId(1), MAIN);
    if let Ok(block) = main {
        let _ = rig.allocator.record_stream(block, SIDE);
        rig.write(SIDE, block);
        rig.free(block);
    }
    let _ = rig.try_malloc(200 * MIB, MAIN);
    let _ = rig.allocator.begin_pool(DEVICE, PoolId(1, 0), std::sync::Arc::new(|stream| stream == SIDE));
    if rig.gpu.begin_capture(SIDE, CaptureMode::Global).is_ok() {
        let captured = rig.try_malloc(4 * MIB, SIDE);
        if let Ok(block) = small {
            let _ = rig.allocator.record_stream(block, SIDE);
            rig.free(block);
        }
        if let Ok(block) = captured {
            rig.free(block);
        }
        rig.gpu.end_capture(SIDE).expect("the allocator spoils no capture");
    }
    rig.allocator.end_pool(DEVICE, PoolId(1, 0));
    rig.allocator.release_pool(DEVICE, PoolId(1, 0));
    let _ = rig.allocator.empty_cache();
    let _ = rig.try_malloc(250 * MIB, SIDE);
}

#[test]
fn program_survives_the_failure_of_its_nth_call_for_every_n() {
    for config in POLICIES {
        let options = SimOptions { devices: 2, capacity_bytes: 256 * MIB, ..SimOptions::default() };
        for nth in 1.. {
            let mut rig = Rig::on(config, options.clone());
            rig.gpu.open_stream(SIDE).expect("the stream can be made");
            rig.gpu.fail_nth(nth);
            program(&mut rig);
            let is_past_the_end = rig.gpu.pending_faults() > 0;
            if is_past_the_end {
                assert!(nth > 50, "the program makes more calls than {nth}");
                break;
            }
            rig.gpu.complete(None).expect("no kernel faults");
            rig.finish();
        }
    }
}
