//! Programs on the simulated GPU, with the real allocator. Each ends with the proof that nothing is left.

use super::*;
use crate::config::Policy;
use crate::driver::Call;
use crate::driver::sim::{RaceError, Work};

const DEVICE: DeviceId = DeviceId(0);
const COMPUTE: StreamHandle = StreamHandle(0x10);
const COPY: StreamHandle = StreamHandle(0x20);
const POOL: PoolId = PoolId(1, 0);
const MIB: u64 = 1 << 20;

fn gpu() -> SimulatedGpu {
    SimulatedGpu::new(SimOptions { capacity_bytes: 64 * MIB, ..SimOptions::default() }, Config::default())
}

/// The same machine under both policies, each in turn.
fn both_policies(program: impl Fn(&SimulatedGpu)) {
    for policy in [Policy::Native, Policy::Expandable, Policy::Rallocator] {
        let options = SimOptions { capacity_bytes: 64 * MIB, ..SimOptions::default() };
        let gpu = SimulatedGpu::new(options, Config { policy, ..Config::default() });
        program(&gpu);
        gpu.check().unwrap();
        gpu.close().unwrap();
    }
}

fn malloc(gpu: &SimulatedGpu, size: u64, stream: StreamHandle) -> DevicePtr {
    gpu.malloc(size, DEVICE, stream).unwrap().unwrap()
}

fn race(result: Result<()>) -> RaceError {
    match result.unwrap_err() {
        SimulatedGpuError::Sim(SimError::Race(race)) => *race,
        other => panic!("not a race: {other}"),
    }
}

/// A block that `COMPUTE` owns and `COPY` writes, freed after `order`; then the next owner on `COMPUTE` writes it.
fn reuse_after_copy(gpu: &SimulatedGpu, order: impl Fn(&SimulatedGpu, DevicePtr)) -> Result<()> {
    let block = malloc(gpu, MIB, COMPUTE);
    gpu.launch(COPY, &[], &[block], 100).unwrap();
    order(gpu, block);
    gpu.free(block, DEVICE).unwrap();
    let next = malloc(gpu, MIB, COMPUTE);
    gpu.launch(COMPUTE, &[], &[next], 100)
}

#[test]
fn leaving_record_stream_out_is_a_race_that_names_both_users() {
    let gpu = gpu();
    let race = race(reuse_after_copy(&gpu, |_, _| ()));
    assert_eq!((race.earlier.stream.handle, race.later.stream.handle), (COPY, COMPUTE));
    assert_eq!((race.earlier.allocation.number, race.later.allocation.number), (1, 2));
    gpu.close().unwrap();
}

#[test]
fn record_stream_orders_the_reuse() {
    both_policies(|gpu| {
        reuse_after_copy(gpu, |gpu, block| {
            assert_eq!(gpu.record_stream(block, COPY).unwrap(), RecordOutcome::Recorded);
        })
        .unwrap();
    });
}

#[test]
fn a_wait_before_the_free_orders_the_reuse() {
    both_policies(|gpu| reuse_after_copy(gpu, |gpu, _| gpu.wait(COMPUTE, COPY).unwrap()).unwrap());
}

#[test]
fn memory_is_reused_on_its_own_stream_while_it_is_in_use() {
    both_policies(|gpu| {
        let first = malloc(gpu, MIB, COMPUTE);
        gpu.launch(COMPUTE, &[], &[first], 100).unwrap();
        assert_eq!(gpu.free(first, DEVICE).unwrap(), FreeOutcome::Freed);
        let second = malloc(gpu, MIB, COMPUTE);
        assert_eq!(first, second);
        gpu.launch(COMPUTE, &[], &[second], 100).unwrap();
    });
}

#[test]
fn requests_for_nothing_and_frees_of_nothing_are_quiet() {
    both_policies(|gpu| {
        assert_eq!(gpu.malloc(0, DEVICE, COMPUTE).unwrap(), None);
        assert_eq!(gpu.free(DevicePtr(0), DEVICE).unwrap(), FreeOutcome::Null);
        assert_eq!(gpu.free(DevicePtr(0x1234), DEVICE).unwrap(), FreeOutcome::NotOurs);
        let block = malloc(gpu, MIB, COMPUTE);
        gpu.free(block, DeviceId(7)).unwrap();
        assert_eq!(gpu.free(block, DEVICE).unwrap(), FreeOutcome::Repeated);
        gpu.launch(COMPUTE, &[DevicePtr(0)], &[], 1).unwrap();
    });
}

#[test]
fn a_full_device_is_an_out_of_memory_error() {
    both_policies(|gpu| {
        let error = gpu.malloc(65 * MIB, DEVICE, COMPUTE).unwrap_err();
        assert!(matches!(error, SimulatedGpuError::Alloc(AllocError::OutOfMemory(_))));
        assert!(error.to_string().starts_with("CUDA out of memory. Tried to allocate 65.00 MiB."), "{error}");
    });
}

