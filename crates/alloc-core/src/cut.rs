//! Where a request is cut from free memory.
//!
//! Only whole handles move, so a cut inside an idle handle *pins* the rest of it for as long as the request stays. Where
//! several cuts cost as little, the one is made that leaves handles whole. Torch's rules, which move nothing, cut every
//! block from its start.

use crate::{
    block::BlockId,
    device::{DeviceState, Request},
    pool::FreeBlock,
};

/// Besides the best fit so many blocks are looked at, the next larger ones …
const OTHERS: usize = 8;
/// … below so many times its size: one that serves two such requests is kept for that, and for larger ones.
const TIMES_BEST_FIT: u64 = 2;
/// Requests of whole granules, and at least so many, begin with a granule where they can, so that they end with one. The
/// piece before it serves small requests only, which for less is a bad bargain.
const GRANULES_TO_ALIGN: u64 = 8;

impl DeviceState {
    /// The block that the request is best cut from, given the best fit.
    #[inline]
    pub(crate) fn best_cut(&self, best_fit: FreeBlock, request: &Request) -> FreeBlock {
        // Most requests leave less than a granule, which pins nothing: then nothing is looked up.
        if best_fit.size - request.rounded < self.capabilities.granularity_bytes {
            return best_fit;
        }
        let pool = &self.pools[request.pool];
        if pool.keeps_handles_whole() && pool.terms.may_split && self.may_lend(request.pool) {
            self.least_pinned(best_fit, request)
        } else {
            best_fit
        }
    }

    /// Of the blocks that are less than twice as large as the best fit, the one of which the cut pins least; of equals the smallest.
    #[inline(never)]
    fn least_pinned(&self, best_fit: FreeBlock, request: &Request) -> FreeBlock {
        let index = &self.pools[request.pool].index;
        let others = std::iter::successors(Some(best_fit), |block| index.after(*block)).take(1 + OTHERS);
        let mut least = (u64::MAX, best_fit);
        let is_similar =
            |block: &FreeBlock| block.size < best_fit.size * TIMES_BEST_FIT && !self.is_spared(*block, request);
        for block in others.take_while(is_similar) {
            let pinned = self.pinned_by_cut(block, request.rounded);
            if pinned < least.0 {
                least = (pinned, block);
            }
            if pinned == 0 {
                break;
            }
        }
        least.1
    }

    /// The bytes of whole granules that could move, and cannot once `size` bytes of the block are in use.
    fn pinned_by_cut(&self, block: FreeBlock, size: u64) -> u64 {
        let end = self.start_of_cut(block, size) + size;
        let across = self.spans[self.blocks[block.id].span].mappings().across(end);
        let idle = across.filter(|handle| block.address <= handle.address && handle.end() <= block.end());
        idle.map_or(0, |handle| handle.end() - self.whole_granules(end))
    }

    /// Where the `size` bytes begin that are cut from a free block of a pool that keeps handles whole.
    ///
    /// Large requests of whole granules begin with the first granule, if that fits and handles may move. From the end only if
    /// all handles between there and the request are whole then, and not if cut from the start. Else from the start, also where less would be left in handles used in part: the neighbour there is most often the younger
    /// one, so blocks that are freed in the order in which they came leave one gap, and not many.
    #[inline(never)]
    fn start_of_cut(&self, block: FreeBlock, size: u64) -> u64 {
        let granularity = self.capabilities.granularity_bytes;
        let is_boundary = |address: u64| address.trailing_zeros() >= granularity.trailing_zeros();
        let from_end = block.end() - size;
        let mut start = block.address;
        let may_align = || self.may_lend(self.blocks[block.id].pool);
        if size >= GRANULES_TO_ALIGN * granularity && is_boundary(size) && may_align() {
            let boundary = self.whole_granules(start);
            if boundary <= from_end {
                start = boundary;
            }
        }
        // Most blocks begin where no handle of that granularity can, so that one reaches beyond them.
        if !is_boundary(start) || !is_boundary(from_end) {
            return start;
        }
        let mappings = self.spans[self.blocks[block.id].span].mappings();
        let cuts_end = mappings.are_whole(start, from_end) && !mappings.are_whole(start + size, block.end());
        if cuts_end { from_end } else { start }
    }

