//! What only the real driver has: streams that synchronise with the legacy default stream.

use std::ptr;

use alloc_core::driver::contract::{Clause, Rig, Stop, Verdict};
use alloc_core::driver::{CaptureMode, CaptureStatus};
use alloc_core::id::{DeviceId, Stream, StreamHandle};
use cudarc::driver::sys;

use crate::rig::must;

pub(crate) const CLAUSES: &[Clause] = &[Clause {
    name: "the_default_stream_counts_as_capturing_beside_the_capture_of_a_blocking_stream",
    check: the_default_stream_counts_as_capturing_beside_the_capture_of_a_blocking_stream,
}];

/// The driver answers neither yes nor no then: work on the default stream would have to join the capture, and must not.
fn the_default_stream_counts_as_capturing_beside_the_capture_of_a_blocking_stream(rig: &dyn Rig) -> Verdict {
    let device = DeviceId(0);
    rig.set_current_device(device);
    let mut blocking = ptr::null_mut();
    // SAFETY: `blocking` is a local that outlives the call; flags 0 ask for a stream that synchronises.
    must(unsafe { sys::cuStreamCreate(&raw mut blocking, 0) });
    let stream = Stream { device, handle: StreamHandle(blocking.expose_provenance() as u64) };
    rig.begin_capture(stream, CaptureMode::Global);
    for handle in [StreamHandle::DEFAULT, StreamHandle::LEGACY] {
        let status = rig.driver().capture_status(Stream { device, handle })?;
        if status != CaptureStatus::Active {
            return Err(Stop::Failed(format!("stream {handle:?} is {status:?}")));
        }
    }
    if !rig.end_capture(stream) {
        return Err(Stop::Failed("the questions have spoiled the capture".to_owned()));
    }
    rig.destroy_stream(stream);
    Ok(())
}
