//! Settings: what they are, what they are when nobody says otherwise, and how they are read from text.
//!
//! The text is torch's (`PYTORCH_CUDA_ALLOC_CONF`), so that a user's variable works as it stands, with a few keys of our
//! own. This module reads text that it is given; which variables exist, and which of them wins, is Python's business.
//!
//! ```
//! use alloc_core::config::{Config, Policy};
//!
//! let parsed = Config::parse("policy:native, max_split_size_mb:128")?;
//! assert_eq!(parsed.config.policy, Policy::Native);
//! assert_eq!(parsed.config.max_split_size, Some(128 << 20));
//! # Ok::<(), alloc_core::config::ConfigError>(())
//! ```

mod error;
mod grammar;
mod roundup;
mod setting;
#[cfg(test)]
mod tests;

use std::fmt;

pub use error::ConfigError;
pub use roundup::Roundup;

macro_rules! named_choice {
    ($(#[$doc:meta])* $choice:ident { $($(#[$variant_doc:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
        pub enum $choice { $($(#[$variant_doc])* $variant,)* }

        impl $choice {
            /// Every choice, in the order in which messages list them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name in settings.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The choice of that name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|choice| choice.name() == name)
            }
        }

        impl fmt::Display for $choice {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(self.name())
            }
        }
    };
}

named_choice! {
    /// By which rules memory is obtained from the driver and handed out.
    Policy {
        /// Torch's default rules: blocks are cut from segments, each one driver allocation.
        Native = "native",
        /// Torch's rules for expandable segments: address ranges that grow. A device without virtual memory management
        /// gets [`Native`](Self::Native) instead, as with [`Rallocator`](Self::Rallocator).
        Expandable = "expandable",
        /// Our own: address ranges that grow, and whole idle handles that move to where they are needed.
        #[default]
        Rallocator = "rallocator",
    }
}

named_choice! {
    /// Which other devices may read and write what is mapped on a device.
    Peers {
        /// Those that this process has used.
        #[default]
        Used = "used",
        /// All that the hardware lets.
        All = "all",
        /// None.
        None = "none",
    }
}

named_choice! {
    /// Whether a stream may be made to wait for another, on the GPU, to get memory that the other used last. Two streams
    /// that a program keeps apart on purpose, as those of two communicators, may deadlock if they are tied together.
    CrossStreamReuse {
        /// Never: memory goes from stream to stream only when its last use is known to be over.
        Done = "done",
        /// For streams that the program asks for memory on, not for those that only `record_stream` named.
        #[default]
        Owned = "owned",
        /// For every stream.
        All = "all",
    }
}

named_choice! {
    /// Whether physical memory may change its address. What another library registered, with a network card or a
    /// communicator, is the physical memory. Each choice forbids what the one before it forbids, and more.
    #[derive(PartialOrd, Ord)]
    Move {
        /// Whole idle handles go to where memory is needed.
        #[default]
        On = "on",
        /// Memory stays at its address until it goes back to the driver.
        Off = "off",
        /// As `Off`, and every block lies in one handle: nothing is put together from several.
        Contiguous = "contiguous",
    }
}

/// The settings of one allocator, validated.
///
/// Sizes are in bytes. All that [`parse`](Self::parse) returns are whole MiB, and at most 2⁶⁰ bytes, so that a setting
/// plus the size of a request never overflows.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `policy`: the rules. Default: rallocator.
    pub policy: Policy,
    /// `max_split_size_mb`: larger blocks are not split, and serve only requests of about their size.
    /// At least `large_segment_size`. Default: `None`, no limit.
    pub max_split_size: Option<u64>,
    /// `max_non_split_rounding_mb`: by how much a block above `max_split_size` may exceed the request that it serves.
    /// At least `large_segment_size`, and by default equal to it.
    pub max_non_split_rounding: u64,
    /// `garbage_collection_threshold`: above this fraction of the memory limit, cached segments that went unused longest
    /// are returned before new memory is obtained; policy native only. Between 0 and 1, both excluded. Default: 0, off.
    pub garbage_collection_threshold: f64,
    /// `roundup_power2_divisions`: how coarsely sizes are rounded up. Default: not at all beyond 512 bytes.
    pub roundup_power2_divisions: Roundup,
    /// `large_segment_size_mb`: the segment, or handle, from which requests of 1 to 10 MiB are cut. Above 10 MiB.
    /// Acts under `policy:native` and `policy:expandable` only. Default: 20 MiB.
    pub large_segment_size: u64,
    /// `per_process_memory_fraction`: how much of a device's memory may be reserved, from 0 to 1. Default: 1, all.
    /// What is not reserved by an allocator (contexts, other libraries) does not count towards it.
    pub per_process_memory_fraction: f64,
    /// `peers`: who may reach mapped memory from another device. Default: devices in use.
    pub peers: Peers,
    /// `cross_stream_reuse`: whether streams may wait for each other on the GPU for the sake of memory. Default: those
    /// that ask for memory. Acts under `policy:rallocator` only.
    pub cross_stream_reuse: CrossStreamReuse,
    /// `move`: whether physical memory may change its address. Default: on. Acts under `policy:rallocator` only.
    pub moving: Move,
    /// `history_limit`: how many of the latest events are kept for snapshots. Default: 0, which keeps none.
    pub history_limit: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            max_split_size: None,
            max_non_split_rounding: setting::DEFAULT_LARGE_SEGMENT_SIZE,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: Roundup::default(),
            large_segment_size: setting::DEFAULT_LARGE_SEGMENT_SIZE,
            per_process_memory_fraction: 1.0,
            peers: Peers::default(),
            cross_stream_reuse: CrossStreamReuse::default(),
            moving: Move::default(),
            history_limit: 0,
        }
    }
}

/// What a text said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed {
    /// The settings in force.
    pub config: Config,
    /// Each key that was given, once, with the value that counts (its last), without white space. Inert keys too.
    pub given: Vec<(String, String)>,
    /// The given keys of torch's that are accepted but change nothing here: worth one warning.
    pub inert: Vec<String>,
}

impl Config {
    /// Reads settings written as `key:value,key:value`.
    ///
    /// The grammar is torch's: white space does not count, an empty text and one trailing comma are fine, a list stands
    /// in brackets, of a repeated key the last value wins. Numbers are read more strictly than torch reads them.
    ///
    /// # Errors
    ///
    /// The first thing wrong with the text, with the key and what would have been accepted.
    pub fn parse(text: &str) -> Result<Parsed, ConfigError> {
        setting::parse(text)
    }

    /// Every setting and its effective value in words, for people: `("max_split_size_mb", "unlimited")`.
    pub fn describe(&self) -> Vec<(&'static str, String)> {
        setting::describe(self)
    }
}

/// The text that [`Config::parse`] reads back as the same settings: those that differ from the defaults.
impl fmt::Display for Config {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self { max_non_split_rounding: self.large_segment_size, ..Self::default() }.describe();
        let changed = self.describe().into_iter().zip(default).filter(|(own, default)| own != default);
        let entries: Vec<String> = changed.map(|((key, value), _)| format!("{key}:{value}")).collect();
        formatter.write_str(&entries.join(","))
    }
}
