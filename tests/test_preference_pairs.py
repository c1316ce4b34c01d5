"""Preference pairs as trainers tokenize them: clean ones have no finding, and each planted fault is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.format_cases import fixture_of, fixture_rows
from tests.world import ROOT

TOKENIZER = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
END, NEWLINE = 2002, 198
Row = dict[str, Any]


def findings(tmp_path: Path, *rows: Row) -> list[tuple[str, str, str]]:
    """Code, severity and cause of everything that a scan finds in these rows."""
    log = written(tmp_path / "pairs.jsonl", rows)
    _, out, err = run("scan", log, "-t", TOKENIZER, "--report", "jsonl")
    assert not err
    lines = [json.loads(line) for line in out.splitlines()]
    return [(line["code"], line["severity"], line["cause"]) for line in lines if "code" in line]


@pytest.mark.parametrize("number", range(len(fixture_rows("preference_pair"))))
def test_rows_that_a_trainer_wrote_have_no_finding(number: int, tmp_path: Path) -> None:
    assert findings(tmp_path, dict(fixture_rows("preference_pair")[number])) == []


def test_several_pairs_may_share_an_answer_and_a_prompt(tmp_path: Path) -> None:
    rows = [fixture_of("preference_pair", name) for name in ("trl-1-dpo-0", "trl-1-kto-0c", "trl-1-dpo-0")]
    assert findings(tmp_path, *rows) == []


def cut(row: Row, side: str) -> None:
    row[f"{side}_ids"] = row[f"{side}_ids"][: row[f"{side}_ids"].index(END)]


def swap(row: Row) -> None:
    row["chosen_ids"], row["rejected_ids"] = row["rejected_ids"], row["chosen_ids"]


def relabel(row: Row, side: str, start: int, end: int | None = None) -> None:
    """Train these tokens of a side alone."""
    ids = row[f"{side}_input_ids"]
    trained = range(len(ids))[start:end]
    row[f"{side}_labels"] = [token if place in trained else -100 for place, token in enumerate(ids)]


def with_other_token(row: Row, place: int) -> None:
    row["rejected_input_ids"][place] = 17


def without_end_of_prompt(row: Row) -> None:
    for side in ("chosen", "rejected"):
        for column in ("input_ids", "labels", "attention_mask"):
            del row[f"{side}_{column}"][8:14]


def without_last_labels(row: Row) -> None:
    row["chosen_labels"] = row["chosen_labels"][:-2]


FAULTS: dict[str, tuple[str, Callable[[Row], Any], tuple[str, str, str]]] = {
    "the chosen answer has no end": (
        "trl-1-dpo-0",
        lambda row: cut(row, "chosen"),
        ("REC016", "warning", "answer without an end"),
    ),
    "the rejected answer has no end": (
        "trl-1-dpo-1",
        lambda row: cut(row, "rejected"),
        ("REC016", "warning", "answer without an end"),
    ),
    "a KTO answer has no end": (
        "trl-1-kto-0c",
        lambda row: cut(row, "completion"),
        ("REC016", "warning", "answer without an end"),
    ),
    "both answers are the same": (
        "trl-1-dpo-0",
        lambda row: row.update(rejected=row["chosen"], rejected_ids=row["chosen_ids"]),
        ("REC016", "warning", "answers are the same"),
    ),
    "the answers are swapped": ("trl-1-dpo-0", swap, ("REC006", "warning", "content is not in the ids")),
    "the end comes twice": (
        "trl-1-dpo-0",
        lambda row: row.update(chosen_ids=[*row["chosen_ids"][:-1], *row["chosen_ids"][-2:]]),
        ("REC016", "warning", "end repeated"),
    ),
    "the prompt is empty": (
        "trl-1-dpo-0",
        lambda row: row.update(prompt_ids=[]),
        ("TPL207", "warning", "generation prompt missing"),
    ),
    "the generation prompt is missing": (
        "trl-1-dpo-0",
        lambda row: row.update(prompt_ids=row["prompt_ids"][:-3]),
        ("TPL207", "warning", "generation prompt missing"),
    ),
    "the prompt is raw text": (
        "trl-1-dpo-0",
        lambda row: row.update(prompt_ids=[45, 295, 259, 287, 391]),
        ("TPL201", "warning", "no template"),
    ),
    "an id is outside the vocabulary": (
        "trl-1-dpo-0",
        lambda row: row["chosen_ids"].__setitem__(1, 99_999),
        ("REC003", "error", "above the vocabulary"),
    ),
    "the answer holds the end of the prompt": (
        "trl-1-text",
        lambda row: row.update(prompt="Sky is ", chosen="blue<|im_end|>", rejected="low<|im_end|>"),
        ("REC016", "warning", "seam inside a token"),
    ),
    "the prompts differ": (
        "trl-0-orpo-0",
        lambda row: with_other_token(row, 4),
        ("REC016", "error", "prompts differ"),
    ),
    "the prompts differ at the seam": (
        "llama-factory",
        lambda row: with_other_token(row, 13),
        ("REC016", "warning", "prompts differ at the seam"),
    ),
    "the maximum length cut the prompts": (
        "llama-factory",
        without_end_of_prompt,
        ("REC016", "warning", "prompt cut"),
    ),
    "the prompt is trained": (
        "llama-factory",
        lambda row: relabel(row, "chosen", 0),
        ("MSK403", "error", "all ones"),
    ),
    "nothing is trained": (
        "llama-factory",
        lambda row: relabel(row, "chosen", 99),
        ("MSK403", "warning", "all zeros"),
    ),
    "the end is not trained": (
        "llama-factory",
        lambda row: relabel(row, "chosen", 14, 20),
        ("REC016", "warning", "end not trained"),
    ),
    "labels are missing": ("llama-factory", without_last_labels, ("REC002", "error", "mask length")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    name, plant, wanted = FAULTS[fault]
    row = copy.deepcopy(fixture_of("preference_pair", name))
    plant(row)
    assert wanted in findings(tmp_path, row)


def test_labels_are_repaired_and_all_columns_stay(tmp_path: Path) -> None:
    row = copy.deepcopy(fixture_of("preference_pair", "llama-factory"))
    relabel(row, "chosen", 0)
    log, out = written(tmp_path / "log.jsonl", [row]), tmp_path / "out.jsonl"
    code, _, _ = run("repair", log, "-o", out, "-t", TOKENIZER)
    new = json.loads(out.read_text())
    assert code == 0
    assert new["chosen_labels"][:14] == [-100] * 14
    assert new["chosen_labels"][14:21] == row["chosen_input_ids"][14:21]
    assert {**new, "chosen_labels": None, "tito_audit": None} == {**row, "chosen_labels": None, "tito_audit": None}


def test_a_pair_that_no_repair_can_fix_goes_to_the_quarantine_whole(tmp_path: Path) -> None:
    row = copy.deepcopy(fixture_of("preference_pair", "trl-1-dpo-0"))
    cut(row, "rejected")
    log, out, aside = written(tmp_path / "log.jsonl", [row]), tmp_path / "out.jsonl", tmp_path / "aside.jsonl"
    run("repair", log, "-o", out, "-t", TOKENIZER, "--unsafe", "--with", "drop", "--quarantine", aside)
    assert out.read_text() == ""
    assert len(aside.read_text().splitlines()) == 1
