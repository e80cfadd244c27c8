//! Carrying plans out: driver calls, and nothing else.
//!
//! A failure part of the way is undone here, so that the state hears either that all was done or what is left.

use crate::{
    backing::mapping::Mapping,
    block::BlockId,
    driver::{Call, CaptureMode, CaptureStatus, Completion, Driver, DriverError, Status},
    event::{Answers, Closed, Closing, Mark, Target},
    id::{DevicePtr, Event, PhysicalHandle, Stream},
    plan::{
        Departure, Map, MapFailure, Obtain, ObtainError, Outcome, Plan, Release, ReleaseRun, Released, RunOutcome,
        Source, Synchronize, UnmapRun,
    },
    source::{Origin, SourceError, SourceFailed},
    thread::thread_number,
};

/// Makes the plan's calls. Whatever some stream is capturing meanwhile is not disturbed.
///
/// The user's callback is not a driver call: the caller runs it.
pub(crate) fn execute<D: Driver>(driver: &D, plan: Plan) -> Outcome {
    match plan {
        Plan::Close(closings) => close(driver, closings),
        Plan::CallBack => Outcome::CalledBack(false),
        plan => match driver.exchange_capture_mode(CaptureMode::Relaxed) {
            Ok(former) => {
                let outcome = execute_relaxed(driver, plan);
                // A thread that stays relaxed refuses less than it should, which harms nobody; try twice all the same.
                let _ = driver.exchange_capture_mode(former).or_else(|_| driver.exchange_capture_mode(former));
                outcome
            }
            Err(error) => refuse(plan, error),
        },
    }
}

fn execute_relaxed<D: Driver>(driver: &D, plan: Plan) -> Outcome {
    match plan {
        Plan::Poll(marks) => poll(driver, &marks),
        Plan::Wait(marks) => wait(driver, marks),
        Plan::Synchronize(synchronize) => {
            let result = synchronize_unless_capturing(driver, &synchronize);
            Outcome::Synchronized(synchronize, result)
        }
        Plan::Obtain(obtain) => {
            let result = obtain_segment(driver, &obtain);
            Outcome::Obtained(obtain, result)
        }
        Plan::Reserve(reserve) => {
            let result = driver.reserve_range(reserve.device, reserve.size);
            Outcome::Reserved(reserve, result)
        }
        Plan::Map(map) => {
            let result = create_and_map(driver, &map);
            Outcome::Mapped(map, result)
        }
        Plan::Unmap(runs) => unmap(driver, runs),
        Plan::TakeOver(taken) => {
            let result = wait_on_gpu(driver, taken.stream, &taken.waits);
            Outcome::TookOver(taken, result)
        }
        Plan::Release(release) => Outcome::Released(give_back(driver, release)),
        Plan::HandBack(departures) => {
            let hand_back = |departure| {
                let result = hand_back(&departure);
                (departure, result)
            };
            Outcome::HandedBack(departures.into_iter().map(hand_back).collect(), None)
        }
        Plan::Close(_) | Plan::CallBack => unreachable!("carried out without a change of mode"),
    }
}

