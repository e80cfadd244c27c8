//! The simulated devices' memory: physical handles, address ranges, mappings, and segments from `cuMemAlloc`.
//!
//! Refuses what the real driver refuses and keeps the figures that a test compares the allocator's own with. Knows
//! nothing of streams: whether work still touches what is unmapped is the timeline's business.

use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::SmallVec;

use super::SimOptions;
use super::address_space::AddressSpace;
use crate::driver::{MemoryInfo, Status};
use crate::id::{DeviceId, PhysicalHandle};

type Result<T> = std::result::Result<T, Status>;

/// Reserved ranges lie below, segments above, so that an address tells a reader which of the two it is.
const RANGE_ADDRESSES: (u64, u64) = (0x0200_0000_0000, 0x7000_0000_0000);
const SEGMENT_ADDRESSES: (u64, u64) = (0x7000_0000_0000, 0x7fff_0000_0000);

/// What `cuMemAlloc` aligns to at least; the simulator aligns to no more.
const SEGMENT_ALIGNMENT: u64 = 512;

/// A quantity now, and the most it has been.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// Bytes now.
    pub current: u64,
    /// The most bytes there have been.
    pub peak: u64,
}

impl Level {
    fn add(&mut self, bytes: u64) {
        self.current += bytes;
        self.peak = self.peak.max(self.current);
    }

    fn subtract(&mut self, bytes: u64) {
        self.current -= bytes;
    }
}

/// Physical memory, under one name for as long as it exists. Handles and segments draw from one sequence of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PhysicalId(pub(super) u64);

/// Bytes of one piece of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) physical: PhysicalId,
    /// Where the mapping or segment begins through which the bytes were found.
    pub(super) mapped_at: u64,
    /// Where in the physical memory the bytes begin.
    pub(super) offset: u64,
    pub(super) size: u64,
}

impl Piece {
    /// Its place within its physical memory.
    pub(super) fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + self.size
    }
}

#[derive(Debug)]
struct Segment {
    size: u64,
    device: DeviceId,
    physical: PhysicalId,
}

#[derive(Debug)]
struct Handle {
    size: u64,
    device: DeviceId,
    /// How many mappings of it exist.
    mappings: u32,
    /// By how many creations and imports the program holds it. At 0 it lives on until `mappings` is 0 too.
    holders: u32,
}

#[derive(Debug)]
struct Mapping {
    size: u64,
    handle: u64,
    /// Who may read and write here.
    access: SmallVec<[DeviceId; 2]>,
}

/// One device's figures.
#[derive(Debug, Default)]
pub(super) struct DeviceUsage {
    /// Segments and handles, mapped or not.
    pub(super) physical: Level,
    /// Mapped addresses: a handle that is mapped twice counts twice.
    pub(super) mapped: Level,
    /// Reserved ranges, backed or not.
    pub(super) reserved: Level,
}

/// Added to the names of handles: no descriptor of the system's is so high, so that nobody closes one of its by mistake.
const DESCRIPTORS: i32 = 1 << 30;

/// All memory of all devices. Addresses are unique across devices, as under CUDA's unified addressing.
#[derive(Debug)]
pub(super) struct Memory {
    capacity: u64,
    supports_mapping: bool,
    granularity: u64,
    peers: bool,
    usage: Vec<DeviceUsage>,
    segment_addresses: AddressSpace,
    range_addresses: AddressSpace,
    segments: BTreeMap<u64, Segment>,
    /// Base of each reserved range, its size and device.
    ranges: BTreeMap<u64, (u64, DeviceId)>,
    handles: BTreeMap<u64, Handle>,
    mappings: BTreeMap<u64, Mapping>,
    last_physical: u64,
    /// Physical memory that went back to its device since [`take_gone`](Memory::take_gone) was last called.
    gone: Vec<PhysicalId>,
}

impl Memory {
    pub(super) fn new(options: &SimOptions) -> Self {
        Self {
            capacity: options.capacity_bytes,
            supports_mapping: options.virtual_memory,
            granularity: options.granularity_bytes,
            peers: options.peers,
            usage: (0..options.devices).map(|_| DeviceUsage::default()).collect(),
            segment_addresses: AddressSpace::new(SEGMENT_ADDRESSES.0, SEGMENT_ADDRESSES.1),
            range_addresses: AddressSpace::new(RANGE_ADDRESSES.0, RANGE_ADDRESSES.1),
            segments: BTreeMap::new(),
            ranges: BTreeMap::new(),
            handles: BTreeMap::new(),
            mappings: BTreeMap::new(),
            last_physical: 0,
            gone: Vec::new(),
        }
    }

