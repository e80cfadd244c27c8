//! Queued work, events, and the two clocks.

use super::*;
use crate::driver::{Call, Completion};

fn query(driver: &SimDriver, event: Event) -> Completion {
    driver.query_event(DEVICE, event).unwrap()
}

#[test]
fn a_launch_takes_no_time_and_its_work_ends_after_its_duration() {
    let driver = driver();
    driver.launch(FIRST, &[], &[], 100).unwrap();
    let event = recorded(&driver, FIRST);
    driver.advance(99).unwrap();
    assert_eq!(query(&driver, event), Completion::Pending);
    driver.advance(1).unwrap();
    assert_eq!(query(&driver, event), Completion::Done);
}

#[test]
fn even_an_empty_kernel_is_pending_until_time_passes() {
    let driver = driver();
    driver.launch(FIRST, &[], &[], 0).unwrap();
    let event = recorded(&driver, FIRST);
    assert_eq!(query(&driver, event), Completion::Pending);
    driver.advance(1).unwrap();
    assert_eq!(query(&driver, event), Completion::Done);
}

#[test]
fn an_event_on_an_idle_stream_or_never_recorded_is_done() {
    let driver = driver();
    let idle = recorded(&driver, FIRST);
    let unrecorded = driver.create_event(DEVICE).unwrap();
    assert_eq!((query(&driver, idle), query(&driver, unrecorded)), (Completion::Done, Completion::Done));
}

#[test]
fn a_second_record_moves_the_mark() {
    let driver = driver();
    let event = recorded(&driver, FIRST);
    driver.launch(SECOND, &[], &[], 10).unwrap();
    driver.record_event(event, on_device(SECOND)).unwrap();
    assert_eq!(query(&driver, event), Completion::Pending);
}

#[test]
fn kernels_of_one_stream_run_one_after_the_other_and_those_of_two_at_once() {
    let driver = driver();
    driver.launch(FIRST, &[], &[], 10).unwrap();
    driver.launch(FIRST, &[], &[], 10).unwrap();
    driver.launch(SECOND, &[], &[], 10).unwrap();
    let (first, second) = (recorded(&driver, FIRST), recorded(&driver, SECOND));
    driver.advance(10).unwrap();
    assert_eq!((query(&driver, first), query(&driver, second)), (Completion::Pending, Completion::Done));
    driver.advance(10).unwrap();
    assert_eq!(query(&driver, first), Completion::Done);
}

#[test]
fn a_stream_that_waits_starts_after_what_it_waits_for() {
    let driver = driver();
    driver.launch(FIRST, &[], &[], 50).unwrap();
    driver.wait(SECOND, FIRST).unwrap();
    driver.launch(SECOND, &[], &[], 10).unwrap();
    let event = recorded(&driver, SECOND);
    driver.advance(59).unwrap();
    assert_eq!(query(&driver, event), Completion::Pending);
    driver.advance(1).unwrap();
    assert_eq!(query(&driver, event), Completion::Done);
}

#[test]
fn completing_a_stream_ends_what_it_waits_for_and_nothing_else() {
    let driver = driver();
    driver.launch(FIRST, &[], &[], 50).unwrap();
    driver.wait(SECOND, FIRST).unwrap();
    driver.launch(FIRST, &[], &[], 50).unwrap();
    driver.launch(SECOND, &[], &[], 50).unwrap();
    driver.launch(THIRD, &[], &[], 1).unwrap();
    let [first, second, third] = [FIRST, SECOND, THIRD].map(|stream| recorded(&driver, stream));
    driver.complete(Some(SECOND)).unwrap();
    assert_eq!(query(&driver, second), Completion::Done);
    assert_eq!(query(&driver, first), Completion::Pending, "queued after what the second stream waits for");
    assert_eq!(query(&driver, third), Completion::Pending);
    assert_eq!(driver.now_us(), 0);
    driver.complete(None).unwrap();
    assert_eq!((query(&driver, first), query(&driver, third)), (Completion::Done, Completion::Done));
}

