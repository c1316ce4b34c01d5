"""What is right to say of a sample and to make of it; each check returns what is violated, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .forms import Columns
from .observed import is_fill
from .plan import Case
from .tool import Finding

__all__ = ["after_repair", "before_repair", "cured", "loud", "named", "of_scan", "said_undecided", "wrong_places"]

MASK_CODES = ("MSK401", "MSK402")
KEPT = 0.9
"""Of the sampled tokens that have their logprob, the share that a repaired slide still trains."""


def loud(findings: Sequence[Finding]) -> bool:
    """Whether anything is an error or a warning."""
    return any(one.loud for one in findings)


def said_undecided(findings: Sequence[Finding]) -> bool:
    """Whether a note says something of the mask or the logprobs."""
    return any(not one.loud and one.code[:3] in ("MSK", "LPR") for one in findings)


def named(case: Case, findings: Sequence[Finding]) -> bool:
    """Whether the fault is named with its code and how far it slid."""
    errors = [one for one in findings if one.severity == "error"]
    fault, fill = case.fault, case.form.fill
    if fault.slid:
        mask = any(one.code in MASK_CODES and one.cause == f"slid by {fault.mask:+d}" for one in errors)
        shift = any(one.code == "LPR502" and one.cause == f"shifted by {fault.logprobs:+d}" for one in errors)
        return (mask or not fault.mask) and (shift or not fault.logprobs)
    if fault.kind == "inverted":
        return any(one.code == "MSK403" and one.cause == "inverted" for one in errors)
    if fault.kind == "roles":
        return any(one.code == "MSK401" for one in errors)
    if fill == 0.0:
        return any(one.code.startswith("LPR") for one in findings)
    code = "LPR503" if fill is None or math.isnan(fill) else "LPR505"
    return any(one.code == code and one.loud for one in findings)


def of_scan(case: Case, findings: Sequence[Finding], *, whole: bool) -> Iterator[str]:
    """What a scan says that is not right. `whole`: all rows of the file have the same fault."""
    verdict = case.verdict
    if any(_misnamed(case, one) for one in findings if one.loud):
        yield "another slide named"
    if case.fault.kind == "clean":
        if loud(findings):
            yield "loud on a clean row"
    elif verdict == "fault":
        if not named(case, findings):
            yield "decidable fault not named" if loud(findings) else "decidable fault passed as clean"
    elif verdict == "open fault":
        if not loud(findings):
            yield "a fault, if not which, passed as clean"
    elif case.fault.kind == "fill":
        if case.zeros >= 8 and not named(case, findings):
            yield "8 zeros or more inside and nothing said"
    elif case.stated_verdict == "open" and not whole and loud(findings):
        yield "loud on a row that may be clean"


def _misnamed(case: Case, found: Finding) -> bool:
    fault = case.fault
    if found.code in MASK_CODES and found.cause.startswith("slid by "):
        return found.cause != f"slid by {fault.mask:+d}"
    return (
        found.code == "LPR502"
        and found.cause.startswith("shifted by ")
        and (found.cause != f"shifted by {fault.logprobs:+d}")
    )


def after_repair(case: Case, after: Columns, flags: str) -> Iterator[str]:
    """What a repair did that is not right."""
    if after.ids != case.chat.ids or not len(after.ids) == len(after.mask) == len(after.values):
        yield "repair changed ids"
        return
    before = before_repair(case)
    wrong_now, wrong_then = wrong_places(case, after), wrong_places(case, before)
    if any(before.mask[at] and at not in wrong_then for at in wrong_now):
        yield "repair harmed: a trained token that was right is wrong"
    fresh = [at for at in wrong_now if not before.mask[at] or _value(case, before, at) != _value(case, after, at)]
    if any(at in wrong_then or not before.mask[at] for at in fresh):
        yield "repair trains a wrong pair that was not there"
    if case.fault.kind == "clean" and _shown(case, after) != _shown(case, before):
        yield "repair touched a clean row"
    if flags in ("default", "warning") and case.verdict == "fault":
        yield from _must_be_cured(case, after)


def before_repair(case: Case) -> Columns:
    """The sample as it was written."""
    return Columns(case.chat.ids, case.sample.seen.mask, case.sample.seen.values)


def cured(case: Case, after: Columns) -> bool:
    """Whether no trained token is wrong."""
    return after.ids == case.chat.ids and not wrong_places(case, after)


def _must_be_cured(case: Case, after: Columns) -> Iterator[str]:
    if not cured(case, after):
        yield "decidable fault not cured"
    elif case.fault.slid:
        there = sum(one is not None for one in case.chat.truth) - case.zeros
        right = sum(after.mask)
        if right < KEPT * there:
            yield "cured by leaving out tokens that could be kept"


def wrong_places(case: Case, columns: Columns) -> list[int]:
    """Trained tokens that were not sampled or carry another logprob than their own."""
    truth = case.chat.truth
    return [
        at for at, on in enumerate(columns.mask) if on and (truth[at] is None or columns.values[at] != truth[at])
    ]


def _value(case: Case, columns: Columns, at: int) -> float | None:
    """A logprob; None for the form's fill."""
    value = columns.values[at]
    nothing = (
        value is None or math.isnan(value) or is_fill(value, case.form.fill) or value == case.form.fill == 1.0
    )
    return None if nothing else value


def _shown(case: Case, columns: Columns) -> tuple[list[bool], list[float | None]]:
    return columns.mask, [_value(case, columns, at) for at in range(len(columns.ids))]
