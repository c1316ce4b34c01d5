"""The gate as a repository meets it: red for what is new, green for what is known, and readable when it is red."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import tito_audit
from tests.command import run, written
from tests.world import BROKEN, CLEAN, ROOT, TOY
from tito_audit import Gate, GateSettings, MaxRate, Settings, gate_rollouts
from tito_audit.errors import SetupError
from tito_audit.settings.model import Override


class Repository:
    """A folder with settings, a tokenizer and one log, and the command run in it as a job would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "logs" / "train.jsonl"
        self.baseline = folder / "tito-baseline.json"
        self.log.parent.mkdir(parents=True)
        shutil.copytree(TOY, folder / "tokenizer")
        (folder / "tito-audit.toml").write_text('tokenizer = "tokenizer"\n', encoding="utf-8")

    def holds(self, *rows: dict[str, Any]) -> None:
        """Write the log."""
        written(self.log, list(rows))

    def runs(self, *arguments: str) -> tuple[int, str]:
        """The command's exit code and stdout; nothing may stand on stderr."""
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(self.folder)
            code, out, err = run(*arguments, env={"COLUMNS": "100"})
        assert err == ""
        return code, out

    def scans(self, *arguments: str) -> tuple[int, str]:
        """The same of `scan logs`."""
        return self.runs("scan", "logs", *arguments)

    def finds(self, *arguments: str) -> tuple[set[tuple[str, int]], set[tuple[str, int]], dict[str, Any]]:
        """Codes and rows of the errors that are new, of those that are known, and what the gate says."""
        _, out = self.scans("--output-format", "json", *arguments)
        whole = json.loads(out)
        errors = [finding for finding in whole["findings"] if finding["severity"] == "error"]
        places = [
            {(finding["code"], finding["row"]) for finding in errors if finding["known"] is is_known}
            for is_known in (False, True)
        ]
        return places[0], places[1], whole["summary"]["gate"]

    def accepted(self) -> list[dict[str, Any]]:
        """What the baseline holds."""
        findings = json.loads(self.baseline.read_text(encoding="utf-8"))["findings"]
        assert isinstance(findings, list)
        return findings


def clean(name: str) -> dict[str, Any]:
    """A rollout of three calls in which nothing is wrong."""
    for line in (ROOT / "fixtures" / "formats" / "generic.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("id") == "calls-clean":
            return {**row, "id": name}
    raise AssertionError("generic.jsonl has no clean calls any more")


def merged(row: dict[str, Any], call: int, word: str) -> dict[str, Any]:
    """The rollout with a word of a call sampled as two tokens, which later prompts hold as one."""
    row = json.loads(json.dumps(row))
    vocabulary = Tokenizer.from_file(str(TOY / "tokenizer.json"))
    sampled = row["calls"][call]
    at = sampled["generation_token_ids"].index(vocabulary.token_to_id(word))
    cuts = ([vocabulary.token_to_id(piece) for piece in (word[:cut], word[cut:])] for cut in range(1, len(word)))
    sampled["generation_token_ids"][at : at + 1] = next(pair for pair in cuts if None not in pair)
    sampled["generation_log_probs"].insert(at, -0.5)
    return row


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "project")


BASELINE = ("--baseline", "tito-baseline.json")
MERGE = ("SEQ301", "TOK101")
"""What one merge in a later prompt is found as."""


