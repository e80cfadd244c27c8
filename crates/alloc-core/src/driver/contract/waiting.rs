//! Which calls wait for queued work, and which do not.

use super::{
    Clause, DEVICE, MIB, Rig, Verdict, expect_completion, granularity, keep_busy, let_finish, refused, second_device,
};
use crate::driver::{Completion, Status};

pub(super) const CLAUSES: &[Clause] = clauses![
    free_waits_for_all_work_queued_on_the_device,
    allocate_does_not_wait_for_queued_work,
    a_refused_allocate_does_not_wait_for_queued_work,
    mapping_and_unmapping_do_not_wait_for_queued_work,
    memory_info_does_not_wait_for_queued_work,
    synchronize_device_waits_for_every_stream_of_the_device,
    synchronize_device_does_not_wait_for_another_device,
    free_does_not_wait_for_another_device,
];

fn free_waits_for_all_work_queued_on_the_device(rig: &dyn Rig) -> Verdict {
    let stream = rig.make_stream(DEVICE);
    let address = rig.driver().allocate(DEVICE, 32 * MIB)?;
    let event = keep_busy(rig, stream)?;
    rig.driver().free(DEVICE, address)?;
    expect_completion(rig, "after free", DEVICE, event, Completion::Done)?;
    let_finish(rig, stream, event)
}

fn allocate_does_not_wait_for_queued_work(rig: &dyn Rig) -> Verdict {
    let stream = rig.make_stream(DEVICE);
    let event = keep_busy(rig, stream)?;
    let address = rig.driver().allocate(DEVICE, 32 * MIB)?;
    expect_completion(rig, "after allocate", DEVICE, event, Completion::Pending)?;
    let_finish(rig, stream, event)?;
    rig.driver().free(DEVICE, address)?;
    Ok(())
}

fn a_refused_allocate_does_not_wait_for_queued_work(rig: &dyn Rig) -> Verdict {
    let stream = rig.make_stream(DEVICE);
    let event = keep_busy(rig, stream)?;
    let total = rig.driver().memory_info(DEVICE)?.total_bytes;
    refused("too much", rig.driver().allocate(DEVICE, 2 * total), Status::OutOfMemory)?;
    expect_completion(rig, "after a refused allocate", DEVICE, event, Completion::Pending)?;
    let_finish(rig, stream, event)
}

fn mapping_and_unmapping_do_not_wait_for_queued_work(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let size = granularity(rig)?;
    let stream = rig.make_stream(DEVICE);
    let event = keep_busy(rig, stream)?;
    let pending = |what| expect_completion(rig, what, DEVICE, event, Completion::Pending);
    let base = driver.reserve_range(DEVICE, size)?;
    pending("after reserve_range")?;
    let handle = driver.create_handle(DEVICE, size)?;
    pending("after create_handle")?;
    driver.map(DEVICE, base, size, handle)?;
    pending("after map")?;
    driver.set_access(DEVICE, base, size, &[DEVICE])?;
    pending("after set_access")?;
    driver.unmap(DEVICE, base, size)?;
    pending("after unmap")?;
    driver.release_handle(DEVICE, handle)?;
    pending("after release_handle")?;
    driver.free_range(DEVICE, base, size)?;
    pending("after free_range")?;
    let_finish(rig, stream, event)
}

fn memory_info_does_not_wait_for_queued_work(rig: &dyn Rig) -> Verdict {
    let stream = rig.make_stream(DEVICE);
    let event = keep_busy(rig, stream)?;
    rig.driver().memory_info(DEVICE)?;
    expect_completion(rig, "after memory_info", DEVICE, event, Completion::Pending)?;
    let_finish(rig, stream, event)
}

fn synchronize_device_waits_for_every_stream_of_the_device(rig: &dyn Rig) -> Verdict {
    let streams = [rig.make_stream(DEVICE), rig.make_stream(DEVICE)];
    let events = [keep_busy(rig, streams[0])?, keep_busy(rig, streams[1])?];
    rig.driver().synchronize_device(DEVICE)?;
    for (stream, event) in streams.into_iter().zip(events) {
        expect_completion(rig, "after synchronize_device", DEVICE, event, Completion::Done)?;
        let_finish(rig, stream, event)?;
    }
    Ok(())
}

fn synchronize_device_does_not_wait_for_another_device(rig: &dyn Rig) -> Verdict {
    let second = second_device(rig)?;
    let stream = rig.make_stream(second);
    let event = keep_busy(rig, stream)?;
    rig.driver().synchronize_device(DEVICE)?;
    expect_completion(rig, "after the other device was waited for", second, event, Completion::Pending)?;
    let_finish(rig, stream, event)
}

fn free_does_not_wait_for_another_device(rig: &dyn Rig) -> Verdict {
    let second = second_device(rig)?;
    let stream = rig.make_stream(second);
    let address = rig.driver().allocate(DEVICE, 32 * MIB)?;
    let event = keep_busy(rig, stream)?;
    rig.driver().free(DEVICE, address)?;
    expect_completion(rig, "after a free on the other device", second, event, Completion::Pending)?;
    let_finish(rig, stream, event)
}
