//! Memory that must stay where it is: registered with a network card or a communicator, or shared with a process.

use std::collections::BTreeMap;

use crate::backing::SpanIx;

/// Pinned pieces of spans. A pin outlives the block: what was registered is the memory, not the allocation.
#[derive(Debug, Default)]
pub(crate) struct PinTable {
    by_address: BTreeMap<u64, Pin>,
}

#[derive(Debug)]
struct Pin {
    span: SpanIx,
    size: u64,
    count: u32,
}

impl PinTable {
    /// Pins `size` bytes at `address`; pins of one address add up.
    pub(crate) fn pin(&mut self, address: u64, size: u64, span: SpanIx) {
        let pin = self.by_address.entry(address).or_insert(Pin { span, size, count: 0 });
        pin.size = pin.size.max(size);
        pin.count += 1;
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

    pub(crate) fn is_empty(&self) -> bool {
        self.by_address.is_empty()
    }

    /// The pinned pieces of a span as `(first, end)`, in address order.
    pub(crate) fn of_span(&self, span: SpanIx) -> Vec<(u64, u64)> {
        let of_span = self.by_address.iter().filter(|(_, pin)| pin.span == span);
        of_span.map(|(address, pin)| (*address, address + pin.size)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_stays_pinned_until_the_last_pin_is_gone() {
        let mut pins = PinTable::default();
        pins.pin(4096, 512, SpanIx(3));
        pins.pin(4096, 1024, SpanIx(3));
        assert_eq!(pins.of_span(SpanIx(3)), [(4096, 5120)]);
        assert!(pins.unpin(4096));
        assert!(!pins.is_empty());
        assert!(pins.unpin(4096));
        assert!(pins.is_empty() && !pins.unpin(4096));
    }
}
