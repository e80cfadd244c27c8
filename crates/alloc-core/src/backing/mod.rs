//! Where memory comes from: spans of contiguous addresses, each cut into blocks.
//!
//! A *segment* is one driver allocation, all of it memory from first to last (torch's default). A *range* is addresses
//! set aside, with physical handles mapped where they are needed (torch's expandable segments). Which of the two a device
//! uses is chosen once, when the device is first used; but private pools with a [source](crate::source) of their own have
//! segments on every device.

pub(crate) mod contiguous;
pub(crate) mod expand;
pub(crate) mod gap;
pub(crate) mod mapping;
pub(crate) mod moving;
pub(crate) mod paged;
pub(crate) mod segments;
pub(crate) mod sourced;

use std::ops::{Index, IndexMut};

use crate::{pool_set::PoolIx, source::Origin};
use mapping::Mappings;

/// A span's place in the [`SpanTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SpanIx(pub(crate) u32);

/// Contiguous addresses that the blocks of one pool lie in.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) base: u64,
    pub(crate) size: u64,
    pub(crate) pool: PoolIx,
    pub(crate) kind: SpanKind,
}

/// What stands behind a span's addresses.
#[derive(Debug)]
pub(crate) enum SpanKind {
    /// Memory, from first to last; and where it goes back to.
    Segment(Origin),
    /// Addresses set aside, with handles where there are any.
    Range(Mappings),
}

impl Span {
    /// The handles of a range.
    pub(crate) fn mappings(&self) -> &Mappings {
        match &self.kind {
            SpanKind::Range(mappings) => mappings,
            SpanKind::Segment(_) => unreachable!("a segment has no handles"),
        }
    }

    /// The handles of a range.
    pub(crate) fn mappings_mut(&mut self) -> &mut Mappings {
        match &mut self.kind {
            SpanKind::Range(mappings) => mappings,
            SpanKind::Segment(_) => unreachable!("a segment has no handles"),
        }
    }

    /// The bytes of memory in the span.
    pub(crate) fn reserved(&self) -> u64 {
        match &self.kind {
            SpanKind::Segment(_) => self.size,
            SpanKind::Range(mappings) => mappings.bytes(),
        }
    }
}

/// All spans of a device.
#[derive(Debug, Default)]
pub(crate) struct SpanTable {
    spans: Vec<Option<Span>>,
}

impl SpanTable {
    pub(crate) fn insert(&mut self, span: Span) -> SpanIx {
        let index = self.spans.iter().position(Option::is_none).unwrap_or_else(|| {
            self.spans.push(None);
            self.spans.len() - 1
        });
        self.spans[index] = Some(span);
        SpanIx(index as u32)
    }

    pub(crate) fn remove(&mut self, span: SpanIx) {
        self.spans[span.0 as usize] = None;
    }

    /// The spans that have one of these addresses.
    pub(crate) fn overlapping(&self, base: u64, end: u64) -> impl Iterator<Item = &Span> {
        self.spans.iter().flatten().filter(move |span| span.base < end && base < span.base + span.size)
    }

    /// The spans there are, in address order.
    pub(crate) fn by_address(&self) -> Vec<SpanIx> {
        let mut ids: Vec<SpanIx> = self.ids().collect();
        ids.sort_by_key(|span| self[*span].base);
        ids
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = SpanIx> + '_ {
        (0..self.spans.len()).filter(|index| self.spans[*index].is_some()).map(|index| SpanIx(index as u32))
    }
}

impl Index<SpanIx> for SpanTable {
    type Output = Span;

    fn index(&self, span: SpanIx) -> &Span {
        self.spans[span.0 as usize].as_ref().expect("a span outlives its blocks")
    }
}

impl IndexMut<SpanIx> for SpanTable {
    fn index_mut(&mut self, span: SpanIx) -> &mut Span {
        self.spans[span.0 as usize].as_mut().expect("a span outlives its blocks")
    }
}
