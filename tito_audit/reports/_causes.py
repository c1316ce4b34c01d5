"""The causes of a scan as lines: what happened, how often, and which rules found it."""

from __future__ import annotations

from dataclasses import dataclass

from tito_audit.record.finding import Severity
from tito_audit.summary import Headline, Summary
from tito_audit.terminal.words import many, percent

LINES = 8
"""Maximum causes listed."""


@dataclass(frozen=True, slots=True)
class CauseLine:
    """One cause."""

    severity: Severity | None
    """None for the line that counts the causes left out."""
    words: str
    """`60 prompts with a tool call rewritten by the template (22 rollouts, 21 %)`."""
    codes: tuple[str, ...] = ()
    """The rules that found it, the one with the most findings first."""


def cause_lines(summary: Summary, limit: int = LINES) -> list[CauseLine]:
    """The causes, the most severe and most frequent first; known findings are left out."""
    ranked = summary.ranked_headlines()
    lines = [_line(one, summary) for one in ranked[:limit]]
    if len(ranked) > limit:
        lines.append(CauseLine(None, f"and {many(len(ranked) - limit, 'more cause')}"))
    return lines


def _line(one: Headline, summary: Summary) -> CauseLine:
    rows = summary.rollouts + summary.rows_unreadable
    codes = tuple(code for code, number in one.codes.most_common() if number)
    if not one.rollouts or not rows:
        return CauseLine(one.severity, one.words, codes)
    share = percent(one.rollouts / rows)
    where = share if one.unit == "rollout" else f"{many(one.rollouts, 'rollout')}, {share}"
    return CauseLine(one.severity, f"{one.words} ({where})", codes)
