"""Findings as a table: the names and values of the JSON report, from a run that audits once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars
import pyarrow
import pytest

import tito_audit
from tests.report_results import results
from tests.world import ROOT
from tito_audit import (
    GateSettings,
    Settings,
    SetupError,
    StorageError,
    findings_schema,
    findings_table,
    gate_rollouts,
    repair_rollouts,
    scan_rollouts,
)
from tito_audit.report_objects import escape_surrogates, finding_object
from tito_audit.run.scan import Scan
from tito_audit.tables.findings import COLUMNS

LOG = ROOT / "fixtures" / "docs" / "first_scan.jsonl"
SETTINGS = Settings(tokenizer=str(ROOT / "fixtures" / "tokenizers" / "toy_bpe"))


class Rows:
    """Counts the rows that a scan reads."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, rows: int, done: int, total: int) -> None:
        self.read += 1


def counted() -> tuple[Scan, Rows]:
    rows = Rows()
    return scan_rollouts(LOG, SETTINGS, rows), rows


@pytest.fixture(scope="module")
def whole() -> pyarrow.Table:
    """The findings of the log."""
    return scan_rollouts(LOG, SETTINGS).findings_table()


def flat(value: dict[str, Any], ahead: str = "") -> Iterator[tuple[str, Any]]:
    for key, entry in value.items():
        if isinstance(entry, dict):
            yield from flat(entry, f"{ahead}{key}_")
        else:
            yield f"{ahead}{key}", entry


def test_a_row_has_the_names_and_values_of_the_json_report() -> None:
    findings = [finding for result in results() for finding in result.findings]
    table = findings_table(results())
    assert table.schema.equals(findings_schema(), check_metadata=True)
    wanted = [dict(flat(escape_surrogates(finding_object(finding)))) | {"times": 1} for finding in findings]
    assert table.to_pylist() == wanted
    assert list(wanted[0]) == list(COLUMNS)
    assert len({row["turn"] is None for row in wanted}) == 2, "both kinds of turns are tried"


def test_a_table_of_no_findings_has_the_columns() -> None:
    table = findings_table(())
    assert (table.num_rows, table.schema) == (0, findings_schema())


def test_more_findings_than_a_batch_holds_stay_in_order() -> None:
    findings = [finding for result in results() for finding in result.findings] * 400
    table = findings_table(findings)
    assert table.num_rows == len(findings) > 5_000
    assert table["fingerprint"].to_pylist() == [finding.fingerprint for finding in findings]


def test_everything_that_a_notebook_asks_for_audits_once(whole: pyarrow.Table) -> None:
    asks = {
        "table": lambda scan: scan.findings_table().equals(whole),
        "pandas": lambda scan: len(scan.to_pandas()) == whole.num_rows,
        "polars": lambda scan: scan.to_polars().height == whole.num_rows,
        "metrics": lambda scan: scan.metrics()["tito_audit/errors"] == 4,
        "display": lambda scan: "re-tokenized" in scan._repr_html_(),
    }
    for first in asks:
        scan, rows = counted()
        assert repr(scan) == "<Scan: not run yet; print it or call run()>"
        assert asks[first](scan), first
        for name, ask in asks.items():
            assert ask(scan), f"{name} after {first}"
        assert repr(scan).startswith("<Scan: failed: errors in 2 of 5 rollouts")
        assert rows.read == 5


def test_a_scan_that_was_iterated_counts_nothing_twice(whole: pyarrow.Table) -> None:
    scan, rows = counted()
    results = list(scan)
    assert findings_table(results).equals(whole)
    assert scan.metrics()["tito_audit/rollouts"] == 5
    assert rows.read == 5, "the counts are there"
    before = scan.metrics()
    assert scan.findings_table().equals(whole)
    assert rows.read == 10, "the findings were not kept"
    assert {**scan.metrics(), "tito_audit/seconds": 0} == {**before, "tito_audit/seconds": 0}
    assert findings_table(scan).equals(whole)
    assert [result.findings for result in scan] == [result.findings for result in results]
    assert rows.read == 15, "iterating audits again"
    assert {**scan.metrics(), "tito_audit/seconds": 0} == {**before, "tito_audit/seconds": 0}


