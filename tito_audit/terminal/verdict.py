"""The verdict of a scan, its causes, coverage and what was skipped, in the same words in every report."""

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
from tito_audit.summary import CoverageCount, Gate, Headline, New, RateCount, RuleCount, Summary
from tito_audit.terminal.escape import cut, visible
from tito_audit.terminal.words import code_ranges, many, percent, rate_number, share
from tito_audit.voice import spoken

_REASONS = 3
"""Maximum reasons named for an empty audit or a failed gate, and causes of each severity."""
_NOTHING = ("nothing audited", "nothing compared")
_BY_TOKENIZER = frozenset(("REC007", "REC011", "TPL213"))
"""Rules that hold the first rows of a log against a tokenizer; as they are about no rollout, none has a skip."""
LINES = 8
"""Maximum causes listed."""
NOT_APPEND_ONLY = "TPL213"
OF_REASONING = frozenset(("TPL204", "TPL205", NOT_APPEND_ONLY))
"""What a template that is not append-only does to reasoning: one cause."""
_RETOKENIZED = "{n} re-tokenized"
"""The headline of tokens that a later prompt holds otherwise."""


@dataclass(frozen=True, slots=True)
class ScanVerdict:
    """The verdict on a scan."""

    word: str
    """`passed` or `failed`; without a gate `findings` or `clean`. `nothing audited` or `nothing compared` in place
    of `passed` and `clean` if no rollout could be checked, whatever notes there are.
    """
    parts: tuple[str, ...]
    """What was found, the reason first; independent parts."""

    @property
    def line(self) -> str:
        """`failed: errors in 11 of 72 rollouts (15 %): 20 prompts re-tokenized; 142 notes in 39 (54 %)`."""
        return f"{self.word}: {'; '.join(self.parts)}"


def verdict(summary: Summary, see_notes: str = "") -> ScanVerdict:
    """The verdict on a whole scan. Findings in the baseline are known and do not count.

    `see_notes` follows the number of notes.
    """
    word = verdict_word(summary)
    counts = _failures_and_findings(summary, see_notes, judged=word not in ("failed", *_NOTHING))
    because = []  # why nothing was audited or compared
    if word == "nothing compared":
        because = [f"{uncompared_words(summary)} ({many(summary.uncompared, 'rollout')})"]
    elif word == "nothing audited":
        rollouts = many(summary.rollouts, "rollout")
        if summary.without_ids < summary.rollouts:
            reasons = [f"{reason} ({codes})" for reason, codes, _ in skips_by_reason(summary)[:_REASONS]]
            because = [f"{rollouts} with {', '.join(reasons) or 'no tokenizer'}"]
        elif summary.rollouts:
            because = [f"no token ids in {rollouts}"]
        else:
            because = [
                _unreadable(summary.rows_unreadable) if summary.rows_unreadable else "there are no rollouts"
            ]
    # What was not audited, besides what the verdict's word says.
    parts = []
    if summary.uncompared and word not in _NOTHING:
        parts.append(f"nothing compared in {summary.uncompared:,}: {uncompared_words(summary)}")
    if summary.without_ids and word != "nothing audited":
        parts.append(f"nothing audited in {summary.without_ids:,} without token ids")
    # A new error may say so already; not if it is known, or if REC001 was not selected.
    if summary.rows_unreadable and summary.rollouts and not summary.findings.get("REC001", RuleCount()).new:
        parts.append(_unreadable(summary.rows_unreadable))
    return ScanVerdict(word, (*because, *counts, *open_words(summary), *parts))


def verdict_line(summary: Summary) -> str:
    """The verdict on a whole scan in one line: `findings: errors in 2 of 6 rollouts (33 %): …`."""
    return visible(spoken(verdict(summary).line))


def verdict_lines(summary: Summary) -> list[str]:
    """The verdict on a whole scan, then a line for each of its causes with the rules that found it."""
    lines = [verdict_line(summary)]
    for cause in cause_lines(summary):
        word = "" if cause.severity is None else cause.severity.word
        lines.append(visible("  " + " ".join(filter(None, (word, cause.words, ", ".join(cause.codes))))))
    return lines


def verdict_word(summary: Summary) -> str:
    """One or two words, as in `ScanVerdict.word`."""
    if summary.gate is not None and summary.gate.failed:
        return "failed"
    if summary.gate is None and any(_some(summary, severity) for severity in (Severity.ERROR, Severity.WARNING)):
        return "findings"
    skipped = {code for code, skipped_rule in summary.skipped.items() if skipped_rule.rollouts >= summary.rollouts}
    if summary.tokenizer is None:
        skipped |= _BY_TOKENIZER
    if summary.without_ids == summary.rollouts or (summary.codes and summary.codes <= skipped):
        return "nothing audited"
    if summary.uncompared and not summary.compared:
        return "nothing compared"
    if summary.gate is not None:
        return "passed"
    return "findings" if summary.findings else "clean"


