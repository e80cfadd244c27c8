"""What the pages of docs claim is what the package does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from rallocator._cli.app import app
from tools.write_replay_docs import DOCS, pages, with_present_output

QUESTIONS = ("out-of-memory", "reserved-above-allocated", "will-it-fit", "guard-memory-in-ci")
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_the_examples_are_what_the_command_prints(page: Path) -> None:
    # After a change on purpose: `make pages`.
    text = page.read_text(encoding="utf-8")
    assert with_present_output(text) == text


def test_every_question_has_a_page_that_the_readme_names() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for question in QUESTIONS:
        assert (DOCS / f"{question}.md").is_file()
        assert f"docs/{question}.md" in readme


@pytest.mark.parametrize("page", [*QUESTIONS, "replay"])
def test_links_and_options_exist(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (DOCS / target).exists(), target
    known = {option for parameter in get_command(app).commands["replay"].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known
