//! Memory that must stay where it is: registered with a network card or a communicator, or shared with a process.

use std::collections::BTreeMap;

/// Pinned pieces of spans. A pin outlives the block: what was registered is the memory, not the allocation. So pins may
/// overlap each other, but none reaches from one span into the next, and no span goes back while it has any.
#[derive(Debug, Default)]
pub(crate) struct PinTable {
    by_address: BTreeMap<u64, Pin>,
    /// No pin is larger: how far before an address the first can begin that reaches it.
    size_max: u64,
}

#[derive(Debug)]
struct Pin {
    size: u64,
    count: u32,
}

impl PinTable {
    /// Pins `size` bytes at `address`; pins of one address add up.
    pub(crate) fn pin(&mut self, address: u64, size: u64) {
        let pin = self.by_address.entry(address).or_insert(Pin { size, count: 0 });
        pin.size = pin.size.max(size);
        pin.count += 1;
        self.size_max = self.size_max.max(size);
    }

    /// Takes one pin back. Returns whether there was one.
    pub(crate) fn unpin(&mut self, address: u64) -> bool {
        let Some(pin) = self.by_address.get_mut(&address) else { return false };
        pin.count -= 1;
        if pin.count == 0 {
            self.by_address.remove(&address);
        }
        true
    }

    /// The pinned pieces of which some byte lies between two addresses, as `(first, end)`, in address order.
    pub(crate) fn overlapping(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let near = self.by_address.range(from.saturating_sub(self.size_max)..to);
        near.map(|(address, pin)| (*address, address + pin.size)).filter(move |(_, end)| from < *end)
    }

    /// Whether some byte between two addresses is pinned.
    pub(crate) fn has_any(&self, from: u64, to: u64) -> bool {
        self.overlapping(from, to).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_stays_pinned_until_the_last_pin_is_gone() {
        let mut pins = PinTable::default();
        pins.pin(4096, 512);
        pins.pin(4096, 1024);
        assert!(pins.overlapping(0, 8192).eq([(4096, 5120)]));
        assert!(pins.unpin(4096));
        assert!(pins.has_any(4096, 5120));
        assert!(pins.unpin(4096));
        assert!(!pins.has_any(0, 8192) && !pins.unpin(4096));
    }

    #[test]
    fn pin_that_reaches_in_from_either_side_overlaps_also_from_behind_a_shorter_one() {
        let mut pins = PinTable::default();
        for (address, size) in [(1024, 8192), (2048, 512), (16384, 512)] {
            pins.pin(address, size);
        }
        let overlapping = |from, to| pins.overlapping(from, to).collect::<Vec<_>>();
        assert_eq!(overlapping(0, 1024), []);
        assert_eq!(overlapping(0, 2049), [(1024, 9216), (2048, 2560)]);
        assert_eq!(overlapping(9215, 16384), [(1024, 9216)]);
        assert_eq!(overlapping(9216, 16384), []);
        assert_eq!(overlapping(16895, 20000), [(16384, 16896)]);
    }
}
