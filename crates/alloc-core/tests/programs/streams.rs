//! The program's calls about streams: kernels, order between streams, and their end.

use alloc_core::{
    allocator::RecordOutcome,
    config::{CrossStreamReuse, Peers, Policy},
    error::AllocError,
    id::{DeviceId, DevicePtr},
    simulated_gpu::SimulatedGpuError,
};

use crate::{
    model::{Held, Slot},
    operation::{Pick, Settle},
    world::{Failure, Step, World, ensure, picked, text},
};

impl World {
    /// Streams wait for those only that the settings name. A rank that sends before it receives hangs if it waits for what
    /// it sends, whose stream asks for no memory.
    pub(crate) fn check_waits(&self) -> Result<(), Failure> {
        let mut awaited = self.gpu.driver().awaited_streams();
        let config = self.gpu.allocator().config();
        if config.policy == Policy::Rallocator {
            match config.cross_stream_reuse {
                CrossStreamReuse::Done => {}
                CrossStreamReuse::Owned => awaited.retain(|stream| !self.owners.contains(stream)),
                CrossStreamReuse::All => awaited.clear(),
            }
        }
        ensure(awaited.is_empty(), || format!("a stream was made to wait for {awaited:?}"))
    }

    pub(crate) fn use_on_own(&mut self, block: Pick, duration_us: u64) -> Result<Step, Failure> {
        let Some(position) = picked(block, self.held.len()) else { return Ok(Step::Skipped) };
        let own = self.held[position].own;
        self.launch(own, &[], &[position], duration_us)
    }

    pub(crate) fn share(&mut self, stream: Pick, read: Pick, write: Pick, duration_us: u64) -> Result<Step, Failure> {
        let slot = self.stream(stream);
        let blocks = [read, write].map(|pick| picked(pick, self.held.len()));
        let [Some(read), Some(write)] = blocks else { return Ok(Step::Skipped) };
        let reads: &[usize] = if read == write { &[] } else { &[read] };
        self.launch(slot, reads, &[write], duration_us)
    }

    pub(crate) fn hand_on(
        &mut self,
        size: u64,
        stream: Pick,
        to: Pick,
        blocks: u8,
        duration_us: u64,
    ) -> Result<Step, Failure> {
        let (own, reader) = (self.stream(stream), self.stream(to));
        for number in 0..u64::from(blocks) {
            // Of different sizes, so that the one that fits best is not always the oldest.
            let Some(position) = self.malloc_on(size - number * size / 16, own)? else { break };
            let is_read = self.launch(reader, &[position], &[], duration_us)? == Step::Executed;
            let is_captured = self.held[position].holders > 0;
            if !is_read || is_captured {
                break;
            }
            self.settle(position, Settle::Record)?;
            self.free(position, 0)?;
        }
        Ok(Step::Executed)
    }

    /// A kernel on a stream, captured or not, ordered as a correct program orders it; skipped if that is impossible.
    pub(crate) fn launch(
        &mut self,
        slot: Slot,
        reads: &[usize],
        writes: &[usize],
        duration_us: u64,
    ) -> Result<Step, Failure> {
        let blocks: Vec<usize> = reads.iter().chain(writes).copied().collect();
        let is_ready = match self.capture_of(slot) {
            Some(capture) => self.prepare_captured(capture, slot, &blocks)?,
            None => self.prepare_all(slot, &blocks)?,
        };
        if !is_ready {
            return Ok(Step::Skipped);
        }
        let addresses = |positions: &[usize]| -> Vec<DevicePtr> {
            positions.iter().map(|position| self.held[*position].address).collect()
        };
        let handle = self.enter(slot);
        let result = self.gpu.launch(handle, &addresses(reads), &addresses(writes), duration_us);
        match (result, self.capture_of(slot)) {
            (Ok(()), _) => Ok(Step::Executed),
            (Err(error), Some(capture)) => self.excuse(capture, error),
            (Err(error), None) => Err(text(error)),
        }
    }

