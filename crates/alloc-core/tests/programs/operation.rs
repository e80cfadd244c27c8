//! What a generated program may do, and how often it does it.
//!
//! An operation names things by their position among those there are when it runs (a block among the blocks held, a
//! stream among the streams), modulo their number. So every operation means something in every program, and a program
//! that fails shrinks well: what is left keeps its meaning.

use alloc_core::{
    config::Move,
    driver::{Call, Status, sim::Mishap},
};
use proptest::{
    prelude::*,
    strategy::{BoxedStrategy, Union},
};

/// One kibibyte.
const KIB: u64 = 1 << 10;
/// One mebibyte.
const MIB: u64 = 1 << 20;

/// A position among the things there are.
pub(crate) type Pick = u8;

/// How a program makes sure that a foreign stream's use of a block is over before the block is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settle {
    /// The block's own stream waits for the other one.
    Wait,
    /// It tells the allocator: `record_stream`.
    Record,
}

/// How a capture ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It becomes a graph.
    Joined,
    /// Streams that joined it are not waited for, so it fails if there are any.
    Unjoined,
    /// It is given up.
    Aborted,
}

/// One step of a program. Sizes are in bytes, durations in microseconds.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// Asks for memory.
    Malloc { size: u64, stream: Pick },
    /// Gives a block back, after its foreign uses were settled.
    Free { block: Pick, by: Settle },
    /// Frees nothing, memory that was never ours, a held block's inside, or a block that is free already.
    FreeBadly { block: Pick, how: u8 },
    /// A kernel on a block's own stream.
    Use { block: Pick, duration_us: u64 },
    /// A kernel on any stream, ordered after the blocks' allocation.
    Share { stream: Pick, read: Pick, write: Pick, duration_us: u64 },
    /// A stream hands blocks to another, one after the other: each is freed while the other still reads it.
    HandOn { size: u64, stream: Pick, to: Pick, blocks: u8, duration_us: u64 },
    /// `record_stream`, needed or not.
    Record { block: Pick, stream: Pick },
    /// A stream waits for another.
    Wait { stream: Pick, on: Pick },
    /// Time passes.
    Advance { duration_us: u64 },
    /// A stream, or with a pick beyond them all streams, end their work.
    Complete { stream: Pick },
    /// The program waits for everything on the host.
    Synchronize,
    /// `empty_cache`.
    EmptyCache,
    /// The device's memory fraction changes.
    SetFraction { device: Pick, percent: u8 },
    /// A capture begins, into a private pool.
    BeginCapture { stream: Pick, pool: Pick, mode: u8 },
    /// A stream joins a capture.
    Join { capture: Pick, stream: Pick },
    /// The capture waits for work outside, which spoils it.
    Spoil { capture: Pick, on: Pick },
    /// A capture ends.
    EndCapture { capture: Pick, how: End },
    /// A graph runs.
    Replay { graph: Pick, stream: Pick },
    /// A graph is destroyed, and its hold on its pool with it.
    DestroyGraph { graph: Pick },
    /// A stream's requests go to a private pool that no graph uses.
    BeginPool { pool: Pick, stream: Pick },
    /// They no longer do.
    EndPool { pool: Pick },
    /// A pool's memory is to stay where it is.
    RestrictMoves { pool: Pick, moving: Move },
    /// Such a pool loses one user.
    ReleasePool { pool: Pick },
    /// A stream's requests go to a private pool with a source of its own, which is made if it is not there.
    BeginSourced { pool: Pick, stream: Pick },
    /// Such a source will do something wrong.
    Mishap { source: Pick, what: Mishap },
    /// A block's memory is pinned.
    Pin { block: Pick },
    /// A pin is taken back.
    Unpin { pin: Pick },
    /// A stream is destroyed, after a word to the allocator; its handle comes back for a new one.
    DestroyStream { stream: Pick },
    /// A block that only the out-of-memory callback will free.
    Hoard { size: u64, stream: Pick },
    /// A driver call is to fail.
    Fault { call: Call, status: Status, after: u8 },
}

/// What a program does most.
#[derive(Clone, Copy, Debug)]
enum Theme {
    /// A little of everything.
    Mixed,
    /// Blocks that several streams use.
    Streams,
    /// Captures, graphs and private pools.
    Graphs,
    /// More memory than there is.
    Pressure,
    /// Driver calls that fail.
    Faults,
}

