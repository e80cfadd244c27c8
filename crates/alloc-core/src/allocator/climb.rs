//! A request that no cached block serves, from its first rung to its end.

use super::Device;
use crate::{device::Request, ladder::Ladder};

/// A request on its way up the ladder. It leaves its pool however that ends, also if the program's own code panics.
pub(super) struct Climb<'a> {
    device: &'a Device,
    pub(super) ladder: Ladder,
}

impl<'a> Climb<'a> {
    /// Begins on the first rung. The caller has counted the request among the pool's climbers.
    pub(super) fn new(device: &'a Device, request: Request) -> Self {
        Self { device, ladder: Ladder::new(request) }
    }
}

impl Drop for Climb<'_> {
    fn drop(&mut self) {
        if let Ok(mut state) = self.device.fast() {
            state.leave(&self.ladder);
        }
    }
}
