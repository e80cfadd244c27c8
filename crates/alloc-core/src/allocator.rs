//! The allocator: locks, and the only caller of the driver.
//!
//! Each device has two locks. The *fast* one guards its state and is held for the length of a cached malloc or free. The
//! *slow* one is taken first and serialises growing and trimming. Driver calls are made under the slow lock at most, host
//! waits and the program's own code (callbacks, sources of segments) under none. So a miss drops the fast lock, takes slow,
//! then fast, searches again, lets the state make a plan, drops fast, carries the plan out, takes fast, commits, and climbs
//! on.

#[cfg(feature = "sim")]
mod chosen;
mod climb;
mod devices;
mod emptying;
mod pools;
mod report;
mod sharing;
mod sources;
mod streams;
mod tracking;

use std::sync::Arc;

pub use pools::StreamFilter;
pub use sharing::{Imported, Shared, SharedName};
pub use streams::RecordOutcome;
pub use tracking::{Tracked, Tracker};

use crate::{
    config::Config,
    device::{DeviceState, Freed, Request},
    driver::{Driver, DriverError},
    error::AllocError,
    event::Closing,
    execute::execute,
    history::Recording,
    id::{DeviceId, DevicePtr, PoolId, StreamHandle},
    ladder::{Ladder, Rung, Step},
    plan::{Outcome, Plan, Synchronize},
    size::REQUEST_MAX,
    source::SharedSource,
    sync::{AtomicUsize, Mutex, MutexGuard, ShortGuard, ShortLock},
};

use climb::Climb;
use devices::DeviceTable;
use pools::Routes;
use streams::{admit, stream_key};

/// What became of a call to [`Allocator::free`]. None of these is worth an error: a destructor is the usual caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeOutcome {
    /// The memory is free, or will be once the streams that used it are done.
    Freed,
    /// The pointer was null.
    Null,
    /// Nothing was ever allocated here at this address, or its segment is long returned. Counted.
    NotOurs,
    /// The address was ours but is not allocated: freed before, or never handed out. Counted.
    Repeated,
    /// The device's state is broken, so the memory stays as it is.
    Leaked,
}

/// A function that frees something when memory has run out, and says whether it did.
pub type OomCallback = Arc<dyn Fn() -> bool + Send + Sync>;

/// One device's state and locks.
struct Device {
    id: DeviceId,
    fast: ShortLock<DeviceState>,
    slow: Mutex<()>,
    /// Private pools that requests are being routed to.
    routes: Mutex<Routes>,
    /// How many there are, so that the cached path need not take their lock.
    route_count: AtomicUsize,
}

impl Device {
    #[inline]
    fn fast(&self) -> Result<ShortGuard<'_, DeviceState>, AllocError> {
        self.fast.lock().map_err(|_| AllocError::Broken { device: self.id })
    }

    fn slow(&self) -> Result<MutexGuard<'_, ()>, AllocError> {
        self.slow.lock().map_err(|_| AllocError::Broken { device: self.id })
    }
}

/// A caching allocator for the memory of all devices of a driver. See the [module](self) for its locks.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// use alloc_core::{allocator::{Allocator, FreeOutcome}, config::Config, driver::sim::{SimDriver, SimOptions}, id::{DeviceId, StreamHandle}};
///
/// let allocator = Allocator::new(SimDriver::new(SimOptions::default()), Config::default());
/// let address = allocator.malloc(1000, DeviceId(0), StreamHandle::DEFAULT, None)?.expect("not a request for nothing");
/// assert_eq!(allocator.free(address, DeviceId(0)), FreeOutcome::Freed);
/// # }
/// # Ok::<(), alloc_core::error::AllocError>(())
/// ```
pub struct Allocator<D> {
    driver: D,
    config: Config,
    devices: DeviceTable,
    callback: Mutex<Option<OomCallback>>,
    /// What devices record when they come into use.
    recording: Mutex<Option<Recording>>,
    trackers: Mutex<Vec<Tracker>>,
    /// Every source that some pool or segment still names, so that none is dropped under another lock. Nothing waits
    /// inside this lock, so that the models of the others need not know of it.
    sources: std::sync::Mutex<Vec<SharedSource>>,
}