/// Driver calls that a program lets fail, each with what it fails with.
///
/// Not here: what only the CUDA driver calls for itself (`cuDevicePrimaryCtxRetain`, `cuCtxSetCurrent`).
pub(crate) const FAULTS: [(Call, Status); 41] = [
    (Call::Initialize, Status::NoDevice),
    (Call::Attribute, Status::InvalidDevice),
    (Call::CurrentContext, Status::InvalidContext),
    (Call::PrimaryContextState, Status::InvalidDevice),
    (Call::CanAccessPeer, Status::InvalidDevice),
    (Call::MemoryInfo, Status::InvalidContext),
    (Call::Allocate, Status::OutOfMemory),
    (Call::Allocate, Status::Unknown),
    (Call::Free, Status::InvalidValue),
    (Call::ReserveRange, Status::OutOfMemory),
    (Call::ReserveRange, Status::Unknown),
    (Call::FreeRange, Status::InvalidValue),
    (Call::FreeRange, Status::InvalidValue),
    (Call::CreateHandle, Status::OutOfMemory),
    (Call::CreateHandle, Status::Unknown),
    (Call::ReleaseHandle, Status::InvalidValue),
    (Call::ReleaseHandle, Status::InvalidValue),
    (Call::Map, Status::OutOfMemory),
    (Call::Map, Status::InvalidValue),
    (Call::SetAccess, Status::OutOfMemory),
    (Call::SetAccess, Status::NotSupported),
    (Call::Unmap, Status::InvalidValue),
    (Call::Unmap, Status::Unknown),
    (Call::CreateEvent, Status::OutOfMemory),
    (Call::DestroyEvent, Status::InvalidValue),
    (Call::RecordEvent, Status::InvalidHandle),
    (Call::RecordEvent, Status::Unknown),
    (Call::QueryEvent, Status::Unknown),
    (Call::QueryEvent, Status::InvalidHandle),
    (Call::SynchronizeEvent, Status::Unknown),
    (Call::WaitEvent, Status::InvalidHandle),
    (Call::WaitEvent, Status::Unknown),
    (Call::WaitEvent, Status::Unknown),
    (Call::StreamContext, Status::InvalidHandle),
    (Call::StreamContext, Status::Unknown),
    (Call::CaptureStatus, Status::InvalidHandle),
    (Call::CaptureStatus, Status::Unknown),
    (Call::ExchangeCaptureMode, Status::Unknown),
    (Call::ExchangeCaptureMode, Status::Unknown),
    (Call::SynchronizeDevice, Status::Unknown),
    (Call::SynchronizeDevice, Status::Unknown),
];

/// What is asked but once for a process or a device: a failure of these has to be asked for before the program begins.
const ASKED_ONCE: [Call; 4] = [Call::Initialize, Call::Attribute, Call::PrimaryContextState, Call::CanAccessPeer];

/// A driver call and how it fails, in the middle of a program.
fn fault() -> impl Strategy<Value = Operation> {
    let faults: Vec<_> = FAULTS.into_iter().filter(|(call, _)| !ASKED_ONCE.contains(call)).collect();
    (proptest::sample::select(faults), 0..4_u8).prop_map(|((call, status), after)| Operation::Fault {
        call,
        status,
        after,
    })
}

/// A call that is made when a process or a device starts, and how it fails.
pub(crate) fn early_fault() -> impl Strategy<Value = (Call, Status)> {
    let faults: Vec<_> = FAULTS.into_iter().filter(|(call, _)| ASKED_ONCE.contains(call)).collect();
    proptest::sample::select(faults)
}

/// Bytes to ask for: often as much as a block before, so that blocks are reused.
fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 1..8 * KIB,
        2 => proptest::sample::select(vec![512, 64 * KIB, 512 * KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB]),
        3 => 8 * KIB..MIB + KIB,
        3 => MIB..10 * MIB,
        3 => 10 * MIB..40 * MIB,
    ]
}

/// How long a kernel takes: not at all, a moment, or longer than the whole program.
fn duration() -> impl Strategy<Value = u64> {
    prop_oneof![1 => Just(0), 3 => 1..200_u64, 2 => 10_000..1_000_000_u64]
}

fn settle() -> impl Strategy<Value = Settle> {
    prop_oneof![1 => Just(Settle::Wait), 2 => Just(Settle::Record)]
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![6 => Just(End::Joined), 1 => Just(End::Unjoined), 1 => Just(End::Aborted)]
}

fn mishap() -> impl Strategy<Value = Mishap> {
    proptest::sample::select(vec![
        Mishap::GivesNothing,
        Mishap::FailsToGive,
        Mishap::GivesMisaligned,
        Mishap::GivesTwice,
        Mishap::DoesNotTakeBack,
    ])
}

