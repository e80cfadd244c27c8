//! One behaviour a test, on programs of a few steps.

use super::*;
use crate::config::Policy;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const SIDE: StreamHandle = StreamHandle(0x100);

pub(super) fn allocate(time_us: u64, allocation: usize, size: u64) -> Step {
    allocate_for(time_us, allocation, size, StreamHandle::DEFAULT, None)
}

pub(super) fn allocate_for(
    time_us: u64,
    allocation: usize,
    size: u64,
    stream: StreamHandle,
    pool: Option<PoolId>,
) -> Step {
    Step { time_us, action: Action::Allocate { allocation, size, stream, pool } }
}

pub(super) fn free(time_us: u64, allocation: usize) -> Step {
    Step { time_us, action: Action::Free { allocation, used_elsewhere_until_us: None } }
}

pub(super) fn free_used_until(time_us: u64, allocation: usize, end_us: u64) -> Step {
    Step { time_us, action: Action::Free { allocation, used_elsewhere_until_us: Some(end_us) } }
}

fn retry(time_us: u64, size: u64) -> Step {
    Step { time_us, action: Action::Try { size, stream: StreamHandle::DEFAULT, pool: None } }
}

pub(super) fn options(policy: Policy, budget_bytes: Option<u64>) -> Options {
    Options { config: Config { policy, ..Config::default() }, budget_bytes, ..Options::default() }
}

/// Replays under a policy and checks what holds for every replay.
fn replayed(policy: Policy, budget_bytes: Option<u64>, steps: &[Step]) -> Outcome {
    let outcome = replay(steps, &options(policy, budget_bytes)).expect("the steps are well formed");
    assert_eq!(outcome.peak_reserved, outcome.peak_device, "the allocator and the GPU count the same");
    assert!(outcome.peak_allocated <= outcome.peak_active && outcome.peak_active <= outcome.peak_reserved);
    assert!(outcome.peak_requested <= outcome.peak_active);
    outcome
}

fn native(steps: &[Step]) -> Outcome {
    replayed(Policy::Native, None, steps)
}

#[test]
fn memory_that_was_given_back_is_handed_out_again() {
    let outcome = native(&[allocate(0, 0, 30 * MIB), free(1, 0), allocate(2, 1, 30 * MIB), free(3, 1)]);
    assert_eq!((outcome.peak_allocated, outcome.peak_reserved), (30 * MIB, 30 * MIB));
    assert_eq!(outcome.peak_address_bytes, 30 * MIB);
    assert_eq!(outcome.driver_calls.iter().find(|(name, _)| *name == "cuMemAlloc"), Some(&("cuMemAlloc", 1)));
    // 41 µs and 0.12 µs for each MiB.
    assert!(outcome.driver_time_us >= 44);
}

#[test]
fn nothing_to_replay_takes_nothing() {
    let outcome = native(&[]);
    assert_eq!((outcome.peak_requested, outcome.peak_reserved, outcome.driver_time_us), (0, 0, 0));
}

#[test]
fn a_block_in_use_elsewhere_is_handed_out_only_after_the_recorded_end() {
    let with_second_at =
        |time_us| native(&[allocate(0, 0, 30 * MIB), free_used_until(10, 0, 500), allocate(time_us, 1, 30 * MIB)]);
    let before = with_second_at(499);
    assert_eq!((before.peak_reserved, before.peak_active, before.peak_allocated), (60 * MIB, 60 * MIB, 30 * MIB));
    assert_eq!(with_second_at(501).peak_reserved, 30 * MIB);
}

#[test]
fn a_block_whose_use_ends_late_holds_up_no_other() {
    let outcome = native(&[
        allocate(0, 0, 30 * MIB),
        allocate(0, 1, 30 * MIB),
        free_used_until(10, 0, 90_000),
        free_used_until(11, 1, 500),
        allocate(600, 2, 30 * MIB),
    ]);
    assert_eq!(outcome.peak_reserved, 60 * MIB);
}

