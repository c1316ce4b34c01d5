"""Every sampled token is trained once: what rows of a run train again is found to the token, and repaired."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import toy
from tests.command import written
from tests.tiers import examples, some
from tito_audit import RepairSettings, Result, Settings, SetupError, repair_rollouts, scan_rollouts
from tito_audit.chains.ledger import Ledger
from tito_audit.chains.trained_once import find_repeated_training, merge_runs
from tito_audit.evidence.trainings import trainings_of
from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.record.trainings import SEQUENCE, SPAN, Trainings
from tito_audit.run.log_findings import NEVER, UNDECIDED
from tito_audit.run.workers import can_fork
from tito_audit.summary import Summary

FORMATS = toy.ROOT / "fixtures" / "formats"
ROLLOUTS = toy.ROOT.parent / "shared" / "rollouts"
ONLY = Settings(select=("REC009",))
ONCE = RepairSettings(strategies=("once",))

Wire = dict[str, Any]
Spot = tuple[Severity, str, Where, int, int]


def scanned(*logs: Path, **how: Any) -> tuple[dict[tuple[str, int], list[Finding]], Summary]:
    """The findings by file and row, and the summary."""
    chunk = how.pop("chunk", None)
    scan = scan_rollouts([str(log) for log in logs], replace(ONLY, **how))
    scan.chunk_bytes = chunk
    by_row: dict[tuple[str, int], list[Finding]] = {}
    for result in scan:
        for finding in result.findings:
            by_row.setdefault((Path(finding.place.file).name, finding.place.row), []).append(finding)
    return by_row, scan.summary


def spots(by_row: Mapping[tuple[str, int], Sequence[Finding]]) -> dict[tuple[str, int], list[Spot]]:
    return {
        key: [
            (finding.severity, finding.hit.cause, finding.hit.where, finding.hit.start, finding.hit.end)
            for finding in findings
        ]
        for key, findings in by_row.items()
    }


# Conversations, and the rows that are exported of them


@dataclass
class Answer:
    """One sampling event: its context, its tokens and their logprobs."""

    context: list[int]
    tokens: list[int]
    logprobs: list[float]
    before: list[Answer] = field(default_factory=list)

    @property
    def seen(self) -> list[int]:
        return self.context + self.tokens


def answer(dice: random.Random, context: list[int], before: Sequence[Answer] = (), size: int = 24) -> Answer:
    tokens = [dice.randrange(10, 5000) for _ in range(size)]
    return Answer(context, tokens, [round(dice.uniform(-3, -1.3), 4) for _ in tokens], list(before))


def conversation(dice: random.Random, steps: int, size: int = 24) -> list[Answer]:
    """A conversation of `steps` answers, with tool results between them."""
    first = answer(dice, [dice.randrange(10, 5000) for _ in range(9)], size=size)
    out = [first]
    for _ in range(steps - 1):
        result = [dice.randrange(10, 5000) for _ in range(5)]
        out.append(answer(dice, out[-1].seen + result, [*out[-1].before, out[-1]], size=size))
    return out


def row_of(last: Answer, trained: Iterable[Answer] | None = None, tail: Sequence[int] = ()) -> Wire:
    """The training row that ends with an answer and trains some answers in it; the last one by default."""
    ids = [*last.seen, *tail]
    mask, logprobs = [0] * len(ids), [None] * len(ids)
    for event in [*last.before, last]:
        start = len(event.context)
        for at, value in enumerate(event.logprobs):
            logprobs[start + at] = value  # type: ignore[call-overload]
    for event in [last] if trained is None else trained:
        start = len(event.context)
        mask[start : start + len(event.tokens)] = [1] * len(event.tokens)
    return {"token_ids": ids, "loss_mask": mask, "logprobs": logprobs}


def trained_events(rows: Sequence[tuple[Wire, Sequence[Answer]]]) -> dict[int, set[int]]:
    """The reference: by row, which tokens it trains although a shorter row or an earlier one does."""
    order = sorted(range(len(rows)), key=lambda k: (_last(rows[k][0]), len(rows[k][0]["token_ids"]), k))
    seen: set[tuple[int, int]] = set()
    again: dict[int, set[int]] = {}
    for k in order:
        row, answers = rows[k]
        for event in answers:
            for at in range(len(event.tokens)):
                place = len(event.context) + at
                if not row["loss_mask"][place]:
                    continue
                if (id(event), at) in seen:
                    again.setdefault(k, set()).add(place)
                seen.add((id(event), at))
    return again


def _last(row: Wire) -> int:
    return max(at for at, trained in enumerate(row["loss_mask"]) if trained) + 1


class TestHistory:
    def test_one_row_a_step_that_trains_its_own_answer_is_silent(self, tmp_path: Path) -> None:
        dice = random.Random(1)
        rows = [row_of(event) for _ in range(6) for event in conversation(dice, 4)]
        by_row, summary = scanned(written(tmp_path / "steps.jsonl", rows))
        assert by_row == {}
        assert not any("trained" in notice for notice in summary.notices)

    def test_history_that_each_step_trains_again_is_found_and_leaves_the_loss(self, tmp_path: Path) -> None:
        dice = random.Random(2)
        talks = [conversation(dice, 3) for _ in range(4)]
        right = [row_of(event) for talk in talks for event in talk]
        log = written(
            tmp_path / "steps.jsonl", [row_of(event, [*event.before, event]) for talk in talks for event in talk]
        )
        by_row, summary = scanned(log)
        assert sorted(row for _, row in by_row) == [row for row in range(12) if row % 3]
        (finding,) = by_row["steps.jsonl", 2]
        assert (finding.severity, finding.hit.cause) == (Severity.ERROR, "history trained again")
        assert (finding.hit.where, finding.hit.start, finding.hit.end) == (Where.ROW, 9, 9 + 24 + 5 + 24)
        assert finding.hit.message == (
            "trained again: 48 tokens in 2 spans of its history, which row 1 and 1 other row train first; "
            "8.3 % of all that the run trains"
        )
        assert finding.repair == "once"
        assert summary.notices[-1] == (
            "288 tokens (50 % of all trained tokens) are trained more than once, in 8 rows; "
            "`repair --with once` takes the repeated tokens out of the loss."
        )
        assert summary.findings["REC009"].rollouts == 8
        repaired = repaired_rows(log, tmp_path / "out.jsonl")
        assert [row["loss_mask"] for row in repaired] == [row["loss_mask"] for row in right]
        assert scanned(tmp_path / "out.jsonl")[0] == {}

    def test_short_answers_are_one_event_where_the_log_has_one_row_a_step(self, tmp_path: Path) -> None:
        dice = random.Random(3)
        talks = [conversation(dice, 3, size=3) for _ in range(4)]
        rows = [row_of(event, [*event.before, event]) for talk in talks for event in talk]
        by_row, _ = scanned(written(tmp_path / "steps.jsonl", rows))
        assert sorted(row for _, row in by_row) == [row for row in range(12) if row % 3]

    def test_a_few_short_rows_that_continue_others_by_chance_are_left_alone(self, tmp_path: Path) -> None:
        """A game with something hidden: a guess may be right for one sample and wrong for another."""
        dice = random.Random(4)
        talk = conversation(dice, 2, size=2)
        others = [conversation(dice, 2, size=2)[1] for _ in range(8)]
        rows = [
            row_of(talk[0]),
            row_of(talk[1], talk),
            *(row_of(event, [*event.before, event]) for event in others),
        ]
        assert scanned(written(tmp_path / "games.jsonl", rows))[0] == {}


def repaired_rows(log: Path, out: Path, **how: Any) -> list[Wire]:
    for _ in repair_rollouts(log, out, Settings(**how), ONCE):
        pass
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


class TestGroups:
    def test_samples_of_one_prompt_may_agree_by_chance(self, tmp_path: Path) -> None:
        dice = random.Random(5)
        prompt = [dice.randrange(10, 5000) for _ in range(20)]
        rows = [row_of(Answer(prompt, [42, 7], [-0.4 - k / 1000, -0.01])) for k in range(16)]
        by_row, summary = scanned(written(tmp_path / "group.jsonl", rows))
        assert by_row == {}
        assert not any("trained" in notice for notice in summary.notices)

    def test_long_answers_that_start_alike_are_two_events(self, tmp_path: Path) -> None:
        dice = random.Random(6)
        event = answer(dice, [1, 2, 3], size=40)
        other = Answer(event.context, [*event.tokens[:39], 9], event.logprobs)
        assert scanned(written(tmp_path / "group.jsonl", [row_of(event), row_of(other)]))[0] == {}

    def test_other_logprobs_show_another_event(self, tmp_path: Path) -> None:
        dice = random.Random(7)
        event = answer(dice, [1, 2, 3], size=40)
        other = replace(event, logprobs=[value * 0.5 for value in event.logprobs])
        assert scanned(written(tmp_path / "group.jsonl", [row_of(event), row_of(other)]))[0] == {}
        near = replace(event, logprobs=[value * 1.01 for value in event.logprobs])
        assert len(scanned(written(tmp_path / "row.jsonl", [row_of(event), row_of(near)]))[0]) == 1


class TestRows:
    def test_a_row_that_is_there_twice_is_found_in_the_second_file(self, tmp_path: Path) -> None:
        dice = random.Random(8)
        rows = [row_of(talk[-1], talk) for talk in (conversation(dice, 2) for _ in range(3))]
        first = written(tmp_path / "a.jsonl", rows[:2])
        second = written(tmp_path / "b.jsonl", [rows[2], rows[1]])
        by_row, _ = scanned(first, second)
        assert spots(by_row) == {
            ("b.jsonl", 1): [(Severity.ERROR, "duplicated row", Where.ROW, 9, 9 + 24 + 5 + 24)]
        }
        (finding,) = by_row["b.jsonl", 1]
        assert finding.hit.message == (
            f"trained again: all of its 48 tokens in the loss, as {first}:1 trains the same tokens first; "
            "25 % of all that the run trains"
        )

    def test_rows_that_no_memory_is_left_for_are_said_to_be_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dice = random.Random(3)
        rows = [row_of(answer(dice, [5, k, 6])) for k in range(6)]
        log = written(tmp_path / "log.jsonl", [*rows, rows[0]])
        assert len(spots(scanned(log)[0])) == 1
        monkeypatch.setattr("tito_audit.chains.ledger.MOST_BYTES", 100)
        by_row, summary = scanned(log)
        assert not spots(by_row)
        (notice,) = [notice for notice in summary.notices if notice.startswith("REC009")]
        assert "compared only the first" in notice
        assert "more were not compared. Scan fewer files at a time." in notice

    def test_branches_train_what_they_share_once(self, tmp_path: Path) -> None:
        dice = random.Random(9)
        talk = conversation(dice, 2)
        ends = [answer(dice, [*talk[-1].seen, *[k] * 4], talk, size=20 + k) for k in range(3)]
        rows = [row_of(end, [*talk, end]) for end in ends]
        by_row, _ = scanned(written(tmp_path / "tree.jsonl", rows))
        assert spots(by_row) == {
            ("tree.jsonl", row): [(Severity.ERROR, "shared prefix", Where.ROW, 9, len(talk[-1].seen))]
            for row in (1, 2)
        }

    def test_masks_that_differ_are_compared_token_by_token(self, tmp_path: Path) -> None:
        dice = random.Random(10)
        talk = conversation(dice, 2, size=30)
        first, other = row_of(talk[0]), row_of(talk[1], talk)
        other["loss_mask"][12:15] = [0, 0, 0]
        log = written(tmp_path / "rows.jsonl", [first, other])
        by_row, _ = scanned(log)
        assert spots(by_row) == {("rows.jsonl", 1): [(Severity.ERROR, "history trained again", Where.ROW, 9, 39)]}
        assert "27 tokens in 2 spans of its history" in by_row["rows.jsonl", 1][0].hit.message

    @pytest.mark.parametrize("ends", [(True, False), (False, True)])
    def test_a_turn_end_that_only_one_of_the_rows_trains_hides_nothing(
        self, ends: tuple[bool, bool], tmp_path: Path
    ) -> None:
        talk = conversation(random.Random(26), 2, size=30)
        rows = [row_of(talk[0]), row_of(talk[1], talk)]
        for row, end in zip(rows, ends, strict=True):
            row["loss_mask"][9 + 29] = int(end)
        by_row, _ = scanned(written(tmp_path / "rows.jsonl", rows))
        assert spots(by_row) == {("rows.jsonl", 1): [(Severity.ERROR, "history trained again", Where.ROW, 9, 38)]}

    def test_without_logprobs_it_is_undecided_and_not_repaired(self, tmp_path: Path) -> None:
        dice = random.Random(11)
        rows = [row_of(conversation(dice, 1)[0]) for _ in range(3)]
        for row in rows:
            del row["logprobs"]
        log = written(tmp_path / "rows.jsonl", [*rows, rows[1]])
        by_row, _ = scanned(log)
        assert spots(by_row) == {("rows.jsonl", 3): [(Severity.NOTE, UNDECIDED, Where.LOG, 0, 0)]}
        assert repaired_rows(log, tmp_path / "out.jsonl") == [*rows, rows[1]]

    def test_a_first_token_in_the_loss_belongs_to_the_rules_of_the_mask(self, tmp_path: Path) -> None:
        row = row_of(answer(random.Random(12), [1, 2], size=40))
        row["loss_mask"] = [1] * len(row["loss_mask"])
        assert scanned(written(tmp_path / "rows.jsonl", [row, row]))[0] == {}


def call_of(event: Answer, **more: Any) -> Wire:
    return {"prompt_ids": event.context, "completion_ids": event.tokens, "logprobs": event.logprobs, **more}


class TestCalls:
    def test_a_call_that_was_logged_twice_would_be_trained_twice(self, tmp_path: Path) -> None:
        calls = [call_of(event) for event in conversation(random.Random(13), 3)]
        log = written(tmp_path / "calls.jsonl", [*calls, calls[1]])
        by_row, _ = scanned(log)
        assert spots(by_row) == {
            ("calls.jsonl", 3): [(Severity.ERROR, "duplicated call", Where.COMPLETION, 0, 24)]
        }
        (finding,) = by_row["calls.jsonl", 3]
        assert "as row 1 has the same call" in finding.hit.message
        assert finding.repair is None
        (outcome,) = [outcome for outcome in repair_rollouts(log, None, Settings(), ONCE) if outcome.declined]
        assert outcome.declined == {"once": "a call has no mask, so leave its row out instead"}

    def test_the_id_of_the_server_proves_and_disproves(self, tmp_path: Path) -> None:
        event = Answer([1, 2, 3], [4, 5], [-0.1, -0.2])
        same = [call_of(event, id="chatcmpl-8f31a2c0"), call_of(event, id="chatcmpl-8f31a2c0")]
        by_row, _ = scanned(written(tmp_path / "same.jsonl", same))
        assert [key for key, _ in by_row.items()] == [("same.jsonl", 1)]
        long = answer(random.Random(14), [1, 2, 3], size=40)
        other = [call_of(long, id="chatcmpl-8f31a2c0"), call_of(long, id="chatcmpl-8f31a2c1")]
        assert scanned(written(tmp_path / "other.jsonl", other))[0] == {}

    def test_calls_and_the_rows_made_of_them_are_one_training(self, tmp_path: Path) -> None:
        dice = random.Random(15)
        talks = [conversation(dice, 3) for _ in range(3)]
        calls = written(tmp_path / "calls.jsonl", [call_of(event) for talk in talks for event in talk])
        rows = written(tmp_path / "rows.jsonl", [row_of(talk[-1], talk) for talk in talks])
        assert scanned(calls, rows)[0] == scanned(rows, calls)[0] == {}

    @pytest.mark.parametrize("tail", [(), (7,), (7, 8)])
    def test_rows_that_leave_out_turn_ends_train_their_calls(self, tail: tuple[int, ...], tmp_path: Path) -> None:
        """Whatever the template writes after the last answer."""
        dice = random.Random(27)
        talks = [conversation(dice, 3) for _ in range(3)]
        calls = written(tmp_path / "calls.jsonl", [call_of(event) for talk in talks for event in talk])
        rows = [row_of(talk[-1], talk if talk is not talks[2] else talk[::2], tail) for talk in talks]
        for row, talk in zip(rows, talks, strict=True):
            for event in talk:
                row["loss_mask"][len(event.seen) - 1] = 0
        by_row, _ = scanned(calls, written(tmp_path / "rows.jsonl", rows))
        assert spots(by_row) == {("calls.jsonl", 7): [(Severity.NOTE, NEVER, Where.COMPLETION, 0, 24)]}

    def test_a_call_that_no_row_trains_is_noted(self, tmp_path: Path) -> None:
        dice = random.Random(16)
        talks = [conversation(dice, 3) for _ in range(3)]
        calls = written(tmp_path / "calls.jsonl", [call_of(event) for talk in talks for event in talk])
        rows = written(tmp_path / "rows.jsonl", [row_of(talk[-1], talk) for talk in talks[:2]])
        left_out = row_of(talks[2][-1], talks[2][::2])
        rows.write_text(rows.read_text(encoding="utf-8") + json.dumps(left_out) + "\n", encoding="utf-8")
        by_row, summary = scanned(calls, rows)
        assert spots(by_row) == {("calls.jsonl", 7): [(Severity.NOTE, NEVER, Where.COMPLETION, 0, 24)]}
        assert "No row of the run trains 24 sampled tokens of 1 call." in summary.notices
        assert scanned(calls, rows, sample=0.9)[0].keys() <= {("calls.jsonl", 7)}

    def test_logs_that_have_nothing_to_do_with_each_other_are_judged_alone(self, tmp_path: Path) -> None:
        dice = random.Random(17)
        calls = [call_of(event) for event in conversation(dice, 3)]
        rows = written(tmp_path / "rows.jsonl", [row_of(event) for event in conversation(dice, 3)])
        by_row, _ = scanned(written(tmp_path / "calls.jsonl", [*calls, calls[2]]), rows)
        assert list(by_row) == [("calls.jsonl", 3)]


# Any log


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[Wire, list[Answer]]]:
    """Rows that train some answers of their conversation, in any order, some of them twice."""
    dice = random.Random(draw(st.integers(0, 10**6)))
    rows: list[tuple[Wire, list[Answer]]] = []
    for _ in range(draw(st.integers(1, 4))):
        talk = conversation(dice, draw(st.integers(1, 4)))
        for _ in range(draw(st.integers(0, 2))):
            at = dice.choice(talk)
            talk.append(answer(dice, [*at.seen, *[dice.randrange(10, 5000)] * 3], [*at.before, at]))
        for last in talk:
            events = [*last.before, last]
            for _ in range(dice.choice((0, 1, 1, 1, 2))):
                trained = [event for event in events if event is last or dice.random() < 0.4]
                row = row_of(last, trained, [7] * dice.choice((0, 0, 2)))
                for event in trained if dice.random() < 0.3 else ():  # masks that differ inside an answer
                    hole = len(event.context) + dice.randrange(0, len(event.tokens) - 4)
                    row["loss_mask"][hole : hole + 3] = [0] * 3
                rows.append((row, events))
    for _ in range(draw(st.integers(0, 2))):  # groups whose answers are the same by chance
        prompt = [dice.randrange(10, 5000) for _ in range(12)]
        for _ in range(3):
            short = Answer(prompt, [42, 7], [-0.3, -0.1])
            rows.append((row_of(short), [short]))
    dice.shuffle(rows)
    return rows


@given(log=logs(), cut=st.integers(0, 10))
@settings(max_examples=examples(8, 600), deadline=None)
def test_what_is_planted_is_found_to_the_token_and_repaired(
    log: list[tuple[Wire, list[Answer]]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assume(log)
    folder = tmp_path_factory.mktemp("log")
    cut = min(cut, len(log))
    parts = [part for part in (log[:cut], log[cut:]) if part]
    files = [written(folder / f"{n}.jsonl", [row for row, _ in part]) for n, part in enumerate(parts)]
    again = trained_events(log)
    by_row, _ = scanned(*files)
    rows = {f.name: n * (len(log) - len(parts[-1])) for n, f in enumerate(files)}
    ranges = {rows[file] + row: (finding.hit.start, finding.hit.end) for (file, row), (finding,) in by_row.items()}
    assert ranges == {row: (min(places), max(places) + 1) for row, places in again.items()}
    (folder / "out").mkdir()
    target = folder / "out" if len(files) > 1 else folder / "out" / files[0].name
    for _ in repair_rollouts([str(f) for f in files], target, Settings(), ONCE):
        pass
    after_rows = [
        json.loads(line) for f in files for line in (folder / "out" / f.name).read_text("utf-8").splitlines()
    ]
    for number, ((row, _), after) in enumerate(zip(log, after_rows, strict=True)):
        left = [bool(trained) and at not in again.get(number, ()) for at, trained in enumerate(row["loss_mask"])]
        assert [bool(trained) for trained in after["loss_mask"]] == left, number
        assert after["token_ids"] == row["token_ids"]
        assert after["logprobs"] == row["logprobs"]
    assert scanned(*(folder / "out" / f.name for f in files))[0] == {}


def planted(dice: random.Random) -> list[Wire]:
    talks = [conversation(dice, 3) for _ in range(12)]
    rows = [
        row_of(event, [*event.before, event] if dice.random() < 0.5 else None) for talk in talks for event in talk
    ]
    dice.shuffle(rows)
    return [*rows, rows[3], rows[5]]


@pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system")
def test_processes_and_kinds_of_files_change_nothing(tmp_path: Path) -> None:
    rows = planted(random.Random(18))
    log = written(tmp_path / "log.jsonl", rows)
    want = spots(scanned(log)[0])
    assert len(want) > 5
    assert spots(scanned(log, jobs=2, chunk=3000)[0]) == want
    with gzip.open(tmp_path / "log.jsonl.gz", "wb") as packed:
        packed.write(log.read_bytes())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet", row_group_size=7)
    for other in ("log.jsonl.gz", "log.parquet"):
        got = spots(scanned(tmp_path / other, jobs=2, chunk=3000)[0])
        assert {row: listed for (_, row), listed in got.items()} == {
            row: listed for (_, row), listed in want.items()
        }, other


@pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system")
def test_a_repair_in_several_processes_writes_the_same(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", planted(random.Random(19)))
    alone = repaired_rows(log, tmp_path / "one.jsonl")
    run = repair_rollouts(log, tmp_path / "two.jsonl", Settings(jobs=2), ONCE)
    run.batch_bytes = 4000
    assert sum(outcome.repaired for outcome in run) > 5
    assert [json.loads(line) for line in (tmp_path / "two.jsonl").read_text("utf-8").splitlines()] == alone


def test_the_order_of_files_changes_only_which_of_equal_rows_is_kept(tmp_path: Path) -> None:
    rows = planted(random.Random(20))
    files = [written(tmp_path / f"{n}.jsonl", rows[n::3]) for n in range(3)]
    totals = {
        tuple(notice for notice in scanned(*order)[1].notices if "more than once" in notice)
        for order in (files, files[::-1], [files[1], files[2], files[0]])
    }
    assert len(totals) == 1
    assert len(next(iter(totals))) == 1


def test_a_single_row_or_another_selection_asks_nothing(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", planted(random.Random(21)))
    assert scanned(log, row=37)[0] == {}
    assert scanned(log, select=("REC",), ignore=("REC009",))[0] == {}


def test_it_runs_when_it_is_named(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", planted(random.Random(22)))
    assert not any("once" in outcome.cured for outcome in repair_rollouts(log, None, Settings(), RepairSettings()))
    assert any("once" in outcome.cured for outcome in repair_rollouts(log, None, Settings(), ONCE))


def test_a_pipe_cannot_be_read_twice(tmp_path: Path) -> None:
    import os

    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    run = repair_rollouts(pipe, None, Settings(), ONCE)
    with pytest.raises(SetupError, match=r"strategies=\(\"once\",\)\): .* is a pipe"):
        next(iter(run))


# Formats

MASKED = (
    *("areal", "atropos_group", "atropos_item", "nemo_rl", "nemo_rl_message_log", "prime_rl_sample"),
    *("prime_rl_tokens", "tinker", "trl_rollout"),
)


@pytest.mark.parametrize("name", sorted(path.stem for path in FORMATS.glob("*.jsonl")))
def test_no_row_of_a_format_is_taken_for_another(name: str) -> None:
    by_row, _ = scanned(FORMATS / f"{name}.jsonl")
    assert {finding.severity for findings in by_row.values() for finding in findings} <= {Severity.NOTE}


@pytest.mark.parametrize("name", MASKED)
def test_each_format_leaves_second_trainings_out_in_its_own_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels become -100, weights 0; the answers of the fixtures are short, so less is asked of their logprobs."""
    monkeypatch.setattr("tito_audit.chains.trained_once.PROOF", -0.2)
    rows = (FORMATS / f"{name}.jsonl").read_bytes().rstrip(b"\n") + b"\n"
    log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    log.write_bytes(rows + rows)
    by_row, _ = scanned(log)
    causes = {finding.hit.cause for findings in by_row.values() for finding in findings}
    assert "duplicated row" in causes
    (*outcomes,) = repair_rollouts(log, out, Settings(), ONCE)
    assert not any(outcome.declined for outcome in outcomes)
    assert {outcome.place.row for outcome in outcomes if outcome.cured} >= {row for _, row in by_row} - {1}
    left, _ = scanned(out)
    assert {finding.severity for findings in left.values() for finding in findings} <= {Severity.NOTE}


