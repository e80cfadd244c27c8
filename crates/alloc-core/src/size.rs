//! Sizes in bytes: how a request is rounded, which class it falls into, how large a segment it asks for.
//!
//! The rules are torch's, so that a user's settings and figures keep their meaning: see
//! [CUDACachingAllocator.cpp](https://github.com/pytorch/pytorch/blob/v2.11.0/c10/cuda/CUDACachingAllocator.cpp),
//! `round_size`, `get_allocation_size` and `should_split`.

use crate::config::Config;

/// Every block is a multiple of this many bytes, and starts at one.
pub const BLOCK_GRANULARITY: u64 = 512;
/// The largest request that is served from small segments.
pub const SMALL_REQUEST_MAX: u64 = 1 << 20;
/// The size of a small segment, and of a small handle.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// Requests below this many bytes share large segments; larger ones get a segment of their own size.
pub const SHARED_REQUEST_LIMIT: u64 = 10 << 20;
/// Segments of their own size are rounded up to this many bytes.
pub const SEGMENT_GRANULARITY: u64 = 2 << 20;
/// The largest request that is tried at all: beyond it, rounding would leave the range of sizes that hold in 63 bits.
pub const REQUEST_MAX: u64 = 1 << 60;

/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;

/// Which of the two kinds of segments a request is served from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SizeClass {
    /// Requests of up to 1 MiB.
    Small,
    /// All others.
    Large,
}

impl SizeClass {
    /// The class of a block of `rounded` bytes.
    pub fn of(rounded: u64) -> Self {
        if rounded <= SMALL_REQUEST_MAX { Self::Small } else { Self::Large }
    }

    /// The class as a position in a pair.
    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

/// `size` rounded up to a multiple of `granularity`.
pub fn round_up(size: u64, granularity: u64) -> u64 {
    size.div_ceil(granularity) * granularity
}

/// The bytes of the block that serves a request of `size` bytes, 1 to [`REQUEST_MAX`].
pub fn block_size(size: u64, config: &Config) -> u64 {
    let divisions = config.roundup_power2_divisions.divisions_for(size);
    if divisions == 0 || size <= BLOCK_GRANULARITY * divisions {
        return round_up(size.max(1), BLOCK_GRANULARITY);
    }
    let power_below = 1 << size.ilog2();
    round_up(size, (power_below / divisions).max(BLOCK_GRANULARITY))
}

/// The bytes of the segment that the driver is asked for when no block of `rounded` bytes is free.
pub fn segment_size(rounded: u64, config: &Config) -> u64 {
    if rounded <= SMALL_REQUEST_MAX {
        SMALL_SEGMENT
    } else if rounded < SHARED_REQUEST_LIMIT {
        config.large_segment_size
    } else {
        round_up(rounded, SEGMENT_GRANULARITY)
    }
}

/// `bytes` as people read them: `512.00 MiB`, `20.00 GiB`; below one KiB in bytes.
pub fn human(bytes: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")];
    UNITS
        .iter()
        .find(|(unit, _)| bytes >= *unit)
        .map_or_else(|| format!("{bytes} bytes"), |(unit, name)| format!("{:.2} {name}", bytes as f64 / *unit as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_rounded_up_to_whole_granules() {
        let config = Config::default();
        assert_eq!(block_size(1, &config), 512);
        assert_eq!(block_size(512, &config), 512);
        assert_eq!(block_size(513, &config), 1024);
    }

    #[test]
    fn divisions_round_up_to_a_part_of_the_power_of_two() {
        let with = |text: &str| Config::parse(text).unwrap().config;
        let four = with("roundup_power2_divisions:4");
        assert_eq!(block_size(1200 * MIB, &four), 1280 * MIB);
        assert_eq!(block_size(1024 * MIB, &four), 1024 * MIB);
        assert_eq!(block_size(1, &four), 512);
        let one = with("roundup_power2_divisions:1");
        assert_eq!(block_size(514 * MIB, &one), 1024 * MIB);
    }

    #[test]
    fn segment_follows_the_three_ranges_of_torch() {
        let config = Config::default();
        assert_eq!(segment_size(512, &config), 2 * MIB);
        assert_eq!(segment_size(MIB, &config), 2 * MIB);
        assert_eq!(segment_size(MIB + 512, &config), 20 * MIB);
        assert_eq!(segment_size(10 * MIB - 512, &config), 20 * MIB);
        assert_eq!(segment_size(10 * MIB, &config), 10 * MIB);
        assert_eq!(segment_size(11 * MIB + 512, &config), 12 * MIB);
    }

    #[test]
    fn sizes_read_as_torch_writes_them() {
        assert_eq!(human(20 * GIB), "20.00 GiB");
        assert_eq!(human(512 * MIB), "512.00 MiB");
        assert_eq!(human(1536), "1.50 KiB");
        assert_eq!(human(12), "12 bytes");
    }
}
