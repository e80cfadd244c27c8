//! Tests of following a recording by the places of its blocks.

use super::tests::{allocate, free, options};
use super::{Emptied, follow};
use crate::config::Policy;
use crate::size::MIB;

/// Enough for any of these.
const AMPLE: usize = 1 << 20;

const A: Option<u64> = Some(1 << 40);
const B: Option<u64> = Some(1 << 41);
const C: Option<u64> = Some(1 << 42);

#[test]
fn block_outside_of_cached_memory_that_fits_tells_of_an_emptied_cache() {
    let steps = [allocate(0, 0, 40 * MIB), free(1, 0), allocate(2, 1, 30 * MIB), allocate(3, 2, 30 * MIB), free(4, 1)];
    let native = options(Policy::Native, None);
    let followed = follow(&steps, &[A, None, B, C, None], &native, AMPLE).unwrap();
    assert_eq!(followed.emptied, [Emptied { step: 2, wanted: 70 * MIB }]);
    assert_eq!((followed.peak_reserved, followed.contradictions), (60 * MIB, 0));
    let kept = follow(&steps, &[A, None, A, C, None], &native, AMPLE).unwrap();
    assert_eq!((kept.emptied.len(), kept.peak_reserved, kept.contradictions), (0, 70 * MIB, 0));
    let unsought = follow(&steps, &[A, None, B, C, None], &native, 0).unwrap();
    assert_eq!((unsought.emptied.len(), unsought.contradictions), (0, 1));
}

#[test]
fn among_blocks_of_one_size_the_recorded_choice_is_followed() {
    let steps = [
        allocate(0, 0, 40 * MIB),
        allocate(1, 1, 40 * MIB),
        free(2, 0),
        free(3, 1),
        allocate(4, 2, 24 * MIB),
        allocate(5, 3, 16 * MIB),
        allocate(6, 4, 40 * MIB),
    ];
    // The recorded driver put the second segment below the first one.
    let places = [B, A, None, None, A, Some((1 << 40) + 24 * MIB), B];
    let followed = follow(&steps, &places, &options(Policy::Native, None), AMPLE).unwrap();
    assert_eq!((followed.emptied.len(), followed.peak_reserved, followed.contradictions), (0, 80 * MIB, 0));
}

#[test]
fn places_that_no_emptied_cache_explains_are_counted() {
    let steps = [allocate(0, 0, 12 * MIB), allocate(1, 1, 14 * MIB)];
    let followed = follow(&steps, &[A, Some((1 << 40) + 4 * MIB)], &options(Policy::Native, None), AMPLE).unwrap();
    assert_eq!((followed.emptied.len(), followed.contradictions), (0, 1));
}
