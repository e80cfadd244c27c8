//! Holds the CUDA driver to the contract, on a real GPU.
//!
//! ```text
//! contract_cuda [FILTER]
//! ```
//!
//! runs the clauses whose names contain FILTER, prints a line for each and exits with 1 if one failed. Without a GPU it
//! says so and exits with 0. Clauses run in a child process; after one that failed, crashed or hung a fresh child goes
//! on with the next, since a failure can leave a context in which nothing works any more.

#![expect(clippy::print_stdout, reason = "a program that prints its findings")]

#[path = "contract_cuda/blocking.rs"]
mod blocking;
#[path = "contract_cuda/rig.rs"]
mod rig;

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use alloc_core::driver::Driver;
use alloc_core::driver::contract::{Clause, Stop, clauses};
use alloc_core::driver::cuda::CudaDriver;

use rig::CudaRig;

/// What test runners that list tests first are told that this program's one test is called.
const TEST_NAME: &str = "the_cuda_driver_keeps_its_contract";

/// With this argument and the number of clauses to leave out, the program is a child that runs the others.
const CHILD: &str = "--from-clause";

/// Longer than any clause takes on a busy machine, the start of the driver included.
const PATIENCE: Duration = Duration::from_mins(1);

/// A line that begins with one of these is a clause's result.
const PASSED: &str = "passed  ";
const FAILED: &str = "FAILED  ";
const SKIPPED: &str = "skipped ";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        if !arguments.iter().any(|argument| argument == "--ignored") {
            println!("{TEST_NAME}: test");
        }
        return ExitCode::SUCCESS;
    }
    if let Some(position) = arguments.iter().position(|argument| argument == CHILD) {
        let first = arguments.get(position + 1).and_then(|number| number.parse().ok());
        let filter = arguments.get(position + 2).map_or("", String::as_str);
        run_clauses(&matching(filter)[first.expect("the parent gives a number")..]);
        return ExitCode::SUCCESS;
    }
    let filter = arguments.iter().find(|argument| !argument.starts_with("--") && *argument != TEST_NAME);
    run_all(filter.map_or("", String::as_str))
}

fn matching(filter: &str) -> Vec<&'static Clause> {
    clauses().chain(blocking::CLAUSES).filter(|clause| clause.name.contains(filter)).collect()
}

/// The child: runs clauses until one fails.
fn run_clauses(clauses: &[&Clause]) {
    let rig = CudaRig::new();
    for clause in clauses {
        match (clause.check)(&rig) {
            Ok(()) => println!("{PASSED}{}", clause.name),
            Err(Stop::Skipped(reason)) => println!("{SKIPPED}{}: {reason}", clause.name),
            Err(Stop::Failed(reason)) => {
                println!("{FAILED}{}: {reason}", clause.name);
                return;
            }
        }
    }
}

/// The parent: lets children run all clauses, prints what they find, and adds up.
fn run_all(filter: &str) -> ExitCode {
    let clauses = matching(filter);
    let devices = match CudaDriver::new().device_count() {
        Ok(devices) if devices > 0 => devices,
        outcome => {
            let reason = outcome.err().map_or_else(|| "the driver counts none".to_owned(), |error| error.to_string());
            println!("skipped: no GPU ({reason})");
            println!("0 passed, 0 failed, {} skipped", clauses.len());
            return ExitCode::SUCCESS;
        }
    };
    println!("{} clauses, {devices} devices", clauses.len());
    let mut lines = Vec::new();
    while lines.len() < clauses.len() {
        let (found, end) = run_child(lines.len(), filter);
        let failed = found.last().is_some_and(|line| line.starts_with(FAILED));
        lines.extend(found);
        if !failed && lines.len() < clauses.len() {
            let line = format!("{FAILED}{}: {end}", clauses[lines.len()].name);
            println!("{line}");
            lines.push(line);
        }
    }
    let count = |kind| lines.iter().filter(|line| line.starts_with(kind)).count();
    println!("{} passed, {} failed, {} skipped", count(PASSED), count(FAILED), count(SKIPPED));
    if count(FAILED) == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a child from the clause with that number on, and prints its lines as they come: the results among them, and how
/// the child ended.
#[expect(clippy::disallowed_methods, reason = "only a thread of its own can read a pipe while this one loses patience")]
fn run_child(first: usize, filter: &str) -> (Vec<String>, String) {
    let program = env::current_exe().expect("a running program has a path");
    let arguments = [CHILD, &first.to_string(), filter];
    let mut child = Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().expect("it started before");
    let output = child.stdout.take().expect("the child's output is piped");
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        // Sending fails when the parent has lost patience and listens no more.
        lines.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
    });
    let mut results = Vec::new();
    loop {
        match receiver.recv_timeout(PATIENCE) {
            Ok(line) => {
                println!("{line}");
                if [PASSED, FAILED, SKIPPED].iter().any(|kind| line.starts_with(kind)) {
                    results.push(line);
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.wait().expect("the child is ours to wait for");
                return (results, format!("the process ended in it: {status}"));
            }
            Err(RecvTimeoutError::Timeout) => {
                child.kill().expect("the child is ours to end");
                child.wait().expect("the child is ours to wait for");
                return (results, format!("still running after {} s", PATIENCE.as_secs()));
            }
        }
    }
}
