//! What the allocator tells about itself.

use std::collections::BTreeSet;

use super::{Allocator, Device};
use crate::{
    backing::SpanKind,
    block::{BlockId, BlockState},
    check::InvariantError,
    device::DeviceState,
    driver::Driver,
    error::{AllocError, OutOfMemory, PendingBytes},
    history::{Action, HistoryEvent, StackId},
    id::{DeviceId, DevicePtr, PoolId, StreamHandle},
    ladder::{Ladder, Refusal},
    snapshot::{BlockPicture, DevicePicture, PictureState, SegmentPicture},
    stats::{Family, Stats},
};

impl<D: Driver> Allocator<D> {
    /// The device's counters; all zero if it is not in use.
    pub fn stats(&self, device: DeviceId) -> Stats {
        self.read(device, |state| state.stats.clone()).unwrap_or_default()
    }

    /// Every key of `torch.cuda.memory_stats()` with its value, sorted.
    pub fn stats_entries(&self, device: DeviceId) -> Vec<(String, i64)> {
        self.stats(device).entries(self.config().max_split_size)
    }

    /// Starts the device's peaks anew from the present values.
    pub fn reset_peak_stats(&self, device: DeviceId) {
        self.read(device, |state| {
            state.stats.reset_peaks();
            state.pools.for_each_reserved(Family::reset_peaks);
        });
    }

    /// Starts the device's totals anew from zero.
    pub fn reset_accumulated_stats(&self, device: DeviceId) {
        self.read(device, |state| {
            state.stats.reset_accumulated();
            state.pools.for_each_reserved(Family::reset_accumulated);
        });
    }

    /// All segments of all devices in use, with their blocks, in address order within a device.
    pub fn snapshot(&self) -> Vec<SegmentPicture> {
        let ids = self.devices.starting_with(DeviceId(0)).map(|device| device.id);
        ids.filter_map(|id| self.read(id, |state| state.picture())).flatten().collect()
    }

    /// The memory and the events of each device in use, in the devices' order. Each is a moment of its own.
    ///
    /// With `leave_mark` a recording then notes that a snapshot was taken: as with torch, later pictures show the mark of
    /// this one, and the latest event of this one is what the program did last.
    pub fn pictures(&self, leave_mark: bool) -> Vec<DevicePicture> {
        let picture = |state: &mut DeviceState| {
            let events = state.history.events().collect();
            if leave_mark {
                let active = state.stats.active_bytes.all.current;
                state.note(Action::Snapshot, 0, active);
            }
            DevicePicture { device: state.id, segments: state.picture(), events }
        };
        self.devices_in_use().into_iter().filter_map(|id| self.read(id, picture)).collect()
    }

    /// The block at an allocated address.
    pub fn block_at(&self, address: DevicePtr) -> Option<BlockPicture> {
        self.devices_in_use().into_iter().find_map(|id| self.read(id, |state| state.held_block(address)).flatten())
    }

    /// The device of an allocated address.
    pub fn device_of(&self, address: DevicePtr) -> Option<DeviceId> {
        let holds = |id: &DeviceId| self.read(*id, |state| state.held_block(address)).flatten().is_some();
        self.devices_in_use().into_iter().find(holds)
    }

    /// By whom the memory at an allocated address was asked for; [`StackId::NONE`] if that was not recorded.
    pub fn stack_of(&self, address: DevicePtr) -> StackId {
        let of =
            |id| self.read(id, |state| state.history.block_stack(address.0)).filter(|stack| *stack != StackId::NONE);
        self.devices_in_use().into_iter().find_map(of).unwrap_or_default()
    }

    /// Every stack that an event, a block or a segment still names: those of all others may be forgotten.
    pub fn stacks(&self) -> BTreeSet<StackId> {
        let stacks = |id| self.read(id, |state| state.history.stacks().collect::<Vec<_>>());
        self.devices_in_use().into_iter().filter_map(stacks).flatten().collect()
    }

    /// Records that the program said something of the memory at an allocated address. What, its witness knows.
    pub fn annotate(&self, address: DevicePtr) {
        for id in self.devices_in_use() {
            self.read(id, |state| state.annotate(address));
        }
    }

