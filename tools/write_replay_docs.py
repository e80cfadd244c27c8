"""Puts what `rallocator replay` prints into the pages of docs.

Below a line such as this, which names a recording of tests/traces,

    <!-- replay: oom_fragmented. Written by `make pages` from a real run. -->

the next block of the page is a command on a file of whatever name, and what it prints for that recording.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "tests" / "traces"
DOCS = ROOT / "docs"
MARKED = re.compile(r"(<!-- replay: (\w+)\. .*? -->\n\n?```console\n\$ (rallocator replay .*?)\n).*?(\n```)", re.DOTALL)


def main() -> None:
    """Rewrite every page that has a mark."""
    for page in pages():
        page.write_text(with_present_output(page.read_text(encoding="utf-8")), encoding="utf-8")


def pages() -> list[Path]:
    """The pages with a mark."""
    return [page for page in sorted(DOCS.glob("*.md")) if MARKED.search(page.read_text(encoding="utf-8"))]


def with_present_output(text: str) -> str:
    """The page with what the commands print now."""
    return MARKED.sub(lambda match: match[1] + output(match[3], match[2]) + match[4], text)


def output(command: str, recording: str) -> str:
    """What a command prints if the file that it names is this recording."""
    words = shlex.split(command)
    (name,) = [word for word in words if word.endswith(".pickle")]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).symlink_to(TRACES / f"{recording}.pickle.xz")
        environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
        ran = subprocess.run(words, check=False, capture_output=True, text=True, env=environment, cwd=folder)
    if ran.returncode == 2:
        raise SystemExit(f"{command}: {ran.stderr}")
    return "\n".join(line.rstrip() for line in ran.stdout.strip().splitlines())


if __name__ == "__main__":
    main()
