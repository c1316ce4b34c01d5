"""The vocabulary: the bytes and the text of each id, and whether it is a control token.

Three notations are supported, recognized by the tokenizer's decoder and pre-tokenizer:

    byte-level       "Ġhello": every character stands for one byte (GPT-2, Qwen, Llama 3, DeepSeek, gpt-oss)
    metaspace        "▁hello": ▁ stands for a space (Llama 2, Gemma)
    byte fallback    "<0x0A>": one byte that no other entry of a metaspace vocabulary can write

The bytes of an added token are its literal content. Everything is read into arrays at once, so that they can be
stored, and processes forked later share them.

Joining the bytes of tokens to compare them with a text takes longer than encoding the text. So they are counted: a
byte-level tokenizer whose parts are all known here may leave out bytes of a text, but never adds or changes any.
If as many come out as went in, they are the same (`keeps_bytes`). If it normalizes to NFC, this holds for texts
that NFC leaves unchanged.
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
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
"""What the library's decoder takes for a byte."""
_PLAIN_JOIN_BELOW = 64
"""For fewer tokens, a plain join is faster than arrays."""
_JOINED_AT_ONCE = 1 << 16
"""How many tokens are joined at once: the arrays take many times the memory of the bytes."""
_SPARSE = 1 << 16
"""Ids this far beyond twice the number of tokens are stored apart, instead of slots for all ids between."""
_NO_ID = 1 << 31
"""Ids are int32, so a log cannot hold an id from here on."""


class Prefix(StrEnum):
    """When a tokenizer prepends a space to a text."""

    NEVER = "never"
    ALWAYS = "always"  # before every stretch of text between added tokens
    ALWAYS_UNLESS_SPACE = "always_unless_space"  # the same, unless the stretch starts with a space
    FIRST_UNLESS_SPACE = "first_unless_space"  # at the very start of the text only


@dataclass(frozen=True, slots=True)
class Entries:
    """The content of a vocabulary as plain values.

    There is a slot for each id from 0 on, then one for each far id, and a last one for unknown ids.
    """

    prefix: Prefix
    added_ids: tuple[int, ...]
    special_ids: tuple[int, ...]
    far_ids: Offsets  # [F] int64, sorted
    """Ids beyond a hole too large to fill with slots."""
    data: bytes
    """The bytes of all slots, joined."""
    lengths: NDArray[np.int32]  # [S] int32, bytes of each slot
    known: Mask  # [S] bool, False where the vocabulary has no such id

    @classmethod
    def read(cls, backend: tokenizers.Tokenizer) -> Entries:
        """The entries of a tokenizer, including its added tokens."""
        normalizers = read_steps(backend.normalizer, code=True)
        pre_tokenizers = read_steps(backend.pre_tokenizer, code=True)
        decoders = read_steps(backend.decoder, code=True)
        byte_level = any(step.get("type") == "ByteLevel" for step in pre_tokenizers + decoders)
        added = backend.get_added_tokens_decoder()
        literal = {
            i: token.content for i, token in added.items() if not token.content.replace(_METASPACE, " ").isspace()
        }
        tokens, far = _list_tokens(backend, added)
        near = len(tokens) - len(far)
        slots = {i: i if i < near else near + far.index(i) for i in literal if i < near or i in far}
        contents = {slot: literal[i].encode("utf-8") for i, slot in slots.items()}
        data, lengths = _spell_tokens(tokens, contents, byte_level)
        return cls(
            prefix=_find_prefix(normalizers, pre_tokenizers),
            added_ids=tuple(literal),
            special_ids=tuple(i for i in literal if added[i].special),
            far_ids=np.array(far, np.int64),
            data=data,
            lengths=np.append(lengths, 0).astype(np.int32),
            known=np.array([*(token is not None for token in tokens), False]),
        )


