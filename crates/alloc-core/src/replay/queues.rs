//! The work that a recorded program is taken to have queued on the GPU, stream by stream.

use rustc_hash::FxHashMap;

use crate::driver::sim::{SimDriver, SimError};
use crate::id::StreamHandle;

/// How many streams stand for those that used blocks of others. Torch completes frees in the order of each such stream,
/// so that a program with fewer of them is replayed exactly; with more, some blocks wait longer than they did.
const MAX_OTHER_STREAMS: u64 = 32;

/// When the work queued on each stream ends.
///
/// Work touches no memory here: which memory a recorded kernel used is unknown, only when it was over.
#[derive(Debug, Default)]
pub(super) struct Queues {
    ends_us: FxHashMap<StreamHandle, u64>,
    /// Streams of our own, which stand for those that a recording does not name.
    others: Vec<StreamHandle>,
}

impl Queues {
    /// Queues work on `stream` that ends at `end_us`, or when what is queued there already does, if that is later.
    pub(super) fn queue_until(
        &mut self,
        driver: &SimDriver,
        stream: StreamHandle,
        end_us: u64,
    ) -> Result<(), SimError> {
        let stream_end_us = self.ends_us.entry(stream).or_default();
        let start_us = driver.now_us().max(*stream_end_us);
        if end_us > start_us {
            driver.launch(stream, &[], &[], end_us - start_us)?;
            *stream_end_us = end_us;
        }
        Ok(())
    }

    /// Queues work that ends at `end_us` on a stream that no recorded allocation is for, and returns that stream.
    pub(super) fn queue_elsewhere(&mut self, driver: &SimDriver, end_us: u64) -> Result<StreamHandle, SimError> {
        let end_of = |stream: &StreamHandle| self.ends_us.get(stream).copied().unwrap_or(0);
        // The stream whose work ends last before this: those that end earlier stay open for blocks that do, too.
        let in_order = self.others.iter().copied().filter(|other| end_of(other) <= end_us).max_by_key(end_of);
        let stream = match in_order {
            Some(stream) => stream,
            None if (self.others.len() as u64) < MAX_OTHER_STREAMS => {
                let fresh = StreamHandle(u64::MAX - self.others.len() as u64);
                self.others.push(fresh);
                fresh
            }
            None => self.others.iter().copied().min_by_key(end_of).unwrap_or(StreamHandle(u64::MAX)),
        };
        self.queue_until(driver, stream, end_us)?;
        Ok(stream)
    }
}