def test_a_gate_goes_red_for_what_is_new_and_green_for_what_is_known_or_fixed(repository: Repository) -> None:
    rows = [clean(f"r{number}") for number in range(4)]
    repository.holds(*rows)
    code, out = repository.scans("--fail-on", "warning")
    assert code == 0
    assert out.splitlines()[-1].startswith("passed: no findings in 4 rollouts")

    rows[1] = merged(rows[1], 1, "Ġand")
    repository.holds(*rows)
    code, out = repository.scans(*BASELINE, "--update-baseline", "--fail-on", "never")
    assert code == 0
    repository.baseline.unlink()
    code, out = repository.scans()
    assert code == 1
    assert "error TOK101 logs/train.jsonl:1 turn 1 completion" in out
    assert "tito-audit repair logs/train.jsonl -o OUT" in out

    code, out = repository.scans(*BASELINE, "--update-baseline")
    assert code == 0
    assert "tito-baseline.json was updated: 2 accepted, 0 gone" in out
    assert [(entry["code"], entry["row"], entry["times"]) for entry in repository.accepted()] == [
        (code, 1, 1) for code in MERGE
    ]
    code, out = repository.scans(*BASELINE)
    assert code == 0
    assert "2 known from tito-baseline.json" in out
    assert "error TOK101" not in out
    assert out.splitlines()[-1] == "passed: 0 new errors (2 known)"
    assert not re.search(r"[1-9]\d* errors?\b", out.replace("0 new errors", ""))

    rows[2] = merged(rows[2], 0, "weather")
    repository.holds(*rows)
    code, out = repository.scans(*BASELINE)
    assert code == 1
    assert "TOK101 logs/train.jsonl:2 turn 0" in out
    assert "logs/train.jsonl:1 " not in out
    assert out.splitlines()[-1] == "failed: new errors in 1 of 4 rollouts (25 %) (2 known): 1 prompt re-tokenized"
    new, accepted, _ = repository.finds(*BASELINE)
    assert new == {(code, 2) for code in MERGE}
    assert accepted == {(code, 1) for code in MERGE}

    repository.holds(clean("a"), clean("b"), *rows)
    new, accepted, _ = repository.finds(*BASELINE)
    assert new == {(code, 4) for code in MERGE}
    assert accepted == {(code, 3) for code in MERGE}

    repository.holds(*rows)
    code, _ = repository.runs("repair", "logs/train.jsonl", "-o", "cured.jsonl")
    assert code == 0
    (repository.folder / "cured.jsonl").replace(repository.log)
    code, out = repository.scans(*BASELINE)
    assert code == 0
    fixed = out.partition("\nFixed since the baseline\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (\w+) logs/train.jsonl row (\d+)", fixed, re.MULTILINE) == [
        (code, "1") for code in MERGE
    ]
    assert len(repository.accepted()) == 2
    code, out = repository.scans(*BASELINE, "--update-baseline")
    assert code == 0
    assert "updated: 0 accepted, 2 gone" in out
    assert repository.accepted() == []
    assert repository.scans(*BASELINE)[0] == 0


def gated(log: Path, *rates: MaxRate, **settings: Any) -> Gate:
    """What the gate says of a log."""
    run = gate_rollouts(log, Settings(**settings), GateSettings(max_rates=rates))
    for _ in run:
        pass
    assert run.summary.gate is not None
    return run.summary.gate


def test_findings_under_a_limit_fail_together_and_not_one_by_one(tmp_path: Path) -> None:
    log = written(tmp_path / "run.jsonl", [CLEAN] * 18 + [BROKEN] * 2)
    within = gated(log, MaxRate("LPR", 0.05))
    assert not within.failed
    assert (within.rates[0].findings, within.rates[0].of, within.rates[0].rate) == (2, 40, 0.05)
    above = gated(log, MaxRate("LPR", 0.049))
    assert above.failed
    assert above.failing == 0
    assert above.because == ("LPR: 2 findings, 5 % of 40 generated tokens (limit 4.9 %)",)
    each = gated(log, MaxRate("", 0.09, "rollout"))
    assert each.because == ("all rules: 2 findings in 20 rollouts, 0.1 per rollout (limit 0.09)",)
    assert not gated(log, MaxRate("", 0.1, "rollout")).failed


def test_a_rate_just_above_its_limit_is_said_in_as_many_digits_as_show_it(tmp_path: Path) -> None:
    log = written(tmp_path / "run.jsonl", [BROKEN] * 1 + [CLEAN] * 98)
    gate = gated(log, MaxRate("LPR", 0.0101, "rollout"), MaxRate("LPR5", 1.0), MaxRate("LPR504", 0.00505))
    assert gate.because == ("LPR504: 1 finding, 0.51 % of 198 generated tokens (limit 0.505 %)",)
    assert gated(log, MaxRate("LPR", 0.0101, "rollout")).because == (
        "LPR: 1 finding in 99 rollouts, 0.010101 per rollout (limit 0.0101)",
    )
    assert gated(log, MaxRate("LPR", 0.0101010101, "rollout")).because == (
        "LPR: 1 finding in 99 rollouts, 0.010101010101 per rollout (limit 0.0101010101)",
    )
    code, out, _ = run("scan", log, "--max-rate", "LPR=1.01%/rollout")
    assert code == 1
    assert "LPR=0.0101/rollout: 1 finding in 99 rollouts, 0.010101: too many" in out


def test_the_longest_beginning_of_a_code_judges_it_and_others_fail_one_by_one(tmp_path: Path) -> None:
    log = written(tmp_path / "run.jsonl", [CLEAN] * 9 + [BROKEN])
    gate = gated(log, MaxRate("LPR", 0.0), MaxRate("LPR504", 1.0), MaxRate("", 0.0))
    assert not gate.failed
    assert [rate.findings for rate in gate.rates] == [0, 1, 0]
    gate = gated(log, MaxRate("TOK", 1.0))
    assert gate.because == ("1 error in 1 rollout: LPR504 (1)",)


