"""Settings: the `Config` that programs write, and which of several sources decides.

The text of settings is read by the core alone (`_core.parse_config`), so that Python and Rust never disagree.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, Literal

from rallocator import _core
from rallocator.errors import ConfigError

OWN_VARIABLE = "RALLOCATOR_CONF"
TORCH_CUDA_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
TORCH_VARIABLE = "PYTORCH_ALLOC_CONF"
NO_CACHING_VARIABLE = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""What has torch's own allocator pass every request on to the driver, as tools that check memory need it."""

_TORCH_VARIABLES = (TORCH_CUDA_VARIABLE, TORCH_VARIABLE)

HOST_PREFIX = "pinned_"
"""How the settings of torch's allocator for pinned host memory begin. That one stays in use, and reads them itself."""

_CALL = "enable()"
_DEFAULT = "default"
# The settings that torch does not have, and refuses in its variables.
_OWN_KEYS = frozenset({"policy", "cross_stream_reuse", "move", "peers", "history_limit"})
# The policies under which a setting acts, if not under all.
_ONLY_UNDER = {
    "garbage_collection_threshold": ("native",),
    "large_segment_size_mb": ("native", "expandable"),
    "cross_stream_reuse": ("rallocator",),
    "move": ("rallocator",),
    "peers": ("expandable", "rallocator"),
}
# The first torch whose CUDA allocator reads PYTORCH_ALLOC_CONF.
_FIRST_TORCH_WITH_GENERIC_VARIABLE = (2, 10)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings, each of which may be left to the environment.

    A field that is None says nothing: the variables `RALLOCATOR_CONF` and then torch's decide about it, and if they
    say nothing either, the default holds. All fields have the same name in the variables, as in
    `RALLOCATOR_CONF="policy:native,max_split_size_mb:128"`.

    Raises:
        ConfigError: a value is out of its range. The message names the field and the range.
    """

    policy: Literal["native", "expandable", "rallocator"] | None = None
    """By which rules memory is obtained from the driver: "native" cuts blocks from segments as torch does by default,
    "expandable" grows address ranges as torch does with `expandable_segments:True`, and "rallocator" also moves idle
    memory to the addresses where it is needed. A device that cannot map memory at addresses of choice uses "native".
    Default: "rallocator". Torch has no such setting, and its `expandable_segments` does not set this."""

    max_split_size_mb: int | None = None
    """In MiB: larger blocks are not split, and serve only requests of about their size. At least
    `large_segment_size_mb`. Default: unlimited. Torch: the same name."""

    max_non_split_rounding_mb: int | None = None
    """In MiB: by how much a block above `max_split_size_mb` may exceed the request that it serves. At least
    `large_segment_size_mb`. Default: equal to it. Torch: the same name."""

    garbage_collection_threshold: float | None = None
    """A fraction of the memory limit, between 0 and 1, both excluded: above it, cached segments that went unused
    longest are given back before new memory is obtained. Policy "native" only. Default: off. Torch: the same name."""

    roundup_power2_divisions: int | str | None = None
    """Into how many steps each power of two is divided; sizes are rounded up to the next step. A power of two, up to
    1048576, for all sizes, or as text a list of sizes in MiB with the divisions from there on, "[256:1,512:2,>:8]".
    Default: off, so that sizes are rounded up to 512 bytes only. Torch: the same name, but powers of two that a list
    skips are not rounded there, and take the divisions of the next smaller one listed here."""

    large_segment_size_mb: int | None = None
    """In MiB, above 10: the memory obtained at once for requests of 1 to 10 MiB. Policies "native" and "expandable"
    only. Default: 20. Torch: the same name, from 2.11."""

    per_process_memory_fraction: float | None = None
    """From 0 to 1: how much of each device's memory may be reserved. Contexts and other libraries do not count.
    Default: 1. Torch: the same name, from 2.10, and `torch.cuda.set_per_process_memory_fraction`."""

    peers: Literal["used", "all", "none"] | None = None
    """Which other devices may reach memory under the policies "expandable" and "rallocator": those that the process
    uses, all that the hardware lets, or none. Default: "used". Torch has no such setting."""

    cross_stream_reuse: Literal["done", "owned", "all"] | None = None
    """Whether a stream may be made to wait for another, on the GPU, to get memory that the other used last, when the
    alternative is to reserve more than the program needs: "done" never does, "owned" for streams that ask for memory
    themselves but not for those that only `record_stream` names, "all" for every stream. Streams that a program keeps
    apart on purpose, as those of two communicators, may deadlock if one waits for the other. Policy "rallocator" only.
    Default: "owned". Torch has no such setting."""

    move: Literal["on", "off", "contiguous"] | None = None
    """Whether physical memory may change its address: what another library registered, with a network card or a
    communicator, is the physical memory. "off" leaves it where it is until it goes back to the driver; "contiguous"
    also puts no block together from several pieces of physical memory. Both take more memory than "on". Policy
    "rallocator" only. Default: "on". Torch has no such setting."""

    history_limit: int | None = None
    """How many of the latest events a snapshot holds; 0 records none. Default: 0. Torch has no such setting; its
    `torch.cuda.memory._record_memory_history(max_entries=…)` is the like."""

    def __post_init__(self) -> None:
        """Refuse what the core would refuse."""
        written = self._written()
        # A comma inside a value would begin another setting.
        if dict(_core.parse_config(str(self)).given) != written:
            raise ConfigError(f"each field takes one value, without a comma of its own: {written}")

    def __str__(self) -> str:
        """The settings as text that `parse` reads."""
        return _join(self._written())

    @staticmethod
    def parse(text: str) -> Config:
        """Read settings from text.

        Arguments:
            text: `key:value,key:value`, as in torch's `PYTORCH_CUDA_ALLOC_CONF`. White space does not count; of a
                repeated key the last value wins. Keys of torch's that change nothing here are dropped, with one
                `UserWarning` that names them.

        Returns:
            The settings that the text gives; all other fields are None.

        Raises:
            ConfigError: the text is malformed, or a key is unknown, or a value out of range.
        """
        parsed = _core.parse_config(text)
        warn_of_inert(parsed.inert, stacklevel=3)
        return _from_given(dict(parsed.given))

    @staticmethod
    def from_env() -> Config:
        """Read the settings that the environment gives.

        Returns:
            `RALLOCATOR_CONF`'s settings, and torch's for what it does not give. All other fields are None.

        Raises:
            ConfigError: a variable is wrong. The message names it.
        """
        given = _read_all(None, os.environ, None)
        parsed = _parse_together(given)
        warn_of_inert([key for key in parsed.inert if not _is_for_host(given[key])], stacklevel=3)
        return _from_given({key: setting.value for key, setting in given.items()})

    def _written(self) -> dict[str, str]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: _write(value) for name, value in values if value is not None}


@dataclass(frozen=True)
class Setting:
    """One setting and who decided about it."""

    key: str
    """Its name in the variables."""
    value: str
    """Its value in words, for instance "128" or "unlimited"."""
    source: str
    """The variable that gave it, "enable()", or "default"."""


@dataclass(frozen=True)
class ResolvedConfig:
    """The settings in force, from all sources together."""

    text: str
    """All that differs from the defaults, as the core reads it: equal texts are equal settings."""
    settings: tuple[Setting, ...]
    """Every setting that acts, in a fixed order."""
    inert: tuple[Setting, ...]
    """Settings of torch's that were given but change nothing here."""
    host: tuple[Setting, ...]
    """Settings in torch's variables that torch's own allocator for pinned host memory reads from there."""


