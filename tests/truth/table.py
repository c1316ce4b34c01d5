"""The counts of a run, as a table, and its violations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .judge import Outcome

__all__ = ["lines"]

COLUMNS = (
    ("rows", "rows"),
    ("fault", "decidable"),
    ("named", "named"),
    ("cured", "cured"),
    ("open fault", "faulty, open"),
    ("told", "told"),
    ("open", "open"),
    ("said", "said"),
    ("clean", "clean"),
    ("loud", "loud on clean"),
    ("harmed", "harmed"),
    ("violations", "violations"),
)
KINDS = ("clean", "mask", "logprobs", "both", "inverted", "roles", "fill")


def lines(outcome: Outcome, show: int) -> Iterator[str]:
    """The table by form and fault, what was loud on clean rows, and the first violations of each kind."""
    yield "".join([f"{'form':9}{'fault':10}", *(f"{title:>14}" for _, title in COLUMNS)])
    forms = list(dict.fromkeys(form for form, _ in outcome.cells))
    totals: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for form in forms:
        for kind in KINDS:
            counts = outcome.cells.get((form, kind))
            if counts is not None:
                yield _line(form, kind, counts)
                totals.update(counts)
                by_kind[kind].update(counts)
    for kind, counts in by_kind.items():
        yield _line("all", kind, counts)
    yield _line("all", "all", totals)
    if outcome.loud_codes:
        yield "\nloud on clean rows (rows by code):"
        yield from (f"  {count:5} {code}" for code, count in outcome.loud_codes.most_common(20))
    yield "\nviolations:" if outcome.violations else "\nno violation"
    for what, found in sorted(outcome.violations.items(), key=lambda pair: -len(pair[1])):
        yield f"  {len(found):5} {what}"
        yield from (f"      {one}" for one in found[:show])


def _line(form: str, kind: str, counts: Counter[str]) -> str:
    return "".join([f"{form:9}{kind:10}", *(f"{counts[name]:14}" for name, _ in COLUMNS)])
