//! The race oracle's verdicts.

use super::super::{AccessKind, RaceError, UnorderedUnmapError, Work};
use super::*;
use crate::driver::{CaptureMode, Completion};
use crate::id::PoolId;

const POOL: Option<PoolId> = Some(PoolId(1, 0));

fn race<T: std::fmt::Debug>(result: Result<T, SimError>) -> RaceError {
    match result.unwrap_err() {
        SimError::Race(race) => *race,
        other => panic!("not a race: {other}"),
    }
}

/// Memory whose first owner wrote it on the first stream, freed it, and whose second owner is on the second stream.
fn handed_on_too_early() -> (SimDriver, DevicePtr) {
    let driver = driver();
    let address = allocation(&driver, PAGE, FIRST);
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    hand_on(&driver, address, PAGE, SECOND);
    (driver, address)
}

#[test]
fn an_unordered_use_by_another_allocation_is_a_race_that_names_both() {
    let (driver, address) = handed_on_too_early();
    let race = race(driver.launch(SECOND, &[], &[address], 10));
    let (earlier, later) = (race.earlier, race.later);
    assert_eq!((earlier.allocation.number, earlier.stream.handle, earlier.work), (1, FIRST, Work::Kernel(1)));
    assert_eq!((later.allocation.number, later.stream.handle, later.work), (2, SECOND, Work::Kernel(2)));
    assert!(earlier.allocation.freed && !later.allocation.freed);
    let text = race.to_string();
    assert!(text.contains("allocation 1 (4096 bytes at") && text.contains("allocation 2 (4096 bytes at"), "{text}");
}

#[test]
fn work_that_happened_to_be_over_is_no_order() {
    let (driver, address) = handed_on_too_early();
    driver.complete(None).unwrap();
    race(driver.launch(SECOND, &[address], &[], 10));
}

#[test]
fn the_same_stream_is_an_order() {
    let (driver, address) = handed_on_too_early();
    driver.launch(FIRST, &[], &[address], 10).unwrap();
}

#[test]
fn a_wait_is_an_order() {
    let (driver, address) = handed_on_too_early();
    driver.wait(SECOND, FIRST).unwrap();
    driver.launch(SECOND, &[], &[address], 10).unwrap();
}

#[test]
fn a_wait_through_a_third_stream_is_an_order() {
    let (driver, address) = handed_on_too_early();
    driver.wait(THIRD, FIRST).unwrap();
    driver.wait(SECOND, THIRD).unwrap();
    driver.launch(SECOND, &[], &[address], 10).unwrap();
}

#[test]
fn a_wait_for_an_event_recorded_before_the_use_is_no_order() {
    let driver = driver();
    let address = allocation(&driver, PAGE, FIRST);
    let event = recorded(&driver, FIRST);
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    driver.wait_event(on_device(SECOND), event).unwrap();
    hand_on(&driver, address, PAGE, SECOND);
    race(driver.launch(SECOND, &[], &[address], 10));
}

#[test]
fn a_query_that_says_done_is_an_order_and_one_that_says_pending_is_none() {
    let (driver, address) = handed_on_too_early();
    let event = recorded(&driver, FIRST);
    assert_eq!(driver.query_event(DEVICE, event).unwrap(), Completion::Pending);
    race(driver.launch(SECOND, &[], &[address], 10));
    driver.complete(None).unwrap();
    assert_eq!(driver.query_event(DEVICE, event).unwrap(), Completion::Done);
    driver.launch(SECOND, &[], &[address], 10).unwrap();
}

#[test]
fn waiting_on_the_host_is_an_order() {
    for synchronize in [
        |driver: &SimDriver, event| driver.synchronize_event(DEVICE, event).unwrap(),
        |driver: &SimDriver, _| driver.synchronize_device(DEVICE).unwrap(),
    ] {
        let (driver, address) = handed_on_too_early();
        let event = recorded(&driver, FIRST);
        synchronize(&driver, event);
        driver.launch(SECOND, &[], &[address], 10).unwrap();
    }
}

