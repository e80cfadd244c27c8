//! What mapping refuses, and that a refused call, or one without anything to do, has changed nothing.

use super::mapping::{Mapped, expect_words, fill};
use super::{Clause, DEVICE, MIB, Rig, Verdict, expect_free, free_bytes, granularity, refused};
use crate::driver::Status;
use crate::id::DeviceId;

pub(super) const CLAUSES: &[Clause] = clauses![
    a_mapped_address_is_not_mapped_again,
    a_map_outside_a_reserved_range_is_refused,
    a_map_at_an_unaligned_address_is_refused,
    a_handle_is_mapped_only_whole,
    a_handle_of_an_unaligned_size_is_refused,
    access_to_unmapped_addresses_is_refused,
    access_for_a_device_that_does_not_exist_is_refused,
    part_of_a_handle_is_not_unmapped,
    unmapping_reserved_addresses_without_mappings_does_nothing,
    creating_more_than_there_is_is_out_of_memory_and_takes_nothing,
    a_range_with_mappings_is_not_given_back,
    only_a_whole_range_is_given_back,
    a_range_is_given_back_once,
    a_process_cannot_open_its_own_ticket,
];

fn a_mapped_address_is_not_mapped_again(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let mapped = Mapped::new(rig, 1)?;
    mapped.fill(rig, 22)?;
    let other = driver.create_handle(DEVICE, mapped.granule)?;
    refused("a second map", driver.map(DEVICE, mapped.base, mapped.granule, other), Status::InvalidValue)?;
    driver.release_handle(DEVICE, other)?;
    mapped.expect_words(rig, 22)?;
    mapped.give_up(rig)
}

fn a_map_outside_a_reserved_range_is_refused(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let granule = granularity(rig)?;
    let base = driver.reserve_range(DEVICE, granule)?;
    let handle = driver.create_handle(DEVICE, 2 * granule)?;
    refused("beyond the end", driver.map(DEVICE, base, 2 * granule, handle), Status::InvalidValue)?;
    driver.free_range(DEVICE, base, granule)?;
    refused("in no range", driver.map(DEVICE, base, 2 * granule, handle), Status::InvalidValue)?;
    driver.release_handle(DEVICE, handle)?;
    Ok(())
}

fn a_map_at_an_unaligned_address_is_refused(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let granule = granularity(rig)?;
    let base = driver.reserve_range(DEVICE, 2 * granule)?;
    let handle = driver.create_handle(DEVICE, granule)?;
    let between = base.offset(granule / 2);
    refused("half a granule in", driver.map(DEVICE, between, granule, handle), Status::InvalidValue)?;
    driver.release_handle(DEVICE, handle)?;
    driver.free_range(DEVICE, base, 2 * granule)?;
    Ok(())
}

fn a_handle_is_mapped_only_whole(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let granule = granularity(rig)?;
    let base = driver.reserve_range(DEVICE, 2 * granule)?;
    let handle = driver.create_handle(DEVICE, 2 * granule)?;
    refused("half of it", driver.map(DEVICE, base, granule, handle), Status::NotSupported)?;
    driver.release_handle(DEVICE, handle)?;
    driver.free_range(DEVICE, base, 2 * granule)?;
    Ok(())
}

fn a_handle_of_an_unaligned_size_is_refused(rig: &dyn Rig) -> Verdict {
    let granule = granularity(rig)?;
    let size = granule + granule / 2;
    refused("one and a half granules", rig.driver().create_handle(DEVICE, size), Status::InvalidValue)
}

fn access_to_unmapped_addresses_is_refused(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let granule = granularity(rig)?;
    let base = driver.reserve_range(DEVICE, 2 * granule)?;
    let handle = driver.create_handle(DEVICE, granule)?;
    let all = || driver.set_access(DEVICE, base, 2 * granule, &[DEVICE]);
    refused("nothing is mapped", all(), Status::InvalidValue)?;
    driver.map(DEVICE, base, granule, handle)?;
    refused("half is mapped", all(), Status::InvalidValue)?;
    driver.set_access(DEVICE, base, granule, &[DEVICE])?;
    driver.unmap(DEVICE, base, granule)?;
    driver.release_handle(DEVICE, handle)?;
    driver.free_range(DEVICE, base, 2 * granule)?;
    Ok(())
}

fn access_for_a_device_that_does_not_exist_is_refused(rig: &dyn Rig) -> Verdict {
    let mapped = Mapped::new(rig, 1)?;
    let nowhere = DeviceId(rig.driver().device_count()?);
    let outcome = rig.driver().set_access(DEVICE, mapped.base, mapped.granule, &[DEVICE, nowhere]);
    refused("set_access", outcome, Status::InvalidDevice)?;
    mapped.give_up(rig)
}

