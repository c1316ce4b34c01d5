"""Ray Data: audits a dataset of rollouts into a dataset of findings, and repairs it batch by batch.

Needs the extra `ray`. Each row is a rollout by itself: calls in several rows are not joined, and rules that
compare all rows of a log (REC009, and those about how a whole log was written) find nothing here; for them, run
`tito-audit scan --engine ray`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from tito_audit.errors import SetupError
from tito_audit.formats import MatchedKeys
from tito_audit.record.finding import Finding
from tito_audit.record.outcome import COLUMN
from tito_audit.record.rollout import Place
from tito_audit.run.auditor import Loader
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.repair import repair_rollouts
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import RowsInMemory, passed_logs
from tito_audit.tables import FindingsBuilder

if TYPE_CHECKING:
    import pyarrow
    import ray.data

__all__ = ["ROW_ID", "AuditBatches", "RepairBatches", "audit", "row_id"]

ROW_ID = "row_id"
"""The column of findings that names their row."""
_NAME = "dataset"
_HEAD_ROWS = 64
"""How many rows show whether tokenizer and template fit, as for a log."""


def audit(
    dataset: ray.data.Dataset,
    settings: Settings | None = None,
    *,
    id_column: str | None = None,
    batch_size: int = 256,
    workers: int | None = None,
) -> ray.data.Dataset:
    """The findings in the rows of a dataset, as a dataset that is computed when it is consumed.

    Its columns are those of `findings_table`, with `row_id` in place of `file` and `row`: the value of `id_column`
    (text unchanged, anything else as JSON) or, without that, a digest of the row (`row_id()`), equal for equal
    rows. The findings do not depend on the number of workers; their order is Ray's.

    The first rows are read at once: as for a log, they show whether tokenizer and template fit. Findings about the
    whole dataset (REC007, REC011) have no `row_id`. SetupError if settings are wrong or there is no such column.
    `workers` is how many processes hold the tokenizer, each with a CPU; None: as many as the cluster has CPUs for.
    """
    import ray.data

    settings = Settings.given(settings)
    first = dataset.limit(_HEAD_ROWS)
    first.context.execution_options.preserve_order = True
    blocks = list(first.iter_batches(batch_size=_HEAD_ROWS, batch_format="pyarrow"))
    if id_column is not None and blocks and id_column not in blocks[0].column_names:
        columns = ", ".join(blocks[0].column_names)
        raise SetupError(f"id_column: the dataset has no column {id_column!r}; it has {columns}.")
    head = blocks[0] if blocks else None
    here = AuditBatches(settings, head, id_column)
    findings = dataset.map_batches(
        AuditBatches,
        fn_constructor_args=(settings, head, id_column, here.commits),
        batch_format="pyarrow",
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(min_size=workers or 1, max_size=workers),
        num_cpus=1,
    )
    if not here.told:
        return findings
    return findings.union(ray.data.from_arrow(_findings_table(here.told, [None] * len(here.told))))


class AuditBatches:
    """Audits batches of rows into tables of findings; a class for `map_batches` with `batch_format="pyarrow"`.

    `head` are the first rows of the dataset, by which all workers decide alike whether tokenizer and template fit.
    `commits` pins hub tokenizers, by name: a branch may move while workers start.
    """

    def __init__(
        self,
        settings: Settings,
        head: pyarrow.Table | None = None,
        id_column: str | None = None,
        commits: Mapping[str, str] | None = None,
    ) -> None:
        import pyarrow as pa

        self._id_column = id_column
        first = _rows_in_memory(_without_tensors(pa.table({}) if head is None else head))
        self._flow = RowFlow([first], _settings_for_rows(settings), loader=Loader(commits))
        self._flow.choose_encoders()
        self.commits: Mapping[str, str] = self._flow.loader.commits
        """The commits of the hub tokenizers that are loaded, by name."""
        self.told: tuple[Finding, ...] = self._flow.fitted_group(_NAME).auditor.log_findings
        """The findings about the whole dataset that its first rows show."""

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """The findings in a batch, row by row, each with the `row_id`."""
        plain = _without_tensors(batch)
        all_findings: list[Finding] = []
        ids: list[str | None] = []
        group, detection = self._flow.fitted_group(_NAME), MatchedKeys()
        for raw in group.open_for_audit(_rows_in_memory(plain)):
            for result in self._flow.audit_row(raw, Place(_NAME, raw.index), detection, None):
                if not result.findings:
                    continue
                if self._id_column is None:
                    name = row_id(plain.slice(raw.index, 1).to_pylist()[0])
                else:
                    value = plain.column(self._id_column)[raw.index].as_py()
                    name = value if isinstance(value, str) else _json_bytes(value).decode()
                all_findings += result.findings
                ids += [name] * len(result.findings)
        return _findings_table(all_findings, ids)


class RepairBatches:
    """Repairs batches of rows; a class for `map_batches` with `batch_format="pyarrow"`.

    Each row is repaired as by `repair_rollouts`, with the same proof; unchanged columns, and rows that no repair
    fixes, pass through. Each batch is a log by itself: its first rows show whether tokenizer and template fit, and
    all its rows together how they were written. With `RepairSettings.provenance` the column `tito_audit` says what
    was done to each row (JSON text; null where nothing was).
    """

    def __init__(self, settings: Settings | None = None, repairs: RepairSettings | None = None) -> None:
        self._settings = _settings_for_rows(Settings.given(settings))
        self._repairs = repairs or RepairSettings()
        if self._repairs.quarantine is not None:
            raise SetupError(
                "RepairBatches: workers cannot share a quarantine file.\n"
                "Leave quarantine out, and filter the rows that `tito_audit.ray.audit` finds."
            )
        RowFlow([], self._settings)  # refuses wrong settings before any batch

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """The repaired batch; a repair may make several rows of one."""
        import pyarrow as pa

        table: pa.Table = repair_rollouts(_without_tensors(batch), None, self._settings, self._repairs).repaired
        if self._repairs.provenance and COLUMN not in table.column_names:
            table = table.append_column(COLUMN, pa.nulls(len(table), pa.string()))
        return table


def row_id(row: dict[str, Any]) -> str:
    """The digest that names a row without an id in findings: 16 hexadecimal digits of its columns and values."""
    return hashlib.sha256(_json_bytes(row)).hexdigest()[:16]


def _json_bytes(value: object) -> bytes:
    how = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(value, default=repr, option=how)


def _settings_for_rows(settings: Settings) -> Settings:
    """The settings for rows that are rollouts by themselves, in one process."""
    whole = replace(settings, limit=None, sample=None, row=None, jobs=None, engine="local", address=None)
    return replace(whole, join=False, session=None)


def _rows_in_memory(batch: pyarrow.Table) -> RowsInMemory:
    (path,) = passed_logs({_NAME: batch}).names
    assert isinstance(path, RowsInMemory)
    return path


def _without_tensors(batch: pyarrow.Table) -> pyarrow.Table:
    """The batch with lists in place of Ray's tensor columns."""
    import pyarrow as pa

    for number, field in enumerate(batch.schema):
        if isinstance(field.type, pa.BaseExtensionType):
            values = [
                None if value is None else np.asarray(value).tolist() for value in batch.column(number).to_pylist()
            ]
            batch = batch.set_column(number, field.name, pa.array(values))
    return batch


def _findings_table(findings: Sequence[Finding], ids: Sequence[str | None]) -> pyarrow.Table:
    import pyarrow as pa

    builder = FindingsBuilder()
    builder.add(findings)
    # The rows of a dataset have no numbers.
    table = builder.table().drop_columns(["file", "row"])
    return table.add_column(0, pa.field(ROW_ID, pa.string()), pa.array(ids, pa.string()))
