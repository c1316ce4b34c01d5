"""The `text` report, for people: what was audited, the causes, an example of each, what to do, the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from rich.table import Table
from rich.text import Text

from tito_audit.evidence.sft import ROWS
from tito_audit.record.finding import Severity
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.summary import Summary
from tito_audit.terminal.escape import visible
from tito_audit.terminal.mismatch import mismatch_lines
from tito_audit.terminal.page import STYLES, finding_lines, open_page, print_commands, print_list, ruled_table
from tito_audit.terminal.verdict import (
    cause_lines,
    coverage_words,
    rate_words,
    sft_words,
    skip_lines,
    skip_words,
    verdict,
)
from tito_audit.terminal.words import many, percent
from tito_audit.terminal.worst import NewFindings, more_words, next_steps, rule_numbers

_FILES = 3
"""Maximum files named in the header."""
_READ_AS = 4
"""Maximum lines about the formats of files."""
_KEYS = 8
"""Maximum keys named of one format."""
_WIDE = 80
"""Terminal columns from which all numbers of the table fit."""
_CAUSES = 3
"""Maximum causes that a verdict names; with more, a table counts the findings of each rule."""
_NOTICES = 20
_FIXED = 5
"""Maximum fixed findings listed."""
_SEVERITY = 9
"""Columns of a severity in front of a cause."""
_VERDICTS = {"failed": "bold red", "passed": "bold green", "clean": "bold green", "findings": "bold yellow"}


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Read all results, then write one page; only the worst findings are kept in memory.

    Notes are shown where `options` say so or where they decide whether the scan fails.
    """
    new_findings, in_baseline = NewFindings(), 0
    while (result := (yield)) is not None:
        new_findings.add(result)
        in_baseline += sum(finding.known for finding in result.findings)
    gate = summary.gate
    counting = gate is not None and (gate.fail_on == Severity.NOTE.word or any(rate.failed for rate in gate.rates))
    least = Severity.NOTE if options.notes or counting else Severity.WARNING
    causes = cause_lines(summary, least=least)
    with open_page(out, options) as console:
        for line in _header(summary, in_baseline):
            console.print(line)
        if causes:
            console.print()
        for cause in causes:  # its severity, what happened and how often, the rules that found it
            style, word = ("", "") if cause.severity is None else (STYLES[cause.severity], cause.severity.word)
            number, _, rest = cause.words.partition(" ")
            words = Text(visible(number), style="bold").append(f" {visible(rest)}", style="not bold")
            words.append(f"  {', '.join(cause.codes)}", style="not bold dim")
            for index, part in enumerate(words.wrap(console, console.width - _SEVERITY)):
                lead = Text(f"{'' if index else word:<{_SEVERITY}}", style=style)
                part.rstrip()
                console.print(Text.assemble(lead, part), soft_wrap=True)
        if len(causes) > _CAUSES or (options.notes and causes):
            console.print()
            console.print(_rule_table(summary, options, least))
        worst = new_findings.worst.pick(options.worst, least)
        for entry in worst:
            console.print()
            for line in finding_lines(entry.finding, console):
                console.print(line, soft_wrap=True)
            if more := more_words(entry):
                console.print(Text(f"  {visible(more)}", style="dim"), soft_wrap=True)
        for title, lines in _titled_lists(summary):
            print_list(console, title, lines)
        if summary.skipped and (summary.compared or summary.uncompared):  # else one notice is enough
            if options.not_checked:
                print_list(console, "Not checked", [visible(line) for line in skip_lines(summary)])
            else:
                console.print()
                console.print(Text.assemble(("Not checked: ", "bold"), visible(skip_words(summary))))
        notices = [visible(notice) for notice in summary.notices if notice not in summary.joined]
        if len(notices) > _NOTICES:
            notices[_NOTICES:] = [f"… and {len(notices) - _NOTICES:,} more notices"]
        print_list(console, "Notices", notices)
        first, browse = (worst[0].finding if worst else None), len(causes) > _CAUSES
        steps = next_steps(first, new_findings, summary, browse=browse, least=least)
        print_commands(console, "Next", [f"{step.command}   {step.says}" for step in steps])
        console.print()
        judged = verdict(summary, see_notes="" if least is Severity.NOTE else ": see --notes")
        line = Text(judged.word, style=_VERDICTS.get(judged.word, "bold yellow"))
        line.append(f": {visible('; '.join(judged.parts))}", style="not bold default")
        console.print(line, soft_wrap=True)


