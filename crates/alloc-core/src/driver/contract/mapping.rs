//! Address ranges, physical handles and the mappings between them.

use super::{Clause, DEVICE, MIB, Rig, Stop, Verdict, expect_free, free_bytes, granularity, second_device};
use crate::id::{DeviceId, DevicePtr, PhysicalHandle};

pub(super) const CLAUSES: &[Clause] = clauses![
    a_reserved_range_takes_no_memory,
    reserved_ranges_are_aligned_and_do_not_overlap,
    mapped_memory_is_usable_once_access_is_set,
    access_is_set_over_several_handles_at_once,
    one_handle_at_two_addresses_is_one_memory,
    a_handle_keeps_its_content_when_it_moves,
    an_address_shows_the_handle_mapped_last,
    another_device_uses_memory_once_it_has_access,
    access_for_another_device_can_be_added_later,
    several_handles_are_unmapped_at_once,
    a_released_handle_keeps_its_memory_until_its_last_mapping_is_gone,
    an_unmapped_handle_keeps_its_memory_until_it_is_released,
    what_an_exported_handle_is_imported_as_is_the_same_memory,
    memory_of_an_imported_handle_outlives_the_first,
];

/// Adjacent handles of one granule each, mapped in a range of their own, usable by [`DEVICE`].
pub(super) struct Mapped {
    pub(super) base: DevicePtr,
    pub(super) granule: u64,
    pub(super) handles: Vec<PhysicalHandle>,
}

impl Mapped {
    pub(super) fn new(rig: &dyn Rig, handles: u64) -> Result<Self, Stop> {
        let driver = rig.driver();
        let granule = granularity(rig)?;
        let base = driver.reserve_range(DEVICE, handles * granule)?;
        let mut mapped = Self { base, granule, handles: Vec::new() };
        for index in 0..handles {
            let handle = driver.create_handle(DEVICE, granule)?;
            driver.map(DEVICE, mapped.at(index), granule, handle)?;
            mapped.handles.push(handle);
        }
        driver.set_access(DEVICE, base, mapped.size(), &[DEVICE])?;
        Ok(mapped)
    }

    pub(super) fn size(&self) -> u64 {
        self.handles.len() as u64 * self.granule
    }

    /// Where the handle of that index is mapped.
    pub(super) fn at(&self, index: u64) -> DevicePtr {
        self.base.offset(index * self.granule)
    }

    /// Unmaps and gives back all.
    pub(super) fn give_up(self, rig: &dyn Rig) -> Verdict {
        rig.driver().unmap(DEVICE, self.base, self.size())?;
        self.give_up_unmapped(rig)
    }

    /// Gives back handles and range when nothing is mapped any more.
    fn give_up_unmapped(self, rig: &dyn Rig) -> Verdict {
        let size = self.size();
        for handle in self.handles {
            rig.driver().release_handle(DEVICE, handle)?;
        }
        rig.driver().free_range(DEVICE, self.base, size)?;
        Ok(())
    }

    /// Writes `value` to all of it, on a stream of its own, and waits.
    pub(super) fn fill(&self, rig: &dyn Rig, value: u32) -> Verdict {
        fill(rig, DEVICE, self.base, self.size(), value)
    }

    pub(super) fn expect_words(&self, rig: &dyn Rig, value: u32) -> Verdict {
        expect_words(rig, self.base, self.size(), value)
    }
}

pub(super) fn fill(rig: &dyn Rig, device: DeviceId, address: DevicePtr, size: u64, value: u32) -> Verdict {
    let stream = rig.make_stream(device);
    rig.write(stream, address, size, value);
    rig.driver().synchronize_device(device)?;
    rig.destroy_stream(stream);
    Ok(())
}

/// Checks the first and the last word.
pub(super) fn expect_words(rig: &dyn Rig, address: DevicePtr, size: u64, value: u32) -> Verdict {
    for place in [address, address.offset(size - 4)] {
        let word = rig.read(DEVICE, place);
        ensure!(word == value, "{word} instead of {value} at {place:?}");
    }
    Ok(())
}

fn a_reserved_range_takes_no_memory(rig: &dyn Rig) -> Verdict {
    let size = 4096 * granularity(rig)?;
    let before = free_bytes(rig)?;
    let base = rig.driver().reserve_range(DEVICE, size)?;
    expect_free(rig, "after addresses were reserved", before)?;
    rig.driver().free_range(DEVICE, base, size)?;
    Ok(())
}

