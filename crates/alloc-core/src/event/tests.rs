//! One stream and its blocks, epoch by epoch.

use super::*;

const STREAM: Stream = Stream { device: DeviceId(0), handle: StreamHandle(16) };
const KEY: StreamKey = StreamKey { handle: STREAM.handle, device: STREAM.device, thread: 0 };

fn table() -> (StreamTable, StreamIx) {
    let mut table = StreamTable::default();
    let stream = table.add(KEY, STREAM);
    (table, stream)
}

fn block(number: usize) -> BlockId {
    BlockId::from_index(number + 1)
}

#[test]
fn one_event_answers_for_all_frees_before_it() {
    let (mut table, stream) = table();
    table.wait_for_current(stream, block(1), 512);
    table.wait_for_current(stream, block(2), 512);
    let closing = table.begin_close(stream, 1).expect("no event yet");
    table.commit_close(&closing, Closed::Recorded(Event(9)), None);
    table.wait_for_current(stream, block(3), 512);
    table.finish(stream, closing.epoch);
    let released: Vec<_> = std::iter::from_fn(|| table.next_released(stream)).collect();
    assert_eq!(released, [block(1), block(2)]);
    table.check().expect("consistent");
}

#[test]
fn failed_record_leaves_its_frees_to_the_next_event() {
    let (mut table, stream) = table();
    table.wait_for_current(stream, block(1), 512);
    let closing = table.begin_close(stream, 1).expect("no event yet");
    table.commit_close(&closing, Closed::Failed, Some(Event(4)));
    assert_eq!(table.unanswered(stream).collect::<Vec<_>>(), [block(1)]);
    let closing = table.begin_close(stream, 1).expect("still no event");
    assert_eq!(closing.event, Some(Event(4)));
    table.commit_close(&closing, Closed::Recorded(Event(4)), None);
    table.finish(stream, closing.epoch);
    assert_eq!(table.next_released(stream), Some(block(1)));
}

#[test]
fn event_of_an_epoch_that_a_synchronise_proved_over_meanwhile_is_idle() {
    let (mut table, stream) = table();
    let closing = table.begin_close(stream, 1).expect("no event yet");
    for (stream, epoch) in table.begin_synchronize() {
        table.finish(stream, epoch);
    }
    table.commit_close(&closing, Closed::Recorded(Event(9)), None);
    table.check().expect("no closed epoch is over");
    assert_eq!(table.take_idle_events(), [(DeviceId(0), Event(9))]);
}

#[test]
fn event_that_a_thread_waits_for_is_not_recycled_under_it() {
    let (mut table, stream) = table();
    table.wait_for_current(stream, block(1), 512);
    let closing = table.begin_close(stream, 1).expect("no event yet");
    table.commit_close(&closing, Closed::Recorded(Event(9)), None);
    let marks = table.await_newest_marks();
    table.finish(stream, closing.epoch);
    assert_eq!(table.take_idle_events(), []);
    table.end_wait(&marks[0]);
    assert_eq!(table.take_idle_events(), [(DeviceId(0), Event(9))]);
}

#[test]
fn mark_that_is_never_reached_leaves_its_epoch_to_the_marks_beside_it() {
    let (mut table, stream) = table();
    for (number, epoch) in [(1, 1), (2, 2)] {
        table.wait_for_current(stream, block(number), 512);
        let closing = table.begin_close(stream, epoch).expect("no event yet");
        table.commit_close(&closing, Closed::Recorded(Event(epoch)), None);
    }
    let marks = table.oldest_marks();
    table.withdraw(&marks[1]);
    table.withdraw(&marks[1]);
    assert_eq!(table.unanswered(stream).collect::<Vec<_>>(), [block(2)]);
    table.check().expect("consistent");
    let closing = table.begin_close(stream, 2).expect("no event any more");
    assert_eq!(closing.event, Some(Event(2)), "the event itself is as good as before");
    table.commit_close(&closing, Closed::Recorded(Event(2)), None);
    table.withdraw(&marks[0]);
    assert!(table.unanswered(stream).next().is_none(), "the later mark answers for the earlier epoch");
    table.check().expect("consistent");
}

#[test]
fn epochs_closed_at_once_may_come_back_in_any_order() {
    let (mut table, stream) = table();
    table.wait_for_current(stream, block(1), 512);
    let first = table.begin_close(stream, 1).expect("no event yet");
    table.wait_for_current(stream, block(2), 512);
    let second = table.begin_close(stream, 2).expect("no event yet");
    table.commit_close(&second, Closed::Recorded(Event(2)), None);
    table.commit_close(&first, Closed::Recorded(Event(1)), None);
    table.check().expect("sorted again");
    table.finish(stream, second.epoch);
    assert_eq!(table.take_idle_events().len(), 2);
}

#[test]
fn frees_after_a_retirement_belong_to_the_epoch_that_it_closed() {
    let (mut table, stream) = table();
    let closing = table.begin_close(stream, 1).expect("no event yet");
    table.retire(stream);
    assert_eq!(table.current_epoch(stream), closing.epoch);
    assert_eq!(table.unanswered_devices(), [DeviceId(0)]);
    table.commit_close(&closing, Closed::Recorded(Event(9)), None);
    assert_eq!(table.unanswered_devices(), []);
    table.wait_for_current(stream, block(1), 512);
    assert!(table.begin_close(stream, closing.epoch).is_none());
    assert_eq!(table.live_targets(&[DeviceId(0)]), []);
    table.finish(stream, closing.epoch);
    assert!(table.is_over(stream));
    assert_eq!(table.next_released(stream), Some(block(1)));
    table.check().expect("consistent");
}

#[test]
fn device_synchronise_answers_for_a_retired_stream_without_an_event() {
    let (mut table, stream) = table();
    table.wait_for_current(stream, block(1), 512);
    let closing = table.begin_close(stream, 1).expect("no event yet");
    table.retire(stream);
    table.commit_close(&closing, Closed::Failed, Some(Event(4)));
    table.wait_for_current(stream, block(2), 512);
    for (stream, epoch) in table.begin_synchronize() {
        table.finish(stream, epoch);
    }
    let released: Vec<_> = std::iter::from_fn(|| table.next_released(stream)).collect();
    assert_eq!(released, [block(1), block(2)]);
    assert!(table.is_over(stream) && table.unanswered_devices().is_empty());
}

#[test]
fn retired_handle_names_a_new_stream() {
    let (mut table, stream) = table();
    table.retire(stream);
    assert_eq!(table.find(KEY), None);
    let successor = table.add(KEY, STREAM);
    assert_eq!(table.find(KEY), Some(successor));
}