def resolve(
    config: Config | str | None,
    *,
    environ: Mapping[str, str] | None = None,
    torch_version: str | None = None,
    warn: bool = True,
) -> ResolvedConfig:
    """Merge all sources of settings, key by key.

    Arguments:
        config: what the program says, which counts most. Then `RALLOCATOR_CONF`, then torch's variables.
        environ: the environment variables; None for the process's.
        torch_version: decides which of its variables torch would read; None for the torch that is installed.
        warn: whether to warn, once in a process for each key, of settings that change nothing, and of memory that is
            cached although torch was asked not to.

    Returns:
        The settings in force and where each came from.

    Raises:
        ConfigError: a source is wrong, or sources contradict each other. The message names the source.
    """
    environ = os.environ if environ is None else environ
    given = _read_all(config, environ, torch_version)
    parsed = _parse_together(given)
    host = [key for key in parsed.inert if _is_for_host(given[key])]
    inert = [key for key in parsed.inert if key not in host]
    if warn:
        warn_of_inert(inert, stacklevel=4)
        _warn_of_combinations(dict(parsed.effective), given.keys(), stacklevel=4)
        _warn_of_caching(environ, stacklevel=4)
    return ResolvedConfig(
        text=parsed.text,
        settings=tuple(
            Setting(key, value, given[key].source if key in given else _DEFAULT) for key, value in parsed.effective
        ),
        inert=tuple(given[key] for key in inert),
        host=tuple(given[key] for key in host),
    )


def caching_note(environ: Mapping[str, str]) -> str | None:
    """What to say to somebody who asks torch not to cache memory; None if nobody does.

    Arguments:
        environ: the environment variables.
    """
    if environ.get(NO_CACHING_VARIABLE, "0") in ("", "0"):
        return None
    return (
        f"{NO_CACHING_VARIABLE} has no effect under rallocator, which caches memory all the same. For what needs it, "
        "as compute-sanitizer does, do not enable rallocator in that run."
    )


