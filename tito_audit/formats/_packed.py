"""Packed rows: several samples in one list of ids, each a rollout with its own slice of every column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import FLAT_IDS, MASKS, ROW_LOGPROBS, first_filled, is_list, parsed, plain
from tito_audit.formats._cuts import BOUNDS, LENGTHS, SampleRanges, sample_ranges
from tito_audit.formats._padding import trained_tokens
from tito_audit.formats._samples import Samples
from tito_audit.formats._update import total_counts, with_counts, with_values
from tito_audit.formats._values import as_logged
from tito_audit.record.sources import Source

_SINGULAR = {"prompt_lengths": "prompt_length", "response_lengths": "response_length", "prompt_lens": "prompt_len"}
"""Lists with one number per sample, and the name of that number in a sample."""
_CONVERSATIONS = ("messages", "prompt", "completion")


def packed(row: Row) -> Samples | None:
    """The samples of a packed row; None if nothing says that it is packed.

    RecordError if its columns disagree about where samples end.
    """
    ids = first_filled(row, FLAT_IDS)
    if ids is None or not len(row[ids]):
        return None
    cuts = sample_ranges(row, ids)
    if cuts is None:
        return None
    parts: dict[str, SampleRanges] = {}
    places: dict[str, str] = {}
    rest: dict[str, Any] = {}
    for name, value in row.items():
        if name in LENGTHS or name in BOUNDS:
            continue
        if (ranges := _ranges(row, name, ids, cuts)) is not None:
            parts[name] = ranges
        elif _is_per_sample(value, name, len(cuts)):
            places[_SINGULAR.get(name, name)] = name
        elif name in MASKS or name in ROW_LOGPROBS:
            if value is not None:
                # It does not fit the samples; read as one sample, a rule can report it.
                kept = {name: value for name, value in row.items() if name not in _CONVERSATIONS}
                whole = partial(_finished, ids, ((0, len(row[ids])),))
                return Samples((kept,), lambda _, name: Source((name,)), ids, whole)
        elif name == "tools" or (not is_list(value) and _applies_to_all(name, value)):
            rest[name] = value
    samples = tuple(
        {
            **rest,
            **{name: row[name][start:end] for name, ranges in parts.items() for start, end in (ranges[number],)},
            **{name: _entries(row, there)[number] for name, there in places.items()},
        }
        for number in range(len(cuts))
    )

    def source(number: int, name: str) -> Source | None:
        if name in parts:
            return Source((name,), part=parts[name][number])
        return Source((places[name], number)) if name in places else None

    return Samples(samples, source, ids, partial(_finished, ids, cuts))


def _finished(ids: str, cuts: SampleRanges, old: Row, new: Row, samples: Sequence[Row]) -> Row:
    """The new row with the new boundaries of its samples, and its counts."""
    sizes = [len(sample[ids]) for sample in samples]
    made = with_values(new, _boundaries(old, cuts, sizes))
    made = with_counts(made, total_counts(len(old[ids]), len(made[ids])))
    again = packed(made)
    if len(samples) > 1 and (again is None or [len(sample[again.ids]) for sample in again.rows] != sizes):
        raise RecordError("it would be unclear where one sample ends and the next begins")
    return made


def _ranges(row: Row, name: str, ids: str, cuts: SampleRanges) -> SampleRanges | None:
    """Each sample's range of a column: one entry per token, or for logprobs one per trained token."""
    value = row[name]
    if not is_list(value):
        return None
    size = len(row[ids])
    if len(value) == size:
        return cuts
    if name not in ROW_LOGPROBS or (len(value) and is_list(value[0])):
        return None
    trained = trained_tokens(row, size)
    if len(value) != trained.sum() or not len(value):
        return None
    before = np.concatenate(([0], np.cumsum(trained)))
    return tuple((int(before[start]), int(before[end])) for start, end in cuts)


def _is_per_sample(value: Any, name: str, count: int) -> bool:
    """Whether a column has one entry per sample, each a list or null if it is a conversation, mask or logprobs."""
    if name in _CONVERSATIONS:
        value = parsed({name: value}, name)
    if not is_list(value) or len(value) != count:
        return False
    if name in (*_CONVERSATIONS, "tools", *MASKS, *ROW_LOGPROBS, *FLAT_IDS):
        return all(entry is None or is_list(entry) for entry in value)
    return True


def _entries(row: Row, name: str) -> Sequence[Any]:
    return plain(parsed(row, name) if name in _CONVERSATIONS else row[name])


def _applies_to_all(name: str, value: Any) -> bool:
    """Whether a value that a row has once applies to each sample; numbers do not, as they count or score all."""
    if name in _CONVERSATIONS:
        return False
    return isinstance(value, str | bool | Mapping) or value is None or name.startswith("group")


def _boundaries(row: Row, cuts: SampleRanges, sizes: Sequence[int]) -> dict[str, Any]:
    """The columns that say how long the samples are, for their new lengths."""
    old = [end - start for start, end in cuts]
    if list(sizes) == old:
        return {}
    grown = np.cumsum([0, *(new - before for new, before in zip(sizes, old, strict=True))]).tolist()
    values: dict[str, Any] = {}
    for name in LENGTHS:
        if is_list(row.get(name)):
            left = iter(sizes)
            values[name] = as_logged([next(left) if size else 0 for size in row[name]], row[name])
    for name in BOUNDS:
        if is_list(row.get(name)):
            moved = {end: end + more for (_, end), more in zip(cuts, grown[1:], strict=True)}
            last = grown[-1]
            values[name] = as_logged([moved.get(at, at + last if at > 0 else at) for at in row[name]], row[name])
    return values
