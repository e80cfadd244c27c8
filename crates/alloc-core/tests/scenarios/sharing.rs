//! Streams, size classes and captures that share one device's memory.

use alloc_core::{
    driver::{Call, CaptureMode, Status, sim::SimOptions},
    id::{DevicePtr, PoolId, StreamHandle},
};

use crate::rig::{DEVICE, MAIN, MIB, Rig, SIDE};

/// Longer than any test takes on the simulated clock.
const FOREVER_US: u64 = 1_000_000_000;

const REUSE: [&str; 3] = ["cross_stream_reuse:done", "cross_stream_reuse:owned", "cross_stream_reuse:all"];

/// An idle block that was used last by work on `stream` which is not over.
fn idle_block(rig: &mut Rig, size: u64, stream: StreamHandle) -> DevicePtr {
    let block = rig.malloc(size, stream);
    rig.gpu.launch(stream, &[], &[block], FOREVER_US).expect("no race");
    rig.free(block);
    block
}

/// A block of the main stream that the program has freed while `stream` works on it.
fn pending_block(rig: &mut Rig, size: u64, stream: StreamHandle) -> DevicePtr {
    let block = rig.malloc(size, MAIN);
    rig.record_stream(block, stream);
    rig.gpu.wait(stream, MAIN).expect("both exist");
    rig.gpu.launch(stream, &[], &[block], FOREVER_US).expect("no race");
    rig.free(block);
    block
}

#[test]
fn stream_takes_idle_memory_of_another_after_a_wait_on_the_gpu() {
    for (config, waits) in REUSE.into_iter().zip([0, 1, 1]) {
        let mut rig = Rig::new(config);
        idle_block(&mut rig, 40 * MIB, MAIN);
        let block = rig.malloc(40 * MIB, SIDE);
        rig.write(SIDE, block);
        let is_shared = waits > 0;
        assert_eq!(rig.reserved(), if is_shared { 40 * MIB } else { 80 * MIB }, "{config}");
        assert_eq!((rig.stats().gpu_waits, rig.gpu.host_waits()), (waits, 0), "{config}");
        rig.finish();
    }
}

#[test]
fn stream_takes_memory_whose_last_use_is_over_without_a_wait_whatever_the_setting() {
    for config in REUSE {
        let mut rig = Rig::new(config);
        idle_block(&mut rig, 40 * MIB, MAIN);
        // Nobody has asked whether it is over; the request does before it lets a stream wait or grows past the need.
        rig.gpu.complete(None).expect("no fault");
        let block = rig.malloc(40 * MIB, SIDE);
        rig.write(SIDE, block);
        assert_eq!((rig.reserved(), rig.stats().gpu_waits, rig.gpu.host_waits()), (40 * MIB, 0, 0), "{config}");
        rig.finish();
    }
}

#[test]
fn oldest_of_three_pending_blocks_is_taken_over_from_streams_that_the_setting_names() {
    // Whether the side stream has asked for memory itself, and which settings then let the main stream wait for it.
    for (is_owner, waits) in [(false, [0, 0, 1]), (true, [0, 1, 1])] {
        for (config, waits) in REUSE.into_iter().zip(waits) {
            let mut rig = Rig::new(config);
            if is_owner {
                let owned = rig.malloc(2 * MIB, SIDE);
                rig.write(SIDE, owned);
            }
            let held = rig.reserved();
            let oldest = pending_block(&mut rig, 40 * MIB, SIDE);
            // While two are pending, the stream works ahead in a third.
            pending_block(&mut rig, 40 * MIB, SIDE);
            pending_block(&mut rig, 40 * MIB, SIDE);
            assert_eq!((rig.reserved(), rig.stats().gpu_waits), (held + 120 * MIB, 0), "{config}");
            let block = rig.malloc(40 * MIB, MAIN);
            rig.write(MAIN, block);
            assert_eq!(block == oldest, waits > 0, "{config}");
            assert_eq!(rig.reserved(), held + if waits > 0 { 120 * MIB } else { 160 * MIB }, "{config}");
            assert_eq!((rig.stats().gpu_waits, rig.gpu.host_waits()), (waits, 0), "{config}");
            rig.finish();
        }
    }
}

#[test]
fn pending_block_that_is_the_only_one_is_taken_over_where_nothing_more_can_be_reserved() {
    let mut rig = Rig::new("cross_stream_reuse:all");
    let pending = pending_block(&mut rig, 40 * MIB, SIDE);
    rig.allocator.set_memory_fraction(DEVICE, 0.0).expect("0 is a fraction");
    let block = rig.malloc(40 * MIB, MAIN);
    rig.write(MAIN, block);
    assert_eq!((block, rig.reserved(), rig.stats().gpu_waits), (pending, 40 * MIB, 1));
    rig.finish();
}

