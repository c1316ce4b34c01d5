"""A scan names columns that it did not read but that look like ids, masks, logprobs or messages; no others.

How it says so stands in `tests/transcripts/unread.txt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command import written
from tests.own_logs import DECOYS, own_log
from tests.world import ROOT
from tito_audit.errors import RecordError
from tito_audit.formats import pick_format, unread_columns
from tito_audit.record.rollout import Place
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.storage import open_log

SHARED = ROOT.parent / "shared"
LOGS = [
    path
    for folder in (ROOT / "fixtures" / "formats", SHARED / "rollouts", SHARED / "recorded")
    for path in sorted(folder.rglob("*"))
    if path.name.endswith((".json", ".jsonl", ".jsonl.gz", ".parquet"))
]
CALL = {
    "prompt_ids": [5, 6, 7, 8, 9, 11],
    "completion_ids": [12, 13, 14, 15],
    "gen_tokens": [12, 13, 14, 99],
    "gen_lp": [-0.5, -0.25, 0.0, -1.0],
}


@pytest.mark.parametrize("jobs", [1, 3])
def test_only_the_first_rows_are_looked_at_whatever_the_number_of_processes(tmp_path: Path, jobs: int) -> None:
    clean = {name: CALL[name] for name in ("prompt_ids", "completion_ids")}
    rows: list[dict[str, Any]] = [dict(clean) for _ in range(400)]
    rows[2]["gen_lp"] = CALL["gen_lp"]
    rows[350]["late_lp"] = CALL["gen_lp"]
    scan = scan_rollouts(written(tmp_path / "log.jsonl", rows), Settings(jobs=jobs))
    scan.chunk_bytes = 4_000
    for _ in scan:
        pass
    assert list(scan.summary.unread.values()) == [{"gen_lp": "logprobs"}]


def test_decoys_are_not_named(tmp_path: Path) -> None:
    top_level = {name for name in DECOYS if "." not in name}
    for seed in range(30):
        log = own_log(seed)
        for row in log.rows:
            columns = {key: value for key, value in row.items() if key in log.decoys & top_level}
            columns |= {"prompt_ids": CALL["prompt_ids"], "completion_ids": CALL["completion_ids"]}
            (form, place) = pick_format(columns), Place("", 0)
            assert {path for _, path in unread_columns(form, columns, form.read(columns, place))} <= {"next_ids"}


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_no_row_of_a_known_format_has_a_column_that_should_have_been_read(log: Path) -> None:
    for raw in open_log(log):
        if raw.value is None:
            continue
        try:
            form = pick_format(raw.value)
            rollouts = form.read(raw.value, Place(str(log), raw.index))
        except (RecordError, ValueError, KeyError, TypeError):  # other tests are about rows that cannot be read
            continue
        assert unread_columns(form, raw.value, rollouts) == ()
