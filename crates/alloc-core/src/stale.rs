//! Addresses whose memory has moved away: still mapped, in no index, and handed to nobody.
//!
//! Nothing has to be done for the memory to come back to such an address: programs that take turns with their memory,
//! step after step, move it to and fro without a driver call. A stale mapping goes when its addresses are needed for other
//! memory, when there are too many, and before the memory goes back to the driver; each time once its last use is over.

use std::{collections::BTreeMap, ops::Range};

use rustc_hash::FxHashMap;

use crate::{
    block::{Block, BlockId, BlockState},
    device::DeviceState,
    event::StreamIx,
    id::{DevicePtr, PhysicalHandle},
    last_use::Epoch,
    plan::{Plan, UnmapRun},
    pool_set::PoolIx,
};

/// Of so many new ones it is worth an event to know that their last use is over.
const FRESH_MAX: u64 = 32;

/// A mapping of memory that lives elsewhere now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stale {
    pub(crate) block: BlockId,
    pub(crate) handle: PhysicalHandle,
    /// How many mappings had become stale before.
    age: u64,
}

/// Stale mappings by pool and address.
#[derive(Debug, Default)]
pub(crate) struct StaleTable {
    by_address: BTreeMap<(PoolIx, u64), Stale>,
    /// At how many stale addresses each handle stands.
    copies: FxHashMap<PhysicalHandle, usize>,
    /// How many mappings have become stale so far.
    count: u64,
    /// How many of them when events were last asked for.
    count_at_events: u64,
    /// How many of them when the surplus was last taken.
    count_at_surplus: u64,
}

impl StaleTable {
    fn insert(&mut self, pool: PoolIx, address: u64, block: BlockId, handle: PhysicalHandle) {
        self.by_address.insert((pool, address), Stale { block, handle, age: self.count });
        *self.copies.entry(handle).or_default() += 1;
        self.count += 1;
    }

    fn remove(&mut self, pool: PoolIx, address: u64) -> Stale {
        let stale = self.by_address.remove(&(pool, address)).expect("the address is stale");
        let copies = self.copies.get_mut(&stale.handle).expect("every stale handle is counted");
        *copies -= 1;
        if *copies == 0 {
            self.copies.remove(&stale.handle);
        }
        stale
    }

    pub(crate) fn at(&self, pool: PoolIx, address: u64) -> Option<Stale> {
        self.by_address.get(&(pool, address)).copied()
    }

    /// Whether the handle stands at a stale address too: it may not be released yet, since its memory would stay.
    pub(crate) fn holds(&self, handle: PhysicalHandle) -> bool {
        self.copies.contains_key(&handle)
    }

    /// All of them, by pool and address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Stale> + '_ {
        self.by_address.values().copied()
    }

    /// Those of one pool, by address.
    pub(crate) fn of_pool(&self, pool: PoolIx) -> impl Iterator<Item = (u64, Stale)> + '_ {
        self.within(pool, 0..u64::MAX)
    }

    pub(crate) fn has_any_of(&self, pool: PoolIx) -> bool {
        self.of_pool(pool).next().is_some()
    }

    /// Those of one pool that begin between two addresses.
    pub(crate) fn within(
        &self,
        pool: PoolIx,
        addresses: Range<u64>,
    ) -> impl DoubleEndedIterator<Item = (u64, Stale)> + '_ {
        let range = self.by_address.range((pool, addresses.start)..(pool, addresses.end));
        range.map(|((_, address), stale)| (*address, *stale))
    }

    /// Whether there are more than `max`, though the surplus was taken: the host does not know that any use is over.
    pub(crate) fn is_flooded(&self, max: usize) -> bool {
        self.by_address.len() > 2 * max
    }

    /// If there are more than `max`: the oldest, until a quarter of that is free again. Asked once for each such quarter.
    fn take_surplus(&mut self, max: usize) -> Vec<BlockId> {
        let new = self.count - self.count_at_surplus;
        if self.by_address.len() <= max || new < max as u64 / 4 {
            return Vec::new();
        }
        self.count_at_surplus = self.count;
        let mut by_age: Vec<_> =
            self.by_address.iter().map(|(place, stale)| (stale.age, *place, stale.block)).collect();
        by_age.sort_unstable();
        by_age.truncate(by_age.len() - max * 3 / 4);
        by_age.sort_unstable_by_key(|(_, place, _)| *place);
        by_age.into_iter().map(|(.., block)| block).collect()
    }
}