fn reserved_ranges_are_aligned_and_do_not_overlap(rig: &dyn Rig) -> Verdict {
    let granule = granularity(rig)?;
    let size = 3 * granule;
    let mut bases = Vec::new();
    for _ in 0..4 {
        let base = rig.driver().reserve_range(DEVICE, size)?;
        ensure!(base.0.is_multiple_of(granule), "{base:?} is not a multiple of {granule}");
        bases.push(base);
    }
    bases.sort();
    for pair in bases.windows(2) {
        ensure!(pair[1].0 - pair[0].0 >= size, "{size} bytes at {:?} and at {:?}", pair[0], pair[1]);
    }
    for base in bases {
        rig.driver().free_range(DEVICE, base, size)?;
    }
    Ok(())
}

fn mapped_memory_is_usable_once_access_is_set(rig: &dyn Rig) -> Verdict {
    let mapped = Mapped::new(rig, 1)?;
    mapped.fill(rig, 11)?;
    mapped.expect_words(rig, 11)?;
    mapped.give_up(rig)
}

fn access_is_set_over_several_handles_at_once(rig: &dyn Rig) -> Verdict {
    let mapped = Mapped::new(rig, 3)?;
    mapped.fill(rig, 12)?;
    for index in 0..3 {
        expect_words(rig, mapped.at(index), mapped.granule, 12)?;
    }
    mapped.give_up(rig)
}

fn one_handle_at_two_addresses_is_one_memory(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let mapped = Mapped::new(rig, 1)?;
    let second = driver.reserve_range(DEVICE, mapped.granule)?;
    driver.map(DEVICE, second, mapped.granule, mapped.handles[0])?;
    driver.set_access(DEVICE, second, mapped.granule, &[DEVICE])?;
    mapped.fill(rig, 13)?;
    expect_words(rig, second, mapped.granule, 13)?;
    fill(rig, DEVICE, second, mapped.granule, 14)?;
    mapped.expect_words(rig, 14)?;
    driver.unmap(DEVICE, second, mapped.granule)?;
    driver.free_range(DEVICE, second, mapped.granule)?;
    mapped.expect_words(rig, 14)?;
    mapped.give_up(rig)
}

fn a_handle_keeps_its_content_when_it_moves(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let mapped = Mapped::new(rig, 1)?;
    let second = driver.reserve_range(DEVICE, mapped.granule)?;
    mapped.fill(rig, 15)?;
    driver.unmap(DEVICE, mapped.base, mapped.granule)?;
    driver.map(DEVICE, second, mapped.granule, mapped.handles[0])?;
    driver.set_access(DEVICE, second, mapped.granule, &[DEVICE])?;
    expect_words(rig, second, mapped.granule, 15)?;
    driver.unmap(DEVICE, second, mapped.granule)?;
    driver.free_range(DEVICE, second, mapped.granule)?;
    mapped.give_up_unmapped(rig)
}

fn an_address_shows_the_handle_mapped_last(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let mapped = Mapped::new(rig, 2)?;
    fill(rig, DEVICE, mapped.at(0), mapped.granule, 16)?;
    fill(rig, DEVICE, mapped.at(1), mapped.granule, 17)?;
    driver.unmap(DEVICE, mapped.base, mapped.size())?;
    driver.map(DEVICE, mapped.at(0), mapped.granule, mapped.handles[1])?;
    driver.map(DEVICE, mapped.at(1), mapped.granule, mapped.handles[0])?;
    driver.set_access(DEVICE, mapped.base, mapped.size(), &[DEVICE])?;
    expect_words(rig, mapped.at(0), mapped.granule, 17)?;
    expect_words(rig, mapped.at(1), mapped.granule, 16)?;
    mapped.give_up(rig)
}

/// A second device that can reach memory on the first.
fn peer(rig: &dyn Rig) -> Result<DeviceId, Stop> {
    let second = second_device(rig)?;
    if !rig.driver().can_access_peer(second, DEVICE)? {
        return Err(Stop::Skipped("needs two devices that can reach each other's memory".to_owned()));
    }
    Ok(second)
}

fn another_device_uses_memory_once_it_has_access(rig: &dyn Rig) -> Verdict {
    let second = peer(rig)?;
    let driver = rig.driver();
    let granule = granularity(rig)?;
    let base = driver.reserve_range(DEVICE, granule)?;
    let handle = driver.create_handle(DEVICE, granule)?;
    driver.map(DEVICE, base, granule, handle)?;
    driver.set_access(DEVICE, base, granule, &[DEVICE, second])?;
    fill(rig, second, base, granule, 18)?;
    expect_words(rig, base, granule, 18)?;
    driver.unmap(DEVICE, base, granule)?;
    driver.release_handle(DEVICE, handle)?;
    driver.free_range(DEVICE, base, granule)?;
    Ok(())
}

