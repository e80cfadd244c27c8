//! What can go wrong for those who call the allocator, and what they can do next.

use std::fmt;

use crate::{
    config::Policy,
    driver::DriverError,
    id::{DeviceId, PoolId, StreamHandle},
    size::human,
    source::SourceError,
};

/// Why the allocator did not do what it was asked for. Apart from other threads' calls, its state is as before.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AllocError {
    /// There is not enough memory: free some, or ask for less. The text is the one that torch's users see.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The driver refused a call for another reason than a lack of memory: see its status.
    #[error("{0}")]
    Driver(#[from] DriverError),
    /// A private pool with an allocator of its own could not be served: see what failed.
    #[error("{0}")]
    Source(#[from] SourceError),
    /// A private pool's memory cannot be kept from moving: see why.
    #[error("{0}")]
    Move(#[from] MoveError),
    /// There is no such device: use one below `count`.
    #[error("{device} does not exist: the driver reports {count} device(s)")]
    NoSuchDevice {
        /// The device asked for.
        device: DeviceId,
        /// How many there are.
        count: u32,
    },
    /// A memory fraction is not a number from 0 to 1: give one that is.
    #[error("a memory fraction of {fraction} is not between 0 and 1")]
    InvalidFraction {
        /// The fraction asked for.
        fraction: f64,
    },
    /// A former call on this device panicked, so its state cannot be trusted: restart the process, and report the bug.
    #[error("the allocator's state of {device} is broken by an earlier internal error; restart the process")]
    Broken {
        /// The device whose state is broken. Others go on working.
        device: DeviceId,
    },
}

/// Why a private pool's memory is not kept from moving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// There is no such pool on the device: make it first, or name the device that it is on.
    #[error("{device} has no private pool ({}, {}): make it first, or name the device that it is on", pool.0, pool.1)]
    NoSuchPool {
        /// The pool asked for.
        pool: PoolId,
        /// The device.
        device: DeviceId,
    },
    /// Its memory may have moved already, or lie in several pieces: say it before the pool's first request.
    #[error("the private pool ({}, {}) has memory already: say it before the first request", pool.0, pool.1)]
    HasMemory {
        /// The pool.
        pool: PoolId,
    },
    /// Torch's rules for expandable segments build blocks of several handles: choose another policy.
    #[error("no pool is contiguous under policy:expandable: choose policy:rallocator or policy:native")]
    PolicyPutsTogether,
}

/// Memory that waits for a stream named by `record_stream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingBytes {
    /// The stream that is not done.
    pub stream: StreamHandle,
    /// The bytes that wait for it; a block that waits for several streams counts for each.
    pub bytes: u64,
}

/// The state of a device when a request failed. All sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The device that ran out.
    pub device: DeviceId,
    /// What the program asked for.
    pub requested: u64,
    /// The device's memory.
    pub total: u64,
    /// What the driver reports as free; `None` if it did not answer.
    pub device_free: Option<u64>,
    /// What this process may reserve; `None` without a limit.
    pub limit: Option<u64>,
    /// What is obtained from the driver.
    pub reserved: u64,
    /// What the program holds.
    pub allocated: u64,
    /// What was freed but waits for streams, by stream, largest first.
    pub pending: Vec<PendingBytes>,
    /// What was freed but waits for streams, each block once.
    pub pending_total: u64,
    /// What is free in the default pools.
    pub cached: u64,
    /// The largest free block in them.
    pub largest_cached: u64,
    /// What private pools (graphs, `MemPool`) have reserved.
    pub private: u64,
    /// The rules by which memory was obtained.
    pub policy: Policy,
    /// Whether the device can do virtual memory management.
    pub virtual_memory: bool,
    /// The private pool that the request was for, if an allocator of its own was asked and gave nothing.
    pub refused_by: Option<PoolId>,
    /// The addresses that are set aside for ranges, if the driver had none left for another one.
    pub addresses: Option<u64>,
}

/// From so many bytes on torch does not write a request's size out.
const EXBIBYTE: u64 = 1 << 60;

impl OutOfMemory {
    /// What is in use outside this allocator: other processes, contexts, libraries.
    fn elsewhere(&self) -> u64 {
        self.device_free.map_or(0, |free| self.total.saturating_sub(free).saturating_sub(self.reserved))
    }

