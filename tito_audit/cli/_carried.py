"""The report of a conversion: what is kept, what is lost, what is repeated in several rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TextIO

from tito_audit.convert.run import Conversion
from tito_audit.terminal.escape import inert, visible

_SHOWN = 4
_MOST = 20
"""How many rows that could not be converted are shown; the others are counted."""


def print_survey(conversion: Conversion, out: TextIO, *, dry_run: bool) -> None:
    """Print what the conversion keeps and loses, before anything is written."""
    for line in _lines(conversion, dry_run=dry_run):
        print(inert(visible(line)) if line else "", file=out)


def why_refused(conversion: Conversion) -> str:
    """Why nothing was written, and what to do."""
    carried = conversion.carried
    parts = []
    if carried.lost:
        shown = ", ".join([*carried.lost][:_SHOWN]) + (", …" if len(carried.lost) > _SHOWN else "")
        parts.append(f"{shown} would be lost")
    if carried.not_converted:
        parts.append(f"{_counted(carried.not_converted, 'row or rollout', 'rows or rollouts')} would be left out")
    way_out = "Pass --lossy to write the rest, or choose another --to."
    if not carried.rows_made:
        way_out = "Choose another --to, or a log with token ids."
    why = f"as {conversion.maker.name} {' and '.join(parts)}"
    return f"{conversion.named}: nothing was written, because {why}. {way_out}"


def _lines(conversion: Conversion, *, dry_run: bool) -> Iterator[str]:
    carried, maker = conversion.carried, conversion.maker
    yield f"{conversion.named} as {maker.name}: {maker.title}"
    read = f"{_counted(carried.rows_read, 'row')}, {_counted(carried.rollouts, 'rollout')}"
    yield f"{read} → {_counted(carried.rows_made, 'row')}{', a dry run: nothing is written' if dry_run else ''}"
    yield from conversion.notices
    if carried.forked:
        yield (
            f"{_counted(carried.forked, 'rollout')} became several rows each: "
            "not every call continues the one before it"
        )
    if carried.lost:
        those = "rows and conversations" if carried.joined else "rows"
        yield from ("", f"Lost, with the number of {those} that have it")
        yield from _table(carried.lost)
    if carried.repeated:
        yield from ("", "Repeated in several rows, with the number of cases")
        yield from _table(carried.repeated)
    if carried.missing:
        yield from ("", "Not in the log, so left out or null, with the number of rollouts")
        yield from _table(carried.missing)
    if carried.not_converted:
        yield from ("", "Not converted")
        for place, reason in carried.refused[:_MOST]:
            yield f"  {place}  {reason}"
        if carried.not_converted > _MOST:
            yield f"  … and {carried.not_converted - _MOST:,} more"
    if carried.lossless:
        yield "Nothing is lost."


def _table(counts: Mapping[str, int]) -> Iterator[str]:
    width = max(map(len, counts))
    for name, count in counts.items():
        yield f"  {name:<{width}}  {count:,}"


def _counted(count: int, one: str, several: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else several or one + 's'}"
