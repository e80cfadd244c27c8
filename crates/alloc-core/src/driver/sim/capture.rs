//! Stream captures, and the graphs they become.
//!
//! Within a capture nothing runs, so it has clocks and a shadow of its own: they find races between the captured
//! kernels themselves. Towards everything outside, a replay is one launch that uses all that was captured.

use std::collections::BTreeMap;
use std::thread::ThreadId;

use super::access::Access;
use super::clock::{StreamIndex, VectorClock};
use super::shadow::Shadow;
use super::timeline::Mark;
use crate::driver::{CaptureMode, CaptureStatus, Status};

/// A capture. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CaptureId(u64);

/// A graph that a capture became.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GraphId(pub u64);

/// Captured kernels, in the order of their launches.
#[derive(Clone, Debug, Default)]
pub(super) struct Captured {
    pub(super) accesses: Vec<Access>,
    pub(super) duration_ns: u64,
}

/// What a capture became.
#[derive(Debug)]
struct Graph {
    captured: Captured,
    /// The end of its last replay: CUDA starts a graph only after its own last launch has ended.
    last_replay: Option<Mark>,
}

/// A capture under way.
#[derive(Debug)]
pub(super) struct Capture {
    mode: CaptureMode,
    thread: ThreadId,
    origin: StreamIndex,
    /// The streams that take part, each with what happens before its next captured kernel.
    members: BTreeMap<StreamIndex, VectorClock>,
    pub(super) captured: Captured,
    pub(super) shadow: Shadow,
    is_spoiled: bool,
}

impl Capture {
    /// Counts a captured kernel on `stream`; returns its number there and what happens before it.
    pub(super) fn tick(&mut self, stream: StreamIndex) -> (u64, VectorClock) {
        let clock = self.members.entry(stream).or_default();
        (clock.tick(stream), clock.clone())
    }

    /// Whether the origin has waited for the last captured work of every stream that takes part.
    fn is_joined(&self) -> bool {
        let origin = &self.members[&self.origin];
        self.members.iter().all(|(&stream, clock)| origin.covers(stream, clock.epoch(stream)))
    }
}

/// The captures under way and the graphs that exist.
#[derive(Debug, Default)]
pub(super) struct Captures {
    ongoing: BTreeMap<CaptureId, Capture>,
    graphs: BTreeMap<GraphId, Graph>,
    last_capture: u64,
    last_graph: u64,
}

impl Captures {
    /// Starts a capture on `origin`.
    pub(super) fn begin(&mut self, origin: StreamIndex, mode: CaptureMode) -> Result<(), Status> {
        if self.of(origin).is_some() {
            return Err(Status::InvalidValue);
        }
        self.last_capture += 1;
        let capture = Capture {
            mode,
            thread: std::thread::current().id(),
            origin,
            members: BTreeMap::from([(origin, VectorClock::default())]),
            captured: Captured::default(),
            shadow: Shadow::default(),
            is_spoiled: false,
        };
        self.ongoing.insert(CaptureId(self.last_capture), capture);
        Ok(())
    }

