//! Where a request could be served from if memory came there: gaps between the blocks in use.

use std::{cmp::Reverse, iter, ops::Range};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::{
    block::{Block, BlockId, BlockState},
    device::{DeviceState, Request},
    plan::Donor,
    pool_set::PoolIx,
    size::round_up,
    stale::Stale,
};

/// How a piece of a gap comes to have memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Means {
    /// It has: a free block.
    Has,
    /// A hole to be filled, or several blocks of it: some may be stale mappings of other handles, which go first.
    Fill,
    /// A stale mapping of an idle handle, which comes back.
    Return(Donor),
}

/// A part of a gap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Its first block, and its last: only a hole in which something has to go first has several.
    pub(super) block: BlockId,
    pub(super) last: BlockId,
    address: u64,
    size: u64,
    pub(super) means: Means,
}

impl Piece {
    fn end(&self) -> u64 {
        self.address + self.size
    }

    fn is_hole(&self) -> bool {
        matches!(self.means, Means::Fill)
    }

    fn missing(&self) -> u64 {
        if self.is_hole() { self.size } else { 0 }
    }

    fn returning(&self) -> u64 {
        if matches!(self.means, Means::Return(_)) { self.size } else { 0 }
    }
}

/// A gap that holds the request once its holes are filled and its handles are back.
#[derive(Debug)]
pub(super) struct Gap {
    /// Each touching the next.
    pub(super) pieces: Vec<Piece>,
    /// Bytes to be filled.
    pub(super) missing: u64,
    /// Bytes that come back.
    returning: u64,
    /// Bytes of the last piece, or of the first if `fills_end`, that stay a hole. All other holes are filled whole.
    spare: u64,
    /// Whether the first piece is a hole of which the end is filled, and not the start.
    pub(super) fills_end: bool,
}

impl Gap {
    /// The bytes that the gap takes from elsewhere, and those of them that have to be mapped.
    ///
    /// The first matter more: what comes back takes no driver call, but is missing where it is idle now, and a request
    /// there takes it back, or needs more memory.
    pub(super) fn cost(&self) -> (u64, u64) {
        (self.missing + self.returning, self.missing)
    }

    /// The holes in order: the bytes to be filled of each, and how many may be filled beyond.
    pub(super) fn holes(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let cut = if self.fills_end { 0 } else { self.pieces.len() - 1 };
        let holes = self.pieces.iter().enumerate().filter(|(_, piece)| piece.is_hole());
        holes.map(move |(index, piece)| {
            let spare = if index == cut { self.spare } else { 0 };
            (piece.size - spare, spare)
        })
    }

    /// The handles that come back.
    pub(super) fn returns(&self) -> impl Iterator<Item = Donor> + '_ {
        returns(&self.pieces)
    }

    /// The addresses that so many bytes in each hole take up.
    fn ranges<'a>(&'a self, bytes: impl Iterator<Item = u64> + 'a) -> impl Iterator<Item = Range<u64>> + 'a {
        let holes = self.pieces.iter().filter(|piece| piece.is_hole());
        holes.zip(bytes).enumerate().map(|(index, (hole, bytes))| {
            if self.fills_end && index == 0 {
                hole.end() - bytes..hole.end()
            } else {
                hole.address..hole.address + bytes
            }
        })
    }

    /// Whether the donor lies in one of the gap's free blocks, which stay where they are.
    pub(super) fn keeps(&self, donor: &Donor) -> bool {
        addresses(&self.pieces).contains(&donor.mapping.address)
    }
}

/// The addresses of pieces that touch each other.
fn addresses(pieces: &[Piece]) -> Range<u64> {
    pieces[0].address..pieces[pieces.len() - 1].end()
}

/// The handles that come back to pieces.
fn returns(pieces: &[Piece]) -> impl Iterator<Item = Donor> + '_ {
    pieces.iter().filter_map(|piece| match piece.means {
        Means::Return(donor) => Some(donor),
        Means::Has | Means::Fill => None,
    })
}