#[test]
fn idle_memory_moves_rather_than_that_a_stream_waits_for_the_block_it_handed_on_last() {
    let mut rig = Rig::new("cross_stream_reuse:all");
    let idle = rig.malloc(80 * MIB, SIDE);
    rig.free(idle);
    rig.gpu.complete(None).expect("no fault");
    rig.allocator.set_memory_fraction(DEVICE, 0.0).expect("a fraction");
    let pending = pending_block(&mut rig, 40 * MIB, SIDE);
    let block = rig.malloc(40 * MIB, MAIN);
    rig.write(MAIN, block);
    assert!(block != pending);
    assert_eq!((rig.reserved(), rig.stats().gpu_waits), (80 * MIB, 0));
    rig.finish();
}

#[test]
fn older_pending_block_is_taken_over_though_the_one_handed_on_last_fits_better() {
    let mut rig = Rig::new("cross_stream_reuse:all");
    let older = pending_block(&mut rig, 42 * MIB, SIDE);
    pending_block(&mut rig, 40 * MIB, SIDE);
    rig.allocator.set_memory_fraction(DEVICE, 0.0).expect("a fraction");
    let block = rig.malloc(39 * MIB, MAIN);
    rig.write(MAIN, block);
    assert_eq!((block, rig.reserved(), rig.stats().gpu_waits), (older, 82 * MIB, 1));
    rig.finish();
}

#[test]
fn full_device_is_asked_for_room_to_work_ahead_once_and_again_when_there_is_more() {
    let mut rig = Rig::new("cross_stream_reuse:all");
    let held = rig.malloc(150 * MIB, MAIN);
    pending_block(&mut rig, 40 * MIB, SIDE);
    pending_block(&mut rig, 40 * MIB, SIDE);
    pending_block(&mut rig, 40 * MIB, SIDE);
    let calls = rig.gpu.call_count(Call::CreateHandle);
    assert_eq!((rig.reserved(), rig.stats().gpu_waits), (230 * MIB, 1), "270 MiB are more than there are");
    for _ in 0..4 {
        pending_block(&mut rig, 40 * MIB, SIDE);
    }
    assert_eq!((rig.gpu.call_count(Call::CreateHandle), rig.stats().gpu_waits), (calls, 5));
    rig.free(held);
    rig.gpu.complete(None).expect("no fault");
    rig.allocator.empty_cache().expect("no fault");
    for _ in 0..3 {
        pending_block(&mut rig, 40 * MIB, SIDE);
    }
    assert_eq!((rig.reserved(), rig.stats().gpu_waits), (120 * MIB, 5));
    rig.finish();
}

#[test]
fn small_requests_get_two_handles_more_before_they_wait_for_pending_blocks() {
    let mut rig = Rig::new("cross_stream_reuse:all");
    for _ in 0..4 {
        pending_block(&mut rig, MIB, SIDE);
    }
    assert_eq!((rig.reserved(), rig.stats().gpu_waits), (4 * MIB, 0));
    pending_block(&mut rig, MIB, SIDE);
    assert_eq!((rig.reserved(), rig.stats().gpu_waits), (4 * MIB, 1));
    rig.finish();
}

#[test]
fn request_that_is_larger_than_what_another_stream_left_takes_that_if_it_is_a_good_part_and_obtains_the_rest() {
    for (left, waits) in [(40, 1), (12, 1), (10, 0)] {
        let mut rig = Rig::new("policy:rallocator");
        idle_block(&mut rig, left * MIB, SIDE);
        let block = rig.malloc(48 * MIB, MAIN);
        rig.write(MAIN, block);
        let reserved = if waits > 0 { 48 } else { left + 48 };
        assert_eq!((rig.reserved(), rig.stats().gpu_waits, rig.gpu.host_waits()), (reserved * MIB, waits, 0), "{left}");
        rig.finish();
    }
}

#[test]
fn donors_remainder_goes_to_no_other_stream_before_the_last_use_is_over() {
    let mut rig = Rig::new("cross_stream_reuse:done");
    idle_block(&mut rig, 40 * MIB, MAIN);
    let fence = rig.malloc(2 * MIB, MAIN);
    // The small request takes a handle out of the idle block; two remainders stay, one of the handle, one of the block.
    let small = rig.malloc(MIB, MAIN);
    assert_eq!(rig.reserved(), 40 * MIB);
    let other = rig.malloc(20 * MIB, SIDE);
    assert_eq!(rig.reserved(), 60 * MIB, "the main stream's work is not over");
    rig.write(SIDE, other);
    rig.gpu.complete(None).expect("no fault");
    let another = rig.malloc(16 * MIB, SIDE);
    rig.write(SIDE, another);
    assert_eq!(rig.reserved(), 60 * MIB, "it is over now");
    for block in [fence, small] {
        rig.write(MAIN, block);
    }
    rig.finish();
}

#[test]
fn memory_of_a_live_graph_never_moves() {
    let pool = PoolId(1, 0);
    let mut rig = Rig::new("policy:rallocator");
    rig.gpu.open_stream(SIDE).expect("the stream can be made");
    rig.begin_pool(pool, SIDE);
    rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
    let captured = rig.malloc(40 * MIB, SIDE);
    rig.write(SIDE, captured);
    rig.free(captured);
    let graph = rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
    rig.allocator.end_pool(DEVICE, pool);
    for stream in [MAIN, SIDE] {
        let block = rig.malloc(40 * MIB, stream);
        rig.gpu.replay(graph, SIDE).expect("no race");
        rig.write(stream, block);
        rig.free(block);
    }
    assert_eq!(rig.reserved(), 80 * MIB, "the graph's, and one that two streams share");
    rig.gpu.destroy_graph(graph).expect("it exists");
    rig.release_pool(pool);
    rig.finish();
}

