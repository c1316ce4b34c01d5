"""Very long texts, encoded in parts: an encoder takes 12 bytes for each byte of a text, the reference some 200.

A part ends at a safe cut (see `split_points.py`), so the ids of the parts, joined, are those of the whole. A text
without safe cuts, and every text of a tokenizer without a table of them, is encoded whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tito_audit.record.arrays import Ids
from tito_audit.tokens.encoders import well_formed

if TYPE_CHECKING:
    from tito_audit.tokens.split_points import SafeCuts

LONG = 1 << 20
"""Texts of more characters are encoded in parts."""
PART = 1 << 18
"""Characters of a part."""

Encode: TypeAlias = Callable[[Sequence[str]], list[Ids]]


def in_parts(encode: Encode, safe_cuts: Callable[[], SafeCuts | None]) -> Encode:
    """The same ids, without the memory that long texts would take as a whole."""

    def encoded(texts: Sequence[str]) -> list[Ids]:
        if max(map(len, texts), default=0) <= LONG or (safe := safe_cuts()) is None:
            return encode(texts)
        short = iter(encode([text for text in texts if len(text) <= LONG]))
        return [next(short) if len(text) <= LONG else _joined(encode, text, safe) for text in texts]

    return encoded


def _joined(encode: Encode, text: str, safe: SafeCuts) -> Ids:
    ids: Ids = np.concatenate([encode([part])[0] for part in safe.parts(well_formed(text), PART)])
    ids.flags.writeable = False
    return ids
