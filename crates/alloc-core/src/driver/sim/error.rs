//! What the simulated GPU finds wrong, with a program or with the allocator.

use std::fmt;

use crate::driver::{Call, Status};
use crate::id::{DeviceId, DevicePtr, Stream};

/// Whether a kernel reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AccessKind {
    /// It reads.
    Read,
    /// It writes.
    Write,
}

/// What touched memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Work {
    /// A kernel, by its number in the order of launches.
    Kernel(u64),
    /// A kernel inside a capture, by its number in the order of launches.
    CapturedKernel(u64),
    /// A graph, which counts as a user of all that it captured, and the number of the launch.
    Replay {
        /// The graph.
        graph: u64,
        /// Its number in the order of launches.
        launch: u64,
    },
}

impl fmt::Display for Work {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Kernel(number) => write!(formatter, "kernel {number}"),
            Work::CapturedKernel(number) => write!(formatter, "captured kernel {number}"),
            Work::Replay { graph, launch } => write!(formatter, "replay {launch} of graph {graph}"),
        }
    }
}

/// An allocation, as the program knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationInfo {
    /// Its number in the order of allocations, from 1.
    pub number: u64,
    /// Its address.
    pub address: DevicePtr,
    /// Bytes that were asked for.
    pub size_bytes: u64,
    /// The stream it was allocated on.
    pub stream: Stream,
    /// Whether the program has freed it.
    pub freed: bool,
}

impl fmt::Display for AllocationInfo {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, address, size_bytes, stream, freed } = self;
        let state = if *freed { ", freed" } else { "" };
        write!(
            formatter,
            "allocation {number} ({size_bytes} bytes at {address:?}, made on stream {:?} of {}{state})",
            stream.handle, stream.device
        )
    }
}

/// One use of an allocation by work on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UseInfo {
    /// What was used.
    pub allocation: AllocationInfo,
    /// Where it ran.
    pub stream: Stream,
    /// What ran.
    pub work: Work,
    /// How it used the memory.
    pub access: AccessKind,
}

impl fmt::Display for UseInfo {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allocation, stream, work, access } = self;
        let verb = match access {
            AccessKind::Read => "reads",
            AccessKind::Write => "writes",
        };
        write!(formatter, "{work} on stream {:?} of {} {verb} {allocation}", stream.handle, stream.device)
    }
}

/// Two allocations share physical bytes, and nothing orders a use of one after a use of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("race on memory that two allocations share: {later}; nothing orders it after this: {earlier}")]
pub struct RaceError {
    /// The use that was queued first.
    pub earlier: UseInfo,
    /// The use that was queued last, by the call that failed.
    pub later: UseInfo,
}

/// The program used an allocation that it had freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("use after free: {0}")]
pub struct UseAfterFreeError(pub UseInfo);

/// Work touched an address that had no accessible memory behind it when the work ran. The context is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct UnmappedAccessError {
    /// The first such address.
    pub address: DevicePtr,
    /// The allocation that the work meant to use; `None` if the address belongs to none.
    pub allocation: Option<AllocationInfo>,
    /// What ran.
    pub work: Work,
    /// Where it ran.
    pub stream: Stream,
}

impl fmt::Display for UnmappedAccessError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, allocation, work, stream } = self;
        write!(
            formatter,
            "{work} on stream {:?} of {} touches {address:?}, which is not mapped for it when it runs",
            stream.handle, stream.device
        )?;
        match allocation {
            Some(allocation) => write!(formatter, "; the address is part of {allocation}"),
            None => Ok(()),
        }
    }
}

/// A mapping was removed although nothing orders that after its last use, as far as the host has seen.
///
/// The work may have been over by luck; on another day it faults. Either the program used the memory on a stream that it
/// did not tell of with `record_stream`, or the allocator did not wait for one that it knew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the mapping at {address:?} was removed although the host had not seen the end of its use on stream {:?} of {}",
    stream.handle, stream.device
)]
pub struct UnorderedUnmapError {
    /// Where the mapping began.
    pub address: DevicePtr,
    /// A stream whose last use of it was not seen to end.
    pub stream: Stream,
}

