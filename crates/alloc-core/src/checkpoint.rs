//! What a private pool holds, to be restored later: how a tree of CUDA graphs goes back to an earlier branch.
//!
//! Graphs that share a pool run at fixed addresses. When a program takes another path than the one that ran last, the
//! pool has to look as it did when that path was captured: the allocations of the abandoned path are freed, those of the
//! other are allocated again where they were. That changes who owns which addresses, and no byte of memory.
//!
//! Memory of a live private pool never moves and never goes back to the driver, so what was there then is still there.

use crate::{
    block::{Block, BlockId, BlockState},
    device::DeviceState,
    id::{DeviceId, DevicePtr, PoolId},
    pool::FreeBlock,
    pool_set::{PoolIx, PrivateIx},
    stats::{Pieces, Weight},
};

/// The allocations of a private pool at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pool: PoolId,
    /// In address order.
    allocations: Vec<Held>,
}

impl Checkpoint {
    /// The pool that it is of.
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// Where the allocations are, in address order.
    pub fn addresses(&self) -> impl Iterator<Item = DevicePtr> + '_ {
        self.allocations.iter().map(|held| DevicePtr(held.address))
    }
}

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    address: u64,
    size: u64,
    requested: u64,
}

impl Held {
    fn end(self) -> u64 {
        self.address + self.size
    }
}

/// What a restore did. An address may be among both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// What the pool held before, in address order.
    pub freed: Vec<DevicePtr>,
    /// What it holds now, in address order.
    pub allocated: Vec<DevicePtr>,
}

/// Why a pool cannot be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// There is no live private pool of this name on the device: it was released, and its memory may be elsewhere.
    #[error("private pool {0:?} is not in use, so it cannot go back to a checkpoint")]
    NoSuchPool(PoolId),
    /// Memory that the checkpoint held waits for another stream: wait for that stream, and try again.
    #[error("the memory at {0:?} is still in use on another stream, so its pool cannot go back to a checkpoint")]
    InUse(DevicePtr),
    /// The pool has no memory there: the checkpoint is one of another pool that had the same name.
    #[error("the pool holds no memory at {0:?}, so it cannot go back to a checkpoint")]
    NoMemory(DevicePtr),
    /// A former call on the device panicked, so its state cannot be trusted: restart the process, and report the bug.
    #[error("the allocator's state of {0} is broken by an earlier internal error; restart the process")]
    Broken(DeviceId),
}

impl DeviceState {
    /// What the pool holds now.
    pub(crate) fn checkpoint(&self, private: PrivateIx) -> Checkpoint {
        let held = |id: &BlockId| {
            let Block { address, size, requested, .. } = self.blocks[*id];
            Held { address, size, requested }
        };
        let allocations = self.held_by(private).iter().map(held).collect();
        Checkpoint { pool: self.pools.private(private).id, allocations }
    }

    /// See [`Allocator::restore_pool`](crate::allocator::Allocator::restore_pool).
    pub(crate) fn restore(&mut self, private: PrivateIx, checkpoint: &Checkpoint) -> Result<Restored, RestoreError> {
        self.check_restore(private, checkpoint)?;
        let freed: Vec<DevicePtr> =
            self.held_by(private).into_iter().map(|id| DevicePtr(self.blocks[id].address)).collect();
        for address in &freed {
            // Whether the streams that such a block waits for should get an event soon makes no difference here.
            self.free(*address);
        }
        let mut free = self.free_blocks_of(private).into_iter();
        let mut current = free.next();
        for held in &checkpoint.allocations {
            while let Some(block) = current.filter(|block| block.address + block.size <= held.address) {
                debug_assert!(block.address < held.address);
                current = free.next();
            }
            let block = current.expect("checked above: the memory of each allocation is free now");
            current = self.allocate_within(block.id, held).map(|rest| self.blocks.entry(rest));
            current = current.or_else(|| free.next());
        }
        let allocated = checkpoint.addresses().collect();
        Ok(Restored { freed, allocated })
    }

    /// Whether all memory of the checkpoint's allocations will be free once what the pool holds is.
    fn check_restore(&self, private: PrivateIx, checkpoint: &Checkpoint) -> Result<(), RestoreError> {
        let mut blocks = self.blocks_of(private).into_iter().peekable();
        for held in &checkpoint.allocations {
            let mut covered = held.address;
            while covered < held.end() {
                while blocks.next_if(|id| self.blocks[*id].end() <= covered).is_some() {}
                let block = blocks.peek().map(|id| &self.blocks[*id]);
                let Some(block) = block.filter(|block| block.address <= covered) else {
                    return Err(RestoreError::NoMemory(DevicePtr(held.address)));
                };
                let becomes_free = match block.state {
                    BlockState::Free => true,
                    BlockState::Allocated => block.last_use.iter().all(|(stream, _)| self.streams.is_over(stream)),
                    BlockState::Pending { .. } | BlockState::Deferred { .. } | BlockState::Claimed => false,
                    BlockState::Unmapped | BlockState::Stale | BlockState::Quarantined => {
                        return Err(RestoreError::NoMemory(DevicePtr(held.address)));
                    }
                };
                if !becomes_free {
                    return Err(RestoreError::InUse(DevicePtr(held.address)));
                }
                covered = block.end();
            }
        }
        Ok(())
    }

    /// The allocations of the pool, in address order.
    fn held_by(&self, private: PrivateIx) -> Vec<BlockId> {
        let mut held = self.blocks_of(private);
        held.retain(|id| self.blocks[*id].state == BlockState::Allocated);
        held
    }

    /// All blocks of the pool, in address order.
    fn blocks_of(&self, private: PrivateIx) -> Vec<BlockId> {
        let mut blocks = Vec::new();
        for span in self.spans.by_address() {
            if self.pools[self.spans[span].pool].owner == Some(private) {
                let first = self.blocks.at(self.spans[span].base);
                blocks.extend(std::iter::successors(first, |id| self.blocks[*id].next));
            }
        }
        blocks
    }

    /// The pool's free blocks, in address order.
    fn free_blocks_of(&self, private: PrivateIx) -> Vec<FreeBlock> {
        let pools: &[PoolIx] = &self.pools.private(private).pools;
        let mut free: Vec<FreeBlock> = pools.iter().flat_map(|pool| self.pools[*pool].index.iter()).collect();
        free.sort_unstable_by_key(|block| block.address);
        free
    }

    /// Hands out exactly these bytes of a free block. Returns the block after them, if something is left there.
    fn allocate_within(&mut self, id: BlockId, held: &Held) -> Option<BlockId> {
        let Held { address, size, requested } = *held;
        let before = self.inactive_split(id);
        let mut after = Pieces::default();
        self.unindex(id);
        let start = self.blocks[id].address;
        let block = if start < address {
            let block = self.blocks.split(id, address - start);
            self.index(id);
            after += self.inactive_split(id);
            block
        } else {
            id
        };
        let mut rest = None;
        if size < self.blocks[block].size {
            let piece = self.blocks.split(block, size);
            self.index(piece);
            after += self.inactive_split(piece);
            rest = Some(piece);
        }
        let class = self.class(block);
        self.stats.on_inactive_split(class, before, after);
        self.occupy(block, Weight { class, size, requested }, None);
        rest
    }
}
