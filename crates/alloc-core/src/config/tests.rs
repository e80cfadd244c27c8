//! What the text of settings means, and what is refused.

#![expect(clippy::float_cmp, reason = "what is read is the very number that was written")]

use proptest::prelude::*;

use super::setting::{INERT_KEYS, KEYS};
use super::*;
use crate::size::{GIB, MIB};

fn config(text: &str) -> Config {
    Config::parse(text).unwrap_or_else(|error| panic!("`{text}` was refused: {error}")).config
}

fn refusal(text: &str) -> String {
    Config::parse(text).expect_err(text).to_string()
}

#[test]
fn every_key_that_acts_is_read() {
    let text = "policy:native,max_split_size_mb:128,max_non_split_rounding_mb:64,garbage_collection_threshold:0.8,\
                roundup_power2_divisions:4,large_segment_size_mb:32,per_process_memory_fraction:0.5,peers:none,\
                history_limit:1000";
    let read = config(text);
    assert_eq!(read.policy, Policy::Native);
    assert_eq!(read.max_split_size, Some(128 << 20));
    assert_eq!(read.max_non_split_rounding, 64 << 20);
    assert_eq!(read.garbage_collection_threshold, 0.8);
    assert_eq!(read.roundup_power2_divisions.divisions_for(GIB), 4);
    assert_eq!(read.large_segment_size, 32 << 20);
    assert_eq!(read.per_process_memory_fraction, 0.5);
    assert_eq!(read.peers, Peers::None);
    assert_eq!(read.history_limit, 1000);
}

#[test]
fn an_empty_text_leaves_every_default() {
    assert_eq!(Config::parse(" \t\n").unwrap(), Parsed::default());
}

#[test]
fn white_space_and_one_trailing_comma_do_not_count() {
    let parsed = Config::parse(" peers : all ,\n roundup_power2_divisions:[ 256 : 1, > : 8, ], ").unwrap();
    assert_eq!(parsed.config.peers, Peers::All);
    let given: Vec<_> = parsed.given.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(given, [("peers", "all"), ("roundup_power2_divisions", "[256:1,>:8]")]);
}

#[test]
fn of_a_repeated_key_the_last_value_wins() {
    let parsed = Config::parse("peers:all,history_limit:5,peers:none").unwrap();
    assert_eq!(parsed.config.peers, Peers::None);
    let given = [("history_limit", "5"), ("peers", "none")].map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(parsed.given, given);
}

#[test]
fn malformed_texts_are_refused_with_the_place() {
    for (text, message) in [
        (",peers:all", "setting 1 is empty: there is a comma too many"),
        ("peers:all,,history_limit:1", "setting 2 is empty: there is a comma too many"),
        (",", "setting 1 is empty: there is a comma too many"),
        ("peers", "`peers` is not a setting: write key:value"),
        ("peers:", "`peers:` is not a setting: write key:value"),
        (":all", "`:all` is not a setting: write key:value"),
        ("history_limit=5", "`history_limit=5` is not a setting: write key:value"),
        ("peers:all:none", "peers: `all:none` is neither one value nor a list like [256:1,512:2,>:8]"),
        ("peers:all]", "peers: `all]` is neither one value nor a list like [256:1,512:2,>:8]"),
        ("peers:[a:1,b:2", "peers: `[a:1,b:2` is neither one value nor a list like [256:1,512:2,>:8]"),
        ("peers:[[a:1]]", "peers: `[[a:1]]` is neither one value nor a list like [256:1,512:2,>:8]"),
        ("peers:[a]", "peers: `[a]` is neither one value nor a list like [256:1,512:2,>:8]"),
        ("peers:[a:1,,b:2]", "peers: `[a:1,,b:2]` is neither one value nor a list like [256:1,512:2,>:8]"),
    ] {
        assert_eq!(refusal(text), message);
    }
}

#[test]
fn unknown_keys_are_refused_with_the_likely_one() {
    assert_eq!(refusal("polices:native"), "unknown setting `polices`: did you mean `policy`?");
    assert_eq!(refusal("max_split_size:1"), "unknown setting `max_split_size`: did you mean `max_split_size_mb`?");
    assert_eq!(refusal("colour:[a:1]"), "unknown setting `colour`");
}

#[test]
fn values_out_of_range_are_refused_with_the_range() {
    let sizes = "a whole number of MiB from 20 to 1099511627776";
    for (key, value, expected) in [
        ("policy", "torch", "native or expandable or rallocator"),
        ("policy", "Native", "native or expandable or rallocator"),
        ("policy", "[a:1]", "native or expandable or rallocator"),
        ("max_split_size_mb", "19", sizes),
        ("max_split_size_mb", "-1", sizes),
        ("max_split_size_mb", "+20", sizes),
        ("max_split_size_mb", "20.5", sizes),
        ("max_split_size_mb", "1099511627777", sizes),
        ("max_split_size_mb", "99999999999999999999999", sizes),
        ("max_non_split_rounding_mb", "19", sizes),
        ("large_segment_size_mb", "10", "a whole number of MiB from 11 to 1099511627776"),
        ("garbage_collection_threshold", "0", "a number between 0 and 1, both excluded"),
        ("garbage_collection_threshold", "1.0", "a number between 0 and 1, both excluded"),
        ("garbage_collection_threshold", "nan", "a number between 0 and 1, both excluded"),
        ("per_process_memory_fraction", "1.01", "a number from 0 to 1"),
        ("per_process_memory_fraction", "-0.5", "a number from 0 to 1"),
        ("per_process_memory_fraction", ".", "a number from 0 to 1"),
        ("peers", "some", "used or all or none"),
        ("history_limit", "100000001", "a number of events from 0 to 100000000"),
        ("backend", "malloc", "native"),
        ("expandable_segments", "true", "True or False"),
    ] {
        let text = format!("{key}:{value}");
        assert_eq!(refusal(&text), format!("{text} is not accepted: {key} takes {expected}"));
    }
}

