//! The allocator over whichever driver it was installed with.
//!
//! One enum instead of a trait object: the branch is predicted, and the core's hot path stays visible to the compiler.

use std::collections::BTreeSet;

use alloc_core::allocator::{
    Allocator, FreeOutcome, Imported, RecordOutcome, Shared, SharedName, StreamFilter, Tracker,
};
use alloc_core::checkpoint::{Checkpoint, RestoreError, Restored};
use alloc_core::config::{Config, Move};
use alloc_core::driver::cuda::CudaDriver;
use alloc_core::driver::sim::{SimDriver, SimOptions};
use alloc_core::error::AllocError;
use alloc_core::history::{Recording, StackId};
use alloc_core::id::{DeviceId, DevicePtr, PoolId, StreamHandle};
use alloc_core::snapshot::{BlockPicture, DevicePicture};
use alloc_core::source::SharedSource;
use alloc_core::stats::{Family, Stats};

use crate::process::Simulated;
use crate::recording;

/// The allocator of this process.
pub(crate) enum Backend {
    /// On real GPUs.
    Cuda(Allocator<CudaDriver>),
    /// On simulated ones, which no kernel can use: for tests of what surrounds the allocator.
    Simulated(Allocator<SimDriver>),
}

/// Calls a method of the allocator, whichever it is.
macro_rules! on_allocator {
    ($backend:expr, $allocator:ident => $call:expr) => {
        match $backend {
            Backend::Cuda($allocator) => $call,
            Backend::Simulated($allocator) => $call,
        }
    };
}

impl Backend {
    /// An allocator with this configuration. Calls no driver.
    pub(crate) fn new(config: Config, simulated: Option<Simulated>) -> Self {
        let limit = config.history_limit;
        let backend = Self::over(config, simulated);
        if limit > 0 {
            // No device is in use yet, so none can be broken.
            let _ = backend.record_history(Some(&recording::recording(limit)), false);
        }
        backend
    }

    fn over(config: Config, simulated: Option<Simulated>) -> Self {
        match simulated {
            None => Self::Cuda(Allocator::new(CudaDriver::new(), config)),
            Some(Simulated { capacity_bytes, devices }) => {
                let options = SimOptions { capacity_bytes, devices, ..SimOptions::default() };
                Self::Simulated(Allocator::new(SimDriver::new(options), config))
            }
        }
    }

    pub(crate) fn malloc(
        &self,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
        pool: Option<PoolId>,
    ) -> Result<Option<DevicePtr>, AllocError> {
        on_allocator!(self, allocator => allocator.malloc(size, device, stream, pool))
    }

    pub(crate) fn route(&self, device: DeviceId, stream: StreamHandle) -> Option<PoolId> {
        on_allocator!(self, allocator => allocator.route(device, stream))
    }

    pub(crate) fn free(&self, pointer: DevicePtr, hint: DeviceId) -> FreeOutcome {
        on_allocator!(self, allocator => allocator.free(pointer, hint))
    }

    pub(crate) fn record_stream(&self, pointer: DevicePtr, stream: StreamHandle) -> RecordOutcome {
        on_allocator!(self, allocator => allocator.record_stream(pointer, stream))
    }

