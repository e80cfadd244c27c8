//! Vector clocks: what is known to have happened before what.
//!
//! Every stream counts its own launches. A clock holds, per stream, how many of that stream's launches come before the
//! moment the clock stands for. Times play no part in it: work that merely happened to end early is not ordered.

use smallvec::SmallVec;

/// A stream of the simulation, as a position in its list of streams. Never reused, unlike a stream's handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct StreamIndex(pub(super) usize);

/// How many launches of each stream come before a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct VectorClock(SmallVec<[u64; 4]>);

impl VectorClock {
    /// How many launches of `stream` come before this moment.
    pub(super) fn epoch(&self, stream: StreamIndex) -> u64 {
        self.0.get(stream.0).copied().unwrap_or(0)
    }

    /// Whether launch number `epoch` of `stream` comes before this moment.
    pub(super) fn covers(&self, stream: StreamIndex, epoch: u64) -> bool {
        self.epoch(stream) >= epoch
    }

    /// Moves this moment after launch number `epoch` of `stream`, though not after what comes before that.
    pub(super) fn include(&mut self, stream: StreamIndex, epoch: u64) {
        if self.0.len() <= stream.0 {
            self.0.resize(stream.0 + 1, 0);
        }
        self.0[stream.0] = self.0[stream.0].max(epoch);
    }

    /// A stream with a launch that comes before this moment but not before `other`.
    pub(super) fn first_beyond(&self, other: &Self) -> Option<StreamIndex> {
        let mut launches = self.0.iter().enumerate();
        launches
            .find(|&(stream, &epoch)| !other.covers(StreamIndex(stream), epoch))
            .map(|(stream, _)| StreamIndex(stream))
    }

    /// Counts one more launch of `stream` and returns its number.
    pub(super) fn tick(&mut self, stream: StreamIndex) -> u64 {
        let epoch = self.epoch(stream) + 1;
        self.include(stream, epoch);
        epoch
    }

    /// Moves this moment after `other` as well.
    pub(super) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_takes_the_later_of_each_stream() {
        let (first, second) = (StreamIndex(0), StreamIndex(1));
        let mut mine = VectorClock::default();
        let mut theirs = VectorClock::default();
        assert_eq!(mine.tick(first), 1);
        assert_eq!(mine.tick(first), 2);
        assert_eq!(theirs.tick(second), 1);
        mine.join(&theirs);
        assert_eq!((mine.epoch(first), mine.epoch(second)), (2, 1));
        assert!(mine.covers(second, 1));
        assert!(!theirs.covers(first, 1), "the other clock learned nothing");
    }
}
