"""What was worked out about a tokenizer, kept on disk for the next run.

Loading a tokenizer takes longer than auditing ten rows. So its tables are kept (what every id stands for,
where texts may be cut) and what others noted, such as what was read off its chat templates. No text of a log is.

Files are named by a hash of all that they depend on: the tokenizer's files, the version of `tokenizers`, and
the code of this room. They hold JSON and plain arrays under a checksum, take their name once they are whole, and
are never trusted to be there: one that is missing, damaged or of something else is worked out again.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tito_audit.tokens.vocab import Entries, Prefix

VARIABLE = "TITO_AUDIT_CACHE"
NOTES = 32
"""How many notes are kept for one tokenizer."""
FOLDER_BYTES = 96 << 20
"""How much is kept of all tokenizers; those used the longest ago are let go."""
_MAGIC = b"tito-audit cache 1\n"
# `segments` are of earlier versions, and let go like the others.
_NAME = re.compile(r"tokenizer-[0-9a-f]{32}\.(tables|segments|notes)(\.\d+\.\d+\.part)?")
_ABANDONED = 24 * 3600
"""Seconds after which an unfinished file is nobody's any more."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What is known of a tokenizer once it was loaded."""

    entries: Entries
    cuts: Mapping[str, int]
    """The control tokens at which texts may be cut."""
    normal_form: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None


def cache_folder() -> Path | None:
    """Where things are kept: what TITO_AUDIT_CACHE names, else in the user's cache folder; None if it is `off`."""
    named = os.environ.get(VARIABLE)
    if named:
        return None if named.lower() == "off" else Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # As the specification has it, a relative path there is not to be used.
        folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return None
    return folder / "tito-audit"


def open_store(version: str, files: Iterable[tuple[str, bytes]]) -> Store | None:
    """What is kept of the tokenizer with these files, as this version of the library reads them; or None.

    Files are given by name and content, or a hash of it where that is long.
    """
    folder = cache_folder()
    if folder is None:
        return None
    key = hashlib.sha256(orjson.dumps([_MAGIC.decode(), version, _code()]))
    for name, content in files:
        key.update(f"{name} {len(content)}\n".encode())
        key.update(content)
    return Store(folder, key.hexdigest()[:32])


