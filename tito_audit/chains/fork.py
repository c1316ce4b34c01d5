"""fork_rows: the calls of a rollout as training rows, one for each unbroken chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.chains.histories import Histories, History
from tito_audit.chains.links import chain_to
from tito_audit.record.arrays import Ids, Logprobs, Mask, as_floats, as_ids

Numbers: TypeAlias = Sequence[Any] | NDArray[Any]
SampledCall: TypeAlias = tuple[Numbers, Numbers] | tuple[Numbers, Numbers, Numbers | None]
"""(prompt_ids, completion_ids) or (prompt_ids, completion_ids, logprobs); the logprobs, one for each
completion token, may be None."""


@dataclass(frozen=True, slots=True)
class ForkedRow:
    """One training row: what the model saw and sampled in a chain of calls, token for token."""

    token_ids: list[int]
    """`[T]` prompt and completion of the last call."""
    loss_mask: list[bool]
    """`[T]` True where a call that is trained in this row sampled the token."""
    logprobs: list[float]
    """`[T]` the sampler's logprobs, from all calls of the row; NaN where there are none."""
    calls: tuple[int, ...]
    """Numbers of its calls, each continuing the one before."""
    trained: tuple[int, ...]
    """The calls that are trained in this row and in no other."""


@dataclass(frozen=True, slots=True)
class _CheckedCall:
    seen: Ids
    """`[P+C]` prompt and completion."""
    start: int
    """`P`, where the completion starts."""
    logprobs: Logprobs
    """`[C]` NaN where there are none."""
    sampled: Mask
    """`[C]` True where the model sampled the token."""


def fork_rows(calls: Sequence[SampledCall], *, sampled: Sequence[Numbers | None] | None = None) -> list[ForkedRow]:
    """The training rows of a rollout's calls, in the order of the first call that each trains.

    A call continues the earlier call whose prompt and completion are the longest prefix of its own prompt, or the
    latest of several equal ones. This separates retries, branches and sub-agents. Each chain from a first call to
    one that no call continues is a row. A call that is in several rows is trained in the row whose last call came
    first; in the others it is context. A call that sampled nothing is not trained and ends no row; a row with
    nothing to train is left out.

    `sampled` has a mask over each call's completion, 1 where the model sampled the token, or None if it sampled
    all of them. Tokens that an environment wrote inside a completion are then never trained and have no logprob.

    NeMo-RL and Gym require one growing sequence per rollout and reject a rollout with a prompt that breaks it;
    here a break just starts the next row.

    ValueError if a call is not such a tuple, if logprobs or a mask do not have one entry for each completion
    token, or if a mask holds anything but 0 and 1; RecordError if ids are not token ids or logprobs not numbers.

    The second prompt holds 9 where 2, 3 was sampled, so it does not continue the first call:

        >>> rows = fork_rows([([1], [2, 3]), ([1, 9, 4], [5]), ([1, 9, 4, 5, 6], [7])])
        >>> [(row.token_ids, row.trained) for row in rows]
        [([1, 2, 3], (0,)), ([1, 9, 4, 5, 6, 7], (1, 2))]

    An answer with a tool result inside, 8, 8, which the loss leaves out:

        >>> fork_rows([([1], [2, 8, 8, 3])], sampled=[[1, 0, 0, 1]])[0].loss_mask
        [False, True, False, False, True]
    """
    if sampled is not None and len(sampled) != len(calls):
        raise ValueError(f"sampled has {len(sampled)} masks for {len(calls)} calls")
    masks = [None] * len(calls) if sampled is None else sampled
    sampled_calls = [
        _check_call(call, mask, number) for number, (call, mask) in enumerate(zip(calls, masks, strict=True))
    ]
    earlier = Histories()
    parents = {}
    for k, call in enumerate(sampled_calls):
        prompt = call.seen[: call.start]
        history = earlier.longest_prefix(prompt)
        if history is not None:
            parents[k] = history.turn
        if len(call.seen):
            earlier.add(History(k, prompt, call.seen))
    leaves: list[int] = []
    continued: set[int] = set()  # by a call that sampled something, directly or not
    for k in reversed(range(len(calls))):
        samples = bool(sampled_calls[k].sampled.any())
        if samples and k not in continued:
            leaves.append(k)
        if (samples or k in continued) and k in parents:
            continued.add(parents[k])
    trained: set[int] = set()
    rows = []
    for leaf in reversed(leaves):
        chain = chain_to(leaf, parents)
        fresh = tuple(k for k in chain if k not in trained and sampled_calls[k].sampled.any())
        trained.update(fresh)
        token_ids = sampled_calls[leaf].seen
        loss_mask, logprobs = np.zeros(len(token_ids), np.bool_), np.full(len(token_ids), np.nan)
        for k in chain:
            call = sampled_calls[k]
            completion = slice(call.start, len(call.seen))
            loss_mask[completion] = call.sampled & (k in fresh)
            logprobs[completion] = call.logprobs
        rows.append(ForkedRow(token_ids.tolist(), loss_mask.tolist(), logprobs.tolist(), chain, fresh))
    return sorted(rows, key=lambda row: row.trained[0])


def fork_cost(calls: Sequence[SampledCall], rows: Sequence[ForkedRow]) -> tuple[int, int]:
    """How many rows there are, and how many more tokens they hold than a single row would.

    That single row is the prompt and completion of the longest call.

        >>> calls = [([1], [2, 3]), ([1, 9, 4], [5])]
        >>> fork_cost(calls, fork_rows(calls))
        (2, 3)
    """
    lengths = [len(row.token_ids) for row in rows]
    longest = max((len(call[0]) + len(call[1]) for call in calls), default=0)
    return len(lengths), max(0, sum(lengths) - longest)


def _check_call(call: SampledCall, mask: Numbers | None, number: int) -> _CheckedCall:
    if isinstance(call, str) or not isinstance(call, Sequence) or len(call) not in (2, 3):
        raise ValueError(f"call {number} is not (prompt_ids, completion_ids) or (…, logprobs)")
    prompt = as_ids(call[0], f"calls[{number}] prompt_ids")
    completion = as_ids(call[1], f"calls[{number}] completion_ids")
    logprobs = np.full(len(completion), np.nan)
    if len(call) == 3 and call[2] is not None:
        logprobs = as_floats(call[2], f"calls[{number}] logprobs")
    if len(logprobs) != len(completion):
        raise ValueError(
            f"call {number} has {len(logprobs)} logprobs and {len(completion)} completion tokens: "
            "which logprob belongs to which token is unknown"
        )
    # `[C]` which completion tokens were sampled; all of them without a mask.
    size = len(completion)
    if mask is None:
        sampled = np.ones(size, np.bool_)
    else:
        values = as_floats(mask, f"sampled[{number}]")
        if len(values) != size:
            raise ValueError(f"sampled[{number}] has {len(values)} entries for {size} completion tokens")
        if not ((values == 0) | (values == 1)).all():
            raise ValueError(f"sampled[{number}] holds values other than 0 and 1")
        sampled = np.asarray(values == 1)
    logprobs = np.where(sampled, logprobs, np.nan)
    return _CheckedCall(np.concatenate((prompt, completion)), len(prompt), logprobs, sampled)
