"""Masks drift out of the loss: trained tokens that differ from what was sampled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import Run, equal_runs, gaps, nearest_run
from tito_audit.record.arrays import Ids, as_ids
from tito_audit.record.prefix import common_ends, common_prefix

MaskBy: TypeAlias = Literal["span", "turn", "first-divergence"]
"""What leaves the loss: the drifted tokens, their turns, or everything from the first of them on."""
_WINDOWS = (64, 256)
"""Tokens of each side that are compared closely; the wider window is used if they do not meet in the narrow
one."""
_ANCHOR = 12
"""Equal tokens in a row after which two sequences count as meeting again; fewer would meet by chance."""


def mask_drift(
    recorded_ids: Sequence[int] | NDArray[Any],
    reference_ids: Sequence[int] | NDArray[Any],
    loss_mask: Sequence[int] | NDArray[Any],
    *,
    by: MaskBy = "span",
    stop_ids: int | Collection[int] = (),
) -> list[bool]:
    """The loss mask without the tokens that drifted, `[T]`; it never adds a token to the loss.

    recorded_ids   `[T]` the row that is trained
    reference_ids  `[N]` what was sampled, or what the row should hold
    loss_mask      `[T]` booleans, or numbers that are 0 or 1
    by             `span`: only the tokens that are not in place in the reference;
                   `turn`: every trained run that such tokens are in or touch;
                   `first-divergence`: all tokens from the first of them on
    stop_ids       for `turn`: ids that end a turn, where the mask trains several turns in one run

    A token is in place when the longest common alignment of both sequences pairs it. Where the reference has
    tokens that the row lacks, no token of the row is out of place: `span` masks nothing, `turn` the turn that lost
    them, `first-divergence` everything from where they are missing. A reference that continues past the row's end
    means that the row was truncated, which is not drift.

    ValueError when `loss_mask` differs in length from `recorded_ids` or holds other values, or when `by` is
    unknown; RecordError if an argument is not token ids.

    The model sampled 5, 6 where the row holds 7:

        >>> mask_drift([1, 2, 7, 4], [1, 2, 5, 6, 4], [0, 1, 1, 1])
        [False, True, False, True]
        >>> mask_drift([1, 2, 7, 4], [1, 2, 5, 6, 4], [0, 1, 1, 1], by="first-divergence")
        [False, True, False, False]
    """
    if by not in get_args(MaskBy):
        raise ValueError(f"by={by!r} is unknown: it is one of {', '.join(get_args(MaskBy))}")
    recorded, reference = as_ids(recorded_ids, "recorded_ids"), as_ids(reference_ids, "reference_ids")
    values = np.asarray(loss_mask)
    if values.shape != recorded.shape:
        raise ValueError(
            f"loss_mask has shape {values.shape} and recorded_ids has {len(recorded)} tokens: each token has one "
            "entry"
        )
    if len(values) and (values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all()):
        raise ValueError("loss_mask holds values other than 0 and 1: make it 1 where a token is trained")
    mask = values.astype(np.bool_)
    # Ranges that the alignment does not pair, in order; an empty one where only the reference has tokens.
    unpaired = gaps(_aligned_runs(recorded, reference), len(recorded), len(reference))
    spans = [(start, end) for start, end, _, _ in unpaired if start < end or end < len(recorded)]
    if by == "turn":
        stops = [stop_ids] if isinstance(stop_ids, int | np.integer) else list(stop_ids)
        # The trained turns: runs of the mask, also cut after the ids that end a turn.
        is_stop = np.isin(recorded, stops)
        before = np.concatenate(([False], mask[:-1])) & ~np.concatenate(([False], is_stop[:-1]))
        after = np.concatenate((mask[1:], [False])) & ~is_stop
        starts, ends = (mask & ~before).nonzero()[0], (mask & ~after).nonzero()[0] + 1
        turns = list(zip(starts.tolist(), ends.tolist(), strict=True))
        spans = [run for run in turns if any(start <= run[1] and run[0] <= end for start, end in spans)]
    elif by == "first-divergence":
        spans = [(start, len(recorded)) for start, _ in spans[:1]]
    for start, end in spans:
        mask[start:end] = False
    return list(mask.tolist())


def _aligned_runs(a: Ids, b: Ids) -> Iterator[Run]:
    """Equal runs of both, in order.

    Equal runs are skipped whole; after a difference both are compared in windows until they meet again.
    """
    _, tail = common_ends(a, b)
    m, n = len(a) - tail, len(b) - tail
    i = j = 0
    while i < m and j < n:
        size = common_prefix(a[i:m], b[j:n])
        if size:
            yield Run(i, j, size)
            i, j = i + size, j + size
            continue
        met: list[Run] = []
        for width in _WINDOWS:
            met = equal_runs(a[i : min(i + width, m)], b[j : min(j + width, n)])
            if width >= m - i and width >= n - j:
                break  # both end in the window
            # Up to the last run that is long enough to continue from
            met = met[: max((k + 1 for k, run in enumerate(met) if run.size >= _ANCHOR), default=0)]
            if met:
                break
        else:
            far = nearest_run(a[i:m], b[j:n], _ANCHOR)
            met = [far] if far is not None else []
        if not met:
            break
        yield from (Run(i + start, j + other, size) for start, other, size in met)
        start, other, size = met[-1]
        i, j = i + start + size, j + other + size
    if tail:
        yield Run(m, n, tail)
