//! An allocator on a small simulated GPU, checked after every step.

use std::sync::Arc;

use alloc_core::{
    allocator::{Allocator, FreeOutcome, RecordOutcome},
    config::Config,
    driver::sim::{SimDriver, SimOptions},
    error::AllocError,
    id::{DeviceId, DevicePtr, PoolId, Stream, StreamHandle},
    stats::Stats,
};

/// Every policy, as a setting.
pub(crate) const POLICIES: [&str; 3] = ["policy:native", "policy:expandable", "policy:rallocator"];

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const DEVICE: DeviceId = DeviceId(0);
pub(crate) const MAIN: StreamHandle = StreamHandle::DEFAULT;
pub(crate) const SIDE: StreamHandle = StreamHandle(0x10);

pub(crate) struct Rig {
    pub(crate) gpu: SimDriver,
    pub(crate) allocator: Arc<Allocator<SimDriver>>,
    held: Vec<DevicePtr>,
}

impl Rig {
    pub(crate) fn new(config: &str) -> Self {
        Self::on(config, SimOptions { capacity_bytes: 256 * MIB, ..SimOptions::default() })
    }

    /// With so many mappings of memory that lives elsewhere.
    pub(crate) fn with_stale_mappings(config: &str, stale_mappings_max: usize) -> Self {
        Self::on(config, SimOptions { capacity_bytes: 256 * MIB, stale_mappings_max, ..SimOptions::default() })
    }

    pub(crate) fn on(config: &str, options: SimOptions) -> Self {
        let gpu = SimDriver::new(options);
        gpu.set_current_device(DEVICE).expect("device 0 exists");
        let config = Config::parse(config).expect("a valid config").config;
        Self { allocator: Arc::new(Allocator::new(gpu.clone(), config)), gpu, held: Vec::new() }
    }

    pub(crate) fn malloc(&mut self, size: u64, stream: StreamHandle) -> DevicePtr {
        self.try_malloc(size, stream).expect("there is memory")
    }

    pub(crate) fn try_malloc(&mut self, size: u64, stream: StreamHandle) -> Result<DevicePtr, AllocError> {
        self.malloc_on(size, DEVICE, stream)
    }

    pub(crate) fn malloc_on(
        &mut self,
        size: u64,
        device: DeviceId,
        stream: StreamHandle,
    ) -> Result<DevicePtr, AllocError> {
        if !stream.is_default() {
            self.gpu.open_stream(stream).expect("the stream can be made");
        }
        let pool = self.allocator.route(device, stream);
        let result = self.allocator.malloc(size, device, stream, pool);
        self.allocator.check().expect("consistent after malloc");
        let address = result?.expect("not a request for nothing");
        self.gpu.allocated(address, size, Stream { device, handle: stream }, pool).expect("no overlap");
        self.held.push(address);
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: DevicePtr) {
        self.held.retain(|held| *held != address);
        self.gpu.freed(address).expect("the oracle knows it");
        assert_eq!(self.allocator.free(address, DEVICE), FreeOutcome::Freed);
        self.allocator.check().expect("consistent after free");
    }

    pub(crate) fn record_stream(&self, address: DevicePtr, stream: StreamHandle) {
        self.gpu.touch_stream(stream).expect("the stream can be made");
        assert_eq!(self.allocator.record_stream(address, stream), RecordOutcome::Recorded);
    }

    /// A kernel on `stream` that writes `address`.
    pub(crate) fn write(&self, stream: StreamHandle, address: DevicePtr) {
        self.gpu.launch(stream, &[], &[address], 100).expect("no race");
    }

    pub(crate) fn begin_pool(&self, pool: PoolId, stream: StreamHandle) {
        let filter = Arc::new(move |asked| asked == stream);
        self.allocator.begin_pool(DEVICE, pool, filter).expect("the device is in use");
        self.gpu.pool_begun(DEVICE, pool);
    }

    pub(crate) fn release_pool(&self, pool: PoolId) {
        self.allocator.release_pool(DEVICE, pool);
        self.gpu.pool_released(DEVICE, pool);
    }

    pub(crate) fn stats(&self) -> Stats {
        self.allocator.stats(DEVICE)
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.current
    }

    /// Frees all that is held.
    pub(crate) fn free_all(&mut self) {
        for address in std::mem::take(&mut self.held) {
            self.free(address);
        }
    }

    /// Frees all that is held, and proves that nothing stays behind anywhere.
    pub(crate) fn finish(mut self) {
        self.free_all();
        self.gpu.complete(None).expect("no kernel faults");
        self.allocator.empty_cache().expect("everything can be returned");
        self.allocator.check().expect("consistent at the end");
        assert_eq!(self.reserved(), 0);
        self.gpu.check().expect("no rule was broken");
        self.gpu.check_empty().expect("nothing is left on the device");
    }
}
