"""Findings about whole logs and about a whole run.

About a log: the conventions of its rows, and what the rows do not decide. About a run: tokens that rows train more
than once, calls that no row trains, and training rows that hold what was sampled for other rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import merge
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from tito_audit.chains.ledger import BLOCK, Ledger
from tito_audit.chains.trained_once import Cause, Double, RepeatedTraining, find_repeated_training
from tito_audit.evidence.sft import (
    BOS_ALONE,
    CUT,
    ENDLESS,
    ENDS_TRAINED,
    NOTHING,
    ROWS,
    SPACED,
    SPLIT_OTHERWISE,
    UNFINISHED,
    UNSPACED,
)
from tito_audit.evidence.trainings import retraining_hit
from tito_audit.levels.tally import level_failures
from tito_audit.record.finding import Finding, Hit, Result, Severity, Where
from tito_audit.record.reading import Slide, assume_flags, describe_slides
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import PLACES, AnswerEnds, Tally, Testimony
from tito_audit.record.trainings import ONCE, TrainedAgain
from tito_audit.run.auditor import TRAINED_ONCE
from tito_audit.run.headlines import with_headline
from tito_audit.settings.model import Settings
from tito_audit.summary import Gate, Summary
from tito_audit.terminal.words import listed, many, percent

_MASK, _LEFT_OUT, _ENDS, _LOGPROBS = "MSK401", "MSK402", "MSK404", "LPR502"
_WHOLE, _BOS, _SPACES = "MSK403", "TPL209", "TOK107"
_SFT_HEADLINES = {
    "nothing trained": "{n} in which no row trains anything",
    "cut before the answer": "{n} with rows that end before an answer begins",
    "ends not trained": "{n} with rows that train no end of an answer",
    "answers without an end": "{n} with answers that have no end",
    "BOS doubled": "{n} with rows that begin with two BOS tokens",
    "spaces lost": "{n} with text that lost its spaces",
}
"""By cause."""
_ADVICE = "log the calls, or write null where no logprob exists"
NEVER, UNDECIDED = "never trained", "undecided"
_STRANGER, _ROW_OF_OTHERS = "REC012", "row of other calls"
"""The code and cause of a stranger: a training row that none of the calls beside it sampled."""
_SAME_DISTANCE = 0.9
"""If this share of the strangers is equally many rows from their calls, the join is off by so many."""
_MOST_STRANGERS = 1 << 17
"""The most strangers that are kept to find their calls."""
_CODES = 6
"""The most codes that a verdict names."""
_LogFindingParts = tuple[str, Severity, str, str, Tally]
"""Code, severity, cause, message, and the rows that it is about."""


class FailingFindings:
    """Counts the findings that fail a run."""

    def __init__(self) -> None:
        self.findings: Counter[Severity] = Counter()
        self._codes: Counter[str] = Counter()
        self._rollouts = 0
        """Rollouts with a failing finding."""
        self._between = 0
        """Rollouts with a failing finding of a rule that compares rows; some may be counted above too."""

    def add(self, result: Result, findings: Sequence[Finding]) -> None:
        """Count the failing `findings` of a result."""
        for finding in findings:
            times = finding.times
            self.findings[finding.severity] += times
            self._codes[finding.code] += times
        self._rollouts += bool(findings) and not result.of_log
        self._between += bool(findings) and result.between_rows

    def words(self, which: str = "") -> str:
        """`3 errors and 1 warning in 2 rollouts: SEQ301 (3), TOK101 (1)`; `which` stands before the colon."""
        kinds = [many(number, severity.word) for severity, number in sorted(self.findings.items(), reverse=True)]
        codes = [f"{code} ({number:,})" for code, number in self._codes.most_common(_CODES)]
        more = len(self._codes) - _CODES
        rest = f" and {many(more, 'more rule')}" if more > 0 else ""
        rollouts = self._rollouts or self._between
        where = f"in {many(rollouts, 'rollout')}" if rollouts else "of the log as a whole"
        where += " and between rows" if self._rollouts and self._between else ""
        return f"{listed(kinds)} {where}{which}: {', '.join(codes)}{rest}"


class RunCounts:
    """Counts the results of a run, and draws the findings about whole logs and the run from them."""

    def __init__(self, summary: Summary, settings: Settings | None = None) -> None:
        """With `settings`, also count the findings that fail the run, for `gate`."""
        self.summary = summary
        self.failing = FailingFindings()
        self._required = settings
        self._bar = None if settings is None else cache(lambda file: Severity.threshold(settings.at(file).fail_on))
        self.testimonies = defaultdict[str, Testimony](Testimony)
        """By log: what its rows together show about how they were written."""
        self.ledger = Ledger()
        """Which tokens the rows train."""
        self.strangers: list[Place] = []
        """Training rows that none of the calls beside them sampled."""

    def add(self, result: Result) -> None:
        """Count a result of a row."""
        self.summary.add(result)
        if result.findings:
            self._count_failing(result)
        if result.witness is not None:
            self.testimonies[result.place.file].add(result.witness, result.place)
        self.ledger.add_result(result)
        for finding in result.findings if len(self.strangers) < _MOST_STRANGERS else ():
            if finding.code == _STRANGER and finding.hit.cause == _ROW_OF_OTHERS:
                self.strangers.append(result.place)
                break

    def update_repaired(self, was: Result, now: Result) -> None:
        """Replace what a row shows, counted by `add`, by what it shows after its repair."""
        if was.witness is not None and now.witness is not None and now is not was:
            self.testimonies[was.place.file].add_repaired(was.witness, now.witness, was.place)

    def add_log_findings(self, findings: tuple[Finding, ...]) -> Iterator[Result]:
        """Count findings about a whole log and yield them as a result; nothing if there are none."""
        if findings:
            yield self._add_counted(Result(findings[0].place, None, findings, of_log=True))

    def close_log(self, file: str, codes: frozenset[str]) -> Iterator[Result]:
        """Count and yield what the rows of a log show together, and what they leave open."""
        if file in self.testimonies:
            count_open(self.testimonies[file], self.summary)
            yield from self.add_log_findings(whole_log_findings(file, self.testimonies[file], codes))

    def close_run(self, *, whole: bool = True, owners: bool = False) -> Iterator[Result]:
        """Count and yield the findings about all rows of the run.

        `whole`: every row was read, so that calls may count as never trained. `owners`: also find the calls that
        sampled the strangers.
        """
        if not len(self.ledger):
            return
        overlaps = TrainedOverlaps.from_ledger(self.ledger, whole=whole)
        for result in chain(stranger_results(self.ledger, self.strangers) if owners else (), overlaps.results()):
            yield self._add_counted(result)
        self.summary.notices += overlaps.notices()

    def close_all(self, codes: Mapping[str, frozenset[str]], *, run: bool = True) -> Sequence[Result]:
        """Count and return the findings about each log, with the `codes` selected for it, and about the run."""
        of_logs = [result for file in self.testimonies for result in self.close_log(file, codes[file])]
        return (*of_logs, *(self.close_run() if run else ()))

    def gate(self, fail_on: str) -> Gate:
        """The verdict on all results, without rates and baseline."""
        number = self.failing.findings.total()
        because = [self.failing.words()] if number else []
        if self._required is not None:
            because += level_failures(self.summary.records, self.summary.files, self._required)
        return Gate(bool(because), tuple(because), fail_on, number)

    def _add_counted(self, result: Result) -> Result:
        self.summary.add(result)
        self._count_failing(result)
        return result

    def _count_failing(self, result: Result) -> None:
        bar = None if self._bar is None else self._bar(result.place.file)
        if bar is not None:
            failing = [finding for finding in result.findings if finding.severity >= bar]
            if failing:
                self.failing.add(result, failing)


def whole_log_findings(file: str, testimony: Testimony, codes: frozenset[str]) -> tuple[Finding, ...]:
    """The findings of these codes about what the rows of a log show together.

    They judge no single row: a row that shows how it was written has its own findings, the others stay open.
    """
    parts = [*_slides(testimony), *_conventions(testimony), *_sft_faults(testimony)]
    stated = {"--convention first": _LEFT_OUT, "--convention end": _ENDS, "--assume": _LOGPROBS}
    for flag, tally in sorted(testimony.contradictions.items()):
        verb, be = ("contradicts", "is") if tally.rows == 1 else ("contradict", "are")
        message = f"{_rows(tally)} {verb} {flag} and {be} left as logged"
        parts.append((stated[flag], Severity.WARNING, f"contradicts {flag}", message, tally))
    return tuple(
        with_headline(
            Finding(
                code,
                severity,
                Place(file, tally.places[0].row),
                Hit(Where.LOG, 0, 0, message, cause=cause, headline=_SFT_HEADLINES.get(cause, "")),
            )
        )
        for code, severity, cause, message, tally in parts
        if code in codes
    )


def _slides(testimony: Testimony) -> Iterator[_LogFindingParts]:
    """Rows whose simplest reading has a slide while another has none, and rows that may have one of others."""
    if slides := testimony.undecided:
        words = listed(describe_slides(slides), "or")
        message = (
            f"all {many(testimony.rows, 'row')} of the log may have {words}: {len(testimony.certain)} different "
            "first tokens of answers have the fill as their logprob, so either all of them were certain, or each "
            f"value is at another token; {_ADVICE}, or state which it is with --convention or --assume"
        )
        tally = testimony.tied[slides[0].mask, slides[0].logprobs]
        yield _LOGPROBS, Severity.NOTE, "undecided", message, tally
    by_code: dict[str, list[tuple[Slide, ...]]] = {}
    for reading in () if testimony.undecided else testimony.open:
        by_code.setdefault(_slide_code(reading), []).append(reading)
    for code, readings in sorted(by_code.items()):
        tally = _sum_tallies(testimony.open[slides] for slides in readings)
        verb = "does" if tally.rows == 1 else "do"
        what = "logprobs are" if code == _LOGPROBS else "loss mask is"
        words = listed(describe_slides(sorted(slide for slides in readings for slide in slides)), "or")
        message = (
            f"{tally.rows:,} of {many(testimony.rows, 'row')} {verb} not show whether the {what} on the sampled "
            f"tokens: {_rows(tally)} may be right, with first tokens that were certain or ends left out of the "
            f"loss, or have {words}; {_ADVICE}, or state which it is with --convention or --assume"
        )
        yield code, Severity.NOTE, "undecided", message, tally
    for slide, tally in testimony.allowed_where_proven.items():
        (words,) = describe_slides([slide])
        proof = _rows(testimony.proven[slide.mask, slide.logprobs])
        message = (
            f"{many(tally.rows, 'row')} may also have {words}, as {proof} of this log: nothing in {_rows(tally)} "
            f"decides it, so no repair touches {'it' if tally.rows == 1 else 'them'}; if it is so, state it with "
            f"{assume_flags(slide)}"
        )
        yield _slide_code((slide,)), Severity.WARNING, "may have the fault of other rows", message, tally


def count_open(testimony: Testimony, summary: Summary) -> None:
    """Count the rows of a log that could not be judged, and those that may have a fault proven in other rows."""
    summary.open_rows += testimony.open_rows
    for slide, tally in testimony.allowed_where_proven.items():
        summary.open_beside_faults += tally.rows
        summary.fault_beside = summary.fault_beside or assume_flags(slide)


def _conventions(testimony: Testimony) -> Iterator[_LogFindingParts]:
    """What rows leave out of the loss in each of their answers: a note if all rows do, else a warning."""
    firsts = {number: tally for number, tally in testimony.first.items() if number}
    for number, tally in sorted(firsts.items()):
        tokens = "the first token" if number == 1 else f"the first {number} tokens"
        message = f"{tokens} of each answer {'is' if number == 1 else 'are'} left out of the loss"
        state = f"`--convention first=left-out:{number}` states that it is meant"
        yield from _convention_finding(_LEFT_OUT, "first tokens left out", message, state, tally, testimony.first)
    if testimony.sft:
        return
    left_out = testimony.ends.get(AnswerEnds.KEPT)
    others = {kind: tally for kind, tally in testimony.ends.items() if kind is not AnswerEnds.OPEN}
    state = "`--convention end=untrained` states that it is meant"
    if left_out is not None:
        message = (
            "the sampled end of each answer is left out of the loss, so the model gets no credit for stopping"
        )
        yield from _convention_finding(_ENDS, "sampled, not trained", message, state, left_out, others)
    elif AnswerEnds.OPEN in testimony.ends and not others:
        tally = testimony.ends[AnswerEnds.OPEN]
        message = (
            f"no row trains the end of an answer ({_rows(tally)}): right if ends were appended, but if they were "
            f"sampled, the model gets no credit for stopping; {state}"
        )
        yield _ENDS, Severity.NOTE, "not trained", message, tally


def _sft_faults(testimony: Testimony) -> Iterator[_LogFindingParts]:
    """Faults of a set for SFT that only all rows together show."""
    of, none = testimony.sft, Tally()
    rows = of.get(ROWS, none).rows
    nothing, cut, endless = of.get(NOTHING, none), of.get(CUT, none), of.get(ENDLESS, none)
    if rows > 1 and nothing.rows == rows:
        message = f"nothing is trained in any of {rows:,} rows: a trainer would learn nothing from this set"
        yield _WHOLE, Severity.ERROR, "nothing trained", message, nothing
    if cut.rows:
        message = (
            f"{cut.rows:,} of {many(rows, 'row')} end before an answer begins, so nothing of them is trained "
            f"({_rows(cut)}); raise the maximum length, or leave such rows out"
        )
        yield _WHOLE, Severity.WARNING, "cut before the answer", message, cut
    if endless.rows:
        with_end = of.get(ENDS_TRAINED, none).rows
        which = f"{endless.rows:,} of {many(endless.rows + with_end, 'row')}" if with_end else "no row"
        verb = "train no end" if with_end else "trains the end"
        message = (
            f"{which} {verb} of an answer ({_rows(endless)}), so the model is not taught to stop; "
            "`--convention end=untrained` states that it is meant"
        )
        yield _ENDS, Severity.WARNING, "ends not trained", message, endless
    if (unfinished := of.get(UNFINISHED, none)).rows:
        message = (
            f"the last answer of {many(unfinished.rows, 'row')} has no end ({_rows(unfinished)}): a maximum "
            "length cut it, or the writer appends no end"
        )
        yield _ENDS, Severity.NOTE, "answers without an end", message, unfinished
    if (alone := of.get(BOS_ALONE, none)).rows:
        message = (
            f"{alone.rows:,} of {many(rows, 'row')} begin with two BOS tokens ({_rows(alone)}): the template "
            "writes one and the tokenizer adds another; encode rendered text with `add_special_tokens=False`"
        )
        yield _BOS, Severity.WARNING, "BOS doubled", message, alone
    dense, split = of.get(UNSPACED, none), of.get(SPLIT_OTHERWISE, none).rows
    if SPACED not in of and dense.rows >= 8 and 2 * split >= dense.rows:
        message = (
            f"no row holds a space, not even the {dense.rows:,} with long texts ({_rows(dense)}), and {split:,} "
            "of these have other tokens than `tokenizer.json` gives: if the data has spaces, the trainer loaded "
            "another tokenizer, which drops them; compare both on one text before training"
        )
        yield _SPACES, Severity.WARNING, "spaces lost", message, dense


def _convention_finding(
    code: str, cause: str, message: str, state: str, tally: Tally, kinds: Mapping[Any, Tally]
) -> Iterator[_LogFindingParts]:
    """A note if all rows of the log keep a convention, a warning if only some do.

    `tally` are the rows that keep it, `kinds` all rows by what they do, `state` how to state the convention.
    """
    rest = _sum_tallies(other for other in kinds.values() if other is not tally)
    if not rest.rows:
        rows = "the only row" if tally.rows == 1 else f"all {tally.rows:,} rows that show it"
        yield code, Severity.NOTE, cause, f"{message} in {rows}; {state}", tally
        return
    # The smaller part is named: most often it is a single row.
    odd = tally if tally.rows <= rest.rows else rest
    share = f"{tally.rows:,} of {many(tally.rows + rest.rows, 'row')}"
    named = f"{_rows(odd)}; not in the others" if odd is tally else f"all but {_rows(odd)}"
    yield code, Severity.WARNING, cause, f"{message} in {share}: {named}", odd


def _slide_code(slides: Iterable[Slide]) -> str:
    """The code of the finding about these slides: that of the logprobs if any of them moves logprobs."""
    return _LOGPROBS if any(slide.logprobs for slide in slides) else _MASK


def _sum_tallies(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally.rows, tally.places)
    return total


def _rows(tally: Tally) -> str:
    """`row 3`, `rows 3, 7[1], 9 and 4 more`."""
    names = [f"{place.row}[{place.item}]" if place.item else f"{place.row}" for place in tally.places]
    more = f" and {tally.rows - len(names):,} more" if tally.rows > len(names) else ""
    return f"row{'' if tally.rows == 1 else 's'} {', '.join(names)}{more}"


_SequenceFinding = tuple[int, TrainedAgain]
"""The number of a sequence in the ledger, and what it trains again or what of it is never trained."""


@dataclass(frozen=True, slots=True)
class TrainedOverlaps:
    """What the rows of a run train more than once or never, as findings and notices."""

    ledger: Ledger
    settled: RepeatedTraining

    @classmethod
    def from_ledger(cls, ledger: Ledger, *, whole: bool = True) -> TrainedOverlaps:
        """What a ledger shows; unless the `whole` run was read, nothing counts as never trained."""
        settled = find_repeated_training(ledger)
        never = settled.never if whole and not ledger.left_out else settled.never[:0]
        return cls(ledger, RepeatedTraining(settled.trained, settled.doubles, never, settled.undecided))

    def results(self) -> Iterator[Result]:
        """The findings: a result for each rollout in the order of the rows, then one for each log."""
        again = map(self._trained_again, self.settled.doubles)
        never: list[_SequenceFinding] = []
        for number in self.settled.never.tolist():
            tokens, turn = self.ledger.trained_tokens(number), self.ledger.turn(number)
            what = f"no row of the run trains the {many(tokens, 'token')} of this call"
            message = f"{what}, although rows train most calls"
            never.append((number, TrainedAgain(turn, ((0, tokens),), NEVER, message, trained=False)))
        in_order = merge(again, never, key=itemgetter(0))
        for place, of_place in groupby(in_order, key=lambda pair: self.ledger.place(pair[0])):
            findings = []
            for number, training in of_place:
                hit, row_place = retraining_hit(training), self.ledger.row_place(number)
                severity = Severity.ERROR if hit.severity is None else hit.severity
                repair = ONCE if training.turn is None else None
                findings.append(with_headline(Finding(TRAINED_ONCE, severity, row_place, hit, repair)))
            yield Result(place, None, tuple(findings), of_log=True)
        undecided = self.settled.undecided.tolist()
        for file, of_file in groupby(undecided, key=lambda number: self.ledger.place(number).file):
            # One finding for all rows of which it is unknown whether they train the same sampled tokens twice.
            numbers = list(of_file)
            places = [self.ledger.row_place(number) for number in numbers[:PLACES]]
            single = len(numbers) == 1
            more = f" and {len(numbers) - PLACES:,} more" if len(numbers) > PLACES else ""
            named = f"row{'s' * (not single)} {', '.join(str(place.row) for place in places)}{more}"
            verb = "trains" if single else "train"
            message = (
                f"{many(len(numbers), 'row')} ({named}) {verb} the same tokens as another, and nothing shows "
                "whether they were sampled twice; log the logprobs, or the id of each answer"
            )
            hit = Hit(Where.LOG, 0, 0, message, cause=UNDECIDED, severity=Severity.NOTE)
            place = Place(file, places[0].row)
            finding = with_headline(Finding(TRAINED_ONCE, Severity.NOTE, place, hit))
            yield Result(place, None, (finding,), of_log=True)

    def notices(self) -> Iterator[str]:
        """Sentences about how much is trained more than once or never, for the summary."""
        doubles = self.settled.doubles
        never = sum(self.ledger.trained_tokens(number) for number in self.settled.never.tolist())
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

    def trained_again(self, file: str, rows: Sequence[int]) -> dict[int, dict[int, tuple[TrainedAgain, ...]]]:
        """By row and item: what these rows of a file train again."""
        by_row: dict[int, dict[int, tuple[TrainedAgain, ...]]] = {}
        for number in self.ledger.sequences_of_rows(file, rows):
            double = self.settled.doubles.of(number)
            if double is not None:
                place, (_, again) = self.ledger.place(number), self._trained_again(double)
                items = by_row.setdefault(place.row, {})
                items[place.item] = (*items.get(place.item, ()), again)
        return by_row

    def _trained_again(self, double: Double) -> _SequenceFinding:
        """What a sequence trains that another one trains first."""
        here, place = self.ledger.row_place(double.sequence), self.ledger.row_place(double.first)
        turn = self.ledger.turn(double.first)
        if turn is not None and place == here:
            named = f"turn {turn}"
        elif place.file != here.file:
            named = str(place)
        else:
            named = f"row {place.row}" + (f"[{place.item}]" if place.item or place.row == here.row else "")
        named += f" and {many(double.others, 'other row')}" if double.others else ""
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

    def _share(self, tokens: int) -> str:
        """The share of all trained tokens: `4.2 %`."""
        return percent(tokens / max(self.settled.trained, 1))


def stranger_results(ledger: Ledger, strangers: Sequence[Place]) -> Iterator[Result]:
    """A finding for each log with strangers that the calls beside another row of the run sampled."""
    spans, first = ledger.spans, ledger.first_spans
    wanted: dict[int, Place] = {}  # the strangers, by the hash of their last trained span
    for file, places in groupby(strangers, key=lambda place: place.file):
        among = set(places)
        for number in ledger.sequences_of_rows(file, sorted({place.row for place in among})):
            place = ledger.place(number)
            if ledger.turn(number) is None and place in among:
                own = spans[first[number] : first[number + 1]]
                wanted[int(own["hash"][np.flatnonzero(own["tokens"])[-1]])] = place
    keys = np.fromiter(wanted, np.uint64, len(wanted))
    owners: dict[Place, Place] = {}  # by row, the first rollout with a call that sampled its last span
    hashes = spans["hash"]
    for at in range(0, len(hashes) if wanted else 0, BLOCK):
        sampled = np.flatnonzero(np.isin(hashes[at : at + BLOCK], keys)) + at
        for span, number in zip(sampled.tolist(), ledger.sequences_of_spans(sampled).tolist(), strict=True):
            place, owner = wanted[int(hashes[span])], ledger.place(number)
            if ledger.turn(number) is not None and owner != place:
                owners.setdefault(place, owner)
    owned = [place for place in wanted.values() if place in owners]
    for _, places in groupby(dict.fromkeys(owned), key=lambda place: place.file):
        pairs = [(place, owners[place]) for place in places]
        # How many rows each stranger is from the calls that sampled it.
        apart = Counter(owner.row - place.row for place, owner in pairs if owner.file == place.file)
        rows, times = apart.most_common(1)[0] if apart else (0, 0)
        named = ", ".join(
            f"{_place_words(place)} what {_place_words(owner, place)} sampled" for place, owner in pairs[:PLACES]
        )
        more = f" and {len(pairs) - PLACES:,} more" if len(pairs) > PLACES else ""
        verb = "trains" if len(pairs) == 1 else "train"
        advice = "join rows and calls by id"
        if rows and times >= max(_SAME_DISTANCE * len(pairs), 2):
            advice = f"the join of rows and calls is off by {rows:+d}: join them by id"
        message = (
            f"{many(len(pairs), 'row')} {verb} what the calls beside another row sampled: {named}{more}; {advice}"
        )
        hit = Hit(Where.LOG, 0, 0, message, cause="joined to other calls", severity=Severity.ERROR)
        place = pairs[0][0]
        yield Result(place, None, (with_headline(Finding(_STRANGER, Severity.ERROR, place, hit)),), of_log=True)


def _place_words(place: Place, beside: Place | None = None) -> str:
    """`row 3` or `row 3[1]`; with its file if that is not the file of `beside`."""
    if beside is not None and place.file != beside.file:
        return str(place)
    return f"row {place.row}" + (f"[{place.item}]" if place.item else "")