#[test]
fn streams_keep_their_memory_apart() {
    let outcome = native(&[allocate(0, 0, 30 * MIB), free(1, 0), allocate_for(2, 1, 30 * MIB, SIDE, None)]);
    assert_eq!(outcome.peak_reserved, 60 * MIB);
}

#[test]
fn private_pools_keep_their_memory_apart() {
    let pool = Some(PoolId(0, 1));
    let outcome = native(&[
        allocate(0, 0, 30 * MIB),
        free(1, 0),
        allocate_for(2, 1, 30 * MIB, StreamHandle::DEFAULT, pool),
        free(3, 1),
        allocate_for(4, 2, 30 * MIB, StreamHandle::DEFAULT, pool),
    ]);
    assert_eq!(outcome.peak_reserved, 60 * MIB, "the pool uses its own memory again");
}

#[test]
fn what_does_not_fit_the_budget_is_counted_and_left_out() {
    for policy in [Policy::Native, Policy::Expandable] {
        let steps =
            [allocate(0, 0, 60 * MIB), allocate(1, 1, 60 * MIB), free(2, 0), free(3, 1), allocate(4, 2, 80 * MIB)];
        let outcome = replayed(policy, Some(100 * MIB), &steps);
        assert_eq!(outcome.ooms, 1, "{policy}");
        assert_eq!(outcome.peak_allocated, 80 * MIB, "{policy}: the free of what failed frees nothing");
        assert!(outcome.peak_reserved <= 100 * MIB, "{policy}");
    }
}

#[test]
fn returning_cached_memory_waits_for_what_was_queued() {
    let steps = [allocate(0, 0, 60 * MIB), free(1000, 0), allocate(1500, 1, 80 * MIB)];
    let outcome = replayed(Policy::Native, Some(100 * MIB), &steps);
    assert_eq!((outcome.ooms, outcome.retries, outcome.host_waits), (0, 1, 1));
    // The free's work was queued at 1000 µs and ends 20,000 µs later; the wait begins at 1500 µs.
    assert_eq!(outcome.host_wait_us, 19_500);
}

#[test]
fn without_a_lag_nothing_waits() {
    let steps = [allocate(0, 0, 60 * MIB), free(1000, 0), allocate(1500, 1, 80 * MIB)];
    let without_lag = Options { lag_us: 0, ..options(Policy::Native, Some(100 * MIB)) };
    let outcome = replay(&steps, &without_lag).expect("the steps are well formed");
    assert_eq!((outcome.retries, outcome.host_waits, outcome.host_wait_us), (1, 0, 0));
}

#[test]
fn what_failed_in_the_recording_is_tried_under_a_budget_only() {
    let steps = [allocate(0, 0, 50 * MIB), retry(1, 40 * MIB), retry(2, 60 * MIB)];
    let limited = replayed(Policy::Native, Some(100 * MIB), &steps);
    assert_eq!((limited.ooms, limited.peak_allocated), (1, 90 * MIB));
    let unlimited = native(&steps);
    assert_eq!((unlimited.ooms, unlimited.peak_allocated), (0, 50 * MIB));
}

#[test]
fn without_a_budget_the_card_grows_until_nothing_fails() {
    let outcome = native(&[allocate(0, 0, 700 * GIB), free(1, 0), allocate(2, 1, 900 * GIB)]);
    assert_eq!((outcome.ooms, outcome.retries, outcome.peak_reserved), (0, 0, 1600 * GIB));
    let beyond_any_card = native(&[allocate(0, 0, 1 << 47), free(1, 0)]);
    assert_eq!(beyond_any_card.ooms, 1);
}

#[test]
fn empty_requests_take_nothing() {
    let outcome = native(&[allocate(0, 0, 0), free(1, 0)]);
    assert_eq!((outcome.peak_requested, outcome.peak_reserved, outcome.ooms), (0, 0, 0));
}

