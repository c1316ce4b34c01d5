"""Large logs out of small ones: rows and tokens by the hundred thousand, deep values, bombs."""

from __future__ import annotations

import json
from random import Random

from tests.torture.attack import Mutant
from tests.torture.mutants.compressed import bomb
from tests.torture.mutants.structure import places
from tests.torture.sources import Source, fixtures

__all__ = ["MUTATORS"]


def _small(dice: Random) -> Source:
    return dice.choice([log for log in fixtures() if len(log.data) < 20_000 and log.suffix == ".jsonl"])


def _many_rows(dice: Random, source: Source) -> Mutant:
    """One row many times."""
    source = _small(dice)
    line = min(source.data.splitlines(keepends=True), key=len)
    times = min(10_000, 3_000_000 // len(line))
    return Mutant("log.jsonl", line * times, f"a row of {source.name}, {times} times", seconds=times / 50)


def _many_tokens(dice: Random, source: Source) -> Mutant:
    """One row whose lists of numbers are very long."""
    row = _small(dice).rows(dice)[0]
    lists = [holder[key] for holder, key in places(row) if isinstance(holder[key], list)]
    numeric = [ids for ids in lists if len(ids) > 1 and all(isinstance(number, (int, float)) for number in ids)]
    size = dice.choice((20_000, 150_000, 400_000))
    for ids in numeric[:4]:
        ids[:] = (ids * (size // len(ids) + 1))[: size + dice.choice((0, 0, 0, 1))]
    return Mutant("log.jsonl", json.dumps(row).encode() + b"\n", f"lists of {size} numbers", seconds=size / 5_000)


def _many_messages(dice: Random, source: Source) -> Mutant:
    """One row whose lists of objects are very long."""
    row = _small(dice).rows(dice)[0]
    lists = [holder[key] for holder, key in places(row) if isinstance(holder[key], list)]
    lists = [items for items in lists if items and isinstance(items[0], dict)]
    size = dice.choice((300, 2_000))
    if lists:
        objects = dice.choice(lists)
        objects[:] = (objects * (size // len(objects) + 1))[:size]
    return Mutant("log.jsonl", json.dumps(row).encode() + b"\n", f"a list of {size} objects", seconds=size / 50)


def _bomb(dice: Random, source: Source) -> Mutant:
    """A small packed file that grows a thousandfold, as one line."""
    suffix = dice.choice((".gz", ".zst"))
    size = dice.choice((2**29, 2**30, 2**31, 10 * 2**30))
    return Mutant(f"log.jsonl{suffix}", bomb(size, suffix), f"a packed line of {size} bytes", seconds=size / 2**26)


def _wide(dice: Random, source: Source) -> Mutant:
    """A row with very many keys."""
    row = source.rows(dice)[0]
    if isinstance(row, dict):
        row |= {f"key {number}": number for number in range(dice.choice((3_000, 30_000)))}
    return Mutant("log.jsonl", json.dumps(row, default=str).encode() + b"\n", "very many keys", seconds=20)


MUTATORS = {_many_rows: 2, _many_tokens: 4, _many_messages: 2, _bomb: 1, _wide: 2}
