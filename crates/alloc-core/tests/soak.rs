//! A long program whose shapes never repeat, over eight streams: memory stays tight and nothing grows without end.
//!
//! Each stream trains a small model of its own on batches of every length, as far as the next stream's turn, so that
//! several steps are under way at once and what one stream has given back is what another needs.
//! `RALLOCATOR_SOAK_OPERATIONS` sets the length. The million takes 18 s of one core in the development profile.
//! How tight memory is depends on the numbers that the program is made of, so other ones are tried too, with the bound
//! that all of them keep: docs/adr/0002 has 24.
//!
//! Two more programs have no steps: in one, blocks of every size live for random times, which leaves more handles used in
//! part than any training does; in the other they are freed in the order in which they came.

use std::collections::VecDeque;

use alloc_core::{
    config::Config,
    driver::sim::SimOptions,
    id::{DeviceId, DevicePtr, StreamHandle},
    simulated_gpu::SimulatedGpu,
};

const DEVICE: DeviceId = DeviceId(0);
const STREAMS: u64 = 8;
const LAYERS: usize = 12;
const MIB: u64 = 1 << 20;

/// Operations unless the environment says otherwise, and how many windows they are divided into.
const OPERATIONS: u64 = 1_000_000;
const WINDOWS: usize = 10;

/// Numbers that look random and are the same in every run (`SplitMix64`).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// One operation of a step, by the block's place in the stream's list.
enum Operation {
    Malloc { place: usize, size: u64 },
    Free { place: usize },
}

/// What a stream holds and has still to do.
#[derive(Default)]
struct Training {
    blocks: Vec<Option<DevicePtr>>,
    script: VecDeque<Operation>,
}

impl Training {
    /// Forward through all layers, which leaves the activations, and backward, which frees them in reverse.
    fn write_step(&mut self, tokens: u64, width: u64) {
        const ACTIVATIONS: [u64; 4] = [1, 3, 4, 1];
        let temporary = LAYERS * ACTIVATIONS.len();
        self.blocks.resize(temporary + 1, None);
        for layer in 0..LAYERS {
            for (position, share) in ACTIVATIONS.into_iter().enumerate() {
                let place = layer * ACTIVATIONS.len() + position;
                self.script.push_back(Operation::Malloc { place, size: tokens * width * share * 2 });
            }
            self.script.push_back(Operation::Malloc { place: temporary, size: tokens * tokens });
            self.script.push_back(Operation::Free { place: temporary });
        }
        for layer in (0..LAYERS).rev() {
            self.script.push_back(Operation::Malloc { place: temporary, size: tokens * width * 4 });
            for position in (0..ACTIVATIONS.len()).rev() {
                self.script.push_back(Operation::Free { place: layer * ACTIVATIONS.len() + position });
            }
            self.script.push_back(Operation::Free { place: temporary });
        }
    }
}

struct Soak {
    gpu: SimulatedGpu,
    numbers: Numbers,
    trainings: Vec<Training>,
    turn: u64,
    left_of_turn: u64,
}

impl Soak {
    fn new(numbers: Numbers) -> Self {
        let options = SimOptions { capacity_bytes: 80 << 30, ..SimOptions::default() };
        let gpu = SimulatedGpu::new(options, Config::default());
        let trainings = (0..STREAMS).map(|_| Training::default()).collect();
        Self { gpu, numbers, trainings, turn: 0, left_of_turn: 0 }
    }