fn part_of_a_handle_is_not_unmapped(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let granule = granularity(rig)?;
    let base = driver.reserve_range(DEVICE, 2 * granule)?;
    let handle = driver.create_handle(DEVICE, 2 * granule)?;
    driver.map(DEVICE, base, 2 * granule, handle)?;
    driver.set_access(DEVICE, base, 2 * granule, &[DEVICE])?;
    fill(rig, DEVICE, base, 2 * granule, 23)?;
    refused("the first half", driver.unmap(DEVICE, base, granule), Status::InvalidValue)?;
    refused("the second half", driver.unmap(DEVICE, base.offset(granule), granule), Status::InvalidValue)?;
    expect_words(rig, base, 2 * granule, 23)?;
    driver.unmap(DEVICE, base, 2 * granule)?;
    driver.release_handle(DEVICE, handle)?;
    driver.free_range(DEVICE, base, 2 * granule)?;
    Ok(())
}

/// The driver's answer to an unmap is therefore no proof that something was mapped.
fn unmapping_reserved_addresses_without_mappings_does_nothing(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let granule = granularity(rig)?;
    let base = driver.reserve_range(DEVICE, 2 * granule)?;
    let handle = driver.create_handle(DEVICE, granule)?;
    driver.unmap(DEVICE, base, granule)?;
    driver.map(DEVICE, base, granule, handle)?;
    driver.set_access(DEVICE, base, granule, &[DEVICE])?;
    fill(rig, DEVICE, base, granule, 26)?;
    driver.unmap(DEVICE, base.offset(granule), granule)?;
    expect_words(rig, base, granule, 26)?;
    driver.unmap(DEVICE, base, granule)?;
    driver.unmap(DEVICE, base, granule)?;
    driver.release_handle(DEVICE, handle)?;
    driver.free_range(DEVICE, base, 2 * granule)?;
    Ok(())
}

fn creating_more_than_there_is_is_out_of_memory_and_takes_nothing(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let granule = granularity(rig)?;
    let before = free_bytes(rig)?;
    let total = driver.memory_info(DEVICE)?.total_bytes;
    let more_than = |bytes: u64| bytes.next_multiple_of(granule) + granule;
    refused("more than in all", driver.create_handle(DEVICE, more_than(total)), Status::OutOfMemory)?;
    expect_free(rig, "after a refused call", before)?;
    let handle = driver.create_handle(DEVICE, (64 * MIB).next_multiple_of(granule))?;
    let left = free_bytes(rig)?;
    refused("more than is left", driver.create_handle(DEVICE, more_than(left)), Status::OutOfMemory)?;
    expect_free(rig, "after another refused call", left)?;
    driver.release_handle(DEVICE, handle)?;
    Ok(())
}

fn a_range_with_mappings_is_not_given_back(rig: &dyn Rig) -> Verdict {
    let mapped = Mapped::new(rig, 2)?;
    mapped.fill(rig, 25)?;
    let outcome = rig.driver().free_range(DEVICE, mapped.base, mapped.size());
    refused("with two mappings", outcome, Status::InvalidValue)?;
    mapped.expect_words(rig, 25)?;
    mapped.give_up(rig)
}

fn only_a_whole_range_is_given_back(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let granule = granularity(rig)?;
    let base = driver.reserve_range(DEVICE, 2 * granule)?;
    refused("the first half", driver.free_range(DEVICE, base, granule), Status::InvalidValue)?;
    refused("the second half", driver.free_range(DEVICE, base.offset(granule), granule), Status::InvalidValue)?;
    driver.free_range(DEVICE, base, 2 * granule)?;
    Ok(())
}

fn a_range_is_given_back_once(rig: &dyn Rig) -> Verdict {
    let granule = granularity(rig)?;
    let base = rig.driver().reserve_range(DEVICE, granule)?;
    rig.driver().free_range(DEVICE, base, granule)?;
    refused("a second time", rig.driver().free_range(DEVICE, base, granule), Status::InvalidValue)
}

fn a_process_cannot_open_its_own_ticket(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let address = driver.allocate(DEVICE, 2 * MIB)?;
    let ticket = driver.ticket(DEVICE, address)?;
    refused("opening the process's own ticket", driver.open_ticket(DEVICE, &ticket), Status::InvalidContext)?;
    driver.free(DEVICE, address)?;
    Ok(())
}
