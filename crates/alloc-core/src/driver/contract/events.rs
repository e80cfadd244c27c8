//! Events, streams, and the order between them.

use super::{
    Clause, DEVICE, LONG, Rig, Verdict, expect_completion, keep_busy, let_finish, on_new_thread, refused, second_device,
};
use crate::driver::Completion::{Done, Pending};
use crate::driver::Status;
use crate::id::{DeviceId, Event, Stream, StreamHandle};

pub(super) const CLAUSES: &[Clause] = clauses![
    an_event_never_recorded_is_done,
    an_event_is_pending_until_the_work_before_it_has_ended,
    work_behind_the_mark_does_not_hold_an_event_up,
    a_second_record_moves_the_mark,
    another_streams_work_does_not_hold_an_event_up,
    one_event_is_recorded_on_several_streams_in_turn,
    every_default_handle_is_a_stream,
    both_names_of_the_default_stream_mean_the_same,
    every_device_has_its_own_default_stream,
    a_stream_waits_on_the_gpu_and_the_host_does_not,
    a_wait_is_for_the_mark_of_its_time,
    a_wait_for_an_event_never_recorded_holds_nothing_up,
    a_stream_waits_for_an_event_of_another_device,
    destroying_an_event_leaves_queued_waits_in_force,
    events_are_used_from_a_thread_without_a_current_device,
    a_stream_knows_its_device,
    an_event_of_another_device_is_refused,
];

fn expect(rig: &dyn Rig, what: &str, event: Event, expected: crate::driver::Completion) -> Verdict {
    expect_completion(rig, what, DEVICE, event, expected)
}

/// A new event, recorded on `stream` now.
fn recorded(rig: &dyn Rig, stream: Stream) -> crate::driver::Result<Event> {
    let event = rig.driver().create_event(stream.device)?;
    rig.driver().record_event(event, stream)?;
    Ok(event)
}

fn an_event_never_recorded_is_done(rig: &dyn Rig) -> Verdict {
    let event = rig.driver().create_event(DEVICE)?;
    expect(rig, "never recorded", event, Done)?;
    rig.driver().synchronize_event(DEVICE, event)?;
    rig.driver().destroy_event(DEVICE, event)?;
    Ok(())
}

fn an_event_is_pending_until_the_work_before_it_has_ended(rig: &dyn Rig) -> Verdict {
    let stream = rig.make_stream(DEVICE);
    let event = keep_busy(rig, stream)?;
    rig.driver().synchronize_event(DEVICE, event)?;
    expect(rig, "after synchronize_event", event, Done)?;
    let_finish(rig, stream, event)
}

fn work_behind_the_mark_does_not_hold_an_event_up(rig: &dyn Rig) -> Verdict {
    let stream = rig.make_stream(DEVICE);
    let before = recorded(rig, stream)?;
    let behind = keep_busy(rig, stream)?;
    rig.driver().synchronize_event(DEVICE, before)?;
    expect(rig, "before the work", before, Done)?;
    expect(rig, "behind the work", behind, Pending)?;
    rig.driver().destroy_event(DEVICE, before)?;
    let_finish(rig, stream, behind)
}

fn a_second_record_moves_the_mark(rig: &dyn Rig) -> Verdict {
    let stream = rig.make_stream(DEVICE);
    let event = recorded(rig, stream)?;
    rig.driver().synchronize_event(DEVICE, event)?;
    expect(rig, "on an idle stream", event, Done)?;
    rig.work(stream, LONG);
    expect(rig, "before it is recorded again", event, Done)?;
    rig.driver().record_event(event, stream)?;
    expect(rig, "recorded again behind long work", event, Pending)?;
    let_finish(rig, stream, event)
}

