"""The mapping from our columns to the log's: proposed, tried on the first rows, and ready to paste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tito_audit.errors import RecordError, SetupError, StorageError
from tito_audit.format import Row
from tito_audit.formats import (
    CALL_LISTS,
    CANONICAL_COLUMNS,
    COMPLETION_IDS,
    FLAT_IDS,
    LOGPROBS,
    MASKS,
    PROMPT_IDS,
    SEGMENT_COLUMNS,
    format_named,
    map_columns,
)
from tito_audit.inspect.columns import Column, Item
from tito_audit.inspect.roles import Role, Roles
from tito_audit.record.column import Column as RecordColumn
from tito_audit.record.finding import Severity
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.auditor import Loader
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.terminal.escape import shell_word

_KNOWN = {Role.IDS: FLAT_IDS, Role.MASK: MASKS, Role.LOGPROBS: LOGPROBS, Role.CALLS: CALL_LISTS}
_ROLES = {
    "token_ids": Role.IDS,
    "prompt_ids": Role.PROMPT_IDS,
    "completion_ids": Role.COMPLETION_IDS,
    "loss_mask": Role.MASK,
    "messages": Role.MESSAGES,
    "tools": Role.TOOLS,
    "calls": Role.CALLS,
    "model": Role.MODEL,
    "finish_reason": Role.FINISH_REASON,
}
_READ = (FLAT_IDS, PROMPT_IDS, COMPLETION_IDS, MASKS, LOGPROBS, CALL_LISTS)


def proposed(
    columns: Sequence[Column],
    roles: Roles,
    rows: int,
    sampler: str | None = None,
    without: Collection[str] = (),
) -> dict[str, str]:
    """Our column names to the log's, for columns that `--map` can name: those in the row and in its objects.

    `sampler` is the chosen logprob column, if there are several; columns in `without` are left out. A row that
    lacks a mapped column cannot be read, so the ids must be in most rows, and all other columns wherever the ids
    are. {} for a log without such ids.
    """
    carriers = (Role.IDS, Role.COMPLETION_IDS, Role.CALLS)
    of_ids = [c.present for c in columns if c.top and roles[c.path].role in carriers and 2 * c.present > rows]
    there = [column for column in columns if of_ids and column.top and column.present >= max(of_ids)]

    def best(role: Role) -> Column | None:
        names = _KNOWN.get(role, ())
        fits = [column for column in there if roles[column.path].role is role and column.path not in without]
        # Prefer known names, then columns aligned with the tokens, then columns nearer to the top.
        fits.sort(
            key=lambda c: (
                c.path != sampler,
                names.index(c.name) if c.name in names else len(names),
                not roles[c.path].alignment,
                len(c.keys),
            )
        )
        return fits[0] if fits else None

    mapping = {ours: column.path for ours, role in _ROLES.items() if (column := best(role)) is not None}
    if (logprobs := best(Role.LOGPROBS)) is not None:
        split = "token_ids" not in mapping and "completion_ids" in mapping
        mapping["completion_logprobs" if split else "logprobs"] = logprobs.path
    if not {"token_ids", "completion_ids", "calls"} & mapping.keys():
        return {}
    return {ours: mapping[ours] for ours in CANONICAL_COLUMNS if ours in mapping}


def by_their_names(mapping: Mapping[str, str]) -> bool:
    """Whether the names in the mapping are all known, so that no mapping is needed."""
    return all(
        theirs == ours or any(ours in names and theirs in names for names in _READ)
        for ours, theirs in mapping.items()
    )


def as_flags(mapping: Mapping[str, str]) -> list[str]:
    """The mapping as flags for a shell: `--map token_ids=tokens`."""
    return [f"--map {shell_word(f'{ours}={theirs}')}" for ours, theirs in mapping.items()]


def as_toml(mapping: Mapping[str, str], table: str = "tool.tito-audit") -> list[str]:
    """The mapping as lines of a configuration file; pass `table` "" for a `tito-audit.toml`."""
    name = f"{table}.map" if table else "map"
    lines = [f"[{name}]"]
    for ours, theirs in mapping.items():
        escapes = {'"': '\\"', "\\": "\\\\"}
        for char in {*theirs} - escapes.keys():
            number = ord(char)
            escape = f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"
            escapes[char] = char if char.isprintable() else escape
        text = "".join(map(escapes.__getitem__, theirs))
        lines.append(f'{ours} = "{text}"')
    return lines


LENGTHS, POSITIONS = "seq_lens", "position_ids"
_NAMES = {LENGTHS, POSITIONS, *SEGMENT_COLUMNS, "sequence_lengths", "cu_seqlens", "attention_mask"}
"""Columns by which a scan splits rows."""


def packed_by(columns: Sequence[Column], items: Sequence[Item], ids: str | None) -> tuple[str, str] | None:
    """The column that splits the rows of these ids into samples, with the name under which a scan would split
    them; None if there is none, or a scan knows one.
    """
    numbers = [column for column in columns if column.top and not column.scope and column.arrays]
    if ids is None or any(column.path in _NAMES for column in numbers):
        return None
    for column in numbers:
        pairs = [(item.lists.get(column.path), item.lists.get(ids)) for item in items]
        both = [(values, tokens) for values, tokens in pairs if values is not None and tokens is not None]
        if len(both) < 2 or any(values.dtype.kind not in "iu" for values, _ in both):
            continue
        # Does it count up from 0, and again from 0?
        steps = [(values, np.diff(values)) for values, tokens in both if len(values) == len(tokens)]
        if len(steps) == len(both) and all(
            len(step) and values[0] == 0 and ((step == 1) | (values[1:] == 0)).all() and (step < 0).any()
            for values, step in steps
        ):
            return column.path, POSITIONS
        # The lengths of the parts of a row?
        parts = (len(v) < len(ids_) and (v > 0).all() and v.sum() == len(ids_) for v, ids_ in both)
        if all(len(values) for values, _ in both) and all(parts) and max(len(v) for v, _ in both) > 1:
            return column.path, LENGTHS
    return None


_LISTS = ("token_ids", "loss_mask", "logprobs", "prompt_ids", "completion_ids", "completion_logprobs")
_OPTIONAL = ("loss_mask", "logprobs", "completion_logprobs")


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
        # A packed row holds several training rows.
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        trained = sum(rollout.training_row is not None for rollout in rollouts)
        ids = trained or any(turn.prompt_ids is not None or turn.completion_ids is not None for turn in turns)
        counts["rows"] += 1
        counts["training_rows"] += trained
        counts["calls"] += len(turns)
        counts["messages"] += any(rollout.messages for rollout in rollouts)
        counts["without_ids"] += not ids
        misfits.update({c.name for rollout in rollouts for c in columns_of(rollout) if c.alignment is None})
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


def misfits_of(trial: Trial) -> list[str]:
    """The mask and logprobs that do not fit the tokens in too many rows."""
    return [name for name in _OPTIONAL if trial.misfits.get(name, 0) > 0.25 * trial.rows]


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
            codes.update(finding.code for finding in result.findings if finding.severity > Severity.NOTE)
            errors = [finding for finding in result.findings if finding.severity is Severity.ERROR]
            with_errors += result.rollout is not None and bool(errors)
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


def columns_of(rollout: Rollout) -> Sequence[RecordColumn]:
    """The per-token columns of a rollout."""
    columns = [column for turn in rollout.turns for column in turn.columns]
    return [*columns, *(rollout.training_row.columns if rollout.training_row is not None else ())]
