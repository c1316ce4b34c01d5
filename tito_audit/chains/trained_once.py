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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from tito_audit.chains.doubles import Cause, Double, Doubles, merged
from tito_audit.chains.ledger import BLOCK, Ledger, Numbers

PROOF = -30.0
"""Tokens whose logprobs add up to this or less are never sampled twice by chance."""
_STEPS = 3
"""The fewest rows that continue the row before them in a log with one row per step."""
_LEADERS = 8
"""How many events of the same tokens a row is compared with."""


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
    families = _Families(ledger, shared[unproven], of[unproven], nodes[unproven])
    doubles, undecided = Doubles(), array("q")
    for family in families:
        family.settle(doubles, undecided)
    return Settled(ledger.trained(evidence), doubles, never, np.sort(np.array(undecided, np.int64)))


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


def _stepwise(ledger: Ledger) -> NDArray[np.bool_]:
    """`[F]` which logs have one row per step: most rows with several spans continue the whole row before them."""
    counts = [_links(ledger, start, end) for start, end in ledger.file_ranges()]
    return np.array([links >= _STEPS and 2 * links > several for links, several in counts], np.bool_)


def _links(ledger: Ledger, start: int, end: int) -> tuple[int, int]:
    """How many of these sequences continue the whole sequence before them, and how many have several spans."""
    hashes, links, total = ledger.spans["hash"], 0, 0
    for at in range(start, end, BLOCK):
        last, several = ledger.trained_ends(max(at - 1, start), min(at + BLOCK, end))
        later = several[1:].nonzero()[0] + 1
        before, whole = last[later], hashes[last[later - 1]]
        # The end of the span before, or the token after it.
        links += int(np.count_nonzero((hashes[before - 2] == whole) | (hashes[before - 1] == whole)))
        total += int(np.count_nonzero(several[int(at > start) :]))
    return links, total


class _Families:
    """Sequences in groups that share spans, one group after the other."""

    def __init__(self, ledger: Ledger, shared: Numbers, of: Numbers, nodes: Numbers) -> None:
        self._ledger, self._first = ledger, ledger.first_spans
        self._stepwise = _stepwise(ledger)
        self._shared, self._nodes = shared, nodes
        numbers, place = np.unique(of, return_inverse=True)
        labels = _labels(len(numbers), place, nodes)
        self._numbers = numbers[np.argsort(labels, kind="stable")]
        self._cuts = np.diff(np.sort(labels), prepend=-1, append=len(numbers)).nonzero()[0]

    def __iter__(self) -> Iterator[_Family]:
        for start, end in zip(self._cuts[:-1].tolist(), self._cuts[1:].tolist(), strict=True):
            yield _Family([self._member(number) for number in self._numbers[start:end].tolist()])

    def _member(self, number: int) -> _Member:
        first, end = int(self._first[number]), int(self._first[number + 1])
        low, high = self._shared.searchsorted((first, end)).tolist()
        nodes = dict(zip((self._shared[low:high] - first).tolist(), self._nodes[low:high].tolist(), strict=True))
        spans = self._ledger.spans[first:end]
        file = int(self._ledger.file_starts.searchsorted(number, "right")) - 1
        tokens = spans["tokens"].tolist()
        return _Member(
            number,
            file if self._stepwise[file] else -1,
            spans["end"].tolist(),
            tokens,
            _totals(spans["logprob"]),
            nodes,
            max(span for span, count in enumerate(tokens) if count),
            self._ledger.turn(number) is not None,
            self._ledger.answer_id(number),
            self._ledger.order(number),
        )


def _labels(count: int, place: Numbers, nodes: Numbers) -> Numbers:
    """`[count]` one number for all sequences that are linked by nodes: the lowest of them."""
    labels = np.arange(count)
    lowest = np.empty(int(nodes.max()) + 1 if len(nodes) else 0, np.int64)
    while True:
        lowest[:] = count
        np.minimum.at(lowest, nodes, labels[place])
        new = labels.copy()
        np.minimum.at(new, place, lowest[nodes])
        new = np.minimum(new, new[new])
        if np.array_equal(new, labels):
            return labels
        labels = new