def test_calls_of_joined_rows_are_named_by_their_own_rows(tmp_path: Path) -> None:
    dice = random.Random(25)
    talks = [conversation(dice, 3) for _ in range(3)]
    calls = [call_of(event, session_id=f"s{k}") for k, talk in enumerate(talks) for event in talk]
    first = written(tmp_path / "a.jsonl", calls[:5])
    second = written(tmp_path / "b.jsonl", [*calls[5:], calls[4], {**calls[7], "session_id": "s9"}])
    alone = spots(scanned(first, second, join=False)[0])
    assert sorted(alone) == [("b.jsonl", 4), ("b.jsonl", 5)]
    joined = scanned(first, second)[0]
    assert sorted(spots(joined)) == sorted(alone)
    assert {key: [spot[1:] for spot in listed] for key, listed in spots(joined).items()} == {
        key: [spot[1:] for spot in listed] for key, listed in alone.items()
    }
    assert f"as {first}:4 has the same call" in joined["b.jsonl", 4][0].hit.message


# Real rollouts


@pytest.mark.skipif(not ROLLOUTS.is_dir(), reason="no recorded rollouts beside the checkout")
@pytest.mark.parametrize("model", some(["smollm2", "qwen2.5-coder", "gemma-3"], 1))
def test_rows_of_recorded_rollouts(model: str, tmp_path: Path) -> None:
    """One row a call, right and with the history in the loss; beside the calls themselves."""
    right, wrong, calls = [], [], []
    with gzip.open(ROLLOUTS / model / "tito.jsonl.gz") as lines:
        for record in map(json.loads, lines):
            before: list[Answer] = []
            for call in record["calls"]:
                columns = call["prompt_token_ids"], call["generation_token_ids"], call["generation_log_probs"]
                event = Answer(*columns)
                seen = before[-1].seen if before else []
                event.before = before if event.context[: len(seen)] == seen else []
                right.append(row_of(event))
                wrong.append(row_of(event, [*event.before, event]))
                calls.append(call_of(event))
                before = [*event.before, event]
    logs = {
        name: written(tmp_path / f"{name}.jsonl", rows)
        for name, rows in (("right", right), ("wrong", wrong), ("calls", calls))
    }
    assert scanned(logs["right"])[0] == scanned(logs["calls"])[0] == {}
    assert scanned(logs["right"], logs["calls"])[0] == {}
    by_row, _ = scanned(logs["wrong"])
    assert {row for _, row in by_row} == {
        n for n, row in enumerate(wrong) if sum(row["loss_mask"]) > sum(right[n]["loss_mask"])
    }
    after = repaired_rows(logs["wrong"], tmp_path / "out.jsonl")
    assert [row["loss_mask"] for row in after] == [row["loss_mask"] for row in right]


