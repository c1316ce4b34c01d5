"""Trials: the result of reading and scanning the first rows of a log with a mapping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tito_audit.errors import RecordError, SetupError, StorageError
from tito_audit.format import Row
from tito_audit.formats import format_named, map_columns, pick_format
from tito_audit.record.column import Column, ColumnRole
from tito_audit.record.finding import Severity
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.auditor import Loader
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings

_LISTS = ("token_ids", "loss_mask", "logprobs", "prompt_ids", "completion_ids", "completion_logprobs")
_OPTIONAL = ("loss_mask", "logprobs", "completion_logprobs")
_MISFITS = 0.25
"""The share of rows in which a column may fail to fit; above it the column is not proposed."""
_READ_ROWS = 8


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a scan of the first rows with the mapping found."""

    rollouts: int
    errors: int
    warnings: int
    notes: int
    with_errors: int
    """Rollouts with an error."""
    codes: Mapping[str, int]
    """Errors and warnings by code, the most common first."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What reading the first rows as `generic` with the mapping gave."""

    rows: int = 0
    training_rows: int = 0
    calls: int = 0
    messages: int = 0
    """Rows with messages."""
    without_ids: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Why rows could not be read, with the number of rows, the most common first."""
    misfits: Mapping[str, int] = field(default_factory=dict)
    """Columns whose length does not fit the tokens of their row, with the number of rows."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Columns that should hold a list but do not, with the number of rows."""
    scan: Scanned | None = None
    """What a scan with it found; None if the log cannot be read again or the settings do not allow a scan."""


def tried(rows: Sequence[tuple[int, Row]], mapping: Mapping[str, str], file: str) -> Trial:
    """Reads these rows as `generic` with the mapping; the result."""
    form = format_named("generic")
    errors: Counter[str] = Counter()
    misfits: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for number, row in rows:
        try:
            row = map_columns(row, mapping)
            rollouts = form.read(row, Place(file, number))
        except RecordError as error:
            errors[str(error)] += 1
            continue
        counts.update(_counted(rollouts))
        misfits.update(set().union(*map(_misfits, rollouts)))
        unread.update(name for name in _LISTS if name in mapping and isinstance(row[name], int | float | str))
    return Trial(
        counts["rows"],
        counts["training_rows"],
        counts["calls"],
        counts["messages"],
        counts["without_ids"],
        dict(errors.most_common()),
        dict(misfits.most_common()),
        dict(unread.most_common()),
    )


def _counted(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """What one row holds: a packed row holds several training rows."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    trained = sum(rollout.training_row is not None for rollout in rollouts)
    ids = trained or any(turn.prompt_ids is not None or turn.completion_ids is not None for turn in turns)
    return {
        "rows": 1,
        "training_rows": trained,
        "calls": len(turns),
        "messages": any(rollout.messages for rollout in rollouts),
        "without_ids": not ids,
    }


def _misfits(rollout: Rollout) -> set[str]:
    return {column.name for column in _columns(rollout) if column.alignment is None}


def misfits_of(trial: Trial) -> list[str]:
    """The mask and logprobs that do not fit the tokens in too many rows."""
    return [name for name in _OPTIONAL if trial.misfits.get(name, 0) > _MISFITS * trial.rows]


def scanned(
    path: Path, mapping: Mapping[str, str], rows: int, settings: Settings, loader: Loader | None, *, whole: bool
) -> Scanned | None:
    """What a scan of the first rows with the mapping finds; None if there can be none.

    Calls are only joined if these are all rows (`whole`).
    """
    if not path.is_file() or not rows:
        return None  # a pipe cannot be read twice
    own = replace(settings, columns=mapping, format=None, limit=rows, jobs=1, sample=None, row=None)
    scan = scan_rollouts(path, own if whole else replace(own, join=False))
    scan.loader = loader
    codes: Counter[str] = Counter()
    with_errors = 0
    try:
        for result in scan:
            codes.update(one.code for one in result.findings if one.severity > Severity.NOTE)
            with_errors += result.rollout is not None and any(
                one.severity is Severity.ERROR for one in result.findings
            )
    except (SetupError, StorageError):
        return None
    counts = scan.summary.findings.values()
    return Scanned(
        scan.summary.rollouts,
        sum(count.error for count in counts),
        sum(count.warning for count in counts),
        sum(count.note for count in counts),
        with_errors,
        dict(codes.most_common()),
    )


def read_logprobs(rows: Sequence[tuple[int, Row]], settings: Settings) -> set[str]:
    """The names, in the log, of the columns that are read as the sampler's logprobs."""
    named = settings.format or ("generic" if settings.columns else None)
    found: set[str] = set()
    for number, row in rows[:_READ_ROWS]:
        try:
            mapped = map_columns(row, settings.columns) if settings.columns else row
            form = format_named(named) if named is not None else pick_format(mapped)
            rollouts = form.read(mapped, Place("", number))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecordError):
            continue
        found.update(
            column.name
            for rollout in rollouts
            for column in _columns(rollout)
            if column.role is ColumnRole.LOGPROBS
        )
    return {settings.columns.get(name, name) for name in found}


def _columns(rollout: Rollout) -> Sequence[Column]:
    columns = [column for turn in rollout.turns for column in turn.columns]
    return [*columns, *(rollout.training_row.columns if rollout.training_row is not None else ())]
