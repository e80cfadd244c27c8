//! What the driver is to be asked for, decided under the lock, and what came of it.
//!
//! A plan is plain data. [`DeviceState`](crate::device::DeviceState) makes it and marks all that it uses `Claimed`;
//! [`execute`](crate::execute) carries it out without the state; the state then takes note of the outcome. So a driver
//! call that fails, or that takes long, never leaves the state half changed or locked.

use std::fmt;

use crate::{
    backing::{SpanIx, mapping::Mapping},
    block::BlockId,
    driver::DriverError,
    event::{Answers, Closed, Closing, Mark, StreamIx, Target},
    id::{DeviceId, DevicePtr, Event, PhysicalHandle, PoolId, Stream, StreamHandle},
    last_use::Epoch,
    pool_set::PoolIx,
    size::SizeClass,
    source::{Origin, SharedSource, SourceError, SourceFailed},
};

/// Driver calls to be made.
#[derive(Debug)]
pub(crate) enum Plan {
    /// Record an event on each stream.
    Close(Vec<Closing>),
    /// Ask which marks are reached: those of one stream stand together, oldest first.
    Poll(Vec<Mark>),
    /// Wait on the host until all marks are reached. Under no lock.
    Wait(Vec<Mark>),
    /// Wait on the host until devices are idle, unless one of their streams is capturing. Under no lock.
    Synchronize(Synchronize),
    /// Allocate a segment. Under no lock if it is a source that is asked.
    Obtain(Obtain),
    /// Set addresses aside.
    Reserve(Reserve),
    /// Create handles and map them.
    Map(Map),
    /// Remove mappings of memory that has moved away.
    Unmap(Vec<UnmapRun>),
    /// Let the asking stream wait, on the GPU, for the streams that used a block, if there are any.
    TakeOver(TakeOver),
    /// Give memory back.
    Release(Release),
    /// Give segments back to the sources that they came from. Under no lock.
    HandBack(Vec<Departure>),
    /// Ask the user's callback to free something. Under no lock.
    CallBack,
}

impl Plan {
    /// Whether the program's own code is called, which may do anything, and so must not meet a lock.
    pub(crate) fn is_foreign(&self) -> bool {
        match self {
            Self::Obtain(obtain) => !obtain.origin.is_driver(),
            Self::HandBack(_) | Self::CallBack => true,
            _ => false,
        }
    }
}

/// Synchronises of devices, and the epochs that they prove over.
#[derive(Debug)]
pub(crate) struct Synchronize {
    pub(crate) devices: Vec<DeviceId>,
    /// Whether all other devices of the process are meant too.
    pub(crate) everywhere: bool,
    /// Streams of these devices: none of them may be capturing.
    pub(crate) streams: Vec<Target>,
    pub(crate) epochs: Vec<(StreamIx, Epoch)>,
    /// How many private pools had been released when it was planned.
    pub(crate) releases: u64,
}

/// A segment for one request.
#[derive(Clone, Debug)]
pub(crate) struct Obtain {
    pub(crate) device: DeviceId,
    pub(crate) pool: PoolIx,
    pub(crate) size: u64,
    /// Who is asked.
    pub(crate) origin: Origin,
    pub(crate) user: User,
}

/// Whose memory a segment is, in the program's words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User {
    pub(crate) pool: PoolId,
    pub(crate) stream: StreamHandle,
}

/// An address range for one pool.
#[derive(Debug)]
pub(crate) struct Reserve {
    pub(crate) device: DeviceId,
    pub(crate) pool: PoolIx,
    pub(crate) size: u64,
}

/// Holes of a range to be filled with handles, so that `pieces` become one block.
#[derive(Debug)]
pub(crate) struct Map {
    pub(crate) device: DeviceId,
    /// The asking stream, which waits for `waits` on the GPU before anything is mapped.
    pub(crate) stream: Stream,
    pub(crate) waits: Vec<Mark>,
    /// Claimed blocks, each touching the next: some have memory, some are the holes.
    pub(crate) pieces: Vec<BlockId>,
    /// In address order.
    pub(crate) holes: Vec<Hole>,
    /// Handles that come back to where they are still mapped, which takes no call.
    pub(crate) returns: Vec<Return>,
    /// The devices that shall reach the memory.
    pub(crate) access: Vec<DeviceId>,
}

