"""Rows as JSON text in odd forms: each is a pure function of the rows and a random generator."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

_ODD_NUMBERS = (
    "1e5", "-0", "-0.0", "1E+2", "0.10", "1.0", "123456789012345678901234567890",
    "0.1000000000000000055511151231257827021181583", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e-400",
    "9007199254740993", "18446744073709551616", "-9223372036854775809", "5e-324",
)  # fmt: skip
_ODD_TEXTS = (
    r'"\u00e9"', '"é"', r'"\/path\/"', r'"\ud83d\ude00"', '"😀"', r'"\ud800"', r'"\u0000"', '"\x7f"', '"\u2028"',
    r'"\u2028"', '""', r'"{\"a\": 1.0, \"a\": 2}"', r'"\u00E9\b\f\t"',
)  # fmt: skip
_ODD_KEYS = ('"note"', '"a.b"', '"a[]"', '""', r'"\u006eote"', '"ключ"', '"tito_audit "', '"*"', r'"x\"y"')
_BROKEN = (
    b'{"a": ', b"null", b"[1, 2]", b'"text"', b"{}", b'{"a": "\xff\xfe"}', b"not json", b'{"a": 1} x', b"[" * 40,
)  # fmt: skip


class _Spelling:
    """How one log is spelled."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.comma, self.colon = rng.choice(((",", ":"), (", ", ": "), (" , ", " : "), (",\t", ":"), (",", ": ")))
        self.pad = rng.choice(("", "", "", " "))
        self.ascii = rng.random() < 0.5
        self.slash = rng.random() < 0.2
        self.floats = rng.choice(("as is", "as is", "exponent", "zeros", "upper", "mixed"))
        self.whole = rng.random() < 0.05
        self.indent = rng.choice((None, None, None, 1, 2, "\t"))

    def text(self, value: Any, depth: int = 0) -> str:
        """A value as JSON."""
        if isinstance(value, Raw):
            return value.text
        if isinstance(value, Pairs | dict):
            pairs = value if isinstance(value, Pairs) else value.items()
            parts = [f"{self.string(key)}{self.colon}{self.text(item, depth + 1)}" for key, item in pairs]
            return self.enclosed("{}", parts, depth)
        if isinstance(value, list):
            return self.enclosed("[]", [self.text(item, depth + 1) for item in value], depth)
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return self.number(value)
        if isinstance(value, int) and not isinstance(value, bool) and self.whole and self.rng.random() < 0.1:
            return f"{value}.0"
        return json.dumps(value, default=str)  # a table may hold times

    def enclosed(self, brackets: str, parts: Sequence[str], depth: int) -> str:
        """The entries of a container."""
        if not parts:
            return brackets
        if self.indent is None:
            return f"{brackets[0]}{self.pad}{self.comma.join(parts)}{self.pad}{brackets[1]}"
        step = self.indent if isinstance(self.indent, str) else " " * self.indent
        line = "\n" + step * (depth + 1)
        return f"{brackets[0]}{line}{f',{line}'.join(parts)}\n{step * depth}{brackets[1]}"

    def string(self, value: str | Raw) -> str:
        """A text with its escapes."""
        if isinstance(value, Raw):
            return value.text
        text = json.dumps(value, ensure_ascii=self.ascii or any("\ud800" <= sign <= "\udfff" for sign in value))
        return text.replace("/", r"\/") if self.slash else text

    def number(self, value: float) -> str:
        """A float, spelled exactly or longer."""
        how = self.rng.choice(("as is", "exponent", "zeros")) if self.floats == "mixed" else self.floats
        text = repr(value)
        if how == "exponent" and "e" not in text:
            return f"{text}e0"
        if how == "upper":
            return text.replace("e", "E")
        if how == "zeros" and "e" not in text:
            return f"{text}00"
        return str(int(value)) if how == "mixed" and value.is_integer() and self.rng.random() < 0.5 else text