#[test]
fn a_long_chain_of_waits_completes() {
    let driver = driver();
    for _ in 0..20_000 {
        driver.launch(FIRST, &[], &[], 1).unwrap();
        driver.wait(SECOND, FIRST).unwrap();
        driver.launch(SECOND, &[], &[], 1).unwrap();
        driver.wait(FIRST, SECOND).unwrap();
    }
    driver.complete(Some(FIRST)).unwrap();
    let event = recorded(&driver, SECOND);
    assert_eq!(query(&driver, event), Completion::Done);
}

#[test]
fn waiting_on_the_host_moves_the_clock_and_is_counted_apart() {
    let driver = driver();
    driver.launch(FIRST, &[], &[], 30).unwrap();
    let event = recorded(&driver, FIRST);
    driver.synchronize_event(DEVICE, event).unwrap();
    driver.synchronize_event(DEVICE, event).unwrap();
    assert_eq!((driver.now_us(), driver.host_waits()), (30, 1), "the second call had nothing to wait for");
    assert!((driver.host_wait_us() - 30.0).abs() < 1e-9);
    assert!(driver.elapsed_us() < 30.0);
}

#[test]
fn freeing_a_segment_waits_for_all_work_on_the_device() {
    let driver = driver();
    let segment = driver.allocate(DEVICE, PAGE).unwrap();
    driver.launch(FIRST, &[], &[], 30).unwrap();
    driver.launch(SECOND, &[], &[], 70).unwrap();
    driver.free(DEVICE, segment).unwrap();
    assert_eq!((driver.now_us(), driver.host_waits()), (70, 1));
}

#[test]
fn with_a_lag_an_event_completes_that_long_after_its_record() {
    let driver = SimDriver::new(SimOptions { lag_us: Some(20), ..small() });
    driver.advance_to(5).unwrap();
    let event = recorded(&driver, FIRST);
    driver.advance_to(24).unwrap();
    assert_eq!(query(&driver, event), Completion::Pending);
    driver.advance_to(25).unwrap();
    assert_eq!(query(&driver, event), Completion::Done);

    driver.record_event(event, on_device(FIRST)).unwrap();
    driver.synchronize_event(DEVICE, event).unwrap();
    assert_eq!(driver.now_us(), 45);
    driver.advance_to(30).unwrap();
    assert_eq!(driver.now_us(), 45, "the clock does not go back");
}

#[test]
fn an_event_of_another_device_cannot_mark_a_stream() {
    let driver = SimDriver::new(SimOptions { devices: 2, ..small() });
    let event = driver.create_event(DeviceId(1)).unwrap();
    assert_eq!(status(driver.record_event(event, on_device(FIRST))), Status::InvalidHandle);
    assert_eq!(status(driver.query_event(DEVICE, event)), Status::InvalidHandle);
}

#[test]
fn a_stream_can_wait_for_an_event_of_another_device() {
    let driver = SimDriver::new(SimOptions { devices: 2, ..small() });
    driver.launch(FIRST, &[], &[], 10).unwrap();
    let event = recorded(&driver, FIRST);
    driver.set_current_device(DeviceId(1)).unwrap();
    driver.touch_stream(SECOND).unwrap();
    driver.wait_event(Stream { device: DeviceId(1), handle: SECOND }, event).unwrap();
    driver.complete(Some(SECOND)).unwrap();
    assert_eq!(query(&driver, event), Completion::Done);
}

#[test]
fn a_stream_belongs_to_the_device_that_was_current_at_its_first_use() {
    let driver = SimDriver::new(SimOptions { devices: 2, ..small() });
    driver.set_current_device(DeviceId(1)).unwrap();
    driver.launch(FIRST, &[], &[], 1).unwrap();
    driver.set_current_device(DEVICE).unwrap();
    driver.launch(FIRST, &[], &[], 1).unwrap();
    assert_eq!(driver.stream_device(FIRST).unwrap(), DeviceId(1));
    let event = driver.create_event(DEVICE).unwrap();
    assert_eq!(status(driver.record_event(event, on_device(FIRST))), Status::InvalidHandle);
}

