"""Logged text as a word of a shell command, for commands to paste."""

from __future__ import annotations

import os
import shlex

from tito_audit.terminal.escape import visible


def shell_word(text: str) -> str:
    """The text as one word that a shell reads back exactly, safe to show on a terminal.

    `'my run.jsonl'`; `$'a\\x1b.jsonl'` if there are characters that would act on a terminal.
    """
    if visible(text) == text:
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char != "[" and char.isascii() and char.isprintable():
        return char  # `[` is escaped, as some CI runners read `##[` as a command
    try:
        data = os.fsencode(char)
    except UnicodeEncodeError:  # half of a surrogate pair
        data = char.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)
