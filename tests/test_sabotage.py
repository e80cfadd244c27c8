"""The faults of `make sabotage` can still be planted. Whether the tests catch them takes minutes to find out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_fault_still_finds_the_text_that_it_replaces() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "sabotage.py", "--check"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    # Ten is what the project promises.
    assert len(done.stdout.splitlines()) >= 10
