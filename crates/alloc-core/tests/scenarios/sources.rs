//! Private pools whose segments come from a source of the program's own.

use std::sync::Arc;

use alloc_core::{
    Rung,
    allocator::FreeOutcome,
    driver::{
        Call, CaptureMode,
        sim::{Mishap, SimSource, SourceCounts},
    },
    error::AllocError,
    history::Action,
    id::{DevicePtr, PoolId, StreamHandle},
    source::SourceError,
};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

pub(crate) const POOL: PoolId = PoolId(0, 7);

/// A machine with a pool that has a source of its own, and begins on the main stream.
pub(crate) fn sourced(config: &str) -> (Rig, SimSource) {
    sourced_on(config, MAIN)
}

/// As [`sourced`], on any stream.
fn sourced_on(config: &str, stream: StreamHandle) -> (Rig, SimSource) {
    let rig = Rig::new(config);
    rig.gpu.open_stream(SIDE).expect("the stream can be made");
    let source = SimSource::new(&rig.gpu);
    rig.allocator.create_pool_from(DEVICE, POOL, Arc::new(source.clone())).expect("there is no such pool yet");
    rig.begin_pool(POOL, stream);
    (rig, source)
}

/// Ends the routing to the pool, and lets it go.
pub(crate) fn release(rig: &Rig) {
    rig.allocator.end_pool(DEVICE, POOL);
    rig.release_pool(POOL);
    rig.allocator.release_pool(DEVICE, POOL);
    assert_eq!(rig.allocator.pool_users(DEVICE, POOL), 0);
}

/// Ends the test: all goes back to where it came from.
pub(crate) fn finish(rig: Rig, source: &SimSource) {
    rig.finish();
    source.check().expect("it got its own back");
    let SourceCounts { given, taken_back, .. } = source.counts();
    assert_eq!((source.segments(DEVICE).len(), taken_back), (0, given));
}

/// What came and went, as the history has it.
pub(crate) fn segment_events(rig: &Rig) -> Vec<(Action, DevicePtr)> {
    let events = rig.allocator.history(DEVICE);
    let of_segments = events.iter().filter(|event| matches!(event.action, Action::SegmentAlloc | Action::SegmentFree));
    of_segments.map(|event| (event.action, event.address)).collect()
}

/// The bytes of the pool's segments, by the snapshot, in address order.
pub(crate) fn segments(rig: &Rig) -> Vec<u64> {
    let of_pool = rig.allocator.snapshot().into_iter().filter(|segment| segment.pool == POOL);
    let whole = of_pool.inspect(|segment| assert!(!segment.is_expandable));
    whole.map(|segment| segment.size).collect()
}

#[test]
fn pool_has_torchs_segments_of_its_source_under_every_policy() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let first = rig.malloc(MIB, MAIN);
        let second = rig.malloc(MIB, MAIN);
        assert_eq!(segments(&rig), [2 * MIB], "{config}: both lie in one small segment");
        let third = rig.malloc(3 * MIB, MAIN);
        let fourth = rig.malloc(12 * MIB, MAIN);
        let fifth = rig.malloc(33 * MIB, MAIN);
        let mut sizes = segments(&rig);
        sizes.sort_unstable();
        assert_eq!(sizes, [2 * MIB, 20 * MIB, 34 * MIB], "{config}");
        assert_eq!(fourth, third.offset(3 * MIB), "{config}: the rest of a large segment serves large requests");
        let known: Vec<u64> = source.segments(DEVICE).into_values().collect();
        assert_eq!((known.iter().sum::<u64>(), known.len()), (56 * MIB, 3));
        assert_eq!(rig.reserved(), 56 * MIB, "{config}: reserved counts it");
        assert_eq!(rig.stats().segment.all.current, 3);
        for address in [first, second, third, fourth, fifth] {
            rig.write(MAIN, address);
        }
        release(&rig);
        finish(rig, &source);
    }
}