#[test]
fn request_of_a_capturing_stream_waits_for_nobody_and_spoils_nothing() {
    for has_pool in [true, false] {
        let pool = PoolId(1, 0);
        let mut rig = Rig::new("cross_stream_reuse:all");
        let owned = rig.malloc(2 * MIB, SIDE);
        rig.free(owned);
        idle_block(&mut rig, 40 * MIB, MAIN);
        if has_pool {
            rig.begin_pool(pool, SIDE);
        }
        rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
        let captured = rig.malloc(40 * MIB, SIDE);
        rig.write(SIDE, captured);
        rig.free(captured);
        let graph = rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
        assert_eq!((rig.stats().gpu_waits, rig.gpu.call_count(Call::WaitEvent)), (0, 0));
        assert!(rig.reserved() >= 80 * MIB, "it got memory of its own");
        rig.gpu.destroy_graph(graph).expect("it exists");
        if has_pool {
            rig.allocator.end_pool(DEVICE, pool);
            rig.release_pool(pool);
        }
        rig.finish();
    }
}

#[test]
fn small_and_large_requests_share_memory() {
    for sizes in [[MIB, 20 * MIB], [20 * MIB, MIB], [MIB / 2, 3 * MIB]] {
        let mut rig = Rig::new("policy:rallocator");
        for size in sizes {
            let blocks: Vec<DevicePtr> = (0..200 * MIB / size).map(|_| rig.malloc(size, MAIN)).collect();
            for block in blocks {
                rig.write(MAIN, block);
                rig.free(block);
            }
        }
        assert!(rig.reserved() * 100 <= rig.stats().active_bytes.all.peak * 105, "{sizes:?}: {}", rig.reserved());
        assert_eq!((rig.gpu.host_waits(), rig.stats().gpu_waits), (0, 0));
        rig.finish();
    }
}

#[test]
fn streams_that_take_turns_share_memory() {
    for is_over_between in [true, false] {
        let mut rig = Rig::on("policy:rallocator", SimOptions { capacity_bytes: 1 << 40, ..SimOptions::default() });
        for stream in 1..=8 {
            let stream = StreamHandle(0x10 * stream);
            let sizes = [200, 1, 120, 7, 64, 3, 33, 2];
            let blocks: Vec<DevicePtr> = sizes.into_iter().map(|size| rig.malloc(size * MIB, stream)).collect();
            for block in blocks {
                rig.gpu.launch(stream, &[], &[block], FOREVER_US).expect("no race");
                rig.free(block);
            }
            if is_over_between {
                rig.gpu.complete(None).expect("no fault");
            }
        }
        let peak_active = rig.stats().active_bytes.all.peak;
        let most = peak_active / 100 * 102 + 4 * MIB;
        assert!(rig.reserved() <= most, "{} reserved for {peak_active}", rig.reserved());
        assert_eq!(rig.gpu.host_waits(), 0);
        rig.finish();
    }
}

#[test]
fn stream_that_is_used_once_at_the_start_strands_nothing() {
    let mut rig = Rig::new("policy:rallocator");
    for size in [60, 20, 1] {
        idle_block(&mut rig, size * MIB, SIDE);
    }
    rig.gpu.complete(Some(SIDE)).expect("no fault");
    let reserved = rig.reserved();
    for _ in 0..3 {
        let blocks: Vec<DevicePtr> = (0..15).map(|_| rig.malloc(4 * MIB, MAIN)).collect();
        for block in blocks {
            rig.write(MAIN, block);
            rig.free(block);
        }
    }
    assert_eq!(rig.reserved(), reserved);
    rig.finish();
}

#[test]
fn failed_call_before_a_wait_on_the_gpu_loses_nothing() {
    for (is_pending, call) in [
        (false, Call::RecordEvent),
        (false, Call::CaptureStatus),
        (false, Call::WaitEvent),
        (true, Call::CaptureStatus),
        (true, Call::WaitEvent),
    ] {
        let mut rig = Rig::new("cross_stream_reuse:all");
        if is_pending {
            for _ in 0..3 {
                pending_block(&mut rig, 40 * MIB, SIDE);
            }
        } else {
            idle_block(&mut rig, 40 * MIB, SIDE);
        }
        rig.gpu.fail_next(call, 0, Status::Unknown);
        // It may be served in another way; if not, the next one is.
        if let Ok(block) = rig.try_malloc(40 * MIB, MAIN) {
            rig.write(MAIN, block);
        }
        assert_eq!(rig.gpu.pending_faults(), 0, "{call:?} was not called");
        let second = rig.malloc(40 * MIB, MAIN);
        rig.write(MAIN, second);
        rig.finish();
    }
}
