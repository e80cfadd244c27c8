//! Which stream a handle names, which streams use memory besides its own, and which are about to be destroyed.
//!
//! A default stream's handle names another stream on every device, and perhaps on every thread, so the state knows streams
//! by keys that say all three. The driver is asked what a key names when the state first meets it, under no lock.

use super::{Allocator, Device};
use crate::{
    device::DeviceState,
    driver::{Driver, DriverError},
    error::AllocError,
    event::{StreamIx, StreamKey},
    execute::execute,
    id::{DeviceId, DevicePtr, Stream, StreamHandle},
    plan::Plan,
    thread::thread_number,
};

/// What became of a call to [`Allocator::record_stream`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordOutcome {
    /// The memory will not be reused before the stream is done with it.
    Recorded,
    /// The address is not allocated here.
    NotOurs,
    /// The driver does not say which stream this is. The memory will not be reused before the host has waited, after the
    /// free, for all devices that the process uses.
    UnknownStream,
    /// The state of the memory's device is broken, or that of a device that it may be on.
    Broken,
}

impl<D: Driver> Allocator<D> {
    /// Says that the program uses the memory at `address` on `stream` too, until the memory is freed.
    ///
    /// A default stream's handle names that stream of the memory's own device, and of the calling thread's current one
    /// if that is another: the caller does not say which it means.
    pub fn record_stream(&self, address: DevicePtr, stream: StreamHandle) -> RecordOutcome {
        let mut missing = RecordOutcome::NotOurs;
        for device in self.devices.starting_with(DeviceId(0)) {
            let Ok(state) = device.fast() else {
                missing = RecordOutcome::Broken;
                continue;
            };
            if state.blocks.at(address.0).is_none() {
                continue;
            }
            drop(state);
            let others = if stream.is_default() { self.may_be_current() } else { Vec::new() };
            let others = others.into_iter().filter(|other| *other != device.id);
            return others.fold(self.record_on(device, address, stream_key(device.id, stream)), |outcome, other| {
                match self.record_on(device, address, stream_key(other, stream)) {
                    RecordOutcome::Recorded => outcome,
                    failure => failure,
                }
            });
        }
        missing
    }

    /// The devices that may be the calling thread's current one: all in use, if the driver does not say which.
    fn may_be_current(&self) -> Vec<DeviceId> {
        if self.devices.len() < 2 {
            return Vec::new();
        }
        match self.driver.current_device() {
            Ok(current) => current.into_iter().collect(),
            Err(_) => self.devices_in_use(),
        }
    }

    fn record_on(&self, device: &Device, address: DevicePtr, key: StreamKey) -> RecordOutcome {
        let Ok(mut state) = device.fast() else { return RecordOutcome::Broken };
        let stream = if let Some(stream) = state.streams.find(key) {
            stream
        } else {
            drop(state);
            let target = self.target(key);
            if let Ok(target) = target {
                // Where its device cannot come into use, the stream is waited for all the same.
                let _ = self.device(target.device);
            }
            let Ok(locked) = device.fast() else { return RecordOutcome::Broken };
            state = locked;
            match target {
                Ok(target) => admit(&mut state, key, target),
                Err(_) => return record_unnamed(&mut state, address),
            }
        };
        if state.record_stream(address, stream) { RecordOutcome::Recorded } else { RecordOutcome::NotOurs }
    }

    /// Forgets a stream that the program is about to destroy: its handle may come back for another one.
    ///
    /// Has to be called before the stream is destroyed and after its last work was queued. An event is recorded on the
    /// stream now, which answers for all memory that it used, freed or not; no call that begins from then on gives the
    /// driver the handle. One that another thread is in the middle of (a request that finds no free block, a free, an
    /// emptied cache) may have decided to before, and still do so: the stream may be destroyed once such calls have
    /// returned. A stream that is destroyed without this call may crash a real driver, see
    /// [`Driver`](Driver#destroyed-streams).
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] if no event could be recorded on it; the memory that it used is then held until a
    /// synchronise of the stream's device. So it is if the driver says that the stream is gone, which is no error.
    /// [`AllocError::Broken`] if a device is; the others forget the stream.
    pub fn retire_stream(&self, stream: StreamHandle) -> Result<(), AllocError> {
        let mut result = Ok(());
        for device in self.devices.starting_with(DeviceId(0)) {
            result = self.retire_on(device, stream_key(device.id, stream)).and(result);
        }
        result
    }

    fn retire_on(&self, device: &Device, key: StreamKey) -> Result<(), AllocError> {
        let mut state = device.fast()?;
        let Some(stream) = state.streams.find(key) else { return Ok(()) };
        let closings = state.plan_retire(stream);
        drop(state);
        let outcome = execute(&self.driver, Plan::Close(closings));
        device.fast()?.commit(outcome)
    }

    /// Which stream a key names. Asks the driver, and brings the stream's own device up if that is another one.
    pub(super) fn resolve(&self, key: StreamKey) -> Result<Stream, AllocError> {
        let target = self.target(key)?;
        self.device(target.device)?;
        Ok(target)
    }

    /// Which stream a key names. Asks the driver.
    fn target(&self, key: StreamKey) -> Result<Stream, DriverError> {
        let device = if key.handle.is_default() { key.device } else { self.driver.stream_device(key.handle)? };
        Ok(Stream { device, handle: key.handle })
    }
}

/// The stream's place in the state, made now if this is its first use.
pub(super) fn admit(state: &mut DeviceState, key: StreamKey, target: Stream) -> StreamIx {
    // Another thread may have been first.
    state.streams.find(key).unwrap_or_else(|| state.streams.add(key, target))
}

/// Notes a use on a stream that the driver does not name. It may have work all the same, and may get more.
#[cold]
fn record_unnamed(state: &mut DeviceState, address: DevicePtr) -> RecordOutcome {
    let unnamed = state.streams.unnamed(state.id);
    if !state.record_stream(address, unnamed) {
        return RecordOutcome::NotOurs;
    }
    state.stats.dead_streams += 1;
    RecordOutcome::UnknownStream
}

/// What a call on `device` means by `handle`.
pub(super) fn stream_key(device: DeviceId, handle: StreamHandle) -> StreamKey {
    match handle {
        StreamHandle::LEGACY => StreamKey { handle: StreamHandle::DEFAULT, device, thread: 0 },
        StreamHandle::PER_THREAD => StreamKey { handle, device, thread: thread_number() },
        _ => StreamKey { handle, device, thread: 0 },
    }
}
