"""Tokenizer folders and chat templates with damage; `tests.torture.definitions` has those built to exhaust."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from random import Random
from typing import Any

from tests.torture.mutants.bytes_ import damaged
from tests.torture.mutants.structure import CHANGES, _encoded, places
from tests.torture.sources import ROOT

__all__ = ["tokenizer_files"]


@cache
def _toy() -> dict[str, bytes]:
    folder = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def tokenizer_files(dice: Random) -> tuple[dict[str, bytes], str]:
    """The files of a tokenizer folder, one of them changed, and what was done."""
    if importlib.util.find_spec("tests.torture.definitions") and dice.random() < 0.5:
        from tests.torture import definitions

        return definitions.drawn(dice)
    files = dict(_toy())
    name = dice.choice(sorted(files))
    if dice.random() < 0.3 or not name.endswith(".json"):
        files[name] = damaged(dice, files[name])
        return files, f"damaged bytes of {name}"
    value: Any = json.loads(files[name])
    names = []
    for _ in range(dice.choice((1, 1, 2))):
        change = dice.choices(list(CHANGES), list(CHANGES.values()))[0]
        spots = places(value)
        try:
            change(dice, value, dice.choice(spots[:40] if dice.random() < 0.7 else spots))
        except (IndexError, KeyError, TypeError, ValueError, OverflowError):
            continue
        names.append(change.__name__.strip("_"))
    files[name] = _encoded(value).encode("utf-8", "surrogatepass")
    return files, f"{', '.join(names)} in {name}"
