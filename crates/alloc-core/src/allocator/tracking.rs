//! Telling others which memory there is: a communicator, for instance, registers it with the network.
//!
//! A tracker is told of memory after it came and before it goes, under no lock. In between, what is at an address stays
//! there: from the first tracker on, no handle moves any more.

use std::sync::Arc;

use super::{Allocator, Device};
use crate::{
    block::BlockId,
    device::DeviceState,
    driver::Driver,
    error::AllocError,
    history::Action,
    id::{DeviceId, DevicePtr, PoolId, StreamHandle},
    plan::{Departure, Outcome, Plan, ReleaseRun, RunOutcome},
    pool_set::PoolIx,
};

/// Memory that came or goes: [`Action::SegmentAlloc`] and [`Action::SegmentFree`] for segments, [`Action::SegmentMap`] and
/// [`Action::SegmentUnmap`] for handles in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracked {
    /// Which of the four.
    pub action: Action,
    /// The device that the memory is on.
    pub device: DeviceId,
    /// The first byte.
    pub address: DevicePtr,
    /// Bytes.
    pub size: u64,
    /// The stream whose requests the memory serves.
    pub stream: StreamHandle,
    /// The private pool that it belongs to, or [`PoolId::DEFAULT`].
    pub pool: PoolId,
}

/// A function that is told. It is foreign code: it may call anything but wait for a thread that allocates.
pub type Tracker = Arc<dyn Fn(&Tracked) + Send + Sync>;

impl<D: Driver> Allocator<D> {
    /// Has a tracker told of all memory that comes and goes from now on, as long as the allocator lives.
    ///
    /// What there is already, [`snapshot`](Self::snapshot) lists.
    ///
    /// # Errors
    ///
    /// [`AllocError::Broken`] if a device is; the others are tracked.
    pub fn add_tracker(&self, tracker: Tracker) -> Result<(), AllocError> {
        let broken = AllocError::Broken { device: DeviceId(0) };
        // A device that comes into use meanwhile sees this, or is seen here.
        let _activation = self.devices.activation.lock().map_err(|_| broken.clone())?;
        self.trackers.lock().map_err(|_| broken)?.push(tracker);
        let mut result = Ok(());
        for device in self.devices.starting_with(DeviceId(0)) {
            result = result.and(device.fast().map(|mut state| state.is_tracked = true));
        }
        result
    }

    /// Whether there is a tracker.
    pub(super) fn is_tracked(&self) -> bool {
        self.trackers.lock().is_ok_and(|trackers| !trackers.is_empty())
    }

    /// Tells all trackers. The caller holds no lock.
    pub(super) fn tell(&self, news: &[Tracked]) {
        let trackers = self.trackers.lock().map(|trackers| trackers.clone()).unwrap_or_default();
        for event in news {
            for tracker in &trackers {
                tracker(event);
            }
        }
    }
}

impl Device {
    /// What goes if the plan is carried out.
    pub(super) fn leaving(&self, plan: &Plan) -> Vec<Tracked> {
        match plan {
            Plan::Release(_) | Plan::HandBack(_) => self.news(|state| state.leaving(plan)),
            _ => Vec::new(),
        }
    }

    /// What came, or was to go and stayed.
    pub(super) fn arriving(&self, outcome: &Outcome) -> Vec<Tracked> {
        self.news(|state| state.arriving(outcome))
    }

    fn news(&self, ask: impl FnOnce(&DeviceState) -> Vec<Tracked>) -> Vec<Tracked> {
        self.fast().map(|state| if state.is_tracked { ask(&state) } else { Vec::new() }).unwrap_or_default()
    }
}

impl DeviceState {
    fn leaving(&self, plan: &Plan) -> Vec<Tracked> {
        let release = match plan {
            Plan::Release(release) => release,
            Plan::HandBack(departures) => {
                return departures
                    .iter()
                    .map(|departure| self.about_departure(Action::SegmentFree, departure))
                    .collect();
            }
            _ => return Vec::new(),
        };
        let segments = release.segments.iter().map(|segment| self.about_block(Action::SegmentFree, segment.block));
        let runs = release.runs.iter().filter(|run| !run.is_stuck);
        segments.chain(runs.map(|run| self.about_run(Action::SegmentUnmap, run))).collect()
    }

    fn arriving(&self, outcome: &Outcome) -> Vec<Tracked> {
        match outcome {
            Outcome::Obtained(obtain, Ok(address)) => {
                vec![self.about(Action::SegmentAlloc, address.0, obtain.size, obtain.pool)]
            }
            Outcome::Mapped(map, Ok(_)) => {
                let pool = self.blocks[map.pieces[0]].pool;
                let about = |address, size| self.about(Action::SegmentMap, address, size, pool);
                map.holes.iter().map(|hole| about(hole.address, hole.size())).collect()
            }
            Outcome::Released(released) => {
                let kept = released.segments.iter().filter(|(_, is_freed)| !is_freed);
                let segments = kept.map(|(segment, _)| self.about_block(Action::SegmentAlloc, segment.block));
                let is_kept =
                    |(run, outcome): &&(ReleaseRun, RunOutcome)| matches!(outcome, RunOutcome::Kept) && !run.is_stuck;
                let kept = released.runs.iter().filter(is_kept);
                segments.chain(kept.map(|(run, _)| self.about_run(Action::SegmentMap, run))).collect()
            }
            Outcome::HandedBack(departures, _) => {
                let kept = departures.iter().filter(|(departure, result)| self.is_kept(departure, *result));
                kept.map(|(departure, _)| self.about_departure(Action::SegmentAlloc, departure)).collect()
            }
            _ => Vec::new(),
        }
    }

    fn about_departure(&self, action: Action, departure: &Departure) -> Tracked {
        self.about(action, departure.base.0, departure.size, departure.pool)
    }

    fn about_block(&self, action: Action, id: BlockId) -> Tracked {
        let block = &self.blocks[id];
        self.about(action, block.address, block.size, block.pool)
    }

    fn about_run(&self, action: Action, run: &ReleaseRun) -> Tracked {
        self.about(action, run.address.0, run.size, self.blocks[run.block].pool)
    }

    fn about(&self, action: Action, address: u64, size: u64, pool: PoolIx) -> Tracked {
        let stream = self.streams.target(self.pools[pool].stream).handle;
        Tracked { action, device: self.id, address: DevicePtr(address), size, stream, pool: self.pool_id(pool) }
    }
}
