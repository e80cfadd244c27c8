//! Private pools: which requests go to them, how long they live. Also pins, which outlive any pool's say.

use std::sync::Arc;

use super::{Allocator, Device};
use crate::{
    block::BlockState,
    checkpoint::{Checkpoint, RestoreError, Restored},
    config::{Move, Policy},
    device::DeviceState,
    driver::Driver,
    error::{AllocError, MoveError},
    id::{DeviceId, DevicePtr, PoolId, StreamHandle},
    pool_set::PrivateIx,
    sync::Ordering,
};

/// Says whether a stream's requests go to a private pool. It is foreign code: it may call CUDA, and may throw.
pub type StreamFilter = Arc<dyn Fn(StreamHandle) -> bool + Send + Sync>;

/// Private pools that have begun and not ended, in the order of their beginning.
pub(super) type Routes = Vec<(PoolId, StreamFilter)>;

impl<D: Driver> Allocator<D> {
    /// The private pool that a request on `stream` goes to now: the last one begun whose filter takes the stream.
    ///
    /// Filters run under no lock. Costs one atomic load where no pool has begun.
    pub fn route(&self, device: DeviceId, stream: StreamHandle) -> Option<PoolId> {
        let device = self.devices.get(device)?;
        if device.route_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let routes = device.routes.lock().ok()?.clone();
        routes.into_iter().rev().find(|(_, takes)| takes(stream)).map(|(pool, _)| pool)
    }

    /// Starts to route requests to a private pool, which is made, or gets one more user.
    ///
    /// # Errors
    ///
    /// Those of bringing the device into use; [`AllocError::Broken`].
    pub fn begin_pool(&self, device: DeviceId, pool: PoolId, filter: StreamFilter) -> Result<(), AllocError> {
        let device = self.device(device)?;
        device.fast()?.pools.begin(pool);
        device.change_routes(|routes| routes.push((pool, filter)))
    }

    /// Makes a private pool, or gives it one more user, without routing requests to it.
    ///
    /// # Errors
    ///
    /// Those of bringing the device into use; [`AllocError::Broken`].
    pub fn create_pool(&self, device: DeviceId, pool: PoolId) -> Result<(), AllocError> {
        self.device(device)?.fast()?.pools.create(pool);
        Ok(())
    }

    /// How many users a private pool has: beginnings and creations that no release has answered. 0 for no such pool.
    pub fn pool_users(&self, device: DeviceId, pool: PoolId) -> u32 {
        self.on_live_pool(device, pool, |state, private| state.pools.private(private).users()).unwrap_or(0)
    }

    /// Whether idle memory of a private pool serves requests of its stream that would fail without. Returns whether there
    /// is such a pool.
    pub fn serve_when_out_of_memory(&self, device: DeviceId, pool: PoolId, serves: bool) -> bool {
        let set = |state: &mut DeviceState, private| state.pools.private_mut(private).serves_when_out = serves;
        self.on_live_pool(device, pool, set).is_some()
    }

    /// Has the blocks of a private pool handed out whole from now on. Returns whether there is such a pool.
    pub fn forbid_splits(&self, device: DeviceId, pool: PoolId) -> bool {
        self.on_live_pool(device, pool, |state, private| state.pools.forbid_splits(private)).is_some()
    }

    /// From now on the memory of a private pool, which must have none yet, changes its address no more than `moving` lets
    /// it, and no more than the settings do: what another library registers is the physical memory. What was said once stays
    /// in force. A pool that has memory may be told what holds for it anyway.
    ///
    /// # Errors
    ///
    /// [`MoveError`]; [`AllocError::Broken`].
    pub fn restrict_moves(&self, device: DeviceId, pool: PoolId, moving: Move) -> Result<(), AllocError> {
        let no_such_pool = MoveError::NoSuchPool { pool, device };
        let mut state = self.devices.get(device).ok_or(no_such_pool)?.fast()?;
        let private = state.pools.find_live(pool).ok_or(no_such_pool)?;
        let terms = &state.pools.private(private).terms;
        if moving == Move::Contiguous && terms.rules == Policy::Expandable {
            return Err(MoveError::PolicyPutsTogether.into());
        }
        if moving > state.moving_under(terms) && state.pools.has_memory(private) {
            return Err(MoveError::HasMemory { pool }.into());
        }
        state.pools.restrict_moves(private, moving);
        Ok(())
    }

