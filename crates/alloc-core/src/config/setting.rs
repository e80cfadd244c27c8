//! The settings one by one: their keys, their ranges, their words.

use super::error::ConfigError;
use super::grammar::{self, Value};
use super::roundup::{Roundup, whole_number};
use super::{Config, CrossStreamReuse, Move, Parsed, Peers, Policy};
use crate::size::MIB;

const POLICY: &str = "policy";
const MAX_SPLIT_SIZE: &str = "max_split_size_mb";
const MAX_NON_SPLIT_ROUNDING: &str = "max_non_split_rounding_mb";
const GARBAGE_COLLECTION_THRESHOLD: &str = "garbage_collection_threshold";
const ROUNDUP_POWER2_DIVISIONS: &str = "roundup_power2_divisions";
const LARGE_SEGMENT_SIZE: &str = "large_segment_size_mb";
const PER_PROCESS_MEMORY_FRACTION: &str = "per_process_memory_fraction";
const PEERS: &str = "peers";
const CROSS_STREAM_REUSE: &str = "cross_stream_reuse";
const MOVE: &str = "move";
const HISTORY_LIMIT: &str = "history_limit";
const BACKEND: &str = "backend";
const EXPANDABLE_SEGMENTS: &str = "expandable_segments";

/// The keys that act, or that ask for what holds anyway.
pub(super) const KEYS: [&str; 13] = [
    POLICY,
    MAX_SPLIT_SIZE,
    MAX_NON_SPLIT_ROUNDING,
    GARBAGE_COLLECTION_THRESHOLD,
    ROUNDUP_POWER2_DIVISIONS,
    LARGE_SEGMENT_SIZE,
    PER_PROCESS_MEMORY_FRACTION,
    PEERS,
    CROSS_STREAM_REUSE,
    MOVE,
    HISTORY_LIMIT,
    BACKEND,
    EXPANDABLE_SEGMENTS,
];

/// Keys of torch 2.9 to 2.15 that change nothing here: they steer pinned host memory, which stays torch's own, or parts
/// of its CUDA allocator that this one has in another form. Whether their values are right is for torch to judge.
pub(super) const INERT_KEYS: [&str; 14] = [
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
];

/// What torch gives requests of 1 to 10 MiB: 20 MiB segments.
pub(super) const DEFAULT_LARGE_SEGMENT_SIZE: u64 = 20 * MIB;
/// A segment must be larger than the largest request that is cut from it, which is 10 MiB.
const MIN_LARGE_SEGMENT_SIZE: u64 = 11 * MIB;
/// Above any device's memory, and low enough that sums with it never overflow.
const MAX_SIZE: u64 = 1 << 60;
/// Some ten GiB of host memory: more history than a viewer opens.
const MAX_HISTORY_LIMIT: u64 = 100_000_000;

