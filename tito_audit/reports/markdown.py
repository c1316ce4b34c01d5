"""The `markdown` report: for a pull request comment or a GitHub Actions step summary.

The verdict and the table come first and everything longer is folded. The page stays below the 65,536 characters of
a comment; what does not fit is counted. Logged text is code, where GitHub recognizes no link, mention, image,
issue number or HTML: it looks for `@names`, `#1` and addresses in the rendered page, and leaves only code alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from textwrap import wrap
from typing import TextIO

from tito_audit.record.finding import Severity
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.summary import Gate, Summary
from tito_audit.terminal.escape import cut, inert, visible
from tito_audit.terminal.verdict import cause_lines, covered_share, required_name, skip_lines, verdict
from tito_audit.terminal.words import many, rate_number
from tito_audit.terminal.worst import WorstFindings, entry_lines, rule_numbers

_TICKS = re.compile("`+")
LIMIT = 65_000
"""Maximum characters of the page; GitHub accepts 65,536 for a comment."""
_SHORT = 6_000
"""Maximum characters of a section other than the worst findings."""
_RULES = 60
"""Maximum rows of the table by rule."""
_WIDTH = 100
_FILES = 3
_SIGNS = {"failed": "❌", "passed": "✅", "clean": "✅", "findings": "🔎"}
_NOTHING = "⚠️"
_CAUSE_SIGNS = {Severity.ERROR: "🔴", Severity.WARNING: "🟡", Severity.NOTE: "⚪", None: ""}


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Read all results, then write one page; only the worst findings are kept in memory."""
    worst = WorstFindings()
    while (result := (yield)) is not None:
        worst.add(finding for finding in result.findings if not finding.known)
    before = "\n".join(chain(_heading(summary), _gate_section(summary.gate), _rule_table(summary, options)))
    sections: list[str] = []
    skips = skip_lines(summary)
    if skips:
        title = f"Not checked everywhere: {many(len(summary.skipped), 'rule')}"
        sections.append(folded(title, _code_block(skips, _SHORT)))
    fixed = summary.gate.fixed if summary.gate is not None else ()
    if fixed:
        lines = [f"{finding.code} {finding.file}:{finding.row} {finding.message}" for finding in fixed]
        title = f"Fixed: {many(len(lines), 'finding')} of the baseline"
        sections.append(folded(title, _code_block(lines, _SHORT)))
    if summary.notices:
        title = many(len(summary.notices), "notice")
        sections.append(folded(title, _code_block(summary.notices, _SHORT)))
    after = "\n".join(sections)
    chosen = worst.pick(options.worst)
    room, shown = LIMIT - len(before) - len(after) - 200, ""
    if chosen:  # as the terminal shows them, as many as fit
        blocks: list[str] = []
        for entry in chosen:
            block = fenced(entry_lines(entry, _WIDTH))
            room -= len(block) + 2
            if room < 0:
                break
            blocks.append(block)
        first = chosen[0].finding
        more = f"{code(f'tito-audit explain {first.code}')} says what it means and what fixes it."
        more += " " + code("tito-audit scan … --report json=findings.json") + " lists every finding."
        opened = first.severity is not Severity.NOTE
        shown = folded("The worst of each cause", "\n\n".join([*blocks, more]), open=opened)
    out.write("\n".join(part for part in (before, shown, after) if part).rstrip() + "\n")


def _heading(summary: Summary) -> Iterator[str]:
    """The verdict as a heading, its causes, and what was scanned."""
    judged = verdict(summary)
    yield f"### {_SIGNS.get(judged.word, _NOTHING)} tito-audit: {judged.word}\n"
    first, *rest = map(_escape, judged.parts)
    yield "; ".join([f"**{first}**", *rest]) + "\n"
    causes = cause_lines(summary)
    if causes:
        listed = ((_CAUSE_SIGNS.get(cause.severity, ""), cause) for cause in causes)
        yield "".join(f"- {sign} {_escape(c.words)} {', '.join(map(code, c.codes))}\n" for sign, c in listed)
    files = " ".join(code(file) for file in summary.files[:_FILES])
    if len(summary.files) > _FILES:
        files += f" and {many(len(summary.files) - _FILES, 'more file')}"
    parts = [files or "no file", many(summary.rollouts, "rollout")]
    if summary.rows_unreadable:
        parts.append(many(summary.rows_unreadable, "unreadable row"))
    parts += [f"{many(summary.tokens, 'token')}, {summary.generated_tokens:,} of them generated"]
    parts += [f"tokenizer {code(summary.tokenizer_words)}" if summary.tokenizer_words else "no tokenizer"]
    yield f"Scanned: {' · '.join(parts)}\n"
    sampled = summary.sampled
    if sampled is not None:
        yield f"A sample: {sampled.rows:,} of {many(sampled.of, 'row')} audited.\n"


