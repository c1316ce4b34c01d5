"""Compressed logs: cut, damaged, of several members, with something behind the last, and of the wrong kind."""

from __future__ import annotations

import bz2
import gzip
import io
import zipfile
from functools import cache
from random import Random
from typing import Any

from tests.torture.attack import Mutant
from tests.torture.mutants.bytes_ import damaged, plain
from tests.torture.mutants.structure import changed_rows, lines_of
from tests.torture.sources import Source

__all__ = ["MUTATORS", "bomb", "packed"]


def packed(data: bytes, suffix: str) -> bytes:
    """Bytes as one gzip or zstd member."""
    if suffix == ".gz":
        return gzip.compress(data, 1, mtime=0)
    return bytes(_zstd().compress(data, asbytes=True))


@cache
def _zstd() -> Any:
    import pyarrow as pa

    return pa.Codec("zstd")


def bomb(size: int, suffix: str) -> bytes:
    """A packed file that grows to about this many bytes: one line that never ends."""
    block = 2**26
    start, member = packed(b'{"messages": "', suffix), packed(b" " * block, suffix)
    return start + member * max(1, size // block)


def _log(dice: Random, source: Source) -> tuple[str, bytes, str]:
    return source.suffix, plain(dice, source), dice.choice((".gz", ".zst"))


def _whole(dice: Random, source: Source) -> Mutant:
    """A packed log with changed rows."""
    rows, names = changed_rows(dice, source)
    suffix = dice.choice((".gz", ".zst"))
    return Mutant(f"log.jsonl{suffix}", packed(lines_of(rows), suffix), f"{names} in {source.name}, packed")


def _damaged(dice: Random, source: Source) -> Mutant:
    name, data, suffix = _log(dice, source)
    return Mutant(f"log{name}{suffix}", damaged(dice, packed(data, suffix)), f"{source.name}, packed and damaged")


def _cut(dice: Random, source: Source) -> Mutant:
    name, data, suffix = _log(dice, source)
    whole = packed(data, suffix)
    return Mutant(f"log{name}{suffix}", whole[: dice.randrange(len(whole))], f"{source.name}, packed and cut")


def _members(dice: Random, source: Source) -> Mutant:
    """Several members, some empty, cut in the middle of lines, of both kinds."""
    name, data, suffix = _log(dice, source)
    parts = []
    for _ in range(dice.choice((2, 3, 10))):
        at = dice.randrange(len(data) + 1)
        parts.append(packed(data[:at], suffix if dice.random() < 0.9 else dice.choice((".gz", ".zst"))))
        data = data[at:]
    return Mutant(f"log{name}{suffix}", b"".join([*parts, packed(data, suffix)]), f"{source.name}, in members")


def _trailing(dice: Random, source: Source) -> Mutant:
    name, data, suffix = _log(dice, source)
    tail = dice.choice(
        (b"\0" * 512, b"garbage", data, b"\n", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")
    )
    return Mutant(f"log{name}{suffix}", packed(data, suffix) + tail, f"{source.name}, packed, with a tail")


def _twice(dice: Random, source: Source) -> Mutant:
    name, data, suffix = _log(dice, source)
    for _ in range(dice.choice((2, 3, 5))):
        data = packed(data, suffix)
    return Mutant(f"log{name}{suffix}", data, f"{source.name}, packed several times")


def _other(dice: Random, source: Source) -> Mutant:
    """Packed in a way that the name does not say, or that is not read at all."""
    name, data, suffix = _log(dice, source)
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr(zipfile.ZipInfo("log.jsonl"), data)
    content = dice.choice((bz2.compress(data), zipped.getvalue(), packed(data, ".gz"), packed(data, ".zst"), data))
    suffix = dice.choice((".gz", ".zst", "", ".bz2", ".zip", ".xz"))
    return Mutant(f"log{name}{suffix}", content, f"{source.name}, packed in another way")


MUTATORS = {_whole: 3, _damaged: 4, _cut: 2, _members: 2, _trailing: 2, _twice: 1, _other: 2}
