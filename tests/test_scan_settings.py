"""Settings of single logs inside one run, and results that say more than their findings."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command import scanned, written
from tests.tiers import examples, some
from tests.world import BROKEN, CLEAN, FORMATS, ROOT, TOKENIZERS, lines_of
from tito_audit import (
    Finding,
    Outcome,
    RepairSettings,
    Result,
    Settings,
    SetupError,
    convert_rollouts,
    read_rollouts,
    repair_rollouts,
    scan_rollouts,
    write_rollouts,
)
from tito_audit.record.finding import Severity
from tito_audit.record.move_row import move_row
from tito_audit.run.workers import can_fork
from tito_audit.settings.model import Override
from tito_audit.viewer.model import MAX_VIEWS, VIEWS_PER_CODE, Measures, Observed, ViewQuota

BPE, METASPACE = str(TOKENIZERS / "toy_bpe"), str(TOKENIZERS / "toy_metaspace")
LOGS = sorted(FORMATS.glob("*.jsonl"))
forks = pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system")
each_number_of_processes = pytest.mark.parametrize(
    ("jobs", "chunk"),
    [(1, None), *some([pytest.param(2, 200, marks=forks), pytest.param(3, 5_000, marks=forks)], 1)],
)


def over(path: Path | str, **changes: Any) -> Override:
    return Override((str(path),), changes)


# Settings of single logs


@each_number_of_processes
@pytest.mark.parametrize("order", some([(2, 0, 1), (0, 1, 2), (1, 2, 0)], 1))
def test_each_log_is_audited_as_if_it_were_alone_with_its_settings(
    tmp_path: Path, order: tuple[int, ...], jobs: int, chunk: int | None
) -> None:
    renamed = [{"ids": row["token_ids"], "mask": row["loss_mask"], "lp": row["logprobs"]} for row in [BROKEN] * 5]
    logs = [
        written(tmp_path / "a.jsonl", lines_of(ROOT / "fixtures/formats/marin.jsonl")),
        written(tmp_path / "b.jsonl", renamed),
        written(tmp_path / "c.jsonl", [CLEAN, BROKEN] * 3),
    ]
    columns = {"token_ids": "ids", "loss_mask": "mask", "logprobs": "lp"}
    own: list[dict[str, Any]] = [
        {"tokenizer": BPE},
        {"tokenizer": METASPACE, "columns": columns, "ignore": ("REC",)},
        {"tokenizer": METASPACE, "select": ("LPR504",), "chat_template": None},
    ]
    overrides = (over(logs[0], **own[0]), over(logs[1], **own[1]), over(logs[2], **own[2]))
    logs, own = [logs[k] for k in order], [own[k] for k in order]
    results, summary = scanned(logs, jobs, chunk, overrides=overrides)
    alone = [scanned(log, **settings) for log, settings in zip(logs, own, strict=True)]
    assert results == [result for findings, _ in alone for result in findings]
    assert {
        name: sum(summed.findings[name].rollouts for _, summed in alone if name in summed.findings)
        for name in summary.findings
    } == {name: count.rollouts for name, count in summary.findings.items()}
    assert summary.files == [str(log) for log in logs]
    names = dict.fromkeys(summed.tokenizer for _, summed in alone)
    assert summary.tokenizer == ", ".join(str(name) for name in names)
    assert len(names) == 2
    assert summary.encoder == "tokenizers"
    assert {
        finding.code for result in results if "c.jsonl" in result.place.file for finding in result.findings
    } == {"LPR504"}


def test_a_run_whose_overrides_fit_nothing_is_a_run_without_them(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [CLEAN, BROKEN])
    nothing = over("/gone/**", tokenizer="/gone/tokenizer", select=("NOPE",))
    assert scanned(log, overrides=(nothing,)) == scanned(log)


def test_notices_name_the_logs_that_they_are_about(tmp_path: Path) -> None:
    logs = [written(tmp_path / f"{name}.jsonl", [CLEAN]) for name in "abcd"]
    with_one = over(tmp_path / "b.jsonl", tokenizer=BPE)
    assert (
        scanned(logs, overrides=(with_one,))[1]
        .notices[0]
        .startswith(f"{logs[0]} and 2 more: No tokenizer given: only rules that need none could run.")
    )
    without = over(tmp_path / "c.jsonl", tokenizer=None)
    assert (
        scanned(logs, tokenizer=BPE, overrides=(without,))[1]
        .notices[0]
        .startswith(f"{logs[2]}: No tokenizer given")
    )
    for settings in ({}, {"overrides": (over(tmp_path / "b.jsonl", select=("LPR",)),)}):
        (first,) = (notice for notice in scanned(logs, **settings)[1].notices if "tokenizer" in notice)
        assert first.startswith("No tokenizer given")


def test_tokenizers_and_templates_are_loaded_once_for_all_settings_that_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tito_audit.run.auditor as engine

    loaded: list[str] = []
    load, make = engine.load_tokenizer, engine.make_renderer

    def load_watched(name: str, **more: Any) -> Any:
        loaded.append(Path(name).name)
        return load(name, **more)

    def make_watched(tokenizer: Any, **more: Any) -> Any:
        loaded.append(f"template {more['template_args']}")
        return make(tokenizer, **more)

    monkeypatch.setattr(engine, "load_tokenizer", load_watched)
    monkeypatch.setattr(engine, "make_renderer", make_watched)
    logs = [written(tmp_path / f"{number}.jsonl", [CLEAN]) for number in range(6)]
    overrides = (
        over(logs[1], select=("LPR",)),
        over(logs[2], tokenizer=METASPACE),
        over(logs[3], template_args={"thinking": True}),
        over(logs[4], tokenizer=METASPACE, ignore=("TOK",)),
    )
    results, _ = scanned(logs, tokenizer=BPE, overrides=overrides)
    assert len(results) == 6
    assert loaded == [
        "toy_bpe",
        "template {}",
        "toy_metaspace",
        "template {}",
        "template {'thinking': True}",
    ]


def test_a_setting_that_cannot_be_is_refused_only_where_a_log_has_it(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [CLEAN])
    for changes, says in (
        ({"select": ("NOPE",)}, "No rule matches 'NOPE'"),
        ({"extend_select": ("NOPE",)}, "No rule matches 'NOPE'"),
        ({"format": "nope"}, 'Unknown format "nope"'),
        ({"tokenizer": str(tmp_path / "gone")}, "gone"),
        ({"chat_template": str(tmp_path / "gone")}, "was given without a tokenizer"),
    ):
        assert len(scanned(log, overrides=(over("/gone/*", **changes),))[0]) == 1
        with pytest.raises(SetupError, match=says):
            scanned(log, overrides=(over(log, **changes),))


def test_rules_are_added_to_those_of_the_run_for_some_logs(tmp_path: Path) -> None:
    logs = [written(tmp_path / name / "a.jsonl", [BROKEN, {"nothing": 1}]) for name in ("x", "y")]
    more = over(tmp_path / "y" / "*", extend_select=("LPR504",))
    results, _ = scanned(logs, select=("REC",), overrides=(more,))
    codes = [{finding.code for finding in result.findings} for result in results if not result.of_log]
    assert codes == [set(), {"REC001"}, {"LPR504"}, {"REC001"}]


@each_number_of_processes
@pytest.mark.parametrize("limit", some([4, 1, 5, 20, 9], 2))
def test_a_limit_counts_over_all_logs(tmp_path: Path, limit: int, jobs: int, chunk: int | None) -> None:
    logs = [written(tmp_path / f"{name}.jsonl", [CLEAN, BROKEN, CLEAN, BROKEN]) for name in "abc"]
    overrides = (over(logs[1], select=("REC",)),)
    every, _ = scanned(logs, overrides=overrides)
    results, summary = scanned(logs, jobs, chunk, limit=limit, overrides=overrides)
    assert results == every[:limit]
    stopped = f"Stopped after {limit} rows, as asked by --limit."
    assert (stopped in summary.notices) == (limit < 12)


@each_number_of_processes
def test_progress_goes_over_all_logs(tmp_path: Path, jobs: int, chunk: int | None) -> None:
    logs = [written(tmp_path / f"{name}.jsonl", [CLEAN] * 40) for name in "abc"]
    total = sum(log.stat().st_size for log in logs)
    seen: list[tuple[int, int, int]] = []
    settings = Settings(jobs=jobs, overrides=(over(logs[1], select=("REC",)),))
    scan = scan_rollouts(logs, settings, lambda *now: seen.append(now))
    scan.chunk_bytes = chunk
    assert len(list(scan)) == 120
    assert seen == sorted(seen)
    assert seen[-1] == (120, total, total)


@each_number_of_processes
def test_messages_are_joined_where_they_are_asked_for(tmp_path: Path, jobs: int, chunk: int | None) -> None:
    logs = [written(tmp_path / f"{name}.jsonl", [{**CLEAN, "id": f"{k}"} for k in range(6)]) for name in "abcd"]
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    messages = written(
        tmp_path / "said.jsonl",
        [{"id": f"{k}", "messages": conversation} for k in range(4)],
    )
    overrides = (over(logs[1], messages=str(messages)), over(logs[3], messages=str(messages), select=("REC",)))
    results, summary = scanned(logs, jobs, chunk, overrides=overrides)
    assert len(results) == 24
    joined = [notice for notice in summary.notices if notice.startswith("--messages")]
    assert "8 of 12 rollouts found their messages" in joined[0]
    missed = Counter(result.place.file for result in results if result.counts.get("messages_row", 0) < 0)
    assert missed == {str(logs[1]): 2, str(logs[3]): 2}


def test_rollouts_are_read_and_written_with_the_settings_of_their_log(tmp_path: Path) -> None:
    renamed = written(tmp_path / "a.jsonl", [{"ids": CLEAN["token_ids"], "lm": CLEAN["loss_mask"]}] * 2)
    plain = written(tmp_path / "b.jsonl", [CLEAN])
    settings = Settings(overrides=(over(renamed, columns={"token_ids": "ids", "loss_mask": "lm"}),))
    rollouts = list(read_rollouts([renamed, plain], settings))
    assert [rollout.format for rollout in rollouts] == ["generic"] * 3
    assert all(rollout.training_row and rollout.training_row.token_ids[-1] == 8 for rollout in rollouts)
    out = tmp_path / "out.jsonl"
    row = rollouts[1].training_row
    assert row is not None
    moved = move_row(row, row.token_ids, np.arange(4), loss_mask=np.zeros(4, bool), logprobs=None).row
    other = replace(rollouts[1], training_row=moved)
    assert write_rollouts(renamed, [other], out, settings) == 1
    assert [json.loads(line)["lm"] for line in out.read_text().splitlines()] == [[0, 0, 1, 1], [0, 0, 0, 0]]


def test_a_log_is_converted_with_its_settings(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [{"ids": CLEAN["token_ids"], "lm": CLEAN["loss_mask"]}] * 2)
    settings = Settings(overrides=(over(log, columns={"token_ids": "ids", "loss_mask": "lm"}),))
    convert_rollouts(log, "tito_sample", tmp_path / "out.jsonl", settings)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


# Repair


def repaired(logs: Any, out: Path | None, settings: Settings, **repairs: Any) -> tuple[list[Outcome], Any]:
    run = repair_rollouts(logs, out, settings, RepairSettings(**repairs))
    return list(run), run


def test_a_repair_reads_audits_and_checks_each_log_with_its_settings(tmp_path: Path) -> None:
    renamed = [{"ids": row["token_ids"], "lm": row["loss_mask"], "lp": row["logprobs"]} for row in (CLEAN, BROKEN)]
    rows = ([CLEAN, BROKEN], renamed, [CLEAN, BROKEN])
    logs = [written(tmp_path / "in" / f"{n}.jsonl", some) for n, some in zip("abc", rows, strict=True)]
    columns = {"token_ids": "ids", "loss_mask": "lm", "logprobs": "lp"}
    settings = Settings(overrides=(over(logs[1], columns=columns), over(logs[2], ignore=("LPR",))))
    aside = tmp_path / "aside.jsonl"
    outcomes, run = repaired(
        logs, tmp_path / "out", settings, strategies=("drop",), unsafe=True, quarantine=str(aside)
    )
    assert [outcome.quarantined is not None for outcome in outcomes] == [False, True, False, True, False, False]
    assert {code: count.rollouts for code, count in run.before.findings.items()} == {"LPR504": 2}
    assert run.after.findings == {}
    assert run.after.rollouts == 4
    assert run.after.rows_unreadable == 0
    out = {log.name: (tmp_path / "out" / log.name).read_text().splitlines() for log in logs}
    assert [json.loads(line) for line in out["b.jsonl"]] == renamed[:1]
    assert (len(out["a.jsonl"]), len(out["c.jsonl"])) == (1, 2)
    assert len(aside.read_text().splitlines()) == 2


def test_what_fails_is_said_for_each_log_of_a_repair(tmp_path: Path) -> None:
    logs = [written(tmp_path / "in" / f"{n}.jsonl", [BROKEN]) for n in "ab"]
    settings = Settings(overrides=(over(logs[1], fail_on="never"),))
    aside = str(tmp_path / "aside.jsonl")
    outcomes, _ = repaired(logs, tmp_path / "out", settings, strategies=("splice",), quarantine=aside)
    assert [outcome.quarantined is not None for outcome in outcomes] == [True, False]


def test_a_repair_reads_every_row_whatever_the_limit_and_the_sample(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [{**CLEAN, "logprobs": [-0.5, -0.25]}] * 9)
    outcomes, run = repaired(log, tmp_path / "b.jsonl", Settings(limit=2, sample=0.1))
    assert len(outcomes) == run.before.rollouts == run.after.rollouts == 9


# Results that are observed


def without(results: Sequence[Result]) -> list[Result]:
    return [replace(result, observed=None) for result in results]


def plain(observed: Observed | None) -> Any:
    """Everything in it, as a value that can be compared."""
    if observed is None:
        return None
    measures = observed.measures
    counts = (measures.by_turn, measures.by_position, measures.by_logprob, measures.without_logprob)
    return [count.tolist() for count in counts], measures.roles, observed.view


@pytest.mark.parametrize("log", some(LOGS, 6), ids=lambda path: path.stem)
def test_to_observe_changes_nothing_else(log: Path) -> None:
    silent, summary = scanned(log, tokenizer=BPE)
    results, observed = scanned(log, tokenizer=BPE, observe=True)
    assert without(results) == silent
    assert observed == summary
    for audited in results:
        assert (audited.observed is None) == (audited.rollout is None)
    assert not any(result.observed for result in silent)
    faulty = [result for result in results if result.rollout is not None and result.findings]
    assert len(viewed(faulty[:VIEWS_PER_CODE])) == len(faulty[:VIEWS_PER_CODE])


@forks
@pytest.mark.parametrize("log", some(LOGS, 3), ids=lambda path: path.stem)
def test_what_is_observed_is_the_same_whatever_the_number_of_processes(log: Path) -> None:
    expected, summary = scanned(log, tokenizer=BPE, observe=True)
    for jobs, chunk in some(((2, 997), (3, 20_011)), 1):
        results, other = scanned(log, jobs, chunk, tokenizer=BPE, observe=True)
        assert (without(results), other) == (without(expected), summary)
        assert [plain(result.observed) for result in results] == [plain(result.observed) for result in expected]


SIZE = examples(80, 400)


def many(path: Path) -> Path:
    """A log with more rollouts of each finding than are viewed, in unequal distances."""
    rows: list[dict[str, Any]] = []
    for number in range(SIZE):
        row = {**CLEAN, "n": number}
        if number % 3 == 0:
            row = {**row, "logprobs": [0.0, 0.0, 0.5, -0.25]}
        if number % 7 == 0:
            row = {**row, "token_ids": [5, 6, 99_999, 8]}
        if number > SIZE * 3 // 4 and number % 5 == 0:
            row = {**row, "logprobs": [-0.25, -0.5]}
        rows.append(row)
    return written(path, rows)


def viewed(results: Sequence[Result]) -> list[int]:
    return [n for n, result in enumerate(results) if result.observed and result.observed.view is not None]


@each_number_of_processes
def test_the_first_rollouts_of_each_code_and_severity_are_viewed(
    tmp_path: Path, jobs: int, chunk: int | None
) -> None:
    results, _ = scanned(many(tmp_path / "log.jsonl"), jobs, chunk, tokenizer=BPE, observe=True)
    seen: Counter[tuple[str, Severity]] = Counter()
    expected = []
    for number, result in enumerate(results):
        keys = {(finding.code, finding.severity) for finding in result.findings}
        if any(seen[key] < VIEWS_PER_CODE for key in keys):
            expected.append(number)
        seen.update(keys)
    assert viewed(results) == expected
    assert len(seen) >= 3
    assert VIEWS_PER_CODE < len(expected) < 100
    assert all(audited.observed is not None for audited in results)


@forks
def test_no_more_views_than_a_bound_whatever_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = many(tmp_path / "log.jsonl")
    every = viewed(scanned(log, tokenizer=BPE, observe=True)[0])
    monkeypatch.setattr("tito_audit.viewer.model.MAX_VIEWS", 17)
    for jobs, chunk in some(((1, None), (3, 9_000), (2, 300)), 2):
        assert viewed(scanned(log, jobs, chunk, tokenizer=BPE, observe=True)[0]) == every[:17]


def test_views_of_logs_are_counted_over_all_of_them(tmp_path: Path) -> None:
    logs = [many(tmp_path / f"{name}.jsonl") for name in "ab"]
    results, _ = scanned(logs, tokenizer=BPE, observe=True)
    alone, _ = scanned(logs[0], tokenizer=BPE, observe=True)
    assert viewed(results) == viewed(alone)


def test_what_a_part_offers_holds_what_is_taken() -> None:
    draw = np.random.default_rng(7)
    codes = [f"TOK{number}" for number in range(60)]
    rollouts = []
    for number in range(3000):
        here = draw.choice(codes[: 2 + number // 50], draw.integers(0, 3), replace=False)
        rollouts.append([finding(str(code), int(draw.integers(0, 3))) for code in here])
    whole = ViewQuota()
    viewed_numbers = {number for number, findings in enumerate(rollouts) if whole.take(findings, 0)}
    assert len(viewed_numbers) == MAX_VIEWS
    quota, merged = ViewQuota(), set()
    for start in range(0, 3000, 100):
        part = quota.copy()
        # Parts before this one that are not back yet are unknown to it.
        part = ViewQuota() if start % 300 == 0 else part
        offered = {
            start + n for n, findings in enumerate(rollouts[start : start + 100]) if part.offer(findings, 0)
        }
        now = {start + n for n, findings in enumerate(rollouts[start : start + 100]) if quota.take(findings, 0)}
        assert now <= offered
        merged |= now
    assert merged == viewed_numbers


def finding(code: str, severity: int) -> Finding:
    from tito_audit import Hit, Place, Where

    return Finding(code, Severity(severity), Place("log", 0), Hit(Where.ROW, 0, 0, ""))


def test_measures_come_out_of_a_pickle_as_they_went_in() -> None:
    draw = np.random.default_rng(3)
    for share in (0.0, 0.02, 1.0):
        measures = Measures(roles={"user": (0, 7)})
        for counts in (measures.by_turn, measures.by_position, measures.by_logprob, measures.without_logprob):
            counts += draw.integers(0, 1 << 60, counts.shape) * (draw.random(counts.shape) < share)
        again = pickle.loads(pickle.dumps(measures))
        for name in ("by_turn", "by_position", "by_logprob", "without_logprob"):
            before, after = getattr(measures, name), getattr(again, name)
            assert (before.dtype, before.shape) == (after.dtype, after.shape)
            assert np.array_equal(before, after)
        assert again.roles == measures.roles
        again.add(measures)
        assert np.array_equal(again.by_turn, 2 * measures.by_turn)
