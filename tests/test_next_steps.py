"""What a scan suggests doing next: nothing that is not kept."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

from tests.command import run, written
from tests.tiers import crossed
from tests.toy import ROOT, rollout_of
from tests.world import FORMATS, TOKENIZERS

TOY = ("-t", TOKENIZERS / "toy_bpe")


def steps(log: Path, *options: object) -> str:
    """The next steps of a scan, each on one line."""
    out = run("scan", log, *TOY, *options, env={"COLUMNS": "300"})[1]
    return out.partition("\nNext\n")[2]


@pytest.mark.parametrize(
    ("name", "jobs"), crossed(["nemo_gym.jsonl", "generic.jsonl", "miles_columns.parquet", "slime.jsonl"], [1, 2])
)
def test_what_a_repair_left_is_not_repaired_again(name: str, jobs: int, tmp_path: Path) -> None:
    repaired = tmp_path / name
    assert run("repair", FORMATS / name, "-o", repaired, *TOY)[0] == 1
    assert "tito-audit repair" in steps(FORMATS / name, "--jobs", jobs)
    journal = tmp_path / "journal"
    for _ in range(2):  # the second scan takes its results from the journal
        assert "tito-audit repair" not in steps(repaired, "--jobs", jobs, "--journal", journal, "--resume")


def test_a_log_of_mere_warnings_is_repaired_with_the_option_that_repairs_warnings(tmp_path: Path) -> None:
    cases = tomllib.loads((ROOT / "fixtures" / "repairs" / "fork.toml").read_text())["repair"]
    calls = []
    for turn in rollout_of(next(case for case in cases if case["name"].endswith("rewritten on purpose"))).turns:
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        prompt, answer = turn.prompt_ids.tolist(), turn.completion_ids.tolist()
        calls.append({"prompt_token_ids": prompt, "generation_token_ids": answer})
    log, out = written(tmp_path / "log.jsonl", [{"calls": calls}]), tmp_path / "out.jsonl"
    (repair,) = (line for line in steps(log).splitlines() if "tito-audit repair" in line)
    assert "--fail-on warning" in repair
    arguments = shlex.split(repair.partition("   ")[0].replace("OUT", str(out)))
    assert "1 repaired" in run(*arguments[1:])[1]


def test_the_first_step_after_a_wrong_tokenizer_finds_the_right_one(tmp_path: Path) -> None:
    other = ROOT / "fixtures" / "tokenizers" / "toy_metaspace"
    log = tmp_path / "a log.jsonl"
    rows = (FORMATS / "generic.jsonl").read_text().replace('"loss_mask"', '"our_mask"')
    log.write_text(rows * 4)
    mapped = ("--map", "loss_mask=our_mask", "--template-arg", "enable_thinking=false")
    out = run("scan", log, "-t", other, *mapped, env={"COLUMNS": "300"})[1]
    assert "REC007" in out
    lines = [line.strip() for line in out.partition("\nNext\n")[2].splitlines()]
    first, second = [line for line in lines if line.startswith("tito-audit")]  # no baseline accepts it
    assert second.startswith("tito-audit explain REC007")
    arguments = shlex.split(first.partition("   ")[0])[1:]
    assert arguments == ["identify", str(log), "--map", "loss_mask=our_mask"]
    identified = run(*arguments, "-t", TOY[1])[1]
    assert f"tito-audit scan '{log}' -t {TOY[1]}" in identified
