//! Private pools whose memory another library registers: it stays at its address, and may have to be in one piece.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};

use alloc_core::{
    config::Move,
    driver::{Call, Status, sim::SimOptions},
    error::{AllocError, MoveError},
    id::{DevicePtr, PoolId},
};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

const POOL: PoolId = PoolId(0, 7);

/// Requests on `SIDE` come from a pool whose memory moves no more than `moving` lets it.
fn with_pool(config: &str, moving: Move) -> Rig {
    let rig = Rig::new(config);
    rig.gpu.open_stream(SIDE).expect("the stream can be made");
    rig.begin_pool(POOL, SIDE);
    rig.allocator.restrict_moves(DEVICE, POOL, moving).expect("the pool is there and has no memory");
    rig
}

/// Ten idle blocks of 2 MiB in the default pool, none touching another, whose last use is over.
fn scattered_idle_blocks(rig: &mut Rig) {
    let blocks: Vec<DevicePtr> = (0..20).map(|_| rig.malloc(2 * MIB, MAIN)).collect();
    for block in blocks.iter().step_by(2) {
        rig.write(MAIN, *block);
        rig.free(*block);
    }
    rig.gpu.complete(None).expect("no kernel faults");
}

/// Gives the pool's routing back, and its user.
fn finish(rig: Rig) {
    rig.allocator.end_pool(DEVICE, POOL);
    rig.release_pool(POOL);
    rig.finish();
}

#[test]
fn nothing_moves_into_a_pool_whose_memory_stays_where_it_is() {
    for (moving, moved) in [(Move::On, 10), (Move::Off, 0), (Move::Contiguous, 0)] {
        let mut rig = with_pool("policy:rallocator", moving);
        scattered_idle_blocks(&mut rig);
        let block = rig.malloc(20 * MIB, SIDE);
        rig.write(SIDE, block);
        assert_eq!(rig.stats().handles_moved, moved, "{moving}");
        assert_eq!(rig.reserved(), 60 * MIB - moved * 2 * MIB, "{moving}");
        // All others go on as ever.
        let other = rig.malloc(20 * MIB, MAIN);
        rig.write(MAIN, other);
        assert!(rig.stats().handles_moved >= 10 || moving == Move::On, "{moving}");
        finish(rig);
    }
}

#[test]
fn every_block_of_a_contiguous_pool_lies_in_one_handle_and_its_handles_serve_again() {
    for policy in ["policy:native", "policy:rallocator"] {
        let mut rig = with_pool(policy, Move::Contiguous);
        let mut held: Vec<DevicePtr> = Vec::new();
        for round in 0..60_u64 {
            // The scan after each call sees to it that no block lies in two.
            let size = [100, 3 * MIB, MIB, 7 * MIB + 1, 600, 2 * MIB][(round % 6) as usize] + round;
            let block = rig.malloc(size, SIDE);
            rig.write(SIDE, block);
            held.push(block);
            if round % 3 == 2 {
                rig.free(held.swap_remove((round as usize * 7) % held.len()));
            }
        }
        let obtained = rig.gpu.call_count(Call::CreateHandle) + rig.gpu.call_count(Call::Allocate);
        assert!(obtained < 45, "{policy}: {obtained}");
        finish(rig);
    }
}

#[test]
fn memory_of_a_released_pool_stays_where_it_is_until_it_goes_back_to_the_driver() {
    for (moving, moves) in [(Move::On, true), (Move::Off, false)] {
        let mut rig = with_pool("policy:rallocator", moving);
        let blocks: Vec<DevicePtr> = (0..20).map(|_| rig.malloc(8 * MIB, SIDE)).collect();
        let (first, second) = blocks.split_at(10);
        for block in first {
            rig.free(*block);
        }
        rig.allocator.end_pool(DEVICE, POOL);
        rig.release_pool(POOL);
        // It needs what the pool does not use any more, so the device is synchronised: no graph runs on the pool.
        let large = rig.malloc(120 * MIB, MAIN);
        rig.write(MAIN, large);
        for block in second.iter().step_by(2) {
            rig.free(*block);
        }
        let next = rig.malloc(32 * MIB, MAIN);
        rig.write(MAIN, next);
        assert_eq!(rig.stats().handles_moved > 0, moves, "{moving}");
        rig.finish();
    }
}

#[test]
fn what_cannot_be_kept_in_place_is_refused_by_name_and_what_stays_anyway_is_not() {
    let restrict = |rig: &Rig, pool, moving| match rig.allocator.restrict_moves(DEVICE, pool, moving) {
        Err(AllocError::Move(error)) => Some(error),
        Ok(()) => None,
        Err(other) => panic!("{other}"),
    };
    for policy in POLICIES {
        let mut rig = Rig::new(policy);
        let held = rig.malloc(MIB, MAIN);
        assert_eq!(restrict(&rig, POOL, Move::Off), Some(MoveError::NoSuchPool { pool: POOL, device: DEVICE }));
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        rig.begin_pool(POOL, SIDE);
        let contiguous = restrict(&rig, POOL, Move::Contiguous);
        assert_eq!(contiguous, (policy == "policy:expandable").then_some(MoveError::PolicyPutsTogether));
        rig.malloc(3 * MIB, SIDE);
        for moving in [Move::On, Move::Off] {
            assert_eq!(restrict(&rig, POOL, moving), None, "{policy}: it holds anyway");
        }
        rig.free(held);
        finish(rig);
    }
    for (config, moving, is_refused) in [
        ("policy:rallocator", Move::Off, true),
        ("policy:rallocator", Move::Contiguous, true),
        ("move:off", Move::Off, false),
        ("move:off", Move::Contiguous, true),
        ("policy:expandable", Move::Off, false),
        ("move:contiguous", Move::Contiguous, false),
        ("policy:native", Move::Contiguous, false),
    ] {
        let mut rig = with_pool(config, Move::On);
        rig.malloc(3 * MIB, SIDE);
        let refusal = is_refused.then_some(MoveError::HasMemory { pool: POOL });
        assert_eq!(restrict(&rig, POOL, moving), refusal, "{config}, {moving}");
        finish(rig);
    }
}

