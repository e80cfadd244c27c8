//! Finding out which streams are done: closing epochs, polling events, waiting.

use crate::{
    block::{BlockId, BlockState},
    device::DeviceState,
    driver::DriverError,
    event::{Answers, Closed, Closing, StreamIx},
    id::{DeviceId, Event},
    last_use::Epoch,
    plan::{Plan, Synchronize},
    pool_set::PoolIx,
};

impl DeviceState {
    /// Events for the streams that this block waits for.
    pub(crate) fn plan_close_of(&mut self, block: BlockId) -> Vec<Closing> {
        let uses = self.blocks[block].last_use.clone();
        let own = self.pools[self.blocks[block].pool].stream;
        let foreign = uses.iter().filter(|(stream, _)| *stream != own);
        foreign.filter_map(|(stream, epoch)| self.streams.begin_close(stream, epoch)).collect()
    }

    /// The last event of a stream that the program is about to destroy.
    pub(crate) fn plan_retire(&mut self, stream: StreamIx) -> Vec<Closing> {
        let epoch = self.streams.current_epoch(stream);
        let closings = self.streams.begin_close(stream, epoch).into_iter().collect();
        self.streams.retire(stream);
        closings
    }

    /// Events for all streams that pending blocks wait for and that none answers for yet; and, once there are enough of
    /// them, for the last uses of new stale mappings.
    pub(crate) fn plan_close_pending(&mut self) -> Option<Plan> {
        let fresh = self.take_fresh_uses();
        let needed = self.last_of_each(self.awaited_epochs().chain(fresh));
        self.plan_close(needed)
    }

    /// As [`plan_close_pending`](Self::plan_close_pending), and for every last use of memory that may be unmapped or go
    /// back to its source: idle now, or once the pending blocks are.
    pub(crate) fn plan_close_all(&mut self) -> Option<Plan> {
        // The driver waits by itself before it takes a segment back, and nobody else does.
        let needs_proof = |pool: &PoolIx| self.is_paged(*pool) || self.is_sourced(*pool);
        let pending = self.pending().map(|(_, _, block)| block);
        let pending = pending.filter(|block| needs_proof(&self.blocks[*block].pool));
        let releasable = self.pools.ids().filter(|pool| needs_proof(pool) && self.pools.is_releasable(*pool));
        let idle = releasable.flat_map(|pool| self.pools[pool].index.iter()).map(|entry| entry.id);
        let held = pending.chain(idle).chain(self.stale.iter().map(|stale| stale.block));
        let uses = held.flat_map(|block| self.blocks[block].last_use.iter());
        let needed = self.last_of_each(uses.chain(self.awaited_epochs()));
        self.plan_close(needed)
    }