fn another_streams_work_does_not_hold_an_event_up(rig: &dyn Rig) -> Verdict {
    let [busy, idle] = [rig.make_stream(DEVICE), rig.make_stream(DEVICE)];
    let busy_event = keep_busy(rig, busy)?;
    let idle_event = recorded(rig, idle)?;
    rig.driver().synchronize_event(DEVICE, idle_event)?;
    expect(rig, "on the idle stream", idle_event, Done)?;
    expect(rig, "on the busy stream", busy_event, Pending)?;
    let_finish(rig, idle, idle_event)?;
    let_finish(rig, busy, busy_event)
}

fn one_event_is_recorded_on_several_streams_in_turn(rig: &dyn Rig) -> Verdict {
    let [busy, idle] = [rig.make_stream(DEVICE), rig.make_stream(DEVICE)];
    let event = keep_busy(rig, busy)?;
    rig.driver().record_event(event, idle)?;
    rig.driver().synchronize_event(DEVICE, event)?;
    let witness = recorded(rig, busy)?;
    expect(rig, "its new stream was idle, but the host waited for its old one", witness, Pending)?;
    let_finish(rig, idle, event)?;
    let_finish(rig, busy, witness)
}

fn every_default_handle_is_a_stream(rig: &dyn Rig) -> Verdict {
    for handle in [StreamHandle::DEFAULT, StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
        let stream = Stream { device: DEVICE, handle };
        let event = keep_busy(rig, stream)?;
        rig.driver().wait_event(stream, event)?;
        rig.driver().synchronize_event(DEVICE, event)?;
        expect(rig, "after synchronize_event", event, Done)?;
        rig.driver().destroy_event(DEVICE, event)?;
    }
    Ok(())
}

fn both_names_of_the_default_stream_mean_the_same(rig: &dyn Rig) -> Verdict {
    let event = keep_busy(rig, Stream { device: DEVICE, handle: StreamHandle::DEFAULT })?;
    let same = recorded(rig, Stream { device: DEVICE, handle: StreamHandle::LEGACY })?;
    expect(rig, "under its other name", same, Pending)?;
    rig.driver().synchronize_event(DEVICE, same)?;
    expect(rig, "under its first name", event, Done)?;
    rig.driver().destroy_event(DEVICE, same)?;
    rig.driver().destroy_event(DEVICE, event)?;
    Ok(())
}

fn every_device_has_its_own_default_stream(rig: &dyn Rig) -> Verdict {
    let second = second_device(rig)?;
    let driver = rig.driver();
    let here = keep_busy(rig, Stream { device: DEVICE, handle: StreamHandle::DEFAULT })?;
    let there = recorded(rig, Stream { device: second, handle: StreamHandle::DEFAULT })?;
    driver.synchronize_event(second, there)?;
    expect_completion(rig, "on the idle device", second, there, Done)?;
    expect(rig, "on the busy device", here, Pending)?;
    driver.synchronize_event(DEVICE, here)?;
    driver.destroy_event(DEVICE, here)?;
    driver.destroy_event(second, there)?;
    Ok(())
}

fn a_stream_waits_on_the_gpu_and_the_host_does_not(rig: &dyn Rig) -> Verdict {
    let [busy, waiting] = [rig.make_stream(DEVICE), rig.make_stream(DEVICE)];
    let event = keep_busy(rig, busy)?;
    rig.driver().wait_event(waiting, event)?;
    expect(rig, "right after wait_event", event, Pending)?;
    let behind = recorded(rig, waiting)?;
    expect(rig, "on the stream that waits", behind, Pending)?;
    rig.driver().synchronize_event(DEVICE, behind)?;
    expect(rig, "what the stream waited for", event, Done)?;
    let_finish(rig, waiting, behind)?;
    let_finish(rig, busy, event)
}

fn a_wait_is_for_the_mark_of_its_time(rig: &dyn Rig) -> Verdict {
    let [busy, waiting] = [rig.make_stream(DEVICE), rig.make_stream(DEVICE)];
    let event = recorded(rig, busy)?;
    rig.driver().wait_event(waiting, event)?;
    rig.work(busy, LONG);
    rig.driver().record_event(event, busy)?;
    let behind = recorded(rig, waiting)?;
    rig.driver().synchronize_event(DEVICE, behind)?;
    expect(rig, "recorded again after the wait", event, Pending)?;
    let_finish(rig, waiting, behind)?;
    let_finish(rig, busy, event)
}