#[test]
fn cached_memory_of_a_source_serves_its_pool_again_and_goes_back_only_after_the_release() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let block = rig.malloc(30 * MIB, MAIN);
        rig.free(block);
        rig.allocator.empty_cache().expect("there is nothing to give back");
        assert_eq!(rig.malloc(30 * MIB, MAIN), block, "{config}: the pool is live");
        rig.free(block);
        release(&rig);
        assert_eq!(source.counts().taken_back, 0, "a graph may run on it");
        rig.allocator.empty_pool(POOL).expect("it can go back");
        assert_eq!((source.counts().taken_back, rig.reserved()), (1, 0), "{config}");
        finish(rig, &source);
    }
}

#[test]
fn tensor_outlives_its_pool_and_still_goes_back_to_its_source() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let block = rig.malloc(30 * MIB, MAIN);
        release(&rig);
        rig.allocator.empty_cache().expect("nothing fails");
        rig.write(MAIN, block);
        assert_eq!((source.counts().taken_back, rig.reserved()), (0, 30 * MIB));
        rig.free(block);
        rig.allocator.empty_cache().expect("it can go back");
        assert_eq!((source.counts().taken_back, rig.reserved()), (1, 0), "{config}");
        finish(rig, &source);
    }
}

/// A source may take memory away at once, so that every use has to be over before, the own stream's too.
#[test]
fn segment_goes_back_after_the_end_of_its_last_use_on_any_stream() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let [own, foreign] = [30 * MIB, 40 * MIB].map(|size| rig.malloc(size, MAIN));
        release(&rig);
        rig.allocator.empty_cache().expect("nothing fails");
        rig.gpu.launch(MAIN, &[], &[own], 500).expect("no race");
        rig.record_stream(foreign, SIDE);
        rig.gpu.wait(SIDE, MAIN).expect("neither is capturing");
        rig.gpu.launch(SIDE, &[], &[foreign], 500).expect("no race");
        rig.free(own);
        rig.free(foreign);
        rig.allocator.empty_cache().expect("it waits for the work and gives all back");
        rig.gpu.check().expect("nothing was taken from under a kernel");
        assert_eq!((source.counts().taken_back, rig.reserved()), (2, 0), "{config}");
        finish(rig, &source);
    }
}

#[test]
fn segment_stays_while_its_stream_captures_something_else() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let block = rig.malloc(30 * MIB, MAIN);
        release(&rig);
        rig.allocator.empty_cache().expect("the pool is proven idle, but for what is held");
        rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
        rig.record_stream(block, SIDE);
        rig.free(block);
        rig.allocator.empty_cache().expect("nothing fails");
        assert_eq!(source.counts().taken_back, 0, "{config}: the capture may use it");
        let graph = rig.gpu.end_capture(SIDE).expect("the source has not spoiled it");
        rig.gpu.destroy_graph(graph).expect("it exists");
        rig.allocator.empty_cache().expect("it can go back");
        assert_eq!(source.counts().taken_back, 1);
        finish(rig, &source);
    }
}

/// No event can tell then that what ran before the capture is over.
#[test]
fn segment_stays_while_its_own_stream_captures() {
    for config in POLICIES {
        let (mut rig, source) = sourced_on(config, SIDE);
        let block = rig.malloc(30 * MIB, SIDE);
        release(&rig);
        rig.allocator.empty_cache().expect("the pool is proven idle, but for what is held");
        rig.gpu.launch(SIDE, &[], &[block], 500).expect("no race");
        rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
        rig.free(block);
        rig.allocator.empty_cache().expect("nothing fails");
        assert_eq!(source.counts().taken_back, 0, "{config}: the kernel runs");
        let graph = rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
        rig.gpu.destroy_graph(graph).expect("it exists");
        rig.allocator.empty_cache().expect("it can go back");
        assert_eq!(source.counts().taken_back, 1, "{config}");
        finish(rig, &source);
    }
}

