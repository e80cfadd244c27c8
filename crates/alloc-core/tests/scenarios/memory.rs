//! Splitting, coalescing, segments, ranges and limits, on one stream.

use alloc_core::{
    allocator::FreeOutcome,
    driver::{Call, Status, sim::SimOptions},
    error::AllocError,
    id::DevicePtr,
};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

#[test]
fn cached_block_is_handed_out_again_without_a_driver_call() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let first = rig.malloc(4 * MIB, MAIN);
        rig.free(first);
        let calls = rig.gpu.calls();
        assert_eq!(rig.malloc(4 * MIB, MAIN), first);
        assert_eq!(rig.gpu.calls(), calls);
        rig.finish();
    }
}

#[test]
fn request_for_nothing_is_null_and_counts_nothing() {
    let mut rig = Rig::new("policy:native");
    assert_eq!(rig.allocator.malloc(0, DEVICE, MAIN, None), Ok(None));
    assert_eq!(rig.allocator.free(DevicePtr(0), DEVICE), FreeOutcome::Null);
    rig.malloc(1, MAIN);
    assert_eq!(rig.stats().allocation.all.current, 1);
    rig.finish();
}

#[test]
fn foreign_and_repeated_frees_are_told_apart_and_harm_nothing() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let address = rig.malloc(MIB, MAIN);
        assert_eq!(rig.allocator.free(DevicePtr(0xdead_0000), DEVICE), FreeOutcome::NotOurs);
        assert_eq!(rig.allocator.free(address.offset(512), DEVICE), FreeOutcome::NotOurs);
        rig.free(address);
        assert_eq!(rig.allocator.free(address, DEVICE), FreeOutcome::Repeated);
        assert_eq!(rig.stats().invalid_frees, 3);
        rig.finish();
    }
}

#[test]
fn small_requests_share_a_segment_and_coalesce_when_freed() {
    let mut rig = Rig::new("policy:native");
    let blocks: Vec<_> = (0..4).map(|_| rig.malloc(MIB / 2, MAIN)).collect();
    assert_eq!(rig.reserved(), 2 * MIB);
    assert_eq!(blocks[1].0 - blocks[0].0, MIB / 2);
    for index in [1, 3, 0, 2] {
        rig.free(blocks[index]);
    }
    assert_eq!(rig.malloc(MIB, MAIN), blocks[0]);
    assert_eq!(rig.reserved(), 2 * MIB);
    rig.finish();
}

#[test]
fn large_remainder_of_a_segment_stays_usable_and_a_small_one_stays_inside() {
    let mut rig = Rig::new("policy:native");
    rig.malloc(2 * MIB, MAIN);
    assert_eq!(rig.reserved(), 20 * MIB);
    let inactive = |rig: &Rig| {
        let stats = rig.stats();
        (stats.inactive_split.all.current, stats.inactive_split_bytes.all.current)
    };
    assert_eq!(inactive(&rig), (1, 18 * MIB));
    let whole = rig.malloc(17 * MIB + 512, MAIN);
    assert_eq!((rig.reserved(), inactive(&rig)), (20 * MIB, (0, 0)), "less than 1 MiB is not worth a block");
    rig.free(whole);
    assert_eq!(inactive(&rig), (1, 18 * MIB));
    rig.finish();
}

#[test]
fn range_grows_at_its_lowest_gap_and_takes_the_free_block_before_it() {
    let mut rig = Rig::new("policy:expandable");
    let first = rig.malloc(15 * MIB, MAIN);
    assert_eq!(rig.reserved(), 20 * MIB);
    let second = rig.malloc(20 * MIB, MAIN);
    assert_eq!(second, first.offset(15 * MIB), "the 5 MiB that are left and one more handle");
    assert_eq!(rig.reserved(), 40 * MIB);
    assert_eq!(rig.allocator.base_allocation(second), Some((first, 40 * MIB)));
    rig.finish();
}

