//! Hands out addresses: always the lowest gap that fits, so that a freed address comes back at once.
//!
//! A real driver does so often enough that an allocator has to survive it. Doing it always makes a stale address a
//! wrong address in every test.

use std::collections::BTreeMap;

/// The addresses between two bounds, of which some are taken.
#[derive(Debug)]
pub(super) struct AddressSpace {
    /// Start of each gap and its size. Gaps neither touch nor overlap.
    gaps: BTreeMap<u64, u64>,
}

impl AddressSpace {
    /// All addresses from `start` to `end`, none of them taken.
    pub(super) fn new(start: u64, end: u64) -> Self {
        Self { gaps: BTreeMap::from([(start, end - start)]) }
    }

    /// Takes `size` bytes at the lowest multiple of `alignment` where they fit.
    pub(super) fn take(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let (gap, gap_size, address) = self.gaps.iter().find_map(|(&gap, &gap_size)| {
            let address = gap.checked_next_multiple_of(alignment)?;
            let end = address.checked_add(size)?;
            (end <= gap + gap_size).then_some((gap, gap_size, address))
        })?;
        self.gaps.remove(&gap);
        if address > gap {
            self.gaps.insert(gap, address - gap);
        }
        let (end, gap_end) = (address + size, gap + gap_size);
        if end < gap_end {
            self.gaps.insert(end, gap_end - end);
        }
        Some(address)
    }

    /// Gives back `size` bytes at `address`, exactly as they were taken.
    pub(super) fn give_back(&mut self, address: u64, size: u64) {
        let mut start = address;
        let mut end = address + size;
        if let Some((&before, &before_size)) = self.gaps.range(..address).next_back()
            && before + before_size == address
        {
            self.gaps.remove(&before);
            start = before;
        }
        if let Some(after_size) = self.gaps.remove(&end) {
            end += after_size;
        }
        self.gaps.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_address_is_the_next_one_handed_out() {
        let mut space = AddressSpace::new(0x1000, 0x9000);
        let first = space.take(0x1000, 0x1000);
        let second = space.take(0x1000, 0x1000);
        assert_eq!((first, second), (Some(0x1000), Some(0x2000)));
        space.give_back(0x1000, 0x1000);
        assert_eq!(space.take(0x800, 0x1000), Some(0x1000));
    }

    #[test]
    fn gaps_join_so_that_the_whole_space_fits_again() {
        let mut space = AddressSpace::new(0x1000, 0x4000);
        for _ in 0..3 {
            assert!(space.take(0x1000, 0x1000).is_some());
        }
        assert_eq!(space.take(1, 1), None);
        for address in [0x1000, 0x3000, 0x2000] {
            space.give_back(address, 0x1000);
        }
        assert_eq!(space.take(0x3000, 0x1000), Some(0x1000));
    }
}