    /// Cuts the request out of a free block that is in no index any more. What is left before and after it goes there.
    #[inline]
    pub(crate) fn cut(&mut self, whole: FreeBlock, request: &Request) -> BlockId {
        let keeps_handles_whole = self.pools[request.pool].keeps_handles_whole();
        let start = if keeps_handles_whole { self.start_of_cut(whole, request.rounded) } else { whole.address };
        let end = start + request.rounded;
        let index = &mut self.pools[request.pool].index;
        let mut id = whole.id;
        if whole.address < start {
            let size = start - whole.address;
            id = self.blocks.split(whole.id, size);
            index.insert(FreeBlock { size, ..whole });
        }
        if end < whole.end() {
            let rest = self.blocks.split(id, request.rounded);
            index.insert(FreeBlock { size: whole.end() - end, address: end, id: rest });
        }
        id
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        backing::{
            Span, SpanKind,
            mapping::{Mapping, Mappings},
        },
        block::BlockState,
        config::{Config, Move},
        driver::Capabilities,
        event::StreamIx,
        id::{DeviceId, PhysicalHandle},
        pool_set::PoolIx,
        size::{BLOCK_GRANULARITY, MIB, SizeClass},
    };

    const GRANULE: u64 = 2 * MIB;

    /// A device with a pool for large requests.
    struct Device {
        state: DeviceState,
        pool: PoolIx,
        ranges: u64,
    }

    impl Device {
        fn new() -> Self {
            let capabilities = Capabilities {
                total_bytes: 1 << 40,
                virtual_memory: true,
                virtual_memory_missing: String::new(),
                granularity_bytes: GRANULE,
                stale_mappings_max: 0,
            };
            let mut state = DeviceState::new(DeviceId(0), capabilities, &Config::default(), None);
            let pool = state.pools.of(None, StreamIx(0), SizeClass::Large);
            Self { state, pool, ranges: 0 }
        }

        /// A free block in a range of its own, over handles of these sizes but for `before` and `after` bytes of them,
        /// which are in use.
        fn free_block(&mut self, handles: &[u64], before: u64, after: u64) -> FreeBlock {
            self.ranges += 1;
            let base = self.ranges << 30;
            let mut mappings = Mappings::default();
            let mut end = base;
            for size in handles {
                mappings.insert(Mapping { address: end, size: *size, handle: PhysicalHandle(end) });
                end += size;
            }
            let Self { state, pool, .. } = self;
            let span = Span { base, size: end - base, pool: *pool, kind: SpanKind::Range(mappings) };
            let span = state.spans.insert(span);
            let size = end - base - before - after;
            let id = state.blocks.insert(base + before, size, span, *pool, BlockState::Free);
            let block = state.blocks.entry(id);
            state.pools[*pool].index.insert(block);
            block
        }

        fn request(&self, rounded: u64) -> Request {
            Request { requested: rounded, rounded, pool: self.pool }
        }

        fn best_fit(&self, request: &Request) -> Option<FreeBlock> {
            self.state.pools[self.pool].index.best_fit(request.rounded)
        }

        fn chosen(&self, rounded: u64) -> FreeBlock {
            let request = self.request(rounded);
            self.state.best_cut(self.best_fit(&request).expect("a block is large enough"), &request)
        }

        /// How far into the block the cut begins.
        fn offset_of_cut(&self, block: FreeBlock, size: u64) -> u64 {
            self.state.start_of_cut(block, size) - block.address
        }

