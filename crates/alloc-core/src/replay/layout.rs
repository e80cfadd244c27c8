//! The memory that a recording began with, where it began in the middle of a run.
//!
//! Requests alone would place what is older than the recording side by side. Where each such block lay, and which memory
//! was cached beside it, decides what later requests fit, so under the policy that the recorded allocator followed the
//! segments are built as they were: each is obtained, cut into its pieces in the order of their addresses while all others
//! are full, and the pieces that were free are given back in the end. A range is filled, holes and all, and the holes are
//! unmapped before that.

use crate::config::Config;
use crate::id::{DevicePtr, PoolId, StreamHandle};
use crate::size::{SMALL_REQUEST_MAX, SMALL_SEGMENT, SizeClass, block_size, segment_size};

use super::{DEVICE, Failure, Replay, State, is_out_of_memory};

/// A segment that was there when the recording began, or the memory of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedSegment {
    /// Where it lay: its name for [`follow`](super::follow), and nothing else.
    pub address: u64,
    /// Bytes, with the holes.
    pub size: u64,
    /// The stream whose requests it serves.
    pub stream: StreamHandle,
    /// The private pool that it belongs to.
    pub pool: Option<PoolId>,
    /// Of a range, which requests it serves; of a segment its pieces tell.
    pub range: Option<SizeClass>,
    /// What it is cut into, from its first byte to its last.
    pub pieces: Vec<PlacedPiece>,
}

/// A part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedPiece {
    /// Bytes.
    pub size: u64,
    /// Who had it.
    pub holder: Holder,
}

/// Who had a piece of a segment when the recording began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// This allocation. Its own step comes later and finds it placed.
    Allocation(usize),
    /// Nobody: it was cached.
    Cache,
    /// Nobody, and there was no memory: a hole of a range, of whole handles.
    Hole,
}

impl Replay {
    /// Builds the segments. Returns false, with memory in some other state, if they cannot be had like this.
    pub(super) fn place(&mut self, segments: &[PlacedSegment], config: &Config) -> Result<bool, Failure> {
        let limit = self.allocator.memory_fraction(DEVICE);
        if segments.iter().any(|segment| segment.range.is_some()) {
            // The holes are memory for a while.
            self.allocator.set_memory_fraction(DEVICE, 1.0)?;
        }
        let (mut free, mut holes) = (Vec::new(), Vec::new());
        let mut expected = 0;
        for segment in segments {
            let is_placed = match segment.range {
                None => self.place_segment(segment, config, &mut free)?,
                Some(class) => self.place_range(segment, class, &mut free, &mut holes)?,
            };
            if !is_placed {
                return Ok(false);
            }
            let memory = segment.pieces.iter().filter(|piece| piece.holder != Holder::Hole);
            expected += memory.map(|piece| piece.size).sum::<u64>();
        }
        for address in &holes {
            self.allocator.free(*address, DEVICE);
        }
        if !holes.is_empty() {
            self.allocator.empty_cache()?;
        }
        for address in free {
            self.allocator.free(address, DEVICE);
        }
        self.allocator.set_memory_fraction(DEVICE, limit)?;
        self.allocator.reset_peak_stats(DEVICE);
        let reserved = self.allocator.stats(DEVICE).reserved_bytes.all.current;
        Ok(reserved == expected && self.budget_bytes.is_none_or(|budget| reserved <= budget))
    }

    /// Fills a range with memory from its first byte on, and cuts it.
    fn place_range(
        &mut self,
        segment: &PlacedSegment,
        class: SizeClass,
        free: &mut Vec<DevicePtr>,
        holes: &mut Vec<DevicePtr>,
    ) -> Result<bool, Failure> {
        let most = if class == SizeClass::Small { SMALL_REQUEST_MAX } else { segment.size };
        let mut whole = Vec::new();
        let mut rest = segment.size;
        while rest > 0 {
            let size = rest.min(most);
            let Some(address) = self.take_piece(size, segment)? else { return Ok(false) };
            whole.push(address);
            rest -= size;
        }
        let Some(mut at) = whole.first().copied() else { return Ok(false) };
        for address in whole {
            self.allocator.free(address, DEVICE);
        }
        for piece in &segment.pieces {
            let Some(address) = self.allocator.carve(at, piece.size, DEVICE) else { return Ok(false) };
            self.note_handed_out(address, piece.size);
            match piece.holder {
                Holder::Allocation(allocation) => self.note_placed(allocation, address)?,
                Holder::Cache => free.push(address),
                Holder::Hole => holes.push(address),
            }
            at.0 += piece.size;
        }
        Ok(true)
    }

    fn note_placed(&mut self, allocation: usize, address: DevicePtr) -> Result<(), Failure> {
        match self.allocations.get_mut(allocation) {
            Some(state @ State::NotYet) => *state = State::Placed(address),
            _ => return Err(Failure::Allocation(allocation, "cannot be placed")),
        }
        Ok(())
    }

    fn place_segment(
        &mut self,
        segment: &PlacedSegment,
        config: &Config,
        free: &mut Vec<DevicePtr>,
    ) -> Result<bool, Failure> {
        let first = segment.pieces.first().map_or(0, |piece| piece.size);
        // A segment of another size than its first piece asks for is obtained whole, and given back to be cut.
        if segment.size != SMALL_SEGMENT && segment_size(block_size(first, config), config) != segment.size {
            let Some(whole) = self.take_piece(segment.size, segment)? else { return Ok(false) };
            self.allocator.free(whole, DEVICE);
        }
        for piece in &segment.pieces {
            if let Holder::Allocation(allocation) = piece.holder {
                let Some(address) = self.take_piece(piece.size, segment)? else { return Ok(false) };
                self.note_placed(allocation, address)?;
                continue;
            }
            // What a small segment has free may be more than a small request takes.
            let most = if segment.size == SMALL_SEGMENT { SMALL_REQUEST_MAX } else { piece.size };
            let mut rest = piece.size;
            while rest > 0 {
                let size = rest.min(most);
                let Some(address) = self.take_piece(size, segment)? else { return Ok(false) };
                free.push(address);
                rest -= size;
            }
        }
        Ok(true)
    }

    fn take_piece(&mut self, size: u64, segment: &PlacedSegment) -> Result<Option<DevicePtr>, Failure> {
        self.begin_pool(segment.pool)?;
        match self.allocator.malloc(size, DEVICE, segment.stream, segment.pool) {
            Ok(Some(address)) => {
                self.note_handed_out(address, size);
                Ok(Some(address))
            }
            Ok(None) => Ok(None),
            Err(error) if is_out_of_memory(&error) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}