#[test]
fn source_may_be_asked_while_a_stream_captures() {
    for config in POLICIES {
        let (mut rig, source) = sourced_on(config, SIDE);
        rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
        let block = rig.malloc(30 * MIB, SIDE);
        rig.write(SIDE, block);
        rig.free(block);
        let graph = rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
        rig.gpu.replay(graph, SIDE).expect("its memory is there");
        rig.allocator.empty_cache().expect("nothing fails");
        assert_eq!(source.counts().taken_back, 0, "the graph is live");
        rig.gpu.destroy_graph(graph).expect("it exists");
        release(&rig);
        finish(rig, &source);
    }
}

#[test]
fn memory_of_a_source_is_lent_to_nobody_and_its_pool_borrows_from_nobody() {
    for config in ["policy:native", "policy:expandable", "policy:rallocator", "cross_stream_reuse:all"] {
        let (mut rig, source) = sourced(config);
        let block = rig.malloc(120 * MIB, MAIN);
        rig.write(MAIN, block);
        rig.free(block);
        rig.allocator.end_pool(DEVICE, POOL);
        rig.try_malloc(140 * MIB, MAIN).expect_err("half of the device is the pool's, which is live");
        let other = rig.malloc(100 * MIB, MAIN);
        rig.write(MAIN, other);
        rig.free(other);
        rig.begin_pool(POOL, MAIN);
        let second = rig.try_malloc(125 * MIB, MAIN);
        assert_eq!(second.expect("what others have cached was given back"), source_end(&source, 126 * MIB), "{config}");
        assert_eq!(segments(&rig).len(), 2);
        assert_eq!(rig.stats().handles_moved, 0, "{config}");
        rig.release_pool(POOL);
        release(&rig);
        finish(rig, &source);
    }
}

/// Where the source's segment of so many bytes begins.
fn source_end(source: &SimSource, size: u64) -> DevicePtr {
    let found = source.segments(DEVICE).into_iter().find(|(_, bytes)| *bytes == size);
    found.expect("the source gave such a segment").0
}

/// Not even after the release, when the driver's memory of a private pool may move.
#[test]
fn memory_of_a_released_pool_of_a_source_moves_nowhere() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let block = rig.malloc(100 * MIB, MAIN);
        let held = rig.malloc(40 * MIB, MAIN);
        release(&rig);
        rig.free(block);
        assert!(rig.allocator.pin(held) && rig.allocator.unpin(held));
        rig.allocator.empty_cache().expect("what is idle goes back");
        assert_eq!((source.counts().taken_back, segments(&rig)), (1, vec![40 * MIB]), "{config}");
        rig.free(held);
        let next = rig.malloc(60 * MIB, MAIN);
        rig.write(MAIN, next);
        assert_eq!((rig.stats().handles_moved, rig.stats().gpu_waits), (0, 0));
        assert_eq!(rig.reserved(), 100 * MIB, "{config}: it is other memory");
        finish(rig, &source);
    }
}

#[test]
fn request_that_needs_the_room_has_the_segments_of_released_pools_given_back() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let block = rig.malloc(200 * MIB, MAIN);
        rig.gpu.launch(MAIN, &[], &[block], 500).expect("no race");
        rig.free(block);
        release(&rig);
        let next = rig.malloc(200 * MIB, MAIN);
        rig.write(MAIN, next);
        assert_eq!(source.counts().taken_back, 1, "{config}");
        assert!(rig.stats().rungs[Rung::HandBack as usize] > 0);
        finish(rig, &source);
    }
}

#[test]
fn pool_that_serves_others_when_memory_is_out_does_so_with_a_source_too() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let block = rig.malloc(200 * MIB, MAIN);
        rig.free(block);
        rig.allocator.end_pool(DEVICE, POOL);
        assert!(rig.allocator.serve_when_out_of_memory(DEVICE, POOL, true));
        assert_eq!(rig.malloc(120 * MIB, MAIN), block, "{config}");
        rig.free(block);
        // The other way round is no help: who names a source wants memory of that source.
        let other = SimSource::new(&rig.gpu);
        let wanting = PoolId(0, 8);
        rig.allocator.create_pool_from(DEVICE, wanting, Arc::new(other.clone())).expect("there is no such pool yet");
        rig.begin_pool(wanting, MAIN);
        rig.try_malloc(120 * MIB, MAIN).expect_err("its own source has nothing");
        rig.allocator.end_pool(DEVICE, wanting);
        rig.release_pool(wanting);
        rig.allocator.release_pool(DEVICE, wanting);
        rig.release_pool(POOL);
        rig.allocator.release_pool(DEVICE, POOL);
        finish(rig, &source);
    }
}

