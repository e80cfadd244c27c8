//! Memory that comes with its address: allocate and free.

use super::{Clause, DEVICE, MIB, Rig, Verdict, expect_free, free_bytes, refused};
use crate::driver::Status;
use crate::id::DevicePtr;

pub(super) const CLAUSES: &[Clause] = clauses![
    allocated_memory_is_aligned_to_512_bytes,
    allocated_memory_holds_what_is_written,
    allocations_do_not_overlap,
    allocating_takes_memory_and_freeing_returns_it,
    allocating_more_than_there_is_is_out_of_memory_and_takes_nothing,
    only_what_was_allocated_is_freed,
    memory_is_freed_once,
];

fn allocated_memory_is_aligned_to_512_bytes(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let mut addresses = Vec::new();
    for size in [1, 513, 2 * MIB, 3 * MIB + 1] {
        let address = driver.allocate(DEVICE, size)?;
        ensure!(address.0.is_multiple_of(512), "{size} bytes are at {address:?}");
        addresses.push(address);
    }
    for address in addresses {
        driver.free(DEVICE, address)?;
    }
    Ok(())
}

fn allocated_memory_holds_what_is_written(rig: &dyn Rig) -> Verdict {
    let size = 4 * MIB;
    let stream = rig.make_stream(DEVICE);
    let address = rig.driver().allocate(DEVICE, size)?;
    rig.write(stream, address, size, 0x1234_5678);
    for offset in [0, size - 4] {
        let word = rig.read(DEVICE, address.offset(offset));
        ensure!(word == 0x1234_5678, "{word:#x} at offset {offset}");
    }
    rig.driver().free(DEVICE, address)?;
    rig.destroy_stream(stream);
    Ok(())
}

fn allocations_do_not_overlap(rig: &dyn Rig) -> Verdict {
    let size = MIB;
    let mut addresses = Vec::new();
    for _ in 0..8 {
        addresses.push(rig.driver().allocate(DEVICE, size)?);
    }
    addresses.sort();
    for pair in addresses.windows(2) {
        ensure!(pair[1].0 - pair[0].0 >= size, "{size} bytes at {:?} and at {:?}", pair[0], pair[1]);
    }
    for address in addresses {
        rig.driver().free(DEVICE, address)?;
    }
    Ok(())
}

fn allocating_takes_memory_and_freeing_returns_it(rig: &dyn Rig) -> Verdict {
    let size = 64 * MIB;
    let before = free_bytes(rig)?;
    let address = rig.driver().allocate(DEVICE, size)?;
    let during = free_bytes(rig)?;
    ensure!(during + size <= before, "{size} bytes allocated, but free bytes went from {before} to {during}");
    rig.driver().free(DEVICE, address)?;
    expect_free(rig, "after everything was freed", before)?;
    Ok(())
}

fn allocating_more_than_there_is_is_out_of_memory_and_takes_nothing(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let before = free_bytes(rig)?;
    let total = driver.memory_info(DEVICE)?.total_bytes;
    refused("more than in all", driver.allocate(DEVICE, total + 2 * MIB), Status::OutOfMemory)?;
    expect_free(rig, "after a refused call", before)?;
    let address = driver.allocate(DEVICE, 64 * MIB)?;
    let left = free_bytes(rig)?;
    refused("more than is left", driver.allocate(DEVICE, left + 2 * MIB), Status::OutOfMemory)?;
    expect_free(rig, "after another refused call", left)?;
    driver.free(DEVICE, address)?;
    Ok(())
}

fn only_what_was_allocated_is_freed(rig: &dyn Rig) -> Verdict {
    let driver = rig.driver();
    let size = 4 * MIB;
    let stream = rig.make_stream(DEVICE);
    let address = driver.allocate(DEVICE, size)?;
    rig.write(stream, address, size, 7);
    refused("an address of nothing", driver.free(DEVICE, DevicePtr(4096)), Status::InvalidValue)?;
    refused("an address inside", driver.free(DEVICE, address.offset(2 * MIB)), Status::InvalidValue)?;
    let word = rig.read(DEVICE, address);
    ensure!(word == 7, "{word} is left of 7 after two refused frees");
    driver.free(DEVICE, address)?;
    rig.destroy_stream(stream);
    Ok(())
}

fn memory_is_freed_once(rig: &dyn Rig) -> Verdict {
    let address = rig.driver().allocate(DEVICE, 4 * MIB)?;
    rig.driver().free(DEVICE, address)?;
    refused("a second free", rig.driver().free(DEVICE, address), Status::InvalidValue)
}
