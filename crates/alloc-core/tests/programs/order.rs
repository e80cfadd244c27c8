//! One block, two users, and what orders the second after the first.

use alloc_core::{
    driver::sim::SimError,
    id::{DevicePtr, StreamHandle},
    simulated_gpu::SimulatedGpuError,
};

use crate::world::{Failure, World, text};

/// What orders the block's next owner after its foreign use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// `record_stream`.
    Record,
    /// The block's own stream waits for the other.
    Wait,
    /// Nothing: the program is wrong.
    None,
}

/// How the block was reused.
pub(crate) struct Reuse {
    /// What the simulator said to the second owner's kernel.
    pub(crate) result: Result<(), SimError>,
    /// The addresses of the first and of the second owner.
    pub(crate) first: DevicePtr,
    pub(crate) second: DevicePtr,
    /// The streams of their kernels.
    pub(crate) streams: (StreamHandle, StreamHandle),
}

/// Kernels of this length outlast all else, so that no poll finds them done.
const LONG_US: u64 = 1_000_000_000;
/// Blocks that a program asks for until one of them has the memory; more than fit into the device.
const ATTEMPTS: usize = 100_000;

/// Allocates on the first stream, uses on another one, frees, and asks again on the first stream until the memory comes
/// back; then uses that. `None` if the program before left no room for the block, or its memory does not come back.
pub(crate) fn reuse(
    world: &mut World,
    size: u64,
    other: usize,
    writes: bool,
    order: Order,
) -> Result<Option<Reuse>, Failure> {
    const OWN: usize = 0;
    world.end_all_captures()?;
    world.end_all_routes()?;
    let Some(position) = world.malloc_on(size, OWN)? else { return Ok(None) };
    let first = world.held[position].address;
    if !world.can_wait(other, OWN) {
        return Ok(None);
    }
    world.wait(other, OWN)?;
    let stream = world.enter(other);
    let (reads, writes): (&[_], &[_]) = if writes { (&[], &[first]) } else { (&[first], &[]) };
    world.gpu.launch(stream, reads, writes, LONG_US).map_err(text)?;
    match order {
        Order::Record => world.record_on(position, other)?,
        Order::Wait => world.wait(OWN, other)?,
        Order::None => {}
    }
    world.free(position, 0)?;

    for _ in 0..ATTEMPTS {
        let calls = world.gpu.driver().calls();
        let Some(position) = world.malloc_on(size, OWN)? else { break };
        let second = world.held[position].address;
        let overlaps = first.0 < second.0 + size && second.0 < first.0 + size;
        let own = world.enter(OWN);
        let result = match world.gpu.launch(own, &[], &[second], 1) {
            Ok(()) => Ok(()),
            Err(SimulatedGpuError::Sim(error)) => Err(error),
            Err(error) => return Err(text(error)),
        };
        if overlaps || result.is_err() {
            return Ok(Some(Reuse { result, first, second, streams: (stream, own) }));
        }
        // Without a record the memory is free, so nothing is asked of the driver before it is handed out again.
        let is_cached = world.gpu.driver().calls() == calls;
        if order == Order::None && !is_cached {
            return Err("the driver was asked although the block was free".to_owned());
        }
    }
    Ok(None)
}
