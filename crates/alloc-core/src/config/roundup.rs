//! How coarsely sizes are rounded up, by size.

use std::fmt;

use super::grammar::Value;
use crate::size::MIB;

/// Divisions of each power of two into which sizes are rounded up (`roundup_power2_divisions`).
///
/// There are 16 intervals: the first holds all sizes below 2 MiB, the next those from 2 MiB, then from 4 MiB, and so on;
/// the last holds all from 32 GiB. An interval's divisions are 0, which rounds to 512 bytes only, or a power of two: each
/// power of two is cut into so many steps, and a size is rounded up to the next step. 1 rounds up to the next power of
/// two. Results stay multiples of 512 bytes: a step below that is 512 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Roundup {
    /// By interval. Each is 0 or a power of two.
    divisions: [u64; Self::INTERVALS],
}

impl Roundup {
    /// The number of intervals.
    pub const INTERVALS: usize = 16;

    /// What the setting takes, for messages.
    pub(super) const EXPECTED: &str = "a power of two up to 1048576, or a list [size:divisions,…] with sizes in MiB, powers \
         of two from 1 to 32768, ascending, the last perhaps `>`, and divisions that are 0 or a power of two up to 1048576";

    /// A table of these divisions, each 0 or a power of two.
    #[cfg(test)]
    pub(super) fn from_intervals(divisions: [u64; Self::INTERVALS]) -> Self {
        Self { divisions }
    }

    /// The divisions for requests of `size` bytes.
    pub fn divisions_for(&self, size: u64) -> u64 {
        let whole_mib = (size / MIB).max(1);
        self.divisions[interval_of(whole_mib).min(Self::INTERVALS - 1)]
    }

    /// Each interval's lower end in MiB, with its divisions: what torch puts into a snapshot's settings.
    pub fn intervals(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.divisions.iter().enumerate().map(|(interval, &divisions)| (1 << interval, divisions))
    }

    /// The table for a setting's value, `None` if that is not accepted.
    ///
    /// Sizes below the first one listed take its divisions, and an interval that the list skips takes those of the one
    /// below it. Above the last one listed nothing is rounded, unless `>` says how; a list of `>` alone holds for all.
    /// Torch (2.15) leaves the intervals that a list skips unrounded, and the first one too if `>` stands alone.
    pub(super) fn from_value(value: &Value<'_>) -> Option<Self> {
        match value {
            Value::Word(word) => {
                let divisions = divisions_of(word).filter(|&divisions| divisions != 0)?;
                Some(Self { divisions: [divisions; Self::INTERVALS] })
            }
            Value::List(items) => Self::from_list(items),
        }
    }

    fn from_list(items: &[(&str, &str)]) -> Option<Self> {
        let (listed, above) = match items.split_last()? {
            ((">", divisions), listed) => (listed, divisions_of(divisions)?),
            _ => (items, 0),
        };
        let mut table = Self::default();
        // The first interval that no item has spoken for yet, and what the item before said.
        let (mut next, mut carried) = (0, None);
        for (size_mib, divisions) in listed {
            let interval = interval_of(whole_number(size_mib).filter(|size_mib| size_mib.is_power_of_two())?);
            let divisions = divisions_of(divisions)?;
            // Sizes that do not ascend make the range of skipped intervals an impossible one.
            table.divisions.get_mut(next..interval)?.fill(carried.unwrap_or(divisions));
            *table.divisions.get_mut(interval)? = divisions;
            (next, carried) = (interval + 1, Some(divisions));
        }
        table.divisions[next..].fill(above);
        Some(table)
    }
}

/// The text of the setting: one number when all intervals agree, else a list of all of them.
impl fmt::Display for Roundup {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.divisions[0];
        if self.divisions == [0; Self::INTERVALS] {
            return formatter.write_str("off");
        }
        if self.divisions == [first; Self::INTERVALS] {
            return write!(formatter, "{first}");
        }
        let items: Vec<String> =
            self.intervals().map(|(size_mib, divisions)| format!("{size_mib}:{divisions}")).collect();
        write!(formatter, "[{}]", items.join(","))
    }
}

/// At 32 GiB a step is then 32 KiB: finer is as good as not rounding, and a product with a block's 512 bytes stays small.
const MAX_DIVISIONS: u64 = 1 << 20;

fn interval_of(size_mib: u64) -> usize {
    size_mib.ilog2() as usize
}

/// An interval's divisions, if the text is such a number.
fn divisions_of(text: &str) -> Option<u64> {
    whole_number(text).filter(|&divisions| divisions == 0 || divisions.is_power_of_two() && divisions <= MAX_DIVISIONS)
}

/// A number written in digits alone: no sign, no fraction.
pub(super) fn whole_number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}
