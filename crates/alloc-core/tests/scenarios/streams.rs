//! Memory that more than one stream uses.

use std::thread;

use alloc_core::{
    allocator::RecordOutcome,
    driver::{Call, CaptureMode, Status, sim::SimOptions},
    id::{DeviceId, StreamHandle},
};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

#[test]
fn block_used_on_second_stream_is_not_reused_before_its_event() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.malloc(4 * MIB, MAIN);
        rig.write(MAIN, block);
        rig.gpu.wait(SIDE, MAIN).expect("ordered");
        rig.write(SIDE, block);
        rig.record_stream(block, SIDE);
        rig.free(block);
        assert_eq!(rig.stats().active_bytes.all.current, 4 * MIB);
        let other = rig.malloc(4 * MIB, MAIN);
        assert_ne!(other, block);
        rig.write(MAIN, other);
        rig.gpu.complete(Some(SIDE)).expect("no fault");
        rig.free(other);
        let large = rig.malloc(40 * MIB, MAIN);
        assert_eq!(rig.stats().active_bytes.all.current, 40 * MIB, "the miss asked the event");
        rig.free(large);
        assert_eq!(rig.malloc(4 * MIB, MAIN), block);
        rig.finish();
    }
}

#[test]
fn slow_stream_does_not_hold_up_the_blocks_of_another() {
    let slow = StreamHandle(0x20);
    let mut rig = Rig::new("policy:native");
    let on_slow = rig.malloc(20 * MIB, MAIN);
    let on_fast = rig.malloc(20 * MIB, MAIN);
    for (block, stream, duration) in [(on_slow, slow, 1_000_000), (on_fast, SIDE, 10)] {
        rig.record_stream(block, stream);
        rig.gpu.launch(stream, &[], &[block], duration).expect("no race");
        rig.free(block);
    }
    rig.gpu.complete(Some(SIDE)).expect("no fault");
    assert_eq!(rig.malloc(20 * MIB, MAIN), on_fast);
    assert_eq!(rig.stats().active_bytes.all.current, 40 * MIB);
    rig.finish();
}

#[test]
fn recording_the_own_stream_changes_nothing() {
    let mut rig = Rig::new("policy:native");
    let block = rig.malloc(MIB, SIDE);
    rig.record_stream(block, SIDE);
    rig.free(block);
    assert_eq!(rig.stats().active_bytes.all.current, 0);
    rig.finish();
}

#[test]
fn full_device_waits_for_pending_blocks_and_searches_before_it_asks_the_driver() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.malloc(200 * MIB, MAIN);
        rig.record_stream(block, SIDE);
        rig.write(SIDE, block);
        rig.free(block);
        let before = rig.gpu.call_count(Call::Free) + rig.gpu.call_count(Call::Unmap);
        assert_eq!(rig.malloc(200 * MIB, MAIN), block);
        assert_eq!(rig.gpu.call_count(Call::Free) + rig.gpu.call_count(Call::Unmap), before);
        assert_eq!(rig.stats().num_sync_all_streams, 1);
        rig.finish();
    }
}

#[test]
fn stream_that_the_driver_calls_dead_is_answered_for_by_a_device_synchronise() {
    for noticed_by in [Call::CaptureStatus, Call::RecordEvent] {
        let mut rig = Rig::new("policy:native");
        let block = rig.malloc(200 * MIB, MAIN);
        rig.record_stream(block, SIDE);
        rig.write(SIDE, block);
        rig.gpu.fail_next(noticed_by, 0, Status::InvalidHandle);
        rig.free(block);
        assert_eq!(rig.gpu.pending_faults(), 0, "the free asked for an event at once");
        assert_eq!((rig.stats().dead_streams, rig.gpu.host_waits()), (1, 0), "and waited for nothing");
        for after in 0..2 {
            rig.gpu.fail_next(noticed_by, after, Status::InvalidHandle);
        }
        assert_eq!(rig.malloc(200 * MIB, MAIN), block);
        rig.write(MAIN, block);
        assert_eq!(rig.gpu.call_count(Call::SynchronizeDevice), 1);
        rig.finish();
    }
}

