//! What is allowed while a stream is capturing, and what spoils the capture.

use super::{Clause, DEVICE, MIB, Rig, Verdict, expect_completion, granularity, on_new_thread, refused};
use crate::driver::{CaptureMode, CaptureStatus, Completion, Status};
use crate::id::{Event, Stream, StreamHandle};

pub(super) const CLAUSES: &[Clause] = clauses![
    a_stream_says_whether_it_is_capturing,
    a_spoiled_capture_is_seen_until_it_is_ended,
    allocate_is_refused_in_a_global_capture_and_spoils_it,
    query_is_refused_in_a_global_capture_and_spoils_it,
    a_global_capture_of_another_thread_refuses_too,
    a_thread_local_capture_refuses_only_its_own_thread,
    a_relaxed_capture_refuses_nothing,
    everything_is_allowed_after_the_exchange_to_relaxed,
    exchange_returns_the_former_mode,
    the_mode_belongs_to_the_thread,
    mapping_is_allowed_in_a_global_capture,
    events_are_made_and_recorded_elsewhere_in_a_global_capture,
    the_default_stream_is_usable_beside_a_capture,
    a_record_on_the_capturing_stream_is_captured,
    a_wait_on_an_outside_event_spoils_the_capture,
    synchronize_device_is_refused_while_a_stream_captures_and_spoils_it,
];

fn expect_status(rig: &dyn Rig, stream: Stream, expected: CaptureStatus) -> Verdict {
    let found = rig.driver().capture_status(stream)?;
    ensure!(found == expected, "the stream's capture status should be {expected:?} and is {found:?}");
    Ok(())
}

/// Ends a capture that has to be whole.
fn end_whole(rig: &dyn Rig, stream: Stream) -> Verdict {
    expect_status(rig, stream, CaptureStatus::Active)?;
    ensure!(rig.end_capture(stream), "the capture was active and yet gave no graph");
    expect_status(rig, stream, CaptureStatus::None)?;
    rig.destroy_stream(stream);
    Ok(())
}

/// Ends a capture that has to be spoiled.
fn end_spoiled(rig: &dyn Rig, stream: Stream) -> Verdict {
    expect_status(rig, stream, CaptureStatus::Invalidated)?;
    ensure!(!rig.end_capture(stream), "the capture was spoiled and yet gave a graph");
    expect_status(rig, stream, CaptureStatus::None)?;
    rig.destroy_stream(stream);
    Ok(())
}

/// A stream that is capturing.
fn capturing(rig: &dyn Rig, mode: CaptureMode) -> Stream {
    let stream = rig.make_stream(DEVICE);
    rig.begin_capture(stream, mode);
    stream
}

/// An event whose work has ended.
fn finished_event(rig: &dyn Rig) -> crate::driver::Result<Event> {
    let event = rig.driver().create_event(DEVICE)?;
    let stream = rig.make_stream(DEVICE);
    rig.driver().record_event(event, stream)?;
    rig.driver().synchronize_event(DEVICE, event)?;
    rig.destroy_stream(stream);
    Ok(event)
}

/// Allocates and frees, which only a relaxed mode allows beside a capture.
fn allocate_and_free(rig: &dyn Rig) -> crate::driver::Result<()> {
    let address = rig.driver().allocate(DEVICE, 4 * MIB)?;
    rig.driver().free(DEVICE, address)
}

fn a_stream_says_whether_it_is_capturing(rig: &dyn Rig) -> Verdict {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let other = rig.make_stream(DEVICE);
        let stream = rig.make_stream(DEVICE);
        expect_status(rig, stream, CaptureStatus::None)?;
        rig.begin_capture(stream, mode);
        expect_status(rig, stream, CaptureStatus::Active)?;
        expect_status(rig, other, CaptureStatus::None)?;
        on_new_thread(|| expect_status(rig, stream, CaptureStatus::Active))?;
        end_whole(rig, stream)?;
        rig.destroy_stream(other);
    }
    Ok(())
}

