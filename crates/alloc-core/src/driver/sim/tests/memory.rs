//! Segments, ranges, handles and mappings.

use super::super::Level;
use super::*;

#[test]
fn a_full_device_refuses_memory_until_some_is_freed() {
    let driver = driver();
    let segment = driver.allocate(DEVICE, 10 * PAGE).unwrap();
    assert_eq!(status(driver.allocate(DEVICE, 7 * PAGE)), Status::OutOfMemory);
    assert_eq!(status(driver.create_handle(DEVICE, 7 * PAGE)), Status::OutOfMemory);
    driver.free(DEVICE, segment).unwrap();
    assert!(driver.create_handle(DEVICE, 16 * PAGE).is_ok());
    assert_eq!(driver.memory_info(DEVICE).unwrap().free_bytes, 0);
}

#[test]
fn a_freed_address_is_handed_out_again_at_once() {
    let driver = driver();
    let first = driver.allocate(DEVICE, 2 * PAGE).unwrap();
    let second = driver.allocate(DEVICE, PAGE).unwrap();
    driver.free(DEVICE, first).unwrap();
    assert_eq!(driver.allocate(DEVICE, PAGE).unwrap(), first);
    assert_ne!(first, second);
}

#[test]
fn only_the_start_of_a_segment_can_be_freed_and_only_once() {
    let driver = driver();
    let segment = driver.allocate(DEVICE, PAGE).unwrap();
    assert_eq!(status(driver.free(DEVICE, segment.offset(512))), Status::InvalidValue);
    driver.free(DEVICE, segment).unwrap();
    assert_eq!(status(driver.free(DEVICE, segment)), Status::InvalidValue);
}

#[test]
fn a_handle_is_mapped_whole_inside_one_range_where_nothing_is() {
    let driver = driver();
    let (range, handle) = mapped_page(&driver);
    let two_pages = driver.create_handle(DEVICE, 2 * PAGE).unwrap();
    let attempts = [
        driver.map(DEVICE, range, PAGE, handle),
        driver.map(DEVICE, range.offset(PAGE), 2 * PAGE, handle),
        driver.map(DEVICE, range.offset(3 * PAGE), 2 * PAGE, two_pages),
        driver.map(DEVICE, range.offset(PAGE + 512), 2 * PAGE, two_pages),
        driver.map(DEVICE, DevicePtr(0x5000), 2 * PAGE, two_pages),
    ];
    for attempt in attempts {
        assert_eq!(status(attempt), Status::InvalidValue);
    }
    assert_eq!(status(driver.map(DEVICE, range.offset(PAGE), PAGE, two_pages)), Status::NotSupported, "half of it");
    driver.map(DEVICE, range.offset(PAGE), PAGE, handle).unwrap();
    assert_eq!(driver.mapped_bytes(DEVICE).current, 2 * PAGE, "one handle at two addresses");
    assert_eq!(driver.physical_bytes(DEVICE).current, 3 * PAGE);
}

#[test]
fn part_of_a_handle_can_be_neither_unmapped_nor_given_access() {
    let driver = driver();
    let range = driver.reserve_range(DEVICE, 4 * PAGE).unwrap();
    let handle = driver.create_handle(DEVICE, 2 * PAGE).unwrap();
    driver.map(DEVICE, range, 2 * PAGE, handle).unwrap();
    assert_eq!(status(driver.unmap(DEVICE, range, PAGE)), Status::InvalidValue);
    assert_eq!(status(driver.unmap(DEVICE, range, 3 * PAGE)), Status::InvalidValue);
    assert_eq!(status(driver.set_access(DEVICE, range, PAGE, &[DEVICE])), Status::InvalidValue);
    driver.unmap(DEVICE, range, 2 * PAGE).unwrap();
}

#[test]
fn an_unmap_of_reserved_addresses_alone_does_nothing_and_elsewhere_is_refused() {
    let driver = driver();
    let (range, _) = mapped_page(&driver);
    driver.unmap(DEVICE, range.offset(PAGE), 3 * PAGE).unwrap();
    assert_eq!(driver.mapped_bytes(DEVICE).current, PAGE);
    assert_eq!(status(driver.unmap(DEVICE, range.offset(PAGE), 4 * PAGE)), Status::InvalidValue, "beyond the range");
    assert_eq!(status(driver.unmap(DEVICE, DevicePtr(PAGE), PAGE)), Status::InvalidValue, "in no range");
    driver.unmap(DEVICE, range, PAGE).unwrap();
    driver.unmap(DEVICE, range, PAGE).unwrap();
}

#[test]
fn a_range_is_given_back_whole_and_empty() {
    let driver = driver();
    let (range, _) = mapped_page(&driver);
    assert_eq!(status(driver.free_range(DEVICE, range, 4 * PAGE)), Status::InvalidValue);
    driver.unmap(DEVICE, range, PAGE).unwrap();
    assert_eq!(status(driver.free_range(DEVICE, range, PAGE)), Status::InvalidValue);
    driver.free_range(DEVICE, range, 4 * PAGE).unwrap();
    assert_eq!(driver.reserved_address_bytes(DEVICE), Level { current: 0, peak: 4 * PAGE });
}

