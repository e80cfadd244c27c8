//! Memory named to other processes, and memory of others brought to this one. A simulation is one process, so what is
//! imported here is what was exported here.

use alloc_core::{
    allocator::SharedName,
    driver::{Call, CaptureMode, Status},
    id::DevicePtr,
};

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

fn nothing_is_abandoned(descriptor: i32) {
    panic!("descriptor {descriptor} is needed");
}

#[test]
fn allocation_is_named_by_the_handles_behind_it_and_imported_as_one_piece() {
    for config in ["policy:expandable", "policy:rallocator"] {
        let mut rig = Rig::new(config);
        let first = rig.malloc(3 * MIB, MAIN);
        let second = rig.malloc(70 * MIB, MAIN);
        for (address, size) in [(first, 3 * MIB), (second, 70 * MIB)] {
            let shared = rig
                .allocator
                .share(address, nothing_is_abandoned)
                .expect("it can be exported")
                .expect("it is allocated");
            let SharedName::Handles(pieces) = &shared.name else { panic!("named by {:?}", shared.name) };
            let bytes: u64 = pieces.iter().map(|(_, size)| size).sum();
            assert!(shared.offset + size <= bytes && shared.offset < pieces[0].1, "{shared:?}");
            let before = (rig.reserved(), rig.gpu.physical_bytes(DEVICE).current);
            let imported = rig.allocator.import(DEVICE, &shared.name).expect("it can be imported");
            assert_ne!(imported.base.offset(shared.offset), address);
            assert_eq!((rig.reserved(), rig.gpu.physical_bytes(DEVICE).current), before, "no memory but addresses");
            assert!(rig.allocator.close_import(&imported).expect("it can be closed"));
        }
        rig.finish();
    }
}

#[test]
fn imported_memory_outlives_its_owner() {
    let mut rig = Rig::new("policy:rallocator");
    let block = rig.malloc(30 * MIB, MAIN);
    let shared =
        rig.allocator.share(block, nothing_is_abandoned).expect("it can be exported").expect("it is allocated");
    let imported = rig.allocator.import(DEVICE, &shared.name).expect("it can be imported");
    rig.free(block);
    rig.allocator.empty_cache().expect("all can go back");
    assert_eq!(rig.reserved(), 0);
    assert!(rig.gpu.physical_bytes(DEVICE).current >= 30 * MIB, "the importer still has it");
    assert!(rig.allocator.close_import(&imported).expect("it can be closed"));
    rig.finish();
}

#[test]
fn segment_is_named_by_its_ticket_and_not_opened_by_its_own_process() {
    let mut rig = Rig::new("policy:native");
    let first = rig.malloc(MIB + 1, MAIN);
    let second = rig.malloc(2 * MIB, MAIN);
    let shared = rig.allocator.share(second, nothing_is_abandoned).expect("it has a ticket").expect("it is allocated");
    assert_eq!(first.offset(shared.offset), second, "both lie in one segment");
    assert!(matches!(shared.name, SharedName::Segment(_)));
    assert!(rig.allocator.import(DEVICE, &shared.name).is_err());
    rig.finish();
}

#[test]
fn only_what_is_allocated_is_shared() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let block = rig.malloc(2 * MIB, MAIN);
        rig.free(block);
        for address in [block, DevicePtr(0x1000)] {
            assert_eq!(
                rig.allocator.share(address, nothing_is_abandoned).expect("nothing is asked of the driver"),
                None
            );
        }
        rig.finish();
    }
}

#[test]
fn import_that_fails_at_any_call_leaves_nothing_behind() {
    for call in [Call::ReserveRange, Call::ImportHandle, Call::Map, Call::SetAccess] {
        for after in 0..3 {
            let mut rig = Rig::new("policy:rallocator");
            let block = rig.malloc(70 * MIB, MAIN);
            let shared =
                rig.allocator.share(block, nothing_is_abandoned).expect("it can be exported").expect("it is allocated");
            rig.gpu.fail_next(call, after, Status::Unknown);
            if let Ok(imported) = rig.allocator.import(DEVICE, &shared.name) {
                assert!(rig.allocator.close_import(&imported).expect("it can be closed"));
            }
            rig.finish();
        }
    }
}

#[test]
fn descriptors_made_before_an_export_fails_are_abandoned() {
    for after in 0..3 {
        let mut rig = Rig::new("policy:expandable");
        let block = rig.malloc(70 * MIB, MAIN);
        rig.gpu.fail_next(Call::ExportHandle, after, Status::Unknown);
        let mut abandoned = Vec::new();
        assert!(rig.allocator.share(block, |descriptor| abandoned.push(descriptor)).is_err());
        assert_eq!(abandoned.len() as u64, after);
        rig.free(block);
        rig.finish();
    }
}

#[test]
fn import_stays_open_while_a_capture_may_be_under_way() {
    let mut rig = Rig::new("policy:rallocator");
    rig.gpu.open_stream(SIDE).expect("the stream can be made");
    let block = rig.malloc(30 * MIB, MAIN);
    let used = rig.malloc(MIB, SIDE);
    let shared =
        rig.allocator.share(block, nothing_is_abandoned).expect("it can be exported").expect("it is allocated");
    let imported = rig.allocator.import(DEVICE, &shared.name).expect("it can be imported");
    rig.gpu.begin_capture(SIDE, CaptureMode::Global).expect("it can capture");
    assert!(!rig.allocator.close_import(&imported).expect("nothing is asked of the driver"));
    let graph = rig.gpu.end_capture(SIDE).expect("nothing spoiled it");
    rig.gpu.destroy_graph(graph).expect("it exists");
    assert!(rig.allocator.close_import(&imported).expect("it can be closed"));
    rig.free(block);
    rig.free(used);
    rig.finish();
}

#[test]
fn import_whose_closing_fails_is_an_error_and_harms_nothing_else() {
    for call in [Call::SynchronizeDevice, Call::Unmap, Call::FreeRange] {
        let mut rig = Rig::new("policy:rallocator");
        let block = rig.malloc(30 * MIB, MAIN);
        let shared =
            rig.allocator.share(block, nothing_is_abandoned).expect("it can be exported").expect("it is allocated");
        let imported = rig.allocator.import(DEVICE, &shared.name).expect("it can be imported");
        rig.gpu.fail_next(call, 0, Status::Unknown);
        assert!(rig.allocator.close_import(&imported).is_err());
        let again = rig.malloc(30 * MIB, MAIN);
        rig.free(again);
        rig.free(block);
    }
}
