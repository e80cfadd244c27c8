//! Idle handles that move to where memory is needed, on one stream.

use alloc_core::{
    driver::{Call, DriverError, Status, sim::SimOptions},
    error::AllocError,
    id::{DevicePtr, StreamHandle},
};

use crate::rig::{DEVICE, MAIN, MIB, Rig, SIDE};

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
fn nothing_moves_where_a_little_growth_serves() {
    for (held, moved) in [(900, 0), (400, 2)] {
        let options = SimOptions { capacity_bytes: 1 << 30, ..SimOptions::default() };
        let mut rig = Rig::on("policy:rallocator", options);
        rig.malloc(held * MIB, MAIN);
        scattered_idle_blocks(&mut rig, 2, MAIN);
        rig.malloc(4 * MIB, MAIN);
        assert_eq!(rig.stats().handles_moved, moved, "{held} MiB and 8 more are held, 4 are idle");
        rig.finish();
    }
}

#[test]
fn new_handles_are_half_as_large_while_much_is_idle_and_cannot_move() {
    let options = SimOptions { capacity_bytes: 64 << 30, ..SimOptions::default() };
    let mut rig = Rig::on("policy:rallocator", options);
    let handles_for = |rig: &mut Rig, size| {
        let before = rig.gpu.call_count(Call::CreateHandle);
        let block = rig.malloc(size, MAIN);
        (block, rig.gpu.call_count(Call::CreateHandle) - before)
    };
    let (whole, few) = handles_for(&mut rig, 224 * MIB);
    rig.free(whole);
    // Each of its handles of 32 MiB is used in part.
    let parts: Vec<DevicePtr> = (0..14).map(|_| rig.malloc(16 * MIB, MAIN)).collect();
    assert_eq!(rig.reserved(), 224 * MIB);
    for part in parts.iter().step_by(2) {
        rig.free(*part);
    }
    let (_, many) = handles_for(&mut rig, 224 * MIB);
    assert_eq!((rig.stats().handles_moved, rig.reserved()), (0, 432 * MIB), "only the free block at the end helps");
    assert_eq!((few, many), (11, 16), "of 32 MiB for 224, and of 16 for 208");
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
fn too_many_old_mappings_are_removed_the_oldest_first_and_only_after_their_last_use() {
    for is_over in [false, true] {
        let mut rig = Rig::with_stale_mappings("policy:rallocator", 30);
        scattered_idle_blocks(&mut rig, 40, MAIN);
        rig.malloc(80 * MIB, MAIN);
        assert_eq!(rig.stats().handles_moved, 40);
        if is_over {
            rig.gpu.complete(None).expect("no fault");
        }
        rig.malloc(512, MAIN);
        let unmapped = if is_over { 18 } else { 0 };
        assert_eq!(rig.gpu.call_count(Call::Unmap), unmapped, "down to three quarters of 30, if the work is over");
        assert_eq!(rig.gpu.mapped_bytes(DEVICE).current, rig.reserved() + (40 - unmapped) * 2 * MIB);
        rig.finish();
    }
}

#[test]
fn old_mappings_cost_no_memory_and_go_when_the_cache_is_emptied() {
    let mut rig = Rig::new("policy:rallocator");
    scattered_idle_blocks(&mut rig, 40, MAIN);
    rig.malloc(80 * MIB, MAIN);
    rig.gpu.complete(None).expect("no fault");
    assert_eq!(rig.gpu.call_count(Call::Unmap), 0);
    assert_eq!(rig.gpu.physical_bytes(DEVICE).current, rig.reserved());
    rig.allocator.empty_cache().expect("they can be unmapped");
    assert_eq!(rig.gpu.call_count(Call::Unmap), 40, "one call for each run of addresses");
    assert_eq!(rig.gpu.mapped_bytes(DEVICE).current, rig.reserved());
    rig.finish();
}

#[test]
fn streams_that_take_turns_move_memory_to_and_fro_without_a_driver_call() {
    let mut rig = Rig::new("policy:rallocator");
    let turn = |rig: &mut Rig, stream| {
        let blocks: Vec<DevicePtr> = [60 * MIB, 7 * MIB, 33 * MIB].map(|size| rig.malloc(size, stream)).into();
        for block in blocks {
            rig.write(stream, block);
            rig.free(block);
        }
        rig.gpu.complete(None).expect("no fault");
        (rig.gpu.call_count(Call::Map), rig.gpu.call_count(Call::Unmap), rig.stats().handles_moved)
    };
    let streams = [MAIN, SIDE, StreamHandle(0x20)];
    let first: Vec<_> = streams.map(|stream| turn(&mut rig, stream)).into();
    for _ in 0..5 {
        for stream in streams {
            let (maps, unmaps, _) = turn(&mut rig, stream);
            assert_eq!((maps, unmaps), (first[2].0, 0), "only the first turn of each stream maps anything");
        }
    }
    assert!(rig.stats().handles_moved > 5 * first[2].2, "the memory does move");
    assert_eq!(rig.reserved(), 100 * MIB);
    rig.finish();
}

#[test]
fn memory_that_comes_back_is_ordered_after_its_use_elsewhere() {
    let mut rig = Rig::new("policy:rallocator");
    for _ in 0..4 {
        for stream in [MAIN, SIDE] {
            let block = rig.malloc(40 * MIB, stream);
            rig.gpu.launch(stream, &[], &[block], 1000).expect("no race");
            rig.free(block);
        }
    }
    assert_eq!(rig.reserved(), 40 * MIB);
    assert_eq!(rig.stats().gpu_waits, 7, "each turn but the first waits for the one before on the GPU");
    rig.finish();
}

#[test]
fn addresses_of_memory_that_cannot_come_back_serve_other_memory() {
    let mut rig = Rig::new("policy:rallocator");
    let (first, between) = (rig.malloc(20 * MIB, MAIN), rig.malloc(20 * MIB, MAIN));
    rig.free(first);
    let elsewhere = rig.malloc(20 * MIB, SIDE);
    assert_eq!(rig.stats().handles_moved, rig.gpu.call_count(Call::CreateHandle) / 2, "the first block's memory moved");
    rig.gpu.complete(None).expect("no fault");
    let next = rig.malloc(20 * MIB, MAIN);
    assert_eq!(next, first, "no other hole is as narrow");
    assert!(rig.gpu.call_count(Call::Unmap) > 0);
    for (stream, block) in [(MAIN, next), (MAIN, between), (SIDE, elsewhere)] {
        rig.write(stream, block);
    }
    rig.finish();
}

#[test]
fn gap_never_reaches_from_one_address_range_into_the_next() {
    let mut rig = Rig::new("policy:rallocator");
    scattered_idle_blocks(&mut rig, 64, MAIN);
    assert_eq!(rig.reserved(), 256 * MIB, "the range is full but for its end, which is narrower than the request");
    let block = rig.malloc(66 * MIB, MAIN);
    rig.write(MAIN, block);
    assert_eq!(rig.gpu.call_count(Call::ReserveRange), 2);
    assert_eq!(rig.reserved(), 256 * MIB);
    rig.finish();
}

#[test]
fn handle_with_two_old_addresses_comes_back_to_one_of_them() {
    let mut rig = Rig::new("policy:rallocator");
    let [first, between, second, after, end] = [2, 2, 2, 4, 2].map(|mib| rig.malloc(mib * MIB, MAIN));
    rig.free(first);
    let of_first = rig.malloc(2 * MIB, SIDE);
    rig.free(second);
    let of_second = rig.malloc(2 * MIB, SIDE);
    // The first block's handle goes to the second one's address …
    rig.free(of_first);
    rig.free(after);
    rig.gpu.complete(None).expect("no fault");
    let wide = rig.malloc(6 * MIB, MAIN);
    assert_eq!(wide, second);
    // … and away again, so that one gap has both addresses.
    rig.free(wide);
    let away = rig.malloc(6 * MIB, SIDE);
    rig.free(away);
    rig.free(between);
    rig.gpu.complete(None).expect("no fault");
    let wider = rig.malloc(10 * MIB, MAIN);
    for (stream, block) in [(MAIN, wider), (MAIN, end), (SIDE, of_second)] {
        rig.write(stream, block);
    }
    rig.finish();
}

#[test]
fn wait_that_fails_before_memory_comes_back_leaves_it_where_it_was() {
    let mut rig = Rig::new("policy:rallocator");
    for stream in [MAIN, SIDE] {
        let block = rig.malloc(40 * MIB, stream);
        rig.gpu.launch(stream, &[], &[block], FOREVER_US).expect("no race");
        rig.free(block);
    }
    let maps = rig.gpu.call_count(Call::Map);
    rig.gpu.fail_next(Call::WaitEvent, 0, Status::Unknown);
    let grown = rig.malloc(40 * MIB, MAIN);
    rig.write(MAIN, grown);
    assert_eq!(rig.gpu.pending_faults(), 0);
    assert_eq!(rig.reserved(), 80 * MIB, "without the wait the alternative is to grow");
    let maps_of_growth = rig.gpu.call_count(Call::Map) - maps;
    rig.free(grown);
    let again = rig.malloc(40 * MIB, SIDE);
    rig.write(SIDE, again);
    assert_eq!(rig.gpu.call_count(Call::Map) - maps, maps_of_growth, "its memory is still its own");
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
    for after in [0, 1, 17] {
        let mut rig = Rig::with_stale_mappings("policy:rallocator", 30);
        scattered_idle_blocks(&mut rig, 40, MAIN);
        rig.malloc(80 * MIB, MAIN);
        rig.gpu.complete(None).expect("no fault");
        rig.gpu.fail_next(Call::Unmap, after, Status::Unknown);
        let next = rig.malloc(512, MAIN);
        rig.write(MAIN, next);
        assert_eq!(rig.gpu.pending_faults(), 0);
        assert_eq!(rig.gpu.mapped_bytes(DEVICE).current, rig.reserved() + 23 * 2 * MIB);
        rig.finish();
    }
}

#[test]
fn address_in_the_way_that_cannot_be_unmapped_is_left_and_the_request_is_served() {
    let mut rig = Rig::new("policy:rallocator");
    let (first, between) = (rig.malloc(20 * MIB, MAIN), rig.malloc(20 * MIB, MAIN));
    rig.free(first);
    let elsewhere = rig.malloc(20 * MIB, SIDE);
    rig.gpu.complete(None).expect("no fault");
    rig.gpu.fail_next(Call::Unmap, 0, Status::Unknown);
    let next = rig.malloc(20 * MIB, MAIN);
    assert_eq!(rig.gpu.pending_faults(), 0);
    for (stream, block) in [(MAIN, next), (MAIN, between), (SIDE, elsewhere)] {
        rig.write(stream, block);
    }
    rig.finish();
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
