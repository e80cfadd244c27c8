//! Private pools that go back to a checkpoint, and what else `MemPool` asks of a pool.

use alloc_core::{
    allocator::FreeOutcome,
    checkpoint::RestoreError,
    id::{DevicePtr, PoolId},
};
use proptest::prelude::*;

use crate::rig::{DEVICE, MAIN, MIB, POLICIES, Rig, SIDE};

const POOL: PoolId = PoolId(0, 7);

/// What the pool holds, by the snapshot.
fn held(rig: &Rig) -> Vec<DevicePtr> {
    let segments = rig.allocator.snapshot().into_iter().filter(|segment| segment.pool == POOL);
    let blocks = segments.flat_map(|segment| segment.blocks);
    blocks.filter(|block| block.state.name() == "active_allocated").map(|block| block.address).collect()
}

#[test]
fn pool_goes_back_to_what_it_held_at_a_checkpoint() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.begin_pool(POOL, SIDE);
        let [first, second, third] = [3 * MIB, 700, 5 * MIB].map(|size| rig.malloc(size, SIDE));
        rig.free(second);
        let checkpoint = rig.allocator.checkpoint_pool(DEVICE, POOL).expect("the pool is in use");
        rig.free(first);
        let other = rig.malloc(40 * MIB, SIDE);
        let another = rig.malloc(2 * MIB, SIDE);
        let before = held(&rig);
        let restored = rig.allocator.restore_pool(DEVICE, &checkpoint).expect("it can");
        rig.allocator.check().expect("consistent after the restore");
        assert_eq!(restored.freed, before);
        assert!(before.contains(&other) && before.contains(&another) && before.contains(&third));
        let mut expected = vec![first, third];
        expected.sort();
        assert_eq!((restored.allocated, held(&rig)), (expected.clone(), expected));
        assert_eq!(rig.allocator.checkpoint_pool(DEVICE, POOL), Some(checkpoint));
        for address in [first, third] {
            rig.allocator.free(address, DEVICE);
        }
        rig.allocator.check().expect("what was restored is freed as anything else");
        assert_eq!(held(&rig), []);
        rig.allocator.end_pool(DEVICE, POOL);
        rig.release_pool(POOL);
        rig.allocator.empty_cache().expect("all can go back");
        assert_eq!(rig.reserved(), 0);
    }
}

#[test]
fn checkpoint_is_refused_without_a_change_where_its_memory_is_not_free() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.begin_pool(POOL, MAIN);
        let block = rig.malloc(4 * MIB, MAIN);
        let checkpoint = rig.allocator.checkpoint_pool(DEVICE, POOL).expect("the pool is in use");
        rig.record_stream(block, SIDE);
        rig.write(SIDE, block);
        assert_eq!(rig.allocator.restore_pool(DEVICE, &checkpoint), Err(RestoreError::InUse(block)));
        assert_eq!(held(&rig), [block], "nothing has changed");
        rig.free(block);
        assert_eq!(rig.allocator.restore_pool(DEVICE, &checkpoint), Err(RestoreError::InUse(block)));
        rig.allocator.end_pool(DEVICE, POOL);
        rig.release_pool(POOL);
        assert_eq!(rig.allocator.restore_pool(DEVICE, &checkpoint), Err(RestoreError::NoSuchPool(POOL)));
        rig.begin_pool(POOL, MAIN);
        assert_eq!(rig.allocator.restore_pool(DEVICE, &checkpoint), Err(RestoreError::NoMemory(block)));
        rig.allocator.end_pool(DEVICE, POOL);
        rig.release_pool(POOL);
        rig.finish();
    }
}

#[test]
fn pool_counts_its_users_and_gives_back_its_own_memory_alone() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        let other = rig.malloc(30 * MIB, SIDE);
        let kept = rig.reserved();
        rig.allocator.create_pool(DEVICE, POOL).expect("the device is in use");
        rig.begin_pool(POOL, MAIN);
        assert_eq!(rig.allocator.pool_users(DEVICE, POOL), 2);
        let block = rig.malloc(30 * MIB, MAIN);
        rig.free(block);
        rig.allocator.end_pool(DEVICE, POOL);
        rig.release_pool(POOL);
        assert_eq!(rig.allocator.pool_users(DEVICE, POOL), 1);
        rig.allocator.empty_pool(POOL).expect("nothing is to be done");
        assert!(rig.reserved() > kept, "the pool has a user");
        rig.allocator.release_pool(DEVICE, POOL);
        assert_eq!(rig.allocator.pool_users(DEVICE, POOL), 0);
        rig.free(other);
        rig.allocator.empty_pool(POOL).expect("its memory can go back");
        rig.allocator.check().expect("consistent");
        assert_eq!(rig.reserved(), kept, "what others have cached stays");
        rig.finish();
    }
}