#[test]
fn emptying_the_cache_unmaps_whole_handles_and_keeps_what_is_held() {
    let mut rig = Rig::new("policy:expandable");
    let low = rig.malloc(30 * MIB, MAIN);
    let high = rig.malloc(30 * MIB, MAIN);
    rig.write(MAIN, low);
    rig.free(low);
    rig.allocator.empty_cache().expect("idle memory can be returned");
    assert_eq!(rig.reserved(), 40 * MIB, "the handle that both share stays");
    rig.write(MAIN, high);
    let again = rig.malloc(20 * MIB, MAIN);
    assert_eq!(again, low, "the hole is the lowest gap");
    rig.finish();
}

#[test]
fn device_without_virtual_memory_falls_back_to_segments() {
    let options = SimOptions { virtual_memory: false, ..SimOptions::default() };
    let mut rig = Rig::on("policy:expandable", options);
    rig.malloc(4 * MIB, MAIN);
    assert_eq!(rig.stats().segment.all.current, 1);
    rig.finish();
}

#[test]
fn request_beyond_the_device_fails_and_the_next_one_works() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let Err(AllocError::OutOfMemory(report)) = rig.try_malloc(1 << 40, MAIN) else {
            panic!("1 TiB does not fit into 256 MiB");
        };
        assert_eq!((report.requested, report.total), (1 << 40, 256 * MIB));
        assert!(rig.try_malloc(u64::MAX, MAIN).is_err());
        assert_eq!(rig.stats().num_ooms, 2);
        rig.malloc(200 * MIB, MAIN);
        rig.finish();
    }
}

#[test]
fn cached_memory_of_other_streams_is_returned_before_a_request_fails() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let side = rig.malloc(200 * MIB, SIDE);
        rig.write(SIDE, side);
        rig.free(side);
        rig.malloc(200 * MIB, MAIN);
        let stats = rig.stats();
        let retries = u64::from(config != "policy:rallocator");
        assert_eq!((stats.num_alloc_retries, stats.num_ooms), (retries, 0), "moving is no retry");
        rig.finish();
    }
}

#[test]
fn new_handles_are_small_where_little_room_is_left_below_the_limit() {
    let handles_of = |capacity_bytes: u64| {
        let mut rig = Rig::on("policy:rallocator", SimOptions { capacity_bytes, ..SimOptions::default() });
        rig.malloc(140 * MIB, MAIN);
        let handles = rig.gpu.call_count(Call::CreateHandle);
        rig.finish();
        handles
    };
    assert_eq!(handles_of(1 << 30), 70, "of 2 MiB each");
    assert!(handles_of(64 << 30) <= 14, "a seventh of the request each, and then halves of what is missing");
}

#[test]
fn new_handles_are_small_near_the_limit_also_after_the_peaks_are_reset() {
    let mut rig = Rig::on("policy:rallocator", SimOptions { capacity_bytes: 4 << 30, ..SimOptions::default() });
    rig.malloc(3200 * MIB, MAIN);
    rig.free_all();
    rig.allocator.reset_peak_stats(DEVICE);
    let before = rig.gpu.call_count(Call::CreateHandle);
    rig.malloc(3340 * MIB, MAIN);
    assert_eq!(rig.gpu.call_count(Call::CreateHandle) - before, 70, "of 2 MiB each");
    rig.finish();
}

#[test]
fn new_handles_are_small_where_the_driver_refused_more_and_not_where_it_failed_otherwise() {
    for (call, handles) in [(Call::CreateHandle, 1 + 70), (Call::SetAccess, 10 + 10)] {
        let mut rig = Rig::on("policy:rallocator", SimOptions { capacity_bytes: 64 << 30, ..SimOptions::default() });
        rig.malloc(140 * MIB, MAIN);
        let before = rig.gpu.call_count(Call::CreateHandle);
        rig.gpu.fail_next(call, 0, Status::OutOfMemory);
        rig.malloc(140 * MIB, MAIN);
        assert_eq!(rig.gpu.call_count(Call::CreateHandle) - before, handles, "{call:?}");
        rig.finish();
    }
}

#[test]
fn fraction_limits_what_is_reserved() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.allocator.set_memory_fraction(DEVICE, 0.5).expect("a fraction");
        rig.malloc(100 * MIB, MAIN);
        let Err(AllocError::OutOfMemory(report)) = rig.try_malloc(100 * MIB, MAIN) else {
            panic!("200 MiB are more than half of 256 MiB");
        };
        assert_eq!(report.limit, Some(128 * MIB));
        assert!(rig.allocator.set_memory_fraction(DEVICE, 1.5).is_err());
        rig.finish();
    }
}

