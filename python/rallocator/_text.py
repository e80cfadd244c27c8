"""Text from outside, made fit to be shown."""

from __future__ import annotations


def printable(text: object) -> str:
    """Return text from outside on one line, with every character that a terminal would act on written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
