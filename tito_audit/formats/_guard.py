"""The guard around formats: a row whose values one does not expect is a row that cannot be read, never a crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tito_audit.errors import ODD_VALUES, RecordError, TitoAuditError, in_words
from tito_audit.format import Format, Row
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import Sources

_Answer = TypeVar("_Answer")


def guarded(format: Format) -> Format:
    """The format with functions that raise RecordError for any row that they cannot handle.

    A row whose values `matches` cannot look at is not of the format.
    """
    return replace(
        format,
        matches=partial(_matches, format),
        read=partial(_read, format),
        sources=partial(_sources, format),
        update=partial(_update, format),
    )


def _matches(format: Format, row: Row) -> bool:
    try:
        return format.matches(row)
    except ODD_VALUES:
        return False


def _read(format: Format, row: Row, place: Place) -> Sequence[Rollout]:
    return _tried(format, row, lambda: format.read(row, place))


def _sources(format: Format, row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    return _tried(format, row, lambda: format.sources(row, rollouts))


def _update(format: Format, row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    return _tried(format, row, lambda: format.update(row, repaired))


def _tried(format: Format, row: Row, work: Callable[[], _Answer]) -> _Answer:
    """What the work returns; RecordError with the reason if it fails in any way."""
    try:
        return work()
    except TitoAuditError:
        raise
    except ODD_VALUES as error:
        raise RecordError(_reason(format, row, error)) from error


def _reason(format: Format, row: Row, error: Exception) -> str:
    if not _matches(format, row):
        what = f"it has no {error.args[0]!r}" if type(error) is KeyError else "its columns hold other values"
        return f"it is not a row of {format.name}, which was asked for: {what}"
    if isinstance(error, RecursionError):
        return f"it cannot be read as {format.name}: {in_words(error)}"
    return (
        f"it cannot be read as {format.name}: a part of it is missing or holds something else than it should "
        f"({in_words(error)})"
    )