impl<D: Driver> Allocator<D> {
    /// An allocator that has not spoken to its driver yet.
    pub fn new(driver: D, config: Config) -> Self {
        let recording = (config.history_limit > 0).then(|| Recording::new(config.history_limit));
        let (devices, callback) = (DeviceTable::default(), Mutex::new(None));
        let (trackers, sources) = (Mutex::default(), std::sync::Mutex::default());
        Self { driver, config, devices, callback, recording: Mutex::new(recording), trackers, sources }
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// The settings that the allocator was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// At least `size` bytes on `device`, for use on `stream`; `None` for a size of 0.
    ///
    /// The memory may be used on the stream at once. `pool` names a private pool that [`begin_pool`](Self::begin_pool)
    /// made; the default pool serves all others.
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`] when all of the [`Rung`]s were tried; [`AllocError::Driver`] when the driver refused
    /// for another reason; [`AllocError::Source`] when the pool's own source did; [`AllocError::NoSuchDevice`];
    /// [`AllocError::Broken`].
    pub fn malloc(
        &self,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
        pool: Option<PoolId>,
    ) -> Result<Option<DevicePtr>, AllocError> {
        if size == 0 {
            return Ok(None);
        }
        let device = self.device(device)?;
        let key = stream_key(device.id, stream);
        let mut state = device.fast()?;
        let stream = if let Some(stream) = state.streams.find(key) {
            stream
        } else {
            drop(state);
            let target = self.resolve(key)?;
            state = device.fast()?;
            admit(&mut state, key, target)
        };
        if size > REQUEST_MAX {
            drop(state);
            return Err(self.out_of_memory(device, size, None));
        }
        let owner = pool.and_then(|pool| state.pools.find_live(pool));
        let request = state.request(size, stream, owner);
        match state.malloc(&request) {
            Some(address) => Ok(Some(address)),
            None => self.malloc_uncached(device, state, request).map(Some),
        }
    }

    /// Serves a request for which no free block is found.
    #[cold]
    fn malloc_uncached(
        &self,
        device: &Device,
        mut state: ShortGuard<'_, DeviceState>,
        request: Request,
    ) -> Result<DevicePtr, AllocError> {
        state.pools[request.pool].climbers += 1;
        drop(state);
        let mut climb = Climb::new(device, request);
        let result = self.malloc_slow(device, &mut climb.ladder);
        if let Some(unusable) = climb.ladder.unusable.take() {
            self.reject(unusable);
        }
        drop(climb);
        self.drop_unused_sources();
        result
    }

    /// Climbs the ladder until the request is served or nothing is left to try.
    #[cold]
    fn malloc_slow(&self, device: &Device, ladder: &mut Ladder) -> Result<DevicePtr, AllocError> {
        self.notice_active_devices()?;
        let mut slow = Some(device.slow()?);
        loop {
            let step = device.fast()?.climb(ladder);
            let (rung, plan) = match step {
                Step::Done(address) => return Ok(address),
                Step::Run(rung, plan) => (rung, plan),
                Step::Fail(Some(error)) => return Err(error),
                Step::Fail(None) => {
                    drop(slow);
                    return Err(self.out_of_memory(device, ladder.request.requested, Some(ladder)));
                }
            };
            let outcome = self.carry_out_locked(device, rung, plan, &mut slow)?;
            if slow.is_none() {
                slow = Some(device.slow()?);
            }
            let news = device.arriving(&outcome);
            let served = device.fast()?.commit_for(outcome, ladder)?;
            if !news.is_empty() {
                drop(slow.take());
                self.tell(&news);
            }
            if let Some(address) = served {
                return Ok(address);
            }
            if slow.is_none() {
                slow = Some(device.slow()?);
            }
        }
    }

    /// Carries a plan out under the slow lock, or drops it if the plan must meet none. Trackers are told of what goes, under
    /// no lock either.
    fn carry_out_locked<'a>(
        &self,
        device: &'a Device,
        rung: Rung,
        plan: Plan,
        slow: &mut Option<MutexGuard<'a, ()>>,
    ) -> Result<Outcome, AllocError> {
        let must_meet_none = may_wait(rung) || plan.is_foreign();
        let news = device.leaving(&plan);
        if must_meet_none || !news.is_empty() {
            drop(slow.take());
            self.tell(&news);
        }
        if !must_meet_none && slow.is_none() {
            *slow = Some(device.slow()?);
        }
        Ok(self.carry_out(plan))
    }

    fn carry_out(&self, plan: Plan) -> Outcome {
        match plan {
            Plan::CallBack => {
                let callback = self.callback.lock().ok().and_then(|callback| callback.clone());
                Outcome::CalledBack(callback.is_some_and(|callback| callback()))
            }
            Plan::Synchronize(mut synchronize) => {
                match self.name_devices(&mut synchronize).map(|()| self.name_streams(&mut synchronize)) {
                    Ok(true) => execute(&self.driver, Plan::Synchronize(synchronize)),
                    refused => Outcome::Synchronized(synchronize, refused),
                }
            }
            plan => execute(&self.driver, plan),
        }
    }

    /// Completes the devices, if all are meant: those in use here, and others whose streams the program may have named.
    fn name_devices(&self, synchronize: &mut Synchronize) -> Result<(), DriverError> {
        let Synchronize { devices, everywhere: true, .. } = synchronize else { return Ok(()) };
        for id in (0..self.driver.device_count()?).map(DeviceId) {
            if !devices.contains(&id) && (self.devices.get(id).is_some() || self.driver.is_active(id)?) {
                devices.push(id);
            }
        }
        Ok(())
    }

    /// Completes the streams that may be capturing while devices are synchronised, which would spoil the capture: other
    /// devices know of their own. Returns false if streams that no device has met yet may be capturing.
    fn name_streams(&self, synchronize: &mut Synchronize) -> bool {
        let Synchronize { devices, streams, .. } = synchronize;
        let mut are_known = true;
        for device in devices.iter().filter_map(|id| self.devices.get(*id)) {
            let Ok(state) = device.fast() else { return false };
            streams.extend(state.streams.live_targets(devices));
            are_known &= !state.pools.has_silent_route();
        }
        streams.sort_unstable();
        streams.dedup();
        are_known
    }

    /// Takes memory back. `hint` is the device that the caller believes it to be on; it is looked for there first.
    ///
    /// Never fails and never waits. May record an event.
    pub fn free(&self, address: DevicePtr, hint: DeviceId) -> FreeOutcome {
        if address.0 == 0 {
            return FreeOutcome::Null;
        }
        let outcome = self.devices.get(hint).map_or(FreeOutcome::NotOurs, |device| self.free_on(device, address));
        match outcome {
            FreeOutcome::NotOurs | FreeOutcome::Leaked => self.free_elsewhere(address, hint, outcome),
            _ => outcome,
        }
    }

    /// Takes memory back if it is the device's.
    #[inline]
    fn free_on(&self, device: &Device, address: DevicePtr) -> FreeOutcome {
        let Ok(mut state) = device.fast() else { return FreeOutcome::Leaked };
        match state.free(address) {
            Freed::Done => FreeOutcome::Freed,
            Freed::CloseDue(block) => {
                let closings = state.plan_close_of(block);
                drop(state);
                self.close(device, closings);
                FreeOutcome::Freed
            }
            Freed::NotHeld => {
                state.stats.invalid_frees += 1;
                FreeOutcome::Repeated
            }
            Freed::Unknown => FreeOutcome::NotOurs,
        }
    }

    /// Goes on with [`free`](Self::free) on all other devices than `hint`, for which `outcome` was found.
    #[cold]
    fn free_elsewhere(&self, address: DevicePtr, hint: DeviceId, mut outcome: FreeOutcome) -> FreeOutcome {
        for device in self.devices.starting_with(hint).filter(|device| device.id != hint) {
            match self.free_on(device, address) {
                FreeOutcome::NotOurs => {}
                FreeOutcome::Leaked => outcome = FreeOutcome::Leaked,
                found => return found,
            }
        }
        if outcome == FreeOutcome::NotOurs
            && let Some(device) = self.devices.starting_with(hint).next()
            && let Ok(mut state) = device.fast()
        {
            state.stats.invalid_frees += 1;
        }
        outcome
    }

    /// Gives events to the streams that a freed block waits for. If that fails, a later event answers for them.
    #[cold]
    fn close(&self, device: &Device, closings: Vec<Closing>) {
        if !closings.is_empty() {
            let outcome = execute(&self.driver, Plan::Close(closings));
            if let Ok(mut state) = device.fast() {
                let _ = state.commit(outcome);
            }
        }
    }

    /// Sets what is run, under no lock, before a request fails for want of memory. `None` for nothing.
    pub fn set_oom_callback(&self, callback: Option<OomCallback>) {
        if let Ok(mut current) = self.callback.lock() {
            *current = callback;
        }
    }
}

/// Whether a rung waits on the host for what streams were given, and so must hold no lock.
///
/// Giving memory back may wait too, inside the driver, but happens under the slow lock: until the state has heard of it,
/// nobody may obtain the same addresses anew, or fail for want of memory that is on its way back. Only what goes back to a
/// source of the program's own is under way without a lock.
fn may_wait(rung: Rung) -> bool {
    matches!(rung, Rung::Wait | Rung::Synchronize | Rung::CloseAll | Rung::ClosePending)
}
