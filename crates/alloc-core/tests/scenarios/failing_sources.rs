//! Sources of segments that fail, and drivers that do while a source is about to be asked.

use std::sync::Arc;

use alloc_core::{
    driver::{Call, Driver, Status, sim::Mishap},
    error::AllocError,
    history::{Action, Recording},
    source::SourceError,
};

use crate::{
    rig::{DEVICE, MAIN, MIB, POLICIES},
    sources::{POOL, finish, release, segment_events, segments, sourced},
};

#[test]
fn source_without_memory_is_asked_again_after_all_that_may_help_and_then_memory_is_out() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        source.fail_next(Mishap::GivesNothing);
        let block = rig.malloc(10 * MIB, MAIN);
        assert_eq!((source.counts().empty, source.counts().given), (1, 1), "{config}: the second time it had some");
        let Err(AllocError::OutOfMemory(report)) = rig.try_malloc(250 * MIB, MAIN) else {
            panic!("the device is too small")
        };
        assert_eq!(report.refused_by, Some(POOL), "{config}");
        assert!(report.to_string().starts_with("CUDA out of memory. Tried to allocate 250.00 MiB. "));
        assert!(
            report
                .to_string()
                .ends_with("The allocator of the private pool (0, 7) gave no memory, and no other serves that pool."),
            "{report}"
        );
        assert_eq!((rig.reserved(), rig.stats().num_ooms), (10 * MIB, 1));
        rig.write(MAIN, block);
        release(&rig);
        finish(rig, &source);
    }
}

#[test]
fn source_that_fails_is_an_error_at_once_and_changes_nothing() {
    for config in POLICIES {
        for mishap in [Mishap::FailsToGive, Mishap::GivesMisaligned, Mishap::GivesTwice] {
            let (mut rig, source) = sourced(config);
            let first = rig.malloc(30 * MIB, MAIN);
            let before = rig.stats();
            source.fail_next(mishap);
            let Err(AllocError::Source(error)) = rig.try_malloc(40 * MIB, MAIN) else {
                panic!("{config}, {mishap:?}: the source failed")
            };
            match (mishap, error) {
                (Mishap::FailsToGive, SourceError::NotObtained { pool: POOL, size }) => assert_eq!(size, 40 * MIB),
                (Mishap::GivesTwice, SourceError::Unusable { pool: POOL, address, .. }) => assert_eq!(address, first),
                (Mishap::GivesMisaligned, SourceError::Unusable { pool: POOL, .. }) => {}
                other => panic!("{config}: {other:?}"),
            }
            source.check().expect("what cannot be used was given back, but for what is in use");
            rig.write(MAIN, first);
            let after = rig.stats();
            assert_eq!((after.reserved_bytes, after.segment), (before.reserved_bytes, before.segment));
            assert_eq!((after.num_ooms, source.counts().given), (0, 1));
            let second = rig.malloc(40 * MIB, MAIN);
            rig.write(MAIN, second);
            release(&rig);
            finish(rig, &source);
        }
    }
}

#[test]
fn segment_that_its_source_does_not_take_back_is_counted_and_offered_again() {
    for config in POLICIES {
        let (mut rig, source) = sourced(config);
        rig.allocator.record_history(Some(&Recording::new(100)), false).expect("nothing is broken");
        let block = rig.malloc(30 * MIB, MAIN);
        rig.free(block);
        release(&rig);
        source.fail_next(Mishap::DoesNotTakeBack);
        let error = rig.allocator.empty_cache().expect_err("the source failed");
        assert_eq!(error, SourceError::NotTakenBack { pool: POOL, address: block, size: 30 * MIB }.into());
        rig.allocator.check().expect("all is as before");
        assert_eq!((rig.reserved(), segments(&rig)), (30 * MIB, vec![30 * MIB]));
        rig.allocator.empty_cache().expect("now it takes it");
        assert_eq!((rig.reserved(), source.counts().kept), (0, 1));
        let came_and_went = [(Action::SegmentAlloc, block), (Action::SegmentFree, block)];
        assert_eq!(segment_events(&rig), came_and_went.repeat(2));
        finish(rig, &source);
    }
}

#[test]
fn any_call_of_a_program_with_a_source_may_fail() {
    for config in POLICIES {
        for nth in 1.. {
            let (mut rig, source) = sourced(config);
            rig.gpu.fail_nth(nth);
            let mut blocks = Vec::new();
            for size in [MIB, 30 * MIB, 3 * MIB] {
                blocks.extend(rig.try_malloc(size, MAIN));
            }
            for block in blocks {
                rig.write(MAIN, block);
                rig.free(block);
            }
            release(&rig);
            let _ = rig.allocator.empty_cache();
            rig.allocator.check().expect("consistent");
            let is_past_the_end = rig.gpu.pending_faults() > 0;
            while rig.gpu.pending_faults() > 0 {
                let _ = rig.gpu.memory_info(DEVICE);
            }
            finish(rig, &source);
            if is_past_the_end {
                break;
            }
        }
    }
}

#[test]
fn driver_that_refuses_the_change_of_mode_leaves_a_segment_where_it_is_and_blames_no_source() {
    let mut left = 0;
    for nth in 0.. {
        let (mut rig, source) = sourced("policy:native");
        let block = rig.malloc(30 * MIB, MAIN);
        rig.write(MAIN, block);
        rig.free(block);
        release(&rig);
        rig.gpu.fail_next(Call::ExchangeCaptureMode, nth, Status::Unknown);
        let result = rig.allocator.empty_cache();
        if rig.gpu.pending_faults() > 0 {
            break;
        }
        // Where it is changed back that it cannot be is no failure of what was done.
        assert!(matches!(result, Ok(()) | Err(AllocError::Driver(_))), "{result:?}");
        assert_eq!(source.counts().kept, 0);
        assert_eq!(rig.reserved(), source.segments(DEVICE).values().sum::<u64>());
        left += source.segments(DEVICE).len();
        rig.allocator.empty_cache().expect("nothing fails any more");
        assert_eq!(source.segments(DEVICE).len(), 0);
        finish(rig, &source);
    }
    assert!(left > 0, "no segment stayed");
}

#[test]
fn source_is_not_asked_where_the_driver_refuses_the_change_of_mode() {
    let (mut rig, source) = sourced("policy:native");
    let block = rig.malloc(30 * MIB, MAIN);
    rig.free(block);
    release(&rig);
    rig.allocator.empty_cache().expect("it goes back");
    rig.begin_pool(POOL, MAIN);
    rig.allocator.end_pool(DEVICE, POOL);
    rig.release_pool(POOL);
    rig.allocator.create_pool_from(DEVICE, POOL, Arc::new(source.clone())).expect("the name is free");
    rig.gpu.fail_next(Call::ExchangeCaptureMode, 0, Status::Unknown);
    let refused = rig.allocator.malloc(30 * MIB, DEVICE, MAIN, Some(POOL));
    refused.expect_err("the driver refused, and the source was not asked");
    assert_eq!((source.counts().given, source.counts().failed), (1, 0));
    rig.allocator.release_pool(DEVICE, POOL);
    finish(rig, &source);
}
