"""The rooms of the package in the order of the flow, each with its first line: `python -m tools.house`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["FLOW", "picture"]

PACKAGE = Path(__file__).resolve().parents[1] / "tito_audit"
FLOW = {
    "A command": ("cli", "settings", "run"),
    "reads rows": ("storage", "formats", "join"),
    "compares them": ("render", "tokens", "align", "chains", "ways", "evidence"),
    "judges them": ("rules", "repairs", "gate"),
    "and reports": ("reports", "tables", "viewer", "terminal"),
    "Beside it": (
        *("convert", "sft", "ray", "integrations", "inspect", "levels", "identify", "templates"),
        "conformance",
    ),
    "Live": ("providers", "parsers", "sessions", "serve", "agents", "rescore"),
    "Nouns": ("record",),
    "Contracts": (
        "format",
        "rule",
        "repair",
        "report",
        "report_objects",
        "provider",
        "parser",
        "registry",
        "summary",
        "unknown",
        "errors",
        "rows",
        "voice",
        "signals",
    ),
}
"""Rooms and contracts of the package by what they do in a run, in the order in which a row meets them."""


def picture() -> Iterator[str]:
    """Lines of the picture: what a run does, the room that does it, and the room's first line."""
    wide = max(map(len, FLOW))
    names = max(len(name) for names in FLOW.values() for name in names)
    for step, rooms in FLOW.items():
        for number, name in enumerate(rooms):
            yield f"{'' if number else step:{wide}}  {name:{names}}  {_first_line(name)}"


def _first_line(name: str) -> str:
    folder = PACKAGE / name
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]


if __name__ == "__main__":
    print("\n".join(picture()))
