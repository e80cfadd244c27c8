//! Private pools with sources of their own, and what holds of their memory at any time.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use alloc_core::{
    driver::sim::{Mishap, SimSource},
    error::AllocError,
    id::{DeviceId, DevicePtr, PoolId},
    source::SourceError,
};

use crate::{
    model::{Pool, Routed},
    operation::Pick,
    world::{Failure, Step, World, ensure, picked},
};

/// A source of segments.
pub(crate) struct ProgramSource {
    pub(crate) source: SimSource,
    pub(crate) device: DeviceId,
    pub(crate) pool: PoolId,
    /// Dead once the allocator has dropped it.
    pub(crate) given: Weak<SimSource>,
}

/// Whether the program gives pools of this name a source.
pub(crate) fn is_sourced(id: PoolId) -> bool {
    id.0 == 4 || id.1 > 2
}

impl World {
    pub(crate) fn begin_sourced(&mut self, pool: Pick, stream: Pick) -> Result<Step, Failure> {
        let Some(slot) = self.eager_stream(stream) else { return Ok(Step::Skipped) };
        let id = PoolId(0, 3 + u64::from(pool) % 2);
        let begun = self.begin(id, slot, Routed::Stream(slot), false)?;
        Ok(if begun.is_some() { Step::Executed } else { Step::Skipped })
    }

    /// Makes the pool with a source, unless it is there; false if a fault prevented it.
    pub(crate) fn make_sourced(&mut self, device: DeviceId, id: PoolId, is_for_graphs: bool) -> Result<bool, Failure> {
        if self.pools.iter().any(|pool| pool.users > 0 && (pool.device, pool.id) == (device, id)) {
            return Ok(true);
        }
        let source = SimSource::new(self.gpu.driver());
        let given = Arc::new(source.clone());
        let alive = Arc::downgrade(&given);
        let faults = self.faults_hit();
        match self.gpu.allocator().create_pool_from(device, id, given) {
            Ok(()) => {}
            Err(AllocError::Driver(_)) if self.faults_hit() > faults => return Ok(false),
            Err(error) => return Err(format!("the pool cannot be made: {error}")),
        }
        self.gpu.driver().pool_begun(device, id);
        self.coverage.on_pool(self.pools.iter().any(|pool| (pool.device, pool.id) == (device, id)));
        let source_at = Some(self.sources.len());
        self.sources.push(ProgramSource { source, device, pool: id, given: alive });
        let used_on = std::collections::BTreeSet::new();
        self.pools.push(Pool { device, id, users: 1, source: source_at, is_for_graphs, used_on });
        Ok(true)
    }

    pub(crate) fn mishap(&mut self, source: Pick, what: Mishap) -> Step {
        let Some(position) = picked(source, self.sources.len()) else { return Step::Skipped };
        self.sources[position].source.fail_next(what);
        // It is the calls that meet it that count.
        Step::Skipped
    }

    /// Whether an error is a source's, and the source has done something to cause it.
    pub(crate) fn is_mishap(&self, error: &AllocError) -> bool {
        let AllocError::Source(error) = error else { return false };
        let count = |of: fn(&SimSource) -> u64| self.sources.iter().map(|source| of(&source.source)).sum::<u64>();
        match error {
            SourceError::NotObtained { .. } => count(|source| source.counts().failed) > 0,
            SourceError::Unusable { .. } => count(|source| source.counts().unusable) > 0,
            SourceError::NotTakenBack { .. } => count(|source| source.counts().kept) > 0,
            SourceError::PoolExists { .. } | SourceError::NotShareable { .. } => false,
        }
    }

    /// How often sources have gone wrong so far, or had nothing.
    pub(crate) fn mishaps(&self) -> u64 {
        let of = |source: &ProgramSource| {
            let counts = source.source.counts();
            counts.empty + counts.failed + counts.unusable + counts.kept
        };
        self.sources.iter().map(of).sum()
    }

    /// The segments of a sourced pool are what its sources have given and not got back: none moves, none goes elsewhere,
    /// none is of another origin; and no block of another pool lies in them.
    pub(crate) fn check_sources(&self) -> Result<(), Failure> {
        let snapshot = self.gpu.allocator().snapshot();
        for source in &self.sources {
            source.source.check()?;
        }
        let mut given: BTreeMap<DevicePtr, (DeviceId, PoolId, u64)> = BTreeMap::new();
        for ProgramSource { source, device, pool, .. } in &self.sources {
            given.extend(source.segments(*device).into_iter().map(|(address, size)| (address, (*device, *pool, size))));
        }
        let of_sources = snapshot.iter().filter(|segment| is_sourced(segment.pool));
        let shown: BTreeMap<_, _> =
            of_sources.map(|segment| (segment.address, (segment.device, segment.pool, segment.size))).collect();
        ensure(shown == given, || format!("sources gave {given:?}, the snapshot shows {shown:?}"))?;
        for held in &self.held {
            let lies_in =
                given.range(..=held.address).next_back().filter(|(base, (_, _, size))| held.address.0 < base.0 + size);
            let source = held.pool.and_then(|pool| self.pools[pool].source);
            let own = source.map(|source| self.sources[source].source.segments(held.device));
            match (lies_in, own) {
                (None, None) => {}
                (Some((base, _)), Some(own)) if own.contains_key(base) => {}
                _ => return Err(format!("{held:?} lies in {lies_in:?}")),
            }
        }
        Ok(())
    }

    /// At the end of a program: every source has got everything back, and was let go.
    pub(crate) fn finish_sources(&mut self) -> Result<(), Failure> {
        for ProgramSource { source, device, given, .. } in &self.sources {
            let left = source.segments(*device);
            ensure(left.is_empty(), || format!("a source did not get {left:?} back"))?;
            ensure(given.upgrade().is_none(), || "a source is kept although nothing is left of its pool".to_owned())?;
            self.coverage.on_source(source.counts());
        }
        self.check_sources()
    }
}
