"""Fork: calls as training rows, one for each unbroken run of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.chains.histories import Histories, History
from tito_audit.chains.links import chain_to, last_calls
from tito_audit.record.arrays import Ids, Logprobs, Mask, as_floats, as_ids

Numbers: TypeAlias = Sequence[Any] | NDArray[Any]
SampledCall: TypeAlias = tuple[Numbers, Numbers] | tuple[Numbers, Numbers, Numbers | None]
"""(prompt_ids, completion_ids) or (prompt_ids, completion_ids, logprobs); the logprobs, one for each
completion token, may be None."""


@dataclass(frozen=True, slots=True)
class ForkedRow:
    """One training row: what the sampler saw and said in a run of calls, token for token."""

    token_ids: list[int]
    """`[T]` prompt and completion of the last call."""
    loss_mask: list[bool]
    """`[T]` True where a call that is trained in this row sampled the token."""
    logprobs: list[float]
    """`[T]` what the sampler gave, of all calls of the row; NaN where nothing was sampled or given."""
    calls: tuple[int, ...]
    """Numbers of the calls in the row, each continuing the one before."""
    trained: tuple[int, ...]
    """Those of them that are trained here and in no other row."""


@dataclass(frozen=True, slots=True)
class _Call:
    seen: Ids
    """`[P+C]` prompt and completion."""
    start: int
    """`P`, where the completion starts."""
    logprobs: Logprobs
    """`[C]` NaN where nothing was sampled or given."""
    sampled: Mask
    """`[C]` what of the completion the model sampled."""


def fork_rows(calls: Sequence[SampledCall], *, sampled: Sequence[Numbers | None] | None = None) -> list[ForkedRow]:
    """The training rows of a rollout's calls, in the order of the first call that each trains.

    A call continues the earlier call whose prompt and completion are the longest beginning of its own
    prompt, the latest of equals; so retries, branches and sub-agents come apart by themselves. Each run of
    calls from a first one to one that none continues is a row. A call that several rows hold is trained in
    the one whose last call came first; elsewhere it is context. A call that sampled nothing is not trained and
    ends no row, and a row with nothing to train is not made.

    `sampled` has for each call a mask over its completion, 1 where the model sampled the token, or None where it
    sampled all of them. What an environment wrote inside a completion is then never trained and has no logprob.

    NeMo-RL and Gym demand one growing sequence per rollout and fail a rollout whose prompt breaks it; here
    a break only begins the next row.

    ValueError for a call of other parts, for logprobs or a mask that are not one entry for each completion token,
    and for a mask of anything but 0 and 1; RecordError for what is no ids or no numbers.

    The second prompt holds 9 where 2, 3 was sampled, so nothing joins the two calls:

        >>> rows = fork_rows([([1], [2, 3]), ([1, 9, 4], [5]), ([1, 9, 4, 5, 6], [7])])
        >>> [(row.token_ids, row.trained) for row in rows]
        [([1, 2, 3], (0,)), ([1, 9, 4, 5, 6, 7], (1, 2))]

    An answer with the result of a tool inside, of which the loss leaves out 8, 8:

        >>> fork_rows([([1], [2, 8, 8, 3])], sampled=[[1, 0, 0, 1]])[0].loss_mask
        [False, True, False, False, True]
    """
    if sampled is not None and len(sampled) != len(calls):
        raise ValueError(f"{len(sampled)} masks of what was sampled for {len(calls)} calls")
    masks = [None] * len(calls) if sampled is None else sampled
    taken = [_as_call(call, mask, number) for number, (call, mask) in enumerate(zip(calls, masks, strict=True))]
    parents = _parents(taken)
    trained: set[int] = set()
    rows = []
    for leaf in _leaves(taken, parents):
        chain = chain_to(leaf, parents)
        fresh = tuple(k for k in chain if k not in trained and taken[k].sampled.any())
        trained.update(fresh)
        rows.append(_row(taken, chain, fresh))
    return sorted(rows, key=lambda row: row.trained[0])


def fork_cost(calls: Sequence[SampledCall], rows: Sequence[ForkedRow]) -> tuple[int, int]:
    """How many rows there are, and how many tokens more they hold than one row would.

    That one row is the longest call, prompt and completion: the least that holds the whole conversation.

        >>> calls = [([1], [2, 3]), ([1, 9, 4], [5])]
        >>> fork_cost(calls, fork_rows(calls))
        (2, 3)
    """
    lengths = [len(row.token_ids) for row in rows]
    longest = max((len(call[0]) + len(call[1]) for call in calls), default=0)
    return len(lengths), max(0, sum(lengths) - longest)


def _as_call(call: SampledCall, mask: Numbers | None, number: int) -> _Call:
    if isinstance(call, str) or not isinstance(call, Sequence) or len(call) not in (2, 3):
        raise ValueError(f"call {number} is not (prompt_ids, completion_ids) or (…, logprobs)")
    prompt = as_ids(call[0], f"calls[{number}] prompt_ids")
    completion = as_ids(call[1], f"calls[{number}] completion_ids")
    given = call[2] if len(call) == 3 else None
    logprobs = np.full(len(completion), np.nan)
    if given is not None:
        logprobs = as_floats(given, f"calls[{number}] logprobs")
    if len(logprobs) != len(completion):
        raise ValueError(
            f"call {number} has {len(logprobs)} logprobs and {len(completion)} completion tokens: "
            "which token each belongs to cannot be told"
        )
    sampled = _as_sampled(mask, len(completion), number)
    logprobs = np.where(sampled, logprobs, np.nan)
    return _Call(np.concatenate((prompt, completion)), len(prompt), logprobs, sampled)


def _as_sampled(mask: Numbers | None, size: int, number: int) -> Mask:
    """`[C]` what of a completion was sampled; all of it without a mask."""
    if mask is None:
        return np.ones(size, np.bool_)
    values = as_floats(mask, f"sampled[{number}]")
    if len(values) != size:
        raise ValueError(f"sampled[{number}] has {len(values)} entries for {size} completion tokens")
    if not ((values == 0) | (values == 1)).all():
        raise ValueError(f"sampled[{number}] holds other values than 0 and 1")
    return np.asarray(values == 1)


def _parents(calls: Sequence[_Call]) -> dict[int, int]:
    """Each call that continues an earlier one, with that call."""
    earlier = Histories()
    parents = {}
    for k, call in enumerate(calls):
        prompt = call.seen[: call.start]
        held = earlier.longest_prefix(prompt)
        if held is not None:
            parents[k] = held.turn
        if len(call.seen):
            earlier.add(History(k, prompt, call.seen))
    return parents


def _leaves(calls: Sequence[_Call], parents: Mapping[int, int]) -> list[int]:
    """The calls that sampled something and that no such call continues, directly or through others."""
    sampled = [k for k, call in enumerate(calls) if call.sampled.any()]
    kept = set(sampled)
    for k in reversed(range(len(calls))):
        if k in kept and k in parents:
            kept.add(parents[k])
    return last_calls(sampled, {k: parents[k] for k in kept if k in parents})


def _row(calls: Sequence[_Call], chain: Sequence[int], trained: Sequence[int]) -> ForkedRow:
    token_ids = calls[chain[-1]].seen
    loss_mask = np.zeros(len(token_ids), np.bool_)
    logprobs = np.full(len(token_ids), np.nan)
    for k in chain:
        start, end = calls[k].start, len(calls[k].seen)
        loss_mask[start:end] = calls[k].sampled & (k in trained)
        logprobs[start:end] = calls[k].logprobs
    return ForkedRow(token_ids.tolist(), loss_mask.tolist(), logprobs.tolist(), tuple(chain), tuple(trained))