        /// The granules between two addresses of a block, each counted that has a byte there, of handles that are whole
        /// between two others.
        fn granules(&self, block: FreeBlock, whole_in: (u64, u64), (from, to): (u64, u64)) -> u64 {
            let mappings = self.state.spans[self.state.blocks[block.id].span].mappings();
            let handles = mappings.within(whole_in.0, whole_in.1);
            let granules = handles.flat_map(|handle| (handle.address..handle.end()).step_by(GRANULE as usize));
            granules.filter(|granule| *granule < to && from < granule + GRANULE).count() as u64
        }

        /// What [`DeviceState::pinned_by_cut`] says, by counting.
        fn pinned(&self, block: FreeBlock, size: u64) -> u64 {
            let start = self.state.start_of_cut(block, size);
            let (whole, cut) = ((block.address, block.end()), (start, start + size));
            let (head, rest) = ((block.address, start), (start + size, block.end()));
            let left = self.granules(block, head, head) + self.granules(block, rest, rest);
            (self.granules(block, whole, whole) - self.granules(block, whole, cut) - left) * GRANULE
        }
    }

    #[test]
    fn block_whose_cut_leaves_handles_whole_comes_before_the_best_fit() {
        let mut device = Device::new();
        device.free_block(&[16 * MIB], 0, 0);
        let whole = device.free_block(&[10 * MIB, 8 * MIB], 0, 0);
        assert_eq!(device.chosen(10 * MIB), whole);
    }

    #[test]
    fn block_twice_as_large_as_the_best_fit_is_kept_for_more() {
        let mut device = Device::new();
        let best_fit = device.free_block(&[16 * MIB], 0, 0);
        device.free_block(&[10 * MIB, 22 * MIB], 0, 0);
        assert_eq!(device.chosen(10 * MIB), best_fit);
    }

    #[test]
    fn where_cuts_pin_as_much_the_best_fit_is_cut() {
        let mut device = Device::new();
        let best_fit = device.free_block(&[16 * MIB], 0, 0);
        device.free_block(&[16 * MIB, 2 * MIB], 0, 0);
        assert_eq!(device.chosen(10 * MIB), best_fit);
    }

    #[test]
    fn handle_that_is_used_in_part_already_counts_for_nothing() {
        let mut device = Device::new();
        let used_in_part = device.free_block(&[16 * MIB], 2 * MIB, 0);
        device.free_block(&[10 * MIB, 8 * MIB], 0, 0);
        assert_eq!(device.chosen(10 * MIB), used_in_part);
    }

    #[test]
    fn pool_that_may_not_split_gives_the_best_fit() {
        let mut device = Device::new();
        let best_fit = device.free_block(&[16 * MIB], 0, 0);
        device.free_block(&[10 * MIB, 8 * MIB], 0, 0);
        device.state.pools[device.pool].terms.may_split = false;
        assert_eq!(device.chosen(10 * MIB), best_fit);
    }

    #[test]
    fn where_handles_do_not_move_the_best_fit_is_cut_from_its_start() {
        let mut device = Device::new();
        let spared = device.free_block(&[64 * MIB], MIB, 24 * MIB);
        let best_fit = device.free_block(&[24 * MIB], 0, 0);
        assert_eq!((device.chosen(16 * MIB), device.offset_of_cut(spared, 16 * MIB)), (spared, MIB));
        device.state.pools[device.pool].terms.moving = Move::Off;
        assert_eq!((device.chosen(16 * MIB), device.offset_of_cut(spared, 16 * MIB)), (best_fit, 0));
    }

    #[test]
    fn oversize_block_is_spared_whatever_a_cut_pins() {
        let mut device = Device::new();
        let best_fit = device.free_block(&[16 * MIB], 0, 0);
        device.free_block(&[10 * MIB, 8 * MIB], 0, 0);
        device.state.config.max_split_size = Some(18 * MIB);
        assert_eq!(device.chosen(10 * MIB), best_fit);
    }

