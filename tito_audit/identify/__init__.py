"""What explains the recorded ids of a log: tokenizer, chat template, arguments, date."""

from __future__ import annotations

from tito_audit.identify.engine import Audit, explain_head, identify
from tito_audit.identify.model import (
    GIVEN_TEMPLATE,
    OWN_TEMPLATE,
    Candidate,
    Departure,
    DepartureKind,
    Ending,
    Explanation,
    Found,
    Identified,
    Lack,
    Left,
    NamedTemplate,
    Share,
    TokenizerFit,
)

__all__ = [
    "GIVEN_TEMPLATE",
    "OWN_TEMPLATE",
    "Audit",
    "Candidate",
    "Departure",
    "DepartureKind",
    "Ending",
    "Explanation",
    "Found",
    "Identified",
    "Lack",
    "Left",
    "NamedTemplate",
    "Share",
    "TokenizerFit",
    "explain_head",
    "identify",
]
