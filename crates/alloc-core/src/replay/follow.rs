//! Finds out when a recorded program emptied its cache, from where its blocks lay.
//!
//! Events of blocks do not show `torch.cuda.empty_cache`, which `torch.cuda.graph` calls too, nor the allocator's own
//! release of its cache at a limit. What they show is what came of it: a request that cached memory would have served was
//! served from elsewhere. So the history is replayed under the rules that it was recorded under, and each segment is tied
//! to the place where the first block in it was recorded. From then on every block's recorded place follows, and where one
//! lies outside of all segments that there are, or in one of another owner, the memory that the replay holds is memory
//! that the recorded allocator had given back.
//!
//! Addresses are names here as elsewhere: no more is taken from them than which blocks lay side by side.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use super::{Action, DEVICE, Failure, Holder, Options, Replay, ReplayError, State, Step};
use crate::id::{DevicePtr, PoolId, StreamHandle};
use crate::size::{SizeClass, block_size};

/// A moment when the cache was emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emptied {
    /// The step before which it was.
    pub step: usize,
    /// Bytes that would have been reserved after that step otherwise. If no more was ever reserved, then the allocator may
    /// have emptied its cache by itself, at a limit.
    pub wanted: u64,
}

/// What following a recording found out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Followed {
    /// When the cache was emptied, those moments among them that were given.
    pub emptied: Vec<Emptied>,
    /// The most that was reserved after any step.
    pub peak_reserved: u64,
    /// Blocks that lay where the replay cannot explain them.
    pub contradictions: usize,
}

/// Follows a recording under policy native, without a budget, from where the blocks lay that its steps allocate; `None`
/// where that does not count.
///
/// Where a block lies elsewhere, the cache was emptied at some time since the segment was last used that would have
/// served it. Of all such moments that make a difference the one is taken that leaves least unexplained among the steps
/// that follow; none, if that leaves no more. At most `budget` steps are replayed for it, beyond one run to the end.
///
/// # Errors
/// [`ReplayError`].
pub fn follow(
    steps: &[Step],
    places: &[Option<u64>],
    options: &Options,
    mut budget: usize,
) -> Result<Followed, ReplayError> {
    let mut options = options.clone();
    let mut from = 0;
    loop {
        let mut follower = Follower::begin(steps, &options)?;
        let suspect = follower.run(steps, places, from, steps.len())?;
        let Some(suspect) = suspect else { return Ok(follower.followed) };
        if 2 * MOST_MOMENTS * (suspect.step + HORIZON) > budget {
            // What is left is not looked into.
            from = steps.len();
            continue;
        }
        let until = steps.len().min(suspect.step + HORIZON);
        let left = unexplained(steps, places, &options, until)?;
        match best_moment(steps, places, &options, &suspect.moments, until, &mut budget)? {
            Some((fewer, moment)) if fewer < left => options.empty_cache_before.push(moment),
            // Something else is different from what the replay takes it to be.
            _ => from = suspect.step + 1,
        }
        budget = budget.saturating_sub(2 * suspect.step);
    }
}

/// Of `moments`, the one that leaves least unexplained, with how much that is: looked for among some of them, then among
/// those around the best, since a moment leaves more unexplained the further it is from the right one.
fn best_moment(
    steps: &[Step],
    places: &[Option<u64>],
    options: &Options,
    moments: &[usize],
    until: usize,
    budget: &mut usize,
) -> Result<Option<(usize, usize)>, ReplayError> {
    let (mut first, mut last) = (0, moments.len());
    let mut best: Option<(usize, usize)> = None;
    loop {
        let stride = (last - first).div_ceil(MOST_MOMENTS).max(1);
        let mut at = first;
        for index in (first..last).step_by(stride).chain(last.checked_sub(1)) {
            let mut tried = options.clone();
            tried.empty_cache_before.push(moments[index]);
            let found = (unexplained(steps, places, &tried, until)?, moments[index]);
            *budget = budget.saturating_sub(until);
            if best.is_none_or(|best| found <= best) {
                (best, at) = (Some(found), index);
            }
        }
        if stride == 1 || *budget < until {
            return Ok(best);
        }
        (first, last) = (at.saturating_sub(stride - 1).max(first), (at + stride).min(last));
    }
}

