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
from tito_audit.chains.links import components

PROOF = -30.0
"""Tokens whose logprobs add up to this or less are never sampled twice by chance."""
_LEADERS = 8
"""How many events of the same tokens a row is compared with."""


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
    """How many other sequences train some of them first."""
    cause: Cause

    @property
    def tokens(self) -> int:
        """How many tokens are trained again."""
        return sum(end - start for start, end in self.runs)


class Doubles:
    """Doubles in two arrays; iterated in the order of their sequences."""

    def __init__(self, columns: Sequence[int] = (), runs: Sequence[int] = ()) -> None:
        """`columns` has for each its sequence, first, others and cause, and where its runs start and end."""
        table = np.array(columns, np.int64).reshape(-1, 6)
        self._columns = table[np.argsort(table[:, 0], kind="stable")]
        self._runs = np.array(runs, np.uint32).reshape(-1, 2)
        self.tokens = int((self._runs[:, 1] - self._runs[:, 0]).sum())
        self.calls = int(np.count_nonzero(table[:, 3] == _CAUSES.index(Cause.CALL)))
        """How many of them are calls, which have no mask."""

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


def merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of half-open runs, in order."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(runs):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


@dataclass(frozen=True, slots=True)
class Settled:
    """What the ledger of a run shows."""

    trained: int
    """Trained tokens, counted each time they are trained."""
    doubles: Doubles
    never: Numbers
    """`[M]` calls whose tokens no row trains, in logs whose rows train other calls."""
    undecided: Numbers
    """`[U]` sequences that train the tokens of another; whether these were sampled twice is unknown."""


def settle(ledger: Ledger) -> Settled:
    """What the run trains more than once, and what it never trains."""
    if not len(ledger):
        return Settled(0, Doubles(), np.empty(0, np.int64), np.empty(0, np.int64))
    shared = ledger.shared()
    of = ledger.sequences_of(shared)
    nodes = np.unique(ledger.spans["hash"][shared], return_inverse=True)[1].astype(np.int64)
    evidence, never = _calls_of_rows(ledger, of, nodes)
    unproven = ~evidence[of]
    unproven &= (np.bincount(nodes[unproven], minlength=len(nodes)) > 1)[nodes]
    doubles, runs, undecided = array("q"), array("I"), array("q")
    for members in _families(ledger, shared[unproven], of[unproven], nodes[unproven]):
        # Add what the sequences of a family train more than once, and those of which nothing shows it.
        members.sort(key=attrgetter("order"))
        by_node: dict[int, list[_Visit]] = {}
        for member in members:
            for span, node in member.nodes.items():
                by_node.setdefault(node, []).append((member, span))
        events, open_ = 0, set[int]()
        for visits in sorted(by_node.values(), key=lambda visits: visits[0][0].ends[visits[0][1]]):
            for event in _events(visits):
                events += 1
                _count(event, events)
            ids = [member.answer_id for member, _ in visits]
            unknown = all(math.isnan(member.totals[span]) for member, span in visits)
            if unknown and not (all(ids) and len(set(ids)) == len(ids)):
                open_ |= {member.number for member, span in visits[1:] if span not in member.event}
        for member in members:
            if member.again:
                again = merged(member.again)
                *others, first = member.leaders
                if sum(end - start for start, end in again) == sum(member.tokens):
                    cause = Cause.CALL if member.call else Cause.ROW
                else:
                    cause = Cause.HISTORY if member.history else Cause.PREFIX
                at = len(runs) // 2
                runs.extend(chain.from_iterable(again))
                doubles.extend((member.number, first, len(others), _CAUSES.index(cause), at, at + len(again)))
        undecided.extend(sorted(open_ - {member.number for member in members if member.again}))
    return Settled(ledger.trained(evidence), Doubles(doubles, runs), never, np.sort(np.array(undecided, np.int64)))


def _calls_of_rows(ledger: Ledger, of: Numbers, nodes: Numbers) -> tuple[NDArray[np.bool_], Numbers]:
    """`[N]` which sequences are calls that rows of the run train, so that only the rows count; and those calls of
    such logs that no row trains, if rows train most of the log."""
    calls, never = ledger.calls(), [np.empty(0, np.int64)]
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