#[test]
fn pool_that_was_asked_for_memory_and_got_none_can_still_be_restricted_on_all_its_streams() {
    let mut rig = Rig::new("policy:rallocator");
    for stream in [MAIN, SIDE] {
        rig.gpu.open_stream(stream).expect("the stream can be made");
        rig.begin_pool(POOL, stream);
        assert!(rig.try_malloc(300 * MIB, stream).is_err(), "the device has 256 MiB");
    }
    for moving in [Move::Contiguous, Move::Off] {
        rig.allocator.restrict_moves(DEVICE, POOL, moving).expect("it has no memory");
    }
    let handles = |rig: &Rig| rig.gpu.call_count(Call::CreateHandle);
    for stream in [MAIN, SIDE] {
        let before = handles(&rig);
        let block = rig.malloc(40 * MIB, stream);
        rig.write(stream, block);
        assert_eq!(handles(&rig) - before, 1, "the weaker word did not undo the stricter one");
    }
    rig.allocator.end_pool(DEVICE, POOL);
    rig.release_pool(POOL);
    finish(rig);
}

#[test]
fn pool_is_not_restricted_while_its_first_request_is_on_its_way() {
    let mut rig = with_pool("policy:rallocator", Move::On);
    let (asking, refusals) = (Arc::downgrade(&rig.allocator), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&refusals);
    rig.allocator.set_oom_callback(Some(Arc::new(move || {
        let allocator = asking.upgrade().expect("it is calling");
        seen.lock().expect("nobody panics").push(allocator.restrict_moves(DEVICE, POOL, Move::Off));
        false
    })));
    assert!(rig.try_malloc(300 * MIB, SIDE).is_err());
    let expected = [Err(AllocError::Move(MoveError::HasMemory { pool: POOL }))];
    assert_eq!(*refusals.lock().expect("nobody panics"), expected);
    rig.allocator.restrict_moves(DEVICE, POOL, Move::Off).expect("it has got none");
    finish(rig);
}

#[test]
fn request_whose_callback_panics_is_no_longer_on_its_way() {
    let mut rig = with_pool("policy:rallocator", Move::On);
    rig.allocator.set_oom_callback(Some(Arc::new(|| panic!("in the program's own code"))));
    let asking = AssertUnwindSafe(|| rig.try_malloc(300 * MIB, SIDE));
    assert!(catch_unwind(asking).is_err(), "it reaches the program");
    rig.allocator.restrict_moves(DEVICE, POOL, Move::Off).expect("nothing is on its way, and nothing is broken");
    let block = rig.malloc(30 * MIB, SIDE);
    rig.write(SIDE, block);
    finish(rig);
}

#[test]
fn pool_that_moves_does_not_stand_in_for_one_that_must_not() {
    const OTHER: PoolId = PoolId(0, 8);
    for (moving, is_served) in [(Move::On, true), (Move::Contiguous, false)] {
        let mut rig = with_pool("policy:rallocator", moving);
        rig.begin_pool(OTHER, SIDE);
        let block = rig.malloc(200 * MIB, SIDE);
        rig.free(block);
        rig.allocator.end_pool(DEVICE, OTHER);
        assert!(rig.allocator.serve_when_out_of_memory(DEVICE, OTHER, true));
        assert_eq!(rig.try_malloc(100 * MIB, SIDE).is_ok(), is_served, "{moving}");
        rig.release_pool(OTHER);
        finish(rig);
    }
}

#[test]
fn handle_that_cannot_be_mapped_leaves_a_contiguous_pool_as_it_was() {
    for call in [Call::CreateHandle, Call::Map, Call::SetAccess] {
        let mut rig = with_pool("policy:rallocator", Move::Contiguous);
        let first = rig.malloc(6 * MIB, SIDE);
        let reserved = rig.reserved();
        rig.gpu.fail_next(call, 0, Status::Unknown);
        assert!(rig.try_malloc(10 * MIB, SIDE).is_err(), "{call:?}");
        assert_eq!(rig.reserved(), reserved, "{call:?}");
        rig.write(SIDE, first);
        let next = rig.malloc(10 * MIB, SIDE);
        rig.write(SIDE, next);
        finish(rig);
    }
}

#[test]
fn a_device_without_virtual_memory_has_contiguous_pools_as_it_is() {
    let options = SimOptions { capacity_bytes: 256 * MIB, virtual_memory: false, ..SimOptions::default() };
    let mut rig = Rig::on("policy:expandable", options);
    rig.gpu.open_stream(SIDE).expect("the stream can be made");
    rig.begin_pool(POOL, SIDE);
    rig.allocator.restrict_moves(DEVICE, POOL, Move::Contiguous).expect("the policy is native here");
    let block = rig.malloc(30 * MIB, SIDE);
    rig.write(SIDE, block);
    finish(rig);
}