    fn operate(&mut self) {
        if self.left_of_turn == 0 {
            self.turn = self.numbers.below(STREAMS);
            self.left_of_turn = 20 + self.numbers.below(400);
        }
        self.left_of_turn -= 1;
        let stream = StreamHandle(0x10 * (1 + self.turn));
        let training = &mut self.trainings[self.turn as usize];
        if training.script.is_empty() {
            training.write_step(16 + self.numbers.below(4096), 256 + 8 * self.numbers.below(128));
        }
        match training.script.pop_front().expect("a step is not empty") {
            Operation::Malloc { place, size } => {
                let address = self.gpu.malloc(size, DEVICE, stream).expect("there is memory");
                self.gpu.launch(stream, &[], &[address.expect("not for nothing")], 10).expect("no race");
                training.blocks[place] = address;
            }
            Operation::Free { place } => {
                let address = training.blocks[place].take().expect("it was allocated");
                if self.numbers.below(20) == 0 {
                    let other = StreamHandle(0x10 * (1 + self.numbers.below(STREAMS)));
                    self.gpu.wait(other, stream).expect("streams can wait");
                    self.gpu.launch(other, &[address], &[], 10).expect("no race");
                    self.gpu.record_stream(address, other).expect("it can be recorded");
                }
                self.gpu.free(address, DEVICE).expect("no misjudgement");
            }
        }
        self.gpu.advance(20).expect("no fault");
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the length of a run is no setting of the allocator")]
fn shapes_that_never_repeat_leave_memory_tight_and_moves_addresses_and_events_bounded() {
    let length = std::env::var("RALLOCATOR_SOAK_OPERATIONS").ok();
    let operations = length.map_or(OPERATIONS, |text| text.parse().expect("a whole number"));
    let per_window = operations / WINDOWS as u64;
    let mut soak = Soak::new(Numbers(7));
    let mut moved = Vec::new();
    let mut addresses = Vec::new();
    for _ in 0..WINDOWS {
        let before = soak.gpu.allocator().stats(DEVICE).handles_moved;
        (0..per_window).for_each(|_| soak.operate());
        let stats = soak.gpu.allocator().stats(DEVICE);
        let (reserved, active) = (stats.reserved_bytes.all.peak, stats.active_bytes.all.peak);
        assert!(reserved <= active / 100 * 102 + 64 * MIB, "{} MiB for {} MiB", reserved / MIB, active / MIB);
        moved.push(stats.handles_moved - before);
        addresses.push(soak.gpu.driver().reserved_address_bytes(DEVICE).peak);
    }
    let [early, late] = [&moved[..WINDOWS / 2], &moved[WINDOWS / 2..]].map(|half| half.iter().sum::<u64>());
    assert!(late <= early, "moves grow: {moved:?}");
    assert_eq!(addresses[WINDOWS / 2], addresses[WINDOWS - 1], "address space grows");

    let driver = soak.gpu.driver();
    let (mapped, reserved) = (driver.mapped_bytes(DEVICE).peak, driver.physical_bytes(DEVICE).peak);
    assert!(mapped <= reserved * 4, "{} MiB stand at other addresses too", (mapped - reserved) / MIB);
    assert!(driver.live_events() <= 64, "{} events", driver.live_events());
    assert_eq!(driver.host_waits(), 0);
    soak.gpu.check().expect("consistent");
    soak.gpu.close().expect("nothing is left");
}

#[test]
fn such_programs_take_at_most_six_hundredths_more_than_they_hold() {
    for first in 1..=6 {
        let mut soak = Soak::new(Numbers(first));
        (0..OPERATIONS / 10).for_each(|_| soak.operate());
        let stats = soak.gpu.allocator().stats(DEVICE);
        let (reserved, active) = (stats.reserved_bytes.all.peak, stats.active_bytes.all.peak);
        assert!(reserved <= active / 100 * 106, "{first}: {} MiB for {} MiB", reserved / MIB, active / MIB);
        assert_eq!(soak.gpu.driver().host_waits(), 0);
        soak.gpu.check().expect("consistent");
        soak.gpu.close().expect("nothing is left");
    }
}

#[test]
fn random_sizes_that_live_for_random_times_cost_six_hundredths_more_than_they_hold_on_average() {
    let over = (1..=8).map(|first| {
        let (reserved, active) = peaks_of_random_blocks(Numbers(first));
        assert!(reserved <= active / 100 * 108, "{first}: {} MiB for {} MiB", reserved / MIB, active / MIB);
        reserved as f64 / active as f64
    });
    let mean = over.sum::<f64>() / 8.0;
    assert!(mean <= 1.06, "{mean:.4} times what is held");
}

/// The peaks of reserved and active bytes of blocks of every size that live for random times.
fn peaks_of_random_blocks(mut numbers: Numbers) -> (u64, u64) {
    const HELD_MAX: u64 = 6 << 30;
    let options = SimOptions { capacity_bytes: 80 << 30, ..SimOptions::default() };
    let gpu = SimulatedGpu::new(options, Config::default());
    let mut live: Vec<(DevicePtr, u64)> = Vec::new();
    let mut held = 0;
    for _ in 0..8_000 {
        let stream = StreamHandle(0x10 * (1 + numbers.below(STREAMS)));
        // From 1 KiB to 512 MiB, each power of two as likely as the next.
        let power = 1 << (10 + numbers.below(19));
        let size = power + numbers.below(power);
        while held + size > HELD_MAX {
            let (address, size) = live.swap_remove(numbers.below(live.len() as u64) as usize);
            gpu.free(address, DEVICE).expect("no misjudgement");
            held -= size;
        }
        let address = gpu.malloc(size, DEVICE, stream).expect("there is memory").expect("not for nothing");
        gpu.launch(stream, &[], &[address], 10).expect("no race");
        live.push((address, size));
        held += size;
        gpu.advance(20).expect("no fault");
    }
    let stats = gpu.allocator().stats(DEVICE);
    assert_eq!(gpu.driver().host_waits(), 0);
    gpu.check().expect("consistent");
    gpu.close().expect("nothing is left");
    (stats.reserved_bytes.all.peak, stats.active_bytes.all.peak)
}

#[test]
fn random_sizes_that_are_freed_in_the_order_in_which_they_came_leave_one_gap() {
    let gpu = SimulatedGpu::new(SimOptions { capacity_bytes: 80 << 30, ..SimOptions::default() }, Config::default());
    let stream = StreamHandle(0x10);
    let mut numbers = Numbers(12);
    let mut live: VecDeque<DevicePtr> = VecDeque::new();
    for _ in 0..30_000 {
        if live.len() == 400 {
            let oldest = live.pop_front().expect("seen above");
            gpu.free(oldest, DEVICE).expect("no misjudgement");
        }
        let size = 1 + numbers.below(32 * MIB);
        let address = gpu.malloc(size, DEVICE, stream).expect("there is memory").expect("not for nothing");
        gpu.launch(stream, &[], &[address], 10).expect("no race");
        live.push_back(address);
        gpu.advance(20).expect("no fault");
    }
    let stats = gpu.allocator().stats(DEVICE);
    let (reserved, active) = (stats.reserved_bytes.all.peak, stats.active_bytes.all.peak);
    assert!(reserved <= active / 99 * 100 + 64 * MIB, "{} MiB for {} MiB", reserved / MIB, active / MIB);
    gpu.check().expect("consistent");
    gpu.close().expect("nothing is left");
}
