"""Output in encodings that lack characters: our marks have a form in ASCII, everything else is escaped."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable

ERROR_HANDLER = "tito_audit"
"""Name of the codec error handler for text that people read."""
_JSON_ERROR_HANDLER = "tito_audit_json"
"""The one for JSON: characters become `\\uXXXX`, so values stay the same."""
_ASCII_FORMS = {
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


def as_encoded(text: str, encoding: str) -> str:
    """The text as a stream of this encoding will show it, to measure its width."""
    return text if text.isascii() else text.encode(encoding, ERROR_HANDLER).decode(encoding)


def print_json(text: str) -> None:
    """Print JSON to stdout; characters that stdout cannot encode become `\\uXXXX`."""
    prepare_stdout("json")
    print(text)


def prepare_stdout(report: str) -> None:
    """Switch stdout to ASCII with the escapes of a machine-readable report (JSON, XML), unless it is UTF-8."""
    escapes = {"json": _JSON_ERROR_HANDLER, "jsonl": _JSON_ERROR_HANDLER, "sarif": _JSON_ERROR_HANDLER}
    escapes |= dict.fromkeys(("html", "junit", "markdown"), "xmlcharrefreplace")
    if report in escapes and not (sys.stdout.encoding or "utf-8").lower().startswith("utf"):
        sys.stdout.reconfigure(encoding="ascii", errors=escapes[report])  # type: ignore[union-attr]


def _ascii_form(text: str, at: int) -> str:
    """The character at a position in ASCII; what a dot stands for depends on its neighbours."""
    char = text[at]
    if char == "·":  # between words, or a space at the end of a token
        return "-" if text[max(at - 1, 0) : at + 2] == " · " else "_"
    if char in _ASCII_FORMS:
        return _ASCII_FORMS[char]
    if "\u2500" <= char <= "\u257f":
        return "-" if char in "─╌╴╶╸╺" else "+"
    if "\u2400" <= char <= "\u241f":  # the picture of a control character
        return f"\\x{ord(char) - 0x2400:02x}"
    return char.encode("ascii", "backslashreplace").decode()


def _error_handler(shown: Callable[[str, int], str]) -> Callable[[UnicodeError], tuple[str, int]]:
    """A codec error handler that replaces each character by `shown(text, position)`."""

    def handle(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(shown(error.object, at) for at in range(error.start, error.end)), error.end

    return handle


codecs.register_error(ERROR_HANDLER, _error_handler(_ascii_form))
codecs.register_error(_JSON_ERROR_HANDLER, _error_handler(lambda text, at: json.dumps(text[at])[1:-1]))
