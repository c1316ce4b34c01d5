"""Counts a rollout's tokens by turn, position, logprob and role, for charts."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.roles import UNKNOWN, Roles
from tito_audit.record.arrays import Logprobs, Mask, Offsets
from tito_audit.record.finding import Finding, Where
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT
from tito_audit.viewer.model import LOGPROB_EDGES, POSITION_EDGES, STATES, TURNS, Counts, Measures

_DRIFT = ("TOK", "TPL")
_FAR = np.iinfo(np.int64).max
_POSITIONS: Offsets = np.array(POSITION_EDGES, np.int64)
_POSITION_CUTS: Offsets = np.append(_POSITIONS, _FAR)
_FINITE = np.finfo(np.float64).max
_LOGPROBS = np.array((-_FINITE, *LOGPROB_EDGES[1:], np.inf))
"""Bin edges; bin 0 and the last bin hold what is not finite."""
_UNKNOWN = len(_LOGPROBS)

assert LOGPROB_EDGES[0] == -np.inf
assert POSITION_EDGES[0] == 0


def measure(evidence: Evidence, findings: Sequence[Finding]) -> Measures:
    """Count one rollout's tokens; the state of a token is the severity of the worst TOK or TPL finding it is in.

    Generated tokens are the completions of the calls. If the log has no calls, they are the trained tokens of the
    training row, or without a mask those that the messages say were sampled. Positions count from the start of
    the call's prompt (of its completion, if the log lacks the prompt) or of the row.

    A finding in a prompt counts for the tokens of earlier completions that the prompt repeats, a finding in the
    training row for the tokens of completions in its range. An empty range covers no token.

    `roles` counts every token of the training row: trained by its mask, or without a mask if sampled. Without a
    training row, generated tokens count as trained and nothing else is counted. If neither mask nor messages say
    what was sampled, nothing is counted.
    """
    if turns := evidence.rollout.turns:  # a span per turn; empty for completions that the log does not hold
        spans = _GeneratedSpans(
            list(range(len(turns))),
            [0 if turn.prompt_ids is None else len(turn.prompt_ids) for turn in turns],
            [0 if turn.completion_ids is None else len(turn.completion_ids) for turn in turns],
            [None if turn.completion_ids is None else turn.completion_logprobs for turn in turns],
        )
    else:
        spans = _spans_of_row(evidence)
    # By role: how many tokens of the training row are trained and how many are not.
    row, columns = evidence.rollout.training_row, evidence.row
    trained = None if row is None else row.loss_mask
    out = Measures()
    if row is None:
        out.roles = {ASSISTANT: (spans.total, 0)} if spans.total else {}
    elif columns is None:
        if trained is not None and len(trained):
            count = int(np.count_nonzero(trained))
            out.roles = {UNKNOWN: (count, len(trained) - count)}
    else:
        trained = columns.sampled if trained is None else trained
        if isinstance(columns.roles, Roles):
            out.roles = columns.roles.token_counts(trained)
        else:
            every, those = Counter(columns.roles), Counter(compress(columns.roles, trained.tolist()))
            out.roles = {role: (those[role], count - those[role]) for role, count in every.items()}
    if not spans.total:
        return out
    bins = spans.logprob_bins()
    for turn, length in zip(spans.turns, spans.lengths, strict=True):
        out.by_turn[min(turn, TURNS - 1), 0] += length
    first = np.array(spans.starts, np.int64)[:, None]
    last = first + np.array(spans.lengths, np.int64)[:, None]
    out.by_position[:, 0] = np.diff(_POSITION_CUTS.clip(first, last), axis=1).sum(axis=0)
    if bins is None:
        out.without_logprob[0] = spans.total
    else:
        counts = np.bincount(bins, minlength=_UNKNOWN + 1)
        out.by_logprob[:, 0] = counts[1:-1]
        out.without_logprob[0] = counts[0] + counts[-1]
    drift = [finding for finding in findings if finding.code.startswith(_DRIFT)]
    if drift:
        # Move drifted tokens from the state `same`, in which all are counted, to their own.
        states = _token_states(evidence, spans, drift)
        at = states.nonzero()[0]
        state, offsets = states[at], np.array(spans.offsets())
        span = offsets.searchsorted(at, side="right") - 1
        turn = np.minimum(np.array(spans.turns)[span], TURNS - 1)
        position = np.array(spans.starts)[span] + at - offsets[span]
        _move_counts(out.by_turn, turn, state)
        _move_counts(out.by_position, _POSITIONS.searchsorted(position, side="right") - 1, state)
        bin_of = np.zeros(len(at), np.int64) if bins is None else bins[at]
        scored = (bin_of > 0) & (bin_of < _UNKNOWN)
        _move_counts(out.by_logprob, bin_of[scored] - 1, state[scored])
        _move_counts(out.without_logprob[None], np.zeros(int((~scored).sum()), np.int64), state[~scored])
    return out


@dataclass(slots=True)
class _GeneratedSpans:
    """The generated tokens of a rollout, concatenated: one span per run of tokens that a turn generated."""

    turns: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Position of each span's first token, counted from the start of its conversation."""
    lengths: list[int] = field(default_factory=list)
    logprobs: list[Logprobs | None] = field(default_factory=list)
    row_mask: Mask | None = None
    """`[T]` True for generated tokens of the training row; None if the log has calls."""

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def offsets(self) -> list[int]:
        """Index of each span's first token among all generated tokens."""
        return [0, *accumulate(self.lengths)][:-1]

    def logprob_bins(self) -> NDArray[np.int64] | None:
        """`[N]` int64, 1 + the logprob bin of every token (0, last: not finite); None if there are no logprobs."""
        if all(values is None for values in self.logprobs):
            return None
        parts = [
            np.full(length, np.nan) if values is None else values
            for values, length in zip(self.logprobs, self.lengths, strict=True)
        ]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return _LOGPROBS.searchsorted(values, side="right")


