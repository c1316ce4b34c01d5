"""Which tokens end sampled turns, and what follows them in later prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from tito_audit.evidence.reference import Reference
from tito_audit.identify.model import Ending
from tito_audit.record.arrays import Ids
from tito_audit.record.rollout import Rollout
from tito_audit.record.runs import trained_runs

_CUT_OFF = frozenset(("length", "max_tokens", "abort", "error"))
_MOST = 6
_FOLLOWING = 32
"""Most tokens between an answer and the next message."""


def endings(rollouts: Iterable[Rollout], reference: Reference) -> tuple[Ending, ...]:
    """The control tokens that end sampled turns, the most frequent first."""
    ends = reference.end_ids()
    turns: Counter[int] = Counter()
    after: dict[int, Counter[str]] = {}
    for rollout in rollouts:
        for answer, rest in _answers(rollout):
            last = int(answer[-1])
            if last in ends:
                turns[last] += 1
                if rest is not None:
                    after.setdefault(last, Counter())[_gap(rest, reference)] += 1
    vocabulary = reference.vocabulary
    return tuple(
        Ending(one, vocabulary.piece(one), number, after[one].most_common(1)[0][0] if one in after else None)
        for one, number in turns.most_common(_MOST)
    )


def _answers(rollout: Rollout) -> Iterator[tuple[Ids, Ids | None]]:
    """Every sampled turn that was not cut off, with the ids that follow it in the next prompt or the row."""
    for turn, later in zip(rollout.turns, (*rollout.turns[1:], None), strict=False):
        ids = turn.completion_ids
        if ids is None or not len(ids) or turn.finish_reason in _CUT_OFF:
            continue
        seen, prompt = turn.seen_ids, later.prompt_ids if later is not None else None
        goes_on = seen is not None and prompt is not None and len(prompt) > len(seen)
        same = goes_on and seen is not None and prompt is not None and np.array_equal(prompt[: len(seen)], seen)
        yield ids, prompt[len(seen) :] if same and prompt is not None and seen is not None else None
    row = rollout.training_row
    if not rollout.turns and row is not None and row.loss_mask is not None:
        for start, end in trained_runs(row.loss_mask):
            rest = row.token_ids[end:]
            yield row.token_ids[start:end], rest if len(rest) else None


def _gap(rest: Ids, reference: Reference) -> str:
    """The text of these ids before the next control token."""
    first = rest[:_FOLLOWING]
    control = np.flatnonzero(reference.vocabulary.control(first))
    return reference.text(first[: int(control[0])] if len(control) else first)
