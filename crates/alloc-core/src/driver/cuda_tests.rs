//! What the driver says where there is no GPU. With one, `tests/contract_cuda.rs` is the test.

use super::*;
use crate::driver::CaptureMode;

const DEVICE: DeviceId = DeviceId(0);
const STREAM: Stream = Stream { device: DEVICE, handle: StreamHandle::DEFAULT };
const ADDRESS: DevicePtr = DevicePtr(2 << 20);
const SIZE: u64 = 2 << 20;

/// Every entry of the trait, and the error that it gave.
fn errors_of_every_entry(driver: &CudaDriver) -> Vec<(&'static str, Option<DriverError>)> {
    let event = Event(0);
    let handle = PhysicalHandle(0);
    vec![
        ("device_count", driver.device_count().err()),
        ("capabilities", driver.capabilities(DEVICE).err()),
        ("current_device", driver.current_device().err()),
        ("is_active", driver.is_active(DEVICE).err()),
        ("can_access_peer", driver.can_access_peer(DEVICE, DEVICE).err()),
        ("memory_info", driver.memory_info(DEVICE).err()),
        ("allocate", driver.allocate(DEVICE, SIZE).err()),
        ("free", driver.free(DEVICE, ADDRESS).err()),
        ("reserve_range", driver.reserve_range(DEVICE, SIZE).err()),
        ("free_range", driver.free_range(DEVICE, ADDRESS, SIZE).err()),
        ("create_handle", driver.create_handle(DEVICE, SIZE).err()),
        ("release_handle", driver.release_handle(DEVICE, handle).err()),
        ("map", driver.map(DEVICE, ADDRESS, SIZE, handle).err()),
        ("set_access", driver.set_access(DEVICE, ADDRESS, SIZE, &[DEVICE]).err()),
        ("unmap", driver.unmap(DEVICE, ADDRESS, SIZE).err()),
        ("create_event", driver.create_event(DEVICE).err()),
        ("destroy_event", driver.destroy_event(DEVICE, event).err()),
        ("record_event", driver.record_event(event, STREAM).err()),
        ("query_event", driver.query_event(DEVICE, event).err()),
        ("synchronize_event", driver.synchronize_event(DEVICE, event).err()),
        ("wait_event", driver.wait_event(STREAM, event).err()),
        ("stream_device", driver.stream_device(StreamHandle(0x1000)).err()),
        ("capture_status", driver.capture_status(STREAM).err()),
        ("exchange_capture_mode", driver.exchange_capture_mode(CaptureMode::Relaxed).err()),
        ("synchronize_device", driver.synchronize_device(DEVICE).err()),
    ]
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that does not run says so")]
fn without_a_gpu_every_call_says_so_and_none_panics() {
    let driver = CudaDriver::new();
    if driver.device_count().is_ok() {
        eprintln!("skipped: this machine has a GPU; contract_cuda tests the driver here");
        return;
    }
    for (entry, error) in errors_of_every_entry(&driver) {
        let error = error.unwrap_or_else(|| panic!("{entry} succeeded without a GPU"));
        assert_eq!(error.call, Call::Initialize, "{entry}");
        assert!(matches!(error.status, Status::NotFound | Status::NoDevice), "{entry}: {error}");
    }
}

#[test]
fn capture_modes_survive_the_way_to_the_driver_and_back() {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        assert_eq!(capture_mode(raw_capture_mode(mode)), mode);
    }
}

#[test]
fn default_streams_are_passed_as_cudas_own_numbers() {
    assert_eq!(raw_stream(StreamHandle::DEFAULT).addr(), 0);
    assert_eq!(raw_stream(StreamHandle::LEGACY).addr(), 1);
    assert_eq!(raw_stream(StreamHandle::PER_THREAD).addr(), 2);
}

#[test]
fn a_failed_call_names_itself_and_its_status() {
    let refused = |code, status| assert_eq!(check(Call::Map, code), Err(DriverError { call: Call::Map, status }));
    refused(CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int, Status::OutOfMemory);
    refused(12345, Status::Other(12345));
    assert_eq!(check(Call::Map, CUresult::CUDA_SUCCESS as c_int), Ok(()));
}

#[test]
fn answers_of_a_newer_driver_are_taken_for_the_stricter_ones() {
    assert_eq!(capture_mode(77), CaptureMode::Global);
    assert_eq!(capture_status(77), CaptureStatus::Active);
    assert_eq!([0, 1, 2].map(capture_status), [CaptureStatus::None, CaptureStatus::Active, CaptureStatus::Invalidated]);
}
