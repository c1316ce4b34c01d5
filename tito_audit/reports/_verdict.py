"""The verdict of a scan, in the same words in every report."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tito_audit.record.finding import Severity
from tito_audit.reports._skips import skips_by_reason
from tito_audit.summary import Gate, New, RateCount, RuleCount, Summary
from tito_audit.terminal.coverage import open_words
from tito_audit.terminal.cut import cut
from tito_audit.terminal.words import many, percent, rate_number

_REASONS = 3
"""Maximum reasons named for an empty audit or a failed gate."""
_NOTHING = ("nothing audited", "nothing compared")
_BY_TOKENIZER = frozenset(("REC007", "REC011", "TPL213"))
"""Rules that hold the first rows of a log against a tokenizer; as they are about no rollout, none has a skip."""
_REASON = 300
"""Maximum characters of a reason."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a scan."""

    word: str
    """`passed` or `failed`; without a gate `findings` or `clean`. `nothing audited` or `nothing compared` in place
    of `passed` and `clean` if no rollout could be checked, whatever notes there are.
    """
    parts: tuple[str, ...]
    """What was found, the reason first; independent parts."""

    @property
    def line(self) -> str:
        """`failed: 91 errors in 11 of 72 rollouts (15 %); 142 notes in 39 (54 %)`."""
        return f"{self.word}: {'; '.join(self.parts)}"


def verdict(summary: Summary) -> Verdict:
    """The verdict on a whole scan. Findings in the baseline are known and do not count."""
    word = verdict_word(summary)
    found = _found(summary, judged=word not in ("failed", *_NOTHING))
    return Verdict(word, (*_because(word, summary), *found, *open_words(summary), *_not_audited(word, summary)))


def _because(word: str, summary: Summary) -> list[str]:
    """Why nothing was audited or compared; [] if something was."""
    if word == "nothing audited":
        return [_nothing(summary)]
    if word == "nothing compared":
        return [f"{uncompared_words(summary)} ({many(summary.uncompared, 'rollout')})"]
    return []


def verdict_word(summary: Summary) -> str:
    """One or two words, as in `Verdict.word`."""
    if summary.gate is not None and summary.gate.failed:
        return "failed"
    if summary.gate is None and any(_some(summary, one) for one in (Severity.ERROR, Severity.WARNING)):
        return "findings"
    if summary.without_ids == summary.rollouts or _ran_nowhere(summary):
        return "nothing audited"
    if summary.uncompared and not summary.compared:
        return "nothing compared"
    if summary.gate is not None:
        return "passed"
    return "findings" if summary.findings else "clean"


def _ran_nowhere(summary: Summary) -> bool:
    """Whether no selected rule could run on any rollout."""
    skipped = {code for code, one in summary.skipped.items() if one.rollouts >= summary.rollouts}
    if summary.tokenizer is None:
        skipped |= _BY_TOKENIZER
    return bool(summary.codes) and summary.codes <= skipped


def _nothing(summary: Summary) -> str:
    if summary.without_ids < summary.rollouts:
        reasons = [f"{because} ({codes})" for because, codes, _ in skips_by_reason(summary)[:_REASONS]]
        return f"{many(summary.rollouts, 'rollout')} with {', '.join(reasons) or 'no tokenizer'}"
    if summary.rollouts:
        return f"no token ids in {many(summary.rollouts, 'rollout')}"
    return _unreadable(summary.rows_unreadable) if summary.rows_unreadable else "there are no rollouts"


def _found(summary: Summary, *, judged: bool) -> list[str]:
    """What was found by severity and what else made the gate fail; failures first. Not `judged`: never "no
    errors".
    """
    gate = summary.gate
    if gate is not None and gate.updated:
        accepted = f"{many(gate.added, 'finding')} accepted into {gate.baseline}; {gate.known:,} known before"
        return [*_reasons(gate), accepted]
    baseline = gate is not None and gate.baseline is not None
    bar = Severity.bar(gate.fail_on) if gate is not None else Severity.ERROR
    counts = {one: summary.new[one] for one in sorted(Severity, reverse=True) if _some(summary, one)}
    words = _counted(counts, summary, new=baseline)
    blamed = [words[one] for one in words if gate is not None and gate.failing and bar is not None and one >= bar]
    rest = [text for text in words.values() if text not in blamed]
    lead: list[str] = []
    if not blamed and not _some(summary, Severity.ERROR) and (baseline or judged):
        lead = ["0 new errors" if baseline else "no errors" if words else _clean(summary)]
    reasons = _reasons(gate) if gate is not None else []
    counted = [*lead, *rest]
    if baseline and gate is not None:
        (blamed or counted)[0] += f" ({gate.known:,} known)"
    spared = _why_errors_pass(gate) if gate is not None and _some(summary, Severity.ERROR) else []
    return [*blamed, *reasons, *spared, *counted]


