//! Streams that the program destroys, and others that get their handles.

use alloc_core::{
    driver::{
        Call, Status,
        sim::{GraphId, SimError, SimOptions, Violation},
    },
    id::{DeviceId, DevicePtr, PoolId},
};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

const POOL: PoolId = PoolId(1, 0);

impl Rig {
    /// Destroys the side stream, as a program that keeps the rule does.
    fn retire_and_destroy_side(&self) {
        self.allocator.retire_stream(SIDE).expect("an event can be recorded");
        self.gpu.destroy_stream(SIDE).expect("it exists");
    }

    /// Gives the handle of the destroyed side stream to a new one, which is kept busy.
    fn reuse_side_handle(&self) {
        self.gpu.open_stream(SIDE).expect("the stream can be made");
        self.gpu.launch(SIDE, &[], &[], 1_000_000).expect("it touches nothing");
    }

    /// A block of the main stream that the side stream writes too, for long.
    fn block_of_both(&mut self) -> DevicePtr {
        let block = self.malloc(4 * MIB, MAIN);
        self.record_stream(block, SIDE);
        self.write(SIDE, block);
        block
    }
}

#[test]
fn retired_handle_may_come_back_as_another_stream() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.malloc(4 * MIB, SIDE);
        rig.write(SIDE, block);
        rig.free(block);
        rig.retire_and_destroy_side();
        let of_successor = rig.malloc(4 * MIB, SIDE);
        assert_ne!(of_successor, block, "the new stream is not ordered after the old one");
        rig.write(SIDE, of_successor);
        rig.finish();
    }
}

#[test]
fn handle_that_comes_back_without_a_retire_races() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.malloc(4 * MIB, SIDE);
        rig.write(SIDE, block);
        rig.free(block);
        rig.gpu.destroy_stream(SIDE).expect("it exists");
        let of_successor = rig.malloc(4 * MIB, SIDE);
        let raced = rig.gpu.launch(SIDE, &[], &[of_successor], 100);
        assert!(matches!(raced, Err(SimError::Race(_))), "{config}: {raced:?}");
    }
}

#[test]
fn stream_destroyed_without_a_retire_is_a_violation_when_its_end_matters() {
    let mut rig = Rig::new("policy:native");
    let block = rig.block_of_both();
    rig.gpu.destroy_stream(SIDE).expect("it exists");
    assert_eq!(rig.allocator.free(block, DEVICE), alloc_core::allocator::FreeOutcome::Freed);
    let Err(SimError::Violation(violation)) = rig.gpu.check() else { panic!("the free named the stream") };
    assert!(matches!(*violation, Violation::DeadStream { call: Call::CaptureStatus, .. }), "{violation}");
}

#[test]
fn block_of_a_retired_stream_is_returned_without_a_call_on_its_handle() {
    for (config, is_reused) in POLICIES.into_iter().flat_map(|config| [(config, false), (config, true)]) {
        let mut rig = Rig::new(config);
        let block = rig.malloc(4 * MIB, SIDE);
        rig.write(SIDE, block);
        rig.retire_and_destroy_side();
        if is_reused {
            rig.reuse_side_handle();
        }
        rig.free(block);
        rig.allocator.empty_cache().expect("everything can be returned");
        assert_eq!(rig.reserved(), 0, "{config}");
        rig.finish();
    }
}

#[test]
fn block_used_on_a_retired_stream_waits_for_the_event_of_its_retirement() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.block_of_both();
        rig.retire_and_destroy_side();
        rig.reuse_side_handle();
        rig.free(block);
        let other = rig.malloc(4 * MIB, MAIN);
        assert_ne!(other, block, "the retired stream still writes it");
        rig.gpu.advance(100).expect("no fault");
        let large = rig.malloc(40 * MIB, MAIN);
        assert_eq!(rig.stats().active_bytes.all.current, 44 * MIB, "the miss asked the event");
        assert_eq!(rig.gpu.host_waits(), 0, "of the retired stream, not of its successor");
        rig.write(MAIN, large);
        rig.finish();
    }
}

