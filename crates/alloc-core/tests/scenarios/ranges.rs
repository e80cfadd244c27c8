//! Address ranges: how large they are, and when they go back.

use alloc_core::{
    driver::{Call, sim::SimOptions},
    error::AllocError,
    id::{PoolId, StreamHandle},
};

use crate::rig::{DEVICE, MAIN, MIB, Rig, SIDE};

const WITH_RANGES: [&str; 2] = ["policy:expandable", "policy:rallocator"];

/// A device so large that there are addresses for twelve ranges of it.
fn with_few_ranges(config: &str) -> Rig {
    Rig::on(config, SimOptions { capacity_bytes: 8 << 40, ..SimOptions::default() })
}

/// One of many streams.
fn stream(number: u64) -> StreamHandle {
    StreamHandle(0x1000 + number)
}

#[test]
fn every_byte_of_a_block_at_the_end_of_a_range_has_memory() {
    let mut rig = Rig::on("policy:expandable", SimOptions { capacity_bytes: 1024 * MIB, ..SimOptions::default() });
    // An eighth more than the device are 1152 MiB, which is no whole number of handles of 20 MiB.
    let first = rig.malloc(500 * MIB, MAIN);
    let _between = rig.malloc(20 * MIB, MAIN);
    rig.free(first);
    rig.allocator.empty_cache().expect("the first block's handles can be unmapped");
    let last = rig.malloc(630 * MIB, MAIN);
    assert_eq!(rig.gpu.physical_bytes(DEVICE).current, (20 + 640) * MIB);
    rig.write(MAIN, last);
    rig.finish();
}

#[test]
fn request_is_refused_where_no_handle_of_its_class_fits_on_the_device() {
    let mut rig = Rig::new("policy:expandable,large_segment_size_mb:350");
    let refused = rig.try_malloc(40 * MIB, MAIN);
    assert!(matches!(refused, Err(AllocError::OutOfMemory(_))), "{refused:?}");
    // Small requests have handles of their own size.
    rig.malloc(MIB, MAIN);
    rig.finish();
}

#[test]
fn ranges_that_are_emptied_for_a_request_leave_their_addresses_to_it() {
    for config in WITH_RANGES {
        let mut rig = with_few_ranges(config);
        for number in 0..30 {
            for size in [4 * MIB, MIB / 2] {
                let block = rig.malloc(size, stream(number));
                rig.write(stream(number), block);
                rig.free(block);
            }
        }
        rig.finish();
    }
}

#[test]
fn ranges_of_released_pools_leave_their_addresses_to_other_pools() {
    for config in WITH_RANGES {
        let mut rig = with_few_ranges(config);
        for number in 0..30 {
            let pool = PoolId(1 + number, 0);
            rig.begin_pool(pool, SIDE);
            let blocks = [4 * MIB, MIB / 2].map(|size| rig.malloc(size, SIDE));
            rig.allocator.end_pool(DEVICE, pool);
            for block in blocks {
                rig.free(block);
            }
            rig.release_pool(pool);
        }
        rig.finish();
    }
}

#[test]
fn emptied_range_is_kept_for_its_pool_where_addresses_are_left() {
    for config in ["policy:expandable", "policy:rallocator,move:off"] {
        let mut rig = Rig::new(config);
        let block = rig.malloc(200 * MIB, MAIN);
        rig.free(block);
        rig.begin_pool(PoolId(1, 0), SIDE);
        rig.malloc(200 * MIB, SIDE);
        rig.allocator.end_pool(DEVICE, PoolId(1, 0));
        assert_eq!(rig.stats().num_alloc_retries, 1, "cached memory was given back");
        assert_eq!(rig.gpu.call_count(Call::FreeRange), 0);
        rig.release_pool(PoolId(1, 0));
        rig.finish();
    }
}

#[test]
fn error_for_want_of_addresses_says_so() {
    for config in WITH_RANGES {
        let mut rig = with_few_ranges(config);
        let refused = (0..30).find_map(|number| rig.try_malloc(4 * MIB, stream(number)).err());
        let Some(AllocError::OutOfMemory(report)) = refused else { panic!("{refused:?}") };
        assert_eq!(report.addresses, Some(rig.gpu.reserved_address_bytes(DEVICE).current));
        assert!(report.to_string().contains("No addresses are left"), "{report}");
        // Where there is a range, a request fails for want of memory alone.
        rig.allocator.set_memory_limit(DEVICE, 64 * MIB).expect("the device is in use");
        let refused = rig.try_malloc(40 * MIB, stream(0));
        let Err(AllocError::OutOfMemory(report)) = refused else { panic!("{refused:?}") };
        assert_eq!(report.addresses, None);
        rig.finish();
    }
}
