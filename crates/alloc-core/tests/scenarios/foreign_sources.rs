//! Sources of segments as what they are: the program's own code, which may do anything meanwhile.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, Weak},
};

use alloc_core::{
    allocator::{Allocator, FreeOutcome, Tracked},
    driver::sim::{Mishap, SimDriver, SimSource},
    history::{Action, Recording},
    id::{DeviceId, DevicePtr, StreamHandle},
    source::{SegmentSource, SourceFailed},
};

use crate::{
    rig::{DEVICE, MAIN, MIB, POLICIES, Rig},
    sources::{POOL, finish, release, segment_events, sourced},
};

/// A source that uses the allocator itself, as the program's own code may.
struct Meddler {
    allocator: Mutex<Weak<Allocator<SimDriver>>>,
    source: SimSource,
    held: Mutex<Vec<DevicePtr>>,
}

impl Meddler {
    /// Would wait for ever if a lock of the allocator were held.
    fn meddle(&self, device: DeviceId, stream: StreamHandle) {
        let allocator = self.allocator.lock().expect("no panic").upgrade().expect("it is being called");
        let block = allocator.malloc(5 * MIB, device, stream, None).expect("there is memory").expect("not for nothing");
        self.held.lock().expect("no panic").push(block);
        allocator.check().expect("consistent");
        allocator.empty_cache().expect("nothing fails");
    }
}

impl SegmentSource for Meddler {
    fn obtain(&self, device: DeviceId, size: u64, stream: StreamHandle) -> Result<Option<DevicePtr>, SourceFailed> {
        self.meddle(device, stream);
        self.source.obtain(device, size, stream)
    }

    fn give_back(
        &self,
        device: DeviceId,
        address: DevicePtr,
        size: u64,
        stream: StreamHandle,
    ) -> Result<(), SourceFailed> {
        self.meddle(device, stream);
        let result = self.source.give_back(device, address, size, stream);
        // The driver may give the same addresses out again before the allocator has heard of the source's answer.
        self.meddle(device, stream);
        result
    }
}

impl Drop for Meddler {
    fn drop(&mut self) {
        let allocator = self.allocator.lock().expect("no panic").upgrade().expect("the test holds it");
        for block in self.held.lock().expect("no panic").drain(..) {
            assert_eq!(allocator.free(block, DEVICE), FreeOutcome::Freed);
        }
    }
}

#[test]
fn source_is_called_and_dropped_under_no_lock() {
    for config in POLICIES {
        let rig = Rig::new(config);
        let source = SimSource::new(&rig.gpu);
        let (allocator, held) = (Mutex::new(Arc::downgrade(&rig.allocator)), Mutex::default());
        let meddler = Meddler { allocator, source: source.clone(), held };
        rig.allocator.record_history(Some(&Recording::new(1000)), false).expect("nothing is broken");
        rig.allocator.create_pool_from(DEVICE, POOL, Arc::new(meddler)).expect("there is no such pool yet");
        let block = rig.allocator.malloc(5 * MIB, DEVICE, MAIN, Some(POOL)).expect("it may").expect("not for nothing");
        rig.allocator.check().expect("consistent");
        rig.allocator.free(block, DEVICE);
        rig.allocator.release_pool(DEVICE, POOL);
        rig.allocator.empty_cache().expect("all goes back");
        rig.allocator.check().expect("consistent");
        assert_eq!(source.counts().taken_back, 1, "{config}");
        let mut there = BTreeSet::new();
        for (action, address) in segment_events(&rig) {
            let is_right = if action == Action::SegmentAlloc { there.insert(address) } else { there.remove(&address) };
            assert!(is_right, "{action:?} of {address:?}, where {there:?} are");
        }
        finish(rig, &source);
    }
}

/// A source during whose answer the program asks for other memory.
struct Slow {
    allocator: Weak<Allocator<SimDriver>>,
    source: SimSource,
    /// What was asked for meanwhile, in bytes, and whether it was there.
    meanwhile: Mutex<Vec<(u64, bool)>>,
}

impl SegmentSource for Slow {
    fn obtain(&self, device: DeviceId, size: u64, stream: StreamHandle) -> Result<Option<DevicePtr>, SourceFailed> {
        let allocator = self.allocator.upgrade().expect("it is being called");
        for (size, is_there) in self.meanwhile.lock().expect("no panic").iter_mut() {
            let block = allocator.malloc(*size, device, stream, None).ok().flatten();
            *is_there = block.is_some_and(|block| allocator.free(block, device) == FreeOutcome::Freed);
        }
        self.source.obtain(device, size, stream)
    }

