//! Addresses whose memory has moved away: still mapped, used by nobody, to be unmapped when their last use is over.

use std::collections::BTreeMap;

use crate::{
    block::{BlockId, BlockState},
    device::DeviceState,
    id::{DevicePtr, PhysicalHandle},
    plan::{Plan, UnmapRun},
};

/// Stale mappings wait for company until there are this many: one unmap call then serves several.
const UNMAP_BATCH: usize = 32;

/// Stale mappings by address, each with its block and the handle that is mapped there a second time.
#[derive(Debug, Default)]
pub(crate) struct StaleTable {
    by_address: BTreeMap<u64, (BlockId, PhysicalHandle)>,
}

impl StaleTable {
    pub(crate) fn insert(&mut self, address: u64, block: BlockId, handle: PhysicalHandle) {
        self.by_address.insert(address, (block, handle));
    }

    pub(crate) fn contains(&self, address: u64, block: BlockId) -> bool {
        self.by_address.get(&address).is_some_and(|(known, _)| *known == block)
    }

    /// Whether the handle stands at a stale address too: it may not be released yet, since its memory would stay.
    pub(crate) fn holds(&self, handle: PhysicalHandle) -> bool {
        self.by_address.values().any(|(_, known)| *known == handle)
    }

    /// Whether there are enough of them to be unmapped together.
    pub(crate) fn is_batch(&self) -> bool {
        self.by_address.len() >= UNMAP_BATCH
    }

    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.by_address.values().map(|(block, _)| *block)
    }
}

impl DeviceState {
    /// Unmaps stale mappings whose last use is over, if there are enough of them.
    pub(crate) fn plan_unmap_batch(&mut self) -> Option<Plan> {
        if self.stale.is_batch() { self.plan_unmap_stale() } else { None }
    }

    /// Unmaps all stale mappings whose last use is over: those that touch each other with one call.
    pub(crate) fn plan_unmap_stale(&mut self) -> Option<Plan> {
        let mut runs: Vec<UnmapRun> = Vec::new();
        let stale: Vec<(u64, (BlockId, PhysicalHandle))> =
            self.stale.by_address.iter().map(|(address, entry)| (*address, *entry)).collect();
        for (address, (id, handle)) in stale {
            let block = &self.blocks[id];
            if !block.last_use.iter().all(|(stream, epoch)| self.streams.is_done(stream, epoch)) {
                continue;
            }
            let (span, size) = (block.span, block.size);
            self.stale.by_address.remove(&address);
            self.blocks[id].state = BlockState::Claimed;
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
        self.blocks[id].state = BlockState::Stale;
        self.stale.insert(self.blocks[id].address, id, handle);
    }
}
