//! Properties of the allocator over generated programs on the simulated GPU.
//!
//! A program is a list of [`Operation`](operation::Operation)s on a small [`Machine`](machine::Machine). A
//! [`World`](world::World) runs it as a correct program would be written, with what the [`model`] knows, and after every
//! operation asks the allocator to scan its own state, the race oracle for its verdict, and the model for its figures.
//! Each program ends with the proof that nothing is left.
//!
//! The run is the same each time. `RALLOCATOR_SEED=N` makes it another one, `RALLOCATOR_PROGRAMS=N` a longer or shorter
//! one. What fails is shrunk, unless `RALLOCATOR_SHRINKS=0`, and becomes a scenario with a name (`tests/scenarios`) when its cause is mended; no file of
//! seeds is kept, since a seed means another program as soon as an operation is added.

mod coverage;
mod graphs;
mod machine;
mod memory;
mod model;
mod operation;
mod order;
mod pools;
mod properties;
mod runner;
mod sources;
mod streams;
mod threads;
mod world;