/// Something that no correct allocator lets happen, whatever the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Two live allocations share bytes.
    #[error("two live allocations share memory: {newer} and {older}")]
    Overlap {
        /// The one made last.
        newer: AllocationInfo,
        /// The one that was there.
        older: AllocationInfo,
    },
    /// A new allocation has no accessible memory behind part of it.
    #[error("{allocation} has no accessible memory at {address:?}")]
    Unbacked {
        /// The allocation.
        allocation: AllocationInfo,
        /// The first address without.
        address: DevicePtr,
    },
    /// The allocator unmapped or freed memory of a live allocation.
    #[error("memory was taken from under {0}, which is live")]
    TakenWhileLive(AllocationInfo),
    /// The allocator gave the driver the handle of a stream that the program has destroyed. A real driver may crash.
    #[error("{} was given stream {:?} of {}, which is destroyed", call.name(), stream.handle, stream.device)]
    DeadStream {
        /// The call.
        call: Call,
        /// The stream that its handle named last.
        stream: Stream,
    },
    /// Memory of a live graph was handed to an allocation outside its pool, which a replay now overwrites.
    #[error("{replay} while the same memory belongs to {owner}")]
    GraphMemoryHandedOut {
        /// The replay's use.
        replay: UseInfo,
        /// Who owns the memory now.
        owner: AllocationInfo,
    },
    /// The allocator did not know one of its allocations when it was freed, or freed what was not one.
    #[error("the free of {address:?} came to {outcome}, but a live allocation {} there", if *is_live { "was" } else { "was not" })]
    FreeMisjudged {
        /// What was freed.
        address: DevicePtr,
        /// What the allocator said.
        outcome: &'static str,
        /// Whether a live allocation starts there.
        is_live: bool,
    },
    /// The allocator's count of the memory that it holds is not the device's.
    #[error("the allocator counts {reserved} reserved bytes on {device}, which has given out {physical}")]
    Miscounted {
        /// The device.
        device: DeviceId,
        /// Bytes by the allocator's count.
        reserved: u64,
        /// Bytes by the device's count.
        physical: u64,
    },
    /// After everything was released, the device still holds something.
    #[error(
        "the device is not empty: {segments} segments, {handles} handles, {mappings} mappings, {ranges} address ranges \
         and {events} events are left"
    )]
    Leak {
        /// Segments from `cuMemAlloc`.
        segments: usize,
        /// Handles that were not released, or are still mapped.
        handles: usize,
        /// Mappings.
        mappings: usize,
        /// Reserved address ranges.
        ranges: usize,
        /// Events.
        events: usize,
    },
}

/// Why a call of the simulated program failed, or what it brought to light.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimError {
    /// See [`RaceError`]: the program left an order out, or the allocator handed memory on too early.
    #[error(transparent)]
    Race(#[from] Box<RaceError>),
    /// See [`UseAfterFreeError`]: the program is wrong.
    #[error(transparent)]
    UseAfterFree(#[from] Box<UseAfterFreeError>),
    /// See [`UnmappedAccessError`]: the program used what it never allocated, or the allocator unmapped too early.
    #[error(transparent)]
    UnmappedAccess(#[from] Box<UnmappedAccessError>),
    /// See [`UnorderedUnmapError`]: the program left a `record_stream` out, or the allocator unmapped too early.
    #[error(transparent)]
    UnorderedUnmap(#[from] Box<UnorderedUnmapError>),
    /// See [`Violation`]: the allocator is wrong.
    #[error(transparent)]
    Violation(#[from] Box<Violation>),
    /// The driver refuses what the program asked for, as a real one would.
    #[error("{operation} failed: {status}")]
    Refused {
        /// CUDA's name of the call that a real program would have made.
        operation: &'static str,
        /// Why.
        status: Status,
    },
}
