//! An ordered set of free blocks, in which the best fit is found in a few steps.
//!
//! Order is by size, then by address: the best fit is the smallest block that is large enough and, among equals, the
//! one with the lowest address. Sizes are counted in units of 512 bytes and sorted into classes, 64 to each power of
//! two; a bitmap says which classes hold anything. Within a class the blocks stand in order, so the answer is exact:
//! a class never gives a block that another order would have refused.

use std::cmp::Ordering;

use crate::{block::BlockId, size::BLOCK_GRANULARITY};

/// Classes to each power of two.
const CLASSES_PER_OCTAVE: usize = 64;
/// `log2(CLASSES_PER_OCTAVE)`: sizes below this power of two, in units, have classes of their own.
const OCTAVE_BITS: u32 = CLASSES_PER_OCTAVE.trailing_zeros();
/// Enough for sizes of up to 2⁶³ bytes.
const OCTAVES: usize = 64 - BLOCK_GRANULARITY.trailing_zeros() as usize - OCTAVE_BITS as usize + 1;
/// Entries that one run of a class holds before it is cut in two, so that an insertion moves at most this many.
const RUN_LENGTH: usize = 128;

/// A free block as the index sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeBlock {
    pub(crate) size: u64,
    pub(crate) address: u64,
    pub(crate) id: BlockId,
}

impl FreeBlock {
    #[inline]
    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }

    /// Size first, then address, as one number: one comparison without a branch.
    fn rank(&self) -> u128 {
        u128::from(self.size) << 64 | u128::from(self.address)
    }
}

impl Ord for FreeBlock {
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl PartialOrd for FreeBlock {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }

    fn lt(&self, other: &Self) -> bool {
        self.rank() < other.rank()
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct FreeIndex {
    /// Bit `o` is set when octave `o` holds a block.
    octaves: u64,
    /// Bit `c` of word `o` is set when class `c` of octave `o` holds a block.
    classes: [u64; OCTAVES],
    /// The blocks of each class, in order.
    buckets: Vec<Bucket>,
}

impl Default for FreeIndex {
    fn default() -> Self {
        Self { octaves: 0, classes: [0; OCTAVES], buckets: Vec::new() }
    }
}

impl FreeIndex {
    #[inline]
    pub(crate) fn insert(&mut self, block: FreeBlock) {
        let class = class_of(block.size);
        if class >= self.buckets.len() {
            self.extend_to(class);
        }
        self.buckets[class].insert(block);
        let octave = class / CLASSES_PER_OCTAVE;
        self.octaves |= 1 << octave;
        self.classes[octave] |= 1 << (class % CLASSES_PER_OCTAVE);
    }

    /// Takes a block out that is in the set.
    #[inline]
    pub(crate) fn remove(&mut self, block: FreeBlock) {
        let class = class_of(block.size);
        let bucket = &mut self.buckets[class];
        bucket.remove(block);
        if bucket.first.is_none() {
            let octave = class / CLASSES_PER_OCTAVE;
            self.classes[octave] &= !(1 << (class % CLASSES_PER_OCTAVE));
            if self.classes[octave] == 0 {
                self.octaves &= !(1 << octave);
            }
        }
    }

    /// The smallest block of at least `size` bytes, and of those the one with the lowest address.
    #[inline]
    pub(crate) fn best_fit(&self, size: u64) -> Option<FreeBlock> {
        let own = class_of(size);
        let class = self.class_from(own)?;
        let bucket = &self.buckets[class];
        if class == own {
            bucket.first_where(|block| block.size >= size).or_else(|| self.first_from(own + 1))
        } else {
            bucket.first
        }
    }

    /// The block that follows `block` in the order of the set.
    pub(crate) fn after(&self, block: FreeBlock) -> Option<FreeBlock> {
        let class = class_of(block.size);
        let own = self.buckets.get(class).and_then(|bucket| bucket.first_where(|other| *other > block));
        own.or_else(|| self.first_from(class + 1))
    }

    /// The largest block, and of those the one with the highest address.
    pub(crate) fn largest(&self) -> Option<FreeBlock> {
        let octave = self.octaves.checked_ilog2()? as usize;
        let class = self.classes[octave].ilog2() as usize;
        self.buckets[octave * CLASSES_PER_OCTAVE + class].last()
    }

    pub(crate) fn contains(&self, block: FreeBlock) -> bool {
        self.buckets.get(class_of(block.size)).and_then(|bucket| bucket.first_where(|other| *other >= block))
            == Some(block)
    }

    /// All blocks, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = FreeBlock> + '_ {
        self.iter_from(0)
    }

    /// The blocks of at least `size` bytes, in order.
    pub(crate) fn iter_from(&self, size: u64) -> impl Iterator<Item = FreeBlock> + '_ {
        let classes = std::iter::successors(self.class_from(class_of(size)), |class| self.class_from(class + 1));
        classes.flat_map(|class| self.buckets[class].iter()).filter(move |block| block.size >= size)
    }

