//! Giving back what is cached, because the program asks for it.

use super::{Allocator, Device};
use crate::{
    driver::Driver,
    error::AllocError,
    id::{DeviceId, PoolId},
    ladder::Rung,
};

impl<D: Driver> Allocator<D> {
    /// Returns cached memory to the driver, or to its source: all that is not held, pending, pinned or a live private
    /// pool's. Waits for queued work, but for what streams that are capturing still wait for.
    ///
    /// # Errors
    ///
    /// The first [`AllocError::Driver`] or [`AllocError::Source`] met; what could be returned is returned all the same.
    pub fn empty_cache(&self) -> Result<(), AllocError> {
        let mut result = Ok(());
        for device in self.devices.starting_with(DeviceId(0)) {
            result = result.and(self.empty_device(device, None));
        }
        result
    }

    /// Gives back what the device has cached, or only what a released private pool has.
    pub(super) fn empty_device(&self, device: &Device, only: Option<PoolId>) -> Result<(), AllocError> {
        let mut first_error: Option<AllocError> = None;
        for rung in Rung::EMPTY_CACHE {
            let mut slow = Some(device.slow()?);
            let Some(plan) = device.fast()?.plan_empty(rung, only) else { continue };
            let outcome = self.carry_out_locked(device, rung, plan, &mut slow)?;
            let news = device.arriving(&outcome);
            if let Err(error) = device.fast()?.commit(outcome) {
                first_error.get_or_insert(error);
            }
            drop(slow);
            self.tell(&news);
        }
        self.drop_unused_sources();
        first_error.map_or(Ok(()), Err)
    }
}
