//! Failures that a test asks for.

use crate::driver::{Call, Status};

/// A failure that is still to come.
#[derive(Debug)]
struct Fault {
    /// Which call fails; `None` for any.
    call: Option<Call>,
    /// How many such calls succeed first.
    after: u64,
    /// With what; `None` for the status that fits the call.
    status: Option<Status>,
}

/// The failures still to come, in the order they were asked for.
#[derive(Debug, Default)]
pub(super) struct Faults {
    pending: Vec<Fault>,
}

impl Faults {
    /// Lets `after` more calls to `call` through and fails the one that follows, once.
    pub(super) fn fail_next(&mut self, call: Call, after: u64, status: Status) {
        self.pending.push(Fault { call: Some(call), after, status: Some(status) });
    }

    /// Lets `after` more calls of any kind through and fails the one that follows, once.
    pub(super) fn fail_any(&mut self, after: u64) {
        self.pending.push(Fault { call: None, after, status: None });
    }

    /// How many failures have not happened yet.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// The status that `call` has to fail with now, if any. Every pending failure that `call` matches counts it.
    pub(super) fn on_call(&mut self, call: Call) -> Option<Status> {
        let mut due = None;
        for (position, fault) in self.pending.iter_mut().enumerate() {
            if fault.call.is_some_and(|wanted| wanted != call) {
                continue;
            }
            if fault.after > 0 {
                fault.after -= 1;
            } else if due.is_none() {
                due = Some(position);
            }
        }
        let fault = self.pending.remove(due?);
        Some(fault.status.unwrap_or_else(|| fitting_status(call)))
    }
}

/// What `call` would most likely fail with.
fn fitting_status(call: Call) -> Status {
    match call {
        Call::Allocate | Call::CreateHandle | Call::ReserveRange | Call::Map | Call::SetAccess | Call::CreateEvent => {
            Status::OutOfMemory
        }
        Call::RecordEvent | Call::WaitEvent | Call::StreamContext | Call::CaptureStatus => Status::InvalidHandle,
        Call::Free | Call::FreeRange | Call::ReleaseHandle | Call::Unmap | Call::DestroyEvent => Status::InvalidValue,
        Call::ExportHandle | Call::ImportHandle | Call::GetTicket => Status::NotSupported,
        Call::Initialize => Status::NoDevice,
        Call::Attribute | Call::CanAccessPeer | Call::PrimaryContextState => Status::InvalidDevice,
        Call::CurrentContext
        | Call::RetainContext
        | Call::SetContext
        | Call::MemoryInfo
        | Call::OpenTicket
        | Call::CloseTicket => Status::InvalidContext,
        Call::QueryEvent | Call::SynchronizeEvent | Call::ExchangeCaptureMode | Call::SynchronizeDevice => {
            Status::Unknown
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_third_call_fails_once_after_two() {
        let mut faults = Faults::default();
        faults.fail_next(Call::SetAccess, 2, Status::OutOfMemory);
        let outcomes: Vec<_> = (0..4).map(|_| faults.on_call(Call::SetAccess)).collect();
        assert_eq!(outcomes, [None, None, Some(Status::OutOfMemory), None]);
    }

    #[test]
    fn other_calls_do_not_count() {
        let mut faults = Faults::default();
        faults.fail_next(Call::Map, 1, Status::Unknown);
        assert_eq!(faults.on_call(Call::Unmap), None);
        assert_eq!(faults.on_call(Call::Map), None);
        assert_eq!(faults.on_call(Call::Map), Some(Status::Unknown));
    }

    #[test]
    fn any_call_may_be_the_one_to_fail() {
        let mut faults = Faults::default();
        faults.fail_any(1);
        assert_eq!(faults.on_call(Call::Map), None);
        assert_eq!(faults.pending(), 1);
        assert_eq!(faults.on_call(Call::CreateHandle), Some(Status::OutOfMemory));
        assert_eq!(faults.pending(), 0);
    }
}
