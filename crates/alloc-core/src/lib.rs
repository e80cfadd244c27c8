//! A caching allocator for GPU memory.

#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![cfg_attr(feature = "cuda", deny(unsafe_code))]

pub mod config;
pub mod driver;
pub mod id;