def _failures_and_findings(summary: Summary, see_notes: str, *, judged: bool) -> list[str]:
    """What was found by severity and what else made the gate fail; failures first. Not `judged`: never "no
    errors".
    """
    gate = summary.gate
    if gate is not None and gate.updated:
        accepted = f"{many(gate.added, 'finding')} accepted into {gate.baseline}; {gate.known:,} known before"
        return [*_reasons(gate), accepted]
    baseline = gate is not None and gate.baseline is not None
    bar = Severity.threshold(gate.fail_on) if gate is not None else Severity.ERROR
    counts = {
        severity: summary.new[severity] for severity in sorted(Severity, reverse=True) if _some(summary, severity)
    }
    words = _counted(counts, summary, new=baseline)
    if Severity.NOTE in words:
        words[Severity.NOTE] += see_notes
    blamed = [
        words[severity]
        for severity in words
        if gate is not None and gate.failing and bar is not None and severity >= bar
    ]
    rest = [text for text in words.values() if text not in blamed]
    lead: list[str] = []
    if not blamed and not _some(summary, Severity.ERROR) and (baseline or judged):
        lead = ["0 new errors" if baseline else "no errors" if words else _clean(summary)]
    reasons = _reasons(gate) if gate is not None else []
    counted = [*lead, *rest]
    if baseline and gate is not None:
        first = blamed or counted
        count, colon, causes = first[0].partition(":")
        first[0] = f"{count} ({gate.known:,} known){colon}{causes}"
    spared = []
    if gate is not None and not gate.failed and _some(summary, Severity.ERROR):
        spared = ["within the limits"] if gate.rates else []
        spared = ["nothing fails with --fail-on never"] if gate.fail_on == "never" else spared
    return [*blamed, *reasons, *spared, *counted]


def _reasons(gate: Gate) -> list[str]:
    """Why the gate failed besides single findings, shortened."""
    reasons = [cut(reason, 300) for reason in gate.because[bool(gate.failing) :]]
    more = len(reasons) - _REASONS
    return [*reasons[:_REASONS], *([many(more, "more reason")] if more > 0 else [])]


def _some(summary: Summary, severity: Severity) -> bool:
    return severity in summary.new and summary.new[severity].findings > 0


def _clean(summary: Summary) -> str:
    words = f"no findings in {many(summary.compared, 'rollout')}"
    never = {code for code, skipped in summary.skipped.items() if skipped.rollouts >= summary.rollouts}
    without, pass_tokenizer = _tokenizer_words(summary)
    if without:
        words += f"; {pass_tokenizer}"
    if others := len(never - without):
        words += f"; {many(others, 'other rule' if without else 'rule')} could not run on any of them"
    if partly := len(summary.skipped.keys() - never - without):
        words += f"; {many(partly, 'rule')} could not run on some"
    return words


def _counted(counts: dict[Severity, New], summary: Summary, *, new: bool) -> dict[Severity, str]:
    """By severity: `errors in 2 of 6 rollouts (33 %): 2 prompts re-tokenized`; then `4 notes in 1 (17 %)`."""
    rows = summary.rollouts + summary.rows_unreadable
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
        ranked = [each for each in summary.ranked_headlines() if each.text and each.severity is severity]
        causes = [_brief(each, severity, count) for each in ranked]
        if severity is Severity.NOTE or not causes:
            words[severity] = f"{many(count.findings, noun)} {where}"
        else:
            # Not how many: several findings may have one cause.
            more = f" and {many(len(causes) - _REASONS, 'more cause')}" if len(causes) > _REASONS else ""
            some = f"1 {noun}" if count.findings == 1 else f"{noun}s"
            words[severity] = f"{some} {where}: {', '.join(causes[:_REASONS])}{more}"
    return words


def _brief(headline: Headline, severity: Severity, count: New) -> str:
    """`60 prompts with a tool call rewritten by the template (22 rollouts)`; what `count` says is left out."""
    times, text = getattr(headline, severity.word), headline.text
    if (headline.unit, times) == ("log", 1):
        text = text.removeprefix("{n} ").removeprefix("with ").removeprefix("in which ")
    elif (headline.unit, headline.rollouts) == ("rollout", count.rollouts):
        text = text.removeprefix("{n} with ")
    of_turn = _of_turn(headline)
    words = of_turn or text.replace("{n}", many(times, headline.unit))
    # Milder findings of the same cause may be in other rollouts.
    implied = headline.rollouts in (0, count.rollouts, None if of_turn else times) or times != headline.times
    return words + ("" if implied else f" ({many(headline.rollouts, 'rollout')})")


