"""Puts what `rallocator demo` prints on a machine without a GPU into README.md, between the two marks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
MARKED = re.compile(r"(<!-- demo: begin\..*? -->\n).*?(<!-- demo: end\. -->)", re.DOTALL)


def main() -> None:
    """Run the demo and rewrite the file."""
    README.write_text(with_present_demo(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_present_demo(readme: str) -> str:
    """The page with what the demo prints now."""
    text, count = MARKED.subn(lambda match: match[1] + demo() + match[2], readme)
    if count != 1:
        raise SystemExit("README.md does not have the two marks once each")
    return text


def demo() -> str:
    """What a reader sees who runs the demo without a GPU: the same on every machine, since nothing in it is timed."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "NO_COLOR": "1"}
    ran = subprocess.run(["rallocator", "demo"], check=True, capture_output=True, text=True, env=environment)
    lines = "\n".join(line.rstrip() for line in ran.stdout.strip().splitlines())
    return f"```console\n$ rallocator demo\n{lines}\n```\n"


if __name__ == "__main__":
    main()
