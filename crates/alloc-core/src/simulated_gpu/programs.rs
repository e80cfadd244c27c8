//! Programs by the hundred: whatever a program does by the rules, the allocator never hands memory on too early.

use proptest::prelude::*;

use super::*;
use crate::config::Policy;

const DEVICE: DeviceId = DeviceId(0);
const STREAMS: [StreamHandle; 3] = [StreamHandle(0), StreamHandle(0x10), StreamHandle(0x20)];
const MIB: u64 = 1 << 20;

/// After how many steps the allocator's whole state is scanned.
const SCAN_EVERY: usize = 10;

/// One thing that a program does. Positions count modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    Malloc {
        size: u64,
        stream: usize,
    },
    Free {
        block: usize,
    },
    /// Uses a block, after a wait and `record_stream` if the stream is not the block's own.
    Use {
        block: usize,
        stream: usize,
        is_write: bool,
    },
    Wait {
        stream: usize,
        on: usize,
    },
    Complete {
        stream: usize,
    },
    Advance {
        duration_us: u64,
    },
    EmptyCache,
    /// Captures a kernel that uses a temporary block, and keeps the graph.
    Capture {
        size: u64,
        stream: usize,
    },
    Replay {
        graph: usize,
        stream: usize,
    },
    DropGraph {
        graph: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let size = || prop_oneof![1..4096_u64, 1..MIB, MIB..30 * MIB];
    let stream = || 0..STREAMS.len();
    prop_oneof![
        8 => (size(), stream()).prop_map(|(size, stream)| Step::Malloc { size, stream }),
        6 => any::<usize>().prop_map(|block| Step::Free { block }),
        8 => (any::<usize>(), stream(), any::<bool>())
            .prop_map(|(block, stream, is_write)| Step::Use { block, stream, is_write }),
        2 => (stream(), stream()).prop_map(|(stream, on)| Step::Wait { stream, on }),
        1 => stream().prop_map(|stream| Step::Complete { stream }),
        2 => (1..200_u64).prop_map(|duration_us| Step::Advance { duration_us }),
        1 => Just(Step::EmptyCache),
        1 => (size(), 1..STREAMS.len()).prop_map(|(size, stream)| Step::Capture { size, stream }),
        2 => (any::<usize>(), stream()).prop_map(|(graph, stream)| Step::Replay { graph, stream }),
        1 => any::<usize>().prop_map(|graph| Step::DropGraph { graph }),
    ]
}

/// What the program holds.
struct Program {
    gpu: SimulatedGpu,
    /// Each block with its own stream.
    blocks: Vec<(DevicePtr, StreamHandle)>,
    /// Each graph with the pool that it has to itself.
    graphs: Vec<(GraphId, PoolId)>,
    pools: u64,
}

/// The value, unless memory ran out, which is no fault of anybody.
fn unless_out_of_memory<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(SimulatedGpuError::Alloc(AllocError::OutOfMemory(_))) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Program {
    fn new(policy: Policy) -> Self {
        let options = SimOptions { capacity_bytes: 100 * MIB, ..SimOptions::default() };
        let gpu = SimulatedGpu::new(options, Config { policy, ..Config::default() });
        Self { gpu, blocks: Vec::new(), graphs: Vec::new(), pools: 0 }
    }

    fn run(&mut self, step: &Step) -> Result<()> {
        let gpu = &self.gpu;
        match *step {
            Step::Malloc { size, stream } => {
                let block = unless_out_of_memory(gpu.malloc(size, DEVICE, STREAMS[stream]))?.flatten();
                self.blocks.extend(block.map(|block| (block, STREAMS[stream])));
            }
            Step::Free { block } if !self.blocks.is_empty() => {
                let (block, _) = self.blocks.swap_remove(block % self.blocks.len());
                gpu.free(block, DEVICE)?;
            }
            Step::Use { block, stream, is_write } if !self.blocks.is_empty() => {
                let (block, own) = self.blocks[block % self.blocks.len()];
                if STREAMS[stream] != own {
                    // Memory is safe to use on its own stream, so another one has to be ordered after that first.
                    gpu.wait(STREAMS[stream], own)?;
                    gpu.record_stream(block, STREAMS[stream])?;
                }
                let (reads, writes) = if is_write { (vec![], vec![block]) } else { (vec![block], vec![]) };
                gpu.launch(STREAMS[stream], &reads, &writes, 50)?;
            }
            Step::Wait { stream, on } => gpu.wait(STREAMS[stream], STREAMS[on])?,
            Step::Complete { stream } => gpu.complete(Some(STREAMS[stream]))?,
            Step::Advance { duration_us } => gpu.advance(duration_us)?,
            Step::EmptyCache => gpu.empty_cache()?,
            Step::Capture { size, stream } => self.capture(size, STREAMS[stream])?,
            Step::Replay { graph, stream } if !self.graphs.is_empty() => {
                let (graph, _) = self.graphs[graph % self.graphs.len()];
                gpu.replay(graph, STREAMS[stream])?;
            }
            Step::DropGraph { graph } if !self.graphs.is_empty() => {
                let (graph, pool) = self.graphs.swap_remove(graph % self.graphs.len());
                gpu.destroy_graph(graph)?;
                gpu.release_pool(pool)?;
            }
            Step::Free { .. } | Step::Use { .. } | Step::Replay { .. } | Step::DropGraph { .. } => {}
        }
        Ok(())
    }

    fn capture(&mut self, size: u64, stream: StreamHandle) -> Result<()> {
        self.pools += 1;
        let (gpu, pool) = (&self.gpu, PoolId(self.pools, 0));
        gpu.begin_pool(pool, stream)?;
        gpu.begin_capture(stream, CaptureMode::Global)?;
        if let Some(block) = unless_out_of_memory(gpu.malloc(size, DEVICE, stream))?.flatten() {
            gpu.launch(stream, &[], &[block], 50)?;
            gpu.free(block, DEVICE)?;
        }
        self.graphs.push((gpu.end_capture(stream)?, pool));
        gpu.end_pool(pool)
    }
}

proptest! {
    // A program that failed becomes a named test, not a seed in a file.
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_program_that_keeps_the_rules_meets_no_race(
        steps in prop::collection::vec(step(), 1..100),
        policy in prop_oneof![Just(Policy::Native), Just(Policy::Expandable), Just(Policy::Rallocator)],
    ) {
        let mut program = Program::new(policy);
        for (number, step) in steps.iter().enumerate() {
            // A full scan costs more than a step does.
            let scan = if number % SCAN_EVERY == 0 { program.gpu.check() } else { Ok(()) };
            if let Err(error) = scan.and_then(|()| program.run(step)) {
                panic!("step {number}, {step:?}: {error}");
            }
        }
        program.gpu.check().unwrap();
        program.gpu.close().unwrap();
    }
}
