//! Devices, contexts, and what a call leaves behind.

use super::{Clause, DEVICE, MIB, Rig, Stop, Verdict, granularity, on_new_thread, refused, second_device};
use crate::driver::{Result, Status};
use crate::id::{DeviceId, DevicePtr, Stream, StreamHandle};

pub(super) const CLAUSES: &[Clause] = clauses![
    asking_about_a_device_does_not_make_it_active,
    capabilities_say_what_the_device_can_do_and_do_not_change,
    a_device_that_does_not_exist_is_refused_by_every_call,
    a_device_can_access_itself,
    access_between_two_devices_is_known,
    a_new_thread_has_no_current_device,
    every_call_leaves_the_current_device_as_it_was,
    a_failure_is_seen_by_its_own_call_alone,
];

fn asking_about_a_device_does_not_make_it_active(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    if driver.is_active(DEVICE)? {
        return Err(Stop::Skipped("this process has used the device already".to_owned()));
    }
    driver.device_count()?;
    driver.capabilities(DEVICE)?;
    driver.can_access_peer(DEVICE, DEVICE)?;
    driver.current_device()?;
    ensure!(!driver.is_active(DEVICE)?, "questions have made the device active");
    driver.memory_info(DEVICE)?;
    ensure!(driver.is_active(DEVICE)?, "a call that needs the device's context has not made it active");
    Ok(())
}

fn capabilities_say_what_the_device_can_do_and_do_not_change(rig: &dyn Rig) -> Verdict {
    let capabilities = rig.driver().capabilities(DEVICE)?;
    ensure!(rig.driver().capabilities(DEVICE)? == capabilities, "the second answer differs from {capabilities:?}");
    if capabilities.virtual_memory {
        ensure!(capabilities.virtual_memory_missing.is_empty(), "nothing can be missing: {capabilities:?}");
        ensure!(capabilities.granularity_bytes.is_power_of_two(), "not a power of two: {capabilities:?}");
    } else {
        ensure!(!capabilities.virtual_memory_missing.is_empty(), "no reason is given: {capabilities:?}");
        ensure!(capabilities.granularity_bytes == 0, "a granularity without virtual memory: {capabilities:?}");
    }
    let memory = rig.driver().memory_info(DEVICE)?;
    ensure!(memory.free_bytes > 0 && memory.free_bytes <= memory.total_bytes, "impossible: {memory:?}");
    ensure!(memory.total_bytes <= capabilities.total_bytes, "{memory:?} is more than {capabilities:?}");
    Ok(())
}

fn a_device_that_does_not_exist_is_refused_by_every_call(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let nowhere = DeviceId(driver.device_count()?);
    let stream = Stream { device: nowhere, handle: StreamHandle::DEFAULT };
    let address = DevicePtr(MIB);
    let event = driver.create_event(DEVICE)?;
    refused("capabilities", driver.capabilities(nowhere), Status::InvalidDevice)?;
    refused("is_active", driver.is_active(nowhere), Status::InvalidDevice)?;
    refused("can_access_peer", driver.can_access_peer(nowhere, DEVICE), Status::InvalidDevice)?;
    refused("can_access_peer", driver.can_access_peer(DEVICE, nowhere), Status::InvalidDevice)?;
    refused("memory_info", driver.memory_info(nowhere), Status::InvalidDevice)?;
    refused("allocate", driver.allocate(nowhere, MIB), Status::InvalidDevice)?;
    refused("free", driver.free(nowhere, address), Status::InvalidDevice)?;
    refused("reserve_range", driver.reserve_range(nowhere, 2 * MIB), Status::InvalidDevice)?;
    refused("create_handle", driver.create_handle(nowhere, 2 * MIB), Status::InvalidDevice)?;
    refused("create_event", driver.create_event(nowhere), Status::InvalidDevice)?;
    refused("record_event", driver.record_event(event, stream), Status::InvalidDevice)?;
    refused("wait_event", driver.wait_event(stream, event), Status::InvalidDevice)?;
    refused("capture_status", driver.capture_status(stream), Status::InvalidDevice)?;
    refused("synchronize_device", driver.synchronize_device(nowhere), Status::InvalidDevice)?;
    driver.destroy_event(DEVICE, event)?;
    Ok(())
}

fn a_device_can_access_itself(rig: &dyn Rig) -> Verdict {
    ensure!(rig.driver().can_access_peer(DEVICE, DEVICE)?, "it says that it cannot");
    Ok(())
}

