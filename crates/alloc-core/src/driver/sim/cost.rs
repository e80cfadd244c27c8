//! What each driver call costs the host, and the running account of it.
//!
//! The figures are medians measured on an H200 (`gpu-facts.md`). Set-access and unmap are charged for every handle in
//! the call: joining handles into one call was measured to save next to nothing.

use crate::driver::Call;

/// One microsecond, in the simulator's unit of time.
pub(super) const NANOSECONDS_PER_MICROSECOND: u64 = 1_000;

const MIB: u64 = 1 << 20;

/// Host time of one call, in nanoseconds: so much each time, and so much for every MiB it is about.
struct Cost {
    fixed_ns: u64,
    per_mib_ns: u64,
}

/// The measured cost of one `call`, or of one handle within it.
fn cost_of(call: Call) -> Cost {
    let (fixed_ns, per_mib_ns) = match call {
        Call::CreateHandle
        // Those between processes were not measured; this is a guess.
        | Call::ExportHandle
        | Call::ImportHandle
        | Call::GetTicket
        | Call::OpenTicket
        | Call::CloseTicket => (10_000, 0),
        Call::SetAccess => (25_000, 100),
        Call::Unmap => (16_000, 0),
        Call::ReleaseHandle => (10_000, 500),
        Call::Allocate => (41_000, 120),
        Call::Free => (35_000, 500),
        Call::MemoryInfo => (4_000, 0),
        Call::RecordEvent | Call::QueryEvent => (200, 0),
        Call::WaitEvent => (150, 0),
        Call::CreateEvent => (160, 0),
        Call::DestroyEvent => (120, 0),
        Call::CaptureStatus => (50, 0),
        Call::StreamContext => (41, 0),
        Call::CurrentContext => (36, 0),
        Call::ExchangeCaptureMode => (28, 0),
        Call::Map | Call::ReserveRange | Call::FreeRange | Call::SynchronizeEvent | Call::SynchronizeDevice => {
            (1_000, 0)
        }
        // Asked once per process or device; what they cost has no bearing on an allocator.
        Call::Initialize
        | Call::Attribute
        | Call::PrimaryContextState
        | Call::RetainContext
        | Call::SetContext
        | Call::CanAccessPeer => (0, 0),
    };
    Cost { fixed_ns, per_mib_ns }
}

/// Calls made, and the time the host spent in them and in waiting.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Calls made, in the order of [`Call::ALL`], failed ones too.
    calls: Vec<u64>,
    /// Those of them that failed.
    failures: Vec<u64>,
    /// Host time spent in calls, without waiting for the GPU.
    pub(super) elapsed_ns: u64,
    /// Times the host had to wait for queued work.
    pub(super) host_waits: u64,
    /// Host time spent waiting for queued work.
    pub(super) host_wait_ns: u64,
}

impl Ledger {
    pub(super) fn new() -> Self {
        let (calls, failures) = (vec![0; Call::ALL.len()], vec![0; Call::ALL.len()]);
        Self { calls, failures, elapsed_ns: 0, host_waits: 0, host_wait_ns: 0 }
    }

    /// Counts one `call` about one handle, or about none.
    pub(super) fn on_call(&mut self, call: Call) {
        self.calls[call as usize] += 1;
        self.elapsed_ns += cost_of(call).fixed_ns;
    }

    /// Counts one `call` that was made and failed.
    pub(super) fn on_failure(&mut self, call: Call) {
        self.failures[call as usize] += 1;
    }

    /// Charges what `call` costs more for being about `bytes`, in `handles` handles.
    pub(super) fn on_bytes(&mut self, call: Call, bytes: u64, handles: u64) {
        let cost = cost_of(call);
        self.elapsed_ns += bytes * cost.per_mib_ns / MIB + handles.saturating_sub(1) * cost.fixed_ns;
    }

    /// Counts one wait of the host.
    pub(super) fn on_host_wait(&mut self, waited_ns: u64) {
        self.host_waits += 1;
        self.host_wait_ns += waited_ns;
    }

    /// How often `call` was made.
    pub(super) fn calls_of(&self, call: Call) -> u64 {
        self.calls[call as usize]
    }

    /// How often `call` failed.
    pub(super) fn failures_of(&self, call: Call) -> u64 {
        self.failures[call as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_about_several_handles_costs_as_much_as_one_call_for_each() {
        let mut joined = Ledger::new();
        joined.on_call(Call::SetAccess);
        joined.on_bytes(Call::SetAccess, 40 * MIB, 2);
        let mut single = Ledger::new();
        for _ in 0..2 {
            single.on_call(Call::SetAccess);
            single.on_bytes(Call::SetAccess, 20 * MIB, 1);
        }
        assert_eq!(joined.elapsed_ns, 2 * 27_000);
        assert_eq!(joined.elapsed_ns, single.elapsed_ns);
    }

    #[test]
    fn calls_are_counted_under_their_own_name() {
        let mut ledger = Ledger::new();
        for &call in Call::ALL {
            ledger.on_call(call);
            assert_eq!(ledger.calls_of(call), 1, "{}", call.name());
        }
    }
}