#[test]
fn so_is_a_request_of_any_size_that_a_program_can_write_down() {
    both_policies(|gpu| {
        for (bytes, tried) in [
            (800_000_000 << 30, "800000000.00 GiB"),
            (1 << 62, "more than 1EB memory"),
            (u64::MAX, "more than 1EB memory"),
        ] {
            let error = gpu.malloc(bytes, DEVICE, COMPUTE).unwrap_err();
            assert!(
                error.to_string().starts_with(&format!("CUDA out of memory. Tried to allocate {tried}.")),
                "{error}"
            );
        }
    });
}

#[test]
fn the_programs_own_use_after_free_and_of_foreign_memory_are_told_apart() {
    let gpu = gpu();
    let block = malloc(&gpu, MIB, COMPUTE);
    gpu.free(block, DEVICE).unwrap();
    let freed = gpu.launch(COMPUTE, &[block], &[], 1);
    assert!(matches!(freed, Err(SimulatedGpuError::Sim(SimError::UseAfterFree(_)))));
    let foreign = gpu.launch(COMPUTE, &[DevicePtr(0x1234)], &[], 1);
    assert!(matches!(foreign, Err(SimulatedGpuError::UnknownPointer(DevicePtr(0x1234)))));
    gpu.close().unwrap();
}

#[test]
fn cached_memory_goes_back_to_the_device() {
    both_policies(|gpu| {
        let block = malloc(gpu, 30 * MIB, COMPUTE);
        gpu.launch(COPY, &[], &[block], 100).unwrap();
        gpu.record_stream(block, COPY).unwrap();
        gpu.free(block, DEVICE).unwrap();
        gpu.empty_cache().unwrap();
        assert_eq!(gpu.driver().physical_bytes(DEVICE).current, 0);
        assert!(gpu.driver().physical_bytes(DEVICE).peak >= 30 * MIB);
    });
}

/// A graph that writes a block of `POOL` on `COMPUTE`.
fn captured(gpu: &SimulatedGpu) -> GraphId {
    gpu.begin_pool(POOL, COMPUTE).unwrap();
    gpu.begin_capture(COMPUTE, CaptureMode::Global).unwrap();
    let block = malloc(gpu, MIB, COMPUTE);
    gpu.launch(COMPUTE, &[], &[block], 50).unwrap();
    gpu.free(block, DEVICE).unwrap();
    let graph = gpu.end_capture(COMPUTE).unwrap();
    gpu.end_pool(POOL).unwrap();
    graph
}

#[test]
fn a_graph_keeps_its_memory_until_its_pool_is_released() {
    both_policies(|gpu| {
        let graph = captured(gpu);
        for stream in [COMPUTE, COPY] {
            let outside = malloc(gpu, MIB, stream);
            gpu.launch(stream, &[], &[outside], 10).unwrap();
            gpu.replay(graph, stream).unwrap();
            gpu.free(outside, DEVICE).unwrap();
        }
        gpu.destroy_graph(graph).unwrap();
        gpu.release_pool(POOL).unwrap();
        let next = malloc(gpu, MIB, COMPUTE);
        gpu.launch(COMPUTE, &[], &[next], 10).unwrap();
        assert!(matches!(gpu.release_pool(POOL), Err(SimulatedGpuError::UnknownPool(POOL))));
    });
}

#[test]
fn replaying_a_graph_whose_pool_was_released_is_a_use_after_free() {
    let gpu = gpu();
    let graph = captured(&gpu);
    gpu.release_pool(POOL).unwrap();
    let error = gpu.replay(graph, COMPUTE).unwrap_err();
    let SimulatedGpuError::Sim(SimError::UseAfterFree(used)) = error else { panic!("{error}") };
    assert_eq!(used.0.work, Work::Replay { graph: graph.0, launch: 2 });
    gpu.close().unwrap();
}

#[test]
fn requests_of_a_stream_that_joins_the_capture_go_to_its_pool() {
    both_policies(|gpu| {
        gpu.begin_pool(POOL, COMPUTE).unwrap();
        gpu.begin_capture(COMPUTE, CaptureMode::Global).unwrap();
        assert_eq!(gpu.allocator().route(DEVICE, COPY), None);
        gpu.wait(COPY, COMPUTE).unwrap();
        assert_eq!(gpu.allocator().route(DEVICE, COPY), Some(POOL));
        let block = malloc(gpu, MIB, COPY);
        gpu.launch(COPY, &[], &[block], 50).unwrap();
        gpu.free(block, DEVICE).unwrap();
        gpu.wait(COMPUTE, COPY).unwrap();
        let graph = gpu.end_capture(COMPUTE).unwrap();
        gpu.end_pool(POOL).unwrap();
        gpu.replay(graph, COMPUTE).unwrap();
    });
}

#[test]
fn memory_can_be_allocated_and_freed_beside_a_capture() {
    both_policies(|gpu| {
        let before = malloc(gpu, 30 * MIB, COPY);
        gpu.record_stream(before, COMPUTE).unwrap();
        gpu.begin_pool(POOL, COMPUTE).unwrap();
        gpu.begin_capture(COMPUTE, CaptureMode::Global).unwrap();
        gpu.free(before, DEVICE).unwrap();
        let during = malloc(gpu, 30 * MIB, COPY);
        gpu.launch(COPY, &[], &[during], 10).unwrap();
        gpu.free(during, DEVICE).unwrap();
        gpu.end_capture(COMPUTE).unwrap();
        gpu.end_pool(POOL).unwrap();
    });
}

