//! Instructions of the cached path, and of what no free block serves, counted by valgrind: the same on every run and
//! whatever else the machine does.
//!
//! `cargo bench -p alloc-core --features sim --bench instructions` runs itself under callgrind, twice for each workload
//! with different numbers of steps: the difference is what the steps cost, without the set-up. It fails where a count is
//! above its ceiling, so that a slower path is noticed when it is written; with a faster one, lower the ceiling.

#![expect(clippy::print_stdout, reason = "the table is what this program is for")]

mod workload;

use std::{
    env, io,
    process::{Command, ExitCode},
};

use alloc_core::{config::Policy, id::StreamHandle};

use workload::{KIB, MIB, Machine, POLICIES, Replacement, SIDE, Turns};

/// Steps of the shorter run, and of the longer one.
const STEPS: [u64; 2] = [1_000, 21_000];
/// The same of steps that cost as much as a hundred others.
const FEW_STEPS: [u64; 2] = [100, 1_100];

struct Workload {
    name: &'static str,
    steps: [u64; 2],
    /// Instructions that one step may take at most, by policy in the order of [`POLICIES`]: a twentieth more than it
    /// took on x86-64 when the ceiling was last set.
    ceilings: [u64; 3],
    run: fn(Policy, u64),
}

const WORKLOADS: [Workload; 7] = [
    Workload {
        name: "cached pair, 512 B",
        steps: STEPS,
        ceilings: [1_190, 1_230, 1_105],
        run: |policy, steps| pairs(policy, 512, steps),
    },
    Workload {
        name: "cached pair, 64 MiB",
        steps: STEPS,
        ceilings: [790, 1_220, 755],
        run: |policy, steps| pairs(policy, 64 * MIB, steps),
    },
    Workload {
        name: "1,000 live up to 1 MiB",
        steps: STEPS,
        ceilings: [1_230, 1_140, 1_120],
        run: |policy, steps| replace(policy, 1_000, 20, steps),
    },
    Workload {
        name: "1,000 live up to 8 MiB",
        steps: STEPS,
        ceilings: [1_200, 1_160, 1_150],
        run: |policy, steps| replace(policy, 1_000, 23, steps),
    },
    Workload {
        name: "10,000 live up to 8 MiB",
        steps: STEPS,
        ceilings: [1_255, 1_215, 1_210],
        run: |policy, steps| replace(policy, 10_000, 23, steps),
    },
    Workload { name: "record_stream, 4 KiB", steps: STEPS, ceilings: [2_505, 2_455, 2_410], run: on_two_streams },
    Workload { name: "two streams in turn", steps: FEW_STEPS, ceilings: [2_420, 2_430, 268_500], run: in_turn },
];

fn pairs(policy: Policy, size: u64, steps: u64) {
    let machine = Machine::new(policy);
    (0..steps).for_each(|_| machine.pair(size, StreamHandle::DEFAULT));
}

fn replace(policy: Policy, live: usize, max_size_log2: u64, steps: u64) {
    let mut replacement = Replacement::new(&Machine::new(policy), StreamHandle::DEFAULT, live, max_size_log2);
    (0..steps).for_each(|_| replacement.step());
}

fn on_two_streams(policy: Policy, steps: u64) {
    let machine = Machine::new(policy);
    machine.touch(SIDE);
    (0..steps).for_each(|_| machine.pair_on_two_streams(4 * KIB, SIDE));
}

fn in_turn(policy: Policy, steps: u64) {
    let mut turns = Turns::new(&Machine::new(policy));
    (0..steps).for_each(|_| turns.step());
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().collect();
    if let [_, mode, policy, name, steps] = arguments.as_slice()
        && mode == RUN
    {
        let (policy, _) = POLICIES.into_iter().find(|(_, name)| name == policy).expect("one of the policies");
        let workload = WORKLOADS.iter().find(|workload| workload.name == name).expect("one of the workloads");
        (workload.run)(policy, steps.parse().expect("a number of steps"));
        return ExitCode::SUCCESS;
    }
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        let count = POLICIES.len() * WORKLOADS.len();
        println!("SKIPPED: instructions of {count} workloads, since valgrind does not start: {error}");
        return ExitCode::SUCCESS;
    }
    match report() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            println!("\nA count is above its ceiling, which stands beside the workload in benches/instructions.rs.");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("\ncallgrind did not count: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The word that makes this program run one workload instead of counting them all.
const RUN: &str = "run";

/// Prints a line for each workload. Returns whether all are below their ceilings.
fn report() -> io::Result<bool> {
    println!("{:<11} {:<24} {:>21} {:>8}", "policy", "workload", "instructions a step", "ceiling");
    let mut all_below = true;
    for (position, (_, policy)) in POLICIES.into_iter().enumerate() {
        for workload in &WORKLOADS {
            let [shorter, longer] = workload.steps.map(|steps| count(policy, workload.name, steps));
            let a_step = (longer? - shorter?) / (workload.steps[1] - workload.steps[0]);
            let ceiling = workload.ceilings[position];
            let remark = if a_step > ceiling { "  TOO MANY" } else { "" };
            println!("{policy:<11} {:<24} {a_step:>21} {ceiling:>8}{remark}", workload.name);
            all_below &= a_step <= ceiling;
        }
    }
    Ok(all_below)
}

/// The instructions of this program with that workload, from its start to its end.
fn count(policy: &str, workload: &str, steps: u64) -> io::Result<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(env::current_exe()?)
        .args([RUN, policy, workload, &steps.to_string()])
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let counted = text.lines().find_map(|line| line.split_once("Collected : "));
    match counted.and_then(|(_, count)| count.trim().parse().ok()) {
        Some(count) if output.status.success() => Ok(count),
        _ => Err(io::Error::other(text.into_owned())),
    }
}
