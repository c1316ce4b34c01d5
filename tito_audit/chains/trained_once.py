"""Which sampled tokens the rows of a run train more than once, and which calls no row trains.

Two rows that train the same tokens after the same context either train one sampling event twice, or two events
that gave the same tokens by chance, as samples of a group may. An independent sample repeats tokens with
probability exp(sum of their logprobs), so below exp(PROOF) chance is ruled out: a log of 10 million rows in groups
of 16 has about 10^8 pairs with the same prompt, of which 10^-5 are expected to agree by chance in such tokens.
Clearly different logprobs mean two events. Less proof is needed for rows with the same server id, and in logs with
one row per step, where most rows continue the row before them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from tito_audit.chains.ledger import Ledger, Numbers
from tito_audit.chains.links import connected_components

PROOF = -30.0
"""Tokens whose logprobs add up to this or less are not sampled twice by chance."""
_LEADERS = 8
"""Sampling events of the same tokens that a row is compared with."""


class Cause(StrEnum):
    """How tokens come to be trained more than once."""

    HISTORY = "history trained again"
    PREFIX = "shared prefix"
    ROW = "duplicated row"
    CALL = "duplicated call"


_CAUSES = tuple(Cause)


@dataclass(frozen=True, slots=True)
class Double:
    """A sequence that trains tokens already trained by another sequence."""

    sequence: int
    runs: tuple[tuple[int, int], ...]
    first: int
    """The sequence that trains the last of these tokens first."""
    others: int
    """Further sequences that train some of them first."""
    cause: Cause

    @property
    def tokens(self) -> int:
        """How many tokens are trained again."""
        return sum(end - start for start, end in self.runs)


class Doubles:
    """Doubles in two arrays, in the order of their sequences."""

    def __init__(self, columns: Sequence[int] = (), runs: Sequence[int] = ()) -> None:
        """`columns` is flat: sequence, first, others, cause, and `[start, end)` of its runs, for each double."""
        table = np.array(columns, np.int64).reshape(-1, 6)
        self._columns = table[np.argsort(table[:, 0], kind="stable")]
        self._runs = np.array(runs, np.uint32).reshape(-1, 2)
        self.tokens = int((self._runs[:, 1] - self._runs[:, 0]).sum())
        self.calls = int(np.count_nonzero(table[:, 3] == _CAUSES.index(Cause.CALL)))
        """Doubles that are whole calls, which have no mask."""

    def __len__(self) -> int:
        return len(self._columns)

    def __iter__(self) -> Iterator[Double]:
        return map(self._at, range(len(self)))

    def of(self, sequence: int) -> Double | None:
        """The double of a sequence; None if it trains nothing again."""
        at = int(np.searchsorted(self._columns[:, 0], sequence))
        return self._at(at) if at < len(self) and self._columns[at, 0] == sequence else None

    def _at(self, number: int) -> Double:
        sequence, first, others, cause, start, end = self._columns[number].tolist()
        runs = tuple((low, high) for low, high in self._runs[start:end].tolist())
        return Double(sequence, runs, first, others, _CAUSES[cause])


def merge_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of half-open runs, in order."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(runs):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


@dataclass(frozen=True, slots=True)
class RepeatedTraining:
    """What a run trains more than once, or never."""

    trained: int
    """Trained tokens, counted as often as they are trained."""
    doubles: Doubles
    never: Numbers
    """`[M]` calls whose tokens no row trains, in logs whose rows train other calls."""
    undecided: Numbers
    """`[U]` sequences that train the same tokens as another, sampled once or twice."""


def find_repeated_training(ledger: Ledger) -> RepeatedTraining:
    """The repeated training in a run, and the calls that it never trains."""
    if not len(ledger):
        return RepeatedTraining(0, Doubles(), np.empty(0, np.int64), np.empty(0, np.int64))
    shared = ledger.find_shared_spans()
    of = ledger.sequences_of(shared)
    nodes = np.unique(ledger.spans["hash"][shared], return_inverse=True)[1].astype(np.int64)
    evidence, never = _calls_covered_by_rows(ledger, of, nodes)
    unproven = ~evidence[of]
    unproven &= (np.bincount(nodes[unproven], minlength=len(nodes)) > 1)[nodes]
    doubles, runs, undecided = array("q"), array("I"), array("q")
    for members in _sequences_sharing_spans(ledger, shared[unproven], of[unproven], nodes[unproven]):
        # Add what the sequences of a family train more than once, and those of which nothing shows it.
        members.sort(key=attrgetter("order"))
        by_node: dict[int, list[_Visit]] = {}
        for member in members:
            for span, node in member.nodes.items():
                by_node.setdefault(node, []).append((member, span))
        events, open_ = 0, set[int]()
        for visits in sorted(by_node.values(), key=lambda visits: visits[0][0].ends[visits[0][1]]):
            for event in _sampling_events(visits):
                events += 1
                _mark_repeats(event, events)
            ids = [member.answer_id for member, _ in visits]
            unknown = all(math.isnan(member.totals[span]) for member, span in visits)
            if unknown and not (all(ids) and len(set(ids)) == len(ids)):
                open_ |= {member.number for member, span in visits[1:] if span not in member.event}
        for member in members:
            if member.again:
                again = merge_runs(member.again)
                *others, first = member.leaders
                if sum(end - start for start, end in again) == sum(member.tokens):
                    cause = Cause.CALL if member.call else Cause.ROW
                else:
                    cause = Cause.HISTORY if member.history else Cause.PREFIX
                at = len(runs) // 2
                runs.extend(chain.from_iterable(again))
                doubles.extend((member.number, first, len(others), _CAUSES.index(cause), at, at + len(again)))
        undecided.extend(sorted(open_ - {member.number for member in members if member.again}))
    return RepeatedTraining(
        ledger.count_trained_tokens(evidence),
        Doubles(doubles, runs),
        never,
        np.sort(np.array(undecided, np.int64)),
    )


def _calls_covered_by_rows(ledger: Ledger, of: Numbers, nodes: Numbers) -> tuple[NDArray[np.bool_], Numbers]:
    """`[N]` True for the calls of files whose calls rows train, as then only the rows count; and those of these
    calls that no row trains, if rows train most calls of the file."""
    calls, never = ledger.is_call(), [np.empty(0, np.int64)]
    by_row = np.zeros(len(nodes) + 1, np.bool_)
    by_row[nodes[~calls[of]]] = True
    met = np.zeros(len(ledger), np.bool_)
    met[of[by_row[nodes] & calls[of]]] = True
    for start, end in ledger.file_ranges():
        met_calls, count = calls[start:end], int(np.count_nonzero(met[start:end]))
        if 2 * count > np.count_nonzero(met_calls):
            never.append((met_calls & ~met[start:end]).nonzero()[0] + start)
        met_calls &= count > 0
    numbers = np.concatenate(never)
    hashes = ledger.spans["hash"][ledger.first_spans[numbers + 1].astype(np.int64) - 1]
    return calls, np.sort(numbers[np.unique(hashes, return_index=True)[1]])  # without repeats of the same tokens


def _sequences_sharing_spans(
    ledger: Ledger, shared: Numbers, of: Numbers, nodes: Numbers
) -> Iterator[list[_Sequence]]:
    """The groups of sequences that share spans, directly or through others."""
    stepwise = ledger.has_row_per_step()
    numbers, first_visit, place = np.unique(of, return_index=True, return_inverse=True)
    _, first_of_node, node = np.unique(nodes, return_index=True, return_inverse=True)
    labels = connected_components(len(of), first_visit[place], first_of_node[node])[first_visit]
    numbers = numbers[np.argsort(labels, kind="stable")]
    cuts = np.diff(np.sort(labels), prepend=-1, append=len(of)).nonzero()[0]
    for start, end in pairwise(cuts.tolist()):
        members = []
        for number in numbers[start:end].tolist():
            first, after = ledger.first_spans[number : number + 2].tolist()
            low, high = shared.searchsorted((first, after)).tolist()
            spans = ledger.spans[first:after]
            file = int(ledger.file_starts.searchsorted(number, "right")) - 1
            # Unknown logprobs count as 0, which proves nothing; the total is NaN while none is known.
            unknown = np.isnan(spans["logprob"])
            totals = np.cumsum(np.where(unknown, 0.0, spans["logprob"]), dtype=np.float64)
            totals[np.logical_and.accumulate(unknown)] = np.nan
            members.append(
                _Sequence(
                    number,
                    file if stepwise[file] else -1,
                    spans["end"].tolist(),
                    spans["tokens"].tolist(),
                    totals.tolist(),
                    dict(zip((shared[low:high] - first).tolist(), nodes[low:high].tolist(), strict=True)),
                    int(spans["tokens"].nonzero()[0][-1]),
                    ledger.turn(number) is not None,
                    ledger.answer_id(number),
                    ledger.sort_key(number),
                )
            )
        yield members


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence of a group, with lists over its spans."""

    number: int
    steps: int
    """Its file, if that has one row per step; else -1."""
    ends: list[int]
    tokens: list[int]
    totals: list[float]
    """The summed logprob of all trained tokens up to each end."""
    nodes: dict[int, int]
    """By span that another sequence has too, a number of that hash."""
    last: int
    """Its last span that trains anything."""
    call: bool
    answer_id: int
    at: tuple[int, ...]
    """Sorts it among the rows of the run."""
    again: list[tuple[int, int]] = field(default_factory=list)
    """Token ranges that another sequence trains first."""
    leaders: dict[int, None] = field(default_factory=dict)
    """The sequences that train them first, the last one last."""
    history: bool = False
    """Whether it starts with another whole sequence."""
    event: dict[int, int] = field(default_factory=dict)
    """By span, the number of its sampling event."""

    @property
    def order(self) -> tuple[int, ...]:
        """A sort key: the shortest sequence of a chain trains its tokens first; of equal ones, the first."""
        return self.ends[self.last], self.ends[-1], *self.at

    def runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """The token ranges that the spans `first` to `last` train."""
        spans = zip(self.ends[first : last + 1], self.tokens[first : last + 1], strict=True)
        return [(end - tokens, end) for end, tokens in spans if tokens]


