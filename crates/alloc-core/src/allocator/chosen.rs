//! Choosing among free blocks what the allocator leaves to the driver's addresses; for replays.
//!
//! Of free blocks of one size the one with the lowest address is handed out. Which that is depends on where the driver
//! put segments, so whoever follows a recording has to name the block.

use crate::allocator::{Allocator, streams::stream_key};
use crate::block::{BlockId, BlockState};
use crate::device::{DeviceState, Request};
use crate::driver::Driver;
use crate::id::{DeviceId, DevicePtr, PoolId, StreamHandle};

impl<D: Driver> Allocator<D> {
    /// The bytes of the free block at an address.
    pub(crate) fn free_block_at(&self, address: DevicePtr, device: DeviceId) -> Option<u64> {
        let state = self.devices.get(device)?.fast().ok()?;
        state.free_block(address).map(|id| state.blocks[id].size)
    }

    /// Serves a request from the free block at an address, as [`malloc`](Self::malloc) would if it had chosen that.
    /// `None` if there is none, or it is too small or of another pool.
    pub(crate) fn malloc_at(
        &self,
        address: DevicePtr,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
        pool: Option<PoolId>,
    ) -> Option<DevicePtr> {
        let mut state = self.devices.get(device)?.fast().ok()?;
        let stream = state.streams.find(stream_key(device, stream))?;
        let owner = pool.and_then(|pool| state.pools.find_live(pool));
        let request = state.request(size, stream, owner);
        let id = state.free_block(address)?;
        let block = &state.blocks[id];
        (block.pool == request.pool && block.size >= request.rounded).then(|| state.hand_out(id, &request))
    }

    /// Hands out the first `size` bytes, a multiple of 512, of the free block at an address, whatever class they are of.
    pub(crate) fn carve(&self, address: DevicePtr, size: u64, device: DeviceId) -> Option<DevicePtr> {
        let mut state = self.devices.get(device)?.fast().ok()?;
        let id = state.free_block(address)?;
        let (pool, bytes) = (state.blocks[id].pool, state.blocks[id].size);
        (bytes >= size).then(|| state.hand_out(id, &Request { requested: size, rounded: size, pool }))
    }
}

impl DeviceState {
    fn free_block(&self, address: DevicePtr) -> Option<BlockId> {
        self.blocks.at(address.0).filter(|id| self.blocks[*id].state == BlockState::Free)
    }
}
