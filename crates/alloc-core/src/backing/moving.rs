//! Growing by moving: whole idle handles go to where memory is needed, before the driver is asked for more.
//!
//! A *target* is a gap that becomes wide enough when its holes are filled; a *donor* is a whole handle inside idle memory.
//! A donor is mapped at the target at once, and for a while stands at both addresses. Its old mapping becomes *stale*: an
//! address that nobody gets, removed once the host knows that the last use there is over. That is safe because
//!
//! - the donor's last use comes before whatever the asking stream does next: it was on that stream, or is known to be over,
//!   or the asking stream waits for it on the GPU;
//! - the stale addresses are in no index, so nothing new is ever queued on them.
//!
//! Memory of live private pools and pinned memory are never donors.

use std::{cmp::Reverse, collections::BTreeMap};

use crate::{
    backing::mapping::Mapping,
    block::{BlockId, BlockState},
    config::{CrossStreamReuse, Move, Policy},
    device::{DeviceState, Request},
    event::{Mark, StreamIx},
    last_use::Epoch,
    plan::{Donor, Hole, Map, Plan, Source},
    pool::FreeBlock,
    size::{MIB, SMALL_SEGMENT, SizeClass, round_up},
};

/// New large handles grow with what is reserved, so that one of which only a part is used is a small share of it …
const HANDLES_PER_RESERVED: u64 = 768;
/// … and with the gap to be filled, since each handle costs some 40 µs to map and unmap again.
const HANDLES_PER_GAP: u64 = 16;
/// Up to this many bytes: larger ones are idle as a whole less often.
const HANDLE_MAX: u64 = 40 * MIB;
/// But a very large gap is filled with this many handles at most, whatever their size …
const HANDLES_PER_LARGE_GAP: u64 = 80;
/// … up to this one.
const LARGE_HANDLE_MAX: u64 = 128 * MIB;
/// The last handles of a gap halve down to the driver's granularity: a later request that is a little smaller then
/// leaves little behind in a handle that is used in part, and there is small change to fill other gaps exactly.
const HANDLES_PER_REST: u64 = 2;
/// Larger requests are cut from a free block's start, whatever that breaks: many of about the same size follow each other,
/// and would be spread over both ends.
const CUT_FROM_END_MAX: u64 = 256 * MIB;
/// Memory may grow without a second thought up to this many hundredths of what the program had in use at once.
const GROWTH_PERCENT: u64 = 101;

/// Which idle memory may be moved for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Donors {
    /// What was last used on the asking stream, or is known to be over.
    Ordered,
    /// Also what other streams used last: the asking stream waits for them on the GPU.
    AfterWait,
}

/// How much new memory may be obtained besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// None.
    None,
    /// As long as no more is reserved than the program is known to need.
    WithinNeed,
    /// Up to the limit.
    ToLimit,
}

/// A gap that would hold the request if its holes were filled.
#[derive(Debug)]
struct Target {
    /// Free and unmapped blocks, each touching the next.
    pieces: Vec<BlockId>,
    /// Bytes to be filled; the holes between the first and the last are filled whole.
    missing: u64,
    /// Whether the first piece is a hole of which the end is filled, and not the start.
    fills_end: bool,
}

/// What shall fill a target: for each of its holes, in order, the handles from first to last.
#[derive(Debug, Default)]
struct Filling {
    holes: Vec<Vec<Source>>,
    new_bytes: u64,
}

impl Filling {
    fn donors(&self) -> impl Iterator<Item = Donor> + '_ {
        self.holes.iter().flatten().filter_map(|source| match source {
            Source::Moved(donor) => Some(*donor),
            Source::New(_) => None,
        })
    }
}