/// The number of blocks among the steps before `until` that lie where the replay cannot explain them.
fn unexplained(steps: &[Step], places: &[Option<u64>], options: &Options, until: usize) -> Result<usize, ReplayError> {
    let mut follower = Follower::begin(steps, options)?;
    follower.run(steps, places, until, until)?;
    Ok(follower.followed.contradictions)
}

/// How many steps tell whether a moment was the right one.
const HORIZON: usize = 300;

/// How many moments are looked at for one suspicious block at first.
const MOST_MOMENTS: usize = 12;

/// A block that lies elsewhere than it would if the cache had not been emptied.
#[derive(Debug)]
struct Suspect {
    step: usize,
    /// The steps before which it may have been: all that make a difference, in order.
    moments: Vec<usize>,
}

/// Whose requests a segment serves.
type Owner = (StreamHandle, Option<PoolId>, SizeClass);

/// A segment of the replay.
#[derive(Clone, Copy, Debug)]
struct Span {
    size: u64,
    owner: Owner,
    /// Where it lay in the recording, if that is known.
    place: Option<u64>,
    /// Blocks that the program holds in it.
    held: usize,
    /// The latest step in which it held one.
    held_until: usize,
}

/// See [`follow`].
struct Follower {
    replay: Replay,
    /// By the first byte in the replay.
    spans: BTreeMap<u64, Span>,
    /// The same by their places.
    by_place: BTreeMap<u64, u64>,
    /// The steps in which memory was obtained, or taken from an idle segment: those that an emptied cache changes.
    turns: Vec<usize>,
    reserved: u64,
    followed: Followed,
}

/// What a block's place says about the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finding {
    /// Nothing.
    Plain,
    /// It was the free block of the same size at this address of the replay.
    Elsewhere(DevicePtr),
    /// It lies where no memory could have been had as long as the segment with this first byte was there.
    Gone(u64),
    /// It cannot be explained.
    Contradiction,
}

impl Follower {
    fn begin(steps: &[Step], options: &Options) -> Result<Self, ReplayError> {
        let (_, card_bytes) = super::CARD_BYTES;
        let options = Options { budget_bytes: None, ..options.clone() };
        let replay = Replay::begin(steps.len(), &options, card_bytes, 1.0, false)?;
        let mut follower = Self {
            reserved: reserved(&replay),
            replay,
            spans: BTreeMap::new(),
            by_place: BTreeMap::new(),
            turns: Vec::new(),
            followed: Followed::default(),
        };
        follower.bind_layout(options.layout.as_deref().map_or(&[], Vec::as_slice));
        Ok(follower)
    }

    /// The segments that the replay began with lie where they lay.
    fn bind_layout(&mut self, layout: &[super::PlacedSegment]) {
        if self.reserved == 0 {
            return;
        }
        let pictures = self.replay.allocator.snapshot();
        // They were obtained in order, and so they lie in order.
        for (segment, picture) in layout.iter().zip(pictures).filter(|(segment, one)| segment.size == one.size) {
            let held = segment.pieces.iter().filter(|piece| matches!(piece.holder, Holder::Allocation(_))).count();
            let owner = (segment.stream, segment.pool, picture.class);
            let span = Span { size: segment.size, owner, place: Some(segment.address), held, held_until: 0 };
            self.insert(picture.address.0, span);
        }
    }

    /// Takes the steps before `until`, or returns at the first suspicious one that is not before `from`.
    fn run(
        &mut self,
        steps: &[Step],
        places: &[Option<u64>],
        from: usize,
        until: usize,
    ) -> Result<Option<Suspect>, ReplayError> {
        for (step, &Step { time_us, action }) in steps.iter().enumerate().take(until) {
            self.replay.allocator.driver().advance_to(time_us)?;
            if self.replay.is_emptied_before(step) {
                self.empty_cache(step).map_err(|failure| failure.at(step))?;
            }
            let gone = self.take(step, action, places).map_err(|failure| failure.at(step))?;
            if let Some(since) = gone.filter(|_| step >= from) {
                return Ok(Some(self.suspect(step, since)));
            }
            self.followed.peak_reserved = self.followed.peak_reserved.max(self.reserved);
        }
        Ok(None)
    }

