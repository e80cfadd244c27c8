//! The race oracle: knows the program's allocations and judges every use of memory.
//!
//! It sees physical bytes, so that memory mapped at two addresses is one memory, and it knows order only through vector
//! clocks, so that a verdict never depends on how long a kernel happened to take.

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashMap;

use super::access::{Access, AllocationId};
use super::clock::{StreamIndex, VectorClock};
use super::error::{
    AccessKind, AllocationInfo, RaceError, SimError, UnorderedUnmapError, UseAfterFreeError, UseInfo, Violation, Work,
};
use super::interval_map::IntervalMap;
use super::memory::{Memory, PhysicalId};
use super::shadow::{Shadow, Use};
use super::timeline::Timeline;
use crate::id::{DeviceId, DevicePtr, PoolId, Stream};

/// One allocation, live or freed.
#[derive(Debug)]
struct Allocation {
    address: u64,
    size: u64,
    stream: Stream,
    /// The private pool it came from.
    pool: Option<PoolId>,
    is_live: bool,
    /// Whether a graph may go on using it after its free: its pool is private and not released yet.
    is_kept_for_graphs: bool,
}

/// A launch about to happen: where, when, and what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch<'a> {
    pub(super) stream: StreamIndex,
    pub(super) epoch: u64,
    pub(super) clock: &'a VectorClock,
    pub(super) work: Work,
}

/// The program's allocations, and who used what.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    allocations: Vec<Allocation>,
    live: BTreeMap<u64, AllocationId>,
    /// The last allocation that was freed at each address, unless a live one lies there.
    freed: BTreeMap<u64, AllocationId>,
    shadow: Shadow,
    /// Which allocation each physical byte was handed to last.
    owners: FxHashMap<PhysicalId, IntervalMap<AllocationId>>,
    /// The last launch of each stream that used memory through the mapping at an address.
    used_through: BTreeMap<u64, VectorClock>,
    /// How often each private pool was begun and not yet released.
    pools: BTreeMap<(DeviceId, PoolId), u32>,
}

impl Oracle {
    /// The allocation that starts at `address` is live from now on.
    pub(super) fn on_allocated(
        &mut self,
        memory: &Memory,
        address: u64,
        size: u64,
        stream: Stream,
        pool: Option<PoolId>,
    ) -> Result<(), Box<Violation>> {
        let id = AllocationId(self.allocations.len());
        let is_kept_for_graphs = pool.is_some();
        self.allocations.push(Allocation { address, size, stream, pool, is_live: true, is_kept_for_graphs });
        let overlapped = self.live_in(address..address + size);
        self.live.insert(address, id);
        while let Some((stale, _)) = last_overlapping(&self.freed, &self.allocations, address..address + size) {
            self.freed.remove(&stale);
        }
        let mut older = overlapped;
        for piece in memory.backing(address, size) {
            let owners = self.owners.entry(piece.physical).or_default();
            older =
                older.or_else(|| owners.overlapping(piece.bytes()).copied().find(|o| self.allocations[o.0].is_live));
            owners.assign(piece.bytes(), id);
        }
        if let Some(older) = older {
            return Err(Box::new(Violation::Overlap { newer: self.info(id), older: self.info(older) }));
        }
        match memory.first_inaccessible(stream.device, address, size) {
            Some(address) => {
                Err(Box::new(Violation::Unbacked { allocation: self.info(id), address: DevicePtr(address) }))
            }
            None => Ok(()),
        }
    }

    /// The allocation that starts at `address` is freed; returns whether there is one.
    pub(super) fn on_freed(&mut self, address: u64) -> bool {
        let Some(id) = self.live.remove(&address) else { return false };
        self.allocations[id.0].is_live = false;
        self.freed.insert(address, id);
        true
    }

    /// A private pool was begun, for the first time or once more.
    pub(super) fn on_pool_begun(&mut self, device: DeviceId, pool: PoolId) {
        *self.pools.entry((device, pool)).or_default() += 1;
    }

    /// A private pool was released as often as this; after the last time no graph may use what was freed in it.
    pub(super) fn on_pool_released(&mut self, device: DeviceId, pool: PoolId) {
        let Some(holders) = self.pools.get_mut(&(device, pool)) else { return };
        *holders -= 1;
        if *holders == 0 {
            self.pools.remove(&(device, pool));
            for allocation in &mut self.allocations {
                if allocation.pool == Some(pool) && allocation.stream.device == device {
                    allocation.is_kept_for_graphs = false;
                }
            }
        }
    }

    /// Where live allocations start, and the device of each.
    pub(super) fn live_allocations(&self) -> Vec<(DevicePtr, DeviceId)> {
        let device_of = |id: AllocationId| self.allocations[id.0].stream.device;
        self.live.iter().map(|(&address, &id)| (DevicePtr(address), device_of(id))).collect()
    }

    /// The private pools that were begun more often than released, and by how much.
    pub(super) fn held_pools(&self) -> Vec<(DeviceId, PoolId, u32)> {
        self.pools.iter().map(|(&(device, pool), &holders)| (device, pool, holders)).collect()
    }

    /// The use of the allocation around `address` that a kernel means; or the freed allocation it would use.
    ///
    /// An address at which no allocation was ever registered stands for itself alone.
    pub(super) fn resolve(&self, address: u64, kind: AccessKind) -> Result<Access, AllocationId> {
        let bytes = address..address.saturating_add(1);
        if let Some(id) = self.live_in(bytes.clone()) {
            return Ok(self.whole(id, kind));
        }
        match last_overlapping(&self.freed, &self.allocations, bytes) {
            Some((_, id)) => Err(id),
            None => Ok(Access { allocation: None, address, size: 1, kind }),
        }
    }

