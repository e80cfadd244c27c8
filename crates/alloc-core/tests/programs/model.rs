//! What a program knows of itself: what it holds, and which of its streams come after which use.
//!
//! A correct program uses a block on a foreign stream only after that stream was ordered after the allocation, and frees
//! it only after that use was settled. Memory that graphs use is used again at every replay, so all uses of one graph
//! pool, replays and others, come one after the other. The model is what keeps generated programs to that.

use std::collections::BTreeSet;

use alloc_core::{
    driver::sim::GraphId,
    id::{DeviceId, DevicePtr, PoolId, StreamHandle},
};

/// A stream's position among the streams of a program.
pub(crate) type Slot = usize;

/// A stream of the program. When it is destroyed and its handle comes back, the next generation begins.
#[derive(Clone, Debug)]
pub(crate) struct ProgramStream {
    pub(crate) device: DeviceId,
    pub(crate) handle: StreamHandle,
    pub(crate) generation: u32,
}

/// A block that the program holds.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// Its number among all blocks of the program.
    pub(crate) number: u64,
    pub(crate) address: DevicePtr,
    pub(crate) size: u64,
    pub(crate) device: DeviceId,
    pub(crate) own: Slot,
    pub(crate) own_generation: u32,
    /// The private pool that it came from, among [`Pool`]s.
    pub(crate) pool: Option<usize>,
    /// Foreign streams whose work from now on comes after the allocation.
    pub(crate) ordered: BTreeSet<Slot>,
    /// Foreign streams that use it, neither waited for since nor recorded.
    pub(crate) unsettled: BTreeSet<Slot>,
    pub(crate) recorded: BTreeSet<Slot>,
    /// The same for captured uses: the capture's number and the stream.
    pub(crate) captured: BTreeSet<(u64, Slot)>,
    /// Captures and graphs outside its pool that use it: it must outlive them.
    pub(crate) holders: u32,
}

/// One life of a private pool: from its first begin to its last release.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub(crate) device: DeviceId,
    pub(crate) id: PoolId,
    /// Begins that no release has answered.
    pub(crate) users: u32,
    /// Its source, among the program's, if it has one of its own.
    pub(crate) source: Option<usize>,
    /// Whether graphs use it.
    pub(crate) is_for_graphs: bool,
    /// Streams after all of which the next use of a graph pool has to come.
    pub(crate) used_on: BTreeSet<Slot>,
}

/// Whose requests go to a private pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Routed {
    /// Those of one stream.
    Stream(Slot),
    /// Those of all streams of a capture, by its number.
    Capture(u64),
}

/// Requests that go to a private pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) of: Routed,
    pub(crate) pool: usize,
}

/// A capture under way.
#[derive(Clone, Debug)]
pub(crate) struct Capture {
    pub(crate) number: u64,
    pub(crate) origin: Slot,
    pub(crate) members: BTreeSet<Slot>,
    pub(crate) pool: usize,
    /// Numbers of the blocks that it uses and that are not its pool's.
    pub(crate) outside: BTreeSet<u64>,
    /// Whether the program has spoiled it.
    pub(crate) is_spoiled: bool,
    /// Faults that had happened when it began: one that happens later may spoil it.
    pub(crate) faults_before: usize,
}

/// What a capture became, and its hold on its pool.
#[derive(Clone, Debug)]
pub(crate) struct Graph {
    /// `None` if the capture failed.
    pub(crate) id: Option<GraphId>,
    pub(crate) pool: usize,
    pub(crate) outside: BTreeSet<u64>,
}
