//! Scenarios: what the simulated GPU does, refuses and finds. One file per part, small numbers throughout.

mod capture;
mod contexts;
mod memory;
mod oracle;
mod streams;

use super::{SimDriver, SimError, SimOptions, Violation};
use crate::driver::{Driver, DriverError, Status};
use crate::id::{DeviceId, DevicePtr, Event, PhysicalHandle, Stream, StreamHandle};

const DEVICE: DeviceId = DeviceId(0);
const FIRST: StreamHandle = StreamHandle(0x10);
const SECOND: StreamHandle = StreamHandle(0x20);
const THIRD: StreamHandle = StreamHandle(0x30);

/// The unit of handles and ranges in these tests.
const PAGE: u64 = 0x1000;

/// One device of sixteen pages.
fn small() -> SimOptions {
    SimOptions { capacity_bytes: 16 * PAGE, granularity_bytes: PAGE, ..SimOptions::default() }
}

fn driver() -> SimDriver {
    let driver = SimDriver::new(small());
    driver.set_current_device(DEVICE).unwrap();
    driver
}

fn on_device(handle: StreamHandle) -> Stream {
    Stream { device: DEVICE, handle }
}

/// A segment that counts as an allocation of the program, made on `stream`.
fn allocation(driver: &SimDriver, size: u64, stream: StreamHandle) -> DevicePtr {
    let address = driver.allocate(DEVICE, size).unwrap();
    driver.allocated(address, size, on_device(stream), None).unwrap();
    address
}

/// A handle of one page, mapped at the start of a range of four pages, with access.
fn mapped_page(driver: &SimDriver) -> (DevicePtr, PhysicalHandle) {
    let range = driver.reserve_range(DEVICE, 4 * PAGE).unwrap();
    let handle = driver.create_handle(DEVICE, PAGE).unwrap();
    driver.map(DEVICE, range, PAGE, handle).unwrap();
    driver.set_access(DEVICE, range, PAGE, &[DEVICE]).unwrap();
    (range, handle)
}

/// A new event that marks the present end of `stream`.
fn recorded(driver: &SimDriver, stream: StreamHandle) -> Event {
    let event = driver.create_event(DEVICE).unwrap();
    driver.record_event(event, on_device(stream)).unwrap();
    event
}

/// What the program frees, another allocation of the program gets, as a careless allocator would do it.
fn hand_on(driver: &SimDriver, address: DevicePtr, size: u64, to: StreamHandle) {
    assert!(driver.freed(address).unwrap());
    driver.allocated(address, size, on_device(to), None).unwrap();
}

/// Runs `call` on a thread of its own.
#[expect(clippy::disallowed_methods, reason = "a thread has a current device, a capture mode and a default stream")]
fn on_another_thread<T: Send + 'static>(driver: &SimDriver, call: impl FnOnce(&SimDriver) -> T + Send + 'static) -> T {
    let driver = driver.clone();
    std::thread::spawn(move || call(&driver)).join().unwrap()
}

fn status<T: std::fmt::Debug>(result: Result<T, DriverError>) -> Status {
    result.unwrap_err().status
}

fn refusal<T: std::fmt::Debug>(result: Result<T, SimError>) -> Status {
    match result.unwrap_err() {
        SimError::Refused { status, .. } => status,
        other => panic!("not refused by the driver: {other}"),
    }
}

fn violation<T: std::fmt::Debug>(result: Result<T, SimError>) -> Violation {
    match result.unwrap_err() {
        SimError::Violation(violation) => *violation,
        other => panic!("not a violation: {other}"),
    }
}
