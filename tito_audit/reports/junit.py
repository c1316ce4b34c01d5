"""The `junit` report: a test suite for each log file, a test for each rule, for systems that show test results.

A rule fails if one of its findings fails and is not in the baseline, is skipped if it could check nothing, and
passes otherwise; rate limits and required coverage have their own suite.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO
from xml.sax.saxutils import escape, quoteattr

from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.summary import Summary
from tito_audit.terminal.escape import cut, visible
from tito_audit.terminal.place import place_words
from tito_audit.terminal.verdict import (
    baseline_words,
    coverage_reason,
    coverage_words,
    rate_words,
    required_name,
    verdict,
)
from tito_audit.terminal.words import many
from tito_audit.terminal.worst import Shortlist

_SUITES = 2_000
"""Maximum files with a suite of their own; all others share one."""
_SHOWN = 3
"""Maximum findings shown of a rule in a file."""
_TEXT = 1_000


@dataclass(slots=True)
class _RuleCase:
    failing: int = 0
    counts: Counter[Severity] = field(default_factory=Counter)
    """Findings that are not in the baseline."""
    in_baseline: int = 0
    skips: Counter[str] = field(default_factory=Counter)
    """By reason: rollouts that it could not check."""
    worst: Shortlist[Finding] = field(default_factory=lambda: Shortlist(_SHOWN))


@dataclass(slots=True)
class _FileSuite:
    rollouts: int = 0
    rows_unreadable: int = 0
    tokens: int = 0
    cases: defaultdict[str, _RuleCase] = field(default_factory=lambda: defaultdict(_RuleCase))

    def add(self, result: Result, options: ReportOptions) -> None:
        self.rollouts += result.rollout is not None
        self.rows_unreadable += result.rollout is None and not result.of_log
        self.tokens += result.counts.get("tokens", 0)
        for skip in result.skips:
            self.cases[skip.code].skips[skip.because] += 1
        for finding in result.findings:
            case = self.cases[finding.code]
            if finding.known:
                case.in_baseline += finding.times
                continue
            fails = finding.severity is Severity.ERROR if options.fails is None else options.fails(finding)
            case.failing += fails and finding.times
            case.counts[finding.severity] += finding.times
            case.worst.offer(finding.severity + (len(Severity) if fails else 0), finding.hit.cause, finding)


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Read all results, keeping a few findings of each rule and file, then write the suites."""
    suites: dict[str, _FileSuite] = {}
    rest = _FileSuite()
    files: set[str] = set()
    while (result := (yield)) is not None:
        file = result.place.file
        if file not in suites and len(suites) >= _SUITES:
            files.add(file)
            rest.add(result, options)
        else:
            suites.setdefault(file, _FileSuite()).add(result, options)
    for file in summary.files[:_SUITES]:
        suites.setdefault(file, _FileSuite())
    for file, suite in suites.items():
        for code in options.ran(file) if options.ran is not None else ():
            suite.cases.setdefault(code, _RuleCase())
    named = list(suites.items())
    if files:
        named.append((f"{many(len(files), 'more file')}", rest))
    # Limits on all files together, and required coverage: name, kind, words, and whether it failed.
    limits, gate = list[tuple[str, str, str, bool]](), summary.gate
    for rate in gate.rates if gate is not None else ():
        limits.append((f"limit {rate.limit}", "limit", rate_words(rate), rate.failed))
    for count in gate.coverage if gate is not None else ():
        words = coverage_reason(count) if count.failed else coverage_words(count)
        limits.append((required_name(count), "coverage", words, count.failed))
    cases = [case for _, suite in named for case in suite.cases.values()]
    failures = sum(case.failing > 0 for case in cases) + sum(failed for *_, failed in limits)
    xml = _XmlWriter(out)
    tests, time = len(cases) + len(limits), f"{summary.seconds:.3f}"
    xml.start("testsuites", name="tito-audit", tests=tests, failures=failures, errors=0, time=time)
    for name, suite in named:
        _write_suite(xml, name, suite, options)
    if summary.gate is not None:
        name, failures = "tito-audit: all files", sum(failed for *_, failed in limits)
        xml.start("testsuite", name=name, tests=len(limits), failures=failures, errors=0, skipped=0)
        for limit, kind, words, failed in limits:
            xml.start("testcase", name=limit, classname=name)
            if failed:
                xml.text("failure", [words], type=kind, message=words)
            else:
                xml.text("system-out", [words])
            xml.end("testcase")
        lines = [verdict(summary).line, *summary.gate.because, baseline_words(summary.gate)]
        xml.text("system-out", [line for line in lines if line])
        xml.end("testsuite")
    xml.end("testsuites")


