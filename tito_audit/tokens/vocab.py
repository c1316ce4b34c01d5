"""What each id stands for: its bytes, its text, whether it is a control token.

Three ways of writing a vocabulary are supported, recognized by the tokenizer's decoder and pre-tokenizer:

    byte-level       "Ġhello": every character stands for one byte (GPT-2, Qwen, Llama 3, DeepSeek, gpt-oss)
    metaspace        "▁hello": ▁ stands for a space (Llama 2, Gemma)
    byte fallback    "<0x0A>": one byte that no other entry of a metaspace vocabulary can write

The bytes of an added token are its literal content. Everything is read at once, into arrays: processes forked
later share them, and they can be stored.

A byte-level tokenizer whose parts are all known here may leave out bytes of a text, but never adds or changes
any: if as many bytes come out as went in, they are the same (`keeps_bytes`). A tokenizer that normalises to NFC
has this property for texts that NFC leaves unchanged. Joining the bytes to compare them takes longer than to
encode the text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids, Mask, Offsets

if TYPE_CHECKING:
    import tokenizers

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = iter(range(0x100, 0x200))
ALPHABET = "".join(chr(byte if byte in _PRINTABLE else next(_OTHERS)) for byte in range(256))
"""The character that stands for each byte in byte-level vocabularies."""
_METASPACE = "▁"
_FEW = 64
"""With fewer tokens than this, a plain join is faster than arrays."""
_AT_ONCE = 1 << 16
"""Of this many tokens the bytes are joined at once: the places of all bytes take many times their size."""
_SPARSE = 1 << 16
"""Ids from here on are stored in a separate list if more than half of the ids below would be holes."""
_NO_ID = 1 << 31
"""Ids are int32: an entry from here on cannot be in a log."""


class Prefix(StrEnum):
    """When a tokenizer prepends a space to a text."""

    NEVER = "never"
    ALWAYS = "always"  # before every stretch of text between added tokens
    ALWAYS_UNLESS_SPACE = "always_unless_space"  # the same, unless the stretch starts with a space
    FIRST_UNLESS_SPACE = "first_unless_space"  # at the very start of the text only


@dataclass(frozen=True, slots=True)
class Entries:
    """The content of a vocabulary as plain values.

    There is a slot for each id from 0 on, then one for each far id, and a last one for everything that is not an
    id.
    """

    prefix: Prefix
    """When the tokenizer prepends a space."""
    added_ids: tuple[int, ...]
    special_ids: tuple[int, ...]
    far_ids: Offsets  # [F] int64, sorted
    """Ids beyond holes so large that the ids below do not all get a slot."""
    data: bytes
    """The bytes of all slots, joined."""
    lengths: NDArray[np.int32]  # [S] int32, bytes of each slot
    known: Mask  # [S] bool, False where the vocabulary has no such id

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Entries:
        """The entries of a tokenizer, including its added tokens."""
        normalizers = part_steps(backend.normalizer, code=True)
        pre_tokenizers = part_steps(backend.pre_tokenizer, code=True)
        decoders = part_steps(backend.decoder, code=True)
        byte_level = any(step.get("type") == "ByteLevel" for step in pre_tokenizers + decoders)
        added = backend.get_added_tokens_decoder()
        literal = {
            i: token.content for i, token in added.items() if not token.content.replace(_METASPACE, " ").isspace()
        }
        tokens, far = _listed(backend, added)
        near = len(tokens) - len(far)
        slots = {i: i if i < near else near + far.index(i) for i in literal if i < near or i in far}
        contents = {slot: literal[i].encode("utf-8") for i, slot in slots.items()}
        data, lengths = _spelled(tokens, contents, byte_level)
        return cls(
            prefix=_prefix_of(normalizers, pre_tokenizers),
            added_ids=tuple(literal),
            special_ids=tuple(i for i in literal if added[i].special),
            far_ids=np.array(far, np.int64),
            data=data,
            lengths=np.append(lengths, 0).astype(np.int32),
            known=np.array([*(token is not None for token in tokens), False]),
        )


class Vocabulary:
    """The entries of one tokenizer, by id. An unknown id has no bytes, `b""`."""

    def __init__(self, entries: tokenizers.Tokenizer | Entries) -> None:
        if not isinstance(entries, Entries):
            entries = Entries.of(entries)
        self.entries = entries
        self.prefix = entries.prefix
        """When the tokenizer prepends a space; `text` removes it again."""
        self.added_ids = frozenset(entries.added_ids)
        """The added tokens except plain white space (gemma-3 adds runs of newlines)."""
        self.special_ids = frozenset(entries.special_ids)
        """The added tokens that the tokenizer marks as special."""
        self.size = len(entries.lengths) - len(entries.far_ids) - 1
        """One more than the highest id, not counting ids beyond large holes."""
        self._data = entries.data
        self._known = entries.known
        self._lengths = entries.lengths.astype(np.int64)
        self._starts: Offsets = self._lengths.cumsum() - self._lengths
        self._far = entries.far_ids if len(entries.far_ids) else None
        self._spelled: dict[bytes, tuple[int, ...]] | None = None
        self._pieces: dict[int, str] = {}
        self.memo: dict[Hashable, Any] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id; b"" for an unknown id."""
        return self._bytes(self._slot(token_id))

    def byte_lengths(self, ids: Ids) -> Offsets:
        """The number of bytes of each id, `[N]` int64; 0 for unknown ids."""
        return self._lengths.take(self._slots(ids), mode="clip")

    def byte_count(self, ids: Ids) -> int:
        """The number of bytes of all ids."""
        return int(self._short_lengths.take(self._slots(ids), mode="clip").sum())

    def data(self, ids: Ids) -> bytes:
        """The bytes of all ids, joined."""
        slots = self._slots(ids)
        return self._joined(slots, self._lengths.take(slots, mode="clip"))

    def spelling(self, ids: Ids) -> tuple[Offsets, bytes, Mask]:
        """Where each id ends in the bytes of all, `[N]`, those bytes, and which ids are control tokens, `[N]`."""
        slots = self._slots(ids)
        lengths = self._lengths.take(slots, mode="clip")
        return lengths.cumsum(), self._joined(slots, lengths), self._control.take(slots, mode="clip")

    def known(self, ids: Ids) -> Mask:
        """`[N]` bool, True where the id is in the vocabulary."""
        return self._known.take(self._slots(ids), mode="clip")

    def control(self, ids: Ids) -> Mask:
        """`[N]` True for control tokens: the added tokens that are marked special."""
        return self._control.take(self._slots(ids), mode="clip")

    def piece(self, token_id: int) -> str:
        """A token as text; bytes that are not text as \\xNN."""
        if token_id not in self._pieces:  # the same few are shown again and again
            slot = self._slot(token_id)
            if not self._known[slot]:
                return f"<unknown id {token_id}>"
            self._pieces[token_id] = self._bytes(slot).decode("utf-8", errors="backslashreplace")
        return self._pieces[token_id]

    def pieces(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Each token as text."""
        texts = self._pieces
        return tuple([texts[number] if number in texts else self.piece(number) for number in numbers])

    def text(self, ids: Ids) -> str:
        """The text that these ids encode; special tokens as written, broken characters as U+FFFD.

        A space that the tokenizer prepends is left out, since encoding the text prepends it again.
        """
        if self.prefix is Prefix.NEVER:
            return self.data(ids).decode("utf-8", errors="replace")
        out: list[bytes] = []
        stretch: list[bytes] = []  # what stands between added tokens, joined without its prepended space
        for token_id, data in zip(ids.tolist(), self._each(self._slots(ids)), strict=True):
            if token_id not in self.added_ids:
                stretch.append(data)
                continue
            out += (self._unprefixed(b"".join(stretch), not out), data)
            stretch = []
        out.append(self._unprefixed(b"".join(stretch), not out))
        return b"".join(out).decode("utf-8", errors="replace")

    def ids_of_bytes(self, data: bytes) -> tuple[int, ...]:
        """All ids that spell these bytes, lowest first; () if there are none. The first call reads every entry."""
        if self._spelled is None:
            self._spelled = self._by_bytes()
        return self._spelled.get(data, ())

    @cached_property
    def byte_ids(self) -> range:
        """The ids of `<0x00>` to `<0xFF>`; empty without byte fallback."""
        first = min(self.ids_of_bytes(b"\x80"), default=self.size) - 0x80
        ids = range(max(first, 0), max(first, 0) + 256)
        return ids if all(self.token_bytes(i) == bytes([byte]) for byte, i in enumerate(ids)) else range(0)

    @cached_property
    def _short_lengths(self) -> NDArray[np.unsignedinteger[Any]]:
        """`_lengths` in as few bytes as hold them, so that a processor's cache holds them all."""
        return self._lengths.astype(np.min_scalar_type(int(self._lengths.max(initial=0))))

    @cached_property
    def _flat(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._data, np.uint8)

    @cached_property
    def _control(self) -> Mask:
        """`[S]` True in the slots of control tokens."""
        table = np.zeros(len(self._known), np.bool_)
        if self.special_ids:
            slots = self._slots(np.fromiter(self.special_ids, np.int64))
            table[np.minimum(slots, len(table) - 1)] = True
            table[-1] = False
        return table

    def _unprefixed(self, data: bytes, first: bool) -> bytes:
        """The bytes of a stretch of text without the space that the tokenizer prepended."""
        if not data.startswith(b" ") or (self.prefix is Prefix.FIRST_UNLESS_SPACE and not first):
            return data
        # If no space is prepended to texts that start with one, two spaces both belong to the text.
        own_space = self.prefix is not Prefix.ALWAYS and (data.startswith(b"  ") or data == b" ")
        return data if own_space else data[1:]

    def _slots(self, ids: Ids | Offsets) -> NDArray[Any]:
        """The slot of each id, `[N]`, to be taken with mode "clip": the last slot is for unknown ids."""
        if self._far is None and ids.dtype == np.int32:
            return ids.view(np.uint32)  # negative ids become very large
        slots = ids.astype(np.int64)
        outside = (slots < 0) | (slots >= self.size)
        if outside.any():
            slots[outside] = [self._slot(token_id) for token_id in slots[outside].tolist()]
        return slots

    def _slot(self, token_id: int) -> int:
        if 0 <= token_id < self.size:
            return token_id
        if self._far is not None:
            at = int(self._far.searchsorted(token_id))
            if at < len(self._far) and self._far[at] == token_id:
                return self.size + at
        return len(self._known) - 1

    def _bytes(self, slot: int) -> bytes:
        start = int(self._starts[slot])
        return self._data[start : start + int(self._lengths[slot])]

    def _joined(self, slots: NDArray[Any], lengths: Offsets) -> bytes:
        if len(slots) < _FEW:
            return b"".join(self._each(slots))
        if len(slots) > _AT_ONCE:
            parts = [slice(at, at + _AT_ONCE) for at in range(0, len(slots), _AT_ONCE)]
            return b"".join([self._joined(slots[part], lengths[part]) for part in parts])
        # Byte i of the result is byte i - (where its token begins in the result) of that token.
        begins = lengths.cumsum()
        begins -= lengths
        offsets = np.subtract(self._starts.take(slots, mode="clip"), begins, out=begins).repeat(lengths)
        offsets += np.arange(len(offsets))
        return self._flat.take(offsets, mode="clip").tobytes() if len(offsets) else b""

    def _each(self, slots: NDArray[Any]) -> list[bytes]:
        data = self._data
        starts = self._starts.take(slots, mode="clip").tolist()
        lengths = self._lengths.take(slots, mode="clip").tolist()
        return [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def _by_bytes(self) -> dict[bytes, tuple[int, ...]]:
        ids = np.concatenate([np.arange(self.size), self.entries.far_ids])[self._known[:-1]]
        spelled: dict[bytes, tuple[int, ...]] = {}
        for token_id, data in zip(ids.tolist(), self._each(self._slots(ids)), strict=True):
            spelled[data] = (*spelled.get(data, ()), token_id)
        return spelled


def _listed(
    backend: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken]
) -> tuple[list[str | None], list[int]]:
    """How the vocabulary writes the entry of each slot but the last, None for a hole; and the far ids."""
    count: int = backend.get_vocab_size(with_added_tokens=True)
    dense = 2 * count + _SPARSE
    size = min(max([count, *(i + 1 for i in added)]), dense)
    tokens: list[str | None] = list(map(backend.id_to_token, range(size)))
    if size - tokens.count(None) >= count:
        return tokens, []
    # There are holes, so there are entries further up.
    entries = {*backend.get_vocab(with_added_tokens=True).values(), *added}
    beyond = sorted(i for i in entries if size <= i < _NO_ID)
    far = [i for i in beyond if i >= dense]
    last = max((i for i in beyond if i < dense), default=size - 1)
    tokens += map(backend.id_to_token, [*range(size, last + 1), *far])
    return tokens, far


def _spelled(
    tokens: Sequence[str | None], literal: Mapping[int, bytes], byte_level: bool
) -> tuple[bytes, NDArray[np.int64]]:
    """The bytes of all tokens joined, and the length of each.

    `literal` has the bytes of tokens that are written differently from the others.
    """
    plain = ["" if token is None else token for token in tokens]
    for at in literal:
        plain[at] = ""
    text = "".join(plain)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    ends: Offsets = np.cumsum(np.fromiter(map(len, plain), np.int64, len(plain)))
    if byte_level:
        # `[325]` the byte that each character stands for; -1 for none, and in the last entry.
        table = np.full(max(map(ord, ALPHABET)) + 2, -1, np.int16)
        table[list(map(ord, ALPHABET))] = range(256)
        values = table.take(codes, mode="clip")
        odd = set(ends.searchsorted((values < 0).nonzero()[0], "right").tolist())
        # Entries in plain text; some vocabularies write their control tokens that way.
        other = {at: plain[at].encode("utf-8") for at in odd}
        data, byte_ends = values.astype(np.uint8).tobytes(), ends
    else:
        at_six = (np.diff(ends, prepend=0) == len("<0x0A>")).nonzero()[0].tolist()
        bytes_of = {at: _single_byte(plain[at]) for at in at_six if plain[at].startswith("<0x")}
        other = {at: data for at, data in bytes_of.items() if data is not None}
        codes = np.where(codes == ord(_METASPACE), ord(" "), codes)
        data = text.replace(_METASPACE, " ").encode("utf-8")
        widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        byte_ends = np.append(0, widths.cumsum())[ends]
    if other:
        return _spelled(tokens, {**literal, **other}, byte_level)
    # Those of `literal` are inserted at their empty places.
    lengths = np.diff(byte_ends, prepend=0)
    pieces: list[bytes] = []
    last = 0
    for at in sorted(literal):
        end = int(byte_ends[at])
        pieces += (data[last:end], literal[at])
        lengths[at] = len(literal[at])
        last = end
    return b"".join([*pieces, data[last:]]), lengths


def _single_byte(token: str) -> bytes | None:
    """The byte that <0x0A> stands for; None if the token only looks like one."""
    if not token.endswith(">"):
        return None
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return None


def _prefix_of(normalizers: list[dict[str, Any]], pre_tokenizers: list[dict[str, Any]]) -> Prefix:
    """When a space is prepended to a text."""
    if any(step.get("type") == "Prepend" for step in normalizers):
        return Prefix.ALWAYS
    for step in pre_tokenizers:
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            return Prefix.ALWAYS_UNLESS_SPACE
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            unless = {"always": Prefix.ALWAYS_UNLESS_SPACE, "first": Prefix.FIRST_UNLESS_SPACE}
            return unless.get(scheme, Prefix.NEVER)
    return Prefix.NEVER


def part_steps(part: Any, *, code: bool = False) -> list[Any]:
    """The steps of one part, in order. A part written in Python raises, or has none if it may be `code`."""
    try:
        return [] if part is None else flat_steps(orjson.loads(part.__getstate__()))
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        if code:
            return []
        raise


def flat_steps(part: Any) -> list[Any]:
    """The steps of one part of a definition, in order, without the sequences around them."""
    pending, steps = [part], []
    while pending:
        step = pending.pop()
        several = None
        if isinstance(step, dict) and step.get("type") == "Sequence":
            several = next((step[key] for key in _SEQUENCES if isinstance(step.get(key), list)), None)
        if several is not None:
            pending += reversed(several)
        elif step is not None:
            steps.append(step)
    return steps


_SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")
_ASCII = bytes(range(0x80))
_LAST_OF_ALPHABET = "\u0143"
"""The last of the characters by which byte-level vocabularies write bytes."""
_LONGEST = 1 << 15
"""How many non-ASCII bytes are checked; with more, comparing the texts is just as fast."""
_LEFT_ALONE = re.compile(
    rb"(?:[\xc2-\xcb\xcf-\xd1][\x80-\xbf]"
    rb"|\xe2(?:\x80[\x82-\xbf]|[\x81\x82\x85-\x8b\x8d-\xaa\xac-\xae][\x80-\xbf])"
    rb"|\xe3(?:\x80[\x80-\xa9]|\x82[\x80-\x98\x9b-\xbf]|[\x81\x83-\xbf][\x80-\xbf])"
    rb"|[\xe4-\xe9\xeb\xec][\x80-\xbf]{2}|\xea[\xb0-\xbf][\x80-\xbf]|\xed[\x80-\x9d][\x80-\xbf]"
    rb"|\xef(?:[\xbc-\xbf][\x80-\xbf]|\xb8[\x80-\x8f])"
    rb"|\xf0\x9f[\x80-\xbf]{2})*"
)
"""Characters that NFC never changes, moves or joins to the one before: Latin, Cyrillic, most symbols, kana,
Chinese, Korean syllables, emoji."""


def is_plain(data: bytes) -> bool:
    """Whether NFC is known to leave this UTF-8 text unchanged."""
    if data.isascii():
        return True
    rest = data.translate(None, _ASCII)
    return len(rest) <= _LONGEST and _LEFT_ALONE.fullmatch(rest) is not None


def keeps_bytes(form: str | None, data: bytes) -> bool:
    """Whether tokens with as many bytes as this text are known to have the same bytes; `form`: see
    `normal_form`."""
    return form is not None and (not form or is_plain(data))


def normal_form(backend: tokenizers.Tokenizer) -> str | None:
    """How a tokenizer normalises a text before it splits it, "" or "NFC"; None if it may write other bytes."""
    try:
        normalizers = part_steps(backend.normalizer)
        cuts = part_steps(backend.pre_tokenizer)
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        return None
    if any(step != {"type": "NFC"} for step in normalizers) or not _by_bytes(cuts) or not _has_all_bytes(backend):
        return None
    contents = [token.content for token in backend.get_added_tokens_decoder().values()]
    if not all(map(_is_literal, contents)) or (normalizers and not all(is_plain(c.encode()) for c in contents)):
        return None
    return "NFC" if normalizers else ""


def _by_bytes(cuts: list[dict[str, Any]]) -> bool:
    """Whether text is only split and written as bytes."""
    kinds = [step.get("type") for step in cuts]
    prefixed = any(step.get("add_prefix_space") for step in cuts)
    return kinds.count("ByteLevel") == 1 and set(kinds) <= {"ByteLevel", "Split", "Digits"} and not prefixed


def _has_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Whether the model merges bytes into tokens and has a token for each byte, so every byte can be written."""
    from tokenizers import models, pre_tokenizers

    model = backend.model
    if not isinstance(model, models.BPE) or model.byte_fallback or model.unk_token is not None:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    return all(model.token_to_id(character) is not None for character in pre_tokenizers.ByteLevel.alphabet())


def _is_literal(content: str) -> bool:
    """Whether an added token's bytes are certain to be its content, even if the model may produce its id too."""
    if not content.replace("▁", "").strip():
        return False
    ascii_signs = all("!" <= character <= "~" for character in content)
    return ascii_signs or max(content) > _LAST_OF_ALPHABET