#[test]
fn block_freed_long_after_its_streams_retirement_is_free_at_once() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.block_of_both();
        rig.retire_and_destroy_side();
        rig.gpu.advance(100).expect("no fault");
        rig.malloc(40 * MIB, MAIN);
        rig.free(block);
        let poll = rig.gpu.call_count(Call::QueryEvent);
        assert_eq!(rig.malloc(4 * MIB, MAIN), block);
        rig.write(MAIN, block);
        assert_eq!(rig.gpu.call_count(Call::QueryEvent), poll);
        rig.finish();
    }
}

#[test]
fn retired_stream_without_an_event_is_answered_for_by_a_device_synchronise() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.block_of_both();
        rig.gpu.fail_next(Call::RecordEvent, 0, Status::Unknown);
        rig.allocator.retire_stream(SIDE).expect_err("no event could be recorded");
        rig.gpu.destroy_stream(SIDE).expect("it exists");
        rig.free(block);
        // All that there is room for, but not beside what is pending.
        let all = rig.malloc(if config == "policy:rallocator" { 254 } else { 240 } * MIB, MAIN);
        rig.write(MAIN, all);
        assert_eq!(rig.gpu.call_count(Call::SynchronizeDevice), 1);
        rig.finish();
    }
}

#[test]
fn retired_stream_of_another_device_without_an_event_is_answered_for_by_a_synchronise_of_that_device() {
    let other = DeviceId(1);
    for config in POLICIES {
        let options = SimOptions { devices: 2, capacity_bytes: 256 * MIB, ..SimOptions::default() };
        let mut rig = Rig::on(config, options);
        let block = rig.malloc(4 * MIB, MAIN);
        rig.gpu.set_current_device(other).expect("it exists");
        rig.malloc_on(4 * MIB, other, SIDE).expect("there is memory");
        rig.record_stream(block, SIDE);
        rig.write(SIDE, block);
        rig.gpu.fail_next(Call::RecordEvent, 0, Status::Unknown);
        rig.allocator.retire_stream(SIDE).expect_err("no event could be recorded");
        rig.gpu.destroy_stream(SIDE).expect("it exists");
        rig.free(block);
        rig.allocator.empty_cache().expect("all that is free can be returned");
        assert_eq!(rig.reserved(), 0);
        rig.finish();
    }
}

#[test]
fn released_pool_is_returned_after_one_of_its_streams_was_retired() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        let graph = capture(&mut rig);
        rig.gpu.replay(graph, MAIN).expect("no race");
        rig.gpu.destroy_graph(graph).expect("it exists");
        rig.release_pool(POOL);
        rig.retire_and_destroy_side();
        rig.allocator.empty_cache().expect("the graph's memory can be returned");
        assert_eq!(rig.reserved(), 0);
        rig.finish();
    }
}

/// A graph that writes memory of a private pool.
fn capture(rig: &mut Rig) -> GraphId {
    rig.begin_pool(POOL, SIDE);
    rig.gpu.begin_capture(SIDE, alloc_core::driver::CaptureMode::Global).expect("it can capture");
    let block = rig.malloc(20 * MIB, SIDE);
    rig.write(SIDE, block);
    rig.free(block);
    let graph = rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
    rig.allocator.end_pool(DEVICE, POOL);
    graph
}

#[test]
fn address_that_a_retired_stream_used_last_is_unmapped_once_a_synchronise_answers_for_it() {
    let mut rig = Rig::new("policy:rallocator");
    let donors: Vec<_> = (0..2).map(|_| (rig.malloc(20 * MIB, SIDE), rig.malloc(2 * MIB, SIDE)).0).collect();
    for donor in donors {
        rig.write(SIDE, donor);
        rig.free(donor);
    }
    rig.malloc(30 * MIB, SIDE);
    let moved = rig.stats();
    assert!(moved.handles_moved > 0 && rig.gpu.call_count(Call::RecordEvent) == 0);
    rig.gpu.fail_next(Call::RecordEvent, 0, Status::Unknown);
    rig.allocator.retire_stream(SIDE).expect_err("no event could be recorded");
    rig.finish();
}