#[test]
fn stream_that_the_driver_calls_dead_spoils_no_capture() {
    let capturing = StreamHandle(0x20);
    let mut rig = Rig::new("policy:native");
    let block = rig.malloc(4 * MIB, MAIN);
    let known = rig.malloc(MIB, capturing);
    rig.record_stream(block, SIDE);
    rig.write(SIDE, block);
    rig.gpu.begin_capture(capturing, CaptureMode::Global).expect("it can capture");
    for after in 0..2 {
        rig.gpu.fail_next(Call::RecordEvent, after, Status::InvalidHandle);
    }
    rig.free(block);
    rig.malloc(40 * MIB, MAIN);
    assert_eq!(rig.gpu.pending_faults(), 0, "the free and the miss asked for an event");
    rig.gpu.end_capture(capturing).expect("the allocator spoils no capture");
    rig.free(known);
    rig.finish();
}

#[test]
fn block_used_on_a_stream_that_the_driver_does_not_name_is_reused_after_a_wait() {
    for status in [Status::InvalidHandle, Status::OutOfMemory] {
        let mut rig = Rig::new("policy:native");
        let block = rig.malloc(200 * MIB, MAIN);
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        rig.gpu.fail_next(Call::StreamContext, 0, status);
        assert_eq!(rig.allocator.record_stream(block, SIDE), RecordOutcome::UnknownStream);
        rig.write(SIDE, block);
        assert_eq!(rig.gpu.host_waits(), 0, "the stream may get work yet");
        rig.free(block);
        let beside = rig.malloc(4 * MIB, MAIN);
        rig.write(MAIN, beside);
        assert_eq!(rig.gpu.host_waits(), 0, "there is room elsewhere");
        assert_eq!(rig.malloc(200 * MIB, MAIN), block);
        rig.write(MAIN, block);
        assert_eq!(rig.gpu.call_count(Call::SynchronizeDevice), 1);
        rig.finish();
    }
}

#[test]
fn stream_that_the_driver_does_not_name_may_be_of_any_device() {
    let other = DeviceId(1);
    for config in POLICIES {
        let options = SimOptions { devices: 3, capacity_bytes: 256 * MIB, ..SimOptions::default() };
        let mut rig = Rig::on(&format!("{config},peers:none"), options);
        rig.gpu.set_current_device(other).expect("it exists");
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        rig.gpu.launch(SIDE, &[], &[], 1_000_000).expect("it touches nothing");
        rig.gpu.set_current_device(DEVICE).expect("it exists");
        let block = rig.malloc(200 * MIB, MAIN);
        rig.gpu.fail_next(Call::StreamContext, 0, Status::Unknown);
        assert_eq!(rig.allocator.record_stream(block, SIDE), RecordOutcome::UnknownStream);
        rig.free(block);
        rig.malloc(200 * MIB, MAIN);
        assert_eq!(rig.gpu.call_count(Call::SynchronizeDevice), 2, "of the two devices that the process uses");
        rig.finish();
    }
}

#[test]
fn stream_of_a_device_that_does_not_come_into_use_is_waited_for() {
    let options = SimOptions { devices: 2, capacity_bytes: 256 * MIB, ..SimOptions::default() };
    let mut rig = Rig::on("policy:native", options);
    let block = rig.malloc(4 * MIB, MAIN);
    rig.gpu.set_current_device(DeviceId(1)).expect("it exists");
    rig.gpu.open_stream(SIDE).expect("the stream can be made");
    rig.write(SIDE, block);
    rig.gpu.set_current_device(DEVICE).expect("it exists");
    rig.gpu.fail_next(Call::Attribute, 0, Status::Unknown);
    rig.record_stream(block, SIDE);
    assert_eq!(rig.gpu.pending_faults(), 0, "the device was to come into use");
    rig.free(block);
    let next = rig.malloc(4 * MIB, MAIN);
    assert_ne!(next, block, "the other device still uses it");
    rig.write(MAIN, next);
    rig.finish();
}

