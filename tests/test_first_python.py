"""What a Python user types first, in a shell and in a notebook."""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import tito_audit
from tests import world
from tests.tables import table
from tests.world import ROOT
from tito_audit import (
    GateSettings,
    Override,
    Settings,
    SetupError,
    gate_rollouts,
    inspect_rollouts,
    repair_rollouts,
    scan_rollouts,
)

LOG = ROOT / "fixtures" / "docs" / "first_scan.jsonl"
TOY = str(world.TOY)
ROWS = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
MAPPING = {"token_ids": "toks", "loss_mask": "m", "logprobs": "lp"}
BAD = {"token_ids": [5, 6], "loss_mask": [0, 1], "logprobs": [0.0, 0.5]}


def own(rows: int = 6) -> list[dict[str, Any]]:
    """Rows of nobody's format."""
    return [
        {"toks": [1200 - 37 * i, 2, 30 * i + 5, 400 - i], "m": [0, 1, 1, 1], "lp": [0, -0.5, -0.2, -0.3]}
        for i in range(rows)
    ]


def test_columns_are_mapped_by_the_name_of_the_flag() -> None:
    settings = Settings(map=MAPPING)
    assert settings == Settings(columns=MAPPING)
    assert Settings(columns={"token_ids": "toks"}, map={"loss_mask": "m"}).columns == {
        "token_ids": "toks",
        "loss_mask": "m",
    }
    assert replace(settings, jobs=2).columns == MAPPING
    assert replace(settings, columns={}).columns == {}
    scan = scan_rollouts(own(), settings).run()
    assert (scan.summary.rollouts, scan.summary.rows_unreadable) == (6, 0)
    with pytest.raises(SetupError, match="map: not a dict"):
        Settings(map=["token_ids=toks"])  # type: ignore[arg-type]


@pytest.mark.parametrize(*table(__file__, "a_wrong_keyword_names_the_nearest"))
def test_a_wrong_keyword_names_the_nearest(make: str, keyword: str, hint: str) -> None:
    with pytest.raises(TypeError) as raised:
        getattr(tito_audit, make)(**{keyword: "x"})
    assert str(raised.value) == f"{make}() takes no argument {keyword!r}: {hint}"


def test_settings_take_what_a_flag_would() -> None:
    assert Settings(select="TOK,SEQ", ignore="LPR", sampled_roles="agent") == Settings(  # type: ignore[arg-type]
        select=("TOK", "SEQ"), ignore=("LPR",), sampled_roles=("agent",)
    )
    assert Settings(tokenizer=Path(TOY)) == Settings(tokenizer=TOY)  # type: ignore[arg-type]
    assert Settings(clock="2024-07-26").clock.day == 26  # type: ignore[arg-type, union-attr]
    with pytest.raises(SetupError, match="did you mean error"):
        Settings(fail_on="errors")  # type: ignore[arg-type]


def test_print_runs_a_scan_and_shows_what_it_found() -> None:
    scan = scan_rollouts(ROWS, Settings(tokenizer=TOY))
    assert repr(scan) == "<Scan: not run yet; print it or call run()>"
    shown = str(scan)
    assert shown.startswith("failed: errors in 2 of 5 rollouts (40 %)")
    assert "│·Skin│ny │" in shown
    assert "error TOK101" in shown
    assert shown == str(scan), "it ran once"
    assert repr(scan) == f"<Scan: {shown.splitlines()[0]}>"
    assert (scan.run() is scan, scan.verdict) == (True, "failed")


def test_a_scan_that_was_iterated_prints_without_a_second_audit() -> None:
    read: list[int] = []
    scan = scan_rollouts(ROWS, Settings(tokenizer=TOY), lambda *progress: read.append(progress[0]))
    for _ in scan:
        pass
    assert str(scan).startswith("failed: errors in 2 of 5 rollouts (40 %)")
    assert str(scan).endswith("findings_table() reads the log again.")
    assert (scan.verdict, len(read)) == ("failed", 5)


