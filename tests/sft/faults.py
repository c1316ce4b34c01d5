"""Faults of sets for SFT, each planted into a clean set, with the finding that it has to have."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

IGNORED = -100
Row = dict[str, Any]
Rows = list[Row]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the finding that it has to have."""

    name: str
    plant: Callable[[Rows, Family], int | None]
    """Changes the rows; the number of the row that has it, None for the log."""
    code: str
    """Or how it begins, where tokenizers differ in what explains the fault."""
    severity: str
    of_log: bool = False
    messages: bool = False
    """Whether only the messages beside the ids show it."""
    needs_bos: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """What a fault has to know of the tokenizer."""

    bos: int | None
    ends: frozenset[int]
    size: int
    """The ids of its vocabulary are below."""


FAULTS: list[Fault] = []


def fault(code: str, severity: str, **facts: bool) -> Callable[[Callable[[Rows, Family], int | None]], Any]:
    """Adds a fault to `FAULTS`, named by its function."""

    def add(plant: Callable[[Rows, Family], int | None]) -> Any:
        FAULTS.append(Fault(plant.__name__.replace("_", " "), plant, code, severity, **facts))
        return plant

    return add


def runs(labels: list[int]) -> list[tuple[int, int]]:
    """The trained runs of a row."""
    edges = [
        at
        for at in range(len(labels) + 1)
        if (at < len(labels) and labels[at] != IGNORED) != (at > 0 and labels[at - 1] != IGNORED)
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def row_with(rows: Rows, turns: int) -> int:
    """The first row with so many turns or more, after the first row."""
    return next(at for at, row in enumerate(rows) if at and len(runs(row["labels"])) >= turns)


def set_labels(row: Row, trained: list[bool]) -> None:
    row["labels"] = [token if on else IGNORED for token, on in zip(row["input_ids"], trained, strict=True)]


def trained(row: Row) -> list[bool]:
    return [label != IGNORED for label in row["labels"]]


@fault("MSK403", "warning")
def nothing_trained_in_a_row(rows: Rows, family: Family) -> int:
    rows[3]["labels"] = [IGNORED] * len(rows[3]["labels"])
    return 3


@fault("MSK403", "error", of_log=True)
def nothing_trained_in_any_row(rows: Rows, family: Family) -> None:
    for row in rows:
        row["labels"] = [IGNORED] * len(row["labels"])


@fault("MSK403", "warning")
def everything_trained_in_a_row(rows: Rows, family: Family) -> int:
    rows[4]["labels"] = list(rows[4]["input_ids"])
    return 4


@fault("MSK403", "error")
def the_mask_of_a_row_inverted(rows: Rows, family: Family) -> int:
    set_labels(rows[2], [not on for on in trained(rows[2])])
    return 2


@fault("MSK401", "error")
def the_mask_of_a_row_one_token_late(rows: Rows, family: Family) -> int:
    at = row_with(rows, 2)
    set_labels(rows[at], [False, *trained(rows[at])[:-1]])
    return at


@fault("MSK401", "error")
def the_mask_of_a_row_one_token_early(rows: Rows, family: Family) -> int:
    at = row_with(rows, 2)
    set_labels(rows[at], [*trained(rows[at])[1:], False])
    return at


@fault("MSK401", "error")
def a_question_trained(rows: Rows, family: Family) -> int:
    at = row_with(rows, 2)
    (_, end), (start, _) = runs(rows[at]["labels"])[:2]
    on = trained(rows[at])
    middle = (end + start) // 2
    on[middle - 1 : middle + 2] = [True] * 3
    set_labels(rows[at], on)
    return at


@fault("MSK401", "error")
def everything_after_the_first_prompt_trained(rows: Rows, family: Family) -> int:
    at = row_with(rows, 2)
    first = runs(rows[at]["labels"])[0][0]
    set_labels(rows[at], [place >= first for place in range(len(rows[at]["labels"]))])
    return at


@fault("MSK404", "warning")
def the_end_of_one_of_several_answers_not_trained(rows: Rows, family: Family) -> int:
    at = row_with(rows, 2)
    rows[at]["labels"][runs(rows[at]["labels"])[0][1] - 1] = IGNORED
    return at


@fault("MSK404", "warning", of_log=True)
def no_end_trained_in_any_row(rows: Rows, family: Family) -> None:
    for row in rows:
        for _, end in runs(row["labels"]):
            row["labels"][end - 1] = IGNORED


@fault("MSK404", "warning", of_log=True)
def no_end_trained_in_one_row(rows: Rows, family: Family) -> None:
    for _, end in runs(rows[5]["labels"]):
        rows[5]["labels"][end - 1] = IGNORED


@fault("MSK404", "warning", of_log=True)
def no_end_trained_in_a_set_of_single_turns(rows: Rows, family: Family) -> None:
    rows[:] = [row for row in rows if len(runs(row["labels"])) == 1]
    for row in rows:
        row["labels"][runs(row["labels"])[0][1] - 1] = IGNORED


@fault("MSK402", "warning")
def the_middle_of_an_answer_left_out(rows: Rows, family: Family) -> int:
    at = next(
        at for at, row in enumerate(rows) if at and max(end - start for start, end in runs(row["labels"])) > 12
    )
    start, _ = max(runs(rows[at]["labels"]), key=lambda run: run[1] - run[0])
    rows[at]["labels"][start + 5 : start + 8] = [IGNORED] * 3
    return at


@fault("MSK402", "note")
def a_whole_answer_left_out(rows: Rows, family: Family) -> int:
    at = row_with(rows, 2)
    start, end = runs(rows[at]["labels"])[0]
    rows[at]["labels"][start:end] = [IGNORED] * (end - start)
    return at


@fault("TPL209", "warning", needs_bos=True, messages=True)
def two_bos_beside_messages(rows: Rows, family: Family) -> int:
    for name, value in (("input_ids", family.bos), ("attention_mask", 1), ("labels", IGNORED)):
        rows[6][name] = [value, *rows[6][name]]
    return 6


@fault("TPL209", "warning", needs_bos=True, of_log=True)
def two_bos_in_every_row(rows: Rows, family: Family) -> None:
    for row in rows:
        row.pop("messages", None)
        for name, value in (("input_ids", family.bos), ("attention_mask", 1), ("labels", IGNORED)):
            row[name] = [value, *row[name]]


@fault("MSK403", "warning", of_log=True)
def a_row_cut_before_its_answer(rows: Rows, family: Family) -> None:
    # Inside the question: no header of an answer is there.
    cut(rows[7], max(runs(rows[7]["labels"])[0][0] - 8, 3))


@fault("MSK404", "note", of_log=True)
def an_answer_cut(rows: Rows, family: Family) -> None:
    start, end = runs(rows[8]["labels"])[-1]
    cut(rows[8], (start + end) // 2)


@fault("REC002", "error")
def labels_of_another_row(rows: Rows, family: Family) -> int:
    row = rows[9]
    drawn = random.Random(1)
    row["labels"] = [label if label == IGNORED else drawn.randrange(1000, 2000) for label in row["labels"]]
    return 9


@fault("REC002", "error")
def labels_one_place_off(rows: Rows, family: Family) -> int:
    row = rows[9]
    ids = [*row["input_ids"][1:], row["input_ids"][0]]
    row["labels"] = [new if label != IGNORED else IGNORED for new, label in zip(ids, row["labels"], strict=True)]
    return 9


@fault("REC002", "error")
def labels_shorter_than_the_ids(rows: Rows, family: Family) -> int:
    rows[10]["labels"] = rows[10]["labels"][:-4]
    return 10


@fault("REC003", "error")
def an_id_outside_the_vocabulary(rows: Rows, family: Family) -> int:
    row = rows[11]
    start, _ = runs(row["labels"])[0]
    row["input_ids"][start + 1] = row["labels"][start + 1] = family.size + 1000
    return 11


@fault("MSK401", "error")
def padding_trained(rows: Rows, family: Family) -> int:
    row, pad = rows[12], min(family.ends)
    row["input_ids"] = [*row["input_ids"], *[pad] * 4]
    row["attention_mask"] = [*row["attention_mask"], *[0] * 4]
    row["labels"] = [*row["labels"], *[pad] * 4]
    return 12


@fault("TPL", "warning", messages=True)
def an_end_missing_from_the_ids(rows: Rows, family: Family) -> int:
    at = row_with(rows, 2)
    _, end = runs(rows[at]["labels"])[0]
    for name in ("input_ids", "attention_mask", "labels"):
        del rows[at][name][end - 1]
    return at


def cut(row: Row, length: int) -> None:
    for name in ("input_ids", "attention_mask", "labels"):
        row[name] = row[name][:length]


def planted(rows: Rows, family: Family, *, messages: bool) -> Iterator[tuple[Fault, Rows, int | None]]:
    """Each fault that a set can have, with the set that has it and the row."""
    for each in FAULTS:
        if (each.messages and not messages) or (each.needs_bos and family.bos is None):
            continue
        copy = [{name: list(value) for name, value in row.items()} for row in rows]
        at = each.plant(copy, family)
        yield each, copy, at