/// The outcome of a plan of which no call was made.
fn refuse(plan: Plan, error: DriverError) -> Outcome {
    match plan {
        Plan::Poll(_) => Outcome::Polled(Answers::default(), Some(error)),
        Plan::Wait(marks) => Outcome::Waited(Answers { marks, captured: Vec::new() }, Err(error)),
        Plan::Synchronize(synchronize) => Outcome::Synchronized(synchronize, Err(error)),
        Plan::Obtain(obtain) => Outcome::Obtained(obtain, Err(ObtainError::Driver(error))),
        Plan::Reserve(reserve) => Outcome::Reserved(reserve, Err(error)),
        Plan::Map(map) => Outcome::Mapped(map, Err(MapFailure { error, strays: Vec::new(), stuck: Vec::new() })),
        Plan::Unmap(runs) => Outcome::Unmapped(runs.into_iter().map(|run| (run, false)).collect(), Some(error)),
        Plan::TakeOver(taken) => Outcome::TookOver(taken, Err(error)),
        Plan::Release(release) => Outcome::Released(Released {
            segments: release.segments.into_iter().map(|segment| (segment, false)).collect(),
            runs: release.runs.into_iter().map(|run| (run, RunOutcome::Kept)).collect(),
            ranges: release.ranges.into_iter().map(|range| (range, false)).collect(),
            strays: release.strays.into_iter().map(|stray| (stray, false)).collect(),
            events: release.events,
            error: Some(error),
        }),
        Plan::HandBack(departures) => {
            let kept = departures.into_iter().map(|departure| (departure, Err(SourceFailed)));
            Outcome::HandedBack(kept.collect(), Some(error))
        }
        Plan::Close(_) | Plan::CallBack => unreachable!("carried out without a change of mode"),
    }
}

fn obtain_segment<D: Driver>(driver: &D, obtain: &Obtain) -> Result<DevicePtr, ObtainError> {
    let Obtain { device, size, user, .. } = *obtain;
    match &obtain.origin {
        Origin::Driver => driver.allocate(device, size).map_err(ObtainError::Driver),
        Origin::Source(source) => match source.obtain(device, size, user.stream) {
            Ok(Some(address)) => Ok(address),
            Ok(None) => Err(ObtainError::OutOfMemory),
            Err(SourceFailed) => Err(ObtainError::Source(SourceError::NotObtained { pool: user.pool, size })),
        },
    }
}

/// Gives a segment back to where it came from.
pub(crate) fn hand_back(departure: &Departure) -> Result<(), SourceFailed> {
    let Departure { device, base, size, user, .. } = *departure;
    departure.source.give_back(device, base, size, user.stream)
}

fn close<D: Driver>(driver: &D, closings: Vec<Closing>) -> Outcome {
    let mut first_error = None;
    let closed = closings.into_iter().map(|mut closing| {
        let mut spare = closing.event.take();
        let closed = close_one(driver, &closing, &mut spare).unwrap_or_else(|error| {
            first_error.get_or_insert(error);
            Closed::Failed
        });
        (closing, closed, spare)
    });
    let closed = closed.collect();
    Outcome::Closed(closed, first_error)
}

/// Records an event on the closing's stream, using `spare` or creating one; it stays in `spare` if it was not used.
fn close_one<D: Driver>(driver: &D, closing: &Closing, spare: &mut Option<Event>) -> Result<Closed, DriverError> {
    if !can_name(closing.target) {
        return Ok(Closed::Elsewhere);
    }
    let target = closing.target.stream;
    match driver.capture_status(target) {
        Ok(CaptureStatus::None) => {}
        Ok(CaptureStatus::Active | CaptureStatus::Invalidated) => return Ok(Closed::Capturing),
        Err(error) => return unless_gone(error),
    }
    let event = match *spare {
        Some(event) => event,
        None => *spare.insert(driver.create_event(target.device)?),
    };
    match driver.record_event(event, target) {
        Ok(()) => {
            *spare = None;
            Ok(Closed::Recorded(event))
        }
        Err(error) => unless_gone(error),
    }
}

/// Whether a driver call of this thread can name the stream.
fn can_name(target: Target) -> bool {
    target.thread == 0 || target.thread == thread_number()
}

/// A stream that was destroyed can record nothing, but its work goes on: only the whole device can answer for it. That is
/// not waited for here, since it spoils what captures, and since a free waits for nothing.
///
/// A real driver may crash instead of noticing it, so this is no way to treat streams that are known to be gone.
fn unless_gone(error: DriverError) -> Result<Closed, DriverError> {
    if error.status == Status::InvalidHandle { Ok(Closed::Gone) } else { Err(error) }
}

