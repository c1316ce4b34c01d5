"""On-disk cache of what is computed about a tokenizer.

Loading a tokenizer takes longer than auditing ten rows. So its tables are stored: what every id stands for, and
where texts may be cut. Other rooms add notes, such as the facts of its chat templates. Nothing of a log is stored.

For a tokenizer that is used again on large logs, the definition is stored too, in the notation that loads in two
thirds of the time: no white space, each merge as one text (`"a b"`), the vocabulary sorted. The library confirms
that nothing changed: it must serialize both notations identically.

A few short texts do not need the whole definition. BPE only ever makes substrings of a text, so entries with bytes
that the texts do not hold in a row may be left out. What remains loads in a hundredth of the time and gives the
same ids (`Excerpts`).

Files are named by a hash of all they depend on: the tokenizer's files, the version of `tokenizers`, and the code
of this room. They hold JSON and plain arrays with a checksum, and are renamed into place once complete. A file
that is missing, damaged or unexpected is computed again.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tito_audit.record.arrays import Offsets
from tito_audit.settings.values import expand_user
from tito_audit.tokens.vocab import ALPHABET, Entries, Prefix

if TYPE_CHECKING:
    import tokenizers

VARIABLE = "TITO_AUDIT_CACHE"
MAX_NOTES = 32
"""How many notes are stored for a tokenizer."""
FOLDER_BYTES = 96 << 20
"""Size of the cache; beyond it the least recently used files are deleted."""
_MAGIC = b"tito-audit cache 1\n"
# Earlier versions wrote `segments` files: they are deleted like the others.
_FILE_NAME = re.compile(r"tokenizer-[0-9a-f]{32}\.(tables|definition|merges|segments|notes)(\.\d+\.\d+\.part)?")


@dataclass(frozen=True, slots=True)
class Tables:
    """What is known about a tokenizer after loading it."""

    entries: Entries
    cuts: Mapping[str, int]
    """The control tokens at which texts may be cut, with their ids."""
    normal_form: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None

    def pack(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """JSON values and arrays as bytes, as `StoredTokenizer` writes them."""
        entries = self.entries
        values = {
            "prefix": str(entries.prefix),
            "added_ids": entries.added_ids,
            "special_ids": entries.special_ids,
            "far_ids": entries.far_ids.tolist(),
            "cuts": dict(self.cuts),
            "normal_form": self.normal_form,
            "eos_ids": self.eos_ids,
            "bos_id": self.bos_id,
        }
        lengths, flags = entries.lengths.astype("<i4").tobytes(), entries.known.astype(np.uint8).tobytes()
        return values, {"lengths": lengths, "known": flags, "data": entries.data}

    @classmethod
    def unpack(cls, values: Mapping[str, Any], parts: Mapping[str, bytes]) -> Tables:
        """The tables that `pack` returned the values and arrays of."""
        entries = Entries(
            prefix=Prefix(values["prefix"]),
            added_ids=tuple(values["added_ids"]),
            special_ids=tuple(values["special_ids"]),
            far_ids=np.array(values["far_ids"], np.int64),
            data=parts["data"],
            lengths=np.frombuffer(parts["lengths"], "<i4").astype(np.int32, copy=False),
            known=np.frombuffer(parts["known"], np.bool_),
        )
        return cls(entries, values["cuts"], values["normal_form"], tuple(values["eos_ids"]), values["bos_id"])


def cache_folder() -> Path | None:
    """TITO_AUDIT_CACHE, else a folder in the user's cache; None if the variable is `off`."""
    named = os.environ.get(VARIABLE)
    if named:
        return None if named.lower() == "off" else expand_user(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification says to ignore a relative path.
        folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # the user has no home folder
        return None
    return folder / "tito-audit"


def open_store(version: str, files: Iterable[tuple[str, bytes]]) -> StoredTokenizer | None:
    """The cache of the tokenizer with these files, for this version of the library; None if caching is off.

    Files are given by name and content, or by name and a hash of the content if it is long.
    """
    folder = cache_folder()
    if folder is None:
        return None
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
    """The cached files of one tokenizer."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key
        self._process = os.getpid()
        self._current_notes: dict[str, dict[str, Any]] = {}
        """Notes that this run read or added."""
        self._has_new_notes = False
        """Whether this run added one."""
        self._missing: set[str] = set()
        """Kinds of files that were wanted but missing."""

    @cached_property
    def tables(self) -> Tables | None:
        """The stored tables; None if there are none."""
        content = self._read("tables")
        if content is None:
            return None
        try:
            tables = Tables.unpack(*content)
        except (KeyError, TypeError, ValueError):
            return None
        with suppress(OSError):
            os.utime(self._path("tables"))
        return tables

    @property
    def definition(self) -> bytes | None:
        """The stored definition in the notation that loads fastest; None if there is none."""
        content = self._read_if_wanted("definition")
        return content and (content[1].get("json") or None)

    @cached_property
    def excerpts(self) -> Excerpts | None:
        """What makes excerpts of the tokenizer; None if nothing is stored for it."""
        content, tables = self._read_if_wanted("merges"), self.tables
        try:
            return Excerpts(tables, content[1]) if content is not None and tables is not None else None
        except (KeyError, TypeError, ValueError):
            return None

    def note(self, name: str) -> dict[str, Any] | None:
        """The note under a name, plain JSON, not to be modified; None if there is none."""
        note = self._current_notes.get(name, self._notes.get(name))
        if note is not None:
            self._current_notes[name] = note
        return note

    def add_note(self, name: str, note: Mapping[str, Any]) -> None:
        """Store a note under a name, replacing the previous one; does nothing if it is not JSON."""
        if os.getpid() != self._process:
            return
        with suppress(TypeError):
            self._current_notes[name] = orjson.loads(orjson.dumps(note))
            self._has_new_notes = True

    def save(self, tables: Callable[[], Tables], **others: Callable[[], Mapping[str, bytes] | None]) -> None:
        """Write what is not stored yet; does nothing in a forked process or if the disk refuses.

        The `others`, definition and merges, are made only for a tokenizer whose tables were stored before: making
        them costs what they save in two runs.
        """
        if os.getpid() != self._process:
            return
        try:
            if self.tables is None:
                self._write("tables", *tables().pack())
            else:
                for kind in self._missing & others.keys():
                    if (parts := others[kind]()) is not None:
                        self._write(kind, {}, parts)
                        self._missing.discard(kind)
            if self._has_new_notes:
                # The notes of this run come first
                notes = {**self._current_notes, **self._notes} | self._current_notes
                self._write("notes", {"notes": dict(islice(notes.items(), MAX_NOTES))}, {})
                self._has_new_notes = False
        except OSError:  # a run does not fail because of its cache
            return

    @cached_property
    def _notes(self) -> dict[str, dict[str, Any]]:
        content = self._read("notes")
        notes = content[0].get("notes") if content is not None else None
        if not isinstance(notes, dict):
            return {}
        return {name: note for name, note in notes.items() if isinstance(note, dict)}

    def _read_if_wanted(self, kind: str) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        """What `_read` returns; notes that the file was used, or was missing."""
        content = self._read(kind)
        if content is None:
            self._missing.add(kind)
        else:
            with suppress(OSError):
                os.utime(self._path(kind))
        return content

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
        """Write a file completely or not at all, and delete old ones."""
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
        # Delete abandoned parts, and the least recently used files beyond the size of the cache.
        files = []
        for file in self._folder.iterdir():
            named = _FILE_NAME.fullmatch(file.name)
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
        """A checksum of key and content, so a renamed file does not pass for another."""
        checksum = hashlib.sha256(self._key.encode())
        checksum.update(body)
        return checksum.hexdigest().encode()


_COMMENT_PREFIX = "#version"
"""The library reads a merge with this beginning as a comment, if it is written as one text."""
_MUTATING_PREFIXES = ("add_", "enable_", "train")
"""Prefixes of the library's methods that change a tokenizer."""
_EXCERPT_CHARACTERS, _EXCERPT_COST = 1 << 16, 1 << 12
"""How many characters excerpts may encode, and how many more each excerpt counts as: all together take as long as
loading the tokenizer."""


class Excerpts:
    """Makes tokenizers of the library that hold only the entries which some texts need."""

    def __init__(self, tables: Tables, parts: Mapping[str, bytes]) -> None:
        """`parts` are what `excerpt_parts` returned."""
        self._form = tables.normal_form
        self._definition = orjson.loads(parts["json"])
        self._merges = np.frombuffer(parts["merges"], "<i4").reshape(3, -1)
        self._own = np.frombuffer(parts["own"], np.bool_)
        self._data = np.frombuffer(tables.entries.data, np.uint8)
        self._lengths = tables.entries.lengths.astype(np.int64)
        self._starts = self._lengths.cumsum() - self._lengths
        self._slots = (self._own & (self._lengths > 1)).nonzero()[0]
        self._first = self._hash_entry_bytes(self._starts[self._slots], 2)
        self._last = self._hash_entry_bytes((self._starts + self._lengths)[self._slots] - 2, 2)
        self._left = _EXCERPT_CHARACTERS
        self._pairs, self._triples = np.zeros(1 << 16, np.bool_), np.zeros(1 << 18, np.bool_)
        """By hash, the runs of two and of three bytes that the current excerpt covers."""
        self._excerpt: tokenizers.Tokenizer | None = None

    def find(self, texts: Sequence[str], expected: Sequence[str] = ()) -> tokenizers.Tokenizer | None:
        """An excerpt that encodes these texts like the whole tokenizer; None if loading the whole pays off.

        The first excerpt covers the `expected` texts too.
        """
        if any(map(self._is_changed_by_nfc, texts)):
            return None
        twos, threes = self._hash_byte_runs(texts)
        if self._excerpt is not None and self._pairs[twos].all() and self._triples[threes].all():
            return self._excerpt
        several = [*texts, *(text for text in expected if not self._is_changed_by_nfc(text))]
        self._left -= sum(map(len, several)) + _EXCERPT_COST
        if self._left < 0:
            return None
        twos, threes = self._hash_byte_runs(several)
        pairs, triples = np.zeros_like(self._pairs), np.zeros_like(self._triples)
        pairs[twos], triples[threes] = True, True
        # Entries whose first two and last two bytes occur in the texts, and all their runs of three bytes
        slots = self._slots[pairs[self._first] & pairs[self._last]]
        each = self._lengths[slots] - 2
        at = (self._starts[slots] - each.cumsum() + each).repeat(each) + np.arange(each.sum())
        needed = self._own & (self._lengths == 1)
        needed[slots] = True
        needed[slots.repeat(each)[~triples[self._hash_entry_bytes(at, 3)]]] = False
        merges = self._merges[:, needed[self._merges[2]]]
        merges = merges[:, needed[merges[0]] & needed[merges[1]]]
        tokens = {
            slot: self._data[start:end].tobytes().decode("latin-1").translate(ALPHABET)
            for slot in needed.nonzero()[0].tolist()
            for start, end in [(self._starts[slot], self._starts[slot] + self._lengths[slot])]
        }
        model = {
            **self._definition["model"],
            "merges": [(tokens[left], tokens[right]) for left, right in merges[:2].T.tolist()],
            # Added tokens keep their ids if the model has them.
            "vocab": {token: slot for slot, token in tokens.items()}
            | {token["content"]: token["id"] for token in self._definition["added_tokens"]},
        }
        from tokenizers import Tokenizer

        excerpt = Tokenizer.from_buffer(orjson.dumps({**self._definition, "model": model}))
        if self._excerpt is None:
            self._excerpt, self._pairs, self._triples = excerpt, pairs, triples
        return excerpt

    def _is_changed_by_nfc(self, text: str) -> bool:
        """Whether the tokenizer's normalizer changes a text."""
        from tokenizers import normalizers

        return bool(self._form) and normalizers.NFC().normalize_str(text) != text

    def _hash_byte_runs(self, texts: Sequence[str]) -> tuple[Offsets, Offsets]:
        """Hashes of all runs of two and of three bytes in these texts."""
        columns = [np.frombuffer(text.encode(), np.uint8) for text in ("", *texts)]
        twos = [_hash_bytes(column[:-1], column[1:]) for column in columns]
        threes = [_hash_bytes(column[:-2], column[1:-1], column[2:]) for column in columns]
        return np.concatenate(twos), np.concatenate(threes)

    def _hash_entry_bytes(self, at: Offsets, count: int) -> Offsets:
        """Hashes of runs of `count` bytes that start at these positions of the entries' bytes."""
        return _hash_bytes(*(self._data[at + place] for place in range(count)))


def _hash_bytes(*columns: NDArray[np.uint8]) -> Offsets:
    """A number for each row of two or three bytes: unique for two, a hash for three."""
    first, second, *rest = (column.astype(np.int64) for column in columns)
    pair: Offsets = first << 8 | second
    return (pair * 31 + rest[0] * 7919) & 0x3FFFF if rest else pair


def excerpt_parts(backend: object, entries: Entries, normal_form: str | None) -> dict[str, bytes] | None:
    """What `Excerpts` need of a loaded tokenizer; {} if none can be made, None if not loaded or changed."""
    written = _serialize(backend)
    if written is None:
        return None
    # A normal form is known only for byte-level BPE.
    if not written or normal_form is None or len(entries.far_ids):
        return {}
    definition = orjson.loads(written)
    model, added_tokens = definition["model"], definition["added_tokens"]
    vocabulary, pairs = model.pop("vocab"), model.pop("merges")
    added, alphabet = {token["id"] for token in added_tokens}, frozenset(ALPHABET)
    own = np.zeros(len(entries.lengths), np.bool_)
    own[[i for token, i in vocabulary.items() if i not in added and alphabet.issuperset(token)]] = True
    merges = [(vocabulary[left], vocabulary[right], vocabulary[left + right]) for left, right in pairs]
    columns = np.array(merges, "<i4").reshape(-1, 3).T
    if model.get("dropout") or any(token["single_word"] for token in added_tokens) or not own[columns].all():
        return {}
    return {"json": orjson.dumps(definition), "merges": columns.tobytes(), "own": own.tobytes()}


class LazyBackend:
    """A tokenizer of the library that is loaded on first use; a few short texts are encoded by excerpts of it."""

    changed = False
    """Whether it may have changed since it was loaded."""
    excerpted = True
    """Whether short texts may be encoded by excerpts, until it is loaded."""
    expected: Sequence[str] = ()
    """Texts that are likely to be encoded soon."""

    def __init__(
        self, load: Callable[[], tokenizers.Tokenizer], excerpts: Callable[[], Excerpts | None] = lambda: None
    ) -> None:
        self._load = load
        self._excerpts = excerpts

    def encode(self, text: str, **how: Any) -> tokenizers.Encoding:
        """The library's encoding of a text."""
        return self._backend_for([text]).encode(text, **how)

    def encode_batch_fast(self, texts: Sequence[str], **how: Any) -> list[tokenizers.Encoding]:
        """The library's encodings of texts, without offsets."""
        return self._backend_for(texts).encode_batch_fast(texts, **how)

    def _backend_for(self, texts: Sequence[str]) -> tokenizers.Tokenizer:
        """The tokenizer, or an excerpt that encodes these texts like it."""
        excerpts = self._excerpts() if self.excerpted and not self.is_loaded else None
        excerpt, self.expected = None if excerpts is None else excerpts.find(texts, self.expected), ()
        return self._backend if excerpt is None else excerpt

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_MUTATING_PREFIXES):
            self.changed = True
        return getattr(self._backend, name)

    @property
    def is_loaded(self) -> bool:
        """Whether the whole tokenizer was loaded."""
        return "_backend" in vars(self)

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        return self._load()