fn access_between_two_devices_is_known(rig: &dyn Rig) -> Verdict {
    let second = second_device(rig)?;
    let there = rig.driver().can_access_peer(DEVICE, second)?;
    ensure!(rig.driver().can_access_peer(DEVICE, second)? == there, "the second answer differs");
    Ok(())
}

fn a_new_thread_has_no_current_device(rig: &dyn Rig) -> Verdict {
    rig.set_current_device(DEVICE);
    on_new_thread(|| {
        let current = rig.driver().current_device()?;
        ensure!(current.is_none(), "{current:?} is current on a thread that has done nothing");
        Ok(())
    })
}

fn every_call_leaves_the_current_device_as_it_was(rig: &dyn Rig) -> Verdict {
    let mut devices = vec![None, Some(DEVICE)];
    devices.extend(second_device(rig).ok().map(Some));
    for current in devices {
        on_new_thread(|| {
            if let Some(device) = current {
                rig.set_current_device(device);
            }
            use_the_device(rig, &|what| {
                let found = rig.driver().current_device()?;
                ensure!(found == current, "{current:?} was current, and {found:?} is after {what}");
                Ok(())
            })
        })?;
    }
    Ok(())
}

/// Makes every call that needs a context, some of which fail, and lets `look` see what each has left behind.
fn use_the_device(rig: &dyn Rig, look: &dyn Fn(&str) -> Verdict) -> Verdict {
    let driver = rig.driver();
    let stream = Stream { device: DEVICE, handle: StreamHandle::DEFAULT };
    let too_much = driver.capabilities(DEVICE)?.total_bytes * 2;
    look("capabilities")?;
    driver.memory_info(DEVICE)?;
    look("memory_info")?;
    let address = driver.allocate(DEVICE, MIB)?;
    look("allocate")?;
    driver.free(DEVICE, address)?;
    look("free")?;
    refused("allocate", driver.allocate(DEVICE, too_much), Status::OutOfMemory)?;
    look("an allocate that fails")?;
    let event = driver.create_event(DEVICE)?;
    look("create_event")?;
    driver.record_event(event, stream)?;
    look("record_event")?;
    driver.query_event(DEVICE, event)?;
    look("query_event")?;
    driver.wait_event(stream, event)?;
    look("wait_event")?;
    driver.synchronize_event(DEVICE, event)?;
    look("synchronize_event")?;
    driver.destroy_event(DEVICE, event)?;
    look("destroy_event")?;
    driver.capture_status(stream)?;
    look("capture_status")?;
    driver.synchronize_device(DEVICE)?;
    look("synchronize_device")?;
    if let Ok(size) = granularity(rig) {
        map_and_unmap(rig, size, look)?;
    }
    Ok(())
}

fn map_and_unmap(rig: &dyn Rig, size: u64, look: &dyn Fn(&str) -> Verdict) -> Verdict {
    let driver = rig.driver();
    let base = driver.reserve_range(DEVICE, size)?;
    look("reserve_range")?;
    let handle = driver.create_handle(DEVICE, size)?;
    look("create_handle")?;
    driver.map(DEVICE, base, size, handle)?;
    look("map")?;
    driver.set_access(DEVICE, base, size, &[DEVICE])?;
    look("set_access")?;
    refused("a second map", driver.map(DEVICE, base, size, handle), Status::InvalidValue)?;
    look("a map that fails")?;
    driver.unmap(DEVICE, base, size)?;
    look("unmap")?;
    driver.release_handle(DEVICE, handle)?;
    look("release_handle")?;
    driver.free_range(DEVICE, base, size)?;
    look("free_range")
}

fn a_failure_is_seen_by_its_own_call_alone(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let stream = rig.make_stream(DEVICE);
    let event = driver.create_event(DEVICE)?;
    let fail = || -> Result<()> { driver.free(DEVICE, DevicePtr(4096)) };
    refused("free", fail(), Status::InvalidValue)?;
    driver.memory_info(DEVICE)?;
    refused("free", fail(), Status::InvalidValue)?;
    driver.record_event(event, stream)?;
    refused("free", fail(), Status::InvalidValue)?;
    driver.synchronize_event(DEVICE, event)?;
    refused("free", fail(), Status::InvalidValue)?;
    let address = driver.allocate(DEVICE, MIB)?;
    driver.free(DEVICE, address)?;
    driver.destroy_event(DEVICE, event)?;
    rig.destroy_stream(stream);
    Ok(())
}
