//! Memory of this process that another one uses, and memory of another one that this process uses.
//!
//! An allocation that is held neither moves nor goes back to the driver, so it can be named to another process by what
//! stands behind it: the driver's ticket of its segment, or a descriptor for each of its handles. How names travel is not
//! the allocator's business. Imported memory is no allocation of this process: it is counted nowhere and never reused.

use super::{Allocator, Device};
use crate::{
    backing::SpanKind,
    block::BlockState,
    device::DeviceState,
    driver::{CaptureMode, Driver, DriverError, Ticket},
    error::AllocError,
    id::{DeviceId, DevicePtr, PhysicalHandle},
    plan::{Outcome, Plan, Synchronize},
    source::{Origin, SourceError},
};

/// What names an allocation to another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// How far into the named memory the allocation begins, in bytes.
    pub offset: u64,
    /// The memory.
    pub name: SharedName,
}

/// What names memory to another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharedName {
    /// A whole segment.
    Segment(Ticket),
    /// Handles, one after the other: a file descriptor for each, which belongs to the caller now, and its bytes.
    Handles(Vec<(i32, u64)>),
}

/// What stands behind an allocation.
enum Backing {
    Segment { base: u64 },
    Handles { base: u64, handles: Vec<(PhysicalHandle, u64)> },
}

/// Memory of another process, at an address of this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Imported {
    device: DeviceId,
    /// The first byte.
    pub base: DevicePtr,
    /// The bytes of the range it is mapped in; `None` for a segment.
    mapped: Option<u64>,
}

impl<D: Driver> Allocator<D> {
    /// Names the allocation at `address` to other processes; `None` if nothing is allocated there.
    ///
    /// The program has to hold the allocation for as long as another process uses it. `abandon` closes a descriptor that
    /// was made in vain.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] if the driver cannot name it: some containers and devices do not let memory be exported.
    /// [`AllocError::Source`] if it comes from elsewhere than the driver. [`AllocError::Broken`] if nothing is known to be
    /// allocated there, and a device is broken.
    pub fn share(&self, address: DevicePtr, abandon: impl FnMut(i32)) -> Result<Option<Shared>, AllocError> {
        let mut missing = Ok(None);
        for device in self.devices.starting_with(DeviceId(0)) {
            let backing = match device.fast() {
                Ok(state) => state.backing_of(address)?,
                Err(error) => {
                    missing = Err(error);
                    continue;
                }
            };
            let Some(backing) = backing else { continue };
            let (base, name) = self.relaxed(|| self.name(device, backing, abandon))?;
            return Ok(Some(Shared { offset: address.0 - base, name }));
        }
        missing
    }

    fn name(
        &self,
        device: &Device,
        backing: Backing,
        abandon: impl FnMut(i32),
    ) -> Result<(u64, SharedName), DriverError> {
        match backing {
            Backing::Segment { base } => {
                let ticket = self.driver.ticket(device.id, DevicePtr(base))?;
                Ok((base, SharedName::Segment(ticket)))
            }
            Backing::Handles { base, handles } => {
                let mut named = Vec::new();
                for (handle, size) in handles {
                    match self.driver.export_handle(device.id, handle) {
                        Ok(descriptor) => named.push((descriptor, size)),
                        Err(error) => {
                            named.into_iter().map(|(descriptor, _)| descriptor).for_each(abandon);
                            return Err(error);
                        }
                    }
                }
                Ok((base, SharedName::Handles(named)))
            }
        }
    }

