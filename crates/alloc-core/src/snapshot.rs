//! A read-only picture of a device's memory, as torch's `memory_snapshot` lists it.

use crate::{
    backing::SpanKind,
    block::{BlockId, BlockState},
    device::DeviceState,
    history::{HistoryEvent, StackId},
    id::{DeviceId, DevicePtr, PoolId, StreamHandle},
    size::SizeClass,
};

/// A device's memory and its latest events, of one moment: walked back from the one, the other never contradicts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePicture {
    /// The device.
    pub device: DeviceId,
    /// In address order.
    pub segments: Vec<SegmentPicture>,
    /// Oldest first.
    pub events: Vec<HistoryEvent>,
}

/// A segment, or a run of mapped handles in a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentPicture {
    /// The device that the memory is on.
    pub device: DeviceId,
    /// The first byte.
    pub address: DevicePtr,
    /// Bytes; the sizes of the blocks add up to it.
    pub size: u64,
    /// The stream whose requests it serves.
    pub stream: StreamHandle,
    /// Which requests it serves.
    pub class: SizeClass,
    /// The private pool that it belongs to, or [`PoolId::DEFAULT`].
    pub pool: PoolId,
    /// Whether it is a run of a range.
    pub is_expandable: bool,
    /// By whom it was obtained; of a run, its first mapping.
    pub stack: StackId,
    /// From first to last, each touching the next.
    pub blocks: Vec<BlockPicture>,
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPicture {
    /// The first byte.
    pub address: DevicePtr,
    /// Bytes.
    pub size: u64,
    /// The bytes that the program asked for; 0 for an inactive block.
    pub requested: u64,
    /// What it is used for.
    pub state: PictureState,
    /// By whom an active block was allocated, if that was recorded.
    pub stack: StackId,
}

/// A block's state, as torch names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureState {
    /// The program holds it.
    Allocated,
    /// Freed, but other streams are not known to be done.
    PendingFree,
    /// Free, quarantined, or set aside for a plan under way.
    Inactive,
}

impl PictureState {
    /// The name in a snapshot.
    pub fn name(self) -> &'static str {
        match self {
            Self::Allocated => "active_allocated",
            Self::PendingFree => "active_pending_free",
            Self::Inactive => "inactive",
        }
    }
}

impl DeviceState {
    /// All memory of this device, in address order.
    pub(crate) fn picture(&self) -> Vec<SegmentPicture> {
        let mut segments = Vec::new();
        for span in self.spans.by_address() {
            let span = &self.spans[span];
            let is_expandable = matches!(span.kind, SpanKind::Range(_));
            let mut next = self.blocks.at(span.base);
            while let Some(first) = next {
                let (blocks, after) = self.mapped_from(first);
                next = after;
                if let (Some(block), Some(last)) = (blocks.first(), blocks.last()) {
                    segments.push(SegmentPicture {
                        device: self.id,
                        address: block.address,
                        size: last.address.0 + last.size - block.address.0,
                        stream: self.streams.target(self.pools[span.pool].stream).handle,
                        class: self.pools[span.pool].class,
                        pool: self.pool_id(span.pool),
                        is_expandable,
                        stack: self.history.segment_stack(block.address.0),
                        blocks,
                    });
                }
            }
        }
        segments
    }

    /// The blocks with memory from `first` on, and the block after the hole that ends them.
    fn mapped_from(&self, first: BlockId) -> (Vec<BlockPicture>, Option<BlockId>) {
        let mut blocks = Vec::new();
        let mut next = Some(first);
        while let Some(id) = next {
            let block = &self.blocks[id];
            next = block.next;
            let state = match block.state {
                BlockState::Unmapped | BlockState::Stale => break,
                BlockState::Allocated => PictureState::Allocated,
                BlockState::Pending { .. } | BlockState::Deferred { .. } => PictureState::PendingFree,
                BlockState::Free | BlockState::Claimed | BlockState::Quarantined => PictureState::Inactive,
            };
            let (address, size, requested) = (DevicePtr(block.address), block.size, block.requested);
            let stack = self.history.block_stack(block.address);
            blocks.push(BlockPicture { address, size, requested, state, stack });
        }
        (blocks, next)
    }
}