    /// Judges the uses of a launch and remembers them. An error has changed nothing.
    pub(super) fn on_launch(
        &mut self,
        memory: &Memory,
        timeline: &Timeline,
        launch: Launch<'_>,
        accesses: &[Access],
    ) -> Result<(), SimError> {
        for access in accesses {
            self.judge(&self.shadow, memory, timeline, launch, access)?;
        }
        for access in accesses {
            let pieces = memory.backing(access.address, access.size);
            if let Some(used) = used_by(launch, access) {
                self.shadow.add(&pieces, used, launch.clock);
            }
            for piece in pieces {
                self.used_through.entry(piece.mapped_at).or_default().include(launch.stream, launch.epoch);
            }
        }
        Ok(())
    }

    /// Judges one use against the earlier ones in `shadow`: this oracle's own, or that of a capture.
    pub(super) fn judge(
        &self,
        shadow: &Shadow,
        memory: &Memory,
        timeline: &Timeline,
        launch: Launch<'_>,
        access: &Access,
    ) -> Result<(), SimError> {
        let Some(later) = used_by(launch, access) else { return Ok(()) };
        let pieces = memory.backing(access.address, access.size);
        match shadow.conflict(&pieces, &later, launch.clock) {
            Some(earlier) => Err(Box::new(RaceError {
                earlier: self.use_info(&earlier, timeline),
                later: self.use_info(&later, timeline),
            })
            .into()),
            None => Ok(()),
        }
    }

    /// Judges whether a graph may still use what it captured.
    pub(super) fn judge_replay(
        &self,
        memory: &Memory,
        timeline: &Timeline,
        launch: Launch<'_>,
        access: &Access,
    ) -> Result<(), SimError> {
        let Some(replayed) = used_by(launch, access) else { return Ok(()) };
        let allocation = &self.allocations[replayed.allocation.0];
        if allocation.is_live {
            return Ok(());
        }
        if !allocation.is_kept_for_graphs {
            return Err(Box::new(UseAfterFreeError(self.use_info(&replayed, timeline))).into());
        }
        for piece in memory.backing(access.address, access.size) {
            let Some(owners) = self.owners.get(&piece.physical) else { continue };
            let mut owners = owners.overlapping(piece.bytes());
            let outside = |id: &&AllocationId| {
                let owner = &self.allocations[id.0];
                owner.is_live && owner.pool != allocation.pool
            };
            if let Some(owner) = owners.find(outside) {
                let replay = self.use_info(&replayed, timeline);
                return Err(Box::new(Violation::GraphMemoryHandedOut { replay, owner: self.info(*owner) }).into());
            }
        }
        Ok(())
    }

    /// Judges an unmap, which has to wait until the host has seen the end of all work on the mappings.
    pub(super) fn on_unmap(&mut self, timeline: &Timeline, address: u64, size: u64) -> Result<(), SimError> {
        let mut unseen = None;
        while let Some((&mapped_at, _)) = self.used_through.range(address..address + size).next() {
            let last_use = self.used_through.remove(&mapped_at).unwrap_or_default();
            unseen = unseen.or_else(|| last_use.first_beyond(&timeline.host).map(|stream| (mapped_at, stream)));
        }
        self.on_taken(address, size)?;
        match unseen {
            Some((mapped_at, stream)) => Err(Box::new(UnorderedUnmapError {
                address: DevicePtr(mapped_at),
                stream: timeline.stream(stream).stream,
            })
            .into()),
            None => Ok(()),
        }
    }

    /// Judges whether `size` bytes at `address` may be taken away.
    fn on_taken(&self, address: u64, size: u64) -> Result<(), Box<Violation>> {
        match self.live_in(address..address + size) {
            Some(id) => Err(Box::new(Violation::TakenWhileLive(self.info(id)))),
            None => Ok(()),
        }
    }

    /// Forgets memory that no longer exists.
    pub(super) fn forget(&mut self, physical: PhysicalId) {
        self.shadow.forget(physical);
        self.owners.remove(&physical);
    }

    /// What a program knows of an allocation.
    pub(super) fn info(&self, id: AllocationId) -> AllocationInfo {
        let Allocation { address, size, stream, is_live, .. } = self.allocations[id.0];
        let number = id.0 as u64 + 1;
        AllocationInfo { number, address: DevicePtr(address), size_bytes: size, stream, freed: !is_live }
    }

    /// A use of the whole of an allocation.
    pub(super) fn whole(&self, id: AllocationId, kind: AccessKind) -> Access {
        let Allocation { address, size, .. } = self.allocations[id.0];
        Access { allocation: Some(id), address, size, kind }
    }

    /// What a program knows of a use.
    pub(super) fn use_info(&self, used: &Use, timeline: &Timeline) -> UseInfo {
        let stream = timeline.stream(used.stream).stream;
        UseInfo { allocation: self.info(used.allocation), stream, work: used.work, access: used.kind }
    }

    fn live_in(&self, addresses: Range<u64>) -> Option<AllocationId> {
        last_overlapping(&self.live, &self.allocations, addresses).map(|(_, id)| id)
    }
}

/// The use that an access is, if it is one of an allocation.
pub(super) fn used_by(launch: Launch<'_>, access: &Access) -> Option<Use> {
    let Launch { stream, epoch, work, .. } = launch;
    access.allocation.map(|allocation| Use { allocation, stream, epoch, kind: access.kind, work })
}

/// The last of some disjoint allocations, by address, that has a byte in `addresses`.
fn last_overlapping(
    by_address: &BTreeMap<u64, AllocationId>,
    allocations: &[Allocation],
    addresses: Range<u64>,
) -> Option<(u64, AllocationId)> {
    let (&start, &id) = by_address.range(..addresses.end).next_back()?;
    (start + allocations[id.0].size > addresses.start).then_some((start, id))
}
