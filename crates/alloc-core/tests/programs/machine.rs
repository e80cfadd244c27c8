//! The machine that a program runs on, and the allocator's settings.

use alloc_core::{
    config::Config,
    driver::{Call, Status, sim::SimOptions},
    simulated_gpu::SimulatedGpu,
};
use proptest::prelude::*;

use crate::operation::early_fault;

/// Two devices, so small that rare paths are common.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// The allocator's settings, as a user writes them.
    pub(crate) config: String,
    /// Memory of each device.
    pub(crate) capacity_mib: u64,
    /// Whether the devices have address ranges.
    pub(crate) virtual_memory: bool,
    /// Whether the devices reach each other's memory.
    pub(crate) peers: bool,
    /// A driver call that fails when the process, or a device, starts.
    pub(crate) early_fault: Option<(Call, Status)>,
}

impl Machine {
    /// A machine with the given settings, on which nothing fails by itself.
    pub(crate) fn new(config: &str, capacity_mib: u64) -> Self {
        Self { config: config.to_owned(), capacity_mib, virtual_memory: true, peers: true, early_fault: None }
    }

    /// Switches the machine on.
    pub(crate) fn start(&self) -> SimulatedGpu {
        let options = SimOptions {
            capacity_bytes: self.capacity_mib << 20,
            devices: 2,
            virtual_memory: self.virtual_memory,
            peers: self.peers,
            // Few, so that programs of this length come by the limit.
            stale_mappings_max: 12,
            ..SimOptions::default()
        };
        let mut config = Config::parse(&self.config).expect("the settings are valid").config;
        config.history_limit = 1 << 20;
        SimulatedGpu::new(options, config)
    }
}

/// Every policy. Our own has the longest ladder, so it gets most of the programs.
fn policy() -> impl Strategy<Value = &'static str> {
    prop_oneof![3 => Just("policy:native"), 2 => Just("policy:expandable"), 4 => Just("policy:rallocator")]
}

/// Any machine, under any policy, with settings that change what the allocator does.
pub(crate) fn machine() -> impl Strategy<Value = Machine> {
    let setting = prop_oneof![
        8 => Just(""),
        7 => Just(",max_split_size_mb:21"),
        7 => Just(",max_split_size_mb:24,max_non_split_rounding_mb:30"),
        3 => Just(",garbage_collection_threshold:0.4"),
        1 => Just(",garbage_collection_threshold:0.8,max_split_size_mb:30"),
        1 => Just(",roundup_power2_divisions:4"),
        1 => Just(",large_segment_size_mb:12"),
        1 => Just(",peers:all"),
        1 => Just(",peers:none"),
        1 => Just(",per_process_memory_fraction:0.7"),
        1 => Just(",cross_stream_reuse:done"),
        1 => Just(",cross_stream_reuse:all"),
        1 => Just(",move:off"),
        1 => Just(",move:contiguous"),
    ];
    let capacity = prop_oneof![2 => Just(64), 3 => Just(96), 2 => Just(192)];
    let rarely_not = || proptest::bool::weighted(0.94);
    let early = proptest::option::weighted(0.15, early_fault());
    (policy(), setting, capacity, rarely_not(), rarely_not(), early).prop_map(
        |(policy, setting, capacity_mib, virtual_memory, peers, early_fault)| Machine {
            config: format!("{policy}{setting}"),
            capacity_mib,
            virtual_memory,
            peers,
            early_fault,
        },
    )
}

/// Machines on which a free block of the right size is handed out again: nothing keeps it from being split or reused.
pub(crate) fn plain_machine() -> impl Strategy<Value = Machine> {
    (policy(), prop_oneof![Just(96), Just(192)]).prop_map(|(policy, capacity_mib)| Machine::new(policy, capacity_mib))
}