class Vocabulary:
    """What each id of a tokenizer stands for. An unknown id has no bytes, `b""`."""

    def __init__(self, entries: tokenizers.Tokenizer | Entries) -> None:
        if not isinstance(entries, Entries):
            entries = Entries.read(entries)
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
        # In as few bytes as hold them, so that the processor's cache holds all
        self._compact_lengths = self._lengths.astype(np.min_scalar_type(int(self._lengths.max(initial=0))))
        self._starts: Offsets = self._lengths.cumsum() - self._lengths
        self._byte_array = np.frombuffer(entries.data, np.uint8)
        self._far = entries.far_ids if len(entries.far_ids) else None
        self._pieces = _Pieces(self)
        self.memo: dict[Hashable, Any] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id; b"" for an unknown id."""
        slot = self._slot(token_id)
        start = int(self._starts[slot])
        return self._data[start : start + int(self._lengths[slot])]

    def byte_lengths(self, ids: Ids) -> Offsets:
        """The number of bytes of each id, `[N]` int64; 0 for unknown ids."""
        return self._lengths.take(self._slots(ids), mode="clip")

    def byte_count(self, ids: Ids) -> int:
        """The number of bytes of all ids together."""
        return int(np.add.reduce(self._compact_lengths.take(self._slots(ids), mode="clip")))

    def bytes_of(self, ids: Ids) -> bytes:
        """The bytes of all ids, joined."""
        slots = self._slots(ids)
        return self._join_slots(slots, self._lengths.take(slots, mode="clip"))

    def spell(self, ids: Ids) -> tuple[Offsets, bytes, Mask]:
        """The byte at which each id ends, `[N]`, the bytes of all ids, and which are control tokens, `[N]`."""
        slots = self._slots(ids)
        lengths = self._lengths.take(slots, mode="clip")
        return lengths.cumsum(), self._join_slots(slots, lengths), self._control_slots.take(slots, mode="clip")

    def known(self, ids: Ids) -> Mask:
        """`[N]` bool, True where the id is in the vocabulary."""
        return self._known.take(self._slots(ids), mode="clip")

    def control(self, ids: Ids) -> Mask:
        """`[N]` True for control tokens: the added tokens that are marked special."""
        return self._control_slots.take(self._slots(ids), mode="clip")

    def piece(self, token_id: int) -> str:
        """A token as text; bytes that are not text as \\xNN."""
        return self._pieces[token_id]

    def pieces(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Each token as text, see `piece`."""
        return tuple(map(self._pieces.__getitem__, numbers))

    def text(self, ids: Ids) -> str:
        """The text of these ids; special tokens as their literal text, invalid UTF-8 as U+FFFD.

        A space that the tokenizer prepends is left out, since encoding prepends it again.
        """
        if self.prefix is Prefix.NEVER:
            return self.bytes_of(ids).decode("utf-8", errors="replace")
        out: list[bytes] = []
        stretch: list[bytes] = []  # the tokens since the last added token
        for token_id, data in zip(ids.tolist(), self._bytes_of_slots(self._slots(ids)), strict=True):
            if token_id not in self.added_ids:
                stretch.append(data)
                continue
            out += (self._without_prefix(b"".join(stretch), not out), data)
            stretch = []
        out.append(self._without_prefix(b"".join(stretch), not out))
        return b"".join(out).decode("utf-8", errors="replace")

    def ids_of_bytes(self, data: bytes) -> tuple[int, ...]:
        """All ids with these bytes, lowest first; () if there are none. The first call reads every entry."""
        return self._ids_by_bytes.get(data, ())

    @cached_property
    def byte_ids(self) -> range:
        """The ids of `<0x00>` to `<0xFF>`; empty without byte fallback."""
        slots = (self._lengths[: self.size] == 1).nonzero()[0]
        slots = slots[self._byte_array[self._starts[slots]] == 0x80]
        first = max(int(slots.min(initial=self.size)) - 0x80, 0)
        ids = range(first, first + 256)
        return ids if all(self.token_bytes(i) == bytes([byte]) for byte, i in enumerate(ids)) else range(0)

    @cached_property
    def _control_slots(self) -> Mask:
        """`[S]` True in the slots of control tokens."""
        table = np.zeros(len(self._known), np.bool_)
        if self.special_ids:
            slots = self._slots(np.fromiter(self.special_ids, np.int64))
            table[np.minimum(slots, len(table) - 1)] = True
            table[-1] = False
        return table

    def _without_prefix(self, data: bytes, first: bool) -> bytes:
        """The bytes of a stretch of text without the space that the tokenizer prepended."""
        if not data.startswith(b" ") or (self.prefix is Prefix.FIRST_UNLESS_SPACE and not first):
            return data
        # If no space is prepended to texts that start with one, two spaces both belong to the text.
        own_space = self.prefix is not Prefix.ALWAYS and (data.startswith(b"  ") or data == b" ")
        return data if own_space else data[1:]

    def _slots(self, ids: Ids | Offsets) -> NDArray[Any]:
        """The slot of each id, `[N]`; take them with mode "clip", which sends unknown ids to the last slot."""
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

    def _join_slots(self, slots: NDArray[Any], lengths: Offsets) -> bytes:
        if len(slots) < _PLAIN_JOIN_BELOW:
            starts = self._starts.take(slots, mode="clip")
            ranges = map(slice, starts.tolist(), (starts + lengths).tolist())
            return b"".join(map(self._data.__getitem__, ranges))
        if len(slots) > _JOINED_AT_ONCE:
            parts = [slice(at, at + _JOINED_AT_ONCE) for at in range(0, len(slots), _JOINED_AT_ONCE)]
            return b"".join([self._join_slots(slots[part], lengths[part]) for part in parts])
        # Byte i of the result is byte i - (start of its token in the result) of that token.
        begins = lengths.cumsum()
        begins -= lengths
        offsets = np.subtract(self._starts.take(slots, mode="clip"), begins, out=begins).repeat(lengths)
        offsets += np.arange(len(offsets))
        return self._byte_array.take(offsets, mode="clip").tobytes() if len(offsets) else b""

    def _bytes_of_slots(self, slots: NDArray[Any]) -> list[bytes]:
        data = self._data
        starts = self._starts.take(slots, mode="clip").tolist()
        lengths = self._lengths.take(slots, mode="clip").tolist()
        return [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, tuple[int, ...]]:
        ids = np.concatenate([np.arange(self.size), self.entries.far_ids])[self._known[:-1]]
        spelled: dict[bytes, tuple[int, ...]] = {}
        for token_id, data in zip(ids.tolist(), self._bytes_of_slots(self._slots(ids)), strict=True):
            spelled[data] = (*spelled.get(data, ()), token_id)
        return spelled


