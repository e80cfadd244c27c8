//! Nanoseconds of the cached path, and of what no free block serves: `cargo bench -p alloc-core --features sim --bench core`.
//!
//! Every figure is for one malloc and one free, or for two of each where streams take turns, with all statistics on.
//! Another program on the machine makes these figures worse and never better; `instructions` counts what no other program
//! disturbs.

mod workload;

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use alloc_core::id::StreamHandle;
use criterion::{Criterion, criterion_group, criterion_main};

use workload::{KIB, MIB, Machine, POLICIES, Replacement, SIDE, Turns};

fn cached_pair(criterion: &mut Criterion) {
    let sizes = [(512, "512 B"), (4 * KIB, "4 KiB"), (MIB, "1 MiB"), (2 * MIB, "2 MiB"), (64 * MIB, "64 MiB")];
    for (policy, policy_name) in POLICIES {
        let mut group = criterion.benchmark_group(format!("cached pair, {policy_name}"));
        for (size, name) in sizes {
            let machine = Machine::new(policy);
            group.bench_function(name, |bencher| bencher.iter(|| machine.pair(size, StreamHandle::DEFAULT)));
        }
    }
}

fn random_replacement(criterion: &mut Criterion) {
    for (policy, policy_name) in POLICIES {
        let mut group = criterion.benchmark_group(format!("random replacement, {policy_name}"));
        for (live, max_size_log2) in [(1_000, 20), (1_000, 23), (10_000, 20), (10_000, 23)] {
            let name = format!("{live} live up to {} MiB", (1 << max_size_log2) / MIB);
            let mut replacement = Replacement::new(&Machine::new(policy), StreamHandle::DEFAULT, live, max_size_log2);
            group.bench_function(name, |bencher| bencher.iter(|| replacement.step()));
        }
    }
}

fn pair_on_two_streams(criterion: &mut Criterion) {
    for (policy, policy_name) in POLICIES {
        let mut group = criterion.benchmark_group(format!("record_stream, {policy_name}"));
        for (size, name) in [(4 * KIB, "4 KiB"), (2 * MIB, "2 MiB")] {
            let machine = Machine::new(policy);
            machine.touch(SIDE);
            group.bench_function(name, |bencher| bencher.iter(|| machine.pair_on_two_streams(size, SIDE)));
        }
    }
}

fn in_turn(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("two streams in turn");
    for (policy, policy_name) in POLICIES {
        let mut turns = Turns::new(&Machine::new(policy));
        group.bench_function(policy_name, |bencher| bencher.iter(|| turns.step()));
    }
}

fn two_threads(criterion: &mut Criterion) {
    for (policy, policy_name) in POLICIES {
        let mut group = criterion.benchmark_group(format!("two threads, {policy_name}"));
        for (streams, name) in [([SIDE; 2], "one stream"), ([SIDE, StreamHandle(0x20)], "a stream each")] {
            let machine = Machine::new(policy);
            for stream in streams {
                machine.touch(stream);
            }
            let pair = |stream| machine.pair(4 * KIB, stream);
            group.bench_function(format!("4 KiB pair, {name}"), |bencher| {
                bencher.iter_custom(|count| on_two_threads(count, streams, pair));
            });
        }
    }
}

/// The time in which both threads make `count` calls of `work` each.
#[expect(clippy::disallowed_methods, reason = "the clock is the bench's, not the core's")]
fn on_two_threads(count: u64, streams: [StreamHandle; 2], work: impl Fn(StreamHandle) + Sync) -> Duration {
    let start = Barrier::new(3);
    thread::scope(|scope| {
        for stream in streams {
            let (start, work) = (&start, &work);
            scope.spawn(move || {
                start.wait();
                (0..count).for_each(|_| work(stream));
            });
        }
        start.wait();
        Instant::now()
    })
    .elapsed()
}

criterion_group!(benches, cached_pair, random_replacement, pair_on_two_streams, in_turn, two_threads);
criterion_main!(benches);
