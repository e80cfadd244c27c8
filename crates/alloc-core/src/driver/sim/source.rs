//! A source of segments on the simulated GPU: a library of the program's own that obtains memory for private pools.
//!
//! As the simulated driver it is never kinder than a real one: it takes memory away without waiting for anybody, takes back
//! only what it gave, and fails when it is told to.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::SimDriver;
use crate::driver::Driver;
use crate::id::{DeviceId, DevicePtr, StreamHandle};
use crate::size::BLOCK_GRANULARITY;
use crate::source::{SegmentSource, SourceFailed};
use crate::sync::{Mutex, MutexGuard};

/// What a source does wrong once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// It has no memory.
    GivesNothing,
    /// It fails when it is asked for memory.
    FailsToGive,
    /// It gives memory that begins in the middle of a block's granule.
    GivesMisaligned,
    /// It gives memory that it gave before; if there is none, it has no memory.
    GivesTwice,
    /// It does not take memory back.
    DoesNotTakeBack,
}

/// What a source has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceCounts {
    /// Segments given.
    pub given: u64,
    /// Segments taken back.
    pub taken_back: u64,
    /// Requests that it had no memory for.
    pub empty: u64,
    /// Requests at which it failed.
    pub failed: u64,
    /// Requests that it answered with memory of no use.
    pub unusable: u64,
    /// Segments that it did not take back.
    pub kept: u64,
}

/// A segment that a source gave: for whom, and how large.
type Given = (DeviceId, u64, StreamHandle);

#[derive(Debug, Default)]
struct State {
    given: BTreeMap<DevicePtr, Given>,
    /// Where memory of no use is said to be that has to come back.
    unusable: Vec<DevicePtr>,
    mishap: Option<Mishap>,
    counts: SourceCounts,
    /// The first thing that was given back wrongly.
    complaint: Option<String>,
}

/// A source of segments. Clones are the same source.
#[derive(Clone, Debug)]
pub struct SimSource {
    driver: SimDriver,
    state: Arc<Mutex<State>>,
}

impl SimSource {
    /// A source that obtains memory from `driver`.
    pub fn new(driver: &SimDriver) -> Self {
        Self { driver: driver.clone(), state: Arc::default() }
    }

    /// Lets the next request that it applies to go wrong.
    pub fn fail_next(&self, mishap: Mishap) {
        self.lock().mishap = Some(mishap);
    }

    /// What it gave on `device` and did not get back, by address: bytes.
    pub fn segments(&self, device: DeviceId) -> BTreeMap<DevicePtr, u64> {
        let state = self.lock();
        let of_device = state.given.iter().filter(|(_, (on, _, _))| *on == device);
        of_device.map(|(address, (_, size, _))| (*address, *size)).collect()
    }

    /// What it has done so far.
    pub fn counts(&self) -> SourceCounts {
        self.lock().counts
    }

    /// Whether all that it was given back was its own.
    ///
    /// # Errors
    ///
    /// What was not, and unusable memory that did not come back.
    pub fn check(&self) -> Result<(), String> {
        let state = self.lock();
        match (&state.complaint, state.unusable.first()) {
            (Some(complaint), _) => Err(complaint.clone()),
            (None, Some(address)) => Err(format!("unusable memory at {address:?} was not given back")),
            (None, None) => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl State {
    /// The mishap that is due, if it is one of these.
    fn take_mishap(&mut self, applies: impl Fn(Mishap) -> bool) -> Option<Mishap> {
        self.mishap.take_if(|mishap| applies(*mishap))
    }
}

impl SegmentSource for SimSource {
    fn obtain(&self, device: DeviceId, size: u64, stream: StreamHandle) -> Result<Option<DevicePtr>, SourceFailed> {
        let mut state = self.lock();
        let state = &mut *state;
        match state.take_mishap(|mishap| mishap != Mishap::DoesNotTakeBack) {
            Some(Mishap::FailsToGive) => {
                state.counts.failed += 1;
                return Err(SourceFailed);
            }
            Some(Mishap::GivesMisaligned) => {
                let address = DevicePtr(BLOCK_GRANULARITY / 2);
                state.unusable.push(address);
                state.counts.unusable += 1;
                return Ok(Some(address));
            }
            Some(Mishap::GivesTwice) => {
                if let Some((address, _)) = state.given.first_key_value() {
                    state.counts.unusable += 1;
                    return Ok(Some(*address));
                }
            }
            Some(Mishap::GivesNothing) => {}
            Some(Mishap::DoesNotTakeBack) => unreachable!("it applies to what comes back"),
            None => match self.driver.allocate(device, size) {
                Ok(address) => {
                    state.given.insert(address, (device, size, stream));
                    state.counts.given += 1;
                    return Ok(Some(address));
                }
                Err(error) if error.is_out_of_memory() => {}
                Err(_) => {
                    state.counts.failed += 1;
                    return Err(SourceFailed);
                }
            },
        }
        state.counts.empty += 1;
        Ok(None)
    }

    fn give_back(
        &self,
        device: DeviceId,
        address: DevicePtr,
        size: u64,
        stream: StreamHandle,
    ) -> Result<(), SourceFailed> {
        let mut state = self.lock();
        if let Some(position) = state.unusable.iter().position(|said| *said == address) {
            state.unusable.remove(position);
            return Ok(());
        }
        let given = state.given.get(&address).copied();
        if given != Some((device, size, stream)) {
            let complaint =
                format!("{size} bytes at {address:?} came back for {stream:?} of {device}: given {given:?}");
            state.complaint.get_or_insert(complaint);
            return Err(SourceFailed);
        }
        let is_kept = state.take_mishap(|mishap| mishap == Mishap::DoesNotTakeBack).is_some();
        if is_kept || self.driver.free_at_once(device, address).is_err() {
            state.counts.kept += 1;
            return Err(SourceFailed);
        }
        state.given.remove(&address);
        state.counts.taken_back += 1;
        Ok(())
    }
}
