"""Settings: what each source says, which one decides, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallocator import _config
from rallocator._config import Config, ResolvedConfig, Setting, resolve
from rallocator.errors import ConfigError

EVERY_FIELD = Config(
    policy="native",
    max_split_size_mb=128,
    max_non_split_rounding_mb=64,
    garbage_collection_threshold=0.8,
    roundup_power2_divisions="[256:1,512:2,>:8]",
    large_segment_size_mb=32,
    per_process_memory_fraction=0.5,
    peers="none",
    cross_stream_reuse="all",
    move="contiguous",
    history_limit=1000,
)
EVERY_FIELD_AS_TEXT = (
    "policy:native,max_split_size_mb:128,max_non_split_rounding_mb:64,garbage_collection_threshold:0.8,"
    "roundup_power2_divisions:[256:1,512:2,>:8],large_segment_size_mb:32,per_process_memory_fraction:0.5,peers:none,"
    "cross_stream_reuse:all,move:contiguous,history_limit:1000"
)


@pytest.fixture(autouse=True)
def _nothing_warned_of_and_no_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_config, "_warned", set())
    for variable in ("RALLOCATOR_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    return iter(())


def test_every_field_is_written_and_read() -> None:
    assert str(EVERY_FIELD) == EVERY_FIELD_AS_TEXT
    assert Config.parse(EVERY_FIELD_AS_TEXT) == EVERY_FIELD


def test_an_empty_text_says_nothing() -> None:
    assert Config.parse("") == Config()
    assert str(Config()) == ""


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EVERY_FIELD.peers = "all"  # type: ignore[misc]


def test_every_field_that_the_core_has_is_a_field_here() -> None:
    assert [field.name for field in dataclasses.fields(Config)] == [setting.key for setting in resolve(None).settings]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("policy", "torch", "native or expandable or rallocator"),
        ("policy", "native,peers:all", "without a comma of its own"),
        ("max_split_size_mb", 19, "a whole number of MiB from 20"),
        ("max_split_size_mb", 20.5, "a whole number of MiB from 20"),
        ("max_split_size_mb", True, "a whole number of MiB from 20"),
        ("max_split_size_mb", -1, "a whole number of MiB from 20"),
        ("garbage_collection_threshold", 1.0, "between 0 and 1, both excluded"),
        ("garbage_collection_threshold", float("nan"), "between 0 and 1, both excluded"),
        ("per_process_memory_fraction", 1.5, "from 0 to 1"),
        ("roundup_power2_divisions", 3, "a power of two up to 1048576, or a list"),
        ("peers", "some", "used or all or none"),
        ("cross_stream_reuse", "never", "done or owned or all"),
        ("move", "never", "on or off or contiguous"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_field_and_the_range(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refusal:
        Config(**{field: value})  # type: ignore[arg-type]
    assert field in str(refusal.value)


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"unknown setting `polices`: did you mean `policy`\?"):
        Config.parse("polices:native")


def test_small_fractions_and_white_space_are_written_as_the_grammar_wants_them() -> None:
    assert str(Config(garbage_collection_threshold=1e-7)) == "garbage_collection_threshold:0.0000001"
    assert str(Config(roundup_power2_divisions="[256:1, >:8]")) == "roundup_power2_divisions:[256:1,>:8]"


@given(st.floats(0, 1, exclude_min=True, exclude_max=True, width=64))
def test_fractions_survive_being_written_and_read(fraction: float) -> None:
    config = Config(garbage_collection_threshold=fraction, per_process_memory_fraction=fraction)
    assert Config.parse(str(config)) == config


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = Config.parse(text)
        except ConfigError:
            return
    assert Config.parse(str(config)) == config


def resolved(
    config: Config | str | None = None, environ: Mapping[str, str] | None = None, torch: str = "2.15.0"
) -> ResolvedConfig:
    return resolve(config, environ=environ or {}, torch_version=torch)


def sources(settings: ResolvedConfig) -> dict[str, tuple[str, str]]:
    """The settings that are not defaults: key to value and source."""
    return {
        setting.key: (setting.value, setting.source) for setting in settings.settings if setting.source != "default"
    }


def test_without_any_source_the_defaults_hold() -> None:
    settings = resolved()
    assert settings.text == ""
    assert {setting.key: setting.value for setting in settings.settings} == {
        "policy": "rallocator",
        "max_split_size_mb": "unlimited",
        "max_non_split_rounding_mb": "20",
        "garbage_collection_threshold": "off",
        "roundup_power2_divisions": "off",
        "large_segment_size_mb": "20",
        "per_process_memory_fraction": "1",
        "peers": "used",
        "cross_stream_reuse": "owned",
        "move": "on",
        "history_limit": "0",
    }
    assert {setting.source for setting in settings.settings} == {"default"}


def test_key_by_key_the_call_beats_our_variable_and_that_beats_torchs() -> None:
    settings = resolved(
        Config(max_split_size_mb=100),
        {
            "RALLOCATOR_CONF": "max_split_size_mb:200,max_non_split_rounding_mb:21",
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:300,max_non_split_rounding_mb:31,roundup_power2_divisions:4",
        },
    )
    assert sources(settings) == {
        "max_split_size_mb": ("100", "enable()"),
        "max_non_split_rounding_mb": ("21", "RALLOCATOR_CONF"),
        "roundup_power2_divisions": ("4", "PYTORCH_CUDA_ALLOC_CONF"),
    }


def test_the_call_takes_text_too() -> None:
    assert sources(resolved("peers: all,")) == {"peers": ("all", "enable()")}


def test_equal_settings_are_equal_texts_however_they_were_given() -> None:
    one = resolved(Config(policy="expandable", peers="all"))
    other = resolved("peers:all", {"RALLOCATOR_CONF": "history_limit:0,policy:expandable"})
    assert one.text == other.text == "policy:expandable,peers:all"


CUDA_GENERIC = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:30", "PYTORCH_ALLOC_CONF": "max_split_size_mb:40"}


@pytest.mark.parametrize(
    ("environ", "torch", "source"),
    [
        (CUDA_GENERIC, "2.9.1", "PYTORCH_CUDA_ALLOC_CONF"),
        (CUDA_GENERIC, "2.10.0+cu130", "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:40"}, "2.9.1", None),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:40"}, "2.10.0a0+git1234", "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:40"}, "3.0.0", "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:40"}, "built from source", "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:40", "PYTORCH_CUDA_ALLOC_CONF": ""}, "2.15.0", None),
    ],
)
def test_of_torchs_variables_the_one_that_torch_reads_counts(
    environ: Mapping[str, str], torch: str, source: str | None
) -> None:
    by = sources(resolved(environ=environ, torch=torch))
    assert by.get("max_split_size_mb", (None, None))[1] == source


def test_the_version_of_torch_is_known_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.9.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert sources(resolve(None, environ={"PYTORCH_ALLOC_CONF": "max_split_size_mb:40"})) == {}


def test_without_torch_its_newest_rules_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    settings = resolve(None, environ={"PYTORCH_ALLOC_CONF": "max_split_size_mb:40"})
    assert sources(settings) == {"max_split_size_mb": ("40", "PYTORCH_ALLOC_CONF")}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RALLOCATOR_CONF": "peers"}, "RALLOCATOR_CONF: `peers` is not a setting: write key:value"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:b"}, "PYTORCH_CUDA_ALLOC_CONF: unknown setting `a`"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "PYTORCH_ALLOC_CONF: .* unset it to use rallocator"),
        ({"PYTORCH_ALLOC_CONF": "policy:native"}, "torch has no setting policy; put it into RALLOCATOR_CONF"),
        (
            {"RALLOCATOR_CONF": "max_split_size_mb:32", "PYTORCH_ALLOC_CONF": "large_segment_size_mb:64"},
            "PYTORCH_ALLOC_CONF and RALLOCATOR_CONF together: max_split_size_mb:32 is not accepted: .* from 64",
        ),
    ],
)
def test_a_wrong_variable_is_refused_by_name(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(environ=environ)


def test_settings_that_change_nothing_are_named_once() -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "graph_capture_record_stream_reuse:True,throw_on_cudamalloc_oom:True"}
    named = r"change nothing: graph_capture_record_stream_reuse, throw_on_cudamalloc_oom\.$"
    with pytest.warns(UserWarning, match=named):
        settings = resolved(environ=environ)
    assert [(setting.key, setting.value, setting.source) for setting in settings.inert] == [
        ("graph_capture_record_stream_reuse", "True", "PYTORCH_CUDA_ALLOC_CONF"),
        ("throw_on_cudamalloc_oom", "True", "PYTORCH_CUDA_ALLOC_CONF"),
    ]
    # Warnings are errors here: a second one would fail.
    resolved(environ=environ)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_of_pinned_memory_are_torchs_own_where_torch_reads_them(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {variable: "pinned_use_cuda_host_register:True,max_split_size_mb:64"}
    # Warnings are errors here.
    settings = resolved(environ=environ)
    assert settings.host == (Setting("pinned_use_cuda_host_register", "True", variable),)
    assert settings.inert == ()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(importlib.metadata, "version", {"torch": "2.15.0"}.__getitem__)
    assert Config.from_env() == Config(max_split_size_mb=64)


def test_settings_of_pinned_memory_change_nothing_where_torch_does_not_look() -> None:
    environ = {"RALLOCATOR_CONF": "pinned_num_register_threads:8"}
    with pytest.warns(UserWarning, match=r"pinned_num_register_threads\. Put pinned_\* into PYTORCH_CUDA_ALLOC_CONF"):
        settings = resolved(environ=environ)
    assert settings.host == ()
    assert [setting.key for setting in settings.inert] == ["pinned_num_register_threads"]


def test_memory_is_cached_whatever_torch_was_asked_and_that_is_said_once() -> None:
    environ = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with pytest.warns(
        UserWarning, match="has no effect under rallocator.* do not enable rallocator in that run"
    ) as seen:
        resolved(environ=environ)
    assert len(seen) == 1
    # Warnings are errors here: a second one would fail.
    resolved(environ=environ)
    for off in ("0", ""):
        assert _config.caching_note({"PYTORCH_NO_CUDA_MEMORY_CACHING": off}) is None


def test_expandable_segments_never_sets_the_policy_and_false_says_what_would() -> None:
    settings = resolved(environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert (settings.text, settings.inert) == ("", ())
    with pytest.warns(UserWarning, match="set policy:native in RALLOCATOR_CONF"):
        settings = resolved(environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})
    assert settings.text == ""


@pytest.mark.parametrize(
    ("policy", "setting", "acts_under"),
    [
        ("expandable", "garbage_collection_threshold:0.8", "native"),
        ("native", "cross_stream_reuse:all", "rallocator"),
        ("expandable", "move:off", "rallocator"),
        ("native", "peers:all", "expandable and rallocator"),
        ("rallocator", "large_segment_size_mb:32", "native and expandable"),
    ],
)
def test_settings_that_change_nothing_under_the_policy_are_named_once(
    policy: str, setting: str, acts_under: str
) -> None:
    text = f"policy:{policy},{setting}"
    with pytest.warns(UserWarning, match=f"changes nothing under policy:{policy}, only under {acts_under}"):
        resolve(text, environ={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(text, environ={})
        resolve(f"policy:{acts_under.rpartition(' ')[2]},{setting}", environ={})


def test_a_resolver_that_only_looks_does_not_warn() -> None:
    settings = resolve(None, environ={"PYTORCH_CUDA_ALLOC_CONF": "throw_on_cudamalloc_oom:True"}, warn=False)
    assert [setting.key for setting in settings.inert] == ["throw_on_cudamalloc_oom"]


def test_from_env_gives_what_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLOCATOR_CONF", "policy:native,roundup_power2_divisions:[>:0]")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.6,expandable_segments:True")
    assert Config.from_env() == Config(
        policy="native", roundup_power2_divisions="[>:0]", garbage_collection_threshold=0.6
    )


def test_a_warning_points_at_the_line_that_asked() -> None:
    with pytest.warns(UserWarning, match="change nothing") as caught:
        Config.parse("pinned_free_catch_all:True")
    assert caught[0].filename == __file__