def _of_turn(headline: Headline) -> str | None:
    """`turn 2 of each was re-tokenized in the next prompt`; None if rollouts have it at different turns."""
    if headline.place is None or headline.unit not in ("prompt", "completion"):
        return None
    turn, later = headline.place
    if later is not None and later > turn and headline.text == _RETOKENIZED:
        where = "the next prompt" if later == turn + 1 else f"the prompt of turn {later}"
        return f"turn {turn} of each was re-tokenized in {where}"
    prompt = turn if later is None else later
    each = f"turn {prompt}'s prompt in each" if headline.unit == "prompt" else f"turn {turn} of each"
    return headline.text.replace("{n} that", f"{each}, which").replace("{n}", each)


def _unreadable(rows: int) -> str:
    return f"{many(rows, 'row')} could not be read"


def uncompared_words(summary: Summary) -> str:
    """`23 rules need a tokenizer: pass -t NAME`; or that the given one does not fit."""
    return _tokenizer_words(summary)[1] or "the tokenizer does not fit the log (REC007)"


def _tokenizer_words(summary: Summary) -> tuple[set[str], str]:
    """The rules that could not run for lack of a tokenizer, and what to do; "" without any."""
    skipped = summary.skipped.items()
    codes = {code for code, rule in skipped if any("no tokenizer" in reason for reason in rule.because)}
    needs = f"{many(len(codes), 'rule')} {'needs' if len(codes) == 1 else 'need'} a tokenizer"
    return codes, f"{needs}: pass -t NAME" if codes else ""


def baseline_words(gate: Gate | None) -> str:
    """`3 known findings of the baseline b.json left out; 2 of its findings are fixed`; empty without one."""
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
    """One cause."""

    severity: Severity | None
    """None for the line that counts the causes left out."""
    words: str
    """`60 prompts with a tool call rewritten by the template (22 rollouts, 21 %)`."""
    codes: tuple[str, ...] = ()
    """The rules that found it, the one with the most findings first."""


def cause_lines(summary: Summary, least: Severity = Severity.NOTE) -> list[CauseLine]:
    """The causes from `least` up, the most severe and most frequent first; known findings are left out.

    What a template that is not append-only does to reasoning is one cause.
    """
    lines: list[CauseLine] = []
    of_template: dict[Severity, int] = {}
    rows = summary.rollouts + summary.rows_unreadable
    for headline in summary.ranked_headlines():
        words, at = headline.words, len(lines)
        if headline.rollouts and rows:
            share, rollouts = percent(headline.rollouts / rows), many(headline.rollouts, "rollout")
            words += f" ({share})" if headline.unit == "rollout" else f" ({rollouts}, {share})"
            if (of_turn := _of_turn(headline)) is not None:
                words = f"{rollouts} ({share}): {of_turn}"
        found_by = tuple(code for code, number in headline.codes.most_common() if number)
        line = CauseLine(headline.severity, words, found_by)
        if not OF_REASONING.isdisjoint(line.codes):
            explains = line.codes == (NOT_APPEND_ONLY,)  # whatever else the template did
            at = of_template.setdefault(max(of_template) if explains and of_template else headline.severity, at)
        if at < len(lines):
            words, codes = f"{lines[at].words}, {line.words}", (*lines[at].codes, *line.codes)
            lines[at] = CauseLine(lines[at].severity, words, tuple(dict.fromkeys(codes)))
        elif headline.severity >= least:
            lines.append(line)
    if len(lines) > LINES:
        lines[LINES:] = [CauseLine(None, f"and {many(len(lines) - LINES, 'more cause')}")]
    return lines


def skip_lines(summary: Summary) -> list[str]:
    """`no logprobs: LPR501-LPR506 (40 rollouts)`, the most common reason first; reasons may quote the log."""
    reasons = skips_by_reason(summary)
    return [f"{because}: {codes} ({many(number, 'rollout')})" for because, codes, number in reasons]


def skip_words(summary: Summary) -> str:
    """The most common reasons: `no loss mask (MSK401-MSK404); no trainer (LPR509); --not-checked lists 2 more`."""
    reasons = skips_by_reason(summary)
    words = []
    for because, codes, number in reasons[:_REASONS]:
        rules = codes if number >= summary.rollouts else f"{codes} in {many(number, 'rollout')}"
        reason = cut(because, 90)  # which may quote the log
        words.append(f"{reason}: {rules}" if reason.endswith(")") else f"{reason} ({rules})")
    more = len(reasons) - _REASONS
    return "; ".join([*words, *([f"--not-checked lists {more:,} more"] if more > 0 else [])])


def skips_by_reason(summary: Summary) -> list[tuple[str, str, int]]:
    """`("no logprobs", "LPR501-LPR506", 40)`: reason, rules, rollouts. First what most rollouts and rules lack,
    last what most logs lack by their nature."""
    codes: dict[tuple[str, int], list[str]] = {}
    for code, skipped in sorted(summary.skipped.items()):
        for because, number in skipped.because.items():
            codes.setdefault((because, number), []).append(code)
    ranked = sorted(codes.items(), key=lambda item: (item[0][0] in RARE, -item[0][1], -len(item[1]), item[0]))
    return [(because, code_ranges(those), number) for (because, number), those in ranked]


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
