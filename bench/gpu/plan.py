"""Which processes a session consists of, in which order, each with its time limit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

DEFAULT_SECTIONS = ("contract", "tests", "checksums", "workloads", "host_cost")
SECTIONS = (*DEFAULT_SECTIONS, "caps", "torch_tests")
"""The last takes most of a session for itself, and what `tools/torch_tests.py` has fetched."""

NATIVE = "native"
OURS = ("rallocator-pluggable", "rallocator-bridge")
"""What a session may compare with torch's own allocator."""

PEAK_GIB = {
    "gpt_varlen": 14.348,
    "lora_checkpoint": 23.395,
    "unet_varsize": 17.467,
    "kv_decode": 20.515,
    "moe": 2.911,
    "fsdp1_streams": 0.3105,
}
"""What each workload has allocated at its peak, in GiB, under torch's own allocator: the sum of its tensors."""

CAPS = (1.02, 1.05)
"""The limits to run ours under, over that peak."""


@dataclass(frozen=True)
class Step:
    """One process of the session."""

    section: str
    name: str
    command: tuple[str, ...]
    limit_s: int
    """The process is killed after so long."""
    least_s: int
    """Not worth starting with less time than this."""
    round: int = 0
    result: Path | None = None
    """The file that the process writes its raw rows to."""


def plan(options: argparse.Namespace, scratch: Path) -> list[Step]:
    """List the steps of the chosen sections, in the order in which the sections were named."""
    makers = {
        "tests": _tests,
        "contract": _contract,
        "checksums": _checksums,
        "workloads": _workloads,
        "host_cost": _host_cost,
        "caps": _caps,
        "torch_tests": _torch_tests,
    }
    return [step for section in options.sections for step in makers[section](options, scratch)]


def rawbench_folder(scratch: Path) -> Path:
    """Where the extension that host_cost.py loads is built."""
    return scratch / "rawbench"


def _tests(options: argparse.Namespace, scratch: Path) -> Iterator[Step]:
    """Tests that share the GPU run side by side; those that watch its free memory run alone afterwards."""
    side_by_side = ("-n", str(options.workers)) if options.workers > 1 else ()
    for name, selection in (
        ("tests that share the GPU", ("-m", "not exclusive", *side_by_side)),
        ("tests that need it alone", ("-m", "exclusive")),
    ):
        result = scratch / f"{name.replace(' ', '-')}.xml"
        command = (
            *(sys.executable, "-m", "pytest", "tests/gpu"),
            *("-v", "-rfEs", f"--junitxml={result}"),
            *selection,
            *options.pytest,
        )
        yield Step("tests", name, command, options.tests_limit_s, least_s=30, result=result)


def _contract(options: argparse.Namespace, _scratch: Path) -> Iterator[Step]:
    yield Step("contract", "contract", (str(options.contract), *options.contract_arg), limit_s=120, least_s=10)


def _checksums(options: argparse.Namespace, scratch: Path) -> Iterator[Step]:
    """Two runs of torch's allocator around one of ours: their spread says what a difference means."""
    length = ("--steps", str(options.checksum_steps)) if options.checksum_steps else ()
    for round_number, kind in ((1, NATIVE), (1, options.ours), (2, NATIVE)):
        arguments = (*options.workload, "--deterministic", *length)
        yield _bench("checksums", "workloads", kind, round_number, scratch, arguments)


def _workloads(options: argparse.Namespace, scratch: Path) -> Iterator[Step]:
    for number in range(1, options.rounds + 1):
        # The further kinds take part in the first round.
        kinds = (NATIVE, options.ours, *(options.also if number == 1 else ()))
        yield _turns("workloads", "workloads", kinds, number, scratch, tuple(options.workload))


def _caps(options: argparse.Namespace, scratch: Path) -> Iterator[Step]:
    """Ours under each limit beside torch's own without one, workload by workload, since each has its own limits."""
    for number, workload in enumerate(options.workload or PEAK_GIB, start=1):
        capped = [f"{options.ours}@{PEAK_GIB[workload] * factor:.4f}" for factor in CAPS]
        yield replace(
            _turns("caps", "workloads", (NATIVE, *capped), number, scratch, (workload,)), name=f"caps {workload}"
        )


def _host_cost(options: argparse.Namespace, scratch: Path) -> Iterator[Step]:
    arguments = ("--extension", str(rawbench_folder(scratch)))
    for number in range(1, options.rounds + 1):
        kinds = (NATIVE, options.ours, *(options.also if number == 1 else ()))
        yield _turns("host_cost", "host_cost", kinds, number, scratch, arguments)


def _torch_tests(options: argparse.Namespace, scratch: Path) -> Iterator[Step]:
    """All routes in one step: their processes alternate, and it ends by itself before it would be killed."""
    result = scratch / "torch-tests.json"
    limit_s = options.torch_tests_limit_s
    command = (
        *(sys.executable, "-m", "bench.gpu.torch_tests.supervisor", "--json", str(result)),
        *("--log", str(options.out / "torch_tests_output.log"), "--limit-s", str(limit_s - 15)),
        *("--workers", str(options.torch_tests_workers)),
    )
    yield Step("torch_tests", "torch's own tests", command, limit_s=limit_s, least_s=60, result=result)


def _turns(
    section: str, bench: str, kinds: Sequence[str], number: int, scratch: Path, arguments: tuple[str, ...]
) -> Step:
    """One process of each kind, which take turns: see `turns.py`."""
    result = scratch / f"{section}-{number}.json"
    command = (sys.executable, "-m", "bench.gpu.turns", bench, ",".join(kinds), *arguments, "--json", str(result))
    name = f"{section} {', '.join(kinds)}, round {number}"
    return Step(section, name, command, limit_s=150 * len(kinds), least_s=30, round=number, result=result)


def _bench(section: str, module: str, kind: str, round_number: int, scratch: Path, arguments: tuple[str, ...]) -> Step:
    result = scratch / f"{section}-{kind}-{round_number}.json"
    command = (sys.executable, "-m", f"bench.gpu.{module}", kind, *arguments, "--json", str(result))
    name = f"{section} {kind}, round {round_number}"
    return Step(section, name, command, limit_s=150, least_s=30, round=round_number, result=result)