    /// The bytes that each private pool has reserved on the device.
    pub fn private_reserved(&self, device: DeviceId) -> Vec<(PoolId, Family)> {
        self.read(device, |state| state.pools.privates().map(|(_, pool)| (pool.id, pool.reserved)).collect())
            .unwrap_or_default()
    }

    /// The device's latest events, oldest first.
    pub fn history(&self, device: DeviceId) -> Vec<HistoryEvent> {
        self.read(device, |state| state.history.events().collect()).unwrap_or_default()
    }

    /// The devices in use.
    pub fn devices_in_use(&self) -> Vec<DeviceId> {
        let mut ids: Vec<DeviceId> = self.devices.starting_with(DeviceId(0)).map(|device| device.id).collect();
        ids.sort();
        ids
    }

    /// The segment, or the mapped run of a range, that holds an allocated address: its first byte and its size.
    pub fn base_allocation(&self, address: DevicePtr) -> Option<(DevicePtr, u64)> {
        self.devices_in_use().into_iter().find_map(|id| self.read(id, |state| state.base_of(address)).flatten())
    }

    /// The bytes of the largest block that a request could get at once: cached in a default pool, or new from the driver.
    ///
    /// Brings the device into use. 0 if it cannot be, or the driver does not answer.
    pub fn largest_available(&self, device: DeviceId) -> u64 {
        let Ok(device) = self.device(device) else { return 0 };
        let free = self.driver().memory_info(device.id).map_or(0, |info| info.free_bytes);
        self.read(device.id, |state| {
            let room = state.limit.saturating_sub(state.stats.reserved_bytes.all.current);
            state.largest_cached().max(free.min(room))
        })
        .unwrap_or(0)
    }

    /// Limits what may be reserved on the device to a part of its memory. Nothing is given back at once.
    ///
    /// # Errors
    ///
    /// [`AllocError::InvalidFraction`] if it is not from 0 to 1; those of bringing the device into use.
    pub fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<(), AllocError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(AllocError::InvalidFraction { fraction });
        }
        self.device(device)?.fast()?.set_fraction(fraction);
        Ok(())
    }

    /// The part of the device's memory that may be reserved.
    pub fn memory_fraction(&self, device: DeviceId) -> f64 {
        self.read(device, |state| state.fraction).unwrap_or(self.config().per_process_memory_fraction)
    }

    /// Limits what may be reserved on the device to so many bytes.
    ///
    /// # Errors
    ///
    /// Those of bringing the device into use.
    pub fn set_memory_limit(&self, device: DeviceId, bytes: u64) -> Result<(), AllocError> {
        self.device(device)?.fast()?.set_limit(bytes);
        Ok(())
    }

    /// Scans all state of all devices for contradictions.
    ///
    /// # Errors
    ///
    /// The first contradiction found.
    pub fn check(&self) -> Result<(), InvariantError> {
        let scan = |id| self.read(id, |state| state.check()).unwrap_or_else(|| Err(InvariantError::broken(id)));
        self.devices_in_use().into_iter().try_for_each(scan)
    }

    /// The error for a request that nothing could serve.
    ///
    /// `ladder` is how far the request came, if it was tried.
    pub(super) fn out_of_memory(&self, device: &Device, requested: u64, ladder: Option<&Ladder>) -> AllocError {
        let device_free = self.driver().memory_info(device.id).ok().map(|info| info.free_bytes);
        match device.fast() {
            Ok(mut state) => {
                let mut report = state.on_out_of_memory(requested, device_free);
                match ladder.and_then(|ladder| ladder.refusal) {
                    Some(Refusal::Source(pool)) => report.refused_by = Some(pool),
                    Some(Refusal::Addresses) => report.addresses = Some(state.addresses_in_ranges()),
                    None => {}
                }
                AllocError::OutOfMemory(Box::new(report))
            }
            Err(error) => error,
        }
    }

    /// Lets `ask` look at the state of a device in use; `None` if it is not in use, or broken.
    fn read<T>(&self, device: DeviceId, ask: impl FnOnce(&mut DeviceState) -> T) -> Option<T> {
        self.devices.get(device)?.fast().ok().map(|mut state| ask(&mut state))
    }
}