    #[test]
    fn request_of_many_whole_granules_begins_with_a_granule_if_it_fits() {
        let mut device = Device::new();
        let block = device.free_block(&[64 * MIB], MIB, 0);
        assert_eq!(device.offset_of_cut(block, 16 * MIB), MIB);
        assert_eq!(device.offset_of_cut(block, 62 * MIB), MIB);
        assert_eq!(device.offset_of_cut(block, 14 * MIB), 0, "fewer granules");
        assert_eq!(device.offset_of_cut(block, 17 * MIB), 0, "no whole granules");
        let block = device.free_block(&[64 * MIB], MIB, MIB / 2);
        assert_eq!(device.offset_of_cut(block, 62 * MIB), 0, "it would not fit");
    }

    #[test]
    fn end_is_cut_only_where_that_alone_leaves_handles_whole() {
        let mut device = Device::new();
        let block = device.free_block(&[16 * MIB, 8 * MIB], 0, 0);
        assert_eq!(device.offset_of_cut(block, 8 * MIB), 16 * MIB);
        assert_eq!(device.offset_of_cut(block, 16 * MIB), 0, "the start leaves as much");
        assert_eq!(device.offset_of_cut(block, 4 * MIB), 0, "the end cuts a handle too");
    }

    #[test]
    fn what_is_left_before_and_after_a_cut_stays_in_the_pool() {
        let mut device = Device::new();
        let block = device.free_block(&[64 * MIB], MIB, 0);
        device.state.pools[device.pool].index.remove(block);
        let id = device.state.cut(block, &device.request(16 * MIB));
        let cut = device.state.blocks.entry(id);
        assert_eq!((cut.address, cut.size), (block.address + MIB, 16 * MIB));
        let left: Vec<_> = device.state.pools[device.pool].index.iter().map(|left| (left.address, left.size)).collect();
        assert_eq!(left, [(block.address, MIB), (cut.end(), 46 * MIB)]);
    }

    /// A free block: the granules of its handles, and the 512 bytes that are in use of the first handle and of the last.
    fn any_block() -> impl Strategy<Value = (Vec<u64>, u64, u64)> {
        let used = || prop_oneof![Just(0), 0..GRANULE / BLOCK_GRANULARITY];
        (prop::collection::vec(1_u64..9, 1..6), used(), used())
    }

    proptest! {
        #[test]
        fn no_similar_block_is_cut_better_than_the_one_that_is_chosen(
            blocks in prop::collection::vec(any_block(), 1..14),
            size in prop_oneof![(1_u64..20).prop_map(|granules| granules * GRANULE), (2_048_u64..65_536).prop_map(|units| units * BLOCK_GRANULARITY)],
        ) {
            let mut device = Device::new();
            for (granules, before, after) in blocks {
                let handles: Vec<u64> = granules.iter().map(|count| count * GRANULE).collect();
                let used = (before + after) * BLOCK_GRANULARITY;
                if used < handles.iter().sum() {
                    device.free_block(&handles, before * BLOCK_GRANULARITY, after * BLOCK_GRANULARITY);
                }
            }
            let request = device.request(size);
            let Some(best_fit) = device.best_fit(&request) else { return Ok(()) };
            let chosen = device.state.best_cut(best_fit, &request);
            let pinned = device.pinned(chosen, size);
            prop_assert_eq!(device.state.pinned_by_cut(chosen, size), pinned);
            if best_fit.size - size >= GRANULE {
                let index = &device.state.pools[device.pool].index;
                for other in index.iter_from(size).take(1 + OTHERS).filter(|other| other.size < 2 * best_fit.size) {
                    let by_other = device.pinned(other, size);
                    prop_assert!(pinned < by_other || pinned == by_other && chosen <= other);
                }
            } else {
                prop_assert_eq!(chosen, best_fit);
            }
            let start = device.state.start_of_cut(chosen, size);
            prop_assert!(chosen.address <= start && start + size <= chosen.end());
        }
    }
}
