//! What a kernel touches.

use std::ops::Range;

use super::error::AccessKind;

/// An allocation, as its position in the order of allocations. Never reused, unlike an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct AllocationId(pub(super) usize);

/// Bytes that a kernel reads or writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    /// Whose bytes; `None` for an address that no allocation was registered at.
    pub(super) allocation: Option<AllocationId>,
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) kind: AccessKind,
}

impl Access {
    /// Whether it touches one of these addresses.
    pub(super) fn overlaps(&self, addresses: &Range<u64>) -> bool {
        self.address < addresses.end && addresses.start < self.address + self.size
    }
}