    pub(crate) fn begin_pool(&self, device: DeviceId, pool: PoolId, filter: StreamFilter) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.begin_pool(device, pool, filter))
    }

    pub(crate) fn end_pool(&self, device: DeviceId, pool: PoolId) {
        on_allocator!(self, allocator => allocator.end_pool(device, pool));
    }

    pub(crate) fn release_pool(&self, device: DeviceId, pool: PoolId) {
        on_allocator!(self, allocator => allocator.release_pool(device, pool));
    }

    pub(crate) fn empty_cache(&self) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.empty_cache())
    }

    pub(crate) fn base_allocation(&self, pointer: DevicePtr) -> Option<(DevicePtr, u64)> {
        on_allocator!(self, allocator => allocator.base_allocation(pointer))
    }

    pub(crate) fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.set_memory_fraction(device, fraction))
    }

    pub(crate) fn memory_fraction(&self, device: DeviceId) -> f64 {
        on_allocator!(self, allocator => allocator.memory_fraction(device))
    }

    pub(crate) fn retire_stream(&self, stream: StreamHandle) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.retire_stream(stream))
    }

    pub(crate) fn pin(&self, pointer: DevicePtr) -> bool {
        on_allocator!(self, allocator => allocator.pin(pointer))
    }

    pub(crate) fn unpin(&self, pointer: DevicePtr) -> bool {
        on_allocator!(self, allocator => allocator.unpin(pointer))
    }

    pub(crate) fn create_pool(&self, device: DeviceId, pool: PoolId) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.create_pool(device, pool))
    }

    /// See [`Allocator::create_pool_from`].
    pub(crate) fn create_pool_from(
        &self,
        device: DeviceId,
        pool: PoolId,
        source: SharedSource,
    ) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.create_pool_from(device, pool, source))
    }

    pub(crate) fn pool_users(&self, device: DeviceId, pool: PoolId) -> u32 {
        on_allocator!(self, allocator => allocator.pool_users(device, pool))
    }

    pub(crate) fn serve_when_out_of_memory(&self, device: DeviceId, pool: PoolId, serves: bool) -> bool {
        on_allocator!(self, allocator => allocator.serve_when_out_of_memory(device, pool, serves))
    }

    pub(crate) fn forbid_splits(&self, device: DeviceId, pool: PoolId) -> bool {
        on_allocator!(self, allocator => allocator.forbid_splits(device, pool))
    }

    /// See [`Allocator::restrict_moves`].
    pub(crate) fn restrict_moves(&self, device: DeviceId, pool: PoolId, moving: Move) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.restrict_moves(device, pool, moving))
    }

    pub(crate) fn empty_pool(&self, pool: PoolId) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.empty_pool(pool))
    }

    pub(crate) fn checkpoint_pool(&self, device: DeviceId, pool: PoolId) -> Option<Checkpoint> {
        on_allocator!(self, allocator => allocator.checkpoint_pool(device, pool))
    }

    pub(crate) fn restore_pool(&self, device: DeviceId, checkpoint: &Checkpoint) -> Result<Restored, RestoreError> {
        on_allocator!(self, allocator => allocator.restore_pool(device, checkpoint))
    }

    /// See [`Allocator::reach_peer`].
    pub(crate) fn reach_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.reach_peer(device, peer))
    }

    /// See [`Allocator::add_tracker`].
    pub(crate) fn add_tracker(&self, tracker: Tracker) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.add_tracker(tracker))
    }

    /// See [`Allocator::share`].
    pub(crate) fn share(&self, address: DevicePtr, abandon: impl FnMut(i32)) -> Result<Option<Shared>, AllocError> {
        on_allocator!(self, allocator => allocator.share(address, abandon))
    }

    /// See [`Allocator::import`].
    pub(crate) fn import(&self, device: DeviceId, name: &SharedName) -> Result<Imported, AllocError> {
        on_allocator!(self, allocator => allocator.import(device, name))
    }

    /// See [`Allocator::close_import`].
    pub(crate) fn close_import(&self, imported: &Imported) -> Result<bool, AllocError> {
        on_allocator!(self, allocator => allocator.close_import(imported))
    }

    /// See [`Allocator::stacks`].
    pub(crate) fn stacks(&self) -> BTreeSet<StackId> {
        on_allocator!(self, allocator => allocator.stacks())
    }

    pub(crate) fn block_at(&self, address: DevicePtr) -> Option<BlockPicture> {
        on_allocator!(self, allocator => allocator.block_at(address))
    }

    pub(crate) fn device_of(&self, address: DevicePtr) -> Option<DeviceId> {
        on_allocator!(self, allocator => allocator.device_of(address))
    }

    pub(crate) fn counted(&self, device: DeviceId) -> Stats {
        on_allocator!(self, allocator => allocator.stats(device))
    }

    pub(crate) fn stats(&self, device: DeviceId) -> Vec<(String, i64)> {
        on_allocator!(self, allocator => allocator.stats_entries(device))
    }

    pub(crate) fn reset_peak_stats(&self, device: DeviceId) {
        on_allocator!(self, allocator => allocator.reset_peak_stats(device));
    }

    pub(crate) fn reset_accumulated_stats(&self, device: DeviceId) {
        on_allocator!(self, allocator => allocator.reset_accumulated_stats(device));
    }

    /// The bytes that each private pool of the device has reserved, by torch's names for the kinds.
    pub(crate) fn private_reserved(&self, device: DeviceId) -> Vec<(PoolId, Family)> {
        on_allocator!(self, allocator => allocator.private_reserved(device))
    }

    /// See [`Allocator::pictures`].
    pub(crate) fn pictures(&self, leave_mark: bool) -> Vec<DevicePicture> {
        on_allocator!(self, allocator => allocator.pictures(leave_mark))
    }

    /// See [`Allocator::record_history`].
    pub(crate) fn record_history(&self, recording: Option<&Recording>, forget: bool) -> Result<(), AllocError> {
        on_allocator!(self, allocator => allocator.record_history(recording, forget))
    }

    pub(crate) fn stack_of(&self, address: DevicePtr) -> StackId {
        on_allocator!(self, allocator => allocator.stack_of(address))
    }

    pub(crate) fn allocated_and_reserved(&self, device: DeviceId) -> (u64, u64) {
        let stats = self.counted(device);
        (stats.allocated_bytes.all.current, stats.reserved_bytes.all.current)
    }

    pub(crate) fn largest_available(&self, device: DeviceId) -> u64 {
        on_allocator!(self, allocator => allocator.largest_available(device))
    }

    pub(crate) fn annotate(&self, address: DevicePtr) {
        on_allocator!(self, allocator => allocator.annotate(address));
    }

    pub(crate) fn config(&self) -> &Config {
        on_allocator!(self, allocator => allocator.config())
    }
}