/// One operation, chosen by the theme's weights.
fn operation(theme: Theme) -> BoxedStrategy<Operation> {
    use Operation as O;
    let pick = any::<Pick>;
    // Weights by theme, in the order of `Theme`.
    let weighted: Vec<([u32; 5], BoxedStrategy<Operation>)> = vec![
        ([26, 24, 24, 30, 26], (size(), pick()).prop_map(|(size, stream)| O::Malloc { size, stream }).boxed()),
        ([20, 20, 16, 16, 20], (pick(), settle()).prop_map(|(block, by)| O::Free { block, by }).boxed()),
        ([1, 1, 1, 1, 1], (pick(), any::<u8>()).prop_map(|(block, how)| O::FreeBadly { block, how }).boxed()),
        (
            [14, 10, 14, 14, 12],
            (pick(), duration()).prop_map(|(block, duration_us)| O::Use { block, duration_us }).boxed(),
        ),
        (
            [10, 20, 10, 8, 12],
            (pick(), pick(), pick(), duration())
                .prop_map(|(stream, read, write, duration_us)| O::Share { stream, read, write, duration_us })
                .boxed(),
        ),
        (
            [1, 3, 1, 1, 1],
            (MIB + 1..20 * MIB, pick(), pick(), 2..6_u8, duration())
                .prop_map(|(size, stream, to, blocks, duration_us)| O::HandOn { size, stream, to, blocks, duration_us })
                .boxed(),
        ),
        ([3, 6, 2, 3, 4], (pick(), pick()).prop_map(|(block, stream)| O::Record { block, stream }).boxed()),
        ([2, 4, 2, 1, 2], (pick(), pick()).prop_map(|(stream, on)| O::Wait { stream, on }).boxed()),
        ([3, 3, 2, 2, 3], duration().prop_map(|duration_us| O::Advance { duration_us }).boxed()),
        ([3, 4, 2, 2, 3], pick().prop_map(|stream| O::Complete { stream }).boxed()),
        ([1, 0, 1, 0, 0], Just(O::Synchronize).boxed()),
        ([2, 1, 2, 2, 4], Just(O::EmptyCache).boxed()),
        (
            [1, 0, 0, 2, 1],
            (pick(), 30..=100_u8).prop_map(|(device, percent)| O::SetFraction { device, percent }).boxed(),
        ),
        (
            [3, 1, 7, 1, 3],
            (pick(), pick(), any::<u8>())
                .prop_map(|(stream, pool, mode)| O::BeginCapture { stream, pool, mode })
                .boxed(),
        ),
        ([1, 0, 3, 0, 1], (pick(), pick()).prop_map(|(capture, stream)| O::Join { capture, stream }).boxed()),
        ([1, 0, 1, 0, 0], (pick(), pick()).prop_map(|(capture, on)| O::Spoil { capture, on }).boxed()),
        ([3, 1, 6, 1, 3], (pick(), end()).prop_map(|(capture, how)| O::EndCapture { capture, how }).boxed()),
        ([4, 1, 10, 1, 3], (pick(), pick()).prop_map(|(graph, stream)| O::Replay { graph, stream }).boxed()),
        ([2, 1, 4, 1, 2], pick().prop_map(|graph| O::DestroyGraph { graph }).boxed()),
        ([1, 0, 2, 1, 1], (pick(), pick()).prop_map(|(pool, stream)| O::BeginPool { pool, stream }).boxed()),
        ([1, 0, 2, 3, 1], pick().prop_map(|pool| O::EndPool { pool }).boxed()),
        ([1, 0, 2, 1, 1], (pick(), restriction()).prop_map(|(pool, moving)| O::RestrictMoves { pool, moving }).boxed()),
        ([1, 0, 2, 3, 1], pick().prop_map(|pool| O::ReleasePool { pool }).boxed()),
        ([1, 1, 2, 2, 2], (pick(), pick()).prop_map(|(pool, stream)| O::BeginSourced { pool, stream }).boxed()),
        ([0, 0, 0, 1, 3], (pick(), mishap()).prop_map(|(source, what)| O::Mishap { source, what }).boxed()),
        ([1, 0, 1, 1, 1], pick().prop_map(|block| O::Pin { block }).boxed()),
        ([1, 0, 1, 1, 1], pick().prop_map(|pin| O::Unpin { pin }).boxed()),
        ([2, 4, 1, 0, 2], pick().prop_map(|stream| O::DestroyStream { stream }).boxed()),
        ([1, 0, 0, 2, 1], (size(), pick()).prop_map(|(size, stream)| O::Hoard { size, stream }).boxed()),
        ([0, 0, 0, 1, 14], fault().boxed()),
    ];
    let of_theme = weighted.into_iter().map(|(weights, strategy)| (weights[theme as usize], strategy));
    Union::new_weighted(of_theme.filter(|(weight, _)| *weight > 0).collect()).boxed()
}

fn restriction() -> impl Strategy<Value = Move> {
    prop_oneof![Just(Move::Off), Just(Move::Contiguous)]
}

/// Programs of `length` operations, each of one theme.
pub(crate) fn program(length: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<Operation>> {
    let themes = [(3, Theme::Mixed), (3, Theme::Streams), (3, Theme::Graphs), (3, Theme::Pressure), (4, Theme::Faults)];
    let of_theme = |(weight, theme)| (weight, proptest::collection::vec(operation(theme), length.clone()).boxed());
    Union::new_weighted(themes.into_iter().map(of_theme).collect())
}

/// Programs of `length` operations in which no driver call is made to fail.
pub(crate) fn faultless_program(length: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<Operation>> {
    let themes = [Theme::Mixed, Theme::Streams, Theme::Graphs];
    let of_theme = |theme| (1, proptest::collection::vec(operation(theme), length.clone()).boxed());
    Union::new_weighted(themes.into_iter().map(of_theme).collect())
}
