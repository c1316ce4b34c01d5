"""The `text` report, for people: what was audited, the verdict, the rules, the worst findings, the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.trainings import ONCE
from tito_audit.report import Report, ReportOptions
from tito_audit.reports._gate_words import accept_lines, gate_line, gate_lists, known_lines
from tito_audit.reports._skips import skip_lines
from tito_audit.reports._verdict import FindingTally, nothing_compared, uncompared_words
from tito_audit.reports._worst import Worst, WorstEntry, by_weight, counted, more_words
from tito_audit.summary import Summary
from tito_audit.terminal.escape import inert, visible
from tito_audit.terminal.page import STYLES, console_for, finding_lines, print_commands, print_list
from tito_audit.terminal.place import show_command, with_options
from tito_audit.terminal.shell import shell_word
from tito_audit.terminal.words import many

_FILES = 3
"""Maximum files named in the header."""
_FORMATS = 4
"""Maximum formats named in the header."""
_TAKEN = 4
"""Maximum lines that say what files were read as."""
_KEYS = 8
"""Maximum keys named of one format."""
_WIDE = 80
"""Terminal columns from which all numbers of the table have room."""
_CAUSES = 3
"""Maximum causes named of one rule."""
_NOTICES = 20
_UNREADABLE = "REC001"


@dataclass(slots=True)
class _Gathered:
    """What the page needs beyond the summary."""

    worst: Worst = field(default_factory=Worst)
    seen: FindingTally = field(default_factory=FindingTally)
    known: int = 0
    """Findings in the baseline; they are counted and not shown."""
    curable: int = 0
    """Other findings that have a repair."""
    again: int = 0
    """Findings whose repair has to be named."""

    def add(self, result: Result) -> None:
        new = tuple(finding for finding in result.findings if not finding.known)
        self.worst.add(new)
        self.seen.add(result)
        self.known += len(result.findings) - len(new)
        self.curable += sum(finding.repair not in (None, ONCE) for finding in new)
        self.again += sum(finding.repair == ONCE for finding in new)


def write(results: Iterable[Result], summary: Summary, out: TextIO, options: ReportOptions) -> None:
    """Read all results, then write one page; only the worst findings are kept in memory."""
    gathered = _Gathered()
    for result in results:
        gathered.add(result)
    page = StringIO()
    console = console_for(page, options)
    for line in _header(summary):
        console.print(line)
    console.print()
    console.print(_verdict(summary, gathered.seen))
    for line in known_lines(summary, gathered.known):
        console.print(line)
    if summary.findings:
        console.print()
        console.print(_table(summary, options))
    worst = gathered.worst.pick(options.worst)
    _print_worst(console, worst, gathered.seen.findings.total() - gathered.known)
    for title, lines in gate_lists(summary):
        print_list(console, title, lines)
    print_list(console, "Not looked at", [visible(line) for line in skip_lines(summary)])
    print_list(console, "Notices", _notice_lines(summary))
    print_commands(console, "More", _more_lines(worst, summary, gathered.curable, gathered.again))
    if (last := gate_line(summary, failing=gathered.seen.findings[Severity.ERROR] > 0)) is not None:
        console.print()
        console.print(last)
    out.writelines(inert(line.rstrip()) + "\n" for line in page.getvalue().splitlines())


def _header(summary: Summary) -> Iterator[Text]:
    files = ", ".join(summary.files[:_FILES])
    if len(summary.files) > _FILES:
        files += f" and {many(len(summary.files) - _FILES, 'more file')}"
    yield Text("tito-audit ", style="bold").append(visible(files))
    by_count = summary.formats.most_common()
    formats = ", ".join(f"{name} {number:,}" for name, number in by_count[:_FORMATS])
    if len(by_count) > _FORMATS:
        formats += f" and {len(by_count) - _FORMATS} other formats"
    yield from _read_as_lines(summary)
    for said in summary.joined:
        yield Text(visible(said))
    parts = [many(summary.rollouts, "rollout") + (f" ({formats})" if formats else "")]
    if summary.rows_unreadable:
        parts.append(many(summary.rows_unreadable, "unreadable row"))
    parts.append(many(summary.turns, "turn"))
    parts.append(f"{many(summary.tokens, 'token')}, {summary.generated_tokens:,} of them generated")
    yield Text(visible(" · ".join(parts)))
    if summary.sampled is not None:
        share, rows, of = summary.sampled.share, summary.sampled.rows, summary.sampled.of
        yield Text(f"sampled {share * 100:g}%: {rows:,} of {many(of, 'row')}", style="yellow")
    pace = f"{summary.seconds:.1f} s"
    if summary.seconds > 0 and summary.tokens:
        pace += f", {summary.tokens / summary.seconds:,.0f} tokens/s"
    encoder = f" · encoder {summary.encoder}" if summary.encoder else ""
    yield Text(visible(f"tokenizer {summary.tokenizer or 'none'}{encoder} · {pace}"))


def _read_as_lines(summary: Summary) -> Iterator[Text]:
    """`read as nemo_gym: responses_create_params, response.output (12 rows)`; similar files share a line."""
    alike: dict[tuple[tuple[str, tuple[str, ...]], ...], list[str]] = {}
    for file, formats in summary.taken.items():
        alike.setdefault(tuple((name, taken.told_by) for name, taken in formats.items()), []).append(file)
    # First what a reader has to check: files read as several formats, or by plain column names.
    doubtful = sorted(alike.items(), key=lambda item: (len(item[0]) == 1, all(n != "generic" for n, _ in item[0])))
    for kinds, files in doubtful[:_TAKEN]:
        line = Text()
        if len(alike) > 1:
            line.append(visible(files[0]) + (f" and {len(files) - 1:,} more" if len(files) > 1 else "") + " ")
        line.append("read as ")
        for index, (name, keys) in enumerate(kinds):
            line.append("; " if index else "").append(name, style="bold")
            named = ", ".join(keys[:_KEYS]) + (f" and {len(keys) - _KEYS} more" if len(keys) > _KEYS else "")
            line.append(visible(f": {named}" if named else ""))
            line.append(f" ({many(sum(summary.taken[file][name].rows for file in files), 'row')})")
        yield line
    if len(alike) > _TAKEN:
        yield Text(f"and {len(alike) - _TAKEN:,} more kinds of files; tito-audit inspect FILE explains each")


def _verdict(summary: Summary, seen: FindingTally) -> Text:
    """The verdict in one line; a log in which nothing could be audited is never called clean."""
    rows = summary.rollouts + summary.rows_unreadable
    found = seen.words(summary)
    if found:
        line = Text()
        for severity, words in found:
            number, in_, rollouts = words.partition(" in ")
            line.append("; " if line else "").append(number, style=STYLES[severity]).append(in_ + rollouts)
    elif not rows:
        return Text("nothing to audit: no rollouts", style="bold yellow")
    elif summary.without_ids == summary.rollouts:
        return Text(f"nothing to audit: no token ids in {many(rows, 'rollout')}", style="bold yellow")
    elif nothing_compared(summary):
        line = Text(f"no findings, but {uncompared_words(summary)}", style="bold yellow")
        return line.append(f"; nothing was compared in {many(summary.uncompared, 'rollout')}", style="not bold")
    else:
        looked = rows - summary.without_ids - summary.uncompared
        line = Text(f"clean: nothing found in {many(looked, 'rollout')}", style="bold green")
        if summary.skipped:
            line.append(", as far as the rules could look (below)", style="not bold default")
    if summary.uncompared:
        line.append(
            f"; nothing compared in {summary.uncompared:,}, as {uncompared_words(summary)}", style="yellow"
        )
    if summary.without_ids:
        line.append(f"; nothing to audit in {summary.without_ids:,} without token ids", style="yellow")
    return line


def _table(summary: Summary, options: ReportOptions) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("code", no_wrap=True)
    table.add_column("what", ratio=1, min_width=12 if options.width >= _WIDE else 8)
    known = any(count.known for count in summary.findings.values())
    columns = ["errors", "warn", "notes", *(["known"] if known else []), "rollouts", "tokens"]
    if options.width < _WIDE:
        columns.pop()
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for code in by_weight(summary.findings):
        count = summary.findings[code]
        worst = max((one for one in Severity if getattr(count, one.word)), default=Severity.NOTE)
        what = Text(visible(options.titles.get(code, "")))
        causes = _causes(summary.causes.get(code, Counter()))
        if causes:
            what.append(("\n" if what else "") + causes, style="dim")
        of_them = [count.known] if known else []
        numbers = (count.error, count.warning, count.note, *of_them, count.rollouts, count.tokens)
        table.add_row(
            Text(code, style=STYLES[worst]), what, *(f"{number:,}" for number in numbers[: len(columns)])
        )
    return table


def _causes(causes: Counter[str]) -> str:
    named = sorted(
        ((cause, number) for cause, number in causes.items() if cause), key=lambda item: (-item[1], item[0])
    )
    words = [f"{visible(cause)} ({number:,})" for cause, number in named[:_CAUSES]]
    if len(named) > _CAUSES:
        return f"{', '.join(words)} and {many(len(named) - _CAUSES, 'other cause')}"
    return ", ".join(words)


def _print_worst(console: Console, worst: list[WorstEntry], total: int) -> None:
    if not worst:
        return
    console.print()
    title = "The findings" if counted(worst) == total else f"The worst of {total:,} findings"
    console.print(Text(title, style="bold"))
    for entry in worst:
        console.print()
        for line in finding_lines(entry.finding, console):
            console.print(line, soft_wrap=True)
        if more := more_words(entry):
            console.print(Text(f"  {visible(more)}", style="dim"), soft_wrap=True)


def _notice_lines(summary: Summary) -> list[str]:
    notices = [notice for notice in summary.notices if notice not in summary.joined]
    lines = [visible(notice) for notice in notices[:_NOTICES]]
    if len(notices) > _NOTICES:
        lines.append(f"… and {len(notices) - _NOTICES:,} more notices")
    return lines


def _more_lines(worst: list[WorstEntry], summary: Summary, curable: int, again: int) -> list[str]:
    lines = []
    if worst:
        lines += [
            f"tito-audit explain {worst[0].finding.code}   what it means and what cures it",
            _look_command(worst[0].finding, summary),
        ]
    log = shell_word(summary.files[0]) if len(summary.files) == 1 else "…"
    for number, named in ((curable, ""), (again, f" --with {ONCE}")):
        if number:
            command = f"tito-audit repair {log}{named} -o OUT{with_options(summary)}"
            lines.append(f"{command}   may cure {many(number, 'finding')}")
    if worst:
        lines.append("tito-audit scan … --report json=findings.json   every finding")
    return lines + accept_lines(summary)


def _look_command(finding: Finding, summary: Summary) -> str:
    """The command that shows where a finding is; an unreadable row has no tokens to show."""
    if finding.code == _UNREADABLE:
        file = shell_word(finding.place.file)
        return f"tito-audit inspect {file}{with_options(summary)}   its columns, and a mapping to paste"
    return f"{show_command(finding.place, summary)}   every token of that rollout"


TEXT = Report("text", "a page for people: the verdict, a table by rule, the worst findings", write)
