"""Puts what `rallocator demo` prints on a machine without a GPU into README.md, between the two marks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

MARKED = re.compile(r"(<!-- demo: begin\..*? -->\n).*?(<!-- demo: end\. -->)", re.DOTALL)


def main() -> None:
    """Run the demo and rewrite the file."""
    # Everybody can repeat what the page shows, whatever GPU they have. The width is that of the page.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "NO_COLOR": "1"}
    demo = subprocess.run(["rallocator", "demo"], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    shown = f"```console\n$ rallocator demo\n{demo.stdout.strip()}\n```\n"
    path = Path("README.md")
    text, count = MARKED.subn(lambda match: match[1] + shown + match[2], path.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit("README.md does not have the two marks once each")
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
