"""The gate as a repository meets it: red for what is new, green for what is known, and readable when it is red."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import tito_audit
from tests.command import run, written
from tests.world import BROKEN, CLEAN, ROOT, TOY
from tito_audit import Gate, GateSettings, MaxRate, Settings, gate_rollouts
from tito_audit.errors import SetupError


def gated(log: Path, *rates: MaxRate, **settings: Any) -> Gate:
    """What the gate says of a log."""
    run = gate_rollouts(log, Settings(**settings), GateSettings(max_rates=rates))
    for _ in run:
        pass
    assert run.summary.gate is not None
    return run.summary.gate


def test_a_rate_of_nothing_to_divide_by_is_null_in_json(tmp_path: Path) -> None:
    log = tmp_path / "torn.jsonl"
    log.write_text('{"token_ids": [1,\n', encoding="utf-8")
    _, out, _ = run("scan", log, "--max-rate", "REC=0.5", "--output-format", "json")
    assert json.loads(out)["summary"]["gate"]["rates"] == [
        {"limit": "REC=0.5", "findings": 1, "of": 0, "rate": None, "failed": True}
    ]


def test_a_rate_counts_what_fail_on_would_refuse_and_everything_when_it_is_never(tmp_path: Path) -> None:
    log = tmp_path / "nemo_gym.jsonl"
    shutil.copy(ROOT / "fixtures" / "formats" / "nemo_gym.jsonl", log)

    def counted(fail_on: str) -> int:
        return gated(log, MaxRate("TPL201", 1.0), tokenizer=str(TOY), fail_on=fail_on).rates[0].findings

    assert [counted(level) for level in ("error", "warning", "note", "never")] == [0, 1, 3, 3]


@pytest.mark.parametrize("limit", [-0.1, float("nan"), float("inf")])
def test_a_limit_is_a_number(tmp_path: Path, limit: float) -> None:
    log = written(tmp_path / "run.jsonl", [CLEAN])
    with pytest.raises(SetupError, match="0 or more"):
        gate_rollouts(log, None, GateSettings(max_rates=(MaxRate("LPR", limit),)))


def test_python_users_gate_a_log_and_see_what_fails(tmp_path: Path) -> None:
    log = written(tmp_path / "run.jsonl", [CLEAN, BROKEN])
    scan = tito_audit.gate_rollouts(log)
    failing = [finding for result in scan for finding in result.findings if scan.fails(finding)]
    assert [finding.code for finding in failing] == ["LPR504"]
    assert scan.summary.gate is not None
    assert scan.summary.gate.failed
    assert "LPR504" in scan.codes(str(log))
    assert tito_audit.scan_rollouts(log).summary.gate is None
    limited = gate_rollouts(log, None, GateSettings(max_rates=(MaxRate("LPR", 1.0),)))
    assert not any(limited.fails(finding) for result in limited for finding in result.findings)


def test_a_run_that_ends_early_has_no_verdict(tmp_path: Path) -> None:
    scan = gate_rollouts(written(tmp_path / "run.jsonl", [BROKEN] * 3))
    next(iter(scan))
    assert scan.summary.gate is None


def test_reports_and_baselines_in_a_folder_of_logs_are_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run.jsonl", [BROKEN])
    files = [f"--report={name}=our-{name}.{end}" for name, end in (("json", "json"), ("jsonl", "jsonl"))]
    files += ["--report=sarif=our-sarif.json", "--baseline=known.json", "--update-baseline"]
    for _ in range(2):
        assert run("scan", ".", *files)[0] == 0
        assert run("repair", "run.jsonl", "--dry-run", "--report", "json=our-repair.json")[0] == 0
        assert json.loads((tmp_path / "our-json.json").read_text(encoding="utf-8"))["summary"]["files"] == [
            "run.jsonl"
        ]
    assert run("scan", ".", "--output-format", "concise")[1].count("LPR504 error") == 1
    assert run("scan", ".", "--report", "json=run.jsonl")[0] == 2
    assert (tmp_path / "run.jsonl").read_text(encoding="utf-8") == json.dumps(BROKEN) + "\n"


def test_the_example_of_the_docs_says_what_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/_api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (example,) = (block for block in blocks if "gate_rollouts" in block)
    monkeypatch.chdir(ROOT)
    exec(example, {})
    findings, _, verdict = capsys.readouterr().out.partition("\nTrue\n")
    assert "REC005" in findings
    assert not re.search("TOK|SEQ", findings)
    assert re.search(
        r"^SEQ: \d+ findings in \d+ rollouts, [\d.]+ per rollout \(limit 0\.1\)$", verdict, re.MULTILINE
    )
