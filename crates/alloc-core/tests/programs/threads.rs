//! Programs of several threads, each with a default stream of its own: one handle, which names another stream on every
//! thread.

use std::{sync::mpsc, thread};

use alloc_core::{
    allocator::RecordOutcome,
    error::AllocError,
    id::{DeviceId, DevicePtr, StreamHandle},
    simulated_gpu::{SimulatedGpu, SimulatedGpuError},
};
use proptest::prelude::*;

use crate::{
    machine::{Machine, plain_machine},
    operation::Pick,
    properties::PROGRAMS,
    runner::{for_all, from_environment},
    world::{DEVICES, Failure, ensure, picked, text},
};

const DEVICE: DeviceId = DEVICES[0];
const OWN: StreamHandle = StreamHandle::PER_THREAD;
const THREADS: usize = 3;
const MIB: u64 = 1 << 20;

/// What a thread does next.
#[derive(Clone, Copy, Debug)]
enum Turn {
    /// Allocates for its own stream.
    Malloc { size: u64 },
    /// Writes a block of its own that no other stream has used.
    Use { block: Pick, duration_us: u64 },
    /// Waits for everything on the host, and uses any block on its own stream, which it records.
    Borrow { block: Pick, duration_us: u64 },
    /// Frees any block.
    Free { block: Pick },
    /// `empty_cache`.
    EmptyCache,
}

/// The same, of a certain block.
#[derive(Clone, Copy, Debug)]
enum Order {
    Malloc(u64),
    Use(DevicePtr, u64),
    Borrow(DevicePtr, u64),
    Free(DevicePtr),
    EmptyCache,
}

/// A block that the program holds.
struct Held {
    address: DevicePtr,
    owner: usize,
    is_borrowed: bool,
}

fn turn() -> impl Strategy<Value = (usize, Turn)> {
    let size = || prop_oneof![1..MIB, MIB..30 * MIB];
    let duration = || prop_oneof![1..200_u64, 10_000..1_000_000_u64];
    let turn = prop_oneof![
        6 => size().prop_map(|size| Turn::Malloc { size }),
        4 => (any::<Pick>(), duration()).prop_map(|(block, duration_us)| Turn::Use { block, duration_us }),
        3 => (any::<Pick>(), duration()).prop_map(|(block, duration_us)| Turn::Borrow { block, duration_us }),
        5 => any::<Pick>().prop_map(|block| Turn::Free { block }),
        1 => Just(Turn::EmptyCache),
    ];
    (0..THREADS, turn)
}

/// What the turn means among the blocks that are held: `None` if there is nothing to do.
fn order(held: &mut Vec<Held>, thread: usize, turn: Turn) -> Option<Order> {
    match turn {
        Turn::Malloc { size } => Some(Order::Malloc(size)),
        Turn::Use { block, duration_us } => {
            let own: Vec<&Held> = held.iter().filter(|held| held.owner == thread && !held.is_borrowed).collect();
            Some(Order::Use(own[picked(block, own.len())?].address, duration_us))
        }
        Turn::Borrow { block, duration_us } => {
            let position = picked(block, held.len())?;
            held[position].is_borrowed = true;
            Some(Order::Borrow(held[position].address, duration_us))
        }
        Turn::Free { block } => Some(Order::Free(held.swap_remove(picked(block, held.len())?).address)),
        Turn::EmptyCache => Some(Order::EmptyCache),
    }
}

/// Carries an order out on the calling thread. Returns what it allocated.
fn carry_out(gpu: &SimulatedGpu, order: Order) -> Result<Option<DevicePtr>, Failure> {
    match order {
        Order::Malloc(size) => match gpu.malloc(size, DEVICE, OWN) {
            Err(SimulatedGpuError::Alloc(AllocError::OutOfMemory(_))) => return Ok(None),
            result => return result.map_err(text),
        },
        Order::Use(address, duration_us) => gpu.launch(OWN, &[], &[address], duration_us).map_err(text)?,
        Order::Borrow(address, duration_us) => {
            gpu.driver().synchronize().map_err(text)?;
            let outcome = gpu.record_stream(address, OWN).map_err(text)?;
            ensure(outcome == RecordOutcome::Recorded, || format!("record_stream is {outcome:?}"))?;
            gpu.launch(OWN, &[], &[address], duration_us).map_err(text)?;
        }
        Order::Free(address) => gpu.free(address, DEVICE).map(drop).map_err(text)?,
        Order::EmptyCache => gpu.empty_cache().map_err(text)?,
    }
    Ok(None)
}

fn play(machine: &Machine, program: &[(usize, Turn)]) -> Result<(), Failure> {
    let gpu = machine.start();
    thread::scope(|scope| {
        let start = || {
            let (orders, inbox) = mpsc::channel();
            let (outbox, answers) = mpsc::channel();
            let gpu = &gpu;
            scope.spawn(move || {
                gpu.set_current_device(DEVICE).expect("it exists");
                for order in inbox {
                    outbox.send(carry_out(gpu, order)).expect("the program waits for the answer");
                }
            });
            (orders, answers)
        };
        let threads: Vec<_> = (0..THREADS).map(|_| start()).collect();
        let mut held = Vec::new();
        for (thread, turn) in program {
            let Some(order) = order(&mut held, *thread, *turn) else { continue };
            let (orders, answers) = &threads[*thread];
            orders.send(order).expect("the thread waits for orders");
            let allocated = answers.recv().expect("the thread does not panic")?;
            held.extend(allocated.map(|address| Held { address, owner: *thread, is_borrowed: false }));
            gpu.check().map_err(text)?;
        }
        Ok::<(), Failure>(())
    })?;
    gpu.close().map_err(text)
}

#[test]
fn own_default_streams_of_several_threads_are_told_apart() {
    let programs = || (plain_machine(), proptest::collection::vec(turn(), 10..=60));
    let cases = from_environment("RALLOCATOR_PROGRAMS", PROGRAMS) * 500 / PROGRAMS;
    for_all(cases.max(1), programs, |(machine, program), run| {
        play(&machine, &program)?;
        run.executed.push(program.len());
        Ok(())
    });
}
