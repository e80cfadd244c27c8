//! The memory that a recording began with, where it began in the middle of a run.
//!
//! Requests alone would place what is older than the recording side by side. Where each such block lay, and which memory
//! was cached beside it, decides what later requests fit, so under the policy that the recorded allocator followed the
//! segments are built as they were: each is obtained, cut into its pieces in the order of their addresses while all others
//! are full, and the pieces that were free are given back in the end.

use crate::config::Config;
use crate::id::{DevicePtr, PoolId, StreamHandle};
use crate::size::{SMALL_REQUEST_MAX, SMALL_SEGMENT, block_size, segment_size};

use super::{DEVICE, Failure, Replay, State, is_out_of_memory};

/// A segment that was there when the recording began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedSegment {
    /// Bytes.
    pub size: u64,
    /// The stream whose requests it serves.
    pub stream: StreamHandle,
    /// The private pool that it belongs to.
    pub pool: Option<PoolId>,
    /// What it is cut into, from its first byte to its last.
    pub pieces: Vec<PlacedPiece>,
}

/// A part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedPiece {
    /// Bytes.
    pub size: u64,
    /// The allocation that had it; `None` if it was free. Its own step comes later and finds it placed.
    pub allocation: Option<usize>,
}

impl Replay {
    /// Builds the segments. Returns false, with memory in some other state, if they cannot be had like this.
    pub(super) fn place(&mut self, segments: &[PlacedSegment], config: &Config) -> Result<bool, Failure> {
        let mut free: Vec<DevicePtr> = Vec::new();
        for segment in segments {
            if !self.place_segment(segment, config, &mut free)? {
                return Ok(false);
            }
        }
        for address in free {
            self.allocator.free(address, DEVICE);
        }
        self.allocator.reset_peak_stats(DEVICE);
        let expected: u64 = segments.iter().map(|segment| segment.size).sum();
        Ok(self.allocator.stats(DEVICE).reserved_bytes.all.current == expected)
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
            if let Some(allocation) = piece.allocation {
                let Some(address) = self.take_piece(piece.size, segment)? else { return Ok(false) };
                match self.allocations.get_mut(allocation) {
                    Some(state @ State::NotYet) => *state = State::Placed(address),
                    _ => return Err(Failure::Allocation(allocation, "cannot be placed")),
                }
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
