"""Packed rows: several samples in one list of ids, each a rollout with its own slice of every column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import (
    FLAT_IDS,
    MASKS,
    ROW_LOGPROBS,
    SEGMENTS,
    first_filled,
    is_list,
    is_messages,
    is_numbers,
    parsed,
    plain,
)
from tito_audit.formats._padding import trained_tokens
from tito_audit.formats._samples import Samples
from tito_audit.formats._update import total_counts, with_counts, with_values
from tito_audit.formats._values import as_logged
from tito_audit.record.arrays import Mask, as_floats
from tito_audit.record.sources import Source

_SINGULAR = {"prompt_lengths": "prompt_length", "response_lengths": "response_length", "prompt_lens": "prompt_len"}
"""Lists with one number per sample, and the name of that number in a sample."""
_CONVERSATIONS = ("messages", "prompt", "completion")
SampleRanges: TypeAlias = tuple[tuple[int, int], ...]
"""The half-open range of each sample, in order; tokens outside of them are padding."""
LENGTHS = (
    "seq_lens",
    "seqlens",
    "seq_lengths",
    "sequence_lengths",
    "sequence_lens",
    "sample_lengths",
    "sample_lens",
    "packed_lengths",
    "doc_lens",
    "doc_lengths",
    "document_lengths",
)
"""Column names for how many tokens each sample of a row has."""
BOUNDS = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k")
"""Column names for where the samples of a row end, counted from the row's start."""
_WHOLE = "attention_mask"
"""Some packers number the samples in it, from 1."""
_Integers: TypeAlias = NDArray[np.int64]


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


# Where the samples begin and end, by whichever column of the row says so


def sample_ranges(row: Row, ids: str) -> SampleRanges | None:
    """The samples of a row whose ids are in column `ids`; None if nothing says that there are several.

    RecordError if two columns disagree, or one counts tokens that do not exist.
    """
    if _LIMITS.isdisjoint(row):
        return None
    size = len(row[ids])
    found_by: dict[str, SampleRanges] = {}
    for names, read in _READERS.items():
        for name in names:
            values = _whole_numbers(row.get(name))
            found = None if values is None else read(values, name, _Row(row, size))
            if found is not None and len(found) > 1:
                found_by[name] = found
    if not found_by or size <= len(next(iter(found_by.values()))):
        return None
    (name, cuts), *others = found_by.items()
    for other, found in others:
        if _starts(found) != _starts(cuts):
            raise RecordError(
                f"{name} and {other} cut the row into different samples, so it is unclear where one ends"
            )
    _check_gaps(cuts, name, row, ids)
    return cuts


class _Row:
    """A row and its size, which a column is checked against."""

    def __init__(self, row: Row, size: int) -> None:
        self.row, self.size = row, size

    def trained(self) -> Mask:
        return trained_tokens(self.row, self.size)

    def visible(self) -> Mask:
        seen = _whole_numbers(self.row.get(_WHOLE))
        return np.ones(self.size, np.bool_) if seen is None or len(seen) != self.size else np.asarray(seen > 0)


def _by_lengths(values: _Integers, name: str, row: _Row) -> SampleRanges | None:
    if len(values) < 2 or (values < 0).any():
        return None
    ends = np.cumsum(values)
    if ends[-1] > row.size:
        raise RecordError(
            f"{name} counts {ends[-1]} tokens in {len(values)} samples, but the row holds {row.size}: it is "
            "unclear where a sample ends"
        )
    return _between([0, *ends.tolist()])


def _by_bounds(values: _Integers, name: str, row: _Row) -> SampleRanges | None:
    bounds = values[values >= 0]
    if len(bounds) < 3 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        return None
    if bounds[-1] > row.size:
        raise RecordError(
            f"{name} ends at token {bounds[-1]}, but the row holds {row.size}: it is unclear where a sample ends"
        )
    return _between(bounds.tolist())


