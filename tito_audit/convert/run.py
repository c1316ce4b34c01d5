"""Converts logs: calls to training rows, training rows to calls, one format to another.

Every row is made, read back and compared before the first is written, so losses are known up front.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tito_audit.convert.compare import CallsOfConversation
from tito_audit.convert.makers import Holds, MakerInput
from tito_audit.convert.rows import GROUPS, ConversionOutcome, RowBuilder, digest_of, maker_named
from tito_audit.convert.rows_and_calls import as_calls, as_rows
from tito_audit.convert.unread import row_facts
from tito_audit.errors import RecordError, SetupError, StorageError
from tito_audit.evidence.reference import Reference
from tito_audit.format import Row
from tito_audit.join import calls_of, lines_of
from tito_audit.record.rollout import Place, Rollout, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.run.auditor import Loader
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import Progress
from tito_audit.run.rows import LogGroup
from tito_audit.settings.model import Settings
from tito_audit.sft.tokenized import as_sft_row, texts_of
from tito_audit.storage import find_logs, open_log, output_path, paths_of, same_place
from tito_audit.storage.atomic import refuse_target
from tito_audit.storage.inside import wrapper_keys
from tito_audit.storage.new_log import ColumnTypes, kind_of_name, new_log
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow
from tito_audit.summary import Summary


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
        self.logs = paths_of(logs)
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
        """Bytes of the logs at the survey: rows added later do not move the joined ones."""
        loader = Loader()
        self._auditor = cache(lambda file: loader.auditor(self.settings.at(file)))
        """What writes the messages of a log as ids."""
        self._shapes: ColumnTypes | None = None
        if self.out is not None and kind_of_name(self.out)[0] == "table":
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
            if any(same_place(self.out, file) for file in files):
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
            self._shapes.settle()
        summary = Summary()
        self._flow.say_joined(summary)
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
        with new_log(self.out, overwrite=self.overwrite, source=source, shapes=self._shapes) as target:
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
            self._compare(target.finish(), digests)
        self.written = self.out

    def _compare(self, draft: Path, digests: Sequence[int]) -> None:
        """Check that a file holds the rows that were made; StorageError if not."""
        if not digests:
            return
        read = 0
        for raw in open_log(draft, max_row_bytes=1 << 62):
            if read >= len(digests) or digest_of(raw, self.form) != digests[read]:
                break
            read += 1
        else:
            if read == len(digests):
                return
        raise StorageError(
            f"{self.out}: row {read} of {len(digests)} did not read back as written, so the file was not "
            "kept.\nWrite it as .jsonl, or to another disk."
        )

    def _rows(self, tally: ConversionOutcome, flow: RowFlow) -> Iterator[tuple[Row | None, int, Place]]:
        """The proven rows of the new log, each with its digest; and None after each row of the old logs."""
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
        """The rows of all logs, calls joined, counted as they pass."""
        total, done = flow.size, 0
        for file in flow.files:
            group = flow.groups[str(file)]
            log = group.open(file)
            for raw in group.rows(log):
                tally.rows_read += len(lines_of(raw))
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
            read = reader.read(raw, place)
            rollouts = tuple(with_speakers(rollout, speakers) for rollout in read.rollouts)
            if (joined := calls_of(raw)) is not None:
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
            facts = _with_stated(own_facts, rollout, place.row if several else None)
            key = ("row", place) if several else _group_key(facts, place)
            yield from ((key, sample) for sample in self._converted(rollout, facts, builder, read.row))

    def _converted(
        self, rollout: Rollout, facts: Mapping[str, Any], builder: RowBuilder, row: Mapping[str, Any]
    ) -> Iterator[MakerInput]:
        """The samples that a rollout of a row becomes."""
        tally = builder.tally
        try:
            if self.maker.tokens_only and not rollout.turns and rollout.training_row is None:
                auditor, _ = self._auditor(rollout.place.file)
                reference = None if auditor.tokenizer is None else Reference(auditor.tokenizer, auditor.renderer)
                rollout = replace(rollout, training_row=as_sft_row(rollout, reference, texts_of(row)))
            parts, lost = as_rows(rollout) if self.maker.holds is Holds.ROWS else as_calls(rollout, facts)
        except RecordError as error:
            tally.refuse(rollout.place, str(error))
            return
        tally.lose(() if self.maker.tokens_only else lost, rollout.place)
        if len(parts) > 1:
            tally.forked += 1
            tally.repeated.update(() if self.maker.tokens_only else facts.keys())
        for part in parts:
            own = {name: value for name, value in facts.items() if name not in part.used_facts}
            yield builder.sample(part.rollout, {**own, **part.facts})

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
            facts = _with_stated(part.facts, part.rollout, None)
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


def _with_stated(facts: Mapping[str, Any], rollout: Rollout, row: int | None) -> dict[str, Any]:
    """The facts with the log's model and tokenizer and, for several rollouts of a row, the row as their group."""
    stated = rollout.stated
    named = {"model": stated.model, "tokenizer": stated.tokenizer}
    more: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if not any(name in facts for name in GROUPS):
        group = row if stated.group is None else stated.group
        if group is not None:
            more["group_id"] = group
    return {**more, **facts}


def _group_key(facts: Mapping[str, Any], place: Place) -> object:
    """What adjacent samples of a group share; the same group number in another log is another group."""
    group = next((facts[name] for name in GROUPS if facts.get(name) is not None), None)
    return ("row", place) if group is None else ("group", place.file, repr(group))
