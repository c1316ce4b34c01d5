"""What the gate says in the `text` report: what is known, what is fixed, the limits, and the last line."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from tito_audit.reports._verdict import rate_words
from tito_audit.summary import Summary
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
    yield "Limits", [rate_words(rate) for rate in gate.rates]


def accept_lines(summary: Summary) -> list[str]:
    """The command that makes a failing gate pass."""
    gate = summary.gate
    if gate is None or not gate.failed:
        return []
    if gate.baseline is not None:
        return ["tito-audit scan … --update-baseline   accept what is new as known"]
    return ["tito-audit scan … --baseline tito-baseline.json --update-baseline   accept what is there now"]


def gate_line(summary: Summary, *, failing: bool) -> Text | None:
    """`gate: failed: 3 errors in 2 rollouts …`; `gate: passed` only if that is not obvious.

    It is obvious if the gate only asks for no errors and there are none; `failing` says whether there are any.
    """
    gate = summary.gate
    if gate is None:
        return None
    says_more = gate.baseline is not None or bool(gate.rates) or gate.fail_on in ("warning", "note")
    if not (gate.failed or says_more or (gate.fail_on != "never" and failing)):
        return None
    line = Text("gate: ")
    if not gate.failed:
        return line.append("passed", style="bold green")
    line.append("failed", style="bold red")
    return line.append(": " + visible("; ".join(gate.because)))