impl DeviceState {
    /// The last uses of the mappings that became stale since this was asked last, once there are enough of them: as long
    /// as it is not known that they are over, the addresses serve no other memory.
    pub(crate) fn take_fresh_uses(&mut self) -> Vec<(StreamIx, Epoch)> {
        let since = self.stale.count_at_events;
        if self.stale.count - since < FRESH_MAX {
            return Vec::new();
        }
        self.stale.count_at_events = self.stale.count;
        let fresh = self.stale.iter().filter(|stale| stale.age >= since);
        fresh.flat_map(|stale| self.blocks[stale.block].last_use.iter()).collect()
    }

    /// Unmaps the oldest stale mappings, if there are too many.
    pub(crate) fn plan_unmap_surplus(&mut self) -> Option<Plan> {
        let surplus = self.stale.take_surplus(self.capabilities.stale_mappings_max);
        self.plan_unmap(surplus)
    }

    /// Unmaps all stale mappings whose last use is over.
    pub(crate) fn plan_unmap_stale(&mut self) -> Option<Plan> {
        let all = self.stale.iter().map(|stale| stale.block).collect();
        self.plan_unmap(all)
    }

    /// Unmaps those of these stale blocks, which are in order, whose last use is over: of those that touch each other all
    /// with one call.
    pub(crate) fn plan_unmap(&mut self, stale: Vec<BlockId>) -> Option<Plan> {
        let mut runs: Vec<UnmapRun> = Vec::new();
        for id in stale {
            if !self.is_over(id) {
                continue;
            }
            let handle = self.claim_stale(id);
            let Block { span, address, size, .. } = self.blocks[id];
            match runs.last_mut() {
                Some(run) if run.span == span && run.address.0 + run.size == address => {
                    run.size += size;
                    run.blocks.push((id, handle));
                }
                _ => runs.push(UnmapRun {
                    device: self.id,
                    span,
                    address: DevicePtr(address),
                    size,
                    blocks: vec![(id, handle)],
                }),
            }
        }
        (!runs.is_empty()).then_some(Plan::Unmap(runs))
    }

    /// Whether the host has seen the block's last use end.
    pub(crate) fn is_over(&self, id: BlockId) -> bool {
        self.blocks[id].last_use.iter().all(|(stream, epoch)| self.streams.is_done(stream, epoch))
    }

    /// Takes note of what was unmapped; the rest is stale as before.
    pub(crate) fn commit_unmap(&mut self, runs: Vec<(UnmapRun, bool)>) {
        for (run, is_unmapped) in runs {
            for (block, handle) in run.blocks {
                if is_unmapped {
                    self.make_unmapped(block);
                } else {
                    self.make_stale(block, handle);
                }
            }
        }
    }

    /// The block's memory is mapped elsewhere now.
    pub(crate) fn make_stale(&mut self, id: BlockId, handle: PhysicalHandle) {
        let block = &mut self.blocks[id];
        block.state = BlockState::Stale;
        self.stale.insert(block.pool, block.address, id, handle);
    }

    /// Claims a stale block; returns the handle that is mapped there.
    pub(crate) fn claim_stale(&mut self, id: BlockId) -> PhysicalHandle {
        let block = &mut self.blocks[id];
        block.state = BlockState::Claimed;
        self.stale.remove(block.pool, block.address).handle
    }
}
