"""What README.md claims is what the package does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rallocator import errors
from rallocator._config import resolve
from tools.write_readme import with_present_demo

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_settings_lists_every_setting_with_its_default() -> None:
    section = README.partition("## Settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `?(\w+)`? \|", section, re.MULTILINE)
    assert rows == [(setting.key, setting.value) for setting in resolve(None, environ={}).settings]


def test_the_demo_is_what_the_demo_prints() -> None:
    # After a change on purpose: `make pages`.
    assert with_present_demo(README) == README


def test_the_commands_of_make_exist() -> None:
    commands = set(re.findall(r"^\$ make (\w+)", README, re.MULTILINE))
    assert commands == {"run", "test", "wheel"}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert commands <= targets


def test_the_example_on_the_simulated_gpu_runs() -> None:
    exec(simulated_example(), {})  # noqa: S102 - it is our own text


def test_the_example_without_its_record_stream_races() -> None:
    lines = simulated_example().splitlines()
    unsafe = "\n".join(line for line in lines if not line.startswith("gpu.record_stream"))
    assert unsafe.count("\n") == len(lines) - 2
    with pytest.raises(errors.RaceError):
        exec(unsafe, {})  # noqa: S102 - it is our own text


def simulated_example() -> str:
    (example,) = re.findall(r"```python\n(from rallocator\.testing .*?)```", README, re.DOTALL)
    return str(example)