impl Map {
    /// The handles that are moved.
    pub(crate) fn donors(&self) -> impl Iterator<Item = Donor> + '_ {
        let moved = self.holes.iter().flat_map(|hole| &hole.sources).filter_map(|source| match source {
            Source::Moved(donor) => Some(*donor),
            Source::New(_) => None,
        });
        moved.chain(self.returns.iter().map(|back| back.donor))
    }

    /// The bytes of the handles that are to be created.
    pub(crate) fn new_bytes(&self) -> u64 {
        let sources = self.holes.iter().flat_map(|hole| &hole.sources);
        sources.filter(|source| matches!(source, Source::New(_))).map(Source::size).sum()
    }

    /// Whether any handle is moved.
    pub(crate) fn moves(&self) -> bool {
        self.donors().next().is_some()
    }
}

/// Addresses with no memory behind them: a claimed block.
#[derive(Clone, Debug)]
pub(crate) struct Hole {
    pub(crate) block: BlockId,
    pub(crate) address: u64,
    /// The handles that fill it, from first to last.
    pub(crate) sources: Vec<Source>,
}

impl Hole {
    pub(crate) fn size(&self) -> u64 {
        self.sources.iter().map(Source::size).sum()
    }

    /// The hole filled from its start with the moved handles and those of `created`, until there are no more of these.
    pub(crate) fn filled_with(&self, created: &mut impl Iterator<Item = PhysicalHandle>) -> Vec<Mapping> {
        let mut end = self.address;
        let mappings = self.sources.iter().map_while(|source| {
            let handle = match source {
                Source::New(_) => created.next()?,
                Source::Moved(donor) => donor.mapping.handle,
            };
            let address = end;
            end += source.size();
            Some(Mapping { address, size: source.size(), handle })
        });
        mappings.collect()
    }
}

/// A handle that comes back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Return {
    /// The claimed block over its stale mapping.
    pub(crate) block: BlockId,
    pub(crate) donor: Donor,
}

/// Where a handle comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// It is created, with this many bytes.
    New(u64),
    /// It is mapped a second time; its old mapping goes later.
    Moved(Donor),
}

impl Source {
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::New(size) => *size,
            Self::Moved(donor) => donor.mapping.size,
        }
    }
}

/// An idle handle that is to be moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Donor {
    /// In a plan the claimed block over just this handle; before, the idle block that holds it.
    pub(crate) block: BlockId,
    pub(crate) mapping: Mapping,
}

/// Contiguous stale mappings, whose blocks are claimed.
#[derive(Debug)]
pub(crate) struct UnmapRun {
    pub(crate) device: DeviceId,
    pub(crate) span: SpanIx,
    pub(crate) address: DevicePtr,
    pub(crate) size: u64,
    pub(crate) blocks: Vec<(BlockId, PhysicalHandle)>,
}

/// A pending or idle block that is claimed, and the marks that the asking stream waits for before it may have it.
#[derive(Debug)]
pub(crate) struct TakeOver {
    pub(crate) block: BlockId,
    pub(crate) stream: Stream,
    pub(crate) waits: Vec<Mark>,
    /// The uses that a pending block waits for; none of an idle one.
    pub(crate) uses: Vec<(StreamIx, Epoch)>,
}

/// Memory to be given back.
#[derive(Debug, Default)]
pub(crate) struct Release {
    pub(crate) segments: Vec<ReleaseSegment>,
    pub(crate) runs: Vec<ReleaseRun>,
    /// Ranges in which nothing is mapped.
    pub(crate) ranges: Vec<ReleaseRange>,
    /// Handles that could not be released before.
    pub(crate) strays: Vec<Stray>,
    pub(crate) events: Vec<(DeviceId, Event)>,
}

impl Release {
    pub(crate) fn is_empty(&self) -> bool {
        let Self { segments, runs, ranges, strays, events } = self;
        segments.is_empty() && runs.is_empty() && ranges.is_empty() && strays.is_empty() && events.is_empty()
    }
}

/// A segment to be freed: its one block is claimed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReleaseSegment {
    pub(crate) device: DeviceId,
    pub(crate) block: BlockId,
    pub(crate) base: DevicePtr,
}

/// A segment on its way back to its source. No block and no span stands for it any more.
pub(crate) struct Departure {
    pub(crate) device: DeviceId,
    pub(crate) pool: PoolIx,
    pub(crate) base: DevicePtr,
    pub(crate) size: u64,
    pub(crate) source: SharedSource,
    pub(crate) user: User,
}

