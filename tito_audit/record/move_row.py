"""Moves the columns of a training row to new token ids; no value is summed, padded or invented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.record.arrays import Ids, Logprobs, Mask, Offsets
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding, MovePolicy, expand
from tito_audit.record.prefix import common_prefix
from tito_audit.record.rollout import Padding, TrainingRow


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A training row on new token ids, and the columns that could not move with it."""

    row: TrainingRow
    stale: tuple[str, ...] = ()
    """Columns a trainer computed from the old ids, now null from the first changed token on."""
    dropped: tuple[str, ...] = ()
    """Columns that cannot be rebuilt."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Entries without a recorded value, by column."""


def move_row(
    row: TrainingRow,
    token_ids: Ids,
    source: Offsets,
    *,
    loss_mask: Mask | None,
    logprobs: Logprobs | None,
    prompt_length: int | None = None,
) -> MovedRow:
    """The row with new tokens `[T']`; the entries of its columns follow their tokens.

    `source` `[T']` is the old position of each token, -1 for a new one. `loss_mask` and `logprobs` `[T']` are the
    new values of these columns; None if the row has none. `prompt_length` is the new start of the response; None:
    wherever the first token of the old response went. RecordError when a column cannot express the result, as a
    mask over the response cannot train the prompt.
    """
    roles = {column.role for column in row.columns}
    if row.loss_mask is None and ColumnRole.LOSS_MASK not in roles:
        loss_mask = None
    if row.logprobs is None and ColumnRole.LOGPROBS not in roles:
        logprobs = None
    if row.prompt_length is not None and prompt_length is None:
        of_response = (source >= row.prompt_length).nonzero()[0]
        prompt_length = int(of_response[0]) if len(of_response) else len(source)
    mover = _ColumnMover(row, token_ids, source, loss_mask, logprobs, prompt_length)
    columns = tuple(new for old in row.columns if (new := mover.move(old)) is not None)
    # Padded on the same sides to the same width, if the tokens fit.
    length = len(token_ids)
    left, right = row.padding.left, row.padding.right
    width = left + len(row.token_ids) + right
    if right:
        padding = Padding(left, max(width - left - length, 0))
    else:
        padding = Padding(max(width - length, 0) if left else 0, 0)
    done = replace(
        row,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        prompt_length=prompt_length if row.prompt_length is not None else None,
        columns=columns,
        padding=padding,
        hidden=None if row.hidden is None else (source >= 0) & row.hidden[source],
    )
    return MovedRow(done, tuple(mover.stale), tuple(mover.dropped), mover.unknown)