impl DeviceState {
    /// Fills the gap that needs least with idle handles, and with new ones where `growth` allows. `None` if that is not
    /// enough.
    pub(crate) fn plan_move(&mut self, request: &Request, donors: Donors, growth: Growth) -> Option<Plan> {
        if self.config.moving == Move::Contiguous {
            return self.plan_single(request, growth);
        }
        let filled = self.targets(request).map(|target| {
            let filling = self.fill(request, &target, self.donors(request, donors, &target));
            (target, filling)
        });
        let cheapest = filled.min_by_key(|(target, filling)| (filling.new_bytes, target.missing));
        let Some((target, filling)) = cheapest else { return self.plan_reserve(request) };
        if !self.may_grow(filling.new_bytes, growth) {
            return None;
        }
        let waits = self.waits_for(request, &filling)?;
        Some(Plan::Map(self.claim(request, target, filling, waits)))
    }

    pub(super) fn may_grow(&self, new: u64, growth: Growth) -> bool {
        let reserved = self.stats.reserved_bytes.all.current;
        match growth {
            _ if new == 0 => true,
            Growth::None => false,
            Growth::WithinNeed => {
                let need = self.stats.active_bytes.all.peak / 100 * GROWTH_PERCENT;
                self.may_reserve(new) && reserved + new <= need
            }
            Growth::ToLimit => self.may_reserve(new),
        }
    }

    /// Gaps to choose from: the narrowest, and the start of the widest hole, which handles of any size fit.
    fn targets(&self, request: &Request) -> impl Iterator<Item = Target> + use<> {
        let missing = self.whole_granules(request.rounded);
        let holes = self.pools[request.pool].unmapped.values().copied();
        let widest = holes.max_by_key(|hole| (self.blocks[*hole].size, Reverse(self.blocks[*hole].address)));
        let widest = widest.filter(|hole| self.blocks[*hole].size >= missing);
        let widest = widest.map(|hole| Target { pieces: vec![hole], missing, fills_end: false });
        self.narrowest_target(request).into_iter().chain(widest)
    }

    /// The gap in the request's pool that misses the fewest bytes, and of those the one at the lowest address.
    fn narrowest_target(&self, request: &Request) -> Option<Target> {
        let mut best: Option<Target> = None;
        for hole in self.pools[request.pool].unmapped.values() {
            let candidates = [self.gap_from_start(*hole, request), self.gap_before(*hole, request)];
            for target in candidates.into_iter().flatten() {
                if best.as_ref().is_none_or(|best| target.missing < best.missing) {
                    best = Some(target);
                }
            }
        }
        best
    }

    /// The gap that begins with the free block before the hole, or with the hole.
    fn gap_from_start(&self, hole: BlockId, request: &Request) -> Option<Target> {
        let usable = |id: &BlockId| matches!(self.blocks[*id].state, BlockState::Free | BlockState::Unmapped);
        let first = self.blocks[hole].previous.filter(usable).unwrap_or(hole);
        let (mut pieces, mut bytes, mut missing, mut next) = (Vec::new(), 0, 0, Some(first));
        while let Some(piece) = next.filter(usable)
            && bytes < request.rounded
        {
            let block = &self.blocks[piece];
            if block.state == BlockState::Unmapped {
                missing += block.size.min(self.whole_granules(request.rounded - bytes));
            }
            pieces.push(piece);
            bytes += block.size;
            next = block.next;
        }
        (bytes >= request.rounded).then_some(Target { pieces, missing, fills_end: false })
    }

    /// The gap made of the hole's end and the free block after it.
    fn gap_before(&self, hole: BlockId, request: &Request) -> Option<Target> {
        let next = self.blocks[hole].next.filter(|next| self.blocks[*next].state == BlockState::Free)?;
        let missing = self.whole_granules(request.rounded.checked_sub(self.blocks[next].size)?);
        let fits = 0 < missing && missing <= self.blocks[hole].size;
        fits.then(|| Target { pieces: vec![hole, next], missing, fills_end: true })
    }

    pub(super) fn whole_granules(&self, bytes: u64) -> u64 {
        round_up(bytes, self.capabilities.granularity_bytes)
    }

