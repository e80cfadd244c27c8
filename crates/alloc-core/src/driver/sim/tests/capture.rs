//! Captures: what they record, what spoils them, and what they become.

use super::*;
use crate::driver::{CaptureMode, CaptureStatus};

const GLOBAL: CaptureMode = CaptureMode::Global;

fn capture_status(driver: &SimDriver, stream: StreamHandle) -> CaptureStatus {
    driver.capture_status(on_device(stream)).unwrap()
}

/// Begins a capture, makes a call that should spoil it, and ends it.
fn spoiling(call: impl FnOnce(&SimDriver, Event) -> Result<(), DriverError>) -> (Status, Status) {
    let driver = driver();
    let event = recorded(&driver, SECOND);
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    let refused = status(call(&driver, event));
    assert_eq!(capture_status(&driver, FIRST), CaptureStatus::Invalidated);
    let ended = refusal(driver.end_capture(FIRST));
    assert_eq!(capture_status(&driver, FIRST), CaptureStatus::None, "the capture is over all the same");
    (refused, ended)
}

#[test]
fn unsafe_calls_are_refused_and_spoil_the_capture() {
    let spoiled = (Status::CaptureUnsupported, Status::CaptureInvalidated);
    assert_eq!(spoiling(|driver, _| driver.allocate(DEVICE, PAGE).map(drop)), spoiled);
    assert_eq!(spoiling(|driver, _| driver.free(DEVICE, DevicePtr(0x10))), spoiled);
    assert_eq!(spoiling(|driver, event| driver.query_event(DEVICE, event).map(drop)), spoiled);
    assert_eq!(spoiling(|driver, event| driver.synchronize_event(DEVICE, event)), spoiled);
    assert_eq!(spoiling(|driver, _| driver.synchronize_device(DEVICE)), spoiled);
}

#[test]
fn a_wait_on_the_capturing_stream_spoils_the_capture() {
    let wait = |driver: &SimDriver, event| driver.wait_event(on_device(FIRST), event);
    assert_eq!(spoiling(wait), (Status::CaptureIsolation, Status::CaptureInvalidated));
}

#[test]
fn other_calls_are_allowed_beside_a_capture() {
    let driver = driver();
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    let (range, handle) = mapped_page(&driver);
    let event = recorded(&driver, SECOND);
    driver.wait_event(on_device(THIRD), event).unwrap();
    driver.memory_info(DEVICE).unwrap();
    driver.unmap(DEVICE, range, PAGE).unwrap();
    driver.release_handle(DEVICE, handle).unwrap();
    driver.end_capture(FIRST).unwrap();
}

#[test]
fn a_relaxed_thread_may_do_everything_but_synchronise_the_device() {
    let driver = driver();
    let event = recorded(&driver, SECOND);
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    assert_eq!(driver.exchange_capture_mode(CaptureMode::Relaxed).unwrap(), GLOBAL);
    let segment = driver.allocate(DEVICE, PAGE).unwrap();
    driver.query_event(DEVICE, event).unwrap();
    driver.free(DEVICE, segment).unwrap();
    assert_eq!(capture_status(&driver, FIRST), CaptureStatus::Active);
    assert_eq!(status(driver.synchronize_device(DEVICE)), Status::CaptureUnsupported);
    assert_eq!(capture_status(&driver, FIRST), CaptureStatus::Invalidated);
}

#[test]
fn another_thread_is_bound_by_a_global_capture_and_by_no_other() {
    for (mode, expected) in [
        (CaptureMode::Global, CaptureStatus::Invalidated),
        (CaptureMode::ThreadLocal, CaptureStatus::Active),
        (CaptureMode::Relaxed, CaptureStatus::Active),
    ] {
        let driver = driver();
        driver.begin_capture(FIRST, mode).unwrap();
        let is_refused = on_another_thread(&driver, |driver| driver.allocate(DEVICE, PAGE).is_err());
        assert_eq!(is_refused, expected == CaptureStatus::Invalidated);
        assert_eq!(capture_status(&driver, FIRST), expected, "{mode:?}");
    }
}

#[test]
fn a_thread_local_capture_binds_its_own_thread() {
    let driver = driver();
    driver.begin_capture(FIRST, CaptureMode::ThreadLocal).unwrap();
    assert_eq!(status(driver.allocate(DEVICE, PAGE)), Status::CaptureUnsupported);
}

#[test]
fn a_captured_event_can_be_neither_queried_nor_waited_for() {
    let driver = driver();
    driver.begin_capture(FIRST, CaptureMode::Relaxed).unwrap();
    let event = recorded(&driver, FIRST);
    driver.end_capture(FIRST).unwrap();
    assert_eq!(status(driver.query_event(DEVICE, event)), Status::CapturedEvent);
    assert_eq!(status(driver.synchronize_event(DEVICE, event)), Status::InvalidValue);
    assert_eq!(status(driver.wait_event(on_device(SECOND), event)), Status::CapturedEvent);
    driver.record_event(event, on_device(SECOND)).unwrap();
    assert!(driver.query_event(DEVICE, event).is_ok(), "a record outside any capture makes it an event again");
}

