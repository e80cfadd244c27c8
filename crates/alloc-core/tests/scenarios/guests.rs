//! Requests that are served from idle memory of another pool, where it lies, since there is no other.

use alloc_core::{
    driver::{Call, CaptureMode, Status},
    id::{DevicePtr, PoolId, StreamHandle},
    size::SizeClass,
};

use crate::rig::{DEVICE, MAIN, MIB, Rig, SIDE};

/// Longer than any test takes on the simulated clock.
const FOREVER_US: u64 = 1_000_000_000;
const KIB: u64 = 1 << 10;

/// Fills the device with one block of `stream`, but for half a MiB inside its last handle, which is idle and was last
/// used by work that is not over.
fn fill_up(rig: &mut Rig, stream: StreamHandle) -> DevicePtr {
    let block = rig.malloc(256 * MIB - 512 * KIB, stream);
    let tail = rig.malloc(512 * KIB, stream);
    rig.gpu.launch(stream, &[], &[block, tail], FOREVER_US).expect("no race");
    rig.free(tail);
    assert_eq!(rig.reserved(), 256 * MIB);
    block
}

fn large_allocations(rig: &Rig) -> u64 {
    rig.stats().allocation.class(SizeClass::Large).current
}

#[test]
fn smallest_request_is_served_while_the_large_pool_of_its_stream_has_anything_idle() {
    let mut rig = Rig::new("policy:rallocator");
    let block = fill_up(&mut rig, MAIN);
    let small: Vec<DevicePtr> = (0..1024).map(|_| rig.malloc(1, MAIN)).collect();
    assert_eq!((large_allocations(&rig), rig.gpu.host_waits()), (1025, 0), "they count where they lie");
    rig.try_malloc(1, MAIN).expect_err("every byte is in use");
    for address in small {
        rig.write(MAIN, address);
        rig.free(address);
    }
    let whole = rig.malloc(512 * KIB, MAIN);
    assert_eq!(whole.0, block.0 + 256 * MIB - 512 * KIB, "they came home, and are one block again");
    rig.finish();
}

#[test]
fn large_request_is_served_from_the_small_pool_when_its_memory_is_pinned() {
    let mut rig = Rig::new("policy:rallocator");
    let small: Vec<DevicePtr> = (0..4).map(|_| rig.malloc(MIB, MAIN)).collect();
    assert!(rig.allocator.pin(small[0]) && rig.allocator.pin(small[3]));
    rig.malloc(252 * MIB, MAIN);
    for address in &small {
        rig.free(*address);
    }
    assert_eq!(rig.malloc(4 * MIB, MAIN), small[0]);
    rig.free(small[0]);
    assert!(rig.allocator.unpin(small[0]) && rig.allocator.unpin(small[3]));
    rig.finish();
}

#[test]
fn guest_of_another_stream_goes_home_when_the_host_knows_that_it_is_done() {
    let mut rig = Rig::new("policy:rallocator");
    let block = fill_up(&mut rig, MAIN);
    rig.gpu.complete(None).expect("no fault");
    let guest = rig.malloc(512 * KIB, SIDE);
    assert_eq!(guest.0, block.0 + 256 * MIB - 512 * KIB);
    assert_eq!((rig.stats().gpu_waits, rig.gpu.host_waits()), (0, 0), "its last use was over");
    rig.gpu.launch(SIDE, &[], &[guest], FOREVER_US).expect("no race");
    rig.free(guest);
    assert_eq!(rig.stats().active.all.current, 2, "the side stream's work goes on");
    rig.gpu.complete(None).expect("no fault");
    assert_eq!(rig.malloc(512 * KIB, MAIN), guest);
    rig.write(MAIN, guest);
    rig.finish();
}

#[test]
fn guest_that_its_home_stream_uses_too_is_nobodys_before_both_are_done() {
    let mut rig = Rig::new("cross_stream_reuse:done");
    fill_up(&mut rig, MAIN);
    rig.gpu.complete(None).expect("no fault");
    let guest = rig.malloc(512 * KIB, SIDE);
    rig.write(SIDE, guest);
    rig.gpu.wait(MAIN, SIDE).expect("both exist");
    rig.gpu.launch(MAIN, &[], &[guest], 50_000).expect("no race");
    rig.record_stream(guest, MAIN);
    rig.free(guest);
    let again = rig.malloc(256 * KIB, SIDE);
    rig.write(SIDE, again);
    assert!(rig.gpu.host_waits() > 0, "the home stream's work was waited for");
    rig.finish();
}