impl DeviceState {
    /// Counts a failed request, and says where the memory is.
    fn on_out_of_memory(&mut self, requested: u64, device_free: Option<u64>) -> OutOfMemory {
        self.stats.num_ooms += 1;
        self.note(Action::Oom, device_free.unwrap_or(0), requested);
        let total = self.capabilities.total_bytes;
        let mut report = OutOfMemory {
            device: self.id,
            requested,
            total,
            device_free,
            limit: (self.limit < total).then_some(self.limit),
            reserved: self.stats.reserved_bytes.all.current,
            allocated: self.stats.allocated_bytes.all.current,
            pending: self.pending_bytes(),
            pending_total: self.stats.active_bytes.all.current - self.stats.allocated_bytes.all.current,
            cached: 0,
            largest_cached: self.largest_cached(),
            private: 0,
            policy: self.rules,
            virtual_memory: self.capabilities.virtual_memory,
            refused_by: None,
            addresses: None,
        };
        for pool in self.pools.ids().filter(|pool| self.pools[*pool].owner.is_none()) {
            report.cached += self.pools[pool].index.iter().map(|entry| entry.size).sum::<u64>();
        }
        for span in self.spans.ids() {
            let span = &self.spans[span];
            if self.pools[span.pool].owner.is_some() {
                report.private += span.reserved();
            }
        }
        report
    }

    /// The bytes of addresses that are set aside, with memory or without.
    fn addresses_in_ranges(&self) -> u64 {
        let ranges = self.spans.ids().map(|span| &self.spans[span]);
        ranges.filter(|span| matches!(span.kind, SpanKind::Range(_))).map(|span| span.size).sum()
    }

    /// The bytes of the largest free block in the default pools.
    fn largest_cached(&self) -> u64 {
        let defaults = self.pools.ids().filter(|pool| self.pools[*pool].owner.is_none());
        defaults.filter_map(|pool| self.pools[pool].index.largest()).map(|entry| entry.size).max().unwrap_or(0)
    }

    /// What waits for each stream, largest first.
    fn pending_bytes(&self) -> Vec<PendingBytes> {
        let of_stream = |stream| {
            let bytes = self.streams.waiting(stream).map(|(_, block)| self.blocks[block].size).sum();
            PendingBytes { stream: self.streams.target(stream).handle, bytes }
        };
        let mut pending: Vec<_> = self.streams.ids().map(of_stream).filter(|pending| pending.bytes > 0).collect();
        pending.sort_by_key(|pending| (std::cmp::Reverse(pending.bytes), pending.stream));
        pending
    }

    /// Records an event that belongs to no pool.
    fn note(&mut self, action: Action, address: u64, size: u64) {
        self.history.push(action, address, size, StreamHandle::DEFAULT, PoolId::DEFAULT);
    }

    fn annotate(&mut self, address: DevicePtr) {
        let Some(block) = self.blocks.at(address.0).map(|id| &self.blocks[id]) else { return };
        if block.state == BlockState::Allocated {
            self.record(Action::Annotate, address.0, block.requested, block.pool);
        }
    }

    fn held_block(&self, address: DevicePtr) -> Option<BlockPicture> {
        let block = self.blocks.at(address.0).map(|id| &self.blocks[id])?;
        let stack = self.history.block_stack(address.0);
        let (size, requested, state) = (block.size, block.requested, PictureState::Allocated);
        (block.state == BlockState::Allocated).then_some(BlockPicture { address, size, requested, state, stack })
    }

    /// The contiguous memory around an allocated block.
    fn base_of(&self, address: DevicePtr) -> Option<(DevicePtr, u64)> {
        let id = self.blocks.at(address.0).filter(|id| self.blocks[*id].state == BlockState::Allocated)?;
        let has_memory = |id: &BlockId| !matches!(self.blocks[*id].state, BlockState::Unmapped | BlockState::Stale);
        let mut first = id;
        while let Some(previous) = self.blocks[first].previous.filter(has_memory) {
            first = previous;
        }
        let mut last = id;
        while let Some(next) = self.blocks[last].next.filter(has_memory) {
            last = next;
        }
        let base = self.blocks[first].address;
        Some((DevicePtr(base), self.blocks[last].end() - base))
    }
}
