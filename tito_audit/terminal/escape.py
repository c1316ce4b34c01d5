"""Makes logged text safe to print; all model output passes through here before it reaches a terminal.

A log may hold anything a model can say: escape sequences that recolour a terminal or change its title,
newlines that forge a line of the report, characters that reverse the reading direction. None of them may take
effect and all of them should be visible, since tokens often differ in exactly one of them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import unicodedata

_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {ord("\n"): "⏎", ord("\t"): "⇥", 0x7F: "␡"}
# Letters that print as nothing: the combining grapheme joiner, Korean and Khmer fillers.
_BLANKS = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0]")
# DEL, C1 controls, bidi and zero-width characters, line separators, tags: legal in JSON, but unwanted in a
# terminal or in a program that splits lines by Unicode's rules.
_UNSAFE = "\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
# What GitHub and Azure runners read as a command anywhere in a line: ##[error], ##vso[task...].
_COMMAND = re.compile(r"(##\w*)\[")
# What they read as a command at the beginning of a line, after any colour escapes.
_COMMAND_FIRST = re.compile(r"((?:\s|\x1b\[[0-9;]*m)*):(?=:)")
# Combining marks: more than four on one letter reach into the lines above and below.
_MARKS = "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe00-\ufe0f\ufe20-\ufe2f]"
_FLOOD = re.compile(f"(?<={_MARKS}{{4}}){_MARKS}+")
_UNSAFE_IN_JSON = re.compile(f"[{_UNSAFE}]|{_FLOOD.pattern}")


def visible(text: str, *, edges: bool = False) -> str:
    """The text on one line with every character visible and no control character left.

    A newline becomes ⏎, other control characters their pictures (ESC is ␛), and everything else that
    does not print its code, `\\u202e`. With `edges`, for a single token, spaces at both ends become `·`
    and an empty token `∅`.
    """
    if not text.isprintable():
        text = "".join(char if char.isprintable() else _code_point(char) for char in text.translate(_PICTURES))
    if not text.isascii():
        text = _BLANKS.sub(lambda match: _code_point(match[0]), text)
        text = _FLOOD.sub(lambda match: "".join(map(_code_point, match[0])), text)
    if "##" in text:
        text = _COMMAND.sub(r"\1\\x5b", text)
    if not edges:
        return text
    inner = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    text = "·" * before + inner + "·" * (len(text) - before - len(inner))
    if text and unicodedata.category(text[0])[0] == "M":
        text = "◌" + text  # or the combining mark would attach to what precedes the token
    return text or "∅"


def inert(line: str) -> str:
    """The line with a leading `::` escaped: CI runners obey `::error::` at the start of a line."""
    command = _COMMAND_FIRST.match(line) if "::" in line else None
    return line if command is None else f"{command[1]}\\x3a{line[command.end() :]}"


def escaped_json(text: str) -> str:
    """The same JSON value with whatever a terminal or CI log would act on escaped."""
    if "##" in text:
        text = _COMMAND.sub(r"\1\\u005b", text)  # it can only be inside a string
    if text.isascii() and "\x7f" not in text:
        return text
    return _UNSAFE_IN_JSON.sub(lambda match: json.dumps(match[0])[1:-1].replace("\x7f", "\\u007f"), text)


def _code_point(char: str) -> str:
    """`\\x1b`, `\\u202e` or `\\U000e0001`."""
    number = ord(char)
    if number <= 0xFF:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def elided(text: str, most: int) -> str:
    """The text cut to at most `most` characters, a trailing `…` included."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def cut(text: str, limit: int) -> str:
    """The text cut to at most `limit` characters, a trailing ` … (812 more characters)` included."""
    if len(text) <= limit:
        return text
    room = limit - len(f" … ({len(text):,} more characters)")
    return f"{text[:room]} … ({len(text) - room:,} more characters)"


def shell_word(text: str) -> str:
    """The text quoted as one word for a shell, safe to show on a terminal.

    `'my run.jsonl'`; `$'a\\x1b.jsonl'` if it holds characters that a terminal would act on.
    """
    if visible(text) == text:
        return shlex.quote(text)
    escaped = []
    for char in text:
        if char in "\\'":
            escaped.append(f"\\{char}")
        elif char != "[" and char.isascii() and char.isprintable():
            escaped.append(char)  # `[` is escaped, as some CI runners read `##[` as a command
        else:
            try:
                data = os.fsencode(char)
            except UnicodeEncodeError:  # half of a surrogate pair
                data = char.encode("utf-8", "surrogatepass")
            escaped += [f"\\x{byte:02x}" for byte in data]
    return f"$'{''.join(escaped)}'"