def test_a_scan_that_was_left_early_is_run_to_its_end(whole: pyarrow.Table) -> None:
    scan, _ = counted()
    for _ in scan:
        break
    assert repr(scan) == "<Scan: not run yet; print it or call run()>"
    assert scan.findings_table().equals(whole)
    assert scan.metrics()["tito_audit/rollouts"] == 5
    for _ in scan:
        break
    assert scan.metrics()["tito_audit/rollouts"] == 5, "what was kept stays whole"
    assert scan.findings_table().equals(whole)


def test_a_gated_scan_says_which_findings_are_known(tmp_path: Path, whole: pyarrow.Table) -> None:
    baseline = str(tmp_path / "known.json")
    first = gate_rollouts(LOG, SETTINGS, GateSettings(baseline=baseline, update_baseline=True))
    assert "not run yet" in first._repr_html_(), "displaying writes nothing"
    assert not Path(baseline).exists()
    assert not any(first.findings_table()["known"].to_pylist())
    again = gate_rollouts(LOG, SETTINGS, GateSettings(baseline=baseline))
    table = again.findings_table()
    assert table.drop_columns("known").equals(whole.drop_columns("known"))
    severe = [severity != "note" for severity in table["severity"].to_pylist()]
    assert table["known"].to_pylist() == severe
    assert again.metrics()["tito_audit/errors"] == 0
    assert again.metrics()["tito_audit/gate/known"] == sum(severe)
    assert [again.metrics()["tito_audit/gate/failed"] for _ in again] == [0.0] * 5
    assert again.summary.gate is not None
    assert again.summary.gate.known == sum(severe), "iterating again counts nothing twice"


def test_the_findings_before_and_after_a_repair_are_tables() -> None:
    outcomes = list(repair_rollouts(LOG, None, SETTINGS))
    before = findings_table(result for outcome in outcomes for result in outcome.before)
    after = findings_table(result for outcome in outcomes for result in outcome.after)
    errors = [table["severity"].to_pylist().count("error") for table in (before, after)]
    assert errors[0] > errors[1]


def test_frames_hold_numbers_texts_and_lists(whole: pyarrow.Table) -> None:
    scan, _ = counted()
    frame = scan.to_pandas()
    assert str(frame["turn"].dtype) == "Int32"
    assert str(frame["row"].dtype) == "int64"
    assert frame.groupby("code").size().to_dict() == polars_counts(scan.to_polars())
    drifted = frame[frame["code"] == "TOK101"].iloc[0]
    assert list(drifted["recorded_pieces"]) == whole.to_pylist()[drifted.name]["recorded_pieces"]


def polars_counts(frame: polars.DataFrame) -> dict[str, int]:
    return dict(frame.group_by("code").len().iter_rows())


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    scan, _ = counted()
    with pytest.raises(SetupError, match=f"pip install {name}"):
        getattr(scan, f"to_{name}")()


def test_a_pipe_is_not_read_again(tmp_path: Path) -> None:
    pipe = tmp_path / "log.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(LOG.read_bytes()))
    writer.start()
    scan = scan_rollouts(pipe, SETTINGS)
    errors = scan.metrics()["tito_audit/errors"]
    writer.join()
    assert errors == 4
    assert scan.findings_table().num_rows, "what was kept needs no second reading"
    with pytest.raises(StorageError, match="a pipe cannot be read twice"):
        next(iter(scan))


def test_metrics_are_floats_and_leave_out_what_is_unknown(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    for log, shares in ((LOG, True), (empty, False)):
        numbers = scan_rollouts(log, SETTINGS).metrics()
        assert {type(value) for value in numbers.values()} == {float}
        assert all(name.startswith("tito_audit/") for name in numbers)
        assert ("tito_audit/share_with_errors" in numbers) is shares
    assert json.loads(json.dumps(numbers)) == numbers


def test_a_table_imports_no_frame_library() -> None:
    code = (
        "import sys, tito_audit\n"
        f"scan = tito_audit.scan_rollouts({str(LOG)!r})\n"
        "for _ in scan: pass\n"
        "assert 'pyarrow' not in sys.modules, 'iterating needs no tables'\n"
        "scan.findings_table(), scan._repr_html_()\n"
        "print([name for name in ('pandas', 'polars', 'torch', 'datasets') if name in sys.modules])\n"
    )
    root = str(Path(tito_audit.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