    /// The one thing to try first; each is said only where its condition holds.
    fn remedy(&self) -> String {
        let asked = self.requested;
        let headroom = self.limit.map(|limit| limit.saturating_sub(self.reserved));
        if self.requested > self.total {
            "The request is larger than the device: ask for less.".to_owned()
        } else if headroom.is_some_and(|headroom| headroom < asked)
            && self.device_free.is_some_and(|free| free >= asked)
        {
            "The device has room, but this process has reached its limit: raise it with \
             torch.cuda.set_per_process_memory_fraction."
                .to_owned()
        } else if let Some(PoolId(first, second)) = self.refused_by {
            format!(
                "The allocator of the private pool ({first}, {second}) gave no memory, and no other serves that pool."
            )
        } else if let Some(addresses) = self.addresses {
            format!(
                "No addresses are left: other streams and private pools have set {} aside. Use fewer of them at a time, \
                 or set policy:native, which needs no more addresses than memory.",
                human(addresses)
            )
        } else if self.pending_total >= asked {
            "Freed memory waits for the streams above: wait for them, or free their tensors earlier.".to_owned()
        } else if self.cached >= asked && self.policy == Policy::Native && self.virtual_memory {
            "Enough memory is free, but in pieces: set policy:expandable, which joins them.".to_owned()
        } else if self.private >= asked {
            "Private pools hold enough: drop CUDA graphs or MemPools that are no longer used.".to_owned()
        } else if self.elsewhere() >= asked {
            "Other processes or libraries hold enough: see nvidia-smi.".to_owned()
        } else {
            "The program's own tensors fill the device: free some, or use smaller batches.".to_owned()
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // People's retry code matches the first sentence, so it is torch's to the letter.
        let tried = if self.requested < EXBIBYTE { human(self.requested) } else { "more than 1EB memory".to_owned() };
        write!(formatter, "CUDA out of memory. Tried to allocate {tried}. ")?;
        write!(formatter, "GPU {} has a total capacity of {}", self.device.0, human(self.total))?;
        match self.device_free {
            Some(free) => writeln!(formatter, " of which {} is free.", human(free))?,
            None => writeln!(formatter, ".")?,
        }
        writeln!(
            formatter,
            "This process has reserved {}: {} held by tensors, {} pending, {} cached (largest block {}), {} in private pools.",
            human(self.reserved),
            human(self.allocated),
            human(self.pending_total),
            human(self.cached),
            human(self.largest_cached),
            human(self.private),
        )?;
        if let Some(limit) = self.limit {
            writeln!(formatter, "It may reserve {}.", human(limit))?;
        }
        if self.elsewhere() > 0 {
            writeln!(formatter, "In use outside this allocator: {}.", human(self.elsewhere()))?;
        }
        for pending in self.pending.iter().take(3) {
            writeln!(formatter, "Pending on stream {:?}: {}.", pending.stream, human(pending.bytes))?;
        }
        formatter.write_str(&self.remedy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::GIB;

    fn report() -> OutOfMemory {
        OutOfMemory {
            device: DeviceId(0),
            requested: 20 * GIB,
            total: 80 * GIB,
            device_free: Some(GIB),
            limit: None,
            reserved: 78 * GIB,
            allocated: 70 * GIB,
            pending: Vec::new(),
            pending_total: 0,
            cached: 8 * GIB,
            largest_cached: 4 * GIB,
            private: 0,
            refused_by: None,
            addresses: None,
            policy: Policy::Expandable,
            virtual_memory: true,
        }
    }

    #[test]
    fn message_begins_as_torch_does_and_stays_within_eight_lines() {
        let mut report = report();
        report.limit = Some(79 * GIB);
        report.pending = (0..9).map(|stream| PendingBytes { stream: StreamHandle(stream), bytes: GIB }).collect();
        let text = report.to_string();
        assert!(
            text.starts_with(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 80.00 GiB"
            )
        );
        assert!(text.lines().count() <= 8, "{text}");
    }

    #[test]
    fn request_of_an_exbibyte_is_named_as_torch_names_it() {
        let text = |requested| OutOfMemory { requested, ..report() }.to_string();
        let begins =
            "CUDA out of memory. Tried to allocate more than 1EB memory. GPU 0 has a total capacity of 80.00 GiB";
        assert!(text(EXBIBYTE).starts_with(begins), "{}", text(EXBIBYTE));
        assert!(text(EXBIBYTE - 1).starts_with("CUDA out of memory. Tried to allocate 1073741824.00 GiB."));
    }

    #[test]
    fn remedy_is_named_only_where_its_condition_holds() {
        let remedy = |change: fn(&mut OutOfMemory)| {
            let mut report = report();
            change(&mut report);
            report.remedy()
        };
        assert!(remedy(|_| ()).contains("smaller batches"));
        assert!(remedy(|report| report.requested = 100 * GIB).contains("larger than the device"));
        assert!(remedy(|report| report.pending_total = 20 * GIB).contains("waits for the streams"));
        assert!(remedy(|report| report.private = 30 * GIB).contains("Private pools"));
        assert!(remedy(|report| report.reserved = 30 * GIB).contains("nvidia-smi"));
        assert!(!remedy(|report| report.cached = 30 * GIB).contains("policy:expandable"));
        let fragmented = |report: &mut OutOfMemory| {
            report.cached = 30 * GIB;
            report.policy = Policy::Native;
        };
        assert!(remedy(fragmented).contains("policy:expandable"));
        let scattered = |report: &mut OutOfMemory| {
            report.addresses = Some(90_000 * GIB);
            report.pending_total = 20 * GIB;
        };
        assert!(remedy(scattered).contains("90000.00 GiB aside"));
        let limited = |report: &mut OutOfMemory| {
            report.limit = Some(79 * GIB);
            report.device_free = Some(40 * GIB);
        };
        assert!(remedy(limited).contains("set_per_process_memory_fraction"));
    }
}
