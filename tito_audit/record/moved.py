"""Moves a training row's columns with its tokens: nothing is summed, padded or invented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.record.arrays import Ids, Logprobs, Mask, Offsets
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding, MovePolicy, spread
from tito_audit.record.prefix import common_prefix
from tito_audit.record.rollout import Padding, TrainingRow


@dataclass(frozen=True, slots=True)
class Moved:
    """A training row on other tokens, and what could not move with it."""

    row: TrainingRow
    stale: tuple[str, ...] = ()
    """Columns that a trainer computed from the old ids: null from the first changed token on."""
    dropped: tuple[str, ...] = ()
    """Columns that cannot be rebuilt and are removed."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """By column, how many entries have no recorded value."""


def moved_row(
    row: TrainingRow,
    token_ids: Ids,
    source: Offsets,
    *,
    loss_mask: Mask | None,
    logprobs: Logprobs | None,
    prompt_length: int | None = None,
) -> Moved:
    """The row with these tokens `[T']`, each column's entries at their tokens.

    `source` `[T']` is the old position of each token, -1 for a new one. `loss_mask` and `logprobs` `[T']` are the
    new values of their columns; None: the row has none. `prompt_length` is where the response now begins; None:
    wherever the token at the old boundary went. RecordError when a column cannot express it (a trained prompt in a
    mask over the response).
    """
    if loss_mask is not None and row.loss_mask is None:
        loss_mask = None if not _column(row, ColumnRole.LOSS_MASK) else loss_mask
    if logprobs is not None and row.logprobs is None:
        logprobs = None if not _column(row, ColumnRole.LOGPROBS) else logprobs
    if row.prompt_length is not None and prompt_length is None:
        # How many tokens come before the first one from the old response.
        after = (source >= row.prompt_length).nonzero()[0]
        prompt_length = int(after[0]) if len(after) else len(source)
    mover = _Mover(row, token_ids, source, loss_mask, logprobs, prompt_length)
    columns = tuple(new for old in row.columns if (new := mover.moved(old)) is not None)
    # Padding on the same sides to the same width, if the tokens fit.
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
    return Moved(done, tuple(mover.stale), tuple(mover.dropped), mover.unknown)


def _column(row: TrainingRow, role: ColumnRole) -> Column | None:
    return next((column for column in row.columns if column.role is role), None)


class _Mover:
    """Moves the columns of one row to other tokens."""

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

    def moved(self, column: Column) -> Column | None:
        """The column on the new tokens; None when it cannot be rebuilt."""
        if column.role is ColumnRole.LOSS_MASK:
            return self._loss_mask(column)
        if column.role is ColumnRole.LOGPROBS:
            if self.logprobs is None:
                return column
            values = self.logprobs
            if column.sentinel is not None:
                lost = np.isnan(values)
                if column.alignment is not None:
                    # A null in the log stays null.
                    lost &= (self.source < 0) | ~np.isnan(self._full(column, np.nan)[self.source])
                values = np.where(lost, column.sentinel, values)
            return self._cut(column, values, alignment=self._alignment(column))
        if column.alignment is None:
            return column
        if column.policy is MovePolicy.DROP:
            if not self.changed:
                return column
            self.dropped.append(column.name)
            return None
        if column.policy is MovePolicy.COPY and (copied := self._copied(column)) is not None:
            return replace(column, values=copied)
        return self._other(column)

    def _loss_mask(self, column: Column) -> Column:
        if self.mask is None:
            return column
        encoding = column.encoding or MaskEncoding.BINARY
        values: NDArray[Any]
        if encoding is MaskEncoding.LABELS:
            values = np.where(self.mask, self.ids, -100).astype(_whole(column))
        elif encoding is MaskEncoding.BOOL:
            values = self.mask.copy()
        elif encoding is MaskEncoding.FLOAT:
            old = self._full(column, 0.0)
            weights = np.where(self.source >= 0, old[self.source], 0.0)
            values = np.where(self.mask, np.where(weights > 0, weights, 1.0), 0.0)
        else:
            values = self.mask.astype(_whole(column))
        if column.alignment is Alignment.RESPONSE and self.mask[: self.prompt_length].any():
            raise RecordError(f"column {column.name!r} covers the response and cannot train a token before it")
        return self._cut(column, values, alignment=self._alignment(column))

    def _other(self, column: Column) -> Column:
        whole: NDArray[Any] = self._full(column, None)
        found = np.empty(len(self.ids), object)
        found[:] = [whole[at] if at >= 0 else None for at in self.source]
        if column.policy in (MovePolicy.STALE, MovePolicy.COPY) and self.changed:
            found[self.same :] = None
            self.stale.append(column.name)
        else:
            missing = int(sum(value is None for value in self._cut(column, found).values))
            missing -= int(sum(value is None for value in column.values))
            if missing > 0:
                self.unknown[column.name] = missing
        cut = self._cut(column, found)
        # Objects in the old dtype if it can express "unknown" (floats, as NaN); otherwise they stay objects.
        values = cut.values
        dtype = column.values.dtype
        if dtype.kind == "f":
            typed = np.array([np.nan if value is None else value for value in values], dtype)
        elif dtype.kind == "O" or any(value is None for value in values):
            typed = values
        else:
            typed = values.astype(dtype)
        return replace(cut, values=typed)

    def _full(self, column: Column, fill: Any) -> NDArray[Any]:
        """The old column as one entry for each token of the old row."""
        size = len(self.row.token_ids)
        if column.alignment is None:
            return np.full(size, fill, object if fill is None else column.values.dtype)
        values = column.values.astype(object) if fill is None else column.values
        return spread(
            values,
            column.alignment,
            full=size,
            prompt_length=self.row.prompt_length,
            trained=self.row.loss_mask,
            fill=fill,
        )

    def _alignment(self, column: Column) -> Alignment:
        """What the column describes; if its length fits nothing, what it comes closest to."""
        if column.alignment is not None:
            return column.alignment
        sizes = {Alignment.FULL: len(self.row.token_ids)}
        if self.row.prompt_length is not None:
            sizes[Alignment.RESPONSE] = len(self.row.token_ids) - self.row.prompt_length
        if self.row.loss_mask is not None and column.role is ColumnRole.LOGPROBS:
            sizes[Alignment.SAMPLED] = int(self.row.loss_mask.sum())
        return min(sizes, key=lambda one: abs(sizes[one] - len(column.values)))

    def _cut(self, column: Column, values: NDArray[Any], *, alignment: Alignment | None = None) -> Column:
        """One entry for each token, cut to what the column describes."""
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

    def _copied(self, column: Column) -> NDArray[Any] | None:
        """The new values of a column that counts the tokens or repeats one value; None for any other."""
        values = column.values
        if column.alignment is not Alignment.FULL or values.dtype.kind not in "iub" or not len(values):
            return None
        if (values == values[0]).all() and len(values) > 1:
            return np.full(len(self.ids), values[0], values.dtype)
        if values.dtype.kind == "b" or not (np.diff(values) == 1).all():
            return None
        return np.arange(values[0], int(values[0]) + len(self.ids), dtype=values.dtype)


def _whole(column: Column) -> np.dtype[Any]:
    return column.values.dtype if column.values.dtype.kind in "iu" else np.dtype(np.int64)