    fn suspect(&self, step: usize, since: usize) -> Suspect {
        let first = self.turns.partition_point(|turn| *turn <= since);
        let turns = self.turns.get(first..).unwrap_or_default();
        let mut moments: Vec<usize> = turns.iter().copied().filter(|turn| *turn < step).collect();
        moments.push(step);
        Suspect { step, moments }
    }

    /// Takes a step. If a segment must have been gone for its block to lie where it lay, returns when it was last used.
    fn take(&mut self, step: usize, action: Action, places: &[Option<u64>]) -> Result<Option<usize>, Failure> {
        let (allocation, size, stream, pool) = match action {
            Action::Allocate { allocation, size, stream, pool } => (allocation, size, stream, pool),
            Action::Free { allocation, .. } => {
                self.give_back(step, allocation);
                self.replay.take(action)?;
                return Ok(None);
            }
            Action::Try { .. } => return Ok(None),
        };
        let was_placed = matches!(self.replay.allocations.get(allocation), Some(State::Placed(_)));
        self.replay.take(action)?;
        let Some(mut address) = self.address_of(allocation).filter(|_| !was_placed) else { return Ok(None) };
        let owner = (stream, pool, SizeClass::of(block_size(size, self.replay.allocator.config())));
        let place = places.get(step).copied().flatten();
        let finding = self.finding(address, place, owner, size);
        let mut gone = None;
        match finding {
            Finding::Plain => {}
            Finding::Elsewhere(at) => {
                self.put_back(allocation, address, size);
                let Some(chosen) = self.replay.allocator.malloc_at(at, size, DEVICE, stream, pool) else {
                    return Err(Failure::Allocation(allocation, "has no block that it could have"));
                };
                self.replay.allocations[allocation] = State::Live { address: chosen, size, stream };
                self.replay.hold(size);
                address = chosen;
            }
            Finding::Gone(base) => {
                self.followed.contradictions += 1;
                gone = self.spans.get(&base).map(|span| span.held_until);
            }
            Finding::Contradiction => self.followed.contradictions += 1,
        }
        self.note_allocation(step, address, place, owner);
        Ok(gone)
    }

    fn address_of(&self, allocation: usize) -> Option<DevicePtr> {
        match self.replay.allocations.get(allocation) {
            Some(State::Live { address, .. }) => Some(*address),
            _ => None,
        }
    }

    /// What the place of a block that was just handed out says.
    fn finding(&self, address: DevicePtr, place: Option<u64>, owner: Owner, size: u64) -> Finding {
        let Some(place) = place else { return Finding::Plain };
        let there = self.at_place(place, size.max(1));
        let Some((base, span)) = self.span_of(address) else {
            // New memory. Where it lies, there can be no other.
            return there.map_or(Finding::Plain, |other| self.gone(other));
        };
        let Some(expected) = span.place else { return Finding::Plain };
        if expected + (address.0 - base) == place {
            return Finding::Plain;
        }
        match there.filter(|other| self.spans[other].owner == owner) {
            Some(other) => self.finding_elsewhere(address, base, other, place),
            None => self.gone(base),
        }
    }

    /// What it says that a block lies in another segment than the one that serves it here, of the same owner.
    fn finding_elsewhere(&self, address: DevicePtr, base: u64, other: u64, place: u64) -> Finding {
        let offset = self.spans[&other].place.map_or(0, |from| place.saturating_sub(from));
        let at = DevicePtr(other + offset);
        let Some(fit) = self.replay.allocator.free_block_at(at, DEVICE) else { return self.gone(other) };
        let cut_from = self.size_before(address, base + self.spans[&base].size);
        // Of free blocks of one size the one with the lowest address is taken, and addresses are the driver's choice.
        match fit.cmp(&cut_from) {
            Ordering::Equal => Finding::Elsewhere(at),
            Ordering::Greater => self.gone(base),
            Ordering::Less => Finding::Contradiction,
        }
    }

