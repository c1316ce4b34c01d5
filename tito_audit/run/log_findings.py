"""Findings about a whole log: what its rows prove together where single rows do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tito_audit.record.finding import Finding, Hit, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import PLACES, Reading, Tally, Testimony
from tito_audit.run.headlines import headed
from tito_audit.terminal.words import many

_MASK, _LOGPROBS = "MSK401", "LPR502"
_ZERO = "a logprob of exactly 0.0 looks like a fill value"


def findings_of_log(file: str, testimony: Testimony, codes: frozenset[str]) -> tuple[Finding, ...]:
    """The findings, with codes among `codes`, about rows that prove nothing alone.

    A row that shows how it was written has its own findings, if any. The other rows are settled if all rows of the
    log have exactly one reading in common; if not, a finding says that it is undecided.
    """
    open_ = _Rows.of(
        (possible, tally)
        for possible, tally in testimony.tallies.items()
        if len(possible) > 1 and any(reading.right for reading in possible)
    )
    if not open_.rows:
        return ()
    common = testimony.common()
    if len(common) == 1:
        (reading,) = common
        hits = () if reading.right else _settled(reading, testimony, open_)
    else:
        hits = _undecided(testimony, codes, agreed=bool(common) and not any(one.right for one in common))
    return tuple(
        headed(Finding(code, hit.severity or Severity.NOTE, Place(file, rows.first), hit, repair))
        for code, hit, repair, rows in hits
        if code in codes
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of the log whose reading is undecided."""

    rows: int
    spans: int
    places: tuple[Place, ...]
    readings: tuple[Reading, ...]
    """Every reading that any of them allows."""

    @classmethod
    def of(cls, tallies: Iterable[tuple[tuple[Reading, ...], Tally]]) -> _Rows:
        """The rows of all these tallies."""
        found = list(tallies)
        places = sorted(
            {place for _, tally in found for place in tally.places}, key=lambda one: (one.row, one.item)
        )
        readings = sorted({reading for possible, _ in found for reading in possible})
        rows, spans = sum(tally.rows for _, tally in found), sum(tally.spans for _, tally in found)
        return cls(rows, spans, tuple(places[:PLACES]), tuple(readings))

    @property
    def first(self) -> int:
        """The number of the first row."""
        return self.places[0].row if self.places else 0

    def named(self) -> str:
        """`row 3`, `rows 3, 7[1], 9 and 4 more`."""
        names = [f"{one.row}[{one.item}]" if one.item else f"{one.row}" for one in self.places]
        more = f" and {self.rows - len(names):,} more" if self.rows > len(names) else ""
        return f"row{'' if self.rows == 1 else 's'} {', '.join(names)}{more}"


_Said = tuple[str, Hit, str | None, _Rows]
"""Code, hit, repair, and the rows that the hit is about."""


def _settled(reading: Reading, testimony: Testimony, open_: _Rows) -> Sequence[_Said]:
    """The findings if all rows allow only this reading, which is wrong: then the open rows are wrong too."""
    every = _Rows.of(testimony.tallies.items())
    alone = sum(tally.rows for possible, tally in testimony.tallies.items() if len(possible) == 1)
    all_rows = f"all {many(every.rows, 'row')} ({many(every.spans, 'sampled span')})"
    shows = (
        f"{many(alone, 'row')} {'proves' if alone == 1 else 'prove'} it" if alone else "no single row proves it"
    )
    shows += f"{', and' if alone else ', but'} it is the only reading that all rows allow"
    proof = f"{shows} (including {open_.named()}){_chance(testimony)}"
    said: list[_Said] = []
    if reading.logprobs:
        words = f"the logprobs are {_lie(reading.logprobs)} in {all_rows}: {proof}"
        said.append(
            (_LOGPROBS, _hit(words, f"shifted by {reading.logprobs:+d}", Severity.ERROR), "realign", open_)
        )
    if reading.mask:
        words = f"the loss mask is {_lie(reading.mask)} in {all_rows}: {proof}"
        said.append((_MASK, _hit(words, f"slid by {reading.mask:+d}", Severity.ERROR), "realign", open_))
    return said


def _chance(testimony: Testimony) -> str:
    """The odds that the logprobs are in place after all, if only chance rules it out; else no text."""
    tokens = len(testimony.chances.get(Reading(), ()))
    shared = [possible for possible in testimony.tallies if Reading() not in possible]
    if shared or not tokens:
        return ""
    odds = testimony.odds(Reading(), (reading for possible in testimony.tallies for reading in possible))
    chance = f"a chance of 1 in 10^{-odds:.0f}"
    return f"; if they were in place, {many(tokens, 'different token')} would all have a logprob of 0.0, {chance}"


def _undecided(testimony: Testimony, codes: frozenset[str], *, agreed: bool) -> Sequence[_Said]:
    """The findings if rows share several readings or none; `agreed`: every shared reading is wrong."""
    by_code: dict[str, list[tuple[tuple[Reading, ...], Tally]]] = {}
    total = sum(tally.rows for tally in testimony.tallies.values())
    for possible, tally in testimony.tallies.items():
        if len(possible) > 1 and any(reading.right for reading in possible):
            by_code.setdefault(_code(possible, codes), []).append((possible, tally))
    said: list[_Said] = []
    for code, tallies in sorted(by_code.items()):
        rows = _Rows.of(tallies)
        what = "logprobs" if code == _LOGPROBS else "loss mask"
        verb = "does" if rows.rows == 1 else "do"
        words = f"{rows.rows:,} of {many(total, 'row')} {verb} not show whether the {what} {_on(code)}: "
        words += f"{rows.named()} {'allows' if rows.rows == 1 else 'allow'} {_choices(rows.readings, code)}"
        words += _advice(code, agreed=agreed)
        severity = Severity.WARNING if agreed else Severity.NOTE
        said.append((code, _hit(words, "undecided", severity), None, rows))
    return said


def _code(possible: Sequence[Reading], codes: frozenset[str]) -> str:
    """The code for what the readings differ in; logprobs first, as rows mostly leave those open."""
    differ = [
        code
        for code, values in (
            (_LOGPROBS, {reading.logprobs for reading in possible}),
            (_MASK, {reading.mask for reading in possible}),
        )
        if len(values) > 1
    ]
    return next((code for code in differ if code in codes), differ[0] if differ else _LOGPROBS)


def _choices(readings: Iterable[Reading], code: str) -> str:
    """`in place or 1 place late`."""
    places = sorted(
        {one.logprobs if code == _LOGPROBS else one.mask for one in readings}, key=lambda n: (abs(n), n)
    )
    return " or ".join(_lie(place) for place in places)


def _on(code: str) -> str:
    return "are on their own tokens" if code == _LOGPROBS else "is on the sampled tokens"


def _advice(code: str, *, agreed: bool) -> str:
    proven = "; other rows rule out that it is right" if agreed else ""
    if code == _LOGPROBS:
        return f" ({_ZERO}){proven}; log the calls, or write null where no logprob exists"
    return f"{proven}; log the calls, or which tokens were sampled"


def _hit(message: str, cause: str, severity: Severity) -> Hit:
    return Hit(Where.LOG, 0, 0, message, cause=cause, severity=severity)


def _lie(places: int) -> str:
    """`in place`, `1 place late`, `2 places early`."""
    if not places:
        return "in place"
    return f"{many(abs(places), 'place')} {'late' if places > 0 else 'early'}"