#[test]
fn pool_serves_others_when_memory_is_out_only_if_it_was_told_to() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.begin_pool(POOL, MAIN);
        let block = rig.malloc(200 * MIB, MAIN);
        rig.free(block);
        rig.allocator.end_pool(DEVICE, POOL);
        assert!(rig.try_malloc(120 * MIB, MAIN).is_err());
        assert!(rig.allocator.serve_when_out_of_memory(DEVICE, POOL, true));
        let elsewhere = rig.try_malloc(120 * MIB, SIDE);
        assert!(elsewhere.is_err(), "the memory belongs to another stream");
        let served = rig.malloc(120 * MIB, MAIN);
        assert_eq!(held(&rig), [served]);
        rig.write(MAIN, served);
        rig.free(served);
        assert!(rig.allocator.serve_when_out_of_memory(DEVICE, POOL, false));
        assert!(rig.try_malloc(120 * MIB, MAIN).is_err());
        rig.release_pool(POOL);
        assert!(!rig.allocator.serve_when_out_of_memory(DEVICE, POOL, true), "there is no such pool any more");
        rig.finish();
    }
}

#[test]
fn pool_that_may_not_split_hands_its_blocks_out_whole() {
    for config in POLICIES {
        let mut rig = Rig::new(config);
        rig.begin_pool(POOL, MAIN);
        assert!(rig.allocator.forbid_splits(DEVICE, POOL));
        let first = rig.malloc(12 * MIB, MAIN);
        let second = rig.malloc(2 * MIB, MAIN);
        let sizes: Vec<u64> =
            rig.allocator.snapshot().iter().flat_map(|segment| &segment.blocks).map(|block| block.size).collect();
        assert_eq!(sizes.len(), 2, "nothing is left over: {sizes:?}");
        rig.free(second);
        assert_eq!(rig.malloc(MIB + 1, MAIN), second, "a smaller request takes all of it");
        rig.free(first);
        rig.allocator.end_pool(DEVICE, POOL);
        rig.release_pool(POOL);
        rig.finish();
    }
}

/// A step of a program: an allocation of so many KiB on one of two streams, or the end of one of those there are.
#[derive(Clone, Copy, Debug)]
enum Step {
    Allocate { kib: u64, aside: bool },
    Free(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let allocate = (1..6000u64, any::<bool>()).prop_map(|(kib, aside)| Step::Allocate { kib, aside });
    let step = prop_oneof![3 => allocate, 2 => any::<prop::sample::Index>().prop_map(Step::Free)];
    prop::collection::vec(step, 0..25)
}

/// Plays the steps in the pool; `live` is what it holds.
fn play(rig: &Rig, steps: &[Step], live: &mut Vec<DevicePtr>) {
    for step in steps {
        match step {
            Step::Allocate { kib, aside } => {
                let stream = if *aside { SIDE } else { MAIN };
                // Memory may run out: then nothing has changed.
                if let Ok(Some(address)) = rig.allocator.malloc(kib << 10, DEVICE, stream, Some(POOL)) {
                    live.push(address);
                }
            }
            Step::Free(which) if !live.is_empty() => {
                let address = live.swap_remove(which.index(live.len()));
                assert_eq!(rig.allocator.free(address, DEVICE), FreeOutcome::Freed);
            }
            Step::Free(_) => {}
        }
        rig.allocator.check().expect("consistent");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever came before and after a checkpoint, a pool goes back to it, and from it to a later one.
    #[test]
    fn any_pool_goes_back_to_any_checkpoint(
        config in prop::sample::select(&POLICIES[..]),
        [before, between, after] in [steps(), steps(), steps()],
    ) {
        let rig = Rig::new(config);
        rig.gpu.open_stream(SIDE).expect("the stream can be made");
        rig.allocator.create_pool(DEVICE, POOL).expect("the device is in use");
        let mut live = Vec::new();
        play(&rig, &before, &mut live);
        let first = (rig.allocator.checkpoint_pool(DEVICE, POOL).expect("it is in use"), live.clone());
        play(&rig, &between, &mut live);
        let second = (rig.allocator.checkpoint_pool(DEVICE, POOL).expect("it is in use"), live.clone());
        play(&rig, &after, &mut live);
        for (checkpoint, then) in [&first, &second, &first] {
            live.sort();
            let restored = rig.allocator.restore_pool(DEVICE, checkpoint).expect("no other stream is involved");
            rig.allocator.check().expect("consistent after the restore");
            assert_eq!(restored.freed, live);
            live.clone_from(then);
            live.sort();
            assert_eq!(&restored.allocated, &live);
            assert_eq!(held(&rig), live.clone());
            assert_eq!(rig.allocator.checkpoint_pool(DEVICE, POOL).as_ref(), Some(checkpoint));
            play(&rig, &after, &mut live);
        }
        for address in live {
            assert_eq!(rig.allocator.free(address, DEVICE), FreeOutcome::Freed);
        }
        rig.allocator.release_pool(DEVICE, POOL);
        rig.finish();
    }
}
