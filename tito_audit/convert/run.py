"""Converts logs: calls to training rows, training rows to calls, one format to another.

Every row is made, read back and compared before the first is written, so losses are known up front.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tito_audit.convert.makers import Holds, Maker, MakerInput, maker_named
from tito_audit.convert.rows_and_calls import (
    CallsOfConversation,
    as_calls,
    as_rows,
    content_digest,
    find_difference,
    lost_names,
)
from tito_audit.convert.unread import row_facts
from tito_audit.errors import RecordError, SetupError, StorageError
from tito_audit.evidence.reference import Reference
from tito_audit.format import Format, Row
from tito_audit.formats import pick_format
from tito_audit.join import gathered_calls, rows_behind
from tito_audit.record.column import Column, ColumnRole
from tito_audit.record.rollout import Place, Rollout, TrainingRow, effective_loss_mask, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.run.auditor import Loader
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import Progress
from tito_audit.run.rows import LogGroup
from tito_audit.settings.model import Settings
from tito_audit.sft.preflight import as_sft_row, prompt_and_completion
from tito_audit.storage import find_logs, log_paths, open_log, output_path, path_identity
from tito_audit.storage.atomic import refuse_target
from tito_audit.storage.nested_rows import wrapper_keys
from tito_audit.storage.new_log import ColumnTypes, new_log, output_kind
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow, dump_row, parse_json
from tito_audit.summary import Summary

GROUPS = ("group_id", "group", "group_index", "_ng_task_index")
"""Keys under which logs group the rollouts that were sampled for the same prompt."""


@dataclass(slots=True)
class RowBuilder:
    """Makes the rows of one pass over the logs, and notes what they lose."""

    form: Format
    maker: Maker
    tally: ConversionOutcome
    excluded: set[str] = field(default_factory=set)
    """Facts and columns with which a row would be read as another format, so that they are left out."""

    def sample(
        self, rollout: Rollout, facts: Mapping[str, Any], of_calls: Sequence[Mapping[str, Any]] = ()
    ) -> MakerInput:
        """The rollout with the facts that the new row has a place for; the others are counted as lost."""
        if self.maker.tokens_only:
            row = rollout.training_row
            bare = None if row is None else TrainingRow(row.token_ids, effective_loss_mask(row), None)
            return MakerInput(Rollout(rollout.place, rollout.format, training_row=bare))
        facts_of_row: dict[str, Any] = {}
        lost: list[str] = []
        for name, value in facts.items():
            there = self.maker.slots.get(name, name)
            has_place = self.maker.takes_facts or there in self.maker.slots.values()
            if has_place and there not in self.maker.own and there not in facts_of_row:
                facts_of_row[there] = value
            elif not (self.maker.grouped and name in GROUPS):
                lost.append(name)
        self.tally.lose(lost, rollout.place)
        self.tally.missing.update(name for name in self.maker.wants if facts_of_row.get(name) is None)
        return MakerInput(rollout, facts_of_row, of_calls)

    def row(self, samples: Sequence[MakerInput]) -> tuple[Row, int] | None:
        """The row of a sample or a group, and its digest; None if no sample fits. Others are refused."""
        fitting: list[MakerInput] = []
        new_row: Row = {}
        again: Sequence[Rollout] = ()
        for sample in samples:
            try:
                fitted, new_row, again = self._fitted(sample)
                fitting.append(fitted)
            except RecordError as error:
                self.tally.refuse(sample.rollout.place, str(error))
        if not fitting:
            return None
        if self.maker.grouped or len(samples) > 1:
            try:
                new_row, again = self._proven(fitting)
            except RecordError as error:
                for sample in fitting:
                    self.tally.refuse(sample.rollout.place, str(error))
                return None
        for sample, rollout in zip(fitting, again, strict=True):
            self.tally.lose(lost_names(sample.rollout, rollout), sample.rollout.place)
        self.tally.rows_made += 1
        return new_row, content_digest(again)

    def _fitted(self, sample: MakerInput) -> tuple[MakerInput, Row, Sequence[Rollout]]:
        """The sample without facts and columns that make its row unreadable, the row, and what it reads as."""
        sample = self._without(sample, self.excluded)
        try:
            return sample, *self._proven([sample])
        except RecordError:
            names = _optional_names(sample, self.maker)
            # If it fails even without all of them, there is another reason: RecordError.
            self._proven([_without_names(sample, names)])
        harmless: set[str] = set()
        for name in names:
            try:
                self._proven([_without_names(sample, {*names} - harmless - {name})])
                harmless.add(name)
            except RecordError:
                self.excluded.add(name)
        sample = self._without(sample, self.excluded)
        return sample, *self._proven([sample])

    def _without(self, sample: MakerInput, names: Collection[str]) -> MakerInput:
        present = [name for name in _optional_names(sample, self.maker) if name in names] if names else []
        self.tally.lose(present, sample.rollout.place)
        return _without_names(sample, present) if present else sample

    def _proven(self, samples: Sequence[MakerInput]) -> tuple[Row, Sequence[Rollout]]:
        """The row of these samples, and the rollouts read back from it; RecordError when they differ."""
        row = self.maker.make(*samples)
        back = parse_json(dump_row(row))
        form = pick_format(back)
        if form.name != self.form.name:
            raise RecordError(f"its row would be read as {form.name}, because it has that format's columns too")
        again = form.read(back, samples[0].rollout.place)
        if len(again) != len(samples):
            raise RecordError(f"its row would be read as {len(again)} rollouts")
        for sample, rollout in zip(samples, again, strict=True):
            what = find_difference(sample.rollout, rollout)
            if what is not None:
                raise RecordError(f"its row would read back with {what}")
        return row, again


def digest_of(raw: RawRow, form: Format) -> int | None:
    """The digest of the rollouts of a row; None when the row cannot be read in the format."""
    if raw.value is None:
        return None
    try:
        if pick_format(raw.value).name != form.name:
            return None
        return content_digest(form.read(raw.value, Place("", raw.index)))
    except RecordError:
        return None


def _optional_names(sample: MakerInput, maker: Maker) -> list[str]:
    """The names of facts and columns that a row can do without."""
    slots = set(maker.slots.values())
    names = [name for facts in (sample.facts, *sample.of_calls) for name in facts if name not in slots]
    row = sample.rollout.training_row
    columns = [] if row is None else list(row.columns)
    columns += [column for turn in sample.rollout.turns for column in turn.columns]
    names += [column.name for column in columns if column.role is ColumnRole.OTHER]
    return list(dict.fromkeys(names))


def _without_names(sample: MakerInput, names: Collection[str]) -> MakerInput:
    def without(columns: tuple[Column, ...]) -> tuple[Column, ...]:
        return tuple(c for c in columns if c.role is not ColumnRole.OTHER or c.name not in names)

    rollout, row = sample.rollout, sample.rollout.training_row
    rollout = replace(
        rollout,
        training_row=None if row is None else replace(row, columns=without(row.columns)),
        turns=tuple(replace(turn, columns=without(turn.columns)) for turn in rollout.turns),
    )
    facts, *of_calls = (
        {name: value for name, value in facts.items() if name not in names}
        for facts in (sample.facts, *sample.of_calls)
    )
    return MakerInput(rollout, facts, of_calls)


_MOST_REFUSED = 1000
"""How many of the rows that could not be converted are kept with their places; the rest are only counted."""


@dataclass(slots=True)
class ConversionOutcome:
    """What a conversion keeps and what it loses."""

    rows_read: int = 0
    rollouts: int = 0
    joined: int = 0
    """How many of the rollouts are conversations with a row for each call."""
    rows_made: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    """What has no place in the new form, by name or path in the log, with the number of rows that have it."""
    repeated: Counter[str] = field(default_factory=Counter)
    """What the log says once and several new rows repeat, with the number of rollouts affected."""
    missing: Counter[str] = field(default_factory=Counter)
    """Facts that a trainer needs and the log lacks, with the number of rollouts that lack them."""
    forked: int = 0
    """Rollouts that became several rows because their calls do not all continue one another."""
    refused: list[tuple[Place, str]] = field(default_factory=list)
    """The first rows and rollouts that could not be read or converted, with the reason."""
    not_converted: int = 0
    """How many rows and rollouts could not be read or converted."""
    _last: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        return not self.lost and not self.not_converted

    def lose(self, names: Iterable[str], place: Place) -> None:
        """Count, once per row and name, what a row of a log loses; rows come in order."""
        row = place.file, place.row
        for name in names:
            if self._last.get(name) != row:
                self._last[name] = row
                self.lost[name] = self.lost.get(name, 0) + 1

    def refuse(self, place: Place, reason: str) -> None:
        """Count a row or rollout that is left out; the first ones are kept with the reason."""
        self.not_converted += 1
        if len(self.refused) < _MOST_REFUSED:
            self.refused.append((place, reason))


class Conversion:
    """The conversion of logs to one new log: `survey` finds what would be lost, `write` writes.

    Creating one opens no file. SetupError when there is no such form, or the target's kind of file cannot hold it.
    """

    def __init__(
        self,
        logs: str | Path | Sequence[str | Path],
        to: str,
        out: str | Path | None = None,
        settings: Settings | None = None,
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.logs = log_paths(logs)
        self.form, self.maker = maker_named(to)
        self.out = output_path(out) if out is not None else None
        self.settings = settings or Settings()
        self.overwrite = overwrite
        self.progress = progress
        self.carried = ConversionOutcome()
        """What the survey found."""
        self.notices: list[str] = []
        """Which rows were joined, once the survey is done."""
        self.written: Path | None = None
        """The new log, once it has its name."""
        self._flow: RowFlow | None = None
        self._size = 0
        """Bytes of the logs at the survey; if rows were added since, the survey does not hold."""
        loader = Loader()
        self._auditor = cache(lambda file: loader.load_auditor(self.settings.at(file)))
        """What writes the messages of a log as ids."""
        self._shapes: ColumnTypes | None = None
        if self.out is not None and output_kind(self.out)[0] == "table":
            self._shapes = ColumnTypes()
            if not self.maker.tables:
                raise SetupError(
                    f"{self.out}: rows of {self.maker.name} hold objects inside objects, which a table changes.\n"
                    "Name it .jsonl or .json."
                )

    @property
    def named(self) -> str:
        """The logs in words: the name of a single log, or how many there are."""
        return self.logs[0] if len(self.logs) == 1 else f"{len(self.logs)} logs"

    def survey(self) -> Iterator[Place]:
        """The places of the logs' rows as they are converted; afterwards `carried` is complete. Writes nothing.

        StorageError when a log cannot be read, or the target exists and must not be replaced.
        """
        files = find_logs(self.logs)
        self.logs = [str(file) for file in files]
        for file in files:
            settings = self.settings.at(file)
            if settings.messages is not None or settings.tools_file is not None:
                raise SetupError(
                    "A conversion does not join messages or tools from other files.\n"
                    "Leave out --messages and --tools."
                )
            if not file.is_file():
                raise SetupError(
                    f"{file}: this is a pipe or a device, which cannot be read twice; save it to a file first."
                )
        if self.out is not None:
            if any(path_identity(self.out) == path_identity(file) for file in files):
                which = "the log" if len(files) == 1 else "one of the logs"
                raise SetupError(
                    f"-o {self.out}: this is {which}, and a log is never overwritten.\nName another file."
                )
            once = isinstance(self.out, RemoteFile) or not self.out.exists()
            for file in files[:1] if once else files:
                refuse_target(self.out, overwrite=self.overwrite, source=file)
        self._flow = RowFlow(files, self.settings, audits=False)
        self._flow.progress = self.progress
        self._size = self._flow.size
        self.carried = ConversionOutcome()
        for row, _, place in self._rows(self.carried, self._flow):
            if row is not None and self._shapes is not None:
                self._shapes.learn(row)
            yield place
        if self._shapes is not None:
            self._shapes.unify_buffered()
        summary = Summary()
        self._flow.report_joins(summary)
        self.notices = summary.notices

    def write(self) -> Iterator[Place]:
        """The places of the logs' rows as they are written; afterwards the file is in place. Call it after
        `survey`.

        The file is first read back and compared; if that fails, StorageError, and no file is left.
        """
        if self.out is None or self._flow is None:
            raise ValueError("a conversion without a target or a survey has nothing to write")
        digests, again = array("Q"), ConversionOutcome()
        source = self._flow.files[0]
        with new_log(self.out, overwrite=self.overwrite, source=source, column_types=self._shapes) as target:
            for row, number, place in self._rows(again, self._flow):
                if row is not None:
                    target.add(row)
                    digests.append(number)
                yield place
            if again != self.carried or self._flow.size != self._size:
                raise StorageError(
                    f"{self.named}: {'the log' if len(self.logs) == 1 else 'a log'} changed while it was "
                    "converted, so nothing was written.\nConvert it again once nothing is writing to it."
                )
            written = open_log(target.finish(), max_row_bytes=1 << 62) if digests else ()
            pairs = zip_longest((digest_of(raw, self.form) for raw in written), digests, fillvalue=-1)
            wrong = next((row for row, (read, digest) in enumerate(pairs) if read != digest), None)
            if wrong is not None:
                raise StorageError(
                    f"{self.out}: row {wrong} of {len(digests)} did not read back as written, so the file was not "
                    "kept.\nWrite it as .jsonl, or to another disk."
                )
        self.written = self.out

    def _rows(self, tally: ConversionOutcome, flow: RowFlow) -> Iterator[tuple[Row | None, int, Place]]:
        """The proven rows of the new log as (row, digest, place); (None, 0, place) after each row of the logs."""
        builder = RowBuilder(self.form, self.maker, tally)
        group: list[MakerInput] = []
        last: object = None
        place: Place | None = None
        for raw, place in self._read(tally, flow):
            for key, sample in self._samples(raw, place, flow.groups[place.file], builder):
                if group and (not self.maker.grouped or key != last):
                    built = builder.row(group)
                    if built is not None:
                        yield *built, place
                    group = []
                group.append(sample)
                last = key
            yield None, 0, place
        if group and place is not None and (built := builder.row(group)) is not None:
            yield *built, place

    def _read(self, tally: ConversionOutcome, flow: RowFlow) -> Iterator[tuple[RawRow, Place]]:
        """The rows of all logs, with calls joined, counted as they pass."""
        total, done = flow.size, 0
        for file in flow.files:
            group = flow.groups[str(file)]
            log = group.open(file)
            for raw in group.rows(log):
                tally.rows_read += len(rows_behind(raw))
                yield raw, Place(str(file), raw.index)
                if self.progress is not None:
                    self.progress(tally.rows_read, done + log.position, total)
            done += log.size

    def _samples(
        self, raw: RawRow, place: Place, reader: LogGroup, builder: RowBuilder
    ) -> Iterator[tuple[object, MakerInput]]:
        """The rollouts of a row in the new form, each with the key of its group."""
        tally, speakers = builder.tally, Speakers(reader.settings.sampled_roles)
        try:
            read = reader.read_row(raw, place)
            rollouts = tuple(with_speakers(rollout, speakers) for rollout in read.rollouts)
            if (joined := gathered_calls(raw)) is not None:
                calls = CallsOfConversation.of(joined, rollouts[0], speakers)
                yield from self._joined(rollouts[0], calls, builder)
                return
            facts_of_row = row_facts(read.row, rollouts, read.format.sources(read.row, read.rollouts))
        except RecordError as error:
            tally.refuse(place, str(error))
            return
        if not self.maker.tokens_only:
            tally.lose(wrapper_keys(raw), place)
            tally.lose(facts_of_row.unread, place)
        several = len(rollouts) > 1
        repeats = several and not self.maker.grouped and not self.maker.tokens_only
        tally.repeated.update(facts_of_row.shared if repeats else ())
        for rollout, own_facts in zip(rollouts, facts_of_row.facts, strict=True):
            tally.rollouts += 1
            facts = _facts_with_stated(own_facts, rollout, place.row if several else None)
            key = ("row", place) if several else _group_key(facts, place)
            try:
                if self.maker.tokens_only and not rollout.turns and rollout.training_row is None:
                    auditor, _ = self._auditor(rollout.place.file)
                    reference = (
                        None if auditor.tokenizer is None else Reference(auditor.tokenizer, auditor.renderer)
                    )
                    row = as_sft_row(rollout, reference, prompt_and_completion(read.row))
                    rollout = replace(rollout, training_row=row)
                parts, lost = as_rows(rollout) if self.maker.holds is Holds.ROWS else as_calls(rollout, facts)
            except RecordError as error:
                tally.refuse(rollout.place, str(error))
                continue
            tally.lose(() if self.maker.tokens_only else lost, rollout.place)
            if len(parts) > 1:
                tally.forked += 1
                tally.repeated.update(() if self.maker.tokens_only else facts.keys())
            for part in parts:
                own = {name: value for name, value in facts.items() if name not in part.used_facts}
                yield key, builder.sample(part.rollout, {**own, **part.facts})

    def _joined(
        self, rollout: Rollout, calls: CallsOfConversation, builder: RowBuilder
    ) -> Iterator[tuple[object, MakerInput]]:
        """The samples that a joined conversation becomes; each keeps what all of its calls say."""
        tally, place = builder.tally, rollout.place
        tally.rollouts += 1
        tally.joined += 1
        calls, rollout = calls.with_ids(rollout, tally.refuse)
        if not rollout.turns:
            return
        try:
            if self.maker.holds is Holds.ROWS:
                parts, lost = calls.as_rows(rollout)
            else:
                parts, lost = calls.as_calls(rollout, self.maker.own_of_calls)
        except RecordError as error:
            tally.refuse(place, str(error))
            return
        tally.lose(() if self.maker.tokens_only else lost, place)
        tally.forked += len(parts) > 1
        for part in parts:
            facts = _facts_with_stated(part.facts, part.rollout, None)
            yield _group_key(facts, place), builder.sample(part.rollout, facts, part.of_calls)


def convert_rollouts(
    logs: str | Path | Sequence[str | Path],
    to: str,
    out: str | Path | None = None,
    settings: Settings | None = None,
    *,
    lossy: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Logs converted to the form `to` (`rows`, `calls`, `atropos_group`, …) and written to `out`, if given.

    Its `carried` says what happened to every row. RecordError, and nothing is written, when something would be
    lost and `lossy` is False; with `lossy`, rows that cannot be converted are left out.
    """
    conversion = Conversion(logs, to, out, settings, overwrite=overwrite, progress=progress)
    for _ in conversion.survey():
        pass
    if out is None:
        return conversion
    carried = conversion.carried
    if not carried.lossless and not lossy:
        what = [*carried.lost, *([f"{carried.not_converted} rollouts"] if carried.not_converted else [])]
        raise RecordError(
            f"{conversion.named}: as {to} these would be lost, so nothing was written: {', '.join(what)}.\n"
            "Convert it with lossy=True to leave them out."
        )
    if carried.rows_read and not carried.rows_made:
        whose = "its" if len(conversion.logs) == 1 else "their"
        raise RecordError(
            f"{conversion.named}: none of {whose} rows can be converted to {to}, so nothing was written."
        )
    for _ in conversion.write():
        pass
    return conversion


def _facts_with_stated(facts: Mapping[str, Any], rollout: Rollout, row: int | None) -> dict[str, Any]:
    """The facts with the stated model and tokenizer, and with `group_id`: the stated group, else `row`."""
    stated = rollout.stated
    named = {"model": stated.model, "tokenizer": stated.tokenizer}
    more: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if not any(name in facts for name in GROUPS):
        group = row if stated.group is None else stated.group
        if group is not None:
            more["group_id"] = group
    return {**more, **facts}


def _group_key(facts: Mapping[str, Any], place: Place) -> object:
    """The key that adjacent samples of a group share; the same group number in another log is another group."""
    group = next((facts[name] for name in GROUPS if facts.get(name) is not None), None)
    return ("row", place) if group is None else ("group", place.file, repr(group))