    /// Whole idle handles that may be moved for the request: large ones first, which take the fewest calls, and of those
    /// the ones in the smallest idle blocks, which serve few requests as they are.
    fn donors(&self, request: &Request, which: Donors, target: &Target) -> Vec<Donor> {
        if self.is_tracked || self.config.moving != Move::On {
            return Vec::new();
        }
        // What a graph captures runs again later: order on the stream that captured it proves nothing.
        let asking = self.pools[request.pool].owner.is_none().then_some(self.pools[request.pool].stream);
        let is_ordered = |(stream, epoch): (StreamIx, Epoch)| {
            Some(stream) == asking
                || self.streams.is_done(stream, epoch)
                || (which == Donors::AfterWait && asking.is_some() && self.may_wait_for(stream))
        };
        let mut donors: Vec<(u64, Donor)> = Vec::new();
        let lent = self.pools.ids().filter(|pool| self.pools.is_releasable(*pool));
        for entry in lent.flat_map(|pool| self.pools[pool].index.iter()) {
            let block = &self.blocks[entry.id];
            if target.pieces.contains(&entry.id) || !block.last_use.iter().all(is_ordered) {
                continue;
            }
            for mapping in self.movable_within(entry.id) {
                donors.push((block.size, Donor { block: entry.id, mapping }));
            }
        }
        donors.sort_by_key(|(size, Donor { mapping, .. })| (Reverse(mapping.size), *size, Reverse(mapping.address)));
        donors.into_iter().map(|(_, donor)| donor).collect()
    }

    /// Whether `cross_stream_reuse` lets other streams wait for this one.
    pub(crate) fn may_wait_for(&self, stream: StreamIx) -> bool {
        match self.config.cross_stream_reuse {
            CrossStreamReuse::Done => false,
            CrossStreamReuse::Owned => self.pools.has_pool_of(stream),
            CrossStreamReuse::All => true,
        }
    }

    /// Chooses what fills the target's holes: donors in the order in which they stand, then new handles.
    fn fill(&self, request: &Request, target: &Target, mut candidates: Vec<Donor>) -> Filling {
        let new_size = self.new_handle_size(self.pools[request.pool].class, target.missing);
        let mut filling = Filling::default();
        let mut missing_in_all = target.missing;
        let holes = target.pieces.iter().filter(|piece| self.blocks[**piece].state == BlockState::Unmapped);
        for hole in holes {
            let room = self.blocks[*hole].size;
            let mut missing = missing_in_all.min(room);
            missing_in_all -= missing;
            let is_last = missing_in_all == 0 && target.pieces.last() == Some(hole) || target.fills_end;
            let spare = if is_last { room - missing } else { 0 };
            let mut sources = Vec::new();
            candidates.retain(|donor| {
                let fits = donor.mapping.size <= missing;
                if fits {
                    missing -= donor.mapping.size;
                    sources.push(Source::Moved(*donor));
                }
                !fits
            });
            // One handle may reach beyond what is missing, if the hole goes on there.
            let reaching = candidates.iter().enumerate().filter(|(_, donor)| donor.mapping.size <= missing + spare);
            if missing > 0
                && let Some((position, _)) = reaching.min_by_key(|(_, donor)| donor.mapping.size)
            {
                let donor = candidates.remove(position);
                missing = 0;
                sources.push(Source::Moved(donor));
            }
            filling.new_bytes += missing;
            while missing > 0 {
                let size = missing.min(new_size).min(self.whole_granules(missing.div_ceil(HANDLES_PER_REST)));
                sources.push(Source::New(size));
                missing -= size;
            }
            filling.holes.push(sources);
        }
        filling
    }

    /// The marks that the asking stream has to wait for before it may use the donors; `None` if some has no event yet.
    fn waits_for(&self, request: &Request, filling: &Filling) -> Option<Vec<Mark>> {
        let own = self.pools[request.pool].stream;
        let mut marks: Vec<Mark> = Vec::new();
        for donor in filling.donors() {
            for (stream, epoch) in self.blocks[donor.block].last_use.iter() {
                if stream != own && !self.streams.is_done(stream, epoch) {
                    let mark = self.streams.mark_for(stream, epoch)?;
                    match marks.iter_mut().find(|known| known.stream == stream) {
                        Some(known) if known.epoch < mark.epoch => *known = mark,
                        Some(_) => {}
                        None => marks.push(mark),
                    }
                }
            }
        }
        Some(marks)
    }

