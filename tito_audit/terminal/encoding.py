"""Streams whose encoding lacks characters: the marks of a page have a form in ASCII, the rest is escaped."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable

FALLBACK = "tito_audit"
"""The error handler of streams that people read."""
_IN_JSON = "tito_audit_json"
"""That of JSON, whose values stay what they are."""
_MARKS = {
    "…": "...",
    "⏎": "\\n",
    "⇥": "\\t",
    "∅": "<empty>",
    "◌": "",
    "–": "-",
    "’": "'",
    "“": '"',
    "”": '"',
    "→": "->",
    "•": "*",
    "×": "x",
    "━": "#",
    "│": "|",
    "┃": "|",
    "␡": "\\x7f",
}


def written_in(text: str, encoding: str) -> str:
    """The text as a stream with this encoding shows it, so that it can be measured."""
    return text if text.isascii() else text.encode(encoding, FALLBACK).decode(encoding)


def print_json(text: str) -> None:
    """Print JSON to stdout: the same value in any encoding."""
    ready_stdout("json")
    print(text)


def ready_stdout(report: str) -> None:
    """Let stdout take a report that programs read: in ASCII, with escapes of its own, if it is not in UTF-8."""
    escapes = {"json": _IN_JSON, "jsonl": _IN_JSON, "sarif": _IN_JSON}
    escapes |= dict.fromkeys(("html", "junit", "markdown"), "xmlcharrefreplace")
    if report in escapes and not (sys.stdout.encoding or "utf-8").lower().startswith("utf"):
        sys.stdout.reconfigure(encoding="ascii", errors=escapes[report])  # type: ignore[union-attr]


def _mark(text: str, at: int) -> str:
    """A character in ASCII; a dot by what is around it."""
    char = text[at]
    if char == "·":  # between words, or a space at the end of a token
        return "-" if text[max(at - 1, 0) : at + 2] == " · " else "_"
    if char in _MARKS:
        return _MARKS[char]
    if "\u2500" <= char <= "\u257f":
        return "-" if char in "─╌╴╶╸╺" else "+"
    if "\u2400" <= char <= "\u241f":  # the picture of a control character
        return f"\\x{ord(char) - 0x2400:02x}"
    return char.encode("ascii", "backslashreplace").decode()


def _replacing(shown: Callable[[str, int], str]) -> Callable[[UnicodeError], tuple[str, int]]:
    """The error handler that shows characters so."""

    def handle(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(shown(error.object, at) for at in range(error.start, error.end)), error.end

    return handle


codecs.register_error(FALLBACK, _replacing(_mark))
codecs.register_error(_IN_JSON, _replacing(lambda text, at: json.dumps(text[at])[1:-1]))
