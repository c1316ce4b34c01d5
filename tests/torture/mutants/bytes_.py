"""Bytes: flipped, cut, inserted, repeated, exchanged, and two files grown together."""

from __future__ import annotations

from random import Random

from tests.torture.attack import Mutant
from tests.torture.sources import Source, fixtures

__all__ = ["MUTATORS", "damaged", "plain"]

_TOKENS = (
    b"\0", b"\xff", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\n", b"null", b"NaN", b"1e999", b"-",
    b"\\ud800", b"\xef\xbb\xbf", b"\x1b[31m", b"9" * 400, b"\xc0\x80", b"\\u0000", b"true", b"''", b"\x85",
    b"\xe2\x80\xa8", b"PAR1", b"ARROW1\0\0", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04",
)  # fmt: skip


def plain(dice: Random, source: Source) -> bytes:
    """Some rows of a source as they are."""
    return b"".join(source.lines(dice))


def damaged(dice: Random, data: bytes, times: int = 0) -> bytes:
    """Bytes with a few damages."""
    for _ in range(times or dice.choice((1, 1, 2, 3, 8))):
        if not data:
            break
        at = dice.randrange(len(data))
        size = min(dice.choice((1, 1, 2, 4, 16, 100, 1000)), len(data) - at)
        how = dice.randrange(7)
        if how == 0:
            data = data[:at] + bytes((data[at] ^ (1 << dice.randrange(8)),)) + data[at + 1 :]
        elif how == 1:
            data = data[:at] + data[at + size :]
        elif how == 2:
            data = data[:at] + dice.choice(_TOKENS) + data[at:]
        elif how == 3:
            data = data[:at] + data[at : at + size] * dice.choice((2, 3, 20)) + data[at + size :]
        elif how == 4:
            data = data[:at] + dice.randbytes(size) + data[at + size :]
        elif how == 5:
            other = dice.randrange(len(data))
            data = data[:at] + data[other : other + size] + data[at + size :]
        else:
            data = data[:at] + dice.choice(_TOKENS) + data[at + 1 :]
    return data


def _damage(dice: Random, source: Source) -> Mutant:
    return Mutant(f"log{source.suffix}", damaged(dice, plain(dice, source)), f"damaged bytes of {source.name}")


def _cut(dice: Random, source: Source) -> Mutant:
    data = plain(dice, source)
    at = dice.randrange(len(data) + 1)
    return Mutant(f"log{source.suffix}", data[:at] if dice.random() < 0.7 else data[at:], f"a cut {source.name}")


def _spliced(dice: Random, source: Source) -> Mutant:
    other = dice.choice(fixtures())
    head, tail = plain(dice, source), plain(dice, other)
    at, there = dice.randrange(len(head) + 1), dice.randrange(len(tail) + 1)
    return Mutant(f"log{source.suffix}", head[:at] + tail[there:], f"{source.name} that goes on as {other.name}")


def _together(dice: Random, source: Source) -> Mutant:
    others = [dice.choice(fixtures()) for _ in range(dice.choice((1, 1, 2)))]
    data = plain(dice, source) + b"".join(plain(dice, other) for other in others)
    return Mutant(f"log{source.suffix}", data, f"{source.name} and {', '.join(other.name for other in others)}")


def _renamed(dice: Random, source: Source) -> Mutant:
    suffix = dice.choice((".json", ".jsonl", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.zst", ".pt", ".txt", ""))
    return Mutant(f"log{suffix}", plain(dice, source), f"{source.name} under a wrong suffix")


def _tiny(dice: Random, source: Source) -> Mutant:
    data = dice.choice((
        b"", b"\n", b"{", b"[]", b"{}", b"null", b"0", b'""', b"[[]]", b"[{}]", b"{}\n{}\n", b" ", b"\xff", b"\0",
        b"[", b"{}{}", b"[null]", b"-", b"PAR1", b"PAR1PAR1", b"ARROW1", b"\r", b"PK\x03\x04", b"\x80\x04.",
        b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b'{"a":', b"[1,2,3]",
    ))  # fmt: skip
    return Mutant(f"log{source.suffix}", data, "next to nothing")


MUTATORS = {_damage: 8, _cut: 2, _spliced: 2, _together: 2, _renamed: 2, _tiny: 1}