class Raw:
    """JSON text that goes in as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


class Pairs(list[tuple[Any, Any]]):
    """An object whose keys may repeat."""


def odd_row(row: Any, rng: random.Random, depth: int = 0) -> Any:
    """A row with keys and values that no repair is about: repeated keys, odd numbers, odd texts, another order."""
    if isinstance(row, list):
        some = rng.randrange(len(row)) if row and not isinstance(row[0], int | float) else -1
        return [odd_row(item, rng, depth + 1) if number == some else item for number, item in enumerate(row)]
    if not isinstance(row, dict):
        return row
    pairs = Pairs(row.items())
    if rng.random() < 0.3:
        rng.shuffle(pairs)
    if pairs and rng.random() < 0.6:
        at = rng.randrange(len(pairs))
        pairs[at] = (pairs[at][0], odd_row(pairs[at][1], rng, depth + 1))
    for _ in range(rng.choice((0, 0, 1, 1, 2)) if depth < 4 else 0):
        value = rng.choice((_number, _text, _several))(rng)
        pairs.insert(rng.randrange(len(pairs) + 1), (Raw(rng.choice(_ODD_KEYS)), value))
    if pairs and rng.random() < (0.25 if depth == 0 else 0.15):
        key, old = rng.choice(pairs)
        value = rng.choice((old, old, _number(rng), _text(rng), None, [], {}))
        pairs.insert(rng.randrange(len(pairs) + 1) if rng.random() < 0.5 else 0, (key, value))
    return pairs


def _number(rng: random.Random) -> Raw:
    return Raw(rng.choice(_ODD_NUMBERS))


def _text(rng: random.Random) -> Raw:
    return Raw(rng.choice(_ODD_TEXTS))


def _several(rng: random.Random) -> Any:
    return rng.choice(
        (
            [],
            {},
            [_number(rng), _text(rng)],
            {"a": _number(rng), "b": [{}]},
            Pairs([("a", 1), ("a", _number(rng))]),
        )
    )


def text_log(rows: Sequence[Any], rng: random.Random) -> tuple[bytes, str]:
    """A log of these rows and its suffix."""
    kind = rng.choice(("lines", "lines", "lines", "lines", "array", "values"))
    spelling = _Spelling(rng)
    if kind == "lines":
        spelling.indent = None
    calm = rng.random() < 0.2
    texts = [spelling.text(row if calm else odd_row(row, rng)).encode("utf-8", "surrogatepass") for row in rows]
    if kind == "lines" and rng.random() < 0.25:
        texts.insert(rng.randrange(len(texts) + 1), rng.choice(_BROKEN))
    end = rng.choice((b"\n", b"\n", b"\r\n"))
    if kind == "lines":
        data = b""
        for text in texts:
            gap = rng.choice((b"", b"", b"", b"", b" ", b"\t", end, b"  " + end)) if not calm else b""
            data += gap + text + rng.choice((b"", b"", b"", b" ")) + end
        data = data if rng.random() < 0.7 else data[: -len(end)]
        data += end * rng.choice((0, 0, 0, 1, 2))
    elif kind == "array":
        comma = rng.choice((b",", b", ", b"," + end, end + b", ", b" ,"))
        space = rng.choice((b"", end, b" "))
        data = b"[" + space + comma.join(texts) + space + b"]" + rng.choice((b"", end))
    else:
        data = rng.choice((end, end + end, b" ", b"")).join(texts) + rng.choice((b"", end))
    if rng.random() < 0.2:
        data = b"\xef\xbb\xbf" + data
    return packed(data, ".jsonl" if kind == "lines" else ".json", rng)


def packed(data: bytes, suffix: str, rng: random.Random) -> tuple[bytes, str]:
    """The text compressed, or not, in one piece or several."""
    how = rng.choice(("plain", "plain", "plain", "plain", "gz", "members", "zst", "frames"))
    half = rng.randrange(len(data) + 1)
    if how == "gz":
        return gzip.compress(data, rng.choice((1, 6, 9)), mtime=rng.choice((0, 1_700_000_000))), f"{suffix}.gz"
    if how == "members":
        return gzip.compress(data[:half], mtime=0) + gzip.compress(data[half:], mtime=0), f"{suffix}.gz"
    if how == "zst":
        return pa.compress(data, codec="zstd", asbytes=True), f"{suffix}.zst"
    if how == "frames":
        return b"".join(
            pa.compress(part, codec="zstd", asbytes=True) for part in (data[:half], data[half:])
        ), f"{suffix}.zst"
    return data, suffix
