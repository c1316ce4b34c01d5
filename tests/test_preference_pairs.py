"""Preference pairs as trainers tokenize them: clean ones have no finding, and each planted fault is found."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.format_cases import fixture_of, fixture_rows
from tests.tables import stored
from tests.world import TOY

Row = dict[str, Any]


def findings(tmp_path: Path, *rows: Row) -> list[tuple[str, str, str]]:
    """Code, severity and cause of everything that a scan finds in these rows."""
    log = written(tmp_path / "pairs.jsonl", rows)
    _, out, err = run("scan", log, "-t", TOY, "--report", "jsonl")
    assert not err
    lines = [json.loads(line) for line in out.splitlines()]
    return [(line["code"], line["severity"], line["cause"]) for line in lines if "code" in line]


@pytest.mark.parametrize("number", range(len(fixture_rows("preference_pair"))))
def test_rows_that_a_trainer_wrote_have_no_finding(number: int, tmp_path: Path) -> None:
    assert findings(tmp_path, dict(fixture_rows("preference_pair")[number])) == []


def test_several_pairs_may_share_an_answer_and_a_prompt(tmp_path: Path) -> None:
    rows = [fixture_of("preference_pair", name) for name in ("trl-1-dpo-0", "trl-1-kto-0c", "trl-1-dpo-0")]
    assert findings(tmp_path, *rows) == []


FAULTS: dict[str, tuple[str, dict[str, tuple[int, int, list[int]]], Row, list[str]]] = stored(__file__, "FAULTS")


def planted(fault: str) -> Row:
    """The row of the fixture that has this fault."""
    name, splices, values, _ = FAULTS[fault]
    row = fixture_of("preference_pair", name)
    new = copy.deepcopy(row)
    for column, (start, end, ids) in splices.items():
        new[column][start:end] = ids
    for column, value in values.items():
        new[column] = row[value[2:]] if isinstance(value, str) and value.startswith("= ") else value
    return new


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    assert tuple(FAULTS[fault][-1]) in findings(tmp_path, planted(fault))


def test_labels_are_repaired_and_all_columns_stay(tmp_path: Path) -> None:
    row = planted("the prompt is trained")
    log, out = written(tmp_path / "log.jsonl", [row]), tmp_path / "out.jsonl"
    code, _, _ = run("repair", log, "-o", out, "-t", TOY)
    new = json.loads(out.read_text())
    assert code == 0
    assert new["chosen_labels"][:14] == [-100] * 14
    assert new["chosen_labels"][14:21] == row["chosen_input_ids"][14:21]
    assert {**new, "chosen_labels": None, "tito_audit": None} == {**row, "chosen_labels": None, "tito_audit": None}


def test_a_pair_that_no_repair_can_fix_goes_to_the_quarantine_whole(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [planted("the rejected answer has no end")])
    out, aside = tmp_path / "out.jsonl", tmp_path / "aside.jsonl"
    run("repair", log, "-o", out, "-t", TOY, "--unsafe", "--with", "drop", "--quarantine", aside)
    assert out.read_text() == ""
    assert len(aside.read_text().splitlines()) == 1
