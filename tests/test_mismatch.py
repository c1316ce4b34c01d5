"""One verdict on a mismatch: what planted mixtures hold is what the report says, within 10 % of the total."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import made
from tests.browser.made import HOSTILE
from tests.command import run
from tests.mismatch.__main__ import CASES, GUIDE, MIXTURES, UNTOLD, held_out_cases, shares_of, shown, verdict
from tests.mismatch.picture import pictures
from tests.mismatch.plant import COLUMNS, HELD_OUT, Planted, cause_of, log, taken
from tests.tiers import some
from tito_audit import audit_batch
from tito_audit.record.mismatch import CauseShare, LogMismatch, MismatchCause, RowMismatch
from tito_audit.record.rollout import Place
from tito_audit.summary import Summary


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


@pytest.mark.parametrize("steps", some([2, 3, 4, 5, 6, 7, 8], 2))
def test_training_that_sharpens_a_policy_is_no_temperature(steps: int) -> None:
    settings = [("float32/float32", 12), (f"versions={steps}", 24)]
    planted = log(settings, np.random.default_rng(steps), source=HELD_OUT, versions=True)
    assert shares_of(verdict(planted, scanned)).get("stale weights", 0.0) >= 0.97


@pytest.mark.parametrize("case", ["float32", "bfloat16", "vllm bfloat16"])
def test_two_engines_with_the_same_weights_have_no_finding(case: str, tmp_path: Path) -> None:
    report = json.loads(scanned(log([(case, 4)], np.random.default_rng(3)).write(tmp_path / "log.jsonl")))
    assert "LPR509" not in report["summary"]["findings"]


def rows_of(setting: str, count: int, seed: int = 0, **columns: Any) -> list[dict[str, Any]]:
    """Rows of the tuning data with more columns."""
    return [{**row, **columns} for row in log([(setting, count)], np.random.default_rng(seed)).rows]


def causes_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a scan says of each cause."""
    causes: dict[str, dict[str, Any]] = verdict(Planted(rows), scanned)["causes"]
    return causes


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ({"sampling_params": {"temperature": 0.7}}, "the log says temperature 0.7: the trainer left it out"),
        ({"request": {"sampling_params": {"temperature": 0.7, "top_p": 1}}}, "the trainer left it out"),
        ({"meta_info": {"temperature": 1.43}}, "the trainer applied it, and the sampler's logprobs are raw"),
        ({"temperatures": [0.0] * 6 + [0.7] * 400}, "the trainer left it out"),
        ({"temperature": 1.0}, "the log says temperature 1: that is not it"),
    ],
)
def test_a_temperature_that_the_log_names_is_compared_with_the_estimate(place: dict[str, Any], named: str) -> None:
    causes = causes_of(rows_of("temperature=0.7", 3, **place))
    ((words, rollouts),) = causes["temperature"]["notes"].items()
    assert words.endswith(named)
    assert rollouts == 3


def test_calls_that_were_sampled_in_several_ways_name_no_temperature() -> None:
    rows = rows_of("temperature=0.7", 2)
    for row in rows:
        at, ids = [0, 200], row["token_ids"]
        own = [(start, slice(6 + start, 206 + start)) for start in at]
        row["calls"] = [
            {"prompt_token_ids": ids[: part.start], "completion_token_ids": ids[part]}
            | {"logprobs": row["logprobs"][part], "sampling_params": {"temperature": 0.7 + start}}
            for start, part in own
        ]
    assert causes_of(rows)["temperature"]["notes"] == {}


def test_temperature_and_top_p_are_named_together_only_if_the_log_names_both() -> None:
    setting, both = "temperature=0.7+top_p=0.9", {"temperature": 0.7, "top_p": 0.9}
    assert list(causes_of(rows_of(setting, 3))) == ["cannot tell"]
    assert list(causes_of(rows_of(setting, 3, sampling_params={"temperature": 0.7}))) == ["cannot tell"]
    (named,) = causes_of(rows_of(setting, 3, sampling_params=both)).items()
    assert named[0] == "temperature and truncated sampling"
    # Weights of another step do not become sampling because the log names some.
    causes = causes_of(rows_of("versions=8", 3, sampling_params=both))
    assert "temperature and truncated sampling" not in causes


@pytest.mark.parametrize(("size", "kind"), [(10, "top-k"), (None, "")])
def test_kept_sets_of_one_size_are_those_of_top_k(size: int | None, kind: str) -> None:
    rows = rows_of("bfloat16 top_p=0.9", 2)
    rng = np.random.default_rng(0)
    for row in rows:
        sizes = [size or int(rng.integers(2, 40)) for _ in range(400)]
        row["rollout_sampling_mask"] = {
            "ids": [
                i for at, n in enumerate(sizes) for i in [row["token_ids"][6 + at], *range(50_000, 49_999 + n)]
            ],
            "offsets": np.cumsum([0, *sizes]).tolist(),
        }
    assert verdict(Planted(rows), scanned)["truncations"] == ({kind: 2} if kind else {})


