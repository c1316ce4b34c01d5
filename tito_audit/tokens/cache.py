"""What was computed about a tokenizer, stored on disk for the next run.

Loading a tokenizer takes longer than auditing ten rows. So its tables are stored (what every id stands for,
where texts may be cut), with notes of other rooms, such as the facts of its chat templates. Nothing of a log is
stored.

For a tokenizer used repeatedly on large logs, the definition is stored too, in the notation that loads fastest,
in two thirds of the time: without white space, each merge as one text (`"a b"`) instead of two, the vocabulary
sorted. The library itself confirms that it is the same: what it loads from either notation, it must write
identically.

Files are named by a hash of everything they depend on: the tokenizer's files, the version of `tokenizers`, and
the code of this room. They hold JSON and plain arrays with a checksum, and are renamed into place once
complete. A file that is missing, damaged or unexpected is computed again.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from tito_audit.settings.values import user_path
from tito_audit.tokens.vocab import Entries, Prefix

if TYPE_CHECKING:
    import tokenizers

VARIABLE = "TITO_AUDIT_CACHE"
NOTES = 32
"""How many notes are stored for one tokenizer."""
FOLDER_BYTES = 96 << 20
"""How much is stored for all tokenizers; the least recently used files are deleted."""
_MAGIC = b"tito-audit cache 1\n"
# `segments` files are from earlier versions, and deleted like the others.
_NAME = re.compile(r"tokenizer-[0-9a-f]{32}\.(tables|definition|segments|notes)(\.\d+\.\d+\.part)?")


@dataclass(frozen=True, slots=True)
class Tables:
    """What is known about a tokenizer once it has been loaded."""

    entries: Entries
    cuts: Mapping[str, int]
    """The control tokens at which texts may be cut, with their ids."""
    normal_form: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None


def cache_folder() -> Path | None:
    """The folder of the cache: TITO_AUDIT_CACHE, else the user's cache folder; None if the variable is `off`."""
    named = os.environ.get(VARIABLE)
    if named:
        return None if named.lower() == "off" else user_path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # By the specification, a relative path is to be ignored.
        folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # the user has no home folder
        return None
    return folder / "tito-audit"


def open_store(version: str, files: Iterable[tuple[str, bytes]]) -> StoredTokenizer | None:
    """The store of the tokenizer with these files, for this version of the library; None without a cache.

    Files are given by name and content, or by name and a hash of the content if it is long.
    """
    folder = cache_folder()
    if folder is None:
        return None
    # A hash of the code that computes the tables.
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        with suppress(OSError):
            code.update(file.read_bytes())
    key = hashlib.sha256(orjson.dumps([_MAGIC.decode(), version, code.hexdigest()]))
    for name, content in files:
        key.update(f"{name} {len(content)}\n".encode())
        key.update(content)
    return StoredTokenizer(folder, key.hexdigest()[:32])


