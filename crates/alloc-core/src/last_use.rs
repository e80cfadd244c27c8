//! By which streams, and until when, a piece of memory was used.

use crate::event::StreamIx;

/// A stream's own count of closed epochs; see [`event`](crate::event). Epoch 0 is before all work.
pub(crate) type Epoch = u64;

/// The last use of a piece of memory by each stream that may have used it, at most one entry a stream.
///
/// While a block is allocated the set holds the streams named by `record_stream`, with epoch 0: their real epochs are
/// known when the block is freed. From then on it says what has to end before anybody else may have the memory.
#[derive(Debug, Default)]
pub(crate) struct LastUse {
    /// Whether there is any entry. The first one, nearly always the only one, stands here.
    is_used: bool,
    stream: StreamIx,
    epoch: Epoch,
    /// All other entries; none if there is no first one.
    others: Vec<(StreamIx, Epoch)>,
}

impl Clone for LastUse {
    fn clone(&self) -> Self {
        Self { others: self.others.clone(), ..*self }
    }

    /// Every split copies a set, nearly always of one entry, for which a list's own way is slow.
    fn clone_from(&mut self, source: &Self) {
        (self.is_used, self.stream, self.epoch) = (source.is_used, source.stream, source.epoch);
        self.others.clear();
        if !source.others.is_empty() {
            self.others.extend_from_slice(&source.others);
        }
    }
}

impl LastUse {
    /// The entries, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamIx, Epoch)> + '_ {
        let first = self.is_used.then_some((self.stream, self.epoch));
        first.into_iter().chain(self.others.iter().copied())
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.is_used
    }

    pub(crate) fn clear(&mut self) {
        self.is_used = false;
        self.others.clear();
    }

    /// Forgets all other uses: for a block that only its own stream has used.
    pub(crate) fn set(&mut self, stream: StreamIx, epoch: Epoch) {
        (self.is_used, self.stream, self.epoch) = (true, stream, epoch);
        self.others.clear();
    }

    /// Adds a use; a later epoch of the same stream covers an earlier one.
    pub(crate) fn add(&mut self, stream: StreamIx, epoch: Epoch) {
        if !self.is_used {
            self.set(stream, epoch);
        } else if self.stream == stream {
            self.epoch = epoch.max(self.epoch);
        } else {
            self.add_other(stream, epoch);
        }
    }

    #[cold]
    fn add_other(&mut self, stream: StreamIx, epoch: Epoch) {
        match self.others.iter_mut().find(|(known, _)| *known == stream) {
            Some((_, last)) => *last = epoch.max(*last),
            None => self.others.push((stream, epoch)),
        }
    }

    /// Adds all uses of `other`: for two blocks that become one.
    pub(crate) fn unite(&mut self, other: &Self) {
        if other.is_used {
            self.add(other.stream, other.epoch);
        }
        for (stream, epoch) in &other.others {
            self.add(*stream, *epoch);
        }
    }

    /// Forgets the uses by all streams but one: they are known to be over.
    pub(crate) fn keep_only(&mut self, stream: StreamIx) {
        let kept = self.iter().find(|(user, _)| *user == stream);
        match kept {
            Some((_, epoch)) => self.set(stream, epoch),
            None => self.clear(),
        }
    }

    /// Replaces each epoch by what `epoch_of` says for its stream.
    pub(crate) fn stamp(&mut self, mut epoch_of: impl FnMut(StreamIx) -> Epoch) {
        if self.is_used {
            self.epoch = epoch_of(self.stream);
        }
        for (stream, epoch) in &mut self.others {
            *epoch = epoch_of(*stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn union_keeps_the_latest_epoch_of_each_stream() {
        let (a, b) = (StreamIx(0), StreamIx(1));
        let mut left = LastUse::default();
        left.add(a, 3);
        let mut right = LastUse::default();
        right.add(a, 2);
        right.add(b, 7);
        left.unite(&right);
        assert_eq!(left.iter().collect::<Vec<_>>(), [(a, 3), (b, 7)]);
    }

    #[test]
    fn one_stream_is_kept_wherever_it_stands() {
        let streams = [StreamIx(0), StreamIx(1), StreamIx(2)];
        for kept in streams {
            let mut uses = LastUse::default();
            for stream in streams {
                uses.add(stream, 5);
            }
            uses.keep_only(kept);
            assert_eq!(uses.iter().collect::<Vec<_>>(), [(kept, 5)]);
            uses.keep_only(StreamIx(3));
            assert!(uses.is_empty() && uses.iter().next().is_none());
        }
    }
}
