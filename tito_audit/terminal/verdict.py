"""The verdict of a scan, its causes, coverage and skipped rules, in words that all reports share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tito_audit.evidence.needs import RARE
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
from tito_audit.record.finding import Severity
from tito_audit.settings.model import Requirement, share_text
from tito_audit.summary import CoverageCount, Gate, Headline, NewCount, RateCount, RuleCount, Summary
from tito_audit.terminal.escape import cut, visible
from tito_audit.terminal.words import code_ranges, many, percent, rate_number, share
from tito_audit.voice import for_reader

_MAX_REASONS = 3
"""Maximum reasons named for an empty audit or a failed gate, and causes of one severity."""
_NOTHING = ("nothing audited", "nothing compared")
_TOKENIZER_CODES = frozenset(("REC007", "REC011", "TPL213"))
"""Rules that test a log's first rows against a tokenizer. As they judge no rollout, they have no skips."""
MAX_CAUSES = 8
"""Maximum causes listed."""
NOT_APPEND_ONLY = "TPL213"
REASONING_CODES = frozenset(("TPL204", "TPL205", NOT_APPEND_ONLY))
"""What a template that is not append-only does to reasoning; these findings are one cause."""
_RETOKENIZED = "{n} re-tokenized"
"""The headline of completions whose tokens a later prompt holds in another form."""


@dataclass(frozen=True, slots=True)
class ScanVerdict:
    """The verdict on a scan."""

    word: str
    """`passed` or `failed`; without a gate `findings` or `clean`. Where no rollout could be checked, `nothing
    audited` or `nothing compared` replaces `passed` and `clean`, whatever notes there are.
    """
    parts: tuple[str, ...]
    """What was found, as independent clauses, the reason for the word first."""

    @property
    def line(self) -> str:
        """`failed: errors in 11 of 72 rollouts (15 %): 20 prompts re-tokenized; 142 notes in 39 (54 %)`."""
        return f"{self.word}: {'; '.join(self.parts)}"


def verdict(summary: Summary, see_notes: str = "") -> ScanVerdict:
    """The verdict on a scan; findings in the baseline do not count. `see_notes` follows the number of notes."""
    word = verdict_word(summary)
    counts = _failures_and_findings(summary, see_notes, judged=word not in ("failed", *_NOTHING))
    because = []  # why nothing was audited or compared
    if word == "nothing compared":
        because = [f"{uncompared_words(summary)} ({many(summary.uncompared, 'rollout')})"]
    elif word == "nothing audited":
        rollouts = many(summary.rollouts, "rollout")
        if summary.without_ids < summary.rollouts:
            reasons = [f"{reason} ({codes})" for reason, codes, _ in skips_by_reason(summary)[:_MAX_REASONS]]
            because = [f"{rollouts} with {', '.join(reasons) or 'no tokenizer'}"]
        elif summary.rollouts:
            because = [f"no token ids in {rollouts}"]
        else:
            because = [
                _unreadable_words(summary.rows_unreadable) if summary.rows_unreadable else "there are no rollouts"
            ]
    # What was not audited, besides what the verdict's word says.
    parts = []
    if summary.uncompared and word not in _NOTHING:
        parts.append(f"nothing compared in {summary.uncompared:,}: {uncompared_words(summary)}")
    if summary.without_ids and word != "nothing audited":
        parts.append(f"nothing audited in {summary.without_ids:,} without token ids")
    # A new error may say so already; not if it is known, or if REC001 was not selected.
    if summary.rows_unreadable and summary.rollouts and not summary.findings.get("REC001", RuleCount()).new:
        parts.append(_unreadable_words(summary.rows_unreadable))
    return ScanVerdict(word, (*because, *counts, *undecided_words(summary), *parts))


def verdict_line(summary: Summary) -> str:
    """The verdict on a scan in one line: `findings: errors in 2 of 6 rollouts (33 %): …`."""
    return visible(for_reader(verdict(summary).line))