/// Every driver call of a program that a source serves, failing in its turn.
#[test]
fn what_a_source_is_asked_for_counts_against_the_limit() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        rig.allocator.set_memory_limit(DEVICE, 50 * MIB).expect("the device is in use");
        let first = rig.malloc(30 * MIB, MAIN);
        let Err(AllocError::OutOfMemory(report)) = rig.try_malloc(30 * MIB, MAIN) else { panic!("beyond the limit") };
        assert_eq!((report.refused_by, source.counts().given, source.counts().empty), (None, 1, 0), "{config}");
        source.fail_next(Mishap::GivesNothing);
        let second = rig.malloc(20 * MIB, MAIN);
        for address in [first, second] {
            rig.write(MAIN, address);
        }
        release(&rig);
        finish(rig, &source);
    }
}

#[test]
fn memory_of_a_source_is_not_shared_with_other_processes() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let block = rig.malloc(3 * MIB, MAIN);
        let refused = rig.allocator.share(block, |_| ()).expect_err("nobody knows what stands behind it");
        assert_eq!(refused, SourceError::NotShareable { pool: POOL }.into());
        assert_eq!(rig.gpu.call_count(Call::GetTicket) + rig.gpu.call_count(Call::ExportHandle), 0);
        rig.allocator.end_pool(DEVICE, POOL);
        let own = rig.malloc(3 * MIB, MAIN);
        rig.allocator.share(own, |_| ()).expect("the driver's can be");
        rig.release_pool(POOL);
        rig.allocator.release_pool(DEVICE, POOL);
        finish(rig, &source);
    }
}

#[test]
fn pool_that_exists_gets_no_source_and_one_of_a_released_name_gets_another() {
    let (mut rig, source) = sourced("policy:rallocator");
    let other = SimSource::new(&rig.gpu);
    let create = |rig: &Rig| rig.allocator.create_pool_from(DEVICE, POOL, Arc::new(other.clone()));
    assert_eq!(create(&rig), Err(SourceError::PoolExists { pool: POOL }.into()));
    let old = rig.malloc(3 * MIB, MAIN);
    release(&rig);
    create(&rig).expect("the name is free again");
    rig.begin_pool(POOL, MAIN);
    let new = rig.malloc(3 * MIB, MAIN);
    assert_eq!((source.counts().given, other.counts().given), (1, 1));
    rig.free(old);
    rig.free(new);
    rig.allocator.empty_cache().expect("the old one's can go back");
    assert_eq!((source.counts().taken_back, other.counts().taken_back), (1, 0));
    release(&rig);
    finish(rig, &source);
    other.check().expect("it got its own back");
    assert_eq!(other.counts().taken_back, 1);
}

#[test]
fn pool_of_a_source_goes_back_to_a_checkpoint() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let [first, second] = [3 * MIB, 700].map(|size| rig.malloc(size, MAIN));
        let checkpoint = rig.allocator.checkpoint_pool(DEVICE, POOL).expect("the pool is in use");
        rig.free(second);
        let third = rig.malloc(5 * MIB, MAIN);
        let restored = rig.allocator.restore_pool(DEVICE, &checkpoint).expect("it can");
        rig.allocator.check().expect("consistent");
        assert!(restored.freed.contains(&third) && restored.allocated.contains(&second));
        for address in [first, second] {
            assert_eq!(rig.allocator.free(address, DEVICE), FreeOutcome::Freed);
        }
        release(&rig);
        rig.allocator.empty_cache().expect("all can go back");
        assert_eq!((rig.reserved(), source.segments(DEVICE).len()), (0, 0), "{config}");
    }
}
