//! Who used each physical byte last, as far as that still matters to anybody.
//!
//! A use stays until one that conflicts with everything it conflicts with is ordered after it: whoever is ordered
//! after the later use is then ordered after the earlier one too. So at most one write and one read per stream stay,
//! and mostly a single use.

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use super::access::AllocationId;
use super::clock::{StreamIndex, VectorClock};
use super::error::{AccessKind, Work};
use super::interval_map::IntervalMap;
use super::memory::{PhysicalId, Piece};

/// One use of an allocation by a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) allocation: AllocationId,
    pub(super) stream: StreamIndex,
    /// The launch's number on its stream.
    pub(super) epoch: u64,
    pub(super) kind: AccessKind,
    pub(super) work: Work,
}

impl Use {
    fn is_before(&self, clock: &VectorClock) -> bool {
        clock.covers(self.stream, self.epoch)
    }

    /// Whether the two must not run at once. What a program does with one allocation is its own business.
    fn conflicts_with(&self, other: &Use) -> bool {
        self.allocation != other.allocation && (self.kind == AccessKind::Write || other.kind == AccessKind::Write)
    }
}

type Uses = SmallVec<[Use; 1]>;

/// The uses of physical memory that later uses may still have to be ordered after.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    planes: FxHashMap<PhysicalId, IntervalMap<Uses>>,
}

impl Shadow {
    /// The first earlier use of `pieces` that conflicts with `later` and is not ordered before `clock`.
    pub(super) fn conflict(&self, pieces: &[Piece], later: &Use, clock: &VectorClock) -> Option<Use> {
        pieces.iter().find_map(|piece| {
            let plane = self.planes.get(&piece.physical)?;
            let mut earlier = plane.overlapping(piece.bytes()).flatten();
            earlier.find(|earlier| earlier.conflicts_with(later) && !earlier.is_before(clock)).copied()
        })
    }

    /// Adds a use of `pieces` at `clock`, and drops the uses that it makes redundant.
    pub(super) fn add(&mut self, pieces: &[Piece], added: Use, clock: &VectorClock) {
        let is_redundant = |earlier: &Use| {
            earlier.is_before(clock) && (added.kind == AccessKind::Write || earlier.kind == AccessKind::Read)
        };
        for piece in pieces {
            let plane = self.planes.entry(piece.physical).or_default();
            if plane.overlapping(piece.bytes()).flatten().all(is_redundant) {
                plane.assign(piece.bytes(), smallvec![added]);
            } else {
                plane.update(piece.bytes(), &Uses::new(), |uses| {
                    uses.retain(|earlier| !is_redundant(earlier));
                    uses.push(added);
                });
            }
        }
    }

    /// Forgets memory that no longer exists.
    pub(super) fn forget(&mut self, physical: PhysicalId) {
        self.planes.remove(&physical);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: Piece = Piece { physical: PhysicalId(1), mapped_at: 0, offset: 0, size: 100 };

    fn use_of(allocation: usize, stream: usize, epoch: u64, kind: AccessKind) -> Use {
        let stream = StreamIndex(stream);
        Use { allocation: AllocationId(allocation), stream, epoch, kind, work: Work::Kernel(epoch) }
    }

    #[test]
    fn a_read_keeps_the_write_before_it() {
        let mut shadow = Shadow::default();
        let mut clock = VectorClock::default();
        let write = use_of(1, 0, clock.tick(StreamIndex(0)), AccessKind::Write);
        shadow.add(&[PIECE], write, &clock);
        let read = use_of(2, 0, clock.tick(StreamIndex(0)), AccessKind::Read);
        assert_eq!(shadow.conflict(&[PIECE], &read, &clock), None);
        shadow.add(&[PIECE], read, &clock);

        let elsewhere = use_of(3, 1, 1, AccessKind::Read);
        assert_eq!(shadow.conflict(&[PIECE], &elsewhere, &VectorClock::default()), Some(write));
    }

    #[test]
    fn unordered_uses_of_one_allocation_are_all_remembered() {
        let mut shadow = Shadow::default();
        let first = use_of(1, 0, 1, AccessKind::Write);
        let second = use_of(1, 1, 1, AccessKind::Write);
        let (mut at_first, mut at_second) = (VectorClock::default(), VectorClock::default());
        at_first.tick(StreamIndex(0));
        at_second.tick(StreamIndex(1));
        shadow.add(&[PIECE], first, &at_first);
        shadow.add(&[PIECE], second, &at_second);

        let later = use_of(2, 2, 1, AccessKind::Write);
        assert_eq!(shadow.conflict(&[PIECE], &later, &at_second), Some(first), "the second one's order is not enough");
        at_second.join(&at_first);
        assert_eq!(shadow.conflict(&[PIECE], &later, &at_second), None);
    }

    #[test]
    fn bytes_beside_each_other_do_not_conflict() {
        let mut shadow = Shadow::default();
        shadow.add(&[PIECE], use_of(1, 0, 1, AccessKind::Write), &VectorClock::default());
        let neighbour = Piece { offset: 100, size: 10, ..PIECE };
        let later = use_of(2, 1, 1, AccessKind::Write);
        assert_eq!(shadow.conflict(&[neighbour], &later, &VectorClock::default()), None);
    }
}