def _spans_of_row(evidence: Evidence) -> _GeneratedSpans:
    """The generated tokens of the training row, split where the next turn begins."""
    row, columns, mask = evidence.rollout.training_row, evidence.row, evidence.generated_in_row
    if row is None or mask is None:
        return _GeneratedSpans()
    runs = trained_runs(mask)
    sampled_runs = runs if columns is None or columns.sampled is mask else trained_runs(columns.sampled)
    firsts = [start for start, _ in sampled_runs]
    logprobs = row.logprobs
    if logprobs is not None and row.sentinel:  # not for 0.0, which may be a real logprob
        logprobs = np.where(logprobs == row.sentinel, np.nan, logprobs)
    spans = _GeneratedSpans(row_mask=mask)
    for start, end in runs:
        inner = firsts[bisect_right(firsts, start) : bisect_right(firsts, end - 1)]
        for first, last in pairwise((start, *inner, end)):
            spans.turns.append(max(bisect_right(firsts, first) - 1, 0))
            spans.starts.append(first)
            spans.lengths.append(last - first)
            spans.logprobs.append(None if logprobs is None else logprobs[first:last])
    return spans


def _token_states(evidence: Evidence, spans: _GeneratedSpans, findings: Sequence[Finding]) -> NDArray[np.uint8]:
    """`[N]` uint8: for every generated token the index of its state in STATES."""
    states = np.zeros(spans.total, np.uint8)
    offsets = spans.offsets()
    bases = np.array(offsets)
    before = None if spans.row_mask is None else np.concatenate(([0], spans.row_mask.cumsum()))
    links = {link.turn: link for link in evidence.links}
    by_severity = sorted(findings, key=attrgetter("severity"))
    placed = ((finding, *span) for finding in by_severity for span in finding.spans())
    for finding, turn, start, end in placed:
        hit, state = finding.hit, STATES.index(finding.severity.word)
        start = max(start, 0)
        if before is not None:
            if hit.where is Where.ROW:
                first, last = np.minimum((start, end), len(before) - 1)
                states[before[first] : before[last]] = state
        elif hit.where is Where.ROW:
            if evidence.row is not None:
                turns = evidence.row.turn[start:end]
                sampled = turns >= 0
                at = bases[turns[sampled]] + evidence.row.turn_offset[start:end][sampled]
                states[at] = state
        elif turn is not None and turn < len(offsets):
            # The completions, or parts of them, that lie in this range of the turn's prompt or completion.
            origins = [(turn, start, end)] if hit.where is Where.COMPLETION else []
            link = None if origins else links.get(turn)
            while link is not None and link.parent is not None:
                end = min(end, link.at, link.seen_at)
                prompt = evidence.rollout.turns[link.parent].prompt_ids
                if start >= end or prompt is None:
                    break
                if end > len(prompt):
                    origins.append((link.parent, max(start - len(prompt), 0), end - len(prompt)))
                link = links.get(link.parent)
            for sequence, first, last in origins:
                last = min(last, spans.lengths[sequence])
                states[offsets[sequence] + first : offsets[sequence] + max(first, last)] = state
    return states


def _move_counts(counts: Counts, at: NDArray[Any], state: NDArray[np.uint8]) -> None:
    moved = np.bincount(at * len(STATES) + state, minlength=counts.size).reshape(counts.shape)
    counts += moved
    counts[:, 0] -= moved.sum(axis=1)
