"""One verdict on a mismatch: what planted mixtures hold is what the report says, within 10 % of the total."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.command import run
from tests.mismatch.__main__ import CASES, GUIDE, MIXTURES, UNTOLD, shares_of, shown, verdict
from tests.mismatch.picture import pictures
from tests.mismatch.plant import COLUMNS, cause_of, log
from tests.tiers import some
from tito_audit import audit_batch


def scanned(path: Path) -> str:
    return run("scan", path, "--report", "json", "--jobs", "1")[1]


@pytest.mark.parametrize("case", some(list(CASES), 8))
def test_a_cause_alone_is_named(case: str) -> None:
    mismatch = verdict(log([(case, 6)], np.random.default_rng(len(case))), scanned)
    assert shares_of(mismatch).get(cause_of(case), 0.0) >= 0.9
    heat = mismatch["temperature"]
    if cause_of(case) == "temperature":
        planted = float(case.split("=")[1])
        assert heat["low"] <= planted <= heat["high"]
        assert heat["best"] == pytest.approx(planted, rel=0.1)
    else:
        assert heat is None
    if case.startswith("top_p"):
        assert mismatch["mass"]["best"] == pytest.approx(float(case.split("=")[1]), rel=0.02)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_shares_of_a_mixture_are_the_planted_ones(name: str) -> None:
    settings, more = MIXTURES[name]
    planted = log(settings, np.random.default_rng(7), **more)
    shares = planted.shares
    if name in UNTOLD:
        shares["cannot tell"] = shares.get("cannot tell", 0.0) + shares.pop("stale weights")
    reported = shares_of(verdict(planted, scanned))
    if name in UNTOLD:  # rows that stay within the bound count as numerics
        assert reported["cannot tell"] >= 0.75
        return
    assert {cause: reported.get(cause, 0.0) for cause in shares} == pytest.approx(shares, abs=0.1)


@pytest.mark.parametrize("case", ["float32", "bfloat16", "vllm bfloat16"])
def test_two_engines_with_the_same_weights_have_no_finding(case: str, tmp_path: Path) -> None:
    report = json.loads(scanned(log([(case, 4)], np.random.default_rng(3)).write(tmp_path / "log.jsonl")))
    assert "LPR509" not in report["summary"]["findings"]


def batch(sampler: list[float], trainer: list[float]) -> list[tuple[str, str, str]]:
    size = len(sampler)
    audit = audit_batch(
        [[7, *range(size)]], [[0] + [1] * size], [[0.0, *sampler]], trainer_logprobs=[[0.0, *trainer]]
    )
    return [(each.code, each.severity.word, each.hit.cause) for each in audit.findings]


def test_a_column_that_equals_the_samplers_to_the_bit_is_a_note() -> None:
    values = COLUMNS["bfloat16"][0][:64].astype(float).tolist()
    assert batch(values, values) == [("LPR509", "note", "equal to the bit")]
    rounded = [round(value, 3) for value in values]
    assert batch(rounded, rounded) == []


@pytest.mark.parametrize(("tokens", "severity"), [(900, "warning"), (1_200, "note")])
def test_one_confident_disagreement_in_a_thousand_tokens_is_a_warning(tokens: int, severity: str) -> None:
    sampler, trainer = COLUMNS["float32"][:, :tokens].astype(float)
    sampler[5], trainer[5] = -0.0004, -9.3
    ((code, reported, _),) = batch(sampler.tolist(), trainer.tolist())
    assert (code, reported) == ("LPR509", severity)


def test_the_text_report_says_the_shares_and_what_to_do(tmp_path: Path) -> None:
    planted = log([("temperature=0.7", 3)], np.random.default_rng(1))
    _, out, _ = run("scan", planted.write(tmp_path / "log.jsonl"))
    assert "Why old_log_probs differs from logprobs" in out
    assert "100 %  temperature (the sampler's is 0." in out
    assert "divide the trainer's logits by the sampling" in out


def test_the_same_verdict_from_several_processes(tmp_path: Path) -> None:
    path = log([("temperature=0.7", 3), ("bfloat16", 3)], np.random.default_rng(1)).write(tmp_path / "log.jsonl")
    ways = (("--jobs", "1"), ("--jobs", "2"))
    first, second = (json.loads(run("scan", path, "-r", "json", *way)[1])["summary"]["mismatches"] for way in ways)
    assert first == second


def test_the_pictures_and_cases_of_the_guide_are_the_measured_ones() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for case in CASES:
        assert f"| {shown(case)} | {cause_of(case)} |" in text
    for name, svg in pictures(COLUMNS):
        assert f"(pictures/{name})" in text
        assert (GUIDE.parent / "pictures" / name).read_text(encoding="utf-8") == svg
