//! What a timeline says of a moment is what the allocator says of it.

use super::tests::{allocate_for, free, free_used_until, options};
use super::*;
use crate::config::Policy;
use crate::snapshot::PictureState;

const MIB: u64 = 1 << 20;

/// A program of many sizes on three streams and in a private pool, with frees that wait.
fn program(seed: u64, steps: usize) -> Vec<Step> {
    let mut state = seed;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut live: Vec<usize> = Vec::new();
    let mut program = Vec::new();
    for number in 0..steps {
        let time_us = 300 * number as u64;
        if live.len() > 40 || (!live.is_empty() && random(5) < 2) {
            let index = random(live.len() as u64) as usize;
            let allocation = live.swap_remove(index);
            let is_elsewhere = random(6) == 0;
            program.push(if is_elsewhere {
                free_used_until(time_us, allocation, time_us + 30_000)
            } else {
                free(time_us, allocation)
            });
        } else {
            let size = if random(3) == 0 { random(64 * MIB) } else { random(3 * MIB) } + 1;
            let stream = StreamHandle([0, 0x100, 0x200][random(3) as usize]);
            let pool = (random(8) == 0).then_some(PoolId(0, 1));
            program.push(allocate_for(time_us, number, size, stream, pool));
            live.push(number);
        }
    }
    program
}

/// The blocks after a step: address, size, whether pending.
fn blocks_at(timeline: &Timeline, step: u32) -> Vec<(u64, u64, bool)> {
    let alive = timeline.blocks.iter().filter(|block| block.begin <= step && step < block.end);
    let mut blocks: Vec<_> = alive.map(|block| (block.address, block.size, block.freed <= step)).collect();
    blocks.sort_unstable();
    blocks
}

/// The memory after a step, as the longest runs.
fn runs(pieces: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut pieces: Vec<_> = pieces.collect();
    pieces.sort_unstable();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (address, size) in pieces {
        match runs.last_mut() {
            Some((start, length)) if *start + *length == address => *length += size,
            _ => runs.push((address, size)),
        }
    }
    runs
}

#[test]
fn timeline_shows_each_moment_as_the_allocator_does() {
    for policy in [Policy::Native, Policy::Expandable, Policy::Rallocator] {
        for (seed, budget_bytes) in [(1, None), (2, Some(700 * MIB))] {
            let steps = program(seed, 1500);
            let options = options(policy, budget_bytes);
            let (outcome, timeline) = replay_with_timeline(&steps, &options).expect("the program is well formed");
            assert_eq!(outcome, replay(&steps, &options).expect("it is"), "being watched changes nothing");
            assert_eq!(timeline.levels.iter().map(|level| level.reserved).max(), Some(outcome.peak_reserved));
            for count in [1, 40, 333, 700, 999, 1250, steps.len()] {
                let picture = picture_after(&steps, count, &options).expect("it is");
                let step = count as u32 - 1;
                let active: Vec<_> = picture
                    .iter()
                    .flat_map(|segment| &segment.blocks)
                    .filter(|block| block.state != PictureState::Inactive)
                    .map(|block| (block.address.0, block.size, block.state == PictureState::PendingFree))
                    .collect();
                assert_eq!(blocks_at(&timeline, step), active, "{policy}, {count} steps");
                let alive = timeline.segments.iter().filter(|life| life.begin <= step && step < life.end);
                assert_eq!(
                    runs(alive.map(|life| (life.address, life.size))),
                    runs(picture.iter().map(|segment| (segment.address.0, segment.size))),
                    "{policy}, {count} steps"
                );
            }
        }
    }
}
