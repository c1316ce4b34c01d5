"""Coverage in words: what was required, what could not be judged, what a set for SFT trains."""

from __future__ import annotations

from tito_audit.evidence.sft import (
    CUT,
    ENDS,
    ENDS_TRAINED,
    NOTHING,
    PACKED,
    ROWS,
    TOKENS,
    TRAINED,
    TWO_BOS,
    UNFINISHED,
)
from tito_audit.settings.model import Requirement, share_text
from tito_audit.summary import CoverageCount, Summary
from tito_audit.terminal.words import many, percent, share


def required_name(count: CoverageCount) -> str:
    """What was asked for: `require LPR`, `require SEQ=95%`, `min-audited 95%`."""
    if not count.codes:
        return f"min-audited {share_text(count.share)}"
    return f"require {Requirement(count.codes, count.share)}"


def coverage_reason(count: CoverageCount) -> str:
    """Why it fails: `LPR ran on 61 of 72 rollouts (85 %), 100 % required: no logprobs in 11, first a.jsonl:14`."""
    required = f"{100 * count.share:.12g} % required"
    if not count.of:
        return f"{count.codes or 'min-audited'}: there are no rollouts, {required}"
    others = count.of - count.covered - count.lacking
    more = f"; other reasons in {others:,}" if others else ""
    return f"{_done(count)}, {required}: {count.because} in {count.lacking:,}, first {count.first}{more}"


def coverage_words(count: CoverageCount) -> str:
    """A requirement and its result: `require LPR=95%: ran on 61 of 72 rollouts (85 %): too few`."""
    ended = "too few" if count.failed else "passed"
    covered = _done(count).removeprefix(count.codes).lstrip() if count.of else "there are no rollouts"
    return f"{required_name(count)}: {covered}: {ended}"


def covered_share(count: CoverageCount) -> str:
    """The share that is covered, `85 %`, with enough digits to tell it from the share that was required."""
    shown, bar = percent(count.rate), 100 * count.share
    if not shown[0].isdigit() or (float(shown.removesuffix(" %")) < bar) == count.failed:
        return shown
    texts = (f"{100 * count.rate:.{digits}f}" for digits in range(1, 13))
    return next((f"{text} %" for text in texts if (float(text) < bar) == count.failed), shown)


def open_words(summary: Summary) -> list[str]:
    """`20 rows could not be judged`, and what to do about those that may have a fault that others prove."""
    words = [f"{many(summary.open_rows, 'row')} could not be judged"] if summary.open_rows else []
    if beside := summary.open_beside_faults:
        them = "it" if beside == 1 else "them"
        words.append(
            f"{many(beside, 'row')} may have the same fault; nothing in {them} decides it: "
            f"state it with {summary.fault_beside} if it is so"
        )
    return words


def sft_words(summary: Summary) -> str:
    """`SFT: 5,797 of 10,866 tokens trained (53 %), ends in 185 of 185 turns`; "" without rows for SFT."""
    of = summary.sft
    if not of[ROWS]:
        return ""
    words = [f"{of[TRAINED]:,} of {many(of[TOKENS], 'token')} trained ({share(of[TRAINED], of[TOKENS])})"]
    if of[ENDS]:
        words.append(f"ends in {of[ENDS_TRAINED]:,} of {many(of[ENDS], 'turn')}")
    for fact, words_of_fact in _FACTS.items():
        if of[fact]:
            words.append(words_of_fact.replace("{n}", many(of[fact], "row")))
    return f"SFT: {', '.join(words)}"


_FACTS = {
    NOTHING: "nothing in {n}",
    CUT: "{n} cut before an answer",
    UNFINISHED: "{n} with an answer cut or without its end",
    TWO_BOS: "{n} with two BOS",
    PACKED: "{n} of several samples",
}
"""What is said of rows for SFT that have it."""


def _done(count: CoverageCount) -> str:
    """`LPR ran on 61 of 72 rollouts (85 %)`, including those with nothing to check."""
    if not count.codes:
        return f"{_shares(count)} audited ({covered_share(count)})"
    if not count.idle:
        return f"{count.codes} ran on {_shares(count)} ({covered_share(count)})"
    ran = f"ran on {count.covered - count.idle:,} and " if count.covered > count.idle else ""
    of = f"{many(count.of, 'rollout')} ({covered_share(count)})"
    return f"{count.codes} {ran}had nothing to check in {count.idle:,} of {of}"


def _shares(count: CoverageCount) -> str:
    return f"{count.covered:,} of {many(count.of, 'rollout')}"