def _gate_section(gate: Gate | None) -> Iterator[str]:
    """Why the gate failed, its limits and required coverage, and the state of the baseline."""
    if gate is None:
        return
    if gate.because:
        yield folded("Why it failed, by rule", _code_block(gate.because, _SHORT)) + "\n"
    rows = []
    for rate in gate.rates:
        sign, of = "❌ above" if rate.failed else "✅ within", f"{rate.of:,} {rate.unit}"
        rows.append(f"| {code(rate.limit)} | {rate.findings:,} | {of} | {rate_number(rate)} | {sign} |")
    yield from _table("| limit | findings | of | rate | |\n| --- | ---: | ---: | ---: | --- |", rows, "limit")
    rows = []
    for count in gate.coverage:
        name, of = code(required_name(count)), many(count.of, "rollout")
        sign = "❌ too few" if count.failed else "✅ enough"
        rows.append(f"| {name} | {count.covered:,} | {of} | {covered_share(count)} | {sign} |")
    yield from _table(
        "| required | covered | of | share | |\n| --- | ---: | ---: | ---: | --- |", rows, "requirement"
    )
    if gate.baseline is not None:
        words = f"Baseline {code(gate.baseline)}: {many(gate.known, 'known finding')}, {gate.gone:,} fixed"
        yield words + (", updated.\n" if gate.updated else ".\n")


def _rule_table(summary: Summary, options: ReportOptions) -> Iterator[str]:
    baseline = summary.gate is not None and summary.gate.baseline is not None
    names = ["errors", "warnings", "notes", *(["known"] if baseline else []), "rollouts", "tokens"]
    rows = []
    for rule_code, _, numbers in rule_numbers(summary, with_known=baseline):
        cells = [code(rule_code), _escape(options.titles.get(rule_code, "")), *numbers]
        rows.append(f"| {' | '.join(cells)} |")
    yield from _table(
        f"| code | what | {' | '.join(names)} |\n| --- | --- |{' ---: |' * len(names)}", rows, "rule"
    )


def _table(heads: str, rows: Sequence[str], kind: str) -> Iterator[str]:
    """The lines of a table, cut after `_RULES` rows of a kind; nothing without rows."""
    if rows:
        yield from (heads, *rows[:_RULES])
        if len(rows) > _RULES:
            yield f"\nand {many(len(rows) - _RULES, f'more {kind}')}"
        yield ""


def _code_block(lines: Iterable[str], limit: int) -> str:
    """The lines as a code block of at most about `limit` characters; lines that do not fit are counted."""
    shown: list[str] = []
    left = 0
    for line in lines:
        wrapped = wrap(visible(line)[:limit], _WIDTH, subsequent_indent="    ") or [""]
        limit -= sum(len(part) + 1 for part in wrapped)
        if left or limit < 0:
            left += 1
        else:
            shown += wrapped
    return fenced([*shown, *([f"… and {left:,} more"] if left else [])])


def _escape(text: str) -> str:
    """Our own text (never a log's) with Markdown characters escaped."""
    return "".join(f"\\{char}" if char in "\\`*_[]<>|~@#&!" else char for char in visible(text))


def code(text: str, limit: int = 120) -> str:
    """The text as inline code for a line or table cell: visible, on one line, cut to `limit` characters."""
    shown = cut(visible(text), limit).replace("|", "\\x7c")  # a bar ends a cell even in code
    ticks = "`" * (_longest_run_of_ticks(shown) + 1)
    blank = " " if not shown or shown[0] in "` " or shown[-1] in "` " else ""
    return f"{ticks}{blank}{shown or '∅'}{blank}{ticks}"


def fenced(lines: Iterable[str]) -> str:
    """The lines as a code block, each made visible and cut."""
    shown = [cut(inert(visible(line)), 400) for line in lines]
    fence = "`" * max(3, max(map(_longest_run_of_ticks, shown), default=0) + 1)
    return "\n".join([f"{fence}text", *shown, fence])


def folded(title: str, body: str, *, open: bool = False) -> str:
    """A section that folds; `title` is our own text, never a log's."""
    return f"<details{' open' if open else ''}><summary>{title}</summary>\n\n{body}\n\n</details>\n"


def _longest_run_of_ticks(text: str) -> int:
    return max((len(run) for run in _TICKS.findall(text)), default=0)


MARKDOWN = Report(
    "markdown",
    "for a pull request or a step summary: verdict, table by rule, the worst findings, short enough to post",
    write,
    suffix="md",
)