#[test]
fn a_released_handle_returns_its_memory_with_its_last_mapping() {
    let driver = driver();
    let (range, handle) = mapped_page(&driver);
    driver.map(DEVICE, range.offset(PAGE), PAGE, handle).unwrap();
    driver.release_handle(DEVICE, handle).unwrap();
    assert_eq!(driver.live_handles(), 0);
    assert_eq!(status(driver.release_handle(DEVICE, handle)), Status::InvalidValue);
    assert_eq!(status(driver.map(DEVICE, range.offset(2 * PAGE), PAGE, handle)), Status::InvalidValue);
    driver.unmap(DEVICE, range, PAGE).unwrap();
    assert_eq!(driver.physical_bytes(DEVICE).current, PAGE);
    driver.unmap(DEVICE, range.offset(PAGE), PAGE).unwrap();
    assert_eq!(driver.physical_bytes(DEVICE), Level { current: 0, peak: PAGE });
}

#[test]
fn sizes_of_handles_and_ranges_are_multiples_of_the_granularity() {
    let driver = driver();
    assert_eq!(status(driver.create_handle(DEVICE, PAGE + 512)), Status::InvalidValue);
    assert_eq!(status(driver.reserve_range(DEVICE, 0)), Status::InvalidValue);
}

#[test]
fn a_device_without_virtual_memory_refuses_its_calls() {
    let driver = SimDriver::new(SimOptions { virtual_memory: false, ..small() });
    let capabilities = driver.capabilities(DEVICE).unwrap();
    assert!(!capabilities.virtual_memory && !capabilities.virtual_memory_missing.is_empty());
    assert_eq!(status(driver.create_handle(DEVICE, PAGE)), Status::NotSupported);
    assert_eq!(status(driver.reserve_range(DEVICE, PAGE)), Status::NotSupported);
    assert!(driver.allocate(DEVICE, PAGE).is_ok());
}

#[test]
fn a_kernel_on_mapped_memory_without_access_loses_the_context() {
    let driver = driver();
    let range = driver.reserve_range(DEVICE, PAGE).unwrap();
    let handle = driver.create_handle(DEVICE, PAGE).unwrap();
    driver.map(DEVICE, range, PAGE, handle).unwrap();
    driver.launch(FIRST, &[range], &[], 1).unwrap();
    assert!(matches!(driver.complete(None), Err(SimError::UnmappedAccess(error)) if error.address == range));
    assert!(driver.is_lost(DEVICE));
    assert_eq!(status(driver.memory_info(DEVICE)), Status::IllegalAddress);
    assert!(matches!(driver.check(), Err(SimError::UnmappedAccess(_))), "it is still known later");
}

#[test]
fn a_peer_reads_mapped_memory_only_with_access_of_its_own() {
    let driver = SimDriver::new(SimOptions { devices: 2, ..small() });
    let peer = DeviceId(1);
    let (range, _) = mapped_page(&driver);
    assert!(driver.can_access_peer(peer, DEVICE).unwrap());
    driver.set_access(DEVICE, range, PAGE, &[peer]).unwrap();
    driver.set_current_device(peer).unwrap();
    driver.launch(FIRST, &[range], &[], 1).unwrap();
    driver.complete(None).unwrap();

    let (unshared, _) = mapped_page(&driver);
    driver.launch(FIRST, &[unshared], &[], 1).unwrap();
    assert!(matches!(driver.complete(None), Err(SimError::UnmappedAccess(_))));
    assert!(driver.is_lost(peer) && !driver.is_lost(DEVICE));
}

#[test]
fn devices_that_cannot_reach_each_other_get_no_access() {
    let driver = SimDriver::new(SimOptions { devices: 2, peers: false, ..small() });
    let (range, _) = mapped_page(&driver);
    assert!(!driver.can_access_peer(DeviceId(1), DEVICE).unwrap());
    assert_eq!(status(driver.set_access(DEVICE, range, PAGE, &[DeviceId(1)])), Status::InvalidDevice);
}

#[test]
fn what_is_left_on_the_device_is_counted() {
    let driver = driver();
    let (range, handle) = mapped_page(&driver);
    let event = driver.create_event(DEVICE).unwrap();
    let leak = Violation::Leak { segments: 0, handles: 1, mappings: 1, ranges: 1, events: 1 };
    assert_eq!(violation(driver.check_empty()), leak);
    driver.unmap(DEVICE, range, PAGE).unwrap();
    driver.release_handle(DEVICE, handle).unwrap();
    driver.free_range(DEVICE, range, 4 * PAGE).unwrap();
    driver.destroy_event(DEVICE, event).unwrap();
    driver.check_empty().unwrap();
}
