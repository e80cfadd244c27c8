//! Where a private pool's segments come from, if not from the driver: an allocator of the program's own.
//!
//! A communicator, for instance, wants its buffers in memory that its library has obtained. Such a pool keeps torch's
//! segments under every policy. They never move and are never lent, since nobody here knows what stands behind them;
//! each goes back to the source that it came from, and keeps that source alive until then.

use std::{fmt, sync::Arc};

use crate::id::{DeviceId, DevicePtr, PoolId, StreamHandle};

/// Obtains and takes back the segments of private pools. It is foreign code: it is called from any thread, under no lock,
/// and may call CUDA and this allocator.
///
/// What it allocates itself must not go to a pool that it is the source of. While it does, memory may run out and a segment
/// be given back to it, on the same thread: so it holds no lock of its own then. It must not panic.
pub trait SegmentSource: Send + Sync {
    /// `size` bytes on `device`, at a multiple of [`BLOCK_GRANULARITY`](crate::size::BLOCK_GRANULARITY), for the requests
    /// of `stream`. `None` if there is too little memory.
    ///
    /// # Errors
    ///
    /// [`SourceFailed`] for any other reason.
    fn obtain(&self, device: DeviceId, size: u64, stream: StreamHandle) -> Result<Option<DevicePtr>, SourceFailed>;

    /// Takes a segment back, given what it was obtained for. No work uses it any more.
    ///
    /// # Errors
    ///
    /// [`SourceFailed`]; then the memory is as it was before.
    fn give_back(
        &self,
        device: DeviceId,
        address: DevicePtr,
        size: u64,
        stream: StreamHandle,
    ) -> Result<(), SourceFailed>;
}

/// A source did not do what it was asked for. It knows why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceFailed;

/// A source that pools and segments share. It is dropped under no lock, since that too is foreign code: the
/// [`Allocator`](crate::allocator::Allocator) keeps one reference until there is no other.
pub type SharedSource = Arc<dyn SegmentSource>;

/// Why a pool with a source of its own could not be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The source failed for another reason than a lack of memory: it knows which.
    #[error("the allocator of the private pool ({}, {}) failed when it was asked for {size} bytes", pool.0, pool.1)]
    NotObtained {
        /// The pool.
        pool: PoolId,
        /// The bytes of the segment.
        size: u64,
    },
    /// The source gave memory that cannot be used, and was given it back unless it had given it before: mend the source.
    #[error(
        "the allocator of the private pool ({}, {}) gave {size} bytes at {:#x}, which is no multiple of 512, or where \
         memory lies already",
        pool.0, pool.1, address.0
    )]
    Unusable {
        /// The pool.
        pool: PoolId,
        /// Where the memory is said to begin.
        address: DevicePtr,
        /// The bytes of the segment.
        size: u64,
    },
    /// The source failed when a segment was given back: the segment stays where it is, and counts as reserved.
    #[error(
        "the allocator of the private pool ({}, {}) did not take back {size} bytes at {:#x}",
        pool.0, pool.1, address.0
    )]
    NotTakenBack {
        /// The pool.
        pool: PoolId,
        /// Where the segment begins.
        address: DevicePtr,
        /// The bytes of the segment.
        size: u64,
    },
    /// A pool that exists cannot be given a source: release it first, or choose another name.
    #[error(
        "the private pool ({}, {}) exists already, so it cannot be given an allocator of its own any more", pool.0, pool.1
    )]
    PoolExists {
        /// The pool.
        pool: PoolId,
    },
    /// Memory of a source cannot be named to another process: share what comes from another pool.
    #[error(
        "memory of the private pool ({}, {}) cannot be used in another process: it has an allocator of its own",
        pool.0, pool.1
    )]
    NotShareable {
        /// The pool.
        pool: PoolId,
    },
}

/// Where segments come from, and go back to.
#[derive(Clone, Default)]
pub(crate) enum Origin {
    #[default]
    Driver,
    Source(SharedSource),
}

impl Origin {
    #[inline]
    pub(crate) fn is_driver(&self) -> bool {
        matches!(self, Self::Driver)
    }

    pub(crate) fn source(&self) -> Option<&SharedSource> {
        match self {
            Self::Driver => None,
            Self::Source(source) => Some(source),
        }
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.is_driver() { "Driver" } else { "Source" })
    }
}
