"""What each id stands for: its bytes, how it reads, whether it is a control token.

Three ways of writing a vocabulary are understood, told apart by the tokenizer's decoder and pre-tokenizer:

    byte-level       "Ġhello": every character stands for one byte (GPT-2, Qwen, Llama 3, DeepSeek, gpt-oss)
    metaspace        "▁hello": ▁ stands for a space (Llama 2, Gemma)
    byte fallback    "<0x0A>": one byte that no other entry of a metaspace vocabulary can write

The bytes of an added token are its literal content. Bytes are worked out when an id is first met: a
vocabulary of 260,000 entries costs most of a second, a log uses a tenth of them.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from tito_audit.record.arrays import Ids, Mask, Offsets

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Prefix", "Vocabulary"]

_METASPACE = "▁"
_UNFILLED = -1
_UNKNOWN = -2
_FEW = 64
"""Below so many tokens a plain join is faster than arrays."""


class Prefix(StrEnum):
    """When a tokenizer puts a space of its own in front of a text."""

    NEVER = "never"
    ALWAYS = "always"  # before every stretch of text between added tokens
    ALWAYS_UNLESS_SPACE = "always_unless_space"  # the same, unless the stretch starts with a space
    FIRST_UNLESS_SPACE = "first_unless_space"  # at the very start of the text only


class Vocabulary:
    """The entries of one tokenizer, by id. An id that is none of them has no bytes, `b""`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        parts = _Parts(backend)
        self._byte_level = parts.has("ByteLevel")
        self.prefix = parts.prefix()
        """What the tokenizer prepends; `text` takes it away again."""
        added = backend.get_added_tokens_decoder()
        self._literal = {i: token.content for i, token in added.items() if not self._ordinary(token.content)}
        self.added_ids = frozenset(self._literal)
        """Every added token that is not plain white space (gemma-3 lists runs of newlines as added)."""
        self.special_ids = frozenset(i for i in self._literal if added[i].special)
        """The added tokens that the tokenizer marks as special."""
        self.size: int = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        """One more than the highest id, as far as it is known without reading the whole vocabulary."""
        # The last slot of each array stands for every id that the vocabulary does not have.
        self._bytes: list[bytes] = [b""] * (self.size + 1)
        self._lengths = np.full(self.size + 1, _UNFILLED, np.int64)
        self._lengths[-1] = _UNKNOWN
        # The same bytes end to end, for joining many of them at once.
        self._flat = bytearray()
        self._starts = np.zeros(self.size + 1, np.int64)
        self._spelled: dict[bytes, tuple[int, ...]] | None = None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for; b"" for an id that the vocabulary does not have."""
        return self._bytes[int(self._slots(np.array([token_id], np.int64))[0])]

    def byte_lengths(self, ids: Ids) -> Offsets:
        """How many bytes each id stands for, `[N]` int64; 0 where the vocabulary has no such id."""
        slots = self._slots(ids)  # first: it may put a longer array in place
        return np.maximum(self._lengths[slots], 0)

    def data(self, ids: Ids) -> bytes:
        """The bytes of all ids, joined."""
        slots = self._slots(ids)
        if len(slots) < _FEW:
            table = self._bytes
            return b"".join([table[slot] for slot in slots.tolist()])
        lengths = np.maximum(self._lengths[slots], 0)
        ends = np.cumsum(lengths)
        # Byte i of the result is byte i - (where its token begins in the result) of that token.
        offsets = np.repeat(self._starts[slots] - (ends - lengths), lengths)
        offsets += np.arange(len(offsets))
        return np.frombuffer(self._flat, np.uint8)[offsets].tobytes() if len(offsets) else b""

    def known(self, ids: Ids) -> Mask:
        """True where the id is in the vocabulary, `[N]` bool."""
        slots = self._slots(ids)
        return self._lengths[slots] >= 0

    def control(self, ids: Ids) -> Mask:
        """`[N]` True for control tokens, the added tokens that are marked special."""
        table = self._control_table
        inside = (ids >= 0) & (ids < len(table))
        return np.asarray(inside & table[np.where(inside, ids, 0)])

    @cached_property
    def _control_table(self) -> Mask:
        """`[largest control id + 2]` so that it is never empty."""
        special = np.fromiter(self.special_ids, np.int64)
        table = np.zeros(int(special.max(initial=-1)) + 2, np.bool_)
        table[special] = True
        return table

    def piece(self, token_id: int) -> str:
        """How a token reads for people: its text, bytes that are no text as \\xNN."""
        slot = int(self._slots(np.array([token_id], np.int64))[0])
        if self._lengths[slot] < 0:
            return f"<unknown id {token_id}>"
        return self._bytes[slot].decode("utf-8", errors="backslashreplace")

    def text(self, ids: Ids) -> str:
        """The text that these ids encode; special tokens as written, broken characters as U+FFFD.

        A space that the tokenizer prepends is left out: encoding the text prepends it again.
        """
        if self.prefix is Prefix.NEVER:
            return self.data(ids).decode("utf-8", errors="replace")
        return b"".join(self._stretches(ids)).decode("utf-8", errors="replace")

    def ids_of_bytes(self, data: bytes) -> tuple[int, ...]:
        """All ids that spell these bytes, lowest first; () if none does. The first call reads every entry."""
        if self._spelled is None:
            self._spelled = self._read_everything()
        return self._spelled.get(data, ())

    def _stretches(self, ids: Ids) -> list[bytes]:
        """The bytes between added tokens, each without the space that was prepended to it."""
        out: list[bytes] = []
        table, added = self._bytes, self.added_ids
        stretch: list[bytes] = []
        for token_id, slot in zip(ids.tolist(), self._slots(ids).tolist(), strict=True):
            if token_id not in added:
                stretch.append(table[slot])
                continue
            out += (self._unprefixed(b"".join(stretch), not out), table[slot])
            stretch = []
        out.append(self._unprefixed(b"".join(stretch), not out))
        return out

    def _unprefixed(self, data: bytes, first: bool) -> bytes:
        """A stretch of text without the space that the tokenizer put before it."""
        if not data.startswith(b" ") or (self.prefix is Prefix.FIRST_UNLESS_SPACE and not first):
            return data
        # A tokenizer that skips texts with a space of their own prepended nothing before two spaces.
        own_space = self.prefix is not Prefix.ALWAYS and (data.startswith(b"  ") or data == b" ")
        return data if own_space else data[1:]

    def _slots(self, ids: Ids | Offsets) -> Offsets:
        """Where each id's entry is, `[N]` int64, with every entry filled."""
        slots = ids.astype(np.int64, copy=False)
        outside = (slots < 0) | (slots >= self.size)
        if outside.any():
            self._grow(np.unique(slots[outside]))
            slots = np.where((slots < 0) | (slots >= self.size), self.size, slots)
        missing = slots[self._lengths[slots] == _UNFILLED]
        if len(missing):
            for token_id in np.unique(missing).tolist():
                self._fill(token_id)
        return slots

    def _grow(self, candidates: Offsets) -> None:
        """Make room for ids beyond the counted size: a vocabulary with holes has some."""
        present = [i for i in candidates.tolist() if i >= self.size and self._token(i) is not None]
        if not present:
            return
        more = max(present) + 1 - self.size
        self._bytes += [b""] * more
        fresh = np.full(more, _UNFILLED, np.int64)
        self._lengths = np.concatenate([self._lengths[:-1], fresh, self._lengths[-1:]])
        self._starts = np.concatenate([self._starts, np.zeros(more, np.int64)])
        self.size += more

    def _fill(self, token_id: int) -> None:
        content = self._literal.get(token_id)
        if content is None:
            token = self._token(token_id)
            if token is None:
                self._lengths[token_id] = _UNKNOWN
                return
            data = self._spell(token)
        else:
            data = content.encode("utf-8")
        self._bytes[token_id] = data
        self._lengths[token_id] = len(data)
        self._starts[token_id] = len(self._flat)
        self._flat += data

    def _token(self, token_id: int) -> str | None:
        """The entry as the vocabulary writes it."""
        return self._backend.id_to_token(token_id) if token_id < 1 << 31 else None

    def _spell(self, token: str) -> bytes:
        """The bytes of an ordinary entry."""
        if self._byte_level:
            alphabet = _byte_alphabet()
            try:
                return bytes([alphabet[character] for character in token])
            except KeyError:  # an entry in plain text, as some vocabularies hold for their control tokens
                return token.encode("utf-8")
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(_METASPACE, " ").encode("utf-8")

    def _ordinary(self, content: str) -> bool:
        return content.replace(_METASPACE, " ").isspace()

    def _read_everything(self) -> dict[bytes, tuple[int, ...]]:
        ids = np.array(sorted(set(self._backend.get_vocab(with_added_tokens=True).values())), np.int64)
        spelled: dict[bytes, tuple[int, ...]] = {}
        for token_id, slot in zip(ids.tolist(), self._slots(ids).tolist(), strict=True):
            data = self._bytes[slot]
            spelled[data] = (*spelled.get(data, ()), token_id)
        return spelled


