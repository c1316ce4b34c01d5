"""What explains the recorded ids of a log: tokenizer, chat template, arguments, date."""

from __future__ import annotations

from tito_audit.identify.engine import Audit, identify
from tito_audit.identify.model import Candidate, Ending, Found, Identified, Lack, Left, Share, TokenizerFit
from tito_audit.ways.explain import explain_head
from tito_audit.ways.explanation import (
    GIVEN_TEMPLATE,
    OWN_TEMPLATE,
    Departure,
    DepartureKind,
    Explanation,
    NamedTemplate,
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
