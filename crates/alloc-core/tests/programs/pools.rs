//! The program's calls about private pools, and the order that the uses of a graph pool need.

use std::collections::BTreeSet;

use alloc_core::{
    config::{Move, Policy},
    error::{AllocError, MoveError},
    id::PoolId,
    simulated_gpu::SimulatedGpuError,
};

use crate::{
    model::{Held, Pool, Route, Routed, Slot},
    operation::Pick,
    sources::is_sourced,
    world::{Failure, Step, World, is_refusal, picked, text},
};

impl World {
    /// Begins a private pool, or one more use of it; `None` if a fault prevented it.
    pub(crate) fn begin(
        &mut self,
        id: PoolId,
        slot: Slot,
        of: Routed,
        is_for_graphs: bool,
    ) -> Result<Option<usize>, Failure> {
        let handle = self.enter(slot);
        let device = self.streams[slot].device;
        if is_sourced(id) && !self.make_sourced(device, id, is_for_graphs)? {
            return Ok(None);
        }
        let faults = self.faults_hit();
        match self.gpu.begin_pool(id, handle) {
            Ok(()) => {}
            Err(error) if is_refusal(&error) && self.faults_hit() > faults => return Ok(None),
            Err(error) => return Err(format!("the pool cannot begin: {error}")),
        }
        let is_it = |pool: &Pool| pool.users > 0 && (pool.device, pool.id) == (device, id);
        let position = self.pools.iter().position(is_it).unwrap_or_else(|| {
            let is_revived = self.pools.iter().any(|pool| (pool.device, pool.id) == (device, id));
            self.coverage.on_pool(is_revived);
            self.pools.push(Pool { device, id, users: 0, source: None, is_for_graphs, used_on: BTreeSet::new() });
            self.pools.len() - 1
        });
        self.pools[position].users += 1;
        self.routes.push(Route { of, pool: position });
        Ok(Some(position))
    }

    pub(crate) fn begin_pool(&mut self, pool: Pick, stream: Pick) -> Result<Step, Failure> {
        let Some(slot) = self.eager_stream(stream) else { return Ok(Step::Skipped) };
        let id = PoolId(0, 1 + u64::from(pool) % 2);
        let begun = self.begin(id, slot, Routed::Stream(slot), false)?;
        Ok(if begun.is_some() { Step::Executed } else { Step::Skipped })
    }

    pub(crate) fn end_pool(&mut self, pool: Pick) -> Result<Step, Failure> {
        let of_streams = |route: &&Route| matches!(route.of, Routed::Stream(_));
        let routes: Vec<Route> = self.routes.iter().filter(of_streams).copied().collect();
        let Some(position) = picked(pool, routes.len()) else { return Ok(Step::Skipped) };
        let pool = routes[position].pool;
        // It is the last begin of the pool that an end answers.
        let last = self.routes.iter().rposition(|route| route.pool == pool).expect("there is one");
        self.routes.remove(last);
        self.gpu.set_current_device(self.pools[pool].device).map_err(text)?;
        self.gpu.end_pool(self.pools[pool].id).map_err(text)?;
        Ok(Step::Executed)
    }

    /// Has a pool's memory stay where it is, if the pool has none yet; the scan after each step sees what lies
    /// in pieces, and the allocator's own assertions what moves.
    pub(crate) fn restrict_moves(&mut self, pool: Pick, moving: Move) -> Result<Step, Failure> {
        let live: Vec<usize> = (0..self.pools.len()).filter(|pool| self.pools[*pool].users > 0).collect();
        let Some(position) = picked(pool, live.len()) else { return Ok(Step::Skipped) };
        let Pool { device, id, .. } = self.pools[live[position]];
        self.gpu.set_current_device(device).map_err(text)?;
        match self.gpu.restrict_moves(id, moving) {
            Ok(()) => {
                // Under the other policies nothing moves anyway.
                if self.gpu.allocator().config().policy == Policy::Rallocator {
                    self.coverage.on_restricted_pool();
                }
                Ok(Step::Executed)
            }
            Err(SimulatedGpuError::Alloc(AllocError::Move(
                MoveError::HasMemory { .. } | MoveError::PolicyPutsTogether,
            ))) => Ok(Step::Skipped),
            Err(error) => Err(format!("the pool cannot be kept in place: {error}")),
        }
    }

    pub(crate) fn release_pool(&mut self, pool: Pick) -> Result<Step, Failure> {
        let routes_of = |pool: usize| self.routes.iter().filter(|route| route.pool == pool).count() as u32;
        let is_releasable =
            |pool: &usize| !self.pools[*pool].is_for_graphs && self.pools[*pool].users > routes_of(*pool);
        let pools: Vec<usize> = (0..self.pools.len()).filter(is_releasable).collect();
        let Some(position) = picked(pool, pools.len()) else { return Ok(Step::Skipped) };
        self.release(pools[position])?;
        Ok(Step::Executed)
    }

    /// One user less of a pool.
    pub(crate) fn release(&mut self, pool: usize) -> Result<(), Failure> {
        self.pools[pool].users -= 1;
        self.gpu.set_current_device(self.pools[pool].device).map_err(text)?;
        self.gpu.release_pool(self.pools[pool].id).map_err(text)
    }

    /// The graph pool that a block came from.
    pub(crate) fn graph_pool_of(&self, held: &Held) -> Option<usize> {
        held.pool.filter(|pool| self.pools[*pool].is_for_graphs)
    }

    /// Whether a stream's next work can come after all uses of a graph pool so far.
    pub(crate) fn can_follow_pool(&self, slot: Slot, pool: usize) -> bool {
        self.pools[pool].used_on.iter().all(|on| *on == slot || self.can_wait(slot, *on))
    }

    pub(crate) fn follow_pool(&mut self, slot: Slot, pool: usize) -> Result<(), Failure> {
        for on in std::mem::replace(&mut self.pools[pool].used_on, BTreeSet::from([slot])) {
            if on != slot {
                self.wait(slot, on)?;
            }
        }
        Ok(())
    }

    /// Whether some stream's requests go to a private pool without a capture.
    pub(crate) fn is_routed(&self, slot: Slot) -> bool {
        self.routes.iter().any(|route| route.of == Routed::Stream(slot))
    }

    /// The private pool that a stream's requests go to: that of the last route that takes it.
    pub(crate) fn expected_pool(&self, slot: Slot) -> Option<usize> {
        let capture = self.capture_of(slot).map(|capture| self.captures[capture].number);
        let takes = |route: &&Route| match route.of {
            Routed::Stream(of) => of == slot,
            Routed::Capture(number) => capture == Some(number),
        };
        self.routes.iter().rev().find(takes).map(|route| route.pool)
    }

    pub(crate) fn end_all_routes(&mut self) -> Result<(), Failure> {
        while !self.routes.is_empty() {
            self.end_pool(0)?;
        }
        Ok(())
    }

    pub(crate) fn release_all_pools(&mut self) -> Result<(), Failure> {
        self.end_all_routes()?;
        for pool in 0..self.pools.len() {
            while self.pools[pool].users > 0 {
                self.release(pool)?;
            }
        }
        Ok(())
    }
}
