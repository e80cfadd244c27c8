//! Idle handles that move to where memory is needed, on one stream.

use alloc_core::{
    driver::{Call, DriverError, Status},
    error::AllocError,
    id::{DevicePtr, StreamHandle},
};

use crate::rig::{DEVICE, MAIN, MIB, Rig};

/// Longer than any test takes on the simulated clock.
const FOREVER_US: u64 = 1_000_000_000;

/// `count` idle blocks of 2 MiB, none touching another, each used last by work on `stream` that is not over.
fn scattered_idle_blocks(rig: &mut Rig, count: usize, stream: StreamHandle) {
    let blocks: Vec<DevicePtr> = (0..2 * count).map(|_| rig.malloc(2 * MIB, stream)).collect();
    for block in blocks.iter().step_by(2) {
        rig.gpu.launch(stream, &[], &[*block], FOREVER_US).expect("no race");
        rig.free(*block);
    }
}

#[test]
fn scattered_free_blocks_serve_a_larger_request_without_new_memory_or_a_host_wait() {
    let mut rig = Rig::new("policy:rallocator");
    scattered_idle_blocks(&mut rig, 10, MAIN);
    let block = rig.malloc(20 * MIB, MAIN);
    rig.write(MAIN, block);
    assert_eq!(rig.reserved(), 40 * MIB);
    assert_eq!(rig.stats().handles_moved, 10);
    assert_eq!((rig.stats().host_waits, rig.gpu.host_waits(), rig.stats().gpu_waits), (0, 0, 0));
    rig.finish();
}

#[test]
fn free_block_that_is_too_small_is_part_of_the_gap_that_is_filled() {
    let mut rig = Rig::new("policy:rallocator");
    let elsewhere = rig.malloc(8 * MIB, MAIN);
    let between = rig.malloc(2 * MIB, MAIN);
    let too_small = rig.malloc(12 * MIB, MAIN);
    for block in [elsewhere, too_small] {
        rig.write(MAIN, block);
        rig.free(block);
    }
    let larger = rig.malloc(20 * MIB, MAIN);
    assert_eq!(larger, too_small, "the block at the end of the memory grew");
    assert_eq!(rig.reserved(), 22 * MIB);
    assert_eq!(rig.stats().handles_moved, 4, "only the missing 8 MiB moved");
    rig.write(MAIN, larger);
    rig.write(MAIN, between);
    rig.finish();
}

#[test]
fn old_mappings_are_removed_together_and_only_after_their_last_use() {
    let mut rig = Rig::new("policy:rallocator");
    scattered_idle_blocks(&mut rig, 40, MAIN);
    rig.malloc(80 * MIB, MAIN);
    assert_eq!(rig.stats().handles_moved, 40);
    rig.malloc(2 * MIB, MAIN);
    assert_eq!(rig.gpu.call_count(Call::Unmap), 0, "the work on the old addresses goes on");
    rig.gpu.complete(None).expect("no fault");
    rig.malloc(2 * MIB, MAIN);
    assert_eq!(rig.gpu.call_count(Call::Unmap), 40, "one call for each run of addresses");
    assert_eq!(rig.gpu.mapped_bytes(DEVICE).current, rig.reserved());
    rig.finish();
}

#[test]
fn few_old_mappings_wait_for_company_and_cost_no_memory() {
    let mut rig = Rig::new("policy:rallocator");
    scattered_idle_blocks(&mut rig, 10, MAIN);
    rig.malloc(20 * MIB, MAIN);
    rig.gpu.complete(None).expect("no fault");
    rig.malloc(2 * MIB, MAIN);
    assert_eq!(rig.gpu.call_count(Call::Unmap), 0);
    assert_eq!(rig.gpu.physical_bytes(DEVICE).current, rig.reserved());
    rig.allocator.empty_cache().expect("they can be unmapped");
    assert_eq!(rig.gpu.call_count(Call::Unmap), 10);
    rig.finish();
}

#[test]
fn pinned_memory_never_moves() {
    let mut rig = Rig::new("policy:rallocator");
    let pinned = rig.malloc(20 * MIB, MAIN);
    let between = rig.malloc(2 * MIB, MAIN);
    assert!(rig.allocator.pin(pinned));
    rig.free(pinned);
    rig.malloc(24 * MIB, MAIN);
    assert_eq!((rig.reserved(), rig.stats().handles_moved), (46 * MIB, 0));
    assert_eq!(rig.malloc(20 * MIB, MAIN), pinned, "its own pool still gets it");
    rig.free(pinned);
    assert!(rig.allocator.unpin(pinned));
    rig.malloc(28 * MIB, MAIN);
    assert_eq!(rig.reserved(), 54 * MIB, "unpinned, it moves");
    rig.write(MAIN, between);
    rig.finish();
}

