"""How histories are to be replayed, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rallocator import _core
from rallocator._replay.container import DEFAULT_LIMIT_BYTES
from rallocator._replay.history import Streams
from rallocator._sizes import parse_size
from rallocator.errors import ConfigError

POLICIES = ("native", "expandable", "rallocator")
"""The policies that a history can be replayed under."""

DEFAULT_LAG_MS = 20.0
"""How long after it was queued work is taken to end: a training step's worth of kernels in front of the GPU."""

DECIDED_ELSEWHERE = frozenset({"policy", "per_process_memory_fraction", "history_limit", "peers"})
"""Settings that are the replay's own business: the policy is named for each, and a budget is its memory limit."""

MAX_LAG_MS = 1e9
"""The longest lag that is accepted, about eleven days."""

DEFAULT_HANDLE_BYTES = 2 << 20
"""What sizes of physical handles are multiples of on every GPU so far."""

HANDLE_RANGE = (64 << 10, 1 << 30)
"""The smallest and the largest such size that is accepted."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How histories are replayed, checked."""

    policies: tuple[str, ...]
    budget_bytes: int | None
    config: str
    streams: Streams
    lag_us: int
    without_effect: tuple[str, ...]
    """Keys of `config` that a replay does not look at."""
    handle_bytes: int = DEFAULT_HANDLE_BYTES
    minimum: bool = False
    """Whether each policy's smallest budget is looked for."""
    max_size_bytes: int = DEFAULT_LIMIT_BYTES

    @staticmethod
    def check(
        policies: Sequence[str],
        budget: int | str | None = None,
        config: str | None = None,
        streams: str = "keep",
        lag_ms: float = DEFAULT_LAG_MS,
        *,
        handle_size: int | str | None = None,
        minimum: bool = False,
        max_size: int | str | None = None,
    ) -> ReplaySettings:
        """Check what a user asked for; see `replay` for the arguments and errors."""
        names = [policies] if isinstance(policies, str) else list(policies)
        unknown = [name for name in names if name not in POLICIES]
        if unknown or not names:
            named = repr(unknown[0]) if unknown else "none"
            raise ConfigError(f"policy {named} cannot be replayed; choose from {', '.join(POLICIES)}")
        if streams not in {choice.value for choice in Streams}:
            raise ConfigError(f"streams is keep or merge, not {streams!r}")
        if not (math.isfinite(lag_ms) and 0 <= lag_ms <= MAX_LAG_MS):
            raise ConfigError(f"the lag is between 0 and {MAX_LAG_MS:.0f} ms, not {lag_ms}")
        parsed = _core.parse_config(config or "")
        without_effect = (*parsed.inert, *(key for key, _ in parsed.given if key in DECIDED_ELSEWHERE))
        return ReplaySettings(
            tuple(dict.fromkeys(names)),
            _size("budget", budget),
            config or "",
            Streams(streams),
            round(lag_ms * 1000),
            without_effect,
            _handle_bytes(handle_size),
            minimum,
            _size("max-size", max_size) or DEFAULT_LIMIT_BYTES,
        )


def _size(what: str, size: int | str | None) -> int | None:
    try:
        return None if size is None else parse_size(size)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error


def _handle_bytes(size: int | str | None) -> int:
    handle_bytes = _size("handle-size", size)
    if handle_bytes is None:
        return DEFAULT_HANDLE_BYTES
    smallest, largest = HANDLE_RANGE
    if handle_bytes.bit_count() != 1 or not smallest <= handle_bytes <= largest:
        raise ConfigError(f"handle-size: a power of two between 64 KiB and 1 GiB, not {handle_bytes} bytes")
    return handle_bytes
