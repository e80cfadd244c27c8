"""What an allocate + free pair costs the host through torch, on one allocator.

usage: python -m bench.gpu.host_cost KIND --extension DIR [--json OUT]

DIR holds the module that `rawbench.py` builds. Run kinds in turn and compare ratios taken in one session.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import timeit
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from bench.gpu.kinds import Kind, install
from bench.gpu.machine import describe

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One figure: nanoseconds for one pair (`threads`: for one pair on one of the threads)."""

    kind: str
    measure: str
    nanoseconds: float


def raw_rows(kind: Kind, rawbench: ModuleType) -> list[Row]:
    """Pairs through torch's C++ interface, with no Python and no tensor between."""
    is_async = kind is Kind.ASYNC  # Ten times slower a pair, so fewer of them.
    rows = [
        Row(kind.value, f"hot pair {label}", rawbench.pair_ns(size, 5000 if is_async else 20000))
        for label, size in (
            ("512 B", 512),
            ("4 KiB", 4 * KIB),
            ("1 MiB", MIB),
            ("2 MiB", 2 * MIB),
            ("64 MiB", 64 * MIB),
        )
    ]
    replacements = 3000 if is_async else 20000
    rows.append(Row(kind.value, "replacement, 1k live up to 8 MiB", rawbench.churn_ns(1000, replacements, 8 * MIB)))
    rows.append(Row(kind.value, "replacement, 10k live up to 1 MiB", rawbench.churn_ns(10000, replacements, MIB)))
    rows += [
        Row(
            kind.value,
            f"4 KiB pair, {threads} thread{'s' if threads > 1 else ''}",
            rawbench.threads_ns(threads, 4 * KIB, 5000),
        )
        for threads in (1, 4, 16)
    ]
    return rows


def tensor_rows(kind: Kind) -> list[Row]:
    """Pairs as a Python program makes them: `torch.empty` and the end of the tensor's life."""
    import torch

    names = {"torch": torch, "device": torch.device("cuda"), "side_stream": torch.cuda.Stream()}

    def median_ns(statement: str, pairs: int, rounds: int) -> float:
        timer = timeit.Timer(statement, setup="torch.cuda.synchronize()", globals=names)
        timer.timeit(2000)
        return statistics.median(timer.repeat(rounds, pairs)) / pairs * 1e9

    rows = [
        Row(
            kind.value,
            f"torch.empty {label}",
            median_ns(f"torch.empty({size}, device=device, dtype=torch.uint8)", pairs=10000, rounds=7),
        )
        # The first obtains no memory: what of the others hardly any allocator can save.
        for label, size in (("0 B", 0), ("1 KiB", KIB), ("4 MiB", 4 * MIB))
    ]
    recorded = f"torch.empty({MIB}, device=device, dtype=torch.uint8).record_stream(side_stream)"
    rows.append(Row(kind.value, "torch.empty 1 MiB + record_stream", median_ns(recorded, pairs=2000, rounds=5)))
    return rows


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure what an allocate + free pair costs the host.")
    parser.add_argument("kind", type=Kind, choices=list(Kind), metavar="KIND", help=", ".join(Kind))
    parser.add_argument("--extension", type=Path, required=True, help="the folder that rawbench.py built into")
    parser.add_argument("--json", type=Path, default=None, help="write the raw rows to this file")
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
    rows = raw_rows(options.kind, rawbench) + tensor_rows(options.kind)
    for row in rows:
        print(f"{row.kind:20s} {row.measure:36s} {row.nanoseconds:9.0f} ns", flush=True)
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
