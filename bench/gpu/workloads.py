"""Run the six workloads on one allocator: peaks, time per step and a checksum of each workload's last result.

usage: python -m bench.gpu.workloads KIND [NAME ...] [--steps N] [--deterministic] [--cap-gib N]
                                     [--json OUT] [--trace DIR]

To compare allocators, run them step by step in turn (`turns.py` does), each in a process of its own. The checksums of
two runs of one allocator differ where kernels add in no fixed order; `--deterministic` has torch choose kernels that do
not, and then an allocator that hands out sound memory gives the very bits that torch's own gives.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import lzma
import os
import pickle
import statistics
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu.kinds import Kind, Peaks, Subject, install
from bench.gpu.machine import describe
from bench.gpu.turns import Turn

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpu.programs import Program

GIB = 1 << 30

# More events than the longest workload makes (135,000), so that a recording is never cut at its beginning.
TRACE_EVENTS = 4_000_000


@dataclass(frozen=True)
class Row:
    """One workload on one allocator, as it is written to the raw JSON."""

    workload: str
    kind: str
    cap_gib: float | None
    """The limit of the process's device memory, if it had one."""
    peaks: Peaks
    steps: int
    ms_per_step: float
    """Mean over the steps after the first quarter, which warm caches up."""
    ms_per_step_median: float
    step_ms: tuple[float, ...]
    """Each of those steps by itself. Every run of a workload makes the same steps, so runs compare step by step."""
    last_value: float | None
    """Mean of the last step's result; None if the workload failed."""
    checksum: float | None
    """Sum of the last step's result, in double precision."""
    digest: str | None
    """CRC-32 of the bytes of the last step's result: equal digests mean equal bits."""
    error: str
    """Empty, or the exception that ended the workload early."""

    def line(self) -> str:
        """One line for people."""
        peaks = self.peaks
        utilization = peaks.allocated_bytes / max(1, peaks.reserved_bytes)
        checksum = "-" if self.checksum is None else f"{self.checksum:.9g} {self.digest}"
        return (
            f"{self.kind:20s} {self.workload:16s} allocated {peaks.allocated_bytes / GIB:7.2f}"
            f" active {peaks.active_bytes / GIB:7.2f} reserved {peaks.reserved_bytes / GIB:7.2f} GiB"
            f" utilization {utilization:.4f} ms/step {self.ms_per_step:8.2f} steps {self.steps}"
            f" checksum {checksum} retries {peaks.allocation_retries}"
            f" device allocations {peaks.device_allocations} {self.error}"
        )