#[test]
fn in_a_forked_child_requests_fail_and_frees_do_nothing() {
    let gpu = gpu();
    let block = malloc(&gpu, MIB, COMPUTE);
    gpu.driver().fork_child();
    let calls = gpu.driver().calls();
    assert!(gpu.malloc(MIB, DEVICE, COMPUTE).is_err());
    assert_eq!(gpu.free(block, DEVICE).unwrap(), FreeOutcome::Leaked);
    assert_eq!(gpu.driver().calls(), calls, "the driver was not asked");
    gpu.driver().fork_parent();
    assert_eq!(gpu.free(block, DEVICE).unwrap(), FreeOutcome::Freed);
    gpu.close().unwrap();
}

#[test]
fn frees_after_the_drivers_shutdown_are_quiet() {
    both_policies(|gpu| {
        let block = malloc(gpu, MIB, COMPUTE);
        gpu.record_stream(block, COPY).unwrap();
        gpu.driver().shutdown_driver();
        gpu.free(block, DEVICE).unwrap();
        assert!(gpu.malloc(30 * MIB, DEVICE, COMPUTE).is_err());
    });
}

#[test]
fn a_failed_driver_call_is_survived() {
    both_policies(|gpu| {
        for call in [Call::CreateHandle, Call::Map, Call::SetAccess, Call::ReserveRange, Call::Allocate] {
            gpu.driver().fail_next(call, 0, Status::OutOfMemory);
        }
        for _ in 0..4 {
            if let Some(block) = gpu.malloc(2 * MIB, DEVICE, COMPUTE).ok().flatten() {
                gpu.launch(COMPUTE, &[], &[block], 1).unwrap();
            }
            gpu.check().unwrap();
        }
    });
}

#[test]
fn closing_frees_what_the_program_still_holds() {
    let gpu = gpu();
    let block = malloc(&gpu, MIB, COMPUTE);
    gpu.launch(COMPUTE, &[], &[block], 100).unwrap();
    captured(&gpu);
    gpu.begin_pool(PoolId(0, 1), COPY).unwrap();
    gpu.begin_capture(COPY, CaptureMode::Global).unwrap();
    malloc(&gpu, MIB, COPY);
    gpu.close().unwrap();
    assert_eq!(gpu.driver().physical_bytes(DEVICE).current, 0);
}

#[test]
fn memory_that_somebody_else_took_from_the_device_is_no_leak_of_the_allocators_but_found() {
    let gpu = gpu();
    malloc(&gpu, MIB, COMPUTE);
    crate::driver::Driver::create_event(gpu.driver(), DEVICE).unwrap();
    let error = gpu.close().unwrap_err();
    let SimulatedGpuError::Sim(SimError::Violation(leak)) = error else { panic!("{error}") };
    assert_eq!(*leak, Violation::Leak { segments: 0, handles: 0, mappings: 0, ranges: 0, events: 1 });
}

#[test]
fn devices_are_independent_and_streams_belong_to_the_current_one() {
    let options = SimOptions { devices: 2, capacity_bytes: 64 * MIB, ..SimOptions::default() };
    let gpu = SimulatedGpu::new(options, Config::default());
    let second = DeviceId(1);
    gpu.set_current_device(second).unwrap();
    let block = gpu.malloc(MIB, second, COMPUTE).unwrap().unwrap();
    gpu.launch(COMPUTE, &[], &[block], 10).unwrap();
    gpu.set_current_device(DEVICE).unwrap();
    let here = gpu.malloc(MIB, DEVICE, StreamHandle::DEFAULT).unwrap().unwrap();
    gpu.launch(StreamHandle::DEFAULT, &[block], &[here], 10).unwrap();
    gpu.complete(None).unwrap();
    assert_eq!(gpu.driver().device_of(COMPUTE), second);
    gpu.close().unwrap();
}

#[test]
fn memory_of_a_destroyed_streams_handle_is_safe_on_the_next_stream_of_that_handle() {
    both_policies(|gpu| {
        for _ in 0..3 {
            let block = malloc(gpu, MIB, COMPUTE);
            gpu.launch(COMPUTE, &[], &[block], 100).unwrap();
            gpu.free(block, DEVICE).unwrap();
            gpu.allocator().retire_stream(COMPUTE).unwrap();
            gpu.destroy_stream(COMPUTE).unwrap();
        }
    });
}

#[test]
fn naming_a_stream_that_was_destroyed_is_the_programs_mistake() {
    let gpu = SimulatedGpu::new(SimOptions::default(), Config::default());
    let block = malloc(&gpu, MIB, COMPUTE);
    gpu.launch(COPY, &[], &[block], 100).unwrap();
    gpu.destroy_stream(COPY).unwrap();
    let named = gpu.record_stream(block, COPY).unwrap_err();
    assert!(named.to_string().contains("destroyed"), "{named}");
}