def verdict_lines(summary: Summary) -> list[str]:
    """The verdict on a scan, then a line for each cause with the rules that found it."""
    lines = [verdict_line(summary)]
    for cause in cause_lines(summary):
        word = "" if cause.severity is None else cause.severity.word
        lines.append(visible("  " + " ".join(filter(None, (word, cause.words, ", ".join(cause.codes))))))
    return lines


def verdict_word(summary: Summary) -> str:
    """The `word` of a scan's `ScanVerdict`."""
    if summary.gate is not None and summary.gate.failed:
        return "failed"
    if summary.gate is None and _has_new(summary, Severity.ERROR, Severity.WARNING):
        return "findings"
    skipped = {code for code, skipped_rule in summary.skipped.items() if skipped_rule.rollouts >= summary.rollouts}
    if summary.tokenizer is None:
        skipped |= _TOKENIZER_CODES
    if summary.without_ids == summary.rollouts or (summary.codes and summary.codes <= skipped):
        return "nothing audited"
    if summary.uncompared and not summary.compared:
        return "nothing compared"
    if summary.gate is not None:
        return "passed"
    return "findings" if summary.findings else "clean"


def _failures_and_findings(summary: Summary, see_notes: str, *, judged: bool) -> list[str]:
    """Clauses on what fails the gate, then on other findings by severity.

    `judged` allows the clause "no errors"; a scan that audited nothing may not claim that.
    """
    gate = summary.gate
    if gate is not None and gate.updated:
        accepted = f"{many(gate.added, 'finding')} accepted into {gate.baseline}; {gate.known:,} known before"
        return [*_reasons(gate), accepted]
    baseline = gate is not None and gate.baseline is not None
    bar = Severity.threshold(gate.fail_on) if gate is not None else Severity.ERROR
    counts = {severity: new for severity, new in sorted(summary.new.items(), reverse=True) if new.findings > 0}
    words = _words_by_severity(counts, summary, new=baseline)
    if Severity.NOTE in words:
        words[Severity.NOTE] += see_notes
    blamed = [
        words[severity]
        for severity in words
        if gate is not None and gate.failing and bar is not None and severity >= bar
    ]
    rest = [text for text in words.values() if text not in blamed]
    lead: list[str] = []
    if not blamed and not _has_new(summary, Severity.ERROR) and (baseline or judged):
        lead = ["0 new errors" if baseline else "no errors"]
        if not (baseline or words):  # nothing was found: say by how many rules
            never = {code for code, skipped in summary.skipped.items() if skipped.rollouts >= summary.rollouts}
            without, pass_tokenizer = _tokenizer_words(summary)
            lead = [f"no findings in {many(summary.compared, 'rollout')}", *([pass_tokenizer] if without else [])]
            if others := len(never - without):
                lead.append(f"{many(others, 'other rule' if without else 'rule')} could not run on any of them")
            if partly := len(summary.skipped.keys() - never - without):
                lead.append(f"{many(partly, 'rule')} could not run on some")
            lead = ["; ".join(lead)]
    reasons = _reasons(gate) if gate is not None else []
    counted = [*lead, *rest]
    if baseline and gate is not None:
        first = blamed or counted
        count, colon, causes = first[0].partition(":")
        first[0] = f"{count} ({gate.known:,} known){colon}{causes}"
    spared = []
    if gate is not None and not gate.failed and _has_new(summary, Severity.ERROR):
        spared = ["within the limits"] if gate.rates else []
        spared = ["nothing fails with --fail-on never"] if gate.fail_on == "never" else spared
    return [*blamed, *reasons, *spared, *counted]


def _reasons(gate: Gate) -> list[str]:
    """Why the gate failed besides single findings, at most three reasons."""
    reasons = [cut(reason, 300) for reason in gate.because[bool(gate.failing) :]]
    more = len(reasons) - _MAX_REASONS
    return [*reasons[:_MAX_REASONS], *([many(more, "more reason")] if more > 0 else [])]


def _has_new(summary: Summary, *severities: Severity) -> bool:
    """Whether there are findings of one of these severities outside the baseline."""
    return any(severity in summary.new and summary.new[severity].findings > 0 for severity in severities)


