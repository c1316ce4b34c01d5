"""The gate in the `text` report: what is known, what is fixed, the limits."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from tito_audit.reports._verdict import rate_words
from tito_audit.summary import Summary
from tito_audit.terminal.coverage import coverage_words
from tito_audit.terminal.escape import visible

_FIXED = 5
"""Maximum fixed findings listed."""


def known_lines(summary: Summary, known: int) -> Iterator[Text]:
    """`12 known from baseline.json, not shown below`, and how the baseline was updated."""
    gate = summary.gate
    if gate is None or gate.baseline is None:
        return
    name = visible(gate.baseline)
    if known:
        yield Text(f"{known:,} known from {name}, not shown below")
    if gate.updated:
        yield Text(f"{name} was updated: {gate.added:,} accepted, {gate.gone:,} gone")


def gate_lists(summary: Summary) -> Iterator[tuple[str, list[str]]]:
    """The lists, by title, of what was fixed since the baseline and of the limits."""
    gate = summary.gate
    if gate is None:
        return
    fixed = []
    for one in gate.fixed[:_FIXED]:
        times = f", {one.times:,} times" if one.times > 1 else ""
        fixed.append(f"{one.code} {visible(one.file)} row {one.row}{times}: {visible(one.message)}")
    if len(gate.fixed) > _FIXED:
        fixed.append(f"… and {len(gate.fixed) - _FIXED:,} more")
    yield "Fixed since the baseline", fixed
    yield "Limits", [*map(rate_words, gate.rates), *(visible(coverage_words(one)) for one in gate.coverage)]


def accept_lines(summary: Summary) -> list[str]:
    """The command that accepts what fails; a baseline cannot accept what was not checked."""
    gate = summary.gate
    if gate is None or not (gate.failing or any(rate.failed for rate in gate.rates)):
        return []
    if gate.baseline is not None:
        return ["tito-audit scan … --update-baseline   accept what is new"]
    return ["tito-audit scan … --baseline tito-baseline.json --update-baseline   accept these; only new ones fail"]
