//! A block: a contiguous piece of a segment or of an address range, and what it is used for.

use std::num::NonZeroU32;

use crate::{backing::SpanIx, event::StreamIx, last_use::LastUse, pool_set::PoolIx, stats::Pieces};

/// A block's place in the [`BlockTable`](crate::block_table::BlockTable).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlockId(NonZeroU32);

impl BlockId {
    /// # Panics
    ///
    /// If the index is 0, where no block stands; or if there are 2³² blocks, which at 512 bytes each is more than any
    /// device holds.
    pub(crate) fn from_index(index: usize) -> Self {
        let number = u32::try_from(index).expect("blocks of at least 512 bytes fit into 32 bits");
        Self(NonZeroU32::new(number).expect("no block stands at index 0"))
    }

    pub(crate) fn index(self) -> usize {
        self.0.get() as usize
    }
}

/// What a block is used for at the moment. Every block is in exactly one state.
///
/// `Unmapped → Free → Allocated → Pending → Free`; `Pending ↔ Deferred` while a stream that used the block captures;
/// `Free → Claimed → Stale → Unmapped` for memory that moves away; `Free → Claimed → …` and `Unmapped → Claimed → …` while a plan is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// Addresses with no memory behind them, in a range.
    Unmapped,
    /// Memory that the block's own stream may have at once. In its pool's index.
    Free,
    /// Memory that the program holds.
    Allocated,
    /// Freed by the program, and still in use on this many streams besides its own.
    Pending {
        /// Streams whose work is not known to have ended. Never 0.
        streams: u16,
    },
    /// As `Pending`, but one of the streams is capturing, so that no event can be recorded on it now.
    Deferred {
        /// As in `Pending`.
        streams: u16,
    },
    /// Set aside for a plan that is under way: neither allocatable nor coalescible, but still counted.
    Claimed,
    /// Addresses whose memory has moved away; still mapped, until the last use there is over.
    Stale,
    /// Free memory of a released private pool, in its pool's index but out of reach: a graph may still run on it.
    Quarantined,
}

impl BlockState {
    /// Whether nobody holds the block and it has memory.
    pub(crate) fn is_idle(self) -> bool {
        matches!(self, Self::Free | Self::Quarantined)
    }
}

/// A contiguous piece of a span.
#[derive(Debug)]
pub(crate) struct Block {
    /// A multiple of 512 bytes.
    pub(crate) address: u64,
    /// A multiple of 512 bytes, never 0.
    pub(crate) size: u64,
    /// The bytes that the program asked for; at most `size`; 0 unless allocated, pending or deferred.
    pub(crate) requested: u64,
    /// Who touches this block in address order: `previous.address + previous.size == address`.
    pub(crate) previous: Option<BlockId>,
    /// `address + size == next.address`.
    pub(crate) next: Option<BlockId>,
    /// The segment or range that the block is a piece of; the same for both neighbours.
    pub(crate) span: SpanIx,
    /// The pool that it returns to; the same for both neighbours.
    pub(crate) pool: PoolIx,
    pub(crate) state: BlockState,
    /// The pool's count of requests when the block became idle: its age, for garbage collection.
    pub(crate) idle_since: u64,
    /// The stream that a guest was handed out to: a block that lies in another stream's pool and goes home when it is
    /// idle. `None` unless allocated, pending or deferred.
    pub(crate) guest_of: Option<StreamIx>,
    /// See [`LastUse`] for what it means in which state.
    pub(crate) last_use: LastUse,
}

impl Block {
    /// A block that nobody has used, and that has no neighbours.
    pub(crate) fn new(address: u64, size: u64, span: SpanIx, pool: PoolIx, state: BlockState) -> Self {
        Self {
            address,
            size,
            requested: 0,
            previous: None,
            next: None,
            span,
            pool,
            state,
            idle_since: 0,
            guest_of: None,
            last_use: LastUse::default(),
        }
    }

    /// What stands where there is no block.
    pub(crate) fn nothing() -> Self {
        Self::new(0, 0, SpanIx(0), PoolIx(0), BlockState::Unmapped)
    }

    /// The first address after the block.
    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }

    /// The program has the block no longer, and nobody but its own stream can still be using it. `now` is by the pool's
    /// count of requests.
    pub(crate) fn turn_idle(&mut self, state: BlockState, now: u64) {
        debug_assert!(state.is_idle(), "{state:?} is no state of idle memory");
        self.state = state;
        self.requested = 0;
        self.guest_of = None;
        self.idle_since = now;
    }

    /// Whether the block is a piece of its span, and not the whole of it.
    pub(crate) fn is_split(&self) -> bool {
        self.previous.is_some() || self.next.is_some()
    }

    /// What torch counts as `inactive_split` of an idle block in a segment: all of it, if it is a piece.
    pub(crate) fn free_pieces(&self) -> Pieces {
        if self.is_split() { Pieces::one(self.size) } else { Pieces::default() }
    }
}
