"""Encodes only the new part of texts that begin like texts with known ids.

The prompts of a conversation grow by a turn each, and the rollouts of a group share their first prompt:

    known   <|im_start|> user\\nHi <|im_end|> \\n <|im_start|> assistant\\n
    text    <|im_start|> user\\nHi <|im_end|> \\n <|im_start|> assistant\\n Hello <|im_end|> …
                                                         ^ the last cut within what both begin with

Text before a cut is encoded as if nothing followed (see `segments.py`), so the ids up to the cut are those of the
known text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from tito_audit.record.arrays import Ids
from tito_audit.tokens.segments import Cuts, SegmentEncoder

_LONG = 2048
"""Texts of at least this many characters are compared with earlier ones."""
_KEPT = 4
"""How many texts are remembered: a rollout's calls may alternate between several chains, and the next rollout may
begin the same way."""


class KnownText:
    """A text with its ids `[N]`, and the cuts found in it."""

    def __init__(self, cuts: Cuts, text: str, ids: Ids, base: KnownText | None = None, shared: int = 0) -> None:
        """The first `shared` cuts are those of `base`, with which text and ids begin."""
        self.text = text
        self.ids = ids
        self._cuts = cuts
        self._ends: list[int] = []
        """Characters up to the end of each cut token; found when a text arrives that may share some."""
        self._tokens: list[int] = []
        """The same, counted in ids."""
        self._read = False
        if base is not None and shared:
            self._ends, self._tokens = base._ends[:shared], base._tokens[:shared]

    @property
    def tokens(self) -> Sequence[int]:
        """Ids up to the end of each cut token found so far."""
        return self._tokens

    def shared(self, text: str) -> int:
        """How many cuts the common start of this text and another one holds."""
        if not self._read:
            # Finding cuts costs a third of encoding: not worth it if only a system prompt is shared.
            half = len(self.text) // 2
            near = self.text[max(half - 32, 0) : half]  # fewer characters are compared before all of them are
            if not text.startswith(near, half - len(near)) or not text.startswith(self.text[:half]):
                return 0
            self._read = True
            begin, first = self.up_to(len(self._ends))
            pieces = self._cuts.split(self.text[begin:])
            at = self._cuts.positions(self.ids[first:]) + first
            # No more if text and ids differ there: a model may write an unknown character as a control token.
            if [self._cuts.tokens[piece] for piece in pieces[1::2]] == self.ids[at].tolist():
                self._ends += list(accumulate(map(len, pieces), initial=begin))[2::2]
                self._tokens += (at + 1).tolist()
        low, high = 0, len(self._ends)
        first = high
        while low < high:
            begin, end = self._ends[low - 1] if low else 0, self._ends[first - 1]
            if text.startswith(self.text[begin:end], begin):
                low = first
            else:
                high = first - 1
            first = (low + high + 1) // 2
        return low

    def up_to(self, shared: int) -> tuple[int, int]:
        """How many characters and ids there are up to the end of the first `shared` cuts."""
        return (self._ends[shared - 1], self._tokens[shared - 1]) if shared else (0, 0)


class KnownTexts:
    """The last few texts with known ids, of several chains that grow by turns."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self._known: list[KnownText] = []

    def find(self, text: str) -> tuple[KnownText | None, int]:
        """The known text that shares the most with this one, and how many cuts; None and 0 if none shares any."""
        best, most, longest = None, 0, (0, 0)
        for text_known in reversed(self._known):
            shared = text_known.shared(text)
            if shared and text_known.up_to(shared) > longest:
                best, most, longest = text_known, shared, text_known.up_to(shared)
        return best, most

    def ids_of(self, text: str) -> Ids | None:
        """The ids of exactly this text; None if it is not known."""
        return next((earlier.ids for earlier in reversed(self._known) if earlier.text == text), None)

    def keep(self, text: str, ids: Ids, base: KnownText | None = None, shared: int = 0) -> None:
        """Remember a text, replacing `base` if it continues all of it."""
        if base is not None and base in self._known and len(base.tokens) == shared:
            self._known.remove(base)
        self._known.append(KnownText(self._cuts, text, ids, base, shared))
        del self._known[:-_KEPT]


class PrefixEncoder:
    """An encoder that encodes only the new part of a long text."""

    def __init__(self, whole: SegmentEncoder, cuts: Cuts) -> None:
        self._whole = whole
        self._known = KnownTexts(cuts)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order."""
        if len(texts) != 1 or len(texts[0]) < _LONG:
            return self._whole.encode_batch(texts)
        text = texts[0]
        same = self._known.ids_of(text)
        if same is not None:
            return [same]
        base, shared = self._known.find(text)
        characters, first = base.up_to(shared) if base is not None else (0, 0)
        if base is not None and characters == len(text):
            return [base.ids[:first]]
        (ids,) = self._whole.encode_batch([text[characters:]])
        if base is not None:
            ids = np.concatenate([base.ids[:first], ids])
            ids.flags.writeable = False
        self._known.keep(text, ids, base, shared)
        return [ids]
