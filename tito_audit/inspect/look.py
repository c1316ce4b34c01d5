"""inspect_log: the first rows of a log, and what they show about its format and columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tito_audit.errors import ODD_VALUES, RecordError
from tito_audit.format import Format, Row
from tito_audit.formats import (
    Near,
    all_formats,
    format_named,
    map_columns,
    near_formats,
    notice_of_text,
    pick_format,
    told_by,
)
from tito_audit.inspect.columns import Column, Columns, Item, NumberFacts, Relation, facts_of, relations_of
from tito_audit.inspect.logprobs import LogprobChoice, choices_of
from tito_audit.inspect.mapping import (
    Trial,
    columns_of,
    misfits_of,
    packed_by,
    proposed,
    scanned,
    tried,
)
from tito_audit.inspect.roles import Role, Roles, characters, roles_of
from tito_audit.join import CallsSeen, calls_seen
from tito_audit.levels.facts import NOTHING
from tito_audit.levels.holds import record_of
from tito_audit.levels.tally import LogRecord, RecordCounts, count_record
from tito_audit.record.column import ColumnRole, MaskEncoding, mask_encoding, trained_of
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.auditor import Loader
from tito_audit.settings.model import Settings
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage import open_log
from tito_audit.tokens.vocab import Vocabulary

_MOST_BYTES = 256 << 20
"""The approximate limit of bytes read from a log, for any number of rows."""


@dataclass(frozen=True, slots=True)
class TakenFor:
    """Rows read as one format, or as none."""

    format: str | None
    """None: no format fits."""
    rows: int
    first_row: int
    told_by: tuple[str, ...] = ()
    """The keys by which the format is recognized."""
    because: str = ""
    """Why no format fits."""
    near: tuple[Near, ...] = ()
    """Formats that the first of them nearly matches."""
    notices: tuple[str, ...] = ()
    """What rows of text are, and what to log instead."""


@dataclass(frozen=True, slots=True)
class MaskNote:
    """How a mask column is encoded, and how much it trains."""

    path: str
    encodings: Mapping[str, int]
    """How many lists have each encoding."""
    trained: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sentinel:
    """What a logprob column holds at untrained tokens."""

    path: str
    mask: str
    value: float
    """The most common value there; NaN for null."""
    share: float
    """The share of untrained tokens with this value."""
    inside: int
    """How many trained tokens have it as well."""


@dataclass(slots=True)
class _Reading:
    """A row as a scan reads it."""

    number: int
    row: Row
    form: Format | None = None
    """None: no format fits."""
    because: str = ""
    """Why none does."""
    rollouts: Sequence[Rollout] | None = None
    """None: it cannot be read."""


@dataclass(slots=True)
class Inspection:
    """What the first rows of a log show."""

    file: str
    kind: str
    """The kind of file: lines, values, array, parquet, arrow or torch."""
    rows: int = 0
    """Rows that were read."""
    stopped: bool = False
    """Whether the log may have more rows."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """By row: why it could not be read."""
    taken: list[TakenFor] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    items: dict[str, list[Item]] = field(default_factory=dict)
    """By scope: the objects that the columns were read from."""
    more_columns: int = 0
    deeper: bool = False
    facts: dict[str, NumberFacts] = field(default_factory=dict)
    """By path, for columns of number lists."""
    roles: Roles = field(default_factory=dict)
    relations: dict[str, list[Relation]] = field(default_factory=dict)
    """By scope."""
    masks: list[MaskNote] = field(default_factory=list)
    sentinels: list[Sentinel] = field(default_factory=list)
    logprobs: list[LogprobChoice] = field(default_factory=list)
    """By scope: which of several columns of logprobs is the sampler's."""
    mapping: dict[str, str] = field(default_factory=dict)
    """The mapping from our column names to the log's: as given, else as proposed."""
    given: bool = False
    """Whether the mapping was given."""
    left_out: list[str] = field(default_factory=list)
    """Columns that were left out of the proposal because they fit the tokens of too few rows."""
    trial: Trial | None = None
    """The result of reading and scanning with the mapping; None without a mapping."""
    packed: tuple[str, str] | None = None
    """A column of unknown name that shows that rows hold several samples, and the name to give it."""
    record: LogRecord | None = None
    """The level of these rows; None before it is known."""
    calls: CallsSeen | None = None
    """The rows that are one call each; None if there are not two."""


