"""What is right to say of a sample and to make of it; each check returns what is violated, in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from .forms import Columns
from .observed import is_fill, region
from .plan import Case
from .tool import Finding

__all__ = [
    "after_repair",
    "before_repair",
    "changed",
    "cured",
    "loud",
    "named",
    "noted",
    "of_log",
    "of_scan",
    "wrong_places",
]

MASK_CODES = ("MSK401", "MSK402")
KEPT = 0.9
"""Of the trained tokens that still have their logprob, the share that a repaired slide still trains."""
SINGLE = 1e-6
"""Values of a call this close are taken for equal."""
ZEROS = 8
"""So many trained tokens without a logprob must be spoken of, also where they have 0.0."""


def loud(findings: Sequence[Finding]) -> bool:
    """Whether anything is an error or a warning."""
    return any(finding.loud for finding in findings)


def noted(findings: Sequence[Finding]) -> bool:
    """Whether a note says something of the mask or the logprobs."""
    return any(not finding.loud and finding.code[:3] in ("MSK", "LPR") for finding in findings)


def named(case: Case, findings: Sequence[Finding]) -> bool:
    """Whether the fault is named with its code, and a slide with how far it went; beside calls, token by token."""
    errors = [finding for finding in findings if finding.severity == "error"]
    fault, fill = case.fault, case.form.fill
    if case.form.calls:
        spans = [span for finding in errors if finding.where == "row" for span in finding.spans]
        before = before_repair(case)
        wrong = [at for at in wrong_places(case, before) if not _rounded(case.chat.truth[at], before.values[at])]
        return all(any(start <= at < end for start, end in spans) for at in wrong)
    if fault.slid:
        slide = next(iter(case.decision.slides), fault)
        slides = {_slide(finding) for finding in errors}
        wanted = {("mask", slide.mask)} if slide.mask else set()
        wanted |= {("logprobs", slide.logprobs)} if slide.logprobs else set()
        return wanted <= slides
    if fault.kind == "inverted":
        if any(finding.code == "MSK403" and finding.cause == "inverted" for finding in errors):
            return True
        # Where answers or their first tokens were out of the loss, the inverted mask may be one by roles.
        partly = case.convention.first > 0 or case.convention.turns != "all"
        return partly and any(finding.code == "MSK401" for finding in errors)
    if fault.kind == "roles":
        return any(finding.code == "MSK401" for finding in errors)
    if fill == 0.0:
        return any(finding.code.startswith("LPR") for finding in findings)
    code = "LPR503" if fill is None or math.isnan(fill) else "LPR505"
    return any(finding.code == code and finding.loud for finding in findings)


def _rounded(truth: float | None, value: float | None) -> bool:
    """Whether a value may be the true one in single precision."""
    return truth is not None and value is not None and abs(truth - value) <= SINGLE


def of_scan(case: Case, findings: Sequence[Finding]) -> Iterator[str]:
    """What a scan says of a sample that is not right."""
    verdict = case.verdict
    if any(_misnamed(case, finding) for finding in findings if finding.loud):
        yield "another slide named"
    if verdict == "clean":
        if loud(findings):
            yield "loud on a right row"
    elif verdict == "fault":
        if not loud(findings):
            yield "decidable fault passed as clean"
        elif not named(case, findings):
            yield "decidable fault not named"
    elif verdict == "open fault":
        if not loud(findings):
            yield "a fault, if not which, passed as clean"
    elif case.fault.kind == "fill":
        if case.zeros >= ZEROS and not named(case, findings):
            yield "8 zeros or more inside and nothing said"
    elif case.may_be_right and any(finding.loud and not _partly_trained(finding) for finding in findings):
        yield "loud on a row that may be right"


def _partly_trained(finding: Finding) -> bool:
    """Whether it warns that a row trains a part of an answer, in a way that no convention has."""
    causes = {"MSK402": "part of a turn left out", "MSK404": "sampled, not trained"}
    return finding.severity == "warning" and finding.cause == causes.get(finding.code)


def of_log(findings: Sequence[Finding], cases: Sequence[Case], *, convention: bool) -> Iterator[str]:
    """What is said of a whole log that is not right; `convention`: whether all of its rows keep one."""
    right = [case.fault.kind == "clean" for case in cases]
    if convention and all(right) and loud(findings):
        yield "loud on a log of one convention"
    if any(right) and any(finding.severity == "error" for finding in findings):
        yield "error on a log with right rows"
    faults = {case.fault for case in cases}
    slides = {_slide(finding) for finding in findings if finding.loud} - {None}
    if len(faults) == 1 and any(slides - {("mask", fault.mask), ("logprobs", fault.logprobs)} for fault in faults):
        yield "another slide named of a log"


def _slide(finding: Finding) -> tuple[str, int] | None:
    """The column that slid as a finding has it, and how far."""
    cause = re.match(r"(slid|shifted) by ([+-]\d+)\b", finding.cause)
    if cause is None or (finding.code not in MASK_CODES and finding.code != "LPR502"):
        return None
    return "mask" if finding.code in MASK_CODES else "logprobs", int(cause[2])


def _misnamed(case: Case, finding: Finding) -> bool:
    """Whether another slide is named, or the slide of an answer where nothing slid."""
    fault, slide = case.fault, _slide(finding)
    if slide is None:
        return False
    wrong = slide not in {("mask", fault.mask), ("logprobs", fault.logprobs)}
    # Where a row has several samples or padding, findings count from elsewhere.
    if wrong or not fault.shape or finding.start is None or case.form.group > 1 or case.form.padded:
        return wrong
    return finding.start not in region(case.chat, fault, case.low, case.sample.turn)


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
    if changed(case, after):
        if case.verdict == "clean":
            yield "repair touched a right row"
        elif case.may_be_right and case.fault.kind != "fill":
            yield "repair touched a row that may be right"
        elif case.verdict == "open fault" and case.decision.outcomes > 1:
            yield "repair touched a fault that several slides explain"
    if flags in ("default", "warning") and case.verdict == "fault":
        yield from _must_be_cured(case, after)


def before_repair(case: Case) -> Columns:
    """The sample as it was written."""
    seen, fill = case.sample.seen, case.form.fill
    return Columns(case.chat.ids, seen.mask, [fill if value is None else value for value in seen.values])


def changed(case: Case, after: Columns) -> bool:
    """Whether the columns say anything else than they did."""
    return _shown(case, after) != _shown(case, before_repair(case))


def cured(case: Case, after: Columns) -> bool:
    """Whether no trained token is wrong."""
    return after.ids == case.chat.ids and not wrong_places(case, after)


def _must_be_cured(case: Case, after: Columns) -> Iterator[str]:
    fault = case.fault
    if not cured(case, after):
        # Where every token has a logprob, nothing shows what to train in place of what was given.
        # An inverted mask does not show which sampled tokens were out of the loss before.
        bare = case.convention.recomputed and not any(after.mask[turn.start] for turn in case.chat.turns)
        sampled = sum(value is not None for value in case.chat.truth)
        if not bare and (fault.kind != "inverted" or sum(case.sample.right.mask) == sampled):
            yield "decidable fault not cured"
    elif fault.slid:
        there = sum(case.sample.right.mask) - abs(fault.mask) - abs(fault.logprobs)
        if sum(after.mask) < KEPT * there:
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