def _write_suite(xml: _XmlWriter, name: str, suite: _FileSuite, options: ReportOptions) -> None:
    cases = sorted(suite.cases.items())
    failures = sum(case.failing > 0 for _, case in cases)
    skipped = sum(_is_skipped(case, suite) for _, case in cases)
    xml.start("testsuite", name=name, tests=len(cases), failures=failures, errors=0, skipped=skipped)
    xml.start("properties")
    for key in ("rollouts", "rows_unreadable", "tokens"):
        xml.empty("property", name=key, value=getattr(suite, key))
    xml.end("properties")
    for code, case in cases:
        title = options.titles.get(code, "")
        xml.start("testcase", name=f"{code} {title}".strip(), classname=name)
        if case.failing:
            first = next(iter(case.worst))
            xml.text("failure", _case_lines(case), type=code, message=f"{_counts(case)}: {first.hit.message}")
        elif _is_skipped(case, suite):
            because = _skip_reasons(case) or "no rollout could be checked"
            xml.text("skipped", [because], message=because)  # Jenkins shows the attribute, GitLab the text
        elif case.counts or case.in_baseline or case.skips:
            xml.text("system-out", _case_lines(case))
        xml.end("testcase")
    xml.end("testsuite")


def _is_skipped(case: _RuleCase, suite: _FileSuite) -> bool:
    """Whether the rule could not check any rollout of the file."""
    findings = case.in_baseline or sum(case.counts.values())
    return not findings and sum(case.skips.values()) >= suite.rollouts


def _counts(case: _RuleCase) -> str:
    counts = [many(case.counts[severity], severity.word) for severity in sorted(case.counts, reverse=True)]
    return ", ".join(counts) or "nothing found"


def _skip_reasons(case: _RuleCase) -> str:
    """`no logprobs (40 rollouts), no loss mask (2 rollouts)`: the most common reasons."""
    most = sorted(case.skips.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    return ", ".join(f"{reason} ({many(number, 'rollout')})" for reason, number in most)


def _case_lines(case: _RuleCase) -> Iterator[str]:
    yield _counts(case) + (f"; {many(case.in_baseline, 'known finding')} left out" if case.in_baseline else "")
    for finding in case.worst:
        yield f"{finding.severity.word}, {place_words(finding)}: {finding.hit.message}"
    if case.worst.left_out:
        yield f"and {case.worst.left_out:,} more"
    if case.skips:
        yield f"not checked: {_skip_reasons(case)}"


class _XmlWriter:
    """Writes XML elements; `visible` keeps out all characters that XML forbids."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        out.write('<?xml version="1.0" encoding="utf-8"?>\n')

    def start(self, tag: str, /, **attributes: Any) -> None:
        self._out.write(f"<{tag}{_attributes(attributes)}>\n")

    def end(self, tag: str) -> None:
        self._out.write(f"</{tag}>\n")

    def empty(self, tag: str, /, **attributes: Any) -> None:
        self._out.write(f"<{tag}{_attributes(attributes)}/>\n")

    def text(self, tag: str, lines: Iterable[str], /, **attributes: Any) -> None:
        # CI systems attach the file that `[[ATTACHMENT|path]]` names.
        shown = "\n".join(escape(cut(visible(line), _TEXT).replace("[[", "[\\x5b")) for line in lines)
        self._out.write(f"<{tag}{_attributes(attributes)}>{shown}</{tag}>\n")


def _attributes(attributes: Mapping[str, Any]) -> str:
    return "".join(f" {name}={quoteattr(cut(visible(str(value)), _TEXT))}" for name, value in attributes.items())


JUNIT = Report(
    "junit",
    "JUnit XML for systems that show test results: one suite per file, one test per rule",
    write,
    suffix="xml",
)
