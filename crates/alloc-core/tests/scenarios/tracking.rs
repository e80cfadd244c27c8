//! Trackers, which are told of memory after it came and before it goes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use alloc_core::{
    allocator::Tracked,
    driver::{Call, Status},
    history::Action,
    id::PoolId,
};

use crate::rig::{MAIN, MIB, POLICIES, Rig, SIDE};

/// What a tracker has been told is there: address and size.
#[derive(Default)]
struct Registered(Mutex<BTreeMap<u64, u64>>);

impl Registered {
    fn note(&self, event: &Tracked) {
        let mut pieces = self.0.lock().expect("no test panics in here");
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => {
                assert_eq!(pieces.insert(event.address.0, event.size), None, "it came twice");
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                // What came in pieces may go as one.
                let end = event.address.0 + event.size;
                let gone: Vec<u64> = pieces.range(event.address.0..end).map(|(address, _)| *address).collect();
                let sizes: u64 = gone.iter().filter_map(|address| pieces.remove(address)).sum();
                assert!(sizes >= event.size, "only what came goes");
                if sizes > event.size {
                    pieces.insert(end, sizes - event.size);
                }
            }
            other => panic!("told of {other:?}"),
        }
    }

    fn bytes(&self) -> u64 {
        self.0.lock().expect("no test panics in here").values().sum()
    }
}

fn tracked(config: &str) -> (Rig, Arc<Registered>) {
    let rig = Rig::new(config);
    let registered = Arc::new(Registered::default());
    let noted = registered.clone();
    // A tracker may ask the allocator: it is called under no lock.
    let allocator = Arc::downgrade(&rig.allocator);
    let tracker = Arc::new(move |event: &Tracked| {
        noted.note(event);
        allocator.upgrade().expect("it is being called").check().expect("consistent");
    });
    rig.allocator.add_tracker(tracker).expect("no device is broken");
    (rig, registered)
}

#[test]
fn tracker_knows_what_is_reserved_and_nothing_moves() {
    for config in POLICIES {
        let (mut rig, registered) = tracked(config);
        let mut held = Vec::new();
        for step in 0..30_u64 {
            let stream = if step % 3 == 0 { SIDE } else { MAIN };
            held.push(rig.malloc((1 + step % 7) * MIB, stream));
            if step % 2 == 1 {
                rig.free(held.remove((step as usize * 5) % held.len()));
            }
            assert_eq!(registered.bytes(), rig.reserved(), "{config}, step {step}");
        }
        rig.gpu.complete(None).expect("no fault");
        rig.allocator.empty_cache().expect("what is idle can go back");
        assert_eq!(registered.bytes(), rig.reserved());
        assert_eq!(rig.stats().handles_moved, 0);
        rig.finish();
        assert_eq!(registered.bytes(), 0);
    }
}

#[test]
fn tracker_is_told_again_of_what_the_driver_did_not_take_back() {
    for (config, call) in [("policy:native", Call::Free), ("policy:rallocator", Call::Unmap)] {
        let (mut rig, registered) = tracked(config);
        let block = rig.malloc(30 * MIB, MAIN);
        rig.free(block);
        rig.gpu.fail_next(call, 0, Status::Unknown);
        assert!(rig.allocator.empty_cache().is_err() || rig.reserved() == 0);
        assert_eq!(registered.bytes(), rig.reserved(), "{config}");
        rig.finish();
        assert_eq!(registered.bytes(), 0);
    }
}

#[test]
fn tracker_hears_of_private_pools_too() {
    for config in POLICIES {
        let (mut rig, registered) = tracked(config);
        rig.begin_pool(PoolId(0, 3), MAIN);
        let block = rig.malloc(3 * MIB, MAIN);
        rig.allocator.end_pool(crate::rig::DEVICE, PoolId(0, 3));
        assert_eq!(registered.bytes(), rig.reserved());
        rig.free(block);
        rig.release_pool(PoolId(0, 3));
        rig.allocator.empty_pool(PoolId(0, 3)).expect("it can go back");
        assert_eq!((registered.bytes(), rig.reserved()), (0, 0));
        rig.finish();
    }
}
