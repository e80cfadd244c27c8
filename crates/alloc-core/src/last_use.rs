//! By which streams, and until when, a piece of memory was used.

use smallvec::SmallVec;

use crate::event::StreamIx;

/// A stream's own count of closed epochs; see [`event`](crate::event). Epoch 0 is before all work.
pub(crate) type Epoch = u64;

/// The last use of a piece of memory by each stream that may have used it, at most one entry a stream.
///
/// While a block is allocated the set holds the streams named by `record_stream`, with epoch 0: their real epochs are
/// known when the block is freed. From then on it says what has to end before anybody else may have the memory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LastUse(SmallVec<[(StreamIx, Epoch); 2]>);

/// Every split copies a set, nearly always of one entry, for which the library's own way is slow.
impl Clone for LastUse {
    fn clone(&self) -> Self {
        Self(match self.0.as_slice() {
            [] => SmallVec::new(),
            [one] => SmallVec::from_buf_and_len([*one, *one], 1),
            entries => SmallVec::from_slice(entries),
        })
    }
}

impl LastUse {
    /// The entries, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamIx, Epoch)> + '_ {
        self.0.iter().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Forgets all other uses: for a block that only its own stream has used.
    pub(crate) fn set(&mut self, stream: StreamIx, epoch: Epoch) {
        self.0.clear();
        self.0.push((stream, epoch));
    }

    /// Adds a use; a later epoch of the same stream covers an earlier one.
    pub(crate) fn add(&mut self, stream: StreamIx, epoch: Epoch) {
        match self.0.iter_mut().find(|(known, _)| *known == stream) {
            Some((_, last)) => *last = epoch.max(*last),
            None => self.0.push((stream, epoch)),
        }
    }

    /// Adds all uses of `other`: for two blocks that become one.
    pub(crate) fn unite(&mut self, other: &Self) {
        for (stream, epoch) in other.iter() {
            self.add(stream, epoch);
        }
    }

    /// Forgets the uses by all streams but one: they are known to be over.
    pub(crate) fn keep_only(&mut self, stream: StreamIx) {
        if !matches!(self.0.as_slice(), [(user, _)] if *user == stream) {
            self.0.retain(|(user, _)| *user == stream);
        }
    }

    /// Replaces each epoch by what `epoch_of` says for its stream.
    pub(crate) fn stamp(&mut self, mut epoch_of: impl FnMut(StreamIx) -> Epoch) {
        for (stream, epoch) in &mut self.0 {
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
}
