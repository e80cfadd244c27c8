//! The program's calls about memory: malloc, free, pins, limits.

use std::collections::BTreeSet;

use alloc_core::{
    allocator::FreeOutcome,
    error::AllocError,
    id::{DeviceId, DevicePtr, Stream},
    simulated_gpu::SimulatedGpuError,
    size,
    snapshot::{PictureState, SegmentPicture},
};

use crate::{
    model::{Held, Slot},
    operation::{Pick, Settle},
    world::{DEVICES, Failure, Step, World, ensure, is_refusal, picked, text},
};

impl World {
    pub(crate) fn malloc(&mut self, size: u64, stream: Pick) -> Result<Step, Failure> {
        self.malloc_on(size, self.stream(stream))?;
        Ok(Step::Executed)
    }

    /// Asks for memory on a stream; returns the position of the block among those held, or `None` if there was none.
    pub(crate) fn malloc_on(&mut self, size: u64, own: Slot) -> Result<Option<usize>, Failure> {
        let handle = self.enter(own);
        let device = self.streams[own].device;
        let pool = self.expected_pool(own);
        let routed = self.gpu.allocator().route(device, handle);
        ensure(routed == pool.map(|pool| self.pools[pool].id), || format!("{handle:?} is routed to {routed:?}"))?;
        let (faults, mishaps) = (self.faults_hit(), self.mishaps());
        self.owners.insert(Stream { device, handle });
        let result = self.gpu.malloc(size, device, handle);
        let address = match result {
            Ok(address) => address.ok_or("memory for nothing")?,
            Err(SimulatedGpuError::Alloc(AllocError::OutOfMemory(_))) => {
                if self.faults_hit() == faults && self.mishaps() == mishaps {
                    self.check_exhausted(device, size)?;
                }
                return Ok(None);
            }
            Err(error) if is_refusal(&error) && self.faults_hit() > faults => return Ok(None),
            Err(SimulatedGpuError::Alloc(error)) if self.is_mishap(&error) && self.mishaps() > mishaps => {
                return Ok(None);
            }
            Err(error) => return Err(format!("malloc failed: {error}")),
        };
        ensure(address.0.is_multiple_of(size::BLOCK_GRANULARITY), || format!("{address:?} is not aligned"))?;
        let number = self.next_number();
        self.held.push(Held {
            number,
            address,
            size,
            device,
            own,
            own_generation: self.streams[own].generation,
            pool,
            ordered: BTreeSet::new(),
            unsettled: BTreeSet::new(),
            recorded: BTreeSet::new(),
            captured: BTreeSet::new(),
            holders: 0,
        });
        Ok(Some(self.held.len() - 1))
    }

    pub(crate) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// No request may fail for want of memory while memory that could go back is kept.
    fn check_exhausted(&self, device: DeviceId, size: u64) -> Result<(), Failure> {
        let allocator = self.gpu.allocator();
        let is_held_back = !self.captures.is_empty() || !self.pins.is_empty() || !self.pools.is_empty();
        if is_held_back || !self.hoard.lock().expect("one thread").is_empty() {
            return Ok(());
        }
        let capacity = self.machine.capacity_mib << 20;
        let limit = (capacity as f64 * allocator.memory_fraction(device)) as u64;
        let rounded = size::block_size(size, allocator.config());
        if self.machine.config.contains("rallocator") && self.machine.virtual_memory {
            // Nothing is waited for or given back for a request that would not fit beside what the program holds.
            if allocator.stats(device).allocated_bytes.all.current + rounded > limit.min(capacity) {
                return Ok(());
            }
            self.check_no_block_would_do(device, rounded)?;
        }
        let wanted = size::segment_size(rounded, allocator.config());
        let is_too_large = allocator.stats(device).reserved_bytes.all.current + wanted > limit;
        let is_idle = |segment: &SegmentPicture| {
            segment.blocks.iter().all(|block| block.state == PictureState::Inactive) && segment.device == device
        };
        let idle = allocator.snapshot().into_iter().find(|segment| is_idle(segment));
        ensure(idle.is_none(), || format!("out of memory although {idle:?} is idle"))?;
        // A range is filled handle by handle, so a request may need one more handle than its size.
        let slack = if self.machine.config.contains("expandable") { allocator.config().large_segment_size } else { 0 };
        let is_full = allocator.stats(device).reserved_bytes.all.current + wanted + slack > limit.min(capacity);
        ensure(is_too_large || is_full, || format!("{size} bytes are refused on {device}, which has room for them"))
    }

    /// No request may fail while an idle block of any stream and size class would hold it.
    fn check_no_block_would_do(&self, device: DeviceId, rounded: u64) -> Result<(), Failure> {
        let snapshot = self.gpu.allocator().snapshot();
        let mut blocks = snapshot.iter().filter(|segment| segment.device == device).flat_map(|segment| &segment.blocks);
        let fitting = blocks.find(|block| block.state == PictureState::Inactive && block.size >= rounded);
        ensure(fitting.is_none(), || format!("out of memory for {rounded} bytes although {fitting:?} is idle"))
    }

    pub(crate) fn free_picked(&mut self, block: Pick, by: Settle) -> Result<Step, Failure> {
        let Some(position) = picked(block, self.held.len()) else { return Ok(Step::Skipped) };
        if self.held[position].holders > 0 {
            return Ok(Step::Skipped);
        }
        self.settle(position, by)?;
        self.free(position, usize::from(block))
    }