fn a_spoiled_capture_is_seen_until_it_is_ended(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let event = driver.create_event(DEVICE)?;
    let stream = capturing(rig, CaptureMode::Global);
    refused("allocate", driver.allocate(DEVICE, MIB), Status::CaptureUnsupported)?;
    refused("a record on the spoiled stream", driver.record_event(event, stream), Status::CaptureInvalidated)?;
    end_spoiled(rig, stream)?;
    driver.destroy_event(DEVICE, event)?;
    allocate_and_free(rig)?;
    Ok(())
}

fn allocate_is_refused_in_a_global_capture_and_spoils_it(rig: &dyn Rig) -> Verdict {
    let stream = capturing(rig, CaptureMode::Global);
    refused("allocate", rig.driver().allocate(DEVICE, MIB), Status::CaptureUnsupported)?;
    end_spoiled(rig, stream)
}

fn query_is_refused_in_a_global_capture_and_spoils_it(rig: &dyn Rig) -> Verdict {
    let event = finished_event(rig)?;
    let stream = capturing(rig, CaptureMode::Global);
    refused("query_event", rig.driver().query_event(DEVICE, event), Status::CaptureUnsupported)?;
    end_spoiled(rig, stream)?;
    expect_completion(rig, "after the capture", DEVICE, event, Completion::Done)?;
    rig.driver().destroy_event(DEVICE, event)?;
    Ok(())
}

fn a_global_capture_of_another_thread_refuses_too(rig: &dyn Rig) -> Verdict {
    let stream = capturing(rig, CaptureMode::Global);
    on_new_thread(|| refused("allocate", rig.driver().allocate(DEVICE, MIB), Status::CaptureUnsupported))?;
    end_spoiled(rig, stream)
}

fn a_thread_local_capture_refuses_only_its_own_thread(rig: &dyn Rig) -> Verdict {
    let event = finished_event(rig)?;
    let stream = capturing(rig, CaptureMode::ThreadLocal);
    on_new_thread(|| {
        allocate_and_free(rig)?;
        expect_completion(rig, "on another thread", DEVICE, event, Completion::Done)
    })?;
    expect_status(rig, stream, CaptureStatus::Active)?;
    refused("allocate", rig.driver().allocate(DEVICE, MIB), Status::CaptureUnsupported)?;
    end_spoiled(rig, stream)?;
    rig.driver().destroy_event(DEVICE, event)?;
    Ok(())
}

fn a_relaxed_capture_refuses_nothing(rig: &dyn Rig) -> Verdict {
    let event = finished_event(rig)?;
    let stream = capturing(rig, CaptureMode::Relaxed);
    allocate_and_free(rig)?;
    expect_completion(rig, "beside a relaxed capture", DEVICE, event, Completion::Done)?;
    on_new_thread(|| Ok(allocate_and_free(rig)?))?;
    end_whole(rig, stream)?;
    rig.driver().destroy_event(DEVICE, event)?;
    Ok(())
}

fn everything_is_allowed_after_the_exchange_to_relaxed(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let event = finished_event(rig)?;
    let stream = capturing(rig, CaptureMode::Global);
    let former = driver.exchange_capture_mode(CaptureMode::Relaxed)?;
    allocate_and_free(rig)?;
    expect_completion(rig, "in relaxed mode", DEVICE, event, Completion::Done)?;
    driver.synchronize_event(DEVICE, event)?;
    driver.memory_info(DEVICE)?;
    driver.exchange_capture_mode(former)?;
    end_whole(rig, stream)?;
    driver.destroy_event(DEVICE, event)?;
    Ok(())
}

