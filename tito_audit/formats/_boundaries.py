"""Where the boundaries between a conversation's messages go when its tokens change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tito_audit.align.runs import gaps, paired_runs
from tito_audit.errors import RecordError
from tito_audit.record.arrays import Mask
from tito_audit.record.rollout import TrainingRow

_LONG = 2000
_Region = tuple[int, int, int, int]
"""A changed span: `[start, end)` of the old ids, then of the new ids."""


def moved_boundaries(
    before: TrainingRow, after: TrainingRow, ends: Sequence[int], generated: Sequence[bool]
) -> list[int]:
    """The positions in the new ids of the boundaries `ends` in the old; both start with 0 and end with the length.

    A boundary next to an unchanged token moves with it. One inside a change, or where tokens were inserted,
    goes where the mask switches between sampled and not sampled; `generated` says which messages were
    sampled. RecordError if neither applies.
    """
    old, new = before.token_ids, after.token_ids
    # In very long sequences frequent tokens are not used as anchors, or the search would take minutes.
    regions: list[_Region] = list(gaps(paired_runs(old, new, frequent_from=_LONG + 1), len(old), len(new)))
    out = [0]
    for number, end in enumerate(ends[1:-1]):
        region = next((one for one in regions if one[0] <= end <= one[1]), None)
        if region is None:
            out.append(end + sum(r[3] - r[2] - (r[1] - r[0]) for r in regions if r[1] < end))
        elif region[0] < region[1] and end in region[:2]:
            # Only tokens on one side changed: the boundary is where the change begins or ends.
            out.append(region[2] if end == region[0] else region[3])
        else:
            out.append(_switch(region, after.loss_mask, generated[number], generated[number + 1], number))
    out.append(len(new))
    if any(a > b for a, b in itertools.pairwise(out)):
        raise RecordError("it is unclear which message the changed tokens belong to")
    return out


def _switch(region: _Region, mask: Mask | None, left: bool, right: bool, number: int) -> int:
    """Where inside a change the mask switches between the two messages."""
    start, end = region[2:]
    if start == end:
        return start
    if mask is not None and left != right:
        own = mask[start:end] == left
        at = int(own.sum())
        if own[:at].all():
            return start + at
    raise RecordError(
        f"the tokens between message_log[{number}] and message_log[{number + 1}] changed, and it is unclear which "
        "of the two messages they belong to"
    )
