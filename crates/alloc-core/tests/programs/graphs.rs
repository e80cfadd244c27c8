//! The program's calls about captures and graphs.

use std::collections::BTreeSet;

use alloc_core::{
    driver::{CaptureMode, sim::SimError},
    id::{PoolId, StreamHandle},
    simulated_gpu::SimulatedGpuError,
};

use crate::{
    model::{Capture, Graph, Routed, Slot},
    operation::{End, Pick, Settle},
    world::{Failure, Step, World, ensure, picked, text},
};

/// Captures under way at once, at most.
const CAPTURES_MAX: usize = 2;

impl World {
    pub(crate) fn begin_capture(&mut self, stream: Pick, pool: Pick, mode: u8) -> Result<Step, Failure> {
        let Some(origin) = self.eager_stream(stream) else { return Ok(Step::Skipped) };
        // A fourth has a source of its own.
        let id = PoolId(1 + u64::from(pool) % 4, 0);
        let device = self.streams[origin].device;
        let is_busy = self
            .captures
            .iter()
            .any(|capture| (self.pools[capture.pool].device, self.pools[capture.pool].id) == (device, id));
        let is_legacy = self.streams[origin].handle == StreamHandle::DEFAULT;
        if is_legacy || is_busy || self.is_routed(origin) || self.captures.len() == CAPTURES_MAX {
            return Ok(Step::Skipped);
        }
        let number = self.next_number();
        let Some(pool) = self.begin(id, origin, Routed::Capture(number), true)? else { return Ok(Step::Skipped) };
        let mode = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed][usize::from(mode) % 3];
        let handle = self.enter(origin);
        self.gpu.begin_capture(handle, mode).map_err(text)?;
        self.captures.push(Capture {
            number,
            origin,
            members: BTreeSet::from([origin]),
            pool,
            outside: BTreeSet::new(),
            is_spoiled: false,
            faults_before: self.faults_hit(),
        });
        Ok(Step::Executed)
    }

    pub(crate) fn join(&mut self, capture: Pick, stream: Pick) -> Result<Step, Failure> {
        let Some(capture) = picked(capture, self.captures.len()) else { return Ok(Step::Skipped) };
        let Some(slot) = self.eager_stream(stream) else { return Ok(Step::Skipped) };
        let origin = self.captures[capture].origin;
        let is_elsewhere = self.streams[slot].device != self.streams[origin].device;
        let is_default = self.streams[slot].handle.is_default();
        if is_elsewhere || is_default || self.is_routed(slot) || self.captures[capture].is_spoiled {
            return Ok(Step::Skipped);
        }
        if let Err(error) = self.wait_in_driver(slot, origin) {
            return self.excuse(capture, error);
        }
        self.captures[capture].members.insert(slot);
        Ok(Step::Executed)
    }

    pub(crate) fn spoil(&mut self, capture: Pick, on: Pick) -> Result<Step, Failure> {
        let Some(capture) = picked(capture, self.captures.len()) else { return Ok(Step::Skipped) };
        let origin = self.captures[capture].origin;
        let same_device = |slot: &Slot| self.streams[*slot].device == self.streams[origin].device;
        let Some(on) = self.eager_stream(on).filter(same_device) else {
            return Ok(Step::Skipped);
        };
        ensure(self.wait_in_driver(origin, on).is_err(), || "a capture waits for work outside".to_owned())?;
        self.captures[capture].is_spoiled = true;
        Ok(Step::Executed)
    }

    /// Whether a fault that happened since a capture began may have made the allocator spoil it.
    fn may_be_spoiled_by_fault(&self, capture: usize) -> bool {
        self.faults_hit() > self.captures[capture].faults_before
    }

    /// Takes note of a capture that a fault has spoiled, if that is why a call was refused.
    pub(crate) fn excuse(&mut self, capture: usize, error: SimulatedGpuError) -> Result<Step, Failure> {
        if matches!(error, SimulatedGpuError::Sim(SimError::Refused { .. })) && self.may_be_spoiled_by_fault(capture) {
            self.captures[capture].is_spoiled = true;
            return Ok(Step::Skipped);
        }
        Err(text(error))
    }

    /// Orders a captured kernel after what the capture did before. Returns false if it cannot be captured.
    pub(crate) fn prepare_captured(&mut self, capture: usize, slot: Slot, blocks: &[usize]) -> Result<bool, Failure> {
        let reaches_all = blocks.iter().all(|block| self.reaches(self.streams[slot].device, self.held[*block].device));
        if self.captures[capture].is_spoiled || !reaches_all {
            return Ok(false);
        }
        let Capture { number, pool, .. } = self.captures[capture];
        for block in blocks {
            let held = &self.held[*block];
            let (own, is_own) = (held.own, self.is_own(slot, held));
            if held.pool != Some(pool) {
                if self.captures[capture].outside.insert(held.number) {
                    self.held[*block].holders += 1;
                }
                continue;
            }
            if is_own {
                continue;
            }
            if self.is_own(own, held)
                && self.captures[capture].members.contains(&own)
                && !self.captured_wait(capture, slot, own)?
            {
                return Ok(false);
            }
            let held = &mut self.held[*block];
            if !held.recorded.contains(&slot) {
                held.captured.insert((number, slot));
            }
        }
        Ok(true)
    }

    /// A wait inside a capture. Returns false if a fault has spoiled the capture.
    fn captured_wait(&mut self, capture: usize, slot: Slot, on: Slot) -> Result<bool, Failure> {
        match self.wait_in_driver(slot, on) {
            Ok(()) => Ok(true),
            Err(error) => self.excuse(capture, error).map(|_| false),
        }
    }

    /// Settles the uses of a block by captures under way: what comes next on its own stream may be captured too.
    pub(crate) fn settle_captured(&mut self, position: usize, by: Settle) -> Result<(), Failure> {
        let captured: Vec<(u64, Slot)> = self.held[position].captured.iter().copied().collect();
        for (number, slot) in captured {
            let capture = self.captures.iter().position(|capture| capture.number == number);
            let capture = capture.expect("what an ended capture used is settled");
            let held = &self.held[position];
            let own = held.own;
            let is_member = self.is_own(own, held) && self.captures[capture].members.contains(&own);
            // What a spoiled capture used will never run.
            if !self.captures[capture].is_spoiled {
                if by == Settle::Wait && is_member {
                    self.captured_wait(capture, own, slot)?;
                } else {
                    self.record_on(position, slot)?;
                }
            }
            self.held[position].captured.remove(&(number, slot));
        }
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, capture: Pick, how: End) -> Result<Step, Failure> {
        let Some(position) = picked(capture, self.captures.len()) else { return Ok(Step::Skipped) };
        let Capture { number, origin, pool, .. } = self.captures[position];
        let others: Vec<Slot> =
            self.captures[position].members.iter().copied().filter(|slot| *slot != origin).collect();
        if how == End::Joined {
            for slot in &others {
                if !self.captures[position].is_spoiled {
                    self.captured_wait(position, origin, *slot)?;
                }
            }
        }
        let handle = self.enter(origin);
        let may_fail = self.captures[position].is_spoiled
            || (how == End::Unjoined && !others.is_empty())
            || self.may_be_spoiled_by_fault(position);
        let id = if how == End::Aborted {
            self.gpu.abort_capture(handle).map_err(text)?;
            None
        } else {
            match self.gpu.end_capture(handle) {
                Ok(id) => Some(id),
                Err(_) if may_fail => None,
                Err(error) => return Err(format!("the capture failed: {error}")),
            }
        };
        self.coverage.on_capture(how, id.is_some());
        let capture = self.captures.remove(position);
        self.routes.retain(|route| route.of != Routed::Capture(number));
        self.enter(origin);
        self.gpu.end_pool(self.pools[pool].id).map_err(text)?;
        for held in &mut self.held {
            held.captured.retain(|(of, _)| *of != number);
        }
        let outside = if id.is_some() { capture.outside } else { self.let_go_of(&capture.outside) };
        self.graphs.push(Graph { id, pool, outside });
        Ok(Step::Executed)
    }

    /// A capture or graph no longer uses these blocks. Returns the empty set that it uses now.
    fn let_go_of(&mut self, outside: &BTreeSet<u64>) -> BTreeSet<u64> {
        for held in self.held.iter_mut().filter(|held| outside.contains(&held.number)) {
            held.holders -= 1;
        }
        BTreeSet::new()
    }

    pub(crate) fn replay(&mut self, graph: Pick, stream: Pick) -> Result<Step, Failure> {
        let Some(graph) = picked(graph, self.graphs.len()) else { return Ok(Step::Skipped) };
        let Some(slot) = self.eager_stream(stream) else { return Ok(Step::Skipped) };
        let Graph { id: Some(id), pool, outside } = self.graphs[graph].clone() else { return Ok(Step::Skipped) };
        let is_elsewhere = self.streams[slot].device != self.pools[pool].device;
        let is_outside = |position: &usize| outside.contains(&self.held[*position].number);
        let blocks: Vec<usize> = (0..self.held.len()).filter(is_outside).collect();
        if is_elsewhere || !self.can_follow_pool(slot, pool) || !self.prepare_all(slot, &blocks)? {
            return Ok(Step::Skipped);
        }
        self.follow_pool(slot, pool)?;
        let handle = self.enter(slot);
        self.gpu.replay(id, handle).map_err(text)?;
        self.coverage.on_replay();
        Ok(Step::Executed)
    }

    pub(crate) fn destroy_graph(&mut self, graph: Pick) -> Result<Step, Failure> {
        let Some(position) = picked(graph, self.graphs.len()) else { return Ok(Step::Skipped) };
        let graph = self.graphs.swap_remove(position);
        if let Some(id) = graph.id {
            self.gpu.destroy_graph(id).map_err(text)?;
        }
        self.let_go_of(&graph.outside);
        self.release(graph.pool)?;
        Ok(Step::Executed)
    }

    pub(crate) fn end_all_captures(&mut self) -> Result<(), Failure> {
        while !self.captures.is_empty() {
            self.end_capture(0, End::Aborted)?;
        }
        Ok(())
    }

    pub(crate) fn drop_all_graphs(&mut self) -> Result<(), Failure> {
        while !self.graphs.is_empty() {
            self.destroy_graph(0)?;
        }
        Ok(())
    }
}
