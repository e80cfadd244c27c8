//! What another thread of the program does between two driver calls of the allocator.

use std::{
    sync::{Arc, Mutex},
    thread,
};

use alloc_core::{
    allocator::{Allocator, FreeOutcome, RecordOutcome},
    config::Config,
    driver::{
        Capabilities, CaptureMode, CaptureStatus, Completion, Driver, MemoryInfo, Result, Ticket,
        sim::{SimDriver, SimOptions},
    },
    id::{DeviceId, DevicePtr, Event, PhysicalHandle, Stream, StreamHandle},
};

use crate::rig::{DEVICE, MAIN, MIB, SIDE};

/// What the program does, and with which stream it was asked.
type Hook = Box<dyn FnOnce(Stream) + Send>;

/// Runs something of the program's after the driver has answered a question about a stream's capture.
#[derive(Clone)]
struct Meddling {
    inner: SimDriver,
    after_status: Arc<Mutex<Option<Hook>>>,
}

impl Driver for Meddling {
    fn device_count(&self) -> Result<u32> {
        self.inner.device_count()
    }
    fn capabilities(&self, d: DeviceId) -> Result<Capabilities> {
        self.inner.capabilities(d)
    }
    fn current_device(&self) -> Result<Option<DeviceId>> {
        self.inner.current_device()
    }
    fn is_active(&self, d: DeviceId) -> Result<bool> {
        self.inner.is_active(d)
    }
    fn can_access_peer(&self, d: DeviceId, p: DeviceId) -> Result<bool> {
        self.inner.can_access_peer(d, p)
    }
    fn memory_info(&self, d: DeviceId) -> Result<MemoryInfo> {
        self.inner.memory_info(d)
    }
    fn allocate(&self, d: DeviceId, s: u64) -> Result<DevicePtr> {
        self.inner.allocate(d, s)
    }
    fn free(&self, d: DeviceId, a: DevicePtr) -> Result<()> {
        self.inner.free(d, a)
    }
    fn reserve_range(&self, d: DeviceId, s: u64) -> Result<DevicePtr> {
        self.inner.reserve_range(d, s)
    }
    fn free_range(&self, d: DeviceId, b: DevicePtr, s: u64) -> Result<()> {
        self.inner.free_range(d, b, s)
    }
    fn create_handle(&self, d: DeviceId, s: u64) -> Result<PhysicalHandle> {
        self.inner.create_handle(d, s)
    }
    fn release_handle(&self, d: DeviceId, h: PhysicalHandle) -> Result<()> {
        self.inner.release_handle(d, h)
    }
    fn map(&self, d: DeviceId, a: DevicePtr, s: u64, h: PhysicalHandle) -> Result<()> {
        self.inner.map(d, a, s, h)
    }
    fn set_access(&self, d: DeviceId, a: DevicePtr, s: u64, l: &[DeviceId]) -> Result<()> {
        self.inner.set_access(d, a, s, l)
    }
    fn unmap(&self, d: DeviceId, a: DevicePtr, s: u64) -> Result<()> {
        self.inner.unmap(d, a, s)
    }
    fn export_handle(&self, d: DeviceId, h: PhysicalHandle) -> Result<i32> {
        self.inner.export_handle(d, h)
    }
    fn import_handle(&self, d: DeviceId, f: i32) -> Result<PhysicalHandle> {
        self.inner.import_handle(d, f)
    }
    fn ticket(&self, d: DeviceId, b: DevicePtr) -> Result<Ticket> {
        self.inner.ticket(d, b)
    }
    fn open_ticket(&self, d: DeviceId, t: &Ticket) -> Result<DevicePtr> {
        self.inner.open_ticket(d, t)
    }
    fn close_ticket(&self, d: DeviceId, a: DevicePtr) -> Result<()> {
        self.inner.close_ticket(d, a)
    }
    fn create_event(&self, d: DeviceId) -> Result<Event> {
        self.inner.create_event(d)
    }
    fn destroy_event(&self, d: DeviceId, e: Event) -> Result<()> {
        self.inner.destroy_event(d, e)
    }
    fn record_event(&self, e: Event, s: Stream) -> Result<()> {
        self.inner.record_event(e, s)
    }
    fn query_event(&self, d: DeviceId, e: Event) -> Result<Completion> {
        self.inner.query_event(d, e)
    }
    fn synchronize_event(&self, d: DeviceId, e: Event) -> Result<()> {
        self.inner.synchronize_event(d, e)
    }
    fn wait_event(&self, s: Stream, e: Event) -> Result<()> {
        self.inner.wait_event(s, e)
    }
    fn stream_device(&self, h: StreamHandle) -> Result<DeviceId> {
        self.inner.stream_device(h)
    }
    fn capture_status(&self, s: Stream) -> Result<CaptureStatus> {
        let status = self.inner.capture_status(s);
        let hook = self.after_status.lock().expect("one thread at a time").take();
        if let Some(hook) = hook {
            hook(s);
        }
        status
    }
    fn exchange_capture_mode(&self, m: CaptureMode) -> Result<CaptureMode> {
        self.inner.exchange_capture_mode(m)
    }
    fn synchronize_device(&self, d: DeviceId) -> Result<()> {
        self.inner.synchronize_device(d)
    }
}

