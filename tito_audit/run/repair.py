"""Read, check, repair, write, check again: the flow from logs to logs that hold the claim."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tito_audit.errors import RecordError, SetupError
from tito_audit.evidence.gather import gather
from tito_audit.evidence.judgement import witness
from tito_audit.evidence.model import Evidence
from tito_audit.format import Format, Row
from tito_audit.formats import map_columns, unmap_columns
from tito_audit.join import form_of, lines_of
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import Reading, Testimony
from tito_audit.repair import Repair, Safety
from tito_audit.repairs import all_repairs, repair_named
from tito_audit.rules import all_rules
from tito_audit.run.apply_repairs import Audited, Cure, Terms, Written, cure_row
from tito_audit.run.auditor import Loader, counts_of, selected_codes, unreadable
from tito_audit.run.check import check
from tito_audit.run.log_groups import LogGroup, Progress, fitted, join_notices, noted, parts_of
from tito_audit.run.scan import Scan, conclude, names_of, testimony_of
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import (
    Output,
    Quarantine,
    allow_open_files,
    dataset_metadata,
    find_logs,
    make_folder,
    open_log,
    open_output,
    refuse_taken,
    same_place,
    target_paths,
    write_dataset_metadata,
)
from tito_audit.storage.row import RawRow
from tito_audit.summary import Summary
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.version import VERSION

__all__ = ["COLUMN", "Repairs", "repair_rollouts"]

COLUMN = "tito_audit"
"""The column of a written row that says what was cured in it by what."""


class Repairs:
    """Outcomes of the rows of logs, one after the other, written while they are computed.

    Making one opens nothing. Iterating raises SetupError or StorageError when the run cannot be made, and
    then no file is left behind; each file takes its name when it is whole. A dry run (no `out`) writes none.
    """

    def __init__(
        self,
        logs: Sequence[str],
        out: str | Path | None,
        settings: Settings,
        repairs: RepairSettings,
        progress: Progress | None = None,
    ) -> None:
        self.logs = logs
        self.out = Path(out) if out is not None else None
        self.settings = settings
        self.repairs = repairs
        self.progress = progress
        self.before = Summary()
        """Of the logs as read."""
        self.after = Summary()
        """Of the written files, scanned again; of the proven rows in a dry run."""
        self.failing = 0
        """Findings in what `after` is of, at or above `fail_on` of their log."""
        self.vocabulary: Vocabulary | None = None
        """For showing pieces of the log at work; None without a tokenizer, set once iteration has started."""
        self.written: list[tuple[Path, Path]] = []
        """(log, file written in its place), as far as they are complete."""

    def __iter__(self) -> Iterator[Outcome]:
        selected_codes(self.settings)
        _strategies(self.repairs)
        files, stock = find_logs(self.logs), Loader()
        targets = target_paths(self.logs, files, self.out) if self.out is not None else {}
        refuse_taken({**targets, **dataset_metadata(self.logs, targets)}, overwrite=self.repairs.force)
        # Every row of a log is read, repaired or not.
        settings = replace(self.settings, limit=None, sample=None, row=None)
        parts = fitted(parts_of(files, settings, stock, self.before))
        rows_of = {part: _Rows(part, self.repairs) for part in parts.values()}
        logs = {file: rows_of[parts[str(file)]] for file in files}
        started = time.perf_counter()
        # The quarantine ends first: no log that lacks rows gets its name before they have theirs.
        with ExitStack() as later, ExitStack() as stack:
            quarantine = None
            if self.repairs.quarantine is not None and self.out is not None:
                place = Path(self.repairs.quarantine)
                _refuse_same(place, [*files, *targets.values()])
                quarantine = stack.enter_context(Quarantine.opened(place, overwrite=self.repairs.force))
                allow_open_files(len(files))
            for outcome in self._files(logs, targets, quarantine, later):
                for result in noted(outcome.before, parts):
                    self.before.add(result)
                self.before.seconds = time.perf_counter() - started
                if self.out is None:
                    for result in outcome.after:
                        self.after.add(result)
                        self.failing += logs[Path(result.place.file)].failing(result)
                yield outcome
        write_dataset_metadata(self.logs, targets, overwrite=self.repairs.force)
        self.before.notices += join_notices(parts)
        conclude(self.before)
        for tokenizer in stock.tokenizers:
            tokenizer.save()
        if self.out is not None:
            self._scan_again({str(targets[file]): row_of for file, row_of in logs.items()})
        else:
            self.after.files = list(self.before.files)
            self.after.tokenizer = self.before.tokenizer

    def _files(
        self,
        logs: Mapping[Path, _Rows],
        targets: Mapping[Path, Path],
        quarantine: Quarantine | None,
        later: ExitStack,
    ) -> Iterator[Outcome]:
        """The outcomes; a file in which rows are left out waits in `later` for its name."""
        total = sum(file.stat().st_size for file in logs if file.is_file())
        done = rows = 0
        for file, row_of in logs.items():
            join, self.vocabulary = row_of.part.join, row_of.part.engine.vocabulary
            self.before.files.append(str(file))
            log = open_log(
                file,
                max_row_bytes=self.settings.max_row_bytes,
                keep_text=bool(targets),
                rows_at=row_of.settings.rows_at,
            )
            parted = False
            with ExitStack() as stack:
                out: Output | None = None
                if targets:
                    if targets[file] != self.out:  # a folder, whose parts are made as needed
                        make_folder(targets[file].parent)
                    added = (COLUMN,) if self.repairs.provenance else ()
                    place = open_output(log, targets[file], overwrite=self.repairs.force, added=added)
                    out = stack.enter_context(place)
                    out = out if join is None else join.output(out, log)
                for raw in log if join is None else join.rows(log):
                    outcome, written = row_of.outcome(Place(str(file), raw.index), raw)
                    if out is not None:
                        _write(raw, outcome, written, out, quarantine)
                    parted |= outcome.quarantined is not None
                    rows += 1
                    if self.progress is not None:
                        self.progress(rows, done + log.position, total)
                    yield outcome
                if out is not None:
                    out.finish(log)
                if parted:
                    later.push(stack.pop_all())
            done += log.size
            if targets:
                self.written.append((file, targets[file]))

    def _scan_again(self, rows_of: Mapping[str, _Rows]) -> None:
        """The written files as a scan sees them."""
        settings = replace(self.settings, limit=None, sample=None, row=None)
        scan = Scan([str(target) for _, target in self.written], settings)
        scan.standing_for = {target: log for log, target in self.written}
        self.after = scan.summary
        for result in scan:
            self.failing += rows_of[result.place.file].failing(result)


def repair_rollouts(
    logs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    settings: Settings | None = None,
    repairs: RepairSettings | None = None,
    progress: Progress | None = None,
) -> Repairs:
    """The repair of logs into `out` (a file for one log, else a folder), as outcomes one a row of the logs.

    Nothing is written before they are iterated; `out` None is a dry run. The logs are never changed. Every row of
    them is read, whatever `Settings.limit` and `Settings.sample` say.
    """
    return Repairs(names_of(logs), out, settings or Settings(), repairs or RepairSettings(), progress)


class _Rows:
    """One row after the other: read, audited, repaired."""

    def __init__(self, part: LogGroup, repairs: RepairSettings) -> None:
        self.part = part
        self.settings = part.settings
        self.repairs = repairs
        self.rules = all_rules()
        self.codes = part.engine.codes
        self._readings: dict[str, Reading | None] = {}
        self.every = frozenset(rule.code for rule in self.rules)
        self.terms = Terms(
            _strategies(repairs),
            self.rules,
            _threshold(part.settings, repairs),
            self.codes,
            repairs.unsafe,
            repairs.choices,
        )

    def outcome(self, place: Place, raw: RawRow) -> tuple[Outcome, list[Row] | None]:
        """What becomes of a row, and the rows to write in its place; None: as it was."""
        if raw.value is None:
            result = unreadable(place, raw.error or "the row cannot be read", self.codes)
            return self._left(place, (result,)), None
        try:
            row = map_columns(raw.value, self.settings.columns) if self.settings.columns else raw.value
            form = form_of(row, self.part.named)
            audited = self._audit(form, row, place)
            known = self._known(place.file) if any(_open(one.evidence) for one in audited) else None
            if known is not None:
                audited = self._audit(form, row, place, known)
        except RecordError as error:
            result = unreadable(place, str(error), self.codes)
            return self._left(place, (result,)), None
        before = tuple(self._shown(one.result) for one in audited)
        if not self._to_do(before):
            return self._left(place, before), None
        # What the log proves of its rows as they were, a repaired row has to have behind it.
        proven = None if known is None else Reading()
        cure = cure_row(row, form, audited, lambda again: self._audit(form, again, place, proven), self.terms)
        return self._outcome(place, raw, form, before, cure)

    def _outcome(
        self, place: Place, raw: RawRow, form: Format, before: tuple[Result, ...], cure: Cure
    ) -> tuple[Outcome, list[Row] | None]:
        after = tuple(self._shown(one.result) for written in cure.rows for one in written.audited)
        open_ = [finding for result in after for finding in result.findings if self._fails(finding)]
        because = cure.left_out
        if because is None and open_ and self.repairs.quarantine is not None:
            because = f"no repair cured {', '.join(sorted({finding.code for finding in open_}))}"
        outcome = Outcome(
            place,
            before,
            after if because is None else (),
            cured=dict(cure.cured),
            declined=dict(cure.declined) if open_ else {},
            notes=tuple(cure.notes),
            more_tokens=cure.more_tokens if because is None else 0,
            rows=len(cure.rows) if because is None else 0,
            quarantined=because,
        )
        if because is not None or not cure.cured:
            return outcome, None
        assert raw.value is not None
        # A table has columns of a fixed kind, and nothing reads its rows as strictly as a document.
        inside = form.open_object if raw.of_text else ""
        rows = [self._row(raw.value, one, number, outcome, inside) for number, one in enumerate(cure.rows)]
        return outcome, rows

    def _row(self, original: Row, written: Written, number: int, outcome: Outcome, inside: str) -> Row:
        """One row as it goes into the file, with its provenance in itself or in the object `inside` it."""
        row = written.row
        if self.settings.columns:
            row = unmap_columns(original, row, self.settings.columns)
        if not self.repairs.provenance:
            return row
        said: dict[str, object] = {
            "version": VERSION,
            "cured": {name: list(codes) for name, codes in outcome.cured.items()},
        }
        if outcome.rows > 1:
            said["part"] = {"number": number, "of": outcome.rows}
        if outcome.notes:
            said["notes"] = list(outcome.notes)
        was = original.get(inside) or {} if inside else original
        if was.get(COLUMN) is not None:
            said["before"] = was[COLUMN]
        return {**row, inside: {**was, COLUMN: said}} if inside else {**row, COLUMN: said}

    def _known(self, file: str) -> Reading | None:
        """How all rows of a log were written, where they prove it together; asked when a row cannot tell alone."""
        if file not in self._readings:
            testimony = testimony_of([file], self.settings).get(file, Testimony())
            common = testimony.common()
            self._readings[file] = next(iter(common)) if len(common) == 1 else None
        return self._readings[file]

    def _audit(self, form: Format, row: Row, place: Place, log_reading: Reading | None = None) -> list[Audited]:
        """The rollouts of a row with everything that every rule finds in them."""
        audited = []
        rollouts, join, engine = form.read(row, place), self.part.join, self.part.engine
        for rollout in rollouts if join is None else join.given(rollouts, row):
            evidence = gather(rollout, engine.tokenizer, engine.renderer, engine.speakers, log_reading)
            findings, skips = check(evidence, self.rules, self.every, all_repairs)
            result = Result(rollout.place, evidence.rollout, findings, skips, counts_of(evidence))
            audited.append(Audited(evidence, result))
        return audited

    def _left(self, place: Place, results: tuple[Result, ...]) -> Outcome:
        """A row that no repair is asked about."""
        fails = [finding for result in results for finding in result.findings if self._fails(finding)]
        because = None
        if fails and self.repairs.quarantine is not None:
            because = f"no repair cures {', '.join(sorted({finding.code for finding in fails}))}"
        kept = results if because is None else ()
        return Outcome(place, results, kept, rows=1 if because is None else 0, quarantined=because)

    def _shown(self, result: Result) -> Result:
        """A result with the selected codes only."""
        return Result(
            result.place,
            result.rollout,
            tuple(finding for finding in result.findings if finding.code in self.codes),
            tuple(skip for skip in result.skips if skip.code in self.codes),
            result.counts,
        )

    def _to_do(self, results: Sequence[Result]) -> bool:
        if any(repair.chosen(self.terms.choices) for repair in self.terms.repairs):
            return True
        return any(f.severity >= self.terms.threshold for result in results for f in result.findings)

    def failing(self, result: Result) -> int:
        """How many findings of a result fail the run."""
        return sum(map(self._fails, result.findings))

    def _fails(self, finding: Finding) -> bool:
        bar = Severity.bar(self.settings.fail_on)
        return bar is not None and finding.severity >= bar


def _open(evidence: Evidence) -> bool:
    """Whether the row leaves several readings open, of which its log may prove one."""
    said = witness(evidence)
    return said is not None and len(said.standing) > 1


def _write(
    raw: RawRow, outcome: Outcome, rows: list[Row] | None, out: Output, quarantine: Quarantine | None
) -> None:
    if outcome.quarantined is not None:
        if quarantine is None:
            raise SetupError(
                f"{outcome.place}: `drop` leaves rows out and needs --quarantine FILE to keep them in."
            )
        codes = sorted({f.code for r in outcome.before for f in r.findings if f.severity > Severity.NOTE})
        for line in lines_of(raw):
            quarantine.add(line, outcome.place, {COLUMN: {"quarantined": outcome.quarantined, "codes": codes}})
        out.replace(raw, [])
    elif rows is None:
        out.keep(raw)
    else:
        out.replace(raw, rows)


def _strategies(repairs: RepairSettings) -> tuple[Repair, ...]:
    """The repairs of a run in their order; SetupError for one that may not run."""
    if not repairs.strategies:
        safe = (repair for repair in all_repairs() if repairs.unsafe or repair.safety is not Safety.UNSAFE)
        return tuple(repair for repair in safe if repair.name != "drop" or repairs.quarantine is not None)
    chosen = tuple(repair_named(name) for name in dict.fromkeys(repairs.strategies))
    for repair in chosen:
        if repair.safety is Safety.UNSAFE and not repairs.unsafe:
            raise SetupError(
                f"--with {repair.name}: {repair.title[0].lower()}{repair.title[1:]}, which is unsafe.\n"
                "It changes or leaves out what was recorded, not only where it stands.\n"
                f"Add --unsafe to let it run; `tito-audit explain {repair.name}` says what it costs."
            )
        if repair.name == "drop" and repairs.quarantine is None:
            raise SetupError(
                "--with drop: there is no place for the rows that it leaves out.\n"
                "Nothing recorded may be lost.\nAdd --quarantine FILE."
            )
    return chosen


def _threshold(settings: Settings, repairs: RepairSettings) -> Severity:
    """How bad a finding has to be to be acted on: what fails the gate; warnings too for named repairs."""
    fails = {"warning": Severity.WARNING, "note": Severity.WARNING}.get(settings.fail_on, Severity.ERROR)
    return Severity.WARNING if repairs.strategies else fails


def _refuse_same(place: Path, taken: Sequence[Path]) -> None:
    if any(same_place(place, one) for one in taken):
        raise SetupError(f"--quarantine: {place} is read or written by this run already; name another file.")