#[test]
fn touching_a_captured_event_spoils_its_capture() {
    let driver = driver();
    driver.begin_capture(FIRST, CaptureMode::Relaxed).unwrap();
    let event = recorded(&driver, FIRST);
    assert_eq!(status(driver.wait_event(on_device(SECOND), event)), Status::CapturedEvent);
    assert_eq!(refusal(driver.end_capture(FIRST)), Status::CaptureInvalidated);
}

#[test]
fn a_spoiled_capture_takes_nothing_more() {
    let driver = driver();
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    assert_eq!(status(driver.allocate(DEVICE, PAGE)), Status::CaptureUnsupported);
    assert_eq!(refusal(driver.launch(FIRST, &[], &[], 1)), Status::CaptureInvalidated);
    let event = driver.create_event(DEVICE).unwrap();
    assert_eq!(status(driver.record_event(event, on_device(FIRST))), Status::CaptureInvalidated);
    driver.abort_capture(FIRST).unwrap();
    driver.launch(FIRST, &[], &[], 1).unwrap();
}

#[test]
fn a_stream_joins_a_capture_by_waiting_and_has_to_be_waited_for() {
    let driver = driver();
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    driver.wait(SECOND, FIRST).unwrap();
    assert_eq!(capture_status(&driver, SECOND), CaptureStatus::Active);
    driver.launch(SECOND, &[], &[], 1).unwrap();
    assert_eq!(refusal(driver.end_capture(FIRST)), Status::Other(904), "unjoined");

    driver.begin_capture(FIRST, GLOBAL).unwrap();
    driver.wait(SECOND, FIRST).unwrap();
    driver.launch(SECOND, &[], &[], 1).unwrap();
    driver.wait(FIRST, SECOND).unwrap();
    driver.end_capture(FIRST).unwrap();
    assert_eq!(capture_status(&driver, SECOND), CaptureStatus::None);
}

#[test]
fn a_capture_waits_neither_for_work_outside_nor_for_another_capture() {
    let driver = driver();
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    assert_eq!(refusal(driver.wait(FIRST, SECOND)), Status::CaptureIsolation);
    driver.abort_capture(FIRST).unwrap();

    driver.begin_capture(FIRST, GLOBAL).unwrap();
    driver.begin_capture(SECOND, GLOBAL).unwrap();
    assert_eq!(refusal(driver.wait(FIRST, SECOND)), Status::Other(902), "merge");
    assert_eq!(refusal(driver.end_capture(FIRST)), Status::CaptureInvalidated);
    assert_eq!(refusal(driver.end_capture(SECOND)), Status::CaptureInvalidated);
}

#[test]
fn a_capture_begins_on_no_default_stream_and_ends_where_and_in_which_thread_it_began() {
    let driver = driver();
    assert_eq!(refusal(driver.begin_capture(StreamHandle::DEFAULT, GLOBAL)), Status::CaptureUnsupported);
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    assert_eq!(refusal(driver.begin_capture(FIRST, GLOBAL)), Status::InvalidValue);
    let elsewhere = on_another_thread(&driver, |driver| refusal(driver.end_capture(FIRST)));
    assert_eq!(elsewhere, Status::Other(908), "wrong thread");
    assert_eq!(refusal(driver.end_capture(SECOND)), Status::InvalidValue);
    driver.end_capture(FIRST).unwrap();
}

#[test]
fn destroying_a_stream_spoils_its_capture() {
    let driver = driver();
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    driver.wait(SECOND, FIRST).unwrap();
    driver.destroy_stream(SECOND).unwrap();
    assert_eq!(refusal(driver.end_capture(FIRST)), Status::CaptureInvalidated);
}

#[test]
fn captured_kernels_run_at_each_replay_and_not_before() {
    let driver = driver();
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    driver.launch(FIRST, &[], &[], 10).unwrap();
    driver.launch(FIRST, &[], &[], 20).unwrap();
    let graph = driver.end_capture(FIRST).unwrap();
    driver.synchronize_device(DEVICE).unwrap();
    assert_eq!(driver.now_us(), 0);
    driver.replay(graph, SECOND).unwrap();
    driver.synchronize_device(DEVICE).unwrap();
    assert_eq!(driver.now_us(), 30);
    driver.destroy_graph(graph).unwrap();
    assert_eq!(refusal(driver.replay(graph, SECOND)), Status::InvalidValue);
}

#[test]
fn a_replay_starts_after_the_same_graphs_last_replay() {
    let driver = driver();
    driver.begin_capture(FIRST, GLOBAL).unwrap();
    driver.launch(FIRST, &[], &[], 10).unwrap();
    let graph = driver.end_capture(FIRST).unwrap();
    driver.replay(graph, FIRST).unwrap();
    driver.replay(graph, SECOND).unwrap();
    driver.synchronize_device(DEVICE).unwrap();
    assert_eq!(driver.now_us(), 20);
}