    /// The bytes of the free block that a block was just cut from. What is left of it follows.
    fn size_before(&self, address: DevicePtr, end: u64) -> u64 {
        let own = self.replay.allocator.block_at(address).map_or(0, |block| block.size);
        let after = DevicePtr(address.0 + own);
        let rest = if after.0 < end { self.replay.allocator.free_block_at(after, DEVICE) } else { None };
        own + rest.unwrap_or(0)
    }

    /// A segment cannot have been there: it was given back, if that is possible.
    fn gone(&self, base: u64) -> Finding {
        // Memory that is in use is not given back, and neither is that of a graph.
        let span = &self.spans[&base];
        let is_private = span.owner.1.is_some();
        if span.held == 0 && !is_private { Finding::Gone(base) } else { Finding::Contradiction }
    }

    fn note_allocation(&mut self, step: usize, address: DevicePtr, place: Option<u64>, owner: Owner) {
        let known = self.span_of(address).map(|(base, _)| base);
        let base = known.unwrap_or_else(|| {
            self.turns.push(step);
            let whole = self.replay.allocator.base_allocation(address);
            let (base, bytes) = whole.map_or((address.0, 0), |(base, bytes)| (base.0, bytes));
            let place = place.filter(|place| self.at_place(*place, bytes).is_none());
            self.insert(base, Span { size: bytes, owner, place, held: 0, held_until: step });
            base
        });
        if let Some(span) = self.spans.get_mut(&base) {
            if known.is_some() && span.held == 0 {
                self.turns.push(step);
            }
            span.held += 1;
            span.held_until = step;
        }
        let before = std::mem::replace(&mut self.reserved, reserved(&self.replay));
        if let Some(emptied) = self.followed.emptied.last_mut().filter(|emptied| emptied.step == step) {
            emptied.wanted += self.reserved.saturating_sub(before);
        }
    }

    /// The program gives a block back.
    fn give_back(&mut self, step: usize, allocation: usize) {
        let address = match self.replay.allocations.get(allocation) {
            Some(State::Live { address, .. } | State::Placed(address)) => *address,
            _ => return,
        };
        let base = self.span_of(address).map(|(base, _)| base);
        if let Some(span) = base.and_then(|base| self.spans.get_mut(&base)) {
            span.held = span.held.saturating_sub(1);
            span.held_until = step;
        }
    }

    /// A block that was just handed out is as if it had not been.
    fn put_back(&mut self, allocation: usize, address: DevicePtr, size: u64) {
        self.replay.allocator.free(address, DEVICE);
        self.replay.allocated -= super::rounded(size);
        self.replay.allocations[allocation] = State::NotYet;
    }

    fn empty_cache(&mut self, step: usize) -> Result<(), Failure> {
        self.followed.emptied.push(Emptied { step, wanted: self.reserved });
        self.replay.allocator.empty_cache()?;
        self.reserved = reserved(&self.replay);
        let left: BTreeSet<u64> = self.replay.allocator.snapshot().iter().map(|one| one.address.0).collect();
        self.spans.retain(|base, _| left.contains(base));
        self.by_place.retain(|_, base| left.contains(base));
        Ok(())
    }

    fn insert(&mut self, base: u64, span: Span) {
        if let Some(place) = span.place {
            self.by_place.insert(place, base);
        }
        self.spans.insert(base, span);
    }

    /// The segment of the replay that an address lies in.
    fn span_of(&self, address: DevicePtr) -> Option<(u64, &Span)> {
        let (base, span) = self.spans.range(..=address.0).next_back()?;
        (address.0 - base < span.size).then_some((*base, span))
    }

    /// A segment of the replay that lay where any of these bytes lay.
    fn at_place(&self, place: u64, size: u64) -> Option<u64> {
        let (from, base) = self.by_place.range(..place.saturating_add(size)).next_back()?;
        (place < from.saturating_add(self.spans[base].size)).then_some(*base)
    }
}

fn reserved(replay: &Replay) -> u64 {
    replay.allocator.stats(DEVICE).reserved_bytes.all.current
}