fn access_for_another_device_can_be_added_later(rig: &dyn Rig) -> Verdict {
    let second = peer(rig)?;
    let mapped = Mapped::new(rig, 2)?;
    mapped.fill(rig, 19)?;
    rig.driver().set_access(DEVICE, mapped.base, mapped.size(), &[second])?;
    fill(rig, second, mapped.at(1), mapped.granule, 20)?;
    expect_words(rig, mapped.at(0), mapped.granule, 19)?;
    expect_words(rig, mapped.at(1), mapped.granule, 20)?;
    mapped.fill(rig, 21)?;
    mapped.expect_words(rig, 21)?;
    mapped.give_up(rig)
}

fn several_handles_are_unmapped_at_once(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let mapped = Mapped::new(rig, 4)?;
    driver.unmap(DEVICE, mapped.at(1), 2 * mapped.granule)?;
    for index in [1, 2] {
        driver.map(DEVICE, mapped.at(index), mapped.granule, mapped.handles[index as usize])?;
    }
    driver.unmap(DEVICE, mapped.base, mapped.size())?;
    mapped.give_up_unmapped(rig)
}

fn a_released_handle_keeps_its_memory_until_its_last_mapping_is_gone(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let size = granularity(rig)?.max(64 * MIB);
    let before = free_bytes(rig)?;
    let base = driver.reserve_range(DEVICE, 2 * size)?;
    let handle = driver.create_handle(DEVICE, size)?;
    driver.map(DEVICE, base, size, handle)?;
    driver.map(DEVICE, base.offset(size), size, handle)?;
    driver.set_access(DEVICE, base, 2 * size, &[DEVICE])?;
    fill(rig, DEVICE, base, size, 24)?;
    let taken = |what: &str| -> Verdict {
        let now = free_bytes(rig)?;
        ensure!(now + size <= before, "{what}: {size} bytes are in use, yet {now} of {before} are free");
        Ok(())
    };
    taken("mapped twice")?;
    driver.release_handle(DEVICE, handle)?;
    taken("after release")?;
    expect_words(rig, base.offset(size), size, 24)?;
    driver.unmap(DEVICE, base, size)?;
    taken("with one mapping left")?;
    expect_words(rig, base.offset(size), size, 24)?;
    driver.unmap(DEVICE, base.offset(size), size)?;
    expect_free(rig, "after the last unmap", before)?;
    driver.free_range(DEVICE, base, 2 * size)?;
    Ok(())
}

fn an_unmapped_handle_keeps_its_memory_until_it_is_released(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let size = granularity(rig)?.max(64 * MIB);
    let before = free_bytes(rig)?;
    let handle = driver.create_handle(DEVICE, size)?;
    let during = free_bytes(rig)?;
    ensure!(during + size <= before, "{size} bytes created, but free bytes went from {before} to {during}");
    driver.release_handle(DEVICE, handle)?;
    expect_free(rig, "after release", before)?;
    Ok(())
}

/// Imports what `descriptor` names and maps it in a range of its own, usable by [`DEVICE`].
fn map_imported(rig: &dyn Rig, descriptor: i32, granule: u64) -> Result<Mapped, Stop> {
    let driver = rig.driver();
    let base = driver.reserve_range(DEVICE, granule)?;
    let handle = driver.import_handle(DEVICE, descriptor)?;
    driver.map(DEVICE, base, granule, handle)?;
    driver.set_access(DEVICE, base, granule, &[DEVICE])?;
    Ok(Mapped { base, granule, handles: vec![handle] })
}

fn what_an_exported_handle_is_imported_as_is_the_same_memory(rig: &dyn Rig) -> Verdict {
    let first = Mapped::new(rig, 1)?;
    // The descriptor stays open: closing one is no call of the driver's.
    let descriptor = rig.driver().export_handle(DEVICE, first.handles[0])?;
    let second = map_imported(rig, descriptor, first.granule)?;
    first.fill(rig, 0x5eed)?;
    let word = rig.read(DEVICE, second.base);
    ensure!(word == 0x5eed, "{word:#x} at the second address");
    second.give_up(rig)?;
    first.give_up(rig)
}

fn memory_of_an_imported_handle_outlives_the_first(rig: &dyn Rig) -> Verdict {
    let first = Mapped::new(rig, 1)?;
    let descriptor = rig.driver().export_handle(DEVICE, first.handles[0])?;
    let second = map_imported(rig, descriptor, first.granule)?;
    first.fill(rig, 0x0bad)?;
    first.give_up(rig)?;
    let word = rig.read(DEVICE, second.base);
    ensure!(word == 0x0bad, "{word:#x} when the first was given up");
    second.give_up(rig)
}