@cache
def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level vocabularies write each byte.

    Printable bytes of Latin-1 stand for themselves; the 68 others take the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


class _Parts:
    """The normalizer, pre-tokenizer and decoder of a tokenizer, as flat lists of their steps."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.normalizers = _steps(backend.normalizer, "normalizers")
        self.pre_tokenizers = _steps(backend.pre_tokenizer, "pretokenizers")
        self.decoders = _steps(backend.decoder, "decoders")

    def has(self, kind: str) -> bool:
        return any(step.get("type") == kind for step in self.pre_tokenizers + self.decoders)

    def prefix(self) -> Prefix:
        """What is prepended to a text before it is cut."""
        if any(step.get("type") == "Prepend" for step in self.normalizers):
            return Prefix.ALWAYS
        for step in self.pre_tokenizers:
            if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
                return Prefix.ALWAYS_UNLESS_SPACE
            if step.get("type") == "Metaspace":
                scheme = step.get("prepend_scheme", "always")
                unless = {"always": Prefix.ALWAYS_UNLESS_SPACE, "first": Prefix.FIRST_UNLESS_SPACE}
                return unless.get(scheme, Prefix.NEVER)
        return Prefix.NEVER


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """One component of a tokenizer as its JSON steps; a component that is code has none to show."""
    if part is None:
        return []
    try:
        state = orjson.loads(part.__getstate__())
    except Exception:  # tokenizers raises plain Exception for components written in Python
        return []
    steps: list[dict[str, Any]] = []
    pending = [state]
    while pending:
        step = pending.pop(0)
        pending = [*step[name], *pending] if isinstance(step.get(name), list) else pending
        steps.append(step)
    return steps