/// See [`Config::parse`].
pub(super) fn parse(text: &str) -> Result<Parsed, ConfigError> {
    let text = grammar::without_white_space(text);
    let mut given: Vec<(&str, Value<'_>)> = Vec::new();
    for (key, value) in grammar::settings(&text)? {
        given.retain(|(earlier, _)| *earlier != key);
        given.push((key, value));
    }
    let mut config = Config::default();
    // The one key on which the range of others depends is read first, wherever it stands.
    if let Some((key, value)) = given.iter().find(|(key, _)| *key == LARGE_SEGMENT_SIZE) {
        config.set(key, value)?;
        config.max_non_split_rounding = config.large_segment_size;
    }
    for (key, value) in &given {
        config.set(key, value)?;
    }
    let inert = given.iter().filter(|(key, value)| is_inert(key, value)).map(|(key, _)| (*key).to_owned()).collect();
    let given = given.iter().map(|(key, value)| ((*key).to_owned(), value.to_string())).collect();
    Ok(Parsed { config, given, inert })
}

/// Whether a valid setting asks for something that it will not get.
fn is_inert(key: &str, value: &Value<'_>) -> bool {
    // `True` asks for what the default policy does anyway. `False` does not choose the policy: that is `policy:native`.
    INERT_KEYS.contains(&key) || (key == EXPANDABLE_SEGMENTS && *value == Value::Word("False"))
}

/// See [`Config::describe`].
pub(super) fn describe(config: &Config) -> Vec<(&'static str, String)> {
    let mib = |bytes: u64| (bytes / MIB).to_string();
    let threshold = config.garbage_collection_threshold;
    vec![
        (POLICY, config.policy.to_string()),
        (MAX_SPLIT_SIZE, config.max_split_size.map_or("unlimited".to_owned(), mib)),
        (MAX_NON_SPLIT_ROUNDING, mib(config.max_non_split_rounding)),
        (GARBAGE_COLLECTION_THRESHOLD, if threshold == 0.0 { "off".to_owned() } else { threshold.to_string() }),
        (ROUNDUP_POWER2_DIVISIONS, config.roundup_power2_divisions.to_string()),
        (LARGE_SEGMENT_SIZE, mib(config.large_segment_size)),
        (PER_PROCESS_MEMORY_FRACTION, config.per_process_memory_fraction.to_string()),
        (PEERS, config.peers.to_string()),
        (CROSS_STREAM_REUSE, config.cross_stream_reuse.to_string()),
        (MOVE, config.moving.to_string()),
        (HISTORY_LIMIT, config.history_limit.to_string()),
    ]
}

impl Config {
    /// Puts one setting in force.
    fn set(&mut self, key: &str, value: &Value<'_>) -> Result<(), ConfigError> {
        match key {
            POLICY => self.policy = choice(POLICY, value, Policy::ALL, Policy::name)?,
            MAX_SPLIT_SIZE => self.max_split_size = Some(size(MAX_SPLIT_SIZE, value, self.large_segment_size)?),
            MAX_NON_SPLIT_ROUNDING => {
                self.max_non_split_rounding = size(MAX_NON_SPLIT_ROUNDING, value, self.large_segment_size)?;
            }
            GARBAGE_COLLECTION_THRESHOLD => {
                let number = decimal(value).filter(|&number| number > 0.0 && number < 1.0);
                self.garbage_collection_threshold =
                    accept(GARBAGE_COLLECTION_THRESHOLD, value, number, "a number between 0 and 1, both excluded")?;
            }
            ROUNDUP_POWER2_DIVISIONS => {
                let table = Roundup::from_value(value);
                self.roundup_power2_divisions = accept(ROUNDUP_POWER2_DIVISIONS, value, table, Roundup::EXPECTED)?;
            }
            LARGE_SEGMENT_SIZE => self.large_segment_size = size(LARGE_SEGMENT_SIZE, value, MIN_LARGE_SEGMENT_SIZE)?,
            PER_PROCESS_MEMORY_FRACTION => {
                let number = decimal(value).filter(|&number| number <= 1.0);
                self.per_process_memory_fraction =
                    accept(PER_PROCESS_MEMORY_FRACTION, value, number, "a number from 0 to 1")?;
            }
            PEERS => self.peers = choice(PEERS, value, Peers::ALL, Peers::name)?,
            CROSS_STREAM_REUSE => {
                self.cross_stream_reuse =
                    choice(CROSS_STREAM_REUSE, value, CrossStreamReuse::ALL, CrossStreamReuse::name)?;
            }
            MOVE => self.moving = choice(MOVE, value, Move::ALL, Move::name)?,
            HISTORY_LIMIT => {
                let limit = whole_number_in(value, 0, MAX_HISTORY_LIMIT).map(|limit| limit as usize);
                let expected = format!("a number of events from 0 to {MAX_HISTORY_LIMIT}");
                self.history_limit = accept(HISTORY_LIMIT, value, limit, &expected)?;
            }
            BACKEND if *value == Value::Word("cudaMallocAsync") => return Err(ConfigError::OtherBackend),
            BACKEND => choice(BACKEND, value, &["native"], |name| name).map(drop)?,
            EXPANDABLE_SEGMENTS => choice(EXPANDABLE_SEGMENTS, value, &["True", "False"], |name| name).map(drop)?,
            inert if INERT_KEYS.contains(&inert) => {}
            unknown => return Err(ConfigError::UnknownKey { key: unknown.to_owned(), nearest: nearest_key(unknown) }),
        }
        Ok(())
    }
}

fn accept<T>(key: &'static str, value: &Value<'_>, read: Option<T>, expected: &str) -> Result<T, ConfigError> {
    read.ok_or_else(|| ConfigError::InvalidValue { key, value: value.to_string(), expected: expected.to_owned() })
}

fn choice<T: Copy>(
    key: &'static str,
    value: &Value<'_>,
    choices: &[T],
    name: impl Fn(T) -> &'static str,
) -> Result<T, ConfigError> {
    let chosen = choices.iter().copied().find(|&choice| *value == Value::Word(name(choice)));
    let names: Vec<_> = choices.iter().copied().map(name).collect();
    accept(key, value, chosen, &names.join(" or "))
}

/// A size in bytes, at least `minimum` bytes, from a number of MiB.
fn size(key: &'static str, value: &Value<'_>, minimum: u64) -> Result<u64, ConfigError> {
    let (minimum, maximum) = (minimum / MIB, MAX_SIZE / MIB);
    let expected = format!("a whole number of MiB from {minimum} to {maximum}");
    accept(key, value, whole_number_in(value, minimum, maximum), &expected).map(|size_mib| size_mib * MIB)
}

fn whole_number_in(value: &Value<'_>, minimum: u64, maximum: u64) -> Option<u64> {
    let Value::Word(word) = value else { return None };
    whole_number(word).filter(|number| (minimum..=maximum).contains(number))
}

/// A number written in digits and at most one point: no sign, no exponent, no infinity.
fn decimal(value: &Value<'_>) -> Option<f64> {
    let Value::Word(word) = value else { return None };
    let is_plain = word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    is_plain.then(|| word.parse().ok()).flatten()
}

/// The known key most like `key`, if one is alike enough to be what was meant.
fn nearest_key(key: &str) -> Option<&'static str> {
    /// Two of three letters right: a slip or a forgotten `_mb`, not another word.
    const ALIKE: f64 = 0.66;
    let likeness = |known: &str| strsim::normalized_levenshtein(key, known);
    let known = KEYS.iter().chain(&INERT_KEYS).copied();
    let nearest = known.max_by(|first, second| likeness(first).total_cmp(&likeness(second)))?;
    (likeness(nearest) >= ALIKE).then_some(nearest)
}
