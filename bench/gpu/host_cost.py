"""What an allocate + free pair costs the host through torch, on one allocator.

usage: python -m bench.gpu.host_cost KIND --extension DIR [--json OUT]

DIR holds the module that `rawbench_build.py` builds. To compare allocators, run them figure by figure in turn
(`turns.py` does), each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType

from bench.gpu.kinds import Kind, install
from bench.gpu.machine import describe
from bench.gpu.turns import Turn

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One figure: nanoseconds for one pair (`threads`: for one pair on one of the threads)."""

    kind: str
    measure: str
    nanoseconds: float


Measure = Callable[[], float]
"""Nanoseconds for a pair."""


def raw_measures(kind: Kind, rawbench: ModuleType) -> Iterator[tuple[str, Measure]]:
    """Pairs through torch's C++ interface, with no Python and no tensor between."""
    is_async = kind is Kind.ASYNC  # Ten times slower a pair, so fewer of them.
    pairs, replacements = (5000, 3000) if is_async else (20000, 20000)
    sizes = {"512 B": 512, "4 KiB": 4 * KIB, "1 MiB": MIB, "2 MiB": 2 * MIB, "64 MiB": 64 * MIB}
    for label, size in sizes.items():
        yield f"hot pair {label}", partial(rawbench.pair_ns, size, pairs)
    yield "replacement, 1k live up to 8 MiB", partial(rawbench.churn_ns, 1000, replacements, 8 * MIB)
    yield "replacement, 10k live up to 1 MiB", partial(rawbench.churn_ns, 10000, replacements, MIB)
    for threads in (1, 4, 16):
        name = f"4 KiB pair, {threads} thread{'s' if threads > 1 else ''}"
        yield name, partial(rawbench.threads_ns, threads, 4 * KIB, 5000)


def tensor_measures() -> Iterator[tuple[str, Measure]]:
    """Pairs as a Python program makes them: `torch.empty` and the end of the tensor's life."""
    import torch

    names = {"torch": torch, "device": torch.device("cuda"), "side_stream": torch.cuda.Stream()}

    def median_ns(statement: str, pairs: int, rounds: int) -> float:
        timer = timeit.Timer(statement, setup="torch.cuda.synchronize()", globals=names)
        timer.timeit(2000)
        return statistics.median(timer.repeat(rounds, pairs)) / pairs * 1e9

    # The first obtains no memory: what of the others hardly any allocator can save.
    for label, size in (("0 B", 0), ("1 KiB", KIB), ("4 MiB", 4 * MIB)):
        statement = f"torch.empty({size}, device=device, dtype=torch.uint8)"
        yield f"torch.empty {label}", partial(median_ns, statement, pairs=10000, rounds=7)
    recorded = f"torch.empty({MIB}, device=device, dtype=torch.uint8).record_stream(side_stream)"
    yield "torch.empty 1 MiB + record_stream", partial(median_ns, recorded, pairs=2000, rounds=5)


@contextmanager
def on_one_core(is_wanted: bool) -> Iterator[None]:
    """Keep this thread on the last core, where others that take turns with it measure too: cores differ in speed."""
    allowed = os.sched_getaffinity(0)
    if is_wanted:
        os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure what an allocate + free pair costs the host.")
    parser.add_argument("kind", type=Kind, choices=list(Kind), metavar="KIND", help=", ".join(Kind))
    parser.add_argument("--extension", type=Path, required=True, help="the folder that rawbench_build.py built into")
    parser.add_argument("--json", type=Path, default=None, help="write the raw rows to this file")
    parser.add_argument("--turn-fds", type=int, nargs=2, default=None, help=argparse.SUPPRESS)  # From turns.py.
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, print a line for each figure, write the JSON."""
    options = parse_arguments()
    install(options.kind)

    import torch

    sys.path.insert(0, str(options.extension))
    import rawbench  # type: ignore[import-not-found]

    torch.cuda.init()
    torch.empty(1, device="cuda")
    turn = None if options.turn_fds is None else Turn(*options.turn_fds)
    if turn is not None:
        turn.take()
    rows = []
    for name, measure in chain(raw_measures(options.kind, rawbench), tensor_measures()):
        with on_one_core(turn is not None and "thread" not in name):
            rows.append(Row(options.kind.value, name, measure()))
        print(f"{options.kind.value:20s} {name:36s} {rows[-1].nanoseconds:9.0f} ns", flush=True)
        if turn is not None:
            turn.pass_on()
    if options.json is not None:
        document = {
            "schema": 1,
            "bench": "host_cost",
            "kind": options.kind.value,
            "command": " ".join(["python -m bench.gpu.host_cost", *sys.argv[1:]]),
            "machine": describe(),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
