"""Packed rows: several samples in one list of ids, each a rollout with its own part of every column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import FLAT_IDS, MASKS, ROW_LOGPROBS, first_filled, is_list, parsed
from tito_audit.formats._copies import total_counts, with_counts
from tito_audit.formats._cuts import BOUNDS, LENGTHS, Cuts, cuts_of
from tito_audit.formats._padding import trained_by
from tito_audit.formats._samples import ReadSample, Samples, UpdateSample, put_back, samples_read, updated_samples
from tito_audit.formats._update import with_values
from tito_audit.formats._values import as_logged
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import Source

_SINGULAR = {"prompt_lengths": "prompt_length", "response_lengths": "response_length", "prompt_lens": "prompt_len"}
"""Lists with a number a sample, and what a sample calls its own."""
_CONVERSATIONS = ("messages", "prompt", "completion")


@dataclass(frozen=True, slots=True)
class Packed:
    """A row that holds several samples, taken apart."""

    ids: str
    cuts: Cuts
    samples: tuple[Row, ...]
    """The row of each as it would be by itself."""
    parts: Mapping[str, Cuts]
    """Columns of which a sample has a range of entries, and those ranges."""
    places: Mapping[str, str]
    """Names in a sample whose column has one entry a sample, to the name of that column."""

    @property
    def parted(self) -> Samples:
        """The samples, and where the row holds their columns."""
        return Samples(self.samples, self._source)

    def _source(self, number: int, name: str) -> Source | None:
        """Where the row holds a column of a sample; None where it holds one for all of them."""
        if name in self.parts:
            return Source((name,), part=self.parts[name][number])
        if len(self.samples) == 1:
            return Source((name,))
        return Source((self.places[name], number)) if name in self.places else None


def packed(row: Row) -> Packed | None:
    """The samples of a packed row; None when nothing says that it is one, or whose entries are whose.

    RecordError when what says so contradicts itself.
    """
    ids = first_filled(row, FLAT_IDS)
    if ids is None or not len(row[ids]):
        return None
    cuts = cuts_of(row, ids)
    if cuts is None:
        return None
    parts: dict[str, Cuts] = {}
    places: dict[str, str] = {}
    rest: dict[str, Any] = {}
    for name, value in row.items():
        if name in LENGTHS or name in BOUNDS:
            continue
        if (ranges := _ranges(row, name, ids, cuts)) is not None:
            parts[name] = ranges
        elif _is_each(value, name, len(cuts)):
            places[_SINGULAR.get(name, name)] = name
        elif name in MASKS or name in ROW_LOGPROBS:
            if value is not None:
                return _whole(row, ids)
        elif name == "tools" or (not is_list(value) and _holds_for_all(name, value)):
            rest[name] = value
    samples = tuple(
        {
            **rest,
            **{name: row[name][start:end] for name, ranges in parts.items() for start, end in (ranges[number],)},
            **{name: _listed(row, there)[number] for name, there in places.items()},
        }
        for number in range(len(cuts))
    )
    return Packed(ids, cuts, samples, parts, places)


def packed_read(one: Packed, place: Place, read: ReadSample) -> tuple[Rollout, ...]:
    """A rollout for each sample."""
    return samples_read(one.samples, place, read)


def packed_update(
    row: Row, one: Packed, mended: Sequence[RepairedRollout], read: ReadSample, update: UpdateSample
) -> Sequence[Row]:
    """The row with what its samples say from now on, and where each of them ends now."""
    samples = one.parted
    new = updated_samples(samples, mended, read, update)
    made = put_back(row, samples, new, one.ids)
    if made is row:
        return (row,)
    sizes = [len(sample[one.ids]) for sample in new]
    made = with_values(made, _boundaries(row, one, sizes))
    made = with_counts(made, total_counts(len(row[one.ids]), len(made[one.ids])))
    again = packed(made)
    if len(new) > 1 and (again is None or [end - start for start, end in again.cuts] != sizes):
        raise RecordError("where one sample ends and the next begins could not be told any more")
    return (made,)


def _whole(row: Row, ids: str) -> Packed:
    """A row whose mask or logprobs fit its samples nowhere: read as one, so that a rule can say by how much."""
    kept = {name: value for name, value in row.items() if name not in _CONVERSATIONS}
    return Packed(ids, ((0, len(row[ids])),), (kept,), {}, {})


def _ranges(row: Row, name: str, ids: str, cuts: Cuts) -> Cuts | None:
    """The entries that each sample has of a column: one a token, or of logprobs one a trained token."""
    value = row[name]
    if not is_list(value):
        return None
    size = len(row[ids])
    if len(value) == size:
        return cuts
    if name not in ROW_LOGPROBS or (len(value) and is_list(value[0])):
        return None
    trained = trained_by(row, size)
    if len(value) != trained.sum() or not len(value):
        return None
    before = np.concatenate(([0], np.cumsum(trained)))
    return tuple((int(before[start]), int(before[end])) for start, end in cuts)


def _is_each(value: Any, name: str, count: int) -> bool:
    """Whether a column has one entry a sample; a conversation is a list, and what takes a mask's place is one."""
    if name in _CONVERSATIONS:
        value = parsed({name: value}, name)
    if not is_list(value) or len(value) != count:
        return False
    if name in (*_CONVERSATIONS, "tools", *MASKS, *ROW_LOGPROBS, *FLAT_IDS):
        return all(entry is None or is_list(entry) for entry in value)
    return True


def _listed(row: Row, name: str) -> Sequence[Any]:
    value = parsed(row, name) if name in _CONVERSATIONS else row[name]
    found: Sequence[Any] = value.tolist() if isinstance(value, np.ndarray) else value
    return found


def _holds_for_all(name: str, value: Any) -> bool:
    """Whether what a row says once is true of each sample: a number counts or scores all of them."""
    if name in _CONVERSATIONS:
        return False
    return isinstance(value, str | bool | Mapping) or value is None or name.startswith("group")


def _boundaries(row: Row, one: Packed, sizes: Sequence[int]) -> dict[str, Any]:
    """The columns that say how long the samples are, for their lengths from now on."""
    old = [end - start for start, end in one.cuts]
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
            moved = {end: end + more for (_, end), more in zip(one.cuts, grown[1:], strict=True)}
            last = grown[-1]
            values[name] = as_logged([moved.get(at, at + last if at > 0 else at) for at in row[name]], row[name])
    return values