/// Pieces that touch each other.
#[derive(Debug, Default)]
struct Run {
    pieces: Vec<Piece>,
}

impl Run {
    /// Adds the block that comes next. Holes that touch are one.
    fn push(&mut self, id: BlockId, block: &Block, means: Means) {
        match self.pieces.last_mut() {
            Some(hole) if hole.is_hole() && matches!(means, Means::Fill) => {
                hole.size += block.size;
                hole.last = id;
            }
            _ => self.pieces.push(Piece { block: id, last: id, address: block.address, size: block.size, means }),
        }
    }

    /// The last block of the last piece.
    fn last(&self) -> Option<BlockId> {
        self.pieces.last().map(|piece| piece.last)
    }
}

/// The cheapest gap so far.
struct Search {
    granularity: u64,
    /// The bytes of the request.
    wanted: u64,
    best: Option<Gap>,
    /// Where the handles are that come back in the gap that is looked at.
    coming: FxHashSet<u64>,
}

impl Search {
    /// Looks at every gap among pieces that touch each other, and that is wide enough with none to spare.
    fn consider_all(&mut self, run: &[Piece]) {
        let (mut from, mut bytes, mut missing, mut returning) = (0, 0, 0, 0);
        for to in 0..run.len() {
            bytes += run[to].size;
            missing += run[to].missing();
            returning += run[to].returning();
            while bytes >= self.wanted {
                self.consider(&run[from..=to], bytes, missing, returning);
                bytes -= run[from].size;
                missing -= run[from].missing();
                returning -= run[from].returning();
                from += 1;
            }
        }
        // A hole that is wide enough is a gap of its own, and its end belongs to another.
        let wanted = self.wanted;
        for (first, hole) in run.iter().enumerate().filter(|(_, piece)| piece.is_hole() && piece.size >= wanted) {
            let (mut bytes, mut returning, mut last) = (0, 0, first);
            for piece in run[first + 1..].iter().take_while(|piece| !piece.is_hole()) {
                if bytes + piece.size >= wanted {
                    break;
                }
                bytes += piece.size;
                returning += piece.returning();
                last += 1;
            }
            if last > first {
                self.consider(&run[first..=last], hole.size + bytes, hole.size, returning);
            }
        }
    }

    /// Looks at the gap made of `pieces`, which have so many bytes. The last one is used in part if it is a hole, else
    /// the first one.
    fn consider(&mut self, pieces: &[Piece], bytes: u64, missing: u64, returning: u64) {
        let (first, last) = (&pieces[0], &pieces[pieces.len() - 1]);
        let (cut, fills_end) = if last.is_hole() { (last, false) } else { (first, first.is_hole()) };
        if cut.is_hole() && bytes - cut.size >= self.wanted {
            // Without this hole the gap is cheaper.
            return;
        }
        let spare = if cut.is_hole() { (bytes - self.wanted) / self.granularity * self.granularity } else { 0 };
        let missing = missing - spare;
        if self.best.as_ref().is_none_or(|best| (missing + returning, missing) < best.cost())
            && self.is_possible(pieces)
        {
            self.best = Some(Gap { pieces: pieces.to_vec(), missing, returning, spare, fills_end });
        }
    }

    /// Whether each handle comes back to one place, and from a block that is no piece of the gap.
    fn is_possible(&mut self, pieces: &[Piece]) -> bool {
        let kept = addresses(pieces);
        self.coming.clear();
        returns(pieces).all(|donor| {
            let address = donor.mapping.address;
            !kept.contains(&address) && self.coming.insert(address)
        })
    }
}