/// Asks about each stream's marks, oldest first, until one is not reached.
fn poll<D: Driver>(driver: &D, marks: &[Mark]) -> Outcome {
    let (mut reached, mut captured) = (Vec::new(), Vec::new());
    let mut first_error = None;
    for marks in marks.chunk_by(|one, other| one.stream == other.stream) {
        for mark in marks {
            match driver.query_event(mark.device, mark.event) {
                Ok(Completion::Done) => reached.push(*mark),
                Ok(Completion::Pending) => break,
                Err(error) if is_captured(error) => captured.push(*mark),
                Err(error) => {
                    first_error.get_or_insert(error);
                    break;
                }
            }
        }
    }
    Outcome::Polled(Answers { marks: reached, captured }, first_error)
}

/// Waits for each mark that can be reached.
fn wait<D: Driver>(driver: &D, marks: Vec<Mark>) -> Outcome {
    let mut result = Ok(());
    let mut captured = Vec::new();
    for mark in &marks {
        match driver.synchronize_event(mark.device, mark.event) {
            Ok(()) => {}
            Err(error) if is_captured(error) => captured.push(*mark),
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    let marks = marks.into_iter().filter(|mark| !captured.contains(mark)).collect();
    Outcome::Waited(Answers { marks, captured }, result)
}

/// Whether the driver says that the event was recorded inside a capture, and so never comes. No question asked before the
/// record can rule that out: a capture may begin between the two.
fn is_captured(error: DriverError) -> bool {
    match error.call {
        Call::SynchronizeEvent => error.status == Status::InvalidValue,
        _ => error.status == Status::CapturedEvent,
    }
}

fn synchronize_unless_capturing<D: Driver>(driver: &D, plan: &Synchronize) -> Result<bool, DriverError> {
    // Whether other threads' own streams are capturing cannot be asked.
    for target in plan.streams.iter().filter(|target| can_name(**target)) {
        match driver.capture_status(target.stream) {
            Ok(CaptureStatus::None) => {}
            Ok(CaptureStatus::Active | CaptureStatus::Invalidated) => return Ok(false),
            // A stream that is gone captures nothing.
            Err(error) if error.status == Status::InvalidHandle => {}
            Err(error) => return Err(error),
        }
    }
    plan.devices.iter().try_for_each(|device| driver.synchronize_device(*device)).map(|()| true)
}

/// Makes what `stream` gets from now on wait for the marks, on the GPU.
///
/// Refused if the stream is capturing: the graph would wait for something outside of it.
fn wait_on_gpu<D: Driver>(driver: &D, stream: Stream, marks: &[Mark]) -> Result<(), DriverError> {
    if marks.is_empty() {
        return Ok(());
    }
    if driver.capture_status(stream)? != CaptureStatus::None {
        return Err(DriverError { call: Call::WaitEvent, status: Status::CaptureIsolation });
    }
    marks.iter().try_for_each(|mark| driver.wait_event(stream, mark.event))
}

/// Fills all holes; on failure undoes what was done. Returns the handles that were created for it.
fn create_and_map<D: Driver>(driver: &D, map: &Map) -> Result<Vec<PhysicalHandle>, MapFailure> {
    let mut created = Vec::new();
    let mut mapped = 0;
    let result = wait_on_gpu(driver, map.stream, &map.waits)
        .and_then(|()| create_handles(driver, map, &mut created))
        .and_then(|()| map_holes(driver, map, &created, &mut mapped));
    match result {
        Ok(()) => Ok(created.into_iter().map(|(handle, _)| handle).collect()),
        Err(error) => Err(undo_map(driver, map, created, mapped, error)),
    }
}

fn create_handles<D: Driver>(
    driver: &D,
    map: &Map,
    created: &mut Vec<(PhysicalHandle, u64)>,
) -> Result<(), DriverError> {
    for source in map.holes.iter().flat_map(|hole| &hole.sources) {
        if let Source::New(size) = source {
            created.push((driver.create_handle(map.device, *size)?, *size));
        }
    }
    Ok(())
}

/// Maps the handles into the holes, in order; `mapped` tells how many were.
fn map_holes<D: Driver>(
    driver: &D,
    map: &Map,
    created: &[(PhysicalHandle, u64)],
    mapped: &mut usize,
) -> Result<(), DriverError> {
    let mut created = created.iter().map(|(handle, _)| *handle);
    for hole in &map.holes {
        for Mapping { address, size, handle } in hole.filled_with(&mut created) {
            driver.map(map.device, DevicePtr(address), size, handle)?;
            *mapped += 1;
        }
        driver.set_access(map.device, DevicePtr(hole.address), hole.size(), &map.access)?;
    }
    Ok(())
}

/// Takes back the first `mapped` mappings, and what was created for them and the others.
fn undo_map<D: Driver>(
    driver: &D,
    map: &Map,
    created: Vec<(PhysicalHandle, u64)>,
    mut mapped: usize,
    error: DriverError,
) -> MapFailure {
    let mut stuck: Vec<(BlockId, Vec<Mapping>)> = Vec::new();
    let mut handles = created.iter().map(|(handle, _)| *handle);
    for hole in &map.holes {
        let mut mappings = hole.filled_with(&mut handles);
        mappings.truncate(mapped);
        mapped -= mappings.len();
        let size: u64 = mappings.iter().map(|mapping| mapping.size).sum();
        if size > 0 && driver.unmap(map.device, DevicePtr(hole.address), size).is_err() {
            stuck.push((hole.block, mappings));
        }
    }
    let is_stuck = |handle| stuck.iter().flat_map(|(_, mappings)| mappings).any(|mapping| mapping.handle == handle);
    let mut strays = created;
    strays.retain(|(handle, _)| !is_stuck(*handle) && driver.release_handle(map.device, *handle).is_err());
    MapFailure { error, strays, stuck }
}

fn unmap<D: Driver>(driver: &D, runs: Vec<UnmapRun>) -> Outcome {
    let mut first_error = None;
    let unmapped = runs.into_iter().map(|run| {
        let result = driver.unmap(run.device, run.address, run.size);
        let is_unmapped = result.is_ok();
        result.unwrap_or_else(|error| {
            first_error.get_or_insert(error);
        });
        (run, is_unmapped)
    });
    let unmapped = unmapped.collect();
    Outcome::Unmapped(unmapped, first_error)
}

fn give_back<D: Driver>(driver: &D, release: Release) -> Released {
    let mut released = Released::default();
    let mut first_error = None;
    let mut succeeds = |result: Result<(), DriverError>| match result {
        Ok(()) => true,
        Err(error) => {
            first_error.get_or_insert(error);
            false
        }
    };
    for segment in release.segments {
        let is_freed = succeeds(driver.free(segment.device, segment.base));
        released.segments.push((segment, is_freed));
    }
    for run in release.runs {
        let outcome = if succeeds(driver.unmap(run.device, run.address, run.size)) {
            RunOutcome::Unmapped(release_handles(driver, &run, &mut succeeds))
        } else {
            RunOutcome::Kept
        };
        released.runs.push((run, outcome));
    }
    for range in release.ranges {
        let is_freed = succeeds(driver.free_range(range.device, range.base, range.size));
        released.ranges.push((range, is_freed));
    }
    for stray in release.strays {
        let is_released = succeeds(driver.release_handle(stray.device, stray.handle));
        released.strays.push((stray, is_released));
    }
    for (device, event) in release.events {
        if !succeeds(driver.destroy_event(device, event)) {
            released.events.push((device, event));
        }
    }
    released.error = first_error;
    released
}

/// Releases a run's handles; returns those that the driver did not take back.
fn release_handles<D: Driver>(
    driver: &D,
    run: &ReleaseRun,
    succeeds: &mut impl FnMut(Result<(), DriverError>) -> bool,
) -> Vec<Mapping> {
    let mut kept = run.handles.clone();
    kept.retain(|mapping| !succeeds(driver.release_handle(run.device, mapping.handle)));
    kept
}