    pub(super) fn usage(&self, device: DeviceId) -> &DeviceUsage {
        &self.usage[device.index()]
    }

    pub(super) fn info(&self, device: DeviceId) -> MemoryInfo {
        let used = self.usage(device).physical.current;
        MemoryInfo { free_bytes: self.capacity - used, total_bytes: self.capacity }
    }

    /// Handles that the program has not given back.
    pub(super) fn live_handles(&self) -> usize {
        self.handles.values().filter(|handle| handle.holders > 0).count()
    }

    /// Segments, ranges, handles (mapped ones that were released too) and mappings that exist.
    pub(super) fn counts(&self) -> [usize; 4] {
        [self.segments.len(), self.ranges.len(), self.handles.len(), self.mappings.len()]
    }

    pub(super) fn allocate(&mut self, device: DeviceId, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Status::InvalidValue);
        }
        self.require_room(device, size)?;
        let taken = size.next_multiple_of(SEGMENT_ALIGNMENT);
        let address = self.segment_addresses.take(taken, SEGMENT_ALIGNMENT).ok_or(Status::OutOfMemory)?;
        let physical = self.next_physical();
        self.usage[device.index()].physical.add(size);
        self.segments.insert(address, Segment { size, device, physical });
        Ok(address)
    }

    /// The size of the segment that starts at `address` on `device`.
    pub(super) fn segment_size(&self, device: DeviceId, address: u64) -> Result<u64> {
        let segment = self.segments.get(&address).ok_or(Status::InvalidValue)?;
        if segment.device == device { Ok(segment.size) } else { Err(Status::InvalidValue) }
    }

    pub(super) fn free(&mut self, device: DeviceId, address: u64) -> Result<()> {
        let size = self.segment_size(device, address)?;
        let segment = self.segments.remove(&address).ok_or(Status::InvalidValue)?;
        self.segment_addresses.give_back(address, size.next_multiple_of(SEGMENT_ALIGNMENT));
        self.usage[device.index()].physical.subtract(size);
        self.gone.push(segment.physical);
        Ok(())
    }

    pub(super) fn reserve_range(&mut self, device: DeviceId, size: u64) -> Result<u64> {
        self.require_virtual_memory()?;
        self.require_aligned(size)?;
        let base = self.range_addresses.take(size, self.granularity).ok_or(Status::OutOfMemory)?;
        self.usage[device.index()].reserved.add(size);
        self.ranges.insert(base, (size, device));
        Ok(base)
    }

    pub(super) fn free_range(&mut self, device: DeviceId, base: u64, size: u64) -> Result<()> {
        self.require_virtual_memory()?;
        if self.ranges.get(&base) != Some(&(size, device)) || self.is_any_mapped(base, size) {
            return Err(Status::InvalidValue);
        }
        self.ranges.remove(&base);
        self.range_addresses.give_back(base, size);
        self.usage[device.index()].reserved.subtract(size);
        Ok(())
    }

    pub(super) fn create_handle(&mut self, device: DeviceId, size: u64) -> Result<PhysicalHandle> {
        self.require_virtual_memory()?;
        self.require_aligned(size)?;
        self.require_room(device, size)?;
        let PhysicalId(name) = self.next_physical();
        self.usage[device.index()].physical.add(size);
        self.handles.insert(name, Handle { size, device, mappings: 0, holders: 1 });
        Ok(PhysicalHandle(name))
    }

    /// Gives a handle back and returns its size.
    pub(super) fn release_handle(&mut self, device: DeviceId, handle: PhysicalHandle) -> Result<u64> {
        self.require_virtual_memory()?;
        let size = self.live_handle(device, handle)?.size;
        if let Some(known) = self.handles.get_mut(&handle.0) {
            known.holders -= 1;
        }
        self.drop_if_unreachable(handle.0);
        Ok(size)
    }

    /// A descriptor that names a handle's memory. It keeps it no longer alive than the handle does.
    pub(super) fn export_handle(&self, device: DeviceId, handle: PhysicalHandle) -> Result<i32> {
        self.require_virtual_memory()?;
        self.live_handle(device, handle)?;
        i32::try_from(handle.0).map(|name| DESCRIPTORS + name).map_err(|_| Status::Unknown)
    }

    /// One more hold on the memory that a descriptor names.
    pub(super) fn import_handle(&mut self, device: DeviceId, descriptor: i32) -> Result<PhysicalHandle> {
        self.require_virtual_memory()?;
        let name = descriptor.checked_sub(DESCRIPTORS).and_then(|name| u64::try_from(name).ok());
        let handle = PhysicalHandle(name.ok_or(Status::InvalidValue)?);
        self.live_handle(device, handle)?;
        if let Some(known) = self.handles.get_mut(&handle.0) {
            known.holders += 1;
        }
        Ok(handle)
    }

    pub(super) fn map(&mut self, device: DeviceId, address: u64, size: u64, handle: PhysicalHandle) -> Result<()> {
        self.require_virtual_memory()?;
        self.require_aligned(size)?;
        let handle_size = self.live_handle(device, handle)?.size;
        if !address.is_multiple_of(self.granularity) || size > handle_size {
            return Err(Status::InvalidValue);
        }
        if size < handle_size {
            return Err(Status::NotSupported);
        }
        if !self.is_in_one_range(address, size) || self.is_any_mapped(address, size) {
            return Err(Status::InvalidValue);
        }
        if let Some(known) = self.handles.get_mut(&handle.0) {
            known.mappings += 1;
        }
        self.usage[device.index()].mapped.add(size);
        self.mappings.insert(address, Mapping { size, handle: handle.0, access: SmallVec::new() });
        Ok(())
    }

    /// Lets `devices` touch the mappings that fill `size` bytes at `address`; returns how many they are.
    pub(super) fn set_access(&mut self, address: u64, size: u64, devices: &[DeviceId]) -> Result<u64> {
        self.require_virtual_memory()?;
        let count = self.require_whole_mappings(address, size)?;
        if devices.is_empty() {
            return Err(Status::InvalidValue);
        }
        for (_, mapping) in self.mappings.range(address..address + size) {
            let owner = self.handles[&mapping.handle].device;
            if devices.iter().any(|&device| device.index() >= self.usage.len() || !self.is_reachable(device, owner)) {
                return Err(Status::InvalidDevice);
            }
        }
        for (_, mapping) in self.mappings.range_mut(address..address + size) {
            for &device in devices {
                if !mapping.access.contains(&device) {
                    mapping.access.push(device);
                }
            }
        }
        Ok(count)
    }

    /// Whether the mappings from `address` fill exactly `size` bytes; returns how many they are.
    fn require_whole_mappings(&self, address: u64, size: u64) -> Result<u64> {
        let end = address.checked_add(size).ok_or(Status::InvalidValue)?;
        let mut covered_to = address;
        let mut count = 0;
        for (&start, mapping) in self.mappings.range(address..end) {
            if start != covered_to {
                return Err(Status::InvalidValue);
            }
            covered_to += mapping.size;
            count += 1;
        }
        if size > 0 && covered_to == end { Ok(count) } else { Err(Status::InvalidValue) }
    }

    /// Removes the mappings that fill `size` bytes at `address`; returns how many they are. Where nothing at all is
    /// mapped in these reserved addresses there is nothing to do, and that is no error.
    pub(super) fn unmap(&mut self, address: u64, size: u64) -> Result<u64> {
        self.require_virtual_memory()?;
        self.require_aligned(size)?;
        if address.is_multiple_of(self.granularity)
            && self.is_in_one_range(address, size)
            && !self.is_any_mapped(address, size)
        {
            return Ok(0);
        }
        let count = self.require_whole_mappings(address, size)?;
        while let Some((&start, _)) = self.mappings.range(address..address + size).next() {
            let Some(mapping) = self.mappings.remove(&start) else { break };
            if let Some(handle) = self.handles.get_mut(&mapping.handle) {
                handle.mappings -= 1;
                self.usage[handle.device.index()].mapped.subtract(mapping.size);
            }
            self.drop_if_unreachable(mapping.handle);
        }
        Ok(count)
    }

    /// The physical memory behind `size` bytes at `address`, without the parts that are backed by nothing.
    pub(super) fn backing(&self, address: u64, size: u64) -> SmallVec<[Piece; 2]> {
        let end = address.saturating_add(size);
        let mut pieces = SmallVec::new();
        let mut push = |start: u64, run: u64, physical: PhysicalId| {
            let (from, to) = (start.max(address), (start + run).min(end));
            if from < to {
                pieces.push(Piece { physical, mapped_at: start, offset: from - start, size: to - from });
            }
        };
        for (start, segment) in around(&self.segments, address, end) {
            push(start, segment.size, segment.physical);
        }
        for (start, mapping) in around(&self.mappings, address, end) {
            push(start, mapping.size, PhysicalId(mapping.handle));
        }
        pieces
    }

    /// The first of `size` bytes at `address` that `device` may not touch.
    pub(super) fn first_inaccessible(&self, device: DeviceId, address: u64, size: u64) -> Option<u64> {
        let end = address.saturating_add(size);
        let mut covered_to = address;
        let mut cover = |start: u64, run: u64| {
            if start <= covered_to {
                covered_to = covered_to.max(start + run);
            }
        };
        // An access that begins in one kind of memory does not end in the other: their addresses are far apart.
        for (start, segment) in around(&self.segments, address, end) {
            if self.is_reachable(device, segment.device) {
                cover(start, segment.size);
            }
        }
        for (start, mapping) in around(&self.mappings, address, end) {
            if mapping.access.contains(&device) {
                cover(start, mapping.size);
            }
        }
        (covered_to < end).then_some(covered_to)
    }

    /// The names of the physical memory that went back to its device since the last call of this method.
    pub(super) fn take_gone(&mut self) -> Vec<PhysicalId> {
        std::mem::take(&mut self.gone)
    }

    /// Whether `device` can reach memory of `owner` at all.
    pub(super) fn is_reachable(&self, device: DeviceId, owner: DeviceId) -> bool {
        device == owner || self.peers
    }

    /// Whether all of `size` bytes at `address` are part of one reserved range.
    fn is_in_one_range(&self, address: u64, size: u64) -> bool {
        let Some((&base, &(range_size, _))) = self.ranges.range(..=address).next_back() else { return false };
        address.checked_add(size).is_some_and(|end| end <= base + range_size)
    }

    fn is_any_mapped(&self, address: u64, size: u64) -> bool {
        around(&self.mappings, address, address.saturating_add(size))
            .any(|(start, mapping)| start + mapping.size > address)
    }

    fn live_handle(&self, device: DeviceId, handle: PhysicalHandle) -> Result<&Handle> {
        match self.handles.get(&handle.0) {
            Some(known) if known.holders > 0 && known.device == device => Ok(known),
            _ => Err(Status::InvalidValue),
        }
    }

    /// Returns a handle's memory to its device once nobody holds it and nothing maps it.
    fn drop_if_unreachable(&mut self, name: u64) {
        if let Some(handle) = self.handles.get(&name)
            && handle.holders == 0
            && handle.mappings == 0
        {
            self.usage[handle.device.index()].physical.subtract(handle.size);
            self.handles.remove(&name);
            self.gone.push(PhysicalId(name));
        }
    }

    fn next_physical(&mut self) -> PhysicalId {
        self.last_physical += 1;
        PhysicalId(self.last_physical)
    }

    fn require_virtual_memory(&self) -> Result<()> {
        if self.supports_mapping { Ok(()) } else { Err(Status::NotSupported) }
    }

    fn require_aligned(&self, size: u64) -> Result<()> {
        if size > 0 && size.is_multiple_of(self.granularity) { Ok(()) } else { Err(Status::InvalidValue) }
    }

    fn require_room(&self, device: DeviceId, size: u64) -> Result<()> {
        if size <= self.info(device).free_bytes { Ok(()) } else { Err(Status::OutOfMemory) }
    }
}

/// The entries that start before `end`, from the last one that starts at or before `address`.
fn around<V>(entries: &BTreeMap<u64, V>, address: u64, end: u64) -> impl Iterator<Item = (u64, &V)> {
    let first = entries.range(..=address).next_back().map_or(address, |(&start, _)| start);
    entries.range(first..end.max(first)).map(|(&start, value)| (start, value))
}