#[test]
fn expandable_ranges_take_less_than_segments() {
    let steps = [allocate(0, 0, 30 * MIB), allocate(1, 1, 50 * MIB), free(2, 0), free(3, 1), allocate(4, 2, 80 * MIB)];
    assert_eq!(native(&steps).peak_reserved, 160 * MIB);
    assert_eq!(replayed(Policy::Expandable, None, &steps).peak_reserved, 80 * MIB);
}

#[test]
fn more_other_streams_than_there_are_stand_ins_only_wait_longer() {
    let count = 100;
    let mut steps: Vec<_> = (0..count).map(|allocation| allocate(0, allocation, 30 * MIB)).collect();
    // Each ends before the one before it, so that no two fit on one stream.
    let ends = (0..count).map(|allocation| free_used_until(1, allocation, 10_000 - allocation as u64));
    steps.extend(ends);
    steps.extend((0..count).map(|allocation| allocate(20_000, count + allocation, 30 * MIB)));
    assert_eq!(native(&steps).peak_reserved, count as u64 * 30 * MIB);
}

#[test]
fn steps_that_name_no_live_allocation_are_the_callers_mistake() {
    let refused = |steps: &[Step]| replay(steps, &options(Policy::Native, None)).expect_err("a wrong step").to_string();
    assert_eq!(refused(&[free(0, 0)]), "step 0 names allocation 0, which was never made");
    assert_eq!(refused(&[free(0, 9)]), "step 0 names allocation 9, which was never made");
    assert_eq!(refused(&[allocate(0, 5, 1)]), "step 0 names allocation 5, which is not below the number of steps");
    let twice = [allocate(0, 0, 1), free(1, 0), free(2, 0)];
    assert_eq!(refused(&twice), "step 2 names allocation 0, which was freed before");
    let again = [allocate(0, 0, 1), allocate(1, 0, 1)];
    assert_eq!(refused(&again), "step 1 names allocation 0, which was made before");
}

#[test]
fn smallest_budget_is_that_of_the_most_held_at_once_rounded_up() {
    let steps = [allocate(0, 0, 60 * MIB), allocate(1, 1, 40 * MIB), free(2, 1), free(3, 0), allocate(4, 2, 90 * MIB)];
    for policy in [Policy::Native, Policy::Rallocator] {
        assert_eq!(minimum_budget(&steps, &options(policy, None)).unwrap(), Some(100 * MIB));
    }
    assert_eq!(minimum_budget(&[], &options(Policy::Native, None)).unwrap(), Some(2 * MIB));
    let refused = [allocate(0, 0, GIB), retry(1, 2 * GIB)];
    assert_eq!(minimum_budget(&refused, &options(Policy::Native, None)).unwrap(), Some(3 * GIB));
    let impossible = [allocate(0, 0, 1 << 59)];
    assert_eq!(minimum_budget(&impossible, &options(Policy::Native, None)).unwrap(), None);
}

#[test]
fn replay_stops_at_the_first_failure_if_asked() {
    let steps = [allocate(0, 0, 80 * MIB), allocate(1, 1, 80 * MIB), free(2, 0), allocate(3, 2, 90 * MIB)];
    let all = replay(&steps, &options(Policy::Native, Some(100 * MIB))).unwrap();
    let stopping = Options { stop_at_failure: true, ..options(Policy::Native, Some(100 * MIB)) };
    let first = replay(&steps, &stopping).unwrap();
    assert_eq!((all.peak_allocated, first.peak_allocated), (90 * MIB, 80 * MIB));
    assert_eq!((all.ooms, first.ooms), (1, 1));
}

