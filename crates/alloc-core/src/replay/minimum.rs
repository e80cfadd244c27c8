//! The smallest budget under which a history runs to its end.

use super::{Options, ReplayError, Step, replay};
use crate::size::round_up;

/// What all memory from the driver is a multiple of, so that no budget between two multiples makes a difference.
const GRANULE_BYTES: u64 = 2 << 20;

/// The largest budget that is tried.
const MOST_BYTES: u64 = 1 << 48;

/// Finds a budget under which no allocation of `steps` fails, and such that with one granule less one does.
///
/// By bisection, so it is the smallest only if more memory never hurts. For a rule that splits blocks that is not quite
/// so: a somewhat smaller budget may happen to suffice too. `None` if not even 256 TiB are enough.
///
/// # Errors
/// [`ReplayError`].
pub fn minimum_budget(steps: &[Step], options: &Options) -> Result<Option<u64>, ReplayError> {
    let granule = GRANULE_BYTES.max(options.handle_granularity_bytes);
    let fits = |granules: u64| -> Result<bool, ReplayError> {
        let budget_bytes = Some(granules * granule);
        Ok(replay(steps, &Options { budget_bytes, stop_at_failure: true, ..options.clone() })?.ooms == 0)
    };
    let free = replay(steps, &Options { budget_bytes: None, ..options.clone() })?;
    if free.ooms > 0 {
        return Ok(None);
    }
    let mut enough = round_up(free.peak_reserved.max(1), granule) / granule;
    // Less than what the program holds at once cannot be enough.
    let mut too_little = free.peak_allocated.saturating_sub(1) / granule;
    // More may be needed than without a limit: what the recorded program was refused is asked for only under one.
    while !fits(enough)? {
        too_little = enough;
        enough *= 2;
        if enough * granule > MOST_BYTES {
            return Ok(None);
        }
    }
    while enough - too_little > 1 {
        let middle = too_little + (enough - too_little) / 2;
        if fits(middle)? {
            enough = middle;
        } else {
            too_little = middle;
        }
    }
    Ok(Some(enough * granule))
}
