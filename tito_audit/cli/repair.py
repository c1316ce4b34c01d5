"""`tito-audit repair`: writes repaired copies of logs and reports what was repaired."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tito_audit.cli._diff import diff_lines
from tito_audit.cli._options import Options, repair_settings_of, skipped_words
from tito_audit.cli._outputs import (
    journal_path,
    json_writer,
    print_resumed,
    refuse_overwriting,
    wanted_reports,
    write_finished_reports,
)
from tito_audit.errors import SetupError
from tito_audit.record.finding import Finding, Severity
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place
from tito_audit.record.trainings import ONCE
from tito_audit.report import ReportOptions
from tito_audit.report_objects import pick, summary_object
from tito_audit.rules import all_rules
from tito_audit.run.auditor import TRAINED_ONCE
from tito_audit.run.progress import REPAIRING, TRYING
from tito_audit.run.repair import Repairs, repair_rollouts
from tito_audit.run.workers import all_cores
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.summary import NewCount, RuleCount, Summary
from tito_audit.terminal.escape import visible
from tito_audit.terminal.page import (
    STYLES,
    console_for,
    open_page,
    print_commands,
    print_list,
    render_line,
    ruled_table,
)
from tito_audit.terminal.place import show_command
from tito_audit.terminal.terminal import RunProgress, colors, page_width, with_progress
from tito_audit.terminal.verdict import uncompared_words, undecided_words
from tito_audit.terminal.words import listed, many


def repair(options: Options, logs: list[str]) -> None:
    """Write repaired copies of logs; a row changes only if a repair is proven on it."""
    if options.out is None and not options.dry_run and not options.diff:
        raise SetupError(
            "There is no file to write to: a log is never changed in place.\n"
            "Pass -o OUT, or --dry-run to see what would be repaired, or --diff to see every change."
        )
    settings, how = all_cores(options.settings()), repair_settings_of(**options.values)
    target = None if options.dry_run else options.out
    place = journal_path(options, target and target.rstrip("/"), "pass -o OUT")
    written = [path for path in (target, how.quarantine, options.journal) if path]
    read = options.input_files(settings)
    refuse_overwriting({"--quarantine": how.quarantine, "--journal": options.journal}, logs, read)
    refuse_overwriting({"-o": target}, (), read)  # whether -o is one of the logs is checked log by log
    wanted = wanted_reports(options, logs, written, read, REPORTS)
    for name, path in wanted if options.diff else ():
        if name != "text" and path is None:
            raise SetupError(
                f"--report {name}: --diff prints to stdout too, and the two would mix.\n"
                f"Name a file for the report: --report {name}=FILE"
            )
    if options.provider is not None:
        settings, how = score_rollouts(logs, settings, how, options.provider, silent=options.quiet)
    tally = RowTally(Severity.threshold(settings.fail_on), settings)
    pace = RunProgress(phase=TRYING if target is None else REPAIRING)
    run = repair_rollouts(logs, target, settings, how, pace, resume=place)
    run.shown = options.worst if options.diff else 0
    run.before.notices += filter(None, [options.config_notice(), skipped_words(logs)])
    titles = {rule.code: rule.title for rule in all_rules()}
    page = ReportOptions(color=colors(sys.stdout), width=page_width(), notes=options.notes, titles=titles)
    # The progress line and the printed changes would overwrite each other.
    silent = options.quiet or (options.diff and sys.stdout.isatty())
    with closing(with_progress(run, pace, silent=silent)) as outcomes:
        for outcome in _print_diffs(outcomes, run, page, options.worst) if options.diff else outcomes:
            tally.add(outcome)
    print_resumed(run.resumed, len(run.before.files), place, silent=options.quiet)
    done = RepairRun(tally, run.before, run.after, run.written, settings, how, target, run.changed)
    write_finished_reports(done, REPORTS, wanted, page)
    if run.failing or run.before.open_beside_faults:
        raise typer.Exit(1)


def _print_diffs(outcomes: Iterable[Outcome], run: Repairs, page: ReportOptions, most: int) -> Iterator[Outcome]:
    """Pass the outcomes on, and print the changes of the first `most` changed rows."""
    console = console_for(sys.stdout, page)
    changed = 0
    for outcome in outcomes:
        if outcome.repaired or outcome.quarantined is not None:
            changed += 1
            if changed <= most:
                piece = run.vocabulary.piece if run.vocabulary is not None else None
                sys.stdout.writelines(render_line(line, console) for line in diff_lines(outcome, piece))
                console.print()
        yield outcome
    if changed > most:
        console.print(f"… and {changed - most:,} more changed rows; --worst {changed} shows all\n")
    elif not changed:
        console.print("no row changed\n")


def score_rollouts(
    logs: Sequence[str], settings: Settings, how: RepairSettings, provider: str, *, silent: bool
) -> tuple[Settings, RepairSettings]:
    """Score every rollout with the provider's model if `rescore` is among the repairs.

    Returns the settings to repair with; the same if nothing was scored.
    """
    if "rescore" not in how.strategies:
        return settings, how
    from tito_audit.provider import ProviderOptions
    from tito_audit.providers import key_of, open_provider
    from tito_audit.rescore.journal import ScoreJournal
    from tito_audit.rescore.run import Rescoring, scores_of

    if settings.engine != "local":
        raise SetupError(
            f"--engine {settings.engine}: one process uses a model's scores, so --with rescore runs without it.\n"
            "Leave out --engine, or fill the logprobs first: tito-audit rescore LOG -o OUT"
        )
    scorer = open_provider(provider, ProviderOptions(api_key=key_of(provider)))
    journal, pace = ScoreJournal(None, scorer.name), RunProgress()
    run = Rescoring(logs, settings, scorer, keeps=True, journal=journal, progress=pace)
    for _ in with_progress(run, pace, silent=silent):
        pass
    values = scores_of(logs, journal, f"{journal.model or 'the model'} ({scorer.name})")
    # One process: a fork must not happen while the provider's threads run.
    return replace(settings, jobs=1), replace(how, choices=replace(how.choices, rescored=values))


_VARIABLE_PARTS = re.compile(r"\d+(?:,? ?\d+)*|'[^']*'")
"""Numbers, lists of numbers, and quoted names: what differs between sentences of one kind."""
_ROW_COUNTS = "written repaired forked forked_into more_tokens as_they_were standing quarantined"
"""The counts of rows in the JSON report, by the attributes of RowTally."""


@dataclass(slots=True)
class Sentence:
    """A sentence said about rows, in the words of the first row; numbers and names may vary."""

    text: str
    place: Place
    rows: int = 0
    alike: bool = True
    """Whether it was the same for all rows, numbers and names included."""
    needs_unsafe: bool = False
    """Whether it says that a repair needs --unsafe."""

    def as_object(self) -> dict[str, Any]:
        return {**pick(self, "text rows"), **pick(self.place, "file row")}


class SentenceCounts:
    """Counts sentences by kind: those that differ only in numbers and names are one kind."""

    def __init__(self) -> None:
        self._sentences: dict[tuple[str, str], Sentence] = {}
        self.others = 0
        """How many sentences were of further kinds, which are not told apart."""

    def add(self, text: str, place: Place, by: str = "", *, needs_unsafe: bool = False) -> None:
        """Count a sentence; `by` is the repair that said it."""
        key = (by, _VARIABLE_PARTS.sub("#", text))
        sentence = self._sentences.get(key)
        if sentence is None:
            if len(self._sentences) >= 200:
                self.others += 1
                return
            sentence = self._sentences[key] = Sentence(text, place, needs_unsafe=needs_unsafe)
        sentence.rows += 1
        sentence.alike = sentence.alike and sentence.text == text

    def __iter__(self) -> Iterator[tuple[str, Sentence]]:
        """The repair and the sentence of each kind, the most frequent first."""
        for (by, _), sentence in sorted(self._sentences.items(), key=lambda item: -item[1].rows):
            yield by, sentence


@dataclass(slots=True)
class RowTally:
    """Counts the rows of a repair by their outcome."""

    threshold: Severity | None
    """Findings at or above it fail the run; None: none do."""
    settings: Settings | None = None
    """Its overrides, if any, decide what fails in each log."""
    _thresholds: dict[str, Severity | None] = field(default_factory=dict)
    rows: int = 0
    repaired: int = 0
    forked: int = 0
    """Rows that became several."""
    forked_into: int = 0
    """How many rows those became."""
    more_tokens: int = 0
    """How many tokens those rows have more than one row each would have."""
    standing: int = 0
    """Rows that still have findings at or above the threshold, repaired or not."""
    movable: int = 0
    """Those of them that a quarantine would take."""
    quarantined: int = 0
    done: Counter[str] = field(default_factory=Counter)
    """By repair: how many rows it repaired."""
    cured: dict[str, Counter[str]] = field(default_factory=dict)
    """By repair: in how many rows each code was fixed."""
    notes: SentenceCounts = field(default_factory=SentenceCounts)
    declined: SentenceCounts = field(default_factory=SentenceCounts)
    moved: SentenceCounts = field(default_factory=SentenceCounts)
    """Why rows went to the quarantine."""
    left: dict[str, Counter[str | None]] = field(default_factory=dict)
    """By code: the repairs of the findings that are left at or above the threshold, None for no repair."""
    first_left: Finding | None = None
    """The first of the worst of these findings."""
    milder: int = 0
    """Warnings below the threshold that a repair claims."""

    @property
    def as_they_were(self) -> int:
        return self.rows - self.repaired - self.quarantined

    @property
    def written(self) -> int:
        return self.rows - self.quarantined - self.forked + self.forked_into

    def add(self, outcome: Outcome) -> None:
        """Count one row."""
        self.rows += 1
        if outcome.quarantined is not None:
            self.quarantined += 1
            self.moved.add(outcome.quarantined, outcome.place)
        elif outcome.repaired:
            self.repaired += 1
            if outcome.rows > 1:
                self.forked += 1
                self.forked_into += outcome.rows
                self.more_tokens += outcome.more_tokens
            for name, codes in outcome.cured.items():
                self.done[name] += 1
                self.cured.setdefault(name, Counter()).update(codes)
            for note in outcome.notes:
                if note not in outcome.costs:
                    self.notes.add(note, outcome.place)
        for name, reason in outcome.declined.items():
            self.declined.add(reason, outcome.place, name, needs_unsafe=name in outcome.needs_unsafe)
        standing = [finding for result in outcome.after for finding in result.findings if self._fails(finding)]
        self.standing += bool(standing)
        self.movable += bool(standing) and not outcome.stays
        self.milder += sum(
            finding.times
            for result in outcome.after
            for finding in result.findings
            if finding.severity is Severity.WARNING and finding.repair is not None and not self._fails(finding)
        )
        for finding in standing:
            self.left.setdefault(finding.code, Counter())[finding.repair] += finding.times
            if self.first_left is None or finding.severity > self.first_left.severity:
                self.first_left = finding

    def as_object(self) -> dict[str, Any]:
        return {
            "rows": {"read": self.rows, **pick(self, _ROW_COUNTS)},
            "repairs": {
                name: {"rows": rows, "cured": dict(sorted(self.cured[name].items()))}
                for name, rows in self.done.items()
            },
            "declined": [{"repair": by, **sentence.as_object()} for by, sentence in self.declined],
            "quarantined": [sentence.as_object() for _, sentence in self.moved],
            "notes": [sentence.as_object() for _, sentence in self.notes],
        }

    def _fails(self, finding: Finding) -> bool:
        threshold = self.threshold
        if self.settings is not None and self.settings.overrides:
            file = finding.place.file
            if file not in self._thresholds:
                self._thresholds[file] = Severity.threshold(self.settings.at(file).fail_on)
            threshold = self._thresholds[file]
        return threshold is not None and finding.severity >= threshold


_DIGITS = re.compile(r"[0-9]+")
_MOST_SENTENCES = 12
"""How many kinds of sentences are listed."""
_MOST_FILES = 5
"""How many files are listed; the JSON report lists all."""


@dataclass(frozen=True, slots=True)
class RepairRun:
    """A finished repair."""

    tally: RowTally
    before: Summary
    after: Summary
    written: list[tuple[Path, Path]]
    settings: Settings
    repairs: RepairSettings
    out: str | None
    """None: a dry run."""
    changed: Mapping[Path, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """By log: its changed rows, and the places in them that changed."""

    def as_object(self) -> dict[str, Any]:
        """Both summaries, the rows, what each repair did, the files."""
        return {
            "before": summary_object(self.before),
            "after": summary_object(self.after),
            **self.tally.as_object(),
            "files": [{"log": str(log), "written": str(target)} for log, target in self.written],
            "changed": [{"file": str(log), **row} for log, rows in self.changed.items() for row in rows],
            "dry_run": self.out is None,
        }


def _write_text(run: RepairRun, out: TextIO, look: ReportOptions) -> None:
    """Write the page: what was repaired, findings before and after, what is left, what would help, the verdict."""
    with open_page(out, look) as console:
        for part in _header_parts(run):
            console.print(part)
        least = Severity.NOTE if look.notes or run.tally.threshold is Severity.NOTE else Severity.WARNING
        shown = [severity for severity in sorted(Severity, reverse=True) if severity >= least]
        before, after = _severity_totals(run.before), _severity_totals(run.after)
        # The table above counts what was fixed.
        if any(after[each] or (before[each] and (look.notes or not run.tally.done)) for each in shown):
            console.print()
            console.print(_findings_table(run, look, shown))
        if run.before.findings or run.after.findings:
            sizes = [
                (name, getattr(run.before, name), getattr(run.after, name)) for name in ("rollouts", "tokens")
            ]
            words = [f"{name} {old:,} → {new:,}" for name, old, new in sizes if old != new]
            if words and not run.tally.forked:  # the header says what a fork costs
                console.print(Text(f"\n{', '.join(words)}"))
        print_list(console, "Notes", list(_sentence_lines(run.tally.notes)))
        not_repaired = list(_sentence_lines(run.tally.declined))
        left = {code: claims[None] for code, claims in sorted(run.tally.left.items()) if claims[None]}
        if left:
            findings = many(sum(left.values()), "finding")
            not_repaired.append(f"no repair fits {listed(list(left))} here ({findings})")
        if whole := [code for code in _whole_log_codes(run) if code != TRAINED_ONCE]:
            not_repaired.append(f"{listed(whole)}: about a log as a whole, which no repair of its rows changes")
        print_list(console, "Not repaired", not_repaired)
        print_list(console, "In quarantine", list(_sentence_lines(run.tally.moved)))
        # One file is named in the header.
        several = [] if [str(target) for _, target in run.written] == [run.out] else run.written
        written = [visible(f"{target}, from {log} (unchanged)") for log, target in several[:_MOST_FILES]]
        if len(run.written) > _MOST_FILES:
            written.append(f"… and {many(len(run.written) - _MOST_FILES, 'more file')}")
        if run.out is not None and run.repairs.quarantine is not None and run.tally.quarantined:
            moved = many(run.tally.quarantined, "row")
            written.append(visible(f"{run.repairs.quarantine}: {moved} with the reason"))
        print_list(console, "Written", written)
        # A notice about a written file replaces the same about its log.
        notices = {_DIGITS.sub("#", text): text for text in run.before.notices}
        for text in run.after.notices:
            about = text
            for log, target in run.written:
                about = about.replace(str(target), str(log))
            notices[_DIGITS.sub("#", about)] = text
        print_list(console, "Notices", list(map(visible, notices.values())))
        print_commands(console, "Next", list(_next_steps(run)))
        console.print()
        console.print(_verdict(run, shown), soft_wrap=True)


REPORTS: dict[str, Callable[[RepairRun, TextIO, ReportOptions], None]] = {
    "text": _write_text,
    "json": json_writer(RepairRun.as_object),
}


def _header_parts(run: RepairRun) -> Iterator[RenderableType]:
    """The logs and where they go, what became of their rows, tokenizer and time, and what each repair did."""
    from tito_audit.repairs import all_repairs

    tally, files = run.tally, run.before.files
    named = files[0] if files else ""
    if len(files) > 1:
        named += f" and {many(len(files) - 1, 'more file')}"
    to = "a dry run, nothing is written" if run.out is None else run.out
    yield Text("tito-audit repair ", style="bold").append(visible(f"{named} → {to}"))
    parts = [many(tally.rows, "row"), f"{tally.repaired:,} repaired"]
    if tally.forked:
        forked = "" if tally.forked == tally.repaired else f"{tally.forked:,} "
        parts[-1] += f" ({forked}forked into {tally.forked_into:,}: {tally.more_tokens:,} more tokens to compute)"
    parts.append(f"{tally.as_they_were:,} as they were")
    if tally.quarantined:
        parts.append(f"{tally.quarantined:,} in quarantine")
    if tally.standing:
        word = "error" if tally.threshold is Severity.ERROR else "finding"
        parts.append(f"{tally.standing:,} still with {word}s")
    yield Text(" · ".join(parts))
    yield Text(visible(f"tokenizer {run.before.tokenizer_words or 'none'} · {run.before.seconds:.1f} s"))
    if not tally.done:
        return
    table = ruled_table()
    table.add_column("repair", no_wrap=True, style="bold")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("fixed in them")
    order = [repair.name for repair in all_repairs()]
    for name in sorted(tally.done, key=lambda name: order.index(name) if name in order else -1):
        codes = ", ".join(f"{code} ({rows:,})" for code, rows in sorted(tally.cured[name].items()))
        table.add_row(visible(name), f"{tally.done[name]:,}", codes or "rewritten as asked")
    yield from (Text(), table)


def _verdict(run: RepairRun, shown: Sequence[Severity]) -> Text:
    """The verdict in one line. It never calls rows fixed or faultless that were not audited."""
    if not run.before.rollouts + run.before.rows_unreadable:
        return Text("nothing to repair: no rollouts", style="bold yellow")
    before, after = _severity_totals(run.before), _severity_totals(run.after)
    # `errors in 2 of 5 rollouts → 0`. For notes, and where findings are about a whole log, findings are counted.
    changes = []
    rows, now = (summary.rollouts + summary.rows_unreadable for summary in (run.before, run.after))
    for severity in (each for each in sorted(Severity, reverse=True) if before[each] or after[each]):
        old, new = (summary.new.get(severity, NewCount()) for summary in (run.before, run.after))
        elsewhere = old.of_logs or new.of_logs or old.between or new.between or not (old.rollouts or new.rollouts)
        if severity is Severity.NOTE or elsewhere:
            changes.append(f"{many(before[severity], severity.word)} → {after[severity]:,}")
        else:
            of = f" of {now:,}" if new.rollouts and now != rows else ""
            rollouts = f"{old.rollouts:,} of {many(rows, 'rollout')} → {new.rollouts:,}{of}"
            changes.append(f"{severity.word}s in {rollouts}")
    if len(changes) > 1 and Severity.NOTE not in shown and (before[Severity.NOTE] or after[Severity.NOTE]):
        changes.pop()
    # What could not be judged in the written rows.
    open_there, beside = run.before.open_beside_faults, run.before.fault_beside
    unjudged = list(undecided_words(replace(run.after, open_beside_faults=open_there, fault_beside=beside)))
    if run.after.rows_unreadable and "REC001" not in run.after.findings:
        unjudged.append(f"{many(run.after.rows_unreadable, 'row')} could not be read")
    if run.after.uncompared:
        way = "pass -t NAME" if run.settings.tokenizer is None else uncompared_words(run.after)
        unjudged.append(f"nothing compared in {many(run.after.uncompared, 'rollout')}: {way}")
    if run.after.without_ids:
        unjudged.append(f"nothing audited in {many(run.after.without_ids, 'rollout')} without token ids")
    if not run.before.compared and not (before[Severity.ERROR] or before[Severity.WARNING]):
        return Text("; ".join([*unjudged, *([", ".join(changes)] if changes else [])]), style="bold yellow")
    parts = [", ".join(changes) or f"no findings in {many(run.before.compared, 'rollout')}"]
    if run.tally.quarantined:
        parts.append(f"{many(run.tally.quarantined, 'row')} in quarantine")
    if run.after.skipped and not any(after.values()):
        parts.append(f"{many(len(run.after.skipped), 'rule')} could not run everywhere")
    # What became of the errors and warnings.
    errors, errors_left = before[Severity.ERROR], after[Severity.ERROR]
    warnings, warnings_left = before[Severity.WARNING], after[Severity.WARNING]
    would = run.out is None
    repairs_warnings = bool(run.repairs.strategies) or run.settings.fail_on in ("warning", "note")
    unchanged = errors == errors_left and warnings == warnings_left
    if unchanged and not errors and not (warnings and repairs_warnings):
        words, style = "nothing to repair", "bold yellow" if warnings or unjudged else "bold green"
    elif unchanged:
        words = "nothing would be fixed" if would else "nothing fixed"
        style = "bold red" if errors_left else "bold yellow"
    elif errors_left or run.before.open_beside_faults or (warnings_left and not errors):
        words = "not all would be fixed" if would else "not all fixed"
        style = "bold red" if errors_left else "bold yellow"
    elif warnings_left or run.tally.quarantined:
        words, style = f"no errors {'would be ' if would else ''}left", "bold yellow"
    else:
        words, style = "would be fixed" if would else "fixed", "bold green"
    line = Text(words, style=style).append(": " + "; ".join(parts))
    return line.append("".join(f"; {part}" for part in unjudged), style="yellow")


def _severity_totals(summary: Summary) -> Counter[Severity]:
    totals: Counter[Severity] = Counter()
    for count in summary.findings.values():
        for severity in Severity:
            totals[severity] += getattr(count, severity.word)
    return totals


def _findings_table(run: RepairRun, look: ReportOptions, severities: Sequence[Severity]) -> Table:
    """Findings of each code and severity, before → after, and their totals."""
    table = ruled_table()
    table.add_column("code", no_wrap=True)
    table.add_column("what", ratio=1, min_width=12)
    for severity in severities:
        table.add_column(f"{severity.word}s", justify="right", no_wrap=True)
    none = RuleCount()
    changes: dict[str, list[tuple[int, int]]] = {}  # by code: (before, after) of each severity
    for code in sorted({*run.before.findings, *run.after.findings}):
        old, new = run.before.findings.get(code, none), run.after.findings.get(code, none)
        counts = [(getattr(old, each.word), getattr(new, each.word)) for each in severities]
        if any(map(any, counts)):
            changes[code] = counts
    before, after = _severity_totals(run.before), _severity_totals(run.after)
    changes["all"] = [(before[each], after[each]) for each in severities]
    widths = [max(cell_len(f"{new:,}") for _, new in column) for column in zip(*changes.values(), strict=True)]
    for code, counts in changes.items():
        # `12 → 0` with aligned arrows; blank where both are 0.
        cells = [
            Text(f"{old:,} → {new:>{width},}" if old or new else "", style="" if old != new else "dim")
            for (old, new), width in zip(counts, widths, strict=True)
        ]
        if code == "all":
            table.add_section()
            table.add_row("", code, *cells)
            continue
        left = run.after.findings.get(code, none)
        worst = max((severity for severity in Severity if getattr(left, severity.word)), default=None)
        style = STYLES[worst] if worst is not None else "green"
        table.add_row(Text(code, style=style), visible(look.titles.get(code, "")), *cells)
    return table


def _sentence_lines(sentences: SentenceCounts) -> Iterator[str]:
    """The most frequent sentences, each with its repair and a row; the others are counted."""
    ranked = list(sentences)
    for by, sentence in ranked[:_MOST_SENTENCES]:
        place = visible(str(sentence.place))
        if sentence.rows > 1 and sentence.alike:
            place = f"{many(sentence.rows, 'row')}, such as {place}"
        elif sentence.rows > 1:  # the numbers differ
            place += f", and {many(sentence.rows - 1, 'row')} like it"
        yield (visible(f"{by}: ") if by else "") + f"{visible(sentence.text)} ({place})"
    if len(ranked) > _MOST_SENTENCES or sentences.others:
        yield f"… and {len(ranked) - _MOST_SENTENCES + sentences.others:,} more of other kinds"


def _whole_log_codes(run: RepairRun) -> list[str]:
    """The codes of the errors left that are about a log as a whole, not about a row."""
    counts = run.after.findings.items() if run.tally.threshold is not None else ()
    return sorted(code for code, count in counts if count.error and code not in run.tally.left)


def _next_steps(run: RepairRun) -> Iterator[str]:
    """What to do about the findings that are left: a flag or command and what it does, line by line."""
    from tito_audit.repair import Safety
    from tito_audit.repairs import all_repairs

    tally = run.tally
    if tally.left and run.settings.tokenizer is None:
        yield "--tokenizer DIR   runs the repairs and rules that need the tokenizer"
    named = run.repairs.strategies
    claiming = [
        repair
        for repair in all_repairs()
        if not repair.by_model and any(repair.claims(code) for code in tally.left)
    ]
    unsafe = [by for by, sentence in tally.declined if sentence.needs_unsafe]
    for repair in claiming if not named else ():
        if repair.safety is Safety.UNSAFE and not repair.removes_rows:
            unsafe.append(repair.name)
    if unsafe and not run.repairs.unsafe:
        unsafe = list(dict.fromkeys(unsafe))
        yield f"--unsafe   lets {listed(unsafe)} run; tito-audit explain {unsafe[0]} names the cost"
    safe = [each.name for each in claiming if each.safety is not Safety.UNSAFE and each.name not in named]
    if named and safe:
        yield f"--with {','.join((*named, *safe))}   also tries {listed(safe)}"
    if tally.milder and not named:
        yield "--fail-on warning   also repairs warnings, where that can be proven"
    if tally.movable and run.repairs.quarantine is None:
        codes = listed(sorted(tally.left))
        yield f"--quarantine FILE   moves the {many(tally.movable, 'row')} with {codes} there, with the reason"
    whole = _whole_log_codes(run)
    if TRAINED_ONCE in whole and ONCE not in named:
        yield f"--with {ONCE}   takes repeated training out of the loss where it is certain"
    if tally.first_left is not None:
        place = tally.first_left.place
        yield f"tito-audit explain {tally.first_left.code}   what it means, and what fixes it"
        yield f"{show_command(place, run.before)}   that rollout, token by token"
    elif whole:
        yield f"tito-audit explain {whole[0]}   what it means, and what fixes it"
    if run.out is None and tally.repaired:
        yield "-o OUT   writes the repaired log; --diff shows every change"