    fn give_back(
        &self,
        device: DeviceId,
        address: DevicePtr,
        size: u64,
        stream: StreamHandle,
    ) -> Result<(), SourceFailed> {
        self.source.give_back(device, address, size, stream)
    }
}

#[test]
fn what_a_source_is_being_asked_for_is_no_longer_there_for_others() {
    for config in POLICIES {
        let rig = Rig::new(config);
        let source = SimSource::new(&rig.gpu);
        let meanwhile = Mutex::new(vec![(50 * MIB, true), (20 * MIB, false)]);
        let slow = Arc::new(Slow { allocator: Arc::downgrade(&rig.allocator), source: source.clone(), meanwhile });
        rig.allocator.create_pool_from(DEVICE, POOL, slow.clone()).expect("there is no such pool yet");
        rig.allocator.set_memory_limit(DEVICE, 100 * MIB).expect("the device is in use");
        let block = rig.allocator.malloc(60 * MIB, DEVICE, MAIN, Some(POOL)).expect("it may").expect("not for nothing");
        rig.allocator.check().expect("consistent");
        assert_eq!(*slow.meanwhile.lock().expect("no panic"), [(50 * MIB, false), (20 * MIB, true)], "{config}");
        rig.allocator.free(block, DEVICE);
        rig.allocator.release_pool(DEVICE, POOL);
        drop(slow);
        finish(rig, &source);
    }
}

#[test]
fn tracker_hears_of_a_sources_segments() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        let told = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&told);
        let tracker = move |event: &Tracked| {
            noted.lock().expect("no panic").push((event.action, event.address, event.size, event.pool));
        };
        rig.allocator.add_tracker(Arc::new(tracker)).expect("no device is broken");
        let block = rig.malloc(30 * MIB, MAIN);
        rig.free(block);
        release(&rig);
        source.fail_next(Mishap::DoesNotTakeBack);
        rig.allocator.empty_cache().expect_err("the source failed");
        rig.allocator.empty_cache().expect("now it takes it");
        let expected = [Action::SegmentAlloc, Action::SegmentFree, Action::SegmentAlloc, Action::SegmentFree];
        let expected: Vec<_> = expected.into_iter().map(|action| (action, block, 30 * MIB, POOL)).collect();
        assert_eq!(*told.lock().expect("no panic"), expected, "{config}");
        finish(rig, &source);
    }
}

#[test]
fn threads_that_ask_at_once_stay_within_the_limit() {
    for config in POLICIES {
        let rig = Rig::new(config);
        let source = SimSource::new(&rig.gpu);
        rig.allocator.create_pool_from(DEVICE, POOL, Arc::new(source.clone())).expect("there is no such pool yet");
        rig.allocator.set_memory_limit(DEVICE, 100 * MIB).expect("the device is in use");
        let served: Vec<DevicePtr> = std::thread::scope(|scope| {
            let ask = || rig.allocator.malloc(12 * MIB, DEVICE, MAIN, Some(POOL)).ok().flatten();
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(ask)).collect();
            threads.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
        });
        rig.allocator.check().expect("consistent");
        let reserved = rig.reserved();
        assert!(!served.is_empty() && reserved <= 100 * MIB, "{config}: {} served, {reserved}", served.len());
        assert_eq!(source.segments(DEVICE).into_values().sum::<u64>(), reserved);
        for block in served {
            assert_eq!(rig.allocator.free(block, DEVICE), FreeOutcome::Freed);
        }
        rig.allocator.release_pool(DEVICE, POOL);
        finish(rig, &source);
    }
}

#[test]
fn source_lives_as_long_as_its_last_segment_and_no_longer() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let source = SimSource::new(&rig.gpu);
        let given = Arc::new(source.clone());
        let alive: Weak<SimSource> = Arc::downgrade(&given);
        rig.allocator.create_pool_from(DEVICE, POOL, given).expect("there is no such pool yet");
        rig.begin_pool(POOL, MAIN);
        let block = rig.malloc(3 * MIB, MAIN);
        release(&rig);
        rig.allocator.empty_cache().expect("nothing fails");
        assert!(alive.upgrade().is_some(), "{config}: a tensor lives");
        rig.free(block);
        assert!(alive.upgrade().is_some(), "{config}: its segment is cached");
        rig.allocator.empty_cache().expect("it goes back");
        assert!(alive.upgrade().is_none(), "{config}");
        // Without any segment it is gone with its pool.
        let unused = Arc::new(source.clone());
        let alive = Arc::downgrade(&unused);
        rig.allocator.create_pool_from(DEVICE, POOL, unused).expect("the name is free");
        rig.allocator.release_pool(DEVICE, POOL);
        assert!(alive.upgrade().is_none(), "{config}");
        finish(rig, &source);
    }
}