#[test]
fn two_reads_are_no_conflict() {
    let driver = driver();
    let address = allocation(&driver, PAGE, FIRST);
    driver.launch(FIRST, &[address], &[], 10).unwrap();
    hand_on(&driver, address, PAGE, SECOND);
    driver.launch(SECOND, &[address], &[], 10).unwrap();
    let later = race(driver.launch(THIRD, &[], &[address], 10)).later;
    assert_eq!(later.access, AccessKind::Write);
}

#[test]
fn two_unordered_uses_of_one_live_allocation_are_the_programs_business() {
    let driver = driver();
    let address = allocation(&driver, PAGE, FIRST);
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    driver.launch(SECOND, &[], &[address], 10).unwrap();
    hand_on(&driver, address, PAGE, FIRST);
    let earlier = race(driver.launch(FIRST, &[], &[address], 10)).earlier;
    assert_eq!(earlier.stream.handle, SECOND, "the owner's own stream was ordered, the other was not");
}

#[test]
fn a_smaller_allocation_in_the_middle_races_and_its_neighbour_does_not() {
    let driver = driver();
    let address = allocation(&driver, PAGE, FIRST);
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    driver.freed(address).unwrap();
    let segment = driver.allocate(DEVICE, PAGE).unwrap();
    driver.allocated(segment, PAGE, on_device(SECOND), None).unwrap();
    driver.allocated(address.offset(512), 512, on_device(SECOND), None).unwrap();
    driver.launch(SECOND, &[], &[segment], 10).unwrap();
    race(driver.launch(SECOND, &[address.offset(1000)], &[], 10));
}

#[test]
fn a_failed_launch_is_not_queued_and_leaves_no_use() {
    let (driver, address) = handed_on_too_early();
    let other = allocation(&driver, PAGE, SECOND);
    race(driver.launch(SECOND, &[], &[other, address], 10));
    hand_on(&driver, other, PAGE, THIRD);
    driver.launch(THIRD, &[], &[other], 10).unwrap();
}

#[test]
fn memory_mapped_twice_is_one_memory() {
    let driver = driver();
    let (range, handle) = mapped_page(&driver);
    let alias = range.offset(PAGE);
    driver.map(DEVICE, alias, PAGE, handle).unwrap();
    driver.set_access(DEVICE, alias, PAGE, &[DEVICE]).unwrap();
    driver.allocated(range, PAGE, on_device(FIRST), None).unwrap();
    driver.launch(FIRST, &[], &[range], 10).unwrap();
    driver.freed(range).unwrap();
    driver.allocated(alias, PAGE, on_device(SECOND), None).unwrap();
    race(driver.launch(SECOND, &[], &[alias], 10));
    driver.launch(FIRST, &[], &[alias], 10).unwrap();
}

#[test]
fn a_freed_allocation_may_not_be_used_by_the_program() {
    let driver = driver();
    let address = allocation(&driver, PAGE, FIRST);
    driver.freed(address).unwrap();
    let error = driver.launch(SECOND, &[address], &[], 10).unwrap_err();
    assert!(matches!(&error, SimError::UseAfterFree(used) if used.0.allocation.number == 1), "{error}");
    assert!(!driver.freed(address).unwrap(), "a second free finds nothing");
}

#[test]
fn live_allocations_may_not_share_bytes_at_any_address() {
    let driver = driver();
    let (range, handle) = mapped_page(&driver);
    driver.allocated(range, PAGE, on_device(FIRST), None).unwrap();
    let twice = violation(driver.allocated(range.offset(512), 512, on_device(FIRST), None));
    assert!(matches!(twice, Violation::Overlap { newer, older } if newer.number == 2 && older.number == 1));

    let alias = range.offset(PAGE);
    driver.map(DEVICE, alias, PAGE, handle).unwrap();
    driver.set_access(DEVICE, alias, PAGE, &[DEVICE]).unwrap();
    let aliased = violation(driver.allocated(alias, 512, on_device(FIRST), None));
    assert!(matches!(aliased, Violation::Overlap { older, .. } if older.number == 1));
}

