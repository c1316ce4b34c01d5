"""Values read from recorded prompts, located by the template's text before and after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

MARK = "qzvargumentzvq"
"""A placeholder for a value to be read; no template treats it specially."""
SAMPLE_DATE = datetime(1987, 11, 28, 17, 43, 21)
"""The time of a rendering that shows where a template writes the date."""
_CONTEXTS = (400, 64, 24)
"""How many characters before and after a value must match."""
_YEARS = range(2015, 2040)
"""Years to try for a date that names only the weekday."""


def between(text: str, mark: str, recorded: str, longest: int) -> Iterator[str]:
    """The possible values in a recorded text where the rendered one has a mark, the likeliest first."""
    pieces = text.split(mark)
    if len(pieces) < 2:
        return
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 2 and recorded.startswith(first) and recorded.endswith(last):
        value = recorded[len(first) : len(recorded) - len(last)]
        if len(first) + len(last) <= len(recorded) and len(value) <= longest:
            yield value
    said = set()
    for before, after in _around(first, pieces[1]):
        found = _found(before, after, recorded)
        if found is not None and len(found) <= longest and found not in said:
            said.add(found)
            yield found


def _around(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Candidates for the text around a value: long pieces, then the rest of its line."""
    for size in _CONTEXTS:
        yield before[-size:], after[:size]
    yield before[before.rfind("\n") + 1 :], after[: after.find("\n") + 1] or after[:24]
    yield before[-24:], after[:1]


def _found(before: str, after: str, recorded: str) -> str | None:
    """The text between the first `before` and the next `after`; None if they are not found."""
    if not before and not after:
        return None
    at = recorded.find(before)
    start = at + len(before)
    end = recorded.find(after, start) if after else len(recorded)
    return recorded[start:end] if at >= 0 and end >= 0 else None


def date_in(text: str, recorded: str, formats: Sequence[str]) -> datetime | None:
    """The date in a recorded text, where a text rendered at SAMPLE_DATE has that date; None if not found."""
    values: list[tuple[str, str]] = []
    for form in sorted(formats, key=lambda one: (-one.count("%"), one)):
        sample = SAMPLE_DATE.strftime(form)
        found = next(between(text, sample, recorded, 2 * len(sample) + 20), None) if sample else None
        if found is not None and not _covered(form, values):
            values.append((form, found))
    return parsed(values) if values else None


def _covered(form: str, values: Iterable[tuple[str, str]]) -> bool:
    """Whether everything that a format names is named by others too."""
    known = {part[:1] for other, _ in values for part in other.split("%")[1:]}
    return bool(known) and bool({part[:1] for part in form.split("%")[1:]} & known)


def parsed(values: Sequence[tuple[str, str]]) -> datetime | None:
    """The time that these formats write as these texts; None if there is none."""
    try:
        whole = datetime.strptime(" ".join(text for _, text in values), " ".join(form for form, _ in values))
    except ValueError:
        return None
    for year in (whole.year, *_YEARS):
        try:
            moved = whole.replace(year=year)
        except ValueError:  # the 29th of February
            continue
        if all(moved.strftime(form) == text for form, text in values):
            return moved
    return None
