"""Sections of a rule's manual, which is Markdown with headings."""

from __future__ import annotations


def section(manual: str, heading: str) -> str:
    """The text under a heading, on one line; empty without that heading."""
    words: list[str] = []
    inside = False
    for line in manual.splitlines():
        if line.startswith("## "):
            inside = line.removeprefix("## ").strip() == heading
        elif inside:
            words += line.split()
    return " ".join(words)