    /// Makes room for blocks of the class.
    #[cold]
    fn extend_to(&mut self, class: usize) {
        self.buckets.resize_with(class + 1, Bucket::default);
    }

    /// The first block of the classes from `class` on.
    fn first_from(&self, class: usize) -> Option<FreeBlock> {
        self.buckets[self.class_from(class)?].first
    }

    /// The first class from `class` on that holds a block.
    #[inline]
    fn class_from(&self, class: usize) -> Option<usize> {
        let octave = class / CLASSES_PER_OCTAVE;
        let here = self.classes.get(octave)? & (u64::MAX << (class % CLASSES_PER_OCTAVE));
        let (octave, word) = if here != 0 {
            (octave, here)
        } else {
            let above = self.octaves & (u64::MAX << octave << 1);
            if above == 0 {
                return None;
            }
            let octave = above.trailing_zeros() as usize;
            (octave, self.classes[octave])
        };
        Some(octave * CLASSES_PER_OCTAVE + word.trailing_zeros() as usize)
    }

    /// The invariants that this module owns; the scan in [`check`](crate::check) calls it.
    pub(crate) fn check(&self) -> Result<(), String> {
        let octaves = self.classes.iter().rev().fold(0, |octaves, classes| octaves << 1 | u64::from(*classes != 0));
        let marked: u32 = self.classes.iter().map(|classes| classes.count_ones()).sum();
        let mut holding = 0;
        for (class, bucket) in self.buckets.iter().enumerate() {
            let Some(first) = bucket.iter().next() else { continue };
            holding += 1;
            if self.class_from(class) != Some(class) || bucket.first != Some(first) {
                return Err(format!("class {class} holds a block and seems empty"));
            }
            if bucket.iter().any(|block| class_of(block.size) != class) {
                return Err(format!("class {class} holds a block of another one"));
            }
        }
        if (self.octaves, marked) != (octaves, holding) {
            return Err(format!("{marked} classes are marked, of which {holding} hold a block"));
        }
        if self.iter().is_sorted() { Ok(()) } else { Err("blocks are out of order".to_owned()) }
    }
}

/// The class of a size: its value in units below 64, else its power of two and the next six bits.
#[inline]
fn class_of(size: u64) -> usize {
    let units = size / BLOCK_GRANULARITY;
    let octave = (units | CLASSES_PER_OCTAVE as u64).ilog2() - OCTAVE_BITS;
    // What is left of the units has its uppermost bit at `CLASSES_PER_OCTAVE`, unless they are fewer.
    octave as usize * CLASSES_PER_OCTAVE + (units >> octave) as usize
}

/// The blocks of one class, in order.
#[derive(Debug, Default)]
struct Bucket {
    /// The first block, which nearly always is the only one: no search, and no memory elsewhere.
    first: Option<FreeBlock>,
    /// The others; none if there is no first one. Made when a class gets its second block, and kept from then on.
    others: Option<Box<Runs>>,
}

impl Bucket {
    #[inline]
    fn insert(&mut self, block: FreeBlock) {
        match &mut self.first {
            None => self.first = Some(block),
            Some(first) => {
                let (lower, upper) = if block < *first { (block, *first) } else { (*first, block) };
                *first = lower;
                self.others.get_or_insert_default().insert(upper);
            }
        }
    }

    /// Takes a block out that is in the bucket.
    #[inline]
    fn remove(&mut self, block: FreeBlock) {
        if self.first.is_some_and(|first| first.id == block.id) {
            debug_assert_eq!(self.first, Some(block), "the block is in the index");
            self.first = None;
            if let Some(others) = &mut self.others {
                self.first = others.pop_first();
            }
        } else {
            self.others.as_mut().expect("the block is in the index").remove(block);
        }
    }

    fn last(&self) -> Option<FreeBlock> {
        self.iter().last()
    }

    /// The first block for which `is_reached` holds, given that it holds for all after it.
    #[inline]
    fn first_where(&self, is_reached: impl Fn(&FreeBlock) -> bool) -> Option<FreeBlock> {
        let first = self.first.filter(&is_reached);
        first.or_else(|| self.others.as_ref()?.first_where(is_reached))
    }

    fn iter(&self) -> impl Iterator<Item = FreeBlock> + '_ {
        self.first.into_iter().chain(self.others.iter().flat_map(|others| others.iter()))
    }
}

/// Blocks in order, cut into runs so that no insertion moves more than one run.
#[derive(Debug, Default)]
struct Runs {
    /// The first run, which is nearly always the only one. Empty only if there is no other.
    head: Vec<FreeBlock>,
    /// The others, none of them empty, in order.
    tail: Vec<Vec<FreeBlock>>,
}

