//! How often a run came by each transition, each rung of the ladder and each failure of a driver call.
//!
//! A property over generated programs is worth what its programs reach, so a run that reaches something too seldom fails.

use std::{collections::BTreeMap, fmt};

use alloc_core::{
    Rung,
    allocator::FreeOutcome,
    driver::{Call, sim::SourceCounts},
    history::Action,
    simulated_gpu::SimulatedGpu,
};

use crate::{
    operation::{End, FAULTS},
    world::DEVICES,
};

/// What a run has to reach each thing for, so that its silence means something.
pub(crate) const REACHED_MIN: u64 = 100;

/// Transitions that neither the history nor a rung tells of, by the name that the report gives them.
const TRANSITIONS: [&str; 31] = [
    "alloc",
    "bad free: foreign",
    "bad free: null",
    "bad free: repeated",
    "capture aborted",
    "capture failed",
    "capture to graph",
    "coalesce",
    "dead stream",
    "deferred",
    "free_completed",
    "free_requested",
    "graph replayed",
    "oom",
    "pending",
    "pool begun",
    "pool kept in place",
    "pool revived",
    "quarantined",
    "reserve",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "source failed",
    "source gave",
    "source had nothing",
    "source kept back",
    "source took back",
    "source unusable",
    "split",
];

/// See the [module](self).
#[derive(Clone, Debug, Default)]
pub(crate) struct Coverage {
    transitions: BTreeMap<&'static str, u64>,
    rungs: [u64; Rung::ALL.len()],
    failures: BTreeMap<Call, u64>,
}

impl Coverage {
    fn count(&mut self, transition: &'static str, times: u64) {
        debug_assert!(TRANSITIONS.contains(&transition), "{transition} is not in the report");
        *self.transitions.entry(transition).or_default() += times;
    }

    /// The number of blocks changed although no memory was obtained or returned: blocks were split or united.
    pub(crate) fn on_blocks(&mut self, before: usize, after: usize) {
        self.count("split", after.saturating_sub(before) as u64);
        self.count("coalesce", before.saturating_sub(after) as u64);
    }

    pub(crate) fn on_bad_free(&mut self, outcome: FreeOutcome) {
        match outcome {
            FreeOutcome::Null => self.count("bad free: null", 1),
            FreeOutcome::NotOurs => self.count("bad free: foreign", 1),
            FreeOutcome::Repeated => self.count("bad free: repeated", 1),
            FreeOutcome::Freed | FreeOutcome::Leaked => {}
        }
    }

    pub(crate) fn on_capture(&mut self, how: End, is_graph: bool) {
        match (how, is_graph) {
            (_, true) => self.count("capture to graph", 1),
            (End::Aborted, false) => self.count("capture aborted", 1),
            (End::Joined | End::Unjoined, false) => self.count("capture failed", 1),
        }
    }

    pub(crate) fn on_replay(&mut self) {
        self.count("graph replayed", 1);
    }

    pub(crate) fn on_pool(&mut self, is_revived: bool) {
        self.count(if is_revived { "pool revived" } else { "pool begun" }, 1);
    }

    pub(crate) fn on_restricted_pool(&mut self) {
        self.count("pool kept in place", 1);
    }

    pub(crate) fn on_source(&mut self, counts: SourceCounts) {
        let SourceCounts { given, taken_back, empty, failed, unusable, kept } = counts;
        self.count("source gave", given);
        self.count("source took back", taken_back);
        self.count("source had nothing", empty);
        self.count("source failed", failed);
        self.count("source unusable", unusable);
        self.count("source kept back", kept);
    }

    /// Takes over what the allocator and the driver counted by the end of a program.
    pub(crate) fn on_program(&mut self, gpu: &SimulatedGpu) {
        for device in DEVICES {
            for event in gpu.allocator().history(device) {
                self.count(Action::name(event.action), 1);
            }
            let stats = gpu.allocator().stats(device);
            self.count("pending", stats.pending_frees);
            self.count("deferred", stats.deferred_frees);
            self.count("quarantined", stats.quarantined_blocks);
            self.count("dead stream", stats.dead_streams);
            for (total, count) in self.rungs.iter_mut().zip(stats.rungs) {
                *total += count;
            }
        }
        let driver = gpu.driver();
        let failed = |call| driver.failure_count(call);
        self.count("reserve", driver.call_count(Call::ReserveRange) - failed(Call::ReserveRange));
        for call in Call::ALL {
            *self.failures.entry(*call).or_default() += failed(*call);
        }
    }

    /// Adds what another run reached.
    pub(crate) fn add(&mut self, other: &Self) {
        for (transition, count) in &other.transitions {
            self.count(transition, *count);
        }
        for (call, count) in &other.failures {
            *self.failures.entry(*call).or_default() += count;
        }
        for (total, count) in self.rungs.iter_mut().zip(other.rungs) {
            *total += count;
        }
    }

    /// Everything that a run has to reach, with how often it did.
    fn entries(&self) -> impl Iterator<Item = (&'static str, String, u64)> {
        let transitions = TRANSITIONS
            .map(|name| ("transition", name.to_owned(), self.transitions.get(name).copied().unwrap_or_default()));
        let rungs = Rung::ALL.map(|rung| ("rung", format!("{rung:?}"), self.rungs[rung as usize]));
        let failing = Call::ALL.iter().filter(|call| FAULTS.iter().any(|(faulty, _)| faulty == *call));
        let failures: Vec<_> = failing
            .map(|call| ("failing call", call.name().to_owned(), self.failures.get(call).copied().unwrap_or_default()))
            .collect();
        transitions.into_iter().chain(rungs).chain(failures)
    }

    /// What was reached less often than it has to be.
    pub(crate) fn missed(&self) -> Vec<String> {
        let seldom = self.entries().filter(|(_, _, count)| *count < REACHED_MIN);
        seldom.map(|(kind, name, count)| format!("{kind} {name}: {count}")).collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, name, count) in self.entries() {
            writeln!(formatter, "{kind:<13} {name:<36} {count:>9}")?;
        }
        Ok(())
    }
}
