//! A caching allocator for GPU memory, for any driver that does what [`driver::Driver`] says.
//!
//! Start at [`allocator::Allocator::malloc`]; the files follow one request in this order: `allocator` (locks), `device`
//! (the cached path), `cut` (which part of which free block), `ladder` (what is tried on a miss), `settle`, `backing`,
//! `release` (the plans of each rung), `execute` (their driver calls). What they stand on: `block`, `block_table`, `pool`, `pool_set`, `event`, `last_use`.

#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![cfg_attr(feature = "cuda", deny(unsafe_code))]

mod address_map;
pub mod allocator;
mod backing;
mod block;
mod block_table;
pub mod check;
pub mod checkpoint;
pub mod config;
mod cut;
mod device;
pub mod driver;
pub mod error;
mod event;
mod execute;
mod guest;
pub mod history;
pub mod id;
mod ladder;
mod last_use;
mod pin;
mod plan;
mod pool;
mod pool_set;
mod release;
#[cfg(feature = "sim")]
pub mod replay;
mod settle;
#[cfg(feature = "sim")]
pub mod simulated_gpu;
pub mod size;
pub mod snapshot;
pub mod source;
mod stale;
pub mod stats;
mod sync;
mod takeover;
mod thread;

pub use ladder::Rung;