impl Runs {
    fn iter(&self) -> impl Iterator<Item = FreeBlock> + '_ {
        self.head.iter().chain(self.tail.iter().flatten()).copied()
    }

    fn first_where(&self, is_reached: impl Fn(&FreeBlock) -> bool) -> Option<FreeBlock> {
        let in_run = |run: &Vec<FreeBlock>| run.get(run.partition_point(|block| !is_reached(block))).copied();
        in_run(&self.head).or_else(|| {
            let run = self.tail.partition_point(|run| run.last().is_some_and(|block| !is_reached(block)));
            self.tail.get(run).and_then(in_run)
        })
    }

    #[inline(never)]
    fn insert(&mut self, block: FreeBlock) {
        let number = self.run_of(block);
        let run = self.run_mut(number);
        let position = run.partition_point(|other| *other < block);
        run.insert(position, block);
        if run.len() > RUN_LENGTH {
            let upper = run.split_off(RUN_LENGTH / 2);
            self.tail.insert(number, upper);
        }
    }

    #[inline(never)]
    fn remove(&mut self, block: FreeBlock) {
        let number = self.run_of(block);
        let run = self.run_mut(number);
        let position = run.partition_point(|other| *other < block);
        debug_assert_eq!(run[position], block, "the block is in the index");
        self.take(number, position);
    }

    fn pop_first(&mut self) -> Option<FreeBlock> {
        if self.head.is_empty() { None } else { Some(self.take(0, 0)) }
    }

    /// Takes a block out of the run of this number.
    fn take(&mut self, number: usize, position: usize) -> FreeBlock {
        let run = self.run_mut(number);
        let block = run.remove(position);
        if run.is_empty() && !self.tail.is_empty() {
            if number == 0 {
                self.head = self.tail.remove(0);
            } else {
                self.tail.remove(number - 1);
            }
        }
        block
    }

    /// The number of the run that `block` belongs into: 0 for the head.
    fn run_of(&self, block: FreeBlock) -> usize {
        self.tail.partition_point(|run| run.first().is_some_and(|first| *first <= block))
    }

    fn run_mut(&mut self, number: usize) -> &mut Vec<FreeBlock> {
        if number == 0 { &mut self.head } else { &mut self.tail[number - 1] }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn block(size: u64, address: u64) -> FreeBlock {
        FreeBlock { size, address, id: BlockId::from_index(1 + address as usize / 512) }
    }

    #[test]
    fn best_fit_is_the_smallest_then_the_lowest() {
        let mut index = FreeIndex::default();
        for entry in [block(4096, 8192), block(4096, 512), block(1024, 1 << 20), block(1 << 30, 0)] {
            index.insert(entry);
        }
        assert_eq!(index.best_fit(2048), Some(block(4096, 512)));
        assert_eq!(index.best_fit(4608), Some(block(1 << 30, 0)));
        assert_eq!(index.best_fit((1 << 30) + 512), None);
        assert_eq!(index.largest(), Some(block(1 << 30, 0)));
    }

    #[test]
    fn classes_are_ordered_as_sizes_are() {
        let mut previous = 0;
        for units in 1..100_000 {
            let class = class_of(units * BLOCK_GRANULARITY);
            assert!(class == previous || class == previous + 1, "units {units}");
            previous = class;
        }
        assert!(class_of(1 << 63) / CLASSES_PER_OCTAVE < OCTAVES);
    }

    #[test]
    fn index_agrees_with_a_sorted_set_under_many_equal_and_close_sizes() {
        let mut index = FreeIndex::default();
        let mut model = BTreeSet::new();
        let mut random = 1_u64;
        for step in 0..20_000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let size = 512 * (1 + (random >> 33) % 300);
            if random >> 63 == 0 || model.is_empty() {
                let entry = block(size, step * 512);
                index.insert(entry);
                model.insert(entry);
            } else {
                let probe = block(size, random % (step * 512));
                let entry = *model.range(probe..).next().or_else(|| model.first()).expect("not empty");
                assert_eq!(index.after(entry), model.range(entry..).nth(1).copied());
                index.remove(entry);
                model.remove(&entry);
            }
            let grown = model.first().map(|entry| block(entry.size + 512, entry.address));
            if let Some(grown) = grown.filter(|grown| !model.contains(grown)) {
                index.remove(model.pop_first().expect("seen above"));
                index.insert(grown);
                model.insert(grown);
            }
            let expected = model.iter().find(|entry| entry.size >= size).copied();
            assert_eq!(index.best_fit(size), expected);
            assert!(index.iter_from(size).eq(model.iter().filter(|entry| entry.size >= size).copied()));
            assert_eq!((index.check(), index.largest()), (Ok(()), model.last().copied()));
        }
        assert!(index.iter().eq(model.iter().copied()));
    }
}
