"""Text: encodings, byte-order marks, line ends, blank lines, lists in place of lines, odd spellings of JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.torture.attack import Mutant
from tests.torture.mutants.bytes_ import plain
from tests.torture.sources import Source

__all__ = ["MUTATORS"]

_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\xff\xfe\0\0", b"\0\0\xfe\xff", b"\xef\xbb\xbf" * 2)
_CODECS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252", "utf-7", "utf-8-sig")
_BREAKS = (
    b"\r\n", b"\r", b"\n\r", b"\n\n", b"\n \n", b"\n\t\n", b"\x0b", b"\xe2\x80\xa8", b"\x85", b"\x1e", b"\n\0\n",
)  # fmt: skip


def _named(source: Source, data: bytes, change: str) -> Mutant:
    return Mutant(f"log{source.suffix}", data, f"{source.name}: {change}")


def _marked(dice: Random, source: Source) -> Mutant:
    mark, lines = dice.choice(_MARKS), source.lines(dice)
    at = dice.choice((0, 0, 0, dice.randrange(len(lines))))
    return _named(
        source, b"".join([*lines[:at], mark + lines[at], *lines[at + 1 :]]), f"the mark {mark!r}, line {at}"
    )


def _recoded(dice: Random, source: Source) -> Mutant:
    codec = dice.choice(_CODECS)
    text = plain(dice, source).decode("utf-8", "replace")
    return _named(source, text.encode(codec, "replace"), f"as {codec}")


def _line_ends(dice: Random, source: Source) -> Mutant:
    mixed = dice.random() < 0.4
    end = dice.choice(_BREAKS)
    lines = [line.rstrip(b"\n") for line in source.lines(dice)] * dice.choice((1, 2))
    data = b"".join(line + (dice.choice((*_BREAKS, b"\n")) if mixed else end) for line in lines)
    return _named(source, data, f"lines that end in {'many ways' if mixed else end!r}")


def _no_end(dice: Random, source: Source) -> Mutant:
    return _named(source, plain(dice, source).rstrip(b"\r\n"), "no newline at the end")


def _zeros(dice: Random, source: Source) -> Mutant:
    lines = source.lines(dice)
    block = b"\0" * dice.choice((1, 512, 4096, 70_000))
    at = dice.randrange(len(lines) + 1)
    return _named(source, b"".join([*lines[:at], block, *lines[at:]]), f"{len(block)} zeros before line {at}")


def _blank(dice: Random, source: Source) -> Mutant:
    lines = source.lines(dice)
    for _ in range(dice.choice((1, 3, 2000))):
        lines.insert(dice.randrange(len(lines) + 1), dice.choice((b"\n", b" \n", b"\t\r\n", b"\r\n")))
    return _named(source, b"".join(lines), "blank lines")


def _spelled(dice: Random, source: Source) -> Mutant:
    """The same rows, spelled differently: indented, escaped, without spaces, numbers as floats or exponents."""
    rows = source.rows(dice)
    way = dice.randrange(5)
    texts: list[str]
    if way == 0:
        texts = [json.dumps(row, indent=dice.choice((1, "\t")), default=str) for row in rows]
    elif way == 1:
        texts = [json.dumps(row, separators=(",", ":"), ensure_ascii=False, default=str) for row in rows]
    elif way == 2:
        texts = [_escaped(json.dumps(row, default=str)) for row in rows]
    elif way == 3:
        texts = [
            json.dumps(_exponents(dice, row), default=str).replace('"\0', "").replace('\0"', "") for row in rows
        ]
        texts = [text.replace('"\\u0000', "").replace('\\u0000"', "") for text in texts]
    else:
        texts = ["  " + json.dumps(row, separators=(" ,  ", "\t:"), default=str) + " \t" for row in rows]
    return _named(source, "\n".join(texts).encode("utf-8", "surrogatepass") + b"\n", "the same, spelled otherwise")


def _escaped(text: str) -> str:
    """Every letter in strings of JSON text as an escape, but where one is already."""
    pieces = text.split('"')
    return '"'.join(
        "".join(f"\\u{ord(letter):04x}" for letter in piece) if at % 2 and "\\" not in piece else piece
        for at, piece in enumerate(pieces)
    )


def _exponents(dice: Random, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _exponents(dice, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_exponents(dice, item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or dice.random() < 0.5:
        return value
    if isinstance(value, int):
        return "\0" + dice.choice((f"{value}.0", f"{value}e0", f"{value}", f"{value}0E-1")) + "\0"
    return "\0" + dice.choice((f"{value!r}", f"{value:.25f}", f"{value:.17e}", f"{value:E}")) + "\0"


MUTATORS = {_marked: 3, _recoded: 3, _line_ends: 3, _no_end: 1, _zeros: 1, _blank: 1, _spelled: 4}