    /// Ends the capture that `origin` began. It is over also if it cannot become a graph.
    pub(super) fn end(&mut self, origin: StreamIndex) -> Result<GraphId, Status> {
        let id = self.of(origin).ok_or(Status::InvalidValue)?;
        let capture = &self.ongoing[&id];
        if capture.origin != origin {
            self.spoil(id);
            return Err(Status::CAPTURE_UNMATCHED);
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != std::thread::current().id() {
            return Err(Status::CAPTURE_WRONG_THREAD);
        }
        let is_joined = capture.is_joined();
        let Some(capture) = self.ongoing.remove(&id) else { return Err(Status::InvalidValue) };
        if capture.is_spoiled {
            return Err(Status::CaptureInvalidated);
        }
        if !is_joined {
            return Err(Status::CAPTURE_UNJOINED);
        }
        self.last_graph += 1;
        let graph = GraphId(self.last_graph);
        self.graphs.insert(graph, Graph { captured: capture.captured, last_replay: None });
        Ok(graph)
    }

    /// Gives up the capture that `origin` began.
    pub(super) fn abort(&mut self, origin: StreamIndex) -> Result<(), Status> {
        let id = self.of(origin).ok_or(Status::InvalidValue)?;
        self.ongoing.remove(&id);
        Ok(())
    }

    /// Gives up all captures and destroys all graphs.
    pub(super) fn clear(&mut self) {
        self.ongoing.clear();
        self.graphs.clear();
    }

    pub(super) fn graph(&self, graph: GraphId) -> Result<&Captured, Status> {
        self.graphs.get(&graph).map(|graph| &graph.captured).ok_or(Status::InvalidValue)
    }

    /// The end of the last replay of `graph`.
    pub(super) fn last_replay(&self, graph: GraphId) -> Option<&Mark> {
        self.graphs.get(&graph)?.last_replay.as_ref()
    }

    /// Notes the end of a replay that was just queued.
    pub(super) fn on_replayed(&mut self, graph: GraphId, end: Mark) {
        if let Some(graph) = self.graphs.get_mut(&graph) {
            graph.last_replay = Some(end);
        }
    }

    pub(super) fn destroy_graph(&mut self, graph: GraphId) -> Result<(), Status> {
        self.graphs.remove(&graph).map(|_| ()).ok_or(Status::InvalidValue)
    }

    /// The capture that `stream` takes part in.
    pub(super) fn of(&self, stream: StreamIndex) -> Option<CaptureId> {
        self.ongoing.iter().find(|(_, capture)| capture.members.contains_key(&stream)).map(|(&id, _)| id)
    }

    pub(super) fn status(&self, stream: StreamIndex) -> CaptureStatus {
        match self.of(stream) {
            None => CaptureStatus::None,
            Some(id) if self.ongoing[&id].is_spoiled => CaptureStatus::Invalidated,
            Some(_) => CaptureStatus::Active,
        }
    }

    /// The capture that `stream` takes part in, if it can still take work; an error if it was spoiled.
    pub(super) fn active(&mut self, stream: StreamIndex) -> Result<Option<&mut Capture>, Status> {
        let Some(id) = self.of(stream) else { return Ok(None) };
        match self.ongoing.get_mut(&id) {
            Some(capture) if !capture.is_spoiled => Ok(Some(capture)),
            _ => Err(Status::CaptureInvalidated),
        }
    }

    /// The program makes `waiting` wait for `awaited`, of which at least one is capturing.
    pub(super) fn wait(&mut self, waiting: StreamIndex, awaited: StreamIndex) -> Result<(), Status> {
        self.active(waiting)?;
        self.active(awaited)?;
        match (self.of(waiting), self.of(awaited)) {
            (Some(mine), None) => {
                self.spoil(mine);
                Err(Status::CaptureIsolation)
            }
            (Some(mine), Some(theirs)) if mine != theirs => {
                self.spoil(mine);
                self.spoil(theirs);
                Err(Status::CAPTURE_MERGE)
            }
            (is_member, Some(capture)) => {
                if let Some(capture) = self.ongoing.get_mut(&capture) {
                    let awaited = capture.members[&awaited].clone();
                    let clock = capture.members.entry(waiting).or_default();
                    clock.join(&awaited);
                    if is_member.is_none() {
                        // A stream that joins has to be waited for, even if it gets no kernel.
                        clock.tick(waiting);
                    }
                }
                Ok(())
            }
            (None, None) => Ok(()),
        }
    }

    /// Makes a capture useless.
    pub(super) fn spoil(&mut self, id: CaptureId) {
        if let Some(capture) = self.ongoing.get_mut(&id) {
            capture.is_spoiled = true;
        }
    }

    /// Spoils the captures that forbid the calling thread, in capture mode `mode`, its unsafe calls.
    pub(super) fn refuse_unsafe(&mut self, mode: CaptureMode) -> Result<(), Status> {
        let thread = std::thread::current().id();
        let forbids = |capture: &Capture| {
            let is_own = capture.thread == thread && capture.mode != CaptureMode::Relaxed;
            let is_global = capture.mode == CaptureMode::Global && mode == CaptureMode::Global;
            mode != CaptureMode::Relaxed && (is_own || is_global)
        };
        self.refuse(forbids)
    }

    /// Spoils the captures in which one of `streams` takes part.
    pub(super) fn refuse_streams(&mut self, is_meant: impl Fn(StreamIndex) -> bool) -> Result<(), Status> {
        self.refuse(|capture| capture.members.keys().any(|&stream| is_meant(stream)))
    }

    fn refuse(&mut self, forbids: impl Fn(&Capture) -> bool) -> Result<(), Status> {
        let mut result = Ok(());
        for capture in self.ongoing.values_mut().filter(|capture| forbids(capture)) {
            capture.is_spoiled = true;
            result = Err(Status::CaptureUnsupported);
        }
        result
    }
}

/// Statuses that only a program's own calls meet, never the allocator's.
impl Status {
    const CAPTURE_MERGE: Self = Self::Other(902);
    const CAPTURE_UNMATCHED: Self = Self::Other(903);
    const CAPTURE_UNJOINED: Self = Self::Other(904);
    const CAPTURE_WRONG_THREAD: Self = Self::Other(908);
}
