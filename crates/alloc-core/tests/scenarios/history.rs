//! What is recorded, and what a picture of the memory shows of it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use alloc_core::{
    driver::sim::SimOptions,
    history::{Action, LabelId, Moment, Recording, StackId},
    id::{DeviceId, PoolId},
};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

/// A recording whose clock ticks once for each event, and whose caller is always stack 7.
fn recording(limit: usize) -> Recording {
    let clock = AtomicU64::new(0);
    let tick =
        move || Moment { time_us: clock.fetch_add(1, Ordering::Relaxed) + 1, stack: StackId(7), label: LabelId(3) };
    Recording { witness: Arc::new(tick), ..Recording::new(limit) }
}

fn actions(rig: &Rig) -> Vec<Action> {
    rig.allocator.history(DEVICE).iter().map(|event| event.action).collect()
}

#[test]
fn events_carry_the_moment_that_the_witness_tells() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.allocator.record_history(Some(&recording(100)), false).expect("nothing is broken");
        let address = rig.malloc(MIB, MAIN);
        rig.free(address);
        let events = rig.allocator.history(DEVICE);
        let times: Vec<u64> = events.iter().map(|event| event.moment.time_us).collect();
        assert_eq!(times, (1..=events.len() as u64).collect::<Vec<_>>());
        assert!(events.iter().all(|event| event.moment.stack == StackId(7) && event.moment.label == LabelId(3)));
        assert_eq!(&actions(&rig)[events.len() - 3..], [Action::Alloc, Action::FreeRequested, Action::FreeCompleted]);
        rig.finish();
    }
}

#[test]
fn free_that_waits_for_a_stream_completes_later_under_the_same_size() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let address = rig.malloc(3 * MIB - 7, MAIN);
        rig.record_stream(address, SIDE);
        rig.write(SIDE, address);
        rig.allocator.record_history(Some(&recording(100)), false).expect("nothing is broken");
        rig.free(address);
        assert_eq!(actions(&rig), [Action::FreeRequested]);
        rig.gpu.complete(None).expect("no kernel faults");
        rig.allocator.empty_cache().expect("everything can be returned");
        let events = rig.allocator.history(DEVICE);
        assert_eq!((events[1].action, events[1].size), (Action::FreeCompleted, 3 * MIB - 7));
        assert!(matches!(events[2].action, Action::SegmentFree | Action::SegmentUnmap));
        rig.finish();
    }
}

#[test]
fn picture_shows_who_holds_what_and_leaves_its_mark_for_later_ones() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let before = rig.malloc(2 * MIB, MAIN);
        rig.allocator.record_history(Some(&recording(100)), false).expect("nothing is broken");
        let held = rig.malloc(2 * MIB, MAIN);
        let [picture] = &rig.allocator.pictures(true)[..] else { panic!("one device is in use") };
        let block = |address| {
            let blocks = picture.segments.iter().flat_map(|segment| &segment.blocks);
            blocks.into_iter().find(|block| block.address == address).expect("it is held").stack
        };
        assert_eq!((block(held), block(before)), (StackId(7), StackId::NONE));
        assert_eq!((rig.allocator.stack_of(held), rig.allocator.stack_of(before)), (StackId(7), StackId::NONE));
        assert_eq!(picture.events.last().map(|event| event.action), Some(Action::Alloc));
        let later = &rig.allocator.pictures(false)[0];
        let (mark, before) = later.events.split_last().expect("the mark");
        assert_eq!((mark.action, mark.size), (Action::Snapshot, 4 * MIB));
        assert_eq!(before, picture.events);
        assert_eq!(rig.allocator.pictures(false)[0].events, later.events, "a picture that leaves no mark");
        rig.finish();
    }
}

#[test]
fn device_that_comes_into_use_while_recording_records() {
    let options = SimOptions { capacity_bytes: 256 * MIB, devices: 2, ..SimOptions::default() };
    let mut rig = Rig::on("policy:native", options);
    rig.malloc(MIB, MAIN);
    rig.allocator.record_history(Some(&recording(100)), false).expect("nothing is broken");
    rig.malloc_on(MIB, DeviceId(1), MAIN).expect("there is memory");
    assert_eq!(rig.allocator.history(DeviceId(1)).len(), 2, "a segment and a block");
    rig.allocator.record_history(None, false).expect("nothing is broken");
    assert!(rig.allocator.history(DeviceId(1)).is_empty());
    rig.finish();
}

#[test]
fn only_what_the_program_holds_can_be_annotated() {
    let mut rig = Rig::new("policy:native");
    let address = rig.malloc(MIB, MAIN);
    rig.allocator.record_history(Some(&recording(100)), false).expect("nothing is broken");
    rig.allocator.annotate(address);
    rig.allocator.annotate(address.offset(512));
    assert_eq!(actions(&rig), [Action::Annotate]);
    rig.finish();
}

#[test]
fn each_private_pool_counts_what_it_has_reserved() {
    const POOLS: [PoolId; 2] = [PoolId(1, 0), PoolId(0, 2)];
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        let outside = rig.malloc(20 * MIB, MAIN);
        for (pool, size) in POOLS.into_iter().zip([20 * MIB, 40 * MIB]) {
            rig.begin_pool(pool, SIDE);
            let inside = rig.malloc(size, SIDE);
            rig.free(inside);
            rig.allocator.end_pool(DEVICE, pool);
        }
        let current = |rig: &Rig| {
            let pools = rig.allocator.private_reserved(DEVICE);
            pools.into_iter().map(|(pool, reserved)| (pool, reserved.all.current)).collect::<Vec<_>>()
        };
        assert_eq!(current(&rig), [(POOLS[0], 20 * MIB), (POOLS[1], 40 * MIB)]);
        rig.release_pool(POOLS[1]);
        rig.allocator.empty_cache().expect("everything can be returned");
        assert_eq!(current(&rig), [(POOLS[0], 20 * MIB)]);
        rig.allocator.reset_accumulated_stats(DEVICE);
        assert_eq!(rig.allocator.private_reserved(DEVICE)[0].1.all.allocated(), 0);
        rig.release_pool(POOLS[0]);
        rig.free(outside);
        rig.finish();
    }
}