    fn on_live_pool<T>(
        &self,
        device: DeviceId,
        pool: PoolId,
        change: impl FnOnce(&mut DeviceState, PrivateIx) -> T,
    ) -> Option<T> {
        let mut state = self.devices.get(device)?.fast().ok()?;
        let private = state.pools.find_live(pool)?;
        Some(change(&mut state, private))
    }

    /// Returns what a released private pool holds, on every device. Does nothing for a live one. Waits as
    /// [`empty_cache`](Self::empty_cache) does.
    ///
    /// # Errors
    ///
    /// As [`empty_cache`](Self::empty_cache).
    pub fn empty_pool(&self, pool: PoolId) -> Result<(), AllocError> {
        let mut result = Ok(());
        for device in self.devices.starting_with(DeviceId(0)) {
            result = result.and(self.empty_pool_on(device, pool));
        }
        result
    }

    fn empty_pool_on(&self, device: &Device, pool: PoolId) -> Result<(), AllocError> {
        let is_released =
            device.fast()?.pools.privates().any(|(_, private)| private.id == pool && private.users() == 0);
        if is_released { self.empty_device(device, Some(pool)) } else { Ok(()) }
    }

    /// Which allocations a live private pool holds now; `None` if there is no such pool.
    pub fn checkpoint_pool(&self, device: DeviceId, pool: PoolId) -> Option<Checkpoint> {
        self.on_live_pool(device, pool, |state, private| state.checkpoint(private))
    }

    /// Makes a private pool hold what it held at the checkpoint and nothing else: all that it holds now is freed, and what
    /// it held then is allocated again, at the same addresses. What the memory contains is left alone.
    ///
    /// # Errors
    ///
    /// [`RestoreError`]; then nothing is changed.
    pub fn restore_pool(&self, device: DeviceId, checkpoint: &Checkpoint) -> Result<Restored, RestoreError> {
        let no_such_pool = RestoreError::NoSuchPool(checkpoint.pool());
        let Some(device) = self.devices.get(device) else { return Err(no_such_pool) };
        let mut state = device.fast().map_err(|_| RestoreError::Broken(device.id))?;
        let private = state.pools.find_live(checkpoint.pool()).ok_or(no_such_pool)?;
        state.restore(private, checkpoint)
    }

    /// Ends the routing that the last [`begin_pool`](Self::begin_pool) of this pool began. The pool lives on.
    pub fn end_pool(&self, device: DeviceId, pool: PoolId) {
        let Some(device) = self.devices.get(device) else { return };
        let mut has_ended = false;
        let _ = device.change_routes(|routes| {
            if let Some(position) = routes.iter().rposition(|(id, _)| *id == pool) {
                routes.remove(position);
                has_ended = true;
            }
        });
        if has_ended && let Ok(mut state) = device.fast() {
            state.pools.end(pool);
        }
    }

    /// Answers one [`begin_pool`](Self::begin_pool). With the last, the pool's memory is quarantined until a device
    /// synchronise proves that no graph runs on it; then it goes back.
    pub fn release_pool(&self, device: DeviceId, pool: PoolId) {
        if let Some(device) = self.devices.get(device)
            && let Ok(mut state) = device.fast()
        {
            state.release_pool(pool);
        }
        self.drop_unused_sources();
    }

    /// Keeps the memory at `address`, which must be allocated, where it is: neither moved nor returned to the driver,
    /// even after it is freed. Returns whether it is ours. Pins add up.
    pub fn pin(&self, address: DevicePtr) -> bool {
        self.devices.starting_with(DeviceId(0)).any(|device| {
            let Ok(mut state) = device.fast() else { return false };
            let Some(id) = state.blocks.at(address.0) else { return false };
            let block = &state.blocks[id];
            let (size, is_held) = (block.size, block.state == BlockState::Allocated);
            if is_held {
                state.pins.pin(address.0, size);
            }
            is_held
        })
    }

    /// Takes one [`pin`](Self::pin) back. Returns whether there was one.
    pub fn unpin(&self, address: DevicePtr) -> bool {
        self.devices
            .starting_with(DeviceId(0))
            .any(|device| device.fast().is_ok_and(|mut state| state.pins.unpin(address.0)))
    }
}

impl Device {
    fn change_routes(&self, change: impl FnOnce(&mut Routes)) -> Result<(), AllocError> {
        let mut routes = self.routes.lock().map_err(|_| AllocError::Broken { device: self.id })?;
        change(&mut routes);
        self.route_count.store(routes.len(), Ordering::Release);
        Ok(())
    }
}
