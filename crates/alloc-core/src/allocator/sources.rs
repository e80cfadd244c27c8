//! Private pools whose segments come from a source of the program's own.

use std::sync::Arc;

use super::Allocator;
use crate::{
    driver::Driver,
    error::AllocError,
    execute::{execute, hand_back},
    id::{DeviceId, PoolId},
    plan::{Departure, Outcome, Plan},
    source::{Origin, SharedSource},
};

impl<D: Driver> Allocator<D> {
    /// Makes a private pool with one user whose segments `source` obtains and takes back, without routing requests to it.
    ///
    /// The source is kept until the pool is released and the last of its segments has gone back.
    ///
    /// # Errors
    ///
    /// [`AllocError::Source`] if there is a live pool of this name; those of bringing the device into use;
    /// [`AllocError::Broken`].
    pub fn create_pool_from(&self, device: DeviceId, pool: PoolId, source: SharedSource) -> Result<(), AllocError> {
        let device = self.device(device)?;
        self.keep_source(&source, AllocError::Broken { device: device.id })?;
        let created = device.fast()?.pools.create_from(pool, Origin::Source(source));
        self.drop_unused_sources();
        Ok(created.map(|_| ())?)
    }

    /// Gives a source back what cannot be used. What it says to that adds nothing: the request fails because of it already.
    pub(super) fn reject(&self, unusable: Departure) {
        if let Outcome::HandedBack(kept, Some(_)) = execute(self.driver(), Plan::HandBack(vec![unusable])) {
            // The driver refused the change of mode that spares captures, and this has to go back all the same.
            for (unusable, _) in &kept {
                let _ = hand_back(unusable);
            }
        }
    }

    /// Keeps one reference, so that the last one is dropped where no lock is held.
    fn keep_source(&self, source: &SharedSource, broken: AllocError) -> Result<(), AllocError> {
        let mut sources = self.sources.lock().map_err(|_| broken)?;
        if !sources.iter().any(|kept| Arc::ptr_eq(kept, source)) {
            sources.push(Arc::clone(source));
        }
        Ok(())
    }

    /// Drops the sources that nobody else names any more. The caller holds no lock.
    pub(super) fn drop_unused_sources(&self) {
        let Ok(mut sources) = self.sources.lock() else { return };
        let unused: Vec<SharedSource> = sources.extract_if(.., |source| Arc::strong_count(source) == 1).collect();
        drop(sources);
        drop(unused);
    }
}
