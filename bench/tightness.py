"""How tight the policies are on made-up programs, and on recordings if any are named: needs neither a GPU nor torch.

usage: python -m bench.tightness [--lag-ms MS] [RECORDING ...]

Each row says how far reserved lies above active, the driver time by the simulator's cost model, and how many handles
moved.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import rallocator
from bench.made_up import MIB, programs

POLICIES = ("expandable", "rallocator")


def main() -> None:
    """Print one row for each program or recording and policy."""
    parser = argparse.ArgumentParser(prog="bench.tightness", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lag-ms", type=float, default=0.0, help="how long work takes to end after it was queued")
    parser.add_argument("recordings", type=Path, nargs="*", help="snapshots to replay in place of the programs")
    arguments = parser.parse_args()
    print(f"{'program':24}{'policy':12}{'active':>10}{'above':>9}{'driver':>10}{'moved':>9}")
    with tempfile.TemporaryDirectory() as folder:
        made_up = ((name, program.write(Path(folder) / "program.pickle")) for name, program in programs())
        named = [(path.name.split(".")[0], path) for path in arguments.recordings]
        for name, path in named or made_up:
            for row in rallocator.replay(path, POLICIES, lag_ms=arguments.lag_ms).rows:
                active, reserved = row.peak_active or 0, row.peak_reserved or 0
                above = f"{100 * (reserved / active - 1):.2f} %" if active else "-"
                driver, moved = f"{(row.driver_time_us or 0) / 1000:.0f} ms", row.handles_moved or 0
                print(f"{name:24}{row.policy:12}{active / MIB:>6.0f} MiB{above:>9}{driver:>10}{moved:>9,}")


if __name__ == "__main__":
    main()
