//! Every interleaving of two threads, for the programs in which a miss meets another call.
//!
//! `make loom` builds the core with loom's locks and counters in place of the standard ones and runs each program again
//! and again, each time with the threads' steps in another order. A step is what lies between two locks, the simulated
//! GPU's own among them, so that each driver call is one. After each run the state is scanned, the figures are those of
//! some order of the calls, and the device can be emptied.
//!
//! Two programs are explored in full. In the other two both threads take locks by the dozen, and orders with more than
//! [`MANY_PREEMPTIONS`] are left out: a *preemption* is a switch away from a thread that could have gone on, and each one
//! more makes five times the orders. Four are enough to part two steps of each thread by steps of the other.
#![cfg(loom)]

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use alloc_core::{
    Rung,
    allocator::{Allocator, FreeOutcome, RecordOutcome},
    config::Config,
    driver::sim::{SimDriver, SimOptions},
    error::AllocError,
    id::{DeviceId, DevicePtr, Stream, StreamHandle},
    stats::Stats,
};
use loom::thread;

/// Preemptions in one run at most, where all of them would be too many.
const MANY_PREEMPTIONS: Option<usize> = Some(4);
/// No such limit.
const EVERY_ORDER: Option<usize> = None;

const MIB: u64 = 1 << 20;
const DEVICE: DeviceId = DeviceId(0);
const MAIN: StreamHandle = StreamHandle::DEFAULT;
const SIDE: StreamHandle = StreamHandle(0x10);
const POLICIES: [&str; 3] = ["policy:native", "policy:expandable", "policy:rallocator"];

/// An allocator on a small device, for any number of threads.
#[derive(Clone)]
struct Rig {
    gpu: SimDriver,
    allocator: Arc<Allocator<SimDriver>>,
}

impl Rig {
    /// The device is brought into use here, since loom does not see the cells that hold devices.
    fn new(config: &str, capacity_bytes: u64) -> Self {
        let gpu = SimDriver::new(SimOptions { capacity_bytes, ..SimOptions::default() });
        gpu.set_current_device(DEVICE).expect("device 0 exists");
        gpu.touch_stream(SIDE).expect("the stream can be made");
        let config = Config::parse(config).expect("a valid config").config;
        let rig = Self { allocator: Arc::new(Allocator::new(gpu.clone(), config)), gpu };
        rig.allocator.set_memory_fraction(DEVICE, 1.0).expect("the device comes into use");
        rig
    }

    /// `None` if there is no memory; no other error is right. The oracle refuses memory that somebody else has.
    fn try_malloc(&self, size: u64) -> Option<DevicePtr> {
        let pool = self.allocator.route(DEVICE, MAIN);
        let address = match self.allocator.malloc(size, DEVICE, MAIN, pool) {
            Ok(address) => address.expect("not a request for nothing"),
            Err(AllocError::OutOfMemory(_)) => return None,
            Err(error) => panic!("the simulated GPU refused something: {error}"),
        };
        self.gpu.allocated(address, size, Stream { device: DEVICE, handle: MAIN }, pool).expect("nobody else has it");
        Some(address)
    }

    fn malloc(&self, size: u64) -> DevicePtr {
        self.try_malloc(size).expect("there is memory in every interleaving")
    }

    fn free(&self, address: DevicePtr) {
        self.gpu.freed(address).expect("the oracle knows it");
        assert_eq!(self.allocator.free(address, DEVICE), FreeOutcome::Freed);
    }

    /// Memory that a kernel of another stream still writes when it is freed.
    fn free_while_in_use(&self, address: DevicePtr) {
        assert_eq!(self.allocator.record_stream(address, SIDE), RecordOutcome::Recorded);
        self.gpu.launch(SIDE, &[], &[address], 100).expect("no race");
        self.free(address);
    }

    fn stats(&self) -> Stats {
        self.allocator.stats(DEVICE)
    }

    /// What holds after every run, whatever the order was; `held` is what the program still has.
    fn finish(self, held: impl IntoIterator<Item = DevicePtr>) {
        self.allocator.check().expect("consistent after the threads");
        let held: Vec<DevicePtr> = held.into_iter().collect();
        assert_eq!(self.stats().allocation.all.current, held.len() as u64);
        held.into_iter().for_each(|address| self.free(address));
        self.gpu.complete(None).expect("no kernel faults");
        self.allocator.empty_cache().expect("everything can be returned");
        self.allocator.check().expect("consistent at the end");
        let stats = self.stats();
        assert_eq!(stats.allocation.all.allocated(), stats.allocation.all.freed);
        assert_eq!((stats.active_bytes.all.current, stats.reserved_bytes.all.current), (0, 0));
        assert_eq!(stats.num_device_alloc, stats.num_device_free);
        self.gpu.check().expect("no rule was broken");
        self.gpu.check_empty().expect("nothing is left on the device");
    }
}

