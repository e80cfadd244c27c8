//! The allocator on the simulated GPU, one behaviour a test.
//!
//! Every scenario ends with [`Rig::finish`]: free all, return all, and the device is empty.

mod broken_devices;
mod checkpoints;
mod failing_sources;
mod failures;
mod foreign_sources;
mod graphs;
mod guests;
mod history;
mod meddling;
mod memory;
mod moving;
mod pools_in_place;
mod processes;
mod ranges;
mod retired_streams;
mod rig;
mod sharing;
mod sources;
mod streams;
mod tracking;
