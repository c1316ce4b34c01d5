"""inspect_log: the format, columns and loss masks of a log, from its first rows.

Mappings from our column names to the log's: proposed, tried on these rows, and printed to be pasted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tito_audit.errors import ODD_VALUES, RecordError, SetupError, StorageError
from tito_audit.format import Format, Row
from tito_audit.formats import (
    CALL_LISTS,
    CANONICAL_COLUMNS,
    COMPLETION_IDS,
    FLAT_IDS,
    LOGPROBS,
    MASKS,
    PROMPT_IDS,
    SEGMENT_COLUMNS,
    NearFormat,
    all_formats,
    format_named,
    map_columns,
    matched_keys,
    near_formats,
    pick_format,
    text_log_notice,
)
from tito_audit.inspect.columns import (
    Columns,
    Item,
    LogColumn,
    NumberFacts,
    Relation,
    find_relations,
    number_facts,
)
from tito_audit.inspect.logprobs import LogprobChoice, choose_sampler_logprobs
from tito_audit.inspect.roles import Role, Roles, count_characters, guess_roles
from tito_audit.join import CallsInspected, inspect_calls
from tito_audit.levels.facts import LACKS_ALL, record_mask
from tito_audit.levels.tally import LogRecord
from tito_audit.record.column import Column, ColumnRole, MaskEncoding, decode_mask, detect_mask_encoding
from tito_audit.record.finding import Severity
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage import open_log
from tito_audit.summary import RecordCounts, count_record
from tito_audit.terminal.escape import shell_word
from tito_audit.tokens.vocab import Vocabulary

_MOST_BYTES = 256 << 20
"""About how many bytes of a log are read at most, however few rows that is."""


@dataclass(frozen=True, slots=True)
class FormatRows:
    """Rows that are read as one format, or that no format reads."""

    format: str | None
    """None if no format fits."""
    rows: int
    first_row: int
    told_by: tuple[str, ...] = ()
    """The keys that gave the format away."""
    because: str = ""
    """Why no format fits."""
    near: tuple[NearFormat, ...] = ()
    """Other formats that the first of these rows nearly matches."""
    notices: tuple[str, ...] = ()
    """For rows of text without ids: what they are, and what to log instead."""


@dataclass(frozen=True, slots=True)
class MaskNote:
    """How a mask column is encoded, and how much it trains."""

    path: str
    encodings: Mapping[str, int]
    """Number of lists by encoding."""
    trained: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sentinel:
    """What a logprob column holds at untrained tokens."""

    path: str
    mask: str
    value: float
    """The most common value there; NaN stands for null."""
    share: float
    """Share of untrained tokens that have it."""
    inside: int
    """Number of trained tokens that have it as well."""


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


@dataclass(slots=True)
class _RowReading:
    """A row, read on its own as a scan would read it."""

    number: int
    row: Row
    form: Format | None = None
    """None if no format fits, for the reason `because`."""
    because: str = ""
    rollouts: Sequence[Rollout] | None = None
    """None if the row cannot be read."""


@dataclass(slots=True)
class Inspection:
    """All that the first rows of a log show; filled in step by step."""

    file: str
    kind: str
    """Kind of file: lines, values, array, parquet, arrow or torch."""
    rows: int = 0
    """Rows that were read."""
    stopped: bool = False
    """Whether rows may follow that were not read."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Why a row could not be read, by row."""
    formats: list[FormatRows] = field(default_factory=list)
    columns: list[LogColumn] = field(default_factory=list)
    items: dict[str, list[Item]] = field(default_factory=dict)
    """By scope: the objects that the columns were read from."""
    more_columns: int = 0
    deeper: bool = False
    facts: dict[str, NumberFacts] = field(default_factory=dict)
    """By path, for columns of lists of numbers."""
    roles: Roles = field(default_factory=dict)
    relations: dict[str, list[Relation]] = field(default_factory=dict)
    """By scope."""
    masks: list[MaskNote] = field(default_factory=list)
    sentinels: list[Sentinel] = field(default_factory=list)
    logprobs: list[LogprobChoice] = field(default_factory=list)
    """Which of several logprob columns is the sampler's, for each scope that has several."""
    mapping: dict[str, str] = field(default_factory=dict)
    """Our column names to the log's: the mapping in the settings, or else the proposed one."""
    given: bool = False
    """Whether the mapping is that of the settings."""
    left_out: list[str] = field(default_factory=list)
    """Columns that are not proposed, as they fit the tokens of too few rows."""
    trial: Trial | None = None
    """What reading and scanning with the mapping gave; None without a mapping."""
    packed: tuple[str, str] | None = None
    """A column of unknown name that splits rows into samples, and the name to give it."""
    record: LogRecord | None = None
    """The level of these rows; None until it is known."""
    calls: CallsInspected | None = None
    """What the rows that are one call each have in common; None if there are fewer than two."""


