//! All blocks of a device: a slab addressed by index, neighbour links in address order, and the way from a pointer to
//! its block.
//!
//! The table knows nothing of pools, streams or accounting. It keeps one invariant: the blocks of a span, followed by
//! `next` from the first one, cover the span without gap or overlap.

use std::ops::{Index, IndexMut};

use crate::{
    address_map::AddressMap,
    backing::SpanIx,
    block::{Block, BlockId, BlockState},
    last_use::LastUse,
    pool::FreeBlock,
    pool_set::PoolIx,
};

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    blocks: Vec<Block>,
    /// Slots of `blocks` that hold no block; they are not in `by_address`.
    vacant: Vec<BlockId>,
    /// Every block by its first address, in whatever state, so that a cached pair of malloc and free changes nothing
    /// here: only a split adds an entry, and only a merge removes one.
    by_address: AddressMap,
}

impl BlockTable {
    /// The block that starts at `address`.
    pub(crate) fn at(&self, address: u64) -> Option<BlockId> {
        self.by_address.get(address)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_address.len()
    }

    /// The block as its pool's index sees it while it is idle.
    pub(crate) fn entry(&self, id: BlockId) -> FreeBlock {
        let block = &self[id];
        FreeBlock { size: block.size, address: block.address, id }
    }

    /// A block that covers a whole span.
    pub(crate) fn insert(&mut self, address: u64, size: u64, span: SpanIx, pool: PoolIx, state: BlockState) -> BlockId {
        self.place(Block {
            address,
            size,
            requested: 0,
            previous: None,
            next: None,
            span,
            pool,
            state,
            idle_since: 0,
            guest_of: None,
            last_use: LastUse::default(),
        })
    }

    /// Removes the only block of its span.
    pub(crate) fn remove(&mut self, id: BlockId) {
        debug_assert!(!self[id].is_split(), "a span is given back whole");
        self.vacate(id);
    }

    /// Cuts a block after `size` bytes; `id` keeps the front, and the rest gets all else that the block had.
    #[inline]
    pub(crate) fn split(&mut self, id: BlockId, size: u64) -> BlockId {
        let front = &self[id];
        debug_assert!(0 < size && size < front.size, "both parts must be something");
        let rest = Block {
            address: front.address + size,
            size: front.size - size,
            requested: 0,
            previous: Some(id),
            next: front.next,
            span: front.span,
            pool: front.pool,
            state: front.state,
            idle_since: front.idle_since,
            guest_of: None,
            last_use: front.last_use.clone(),
        };
        let after = front.next;
        let rest = self.place(rest);
        self[id].size = size;
        self[id].next = Some(rest);
        if let Some(after) = after {
            self[after].previous = Some(rest);
        }
        rest
    }

    /// Makes a block and the one after it one block, which keeps `id`, its state and the uses of both.
    #[inline]
    pub(crate) fn absorb_next(&mut self, id: BlockId) {
        let next = self[id].next.expect("the caller saw the next block");
        let both = self.blocks.get_disjoint_mut([id.index(), next.index()]);
        let [block, absorbed] = both.expect("a block is not its own neighbour");
        debug_assert_eq!(block.end(), absorbed.address, "neighbours touch");
        block.size += absorbed.size;
        block.next = absorbed.next;
        block.idle_since = block.idle_since.max(absorbed.idle_since);
        block.last_use.unite(&absorbed.last_use);
        let after = absorbed.next;
        self.vacate(next);
        if let Some(after) = after {
            self[after].previous = Some(id);
        }
    }

    #[inline]
    fn place(&mut self, block: Block) -> BlockId {
        let address = block.address;
        let id = if let Some(id) = self.vacant.pop() {
            self[id] = block;
            id
        } else {
            self.blocks.push(block);
            BlockId::from_index(self.blocks.len() - 1)
        };
        self.by_address.insert(address, id);
        id
    }

    #[inline]
    fn vacate(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        block.last_use.clear();
        self.by_address.remove(block.address);
        self.vacant.push(id);
    }
}

impl Index<BlockId> for BlockTable {
    type Output = Block;

    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }
}

impl IndexMut<BlockId> for BlockTable {
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table_with_one_block() -> (BlockTable, BlockId) {
        let mut table = BlockTable::default();
        let id = table.insert(4096, 2048, SpanIx(0), PoolIx(0), BlockState::Free);
        (table, id)
    }

    #[test]
    fn split_links_both_parts_in_address_order() {
        let (mut table, front) = table_with_one_block();
        let rest = table.split(front, 512);
        assert_eq!((table[front].size, table[rest].size), (512, 1536));
        assert_eq!((table[front].next, table[rest].previous), (Some(rest), Some(front)));
        assert_eq!(table.at(4608), Some(rest));
    }

    #[test]
    fn absorbing_the_rest_restores_the_whole_block() {
        let (mut table, front) = table_with_one_block();
        let rest = table.split(front, 512);
        table.split(rest, 512);
        table.absorb_next(front);
        table.absorb_next(front);
        assert_eq!((table[front].size, table[front].next), (2048, None));
        assert_eq!((table.len(), table.at(4608)), (1, None));
    }
}
