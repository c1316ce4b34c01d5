"""Findings about a whole log: the conventions that its rows keep, and what its rows leave open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from tito_audit.record.finding import Finding, Hit, Result, Severity, Where
from tito_audit.record.reading import Slide, assume_flags, slides_in_words
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import EndsOf, Tally, Testimony
from tito_audit.run.headlines import headed
from tito_audit.summary import Summary
from tito_audit.terminal.words import listed_or, many

_MASK, _LEFT_OUT, _ENDS, _LOGPROBS = "MSK401", "MSK402", "MSK404", "LPR502"
_ADVICE = "log the calls, or write null where no logprob exists"
_LogFinding = tuple[str, Severity, str, str, Tally]
"""Code, severity, cause, message and the rows that it is about."""


def findings_of_log(file: str, testimony: Testimony, codes: frozenset[str]) -> tuple[Finding, ...]:
    """The findings, with codes among `codes`, about what the rows of a log show together.

    They judge no row: a row that shows how it was written has its own findings, and the others stay open.
    """
    every = chain(_open(testimony), _beside_faults(testimony), _conventions(testimony), _contradictions(testimony))
    return tuple(
        headed(
            Finding(code, severity, Place(file, tally.places[0].row), Hit(Where.LOG, 0, 0, message, cause=cause))
        )
        for code, severity, cause, message, tally in every
        if code in codes
    )


def _open(testimony: Testimony) -> Iterator[_LogFinding]:
    """Rows whose simplest reading is a fault, though one without a fault stands."""
    slides = testimony.undecided
    if slides:
        words = listed_or(slides_in_words(slides))
        message = (
            f"all {many(testimony.rows, 'row')} of the log may have {words}: {len(testimony.certain)} different "
            "first tokens of answers have the fill as their logprob, so either all of them were certain, or each "
            f"value is at another token; {_ADVICE}, or state which it is with --convention or --assume"
        )
        tally = testimony.tied[slides[0].mask, slides[0].logprobs]
        yield _LOGPROBS, Severity.NOTE, "undecided", message, tally
        return
    by_code: dict[str, list[tuple[Slide, ...]]] = {}
    for reading in testimony.open:
        by_code.setdefault(_code(reading), []).append(reading)
    for code, readings in sorted(by_code.items()):
        tally = _together(testimony.open[slides] for slides in readings)
        verb = "does" if tally.rows == 1 else "do"
        what = "logprobs are" if code == _LOGPROBS else "loss mask is"
        words = listed_or(slides_in_words(sorted(slide for slides in readings for slide in slides)))
        message = (
            f"{tally.rows:,} of {many(testimony.rows, 'row')} {verb} not show whether the {what} on the sampled "
            f"tokens: {_named(tally)} may be right, with first tokens that were certain or ends left out of the "
            f"loss, or have {words}; {_ADVICE}, or state which it is with --convention or --assume"
        )
        yield code, Severity.NOTE, "undecided", message, tally


def _beside_faults(testimony: Testimony) -> Iterator[_LogFinding]:
    """Rows that allow a slide which other rows prove."""
    for slide, tally in testimony.beside_faults.items():
        (words,) = slides_in_words([slide])
        proof = _named(testimony.proven[slide.mask, slide.logprobs])
        message = (
            f"{many(tally.rows, 'row')} may also have {words}, as {proof} of this log: nothing in {_named(tally)} "
            f"decides it, so no repair touches {'it' if tally.rows == 1 else 'them'}; if it is so, state it with "
            f"{assume_flags(slide)}"
        )
        yield _code((slide,)), Severity.WARNING, "may have the fault of other rows", message, tally


def note_witness(result: Result, testimonies: dict[str, Testimony]) -> None:
    """Add what a row shows to what its log shows."""
    if result.witness is not None:
        testimonies.setdefault(result.place.file, Testimony()).add(result.witness, result.place)


def count_logs(
    testimonies: Mapping[str, Testimony], summary: Summary, codes: Mapping[str, frozenset[str]]
) -> Iterator[Result]:
    """The findings about whole logs, by their codes, with what their rows leave open counted."""
    for file, testimony in testimonies.items():
        count_open(testimony, summary)
        findings = findings_of_log(file, testimony, codes[file])
        if findings:
            yield Result(findings[0].place, None, findings, of_log=True)


def count_open(testimony: Testimony, summary: Summary) -> None:
    """Count the rows of a log that could not be judged, and those that may have a fault which others prove."""
    summary.open_rows += testimony.open_rows
    for slide, tally in testimony.beside_faults.items():
        summary.open_beside_faults += tally.rows
        summary.fault_beside = summary.fault_beside or assume_flags(slide)


def _conventions(testimony: Testimony) -> Iterator[_LogFinding]:
    """What rows leave out of every answer that they train: a note if all rows do, else a warning."""
    firsts = {number: tally for number, tally in testimony.first.items() if number}
    for number, tally in sorted(firsts.items()):
        tokens = "the first token" if number == 1 else f"the first {number} tokens"
        message = f"{tokens} of each answer {'is' if number == 1 else 'are'} left out of the loss"
        state = f"`--convention first=left-out:{number}` states that it is meant"
        yield from _convention(_LEFT_OUT, "first tokens left out", message, state, tally, testimony.first)
    kept = testimony.ends.get(EndsOf.KEPT)
    others = {kind: tally for kind, tally in testimony.ends.items() if kind is not EndsOf.OPEN}
    state = "`--convention end=untrained` states that it is meant"
    if kept is not None:
        message = (
            "the sampled end of each answer is left out of the loss, so the model gets no credit for stopping"
        )
        yield from _convention(_ENDS, "sampled, not trained", message, state, kept, others)
    elif EndsOf.OPEN in testimony.ends and not others:
        tally = testimony.ends[EndsOf.OPEN]
        message = (
            f"no row trains the end of an answer ({_named(tally)}): right if ends were appended, but if they were "
            f"sampled, the model gets no credit for stopping; {state}"
        )
        yield _ENDS, Severity.NOTE, "not trained", message, tally


def _convention(
    code: str, cause: str, message: str, state: str, tally: Tally, kinds: Mapping[Any, Tally]
) -> Iterator[_LogFinding]:
    """A convention that all rows of the log keep, or some of them."""
    rest = _together(other for other in kinds.values() if other is not tally)
    if not rest.rows:
        rows = "the only row" if tally.rows == 1 else f"all {tally.rows:,} rows that show it"
        yield code, Severity.NOTE, cause, f"{message} in {rows}; {state}", tally
        return
    # The smaller part is named: most often it is a single row.
    odd = tally if tally.rows <= rest.rows else rest
    share = f"{tally.rows:,} of {many(tally.rows + rest.rows, 'row')}"
    named = f"{_named(odd)}; not in the others" if odd is tally else f"all but {_named(odd)}"
    yield code, Severity.WARNING, cause, f"{message} in {share}: {named}", odd


def _contradictions(testimony: Testimony) -> Iterator[_LogFinding]:
    """Rows that say otherwise than the run states."""
    codes = {"--convention first": _LEFT_OUT, "--convention end": _ENDS, "--assume": _LOGPROBS}
    for flag, tally in sorted(testimony.contradictions.items()):
        verb = "contradicts" if tally.rows == 1 else "contradict"
        message = f"{_named(tally)} {verb} {flag} and {'is' if tally.rows == 1 else 'are'} left as logged"
        yield codes[flag], Severity.WARNING, f"contradicts {flag}", message, tally


def _code(slides: Iterable[Slide]) -> str:
    """The code for these slides; logprobs first, as rows mostly leave those open."""
    return _LOGPROBS if any(slide.logprobs for slide in slides) else _MASK


def _together(tallies: Iterable[Tally]) -> Tally:
    every = Tally()
    for tally in tallies:
        every.add(tally.rows, tally.places)
    return every


def _named(tally: Tally) -> str:
    """`row 3`, `rows 3, 7[1], 9 and 4 more`."""
    names = [f"{place.row}[{place.item}]" if place.item else f"{place.row}" for place in tally.places]
    more = f" and {tally.rows - len(names):,} more" if tally.rows > len(names) else ""
    return f"row{'' if tally.rows == 1 else 's'} {', '.join(names)}{more}"