    /// Claims the target and the donors.
    fn claim(&mut self, request: &Request, target: Target, filling: Filling, waits: Vec<Mark>) -> Map {
        let mut claimed = self.claim_donors(filling.donors().collect());
        let mut pieces = target.pieces;
        if target.fills_end {
            pieces[0] = self.cut_hole(pieces[0], filling.holes[0].iter().map(Source::size).sum());
        }
        let mut fillings = filling.holes.into_iter();
        let mut holes = Vec::new();
        for piece in &pieces {
            if self.blocks[*piece].state == BlockState::Unmapped {
                let mut sources = fillings.next().expect("one filling for each hole");
                for source in &mut sources {
                    if let Source::Moved(donor) = source {
                        donor.block = claimed.remove(&donor.mapping.address).expect("every donor was claimed");
                    }
                }
                self.claim_unmapped(*piece, sources.iter().map(Source::size).sum());
                holes.push(Hole { block: *piece, address: self.blocks[*piece].address, sources });
            } else {
                self.unindex(*piece);
                self.blocks[*piece].state = BlockState::Claimed;
            }
        }
        let stream = self.streams.target(self.pools[request.pool].stream);
        Map { device: self.id, stream, waits, pieces, holes, access: self.access.clone() }
    }

    /// Cuts the last `size` bytes off a hole; returns them as a hole of their own.
    pub(super) fn cut_hole(&mut self, id: BlockId, size: u64) -> BlockId {
        let rest = self.blocks[id].size - size;
        if rest == 0 {
            return id;
        }
        let end = self.blocks.split(id, rest);
        let pool = self.blocks[end].pool;
        self.pools[pool].unmapped.insert(self.blocks[end].address, end);
        end
    }

    /// Cuts each donor's handle out of the idle block that holds it, and claims it. Returns the blocks by address.
    fn claim_donors(&mut self, mut chosen: Vec<Donor>) -> BTreeMap<u64, BlockId> {
        chosen.sort_by_key(|donor| donor.mapping.address);
        let mut claimed = BTreeMap::new();
        let mut rest: Option<BlockId> = None;
        for Donor { block: holder, mapping: Mapping { address, size, .. } } in chosen {
            let in_rest = rest.filter(|rest| (self.blocks[*rest].address..self.blocks[*rest].end()).contains(&address));
            if in_rest.is_none() {
                self.unindex(holder);
                if let Some(rest) = rest {
                    self.index(rest);
                }
            }
            let block = self.cut_off_front(in_rest.unwrap_or(holder), address);
            rest = (size < self.blocks[block].size).then(|| self.blocks.split(block, size));
            self.blocks[block].state = BlockState::Claimed;
            claimed.insert(address, block);
        }
        if let Some(rest) = rest {
            self.index(rest);
        }
        claimed
    }

    /// Whether a request is better cut from the end of a free block than from its start: what is left then has fewer
    /// bytes in handles that are used in part, which cannot move.
    pub(crate) fn cuts_end(&self, whole: FreeBlock, request: &Request, class: SizeClass) -> bool {
        if self.rules != Policy::Rallocator || class == SizeClass::Small || request.rounded > CUT_FROM_END_MAX {
            return false;
        }
        let mappings = self.spans[self.blocks[whole.id].span].mappings();
        let (start, end) = (whole.address, whole.address + whole.size);
        let after_end = mappings.partial_bytes(start, end - request.rounded);
        after_end < mappings.partial_bytes(start + request.rounded, end)
    }

    /// The size of new handles for a gap of `missing` bytes.
    fn new_handle_size(&self, class: SizeClass, missing: u64) -> u64 {
        let size = match class {
            SizeClass::Small => SMALL_SEGMENT,
            SizeClass::Large => {
                let share = self.stats.reserved_bytes.all.peak / HANDLES_PER_RESERVED;
                let of_gap = share.max(missing / HANDLES_PER_GAP).min(HANDLE_MAX);
                of_gap.max((missing / HANDLES_PER_LARGE_GAP).min(LARGE_HANDLE_MAX))
            }
        };
        self.whole_granules(size.max(1))
    }
}
