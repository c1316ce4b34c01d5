"""The kit of formats: what reads a row and writes it back, made from the functions that are the format's own.

`training_rows` is for rows that are one training row, `single_calls` for rows that are one call, `batches` for
rows with one list per sample, `SampleRows` for all other rows of samples. A format passes a function that reads a
sample and one that writes it, and takes the `functions` made of them. A reader finds columns by their usual names
(`_columns.py`), a call by `read_turn` and what the row says about itself by `stated_facts` (`_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._calls import (
    CALL_LISTS,
    errors_at,
    read_turn,
    stated_facts,
    updated_call,
    with_finish_reasons,
)
from tito_audit.formats._columns import (
    FLAT_IDS,
    MASKS,
    RESPONSE_MASKS,
    ROW_LOGPROBS,
    SEGMENT_COLUMNS,
    as_logged,
    first_filled_name,
    first_list_name,
    has_entries,
    is_list,
    is_messages,
    is_number_list,
    names_in,
    parsed_column,
    to_list,
)
from tito_audit.formats._flat import read_flat_row, read_split_row, trained_by_mask, updated_flat_row
from tito_audit.formats._update import TOTAL_COUNTS, one_repair_each, with_counts, with_values
from tito_audit.formats._writer import RowFunctions
from tito_audit.record.arrays import Mask, as_floats
from tito_audit.record.message import Message, as_messages, as_tools
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn, with_call_as_row
from tito_audit.record.sources import CallSource, Source, Sources

ReadSample = Callable[[Row, Place], Rollout]
"""The rollout of a row that is one sample."""
UpdateSample = Callable[[Row, Rollout, RepairedRollout], Row]
"""The row of one sample with its repaired rollout, from the row, its rollout and the repaired one."""


@dataclass(frozen=True, slots=True)
class Samples:
    """A row that holds several samples, split into them."""

    rows: tuple[Row, ...]
    """Each sample as a row of its own."""
    source: Callable[[int, str], Source | None]
    """Where the whole row stores a column of the sample with this number; None if all samples share it."""
    ids: str = ""
    """The column of ids. A column that a sample lost gets a null for each of its ids."""
    with_totals: Callable[[Row, Row, Sequence[Row]], Row] = lambda old, new, samples: new
    """The written row with what it says of all samples, from the old row, the written one and the new samples."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The `read`, `sources` and `update` of a format whose rows are one sample or hold several."""

    read_one: ReadSample
    write_one: UpdateSample
    split: Callable[[Row], Samples | None] = lambda row: None
    """The samples of a row; None if it is one sample."""
    forks: bool = False
    """Whether a fork becomes several rows, one for each part; else it is refused."""

    def read(self, row: Row, place: Place) -> Sequence[Rollout]:
        """One rollout for each sample."""
        samples = self.split(row)
        return (self.read_one(row, place),) if samples is None else self._read_each(samples, place)

    def sources(self, row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
        """Where the row stores the columns of its samples."""
        return sample_sources(self.split(row) or Samples((row,), lambda _, name: Source((name,))), rollouts)

    def update(self, row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
        """The row with its repaired samples, or a row for each part of a fork."""
        if not repaired:
            return ()
        samples, place = self.split(row), repaired[0].rollout.place
        if samples is None:
            before = self.read_one(row, place)
            parts = repaired if self.forks else one_repair_each([before], repaired)
            return tuple(self.write_one(row, before, part) for part in parts)
        rollouts = self._read_each(samples, place)
        parts = one_repair_each(rollouts, repaired)
        new = [self.write_one(*each) for each in zip(samples.rows, rollouts, parts, strict=True)]
        updated = with_changed_samples(row, samples, new)
        return (row if updated is row else samples.with_totals(row, updated, new),)

    def _read_each(self, samples: Samples, place: Place) -> tuple[Rollout, ...]:
        """One rollout for each sample; RecordError naming the one that cannot be read."""
        rollouts = []
        for item, sample in enumerate(samples.rows):
            with errors_at(f"sample {item}"):
                rollouts.append(self.read_one(sample, replace(place, item=item)))
        return tuple(rollouts)

    @property
    def functions(self) -> RowFunctions:
        """The three functions, as the arguments of a Format."""
        return RowFunctions(read=self.read, sources=self.sources, update=self.update)


def training_rows(
    read_one: ReadSample, write: Callable[[Row, TrainingRow, TrainingRow], Row], what: str = "this format's row"
) -> SampleRows:
    """Rows that are one training row each; `write` gets the row, its old and its new training row."""

    def write_one(row: Row, before: Rollout, after: RepairedRollout) -> Row:
        old, new = before.training_row, after.rollout.training_row
        if old is not None and new is not None:
            return write(row, old, new)
        if old is not new:
            raise RecordError(f"a training row can neither be added to {what} nor removed")
        return row

    return SampleRows(read_one, write_one)


def single_calls(read_one: ReadSample, *skip: str) -> SampleRows:
    """Rows that are one call each; columns in `skip` belong to something else and never change."""

    def write_one(row: Row, before: Rollout, after: RepairedRollout) -> Row:
        if after.turns_from != (0,):
            raise RecordError("the row is a single call, which cannot be removed")
        return updated_call(row, before.turns[0], after.rollout.turns[0], skip=skip)

    return SampleRows(read_one, write_one)


def batches(read_one: ReadSample, write_one: UpdateSample, ids: str) -> SampleRows:
    """Rows with a list per sample in the column `ids`; a row with a flat list there is one sample."""
    return SampleRows(read_one, write_one, partial(split_batch, ids=ids))


def sample_sources(samples: Samples, rollouts: Sequence[Rollout]) -> list[Sources]:
    """Where a row stores the columns of its samples.

    Beside training rows, a sample that is a call has its mask as an implied column: it trains the whole call.
    """
    mixed = any(rollout.training_row is not None for rollout in rollouts)
    sources = []
    for number, rollout in enumerate(rollouts):
        names = [column.name for part in (rollout.training_row, *rollout.turns) if part for column in part.columns]
        there = {name: source for name in names if (source := samples.source(number, name)) is not None}
        columns = {name: (source,) for name, source in there.items()}
        mask = first_list_name(samples.rows[number], RESPONSE_MASKS) if mixed and rollout.turns else None
        implied = samples.source(number, mask) if mask is not None else None
        calls = tuple(CallSource(columns=columns) for _ in rollout.turns)
        sources.append(Sources(columns, calls, () if implied is None else (implied.path,)))
    return sources


def with_changed_samples(row: Row, samples: Samples, new: Sequence[Row]) -> Row:
    """The row with the changed columns of its samples; the same object if none changed."""
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
                own = [None] * len(sample[samples.ids]) if value is None else to_list(value)
                parts.setdefault(str(column), []).append((*source.part, own))
            elif place:
                values.setdefault(str(column), list(row[str(column)]))[int(place[0])] = value
            else:
                values[str(column)] = value
    columns: dict[str, Any] = {}
    for name, value in values.items():
        logged = row.get(name)
        columns[name] = np.array(value, logged.dtype) if isinstance(logged, np.ndarray) else value
    for name, changed in parts.items():
        entries = to_list(row[name])
        for start, end, own in reversed(changed):
            entries[start:end] = own
        whole = [entry.item() if isinstance(entry, np.generic) else entry for entry in entries]
        columns[name] = as_logged(whole, row[name])
    return with_values(row, columns)


def is_batch(row: Row, name: str) -> bool:
    """Whether the column holds a list per sample."""
    value: Any = row.get(name)
    return has_entries(value) and (value[0] is None or is_list(value[0]))


def split_batch(row: Row, ids: str) -> Samples | None:
    """The samples of a batch; None if the row is one sample.

    A sample has its entry of each list that is as long as the batch, and shares every value that is not a list.
    RecordError if a column of lists has another length.
    """
    if not is_batch(row, ids):
        return None
    size = len(row[ids])
    for name, value in row.items():
        nested = has_entries(value) and is_list(value[0])
        if nested and len(value) != size:
            raise RecordError(
                f"column {name!r} holds {len(value)} lists for {size} samples, so they cannot be matched"
            )
    columns = {name: value for name, value in row.items() if is_list(value) and len(value) == size}
    rest = {name: value for name, value in row.items() if not is_list(value)}
    samples = [{**rest, **{name: value[number] for name, value in columns.items()}} for number in range(size)]
    return Samples(tuple(samples), lambda number, name: Source((name, number)) if name in columns else None, ids)


def read_sample(row: Row, place: Place, format: str, names: Collection[str], *, prompt: object = None) -> Rollout:
    """The rollout of a sample in the columns that `generic` reads: a training row, or one call trained as a whole.

    `names` are the columns of ids; a sample with no entry in any of them needs no ids. Its messages include its
    answers, or are only its prompt, which some logs keep apart as `prompt`.
    """
    flat = any(is_list(row.get(name)) for name in FLAT_IDS)
    trained: TrainingRow | None = read_flat_row(row, has_calls=False) if flat else read_split_row(row)
    messages = as_messages(parsed_column(row, "messages"), "messages")
    if messages and any(not message.known_unsampled for message in messages):
        prompt_messages: tuple[Message, ...] = ()
    else:
        messages = prompt_messages = messages or as_messages(prompt if is_messages(prompt) else None, "prompt")
    turns: tuple[Turn, ...] = ()
    stated = stated_facts(row)
    if not any(has_entries(row.get(name)) for name in names):
        stated = stated.without_ids()
    elif trained is None:
        plain = {name: value for name, value in row.items() if name not in ("messages", *FLAT_IDS)}
        whole = with_finish_reasons(read_split_row(row, of_one_call=True), row)
        turns = (replace(read_turn(plain, prompt_messages=prompt_messages or None), as_row=whole),)
    tools = as_tools(parsed_column(row, "tools"), "tools")
    return Rollout(
        place,
        format,
        messages,
        tools,
        turns=turns,
        training_row=with_finish_reasons(trained, row),
        stated=stated,
    )


def updated_sample(row: Row, before: Rollout, after: RepairedRollout) -> Row:
    """The sample with the columns of its repaired training row or call."""
    if before.turns and not after.rollout.turns and before.turns[0].as_row is not None:
        before = with_call_as_row(before)
    if after.turns_from != tuple(range(len(before.turns))):
        raise RecordError("the call is all of its row or sample, so it cannot be removed")
    new: Row = row
    for old_turn, turn in zip(before.turns, after.rollout.turns, strict=True):
        new = updated_call(new, old_turn, turn, skip=("messages", *FLAT_IDS))
    return with_updated_training_row(new, before, after, has_turn=bool(before.turns))


def with_updated_training_row(row: Row, before: Rollout, after: RepairedRollout, *, has_turn: bool = False) -> Row:
    """The row with the columns of its repaired training row; with `has_turn`, others belong to its call."""
    old, new = before.training_row, after.rollout.training_row
    if old is not None and new is not None:
        return updated_flat_row(row, old, new, skip=(*CALL_LISTS, "messages", "tools"), has_turn=has_turn)
    if old is not new:
        raise RecordError("a training row can neither be added to these columns nor removed")
    return row


_SINGULAR = {"prompt_lengths": "prompt_length", "response_lengths": "response_length", "prompt_lens": "prompt_len"}
"""Lists with one number per sample, and the name of that number in a sample."""
_CONVERSATIONS = ("messages", "prompt", "completion")
_LISTS_OF_SAMPLES = frozenset((*_CONVERSATIONS, "tools", *MASKS, *ROW_LOGPROBS, *FLAT_IDS))
"""Columns that hold a list or null for each sample, if they hold an entry for each."""
SampleRanges: TypeAlias = tuple[tuple[int, int], ...]
"""The range `[start, end)` of each sample, in order; tokens outside of all ranges are padding."""
LENGTH_COLUMNS = names_in(
    """seq_lens seqlens seq_lengths sequence_lengths sequence_lens sample_lengths sample_lens packed_lengths
    doc_lens doc_lengths document_lengths"""
)
"""Column names for how many tokens each sample of a row has."""
BOUND_COLUMNS = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k")
"""Column names for where the samples of a row end, counted from the row's start."""
_ATTENTION_MASK = "attention_mask"
"""Some packers number the samples in it, counting from 1."""
_Integers: TypeAlias = NDArray[np.int64]


def split_packed_row(row: Row) -> Samples | None:
    """The samples of a packed row, None if it is not packed; RecordError if columns disagree where samples end."""
    ids = first_filled_name(row, FLAT_IDS)
    if ids is None or not len(row[ids]):
        return None
    bounds = find_sample_ranges(row, ids)
    if bounds is None:
        return None
    per_token: dict[str, SampleRanges] = {}
    per_sample: dict[str, str] = {}
    shared: dict[str, Any] = {}
    for name, value in row.items():
        if name in LENGTH_COLUMNS or name in BOUND_COLUMNS:
            continue
        if (ranges := _column_ranges(row, name, ids, bounds)) is not None:
            per_token[name] = ranges
            continue
        if name in _CONVERSATIONS:
            value = parsed_column(row, name)
        if (
            is_list(value)
            and len(value) == len(bounds)
            and (name not in _LISTS_OF_SAMPLES or all(entry is None or is_list(entry) for entry in value))
        ):
            per_sample[_SINGULAR.get(name, name)] = name
        elif name in MASKS or name in ROW_LOGPROBS:
            if value is not None:
                # A mask or logprobs that do not fit the samples: read as one sample, so that a rule can report it.
                flat_columns = {name: value for name, value in row.items() if name not in _CONVERSATIONS}
                with_totals = partial(_with_new_boundaries, ids, ((0, len(row[ids])),))
                return Samples((flat_columns,), lambda _, name: Source((name,)), ids, with_totals)
        elif name == "tools" or (
            # A single value applies to each sample, except numbers, which count or score all of them.
            (value is None or isinstance(value, str | bool | Mapping) or name.startswith("group"))
            and not is_list(value)
            and name not in _CONVERSATIONS
        ):
            shared[name] = value
    lists = {
        name: to_list(parsed_column(row, logged) if logged in _CONVERSATIONS else row[logged])
        for name, logged in per_sample.items()
    }
    samples = []
    for number in range(len(bounds)):
        tokens = {name: row[name][slice(*ranges[number])] for name, ranges in per_token.items()}
        samples.append({**shared, **tokens, **{name: entries[number] for name, entries in lists.items()}})

    def source(number: int, name: str) -> Source | None:
        if name in per_token:
            return Source((name,), part=per_token[name][number])
        return Source((per_sample[name], number)) if name in per_sample else None

    return Samples(tuple(samples), source, ids, partial(_with_new_boundaries, ids, bounds))


def _with_new_boundaries(ids: str, ranges: SampleRanges, old: Row, new: Row, samples: Sequence[Row]) -> Row:
    """The written row with new lengths, bounds and counts of its samples; RecordError if these are unclear."""
    sizes = [len(sample[ids]) for sample in samples]
    old_sizes = [end - start for start, end in ranges]
    values: dict[str, Any] = {}
    if sizes != old_sizes:
        grown = np.cumsum([0, *(now - was for now, was in zip(sizes, old_sizes, strict=True))]).tolist()
        for name in LENGTH_COLUMNS:
            if is_list(old.get(name)):
                sizes_left = iter(sizes)
                values[name] = as_logged([next(sizes_left) if size else 0 for size in old[name]], old[name])
        for name in BOUND_COLUMNS:
            if is_list(old.get(name)):
                moved = {end: end + more for (_, end), more in zip(ranges, grown[1:], strict=True)}
                last = grown[-1]
                values[name] = as_logged(
                    [moved.get(at, at + last if at > 0 else at) for at in old[name]], old[name]
                )
    totals = {name: [(len(old[ids]), len(new[ids]))] for name in TOTAL_COUNTS}
    written = with_counts(with_values(new, values), totals)
    read_back = split_packed_row(written)
    if len(samples) > 1 and (
        read_back is None or [len(sample[read_back.ids]) for sample in read_back.rows] != sizes
    ):
        raise RecordError("it would be unclear where one sample ends and the next begins")
    return written


def _column_ranges(row: Row, name: str, ids: str, cuts: SampleRanges) -> SampleRanges | None:
    """Each sample's range of a column with an entry per token, or logprobs with one per trained token."""
    value = row[name]
    if not is_list(value):
        return None
    size = len(row[ids])
    if len(value) == size:
        return cuts
    if name not in ROW_LOGPROBS or (len(value) and is_list(value[0])):
        return None
    trained = trained_by_mask(row, size)
    if len(value) != trained.sum() or not len(value):
        return None
    before = np.concatenate(([0], np.cumsum(trained)))
    return tuple((int(before[start]), int(before[end])) for start, end in cuts)


def find_sample_ranges(row: Row, ids: str) -> SampleRanges | None:
    """The samples of a row whose ids are in column `ids`; None if no column says that there are several.

    RecordError if two columns disagree, one counts tokens that do not exist, or trained tokens are in no sample.
    """
    if RANGE_COLUMNS.isdisjoint(row):
        return None
    size = len(row[ids])
    found_by: dict[str, SampleRanges] = {}
    for names, read in _RANGE_READERS.items():
        for name in names:
            values = _as_integers(row.get(name))
            ranges = None if values is None else read(values, name, row, size)
            if ranges is not None and len(ranges) > 1:
                found_by[name] = ranges
    if not found_by or size <= len(next(iter(found_by.values()))):
        return None
    (name, cuts), *others = found_by.items()
    for other, ranges in others:
        if _starts_of_samples(ranges) != _starts_of_samples(cuts):
            raise RecordError(
                f"{name} and {other} cut the row into different samples, so it is unclear where one ends"
            )
    # RecordError if tokens outside of all samples are not padding: trained, or visible and not all the same.
    outside = np.ones(size, np.bool_)
    for start, end in cuts:
        outside[start:end] = False
    seen = {str(row[ids][at]) for at in np.flatnonzero(outside & _visible_tokens(row, size)).tolist()}
    if len(seen) > 1 or (outside & trained_by_mask(row, size)).any():
        count = int(outside.sum())
        raise RecordError(f"{count} tokens of the row are in none of the {len(cuts)} samples that {name} counts")
    return cuts


def _visible_tokens(row: Row, size: int) -> Mask:
    """`[size]` which tokens the attention mask shows; all if no mask has that length."""
    seen = _as_integers(row.get(_ATTENTION_MASK))
    return np.ones(size, np.bool_) if seen is None or len(seen) != size else np.asarray(seen > 0)


def _ranges_by_ends(values: _Integers, name: str, row: Row, size: int) -> SampleRanges | None:
    """The samples by their lengths, or by their bounds; bounds below 0 are filler."""
    are_lengths = name in LENGTH_COLUMNS
    bounds = np.append(0, np.cumsum(values)) if are_lengths else values[values >= 0]
    if len(bounds) < 3 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        return None
    if bounds[-1] > size:
        counted = f"counts {bounds[-1]} tokens in {len(values)} samples"
        says = counted if are_lengths else f"ends at token {bounds[-1]}"
        raise RecordError(f"{name} {says}, but the row holds {size}: it is unclear where a sample ends")
    return _ranges_between(bounds.tolist())


def _ranges_of_positions(values: _Integers, name: str, row: Row, size: int) -> SampleRanges | None:
    """Runs of 0, 1, 2, …; a single 0 is padding at either end of the row, or where the attention mask hides it."""
    if len(values) != size or not size:
        return None
    visible = _visible_tokens(row, size)
    if not visible.any():
        return None
    first, last = int(visible.argmax()), len(visible) - int(visible[::-1].argmax())
    # A number repeated at the end is padding.
    inner = values[first:last]
    changes = np.flatnonzero(np.diff(inner))
    end = int(changes[-1]) + 2 if len(changes) else 1
    inner = inner if end == len(inner) else inner[: end - 1]
    starts = np.flatnonzero(inner == 0)
    if len(starts) < 2 or starts[0] != 0 or not ((np.diff(inner) == 1) | (inner[1:] == 0)).all():
        return None
    cuts = _ranges_between([*(first + starts).tolist(), first + len(inner)])
    while cuts and _is_single_token(cuts[0]):
        cuts = cuts[1:]
    while cuts and _is_single_token(cuts[-1]):
        cuts = cuts[:-1]
    if any(_is_single_token(cut) and visible[cut[0]] for cut in cuts):
        return None
    return tuple(cut for cut in cuts if not _is_single_token(cut))


def _ranges_of_segments(values: _Integers, name: str, row: Row, size: int) -> SampleRanges | None:
    """Runs of one number; None if they follow the loss mask, as the turns of a conversation do."""
    if len(values) != size or not size or is_messages(parsed_column(row, "messages")):
        return None
    if name == _ATTENTION_MASK and values.max() < 2:
        return None
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), size]
    # Trailing zeros are padding, as packers that count from 1 write it.
    some = np.flatnonzero(values)
    inner = values[some[0] : some[-1] + 1] if len(some) else values
    padding = {-1, 0} if values.min() == 0 and values[0] != 0 and (inner != 0).all() else {-1}
    visible = _visible_tokens(row, size)
    runs = [
        (start, end)
        for start, end in pairwise(edges)
        if int(values[start]) not in padding and visible[start:end].any()
    ]
    if len({int(values[start]) for start, _ in runs}) < len(runs):
        return None
    trained = trained_by_mask(row, size)
    if trained.any() and all(trained[start:end].all() or not trained[start:end].any() for start, end in runs):
        return None
    return tuple(runs)


_RANGE_READERS: Mapping[tuple[str, ...], Callable[[_Integers, str, Row, int], SampleRanges | None]] = {
    (*LENGTH_COLUMNS, *BOUND_COLUMNS): _ranges_by_ends,
    ("position_ids",): _ranges_of_positions,
    (*SEGMENT_COLUMNS, _ATTENTION_MASK): _ranges_of_segments,
}


RANGE_COLUMNS = frozenset(name for names in _RANGE_READERS for name in names)


def _as_integers(value: Any) -> _Integers | None:
    """A list of whole numbers as an array; None for anything else."""
    if not is_list(value) or not len(value) or not is_number_list(value):
        return None
    try:
        values = as_floats(value, "")
    except RecordError:
        return None
    if not np.isfinite(values).all() or (values != np.floor(values)).any() or np.abs(values).max() > 1 << 40:
        return None
    return values.astype(np.int64)


def _ranges_between(bounds: list[int]) -> SampleRanges:
    return tuple((start, end) for start, end in pairwise(bounds) if start < end)


def _is_single_token(cut: tuple[int, int]) -> bool:
    return cut[1] - cut[0] == 1


def _starts_of_samples(cuts: SampleRanges) -> list[int]:
    return [start for start, end in cuts if end - start > 1]
