"""`tito-audit repair`: exit codes, what is written and what is not, its page, its diff and its JSON."""

from __future__ import annotations

import doctest
import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run, written
from tests.world import BROKEN, CLEAN, ROOT
from tito_audit.cli._diff import changed_spans, diff_lines
from tito_audit.cli.repair import REPORTS, RepairRun, RowTally, SentenceCounts
from tito_audit.record.build import build_training_row
from tito_audit.record.finding import Finding, Hit, Result, Severity, Where
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.repairs import all_repairs
from tito_audit.report import ReportOptions
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.summary import Summary
from tito_audit.terminal.sequence import TokenLine

PLACE = Place("run.jsonl", 3)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Ten rows; row 3 has a logprob above zero where it trains."""
    return written(tmp_path / "run.jsonl", [BROKEN if row == 3 else CLEAN for row in range(10)])


def test_a_row_of_a_table_that_cannot_be_shown_stays_in_it(tmp_path: Path) -> None:
    log, out, bad = tmp_path / "log.parquet", tmp_path / "out.parquet", tmp_path / "bad.jsonl"
    texts = pa.array([b"good", b"\xff\xfe"]).view(pa.string())
    pq.write_table(pa.table({"prompt_ids": [[1], [1]], "completion_ids": [[3], [3]], "text": texts}), log)
    code, _, err = run("repair", log, "-o", out, "--quarantine", bad)
    assert code == 1, err
    assert pq.read_table(out).equals(pq.read_table(log))
    assert not bad.exists() or not bad.read_bytes()
    _, page, _ = run("repair", log, "--dry-run")
    assert "--quarantine FILE" not in page, "no quarantine would take it"
    _, page, _ = run("repair", written(tmp_path / "other.jsonl", [{"prompt_ids": ["x"]}]), "--dry-run")
    assert "--quarantine FILE" in page


def test_a_written_file_that_is_no_log_any_more_is_a_finding(tmp_path: Path) -> None:
    log, out, bad = tmp_path / "log.jsonl", tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    faulty = json.dumps({"prompt_ids": [17], "completion_ids": [19], "completion_logprobs": [None]}).encode()
    log.write_bytes(faulty + b"\x85" + faulty + b"\n")  # two calls of a log that may be joined, the second damaged
    code, page, err = run("repair", log, "-o", out, "--with", "drop", "--unsafe", "--quarantine", bad)
    assert (code, err) == (1, "")
    assert out.read_bytes() == b"\x85" + faulty + b"\n"
    assert b"quarantined" in bad.read_bytes()
    assert "not all fixed" in page
    assert "1 in quarantine" in page


@pytest.mark.parametrize("how", [("-o", "OUT"), ("--dry-run",)])
def test_rows_that_were_trained_twice_before_are_counted_before_and_after(how: Any, tmp_path: Path) -> None:
    logprobs = [None, *(-0.3 - place % 7 / 8 for place in range(1, 400))]
    row = {
        "token_ids": [300 + place % 40 for place in range(400)],
        "loss_mask": [0] + [1] * 399,
        "logprobs": logprobs,
    }
    other = {**row, "token_ids": [77, *row["token_ids"][1:]], "logprobs": [None, 0.5, *logprobs[2:]]}
    log, report = written(tmp_path / "log.jsonl", [row, row, other]), tmp_path / "report.json"
    words = (str(tmp_path / "out.jsonl") if word == "OUT" else word for word in how)
    code, page, _ = run("repair", log, *words, "--report", f"json={report}", "--report", "text")
    summary = json.loads(report.read_text(encoding="utf-8"))
    once = [summary[when]["findings"]["REC009"]["error"] for when in ("before", "after")]
    assert (code, once) == (1, [1, 1])
    assert [summary[when]["findings"].get("LPR504", {}).get("error", 0) for when in ("before", "after")] == [1, 0]
    assert f"{'not all would be fixed' if how == ('--dry-run',) else 'not all fixed'}: 2 errors → 1" in page


def test_a_diff_shows_twenty_changed_rows_and_counts_the_rest(tmp_path: Path) -> None:
    page = run("repair", written(tmp_path / "many.jsonl", [BROKEN] * 30), "--diff")[1]
    assert page.count("repaired by") == 20
    assert "and 10 more changed rows; --worst 30" in page


def test_the_json_report_holds_both_summaries_and_the_rows(log: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "cured.jsonl", tmp_path / "report.json"
    code, page, _ = run("repair", log, "-o", out, "--report", f"json={report}", "--report", "text")
    whole = json.loads(report.read_text(encoding="utf-8"))
    assert code == 0
    assert "1 repaired" in page
    assert whole["before"]["findings"]["LPR504"]["error"] == 1
    assert whole["after"]["findings"].get("LPR504", {"error": 0})["error"] == 0
    assert whole["rows"] == {
        "read": 10,
        "written": 10,
        "repaired": 1,
        "forked": 0,
        "forked_into": 0,
        "more_tokens": 0,
        "as_they_were": 9,
        "standing": 0,
        "quarantined": 0,
    }
    assert whole["repairs"] == {"mask": {"rows": 1, "cured": {"LPR504": 1}}}
    assert whole["files"] == [{"log": str(log), "written": str(out)}]
    assert whole["dry_run"] is False


def test_the_examples_of_the_page_on_python_are_true() -> None:
    done = doctest.testfile(str(ROOT / "docs/_api.md"), module_relative=False, encoding="utf-8")
    assert done.attempted >= 4
    assert done.failed == 0


def test_explain_of_a_repair_misspelt_names_the_nearest_and_of_a_rule_its_repairs() -> None:
    code, page, err = run("explain", "splise")
    assert (code, page) == (2, "")
    assert "splice" in err
    claims = [repair.name for repair in all_repairs() if repair.claims("TOK101")]
    assert f"Repairs: {', '.join(claims)}." in run("explain", "TOK101")[1]


# The page and the diff by themselves


def rollout(ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float], **more: Any) -> Rollout:
    row = build_training_row(
        np.array(ids, np.int32), mask=("mask", list(mask)), logprobs=("logprobs", list(logprobs))
    )
    return Rollout(PLACE, "toy", training_row=row, **more)


def outcome(old: Sequence[Rollout], new: Sequence[Rollout], **more: Any) -> Outcome:
    more = {"cured": {"splice": ("TOK101",)}, "rows": len(new), **more}
    return Outcome(
        PLACE, tuple(Result(PLACE, entry) for entry in old), tuple(Result(PLACE, entry) for entry in new), **more
    )


def diff(repaired: Outcome, piece: Any = None) -> list[str]:
    return [line.plain for line in diff_lines(repaired, piece)]


def test_a_diff_shows_old_over_new_with_three_tokens_around() -> None:
    old = rollout([*range(20)], [0] * 10 + [1] * 10, [0.0] * 10 + [-0.5] * 10)
    ids = [*range(12), 90, 91, *range(13, 20)]
    new = rollout(ids, [0] * 10 + [1] * 11, [0.0] * 10 + [-0.5] * 2 + [-1.0, np.nan] + [-0.5] * 7)
    assert diff(outcome([old], [new])) == [
        "run.jsonl:3 repaired by splice (TOK101)",
        "  training row · 20 tokens, 10 trained → 21 tokens, 11 trained",
        "      at  id  mask  logprob",
        "       9   9     0   0.0000",
        "      10  10     1  -0.5000",
        "      11  11     1  -0.5000",
        "    - 12  12     1  -0.5000",
        "    + 12  90     1  -1.0000",
        "    + 13  91     1     null",
        "      14  13     1  -0.5000",
        "      15  14     1  -0.5000",
        "      16  15     1  -0.5000",
    ]


def test_a_diff_of_a_long_run_leaves_out_its_middle_and_counts_it() -> None:
    old, new = (rollout([*range(100)], [flag] * 100, [-0.5] * 100) for flag in (1, 0))
    lines = diff(outcome([old], [new]))
    assert [line for line in lines if "more" in line] == ["    - … 93 more", "    + … 93 more"]
    assert len(lines) == 3 + 2 * 8


def test_a_change_that_later_prompts_repeat_is_shown_once() -> None:
    def calls(history: list[int]) -> tuple[Turn, ...]:
        prompts = [[1, 2], [1, 2, *history, 5], [1, 2, *history, 5, 30, 6]]
        completions = [[3, 4], [30], [31]]
        return tuple(
            Turn(np.array(p, np.int32), np.array(c, np.int32)) for p, c in zip(prompts, completions, strict=True)
        )

    old, new = (Rollout(PLACE, "toy", turns=calls(history)) for history in ([34], [3, 4]))
    lines = diff(outcome([old], [new]))
    assert sum(line.startswith("    -") for line in lines) == 1
    assert lines[-1] == "  turn 2 prompt · 6 tokens → 7 tokens · 1 change as above"


def test_a_diff_of_a_fork_names_each_part_and_the_turns_it_trains() -> None:
    turns = tuple(
        Turn(np.array([1] * n, np.int32), np.array([n], np.int32), np.array([-0.5], np.float32)) for n in (2, 5)
    )
    old = rollout([1, 1, 2, 1, 1, 5], [0, 0, 1, 0, 0, 1], [0.0] * 6, turns=turns)
    new = [
        rollout([1, 1, 2], [0, 0, 1], [0.0] * 3, turns=turns[:1]),
        rollout([1, 1, 1, 1, 1, 5], [0, 0, 0, 0, 0, 1], [0.0] * 6, turns=turns[1:]),
    ]
    assert diff(outcome([old], new))[1:] == [
        "  row 1 of 2 · 3 tokens, 1 trained · trains turn 0",
        "  row 2 of 2 · 6 tokens, 1 trained · trains turn 1",
    ]


def test_a_diff_of_a_fork_tells_turns_of_equal_completions_apart() -> None:
    sampled = np.array([7], np.int32), np.array([-0.5], np.float32)
    turns = tuple(Turn(np.array(prompt, np.int32), *sampled) for prompt in ([1], [1, 2], [1], [1, 7, 3]))
    old = rollout([1, 7, 3, 7], [0, 1, 0, 1], [0.0] * 4, turns=turns)
    parts = [turns[1:2], turns[:1], (turns[2], turns[3])]
    new = [rollout([1, 7], [0, 1], [0.0] * 2, turns=part) for part in parts]
    words = [line.rpartition(" · ")[2] for line in diff(outcome([old], new))[1:]]
    assert words == ["trains turn 1", "trains turn 0", "trains turns 2, 3"]


def test_rollouts_of_a_row_that_no_fork_changed_keep_their_pairs_however_unlike_they_are() -> None:
    old = [rollout([number] * 3, [0, 0, 1], [0.0] * 3) for number in (1, 2, 3)]
    new = [rollout([number] * 3, [0, 0, 1], [0.0] * 3) for number in (1, 9, 3)]
    heads = [line for line in diff(outcome(old, new)) if "training row" in line or line.startswith("  row")]
    assert heads == ["  training row · 3 tokens, 1 trained → 3 tokens, 1 trained"]


def test_nothing_that_a_log_says_acts_on_the_terminal() -> None:
    evil = Place("a\x1b]0;title\x07.jsonl\nforged: 0 errors", 3)
    old, new = (replace(rollout([5, number], [0, 1], [0.0, -0.5]), place=evil) for number in (6, 7))
    repaired = replace(
        outcome([old], [new], notes=("column x\x1b[31m is\nstale",), declined={"fork": "no \u202eplace"}),
        place=evil,
    )
    finding = Finding("LPR504", Severity.ERROR, evil, Hit(Where.ROW, 0, 1, "m\x1b[2J"), None)
    left = Result(evil, new, (finding,))
    repaired = replace(repaired, after=(left,))
    text = "\n".join(diff(repaired, lambda token: f"\x1b[{token}m\n"))
    tally, summary = RowTally(Severity.ERROR), Summary(files=[evil.file], notices=["n\x1b[1m"], tokenizer="t\x07")
    tally.add(repaired)
    summary.add(left)
    files = [(Path(evil.file), Path("cured\x1b[1m.jsonl"))]
    over = RepairRun(tally, summary, summary, files, Settings(), RepairSettings(), "o\x1b[1m")
    for write in REPORTS.values():
        page = StringIO()
        write(over, page, ReportOptions())
        text += page.getvalue()
    assert "forged" in text
    assert not any(line.startswith("forged") for line in text.splitlines())
    assert not [char for char in text if not char.isprintable() and char != "\n"]


def test_sentences_that_differ_in_numbers_only_are_counted_as_one() -> None:
    sayings = SentenceCounts()
    for row in range(5):
        sayings.add(f"{row + 1} of 7 tokens left in turns {', '.join('123'[: row % 3 + 1])}", Place("a", row))
    sayings.add("advantages are stale", Place("a", 9))
    (_, most), (_, least) = sayings
    assert (most.text, most.rows, most.alike) == ("1 of 7 tokens left in turns 1", 5, False)
    assert (least.rows, least.alike, least.place.row) == (1, True, 9)


sequences = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from([-1.0, 0.0, np.nan])), max_size=30
)


@given(sequences, sequences)
def test_regions_put_in_their_places_make_the_new_sequence_of_the_old(
    left: list[tuple[int, bool, float]], right: list[tuple[int, bool, float]]
) -> None:
    old, new = (TokenLine(*(np.array([entry[n] for entry in side]) for n in range(3))) for side in (left, right))
    at, rebuilt = 0, []
    for region in changed_spans(old, new):
        assert region.start >= at
        assert region.end > region.start or region.other_end > region.other
        rebuilt += left[at : region.start]
        assert len(rebuilt) == region.other
        rebuilt += right[region.other : region.other_end]
        at = region.end
    assert repr(rebuilt + left[at:]) == repr(right)