#[test]
fn new_device_reaches_what_was_mapped_before_it_came() {
    let options = SimOptions { devices: 2, capacity_bytes: 256 * MIB, ..SimOptions::default() };
    for (config, reaches) in [("", true), ("peers:none", false), ("peers:all", true)] {
        let mut rig = Rig::on(config, options.clone());
        let early = rig.malloc(30 * MIB, MAIN);
        rig.gpu.set_current_device(DeviceId(1)).expect("it exists");
        let there = rig.malloc_on(4 * MIB, DeviceId(1), SIDE).expect("there is memory");
        let late = rig.malloc(30 * MIB, MAIN);
        rig.gpu.complete(None).expect("no fault");
        for block in [early, late] {
            rig.record_stream(block, SIDE);
            let launched = rig.gpu.launch(SIDE, &[block], &[there], 10).and_then(|()| rig.gpu.complete(Some(SIDE)));
            assert_eq!(launched.is_ok(), reaches, "{config}");
            if !reaches {
                return;
            }
        }
        rig.gpu.set_current_device(DEVICE).expect("it exists");
        rig.finish();
    }
}

#[test]
fn default_stream_is_recorded_on_every_device_if_the_driver_does_not_say_which_is_current() {
    let options = SimOptions { devices: 2, capacity_bytes: 256 * MIB, ..SimOptions::default() };
    for config in POLICIES {
        let mut rig = Rig::on(config, options.clone());
        let block = rig.malloc(4 * MIB, SIDE);
        rig.malloc_on(4 * MIB, DeviceId(1), MAIN).expect("there is memory");
        rig.gpu.set_current_device(DeviceId(1)).expect("it exists");
        rig.write(MAIN, block);
        rig.gpu.fail_next(Call::CurrentContext, 0, Status::InvalidContext);
        rig.record_stream(block, MAIN);
        rig.free(block);
        let next = rig.malloc(4 * MIB, SIDE);
        assert_ne!(next, block, "the other device's default stream uses it");
        rig.write(SIDE, next);
        rig.finish();
    }
}

/// Runs the calls on another thread, whose current device is the first one, and waits for it.
fn on_another_thread<T: Send>(rig: &mut Rig, calls: impl FnOnce(&mut Rig) -> T + Send) -> T {
    let calls = || {
        rig.gpu.set_current_device(DEVICE).expect("it exists");
        calls(rig)
    };
    thread::scope(|scope| scope.spawn(calls).join().expect("it does not panic"))
}

#[test]
fn block_of_another_threads_own_stream_is_reused_only_after_that_stream() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        on_another_thread(&mut rig, |rig| {
            let block = rig.malloc(200 * MIB, StreamHandle::PER_THREAD);
            rig.write(StreamHandle::PER_THREAD, block);
            rig.free(block);
        });
        let next = rig.malloc(200 * MIB, SIDE);
        rig.write(SIDE, next);
        rig.finish();
    }
}

#[test]
fn block_recorded_on_another_threads_own_stream_waits_for_that_stream() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.malloc(4 * MIB, SIDE);
        on_another_thread(&mut rig, |rig| {
            rig.record_stream(block, StreamHandle::PER_THREAD);
            rig.write(StreamHandle::PER_THREAD, block);
        });
        rig.free(block);
        let other = rig.malloc(4 * MIB, SIDE);
        assert_ne!(other, block, "{config}: the other thread's stream still writes it");
        rig.write(SIDE, other);
        rig.free(other);
        // All that there is room for, but not beside what is pending.
        let all = rig.malloc(if config == "policy:rallocator" { 254 } else { 240 } * MIB, SIDE);
        rig.write(SIDE, all);
        assert_eq!(rig.gpu.call_count(Call::SynchronizeDevice), 1, "{config}: nothing else can answer");
        rig.finish();
    }
}

#[test]
fn thread_records_on_its_own_stream_what_other_threads_could_not() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.malloc(4 * MIB, SIDE);
        on_another_thread(&mut rig, |rig| {
            rig.record_stream(block, StreamHandle::PER_THREAD);
            rig.write(StreamHandle::PER_THREAD, block);
            thread::scope(|scope| scope.spawn(|| rig.free(block)).join().expect("it does not panic"));
            rig.gpu.complete(Some(StreamHandle::PER_THREAD)).expect("no fault");
            rig.malloc(40 * MIB, SIDE);
            assert_eq!(rig.stats().active_bytes.all.current, 40 * MIB, "{config}: the miss asked the event");
        });
        assert_eq!(rig.gpu.call_count(Call::SynchronizeDevice), 0);
        rig.finish();
    }
}
