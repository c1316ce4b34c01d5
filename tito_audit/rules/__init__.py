"""Evidence to findings; one file a rule."""

from __future__ import annotations

from functools import cache

from tito_audit.registry import load_plugins
from tito_audit.rule import Rule

__all__ = ["FAMILIES", "all_rules", "rule_of"]

FAMILIES = {
    "REC": "the record",
    "TOK": "same bytes, other tokens",
    "TPL": "other bytes",
    "SEQ": "call to call",
    "MSK": "the loss mask",
    "LPR": "logprobs",
}


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    return tuple(sorted(load_plugins(__name__, Rule, lambda rule: rule.code), key=lambda rule: rule.code))


def rule_of(code: str) -> Rule | None:
    """The rule with this code; None when there is none."""
    return next((rule for rule in all_rules() if rule.code == code), None)