def inspect_log(
    path: Path,
    rows: int = 100,
    settings: Settings | None = None,
    vocabulary: Vocabulary | None = None,
    loader: Loader | None = None,
) -> Inspection:
    """Inspects the first `rows` rows of a file; StorageError if it cannot be read as a log.

    `vocabulary` is the tokenizer's, if there is one; `loader` loads what a scan of the rows needs.
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
    with np.errstate(invalid="ignore", over="ignore"):  # of columns that hold infinity
        _look_at_columns(result, read, vocabulary)
    if result.kind in ("parquet", "arrow"):
        _name_storage_types(result, log.schema())
    readings = list(_readings(read, settings, result.file))
    result.taken = _taken_for(readings)
    # Names, in the log, of the columns that are read as the sampler's logprobs.
    seen = [rollout for reading in readings[:8] for rollout in reading.rollouts or ()]
    every = (column for rollout in seen for column in columns_of(rollout))
    own_names = {column.name for column in every if column.role is ColumnRole.LOGPROBS}
    names = {settings.columns.get(name, name) for name in own_names}
    for scope, columns in _by_scope(result):
        own = next((column.path for column in columns if column.name in names or column.path in names), None)
        items = result.items.get(scope, [])
        choice = choices_of(columns, items, result.facts, result.roles, scope, own)
        if choice is not None:
            result.logprobs.append(choice)
    _map(result, read, settings)
    if result.mapping and not settings.columns and any(rows_of.format is None for rows_of in result.taken):
        readings = list(_readings(read, replace(settings, columns=result.mapping), result.file))
    result.record = _record(result, readings)
    result.packed = packed_by(result.columns, result.items.get("", []), result.mapping.get("token_ids"))
    if result.trial is not None:
        whole = not result.stopped
        scan = scanned(path, result.mapping, result.rows, settings, loader, whole=whole)
        result.trial = replace(result.trial, scan=scan)
    decode = vocabulary.bytes_of if vocabulary is not None else None
    result.calls = calls_seen(path, [row for _, row in read], result.rows, settings, decode)
    return result


def _look_at_columns(result: Inspection, rows: Sequence[tuple[int, Row]], vocabulary: Vocabulary | None) -> None:
    seen = Columns()
    for number, row in rows:
        seen.add(number, row)
    result.columns = list(seen.by_path.values())
    result.more_columns, result.deeper = seen.more, seen.deeper
    result.items = seen.items
    in_vocabulary = vocabulary.known if vocabulary is not None else None
    texts = [characters(row) for _, row in rows]
    for column in result.columns:
        if column.arrays and (facts := facts_of(column.arrays)) is not None:
            result.facts[column.path] = facts
    for scope, columns in _by_scope(result):
        items = seen.items.get(scope, [])
        about = {column.path: result.facts[column.path] for column in columns if column.path in result.facts}
        relations = relations_of(items, about) if about else []
        result.roles.update(roles_of(columns, items, about, relations, () if scope else texts, in_vocabulary))
        # Lists without tokens may match only because their lengths never vary.
        result.relations[scope] = [
            relation
            for relation in relations
            if relation.varied
            or relation.of < 2
            or any(result.roles[path].role is not Role.LIST for path in relation.paths)
        ]
        # Fill in how masks are encoded, and what logprobs are at untrained tokens.
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
                encoding = _encoding(item, mask, ids)
                encodings[str(encoding) if encoding is not None else "none"] += 1
                tokens += len(values)
                trained += int(trained_of(values, encoding).sum()) if encoding is not None else 0
            result.masks.append(MaskNote(mask, dict(encodings.most_common()), trained, tokens))
            for logprobs in by_role[Role.LOGPROBS]:
                sentinel = _sentinel(items, logprobs, mask, ids)
                if sentinel is not None:
                    result.sentinels.append(sentinel)


def _by_scope(result: Inspection) -> Sequence[tuple[str, Sequence[Column]]]:
    by_scope: dict[str, list[Column]] = {}
    for column in result.columns:
        by_scope.setdefault(column.scope, []).append(column)
    return list(by_scope.items())


def _encoding(item: Item, mask: str, ids: str | None) -> MaskEncoding | None:
    values, tokens = item.lists.get(mask), item.lists.get(ids or "")
    if values is None:
        return None
    usable = tokens.astype(np.int64) if tokens is not None and tokens.dtype.kind in "iu" else None
    return mask_encoding(values, usable)  # type: ignore[arg-type]  # wider integers compare the same


def _sentinel(items: Sequence[Item], logprobs: str, mask: str, ids: str | None) -> Sentinel | None:
    """The most common logprob outside the mask; None if the two columns never line up."""
    outside: list[Any] = []
    inside: list[Any] = []
    for item in items:
        values, marks = item.lists.get(logprobs), item.lists.get(mask)
        encoding = _encoding(item, mask, ids)
        if values is None or marks is None or encoding is None or not len(values):
            continue
        trained = trained_of(marks, encoding)
        # A mask of the response is aligned with the end of logprobs of the whole sequence.
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


def _name_storage_types(result: Inspection, schema: Any) -> None:
    """Fill in the type that the file's schema gives each column."""
    types: dict[tuple[str, ...], str] = {}

    def walk(keys: tuple[str, ...], kind: Any) -> None:
        types[keys] = str(kind)
        if pa.types.is_struct(kind):
            for field_ in kind:
                walk((*keys, field_.name), field_.type)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            walk((*keys, "[]"), kind.value_type)

    for field_ in schema:
        walk((field_.name,), field_.type)
    for column in result.columns:
        column.storage_type = types.get(column.keys)


