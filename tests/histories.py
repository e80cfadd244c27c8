"""Small recorded histories, written by hand, and where the real ones are."""

from __future__ import annotations

import lzma
import pickle
from pathlib import Path
from typing import Any

import pytest

TRACES = Path(__file__).parent / "traces"

# Histories that others published: not part of this repository, but lent beside the checkout on some machines.
PUBLIC = Path(__file__).parents[2] / "shared" / "traces" / "public"
PUBLIC_NAMES = (
    "decomfl_from_empty",
    "gpt_medium_ctx128_train",
    "gpt_medium_ctx1024_train",
    "gpt_medium_ctx1024_inference",
)
needs_public_histories = pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"there is no {PUBLIC}")

MIB = 1 << 20
GIB = 1 << 30


def event(action: str, addr: int = 0, size: int = 512, time_us: int | None = 0, **more: Any) -> dict[str, Any]:
    """One entry of a trace; on the default stream unless `stream` says otherwise."""
    entry = {"action": action, "addr": addr, "size": size, "stream": 0, **more}
    if time_us is not None:
        entry["time_us"] = time_us
    return entry


def free(addr: int, size: int = 512, time_us: int | None = 0, **more: Any) -> list[dict[str, Any]]:
    """Both halves of a free that waits for nothing."""
    return [event(action, addr, size, time_us, **more) for action in ("free_requested", "free_completed")]


def segment(address: int, *blocks: tuple[int, str], device: int = 0, stream: int = 0, **more: Any) -> dict[str, Any]:
    """A final segment in the layout of torch 2.1 and later, with blocks given by size and state."""
    entries, at = [], address
    for size, state in blocks:
        entries.append({"address": at, "size": size, "requested_size": size, "state": state, "frames": []})
        at += size
    return {
        "device": device,
        "address": address,
        "total_size": at - address,
        "stream": stream,
        "segment_pool_id": (0, 0),
        "blocks": entries,
        **more,
    }


def write(path: Path, snapshot: object, protocol: int = 4) -> Path:
    """Write a snapshot as torch does and return the path."""
    path.write_bytes(pickle.dumps(snapshot, protocol=protocol))
    return path


def write_history(path: Path, events: list[dict[str, Any]], segments: list[dict[str, Any]] | None = None) -> Path:
    """Write the history of one device, in which each event is an object of its own, as torch's are."""
    return write(path, {"segments": segments or [], "device_traces": [[dict(entry) for entry in events]]})


def load(name: str) -> dict[str, Any]:
    """Load one of the real histories."""
    content = lzma.decompress((TRACES / f"{name}.pickle.xz").read_bytes())
    snapshot: dict[str, Any] = pickle.loads(content)  # noqa: S301 — our own file.
    return snapshot