impl Departure {
    /// What was obtained just now, to go back at once; `None` if it came from the driver.
    pub(crate) fn of(obtain: Obtain, base: DevicePtr) -> Option<Self> {
        let Obtain { device, pool, size, origin, user } = obtain;
        let Origin::Source(source) = origin else { return None };
        Some(Self { device, pool, base, size, source, user })
    }

    /// What is to be said if the source does not take it back.
    pub(crate) fn failure(&self) -> SourceError {
        SourceError::NotTakenBack { pool: self.user.pool, address: self.base, size: self.size }
    }
}

impl fmt::Debug for Departure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, pool, base, size, source: _, user } = self;
        write!(formatter, "Departure of {size} bytes at {base:?} of {pool:?} on {device}, {user:?}")
    }
}

/// Whole handles to be unmapped and released: the block over them is claimed.
#[derive(Clone, Debug)]
pub(crate) struct ReleaseRun {
    pub(crate) device: DeviceId,
    pub(crate) block: BlockId,
    pub(crate) address: DevicePtr,
    pub(crate) size: u64,
    pub(crate) handles: Vec<Mapping>,
    /// Whether the memory was mapped but never made accessible, and could not be unmapped when that failed: nobody can
    /// use it, and its block stays claimed until it is gone.
    pub(crate) is_stuck: bool,
}

/// A range to be given back: its one block is claimed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReleaseRange {
    pub(crate) device: DeviceId,
    pub(crate) block: BlockId,
    pub(crate) base: DevicePtr,
    pub(crate) size: u64,
}

/// A handle without a mapping that the driver did not take back when asked. Still counted as reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stray {
    pub(crate) device: DeviceId,
    pub(crate) handle: PhysicalHandle,
    pub(crate) size: u64,
    /// The pool whose figures count it.
    pub(crate) class: SizeClass,
}

/// What came of a plan.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Each closing with what came of it, and the event that it did not use.
    Closed(Vec<(Closing, Closed, Option<Event>)>, Option<DriverError>),
    /// The marks that are reached.
    Polled(Answers, Option<DriverError>),
    /// All marks, and whether the wait for those that can be reached went well.
    Waited(Answers, Result<(), DriverError>),
    /// `Ok(false)`: a stream was capturing, and nothing was waited for.
    Synchronized(Synchronize, Result<bool, DriverError>),
    Obtained(Obtain, Result<DevicePtr, ObtainError>),
    Reserved(Reserve, Result<DevicePtr, DriverError>),
    /// The handles that were created, in the order of the holes and their sources.
    Mapped(Map, Result<Vec<PhysicalHandle>, MapFailure>),
    /// Each run, and whether it was unmapped.
    Unmapped(Vec<(UnmapRun, bool)>, Option<DriverError>),
    TookOver(TakeOver, Result<(), DriverError>),
    Released(Released),
    /// Each segment with what its source answered, and the error if none was asked.
    HandedBack(Vec<(Departure, Result<(), SourceFailed>)>, Option<DriverError>),
    CalledBack(bool),
}

/// Why a segment was not obtained.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ObtainError {
    /// The driver refused.
    Driver(DriverError),
    /// The source has too little memory.
    OutOfMemory,
    /// The source refused.
    Source(SourceError),
}

/// Why holes could not be filled.
#[derive(Debug)]
pub(crate) struct MapFailure {
    pub(crate) error: DriverError,
    /// Handles that were created on the way and could not be released again, with their sizes.
    pub(crate) strays: Vec<(PhysicalHandle, u64)>,
    /// Mappings that could not be undone, from the start of the hole in this block.
    pub(crate) stuck: Vec<(BlockId, Vec<Mapping>)>,
}

/// What was given back and what was not.
#[derive(Debug, Default)]
pub(crate) struct Released {
    pub(crate) segments: Vec<(ReleaseSegment, bool)>,
    pub(crate) runs: Vec<(ReleaseRun, RunOutcome)>,
    pub(crate) ranges: Vec<(ReleaseRange, bool)>,
    pub(crate) strays: Vec<(Stray, bool)>,
    /// Events that could not be destroyed.
    pub(crate) events: Vec<(DeviceId, Event)>,
    /// The first failure.
    pub(crate) error: Option<DriverError>,
}

/// What became of a run of handles.
#[derive(Debug)]
pub(crate) enum RunOutcome {
    /// Still mapped, as before.
    Kept,
    /// Unmapped; these handles could not be released.
    Unmapped(Vec<Mapping>),
}
