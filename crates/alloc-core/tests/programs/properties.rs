//! The properties.

use alloc_core::driver::sim::SimError;
use proptest::prelude::*;

use crate::{
    machine::{machine, plain_machine},
    operation::{faultless_program, program},
    order::{Order, reuse},
    runner::{for_all, from_environment, play, play_in},
    world::{World, ensure},
};

/// Programs of the main property: enough for each rare path to be walked a hundred times.
pub(crate) const PROGRAMS: u64 = 12_000;
/// The median program executes at least so many operations.
const MEDIAN_MIN: usize = 80;

#[test]
#[expect(clippy::print_stdout, reason = "what the run reached is its result")]
fn generated_programs_neither_race_nor_leak_nor_miscount() {
    let programs = from_environment("RALLOCATOR_PROGRAMS", PROGRAMS);
    let run = for_all(
        programs,
        || (machine(), program(0..=240)),
        |(machine, program), run| {
            let (world, executed) = play(&machine, &program)?;
            run.coverage.add(&world.coverage);
            run.executed.push(executed);
            Ok(())
        },
    );
    let median = run.executed[run.executed.len() / 2];
    println!("{programs} programs, median of executed operations {median}\n{}", run.coverage);
    if programs >= PROGRAMS {
        assert!(median >= MEDIAN_MIN, "half of the programs execute less than {MEDIAN_MIN} operations");
        let missed = run.coverage.missed();
        assert!(missed.is_empty(), "reached too seldom: {missed:#?}");
    }
}

#[test]
fn generated_programs_survive_the_failure_of_their_nth_call_for_every_n() {
    let programs = from_environment("RALLOCATOR_PROGRAMS", PROGRAMS) * 300 / PROGRAMS;
    for_all(
        programs.max(1),
        || (machine(), faultless_program(0..=60)),
        |(machine, program), _| {
            for nth in 1.. {
                let mut world = World::new(&machine);
                world.fail_nth(nth);
                play_in(&mut world, &program).map_err(|failure| format!("call {nth} fails; {failure}"))?;
                world.finish().map_err(|failure| format!("call {nth} fails; at the end: {failure}"))?;
                if world.gpu.driver().pending_faults() > 0 {
                    break;
                }
            }
            Ok(())
        },
    );
}

/// Memory used on a second stream and then reused on its own, after any program.
#[test]
fn removing_a_needed_record_stream_is_a_race_that_names_both_users() {
    let programs = from_environment("RALLOCATOR_PROGRAMS", PROGRAMS) * 500 / PROGRAMS;
    let strategy = || (plain_machine(), faultless_program(0..=40), 1..2_000_000_u64, 1..3_usize, any::<bool>());
    let run = for_all(programs.max(1), strategy, |(machine, program, size, other, writes), run| {
        for order in [Order::Record, Order::Wait, Order::None] {
            let mut world = World::new(&machine);
            play_in(&mut world, &program)?;
            let Some(reuse) = reuse(&mut world, size, other, writes, order)? else { return Ok(()) };
            match (order, reuse.result) {
                (Order::None, Err(SimError::Race(race))) => {
                    let (earlier, later) = (race.earlier, race.later);
                    ensure(earlier.allocation.address == reuse.first, || format!("{race} begins elsewhere"))?;
                    ensure(later.allocation.address == reuse.second, || format!("{race} ends elsewhere"))?;
                    let streams = (earlier.stream.handle, later.stream.handle);
                    ensure(streams == reuse.streams, || format!("{race} is on {streams:?}"))?;
                }
                (Order::None, result) => return Err(format!("the race was not seen: {result:?}")),
                (Order::Record | Order::Wait, Ok(())) => {}
                (order, Err(error)) => return Err(format!("{order:?} did not order the reuse: {error}")),
            }
            if order != Order::None {
                world.finish()?;
            }
        }
        run.executed.push(program.len());
        Ok(())
    });
    let judged = run.executed.len() as u64;
    assert!(judged * 2 >= programs, "only {judged} of {programs} programs left room for the block");
}