def _header(summary: Summary, in_baseline: int) -> Iterator[Text]:
    """Lines on what was audited and how, and on how many findings the baseline has."""
    files = ", ".join(summary.files[:_FILES])
    if len(summary.files) > _FILES:
        files += f" and {many(len(summary.files) - _FILES, 'more file')}"
    yield Text("tito-audit ", style="bold").append(visible(files))
    # `read as nemo_gym: responses_create_params, response.output (12 rows)`; files read alike share a line.
    alike: dict[tuple[tuple[str, tuple[str, ...]], ...], list[str]] = {}
    for file, formats in summary.taken.items():
        alike.setdefault(tuple((name, count.told_by) for name, count in formats.items()), []).append(file)
    # First what a reader should check: files read as several formats, or by plain column names.
    doubtful = sorted(alike.items(), key=lambda item: (len(item[0]) == 1, all(n != "generic" for n, _ in item[0])))
    for kinds, logs in doubtful[:_READ_AS]:
        line = Text()
        if len(alike) > 1:
            line.append(visible(logs[0]) + (f" and {len(logs) - 1:,} more" if len(logs) > 1 else "") + " ")
        line.append("read as ")
        for index, (name, keys) in enumerate(kinds):
            line.append("; " if index else "").append(name, style="bold")
            named = ", ".join(keys[:_KEYS]) + (f" and {len(keys) - _KEYS} more" if len(keys) > _KEYS else "")
            line.append(visible(f": {named}" if named else ""))
            line.append(f" ({many(sum(summary.taken[log][name].rows for log in logs), 'row')})")
        yield line
    if len(alike) > _READ_AS:
        yield Text(f"and {len(alike) - _READ_AS:,} more kinds of files; tito-audit inspect FILE explains each")
    for sentence in summary.joined:
        yield Text(visible(sentence))
    parts = [many(summary.rollouts, "rollout")]
    if summary.rows_unreadable:
        parts.append(many(summary.rows_unreadable, "unreadable row"))
    if summary.sft[ROWS] < summary.rollouts or not summary.rollouts:
        parts.append(many(summary.turns, "turn"))
        parts.append(f"{many(summary.tokens, 'token')}, {summary.generated_tokens:,} of them generated")
    yield Text(visible(" · ".join(parts)))
    if words := sft_words(summary):
        yield Text(visible(words))
    if summary.sampled is not None:
        share, rows, of = summary.sampled.share, summary.sampled.rows, summary.sampled.of
        yield Text(f"sampled {percent(share)}: {rows:,} of {many(of, 'row')}", style="yellow")
    pace = f"{summary.seconds:.1f} s"
    if summary.seconds > 0 and summary.tokens:
        pace += f", {summary.tokens / summary.seconds:,.0f} tokens/s"
    encoder = f" · encoder {summary.encoder}" if summary.encoder not in (None, "tokenizers") else ""
    yield Text(visible(f"tokenizer {summary.tokenizer_words or 'none'}{encoder} · {pace}"))
    gate = summary.gate
    if gate is not None and gate.baseline is not None:
        name = visible(gate.baseline)
        if in_baseline:
            yield Text(f"{in_baseline:,} known from {name}, not shown below")
        if gate.updated:
            yield Text(f"{name} was updated: {gate.added:,} accepted, {gate.gone:,} gone")


def _titled_lists(summary: Summary) -> Iterator[tuple[str, list[str]]]:
    """Titles with lines: why a trainer's logprobs differ, what was fixed since the baseline, the limits."""
    # By column, where LPR509 says that they do.
    for column, mismatch in summary.mismatches.items() if "LPR509" in summary.findings else ():
        lines = [f"{share:>6}  {words}" for share, words in mismatch_lines(mismatch)]
        if mismatch.confident:
            lines.append(
                f"        {many(mismatch.confident, 'token')} that the sampler gave more than 0.99 and the "
                "trainer less than 0.01"
            )
        yield f"Why {visible(column)} differs from {visible(mismatch.sampler)}: shares of the difference", lines
    gate = summary.gate
    if gate is None:
        return
    fixed = [
        f"{finding.code} {visible(finding.file)} row {finding.row}"
        + (f", {finding.times:,} times: " if finding.times > 1 else ": ")
        + visible(finding.message)
        for finding in gate.fixed[:_FIXED]
    ]
    if len(gate.fixed) > _FIXED:
        fixed.append(f"… and {len(gate.fixed) - _FIXED:,} more")
    yield "Fixed since the baseline", fixed
    yield "Limits", [*map(rate_words, gate.rates), *(visible(coverage_words(count)) for count in gate.coverage)]


def _rule_table(summary: Summary, options: ReportOptions, least: Severity) -> Table:
    table = ruled_table()
    table.add_column("code", no_wrap=True)
    table.add_column("what", ratio=1, min_width=12 if options.width >= _WIDE else 8)
    any_known = any(count.known for count in summary.findings.values())
    heads = ["errors", "warn", *(["notes"] if least is Severity.NOTE else [])]
    columns = [*heads, *(["known"] if any_known else []), "rollouts", "tokens"]
    if options.width < _WIDE:
        columns.pop()
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for code, worst, numbers in rule_numbers(summary, least, with_known=any_known):
        if worst >= least:
            what = visible(options.titles.get(code, ""))
            table.add_row(Text(code, style=STYLES[worst]), what, *numbers[: len(columns)])
    return table


TEXT = Report("text", "a page for people: the causes, the worst findings, what to do next, the verdict", write)
