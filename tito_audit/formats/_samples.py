"""Rows that are one sample or hold several: read, and written back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._calls import CALL_LISTS, call_turn, updated_call
from tito_audit.formats._columns import FLAT_IDS, RESPONSE_MASKS, filled, first_list, is_list, parsed, plain
from tito_audit.formats._facts import stated_facts, with_finishes
from tito_audit.formats._flat import flat_row, split_row, updated_flat
from tito_audit.formats._update import at_most_one_each, with_values
from tito_audit.formats._values import as_logged
from tito_audit.record.message import Message, as_messages, as_tools
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn, as_training_row
from tito_audit.record.sources import CallSource, Source, Sources

ReadSample = Callable[[Row, Place], Rollout]
UpdateSample = Callable[[Row, Rollout, RepairedRollout], Row]


@dataclass(frozen=True, slots=True)
class Samples:
    """A row that holds several samples, split into them."""

    rows: tuple[Row, ...]
    """Each sample as a row of its own."""
    source: Callable[[int, str], Source | None]
    """Where the whole row stores a column of a sample; None if all samples share it."""
    ids: str = ""
    """The column of ids; entries of a column that a sample lost become null, one for each id."""
    finished: Callable[[Row, Row, Sequence[Row]], Row] = lambda old, new, samples: new
    """Updates what the row says about its samples, from the old row, the new one and the new samples."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The `read`, `sources` and `update` of a format whose rows are one sample or hold several."""

    read_one: ReadSample
    write_one: UpdateSample
    split: Callable[[Row], Samples | None] = lambda row: None
    """The samples of a row; None if it is one sample."""
    forks: bool = False
    """Whether each part of a fork is a row."""

    def read(self, row: Row, place: Place) -> Sequence[Rollout]:
        """One rollout for each sample."""
        samples = self.split(row)
        return (
            (self.read_one(row, place),) if samples is None else _samples_read(samples.rows, place, self.read_one)
        )

    def sources(self, row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
        """Where the row stores the columns of its samples."""
        return sources_in(self.split(row) or Samples((row,), lambda _, name: Source((name,))), rollouts)

    def update(self, row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
        """The row with its repaired samples, or a row for each part of a fork."""
        if not repaired:
            return ()
        samples, place = self.split(row), repaired[0].rollout.place
        if samples is None:
            before = self.read_one(row, place)
            ones = repaired if self.forks else at_most_one_each([before], repaired)
            return tuple(self.write_one(row, before, one) for one in ones)
        read = _samples_read(samples.rows, place, self.read_one)
        chosen = at_most_one_each(read, repaired)
        new = [self.write_one(*each) for each in zip(samples.rows, read, chosen, strict=True)]
        made = put_back(row, samples, new, samples.ids)
        return (row if made is row else samples.finished(row, made, new),)


def training_rows(
    read_one: ReadSample, written: Callable[[Row, TrainingRow, TrainingRow], Row], what: str = "this format's row"
) -> SampleRows:
    """The functions of a format whose rows are training rows; `written` gets the row, before and after."""

    def write_one(row: Row, before: Rollout, one: RepairedRollout) -> Row:
        old, new = before.training_row, one.rollout.training_row
        if old is not None and new is not None:
            return written(row, old, new)
        if old is not new:
            raise RecordError(f"a training row can neither be added to {what} nor removed")
        return row

    return SampleRows(read_one, write_one)


def single_calls(read_one: ReadSample, *skip: str) -> SampleRows:
    """The functions of a format with one call per row; the columns in `skip` belong to something else."""

    def write_one(row: Row, before: Rollout, one: RepairedRollout) -> Row:
        if one.turns_from != (0,):
            raise RecordError("the row is a single call, which cannot be removed")
        return updated_call(row, before.turns[0], one.rollout.turns[0], skip=skip)

    return SampleRows(read_one, write_one)


def sources_in(samples: Samples, rollouts: Sequence[Rollout]) -> list[Sources]:
    """Where a row stores the columns of its samples. Next to training rows, a mask that trains a whole sample
    marks a call."""
    mixed = any(rollout.training_row is not None for rollout in rollouts)
    found = []
    for number, rollout in enumerate(rollouts):
        names = [column.name for one in (rollout.training_row, *rollout.turns) if one for column in one.columns]
        there = {name: source for name in names if (source := samples.source(number, name)) is not None}
        columns = {name: (source,) for name, source in there.items()}
        mask = first_list(samples.rows[number], RESPONSE_MASKS) if mixed and rollout.turns else None
        implied = samples.source(number, mask) if mask is not None else None
        calls = tuple(CallSource(columns=columns) for _ in rollout.turns)
        found.append(Sources(columns, calls, () if implied is None else (implied.path,)))
    return found


def put_back(row: Row, samples: Samples, new: Sequence[Row], ids: str) -> Row:
    """The row with its samples' changed columns put back; the same object if none changed.

    A column that a sample lost becomes null for each of its `ids`.
    """
    values: dict[str, Any] = {}
    parts: dict[str, list[tuple[int, int, list[Any]]]] = {}
    for number, (old, sample) in enumerate(zip(samples.rows, new, strict=True)):
        for name, value in sample.items():
            if name in old and value is old[name]:
                continue
            source = samples.source(number, name)
            if source is None:
                raise RecordError(f"column {name!r} is shared by all samples and cannot change for one of them")
            column, *place = source.path
            if source.part is not None:
                own = [None] * len(sample[ids]) if value is None else plain(value)
                parts.setdefault(str(column), []).append((*source.part, own))
            elif place:
                values.setdefault(str(column), list(row[str(column)]))[int(place[0])] = value
            else:
                values[str(column)] = value
    made = {name: _in_kind(value, row.get(name)) for name, value in values.items()}
    made |= {name: _spliced(row[name], changed) for name, changed in parts.items()}
    return with_values(row, made)


def _samples_read(samples: Iterable[Row], place: Place, read: ReadSample) -> tuple[Rollout, ...]:
    """One rollout for each sample; RecordError naming the one that cannot be read."""
    found = []
    for item, sample in enumerate(samples):
        try:
            found.append(read(sample, replace(place, item=item)))
        except RecordError as error:
            raise RecordError(f"sample {item}: {error}") from None
    return tuple(found)


def _spliced(original: Any, parts: Sequence[tuple[int, int, list[Any]]]) -> Any:
    """A list with some ranges of entries replaced."""
    entries = plain(original)
    for start, end, own in reversed(parts):
        entries[start:end] = own
    return as_logged([entry.item() if isinstance(entry, np.generic) else entry for entry in entries], original)


def _in_kind(values: Any, original: Any) -> Any:
    return np.array(values, original.dtype) if isinstance(original, np.ndarray) else values


# Batches: samples of trainers, with prompt and response ids and columns over the response, one list per sample


def is_batch(row: Row, name: str) -> bool:
    """True if the column holds a list of lists: one per sample."""
    value: Any = row.get(name)
    return filled(value) and (value[0] is None or is_list(value[0]))


def batch_samples(row: Row, ids: str) -> Samples | None:
    """The samples of a batch; None if the row is one sample.

    A sample has an entry of each list that is as long as the batch, and every value that is not a list.
    RecordError if a column of lists has another length.
    """
    if not is_batch(row, ids):
        return None
    size = len(row[ids])
    for name, value in row.items():
        nested = filled(value) and is_list(value[0])
        if nested and len(value) != size:
            raise RecordError(
                f"column {name!r} holds {len(value)} lists for {size} samples, so they cannot be matched"
            )
    columns = {name: value for name, value in row.items() if is_list(value) and len(value) == size}
    rest = {name: value for name, value in row.items() if not is_list(value)}
    samples = [{**rest, **{name: value[number] for name, value in columns.items()}} for number in range(size)]
    return Samples(tuple(samples), lambda number, name: Source((name, number)) if name in columns else None, ids)


def sample_rollout(
    row: Row, place: Place, format_name: str, names: Collection[str], *, prompt: object = None
) -> Rollout:
    """A sample in the columns that `generic` reads: a training row, or one call that is trained as a whole.

    `names` are the columns of ids; a sample with no entry in any of them needs no ids. `prompt` holds the
    prompt's messages, if the log keeps them next to the columns.
    """
    flat = any(is_list(row.get(name)) for name in FLAT_IDS)
    trained: TrainingRow | None = flat_row(row, has_calls=False) if flat else split_row(row)
    messages, asked = _messages(row, prompt)
    turns: tuple[Turn, ...] = ()
    stated = stated_facts(row)
    if not any(filled(row.get(name)) for name in names):
        stated = stated.without_ids()
    elif trained is None:
        plain = {name: value for name, value in row.items() if name not in ("messages", *FLAT_IDS)}
        whole = with_finishes(split_row(row, of_one_call=True), row)
        turns = (replace(call_turn(plain, prompt_messages=asked or None), as_row=whole),)
    tools = as_tools(parsed(row, "tools"), "tools")
    return Rollout(
        place, format_name, messages, tools, turns=turns, training_row=with_finishes(trained, row), stated=stated
    )


def updated_sample(row: Row, before: Rollout, one: RepairedRollout) -> Row:
    """The sample with the columns of its repaired rollout: a training row, or a call."""
    if before.turns and not one.rollout.turns and before.turns[0].as_row is not None:
        before = as_training_row(before)
    if one.turns_from != tuple(range(len(before.turns))):
        raise RecordError("the call is all of its row or sample, so it cannot be removed")
    new: Row = row
    for old_turn, turn in zip(before.turns, one.rollout.turns, strict=True):
        new = updated_call(new, old_turn, turn, skip=("messages", *FLAT_IDS))
    return with_training_row(new, before, one, has_turn=bool(before.turns))


def with_training_row(row: Row, before: Rollout, one: RepairedRollout, *, has_turn: bool = False) -> Row:
    """The row with the columns of its repaired training row; with `has_turn`, others belong to its one call."""
    old, new = before.training_row, one.rollout.training_row
    if old is not None and new is not None:
        return updated_flat(row, old, new, skip=(*CALL_LISTS, "messages", "tools"), has_turn=has_turn)
    if old is not new:
        raise RecordError("a training row can neither be added to these columns nor removed")
    return row


def _messages(row: Row, prompt: object) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """All messages of a sample, if they include its answers, and the messages of its prompt."""
    found = as_messages(parsed(row, "messages"), "messages")
    if found and any(not message.given for message in found):
        return found, ()
    asked = found or as_messages(prompt, "prompt")
    return asked, asked
