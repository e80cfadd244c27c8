//! Captures and private pools.

use alloc_core::{allocator::FreeOutcome, driver::CaptureMode, id::PoolId};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

const POOL: PoolId = PoolId(1, 0);

/// Captures a graph on the side stream that writes two temporaries, one after the other in one block.
fn capture(rig: &mut Rig) -> alloc_core::driver::sim::GraphId {
    rig.begin_pool(POOL, SIDE);
    rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
    let first = rig.malloc(20 * MIB, SIDE);
    rig.write(SIDE, first);
    rig.free(first);
    let second = rig.malloc(20 * MIB, SIDE);
    assert_eq!(first, second, "one capture on one stream reuses its own memory");
    rig.write(SIDE, second);
    rig.free(second);
    let graph = rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
    rig.allocator.end_pool(crate::rig::DEVICE, POOL);
    graph
}

#[test]
fn captured_memory_belongs_to_the_graph_until_its_pool_is_released() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        let graph = capture(&mut rig);
        rig.allocator.empty_cache().expect("the rest can be returned");
        assert_eq!(rig.reserved(), 20 * MIB, "a graph may run at any time");
        let other = rig.malloc(20 * MIB, SIDE);
        rig.gpu.replay(graph, MAIN).expect("no race");
        rig.write(SIDE, other);
        rig.gpu.destroy_graph(graph).expect("it exists");
        rig.release_pool(POOL);
        assert_eq!(rig.reserved(), 40 * MIB, "the replay may still be running");
        rig.allocator.empty_cache().expect("the graph's memory can be returned");
        assert_eq!(rig.reserved(), 20 * MIB);
        rig.finish();
    }
}

#[test]
fn released_pool_is_returned_when_memory_runs_out() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        let graph = capture(&mut rig);
        rig.gpu.replay(graph, MAIN).expect("no race");
        rig.gpu.destroy_graph(graph).expect("it exists");
        rig.release_pool(POOL);
        let all = rig.malloc(240 * MIB, MAIN);
        rig.write(MAIN, all);
        rig.finish();
    }
}

#[test]
fn free_that_falls_into_a_capture_is_deferred_and_completes_after_it() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.malloc(4 * MIB, MAIN);
        rig.record_stream(block, SIDE);
        rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
        rig.free(block);
        assert_eq!(rig.stats().deferred_frees, 1);
        let other = rig.malloc(4 * MIB, MAIN);
        assert_ne!(other, block, "no event could be recorded");
        rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
        let large = rig.malloc(100 * MIB, MAIN);
        rig.gpu.complete(None).expect("no fault");
        rig.free(large);
        rig.malloc(120 * MIB, MAIN);
        assert_eq!(rig.stats().active_bytes.all.current, 124 * MIB);
        rig.finish();
    }
}

#[test]
fn growth_polls_and_waits_during_a_capture_leave_it_intact() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.malloc(100 * MIB, MAIN);
        rig.record_stream(block, SIDE);
        rig.write(SIDE, block);
        let capturing = alloc_core::id::StreamHandle(0x20);
        rig.gpu.open_stream(capturing).expect("the stream can be made");
        rig.free(block);
        rig.gpu.begin_capture(capturing, CaptureMode::Global).expect("it can capture");
        rig.begin_pool(POOL, capturing);
        rig.malloc(10 * MIB, capturing);
        rig.malloc(150 * MIB, MAIN);
        rig.malloc(50 * MIB, MAIN);
        rig.allocator.end_pool(crate::rig::DEVICE, POOL);
        rig.gpu.end_capture(capturing).expect("nothing spoiled it");
        rig.release_pool(POOL);
        rig.finish();
    }
}

#[test]
fn abandoned_capture_leaves_a_pool_that_can_be_returned() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        rig.begin_pool(POOL, SIDE);
        rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
        let block = rig.malloc(20 * MIB, SIDE);
        rig.gpu.abort_capture(SIDE).expect("it was capturing");
        rig.allocator.end_pool(crate::rig::DEVICE, POOL);
        rig.release_pool(POOL);
        assert!(rig.allocator.empty_cache().is_ok());
        assert_eq!(rig.reserved(), 20 * MIB, "a tensor outlives its capture");
        rig.free(block);
        rig.finish();
    }
}

#[test]
fn device_is_not_synchronised_while_a_capture_that_has_asked_for_nothing_may_be_under_way() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        let graph = capture(&mut rig);
        rig.gpu.destroy_graph(graph).expect("it exists");
        rig.release_pool(POOL);
        // No request has named this stream, so the allocator cannot ask whether it is capturing.
        let unknown = alloc_core::id::StreamHandle(0x20);
        rig.gpu.open_stream(unknown).expect("the stream can be made");
        rig.begin_pool(PoolId(2, 0), unknown);
        rig.gpu.begin_capture(unknown, CaptureMode::Global).expect("it can capture");
        rig.allocator.empty_cache().expect("what may go back does");
        assert_eq!(rig.reserved(), 20 * MIB, "the released pool is not proven idle");
        rig.gpu.end_capture(unknown).expect("nothing spoiled it");
        rig.allocator.end_pool(crate::rig::DEVICE, PoolId(2, 0));
        rig.release_pool(PoolId(2, 0));
        rig.allocator.empty_cache().expect("all can go back");
        assert_eq!(rig.reserved(), 0);
        rig.finish();
    }
}

#[test]
fn oversize_memory_of_a_live_graph_makes_no_room_for_a_request_of_its_pool() {
    let mut rig = Rig::new("policy:native,max_split_size_mb:21");
    rig.gpu.open_stream(SIDE).expect("the stream can be made");
    rig.begin_pool(POOL, SIDE);
    rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
    let large = rig.malloc(140 * MIB, SIDE);
    rig.write(SIDE, large);
    rig.free(large);
    // Too small for the oversize segment, which may not be split, and too large for the rest of the device.
    assert!(rig.try_malloc(20 * MIB, SIDE).is_ok() && rig.try_malloc(110 * MIB, SIDE).is_err());
    let graph = rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
    rig.allocator.end_pool(crate::rig::DEVICE, POOL);
    rig.gpu.replay(graph, MAIN).expect("no race");
    rig.gpu.complete(None).expect("its memory is still there");
    rig.gpu.destroy_graph(graph).expect("it exists");
    rig.release_pool(POOL);
    rig.finish();
}

#[test]
fn request_whose_pool_is_released_while_it_climbs_is_served_by_the_default_pool() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.begin_pool(POOL, MAIN);
        rig.malloc(150 * MIB, MAIN);
        let hoard = rig.malloc(80 * MIB, SIDE);
        let allocator = rig.allocator.clone();
        rig.allocator.set_oom_callback(Some(std::sync::Arc::new(move || {
            // What a program does that drops its graphs to make room.
            allocator.end_pool(DEVICE, POOL);
            allocator.release_pool(DEVICE, POOL);
            true
        })));
        assert!(rig.allocator.malloc(60 * MIB, DEVICE, MAIN, Some(POOL)).is_err(), "nothing was freed");
        rig.allocator.check().expect("consistent");
        rig.allocator.set_oom_callback(None);
        rig.free(hoard);
        let address = rig.allocator.malloc(60 * MIB, DEVICE, MAIN, Some(POOL)).expect("there is room now");
        assert!(
            rig.allocator.snapshot().iter().any(|segment| segment.pool == PoolId::DEFAULT && segment.size >= 60 * MIB)
        );
        assert_eq!(rig.allocator.free(address.expect("not nothing"), DEVICE), FreeOutcome::Freed);
        rig.finish();
    }
}