#[test]
fn an_allocation_needs_accessible_memory() {
    let driver = driver();
    let (range, _) = mapped_page(&driver);
    let unbacked = violation(driver.allocated(range, 2 * PAGE, on_device(FIRST), None));
    assert!(matches!(unbacked, Violation::Unbacked { address, .. } if address == range.offset(PAGE)));
}

#[test]
fn work_queued_on_unmapped_memory_faults_when_it_runs_even_if_something_else_is_mapped_there_by_then() {
    let driver = driver();
    let (range, _) = mapped_page(&driver);
    driver.launch(FIRST, &[range], &[], 10).unwrap();
    driver.unmap(DEVICE, range, PAGE).unwrap();
    let other = driver.create_handle(DEVICE, PAGE).unwrap();
    driver.map(DEVICE, range, PAGE, other).unwrap();
    driver.set_access(DEVICE, range, PAGE, &[DEVICE]).unwrap();
    assert!(matches!(driver.advance(10), Err(SimError::UnmappedAccess(error)) if error.work == Work::Kernel(1)));
}

#[test]
fn unmapping_memory_whose_work_the_host_has_not_seen_to_end_is_found() {
    let driver = driver();
    let (range, handle) = mapped_page(&driver);
    driver.allocated(range, PAGE, on_device(FIRST), None).unwrap();
    driver.launch(FIRST, &[], &[range], 10).unwrap();
    driver.freed(range).unwrap();
    driver.complete(None).unwrap();
    driver.unmap(DEVICE, range, PAGE).unwrap();
    let unproven = SimError::UnorderedUnmap(UnorderedUnmapError { address: range, stream: on_device(FIRST) }.into());
    assert_eq!(driver.complete(None), Err(unproven.clone()), "found although the work was over");
    assert_eq!(driver.check(), Err(unproven));
    driver.release_handle(DEVICE, handle).unwrap();
}

#[test]
fn unmapping_after_a_host_wait_is_fine() {
    let driver = driver();
    let (range, _) = mapped_page(&driver);
    driver.allocated(range, PAGE, on_device(FIRST), None).unwrap();
    driver.launch(FIRST, &[], &[range], 10).unwrap();
    driver.freed(range).unwrap();
    let event = recorded(&driver, FIRST);
    driver.synchronize_event(DEVICE, event).unwrap();
    driver.unmap(DEVICE, range, PAGE).unwrap();
    driver.check().unwrap();
}

#[test]
fn memory_of_a_live_allocation_may_not_be_taken_away() {
    let driver = driver();
    let address = allocation(&driver, PAGE, FIRST);
    driver.free(DEVICE, address).unwrap();
    assert!(matches!(violation(driver.check()), Violation::TakenWhileLive(taken) if taken.number == 1));
}

/// A graph that writes a block of its private pool, which was freed while it was captured.
fn graph_with_private_block(driver: &SimDriver) -> (super::super::GraphId, DevicePtr) {
    let address = driver.allocate(DEVICE, PAGE).unwrap();
    driver.pool_begun(DEVICE, PoolId(1, 0));
    driver.begin_capture(FIRST, CaptureMode::Global).unwrap();
    driver.allocated(address, PAGE, on_device(FIRST), POOL).unwrap();
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    driver.freed(address).unwrap();
    (driver.end_capture(FIRST).unwrap(), address)
}

#[test]
fn a_graph_may_use_freed_memory_of_its_pool_until_the_pool_is_released() {
    let driver = driver();
    let (graph, _) = graph_with_private_block(&driver);
    driver.pool_begun(DEVICE, PoolId(1, 0));
    driver.replay(graph, SECOND).unwrap();
    driver.pool_released(DEVICE, PoolId(1, 0));
    driver.replay(graph, SECOND).unwrap();
    driver.pool_released(DEVICE, PoolId(1, 0));
    assert!(matches!(driver.replay(graph, SECOND), Err(SimError::UseAfterFree(_))));
}

