"""The smallest input that still fails in the same way: lines, keys, items, columns and bytes taken away."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.torture.attack import Attack
from tests.torture.mutants.structure import places

__all__ = ["minimised"]

Fails = Callable[[Attack], bool]
_TRIES = 400
"""Runs that one failure may take."""


class _Spent(Exception):
    """No runs are left."""


def minimised(attack: Attack, fails: Fails, *, seconds: float = 60.0) -> Attack:
    """The attack with less of everything; `fails` tells whether an attack still fails in the same way."""
    until, left = time.monotonic() + seconds, _TRIES
    best = attack

    def accepted(tried: Attack) -> bool:
        nonlocal left, best
        left -= 1
        if left < 0 or time.monotonic() > until:
            raise _Spent
        if fails(tried):
            best = tried
            return True
        return False

    try:
        _fewer_files(attack, accepted)
        _fewer_words(best, accepted)
        for name in best.files:
            _smaller(best, name, accepted)
        _fewer_words(best, accepted)
    except _Spent:
        pass
    return best


def _fewer_files(attack: Attack, accepted: Fails) -> None:
    for name in list(attack.files):
        if len(attack.files) > 1 and not any(name in word for word in attack.words):
            tried = attack.with_files({other: data for other, data in attack.files.items() if other != name})
            attack = tried if accepted(tried) else attack


def _fewer_words(attack: Attack, accepted: Fails) -> None:
    at = 1
    while at < len(attack.words):
        for size in (2, 1):
            words = attack.words[:at] + attack.words[at + size :]
            gone = attack.words[at : at + size]
            if gone[0].startswith("-") and len(gone) == size:
                tried = replace(attack, words=words)
                if accepted(tried):
                    attack = tried
                    break
        else:
            at += 1


def _smaller(attack: Attack, name: str, accepted: Fails) -> None:
    """Less of one file."""
    data = attack.files[name]

    def with_data(changed: bytes) -> bool:
        return accepted(attack.with_files(attack.files | {name: changed}))

    if name.endswith(".parquet"):
        _less_table(data, with_data)
        return
    data = _without(data.splitlines(keepends=True), with_data)
    value = _value(data)
    if value is not None:
        _less_json(value, with_data, b"\n" if data.endswith(b"\n") else b"")
    else:
        _without([data[at : at + 1] for at in range(len(data))], with_data)


def _without(parts: list[bytes], accepted: Callable[[bytes], bool]) -> bytes:
    """Parts that are needed; halves are taken away first, then ever smaller pieces."""
    size = max(1, len(parts) // 2)
    while parts and size:
        at = 0
        while at < len(parts):
            fewer = parts[:at] + parts[at + size :]
            if len(parts) > 1 and accepted(b"".join(fewer)):
                parts = fewer
            else:
                at += size
        size //= 2
    return b"".join(parts)


def _value(data: bytes) -> Any:
    """The value of a file of one JSON value that Python writes again as it was; None of any other."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def _less_json(value: Any, accepted: Callable[[bytes], bool], end: bytes) -> None:
    def text() -> bytes:
        return json.dumps(value).encode("utf-8", "surrogatepass") + end

    if not accepted(text()):
        return
    changed = True
    while changed:
        changed = False
        for holder, key in places(value):
            if (isinstance(holder, dict) and key not in holder) or (
                isinstance(holder, list) and key >= len(holder)
            ):
                continue
            old = holder[key]
            if isinstance(holder, dict):
                items = list(holder.items())
                del holder[key]
                if accepted(text()):
                    changed = True
                    continue
                holder.clear()
                holder.update(items)
            else:
                del holder[key]
                if accepted(text()):
                    changed = True
                    continue
                holder.insert(key, old)
            if isinstance(old, str | list) and len(old) > 8:
                holder[key] = old[:4] if isinstance(old, str) else old[: len(old) // 2]
                if accepted(text()):
                    changed = True
                    continue
                holder[key] = old


def _less_table(data: bytes, accepted: Callable[[bytes], bool]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def saved(table: pa.Table) -> bytes:
        out = pa.BufferOutputStream()
        pq.write_table(table, out)
        return bytes(out.getvalue())

    if not _readable(data):
        return
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
        if not accepted(saved(table)):
            return
        for at in range(table.num_rows - 1):
            if accepted(saved(table.slice(at, 1))):
                table = table.slice(at, 1)
                break
        for name in list(table.column_names):
            fewer = table.drop_columns([name])
            if accepted(saved(fewer)):
                table = fewer
    except (pa.ArrowException, ValueError, KeyError):
        return


def _readable(data: bytes) -> bool:
    """Whether Arrow reads a file, which may end the process that tries."""
    # It ends at once after reading: threads of libraries may make a usual end fail.
    code = (
        "import os, sys, pyarrow.parquet as p, pyarrow as a; "
        "p.ParquetFile(a.BufferReader(sys.stdin.buffer.read())).read(); os._exit(7)"
    )
    return subprocess.run([sys.executable, "-c", code], input=data, capture_output=True).returncode == 7
