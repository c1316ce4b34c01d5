"""Token ids to text, piece by piece as they are sampled."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from tito_audit.record.arrays import Ids
from tito_audit.tokens.vocab import Prefix, Vocabulary


class TextStream:
    """Decodes one answer piece by piece; the pieces join to what `decode` returns for all ids.

    Holds back only what the next token may change: an incomplete character, a space that the tokenizer may have
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
        self._held_ids: list[int] = []
        """End tokens not yet followed by anything."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prefix_remover = None if vocabulary.prefix is Prefix.NEVER else _PrefixRemover(vocabulary.prefix)
        self._stop = _StopTexts(stop, keep_stop) if any(stop) else None

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found, so that nothing more is part of the text."""
        return self._stop is not None and self._stop.found

    def feed(self, ids: Iterable[int]) -> str:
        """The text that the next ids add."""
        data = bytearray()
        for token_id in ids:
            self._held_ids.append(token_id)
            if token_id not in self._end_ids:
                self._append_bytes(data)
        text = self._decoder.decode(bytes(data))
        return text if self._stop is None else self._stop.feed(text, last=False)

    def close(self) -> str:
        """The text that was held back, when the answer has ended; without one last end token."""
        data = bytearray()
        del self._held_ids[-1:]
        self._append_bytes(data)
        if self._prefix_remover is not None:
            data += self._prefix_remover.close()
        text = self._decoder.decode(bytes(data), final=True)
        return text if self._stop is None else self._stop.feed(text, last=True)

    def _append_bytes(self, data: bytearray) -> None:
        """Append the bytes of the ids that were held back."""
        for token_id in self._held_ids:
            if token_id in self._hidden:
                continue
            own = self._vocabulary.token_bytes(token_id)
            if self._prefix_remover is not None:
                own = self._prefix_remover.feed(own, token_id in self._vocabulary.added_ids)
            data += own
        self._held_ids.clear()


def decode(
    vocabulary: Vocabulary,
    ids: Sequence[int] | Ids,
    *,
    special: bool = True,
    end_ids: Collection[int] = (),
    stop: Sequence[str] = (),
    keep_stop: bool = False,
) -> str:
    """The text of an answer; invalid UTF-8 becomes U+FFFD.

    Without `special`, control tokens are left out. If the last id is an end token, it is not part of the text. The
    text ends before the stop text that is complete first; with `keep_stop`, after it.
    """
    shown = np.asarray(ids, np.int32)
    if len(shown) and int(shown[-1]) in end_ids:
        shown = shown[:-1]
    if not special:
        shown = shown[~vocabulary.control(shown)]
    text = vocabulary.text(shown)
    return text[: _first_stop(text, stop, keep_stop)]


class _PrefixRemover:
    """Removes the spaces that the tokenizer prepends from the bytes of tokens, as `Vocabulary.text` does."""

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self._begins = True
        """Whether nothing came since the last added token, except perhaps a pending space."""
        self._space = False

    def feed(self, data: bytes, added: bool) -> bytes:
        """The bytes that a token adds; an added token ends one stretch of text and begins another."""
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
        """The pending space of a stretch that holds nothing else, if it belongs to the text."""
        waits, self._space = self._space, False
        return b" " if waits and self._prefix is not Prefix.ALWAYS else b""


class _StopTexts:
    """Ends a stream of text at the first of several stop texts."""

    def __init__(self, stop: Sequence[str], keep: bool) -> None:
        self._keep = keep
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.found = False

    def feed(self, text: str, last: bool) -> str:
        """The text that the next piece adds."""
        if self.found:
            return ""
        text = self._held + text
        at = _first_stop(text, self._stop, self._keep)
        if at is not None:
            self.found, self._held = True, ""
            return text[:at]
        back = 0 if last else max(partial_match(text, mark) for mark in self._stop)
        self._held = text[len(text) - back :]
        return text[: len(text) - back]


def _first_stop(text: str, stop: Sequence[str], keep: bool) -> int | None:
    """Where a text ends at the stop text that is complete first; None if it holds none."""
    places = [
        (at + len(text_of_stop), at)
        for text_of_stop in stop
        if text_of_stop and (at := text.find(text_of_stop)) >= 0
    ]
    return min(places)[not keep] if places else None


def partial_match(text: str, mark: str) -> int:
    """How many characters at the end of a text begin `mark` without completing it."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0