class Store:
    """What is kept of one tokenizer."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key
        self._process = os.getpid()
        self._used: dict[str, dict[str, Any]] = {}
        """Notes that this run asked for or made."""
        self._noted = False
        """Whether it made one."""

    @cached_property
    def tables(self) -> Tables | None:
        """The tables, if they were kept."""
        content = self._read("tables")
        if content is None:
            return None
        try:
            tables = _tables(*content)
        except (KeyError, TypeError, ValueError):
            return None
        with suppress(OSError):
            os.utime(self._path("tables"))
        return tables

    def note(self, name: str) -> dict[str, Any] | None:
        """What was noted under a name, plain JSON, not to be written to; None if nothing was."""
        found = self._used.get(name, self._notes.get(name))
        if found is not None:
            self._used[name] = found
        return found

    def add_note(self, name: str, note: Mapping[str, Any]) -> None:
        """Note something under a name, in place of what was noted there; nothing if it is no JSON."""
        if os.getpid() != self._process:
            return
        with suppress(TypeError):
            self._used[name] = orjson.loads(orjson.dumps(note))
            self._noted = True

    def save(self, tables: Callable[[], Tables]) -> None:
        """Write what was not kept before, where that can be done; nothing in a process that was forked."""
        if os.getpid() != self._process:
            return
        try:
            if self.tables is None:
                self._write("tables", *_plain(tables()))
            if self._noted:
                notes = {**self._used, **self._notes} | self._used  # those of this run come first
                self._write("notes", {"notes": dict(islice(notes.items(), NOTES))}, {})
                self._noted = False
        except OSError:  # a cache is no reason for a run to fail
            return

    @cached_property
    def _notes(self) -> dict[str, dict[str, Any]]:
        """The notes that were kept."""
        content = self._read("notes")
        notes = content[0].get("notes") if content is not None else None
        if not isinstance(notes, dict):
            return {}
        return {name: note for name, note in notes.items() if isinstance(note, dict)}

    def _path(self, kind: str) -> Path:
        return self._folder / f"tokenizer-{self._key}.{kind}"

    def _read(self, kind: str) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        """The values and parts of a file; None if it is not there or not as it was written."""
        try:
            content = self._path(kind).read_bytes()
        except OSError:
            return None
        size = len(_MAGIC) + 64
        body = content[size:]
        if content[:size] != _MAGIC + self._checksum(body):
            return None
        head, _, data = body.partition(b"\n")
        values = orjson.loads(head)
        parts: dict[str, bytes] = {}
        start = 0
        for name, length in values.pop("parts").items():
            parts[name] = data[start : start + length]
            start += length
        return values, parts

    def _write(self, kind: str, values: Mapping[str, Any], parts: Mapping[str, bytes]) -> None:
        """Put a file in place, whole or not at all, and let old ones go."""
        path = self._path(kind)
        head = orjson.dumps({**values, "parts": {name: len(data) for name, data in parts.items()}})
        body = b"\n".join([head, b"".join(parts.values())])
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}.part")
        try:
            # For the user alone: chat templates may be private.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with os.fdopen(os.open(part, flags, 0o600), "wb") as out:
                out.write(_MAGIC + self._checksum(body) + body)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        _tidy(self._folder)

    def _checksum(self, body: bytes) -> bytes:
        """Of the content and what it is about: a file that was renamed is not taken for another's."""
        return hashlib.sha256(self._key.encode() + body).hexdigest().encode()


def _plain(tables: Tables) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Tables as values and parts of a file."""
    entries = tables.entries
    values = {
        "prefix": str(entries.prefix),
        "added_ids": entries.added_ids,
        "special_ids": entries.special_ids,
        "far_ids": entries.far_ids.tolist(),
        "cuts": dict(tables.cuts),
        "normal_form": tables.normal_form,
        "eos_ids": tables.eos_ids,
        "bos_id": tables.bos_id,
    }
    lengths, known = entries.lengths.astype("<i4").tobytes(), entries.known.astype(np.uint8).tobytes()
    return values, {"lengths": lengths, "known": known, "data": entries.data}


def _tables(values: Mapping[str, Any], parts: Mapping[str, bytes]) -> Tables:
    """Tables out of the values and parts of a file."""
    entries = Entries(
        prefix=Prefix(values["prefix"]),
        added_ids=tuple(values["added_ids"]),
        special_ids=tuple(values["special_ids"]),
        far_ids=np.array(values["far_ids"], np.int64),
        data=parts["data"],
        lengths=np.frombuffer(parts["lengths"], "<i4").astype(np.int32, copy=False),
        known=np.frombuffer(parts["known"], np.bool_),
    )
    return Tables(entries, values["cuts"], values["normal_form"], tuple(values["eos_ids"]), values["bos_id"])


def _code() -> str:
    """A hash of the code that works the tables out."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        with suppress(OSError):
            code.update(file.read_bytes())
    return code.hexdigest()


def _tidy(folder: Path) -> None:
    """Let files go that were used the longest ago, as long as they are too many bytes, and abandoned ones."""
    files = []
    for file in folder.iterdir():
        named = _NAME.fullmatch(file.name)
        if named is None:
            continue
        with suppress(OSError):
            there = file.stat()
            if named[2] is None:
                files.append((there.st_mtime, there.st_size, file))
            elif there.st_mtime < time.time() - _ABANDONED:
                file.unlink(missing_ok=True)
    held = 0
    for _, size, file in sorted(files, reverse=True):
        held += size
        if held > FOLDER_BYTES:
            with suppress(OSError):
                file.unlink(missing_ok=True)
