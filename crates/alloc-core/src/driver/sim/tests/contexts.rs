//! Contexts, injected failures, and a driver that is gone.

use super::*;
use crate::driver::Call;

#[test]
fn a_thread_has_no_current_device_until_it_sets_one() {
    let driver = SimDriver::new(SimOptions { devices: 2, ..small() });
    assert_eq!(driver.current_device().unwrap(), None);
    driver.set_current_device(DeviceId(1)).unwrap();
    assert_eq!(driver.current_device().unwrap(), Some(DeviceId(1)));
    assert_eq!(on_another_thread(&driver, |driver| driver.current_device().unwrap()), None);
}

#[test]
fn a_context_becomes_active_with_the_first_use_of_its_device() {
    let driver = SimDriver::new(SimOptions { devices: 3, ..small() });
    driver.capabilities(DEVICE).unwrap();
    assert!(!driver.is_active(DEVICE).unwrap());
    driver.allocate(DEVICE, PAGE).unwrap();
    driver.set_current_device(DeviceId(1)).unwrap();
    let active = [0, 1, 2].map(|device| driver.is_active(DeviceId(device)).unwrap());
    assert_eq!(active, [true, true, false]);
}

#[test]
fn a_device_that_does_not_exist_is_refused() {
    let driver = driver();
    let absent = DeviceId(1);
    assert_eq!(driver.device_count().unwrap(), 1);
    assert_eq!(status(driver.capabilities(absent)), Status::InvalidDevice);
    assert_eq!(status(driver.allocate(absent, PAGE)), Status::InvalidDevice);
    assert_eq!(status(driver.can_access_peer(DEVICE, absent)), Status::InvalidDevice);
    assert_eq!(refusal(driver.set_current_device(absent)), Status::InvalidDevice);
}

#[test]
fn an_injected_failure_changes_nothing() {
    let driver = driver();
    driver.fail_next(Call::CreateHandle, 1, Status::OutOfMemory);
    driver.create_handle(DEVICE, PAGE).unwrap();
    assert_eq!(status(driver.create_handle(DEVICE, PAGE)), Status::OutOfMemory);
    assert_eq!(driver.physical_bytes(DEVICE).current, PAGE);
    assert_eq!(driver.pending_faults(), 0);
    driver.create_handle(DEVICE, PAGE).unwrap();
    assert_eq!(driver.calls(), [("cuMemCreate", 3)]);
}

#[test]
fn the_nth_call_of_any_kind_fails() {
    let driver = driver();
    driver.fail_nth(2);
    let handle = driver.create_handle(DEVICE, PAGE).unwrap();
    let error = driver.reserve_range(DEVICE, PAGE).unwrap_err();
    assert_eq!((error.call, error.status), (Call::ReserveRange, Status::OutOfMemory));
    driver.release_handle(DEVICE, handle).unwrap();
}

#[test]
fn a_forked_child_gets_no_answer_and_the_parent_goes_on() {
    let driver = driver();
    driver.fork_child();
    assert_eq!(status(driver.device_count()), Status::NotInitialized);
    assert_eq!(status(driver.allocate(DEVICE, PAGE)), Status::NotInitialized);
    assert_eq!(refusal(driver.launch(FIRST, &[], &[], 1)), Status::NotInitialized);
    driver.fork_parent();
    assert!(driver.allocate(DEVICE, PAGE).is_ok());
}

#[test]
fn a_driver_that_shut_down_answers_nothing() {
    let driver = driver();
    let segment = driver.allocate(DEVICE, PAGE).unwrap();
    driver.shutdown_driver();
    assert_eq!(status(driver.free(DEVICE, segment)), Status::Deinitialized);
    assert_eq!(refusal(driver.complete(None)), Status::Deinitialized);
}

#[test]
fn calls_cost_what_was_measured() {
    let driver = SimDriver::new(SimOptions::default());
    let size = 20 << 20;
    let range = driver.reserve_range(DEVICE, size).unwrap();
    let before = driver.elapsed_us();
    let handle = driver.create_handle(DEVICE, size).unwrap();
    driver.map(DEVICE, range, size, handle).unwrap();
    driver.set_access(DEVICE, range, size, &[DEVICE]).unwrap();
    driver.unmap(DEVICE, range, size).unwrap();
    driver.release_handle(DEVICE, handle).unwrap();
    let expected = 10.0 + 1.0 + (25.0 + 2.0) + 16.0 + (10.0 + 10.0);
    assert!((driver.elapsed_us() - before - expected).abs() < 1e-6);
}
