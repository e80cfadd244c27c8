//! What is measured: the core's cached path, on a simulated GPU that is asked for nothing meanwhile.

use std::sync::Arc;

use alloc_core::{
    allocator::{Allocator, FreeOutcome, RecordOutcome},
    config::{Config, Policy},
    driver::sim::{SimDriver, SimOptions},
    id::{DeviceId, DevicePtr, StreamHandle},
};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;

pub(crate) const POLICIES: [(Policy, &str); 3] =
    [(Policy::Native, "native"), (Policy::Expandable, "expandable"), (Policy::Rallocator, "rallocator")];
/// A stream besides the default one.
pub(crate) const SIDE: StreamHandle = StreamHandle(0x10);

const DEVICE: DeviceId = DeviceId(0);
/// More than the largest workload ever holds, so that nothing but the first steps reaches the driver.
const CAPACITY_BYTES: u64 = 80 << 30;

/// An allocator with all statistics on, as torch would use it on one device.
#[derive(Clone)]
pub(crate) struct Machine {
    gpu: SimDriver,
    allocator: Arc<Allocator<SimDriver>>,
}

impl Machine {
    pub(crate) fn new(policy: Policy) -> Self {
        let gpu = SimDriver::new(SimOptions { capacity_bytes: CAPACITY_BYTES, ..SimOptions::default() });
        gpu.set_current_device(DEVICE).expect("device 0 exists");
        let allocator = Allocator::new(gpu.clone(), Config { policy, ..Config::default() });
        Self { gpu, allocator: Arc::new(allocator) }
    }

    /// As torch's hook does it: first where to, then the memory.
    pub(crate) fn malloc(&self, size: u64, stream: StreamHandle) -> DevicePtr {
        let pool = self.allocator.route(DEVICE, stream);
        let address = self.allocator.malloc(size, DEVICE, stream, pool).expect("the device is large enough");
        address.expect("not a request for nothing")
    }

    pub(crate) fn free(&self, address: DevicePtr) {
        assert_eq!(self.allocator.free(address, DEVICE), FreeOutcome::Freed);
    }

    /// One malloc and one free of memory that is cached.
    pub(crate) fn pair(&self, size: u64, stream: StreamHandle) {
        let address = self.malloc(size, stream);
        self.free(address);
    }

    /// Streams for [`pair_on_two_streams`](Self::pair_on_two_streams) must exist on the device.
    pub(crate) fn touch(&self, stream: StreamHandle) {
        self.gpu.touch_stream(stream).expect("the device has room for a stream");
    }

    /// A malloc on the default stream, a use on another one, and a free that has to wait for that use. Every sixteenth
    /// records an event; what waits is found to be done when the pool has nothing left.
    pub(crate) fn pair_on_two_streams(&self, size: u64, other: StreamHandle) {
        let address = self.malloc(size, StreamHandle::DEFAULT);
        assert_eq!(self.allocator.record_stream(address, other), RecordOutcome::Recorded);
        self.free(address);
    }
}

/// `live` blocks of random sizes, of which each step replaces a random one.
///
/// Sizes are uniform in their logarithm from 1 byte to `1 << max_size_log2`, as in the raw benchmark of torch, and at
/// least 512 bytes. They are computed in integers, linear within each power of two, so that drawing one costs little
/// beside what is measured.
pub(crate) struct Replacement {
    machine: Machine,
    stream: StreamHandle,
    held: Vec<DevicePtr>,
    max_size_log2: u64,
    numbers: Numbers,
}

impl Replacement {
    pub(crate) fn new(machine: &Machine, stream: StreamHandle, live: usize, max_size_log2: u64) -> Self {
        let mut this = Self {
            machine: machine.clone(),
            stream,
            held: Vec::with_capacity(live),
            max_size_log2,
            numbers: Numbers::default(),
        };
        for _ in 0..live {
            let size = this.numbers.size(max_size_log2);
            this.held.push(machine.malloc(size, stream));
        }
        // Until the pool has found its shape.
        for _ in 0..10 * live {
            this.step();
        }
        this
    }

    pub(crate) fn step(&mut self) {
        let position = self.numbers.below(self.held.len() as u64) as usize;
        self.machine.free(self.held[position]);
        let size = self.numbers.size(self.max_size_log2);
        self.held[position] = self.machine.malloc(size, self.stream);
    }
}

/// Two streams that hold blocks of their own and take turns with a large block, of another size each time. Most of its
/// memory is idle in the other stream's pool when it is asked for: two steps of three find no free block under the policy
/// rallocator, and nearly all instructions are theirs.
pub(crate) struct Turns {
    machine: Machine,
    residents: [Replacement; 2],
    steps: usize,
    numbers: Numbers,
}

impl Turns {
    const LIVE: usize = 200;
    const RESIDENT_MAX_LOG2: u64 = 23;
    const LARGE_MIN: u64 = 32 * MIB;

    pub(crate) fn new(machine: &Machine) -> Self {
        machine.touch(SIDE);
        let residents = [StreamHandle::DEFAULT, SIDE]
            .map(|stream| Replacement::new(machine, stream, Self::LIVE, Self::RESIDENT_MAX_LOG2));
        Self { machine: machine.clone(), residents, steps: 0, numbers: Numbers::default() }
    }

    pub(crate) fn step(&mut self) {
        let resident = &mut self.residents[self.steps % 2];
        self.machine.pair(Self::LARGE_MIN + self.numbers.below(Self::LARGE_MIN), resident.stream);
        resident.step();
        self.steps += 1;
    }
}

/// Marsaglia's xorshift.
struct Numbers(u64);

impl Default for Numbers {
    fn default() -> Self {
        Self(88_172_645_463_325_252)
    }
}

impl Numbers {
    fn size(&mut self, max_size_log2: u64) -> u64 {
        let scaled = (self.next() >> 32) * max_size_log2;
        let (exponent, fraction) = (scaled >> 32, scaled & u64::from(u32::MAX));
        ((1 << exponent) + ((fraction << exponent) >> 32)).max(512)
    }

    fn below(&mut self, limit: u64) -> u64 {
        ((self.next() >> 32) * limit) >> 32
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
