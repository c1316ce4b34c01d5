"""Turns the patterns of overrides in a file into patterns of whole paths."""

from __future__ import annotations

import os
import re
from pathlib import Path

MEANINGLESS = r"(?:^|[^\\])(?:\[[^/]*\]|\{[^/]*,[^/]*\})|^!|\\[A-Za-z0-9]"
"""Syntax of other tools' patterns that ours lack: sets, alternatives, exceptions, backslashes between folders.
Taken literally, it would silently match nothing."""
_WILD = re.compile(r"(?<!\\)[*?]")


def patterns_of(text: str, folder: Path) -> tuple[str, ...]:
    """The patterns for `Override.paths` equivalent to one pattern in a file of this folder.

    Without a slash it is the name of a file anywhere, or of a folder below this one, with everything in it. With
    one it is a path from this folder, with everything in it if it is a folder. Links are resolved up to the first
    `*` or `?`.
    """
    name = text.rstrip("/")
    if "://" in text:  # a remote log, or those below a folder
        return (name, f"{name}/**")
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
    """A pattern that matches only this path, without a slash at its end."""
    return re.sub(r"([\\*?])", r"\\\1", path.as_posix()).rstrip("/")