def test_findings_with_nothing_to_divide_by_fail_and_their_rate_is_null_in_json(tmp_path: Path) -> None:
    log = tmp_path / "torn.jsonl"
    log.write_text('{"token_ids": [1,\n', encoding="utf-8")
    gate = gated(log, MaxRate("REC", 0.5))
    assert gate.because == ("REC: 1 finding, but no generated token to divide by",)
    code, out, _ = run("scan", log, "--max-rate", "REC=0.5", "--output-format", "json")
    assert code == 1
    assert json.loads(out)["summary"]["gate"]["rates"] == [
        {"limit": "REC=0.5", "findings": 1, "of": 0, "rate": None, "failed": True}
    ]
    assert not gated(log, MaxRate("LPR", 0.0)).rates[0].failed
    assert not gated(log, MaxRate("REC", 1.0, "rollout")).failed


def test_a_rate_counts_what_fail_on_would_refuse_and_everything_when_it_is_never(tmp_path: Path) -> None:
    log = tmp_path / "nemo_gym.jsonl"
    shutil.copy(ROOT / "fixtures" / "formats" / "nemo_gym.jsonl", log)

    def counted(fail_on: str) -> int:
        return gated(log, MaxRate("TPL201", 1.0), tokenizer=str(TOY), fail_on=fail_on).rates[0].findings

    assert [counted(level) for level in ("error", "warning", "note", "never")] == [0, 1, 3, 3]


def test_a_log_that_is_let_off_takes_no_part_in_the_gate(tmp_path: Path) -> None:
    old = written(tmp_path / "old.jsonl", [BROKEN] * 5)
    written(tmp_path / "new.jsonl", [BROKEN] + [CLEAN] * 9)
    let_off = (Override((str(old),), {"fail_on": "never"}),)
    gate = gated(tmp_path, overrides=let_off)
    assert gate.because == ("1 error in 1 rollout: LPR504 (1)",)
    (rate,) = gated(tmp_path, MaxRate("LPR", 0.1), overrides=let_off).rates
    assert (rate.findings, rate.of) == (1, 20)
    strict = (Override((str(old),), {"fail_on": "error"}),)
    assert gated(tmp_path, fail_on="never", overrides=strict).failing == 5


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


def test_one_report_stands_on_stdout_whatever_goes_into_files(tmp_path: Path) -> None:
    log = written(tmp_path / "run.jsonl", [CLEAN, BROKEN])
    json_file, lines_file = tmp_path / "out.json", tmp_path / "out.jsonl"
    files = ("--report", f"json={json_file}", "--report", f"jsonl={lines_file}")
    _, out, _ = run("scan", log, *files)
    assert out.startswith(f"tito-audit {log}")
    assert len(json.loads(json_file.read_text(encoding="utf-8"))["findings"]) == 1
    assert len(lines_file.read_text(encoding="utf-8").splitlines()) == 2
    _, out, _ = run("scan", log, *files, "--output-format", "jsonl")
    assert json.loads(out.splitlines()[0])["code"] == "LPR504"
    assert run("scan", log, "--report", "jsonl")[1].splitlines()[0] == out.splitlines()[0]
    assert run("scan", log, *files, "--quiet")[1] == ""
    assert run("scan", log, "--quiet", "-f", "jsonl")[1].splitlines()[0] == out.splitlines()[0]


def test_a_flag_for_stdout_stands_in_place_of_what_the_file_has_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run.jsonl", [BROKEN])
    settings = tmp_path / "tito-audit.toml"
    settings.write_text('output-format = "json"', encoding="utf-8")
    assert run("scan", "run.jsonl")[1].startswith('{"summary"')
    assert run("scan", "run.jsonl", "--report", "jsonl")[1].startswith('{"code"')
    assert run("scan", "run.jsonl", "-f", "jsonl")[1].startswith('{"code"')
    settings.write_text('report = ["json", "text=page.txt"]', encoding="utf-8")
    assert run("scan", "run.jsonl")[1].startswith('{"summary"')
    assert run("scan", "run.jsonl", "-f", "jsonl")[1].startswith('{"code"')
    assert (tmp_path / "page.txt").is_file()
    settings.write_text('report = "json"\noutput-format = "text"', encoding="utf-8")
    code, out, err = run("scan", "run.jsonl")
    assert (code, out) == (2, "")
    assert "--report json goes to stdout too" in err


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
