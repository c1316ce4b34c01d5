"""Patterns of a file's overrides, as patterns of whole paths."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["MEANINGLESS", "patterns_of"]

MEANINGLESS = r"(?:^|[^\\])(?:\[[^/]*\]|\{[^/]*,[^/]*\})|^!|\\[A-Za-z0-9]"
"""What patterns of other tools have and ours do not: sets, alternatives, exceptions, folders apart by backslashes.
Taken as it stands it would fit nothing, in silence."""
_WILD = re.compile(r"(?<!\\)[*?]")


def patterns_of(text: str, folder: Path) -> tuple[str, ...]:
    """What `Override.paths` has to say for one pattern of a file in that folder.

    One without a slash is a file's name, wherever it lies, or the name of a folder below this one with all that
    is in it. Any other is a path from this folder on, with all that is in it where it names a folder. Links are
    followed up to the first `*` or `?`.
    """
    name = text.rstrip("/")
    if "/" not in name and name not in ("", ".", "..", "~"):
        here = Path(os.path.realpath(folder))
        below = f"{_literal(here)}/**/{name}/**"
        return (below,) if text.endswith("/") else (f"{_literal(Path(here.anchor))}/**/{name}", below)
    parts = os.path.expanduser(text).split("/")  # noqa: PTH111 - Path drops the slash at the end
    known = next((at for at, part in enumerate(parts) if _WILD.search(part)), len(parts))
    head = re.sub(r"\\(.)", r"\1", "/".join(parts[:known]) or "/" * known)
    wild: list[str] = []
    for part in parts[known:]:
        if part == ".." and wild:
            wild.pop()
        elif part not in ("", "."):
            wild.append(part)
    whole = "/".join([_literal(Path(os.path.realpath(folder / head))), *wild])
    inside = whole if wild[-1:] == ["**"] else f"{whole}/**"
    return (inside,) if text.endswith("/") or inside == whole else (whole, inside)


def _literal(path: Path) -> str:
    """The path as a pattern that is itself only, without a slash at its end."""
    return re.sub(r"([\\*?])", r"\\\1", path.as_posix()).rstrip("/")