fn a_wait_for_an_event_never_recorded_holds_nothing_up(rig: &dyn Rig) -> Verdict {
    let stream = rig.make_stream(DEVICE);
    let never = rig.driver().create_event(DEVICE)?;
    rig.driver().wait_event(stream, never)?;
    let behind = recorded(rig, stream)?;
    rig.driver().synchronize_event(DEVICE, behind)?;
    expect(rig, "behind the wait", behind, Done)?;
    rig.driver().destroy_event(DEVICE, never)?;
    let_finish(rig, stream, behind)
}

fn a_stream_waits_for_an_event_of_another_device(rig: &dyn Rig) -> Verdict {
    let second = second_device(rig)?;
    let [busy, waiting] = [rig.make_stream(second), rig.make_stream(DEVICE)];
    let there = keep_busy(rig, busy)?;
    rig.driver().wait_event(waiting, there)?;
    let here = recorded(rig, waiting)?;
    expect(rig, "on the stream that waits", here, Pending)?;
    rig.driver().synchronize_event(DEVICE, here)?;
    expect_completion(rig, "what the stream waited for", second, there, Done)?;
    let_finish(rig, waiting, here)?;
    let_finish(rig, busy, there)
}

fn destroying_an_event_leaves_queued_waits_in_force(rig: &dyn Rig) -> Verdict {
    let [busy, waiting] = [rig.make_stream(DEVICE), rig.make_stream(DEVICE)];
    let witness = keep_busy(rig, busy)?;
    let event = recorded(rig, busy)?;
    rig.driver().wait_event(waiting, event)?;
    rig.driver().destroy_event(DEVICE, event)?;
    let behind = recorded(rig, waiting)?;
    expect(rig, "destroy_event must not wait", witness, Pending)?;
    rig.driver().synchronize_event(DEVICE, behind)?;
    expect(rig, "what the stream waited for", witness, Done)?;
    let_finish(rig, waiting, behind)?;
    let_finish(rig, busy, witness)
}

fn events_are_used_from_a_thread_without_a_current_device(rig: &dyn Rig) -> Verdict {
    let stream = rig.make_stream(DEVICE);
    let event = rig.driver().create_event(DEVICE)?;
    rig.work(stream, LONG);
    on_new_thread(|| {
        let driver = rig.driver();
        driver.record_event(event, stream)?;
        expect(rig, "behind long work", event, Pending)?;
        driver.wait_event(stream, event)?;
        driver.synchronize_event(DEVICE, event)?;
        expect(rig, "after synchronize_event", event, Done)
    })?;
    let_finish(rig, stream, event)
}

fn a_stream_knows_its_device(rig: &dyn Rig) -> Verdict {
    for index in 0..rig.driver().device_count()?.min(2) {
        let device = DeviceId(index);
        let stream = rig.make_stream(device);
        let look = || {
            let found = rig.driver().stream_device(stream.handle)?;
            ensure!(found == device, "a stream of {device} is said to be of {found}");
            Ok(())
        };
        look()?;
        on_new_thread(look)?;
        rig.destroy_stream(stream);
    }
    Ok(())
}

fn an_event_of_another_device_is_refused(rig: &dyn Rig) -> Verdict {
    let second = second_device(rig)?;
    let driver = rig.driver();
    let event = driver.create_event(second)?;
    let stream = rig.make_stream(DEVICE);
    refused("on a stream", driver.record_event(event, stream), Status::InvalidHandle)?;
    let default = Stream { device: DEVICE, handle: StreamHandle::DEFAULT };
    refused("on the default stream", driver.record_event(event, default), Status::InvalidHandle)?;
    driver.destroy_event(second, event)?;
    rig.destroy_stream(stream);
    Ok(())
}