def _why_errors_pass(gate: Gate) -> list[str]:
    """Why a log with new errors does not fail; [] if it does."""
    if gate.failed:
        return []
    if gate.fail_on == "never":
        return ["nothing fails with --fail-on never"]
    return ["within the limits"] if gate.rates else []


def _reasons(gate: Gate) -> list[str]:
    """Why the gate failed besides single findings, shortened."""
    reasons = gate.because[bool(gate.failing) :]
    more = len(reasons) - _REASONS
    return [cut(one, _REASON) for one in reasons[:_REASONS]] + (
        [f"{many(more, 'more reason')}"] if more > 0 else []
    )


def _some(summary: Summary, severity: Severity) -> bool:
    return severity in summary.new and summary.new[severity].findings > 0


def _clean(summary: Summary) -> str:
    words = f"no findings in {many(summary.compared, 'rollout')}"
    never = [code for code, one in summary.skipped.items() if one.rollouts >= summary.rollouts]
    without = _without_tokenizer(summary)
    if without:
        words += f"; {_pass_tokenizer(without)}"
    if others := len(set(never) - set(without)):
        words += f"; {many(others, 'other rule' if without else 'rule')} could not run on any of them"
    if partly := len(set(summary.skipped) - {*never, *without}):
        words += f"; {many(partly, 'rule')} could not run on some"
    return words


def _counted(counts: dict[Severity, New], summary: Summary, *, new: bool) -> dict[Severity, str]:
    """By severity: `4 errors in 2 of 6 rollouts (33 %)`; after the first, `1 warning in 1 (17 %)`."""
    rows = summary.rollouts + summary.rows_unreadable
    words: dict[Severity, str] = {}
    of = f" of {many(rows, 'rollout')}"
    for severity, count in counts.items():
        noun = f"new {severity.word}" if new else severity.word
        where, in_rollouts = _where(count, rows, of)
        words[severity] = f"{many(count.findings, noun)} {where}"
        of = "" if in_rollouts else of
    return words


def _where(count: New, rows: int, of: str) -> tuple[str, bool]:
    """`in 2 of 6 rollouts (33 %)`, `in the log as a whole`; and whether it says rollouts."""
    alone = count.rollouts or count.between
    log = "the log as a whole" if count.of_logs == 1 else "logs as a whole"
    if not alone:
        return f"in {log}", False
    words = f"in {alone:,}{of} ({percent(alone / rows)})" if rows else f"in {alone:,}"
    if count.rollouts and count.between:
        words += " and between rows"
    return words + (f" and in {log}" if count.of_logs else ""), True


def _not_audited(word: str, summary: Summary) -> list[str]:
    """What was not audited, besides what the verdict's word says."""
    parts = []
    if summary.uncompared and word not in _NOTHING:
        parts.append(f"nothing compared in {summary.uncompared:,}: {uncompared_words(summary)}")
    if summary.without_ids and word != "nothing audited":
        parts.append(f"nothing audited in {summary.without_ids:,} without token ids")
    # A new error may say so already; not if it is known, or if REC001 was not selected.
    if summary.rows_unreadable and summary.rollouts and not summary.findings.get("REC001", RuleCount()).new:
        parts.append(_unreadable(summary.rows_unreadable))
    return parts


def _unreadable(rows: int) -> str:
    return f"{many(rows, 'row')} could not be read"


def uncompared_words(summary: Summary) -> str:
    """`23 rules need a tokenizer: pass -t NAME`; or that the given one does not fit."""
    lacking = _without_tokenizer(summary)
    return _pass_tokenizer(lacking) if lacking else "the tokenizer does not fit the log (REC007)"


def _without_tokenizer(summary: Summary) -> list[str]:
    """The rules that could not run for lack of a tokenizer."""
    skipped = summary.skipped.items()
    return [code for code, one in skipped if any("no tokenizer" in reason for reason in one.because)]


def _pass_tokenizer(codes: list[str]) -> str:
    return f"{many(len(codes), 'rule')} {'needs' if len(codes) == 1 else 'need'} a tokenizer: pass -t NAME"


def baseline_words(gate: Gate | None) -> str:
    """`3 known findings of the baseline b.json left out; 2 of its findings are fixed`; empty without one."""
    if gate is None or gate.baseline is None:
        return ""
    words = f"{many(gate.known, 'known finding')} of the baseline {gate.baseline} left out"
    return words + (
        f"; {gate.gone:,} of its findings {'is' if gate.gone == 1 else 'are'} fixed" if gate.gone else ""
    )


def rate_words(rate: RateCount) -> str:
    """`TOK=0.001: 41 findings in 20,000 generated tokens, 0.00205: too many`."""
    often = f", {rate_number(rate)}" if math.isfinite(rate.rate) else ""
    found = f"{many(rate.findings, 'finding')} in {rate.of:,} {rate.unit}"
    return f"{rate.limit}: {found}{often}: {'too many' if rate.failed else 'passed'}"
