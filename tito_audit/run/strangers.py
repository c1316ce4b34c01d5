"""Findings about a whole run: training rows that hold what the calls beside other rows sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from tito_audit.chains.ledger import BLOCK, Ledger
from tito_audit.record.finding import Finding, Hit, Result, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import PLACES
from tito_audit.run.headlines import headed
from tito_audit.terminal.words import many

CODE, ROW_OF_OTHERS = "REC012", "row of other calls"
"""The code and cause of a training row that is not of the calls beside it."""
_SAME = 0.9
"""The share of these rows that have to be as many rows from their calls to say that the join is off."""
MOST = 1 << 17
"""How many such rows are looked for."""


def is_stranger(result: Result) -> bool:
    """Whether the training row of a rollout is not of the calls beside it."""
    return any(one.code == CODE and one.hit.cause == ROW_OF_OTHERS for one in result.findings)


def owner_results(ledger: Ledger, strangers: Sequence[Place]) -> Iterator[Result]:
    """A finding for each log with such rows whose tokens the calls beside other rows of the run sampled."""
    owners = _owners(ledger, _last_spans(ledger, strangers))
    for _, places in groupby(owners, key=lambda place: place.file):
        pairs = [(place, owners[place]) for place in places]
        hit = Hit(Where.LOG, 0, 0, _message(pairs), cause="joined to other calls", severity=Severity.ERROR)
        first = pairs[0][0]
        yield Result(first, None, (headed(Finding(CODE, Severity.ERROR, first, hit)),), of_log=True)


def _last_spans(ledger: Ledger, strangers: Sequence[Place]) -> dict[int, Place]:
    """The hash of the last trained span of each of these training rows."""
    spans, first, found = ledger.spans, ledger.first_spans, dict[int, Place]()
    for file, places in groupby(strangers, key=lambda place: place.file):
        among = set(places)
        for number in ledger.sequences(file, sorted({place.row for place in among})):
            place = ledger.place(number)
            if ledger.turn(number) is None and place in among:
                own = spans[first[number] : first[number + 1]]
                found[int(own["hash"][np.flatnonzero(own["tokens"])[-1]])] = place
    return found


def _owners(ledger: Ledger, wanted: dict[int, Place]) -> dict[Place, Place]:
    """By row, the first rollout with a call that sampled its last span, in the order of the rows."""
    keys, found = np.fromiter(wanted, np.uint64, len(wanted)), dict[Place, Place]()
    hashes = ledger.spans["hash"]
    for at in range(0, len(hashes) if wanted else 0, BLOCK):
        held = np.flatnonzero(np.isin(hashes[at : at + BLOCK], keys)) + at
        for span, number in zip(held.tolist(), ledger.sequences_of(held).tolist(), strict=True):
            place, owner = wanted[int(hashes[span])], ledger.place(number)
            if ledger.turn(number) is not None and owner != place:
                found.setdefault(place, owner)
    return {place: found[place] for place in wanted.values() if place in found}


def _message(pairs: Sequence[tuple[Place, Place]]) -> str:
    """Which rows hold what, and how far the join is off."""
    apart = Counter(owner.row - place.row for place, owner in pairs if owner.file == place.file)
    rows, times = apart.most_common(1)[0] if apart else (0, 0)
    named = ", ".join(f"{_name(place)} what {_name(owner, place)} sampled" for place, owner in pairs[:PLACES])
    more = f" and {len(pairs) - PLACES:,} more" if len(pairs) > PLACES else ""
    verb = "trains" if len(pairs) == 1 else "train"
    said = f"{many(len(pairs), 'row')} {verb} what the calls beside another row sampled: {named}{more}"
    if rows and times >= max(_SAME * len(pairs), 2):
        return f"{said}; the join of rows and calls is off by {rows:+d}: join them by id"
    return f"{said}; join rows and calls by id"


def _name(place: Place, beside: Place | None = None) -> str:
    """`row 3`, `row 3[1]`; with its file if that is another than the one beside it."""
    if beside is not None and place.file != beside.file:
        return str(place)
    return f"row {place.row}" + (f"[{place.item}]" if place.item else "")
