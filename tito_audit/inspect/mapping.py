"""Mappings from our column names to the log's: proposed, tried on the first rows, and printed to be pasted."""

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
from tito_audit.inspect.columns import Item, LogColumn
from tito_audit.inspect.roles import Role, Roles
from tito_audit.record.column import Column
from tito_audit.record.finding import Severity
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.auditor import Loader
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.terminal.escape import shell_word

_NAMES_BY_ROLE = {Role.IDS: FLAT_IDS, Role.MASK: MASKS, Role.LOGPROBS: LOGPROBS, Role.CALLS: CALL_LISTS}
_ROLES_BY_NAME = {
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
_INTERCHANGEABLE = (FLAT_IDS, PROMPT_IDS, COMPLETION_IDS, MASKS, LOGPROBS, CALL_LISTS)


def propose_mapping(
    columns: Sequence[LogColumn],
    roles: Roles,
    rows: int,
    sampler: str | None = None,
    without: Collection[str] = (),
) -> dict[str, str]:
    """Our column names to the log's; {} for a log without ids that `--map` can name.

    A row that lacks a mapped column cannot be read. So the ids must be in most rows, and every other column
    wherever the ids are. `sampler` is the logprob column to prefer; columns in `without` are not proposed.
    """
    carriers = (Role.IDS, Role.COMPLETION_IDS, Role.CALLS)
    mappable = [column for column in columns if column.is_mappable]
    with_ids = [c.rows_with_key for c in mappable if roles[c.path].role in carriers and 2 * c.rows_with_key > rows]
    complete = [column for column in mappable if with_ids and column.rows_with_key >= max(with_ids)]

    def best(role: Role) -> LogColumn | None:
        names = _NAMES_BY_ROLE.get(role, ())
        fits = [column for column in complete if roles[column.path].role is role and column.path not in without]
        # Known names first, then columns aligned with the tokens, then those nearer to the top.
        fits.sort(
            key=lambda c: (
                c.path != sampler,
                names.index(c.name) if c.name in names else len(names),
                not roles[c.path].alignment,
                len(c.keys),
            )
        )
        return fits[0] if fits else None

    mapping = {ours: column.path for ours, role in _ROLES_BY_NAME.items() if (column := best(role)) is not None}
    if (logprobs := best(Role.LOGPROBS)) is not None:
        split = "token_ids" not in mapping and "completion_ids" in mapping
        mapping["completion_logprobs" if split else "logprobs"] = logprobs.path
    if not {"token_ids", "completion_ids", "calls"} & mapping.keys():
        return {}
    return {ours: mapping[ours] for ours in CANONICAL_COLUMNS if ours in mapping}


def needs_no_mapping(mapping: Mapping[str, str]) -> bool:
    """Whether a scan knows all these columns by their own names."""
    return all(
        theirs == ours or any(ours in names and theirs in names for names in _INTERCHANGEABLE)
        for ours, theirs in mapping.items()
    )


def as_flags(mapping: Mapping[str, str]) -> list[str]:
    """The mapping as flags for a shell: `--map token_ids=tokens`."""
    return [f"--map {shell_word(f'{ours}={theirs}')}" for ours, theirs in mapping.items()]


def as_toml(mapping: Mapping[str, str], table: str = "tool.tito-audit") -> list[str]:
    """The mapping as lines of a configuration file; in a `tito-audit.toml` the `table` is ""."""
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
_PACKING_NAMES = {LENGTHS, POSITIONS, *SEGMENT_COLUMNS, "sequence_lengths", "cu_seqlens", "attention_mask"}
"""Columns by which a scan splits packed rows."""


def packing_column(columns: Sequence[LogColumn], items: Sequence[Item], ids: str | None) -> tuple[str, str] | None:
    """A column that shows where packed rows are split, and the name by which a scan would know it.

    None if no column does, or if a scan knows one already. `ids` is the column of the packed ids.
    """
    numbers = [column for column in columns if column.is_mappable and not column.scope and column.arrays]
    if ids is None or any(column.path in _PACKING_NAMES for column in numbers):
        return None
    for column in numbers:
        pairs = [(item.lists.get(column.path), item.lists.get(ids)) for item in items]
        both = [(values, tokens) for values, tokens in pairs if values is not None and tokens is not None]
        if len(both) < 2 or any(values.dtype.kind not in "iu" for values, _ in both):
            continue
        # Position ids: they count up from 0, again and again.
        steps = [(values, np.diff(values)) for values, tokens in both if len(values) == len(tokens)]
        if len(steps) == len(both) and all(
            len(step) and values[0] == 0 and ((step == 1) | (values[1:] == 0)).all() and (step < 0).any()
            for values, step in steps
        ):
            return column.path, POSITIONS
        # Lengths that add up to that of the row.
        parts = (len(v) < len(ids_) and (v > 0).all() and v.sum() == len(ids_) for v, ids_ in both)
        if all(len(values) for values, _ in both) and all(parts) and max(len(v) for v, _ in both) > 1:
            return column.path, LENGTHS
    return None


_LISTS = ("token_ids", "loss_mask", "logprobs", "prompt_ids", "completion_ids", "completion_logprobs")
_OPTIONAL = ("loss_mask", "logprobs", "completion_logprobs")


@dataclass(frozen=True, slots=True)
class ScanCounts:
    """What a scan of the first rows found."""

    rollouts: int
    errors: int
    warnings: int
    notes: int
    with_errors: int
    """Rollouts that have an error."""
    codes: Mapping[str, int]
    """Errors and warnings by code, the most common first."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What reading the first rows as `generic` with a mapping gave."""

    rows: int = 0
    training_rows: int = 0
    calls: int = 0
    messages: int = 0
    """Rows with messages."""
    without_ids: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Number of rows by why they could not be read, the most common reason first."""
    misfits: Mapping[str, int] = field(default_factory=dict)
    """Number of rows by column whose length does not fit the tokens."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Number of rows by column that should hold a list and does not."""
    scan: ScanCounts | None = None
    """What a scan with it found; None if the log cannot be read again, or not with these settings."""

    @property
    def unfit(self) -> list[str]:
        """The mask and logprob columns that do not fit the tokens in over a quarter of the rows."""
        return [name for name in _OPTIONAL if self.misfits.get(name, 0) > 0.25 * self.rows]


def try_mapping(rows: Sequence[tuple[int, Row]], mapping: Mapping[str, str], file: str) -> Trial:
    """Read these rows as `generic` with the mapping."""
    form = format_named("generic")
    errors, misfits, unread, counts = (Counter[str]() for _ in range(4))
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
        misfits.update({c.name for rollout in rollouts for c in token_columns(rollout) if c.alignment is None})
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


def scan_with_mapping(
    path: Path, mapping: Mapping[str, str], rows: int, settings: Settings, loader: Loader | None, *, whole: bool
) -> ScanCounts | None:
    """What a scan of the first rows with the mapping finds; None if the log cannot be scanned.

    Calls are only joined if these are all rows of the log (`whole`).
    """
    if not path.is_file() or not rows:  # a pipe cannot be read twice
        return None
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
    return ScanCounts(
        scan.summary.rollouts,
        sum(count.error for count in counts),
        sum(count.warning for count in counts),
        sum(count.note for count in counts),
        with_errors,
        dict(codes.most_common()),
    )


def token_columns(rollout: Rollout) -> Sequence[Column]:
    """The per-token columns of a rollout."""
    columns = [column for turn in rollout.turns for column in turn.columns]
    return [*columns, *(rollout.training_row.columns if rollout.training_row is not None else ())]