def inspect_log(
    path: Path,
    rows: int = 100,
    settings: Settings | None = None,
    vocabulary: Vocabulary | None = None,
) -> Inspection:
    """Inspect the first `rows` rows of a file; StorageError if it cannot be read as a log.

    `vocabulary` is that of the log's tokenizer, if it is known.
    """
    settings = (settings or Settings()).at(path)
    log = open_log(path, max_row_bytes=settings.max_row_bytes, rows_at=settings.rows_at)
    result = Inspection(str(path), "")
    read: list[tuple[int, Row]] = []
    for raw in log:
        if result.rows >= rows or log.position > _MOST_BYTES:
            result.stopped = True
            break
        result.rows += 1
        if raw.value is None:
            result.unreadable[raw.index] = raw.error or "the row cannot be read"
        else:
            read.append((raw.index, raw.value))
    result.kind = log.kind if path.is_file() else "lines"
    with np.errstate(invalid="ignore", over="ignore"):  # columns may hold infinity
        _inspect_columns(result, read, vocabulary)
    if result.kind in ("parquet", "arrow"):
        types: dict[tuple[str, ...], str] = {}
        fields: list[tuple[tuple[str, ...], Any]] = [((column.name,), column.type) for column in log.schema()]
        for keys, kind in fields:  # which grows by those inside of them
            types[keys] = str(kind)
            if pa.types.is_struct(kind):
                fields += [((*keys, inner.name), inner.type) for inner in kind]
            elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
                fields.append(((*keys, "[]"), kind.value_type))
        for listed in result.columns:
            listed.storage_type = types.get(listed.keys)
    readings = list(_read_rows(read, settings, result.file))
    result.formats = _group_by_format(readings)
    _add_logprobs_and_mapping(result, read, readings, settings)
    if result.mapping and not settings.columns and any(rows_of.format is None for rows_of in result.formats):
        readings = list(_read_rows(read, replace(settings, columns=result.mapping), result.file))
    counts = RecordCounts()
    for number in result.unreadable:
        count_record(counts, Place(result.file, number), "", LACKS_ALL)
    for reading in readings:
        if reading.rollouts is None:
            count_record(counts, Place(result.file, reading.number), "", LACKS_ALL)
        for rollout in reading.rollouts or ():
            count_record(counts, rollout.place, rollout.format, record_mask(rollout, [reading.row]))
    result.record = LogRecord.of(result.file, counts)
    result.packed = packing_column(result.columns, result.items.get("", []), result.mapping.get("token_ids"))
    if result.trial is not None:
        scan = scan_with_mapping(path, result.mapping, result.rows, settings, whole=not result.stopped)
        result.trial = replace(result.trial, scan=scan)
    decode = vocabulary.bytes_of if vocabulary is not None else None
    result.calls = inspect_calls(path, [row for _, row in read], result.rows, settings, decode)
    return result


