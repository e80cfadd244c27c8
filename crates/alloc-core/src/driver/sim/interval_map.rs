//! Values on intervals of bytes, which split where a new interval begins or ends.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint intervals with a value each. Bytes in no interval have no value.
#[derive(Clone, Debug)]
pub(super) struct IntervalMap<V> {
    /// Start of each interval, its end, and its value.
    intervals: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for IntervalMap<V> {
    fn default() -> Self {
        Self { intervals: BTreeMap::new() }
    }
}

impl<V: Clone> IntervalMap<V> {
    /// The values that some byte of `bytes` has, by address.
    pub(super) fn overlapping(&self, bytes: Range<u64>) -> impl Iterator<Item = &V> {
        let first = self.start_of(bytes.start);
        self.intervals.range(first..bytes.end.max(first)).map(|(_, (_, value))| value)
    }

    /// Gives all of `bytes` one value, in place of those they had.
    pub(super) fn assign(&mut self, bytes: Range<u64>, value: V) {
        self.remove(bytes.clone());
        self.intervals.insert(bytes.start, (bytes.end, value));
    }

    /// Takes the values from all of `bytes`.
    pub(super) fn remove(&mut self, bytes: Range<u64>) {
        self.split(bytes.start);
        self.split(bytes.end);
        while let Some((&start, _)) = self.intervals.range(bytes.clone()).next() {
            self.intervals.remove(&start);
        }
    }

    /// Changes the value of all of `bytes`; those without a value start from `empty`.
    pub(super) fn update(&mut self, bytes: Range<u64>, empty: &V, mut change: impl FnMut(&mut V)) {
        self.split(bytes.start);
        self.split(bytes.end);
        let mut gaps = Vec::new();
        let mut covered_to = bytes.start;
        for (&start, (end, value)) in self.intervals.range_mut(bytes.clone()) {
            if covered_to < start {
                gaps.push(covered_to..start);
            }
            covered_to = *end;
            change(value);
        }
        if covered_to < bytes.end {
            gaps.push(covered_to..bytes.end);
        }
        for gap in gaps {
            let mut value = empty.clone();
            change(&mut value);
            self.intervals.insert(gap.start, (gap.end, value));
        }
    }

    /// The start of the interval around `offset`, or `offset` itself.
    fn start_of(&self, offset: u64) -> u64 {
        match self.intervals.range(..=offset).next_back() {
            Some((&start, &(end, _))) if end > offset => start,
            _ => offset,
        }
    }

    /// Makes `offset` a bound between two intervals, if it lies inside one.
    fn split(&mut self, offset: u64) {
        if let Some((_, (end, value))) = self.intervals.range_mut(..offset).next_back()
            && *end > offset
        {
            let upper = (*end, value.clone());
            *end = offset;
            self.intervals.insert(offset, upper);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(map: &IntervalMap<u32>, bytes: Range<u64>) -> Vec<u32> {
        map.overlapping(bytes).copied().collect()
    }

    #[test]
    fn an_update_splits_at_its_bounds_and_fills_gaps() {
        let mut map = IntervalMap::default();
        map.assign(0..10, 1);
        map.assign(20..30, 2);
        map.update(5..25, &0, |value| *value += 10);
        assert_eq!(values(&map, 0..30), [1, 11, 10, 12, 2]);
        assert_eq!(values(&map, 7..8), [11]);
        assert_eq!(values(&map, 10..20), [10]);
    }

    #[test]
    fn an_assignment_leaves_the_rest_of_what_it_covers_in_part() {
        let mut map = IntervalMap::default();
        map.assign(0..10, 1);
        map.assign(4..6, 2);
        assert_eq!(values(&map, 0..10), [1, 2, 1]);
        map.remove(0..10);
        assert_eq!(values(&map, 0..10), [] as [u32; 0]);
    }
}