#[test]
fn every_call_of_a_move_fails_once_and_nothing_is_lost() {
    for (call, nth, status) in [
        (Call::Map, 0, Status::OutOfMemory),
        (Call::Map, 0, Status::Unknown),
        (Call::Map, 5, Status::Unknown),
        (Call::Map, 9, Status::OutOfMemory),
        (Call::Map, 9, Status::Unknown),
        (Call::SetAccess, 0, Status::OutOfMemory),
        (Call::SetAccess, 0, Status::Unknown),
        (Call::SetAccess, 1, Status::Unknown),
    ] {
        let mut rig = Rig::new("policy:rallocator");
        scattered_idle_blocks(&mut rig, 10, MAIN);
        rig.gpu.fail_next(call, nth, status);
        let answers = [rig.try_malloc(12 * MIB, MAIN), rig.try_malloc(8 * MIB, MAIN)];
        assert_eq!(rig.gpu.pending_faults(), 0, "{call:?} was not called {nth} times");
        let errors: Vec<&AllocError> = answers.iter().filter_map(|answer| answer.as_ref().err()).collect();
        // Lack of memory is survived by a later rung; what is no lack of memory is reported as what it is.
        let expected = AllocError::Driver(DriverError { call, status });
        assert_eq!(errors, if status == Status::OutOfMemory { vec![] } else { vec![&expected] });
        for block in answers.iter().flatten() {
            rig.write(MAIN, *block);
        }
        let again = rig.malloc(20 * MIB, MAIN);
        rig.write(MAIN, again);
        rig.finish();
    }
}

#[test]
fn old_mapping_that_could_not_be_removed_is_removed_later() {
    for after in [0, 1, 39] {
        let mut rig = Rig::new("policy:rallocator");
        scattered_idle_blocks(&mut rig, 40, MAIN);
        rig.malloc(80 * MIB, MAIN);
        rig.gpu.complete(None).expect("no fault");
        rig.gpu.fail_next(Call::Unmap, after, Status::Unknown);
        let next = rig.malloc(2 * MIB, MAIN);
        rig.write(MAIN, next);
        assert_eq!(rig.gpu.pending_faults(), 0);
        assert_eq!(rig.gpu.mapped_bytes(DEVICE).current, rig.reserved() + 2 * MIB);
        rig.finish();
    }
}

#[test]
fn memory_stays_at_its_address_where_moving_is_off() {
    for config in ["move:off", "move:contiguous"] {
        let mut rig = Rig::new(config);
        scattered_idle_blocks(&mut rig, 10, MAIN);
        let block = rig.malloc(20 * MIB, MAIN);
        rig.write(MAIN, block);
        assert_eq!((rig.reserved(), rig.stats().handles_moved), (60 * MIB, 0), "{config}");
        // It still goes back to the driver when there is no more.
        let large = rig.malloc(210 * MIB, MAIN);
        rig.write(MAIN, large);
        assert_eq!((rig.reserved(), rig.stats().handles_moved), (250 * MIB, 0), "{config}");
        rig.finish();
    }
}

#[test]
fn every_block_lies_in_one_handle_where_memory_is_contiguous() {
    let mut rig = Rig::new("move:contiguous");
    let mut held: Vec<DevicePtr> = Vec::new();
    for round in 0..60_u64 {
        let size = [100, 3 * MIB, MIB, 7 * MIB + 1, 600, 2 * MIB][(round % 6) as usize] + round;
        held.push(rig.malloc(size, MAIN));
        if round % 3 == 2 {
            let address = held.swap_remove((round as usize * 7) % held.len());
            rig.write(MAIN, address);
            rig.free(address);
        }
        // A run of memory without a hole is one segment of the picture.
        let handles = rig.gpu.call_count(Call::CreateHandle) - rig.gpu.call_count(Call::ReleaseHandle);
        assert_eq!(rig.allocator.snapshot().len() as u64, handles);
    }
    assert!(rig.gpu.call_count(Call::CreateHandle) < 45, "handles serve again");
    rig.finish();
}