def _inspect_columns(result: Inspection, rows: Sequence[tuple[int, Row]], vocabulary: Vocabulary | None) -> None:
    """Fill in columns, their facts and roles, how they relate, masks and sentinels."""
    seen = Columns()
    for number, row in rows:
        seen.add(number, row)
    result.columns = list(seen.by_path.values())
    result.more_columns, result.deeper = seen.unlisted, seen.has_deeper_values
    result.items = seen.items
    in_vocabulary = vocabulary.known if vocabulary is not None else None
    texts = [count_characters(row) for _, row in rows]
    for column in result.columns:
        if column.arrays and (facts := number_facts(column.arrays)) is not None:
            result.facts[column.path] = facts
    for scope, columns in _columns_by_scope(result):
        items = seen.items.get(scope, [])
        about = {column.path: result.facts[column.path] for column in columns if column.path in result.facts}
        relations = find_relations(items, about) if about else []
        result.roles.update(guess_roles(columns, items, about, relations, () if scope else texts, in_vocabulary))
        # Where lengths never vary, lists that have no tokens may match by chance.
        result.relations[scope] = [
            relation
            for relation in relations
            if relation.varied
            or relation.of < 2
            or any(result.roles[path].role is not Role.LIST for path in relation.paths)
        ]
        by_role = {
            role: [c.path for c in columns if result.roles[c.path].role is role and c.path in result.facts]
            for role in Role
        }
        ids = next(iter(by_role[Role.IDS]), None)
        for mask in by_role[Role.MASK]:
            encodings: Counter[str] = Counter()
            trained = tokens = 0
            for item in items:
                values = item.lists.get(mask)
                if values is None:
                    continue
                encoding = _encoding_of_mask(item, mask, ids)
                encodings[str(encoding) if encoding is not None else "none"] += 1
                tokens += len(values)
                trained += int(decode_mask(values, encoding).sum()) if encoding is not None else 0
            result.masks.append(MaskNote(mask, dict(encodings.most_common()), trained, tokens))
            for logprobs in by_role[Role.LOGPROBS]:
                sentinel = _find_sentinel(items, logprobs, mask, ids)
                if sentinel is not None:
                    result.sentinels.append(sentinel)


def _columns_by_scope(result: Inspection) -> Sequence[tuple[str, Sequence[LogColumn]]]:
    by_scope: dict[str, list[LogColumn]] = {}
    for column in result.columns:
        by_scope.setdefault(column.scope, []).append(column)
    return list(by_scope.items())


def _encoding_of_mask(item: Item, mask: str, ids: str | None) -> MaskEncoding | None:
    """How an object's mask is encoded; None if it has none, or that is no mask."""
    values, tokens = item.lists.get(mask), item.lists.get(ids or "")
    if values is None:
        return None
    usable = tokens.astype(np.int64) if tokens is not None and tokens.dtype.kind in "iu" else None
    return detect_mask_encoding(values, usable)  # type: ignore[arg-type]  # wider integers compare the same


def _find_sentinel(items: Sequence[Item], logprobs: str, mask: str, ids: str | None) -> Sentinel | None:
    """The most common logprob at untrained tokens; None if the two columns never line up."""
    outside: list[Any] = []
    inside: list[Any] = []
    for item in items:
        values, marks = item.lists.get(logprobs), item.lists.get(mask)
        encoding = _encoding_of_mask(item, mask, ids)
        if values is None or marks is None or encoding is None or not len(values):
            continue
        trained = decode_mask(marks, encoding)
        # A mask of the response covers the end of logprobs of the whole sequence.
        if len(trained) < len(values):
            trained = np.concatenate([np.zeros(len(values) - len(trained), dtype=bool), trained])
        if len(trained) == len(values):
            outside.append(values[~trained].astype(np.float64))
            inside.append(values[trained].astype(np.float64))
    around = np.concatenate(outside) if outside else np.empty(0)
    if not len(around):
        return None
    values, counts = np.unique(around, return_counts=True)  # NaN once
    value = float(values[counts.argmax()])
    within = np.concatenate(inside)
    same = np.isnan(within) if np.isnan(value) else within == value
    return Sentinel(logprobs, mask, value, float(counts.max() / len(around)), int(same.sum()))


