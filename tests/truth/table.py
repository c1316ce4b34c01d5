"""The counts of a run, as a table, and its violations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .conventions import CONVENTIONS
from .judge import Outcome

__all__ = ["lines"]

COLUMNS = {
    name: {"fault": "decidable", "open fault": "ambiguous"}.get(name, name)
    for name in (
        *("rows", "fault", "named", "cured", "open fault", "told", "open", "said", "clean", "noted", "loud"),
        *("changed", "harmed", "violations"),
    )
}
GROUPS = ("clean", "slid", "slid from", "slid only", "inverted", "roles", "fill")
LEGEND = """decidable: faults that one slide explains, or that are no slide; beside calls, wrong tokens in the loss
named: of these, those with an error of that cause (of a slide, how far), beside calls on every wrong token
cured: of these, those of which a repair leaves no wrong token
ambiguous, told: faults that several slides explain, and those of them with an error or a warning
open, said: faults of rows that may be right, and those of them with a note: where a fault is the simplest reading
clean, noted, loud, changed: right rows; with a note, with an error or a warning, with a repair that changed them
harmed: a repair made a right token wrong, or trained a wrong one"""


def lines(outcome: Outcome, show: int) -> Iterator[str]:
    """Counts by convention and fault and by form, what was loud on right rows, the first violations of a kind."""
    names = {name for _, name, _ in outcome.cells}
    conventions = [*(each.name for each in CONVENTIONS if each.name in names), *(names & {"combined"})]
    yield from _titles("convention", "fault")
    for convention in conventions:
        for group in GROUPS:
            yield from _line(outcome, convention, group, name=convention, group=group)
    for group in GROUPS:
        yield from _line(outcome, "all", group, group=group)
    yield f"\n{LEGEND}\n"
    yield from _titles("form", "fault")
    for form in dict.fromkeys(form for form, _, _ in outcome.cells):
        yield from _line(outcome, form, "all", form=form)
    yield from _line(outcome, "all", "all")
    if outcome.loud_codes:
        yield "\nloud on right rows (rows by code):"
        yield from (f"  {count:5} {code}" for code, count in outcome.loud_codes.most_common(20))
    yield "\nviolations:" if outcome.violations else "\nno violation"
    for what, violations in sorted(outcome.violations.items(), key=lambda pair: -len(pair[1])):
        yield f"  {len(violations):5} {what}"
        yield from (f"      {violation}" for violation in violations[:show])


def _titles(first: str, second: str) -> Iterator[str]:
    yield "".join([f"{first:15}{second:10}", *(f"{title:>11}" for title in COLUMNS.values())])


def _line(outcome: Outcome, title: str, kind: str, **wanted: str) -> Iterator[str]:
    """The counts of the cells that have this form, convention and group, where they are asked for."""
    counts: Counter[str] = Counter()
    for cell, more in outcome.cells.items():
        if all(
            want in (None, have)
            for want, have in zip(map(wanted.get, ("form", "name", "group")), cell, strict=True)
        ):
            counts.update(more)
    if counts["rows"]:
        yield "".join([f"{title:15}{kind:10}", *(f"{counts[column]:11}" for column in COLUMNS)])
