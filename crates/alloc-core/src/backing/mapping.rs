//! Which physical handle stands behind which addresses of a range.

use std::collections::BTreeMap;

use crate::id::PhysicalHandle;

/// A whole handle at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) address: u64,
    /// A multiple of the driver's granularity.
    pub(crate) size: u64,
    pub(crate) handle: PhysicalHandle,
}

impl Mapping {
    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }
}

/// The handles of one range, none overlapping another.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    by_address: BTreeMap<u64, Mapping>,
}

impl Mappings {
    pub(crate) fn insert(&mut self, mapping: Mapping) {
        let displaced = self.by_address.insert(mapping.address, mapping);
        debug_assert!(displaced.is_none(), "two handles at one address");
    }

    /// Takes the handle out that starts at `address`.
    pub(crate) fn remove(&mut self, address: u64) -> Mapping {
        self.by_address.remove(&address).expect("a handle starts here")
    }

    /// The handles in address order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Mapping> + '_ {
        self.by_address.values().copied()
    }

    /// The handles that lie wholly between two addresses, in address order.
    pub(crate) fn within(&self, from: u64, to: u64) -> impl DoubleEndedIterator<Item = Mapping> + '_ {
        self.by_address.range(from..to).map(|(_, mapping)| *mapping).filter(move |mapping| mapping.end() <= to)
    }

    /// The handles of which some byte lies between two addresses, in address order.
    pub(crate) fn overlapping(&self, from: u64, to: u64) -> impl Iterator<Item = Mapping> + '_ {
        let first = self.by_address.range(..=from).next_back().map_or(from, |(address, _)| *address);
        self.by_address.range(first..to).map(|(_, mapping)| *mapping).filter(move |mapping| from < mapping.end())
    }

    /// The handle that begins before the address and ends after it.
    pub(crate) fn across(&self, address: u64) -> Option<Mapping> {
        let (_, before) = self.by_address.range(..address).next_back()?;
        (address < before.end()).then_some(*before)
    }

    /// Whether no handle with memory between the two addresses, all of which have some, reaches beyond them.
    pub(crate) fn are_whole(&self, from: u64, to: u64) -> bool {
        self.across(from).is_none() && self.across(to).is_none()
    }

    /// Whether every address between the two has memory.
    pub(crate) fn covers(&self, from: u64, to: u64) -> bool {
        let first = self.by_address.range(..=from).next_back().map_or(from, |(address, _)| *address);
        let mut reached = from;
        for (address, mapping) in self.by_address.range(first..to) {
            if *address > reached {
                return false;
            }
            reached = reached.max(mapping.end());
        }
        reached >= to
    }

    /// Whether no address between the two has memory.
    pub(crate) fn is_free(&self, from: u64, to: u64) -> bool {
        self.by_address.range(..to).next_back().is_none_or(|(_, mapping)| mapping.end() <= from)
    }

    /// The bytes of all handles.
    pub(crate) fn bytes(&self) -> u64 {
        self.by_address.values().map(|mapping| mapping.size).sum()
    }
}

/// Contiguous pieces of addresses, joined where they touch.
#[derive(Debug, Default)]
pub(crate) struct Runs(pub(crate) Vec<(u64, u64)>);

impl Runs {
    /// Adds `size` bytes at `address`, which lie after all that was added before.
    pub(crate) fn push(&mut self, address: u64, size: u64) {
        match self.0.last_mut() {
            Some((base, length)) if *base + *length == address => *length += size,
            _ => self.0.push((address, size)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mappings(pieces: &[(u64, u64)]) -> Mappings {
        let mut mappings = Mappings::default();
        for (address, size) in pieces {
            mappings.insert(Mapping { address: *address, size: *size, handle: PhysicalHandle(*address) });
        }
        mappings
    }

    #[test]
    fn only_whole_handles_lie_within() {
        let mappings = mappings(&[(0, 20), (20, 2), (22, 20)]);
        let within: Vec<_> = mappings.within(5, 30).map(|mapping| mapping.address).collect();
        assert_eq!(within, [20]);
        assert_eq!(mappings.bytes(), 42);
    }

    #[test]
    fn handle_that_reaches_in_from_either_side_overlaps() {
        let mappings = mappings(&[(0, 20), (20, 2), (30, 20)]);
        let overlapping = |from, to| mappings.overlapping(from, to).map(|mapping| mapping.address).collect::<Vec<_>>();
        assert_eq!(overlapping(19, 21), [0, 20]);
        assert_eq!(overlapping(22, 30), []);
        assert_eq!(overlapping(25, 31), [30]);
        assert_eq!(overlapping(0, 99), [0, 20, 30]);
    }

    #[test]
    fn gap_between_handles_is_neither_covered_nor_free() {
        let mappings = mappings(&[(0, 20), (30, 10)]);
        assert!(mappings.covers(5, 20) && mappings.covers(32, 40));
        assert!(!mappings.covers(5, 35) && !mappings.covers(30, 41));
        assert!(mappings.is_free(20, 30) && mappings.is_free(40, 90));
        assert!(!mappings.is_free(10, 30) && !mappings.is_free(25, 35));
    }

    #[test]
    fn handle_across_either_end_is_not_whole() {
        let mappings = mappings(&[(0, 20), (20, 10), (30, 20)]);
        assert!(mappings.are_whole(0, 50) && mappings.are_whole(20, 30));
        assert!(!mappings.are_whole(5, 30) && !mappings.are_whole(20, 45) && !mappings.are_whole(15, 35));
        assert_eq!(mappings.across(25).map(|mapping| mapping.address), Some(20));
        assert_eq!((mappings.across(30), mappings.across(50)), (None, None));
    }

    #[test]
    fn touching_pieces_are_one_run() {
        let mut runs = Runs::default();
        for (address, size) in [(0, 2), (2, 4), (8, 2)] {
            runs.push(address, size);
        }
        assert_eq!(runs.0, [(0, 6), (8, 2)]);
    }
}
