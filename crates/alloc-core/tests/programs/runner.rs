//! Running a property over many generated programs, on two threads.

use std::{cell::RefCell, fmt::Debug, time::Duration};

use proptest::{
    strategy::Strategy,
    test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner},
};

use crate::{
    coverage::Coverage,
    machine::Machine,
    operation::Operation,
    world::{Failure, Step, World},
};

/// The threads that share the programs: as many as CI has cores.
const THREADS: u64 = 2;
/// Shrinking a failure takes this long at most.
const SHRINK_TIME_MAX: Duration = Duration::from_mins(1);

/// What a run came to.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub(crate) coverage: Coverage,
    /// Executed operations of each program.
    pub(crate) executed: Vec<usize>,
}

/// The value of an environment variable that is a number, or `default` if it is not set.
#[expect(clippy::disallowed_methods, reason = "which programs a test runs is not the core's input")]
pub(crate) fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Runs `property` on `cases` values of `strategy`, and panics with the smallest that fails.
pub(crate) fn for_all<S: Strategy>(
    cases: u64,
    strategy: impl Fn() -> S + Sync,
    property: impl Fn(S::Value, &mut Run) -> Result<(), Failure> + Sync,
) -> Run
where
    S::Value: Debug,
{
    let seed = from_environment("RALLOCATOR_SEED", 1);
    let on_thread = |thread: u64| {
        let cases = cases / THREADS + u64::from(thread < cases % THREADS);
        for_all_on_one_thread(cases as u32, seed.wrapping_mul(THREADS) + thread, &strategy(), &property)
    };
    let runs: Vec<Result<Run, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || on_thread(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("failures come back as values")).collect()
    });
    let mut total = Run::default();
    for run in runs {
        let run = run.unwrap_or_else(|failure| panic!("{failure}"));
        total.coverage.add(&run.coverage);
        total.executed.extend(run.executed);
    }
    total.executed.sort_unstable();
    total
}

fn for_all_on_one_thread<S: Strategy>(
    cases: u32,
    seed: u64,
    strategy: &S,
    property: impl Fn(S::Value, &mut Run) -> Result<(), Failure>,
) -> Result<Run, String>
where
    S::Value: Debug,
{
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_time: SHRINK_TIME_MAX.as_millis() as u32,
        max_shrink_iters: from_environment("RALLOCATOR_SHRINKS", 1_000_000) as u32,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let run = RefCell::new(Run::default());
    let result = TestRunner::new_with_rng(config, random)
        .run(strategy, |value| property(value, &mut run.borrow_mut()).map_err(TestCaseError::fail));
    match result {
        Ok(()) => Ok(run.into_inner()),
        Err(TestError::Fail(reason, smallest)) => {
            // One operation a line, as it would stand in a test.
            let smallest = format!("{smallest:?}").replace(" }, ", " },\n").replace('[', "[\n");
            Err(format!("{reason}\nsmallest failure: {smallest}"))
        }
        Err(TestError::Abort(reason)) => Err(reason.to_string()),
    }
}

/// Runs a program to its end. Returns the world it leaves, and how many operations were executed.
pub(crate) fn play(machine: &Machine, program: &[Operation]) -> Result<(World, usize), Failure> {
    let mut world = World::new(machine);
    let executed = play_in(&mut world, program)?;
    world.finish().map_err(|failure| format!("at the end: {failure}"))?;
    Ok((world, executed))
}

/// Runs a program in a world, which goes on. Returns how many operations were executed.
pub(crate) fn play_in(world: &mut World, program: &[Operation]) -> Result<usize, Failure> {
    let mut executed = 0;
    for (position, operation) in program.iter().enumerate() {
        let step =
            world.step(operation).map_err(|failure| format!("operation {position}, {operation:?}: {failure}"))?;
        executed += usize::from(step == Step::Executed);
    }
    Ok(executed)
}