fn exchange_returns_the_former_mode(rig: &dyn Rig) -> Verdict {
    on_new_thread(|| {
        let mut expected = CaptureMode::Global;
        for mode in [CaptureMode::Relaxed, CaptureMode::ThreadLocal, CaptureMode::ThreadLocal, CaptureMode::Global] {
            let former = rig.driver().exchange_capture_mode(mode)?;
            ensure!(former == expected, "the former mode was {expected:?}, but the driver says {former:?}");
            expected = mode;
        }
        Ok(())
    })
}

fn the_mode_belongs_to_the_thread(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let stream = capturing(rig, CaptureMode::Global);
    let former = driver.exchange_capture_mode(CaptureMode::Relaxed)?;
    allocate_and_free(rig)?;
    on_new_thread(|| refused("on another thread", driver.allocate(DEVICE, MIB), Status::CaptureUnsupported))?;
    driver.exchange_capture_mode(former)?;
    end_spoiled(rig, stream)
}

fn mapping_is_allowed_in_a_global_capture(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let size = granularity(rig)?;
    let stream = capturing(rig, CaptureMode::Global);
    let base = driver.reserve_range(DEVICE, size)?;
    let handle = driver.create_handle(DEVICE, size)?;
    driver.map(DEVICE, base, size, handle)?;
    driver.set_access(DEVICE, base, size, &[DEVICE])?;
    driver.unmap(DEVICE, base, size)?;
    driver.release_handle(DEVICE, handle)?;
    driver.free_range(DEVICE, base, size)?;
    driver.memory_info(DEVICE)?;
    end_whole(rig, stream)
}

fn events_are_made_and_recorded_elsewhere_in_a_global_capture(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let [first, second] = [rig.make_stream(DEVICE), rig.make_stream(DEVICE)];
    let stream = capturing(rig, CaptureMode::Global);
    let event = driver.create_event(DEVICE)?;
    driver.record_event(event, first)?;
    driver.wait_event(second, event)?;
    driver.stream_device(first.handle)?;
    driver.destroy_event(DEVICE, event)?;
    end_whole(rig, stream)?;
    rig.destroy_stream(first);
    rig.destroy_stream(second);
    Ok(())
}

fn the_default_stream_is_usable_beside_a_capture(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let event = driver.create_event(DEVICE)?;
    let stream = capturing(rig, CaptureMode::Global);
    for handle in [StreamHandle::DEFAULT, StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
        let default = Stream { device: DEVICE, handle };
        expect_status(rig, default, CaptureStatus::None)?;
        driver.record_event(event, default)?;
    }
    end_whole(rig, stream)?;
    driver.destroy_event(DEVICE, event)?;
    Ok(())
}

fn a_record_on_the_capturing_stream_is_captured(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let event = driver.create_event(DEVICE)?;
    let stream = capturing(rig, CaptureMode::Relaxed);
    driver.record_event(event, stream)?;
    expect_status(rig, stream, CaptureStatus::Active)?;
    refused("query_event", driver.query_event(DEVICE, event), Status::CapturedEvent)?;
    refused("synchronize_event", driver.synchronize_event(DEVICE, event), Status::InvalidValue)?;
    rig.end_capture(stream);
    rig.destroy_stream(stream);
    driver.destroy_event(DEVICE, event)?;
    Ok(())
}

fn a_wait_on_an_outside_event_spoils_the_capture(rig: &dyn Rig) -> Verdict {
    for mode in [CaptureMode::Global, CaptureMode::Relaxed] {
        let event = finished_event(rig)?;
        let stream = capturing(rig, mode);
        refused("wait_event", rig.driver().wait_event(stream, event), Status::CaptureIsolation)?;
        end_spoiled(rig, stream)?;
        rig.driver().destroy_event(DEVICE, event)?;
    }
    Ok(())
}

fn synchronize_device_is_refused_while_a_stream_captures_and_spoils_it(rig: &dyn Rig) -> Verdict {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let stream = capturing(rig, mode);
        refused("synchronize_device", rig.driver().synchronize_device(DEVICE), Status::CaptureUnsupported)?;
        end_spoiled(rig, stream)?;
    }
    Ok(())
}