    /// Orders a stream's next kernel, which runs at once, after all that comes before its blocks' next use.
    /// Returns false, with nothing done, if that is impossible.
    pub(crate) fn prepare_all(&mut self, slot: Slot, blocks: &[usize]) -> Result<bool, Failure> {
        if !self.is_eager(slot) || !blocks.iter().all(|block| self.can_prepare(slot, &self.held[*block])) {
            return Ok(false);
        }
        for block in blocks {
            self.prepare(slot, *block)?;
        }
        Ok(true)
    }

    fn can_prepare(&self, slot: Slot, held: &Held) -> bool {
        if !self.reaches(self.streams[slot].device, held.device) {
            return false;
        }
        match self.graph_pool_of(held) {
            Some(pool) => self.can_follow_pool(slot, pool),
            None => self.is_own(slot, held) || held.ordered.contains(&slot) || self.can_wait_for_own(slot, held),
        }
    }

    fn prepare(&mut self, slot: Slot, block: usize) -> Result<(), Failure> {
        let held = &self.held[block];
        let own = held.own;
        let is_own = self.is_own(slot, held);
        if let Some(pool) = self.graph_pool_of(held) {
            self.follow_pool(slot, pool)?;
        } else if !is_own && !held.ordered.contains(&slot) {
            self.wait(slot, own)?;
        }
        let held = &mut self.held[block];
        if !is_own && !held.recorded.contains(&slot) {
            held.unsettled.insert(slot);
        }
        Ok(())
    }

    /// Whether the slot's present stream is the one that the block was allocated on.
    pub(crate) fn is_own(&self, slot: Slot, held: &Held) -> bool {
        held.own == slot && self.streams[slot].generation == held.own_generation
    }

    fn can_wait_for_own(&self, slot: Slot, held: &Held) -> bool {
        self.is_own(held.own, held) && self.can_wait(slot, held.own)
    }

    /// Whether `slot` can wait for `on` outside any capture.
    ///
    /// Two default streams of two devices cannot: their handles are the same, and the current device decides which of
    /// the two a handle names.
    pub(crate) fn can_wait(&self, slot: Slot, on: Slot) -> bool {
        let (stream, awaited) = (&self.streams[slot], &self.streams[on]);
        let is_ambiguous = stream.handle.is_default() && awaited.handle.is_default() && stream.device != awaited.device;
        slot != on && !is_ambiguous && self.is_eager(slot) && self.is_eager(on)
    }

    /// Whether kernels on `device` reach memory on `owner` now.
    pub(crate) fn reaches(&self, device: DeviceId, owner: DeviceId) -> bool {
        let allocator = self.gpu.allocator();
        let may_share = self.machine.peers && allocator.config().peers != Peers::None;
        device == owner || (may_share && allocator.devices_in_use().len() == 2)
    }

    /// Makes `slot` wait for what `on` has queued.
    pub(crate) fn wait(&mut self, slot: Slot, on: Slot) -> Result<(), Failure> {
        self.wait_in_driver(slot, on).map_err(text)?;
        for position in 0..self.held.len() {
            if self.is_own(on, &self.held[position]) {
                self.held[position].ordered.insert(slot);
            }
            if self.is_own(slot, &self.held[position]) {
                self.held[position].unsettled.remove(&on);
            }
        }
        Ok(())
    }

    /// The wait itself, which a capture may take into account in its own way.
    pub(crate) fn wait_in_driver(&self, slot: Slot, on: Slot) -> Result<(), SimulatedGpuError> {
        // A default handle is of the current device; any other stream has been made before.
        let (stream, awaited) = if self.streams[on].handle.is_default() {
            (self.streams[slot].handle, self.enter(on))
        } else {
            (self.enter(slot), self.streams[on].handle)
        };
        self.gpu.wait(stream, awaited)
    }

    pub(crate) fn wait_picked(&mut self, stream: Pick, on: Pick) -> Result<Step, Failure> {
        let (slot, on) = (self.stream(stream), self.stream(on));
        if !self.can_wait(slot, on) {
            return Ok(Step::Skipped);
        }
        self.wait(slot, on)?;
        Ok(Step::Executed)
    }

