"""The functions that a row passes through, from the log to its findings: `python -m tools.walk LOG ROW
[TOKENIZER]`.

Each counts once, when it is first called, after the function that calls it; functions of fewer than 8 lines do not
count. A stay is a run of functions in one room, a return is a stay in a room that was left before. The first row
of the log is read before, so loading is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

from tito_audit import Settings, scan_rollouts

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tito_audit"
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
LINES = 8
Stop = tuple[str, str]
"""A file of the package and a function in it."""


def walk(log: Path, row: int, tokenizer: Path = TOY) -> list[Stop]:
    """The functions that a row of a JSONL log passes through, in reading order."""
    lines, stops, seen = log.read_bytes().splitlines(keepends=True), list[Stop](), set[CodeType]()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in seen and _counts(frame.f_code):
            seen.add(frame.f_code)
            stops.extend(_stop(one) for one in (_caller(frame), frame) if one is not None)

    with TemporaryDirectory() as folder:
        two = Path(folder) / log.name
        two.write_bytes(lines[0] + lines[row])
        results = iter(scan_rollouts(two, Settings(tokenizer=str(tokenizer))))
        next(results)
        sys.setprofile(called)
        next(results)
        sys.setprofile(None)
    return stops


def stays(stops: Sequence[Stop], *, files: bool = False) -> list[str]:
    """The rooms or files of a walk: one entry for each run of functions."""
    return [name for name, _ in groupby(stop[0] if files else stop[0].split("/")[0] for stop in stops)]


def _counts(code: CodeType) -> bool:
    lines = [line for *_, line in code.co_lines() if line]
    return _is_ours(code) and not code.co_name.startswith("<") and max(lines) - min(lines) >= LINES


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(str(PACKAGE))


def _caller(frame: FrameType) -> FrameType | None:
    """The nearest function of the package that led to the call."""
    caller = frame.f_back
    while caller is not None and not _is_ours(caller.f_code):
        caller = caller.f_back
    return caller


def _stop(frame: FrameType) -> Stop:
    return Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname


if __name__ == "__main__":
    way = walk(Path(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:4]))
    for room, passed in groupby(way, key=lambda stop: stop[0].split("/")[0]):
        print(f"{room:10}", ", ".join(name for (_, name), _ in groupby(passed)))
    for what, found in ("rooms", stays(way)), ("files", stays(way, files=True)):
        print(f"{len(found)} stays in {len(set(found))} {what}, {len(found) - len(set(found))} returns")
