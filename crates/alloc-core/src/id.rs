//! The names of things: devices, addresses, streams, pools.
//!
//! Each is its own type, so that a device index is never taken for a stream or an address for a size. Values that a
//! program outside hands in (a device index, a raw stream, a pool's pair of integers) are kept as they came.

use std::fmt;

/// A device's index, as CUDA and torch count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceId(pub u32);

impl DeviceId {
    /// The index as a position in a list of devices.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "device {}", self.0)
    }
}

/// An address in device memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `offset` bytes further on.
    #[must_use]
    pub fn offset(self, offset: u64) -> Self {
        Self(self.0 + offset)
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:#x}", self.0)
    }
}

/// A stream as the program passes it: a `CUstream`, of which 0, 1 and 2 are not pointers but the default streams.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StreamHandle(pub u64);

impl StreamHandle {
    /// The legacy default stream of whichever device the call is about.
    pub const DEFAULT: Self = Self(0);
    /// The other name of the legacy default stream (`CU_STREAM_LEGACY`).
    pub const LEGACY: Self = Self(1);
    /// The calling thread's own default stream (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD: Self = Self(2);

    /// Whether the handle names no stream object but a default stream, which every device has.
    pub fn is_default(self) -> bool {
        self.0 <= Self::PER_THREAD.0
    }
}

impl fmt::Debug for StreamHandle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:#x}", self.0)
    }
}

/// A stream and the device that it belongs to: all that a driver needs to find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream {
    /// The device whose context the stream lives in.
    pub device: DeviceId,
    /// The handle within that context.
    pub handle: StreamHandle,
}

/// A private pool's name: torch's `MempoolId_t`. Capture pools set the first number, pools of the user the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u64, pub u64);

impl PoolId {
    /// The default pool, which belongs to no graph and to no `MemPool`.
    pub const DEFAULT: Self = Self(0, 0);
}

/// Physical memory obtained with `cuMemCreate`, opaque to all but the driver that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PhysicalHandle(pub u64);

/// A driver event, opaque to all but the driver that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Event(pub u64);