#[test]
fn emptied_cache_is_no_longer_reserved_afterwards() {
    let steps = [allocate(0, 0, 80 * MIB), free(1, 0), allocate(100_000, 1, 30 * MIB), free(100_001, 1)];
    let late = Options { late_from: Some(2), ..options(Policy::Expandable, None) };
    let kept = replay(&steps, &late).unwrap();
    let emptied = replay(&steps, &Options { empty_cache_before: vec![2], ..late }).unwrap();
    assert_eq!((kept.peak_reserved_late, emptied.peak_reserved_late), (80 * MIB, 40 * MIB));
    assert_eq!(kept.peak_reserved, emptied.peak_reserved);
}

#[test]
fn handles_are_multiples_of_the_granularity() {
    let steps = [allocate(0, 0, 3 * MIB)];
    let with = |bytes| Options { handle_granularity_bytes: bytes, ..options(Policy::Rallocator, None) };
    assert_eq!(replay(&steps, &with(2 * MIB)).unwrap().peak_reserved, 4 * MIB);
    assert_eq!(replay(&steps, &with(16 * MIB)).unwrap().peak_reserved, 16 * MIB);
}

/// A large segment of 64 MiB with 20 MiB free in its middle, and a small one with half of it free.
fn layout() -> Arc<Vec<PlacedSegment>> {
    let piece = |mib: u64, allocation: Option<usize>| {
        let holder = allocation.map_or(Holder::Cache, Holder::Allocation);
        PlacedPiece { size: mib * MIB / 2, holder }
    };
    let placed = |address, size, pieces| {
        let (stream, pool, range) = (StreamHandle::DEFAULT, None, None);
        PlacedSegment { address, size, stream, pool, range, pieces }
    };
    Arc::new(vec![
        placed(GIB, 64 * MIB, vec![piece(40, Some(0)), piece(40, None), piece(48, Some(1))]),
        placed(2 * GIB, 2 * MIB, vec![piece(1, Some(2)), piece(3, None)]),
    ])
}

fn with_layout(budget_bytes: Option<u64>) -> Options {
    Options { layout: Some(layout()), ..options(Policy::Native, budget_bytes) }
}

#[test]
fn replay_begins_with_the_memory_that_the_recording_began_with() {
    let old = [allocate(0, 0, 20 * MIB), allocate(0, 1, 24 * MIB - 100), allocate(0, 2, 1000)];
    let fits = [old.as_slice(), &[allocate(1, 3, 19 * MIB), allocate(2, 4, MIB)]].concat();
    let outcome = replay(&fits, &with_layout(None)).unwrap();
    assert_eq!(outcome.peak_reserved, 66 * MIB, "both fit what was free");
    assert_eq!(outcome.peak_allocated, (20 + 24 + 19 + 1) * MIB + 1024);
    let too_large = [old.as_slice(), &[allocate(1, 3, 21 * MIB)]].concat();
    assert_eq!(replay(&too_large, &with_layout(None)).unwrap().peak_reserved, 88 * MIB);
    assert_eq!(growth(&too_large, &with_layout(None)).unwrap(), [0, 3], "the beginning counts as the first step");
    let freed = [old.as_slice(), &[free(1, 0), allocate(2, 3, 40 * MIB)]].concat();
    assert_eq!(replay(&freed, &with_layout(None)).unwrap().peak_reserved, 66 * MIB, "free neighbours are one block");
}

#[test]
fn memory_that_cannot_be_had_is_not_begun_with() {
    let old = [allocate(0, 0, 20 * MIB), allocate(0, 1, 24 * MIB), allocate(0, 2, 1000)];
    let small = replay(&old, &with_layout(Some(50 * MIB))).unwrap();
    assert_eq!((small.peak_reserved, small.ooms), (46 * MIB, 0));
    let odd = vec![PlacedSegment { size: 5 * MIB, pieces: vec![], ..layout()[0].clone() }];
    let odd = Options { layout: Some(Arc::new(odd)), ..options(Policy::Native, None) };
    assert_eq!(replay(&old, &odd).unwrap().peak_reserved, 46 * MIB, "no segment has 5 MiB");
    assert_eq!(minimum_budget(&old, &with_layout(None)).unwrap(), Some(46 * MIB));
}