impl DeviceState {
    /// The gap in the request's pool that costs least, and of those the one at the lowest address.
    pub(super) fn cheapest_gap(&self, request: &Request, donors: &[Donor]) -> Option<Gap> {
        let granularity = self.capabilities.granularity_bytes;
        let mut search = Search { granularity, wanted: request.rounded, best: None, coming: FxHashSet::default() };
        let is_free = |id: &BlockId| self.blocks[*id].state == BlockState::Free;
        let mut run = Run::default();
        for (block, means) in self.without_memory(request.pool, donors) {
            let Block { previous, next, .. } = self.blocks[block];
            if previous.is_none() || run.last() != previous {
                search.consider_all(&run.pieces);
                run.pieces.clear();
                if let Some(before) = previous.filter(is_free) {
                    run.push(before, &self.blocks[before], Means::Has);
                }
            }
            run.push(block, &self.blocks[block], means);
            if let Some(after) = next.filter(is_free) {
                run.push(after, &self.blocks[after], Means::Has);
            }
        }
        search.consider_all(&run.pieces);
        search.best
    }

    /// Holes of a pool and stale blocks that may be used, in address order, and how.
    fn without_memory(&self, pool: PoolIx, donors: &[Donor]) -> impl Iterator<Item = (BlockId, Means)> + '_ {
        let is_flooded = self.stale.is_flooded(self.capabilities.stale_mappings_max);
        let looked_at = (!is_flooded && self.stale.has_any_of(pool)).then(|| self.stale.of_pool(pool));
        let lent = if looked_at.is_some() { donors } else { &[] };
        let by_handle: FxHashMap<_, _> = lent.iter().map(|donor| (donor.mapping.handle, *donor)).collect();
        let usable = move |(address, Stale { block, handle, .. })| match by_handle.get(&handle) {
            Some(donor) => Some((address, block, Means::Return(*donor))),
            None => self.is_over(block).then_some((address, block, Means::Fill)),
        };
        let mut stale = looked_at.into_iter().flatten().filter_map(usable).peekable();
        let mut holes = self.pools[pool].unmapped.iter().map(|(address, id)| (*address, *id, Means::Fill)).peekable();
        let merged = iter::from_fn(move || match (stale.peek(), holes.peek()) {
            (Some((stale_address, ..)), Some((hole_address, ..))) if stale_address > hole_address => holes.next(),
            (Some(_), _) => stale.next(),
            (None, _) => holes.next(),
        });
        merged.map(|(_, block, means)| (block, means))
    }

    /// The stale mappings of other handles where so many bytes of each of the gap's holes are to be filled.
    pub(super) fn in_the_way_of(&self, gap: &Gap, bytes: impl Iterator<Item = u64>, pool: PoolIx) -> Vec<BlockId> {
        let within = gap.ranges(bytes).flat_map(|Range { start, end }| {
            let reaching_in = self.stale.within(pool, 0..start).next_back();
            let reaching_in = reaching_in.filter(move |(_, stale)| start < self.blocks[stale.block].end());
            reaching_in.into_iter().chain(self.stale.within(pool, start..end))
        });
        within.map(|(_, stale)| stale.block).collect()
    }

    /// The start of the widest hole, which handles of any size fit.
    pub(super) fn widest_hole(&self, request: &Request) -> Option<Gap> {
        let missing = self.whole_granules(request.rounded);
        let holes = self.pools[request.pool].unmapped.values();
        let block = *holes.max_by_key(|id| (self.blocks[**id].size, Reverse(self.blocks[**id].address)))?;
        let Block { address, size, .. } = self.blocks[block];
        let pieces = vec![Piece { block, last: block, address, size, means: Means::Fill }];
        let spare = size.checked_sub(missing)?;
        Some(Gap { pieces, missing, returning: 0, spare, fills_end: false })
    }

    /// Whether [`widest_hole`](Self::widest_hole) finds one. The last hole, which no memory has come to yet, nearly always is.
    pub(super) fn has_wide_hole(&self, request: &Request) -> bool {
        let missing = self.whole_granules(request.rounded);
        self.pools[request.pool].unmapped.values().rev().any(|id| self.blocks[*id].size >= missing)
    }

    pub(crate) fn whole_granules(&self, bytes: u64) -> u64 {
        round_up(bytes, self.capabilities.granularity_bytes)
    }
}