#[test]
fn a_destroyed_streams_work_goes_on() {
    let driver = driver();
    driver.launch(FIRST, &[], &[], 10).unwrap();
    let event = recorded(&driver, FIRST);
    driver.destroy_stream(FIRST).unwrap();
    assert_eq!(query(&driver, event), Completion::Pending);
    driver.complete(Some(FIRST)).unwrap();
    assert_eq!(query(&driver, event), Completion::Done);
    driver.check().unwrap();
}

#[test]
fn a_driver_call_that_is_given_a_destroyed_stream_is_refused_and_a_violation() {
    for call in [Call::RecordEvent, Call::WaitEvent, Call::StreamContext, Call::CaptureStatus] {
        let driver = driver();
        let event = recorded(&driver, FIRST);
        let use_stream = || match call {
            Call::RecordEvent => driver.record_event(event, on_device(FIRST)),
            Call::WaitEvent => driver.wait_event(on_device(FIRST), event),
            Call::StreamContext => driver.stream_device(FIRST).map(drop),
            _ => driver.capture_status(on_device(FIRST)).map(drop),
        };
        driver.destroy_stream(FIRST).unwrap();
        driver.check().unwrap();
        assert_eq!(status(use_stream()), Status::InvalidHandle);
        let expected = Violation::DeadStream { call, stream: on_device(FIRST) };
        assert_eq!(violation(driver.check()), expected);
        assert_eq!(violation(driver.open_stream(FIRST)), expected, "the program hears of it at its next call");
        use_stream().expect("the handle names a new stream");
    }
}

#[test]
fn a_destroyed_streams_handle_names_a_new_stream_from_its_next_use_on() {
    let driver = driver();
    driver.launch(FIRST, &[], &[], 10).unwrap();
    let old = recorded(&driver, FIRST);
    driver.destroy_stream(FIRST).unwrap();
    assert_eq!(refusal(driver.destroy_stream(FIRST)), Status::InvalidHandle);
    driver.launch(FIRST, &[], &[], 1).unwrap();
    let new = recorded(&driver, FIRST);
    driver.complete(Some(FIRST)).unwrap();
    assert_eq!((query(&driver, old), query(&driver, new)), (Completion::Pending, Completion::Done));
}

#[test]
fn a_new_stream_under_an_old_handle_belongs_to_the_device_that_is_current_then() {
    let driver = SimDriver::new(SimOptions { devices: 2, ..small() });
    driver.open_stream(FIRST).unwrap();
    driver.destroy_stream(FIRST).unwrap();
    driver.set_current_device(DeviceId(1)).unwrap();
    driver.open_stream(FIRST).unwrap();
    assert_eq!(driver.stream_device(FIRST).unwrap(), DeviceId(1));
}

#[test]
fn handles_0_and_1_are_one_stream_and_handle_2_is_each_threads_own() {
    let driver = driver();
    driver.launch(StreamHandle::DEFAULT, &[], &[], 10).unwrap();
    let legacy = recorded(&driver, StreamHandle::LEGACY);
    let own = recorded(&driver, StreamHandle::PER_THREAD);
    assert_eq!((query(&driver, legacy), query(&driver, own)), (Completion::Pending, Completion::Done));

    driver.launch(StreamHandle::PER_THREAD, &[], &[], 10).unwrap();
    let elsewhere = on_another_thread(&driver, |driver| recorded(driver, StreamHandle::PER_THREAD));
    assert_eq!(query(&driver, elsewhere), Completion::Done, "it marks the stream of the thread that recorded it");
}

#[test]
fn destroyed_events_are_refused() {
    let driver = driver();
    let event = recorded(&driver, FIRST);
    assert_eq!(driver.live_events(), 1);
    driver.destroy_event(DEVICE, event).unwrap();
    assert_eq!(driver.live_events(), 0);
    assert_eq!(status(driver.destroy_event(DEVICE, event)), Status::InvalidHandle);
    assert_eq!(status(driver.query_event(DEVICE, event)), Status::InvalidHandle);
    assert_eq!(status(driver.wait_event(on_device(FIRST), event)), Status::InvalidHandle);
    assert_eq!(driver.call_count(Call::DestroyEvent), 2);
}
