"""A log converted: calls to training rows, training rows to calls, one format to another.

Every row is made, read back and compared before the first is written, so that what would be lost is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tito_audit.convert.maker import Holds, Sample
from tito_audit.convert.outcome import ConversionOutcome
from tito_audit.convert.rows import GROUPS, RowBuilder, digest_of, maker_named
from tito_audit.convert.rows_and_calls import as_calls, as_rows
from tito_audit.convert.unread import row_facts
from tito_audit.errors import RecordError, SetupError, StorageError
from tito_audit.format import Row
from tito_audit.record.rollout import Place, Rollout, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.run.progress import Progress
from tito_audit.run.rows import LogGroup
from tito_audit.settings.model import Settings
from tito_audit.storage import find_logs, open_log, same_place
from tito_audit.storage.atomic import refuse_target
from tito_audit.storage.inside import wrapper_keys
from tito_audit.storage.new_log import ColumnTypes, kind_of_name, new_log
from tito_audit.storage.row import RawRow


class Conversion:
    """The conversion of one log: `survey` finds what would be lost, `write` writes.

    Creating one opens no file. SetupError when there is no such form, or the target's kind of file cannot hold it.
    """

    def __init__(
        self,
        log: str | Path,
        to: str,
        out: str | Path | None = None,
        settings: Settings | None = None,
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.log = Path(log)
        self.form, self.maker = maker_named(to)
        self.out = Path(out) if out is not None else None
        self.settings = (settings or Settings()).at(log)
        if self.settings.messages is not None or self.settings.tools is not None:
            raise SetupError(
                "A conversion does not join messages or tools from other files.\nLeave out --messages and --tools."
            )
        self.overwrite = overwrite
        self.progress = progress
        self.carried = ConversionOutcome()
        """What the survey found."""
        self.written: Path | None = None
        """The new log, once it has its name."""
        self._shapes: ColumnTypes | None = None
        if self.out is not None and kind_of_name(self.out)[0] == "table":
            self._shapes = ColumnTypes()
            if not self.maker.tables:
                raise SetupError(
                    f"{self.out}: rows of {self.maker.name} hold objects inside objects, which a table changes.\n"
                    "Name it .jsonl or .json."
                )

    def survey(self) -> Iterator[Place]:
        """The places of the log's rows as they are converted; then `carried` is complete. Nothing is written.

        StorageError when the log cannot be read, or the target exists and may not be replaced.
        """
        self.log = _one_file(self.log)
        if self.out is not None:
            if same_place(self.out, self.log):
                raise SetupError(
                    f"-o {self.out}: this is the log, and a log is never overwritten.\nName another file."
                )
            refuse_target(self.out, overwrite=self.overwrite, source=self.log)
        self.carried = ConversionOutcome()
        for row, _, place in self._rows(self.carried):
            if row is not None and self._shapes is not None:
                self._shapes.learn(row)
            yield place
        if self._shapes is not None:
            self._shapes.settle()

    def write(self) -> Iterator[Place]:
        """The places of the log's rows as they are written; then the file has its name. Call it after `survey`.

        The file is read back and compared first; StorageError when that fails, and nothing is left of it.
        """
        if self.out is None:
            raise ValueError("a conversion without a target has nothing to write")
        digests, again = array("Q"), ConversionOutcome()
        with new_log(self.out, overwrite=self.overwrite, source=self.log, shapes=self._shapes) as target:
            for row, number, place in self._rows(again):
                if row is not None:
                    target.add(row)
                    digests.append(number)
                yield place
            if again != self.carried:
                raise StorageError(
                    f"{self.log}: the log changed while it was converted, so nothing was written.\n"
                    "Convert it when nothing writes to it any more."
                )
            self._compare(target.finish(), digests)
        self.written = self.out

    def _compare(self, draft: Path, digests: Sequence[int]) -> None:
        """Check that a file holds the rows that were made; StorageError if not."""
        read = 0
        if digests:
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

    def _rows(self, tally: ConversionOutcome) -> Iterator[tuple[Row | None, int, Place]]:
        """The proven rows of the new log, each with its digest; and None after each row of the old log."""
        reader, builder = LogGroup(self.settings), RowBuilder(self.form, self.maker, tally)
        log = reader.open(self.log)
        group: list[Sample] = []
        last: object = None
        place = Place(str(self.log), 0)
        for raw in log:
            place = Place(str(self.log), raw.index)
            tally.rows_read += 1
            for key, sample in self._samples(raw, place, reader, builder):
                if group and (not self.maker.grouped or key != last):
                    made = builder.row(group)
                    if made is not None:
                        yield *made, place
                    group = []
                group.append(sample)
                last = key
            if self.progress is not None:
                self.progress(tally.rows_read, log.position, log.size)
            yield None, 0, place
        if group and (made := builder.row(group)) is not None:
            yield *made, place

    def _samples(
        self, raw: RawRow, place: Place, reader: LogGroup, builder: RowBuilder
    ) -> Iterator[tuple[object, Sample]]:
        """The rollouts of a row in the new form, each with the key of its group."""
        tally = builder.tally
        try:
            read, speakers = reader.read(raw, place), Speakers(self.settings.sampled_roles)
            rollouts = tuple(with_speakers(rollout, speakers) for rollout in read.rollouts)
        except RecordError as error:
            tally.refuse(place, str(error))
            return
        found = row_facts(read.row, rollouts, read.format.sources(read.row, read.rollouts))
        tally.lose(wrapper_keys(raw), place.row)
        tally.lose(found.unread, place.row)
        several = len(rollouts) > 1
        tally.repeated.update(found.shared if several and not self.maker.grouped else ())
        for rollout, said in zip(rollouts, found.facts, strict=True):
            tally.rollouts += 1
            facts = _with_stated(said, rollout, place.row if several else None)
            group = next((facts[name] for name in GROUPS if facts.get(name) is not None), None)
            key = ("row", place.row) if several or group is None else ("group", repr(group))
            yield from ((key, sample) for sample in self._converted(rollout, facts, builder))

    def _converted(self, rollout: Rollout, facts: Mapping[str, Any], builder: RowBuilder) -> Iterator[Sample]:
        """The samples that a rollout becomes."""
        tally = builder.tally
        try:
            converted = as_rows(rollout) if self.maker.holds is Holds.ROWS else as_calls(rollout, facts)
        except RecordError as error:
            tally.refuse(rollout.place, str(error))
            return
        tally.lose(converted.lost, rollout.place.row)
        if len(converted.parts) > 1:
            tally.forked += 1
            tally.repeated.update(facts.keys())
        for part in converted.parts:
            own = {name: value for name, value in facts.items() if name not in part.used_facts}
            yield builder.sample(part.rollout, {**own, **part.facts})


def convert_rollouts(
    log: str | Path,
    to: str,
    out: str | Path | None = None,
    settings: Settings | None = None,
    *,
    lossy: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """A log converted to the form `to` (`rows`, `calls`, `atropos_group`, …) and written to `out`, if given.

    Its `carried` says what became of every row. RecordError, and nothing is written, when something would be lost
    and `lossy` is False; with `lossy`, rows that cannot be converted are left out.
    """
    conversion = Conversion(log, to, out, settings, overwrite=overwrite, progress=progress)
    for _ in conversion.survey():
        pass
    if out is None:
        return conversion
    carried = conversion.carried
    if not carried.lossless and not lossy:
        what = [*carried.lost, *([f"{carried.not_converted} rollouts"] if carried.not_converted else [])]
        raise RecordError(
            f"{log}: as {to} these would be lost, so nothing was written: {', '.join(what)}.\n"
            "Convert it with lossy=True to leave them out."
        )
    if carried.rows_read and not carried.rows_made:
        raise RecordError(f"{log}: none of its rows can be converted to {to}, so nothing was written.")
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


def _one_file(log: Path) -> Path:
    """The one file that was named; SetupError unless it is one file that can be read twice."""
    files = find_logs([str(log)])
    if len(files) != 1:
        raise SetupError(f"{log}: these are {len(files)} logs, but one is converted at a time.\nName one of them.")
    if not files[0].is_file():
        raise SetupError(
            f"{files[0]}: this is a pipe or a device, which cannot be read twice; save it to a file first."
        )
    return files[0]
