"""What was computed about a tokenizer, stored on disk for the next run.

Loading a tokenizer takes longer than auditing ten rows. So its tables are stored (what every id stands for,
where texts may be cut), with notes of other rooms, such as the facts of its chat templates. Nothing of a log is
stored.

For a tokenizer used repeatedly on large logs, the definition is stored too, in the notation that loads fastest,
in two thirds of the time: without white space, each merge as one text (`"a b"`) instead of two, the vocabulary
sorted. The library itself confirms that it is the same: what it loads from either notation, it must write
identically.

A few short texts do not need the whole definition. All that BPE makes of a text on its way to the ids are parts of
the text, so entries with bytes that it does not hold one after the other may be left out: what remains loads in a
hundredth of the time and gives the same ids (`Excerpts`).

Files are named by a hash of everything they depend on: the tokenizer's files, the version of `tokenizers`, and
the code of this room. They hold JSON and plain arrays with a checksum, and are renamed into place once
complete. A file that is missing, damaged or unexpected is computed again.
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

from tito_audit.record.arrays import Mask, Offsets
from tito_audit.settings.values import expand_user
from tito_audit.tokens.vocab import ALPHABET, Entries, Prefix

if TYPE_CHECKING:
    import tokenizers

VARIABLE = "TITO_AUDIT_CACHE"
NOTES = 32
"""How many notes are stored for one tokenizer."""
FOLDER_BYTES = 96 << 20
"""How much is stored for all tokenizers; the least recently used files are deleted."""
_MAGIC = b"tito-audit cache 1\n"
# `segments` files are from earlier versions, and deleted like the others.
_NAME = re.compile(r"tokenizer-[0-9a-f]{32}\.(tables|definition|merges|segments|notes)(\.\d+\.\d+\.part)?")


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
        return None if named.lower() == "off" else expand_user(named)
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
        self._lacking: set[str] = set()
        """The files of a tokenizer that was stored before that were wanted but missing."""

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
        content = self._wanted("definition")
        return content and (content[1].get("json") or None)

    @cached_property
    def excerpts(self) -> Excerpts | None:
        """What makes excerpts of the tokenizer; None if it is not stored, or there are none."""
        content, tables = self._wanted("merges"), self.tables
        try:
            return Excerpts(tables, content[1]) if content is not None and tables is not None else None
        except (KeyError, TypeError, ValueError):
            return None

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

    def save(self, tables: Callable[[], Tables], **others: Callable[[], Mapping[str, bytes] | None]) -> None:
        """Write what is not stored yet, if possible; does nothing in a forked process.

        The others, definition and merges, are made only for a tokenizer that was stored before: making them costs
        what they save in two runs.
        """
        if os.getpid() != self._process:
            return
        try:
            if self.tables is None:
                self._write("tables", *_plain(tables()))
            else:
                for kind in self._lacking & others.keys():
                    if (parts := others[kind]()) is not None:
                        self._write(kind, {}, parts)
                        self._lacking.discard(kind)
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

    def _wanted(self, kind: str) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        """What `_read` returns, of a file that is in use from now on."""
        content = self._read(kind)
        if content is None:
            self._lacking.add(kind)
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


_CHARACTERS, _EACH = 1 << 16, 1 << 12
"""Up to so many characters are encoded by excerpts, each of which counts as so many more: together they cost what
loading the tokenizer does."""


class Excerpts:
    """A tokenizer of the library without the entries that given texts do not need."""

    def __init__(self, tables: Tables, parts: Mapping[str, bytes]) -> None:
        """From what `merges_of` returned, as it was stored."""
        self._form = tables.normal_form
        self._definition = orjson.loads(parts["json"])
        self._merges = np.frombuffer(parts["merges"], "<i4").reshape(3, -1)
        self._own = np.frombuffer(parts["own"], np.bool_)
        self._data = np.frombuffer(tables.entries.data, np.uint8)
        self._lengths = tables.entries.lengths.astype(np.int64)
        self._starts = self._lengths.cumsum() - self._lengths
        self._slots = (self._own & (self._lengths > 1)).nonzero()[0]
        self._first = self._spelled(self._starts[self._slots], 2)
        self._last = self._spelled((self._starts + self._lengths)[self._slots] - 2, 2)
        self._left = _CHARACTERS
        self._pairs, self._triples = np.zeros(1 << 16, np.bool_), np.zeros(1 << 18, np.bool_)
        """Of two and of three bytes, those that the excerpt in use was made for."""
        self._excerpt: tokenizers.Tokenizer | None = None

    def holding(self, texts: Sequence[str], expected: Sequence[str] = ()) -> tokenizers.Tokenizer | None:
        """An excerpt that encodes these texts as the whole does, and if it is the first one also the `expected`
        ones; None if loading the whole is better."""
        if any(map(self._changes, texts)):
            return None
        twos, threes = self._numbers_in(texts)
        if self._excerpt is not None and self._pairs[twos].all() and self._triples[threes].all():
            return self._excerpt
        several = [*texts, *(text for text in expected if not self._changes(text))]
        self._left -= sum(map(len, several)) + _EACH
        if self._left < 0:
            return None
        twos, threes = self._numbers_in(several)
        pairs, triples = np.zeros_like(self._pairs), np.zeros_like(self._triples)
        pairs[twos], triples[threes] = True, True
        excerpt = self._excerpt_of(pairs, triples)
        if self._excerpt is None:
            self._excerpt, self._pairs, self._triples = excerpt, pairs, triples
        return excerpt

    def _changes(self, text: str) -> bool:
        """Whether the tokenizer normalises a text."""
        from tokenizers import normalizers

        return bool(self._form) and normalizers.NFC().normalize_str(text) != text

    def _numbers_in(self, texts: Sequence[str]) -> tuple[Offsets, Offsets]:
        """The numbers of all two bytes and of all three bytes in a row that texts hold."""
        columns = [np.frombuffer(text.encode(), np.uint8) for text in ("", *texts)]
        twos = [_numbers(column[:-1], column[1:]) for column in columns]
        threes = [_numbers(column[:-2], column[1:-1], column[2:]) for column in columns]
        return np.concatenate(twos), np.concatenate(threes)

    def _excerpt_of(self, pairs: Mask, triples: Mask) -> tokenizers.Tokenizer:
        from tokenizers import Tokenizer

        # Entries whose first and last two bytes occur in the texts, except those of which three bytes do not.
        slots = self._slots[pairs[self._first] & pairs[self._last]]
        each = self._lengths[slots] - 2
        at = (self._starts[slots] - each.cumsum() + each).repeat(each) + np.arange(each.sum())
        needed = self._own & (self._lengths == 1)
        needed[slots] = True
        needed[slots.repeat(each)[~triples[self._spelled(at, 3)]]] = False
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
        return Tokenizer.from_buffer(orjson.dumps({**self._definition, "model": model}))

    def _spelled(self, at: Offsets, count: int) -> Offsets:
        """The numbers of so many bytes of entries, from these places on."""
        return _numbers(*(self._data[at + place] for place in range(count)))


def _numbers(*columns: NDArray[np.uint8]) -> Offsets:
    """A number for each row of two bytes, or of three; of three, some have the same."""
    first, second, *rest = (column.astype(np.int64) for column in columns)
    pair: Offsets = first << 8 | second
    return (pair * 31 + rest[0] * 7919) & 0x3FFFF if rest else pair


def merges_of(backend: object, entries: Entries, normal_form: str | None) -> dict[str, bytes] | None:
    """What `Excerpts` need of a tokenizer as loaded; {} if it has none, None if it is not known now."""
    written = _written(backend)
    if written is None:
        return None
    # The normal form is known of BPE over bytes only.
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
    """A tokenizer of the library, loaded on first use: a few short texts are encoded by excerpts of it."""

    changed = False
    """Whether it may have been changed since then."""
    excerpted = True
    """Whether short texts may be encoded by excerpts, until it is loaded."""
    expected: Sequence[str] = ()
    """Texts that will probably be encoded soon."""

    def __init__(
        self, load: Callable[[], tokenizers.Tokenizer], excerpts: Callable[[], Excerpts | None] = lambda: None
    ) -> None:
        self._load = load
        self._excerpts = excerpts

    def encode(self, text: str, **how: Any) -> tokenizers.Encoding:
        """What the library makes of a text."""
        return self._for([text]).encode(text, **how)

    def encode_batch_fast(self, texts: Sequence[str], **how: Any) -> list[tokenizers.Encoding]:
        """What the library makes of texts, without offsets."""
        return self._for(texts).encode_batch_fast(texts, **how)

    def _for(self, texts: Sequence[str]) -> tokenizers.Tokenizer:
        """The tokenizer, or an excerpt that does the same with these texts."""
        excerpts = self._excerpts() if self.excerpted and not self.is_loaded else None
        excerpt, self.expected = None if excerpts is None else excerpts.holding(texts, self.expected), ()
        return self._loaded if excerpt is None else excerpt

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


def _written(backend: object) -> str | None:
    """The definition of a tokenizer as loaded, as the library writes it; None if it is not known now."""
    if not isinstance(backend, LazyBackend) or not backend.is_loaded or backend.changed:
        return None
    try:
        written: str = backend.to_str()
    except Exception:  # tokenizers raises plain Exception, also for parts written in Python
        return ""
    return written


def definition_of(backend: object) -> dict[str, bytes] | None:
    """The definition of a tokenizer as loaded, to load it from next time, as it is stored; b"" if none loads
    faster, None if it is not known now."""
    from tokenizers import Tokenizer

    own = _written(backend)
    if own is None:
        return None
    try:
        compacted = compact(own)
        same = compacted is not None and Tokenizer.from_buffer(compacted).to_str() == own
        return {"json": compacted if compacted is not None and same else b""}
    except Exception:  # tokenizers raises plain Exception, also for parts written in Python
        return {"json": b""}


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
