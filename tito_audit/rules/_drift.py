"""Questions that the TOK, TPL and SEQ rules ask about a difference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from tito_audit.align.pieces import CONTEXT_BYTES
from tito_audit.evidence.model import Difference, Evidence, TextSide
from tito_audit.record.finding import Hit
from tito_audit.rule import SAME_BYTES, hit_of

_THOUGHT = re.compile(rb"<think>(.*?)</think>", re.DOTALL)
_THOUGHT_END = b"</think>"
_FEW_BYTES = 4 * CONTEXT_BYTES
"""Texts below this are quickly searched, however many differences keep the same one."""
_SPACE_AFTER = re.compile(rb"\s*")


def same_bytes(difference: Difference) -> bool:
    """Whether both sides spell the same bytes."""
    return difference.kind in SAME_BYTES


def hits_of_known_causes(evidence: Evidence, code: str) -> Iterator[Hit]:
    """Hits of a plain `@rule` at differences that another way of writing the messages explains by its code."""
    for explained in evidence.explained:
        if explained.code == code and explained.difference.known_cause is not None:
            yield hit_of(explained, evidence, explained.difference.severity)


def reasoning_blocks(data: bytes) -> Iterator[re.Match[bytes]]:
    """The reasoning blocks in a text; group 1 is the text between the markers."""
    # Ends at the last end marker: the search for an end of each block opened after it would be quadratic.
    return _THOUGHT.finditer(data, 0, data.rfind(_THOUGHT_END) + len(_THOUGHT_END))


def is_repeated(difference: Difference, evidence: Evidence) -> bool:
    """Whether the recorded tokens of a difference occur again directly before or after it."""
    ids = evidence.sequence(difference.where, difference.turn)
    size = difference.end - difference.start
    if ids is None or not size:
        return False
    # The alignment may place a repetition at any of its tokens.
    around = ids[max(difference.start - size, 0) : difference.start + 2 * size]
    equal = np.concatenate(([0], (around[:-size] == around[size:]).cumsum()))
    return bool((equal[size:] - equal[:-size] == size).any())


def texts_in_context(difference: Difference) -> tuple[str, str]:
    """Recorded and canonical text of a difference, with the text around it up to the nearest control tokens."""
    return tuple(  # type: ignore[return-value]
        side.in_context.decode("utf-8", "replace") for side in (difference.recorded, difference.canonical)
    )


def in_answer(difference: Difference) -> bool:
    """Whether a difference lies in what the model said: a completion, or an assistant message in a prompt."""
    header = difference.recorded.before[:64] + difference.canonical.before[:64]
    return difference.sampled or bool(re.search(rb"assistant|model|Assistant", header))


def control_ids(side: TextSide) -> list[int]:
    """The control tokens of a side, in order."""
    control = side.pieces.control[side.start : side.end]
    if b"\1" not in control.tobytes():
        return []
    ids: list[int] = side.ids[control].tolist()
    return ids


def only_turn_ends(side: TextSide, evidence: Evidence) -> bool:
    """Whether a side holds tokens that end a turn and nothing else except white space."""
    rest = [i for i in side.ids.tolist() if i not in evidence.end_ids]
    if len(rest) == len(side.ids) or evidence.vocabulary is None:
        return False
    return not b"".join(map(evidence.vocabulary.token_bytes, rest)).strip()


@lru_cache(maxsize=1)  # two rules ask in turn
def changed_reasoning(recorded: TextSide, canonical: TextSide) -> tuple[bytes, bytes] | None:
    """The text of the reasoning block around a difference on either side; None outside a block, or if both are
    equal."""
    inner: dict[TextSide, bytes] = {}
    for data in (recorded.pieces.data, canonical.pieces.data):
        if len(data) < _FEW_BYTES and _THOUGHT_END not in data:
            return None
    # Most often, the side with less text is the one in no block.
    shorter = canonical if len(canonical.data) < len(recorded.data) else recorded
    for side in (recorded, canonical) if shorter is recorded else (canonical, recorded):
        start, text = len(side.before), side.in_context
        for thought in reasoning_blocks(text):
            space = _SPACE_AFTER.match(text, thought.end())
            assert space is not None
            if thought.start() <= start and start + len(side.data) <= space.end():
                inner[side] = thought[1].strip()
                break
        else:
            return None
    return (inner[recorded], inner[canonical]) if inner[recorded] != inner[canonical] else None


def hold_mark(difference: Difference, mark: bytes) -> tuple[bool, bool]:
    """Whether the recorded side contains a mark, and whether the canonical side does."""
    return mark in difference.recorded.data, mark in difference.canonical.data
