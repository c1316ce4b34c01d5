"""Findings as an Arrow table: a row per finding, with the keys of the JSON report as flat columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tito_audit.record.finding import Finding, Result
from tito_audit.report_objects import as_json, finding_object
from tito_audit.summary import SCHEMA_VERSION

if TYPE_CHECKING:
    import pyarrow

_TEXT, _NUMBER, _TURN, _FLAG, _IDS, _PIECES = "string", "int64", "int32", "bool", "ids", "pieces"
COLUMNS = {
    "code": _TEXT,
    "severity": _TEXT,
    "file": _TEXT,
    "row": _NUMBER,
    "item": _NUMBER,
    "turn": _TURN,
    "where": _TEXT,
    "start": _NUMBER,
    "end": _NUMBER,
    "cause": _TEXT,
    "message": _TEXT,
    "recorded_ids": _IDS,
    "recorded_pieces": _PIECES,
    "recorded_label": _TEXT,
    "canonical_ids": _IDS,
    "canonical_pieces": _PIECES,
    "canonical_label": _TEXT,
    "context_before_ids": _IDS,
    "context_before_pieces": _PIECES,
    "context_after_ids": _IDS,
    "context_after_pieces": _PIECES,
    "repair": _TEXT,
    "fingerprint": _TEXT,
    "known": _FLAG,
    "because_of": _TEXT,
    "times": _NUMBER,
}
"""The columns of the table in order, each with its kind."""
_NULLS = frozenset(("turn", "repair", "because_of"))
"""The columns that may hold nulls."""


class FindingsBuilder:
    """Collects findings as Arrow columns, which take a fifth of the memory of the findings."""

    def __init__(self) -> None:
        self._parts: list[pyarrow.Table] = []
        self._waiting: list[Finding] = []

    def add(self, findings: Iterable[Finding]) -> None:
        self._waiting.extend(findings)
        if len(self._waiting) >= 4_096:
            self._flush()

    def table(self) -> pyarrow.Table:
        """All findings added so far, with the columns of `findings_schema`."""
        import pyarrow

        self._flush()
        batches = [batch for part in self._parts for batch in part.to_batches()]
        return pyarrow.Table.from_batches(batches, findings_schema())

    def _flush(self) -> None:
        if not self._waiting:
            return
        # Through JSON: to convert Python values, Arrow would import pandas if that is installed.
        import pyarrow
        from pyarrow import json

        rows = (dict(_flatten(finding_object(each))) | {"times": each.times} for each in self._waiting)
        lines = "\n".join(map(as_json, rows)).encode()
        self._waiting.clear()
        schema = findings_schema()
        parsing = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
        reading = json.ReadOptions(use_threads=False, block_size=len(lines) + 1)
        table = json.read_json(pyarrow.BufferReader(lines), reading, parsing)
        self._parts.append(table.select(schema.names).cast(schema))


def findings_schema() -> pyarrow.Schema:
    """The Arrow schema of a findings table.

    The columns are the keys of a finding in the JSON report, nested keys joined by `_`; the metadata holds the
    report's `schema_version`.
    """
    import pyarrow

    lists = {_IDS: pyarrow.list_(pyarrow.int64()), _PIECES: pyarrow.list_(pyarrow.string())}
    fields = [
        pyarrow.field(name, lists.get(kind) or pyarrow.type_for_alias(kind), name in _NULLS)
        for name, kind in COLUMNS.items()
    ]
    return pyarrow.schema(fields, {"schema_version": str(SCHEMA_VERSION)})


def findings_table(of: Iterable[Result | Finding]) -> pyarrow.Table:
    """Findings as an Arrow table, one row each, in their order; the columns of `findings_schema`.

    Takes a scan, a gated scan or an audited batch (then it is their `findings_table()`), or any iterable of
    results or findings: `findings_table(result for outcome in repairs for result in outcome.after)`.
    """
    own = getattr(of, "findings_table", None)
    if own is not None:
        return own()
    builder = FindingsBuilder()
    for each in of:
        builder.add((each,) if isinstance(each, Finding) else each.findings)
    return builder.table()


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a finding's object by key, nested keys joined by `_`; `folded` has no column."""
    for key, inner in value.items():
        if key == "folded":
            continue
        if isinstance(inner, Mapping):
            yield from _flatten(inner, f"{prefix}{key}_")
        else:
            yield f"{prefix}{key}", inner