def _read_all(config: Config | str | None, environ: Mapping[str, str], torch_version: str | None) -> dict[str, Setting]:
    """All that was given, each key from the source that counts most."""
    given: dict[str, Setting] = {}
    for source, text in _torch_text(environ, torch_version):
        given |= _read(source, text)
    given |= _read(OWN_VARIABLE, environ.get(OWN_VARIABLE, ""))
    return given | _read(_CALL, "" if config is None else str(config))


def _parse_together(given: Mapping[str, Setting]) -> _core.ParsedConfig:
    """What settings from several sources say together: one may have narrowed the range of another."""
    try:
        return _core.parse_config(_join({key: setting.value for key, setting in given.items()}))
    except ConfigError as error:
        sources = sorted({setting.source for setting in given.values()})
        raise ConfigError(f"{' and '.join(sources)} together: {error}") from None


def _read(source: str, text: str) -> dict[str, Setting]:
    """The settings of one source."""
    try:
        parsed = _core.parse_config(text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    given = {key: Setting(key, value, source) for key, value in parsed.given}
    if source in _TORCH_VARIABLES and (own := sorted(_OWN_KEYS & given.keys())):
        raise ConfigError(f"{source}: torch has no setting {own[0]}; put it into {OWN_VARIABLE}")
    return given


def _is_for_host(setting: Setting) -> bool:
    """Whether torch's allocator for pinned host memory reads this setting: it looks into torch's variables only."""
    return setting.key.startswith(HOST_PREFIX) and setting.source in _TORCH_VARIABLES


def _torch_text(environ: Mapping[str, str], torch_version: str | None) -> list[tuple[str, str]]:
    """The variable that torch reads, if any, and its text."""
    # One that is set but empty counts too: torch then does not look at the other.
    if TORCH_CUDA_VARIABLE in environ:
        return [(TORCH_CUDA_VARIABLE, environ[TORCH_CUDA_VARIABLE])]
    if TORCH_VARIABLE in environ and _reads_generic_variable(torch_version or _installed_torch()):
        return [(TORCH_VARIABLE, environ[TORCH_VARIABLE])]
    return []


def _reads_generic_variable(torch_version: str | None) -> bool:
    release = re.match(r"(\d+)\.(\d+)", torch_version or "")
    return release is None or (int(release[1]), int(release[2])) >= _FIRST_TORCH_WITH_GENERIC_VARIABLE


def _installed_torch() -> str | None:
    """The version of torch, without importing it."""
    if (version := getattr(sys.modules.get("torch"), "__version__", None)) is not None:
        return str(version)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _from_given(given: Mapping[str, str]) -> Config:
    """A `Config` of those settings that it has a field for."""
    values: dict[str, Any] = {}
    for field in fields(Config):
        if (text := given.get(field.name)) is not None:
            values[field.name] = _read_value(text)
    return Config(**values)


def _read_value(text: str) -> int | float | str:
    """A value as a person would write it in Python. What it may be, the core has checked."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def _write(value: object) -> str:
    # Neither Python's `1e-05` nor `True` is a number in the grammar; the core refuses the latter.
    return f"{Decimal(str(value)):f}" if isinstance(value, float) else "".join(str(value).split())


def _join(settings: Mapping[str, str]) -> str:
    return ",".join(f"{key}:{value}" for key, value in settings.items())


_warned: set[str] = set()


def warn_of_inert(keys: list[str], stacklevel: int) -> None:
    """Name settings that change nothing, each once in a process."""
    if news := [key for key in keys if key not in _warned]:
        _warned.update(news)
        text = f"rallocator does not use these settings of torch's, which change nothing: {', '.join(news)}."
        if "expandable_segments" in news:
            text += " To choose torch's default rules, set policy:native in RALLOCATOR_CONF."
        if any(key.startswith(HOST_PREFIX) for key in news):
            text += (
                f" Put {HOST_PREFIX}* into {TORCH_CUDA_VARIABLE}: torch's allocator for pinned memory reads it there."
            )
        warnings.warn(text, UserWarning, stacklevel=stacklevel)


def _warn_of_caching(environ: Mapping[str, str], stacklevel: int) -> None:
    """Say once in a process that memory is cached although the environment asks torch not to."""
    if NO_CACHING_VARIABLE not in _warned and (note := caching_note(environ)):
        _warned.add(NO_CACHING_VARIABLE)
        warnings.warn(note, UserWarning, stacklevel=stacklevel)


def _warn_of_combinations(effective: Mapping[str, str], given: Collection[str], stacklevel: int) -> None:
    """Name settings that change nothing under the policy in force, each once in a process."""
    policy = effective["policy"]
    for key, policies in _ONLY_UNDER.items():
        if key in given and policy not in policies and key not in _warned:
            _warned.add(key)
            text = f"{key} changes nothing under policy:{policy}, only under {' and '.join(policies)}."
            warnings.warn(text, UserWarning, stacklevel=stacklevel)