def _readings(rows: Sequence[tuple[int, Row]], settings: Settings, file: str) -> Iterator[_Reading]:
    """How a scan reads each row by itself."""
    named = settings.format or ("generic" if settings.columns else None)
    for number, row in rows:
        reading = _Reading(number, row)
        try:
            reading.row = map_columns(row, settings.columns) if settings.columns else row
            reading.form = format_named(named) if named is not None else pick_format(reading.row)
        except RecordError as error:
            reading.because = str(error)
        with suppress(RecordError, *ODD_VALUES):
            if reading.form is not None:
                reading.rollouts = reading.form.read(reading.row, Place(file, number))
        yield reading


def _taken_for(readings: Sequence[_Reading]) -> list[TakenFor]:
    """The formats that the rows are read as, the most common first."""
    firsts: dict[tuple[str | None, str], _Reading] = {}
    counts: Counter[tuple[str | None, str]] = Counter()
    notices: dict[str | None, dict[str, None]] = {}
    for reading in readings:
        name = None if reading.form is None else reading.form.name
        if name is not None and (notice := notice_of_text(reading.row, name)):
            notices.setdefault(name, {})[notice] = None
        counts[name, reading.because] += 1
        firsts.setdefault((name, reading.because), reading)
    formats = []
    for (name, because), count in counts.most_common():
        first = firsts[name, because]
        keys = told_by(first.form, first.row) if first.form is not None else ()
        near = near_formats(first.row, all_formats(), name)
        formats.append(TakenFor(name, count, first.number, keys, because, near, tuple(notices.get(name, ()))))
    return formats


def _record(result: Inspection, readings: Iterable[_Reading]) -> LogRecord:
    """The level of the rows, each read by itself."""
    counts = RecordCounts()
    for number in result.unreadable:
        count_record(counts, Place(result.file, number), "", NOTHING)
    for reading in readings:
        if reading.rollouts is None:
            count_record(counts, Place(result.file, reading.number), "", NOTHING)
        for rollout in reading.rollouts or ():
            if (record := record_of(rollout, [reading.row])) is not None:
                count_record(counts, rollout.place, rollout.format, record)
    return LogRecord.of(result.file, counts)


def _map(result: Inspection, rows: Sequence[tuple[int, Row]], settings: Settings) -> None:
    if settings.columns:
        result.mapping, result.given = dict(settings.columns), True
        result.trial = tried(rows, result.mapping, result.file)
        return
    if all(read_as.format not in (None, "generic") for read_as in result.taken):
        return  # read as it is
    top = next((choice.columns[0].path for choice in result.logprobs if not choice.scope), None)
    for _ in range(8):
        mapping = proposed(result.columns, result.roles, len(rows), top, result.left_out) if rows else {}
        if not mapping:
            return
        trial = tried(rows, mapping, result.file)
        misfits = [name for name in misfits_of(trial) if name in mapping]
        result.left_out += [mapping[name] for name in misfits]
        if not misfits:
            break
    else:
        return
    if 2 * trial.rows > len(rows) and trial.training_rows + trial.calls:
        result.mapping, result.trial = mapping, trial