def _totals(logprobs: NDArray[np.float32]) -> list[float]:
    """The logprob of each span and all before it; unknown logprobs count as certain, and NaN means that none is
    known."""
    unknown = np.isnan(logprobs)
    sums = np.cumsum(np.where(unknown, 0.0, logprobs), dtype=np.float64)
    sums[np.logical_and.accumulate(unknown)] = np.nan
    return list(sums.tolist())


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


_Held = tuple[_Member, int]
"""A sequence and which of its spans ends at a node."""


class _Family:
    """Sequences that share spans, directly or through others."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self.members = sorted(members, key=attrgetter("order"))
        self._nodes: dict[int, list[_Held]] = {}
        for member in self.members:
            for span, node in member.nodes.items():
                self._nodes.setdefault(node, []).append((member, span))

    def settle(self, doubles: Doubles, undecided: array[int]) -> None:
        """Add what the sequences train more than once, and those of which nothing shows it."""
        events, open_ = 0, set[int]()
        for visits in sorted(self._nodes.values(), key=lambda visits: visits[0][0].ends[visits[0][1]]):
            for event in _events(visits):
                events += 1
                _count(event, events)
            open_ |= _open(visits)
        for member in self.members:
            if member.again:
                runs = merged(member.again)
                *others, first = member.leaders
                if sum(end - start for start, end in runs) == sum(member.tokens):
                    cause = Cause.CALL if member.call else Cause.ROW
                else:
                    cause = Cause.HISTORY if member.history else Cause.PREFIX
                doubles.add(Double(member.number, tuple(runs), first, len(others), cause))
        undecided.extend(sorted(open_ - {member.number for member in self.members if member.again}))


def _events(held: Sequence[_Held]) -> list[list[_Held]]:
    """Groups of these sequences that share one sampling event, each led by the one that trains the tokens
    first."""
    if any(member.totals[span] <= PROOF for member, span in held):
        return _grouped(held, ())
    answers: dict[int, list[_Held]] = {}
    for one in held:
        if one[0].answer_id:
            answers.setdefault(one[0].answer_id, []).append(one)
    same = [event for same in answers.values() for event in _grouped(same, ())]
    whole = [one for one in held if one[0].last <= one[1] and one[0].steps >= 0]
    passing = [one for one in held if one[0].last > one[1] and one[0].steps >= 0]
    return [*same, *(_grouped(passing, whole[:_LEADERS]) if whole else ())]


def _grouped(visits: Sequence[_Held], leaders: Sequence[_Held]) -> list[list[_Held]]:
    """Events of several sequences: each joins the first one that it agrees with; without `leaders` it may lead."""
    events = [[leader] for leader in leaders]
    for visit in visits:
        event = next((event for event in events if _agree(event[0], visit)), None)
        if event is not None:
            event.append(visit)
        elif not leaders and len(events) < _LEADERS:
            events.append([visit])
    return [event for event in events if len(event) > 1]


def _agree(visit: _Held, other: _Held) -> bool:
    """Whether they may be one sampling event: no different server ids, no clearly different logprobs."""
    (a, at), (b, bt) = visit, other
    if a.answer_id and b.answer_id and a.answer_id != b.answer_id:
        return False
    total, other_total = a.totals[at], b.totals[bt]
    if math.isnan(total) or math.isnan(other_total) or sum(a.tokens[: at + 1]) != sum(b.tokens[: bt + 1]):
        return True
    return abs(total - other_total) <= 1 + abs(total + other_total) / 20


def _count(event: Sequence[_Held], number: int) -> None:
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


def _open(visits: Sequence[_Held]) -> set[int]:
    """The sequences after the first for which it is unknown whether the tokens were sampled twice."""
    ids = {member.answer_id for member, _ in visits}
    told_apart = 0 not in ids and len(ids) == len(visits)
    if told_apart or not all(math.isnan(member.totals[span]) for member, span in visits):
        return set()
    return {member.number for member, span in visits[1:] if span not in member.event}


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
