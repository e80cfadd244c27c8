//! Holds the simulated driver to the contract, on simulated machines of several kinds.

#![expect(clippy::print_stdout, reason = "each clause's result is printed, as `contract_cuda` does")]

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use alloc_core::driver::contract::{Rig, Stop, clauses};
use alloc_core::driver::sim::{PhysicalBytes, SimDriver, SimOptions};
use alloc_core::driver::{CaptureMode, Driver};
use alloc_core::id::{DeviceId, DevicePtr, Stream, StreamHandle};

/// The first handle given to a stream; the next ones follow.
const FIRST_STREAM: u64 = 0x1000;

/// A simulated machine and a program on it.
struct SimRig {
    driver: SimDriver,
    /// The simulator's memory holds no data. What was written, oldest first, is kept here by physical place.
    written: Mutex<Vec<(PhysicalBytes, u32)>>,
    streams: Mutex<u64>,
}

impl SimRig {
    fn new(options: SimOptions) -> Self {
        Self { driver: SimDriver::new(options), written: Mutex::default(), streams: Mutex::new(FIRST_STREAM) }
    }

    /// Runs `body` with `device` current, on another thread if the calling one has another device.
    fn on(&self, device: DeviceId, body: impl FnOnce(&SimDriver) + Send) {
        let current = self.driver.current_device().expect("the driver is there");
        if current.unwrap_or_default() == device {
            return body(&self.driver);
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                self.driver.set_current_device(device).expect("the device exists");
                body(&self.driver);
            });
        });
    }
}

impl Rig for SimRig {
    fn driver(&self) -> &dyn Driver {
        &self.driver
    }

    fn make_stream(&self, device: DeviceId) -> Stream {
        let mut next = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = StreamHandle(*next);
        *next += 1;
        self.on(device, |driver| driver.open_stream(handle).expect("the simulator makes streams by name"));
        Stream { device, handle }
    }

    fn destroy_stream(&self, stream: Stream) {
        if !stream.handle.is_default() {
            self.driver.destroy_stream(stream.handle).expect("the stream is alive");
        }
    }

    fn set_current_device(&self, device: DeviceId) {
        self.driver.set_current_device(device).expect("the device exists");
    }

    fn work(&self, stream: Stream, duration: Duration) {
        let duration_us = duration.as_micros() as u64;
        self.on(stream.device, |driver| {
            driver.launch(stream.handle, &[], &[], duration_us).expect("a kernel that touches nothing does no harm");
        });
    }

    fn write(&self, stream: Stream, address: DevicePtr, size: u64, value: u32) {
        let ends = [address, address.offset(size - 4)];
        self.on(stream.device, |driver| {
            driver.launch(stream.handle, &[], &ends, 1).expect("the memory belongs to nobody else");
        });
        let places = self.driver.backing(address, size);
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.extend(places.into_iter().map(|place| (place, value)));
    }

    fn read(&self, _device: DeviceId, address: DevicePtr) -> u32 {
        self.driver.complete(None).expect("no kernel touched memory that it may not");
        let places = self.driver.backing(address, 1);
        let place = places.first().expect("the address is backed by memory");
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |bytes: &PhysicalBytes| {
            bytes.memory == place.memory && (bytes.offset..bytes.offset + bytes.size).contains(&place.offset)
        };
        written.iter().rev().find(|(bytes, _)| holds(bytes)).map_or(0, |&(_, value)| value)
    }

    fn begin_capture(&self, stream: Stream, mode: CaptureMode) {
        self.driver.begin_capture(stream.handle, mode).expect("the stream is not capturing");
    }

    fn end_capture(&self, stream: Stream) -> bool {
        match self.driver.end_capture(stream.handle) {
            Ok(graph) => {
                self.driver.destroy_graph(graph).expect("the graph exists");
                true
            }
            Err(_) => false,
        }
    }
}

/// Runs all clauses, each on a machine of its own that has to be empty in the end; returns why some were skipped.
fn hold_to_the_contract(options: &SimOptions) -> Vec<String> {
    let (mut passed, mut failed, mut skipped) = (0, Vec::new(), Vec::new());
    for clause in clauses() {
        let rig = SimRig::new(options.clone());
        let verdict = (clause.check)(&rig).and_then(|()| {
            let clean = rig.driver.check().and_then(|()| rig.driver.check_empty());
            clean.map_err(|error| Stop::Failed(error.to_string()))
        });
        match verdict {
            Ok(()) => {
                println!("passed  {}", clause.name);
                passed += 1;
            }
            Err(Stop::Skipped(reason)) => {
                println!("skipped {}: {reason}", clause.name);
                skipped.push(reason);
            }
            Err(Stop::Failed(reason)) => failed.push(format!("{}: {reason}", clause.name)),
        }
    }
    println!("{passed} passed, {} failed, {} skipped", failed.len(), skipped.len());
    assert!(failed.is_empty(), "{} clauses failed:\n{}", failed.len(), failed.join("\n"));
    skipped
}

#[test]
fn two_devices_keep_every_clause() {
    let skipped = hold_to_the_contract(&SimOptions { devices: 2, ..SimOptions::default() });
    assert_eq!(skipped, Vec::<String>::new());
}

#[test]
fn a_small_granularity_keeps_every_clause() {
    let options = SimOptions { devices: 2, granularity_bytes: 64 << 10, ..SimOptions::default() };
    assert_eq!(hold_to_the_contract(&options), Vec::<String>::new());
}

#[test]
fn one_device_keeps_what_needs_no_second() {
    let skipped = hold_to_the_contract(&SimOptions::default());
    assert!(!skipped.is_empty());
    assert!(skipped.iter().all(|reason| reason.contains("two devices")), "{skipped:?}");
}

#[test]
fn devices_that_cannot_reach_each_other_keep_the_rest() {
    let skipped = hold_to_the_contract(&SimOptions { devices: 2, peers: false, ..SimOptions::default() });
    assert!(!skipped.is_empty());
    assert!(skipped.iter().all(|reason| reason.contains("reach each other")), "{skipped:?}");
}

#[test]
fn a_device_without_virtual_memory_keeps_the_rest() {
    let options = SimOptions { devices: 2, virtual_memory: false, ..SimOptions::default() };
    let skipped = hold_to_the_contract(&options);
    assert!(!skipped.is_empty());
    assert!(skipped.iter().all(|reason| reason.contains("virtual memory")), "{skipped:?}");
}