#[test]
fn oversize_segments_are_not_split_and_are_returned_first() {
    let mut rig = Rig::new("policy:native,max_split_size_mb:64");
    let large = rig.malloc(100 * MIB, MAIN);
    rig.free(large);
    rig.malloc(20 * MIB, MAIN);
    assert_eq!(rig.reserved(), 120 * MIB, "20 MiB are not cut from the oversize block");
    rig.malloc(200 * MIB, MAIN);
    assert_eq!(rig.reserved(), 220 * MIB, "the oversize block made room");
    assert_eq!(rig.stats().oversize_segments.current, 1);
    rig.finish();
}

#[test]
fn collection_returns_what_went_unused_longest() {
    let mut rig = Rig::new("policy:native,garbage_collection_threshold:0.5");
    rig.malloc(2 * MIB, MAIN);
    let old = rig.malloc(60 * MIB, MAIN);
    let young = rig.malloc(70 * MIB, MAIN);
    rig.free(old);
    for _ in 0..10 {
        let again = rig.malloc(2 * MIB, MAIN);
        rig.free(again);
    }
    rig.free(young);
    rig.malloc(80 * MIB, MAIN);
    assert!(rig.allocator.snapshot().iter().all(|segment| segment.address != old));
    assert!(rig.allocator.snapshot().iter().any(|segment| segment.address == young));
    rig.finish();
}

#[test]
fn pinned_memory_stays_on_the_device_after_its_free() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let pinned = rig.malloc(20 * MIB, MAIN);
        assert!(rig.allocator.pin(pinned));
        rig.free(pinned);
        rig.allocator.empty_cache().expect("the rest can be returned");
        assert_eq!(rig.reserved(), 20 * MIB);
        assert!(rig.allocator.unpin(pinned) && !rig.allocator.unpin(pinned));
        rig.finish();
    }
}

#[test]
fn callback_runs_before_a_request_fails_and_may_save_it() {
    use std::sync::{Arc, Mutex};
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let hoard = rig.malloc(200 * MIB, MAIN);
        let asked = Arc::new(Mutex::new(0));
        let count = Arc::clone(&asked);
        rig.allocator.set_oom_callback(Some(Arc::new(move || {
            *count.lock().expect("one thread") += 1;
            false
        })));
        assert!(rig.try_malloc(100 * MIB, MAIN).is_err());
        assert_eq!(*asked.lock().expect("one thread"), 1);
        rig.free(hoard);
        rig.malloc(100 * MIB, MAIN);
        rig.finish();
    }
}

#[test]
fn largest_block_to_be_had_is_the_largest_cached_or_what_the_limit_leaves_of_the_free_memory() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        assert_eq!(rig.allocator.largest_available(DEVICE), 256 * MIB);
        let address = rig.malloc(200 * MIB, MAIN);
        assert_eq!(rig.allocator.largest_available(DEVICE), 56 * MIB);
        rig.allocator.set_memory_limit(DEVICE, 220 * MIB).expect("the device is in use");
        assert_eq!(rig.allocator.largest_available(DEVICE), 20 * MIB);
        rig.free(address);
        assert_eq!(rig.allocator.largest_available(DEVICE), 200 * MIB);
        rig.finish();
    }
}

#[test]
fn each_time_that_memory_is_given_back_counts_as_one_wait_for_all_streams() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let address = rig.malloc(20 * MIB, MAIN);
        assert_eq!(rig.stats().num_sync_all_streams, 0);
        rig.free(address);
        rig.allocator.empty_cache().expect("everything can be returned");
        rig.allocator.empty_cache().expect("there is nothing to return");
        assert_eq!(rig.stats().num_sync_all_streams, 2);
        rig.try_malloc(1 << 30, MAIN).expect_err("the device is smaller");
        // Our own policy does not wait where no wait would help.
        let waits = if config == "policy:rallocator" { 2 } else { 3 };
        assert_eq!(rig.stats().num_sync_all_streams, waits);
        rig.finish();
    }
}