def _serialize(backend: object) -> str | None:
    """The library's JSON of a loaded tokenizer; "" if it has none, None if it is not loaded or has changed."""
    if not isinstance(backend, LazyBackend) or not backend.is_loaded or backend.changed:
        return None
    try:
        written: str = backend.to_str()
    except Exception:  # tokenizers raises plain Exception, also for parts written in Python
        return ""
    return written


def compact_definition(backend: object) -> dict[str, bytes] | None:
    """The definition that loads fastest, as stored; b"" if none is faster, None if not loaded or changed."""
    from tokenizers import Tokenizer

    own = _serialize(backend)
    if own is None:
        return None
    try:
        compacted = compact_json(own)
        same = compacted is not None and Tokenizer.from_buffer(compacted).to_str() == own
        return {"json": compacted if compacted is not None and same else b""}
    except Exception:  # tokenizers raises plain Exception, also for parts written in Python
        return {"json": b""}


def compact_json(definition: str) -> bytes | None:
    """A definition in the notation that loads fastest; None unless its model is BPE without dropout."""
    whole = orjson.loads(definition)
    model = whole["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        return None
    merges = model["merges"]
    if merges and set(map(type, merges)) == {list} and set(map(len, merges)) == {2}:
        texts = list(map(" ".join, merges))
        together = "".join(texts)
        # Each pair as one text, if the space between is its only one
        if together.count(" ") == len(texts) and _COMMENT_PREFIX not in together:
            model["merges"] = texts
    vocabulary = model["vocab"]
    model["vocab"] = {token: vocabulary[token] for token in sorted(vocabulary)}
    return orjson.dumps(whole)