/// Runs the program in every order with so many preemptions, under each policy, and says how many there were. The
/// program returns whether the two calls met in the way that it is about: some order has to show that.
#[expect(
    clippy::print_stderr,
    reason = "a model that explores nothing proves nothing: the count is part of the result"
)]
fn explore(
    name: &str,
    preemptions: Option<usize>,
    program: impl Fn(&'static str) -> bool + Copy + Send + Sync + 'static,
) {
    for policy in POLICIES {
        let [orders, meetings] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let counters = [Arc::clone(&orders), Arc::clone(&meetings)];
        let mut model = loom::model::Builder::new();
        model.preemption_bound = preemptions;
        model.check(move || {
            counters[0].fetch_add(1, Ordering::Relaxed);
            counters[1].fetch_add(usize::from(program(policy)), Ordering::Relaxed);
        });
        let [orders, meetings] = [orders, meetings].map(|counter| counter.load(Ordering::Relaxed));
        eprintln!("{name}, {policy}: {orders} orders, in {meetings} of them the calls met");
        assert!(meetings > 0, "{name} under {policy}: the calls never met");
    }
}

#[test]
fn miss_beside_a_free_of_its_neighbour() {
    explore("a miss beside a free of its neighbour", EVERY_ORDER, |policy| {
        // The device is full, and one piece alone is too small: the miss has to find both, united.
        let rig = Rig::new(policy, 20 * MIB);
        let (left, right) = (rig.malloc(9 * MIB), rig.malloc(9 * MIB));
        rig.free(left);
        let freeing = thread::spawn({
            let rig = rig.clone();
            move || rig.free(right)
        });
        let served = rig.try_malloc(18 * MIB);
        freeing.join().expect("the free does not panic");
        assert_eq!(rig.stats().num_ooms, u64::from(served.is_none()));
        let is_met = served.is_some() && rig.stats().rungs.iter().sum::<u64>() > 0;
        rig.finish(served);
        is_met
    });
}

#[test]
fn two_misses() {
    explore("two misses", EVERY_ORDER, |policy| {
        let rig = Rig::new(policy, 64 * MIB);
        let other = thread::spawn({
            let rig = rig.clone();
            move || rig.malloc(2 * MIB)
        });
        let mine = rig.malloc(2 * MIB);
        let other = other.join().expect("the miss does not panic");
        assert_ne!(mine, other);
        // Whoever comes second finds the rest of what the first obtained, even if both had missed before. Under our own
        // policy there is no rest, and nothing is obtained twice.
        let reserved = if policy == "policy:rallocator" { 4 * MIB } else { 20 * MIB };
        assert_eq!(rig.stats().reserved_bytes.all.current, reserved);
        rig.finish([mine, other]);
        true
    });
}

#[test]
fn miss_beside_empty_cache() {
    explore("a miss beside empty_cache", MANY_PREEMPTIONS, |policy| {
        // The request needs the whole device, so what is cached has to go: either thread may be the one to return it, or
        // the miss moves it to where it grows.
        let rig = Rig::new(policy, 40 * MIB);
        rig.free(rig.malloc(MIB));
        let emptying = thread::spawn({
            let rig = rig.clone();
            move || rig.allocator.empty_cache().expect("everything cached can be returned")
        });
        let mine = rig.malloc(40 * MIB);
        emptying.join().expect("emptying does not panic");
        let stats = rig.stats();
        let is_met = stats.num_alloc_retries == 1 || stats.num_device_free == 0;
        rig.finish([mine]);
        is_met
    });
}

#[test]
fn wait_beside_a_poll() {
    explore("a wait beside a poll", MANY_PREEMPTIONS, |policy| {
        // Both threads need the pending block. While one waits for its event on the host, the other may see the event
        // done, have the block, record the event anew, and destroy it. It keeps the block in the end, so that a wait for
        // an event that is no more is not made up for by finding the block free.
        let rig = Rig::new(policy, 20 * MIB);
        let kept = rig.malloc(9 * MIB);
        rig.free_while_in_use(rig.malloc(9 * MIB));
        let polling = thread::spawn({
            let rig = rig.clone();
            move || {
                rig.gpu.complete(None).expect("no kernel faults");
                let polled = rig.try_malloc(9 * MIB);
                polled.into_iter().for_each(|address| rig.free_while_in_use(address));
                rig.allocator.empty_cache().expect("no event is used after its end");
                (polled.is_some(), rig.try_malloc(9 * MIB))
            }
        });
        let mine = rig.try_malloc(9 * MIB);
        let (was_polled, other) = polling.join().expect("polling does not panic");
        assert_ne!(mine.is_some(), other.is_some(), "one of them has the block");
        let is_met = was_polled && rig.stats().rungs[Rung::Wait as usize] > 0;
        rig.finish(mine.into_iter().chain(other).chain([kept]));
        is_met
    });
}