    pub(crate) fn complete(&mut self, stream: Pick) -> Result<Step, Failure> {
        let handle = match usize::from(stream) % (self.streams.len() + 2) {
            slot if slot < self.streams.len() => Some(self.enter(slot)),
            _ => None,
        };
        self.gpu.complete(handle).map_err(text)?;
        Ok(Step::Executed)
    }

    /// The host waits for everything: whatever it launches from now on comes after that.
    pub(crate) fn synchronize(&mut self) -> Result<Step, Failure> {
        self.gpu.driver().synchronize().map_err(text)?;
        for pool in &mut self.pools {
            pool.used_on.clear();
        }
        Ok(Step::Executed)
    }

    pub(crate) fn record(&mut self, block: Pick, stream: Pick) -> Result<Step, Failure> {
        let Some(position) = picked(block, self.held.len()) else { return Ok(Step::Skipped) };
        self.record_on(position, self.stream(stream))?;
        Ok(Step::Executed)
    }

    /// Records a stream's use of a block, which settles it, also if a fault keeps the driver from naming the stream.
    pub(crate) fn record_on(&mut self, position: usize, slot: Slot) -> Result<(), Failure> {
        let handle = self.enter(slot);
        let faults = self.faults_hit();
        let outcome = self.gpu.record_stream(self.held[position].address, handle).map_err(text)?;
        let was_disturbed = self.faults_hit() > faults;
        let is_right = match outcome {
            RecordOutcome::Recorded => true,
            RecordOutcome::UnknownStream => was_disturbed,
            _ => false,
        };
        ensure(is_right, || format!("record_stream on {handle:?} is {outcome:?}"))?;
        let held = &mut self.held[position];
        held.recorded.insert(slot);
        held.unsettled.remove(&slot);
        Ok(())
    }

    /// Makes sure that nobody gets the block's memory before its foreign uses are over.
    pub(crate) fn settle(&mut self, position: usize, by: Settle) -> Result<(), Failure> {
        let foreign: Vec<Slot> = self.held[position].unsettled.iter().copied().collect();
        for slot in foreign {
            let held = &self.held[position];
            let own = held.own;
            if by == Settle::Wait && self.is_own(own, held) && self.can_wait(own, slot) {
                self.wait(own, slot)?;
            } else {
                self.record_on(position, slot)?;
            }
        }
        self.settle_captured(position, by)
    }

    pub(crate) fn destroy_stream(&mut self, stream: Pick) -> Result<Step, Failure> {
        let slot = self.stream(stream);
        let is_used_by_pool = self.pools.iter().any(|pool| pool.used_on.contains(&slot));
        let is_default = self.streams[slot].handle.is_default();
        if is_default || is_used_by_pool || self.is_routed(slot) || !self.is_eager(slot) {
            return Ok(Step::Skipped);
        }
        for position in 0..self.held.len() {
            if self.held[position].unsettled.contains(&slot) {
                self.record_on(position, slot)?;
            }
        }
        self.retire(slot)?;
        let handle = self.enter(slot);
        self.gpu.destroy_stream(handle).map_err(text)?;
        self.begin_generation(slot)?;
        Ok(Step::Executed)
    }

    fn retire(&mut self, slot: Slot) -> Result<(), Failure> {
        let handle = self.enter(slot);
        let faults = self.faults_hit();
        match self.gpu.allocator().retire_stream(handle) {
            Ok(()) => Ok(()),
            Err(AllocError::Driver(_)) if self.faults_hit() > faults => Ok(()),
            Err(error) => Err(format!("the stream cannot be retired: {error}")),
        }
    }

    /// The slot's handle names a new stream from now on.
    fn begin_generation(&mut self, slot: Slot) -> Result<(), Failure> {
        self.streams[slot].generation += 1;
        for held in &mut self.held {
            held.ordered.remove(&slot);
            held.recorded.remove(&slot);
            held.unsettled.remove(&slot);
        }
        let handle = self.enter(slot);
        self.gpu.launch(handle, &[], &[], 0).map_err(text)
    }
}
