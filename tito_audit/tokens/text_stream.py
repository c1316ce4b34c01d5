"""Token ids to text, piece by piece as they are sampled."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from tito_audit.record.arrays import Ids
from tito_audit.tokens.vocab import Prefix, Vocabulary


class TextStream:
    """The text of one answer in pieces; joined, they equal `decoded` of all its ids.

    Only what the next token may change is held back: an incomplete character, a space that the tokenizer may have
    prepended, an end token, and the beginning of a stop text. Takes linear time in the number of ids.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        special: bool = True,
        end_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        keep_stop: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._hidden = frozenset[int]() if special else vocabulary.special_ids
        self._end_ids = frozenset(end_ids)
        self._ended: list[int] = []
        """End tokens not yet followed by anything."""
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._stretches = None if vocabulary.prefix is Prefix.NEVER else _Stretches(vocabulary.prefix)
        self._stop = _Stop(stop, keep_stop) if any(stop) else None

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found: nothing more is part of the text."""
        return self._stop is not None and self._stop.found

    def feed(self, ids: Iterable[int]) -> str:
        """What the next ids add."""
        data = bytearray()
        for token_id in ids:
            self._ended.append(token_id)
            if token_id not in self._end_ids:
                self._take(data)
        return self._shown(self._characters.decode(bytes(data)))

    def close(self) -> str:
        """What was still held back when the answer ended, without one last end token."""
        data = bytearray()
        del self._ended[-1:]
        self._take(data)
        if self._stretches is not None:
            data += self._stretches.close()
        return self._shown(self._characters.decode(bytes(data), final=True), last=True)

    def _take(self, data: bytearray) -> None:
        for token_id in self._ended:
            if token_id in self._hidden:
                continue
            own = self._vocabulary.token_bytes(token_id)
            if self._stretches is not None:
                own = self._stretches.feed(own, token_id in self._vocabulary.added_ids)
            data += own
        self._ended.clear()

    def _shown(self, text: str, last: bool = False) -> str:
        return text if self._stop is None else self._stop.feed(text, last)


def decoded(
    vocabulary: Vocabulary,
    ids: Sequence[int] | Ids,
    *,
    special: bool = True,
    end_ids: Collection[int] = (),
    stop: Sequence[str] = (),
    keep_stop: bool = False,
) -> str:
    """The text of an answer; broken characters as U+FFFD.

    Control tokens are left out unless `special`. If the last id is an end token, it is not part of the text; the
    text ends before the stop text that is complete first, or after it with `keep_stop`.
    """
    shown = np.asarray(ids, np.int32)
    if len(shown) and int(shown[-1]) in end_ids:
        shown = shown[:-1]
    if not special:
        shown = shown[~vocabulary.control(shown)]
    text = vocabulary.text(shown)
    return text[: _first_stop(text, stop, keep_stop)]


class _Stretches:
    """The bytes of tokens without the spaces that the tokenizer prepends, as `Vocabulary.text` leaves them out."""

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self._begins = True
        """Whether the text since the last added token has no bytes yet but a pending space."""
        self._space = False

    def feed(self, data: bytes, added: bool) -> bytes:
        """What a token adds; an added token ends one stretch and begins another."""
        if not added:
            if not self._begins:
                return data
            data = b" " + data if self._space else data
            self._space = data == b" "
            if self._space or not data:
                return b""
            self._begins = False
            own = not data.startswith(b" ") or (self._prefix is not Prefix.ALWAYS and data.startswith(b"  "))
            return data if own else data[1:]
        rest = self.close()
        self._begins = self._prefix is not Prefix.FIRST_UNLESS_SPACE
        return rest + data

    def close(self) -> bytes:
        """The space of a stretch that holds nothing else, if it belongs to the text."""
        waits, self._space = self._space, False
        return b" " if waits and self._prefix is not Prefix.ALWAYS else b""


class _Stop:
    """A text up to the first of several stop texts."""

    def __init__(self, stop: Sequence[str], keep: bool) -> None:
        self._keep = keep
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.found = False

    def feed(self, text: str, last: bool) -> str:
        """What the next piece adds."""
        if self.found:
            return ""
        text = self._held + text
        at = _first_stop(text, self._stop, self._keep)
        if at is not None:
            self.found, self._held = True, ""
            return text[:at]
        back = 0 if last else max(overlap(text, mark) for mark in self._stop)
        self._held = text[len(text) - back :]
        return text[: len(text) - back]


def _first_stop(text: str, stop: Sequence[str], keep: bool) -> int | None:
    """Where a text with a stop text ends: at the stop text that is complete first, as a sampler sees it."""
    places = [
        (at + len(text_of_stop), at)
        for text_of_stop in stop
        if text_of_stop and (at := text.find(text_of_stop)) >= 0
    ]
    return min(places)[not keep] if places else None


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark; the whole mark does not count."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0