    /// Frees a block whose uses are settled; the hint may be wrong.
    pub(crate) fn free(&mut self, position: usize, hint: usize) -> Result<Step, Failure> {
        let held = self.held.swap_remove(position);
        let outcome = self.gpu.free(held.address, DEVICES[hint % 2]).map_err(text)?;
        ensure(outcome == FreeOutcome::Freed, || format!("the free of {:?} is {outcome:?}", held.address))?;
        Ok(Step::Executed)
    }

    pub(crate) fn free_badly(&mut self, block: Pick, how: u8) -> Result<Step, Failure> {
        let inside = picked(block, self.held.len()).map(|position| self.held[position].address.offset(256));
        let (address, expected) = match how % 4 {
            0 => (DevicePtr(0), FreeOutcome::Null),
            1 => (DevicePtr(0x1234_5678), FreeOutcome::NotOurs),
            2 => match inside {
                Some(address) => (address, FreeOutcome::NotOurs),
                None => return Ok(Step::Skipped),
            },
            _ => match self.idle_block(block) {
                Some(address) => (address, FreeOutcome::Repeated),
                None => return Ok(Step::Skipped),
            },
        };
        let outcome = self.gpu.free(address, DEVICES[usize::from(block) % 2]).map_err(text)?;
        ensure(outcome == expected, || format!("a free of {address:?} is {outcome:?}, not {expected:?}"))?;
        self.coverage.on_bad_free(outcome);
        Ok(Step::Executed)
    }

    /// The address of a block that nobody holds.
    fn idle_block(&self, pick: Pick) -> Option<DevicePtr> {
        let snapshot = self.gpu.allocator().snapshot();
        let blocks = snapshot.iter().flat_map(|segment| &segment.blocks);
        let idle: Vec<DevicePtr> =
            blocks.filter(|block| block.state != PictureState::Allocated).map(|block| block.address).collect();
        picked(pick, idle.len()).map(|position| idle[position])
    }

    pub(crate) fn empty_cache(&mut self) -> Result<Step, Failure> {
        let (faults, mishaps) = (self.faults_hit(), self.mishaps());
        match self.gpu.empty_cache() {
            Ok(()) => Ok(Step::Executed),
            Err(SimulatedGpuError::Alloc(error)) if self.is_mishap(&error) && self.mishaps() > mishaps => {
                Ok(Step::Executed)
            }
            Err(error) if is_refusal(&error) && self.faults_hit() > faults => Ok(Step::Executed),
            Err(error) => Err(format!("the cache cannot be emptied: {error}")),
        }
    }

    pub(crate) fn set_fraction(&mut self, device: Pick, percent: u8) -> Result<Step, Failure> {
        let faults = self.faults_hit();
        let device = DEVICES[usize::from(device) % 2];
        let result = self.gpu.allocator().set_memory_fraction(device, f64::from(percent) / 100.0);
        match result {
            Ok(()) => Ok(Step::Executed),
            Err(AllocError::Driver(_)) if self.faults_hit() > faults => Ok(Step::Executed),
            Err(error) => Err(format!("the fraction cannot be set: {error}")),
        }
    }

    pub(crate) fn pin(&mut self, block: Pick) -> Result<Step, Failure> {
        let Some(position) = picked(block, self.held.len()) else { return Ok(Step::Skipped) };
        let address = self.held[position].address;
        ensure(self.gpu.allocator().pin(address), || format!("{address:?} is held but cannot be pinned"))?;
        self.pins.push(address);
        Ok(Step::Executed)
    }

    pub(crate) fn unpin(&mut self, pin: Pick) -> Result<Step, Failure> {
        let Some(position) = picked(pin, self.pins.len()) else { return Ok(Step::Skipped) };
        let address = self.pins.swap_remove(position);
        ensure(self.gpu.allocator().unpin(address), || format!("the pin of {address:?} is lost"))?;
        Ok(Step::Executed)
    }

    /// Puts a block, on which no kernel runs, where the out-of-memory callback finds it.
    pub(crate) fn hoard(&mut self, size: u64, stream: Pick) -> Result<Step, Failure> {
        let own = self.stream(stream);
        if self.expected_pool(own).is_some() {
            return Ok(Step::Skipped);
        }
        if let Some(position) = self.malloc_on(size, own)? {
            let held = self.held.swap_remove(position);
            self.hoard.lock().expect("one thread").push((held.address, held.device));
        }
        Ok(Step::Executed)
    }

    /// Gives back all that the program has: what it holds, what it pinned, its graphs and its pools.
    pub(crate) fn let_go(&mut self) -> Result<(), Failure> {
        self.end_all_captures()?;
        self.drop_all_graphs()?;
        while !self.held.is_empty() {
            let last = self.held.len() - 1;
            self.settle(last, Settle::Record)?;
            self.free(last, 0)?;
        }
        while !self.pins.is_empty() {
            self.unpin(0)?;
        }
        let hoarded = std::mem::take(&mut *self.hoard.lock().expect("one thread"));
        for (address, device) in hoarded {
            self.gpu.free(address, device).map_err(text)?;
        }
        self.release_all_pools()
    }
}
