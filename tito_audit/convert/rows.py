"""Rows made from samples, each read back to prove that tokens, mask and logprobs are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tito_audit.convert.compare import difference, digest, lost_names
from tito_audit.convert.makers import MAKERS, Maker, MakerInput
from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format, Row
from tito_audit.formats import all_formats, pick_format
from tito_audit.record.column import Column, ColumnRole
from tito_audit.record.rollout import Place, Rollout, TrainingRow, seen_by_loss
from tito_audit.storage.row import RawRow, dump_row, parse_json
from tito_audit.unknown import unknown

GROUPS = ("group_id", "group", "group_index", "_ng_task_index")
"""Keys under which logs group the rollouts that were sampled for the same prompt."""


def all_makers() -> dict[str, tuple[Format, Maker]]:
    """Every maker by its name for `--to`, with the format that reads its rows."""
    return {maker.name: (form, maker) for form in all_formats() for maker in makers_of(form)}


def makers_of(form: Format) -> tuple[Maker, ...]:
    """The makers of a format's rows; () when they cannot be made."""
    return tuple(maker for maker in MAKERS if maker.format == form.name)


def maker_named(name: str) -> tuple[Format, Maker]:
    """The format and the maker of that name; SetupError with the known names when there is none."""
    makers = all_makers()
    if name in makers:
        return makers[name]
    form = next((form for form in all_formats() if form.name == name), None)
    if form is None:
        raise unknown("form", name, makers, flag="--to")
    if makers_of(form):
        why = f"choose one of its forms: {' or '.join(maker.name for maker in makers_of(form))}."
    else:
        why = f"{form.title} can be read and repaired, but not made: they hold what only their own writer knows."
    raise SetupError(f"--to {name}: {why}\nForms that can be made: {', '.join(makers)}.")


@dataclass(slots=True)
class RowBuilder:
    """Builds the rows of one pass over a log."""

    form: Format
    maker: Maker
    tally: ConversionOutcome
    excluded: set[str] = field(default_factory=set)
    """Facts and columns with which a row of this form would be read as something else."""

    def sample(
        self, rollout: Rollout, facts: Mapping[str, Any], of_calls: Sequence[Mapping[str, Any]] = ()
    ) -> MakerInput:
        """The rollout with the facts that its row has a place for; all others are counted as lost."""
        if self.maker.tokens_only:
            row = rollout.training_row
            bare = None if row is None else TrainingRow(row.token_ids, seen_by_loss(row), None)
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
        """The row of one sample or of a group, with its digest; None when no sample is left.

        Samples that it cannot hold are recorded as refused.
        """
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
        return new_row, digest(again)

    def _fitted(self, sample: MakerInput) -> tuple[MakerInput, Row, Sequence[Rollout]]:
        """The sample without the facts and columns that make its row unreadable in its format; and its row."""
        sample = self._without(sample, self.excluded)
        try:
            return sample, *self._proven([sample])
        except RecordError:
            names = _names(sample, self.maker)
            # What fails even without them fails for another reason.
            self._proven([_stripped(sample, names)])
        harmless: set[str] = set()
        for name in names:
            try:
                self._proven([_stripped(sample, {*names} - harmless - {name})])
                harmless.add(name)
            except RecordError:
                self.excluded.add(name)
        sample = self._without(sample, self.excluded)
        return sample, *self._proven([sample])

    def _without(self, sample: MakerInput, names: Collection[str]) -> MakerInput:
        present = [name for name in _names(sample, self.maker) if name in names] if names else []
        self.tally.lose(present, sample.rollout.place)
        return _stripped(sample, present) if present else sample

    def _proven(self, samples: Sequence[MakerInput]) -> tuple[Row, Sequence[Rollout]]:
        """A row, and the rollouts read back from it; RecordError when they differ."""
        row = self.maker.make(samples)
        back = parse_json(dump_row(row))
        form = pick_format(back)
        if form.name != self.form.name:
            raise RecordError(f"its row would be read as {form.name}, because it has that format's columns too")
        again = form.read(back, samples[0].rollout.place)
        if len(again) != len(samples):
            raise RecordError(f"its row would be read as {len(again)} rollouts")
        for sample, rollout in zip(samples, again, strict=True):
            what = difference(sample.rollout, rollout)
            if what is not None:
                raise RecordError(f"its row would read back with {what}")
        return row, again


def digest_of(raw: RawRow, form: Format) -> int | None:
    """The digest of a row's rollouts; None when it cannot be read as a row of the format."""
    if raw.value is None:
        return None
    try:
        if pick_format(raw.value).name != form.name:
            return None
        return digest(form.read(raw.value, Place("", raw.index)))
    except RecordError:
        return None


def _names(sample: MakerInput, maker: Maker) -> list[str]:
    """The facts and columns that a row can do without."""
    slots = set(maker.slots.values())
    names = [name for facts in (sample.facts, *sample.of_calls) for name in facts if name not in slots]
    row = sample.rollout.training_row
    columns = [] if row is None else list(row.columns)
    columns += [column for turn in sample.rollout.turns for column in turn.columns]
    names += [column.name for column in columns if column.role is ColumnRole.OTHER]
    return list(dict.fromkeys(names))


def _stripped(sample: MakerInput, names: Collection[str]) -> MakerInput:
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


_NAMED = 1000
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
    """What the new form has a place for but the log lacks, by rollouts that lack it; no value is made up."""
    forked: int = 0
    """Rollouts that became several rows because their calls do not all continue one another."""
    refused: list[tuple[Place, str]] = field(default_factory=list)
    """The first rows and rollouts that could not be read or converted, with the reason."""
    not_converted: int = 0
    """How many there are in total."""
    _last: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        return not self.lost and not self.not_converted

    def lose(self, names: Iterable[str], place: Place) -> None:
        """Note what a row of a log loses; rows come in order."""
        row = place.file, place.row
        for name in names:
            if self._last.get(name) != row:
                self._last[name] = row
                self.lost[name] = self.lost.get(name, 0) + 1

    def refuse(self, place: Place, reason: str) -> None:
        """Note a row or rollout that is left out, with the reason."""
        self.not_converted += 1
        if len(self.refused) < _NAMED:
            self.refused.append((place, reason))