def _words_by_severity(counts: dict[Severity, NewCount], summary: Summary, *, new: bool) -> dict[Severity, str]:
    """By severity: `errors in 2 of 6 rollouts (33 %): 2 prompts re-tokenized`, `4 notes in 1 (17 %)`."""
    rows = summary.rollouts + summary.rows_unreadable
    ranked = [headline for headline in summary.ranked_headlines() if headline.text]
    words: dict[Severity, str] = {}
    of = f" of {many(rows, 'rollout')}"
    for severity, count in counts.items():
        noun = f"new {severity.word}" if new else severity.word
        # `in 2 of 6 rollouts (33 %)`, `in the log as a whole`.
        log = "the log as a whole" if count.of_logs == 1 else "logs as a whole"
        where = f"in {log}"
        if alone := count.rollouts or count.between:
            where = f"in {alone:,}{of} ({percent(alone / rows)})" if rows else f"in {alone:,}"
            where += " and between rows" if count.rollouts and count.between else ""
            where += f" and in {log}" if count.of_logs else ""
            of = ""
        causes = []
        for headline in ranked:
            if headline.severity is not severity:
                continue
            # `60 prompts with a tool call rewritten by the template (22 rollouts)`, without what `count` states.
            times, text = getattr(headline, severity.word), headline.text
            if (headline.unit, times) == ("log", 1):
                text = text.removeprefix("{n} ").removeprefix("with ").removeprefix("in which ")
            elif (headline.unit, headline.rollouts) == ("rollout", count.rollouts):
                text = text.removeprefix("{n} with ")
            of_turn = _turn_words(headline)
            cause = of_turn or text.replace("{n}", many(times, headline.unit))
            # Milder findings of the same cause may be in other rollouts.
            implied = headline.rollouts in (0, count.rollouts, None if of_turn else times)
            if not implied and times == headline.times:
                cause += f" ({many(headline.rollouts, 'rollout')})"
            causes.append(cause)
        if severity is Severity.NOTE or not causes:
            words[severity] = f"{many(count.findings, noun)} {where}"
        else:
            # Not how many: several findings may have one cause.
            more = f" and {many(len(causes) - _MAX_REASONS, 'more cause')}" if len(causes) > _MAX_REASONS else ""
            some = f"1 {noun}" if count.findings == 1 else f"{noun}s"
            words[severity] = f"{some} {where}: {', '.join(causes[:_MAX_REASONS])}{more}"
    return words


def _turn_words(headline: Headline) -> str | None:
    """`turn 2 of each was re-tokenized in the next prompt`; None unless all rollouts show it at the same turn."""
    if headline.place is None or headline.unit not in ("prompt", "completion"):
        return None
    turn, later = headline.place
    if later is not None and later > turn and headline.text == _RETOKENIZED:
        where = "the next prompt" if later == turn + 1 else f"the prompt of turn {later}"
        return f"turn {turn} of each was re-tokenized in {where}"
    prompt = turn if later is None else later
    each = f"turn {prompt}'s prompt in each" if headline.unit == "prompt" else f"turn {turn} of each"
    return headline.text.replace("{n} that", f"{each}, which").replace("{n}", each)


def _unreadable_words(rows: int) -> str:
    return f"{many(rows, 'row')} could not be read"


_UNENCODED = "the tokenizer cannot encode it"
"""The reason for a skipped rule (`run/auditor.py`)."""


def uncompared_words(summary: Summary) -> str:
    """`23 rules need a tokenizer: pass -t NAME`, or why the one passed could not be used."""
    reasons = {reason for rule in summary.skipped.values() for reason in rule.because}
    misfit = "the tokenizer does not fit the log (REC007)"
    unused = _UNENCODED if _UNENCODED in reasons and misfit not in reasons else misfit
    return _tokenizer_words(summary)[1] or unused


def _tokenizer_words(summary: Summary) -> tuple[set[str], str]:
    """The codes of rules that lacked a tokenizer, and what to do; "" if there are none."""
    skipped = summary.skipped.items()
    codes = {code for code, rule in skipped if any("no tokenizer" in reason for reason in rule.because)}
    needs = f"{many(len(codes), 'rule')} {'needs' if len(codes) == 1 else 'need'} a tokenizer"
    return codes, f"{needs}: pass -t NAME" if codes else ""