#[test]
fn both_ends_of_a_closed_range_are_accepted() {
    assert_eq!(config("per_process_memory_fraction:0").per_process_memory_fraction, 0.0);
    assert_eq!(config("per_process_memory_fraction:1").per_process_memory_fraction, 1.0);
    assert_eq!(config("max_split_size_mb:20").max_split_size, Some(20 << 20));
    assert_eq!(config("max_split_size_mb:1099511627776").max_split_size, Some(1 << 60));
    assert_eq!(config("large_segment_size_mb:11").large_segment_size, 11 << 20);
}

#[test]
fn sizes_that_depend_on_the_large_segment_do_so_in_any_order() {
    for text in ["max_split_size_mb:32,large_segment_size_mb:64", "large_segment_size_mb:64,max_split_size_mb:32"] {
        let expected = "a whole number of MiB from 64 to 1099511627776";
        assert_eq!(refusal(text), format!("max_split_size_mb:32 is not accepted: max_split_size_mb takes {expected}"));
    }
    assert_eq!(config("large_segment_size_mb:64").max_non_split_rounding, 64 << 20);
    assert_eq!(config("max_non_split_rounding_mb:15,large_segment_size_mb:12").max_non_split_rounding, 15 << 20);
}

#[test]
fn another_backend_is_refused_with_the_remedy_and_the_native_one_is_this_one() {
    assert_eq!(Config::parse("backend:cudaMallocAsync"), Err(ConfigError::OtherBackend));
    assert!(refusal("backend:cudaMallocAsync").contains("unset it"));
    let parsed = Config::parse("backend:native").unwrap();
    assert_eq!((parsed.config, parsed.inert), (Config::default(), vec![]));
}

#[test]
fn expandable_segments_never_changes_the_policy() {
    for (text, policy, inert) in [
        ("expandable_segments:True", Policy::Rallocator, vec![]),
        ("expandable_segments:False", Policy::Rallocator, vec!["expandable_segments".to_owned()]),
        ("expandable_segments:False,expandable_segments:True", Policy::Rallocator, vec![]),
        ("policy:native,expandable_segments:True", Policy::Native, vec![]),
    ] {
        let parsed = Config::parse(text).unwrap();
        assert_eq!((parsed.config.policy, parsed.inert), (policy, inert), "{text}");
    }
}

#[test]
fn keys_that_cannot_apply_are_named_and_change_nothing() {
    for key in INERT_KEYS {
        for value in ["True", "[small:0.25,other:10G]", "[]"] {
            let parsed = Config::parse(&format!("{key}:{value}")).unwrap();
            assert_eq!(parsed.config, Config::default());
            assert_eq!(parsed.given, [(key.to_owned(), value.to_owned())]);
            assert_eq!(parsed.inert, [key]);
        }
    }
}

#[test]
fn a_misspelt_key_is_told_the_right_one_whichever_it_is() {
    for key in KEYS.iter().chain(&INERT_KEYS) {
        let misspelt = format!("{key}x");
        assert!(refusal(&format!("{misspelt}:1")).ends_with(&format!("did you mean `{key}`?")), "{key}");
    }
}

#[test]
fn one_number_of_divisions_holds_for_every_size() {
    let table = config("roundup_power2_divisions:8").roundup_power2_divisions;
    for size in [1, 512, MIB, GIB, 1 << 45, u64::MAX] {
        assert_eq!(table.divisions_for(size), 8);
    }
}

#[test]
fn intervals_begin_at_powers_of_two_of_a_mib() {
    let table = config("roundup_power2_divisions:[1:2,2:4,4:8,>:16]").roundup_power2_divisions;
    for (size, divisions) in
        [(1, 2), (MIB, 2), (2 * MIB - 1, 2), (2 * MIB, 4), (4 * MIB - 1, 4), (4 * MIB, 8), (8 * MIB, 16), (1 << 45, 16)]
    {
        assert_eq!(table.divisions_for(size), divisions, "{size} bytes");
    }
}