    /// The pending blocks, each with every stream and epoch that it waits for; those of a stream in their order.
    pub(crate) fn pending(&self) -> impl Iterator<Item = (StreamIx, Epoch, BlockId)> + '_ {
        let waiting = |stream| self.streams.waiting(stream).map(move |(epoch, block)| (stream, epoch, block));
        self.streams.ids().flat_map(waiting)
    }

    /// For each stream that blocks wait for, the last epoch that they wait for.
    fn awaited_epochs(&self) -> impl Iterator<Item = (StreamIx, Epoch)> + '_ {
        self.streams.ids().filter_map(|stream| {
            let (epoch, _) = self.streams.waiting(stream).last()?;
            Some((stream, epoch))
        })
    }

    /// Every stream with the last of its epochs among these uses; epoch 0, which needs no answer, if there is none.
    fn last_of_each(&self, uses: impl Iterator<Item = (StreamIx, Epoch)>) -> Vec<(StreamIx, Epoch)> {
        let mut last: Vec<_> = self.streams.ids().map(|stream| (stream, 0)).collect();
        uses.for_each(|(stream, epoch)| {
            let known = &mut last[stream.index()].1;
            *known = epoch.max(*known);
        });
        last
    }

    /// `needed` names each stream with the epoch that shall be answered for.
    fn plan_close(&mut self, needed: Vec<(StreamIx, Epoch)>) -> Option<Plan> {
        let closings: Vec<Closing> =
            needed.into_iter().filter_map(|(stream, epoch)| self.streams.begin_close(stream, epoch)).collect();
        (!closings.is_empty()).then_some(Plan::Close(closings))
    }

    /// A poll of the oldest events.
    pub(crate) fn plan_poll(&self) -> Option<Plan> {
        let marks = self.streams.oldest_marks();
        (!marks.is_empty()).then_some(Plan::Poll(marks))
    }

    /// A host wait for all that was recorded.
    pub(crate) fn plan_wait(&mut self) -> Option<Plan> {
        let marks = self.streams.await_newest_marks();
        (!marks.is_empty()).then_some(Plan::Wait(marks))
    }

    /// Device synchronises, if released private pools hold memory that waits for one, or nothing else can answer for
    /// streams that are gone or other threads' own, of this device or of another, or without a name.
    pub(crate) fn plan_synchronize(&mut self) -> Option<Plan> {
        let everywhere = self.streams.awaits_unnamed();
        let mut devices = self.streams.unanswered_devices();
        if self.pools.has_unproven() && !devices.contains(&self.id) {
            devices.push(self.id);
        }
        (everywhere || !devices.is_empty()).then(|| self.plan_synchronize_devices(devices, everywhere))
    }

    /// Synchronises of these devices, or of all.
    pub(crate) fn plan_synchronize_devices(&mut self, devices: Vec<DeviceId>, everywhere: bool) -> Plan {
        let streams = self.streams.live_targets(&devices);
        let epochs = self.streams.begin_synchronize();
        Plan::Synchronize(Synchronize { devices, everywhere, streams, epochs, releases: self.pools.releases() })
    }

    /// Takes note of closed epochs.
    pub(crate) fn commit_close(&mut self, closings: Vec<(Closing, Closed, Option<Event>)>) {
        for (closing, closed, spare) in closings {
            self.streams.commit_close(&closing, closed, spare);
            match closed {
                Closed::Recorded(_) => self.set_deferred(closing.stream, false),
                Closed::Capturing => self.set_deferred(closing.stream, true),
                Closed::Gone => self.stats.dead_streams += 1,
                Closed::Elsewhere | Closed::Failed => {}
            }
        }
    }

    /// Takes note of marks that are reached, and of those that never will be.
    pub(crate) fn commit_done(&mut self, answers: &Answers) {
        for mark in &answers.marks {
            self.streams.finish(mark.stream, mark.epoch);
            self.release_waiting(mark.stream);
        }
        for mark in &answers.captured {
            self.streams.withdraw(mark);
        }
    }

    /// Takes note of a host wait's end.
    pub(crate) fn commit_wait(&mut self, answers: &Answers, result: Result<(), DriverError>) {
        for mark in answers.marks.iter().chain(&answers.captured) {
            self.streams.end_wait(mark);
        }
        self.stats.host_waits += 1;
        if result.is_ok() {
            self.commit_done(answers);
        }
    }

    /// Takes note of device synchronises: what they prove over, and that no graph runs on pools released before.
    pub(crate) fn commit_synchronize(&mut self, synchronize: &Synchronize) {
        self.stats.host_waits += 1;
        for (stream, epoch) in &synchronize.epochs {
            if self.streams.is_answered_by(*stream, synchronize.everywhere, &synchronize.devices) {
                self.streams.finish(*stream, *epoch);
                self.release_waiting(*stream);
            }
        }
        if synchronize.devices.contains(&self.id) {
            self.pools.prove(synchronize.releases);
        }
    }

    /// Blocks that waited for what is over now.
    fn release_waiting(&mut self, stream: StreamIx) {
        while let Some(block) = self.streams.next_released(stream) {
            self.on_stream_done(block);
        }
    }

    /// Blocks that no event answers for are deferred while their stream is capturing, and pending again after it.
    fn set_deferred(&mut self, stream: StreamIx, is_deferred: bool) {
        let blocks: Vec<BlockId> = if is_deferred {
            self.streams.unanswered(stream).collect()
        } else {
            self.streams.waiting(stream).map(|(_, block)| block).collect()
        };
        for block in blocks {
            let state = &mut self.blocks[block].state;
            *state = match *state {
                BlockState::Pending { streams } if is_deferred => {
                    self.stats.deferred_frees += 1;
                    BlockState::Deferred { streams }
                }
                BlockState::Deferred { streams } if !is_deferred => BlockState::Pending { streams },
                other => other,
            };
        }
    }
}