impl Meddling {
    /// On a small machine, with the allocator that asks it.
    fn new(config: &str) -> (Self, Allocator<Self>) {
        let inner = SimDriver::new(SimOptions { capacity_bytes: 256 * MIB, ..SimOptions::default() });
        inner.set_current_device(DEVICE).expect("it exists");
        let driver = Self { inner, after_status: Arc::default() };
        let config = Config::parse(config).expect("a valid config").config;
        (driver.clone(), Allocator::new(driver, config))
    }

    /// Has another thread do this when a stream's capture was asked about next.
    fn after_next_status(&self, meddle: impl FnOnce(Stream) + Send + 'static) {
        let hook: Hook = Box::new(|stream| {
            thread::scope(|scope| scope.spawn(|| meddle(stream)).join().expect("it does not panic"));
        });
        *self.after_status.lock().expect("one thread") = Some(hook);
    }
}

#[test]
fn event_that_a_capture_took_away_before_it_was_recorded_is_replaced_after_the_capture() {
    for is_over_before_the_poll in [false, true] {
        let (driver, allocator) = Meddling::new("policy:native");
        driver.inner.open_stream(SIDE).expect("the stream can be made");
        let block = allocator.malloc(200 * MIB, DEVICE, MAIN, None).expect("there is memory").expect("not for nothing");
        assert_eq!(allocator.record_stream(block, SIDE), RecordOutcome::Recorded);
        driver.inner.launch(SIDE, &[], &[], 1_000_000).expect("it touches nothing");
        let sim = driver.inner.clone();
        driver.after_next_status(move |stream| {
            sim.begin_capture(stream.handle, CaptureMode::Relaxed).expect("it can capture");
        });
        assert_eq!(allocator.free(block, DEVICE), FreeOutcome::Freed);
        if is_over_before_the_poll {
            driver.inner.end_capture(SIDE).expect("nothing spoiled it");
        }
        let beside = allocator.malloc(30 * MIB, DEVICE, MAIN, None).expect("there is memory").expect("not for nothing");
        if !is_over_before_the_poll {
            // To be asked about its event may have spoiled it: the driver says too late that it has one.
            let _ = driver.inner.end_capture(SIDE);
        }
        assert_eq!(allocator.malloc(200 * MIB, DEVICE, MAIN, None), Ok(Some(block)), "a new event answers");
        assert_eq!(allocator.free(block, DEVICE), FreeOutcome::Freed);
        assert_eq!(allocator.free(beside, DEVICE), FreeOutcome::Freed);
        allocator.empty_cache().expect("everything can be returned");
        allocator.check().expect("consistent at the end");
        driver.inner.check().expect("no rule was broken");
        driver.inner.check_empty().expect("nothing is left on the device");
    }
}