def baseline_words(gate: Gate | None) -> str:
    """`3 known findings of the baseline b.json left out; 2 of its findings are fixed`; "" without a baseline."""
    if gate is None or gate.baseline is None:
        return ""
    fixed = f"; {gate.gone:,} of its findings {'is' if gate.gone == 1 else 'are'} fixed" if gate.gone else ""
    return f"{many(gate.known, 'known finding')} of the baseline {gate.baseline} left out{fixed}"


def rate_words(rate: RateCount) -> str:
    """`TOK=0.001: 41 findings in 20,000 generated tokens, 0.00205: too many`."""
    often = f", {rate_number(rate)}" if math.isfinite(rate.rate) else ""
    findings = f"{many(rate.findings, 'finding')} in {rate.of:,} {rate.unit}"
    return f"{rate.limit}: {findings}{often}: {'too many' if rate.failed else 'passed'}"


@dataclass(frozen=True, slots=True)
class CauseLine:
    """One line in a list of causes."""

    severity: Severity | None
    """None in the line that counts the causes left out."""
    words: str
    """`60 prompts with a tool call rewritten by the template (22 rollouts, 21 %)`."""
    codes: tuple[str, ...] = ()
    """The rules that found it, the one with the most findings first."""


def cause_lines(summary: Summary, least: Severity = Severity.NOTE) -> list[CauseLine]:
    """At most eight causes of new findings from `least` up, the most severe and then most frequent first."""
    lines: list[CauseLine] = []
    of_template: dict[Severity, int] = {}
    rows = summary.rollouts + summary.rows_unreadable
    for headline in summary.ranked_headlines():
        words, at = headline.words, len(lines)
        if headline.rollouts and rows:
            share, rollouts = percent(headline.rollouts / rows), many(headline.rollouts, "rollout")
            words += f" ({share})" if headline.unit == "rollout" else f" ({rollouts}, {share})"
            if (of_turn := _turn_words(headline)) is not None:
                words = f"{rollouts} ({share}): {of_turn}"
        found_by = tuple(code for code, number in headline.codes.most_common() if number)
        line = CauseLine(headline.severity, words, found_by)
        if not REASONING_CODES.isdisjoint(line.codes):
            explains = line.codes == (NOT_APPEND_ONLY,)  # whatever else the template did
            at = of_template.setdefault(max(of_template) if explains and of_template else headline.severity, at)
        if at < len(lines):
            words, codes = f"{lines[at].words}, {line.words}", (*lines[at].codes, *line.codes)
            lines[at] = CauseLine(lines[at].severity, words, tuple(dict.fromkeys(codes)))
        elif headline.severity >= least:
            lines.append(line)
    if len(lines) > MAX_CAUSES:
        lines[MAX_CAUSES:] = [CauseLine(None, f"and {many(len(lines) - MAX_CAUSES, 'more cause')}")]
    return lines


def skip_lines(summary: Summary) -> list[str]:
    """`no logprobs: LPR501-LPR506 (40 rollouts)` for each reason, which may quote the log; the commonest first."""
    reasons = skips_by_reason(summary)
    return [f"{because}: {codes} ({many(number, 'rollout')})" for because, codes, number in reasons]


def skip_words(summary: Summary) -> str:
    """The commonest reasons: `no loss mask (MSK401-MSK404); no trainer (LPR509); --not-checked lists 2 more`."""
    reasons = skips_by_reason(summary)
    words = []
    for because, codes, number in reasons[:_MAX_REASONS]:
        rules = codes if number >= summary.rollouts else f"{codes} in {many(number, 'rollout')}"
        reason = cut(because, 90)  # which may quote the log
        words.append(f"{reason}: {rules}" if reason.endswith(")") else f"{reason} ({rules})")
    more = len(reasons) - _MAX_REASONS
    return "; ".join([*words, *([f"--not-checked lists {more:,} more"] if more > 0 else [])])