    /// Brings memory of another process to an address of this one, for `device` to use.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] if the driver refuses it; then nothing is left behind. Those of bringing the device into
    /// use.
    pub fn import(&self, device: DeviceId, name: &SharedName) -> Result<Imported, AllocError> {
        self.device(device)?;
        let imported = self.relaxed(|| match name {
            SharedName::Segment(ticket) => {
                let base = self.driver.open_ticket(device, ticket)?;
                Ok(Imported { device, base, mapped: None })
            }
            SharedName::Handles(pieces) => {
                let size = pieces.iter().map(|(_, size)| size).sum();
                let base = self.driver.reserve_range(device, size)?;
                let mut mapped = 0;
                let outcome = self.map_all(device, base, pieces, &mut mapped);
                if let Err(error) = outcome {
                    // What cannot be undone is left: addresses, and memory that the other process holds anyway.
                    let undone = if mapped > 0 { self.driver.unmap(device, base, mapped) } else { Ok(()) };
                    let _ = undone.and_then(|()| self.driver.free_range(device, base, size));
                    return Err(error);
                }
                Ok(Imported { device, base, mapped: Some(size) })
            }
        });
        Ok(imported?)
    }

    /// Maps the pieces one after the other; `mapped` tells how far it came.
    fn map_all(
        &self,
        device: DeviceId,
        base: DevicePtr,
        pieces: &[(i32, u64)],
        mapped: &mut u64,
    ) -> Result<(), DriverError> {
        for (descriptor, size) in pieces {
            let handle = self.driver.import_handle(device, *descriptor)?;
            let outcome = self.driver.map(device, base.offset(*mapped), *size, handle);
            // The mapping keeps the memory; this process has no other use for the handle.
            let _ = self.driver.release_handle(device, handle);
            outcome?;
            *mapped += size;
        }
        self.driver.set_access(device, base, *mapped, &[device])
    }

    /// Gives up what [`import`](Self::import) returned, after a wait for all work queued on the device that uses it.
    ///
    /// Returns false, and leaves the memory where it is, while a stream of the device may be capturing: that wait would
    /// spoil the capture. Ask again later.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] if the driver refuses; then the memory stays where it is, for good.
    pub fn close_import(&self, imported: &Imported) -> Result<bool, AllocError> {
        let Imported { device, base, mapped } = *imported;
        let wait = Synchronize {
            devices: vec![device],
            everywhere: false,
            streams: Vec::new(),
            epochs: Vec::new(),
            releases: 0,
        };
        let Outcome::Synchronized(_, is_idle) = self.carry_out(Plan::Synchronize(wait)) else {
            unreachable!("the outcome of a plan is of its kind")
        };
        if !is_idle? {
            return Ok(false);
        }
        self.relaxed(|| match mapped {
            None => self.driver.close_ticket(device, base),
            Some(size) => {
                self.driver.unmap(device, base, size)?;
                self.driver.free_range(device, base, size)
            }
        })?;
        Ok(true)
    }

    /// Makes driver calls that no capture of another stream may be spoiled by.
    fn relaxed<T>(&self, calls: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
        let former = self.driver.exchange_capture_mode(CaptureMode::Relaxed)?;
        let outcome = calls();
        let _ = self.driver.exchange_capture_mode(former).or_else(|_| self.driver.exchange_capture_mode(former));
        outcome
    }
}

impl DeviceState {
    /// What stands behind the allocation at an address.
    fn backing_of(&self, address: DevicePtr) -> Result<Option<Backing>, SourceError> {
        let block = self.blocks.at(address.0).map(|id| &self.blocks[id]);
        let Some(block) = block.filter(|block| block.state == BlockState::Allocated) else { return Ok(None) };
        let span = &self.spans[block.span];
        Ok(Some(match &span.kind {
            SpanKind::Segment(Origin::Driver) => Backing::Segment { base: span.base },
            SpanKind::Segment(Origin::Source(_)) => {
                return Err(SourceError::NotShareable { pool: self.pool_id(span.pool) });
            }
            SpanKind::Range(mappings) => {
                let behind = mappings.overlapping(block.address, block.end()).collect::<Vec<_>>();
                let base = behind.first().map_or(block.address, |mapping| mapping.address);
                let handles = behind.iter().map(|mapping| (mapping.handle, mapping.size)).collect();
                Backing::Handles { base, handles }
            }
        }))
    }
}