@pytest.mark.parametrize(
    ("rows", "settings", "verdict"),
    [
        (ROWS[:1], Settings(tokenizer=TOY), "passed"),
        (ROWS, Settings(tokenizer=TOY), "failed"),
        (ROWS, Settings(tokenizer=TOY, fail_on="never"), "passed"),
        (own(), Settings(map=MAPPING), "nothing compared"),
        ([{"text": "a"}], Settings(), "failed"),
        ([], Settings(), "nothing audited"),
    ],
)
def test_a_run_has_a_verdict_and_it_is_the_gate_s(rows: Any, settings: Settings, verdict: str) -> None:
    scan, gated = scan_rollouts(rows, settings), gate_rollouts(rows, settings)
    assert scan.summary.gate is None
    assert scan.verdict == scan.run().verdict == gated.verdict == verdict
    assert scan.summary.gate is not None
    assert scan.summary.gate == gated.summary.gate


@pytest.mark.parametrize("jobs", [1, 2])
def test_each_log_is_judged_by_its_own_severity(tmp_path: Path, jobs: int) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(BAD) + "\n")
    spare = Override((str(tmp_path / "a.jsonl"),), {"fail_on": "never"})
    scan = scan_rollouts(tmp_path, Settings(overrides=(spare,), jobs=jobs)).run()
    gate = scan.summary.gate
    assert gate is not None
    assert (gate.failed, gate.failing) == (True, 1)
    assert gate.because == ("1 error in 1 rollout: LPR504 (1)",)
    assert gate == gate_rollouts(tmp_path, Settings(overrides=(spare,))).run().summary.gate


def test_a_repair_runs_when_it_is_told_to() -> None:
    repairs = repair_rollouts(ROWS, settings=Settings(tokenizer=TOY))
    assert repairs.run() is repairs
    assert "after: " in repr(repairs)
    assert len(repairs.repaired) >= len(ROWS)


def test_a_printed_gate_never_rewrites_its_baseline(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    gated = gate_rollouts(
        ROWS, Settings(tokenizer=TOY), GateSettings(baseline=str(baseline), update_baseline=True)
    )
    assert str(gated) == "<GatedScan: not run yet; print it or call run()>"
    assert not baseline.exists()
    assert gated.run().verdict == "passed"
    assert baseline.exists()


def test_an_inspection_proposes_the_mapping_and_the_call_to_paste() -> None:
    rows = own()
    inspected = inspect_rollouts(rows)
    assert inspected.mapping == MAPPING
    assert "mapping {'token_ids': 'toks', 'loss_mask': 'm', 'logprobs': 'lp'}" in repr(inspected)
    call = str(inspected).splitlines()[-1].strip()
    assert call == 'scan_rollouts(rows, Settings(map={"token_ids": "toks", "loss_mask": "m", "logprobs": "lp"}))'
    assert eval(call).run().summary.rollouts == scan_rollouts(rows, inspected.settings).run().summary.rollouts == 6
    html = unescape(inspected._repr_html_())
    assert html.index(call) < html.index("Columns") < html.index("every token")
    assert "--map" not in str(inspected) + html
    assert "tool.tito-audit" not in str(inspected)


def test_an_inspection_reads_files_and_known_formats(tmp_path: Path) -> None:
    inspected = inspect_rollouts(LOG, Settings(tokenizer=TOY))
    assert inspected.mapping == {}
    assert str(inspected).splitlines()[-1] == f'  scan_rollouts("{LOG}", Settings(tokenizer="{TOY}"))'
    assert "as tokens" in str(inspected)
    with pytest.raises(SetupError, match="2 logs instead of one"):
        inspect_rollouts({"a": own(), "b": own()})


def test_an_inspection_shows_no_markup_of_a_log() -> None:
    inspected = inspect_rollouts([{"<script>\x1b[2J": [1200, 3, 9], "toks": [900, 3, 80]}] * 3)
    html = inspected._repr_html_()
    assert "<script>" not in html
    assert "\x1b" not in html + str(inspected) + repr(inspected)