def _read_rows(rows: Sequence[tuple[int, Row]], settings: Settings, file: str) -> Iterator[_RowReading]:
    """Each row as a scan reads it on its own."""
    named = settings.format or ("generic" if settings.columns else None)
    for number, row in rows:
        reading = _RowReading(number, row)
        try:
            reading.row = map_columns(row, settings.columns) if settings.columns else row
            reading.form = format_named(named) if named is not None else pick_format(reading.row)
        except RecordError as error:
            reading.because = str(error)
        with suppress(RecordError, *ODD_VALUES):
            if reading.form is not None:
                reading.rollouts = reading.form.read(reading.row, Place(file, number))
        yield reading


def _group_by_format(readings: Sequence[_RowReading]) -> list[FormatRows]:
    groups: dict[tuple[str | None, str], list[_RowReading]] = {}
    for reading in readings:
        name = None if reading.form is None else reading.form.name
        groups.setdefault((name, reading.because), []).append(reading)
    formats = []
    for (name, because), alike in sorted(groups.items(), key=lambda group: -len(group[1])):
        first = alike[0]
        keys = matched_keys(first.form, first.row) if first.form is not None else ()
        near = near_formats(first.row, all_formats(), name)
        notices = [text_log_notice(reading.row, name) for reading in alike] if name is not None else []
        different = tuple(dict.fromkeys(filter(None, notices)))
        formats.append(FormatRows(name, len(alike), first.number, keys, because, near, different))
    return formats


def _add_logprobs_and_mapping(
    result: Inspection, rows: Sequence[tuple[int, Row]], readings: Sequence[_RowReading], settings: Settings
) -> None:
    """Fill in the sampler's logprobs, and the mapping of the settings or else one that reads most rows.

    The mapping is without columns that do not fit.
    """
    # What the log calls the columns that a scan reads as the sampler's logprobs.
    seen = [rollout for reading in readings[:8] for rollout in reading.rollouts or ()]
    every = (column for rollout in seen for column in token_columns(rollout))
    own_names = {column.name for column in every if column.role is ColumnRole.LOGPROBS}
    names = {settings.columns.get(name, name) for name in own_names}
    for scope, columns in _columns_by_scope(result):
        own = next((column.path for column in columns if column.name in names or column.path in names), None)
        items = result.items.get(scope, [])
        choice = choose_sampler_logprobs(columns, items, result.facts, result.roles, scope, own)
        if choice is not None:
            result.logprobs.append(choice)
    if settings.columns:
        result.mapping, result.given = dict(settings.columns), True
        result.trial = try_mapping(rows, result.mapping, result.file)
        return
    if all(read_as.format not in (None, "generic") for read_as in result.formats):
        return  # read as it is
    top = next((choice.columns[0].path for choice in result.logprobs if not choice.scope), None)
    for _ in range(8):
        mapping = propose_mapping(result.columns, result.roles, len(rows), top, result.left_out) if rows else {}
        if not mapping:
            return
        trial = try_mapping(rows, mapping, result.file)
        unfit = [mapping[name] for name in trial.unfit if name in mapping]
        result.left_out += unfit
        if not unfit:
            break
    else:
        return
    if 2 * trial.rows > len(rows) and trial.training_rows + trial.calls:
        result.mapping, result.trial = mapping, trial


# Mappings

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
        text = re.sub(r'["\\]', r"\\\g<0>", theirs)
        escaped = (f"\\u{ord(char):04x}" if char <= "\uffff" else f"\\U{ord(char):08x}" for char in text)
        shown = (char if char.isprintable() else escape for char, escape in zip(text, escaped, strict=True))
        lines.append(f'{ours} = "{"".join(shown)}"')
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
        **counts,
        errors=dict(errors.most_common()),
        misfits=dict(misfits.most_common()),
        unread=dict(unread.most_common()),
        scan=None,
    )


def scan_with_mapping(
    path: Path, mapping: Mapping[str, str], rows: int, settings: Settings, *, whole: bool
) -> ScanCounts | None:
    """What a scan of the first rows with the mapping finds; None if the log cannot be scanned.

    Calls are only joined if these are all rows of the log (`whole`).
    """
    if not path.is_file() or not rows:  # a pipe cannot be read twice
        return None
    own = replace(settings, columns=mapping, format=None, limit=rows, jobs=1, sample=None, row=None)
    scan = scan_rollouts(path, own if whole else replace(own, join=False))
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
