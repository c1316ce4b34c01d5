"""Narrows a block whose bytes differ to the tokens that differ."""

from __future__ import annotations

import re
import unicodedata

from tito_audit.align.blocks import Block, BlockKind
from tito_audit.align.pieces import Pieces
from tito_audit.align.runs import equal_runs, gaps
from tito_audit.record.prefix import common_ends

_BROKEN = "\ufffd"
_EMPTY_REASONING = re.compile(rb"<think>\s*</think>\s*")
_LONGEST = 2000
"""The most tokens on a side of a block that is still narrowed."""


def narrowed(block: Block, recorded: Pieces, canonical: Pieces) -> list[Block]:
    """The parts of a block that differ; one part where all of it does.

    Tokens that both sides begin or end with are cut off. If all that differs is control tokens that the canonical
    side drops, broken characters that it writes as U+FFFD, text that it normalises, or empty reasoning that it
    adds, each of these is a part.
    """
    kind, start, end, c_start, c_end = block
    if kind is not BlockKind.DRIFT:
        return [block]
    a, b = recorded.ids[start:end], canonical.ids[c_start:c_end]
    head, tail = common_ends(a, b)
    whole = _part(start + head, end - tail, c_start + head, c_end - tail)
    a, b = a[head : len(a) - tail], b[head : len(b) - tail]
    if not len(a) or not len(b) or max(len(a), len(b)) > _LONGEST:
        return [whole]
    parts = [
        _part(whole[1] + i, whole[1] + i_end, whole[3] + j, whole[3] + j_end)
        for i, i_end, j, j_end in gaps(equal_runs(a, b), len(a), len(b))
    ]
    separate = len(parts) > 1 and all(_is_clear(part, recorded, canonical) for part in parts)
    return parts if separate else [whole]


def _is_clear(part: Block, recorded: Pieces, canonical: Pieces) -> bool:
    """Whether a part shows by itself what happened: dropped control tokens, text as decoding or normalising leaves
    it, or empty reasoning that was added."""
    kind, start, end, c_start, c_end = part
    if kind is BlockKind.EXTRA:
        return bool(recorded.control[start:end].all())
    data, written = recorded.bytes_of(start, end), canonical.bytes_of(c_start, c_end)
    if kind is BlockKind.MISSING:
        return _EMPTY_REASONING.fullmatch(written) is not None
    text = _text(data)
    return (_BROKEN in text and text == _text(written)) or normalised(data, written) is not None


def normalised(data: bytes, written: bytes) -> str | None:
    """The Unicode normalisation that makes one text the other; None if none does."""
    try:
        text, other = data.decode(), written.decode()
    except UnicodeDecodeError:
        return None
    if text == other:
        return None
    return next((form for form in ("NFC", "NFKC") if unicodedata.normalize(form, text) == other), None)


def _text(data: bytes) -> str:
    """Bytes as text, each run of broken characters as one: decoders differ in how many they produce."""
    return re.sub(f"{_BROKEN}+", _BROKEN, data.decode("utf-8", "replace"))


def _part(start: int, end: int, c_start: int, c_end: int) -> Block:
    kind = BlockKind.DRIFT if start < end and c_start < c_end else BlockKind.EXTRA
    return (BlockKind.MISSING if start == end else kind), start, end, c_start, c_end