_Visit = tuple[_Sequence, int]
"""A sequence, and its span with a certain hash."""


def _sampling_events(visits: Sequence[_Visit]) -> list[list[_Visit]]:
    """The visits that share one sampling event, in groups led by the sequence that trains the tokens first."""
    if any(member.totals[span] <= PROOF for member, span in visits):
        return _group_visits(visits, ())
    answers: dict[int, list[_Visit]] = {}
    for visit in visits:
        if visit[0].answer_id:
            answers.setdefault(visit[0].answer_id, []).append(visit)
    same = [event for same in answers.values() for event in _group_visits(same, ())]
    whole = [visit for visit in visits if visit[0].last <= visit[1] and visit[0].steps >= 0]
    passing = [visit for visit in visits if visit[0].last > visit[1] and visit[0].steps >= 0]
    return [*same, *(_group_visits(passing, whole[:_LEADERS]) if whole else ())]


def _group_visits(visits: Sequence[_Visit], leaders: Sequence[_Visit]) -> list[list[_Visit]]:
    """Groups of visits: each joins the first leader that it may share an event with, or leads if none is given."""
    events = [[leader] for leader in leaders]
    for visit in visits:
        event = next((event for event in events if _may_be_one_event(event[0], visit)), None)
        if event is not None:
            event.append(visit)
        elif not leaders and len(events) < _LEADERS:
            events.append([visit])
    return [event for event in events if len(event) > 1]