def test_experts_of_both_sides_show_the_routing_and_of_one_side_say_so() -> None:
    planted = log([("experts coarse router", 6)], np.random.default_rng(0), source=HELD_OUT)
    causes = causes_of(planted.rows)
    assert causes["routing"]["share"] == pytest.approx(planted.shares["routing"], abs=0.1)
    for row in planted.rows:
        del row["trainer_routed_experts"]
    causes = causes_of(planted.rows)
    assert "routing" not in causes
    assert any("experts of one side only" in words for words in causes["cannot tell"]["notes"])


def test_experts_that_differ_anywhere_are_no_cause() -> None:
    planted = log([("experts coarse router", 6)], np.random.default_rng(0), source=HELD_OUT)
    for number, row in enumerate(planted.rows):
        # The trainer's experts of other tokens.
        experts = row["trainer_routed_experts"]
        row["trainer_routed_experts"] = np.roll(np.array(row["routed_experts"]), 7 + number, axis=0).tolist()
        assert experts != row["trainer_routed_experts"]
    assert "routing" not in causes_of(planted.rows)


def test_the_versions_of_a_samples_calls_show_stale_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(4):
        old, new = (taken(setting, rng).pair for setting in ("versions=8", "float32"))
        sampler, trainer = ([*before, *[0.0] * 5, *after] for before, after in zip(old, new, strict=True))
        row = {"tokens": rng.integers(100, 4000, 808).tolist(), "response_length": 805, "response": ""}
        row |= {"loss_mask": [1] * 400 + [0] * 5 + [1] * 400, "status": "completed"}
        row |= {"rollout_log_probs": sampler, "log_probs": trainer, "weight_versions": ["3", "11"]}
        rows.append(row)
    path = Planted(rows).write(tmp_path / "log.jsonl")
    (mismatch,) = json.loads(scanned(path))["summary"]["mismatches"].values()
    assert shares_of(mismatch)["stale weights"] > 0.99
    for row in rows:
        row["weight_versions"] = ["3", "7", "11"]  # not one for each call
    (mismatch,) = json.loads(scanned(Planted(rows).write(path)))["summary"]["mismatches"].values()
    assert "stale weights" not in shares_of(mismatch)


def test_the_page_shows_the_causes_with_plots(tmp_path: Path) -> None:
    path = log([("temperature=0.7", 3), ("bfloat16", 3)], np.random.default_rng(1)).write(tmp_path / "log.jsonl")
    page = tmp_path / "page.html"
    run("scan", path, "--report", f"html={page}")
    text = page.read_text(encoding="utf-8")
    assert "Why sampler and trainer differ" in text
    assert "old_log_probs against logprobs" in text
    assert re.search(r"temperature <span class=\"quiet\">\(the sampler&#39;s is 0\.\d+", text)
    assert text.count("<circle class") + text.count("<circle cx") - 2 > 100
    rows = rows_of("bfloat16", 1)
    del rows[0]["old_log_probs"]
    run("scan", Planted(rows).write(path), "--report", f"html={page}")
    assert "Why sampler and trainer differ" not in page.read_text(encoding="utf-8")


def test_names_and_values_of_a_log_do_nothing_on_the_page(tmp_path: Path) -> None:
    rows = rows_of("temperature=0.7", 3, sampling_params={"temperature": HOSTILE}, version=HOSTILE)
    for row in rows:
        row[HOSTILE] = row.pop("logprobs")
    path, page = Planted(rows).write(tmp_path / "<img src=x>.jsonl"), tmp_path / "page.html"
    run("scan", path, "--report", f"html={page}", "--map", f"logprobs={HOSTILE}")
    text = page.read_text(encoding="utf-8")
    assert "Why sampler and trainer differ" in text
    assert "<img" not in text

    # Whatever a name or a note of a verdict may hold one day.
    share = ((MismatchCause.TEMPERATURE.value, CauseShare(3, 1.0)),)
    notes = ((MismatchCause.TEMPERATURE.value, HOSTILE),)
    summary = Summary(files=["log.jsonl"])
    mismatch = LogMismatch(HOSTILE)
    points = ((-1.0, 0.5, False),)
    mismatch.add(RowMismatch(HOSTILE, HOSTILE, 3, share, notes=notes, points=points), Place("log", 0))
    summary.mismatches[HOSTILE] = mismatch
    text = made.written([], summary)
    assert text.count("&lt;/script&gt;&lt;script&gt;window.owned") >= 3
    assert not re.search(r"<img|<svg/|<script>window|\x1b|\u202e", text)


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


def test_one_confident_disagreement_in_a_thousand_tokens_is_a_warning() -> None:
    for tokens, severity in ((900, "warning"), (1_200, "note")):
        sampler, trainer = COLUMNS["float32"][:, :tokens].astype(float)
        sampler[5], trainer[5] = -0.0004, -9.3
        assert [each[:2] for each in batch(sampler.tolist(), trainer.tolist())] == [("LPR509", severity)]


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
    for case, stated in held_out_cases():
        assert stated or f"| {shown(case)} | {cause_of(case)} |" in text
    for name, svg in pictures():
        assert f"(pictures/{name})" in text + GUIDE.with_name("ratios-explode.md").read_text(encoding="utf-8")
        assert (GUIDE.parent / "pictures" / name).read_text(encoding="utf-8") == svg