#[test]
fn idle_piece_of_another_stream_serves_after_a_wait_on_the_gpu_or_else_on_the_host() {
    for (config, gpu_waits, host_waits) in
        [("cross_stream_reuse:done", 0, 1), ("cross_stream_reuse:owned", 1, 0), ("cross_stream_reuse:all", 1, 0)]
    {
        let mut rig = Rig::new(config);
        fill_up(&mut rig, MAIN);
        let guest = rig.malloc(100, SIDE);
        rig.write(SIDE, guest);
        assert_eq!((rig.stats().gpu_waits, rig.gpu.host_waits()), (gpu_waits, host_waits), "{config}");
        rig.finish();
    }
}

#[test]
fn what_is_left_of_a_lent_block_stays_its_own_streams() {
    let mut rig = Rig::new("policy:rallocator");
    fill_up(&mut rig, MAIN);
    let guest = rig.malloc(256 * KIB, SIDE);
    rig.write(SIDE, guest);
    let waits = rig.stats().gpu_waits;
    let rest = rig.malloc(256 * KIB, MAIN);
    rig.write(MAIN, rest);
    assert_eq!((rest.0, rig.stats().gpu_waits), (guest.0 + 256 * KIB, waits));
    rig.free(guest);
    rig.free(rest);
    rig.finish();
}

#[test]
fn private_pool_lends_to_nobody_and_borrows_from_itself_alone() {
    let pool = PoolId(1, 0);
    let mut rig = Rig::new("policy:rallocator");
    rig.gpu.open_stream(SIDE).expect("the stream can be made");
    let fence = rig.malloc(MIB + 512 * KIB, MAIN);
    rig.begin_pool(pool, SIDE);
    rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
    let captured = rig.malloc(254 * MIB - 512 * KIB, SIDE);
    rig.write(SIDE, captured);
    let of_own = rig.malloc(100, SIDE);
    rig.write(SIDE, of_own);
    rig.free(of_own);
    let graph = rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
    rig.allocator.end_pool(DEVICE, pool);
    // The graph's pool has half a MiB and the default pool as much: each serves its own only.
    let last = rig.malloc(512 * KIB, MAIN);
    rig.gpu.replay(graph, SIDE).expect("no race");
    rig.write(MAIN, last);
    rig.try_malloc(1, MAIN).expect_err("what is idle is the graph's");
    rig.write(MAIN, fence);
    rig.gpu.destroy_graph(graph).expect("it exists");
    rig.release_pool(pool);
    rig.finish();
}

#[test]
fn failed_call_before_a_guest_is_let_in_loses_nothing() {
    for (call, status) in [
        (Call::CaptureStatus, Status::Unknown),
        (Call::WaitEvent, Status::Unknown),
        (Call::RecordEvent, Status::Unknown),
        (Call::QueryEvent, Status::Unknown),
    ] {
        let mut rig = Rig::new("policy:rallocator");
        fill_up(&mut rig, MAIN);
        rig.gpu.fail_next(call, 0, status);
        if let Ok(guest) = rig.try_malloc(100, SIDE) {
            rig.write(SIDE, guest);
        }
        assert_eq!(rig.gpu.pending_faults(), 0, "{call:?} was not called");
        let guest = rig.malloc(100, SIDE);
        rig.write(SIDE, guest);
        rig.finish();
    }
}

#[test]
fn history_names_the_stream_that_a_guest_was_handed_out_to() {
    let mut rig = Rig::new("history_limit:100");
    fill_up(&mut rig, MAIN);
    rig.gpu.complete(None).expect("no fault");
    let guest = rig.malloc(100, SIDE);
    rig.free(guest);
    let events = rig.allocator.history(DEVICE);
    let of_guest = events.iter().rev().take(2);
    assert!(of_guest.clone().all(|event| event.address == guest && event.stream == SIDE), "{events:?}");
    rig.finish();
}