#[test]
fn intervals_that_a_list_skips_take_the_divisions_of_the_one_below() {
    // J5 of the users' cases: torch leaves the 2 MiB and 8 MiB intervals of this list unrounded.
    let table = config("roundup_power2_divisions:[1:1,4:2,16:4]").roundup_power2_divisions;
    let divisions: Vec<u64> = table.intervals().map(|(_, divisions)| divisions).collect();
    assert_eq!(divisions, [1, 1, 2, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn sizes_below_the_first_listed_take_its_divisions() {
    let table = config("roundup_power2_divisions:[256:1,512:2,>:8]").roundup_power2_divisions;
    let divisions: Vec<_> = table.intervals().collect();
    assert_eq!(divisions[0], (1, 1));
    assert_eq!(divisions[8..11], [(256, 1), (512, 2), (1024, 8)]);
    assert_eq!(divisions[15], (32768, 8));
}

#[test]
fn a_list_of_only_the_rest_holds_for_every_size() {
    assert_eq!(config("roundup_power2_divisions:[>:1]"), config("roundup_power2_divisions:1"));
    assert_eq!(config("roundup_power2_divisions:[>:0]"), Config::default());
    assert_eq!(config("roundup_power2_divisions:[32768:4,>:8]"), config("roundup_power2_divisions:4"));
}

#[test]
fn divisions_and_sizes_that_are_no_powers_of_two_are_refused() {
    for value in [
        "0",
        "3",
        "-1",
        "two",
        "[256:3]",
        "[100:2]",
        "[0:2]",
        "[65536:2]",
        "[512:1,256:1]",
        "[256:1,256:1]",
        "[>:1,256:2]",
        "[>:1,>:2]",
        "[]",
    ] {
        let error = Config::parse(&format!("roundup_power2_divisions:{value}")).expect_err(value);
        assert!(matches!(error, ConfigError::InvalidValue { key: "roundup_power2_divisions", .. }), "{value}");
    }
}

#[test]
fn settings_describe_themselves_in_words() {
    let words = Config::default().describe();
    let words: Vec<_> = words.iter().map(|(key, value)| (*key, value.as_str())).collect();
    assert_eq!(
        words,
        [
            ("policy", "rallocator"),
            ("max_split_size_mb", "unlimited"),
            ("max_non_split_rounding_mb", "20"),
            ("garbage_collection_threshold", "off"),
            ("roundup_power2_divisions", "off"),
            ("large_segment_size_mb", "20"),
            ("per_process_memory_fraction", "1"),
            ("peers", "used"),
            ("cross_stream_reuse", "owned"),
            ("move", "on"),
            ("history_limit", "0"),
        ]
    );
}

/// Any settings that a text can bring about.
fn any_config() -> impl Strategy<Value = Config> {
    let divisions = || prop_oneof![Just(0_u64), (0..=20_u32).prop_map(|power| 1 << power)];
    let table = proptest::collection::vec(divisions(), Roundup::INTERVALS);
    let table = table.prop_map(|divisions| Roundup::from_intervals(divisions.try_into().expect("16 intervals")));
    let large_segment_size_mib = 11..200_u64;
    (
        proptest::sample::select(Policy::ALL),
        (
            proptest::sample::select(Peers::ALL),
            proptest::sample::select(CrossStreamReuse::ALL),
            proptest::sample::select(Move::ALL),
        ),
        large_segment_size_mib,
        proptest::option::of(0..(1_u64 << 39)),
        proptest::option::of(0..(1_u64 << 39)),
        prop_oneof![Just(0.0), 1e-9..1.0],
        prop_oneof![Just(1.0), 0.0..=1.0],
        table,
        0..100_000_000_usize,
    )
        .prop_map(|(policy, sharing, large, split, rounding, threshold, fraction, table, history_limit)| Config {
            policy,
            max_split_size: split.map(|above| (large + above) * MIB),
            max_non_split_rounding: (large + rounding.unwrap_or(0)) * MIB,
            garbage_collection_threshold: threshold,
            roundup_power2_divisions: table,
            large_segment_size: large * MIB,
            per_process_memory_fraction: fraction,
            peers: sharing.0,
            cross_stream_reuse: sharing.1,
            moving: sharing.2,
            history_limit,
        })
}

proptest! {
    #[test]
    fn settings_survive_being_written_and_read(config in any_config()) {
        let text = config.to_string();
        prop_assert_eq!(Config::parse(&text).map(|parsed| parsed.config), Ok(config), "{}", text);
    }

    #[test]
    fn what_was_given_reads_as_the_same_settings(config in any_config()) {
        let parsed = Config::parse(&config.to_string()).unwrap();
        let given: Vec<String> = parsed.given.iter().map(|(key, value)| format!("{key}:{value}")).collect();
        prop_assert_eq!(Config::parse(&given.join(",")), Ok(parsed));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in any::<String>()) {
        let _answer = Config::parse(&text);
    }

    #[test]
    fn no_text_that_is_nearly_right_makes_the_parser_panic(
        parts in proptest::collection::vec(
            proptest::sample::select(&[
                ":", ",", "[", "]", ">", " ", "-", "0", "1", "64", "0.5", "18446744073709551616", "native", "True",
                "policy:", "roundup_power2_divisions:", "max_split_size_mb:", "garbage_collection_threshold:",
                "large_segment_size_mb:", "history_limit:", "backend:",
            ][..]),
            0..24,
        ),
    ) {
        let _answer = Config::parse(&parts.concat());
    }
}