class _Pieces(dict[int, str]):
    """Tokens as text, by id: the same few are shown again and again."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __missing__(self, token_id: int) -> str:
        data = self._vocabulary.token_bytes(token_id)
        if not data and not self._vocabulary.known(np.array([token_id])).all():
            return f"<unknown id {token_id}>"
        self[token_id] = text = data.decode("utf-8", errors="backslashreplace")
        return text


def _list_tokens(
    backend: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken]
) -> tuple[list[str | None], list[int]]:
    """The vocabulary's notation of each slot but the last, None for a hole; and the far ids."""
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


def _spell_tokens(
    tokens: Sequence[str | None], literal: Mapping[int, bytes], byte_level: bool
) -> tuple[bytes, NDArray[np.int64]]:
    """The bytes of all tokens joined, and the length of each; `literal` has the bytes of tokens by slot."""
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
        byte_tokens = {at: _BYTE_TOKEN.fullmatch(plain[at]) for at in at_six}
        other = {at: bytes([int(match[1], 16)]) for at, match in byte_tokens.items() if match}
        codes = np.where(codes == ord(_METASPACE), ord(" "), codes)
        data = text.replace(_METASPACE, " ").encode("utf-8")
        widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        byte_ends = np.append(0, widths.cumsum())[ends]
    if other:
        return _spell_tokens(tokens, {**literal, **other}, byte_level)
    # Insert the bytes of `literal` in their empty slots.
    lengths = np.diff(byte_ends, prepend=0)
    pieces: list[bytes] = []
    last = 0
    for at in sorted(literal):
        end = int(byte_ends[at])
        pieces += (data[last:end], literal[at])
        lengths[at] = len(literal[at])
        last = end
    return b"".join([*pieces, data[last:]]), lengths