def _may_be_one_event(visit: _Visit, other: _Visit) -> bool:
    """Whether two visits may be one sampling event: no different answer ids, no clearly different logprobs."""
    (a, at), (b, bt) = visit, other
    if a.answer_id and b.answer_id and a.answer_id != b.answer_id:
        return False
    total, other_total = a.totals[at], b.totals[bt]
    if math.isnan(total) or math.isnan(other_total) or sum(a.tokens[: at + 1]) != sum(b.tokens[: bt + 1]):
        return True
    return abs(total - other_total) <= 1 + abs(total + other_total) / 20


def _mark_repeats(event: Sequence[_Visit], number: int) -> None:
    """Record for each sequence of an event which of its tokens earlier sequences train."""
    before = {(span, member.event.get(span - 1)) for member, span in event}
    # Whether these sequences are already compared up to the span before, as one event.
    compared = len(before) == 1 and None not in next(iter(before))
    covered: list[tuple[int, int]] = []
    leader, at = event[0]
    for member, span in event:
        runs = member.runs(span if compared else 0, span)
        both = _intersect_runs(runs, covered)
        if both:
            member.again += both
            member.leaders.pop(leader.number, None)
            member.leaders[leader.number] = None
            member.history |= leader.last <= at and member.last > span
        covered = merge_runs([*covered, *runs])
    for member, span in event:
        member.event[span] = number


def _intersect_runs(runs: Sequence[tuple[int, int]], covered: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of runs that lie in others; both in order."""
    out, at = [], 0
    for start, end in runs:
        while at < len(covered) and covered[at][1] <= start:
            at += 1
        for low, high in covered[at:]:
            if low >= end:
                break
            out.append((max(start, low), min(end, high)))
    return out
