"""The top of the page: the verdict, facts about the log, how often each rule found something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tito_audit.record.finding import Severity
from tito_audit.report import ReportOptions
from tito_audit.reports import _verdict
from tito_audit.reports._skips import skips_by_reason
from tito_audit.reports._verdict import FindingTally
from tito_audit.summary import RuleCount, Summary
from tito_audit.terminal.words import many

_CAUSES = 12
"""Maximum causes named of one rule."""
_FORMATS = 4

State = Literal["fail", "warn", "pass", "none"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reader should take away."""

    state: State
    word: str
    line: str
    """What was found, in one line."""
    because: tuple[str, ...] = ()
    """Why the gate failed, or what a pass does not mean."""


def verdict(summary: Summary, seen: FindingTally) -> Verdict:
    """The verdict of the gate, or of the findings without one; a log without anything to audit is never clean."""
    line, word = _found(summary, seen), _verdict.verdict(summary)
    if word == "failed" and summary.gate is not None:
        return Verdict("fail", "Failed", line, summary.gate.because)
    if word == "nothing audited":
        words = ("Nothing failed, since there was nothing to audit.",) if summary.gate is not None else ()
        return Verdict("none", "Nothing to audit", line, words)
    if word == "nothing compared":
        return Verdict("none", "Nothing compared", line)
    if word == "passed":
        return Verdict("pass", "Passed", line)
    worst = max((severity for severity, number in seen.findings.items() if number), default=None)
    if worst is None:
        return Verdict("pass", "Clean", line)
    words_of: dict[Severity, tuple[State, str]] = {
        Severity.ERROR: ("fail", "Errors found"),
        Severity.WARNING: ("warn", "Warnings found"),
        Severity.NOTE: ("pass", "Notes only"),
    }
    return Verdict(*words_of[worst], line)


def _found(summary: Summary, seen: FindingTally) -> str:
    """What was found, and in how many rollouts."""
    rows = summary.rollouts + summary.rows_unreadable
    found = seen.words(summary)
    if found:
        line = "; ".join(words for _, words in found)
    elif not rows:
        return "There are no rollouts."
    elif summary.without_ids == summary.rollouts:
        return f"There are no token ids in {many(rows, 'rollout')}."
    elif _verdict.nothing_compared(summary):
        line = f"No findings in {many(summary.uncompared, 'rollout')}, where nothing was compared"
    else:
        line = f"Nothing found in {many(rows - summary.without_ids, 'rollout')}"
        line += ", as far as the rules could look" if summary.skipped else ""
    if summary.uncompared:
        line += f"; in {summary.uncompared:,} nothing was compared, as {_verdict.uncompared_words(summary)}"
    if summary.without_ids:
        line += f"; nothing to audit in {summary.without_ids:,} without token ids"
    return line + "."


def facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """What was audited, as (name, value) pairs."""
    yield "rollouts", f"{summary.rollouts:,}"
    if summary.rows_unreadable:
        yield "unreadable rows", f"{summary.rows_unreadable:,}"
    yield "turns", f"{summary.turns:,}"
    yield "tokens", f"{summary.tokens:,}"
    yield "generated tokens", f"{summary.generated_tokens:,}"
    if summary.sampled is not None:
        of = summary.sampled
        yield "sampled", f"{of.rows:,} of {of.of:,} rows ({100 * of.share:g} %)"
    ranked = summary.formats.most_common()
    formats = ", ".join(f"{name} {number:,}" for name, number in ranked[:_FORMATS])
    more = f" and {many(len(ranked) - _FORMATS, 'other format')}" if len(ranked) > _FORMATS else ""
    yield "formats", formats + more or "none"
    yield "tokenizer", summary.tokenizer or "none"
    yield "encoder", summary.encoder or "none"
    yield "took", f"{summary.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause, and how many findings of a rule have it."""

    name: str
    findings: int
    share: str
    """Its share of the rule's findings, as the length of a bar: `37.5%`."""


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """One row of the rules table."""

    code: str
    title: str
    worst: str
    counts: RuleCount
    findings: int
    bars: tuple[tuple[str, str, str], ...]
    """Severity, start and length of its part of the bar: `("error", "0%", "37.5%")`."""
    per_token: str
    """Findings per generated token, as for `--max-rate`."""
    per_rollout: str
    """Share of rollouts with at least one."""
    causes: tuple[Cause, ...]
    more_causes: int
    manual: tuple[tuple[str, list[list[str]]], ...]
    """Its headings, each with paragraphs (one line) and examples (several lines); () if none was given."""


def rules(summary: Summary, options: ReportOptions) -> list[RuleFacts]:
    """Every rule that found something, by code."""
    totals = {code: one.error + one.warning + one.note for code, one in summary.findings.items()}
    most = max(totals.values(), default=1)
    return [_rule(summary, code, totals[code], most, options) for code in sorted(totals)]


def _rule(summary: Summary, code: str, total: int, most: int, options: ReportOptions) -> RuleFacts:
    counts = summary.findings[code]
    bars, start = [], 0
    present = [word for word in ("error", "warning", "note") if getattr(counts, word)]
    for word in present:
        number = getattr(counts, word)
        bars.append((word, _length(start, most), _length(number, most)))
        start += number
    named = Counter({cause: number for cause, number in summary.causes.get(code, {}).items() if cause})
    ranked = sorted(named.items(), key=lambda item: (-item[1], item[0]))
    rows = summary.rollouts + summary.rows_unreadable
    return RuleFacts(
        code,
        options.titles.get(code, ""),
        present[0] if present else "note",
        counts,
        total,
        tuple(bars),
        f"{total / summary.generated_tokens:.2g}" if summary.generated_tokens else "–",
        f"{100 * counts.rollouts / rows:.1f} %" if rows else "–",
        tuple(Cause(cause, number, _length(number, total)) for cause, number in ranked[:_CAUSES]),
        max(len(ranked) - _CAUSES, 0),
        tuple(_manual(options.docs.get(code, ""))),
    )


def _manual(doc: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Each heading of a manual in Markdown with its paragraphs; fenced examples keep their lines."""
    for part in doc.split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        paragraphs: list[list[str]] = []
        for at, block in enumerate(text.split("```")):
            if at % 2:
                paragraphs.append([*block.partition("\n")[2].rstrip().splitlines(), ""])
            else:
                paragraphs += [[" ".join(words.split())] for words in block.split("\n\n") if words.strip()]
        yield heading.strip(), paragraphs


def skips(summary: Summary) -> list[tuple[str, str, str]]:
    """`("no logprobs", "LPR501-LPR506", "40 rollouts")`, the most common reason first."""
    return [(because, codes, many(number, "rollout")) for because, codes, number in skips_by_reason(summary)]


def _length(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.2f}%"
