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
    pool::FreeBlock,
    pool_set::PoolIx,
};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct BlockTable {
    /// By id. The first one is none, since no id is 0.
    blocks: Vec<Block>,
    /// The slot of `blocks` that was vacated last. Each vacant one names the one before as its `next`; none of them is in
    /// `by_address`.
    vacant: Option<BlockId>,
    /// Every block by its first address, in whatever state, so that a cached pair of malloc and free changes nothing
    /// here: only a split adds an entry, and only a merge removes one.
    by_address: AddressMap,
}

impl Default for BlockTable {
    fn default() -> Self {
        Self { blocks: vec![Block::nothing()], vacant: None, by_address: AddressMap::default() }
    }
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
        let id = self.take_slot();
        self[id] = Block::new(address, size, span, pool, state);
        self.by_address.insert(address, id);
        id
    }

    /// Removes the only block of its span.
    pub(crate) fn remove(&mut self, id: BlockId) {
        debug_assert!(!self[id].is_split(), "a span is given back whole");
        self.by_address.remove(self[id].address);
        self[id].next = self.vacant.replace(id);
    }

    /// Cuts a block after `size` bytes; `id` keeps the front, and the rest gets all else that the block had.
    #[inline]
    pub(crate) fn split(&mut self, id: BlockId, size: u64) -> BlockId {
        let rest_id = self.take_slot();
        let both = self.blocks.get_disjoint_mut([id.index(), rest_id.index()]);
        let [front, rest] = both.expect("a block stands in no vacant slot");
        debug_assert!(0 < size && size < front.size, "both parts must be something");
        let after = front.next;
        rest.address = front.address + size;
        rest.size = front.size - size;
        rest.previous = Some(id);
        rest.next = after;
        rest.span = front.span;
        rest.pool = front.pool;
        rest.state = front.state;
        rest.requested = 0;
        rest.idle_since = front.idle_since;
        rest.guest_of = None;
        rest.last_use.clone_from(&front.last_use);
        front.size = size;
        front.next = Some(rest_id);
        self.by_address.insert(rest.address, rest_id);
        if let Some(after) = after {
            self[after].previous = Some(rest_id);
        }
        rest_id
    }

    /// Unites a block with the one after it, if that one is in the same state. Returns what the other was.
    #[inline]
    pub(crate) fn unite_with_next(&mut self, id: BlockId) -> Option<FreeBlock> {
        let block = &self[id];
        let next = block.next.filter(|next| self[*next].state == block.state)?;
        let absorbed = self.entry(next);
        self.absorb(id, next);
        Some(absorbed)
    }

    /// Unites a block with the one before it, if that one is in the same state, and keeps its id. Returns what it was.
    #[inline]
    pub(crate) fn unite_with_previous(&mut self, id: BlockId) -> Option<FreeBlock> {
        let block = &self[id];
        let previous = block.previous.filter(|previous| self[*previous].state == block.state)?;
        let former = self.entry(previous);
        self.absorb(previous, id);
        Some(former)
    }

    /// Makes a block and the one after it one block, which keeps `id`, its state and the uses of both.
    pub(crate) fn absorb_next(&mut self, id: BlockId) {
        let next = self[id].next.expect("the caller saw the next block");
        self.absorb(id, next);
    }

    #[inline]
    fn absorb(&mut self, id: BlockId, next: BlockId) {
        let both = self.blocks.get_disjoint_mut([id.index(), next.index()]);
        let [block, absorbed] = both.expect("a block is not its own neighbour");
        debug_assert_eq!(block.end(), absorbed.address, "neighbours touch");
        let after = absorbed.next;
        block.size += absorbed.size;
        block.next = after;
        block.idle_since = block.idle_since.max(absorbed.idle_since);
        block.last_use.unite(&absorbed.last_use);
        self.by_address.remove(absorbed.address);
        absorbed.next = self.vacant.replace(next);
        if let Some(after) = after {
            self[after].previous = Some(id);
        }
    }

    /// A slot for a block, whose fields are anything.
    #[inline]
    fn take_slot(&mut self) -> BlockId {
        let Some(id) = self.vacant else { return self.add_slot() };
        self.vacant = self[id].next;
        id
    }

    #[cold]
    fn add_slot(&mut self) -> BlockId {
        self.blocks.push(Block::nothing());
        BlockId::from_index(self.blocks.len() - 1)
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
