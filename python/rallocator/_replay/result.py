"""`rallocator.replay` and what it returns."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rallocator._replay.advice import Advice, advise
from rallocator._replay.notebook import result_as_html
from rallocator._replay.row import ReplayRow
from rallocator._replay.runner import Subject, replay_subjects, subjects
from rallocator._replay.settings import DEFAULT_LAG_MS, POLICIES, ReplaySettings


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found out. In a notebook it shows itself as a table."""

    rows: tuple[ReplayRow, ...]
    """The devices of the file in order, and for each the policies in the order that was asked for."""
    subjects: tuple[Subject, ...] = field(default=(), compare=False, repr=False)
    """What was replayed."""

    @property
    def replayable(self) -> bool:
        """Whether the file holds a history of one device at least."""
        return any(row.replayable for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether each device's history runs to its end, without a failed allocation, under one of the policies.

        False where no device has a history, since then nothing shows it: `replayable` tells the two apart.
        """
        replayable = {row.device for row in self.rows if row.replayable}
        return self.replayable and replayable <= {row.device for row in self.rows if row.ooms == 0}

    def row(self, policy: str, device: int | None = None) -> ReplayRow:
        """Return the figures under one policy.

        Arguments:
            policy: which.
            device: its index in the recording; None for the only one there is.

        Raises:
            KeyError: there is no such row, or more than one.
        """
        found = [row for row in self.rows if row.policy == policy and device in {None, row.device}]
        if len(found) != 1:
            place = "" if device is None else f", device {device}"
            raise KeyError(f"{len(found)} rows of policy {policy}{place}")
        return found[0]

    @functools.cached_property
    def advice(self) -> Mapping[int, tuple[Advice, ...]]:
        """What is to be said about each device's history, each finding borne out by a replay of its own.

        Worked out when it is first asked for.
        """
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            found = list(pool.map(self._advise, self.subjects))
        return {subject.history.device: advice for subject, advice in zip(self.subjects, found, strict=True)}

    def _advise(self, subject: Subject) -> tuple[Advice, ...]:
        return advise(subject, [row for row in self.rows if row.device == subject.history.device])

    def without_steps(self) -> ReplayResult:
        """Return the same without what was replayed, of which many results may have much; the advice is worked out."""
        result = ReplayResult(self.rows)
        result.__dict__["advice"] = self.advice
        return result

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rows, with the advice about each device, as `rallocator replay --json` prints them."""
        advice = {device: [one.to_json() for one in found] for device, found in self.advice.items()}
        return [{**row.to_json(), "advice": advice.get(row.device, [])} for row in self.rows]

    def _repr_html_(self) -> str:
        return result_as_html(self.rows, self.advice)


def replay_file(path: str | os.PathLike[str], settings: ReplaySettings, *, keep_frames: bool = False) -> ReplayResult:
    """Replay a file as the settings say; see `replay`.

    Arguments:
        path: the file.
        settings: how.
        keep_frames: whether to keep the stacks that a snapshot has.
    """
    found = tuple(subjects(path, settings, keep_frames=keep_frames))
    return ReplayResult(tuple(replay_subjects(found)), found)


def replay(
    path: str | os.PathLike[str],
    policies: Sequence[str] = POLICIES,
    budget: int | str | None = None,
    *,
    config: str | None = None,
    streams: str = "keep",
    lag_ms: float = DEFAULT_LAG_MS,
    handle_size: int | str | None = None,
    minimum: bool = False,
    max_size: int | str | None = None,
) -> ReplayResult:
    """Replay a recorded history on a simulated GPU, with the allocator's own code.

    Only the recorded allocations and frees count, not what torch's allocator did to serve them. Blocks that are older
    than the recording are placed first; under "native", if that is what was recorded, where they lay, with the memory
    that was cached beside them. Needs no GPU and no torch.

    Arguments:
        path: a memory snapshot of torch (`torch.cuda.memory._dump_snapshot`), a Chrome trace of its profiler with
            `[memory]` events, or a log of RMM's `LoggingResourceAdaptor`; plain, gzip or xz.
        policies: the policies to replay under: "native" (torch's default rules), "expandable" (torch's rules for
            expandable segments), "rallocator" (our own, the default).
        budget: bytes that may be reserved, as a number or as text such as "24GiB"; what goes beyond is out of memory.
            Like torch's own limit, "expandable" may exceed it by less than a handle of 20 MiB. None: as much as it
            takes. Allocations that failed in the recording are tried only under a budget.
        config: more settings, in the grammar of `PYTORCH_CUDA_ALLOC_CONF`; its policy does not count.
        streams: "keep" the recorded streams, or "merge" them into one.
        lag_ms: milliseconds after it was queued that work is taken to end. A block that another stream used too is
            reusable from the recorded completion of its free on, whatever the lag.
        handle_size: what sizes of physical handles are multiples of on the simulated GPU, a power of two. None: 2 MiB,
            as on real ones. Policy "native" uses no handles.
        minimum: whether to look for each policy's `minimum_budget` too, by some fifteen more replays.
        max_size: unpacked bytes after which a file is refused, so that a small one cannot fill the memory. None: 4 GiB.

    Returns:
        A row of figures for each device of the file under each policy, and advice. A file that holds a state but no
        history gives rows with `replayable` False and the reason, and what the state tells by itself; it does not fit.

    Raises:
        SnapshotError: the file is unreadable, damaged, or of no known kind.
        ConfigError: a policy, budget, setting or option that there is not.
    """
    settings = ReplaySettings.check(
        policies,
        budget,
        config,
        streams,
        lag_ms,
        handle_size=handle_size,
        minimum=minimum,
        max_size=max_size,
    )
    return replay_file(path, settings)
