"""Findings about a whole run: tokens that its rows train more than once, and calls that no row trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, starmap

from tito_audit.chains.ledger import Ledger
from tito_audit.chains.trained_once import Cause, Double, Settled, settle
from tito_audit.evidence.trainings import hit_again
from tito_audit.record.finding import Finding, Hit, Result, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import PLACES
from tito_audit.record.trainings import ONCE, TrainedAgain
from tito_audit.run.auditor import TRAINED_ONCE
from tito_audit.run.headlines import headed
from tito_audit.terminal.words import listed, many, percent

NEVER, UNDECIDED = "never trained", "undecided"
_Noted = tuple[int, TrainedAgain]
"""A sequence, and what it trains again or never."""


@dataclass(frozen=True, slots=True)
class Once:
    """What the rows of a run train more than once or never, in words."""

    ledger: Ledger
    settled: Settled

    @classmethod
    def of(cls, ledger: Ledger, *, whole: bool = True) -> Once:
        """What the ledger of a run shows; if only part of the rows was read, nothing counts as never trained."""
        settled = settle(ledger)
        never = settled.never if whole and not ledger.left_out else settled.never[:0]
        return cls(ledger, Settled(settled.trained, settled.doubles, never, settled.undecided))

    def results(self) -> Iterator[Result]:
        """The findings, one result for each rollout and each log, in the order of the rows."""
        for place, noted in groupby(self._noted(), key=lambda one: self.ledger.place(one[0])):
            yield Result(place, None, tuple(starmap(self._finding, noted)), of_log=True)
        for file, numbers in self._by_file(self.settled.undecided.tolist()):
            yield self._undecided(file, numbers)

    def notices(self) -> Iterator[str]:
        """How much is trained twice or not at all, for the summary."""
        doubles, never = self.settled.doubles, self._never_tokens()
        if self.ledger.left_out:
            compared = self.ledger.rollouts - self.ledger.left_out
            yield (
                f"REC009 compared only the first {many(compared, 'rollout')}, as their records take all the "
                f"memory it may use; {self.ledger.left_out:,} more were not compared. Scan fewer files at a time."
            )
        if len(doubles):
            share = f"{many(doubles.tokens, 'token')} ({self._share(doubles.tokens)} of all trained tokens)"
            rows, calls = len(doubles) - doubles.calls, doubles.calls
            counted = [many(count, noun) for count, noun in ((rows, "row"), (calls, "call")) if count]
            advice = f"; `repair --with {ONCE}` takes the repeated tokens out of the loss" if rows else ""
            yield f"{share} are trained more than once, in {listed(counted)}{advice}."
        if never:
            counted_calls = many(len(self.settled.never), "call")
            yield f"No row of the run trains {many(never, 'sampled token')} of {counted_calls}."

    def again(self, file: str, rows: Sequence[int]) -> dict[int, dict[int, tuple[TrainedAgain, ...]]]:
        """What these rows of a file train again, by row, then by item."""
        found: dict[int, dict[int, tuple[TrainedAgain, ...]]] = {}
        for number in self.ledger.sequences(file, rows):
            double = self.settled.doubles.of(number)
            if double is not None:
                place, (_, said) = self.ledger.place(number), self._again(double)
                items = found.setdefault(place.row, {})
                items[place.item] = (*items.get(place.item, ()), said)
        return found

    def _noted(self) -> Iterator[_Noted]:
        """What each sequence trains again or never, in the order of the sequences."""
        never, at = self.settled.never.tolist(), 0
        for double in self.settled.doubles:
            while at < len(never) and never[at] < double.sequence:
                yield self._never(never[at])
                at += 1
            yield self._again(double)
        yield from map(self._never, never[at:])

    def _again(self, double: Double) -> _Noted:
        """What a sequence trains again."""
        place = self.ledger.row_place(double.sequence)
        named = self._named(double.first, place) + (
            f" and {many(double.others, 'other row')}" if double.others else ""
        )
        counted = many(double.tokens, "token")
        spans = f" in {many(len(double.runs), 'span')}" if len(double.runs) > 1 else ""
        all_ = "its only trained token" if double.tokens == 1 else f"all of its {counted} in the loss"
        verb = "train" if double.others else "trains"
        what = {
            Cause.HISTORY: f"{counted}{spans} of its history, which {named} {verb} first",
            Cause.PREFIX: f"{counted}{spans} of what it shares with {named}, which {verb} them first",
            Cause.ROW: f"{all_}, as {named} {verb} the same tokens first",
            Cause.CALL: f"{all_}, as {named} {'have' if double.others else 'has'} the same call",
        }[double.cause]
        message = f"trained again: {what}; {self._share(double.tokens)} of all that the run trains"
        turn, runs = self.ledger.turn(double.sequence), double.runs
        if turn is not None:
            runs = tuple((start - runs[0][0], end - runs[0][0]) for start, end in runs)
        return double.sequence, TrainedAgain(turn, runs, double.cause.value, message)

    def _finding(self, number: int, said: TrainedAgain) -> Finding:
        hit = hit_again(said)
        severity = Severity.ERROR if hit.severity is None else hit.severity
        repair = ONCE if said.turn is None else None
        return headed(Finding(TRAINED_ONCE, severity, self.ledger.row_place(number), hit, repair))

    def _named(self, number: int, here: Place) -> str:
        """A sequence, named from a place: `row 3`, `row 3[1]`, `other.jsonl:3`, `turn 2` of the same row."""
        place, turn = self.ledger.row_place(number), self.ledger.turn(number)
        if turn is not None and place == here:
            return f"turn {turn}"
        if place.file != here.file:
            return str(place)
        return f"row {place.row}" + (f"[{place.item}]" if place.item or place.row == here.row else "")

    def _never(self, number: int) -> _Noted:
        """What a call sampled but no row trains."""
        tokens = self.ledger.tokens(number)
        message = (
            f"no row of the run trains the {many(tokens, 'token')} of this call, although rows train most calls"
        )
        turn = self.ledger.turn(number)
        return number, TrainedAgain(turn, ((0, tokens),), NEVER, message, trained=False)

    def _undecided(self, file: str, numbers: Sequence[int]) -> Result:
        """The finding that rows may or may not train the same sampling twice."""
        places = [self.ledger.row_place(number) for number in numbers[:PLACES]]
        one = len(numbers) == 1
        more = f" and {len(numbers) - PLACES:,} more" if len(numbers) > PLACES else ""
        named = f"row{'s' * (not one)} {', '.join(str(place.row) for place in places)}{more}"
        message = (
            f"{many(len(numbers), 'row')} ({named}) {'trains' if one else 'train'} the same tokens as another, "
            "and nothing shows whether they were sampled twice; log the logprobs, or the id of each answer"
        )
        hit = Hit(Where.LOG, 0, 0, message, cause=UNDECIDED, severity=Severity.NOTE)
        place = Place(file, places[0].row)
        return Result(place, None, (headed(Finding(TRAINED_ONCE, Severity.NOTE, place, hit)),), of_log=True)

    def _by_file(self, numbers: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
        for file, found in groupby(numbers, key=lambda number: self.ledger.place(number).file):
            yield file, list(found)

    def _never_tokens(self) -> int:
        return sum(self.ledger.tokens(number) for number in self.settled.never.tolist())

    def _share(self, tokens: int) -> str:
        """`4.2 %`."""
        return percent(tokens / max(self.settled.trained, 1))