def measure(name: str, program: Program, subject: Subject, options: argparse.Namespace, turn: Turn | None) -> Row:
    """Run one workload to its end, or to the error that ends it, and read the figures; others' turns do not count."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    subject.reset_peaks()
    seconds: list[float] = []
    last: Tensor | None = None
    error = ""
    started = time.perf_counter()
    try:
        for result in itertools.islice(program(), options.steps):
            last = result
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            if turn is not None:
                turn.pass_on()
            started = time.perf_counter()
    except RuntimeError as failure:
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}"
        last = None
    peaks = subject.peaks()  # Before the checksums, which allocate.
    settled = seconds[len(seconds) // 4 :]
    return Row(
        workload=name,
        kind=subject.kind.value,
        cap_gib=options.cap_gib,
        peaks=peaks,
        steps=len(seconds),
        ms_per_step=1e3 * sum(settled) / max(1, len(settled)),
        ms_per_step_median=1e3 * statistics.median(settled) if settled else 0.0,
        step_ms=tuple(round(1e3 * step, 3) for step in settled),
        last_value=None if last is None else last.float().mean().item(),
        checksum=None if last is None else last.double().sum().item(),
        digest=None if last is None else _digest(last),
        error=error,
    )


def _digest(result: Tensor) -> str:
    import torch

    raw = result.detach().contiguous().cpu().flatten().view(torch.uint8)
    return f"{zlib.crc32(raw.numpy().tobytes()):08x}"


def record_history(program: Program, path: Path) -> None:
    """Run a workload under torch's own history recording and write the snapshot, for `rallocator replay`."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=TRACE_EVENTS)
    for _ in program():
        torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    path.write_bytes(lzma.compress(pickle.dumps(snapshot), preset=2))
    print(f"{path}: {sum(len(trace) for trace in snapshot['device_traces'])} events", flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; the environment's CAP_GIB and TRACE are the defaults of two options."""
    parser = argparse.ArgumentParser(description="Run the six workloads on one allocator.")
    parser.add_argument("kind", type=Kind, choices=list(Kind), metavar="KIND", help=", ".join(Kind))
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads to run; all six when none is named")
    parser.add_argument("--steps", type=int, default=None, help="stop each workload after so many steps")
    parser.add_argument("--deterministic", action="store_true", help="use kernels whose results do not vary")
    parser.add_argument(
        "--cap-gib",
        type=float,
        default=float(os.environ["CAP_GIB"]) if os.environ.get("CAP_GIB") else None,
        help="limit the process's device memory to so many GiB (default: CAP_GIB)",
    )
    parser.add_argument("--json", type=Path, default=None, help="write the raw rows to this file")
    parser.add_argument(
        "--trace",
        type=Path,
        default=Path(os.environ["TRACE"]) if os.environ.get("TRACE") else None,
        help="record each workload's history into this folder instead of measuring (torch's allocators only)",
    )
    parser.add_argument("--turn-fds", type=int, nargs=2, default=None, help=argparse.SUPPRESS)  # From turns.py.
    return parser.parse_args(arguments)


def make_deterministic() -> None:
    """Have torch choose kernels that add in a fixed order; where it has none, the workload fails and says so.

    Merely to be warned is not enough: flash attention then adds in any order, and two runs of one allocator differ.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    # cuDNN's attention adds in no fixed order and cannot be told to; flash attention's can.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Filling new tensors would hide a workload that reads what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False


def main() -> int:
    """Measure, print a line for each workload, write the JSON. Returns 1 if any workload failed."""
    options = parse_arguments()
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, at its first handle.
    subject = install(options.kind)

    import torch

    from bench.gpu import programs  # After install: it imports torch.

    unknown = sorted(set(options.names) - set(programs.ALL))
    if unknown:
        print(f"no such workload: {', '.join(unknown)}; there are {', '.join(programs.ALL)}", file=sys.stderr)
        return 2
    if options.deterministic:
        make_deterministic()
    if options.cap_gib is not None:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap_gib * GIB / total_bytes)

    chosen = {name: program for name, program in programs.ALL.items() if not options.names or name in options.names}
    if options.trace is not None:
        for name, program in chosen.items():
            record_history(program, options.trace / f"{name}.pickle.xz")
        return 0
    return 1 if any(row.error for row in measure_all(chosen, subject, options)) else 0


def measure_all(chosen: Mapping[str, Program], subject: Subject, options: argparse.Namespace) -> list[Row]:
    """Measure workloads one after another; by turns, one that fails is the last."""
    turn = None if options.turn_fds is None else Turn(*options.turn_fds)
    if turn is not None:
        turn.take()
    rows: list[Row] = []
    for name, program in chosen.items():
        row = measure(name, program, subject, options, turn)
        rows.append(row)
        print(row.line(), flush=True)
        if options.json is not None:  # After each workload, so that a run that is stopped leaves what it has.
            write_json(options, rows)
        if turn is not None and row.error:
            break
    return rows


def write_json(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Write the raw rows with everything needed to read them later."""
    document = {
        "schema": 1,
        "bench": "workloads",
        "kind": options.kind.value,
        "command": " ".join(["python -m bench.gpu.workloads", *sys.argv[1:]]),
        "deterministic": options.deterministic,
        "most_steps": options.steps,
        "cap_gib": options.cap_gib,
        "machine": describe(),
        "rows": [asdict(row) for row in rows],
    }
    options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    sys.exit(main())