class _ColumnMover:
    """Moves the columns of one row to new token ids."""

    def __init__(
        self,
        row: TrainingRow,
        token_ids: Ids,
        source: Offsets,
        loss_mask: Mask | None,
        logprobs: Logprobs | None,
        prompt_length: int | None,
    ) -> None:
        self.row, self.ids, self.source = row, token_ids, source
        self.mask, self.logprobs, self.prompt_length = loss_mask, logprobs, prompt_length
        self.stale: list[str] = []
        self.dropped: list[str] = []
        self.unknown: dict[str, int] = {}
        self.same = common_prefix(row.token_ids, token_ids)
        self.changed = self.same < max(len(token_ids), len(row.token_ids))

    def move(self, column: Column) -> Column | None:
        """The column on the new tokens; None if it cannot be rebuilt."""
        if column.role is ColumnRole.LOSS_MASK:
            return self._move_mask(column)
        if column.role is ColumnRole.LOGPROBS:
            if self.logprobs is None:
                return column
            values = self.logprobs
            if column.sentinel is not None:
                unknown = np.isnan(values)
                if column.alignment is not None:
                    # A null in the log stays null.
                    unknown &= (self.source < 0) | ~np.isnan(self._expand(column, np.nan)[self.source])
                values = np.where(unknown, column.sentinel, values)
            return self._cut_to_alignment(column, values, alignment=self._closest_alignment(column))
        if column.alignment is None:
            return column
        if column.policy is MovePolicy.DROP:
            if not self.changed:
                return column
            self.dropped.append(column.name)
            return None
        values = column.values
        counts = column.alignment is Alignment.FULL and values.dtype.kind in "iub" and len(values) > 0
        if column.policy is MovePolicy.COPY and counts:  # a column that repeats one value, or counts tokens
            if (values == values[0]).all() and len(values) > 1:
                return replace(column, values=np.full(len(self.ids), values[0], values.dtype))
            if values.dtype.kind != "b" and (np.diff(values) == 1).all():
                first = int(values[0])
                return replace(column, values=np.arange(first, first + len(self.ids), dtype=values.dtype))
        return self._move_values(column)

    def _move_mask(self, column: Column) -> Column:
        """The new loss mask in the encoding of its column."""
        if self.mask is None:
            return column
        encoding = column.encoding or MaskEncoding.BINARY
        values: NDArray[Any]
        if encoding is MaskEncoding.LABELS:
            values = np.where(self.mask, self.ids, -100).astype(_integer_dtype(column))
        elif encoding is MaskEncoding.BOOL:
            values = self.mask.copy()
        elif encoding is MaskEncoding.FLOAT:
            old = self._expand(column, 0.0)
            weights = np.where(self.source >= 0, old[self.source], 0.0)
            values = np.where(self.mask, np.where(weights > 0, weights, 1.0), 0.0)
        else:
            values = self.mask.astype(_integer_dtype(column))
        if column.alignment is Alignment.RESPONSE and self.mask[: self.prompt_length].any():
            raise RecordError(f"column {column.name!r} covers the response and cannot train a token before it")
        return self._cut_to_alignment(column, values, alignment=self._closest_alignment(column))

    def _move_values(self, column: Column) -> Column:
        """The entries at their tokens, unknown at new ones; from the first change on if they are stale."""
        old: NDArray[Any] = self._expand(column, None)
        new = np.empty(len(self.ids), object)
        new[:] = [old[at] if at >= 0 else None for at in self.source]
        is_stale = column.policy in (MovePolicy.STALE, MovePolicy.COPY) and self.changed
        if is_stale:
            new[self.same :] = None
            self.stale.append(column.name)
        cut = self._cut_to_alignment(column, new)
        values = cut.values
        missing = sum(value is None for value in values) - sum(value is None for value in column.values)
        if not is_stale and missing > 0:
            self.unknown[column.name] = missing
        # Back to the old dtype, unless it cannot express "unknown" as floats do by NaN.
        dtype = column.values.dtype
        if dtype.kind == "f":
            typed = np.array([np.nan if value is None else value for value in values], dtype)
        elif dtype.kind == "O" or any(value is None for value in values):
            typed = values
        else:
            typed = values.astype(dtype)
        return replace(cut, values=typed)

    def _expand(self, column: Column, fill: Any) -> NDArray[Any]:
        """`[T]` an entry of the old column for each old token, `fill` where it has none; None: as objects."""
        size = len(self.row.token_ids)
        if column.alignment is None:
            return np.full(size, fill, object if fill is None else column.values.dtype)
        values = column.values.astype(object) if fill is None else column.values
        return expand(
            values,
            column.alignment,
            full=size,
            prompt_length=self.row.prompt_length,
            trained=self.row.loss_mask,
            fill=fill,
        )

    def _closest_alignment(self, column: Column) -> Alignment:
        """The alignment of the column, or the one whose length is closest if it fits none."""
        if column.alignment is not None:
            return column.alignment
        sizes = {Alignment.FULL: len(self.row.token_ids)}
        if self.row.prompt_length is not None:
            sizes[Alignment.RESPONSE] = len(self.row.token_ids) - self.row.prompt_length
        if self.row.loss_mask is not None and column.role is ColumnRole.LOGPROBS:
            sizes[Alignment.SAMPLED] = int(self.row.loss_mask.sum())
        return min(sizes, key=lambda alignment: abs(sizes[alignment] - len(column.values)))

    def _cut_to_alignment(
        self, column: Column, values: NDArray[Any], *, alignment: Alignment | None = None
    ) -> Column:
        """The column with `values` `[T']`, cut to the tokens that it covers."""
        alignment = alignment or column.alignment
        if alignment is Alignment.RESPONSE:
            values = values[self.prompt_length :]
        elif alignment is Alignment.SAMPLED:
            values = values[self.mask] if self.mask is not None else values
        elif alignment is Alignment.SHIFTED:
            values = values[1:]
        elif alignment is not Alignment.FULL:
            raise RecordError(f"column {column.name!r} is {alignment} and cannot be moved")
        return replace(column, values=values, alignment=alignment)


def _integer_dtype(column: Column) -> np.dtype[Any]:
    return column.values.dtype if column.values.dtype.kind in "iu" else np.dtype(np.int64)