# The arithmetic


def ledger_of(rows: Iterable[tuple[str, int, Wire]]) -> Ledger:
    ledger = Ledger()
    for file, number, row in rows:
        logprobs = [np.nan if value is None else value for value in row["logprobs"]]
        training_row = TrainingRow(
            np.array(row["token_ids"], np.int32),
            np.array(row["loss_mask"], np.bool_),
            np.array(logprobs, np.float64),
        )
        trainings = trainings_of(Rollout(Place(file, number), "toy", training_row=training_row))
        if trainings is not None:
            ledger.add(trainings, Place(file, number))
    return ledger


def test_an_empty_ledger_shows_nothing() -> None:
    settled = find_repeated_training(Ledger())
    assert (settled.trained, len(settled.doubles), len(settled.never), len(settled.undecided)) == (0, 0, 0, 0)


def test_spans_are_sorted_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = planted(random.Random(23))
    whole = list(find_repeated_training(ledger_of(("log", n, row) for n, row in enumerate(rows))).doubles)
    monkeypatch.setattr("tito_audit.chains.ledger.BLOCK", 4)
    assert list(find_repeated_training(ledger_of(("log", n, row) for n, row in enumerate(rows))).doubles) == whole


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9))))
@settings(max_examples=examples(25, 500), deadline=None)
def test_runs_are_merged(spans: list[tuple[int, int]]) -> None:
    runs = [(start, start + size) for start, size in spans]
    places = {at for start, end in runs for at in range(start, end)}
    out = merge_runs(runs)
    assert {at for start, end in out for at in range(start, end)} == places
    assert all(a[1] < b[0] for a, b in pairwise(out))


def test_results_of_a_run_are_no_rollouts(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", planted(random.Random(24)))
    results: list[Result] = list(scan_rollouts(str(log), ONLY))
    assert all(result.of_log for result in results if result.findings)
    assert sum(not result.of_log for result in results) == 38


def test_a_row_takes_a_few_bytes_of_the_ledger() -> None:
    """10 million rows of one span take less than 400 MB, settled too."""
    rows = examples(1 << 13, 1 << 16)
    spans = np.zeros(rows, SPAN)
    spans["hash"] = np.random.default_rng(28).permutation(rows)
    spans["end"], spans["tokens"], spans["logprob"] = 900, 400, -90.0
    spans["hash"][-5:] = spans["hash"][:5]
    sequence = np.array([(1, -1, 0)], SEQUENCE).tobytes()
    tracemalloc.start()
    try:
        ledger = Ledger()
        for number in range(rows):
            ledger.add(Trainings(sequence, spans[number].tobytes()), Place("log", number))
        assert tracemalloc.get_traced_memory()[0] < 34 * rows
        assert len(find_repeated_training(ledger).doubles) == 5
        assert tracemalloc.get_traced_memory()[0] < 40 * rows
    finally:
        tracemalloc.stop()
