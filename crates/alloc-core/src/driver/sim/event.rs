//! Events of the simulated driver.

use std::collections::BTreeMap;

use super::capture::CaptureId;
use super::timeline::Mark;
use crate::driver::Status;
use crate::id::{DeviceId, Event};

/// What an event was last recorded as.
#[derive(Clone, Debug)]
pub(super) enum Recorded {
    /// Nothing: it counts as reached.
    Never,
    /// A point in a stream's queue.
    Mark(Mark),
    /// A node of a capture: it can be neither queried nor waited for.
    Captured(CaptureId),
}

#[derive(Debug)]
struct EventState {
    device: DeviceId,
    recorded: Recorded,
}

/// All events that exist. A name is never used twice, so that the use of a destroyed event is always refused.
#[derive(Debug, Default)]
pub(super) struct Events {
    events: BTreeMap<Event, EventState>,
    last: u64,
}

impl Events {
    pub(super) fn create(&mut self, device: DeviceId) -> Event {
        self.last += 1;
        let event = Event(self.last);
        self.events.insert(event, EventState { device, recorded: Recorded::Never });
        event
    }

    pub(super) fn destroy(&mut self, device: DeviceId, event: Event) -> Result<(), Status> {
        self.of_device(device, event)?;
        self.events.remove(&event);
        Ok(())
    }

    pub(super) fn record(&mut self, event: Event, recorded: Recorded) {
        if let Some(state) = self.events.get_mut(&event) {
            state.recorded = recorded;
        }
    }

    /// What `event` was last recorded as, on whichever device.
    pub(super) fn recorded(&self, event: Event) -> Result<&Recorded, Status> {
        self.events.get(&event).map(|state| &state.recorded).ok_or(Status::InvalidHandle)
    }

    /// What `event` of `device` was last recorded as.
    pub(super) fn of_device(&self, device: DeviceId, event: Event) -> Result<&Recorded, Status> {
        match self.events.get(&event) {
            Some(state) if state.device == device => Ok(&state.recorded),
            _ => Err(Status::InvalidHandle),
        }
    }

    /// How many exist.
    pub(super) fn live(&self) -> usize {
        self.events.len()
    }
}
