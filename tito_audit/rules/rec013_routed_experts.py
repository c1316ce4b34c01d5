"""REC013: routed experts that do not fit their tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Mask
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.runs import trained_runs
from tito_audit.record.token_extras import Routing
from tito_audit.rule import rule
from tito_audit.rules._beside import TokenSequence, token_sequences
from tito_audit.rules._words import counted

_MISSING = -1
"""What engines write where they captured nothing."""
_REPEATS = 8
"""This many equal rows in a run, of at least as many experts each, are no chance."""


@rule(
    "REC013",
    Severity.ERROR,
    headline="{n} beside routed experts that do not fit",
    needs=(Needs.EXPERTS_READ,),
)
def routed_experts(evidence: Evidence) -> Iterator[Hit]:
    """Routed experts do not fit their tokens.

    ## What it finds
    Experts (`routed_experts`, `rollout_routed_experts`, `rollout_expert_indices`) whose rows are of other
    tokens: as many as no way to write them explains. Engines write a row for each token or for each but the
    last, which is never fed; from the first token, from a stated one, or for what was sampled; a call may have
    only the rows that come after those of the previous one, and what stands behind the last sampled token may
    have none. Also bytes that are not of their shape, other
    numbers of layers or of experts in another call, ids below -1 or above the number of experts that the log
    states, and an expert that one layer chose twice for one token. A warning says that sampled tokens have a row
    of zeros, as buffers that nothing filled do, that many different tokens in a row share one row, or that an
    answer which newer weights went on with has the rows of each part from the first token on, as AReaL joins them.

    ## Why it matters
    With router replay the trainer sends each token to the experts of its row. A row too few moves every later
    token to the experts of its neighbour, and the ratio of trainer and sampler says nothing any more, at every
    layer.

    ## Example
    Two rows are missing:

    ```text
    error REC013 row 0:6
      `routed_experts` has 3 rows for 6 tokens: 2 rows missing; replay sends tokens to the experts
      of others
    ```

    ## Repair
    None: experts cannot be computed again without the sampler. A repair that changes tokens leaves the column
    out. Log them again, with all rows, or train without replay.
    """
    shapes: dict[tuple[int, ...], int | None] = {}
    widths: set[int] | None = None
    images = bool(evidence.present & Needs.IMAGES)
    for sequence in token_sequences(evidence):
        for unfit in sequence.beside.unreadable:
            if unfit.is_routing and unfit.contradicts_itself:
                yield sequence.hit(f"`{unfit.name}` holds {unfit.because}", "not of its shape")
        for routing in sequence.beside.routing:
            first, later = _possible_row_counts(sequence, routing)
            if routing.experts.ndim == 1:
                size = len(routing.experts)
                fits = {size // count for count in first | later if count and size % count == 0}
                if not images and (not fits or (widths is not None and not widths & fits)):
                    message = f"{size:,} numbers in `{routing.name}` are no rows of {_tokens(sequence)}"
                    yield sequence.hit(message, "rows of other tokens")
                widths = (widths & fits or widths) if widths and fits else fits or widths
                yield from _check_experts(sequence, routing, None)
                continue
            shape = routing.experts.shape[1:]
            if shapes and shape not in shapes:
                other = " x ".join(map(str, next(iter(shapes))))
                message = (
                    f"`{routing.name}` has rows of {' x '.join(map(str, shape))} experts, others have {other}"
                )
                yield sequence.hit(message, "another shape")
            shapes.setdefault(shape, sequence.turn)
            count, most = len(routing.experts), max(first, default=0)
            start, end = 0, count
            if count > most:
                # The rows without padding on either side: zeros, as in verl's tensors, or `_MISSING`.
                flat = routing.experts.reshape(count, -1)
                inside = (~((flat == 0).all(axis=1) | (flat == _MISSING).all(axis=1))).nonzero()[0]
                start, end = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
            if not images and count not in first | later and (count < most or end - start > most):
                message = f"`{routing.name}` has {counted(count, 'row')} for {_tokens(sequence)}"
                parts = sequence.resumed_at
                if parts and count - sum(parts) + len(parts) in first:
                    # inclusionAI/AReaL `areal/infra/remote_inf_engine.py`; its trainer refuses so many rows.
                    message += (
                        f": those of {counted(len(parts) + 1, 'part')} that different weights sampled, each from "
                        "the first token on; replay has to leave out what a later part repeats"
                    )
                    yield sequence.hit(message, "rows of several parts", severity=Severity.WARNING)
                    yield from _check_experts(sequence, routing, None)
                    continue
                missing = len(sequence.ids) - routing.start - 1 - count
                message += f" from token {routing.start} on" if routing.start else ""
                message += f": {counted(missing, 'row')} missing" if missing > 0 else ""
                message += "; replay sends tokens to the experts of others"
                yield sequence.hit(message, "rows of other tokens")
                continue
            # If there may be rows of the response alone, or an image takes several, their tokens are unknown.
            certain = not images and (count in first or (count > most >= end))
            yield from _check_experts(sequence, routing, routing.start if certain else None)


def _possible_row_counts(sequence: TokenSequence, routing: Routing) -> tuple[set[int], set[int]]:
    """The row counts that fit all tokens, or those from the stated one on; and those that fit later tokens alone.

    Tokens after the last sampled one may have no rows: SkyRL and verl append them after the last call.
    """
    size, sampled = len(sequence.ids), sequence.sampled.nonzero()[0]
    last = int(sampled[-1]) if len(sampled) else size - 1
    rows = {count - routing.start for count in (*range(last, size), size) if count >= routing.start}
    begins = sampled[:1].tolist() if sequence.response is None else [sequence.response]
    later = [] if routing.start else [*begins, sequence.fed]
    return rows, {size - at - by for at in later if at is not None for by in (0, 1) if at + by <= size} - rows


def _tokens(sequence: TokenSequence) -> str:
    return counted(len(sequence.ids), "token")


def _check_experts(sequence: TokenSequence, routing: Routing, first: int | None) -> Iterator[Hit]:
    """Hits on wrong experts; with `first`, the token of the first row, also on rows of zeros and equal rows."""
    experts = routing.experts.astype(np.int64)
    if not experts.size:
        return
    least, most = int(experts.min()), int(experts.max())
    if least < _MISSING or (routing.count is not None and most >= routing.count):
        of = "" if routing.count is None else f" of {counted(routing.count, 'expert')}"
        number = least if least < _MISSING else most
        yield sequence.hit(f"`{routing.name}` names expert {number}{of}", "experts out of range")
        return
    if experts.ndim != 3:
        return
    if experts.shape[2] > 1:
        ordered = np.sort(experts, axis=2)
        twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] > 0)).any(axis=(1, 2))
        if twice.any():
            message = f"{counted(int(twice.sum()), 'row')} of `{routing.name}` with one expert twice in a layer"
            yield sequence.hit(message, "one expert twice", None if first is None else twice.nonzero()[0] + first)
            return
    if first is None:
        return
    flat = experts.reshape(len(experts), -1)[: max(len(sequence.ids) - first - 1, 0)]
    sampled = sequence.sampled[first : first + len(flat)]
    if experts.shape[2] > 1:
        empty = sampled & np.asarray((flat == 0).all(axis=1))
        if empty.any():
            message = f"`{routing.name}` has only zeros for {counted(int(empty.sum()), 'sampled token')}"
            message += ": nothing was captured there"
            yield sequence.hit(message, "rows of zeros", empty.nonzero()[0] + first, Severity.WARNING)
            return
    if flat.shape[1] < _REPEATS or len(flat) < _REPEATS:
        return
    captured: Mask = np.asarray((flat > 0).any(axis=1))
    equal = np.concatenate([[False], (flat[1:] == flat[:-1]).all(axis=1) & captured[1:]]) & sampled
    for start, end in trained_runs(equal):
        tokens = sequence.ids[first + start - 1 : first + end]
        if end - start + 1 >= _REPEATS and len(np.unique(tokens)) >= _REPEATS // 2:
            message = f"{counted(end - start + 1, 'token')} in a row have the same experts in every layer"
            at = np.arange(start - 1, end) + first
            yield sequence.hit(message, "repeated rows", at, Severity.WARNING)
