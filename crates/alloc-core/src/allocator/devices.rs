//! Which devices are in use, and who reaches whose memory.

use std::sync::OnceLock;

use super::{Allocator, Device, Routes};
use crate::{
    config::Peers,
    device::DeviceState,
    driver::{Driver, DriverError},
    error::AllocError,
    history::Recording,
    id::DeviceId,
    sync::{AtomicUsize, Mutex, Ordering, ShortLock},
};

/// More devices than any machine has; beyond it a device does not exist.
const DEVICES_MAX: usize = 64;

/// The devices in use. A device, once in use, stays.
pub(super) struct DeviceTable {
    slots: [OnceLock<Box<Device>>; DEVICES_MAX],
    /// How many are in use.
    len: AtomicUsize,
    /// The number of devices that the driver has.
    count: OnceLock<u32>,
    /// Held while a device comes into use, so that of two that do at once the second sees the first.
    pub(super) activation: Mutex<()>,
}

impl Default for DeviceTable {
    fn default() -> Self {
        Self {
            slots: [const { OnceLock::new() }; DEVICES_MAX],
            len: AtomicUsize::new(0),
            count: OnceLock::new(),
            activation: Mutex::new(()),
        }
    }
}

impl DeviceTable {
    pub(super) fn get(&self, id: DeviceId) -> Option<&Device> {
        self.slots.get(id.index())?.get().map(Box::as_ref)
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// The devices in use: `first`, if it is one, then the others by index.
    pub(super) fn starting_with(&self, first: DeviceId) -> impl Iterator<Item = &Device> {
        let others = self.slots.iter().filter_map(|slot| slot.get().map(Box::as_ref));
        self.get(first).into_iter().chain(others.filter(move |device| device.id != first))
    }
}

impl<D: Driver> Allocator<D> {
    /// The device, brought into use if this is the first call for it.
    pub(super) fn device(&self, id: DeviceId) -> Result<&Device, AllocError> {
        match self.devices.get(id) {
            Some(device) => Ok(device),
            None => self.activate(id),
        }
    }

    /// Brings a device into use. Devices that may reach each other's memory do so when this returns.
    #[cold]
    fn activate(&self, id: DeviceId) -> Result<&Device, AllocError> {
        let _activation = self.devices.activation.lock().map_err(|_| AllocError::Broken { device: id })?;
        if let Some(device) = self.devices.get(id) {
            return Ok(device);
        }
        let count = self.device_count()?;
        if id.0 >= count || id.index() >= DEVICES_MAX {
            return Err(AllocError::NoSuchDevice { device: id, count });
        }
        let capabilities = self.driver.capabilities(id)?;
        // Read while the activation's lock is held: a recording that begins now reaches this device or is seen here.
        let recording = self.recording()?;
        let mut state = DeviceState::new(id, capabilities, &self.config, recording);
        state.is_tracked = self.is_tracked();
        if state.has_ranges() {
            state.access.extend(self.peers_of(id)?);
        }
        for other in self.devices.starting_with(id) {
            match self.let_in(other, id) {
                // What a broken device holds stays out of the newcomer's reach, which has memory of its own.
                Err(AllocError::Broken { .. }) => {}
                result => result?,
            }
        }
        let device = Device {
            id,
            fast: ShortLock::new(state),
            slow: Mutex::new(()),
            routes: Mutex::new(Routes::default()),
            route_count: AtomicUsize::new(0),
        };
        self.devices.len.fetch_add(1, Ordering::AcqRel);
        Ok(self.devices.slots[id.index()].get_or_init(|| Box::new(device)))
    }

    /// Brings two devices into use, after which `device` reaches the memory of `peer` as far as the setting `peers` and
    /// the hardware let it.
    ///
    /// # Errors
    ///
    /// Those of bringing a device into use.
    pub fn reach_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), AllocError> {
        self.device(peer)?;
        self.device(device)?;
        Ok(())
    }

    /// Has the devices in use, and those that come into use later, record so; `None` for not at all.
    ///
    /// Recorded events are kept, unless `forget_events` or a lower limit says otherwise; with `None` all are forgotten.
    ///
    /// # Errors
    ///
    /// [`AllocError::Broken`] if a device is; the others do as they are told.
    pub fn record_history(&self, recording: Option<&Recording>, forget_events: bool) -> Result<(), AllocError> {
        let broken = |id| AllocError::Broken { device: id };
        let _activation = self.devices.activation.lock().map_err(|_| broken(DeviceId(0)))?;
        *self.recording.lock().map_err(|_| broken(DeviceId(0)))? = recording.cloned();
        let mut result = Ok(());
        for device in self.devices.starting_with(DeviceId(0)) {
            let set = device.fast().map(|mut state| state.history.set_recording(recording.cloned(), forget_events));
            result = result.and(set);
        }
        result
    }

    /// What is recorded at the moment.
    fn recording(&self) -> Result<Option<Recording>, AllocError> {
        let recording = self.recording.lock().map_err(|_| AllocError::Broken { device: DeviceId(0) })?;
        Ok(recording.clone())
    }

    fn device_count(&self) -> Result<u32, AllocError> {
        if let Some(count) = self.devices.count.get() {
            return Ok(*count);
        }
        let count = self.driver.device_count()?;
        Ok(*self.devices.count.get_or_init(|| count))
    }

    /// The devices that reach what is mapped on `id` from its first mapping on.
    fn peers_of(&self, id: DeviceId) -> Result<Vec<DeviceId>, DriverError> {
        let candidates: Vec<DeviceId> = match self.config.peers {
            Peers::None => Vec::new(),
            Peers::Used => self.devices.starting_with(id).map(|device| device.id).collect(),
            Peers::All => (0..self.devices.count.get().copied().unwrap_or(0)).map(DeviceId).collect(),
        };
        let mut peers = Vec::new();
        for peer in candidates.into_iter().filter(|peer| *peer != id) {
            if self.driver.can_access_peer(peer, id)? {
                peers.push(peer);
            }
        }
        Ok(peers)
    }

    /// Lets `newcomer` reach what is mapped on `device`, now and later.
    fn let_in(&self, device: &Device, newcomer: DeviceId) -> Result<(), AllocError> {
        // Nothing is mapped or unmapped on the device while the slow lock is held.
        let _slow = device.slow()?;
        let state = device.fast()?;
        if !state.has_ranges() || self.config.peers != Peers::Used || state.access.contains(&newcomer) {
            return Ok(());
        }
        let runs = state.mapped_runs();
        drop(state);
        if !self.driver.can_access_peer(newcomer, device.id)? {
            return Ok(());
        }
        for (address, size) in runs {
            self.driver.set_access(device.id, address, size, &[newcomer])?;
        }
        device.fast()?.access.push(newcomer);
        Ok(())
    }

    /// Brings devices into use that somebody else in this process uses: their kernels may want to reach our memory.
    pub(super) fn notice_active_devices(&self) -> Result<(), AllocError> {
        let count = self.device_count()?;
        if count < 2 || self.config.peers != Peers::Used || self.devices.len() as u32 == count {
            return Ok(());
        }
        for id in (0..count).map(DeviceId).filter(|id| self.devices.get(*id).is_none()) {
            if self.driver.is_active(id)? {
                self.activate(id)?;
            }
        }
        Ok(())
    }
}
