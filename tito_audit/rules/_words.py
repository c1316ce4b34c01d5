"""Puts numbers, texts and tokens into the words of findings."""

from __future__ import annotations

from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Side
from tito_audit.rule import SHOWN_TOKENS


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 token`, `2 tokens`: the plural adds an s unless another one is given."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def quoted(text: str) -> str:
    """A text in quotes, control characters escaped, shortened to 40 characters."""
    return repr(text if len(text) <= 40 else text[:39] + "…")


def head(evidence: Evidence, ids: Ids) -> Side:
    """The first tokens of a range, at most `SHOWN_TOKENS`, as a side of a finding."""
    return evidence.side(ids[:SHOWN_TOKENS])
