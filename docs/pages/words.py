"""Markdown out of the words of the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["Pages", "command_block", "fenced", "flags_as_code", "linked", "table", "toctree"]

Pages = dict[str, str]
"""Text by path, as seen from the root of the site."""

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})")
_FLAG = re.compile(r"(?<![\w`/-])(--?[a-z][a-z-]*(?:=\S+)?)")
_CODE = re.compile(r"(?<![\w/`.=,-])([A-Z]{3}\d{3})(?![\w`])")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; `|` in a cell stays a character."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def toctree(pages: Iterable[str], *, depth: int = 1, caption: str = "") -> str:
    """A list of pages that the side bar shows and the page does not."""
    said = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", ":hidden:", f":maxdepth: {depth}", *said, "", *pages, "```\n"])


def fenced(text: str, language: str = "text") -> str:
    """A block of code, behind a fence that the text does not hold."""
    longest = max((len(found) for found in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def command_block(*commands: str) -> str:
    """Commands as one types them."""
    return fenced("\n".join(f"$ {command}" for command in commands), "console")


def flags_as_code(text: str) -> str:
    """Prose of a help text with the flags in it set as code."""
    return _outside_of_code(text, lambda part: _FLAG.sub(r"`\1`", part.replace("*", "\\*")))


def linked(text: str, places: Mapping[str, str]) -> str:
    """The page with each code of a rule in its prose, not in code or headings, as a link to the rule's page."""
    lines, fence = [], ""
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[2]
        elif found and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        elif not fence and not line.startswith(("#", "    ")):
            line = _outside_of_code(line, lambda part: _CODE.sub(lambda one: _link(one[1], places), part))
        lines.append(line)
    return "\n".join(lines)


def _link(code: str, places: Mapping[str, str]) -> str:
    return f"[{code}]({places[code]})" if code in places else code


def _outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """The text with what stands between spans of code and links changed."""
    parts = re.split(r"(`+[^`]*`+|\[[^\]]*\]\([^)]*\))", text)
    return "".join(part if at % 2 else change(part) for at, part in enumerate(parts))