def _find_prefix(normalizers: list[dict[str, Any]], pre_tokenizers: list[dict[str, Any]]) -> Prefix:
    """When the tokenizer prepends a space."""
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


def read_steps(part: Any, *, code: bool = False) -> list[Any]:
    """The steps of one part, in order. A part written in Python raises, or counts as no steps with `code`."""
    try:
        return [] if part is None else flatten_steps(orjson.loads(part.__getstate__()))
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        if code:
            return []
        raise


def flatten_steps(part: Any) -> list[Any]:
    """The steps of one part of a definition, in order, with nested sequences flattened."""
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
"""The last character of `ALPHABET`."""
_MAX_CHECKED = 1 << 15
"""How many non-ASCII bytes are checked; beyond, comparing the texts is as fast."""
_NFC_STABLE = re.compile(
    rb"(?:[\xc2-\xcb\xcf-\xd1][\x80-\xbf]"
    rb"|\xe2(?:\x80[\x82-\xbf]|[\x81\x82\x85-\x8b\x8d-\xaa\xac-\xae][\x80-\xbf])"
    rb"|\xe3(?:\x80[\x80-\xa9]|\x82[\x80-\x98\x9b-\xbf]|[\x81\x83-\xbf][\x80-\xbf])"
    rb"|[\xe4-\xe9\xeb\xec][\x80-\xbf]{2}|\xea[\xb0-\xbf][\x80-\xbf]|\xed[\x80-\x9d][\x80-\xbf]"
    rb"|\xef(?:[\xbc-\xbf][\x80-\xbf]|\xb8[\x80-\x8f])"
    rb"|\xf0\x9f[\x80-\xbf]{2})*"
)
"""UTF-8 of characters that NFC never changes, moves or composes: Latin, Cyrillic, most symbols, kana, Chinese,
Korean syllables, emoji."""


def is_unchanged_by_nfc(data: bytes) -> bool:
    """Whether NFC is known to leave this UTF-8 text unchanged."""
    rest = data.translate(None, _ASCII)
    return len(rest) <= _MAX_CHECKED and _NFC_STABLE.fullmatch(rest) is not None


def keeps_bytes(form: str | None, data: bytes) -> bool:
    """Whether tokens with as many bytes as a text must have the same bytes; `form`: see `find_normal_form`."""
    return form is not None and (not form or data.isascii() or is_unchanged_by_nfc(data))


def find_normal_form(backend: tokenizers.Tokenizer) -> str | None:
    """How a tokenizer normalizes texts, "" or "NFC"; None if its tokens may have other bytes than the text."""
    from tokenizers import models

    try:
        normalizers = read_steps(backend.normalizer)
        pre_tokenizers = read_steps(backend.pre_tokenizer)
    except Exception:  # tokenizers raises plain Exception for parts written in Python
        return None
    # Pre-tokenization may only split a text and map its bytes to characters.
    kinds = [step.get("type") for step in pre_tokenizers]
    if kinds.count("ByteLevel") != 1 or not set(kinds) <= {"ByteLevel", "Split", "Digits"}:
        return None
    if any(step.get("add_prefix_space") for step in pre_tokenizers):
        return None
    # The model has to be byte-level BPE with a token for every byte.
    model = backend.model
    if not isinstance(model, models.BPE) or model.byte_fallback or model.unk_token is not None:
        return None
    has_affix = model.continuing_subword_prefix or model.end_of_word_suffix
    if has_affix or any(model.token_to_id(character) is None for character in ALPHABET):
        return None
    if any(step != {"type": "NFC"} for step in normalizers):
        return None
    contents = [token.content for token in backend.get_added_tokens_decoder().values()]
    stable = not normalizers or all(is_unchanged_by_nfc(content.encode()) for content in contents)
    if not stable:
        return None
    for content in contents:  # its bytes must certainly be its text, even if the model can produce its id too
        signs = all("!" <= character <= "~" for character in content) or max(content) > _LAST_OF_ALPHABET
        if not signs or not content.replace("▁", "").strip():
            return None
    return "NFC" if normalizers else ""