#[test]
fn a_replay_is_a_use_of_all_that_was_captured_by_the_stream_that_replays() {
    let driver = driver();
    let (graph, address) = graph_with_private_block(&driver);
    driver.replay(graph, SECOND).unwrap();
    driver.pool_released(DEVICE, PoolId(1, 0));
    driver.allocated(address, PAGE, on_device(FIRST), None).unwrap();
    let earlier = race(driver.launch(FIRST, &[], &[address], 10)).earlier;
    assert_eq!((earlier.work, earlier.stream.handle), (Work::Replay { graph: 1, launch: 2 }, SECOND));
    driver.launch(SECOND, &[], &[address], 10).unwrap();
}

#[test]
fn a_use_before_the_capture_has_to_be_ordered_before_every_replay() {
    let driver = driver();
    let address = allocation(&driver, PAGE, FIRST);
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    driver.freed(address).unwrap();
    driver.pool_begun(DEVICE, PoolId(1, 0));
    driver.begin_capture(FIRST, CaptureMode::Global).unwrap();
    driver.allocated(address, PAGE, on_device(FIRST), POOL).unwrap();
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    let graph = driver.end_capture(FIRST).unwrap();
    driver.replay(graph, FIRST).unwrap();
    driver.synchronize_device(DEVICE).unwrap();

    let driver = super::driver();
    let address = allocation(&driver, PAGE, FIRST);
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    driver.freed(address).unwrap();
    driver.pool_begun(DEVICE, PoolId(1, 0));
    driver.begin_capture(FIRST, CaptureMode::Global).unwrap();
    driver.allocated(address, PAGE, on_device(FIRST), POOL).unwrap();
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    let graph = driver.end_capture(FIRST).unwrap();
    race(driver.replay(graph, SECOND));
}

#[test]
fn memory_of_a_live_graph_may_not_be_handed_out_elsewhere() {
    let driver = driver();
    let (graph, address) = graph_with_private_block(&driver);
    driver.allocated(address, PAGE, on_device(FIRST), None).unwrap();
    let handed_out = violation(driver.replay(graph, FIRST));
    assert!(matches!(handed_out, Violation::GraphMemoryHandedOut { owner, .. } if owner.number == 2));
}

#[test]
fn a_graph_that_uses_a_freed_input_of_the_program_is_the_programs_mistake() {
    let driver = driver();
    let input = allocation(&driver, PAGE, FIRST);
    driver.begin_capture(FIRST, CaptureMode::Global).unwrap();
    driver.launch(FIRST, &[input], &[], 10).unwrap();
    let graph = driver.end_capture(FIRST).unwrap();
    driver.replay(graph, FIRST).unwrap();
    driver.freed(input).unwrap();
    assert!(matches!(driver.replay(graph, FIRST), Err(SimError::UseAfterFree(_))));
}

#[test]
fn captured_kernels_of_forked_streams_race_with_each_other() {
    let driver = driver();
    let address = driver.allocate(DEVICE, PAGE).unwrap();
    driver.pool_begun(DEVICE, PoolId(1, 0));
    driver.begin_capture(FIRST, CaptureMode::Global).unwrap();
    driver.wait(SECOND, FIRST).unwrap();
    driver.allocated(address, PAGE, on_device(FIRST), POOL).unwrap();
    driver.launch(FIRST, &[], &[address], 10).unwrap();
    driver.freed(address).unwrap();
    driver.allocated(address, PAGE, on_device(SECOND), POOL).unwrap();
    race(driver.launch(SECOND, &[], &[address], 10));
    driver.wait(SECOND, FIRST).unwrap();
    driver.launch(SECOND, &[], &[address], 10).unwrap();
}