class StoredTokenizer:
    """What is stored about one tokenizer."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key
        self._process = os.getpid()
        self._used: dict[str, dict[str, Any]] = {}
        """Notes that this run read or made."""
        self._noted = False
        """Whether this run made one."""
        self._lacks_definition = False
        """Whether the definition was wanted but missing."""

    @cached_property
    def tables(self) -> Tables | None:
        """The tables; None if they are not stored."""
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

    @property
    def definition(self) -> bytes | None:
        """The tokenizer's definition in the notation that loads fastest; None if there is none."""
        content = self._read("definition")
        if content is None:
            self._lacks_definition = True
            return None
        with suppress(OSError):
            os.utime(self._path("definition"))
        return content[1].get("json") or None

    def note(self, name: str) -> dict[str, Any] | None:
        """The note stored under a name, plain JSON, not to be modified; None if there is none."""
        note = self._used.get(name, self._notes.get(name))
        if note is not None:
            self._used[name] = note
        return note

    def add_note(self, name: str, note: Mapping[str, Any]) -> None:
        """Store a note under a name, replacing the previous one; does nothing if it is not JSON."""
        if os.getpid() != self._process:
            return
        with suppress(TypeError):
            self._used[name] = orjson.loads(orjson.dumps(note))
            self._noted = True

    def save(self, tables: Callable[[], Tables], definition: Callable[[], bytes | None] = lambda: None) -> None:
        """Write what is not stored yet, if possible; does nothing in a forked process.

        The definition is made only for a tokenizer that was stored before: making it costs what it saves in two
        runs.
        """
        if os.getpid() != self._process:
            return
        try:
            if self.tables is None:
                self._write("tables", *_plain(tables()))
            elif self._lacks_definition and (content := definition()) is not None:
                self._write("definition", {}, {"json": content})
                self._lacks_definition = False
            if self._noted:
                notes = {**self._used, **self._notes} | self._used  # those of this run come first
                self._write("notes", {"notes": dict(islice(notes.items(), NOTES))}, {})
                self._noted = False
        except OSError:  # a run does not fail because of its cache
            return

    @cached_property
    def _notes(self) -> dict[str, dict[str, Any]]:
        content = self._read("notes")
        notes = content[0].get("notes") if content is not None else None
        if not isinstance(notes, dict):
            return {}
        return {name: note for name, note in notes.items() if isinstance(note, dict)}

    def _path(self, kind: str) -> Path:
        return self._folder / f"tokenizer-{self._key}.{kind}"

    def _read(self, kind: str) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        """The values and parts of a file; None if it is missing or damaged."""
        try:
            content = self._path(kind).read_bytes()
        except OSError:
            return None
        size = len(_MAGIC) + 64
        if content[:size] != _MAGIC + self._checksum(memoryview(content)[size:]):
            return None
        start = content.find(b"\n", size) + 1
        values = orjson.loads(content[size:start])
        parts: dict[str, bytes] = {}
        for name, length in values.pop("parts").items():
            parts[name] = content[start : start + length]
            start += length
        return values, parts

    def _write(self, kind: str, values: Mapping[str, Any], parts: Mapping[str, bytes]) -> None:
        """Write a file, completely or not at all, and delete old ones."""
        path = self._path(kind)
        head = orjson.dumps({**values, "parts": {name: len(data) for name, data in parts.items()}})
        body = b"\n".join([head, b"".join(parts.values())])
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}.part")
        try:
            # Readable by the user only: chat templates may be private.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with os.fdopen(os.open(part, flags, 0o600), "wb") as out:
                out.write(_MAGIC + self._checksum(body) + body)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        # Delete abandoned files, and the least recently used ones while there are too many bytes.
        files = []
        for file in self._folder.iterdir():
            named = _NAME.fullmatch(file.name)
            if named is None:
                continue
            with suppress(OSError):
                there = file.stat()
                if named[2] is None:
                    files.append((there.st_mtime, there.st_size, file))
                elif there.st_mtime < time.time() - 24 * 3600:  # an unfinished file
                    file.unlink(missing_ok=True)
        total = 0
        for _, size, file in sorted(files, reverse=True):
            total += size
            if total > FOLDER_BYTES:
                with suppress(OSError):
                    file.unlink(missing_ok=True)

    def _checksum(self, body: bytes | memoryview) -> bytes:
        """A checksum of key and content, so a renamed file is not mistaken for another."""
        checksum = hashlib.sha256(self._key.encode())
        checksum.update(body)
        return checksum.hexdigest().encode()


def _plain(tables: Tables) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Tables as the values and parts of a file."""
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
    lengths, flags = entries.lengths.astype("<i4").tobytes(), entries.known.astype(np.uint8).tobytes()
    return values, {"lengths": lengths, "known": flags, "data": entries.data}


def _tables(values: Mapping[str, Any], parts: Mapping[str, bytes]) -> Tables:
    """Tables from the values and parts of a file."""
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


_COMMENT = "#version"
"""A merge written as one text with this beginning is read as a comment."""
_CHANGING = ("add_", "enable_", "train")
"""Prefixes of the methods that change one of the library's tokenizers."""


class LazyBackend:
    """A tokenizer of the library, loaded on first use."""

    changed = False
    """Whether it may have been changed since then."""

    def __init__(self, load: Callable[[], tokenizers.Tokenizer]) -> None:
        self._load = load

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_CHANGING):
            self.changed = True
        return getattr(self._loaded, name)

    @property
    def is_loaded(self) -> bool:
        """Whether it was used."""
        return "_loaded" in vars(self)

    @cached_property
    def _loaded(self) -> tokenizers.Tokenizer:
        return self._load()


def definition_of(backend: object) -> bytes | None:
    """The definition of a tokenizer as loaded, to load it from next time; b"" if none loads faster, None if it is
    not known now."""
    if not isinstance(backend, LazyBackend) or not backend.is_loaded or backend.changed:
        return None
    from tokenizers import Tokenizer

    try:
        own = backend.to_str()
        compacted = compact(own)
        return compacted if compacted is not None and Tokenizer.from_buffer(compacted).to_str() == own else b""
    except Exception:  # tokenizers raises plain Exception, also for parts written in Python
        return b""


def compact(definition: str) -> bytes | None:
    """The same definition in the notation that loads fastest; None unless its model is BPE."""
    whole = orjson.loads(definition)
    model = whole["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        return None
    merges = model["merges"]
    if merges and set(map(type, merges)) == {list} and set(map(len, merges)) == {2}:
        texts = list(map(" ".join, merges))
        together = "".join(texts)
        # Each pair as one text, if each text shows where its pair divides.
        if together.count(" ") == len(texts) and _COMMENT not in together:
            model["merges"] = texts
    vocabulary = model["vocab"]
    model["vocab"] = {token: vocabulary[token] for token in sorted(vocabulary)}
    return orjson.dumps(whole)
