"""Kept cases: folders with the words of a run and its files. A case is kept once the tool withstands it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.torture.attack import Attack
from tests.torture.judge import Failure

__all__ = ["CASES", "keep", "kept"]

CASES = Path(__file__).resolve().parent / "cases"
_LARGEST = 40_000
"""Bytes of a case that may be kept in the repository."""


def keep(attack: Attack, failure: Failure, where: str, folder: Path) -> Path | None:
    """The folder of a new case; None if it is too large, or made from logs that are not ours."""
    if not attack.ours or sum(map(len, attack.files.values())) > _LARGEST:
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", f"{failure.kind} {failure.place}".lower()).strip("-")[:70]
    digest = hashlib.sha256(repr((attack.words, sorted(attack.files.items()))).encode()).hexdigest()[:6]
    case = folder / f"{slug}-{digest}"
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir(parents=True)
    names = {name: f"{number}.bin" for number, name in enumerate(attack.files)}
    for name, data in attack.files.items():
        (case / names[name]).write_bytes(data)
    about = {
        "failed": str(failure),
        "seen": where,
        "made": attack.made,
        "words": attack.words,
        "files": names,
        "stdin": attack.stdin,
        "seconds": attack.seconds,
    }
    (case / "case.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return case


def kept(folder: Path = CASES) -> Iterator[tuple[str, Attack]]:
    """The kept cases by name."""
    for path in sorted(folder.glob("*/case.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        files = {name: (path.parent / stored).read_bytes() for name, stored in about["files"].items()}
        words, change = tuple(about["words"]), about["made"]
        yield path.parent.name, Attack(words, files, change, stdin=about["stdin"], seconds=about["seconds"])