def _families(ledger: Ledger, shared: Numbers, of: Numbers, nodes: Numbers) -> Iterator[list[_Member]]:
    """Sequences in groups that share spans, directly or through others, one group after the other."""
    stepwise = ledger.stepwise()
    numbers, first_visit, place = np.unique(of, return_index=True, return_inverse=True)
    _, first_of_node, node = np.unique(nodes, return_index=True, return_inverse=True)
    labels = components(len(of), first_visit[place], first_of_node[node])[first_visit]
    numbers = numbers[np.argsort(labels, kind="stable")]
    cuts = np.diff(np.sort(labels), prepend=-1, append=len(of)).nonzero()[0]
    for start, end in pairwise(cuts.tolist()):
        members = []
        for number in numbers[start:end].tolist():
            first, after = ledger.first_spans[number : number + 2].tolist()
            low, high = shared.searchsorted((first, after)).tolist()
            spans = ledger.spans[first:after]
            file = int(ledger.file_starts.searchsorted(number, "right")) - 1
            # Unknown logprobs count as certain; NaN means that none is known so far.
            unknown = np.isnan(spans["logprob"])
            totals = np.cumsum(np.where(unknown, 0.0, spans["logprob"]), dtype=np.float64)
            totals[np.logical_and.accumulate(unknown)] = np.nan
            members.append(
                _Member(
                    number,
                    file if stepwise[file] else -1,
                    spans["end"].tolist(),
                    spans["tokens"].tolist(),
                    totals.tolist(),
                    dict(zip((shared[low:high] - first).tolist(), nodes[low:high].tolist(), strict=True)),
                    int(spans["tokens"].nonzero()[0][-1]),
                    ledger.turn(number) is not None,
                    ledger.answer_id(number),
                    ledger.order(number),
                )
            )
        yield members


@dataclass(slots=True, eq=False)
class _Member:
    """A sequence of a family."""

    number: int
    steps: int
    """Its file, if that has one row per step; else -1."""
    ends: list[int]
    tokens: list[int]
    totals: list[float]
    """The logprob of all trained tokens up to each end."""
    nodes: dict[int, int]
    """The node of each span that another sequence has too."""
    last: int
    """Its last span that trains anything."""
    call: bool
    answer_id: int
    at: tuple[int, ...]
    """Where it is among the rows of the run."""
    again: list[tuple[int, int]] = field(default_factory=list)
    """Tokens that another sequence trains first."""
    leaders: dict[int, None] = field(default_factory=dict)
    history: bool = False
    """Whether it starts with another whole sequence."""
    event: dict[int, int] = field(default_factory=dict)
    """By span: the event that it was last assigned to."""

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key: the shortest sequence of a chain trains its tokens first; of equal ones, the first."""
        return self.ends[self.last], self.ends[-1], *self.at

    def runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """The trained tokens of the spans `first` to `last`."""
        spans = zip(self.ends[first : last + 1], self.tokens[first : last + 1], strict=True)
        return [(end - tokens, end) for end, tokens in spans if tokens]


_Visit = tuple[_Member, int]
"""A sequence and which of its spans ends at a node."""


def _events(visits: Sequence[_Visit]) -> list[list[_Visit]]:
    """Groups of these sequences that share one sampling event, each led by the one that trains the tokens
    first."""
    if any(member.totals[span] <= PROOF for member, span in visits):
        return _grouped(visits, ())
    answers: dict[int, list[_Visit]] = {}
    for visit in visits:
        if visit[0].answer_id:
            answers.setdefault(visit[0].answer_id, []).append(visit)
    same = [event for same in answers.values() for event in _grouped(same, ())]
    whole = [visit for visit in visits if visit[0].last <= visit[1] and visit[0].steps >= 0]
    passing = [visit for visit in visits if visit[0].last > visit[1] and visit[0].steps >= 0]
    return [*same, *(_grouped(passing, whole[:_LEADERS]) if whole else ())]


def _grouped(visits: Sequence[_Visit], leaders: Sequence[_Visit]) -> list[list[_Visit]]:
    """Events of several sequences: each joins the first one that it agrees with; without `leaders` it may lead."""
    events = [[leader] for leader in leaders]
    for visit in visits:
        event = next((event for event in events if _agree(event[0], visit)), None)
        if event is not None:
            event.append(visit)
        elif not leaders and len(events) < _LEADERS:
            events.append([visit])
    return [event for event in events if len(event) > 1]


def _agree(visit: _Visit, other: _Visit) -> bool:
    """Whether they may be one sampling event: no different server ids, no clearly different logprobs."""
    (a, at), (b, bt) = visit, other
    if a.answer_id and b.answer_id and a.answer_id != b.answer_id:
        return False
    total, other_total = a.totals[at], b.totals[bt]
    if math.isnan(total) or math.isnan(other_total) or sum(a.tokens[: at + 1]) != sum(b.tokens[: bt + 1]):
        return True
    return abs(total - other_total) <= 1 + abs(total + other_total) / 20


def _count(event: Sequence[_Visit], number: int) -> None:
    """Note for each sequence of an event which of its tokens earlier sequences train."""
    before = {(span, member.event.get(span - 1)) for member, span in event}
    # Up to the span before, these sequences were compared as one event already.
    compared = len(before) == 1 and None not in next(iter(before))
    covered: list[tuple[int, int]] = []
    leader, at = event[0]
    for member, span in event:
        runs = member.runs(span if compared else 0, span)
        both = _intersection(runs, covered)
        if both:
            member.again += both
            member.leaders.pop(leader.number, None)
            member.leaders[leader.number] = None
            member.history |= leader.last <= at and member.last > span
        covered = merged([*covered, *runs])
    for member, span in event:
        member.event[span] = number


def _intersection(runs: Sequence[tuple[int, int]], covered: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
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