def skips_by_reason(summary: Summary) -> list[tuple[str, str, int]]:
    """Reason, rules and number of rollouts: `("no logprobs", "LPR501-LPR506", 40)`.

    First what most rollouts and rules lack, last what few logs ever have (`RARE`).
    """
    codes: dict[tuple[str, int], list[str]] = {}
    for code, skipped in sorted(summary.skipped.items()):
        for because, number in skipped.because.items():
            codes.setdefault((because, number), []).append(code)
    ranked = sorted(codes.items(), key=lambda item: (item[0][0] in RARE, -item[0][1], -len(item[1]), item[0]))
    return [(because, code_ranges(those), number) for (because, number), those in ranked]


def required_name(count: CoverageCount) -> str:
    """The requirement as an option: `require LPR`, `require SEQ=95%`, `min-audited 95%`."""
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
    return f"{_coverage_done(count)}, {required}: {count.because} in {count.lacking:,}, first {count.first}{more}"


def coverage_words(count: CoverageCount) -> str:
    """A requirement and its result: `require LPR=95%: ran on 61 of 72 rollouts (85 %): too few`."""
    ended = "too few" if count.failed else "passed"
    covered = _coverage_done(count).removeprefix(count.codes).lstrip() if count.of else "there are no rollouts"
    return f"{required_name(count)}: {covered}: {ended}"


def covered_share(count: CoverageCount) -> str:
    """The covered share, `85 %`, with enough digits to tell it from the required share."""
    shown, bar = percent(count.rate), 100 * count.share
    if not shown[0].isdigit() or (float(shown.removesuffix(" %")) < bar) == count.failed:
        return shown
    texts = (f"{100 * count.rate:.{digits}f}" for digits in range(1, 13))
    return next((f"{text} %" for text in texts if (float(text) < bar) == count.failed), shown)


def undecided_words(summary: Summary) -> list[str]:
    """`20 rows could not be judged`, and which flag to pass if some have the fault that other rows prove."""
    words = [f"{many(summary.open_rows, 'row')} could not be judged"] if summary.open_rows else []
    if beside := summary.open_beside_faults:
        them = "it" if beside == 1 else "them"
        words.append(
            f"{many(beside, 'row')} may have the same fault; nothing in {them} decides it: "
            f"state it with {summary.fault_beside} if it is so"
        )
    return words


def sft_words(summary: Summary) -> str:
    """`SFT: 5,797 of 10,866 tokens trained (53 %), ends in 185 of 185 turns`; "" without SFT rows."""
    of = summary.sft
    if not of[ROWS]:
        return ""
    words = [f"{of[TRAINED]:,} of {many(of[TOKENS], 'token')} trained ({share(of[TRAINED], of[TOKENS])})"]
    if of[ENDS]:
        words.append(f"ends in {of[ENDS_TRAINED]:,} of {many(of[ENDS], 'turn')}")
    for fact, words_of_fact in _SFT_FACTS.items():
        if of[fact]:
            words.append(words_of_fact.replace("{n}", many(of[fact], "row")))
    return f"SFT: {', '.join(words)}"


_SFT_FACTS = {
    NOTHING: "nothing in {n}",
    CUT: "{n} cut before an answer",
    UNFINISHED: "{n} with an answer cut or without its end",
    TWO_BOS: "{n} with two BOS",
    PACKED: "{n} of several samples",
}
"""By fact about SFT rows: its words, with `{n}` for the number of rows."""


def _coverage_done(count: CoverageCount) -> str:
    """`LPR ran on 61 of 72 rollouts (85 %)`, and in how many it had nothing to check."""
    if not count.codes:
        return f"{_covered_of(count)} audited ({covered_share(count)})"
    if not count.idle:
        return f"{count.codes} ran on {_covered_of(count)} ({covered_share(count)})"
    ran = f"ran on {count.covered - count.idle:,} and " if count.covered > count.idle else ""
    of = f"{many(count.of, 'rollout')} ({covered_share(count)})"
    return f"{count.codes} {ran}had nothing to check in {count.idle:,} of {of}"


def _covered_of(count: CoverageCount) -> str:
    return f"{count.covered:,} of {many(count.of, 'rollout')}"
