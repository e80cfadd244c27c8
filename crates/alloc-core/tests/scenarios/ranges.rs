//! Address ranges: how large they are.

use alloc_core::{driver::sim::SimOptions, error::AllocError};

use crate::rig::{DEVICE, MAIN, MIB, Rig};

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