def _by_positions(values: _Integers, name: str, row: _Row) -> SampleRanges | None:
    """Runs of 0, 1, 2, …; a lone 0 is padding at either end of the row, or where the attention mask hides it."""
    if len(values) != row.size or not row.size:
        return None
    visible = row.visible()
    if not visible.any():
        return None
    first, last = int(visible.argmax()), len(visible) - int(visible[::-1].argmax())
    inner = _without_tail(values[first:last])
    starts = np.flatnonzero(inner == 0)
    if len(starts) < 2 or starts[0] != 0 or not ((np.diff(inner) == 1) | (inner[1:] == 0)).all():
        return None
    cuts = _between([*(first + starts).tolist(), first + len(inner)])
    while cuts and _is_lone(cuts[0]):
        cuts = cuts[1:]
    while cuts and _is_lone(cuts[-1]):
        cuts = cuts[:-1]
    if any(_is_lone(cut) and visible[cut[0]] for cut in cuts):
        return None
    return tuple(cut for cut in cuts if not _is_lone(cut))


def _by_segments(values: _Integers, name: str, row: _Row) -> SampleRanges | None:
    """Runs of one number; None if they only repeat the loss mask, or are the turns of one conversation."""
    if len(values) != row.size or not row.size or is_messages(parsed(row.row, "messages")):
        return None
    if name == _WHOLE and values.max() < 2:
        return None
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), row.size]
    padding = {-1} | ({0} if values.min() == 0 and _is_zero_at_end(values) else set())
    visible = row.visible()
    runs = [
        (start, end)
        for start, end in pairwise(edges)
        if int(values[start]) not in padding and visible[start:end].any()
    ]
    if len({int(values[start]) for start, _ in runs}) < len(runs):
        return None
    trained = row.trained()
    if trained.any() and all(trained[start:end].all() or not trained[start:end].any() for start, end in runs):
        return None
    return tuple(runs)


_READERS: Mapping[tuple[str, ...], Callable[[_Integers, str, _Row], SampleRanges | None]] = {
    LENGTHS: _by_lengths,
    BOUNDS: _by_bounds,
    ("position_ids",): _by_positions,
    (*SEGMENTS, _WHOLE): _by_segments,
}


_LIMITS = frozenset(name for names in _READERS for name in names)


def _whole_numbers(value: Any) -> _Integers | None:
    """A list of whole numbers; None for anything else."""
    if not is_list(value) or not len(value) or not is_numbers(value):
        return None
    try:
        values = as_floats(value, "")
    except RecordError:
        return None
    if not np.isfinite(values).all() or (values != np.floor(values)).any() or np.abs(values).max() > 1 << 40:
        return None
    return values.astype(np.int64)


def _between(bounds: list[int]) -> SampleRanges:
    return tuple((start, end) for start, end in pairwise(bounds) if start < end)


def _without_tail(values: _Integers) -> _Integers:
    """Positions without the number repeated at their end, which is padding."""
    changes = np.flatnonzero(np.diff(values))
    end = int(changes[-1]) + 2 if len(changes) else 1
    return values if end == len(values) else values[: end - 1]


def _is_lone(cut: tuple[int, int]) -> bool:
    return cut[1] - cut[0] == 1


def _is_zero_at_end(values: _Integers) -> bool:
    """Whether zeros are only at the end, where packers that count from 1 put padding."""
    some = np.flatnonzero(values)
    return bool(len(some)) and values[0] != 0 and bool((values[some[0] : some[-1] + 1] != 0).all())


def _starts(cuts: SampleRanges) -> list[int]:
    return [start for start, end in cuts if end - start > 1]


def _check_gaps(cuts: SampleRanges, name: str, row: Row, ids: str) -> None:
    """RecordError if tokens outside of all samples are not padding: trained, or visible and not all the same."""
    held = _Row(row, len(row[ids]))
    outside = np.ones(held.size, np.bool_)
    for start, end in cuts:
        outside[start:end] = False
    seen = {str(row[ids][at]) for at in np.flatnonzero(outside & held.visible()).tolist()}
    if len(seen) > 1 or (outside & held.trained()).any():
        count = int(outside.sum())
        raise RecordError(f"{count} tokens of the row are in none of the {len(cuts)} samples that {name} counts")
