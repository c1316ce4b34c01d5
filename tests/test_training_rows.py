"""Training rows without calls, through the command line: what is said of them and what is touched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import toy
from tests.command import run, written
from tests.tiers import crossed

TOY = toy.TOKENIZERS / "toy_bpe"
WORDS = ("four", "five", "nine", "two", "one", "ten", "six", "red", "blue", "green", "sun", "moon", "tree", "sea")
Row = dict[str, Any]
Found = set[tuple[str, str]]


def row(turns: Sequence[tuple[str, bool]], *, seed: int = 0, fill: float | None = 0.0, tail: bool = True) -> Row:
    """A conversation of answers that stopped (True) or were cut by length (False), every token known."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float | None] = []
    tokenizer = toy.toy_tokenizer()

    def add(text: str, sampled: bool) -> None:
        for token in tokenizer.encode(text).tolist():
            ids.append(token)
            mask.append(int(sampled))
            logprobs.append(-0.05 - ((seed + len(ids)) * 37 % 90) / 100 if sampled else fill)

    for number, (answer, stopped) in enumerate(turns):
        add(("\n" if number else "") + "<|im_start|>user\nhow many?<|im_end|>\n<|im_start|>assistant\n", False)
        add(answer, True)
        add("<|im_end|>", stopped)
    if tail:
        add("\n", False)
    return {"token_ids": ids, "loss_mask": mask, "logprobs": logprobs}


def late(values: list[Any], places: int, fill: Any) -> list[Any]:
    """The values so many places later; what leaves an end is lost."""
    if places >= 0:
        return [fill] * places + values[: len(values) - places]
    return values[-places:] + [fill] * -places


def slid(truth: Row, *, mask: int = 0, logprobs: int = 0, fill: float | None = 0.0) -> Row:
    return {
        **truth,
        "loss_mask": late(truth["loss_mask"], mask, 0),
        "logprobs": late(truth["logprobs"], logprobs, fill),
    }


def findings(log: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    code, out, err = run("scan", log, "-t", TOY, "-f", "json", *more)
    assert code in (0, 1), err
    return code, json.loads(out)["findings"]


def loud(listed: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(finding["code"], finding["cause"]) for finding in listed if finding["severity"] != "note"}


def repaired(log: Path, *more: str) -> list[Row]:
    out = log.with_suffix(".out.jsonl")
    code, _, err = run("repair", log, "-o", out, "-t", TOY, "--force", "--no-provenance", *more)
    assert code in (0, 1), err
    return [json.loads(line) for line in out.read_text().splitlines()]


def wrong_pairs(after: Row, truth: Row) -> int:
    """Trained tokens that were not sampled or carry another token's logprob."""
    lines = zip(after["loss_mask"], after["logprobs"], truth["loss_mask"], truth["logprobs"], strict=True)
    return sum(bool(trained) and (not own or value != right) for trained, value, own, right in lines)


CUT = [("the sun is red and hot", True), ("one two three four", False), ("a cat and a dog", True)]
FILLS = (0.0, None, 1.0)
BESIDE: dict[float | None, Found] = {
    0.0: set(),
    None: {("LPR503", "not recorded")},
    1.0: {("LPR505", "sentinel 1")},
}
"""What is found too, where a mask slid over tokens whose logprobs are the fill."""


def without(whole: Row, *places: int, fill: float | None = 0.0) -> Row:
    """The row without mask and logprobs at these places."""
    columns = (("loss_mask", 0), ("logprobs", fill))
    return {
        **whole,
        **{name: [off if at in places else v for at, v in enumerate(whole[name])] for name, off in columns},
    }


def masked(whole: Row, *places: int) -> Row:
    """The row that trains these places."""
    return {**whole, "loss_mask": [int(at in places) for at in range(len(whole["loss_mask"]))]}


def moved(mask: int = 0, logprobs: int = 0) -> Found:
    """What is found where they slid."""
    named = {(code, f"slid by {mask:+d}") for code in ("MSK401", "MSK402") if mask}
    return named | ({("LPR502", f"shifted by {logprobs:+d}")} if logprobs else set())


def certain(whole: Row, *places: int) -> Row:
    """The row with tokens that were certain."""
    return {**whole, "logprobs": [0.0 if at in places else v for at, v in enumerate(whole["logprobs"])]}


def of_response(mask: list[int], logprobs: list[float]) -> Row:
    """A row with columns over what follows its first prompt, as TRL logs it."""
    ids = CLEAN["token_ids"]
    return {
        "prompt_ids": ids[:BEGINS],
        "completion_ids": ids[BEGINS:],
        "completion_mask": mask,
        "logprobs": logprobs,
    }


CLEAN, AMONG_NULLS = row(CUT), row(CUT, fill=None)
BEGINS, LENGTH = CLEAN["loss_mask"].index(1), len(CLEAN["token_ids"])
SAMPLED = [at for at, own in enumerate(CLEAN["loss_mask"]) if own]
STOPPED = {**certain(row([CUT[0], CUT[2]], fill=None), BEGINS), "finish_reason": "stop"}
FIRST = slice(BEGINS - 1, CLEAN["loss_mask"].index(0, BEGINS))
"""The first answer, and the token before it."""
MASK, LOGPROBS = CLEAN["loss_mask"][BEGINS:], CLEAN["logprobs"][BEGINS:]
PADS = 7
PADDED = {
    "token_ids": CLEAN["token_ids"] + [2002] * PADS,
    "loss_mask": CLEAN["loss_mask"] + [0] * PADS,
    "logprobs": CLEAN["logprobs"] + [0.0] * PADS,
    "attention_mask": [1] * LENGTH + [0] * PADS,
}
NULLS = certain(AMONG_NULLS, BEGINS)["logprobs"]
FAULTS: dict[str, tuple[Row, Found, Row]] = {
    **{
        f"a mask by {n:+d} beside {fill}": (
            slid(row(CUT, fill=fill), mask=n),
            moved(n) | BESIDE[fill],
            row(CUT, fill=fill),
        )
        for n, fill in crossed((-3, -1, 1, 2), FILLS)
    },
    **{  # what falls off the end is lost
        f"logprobs by {n:+d} beside {fill}": (
            slid(row(CUT, fill=fill), logprobs=n, fill=fill),
            moved(logprobs=n),
            without(row(CUT, fill=fill), *range(LENGTH - max(n, 1), LENGTH), fill=fill),
        )
        for n, fill in crossed((-2, -1, 1, 3), FILLS)
    },
    "both": (slid(CLEAN, mask=1, logprobs=-2), moved(1, -2), CLEAN),
    # Tokens outside the loss have logprobs too, so that the format knows of no fill.
    "both over the response": (
        of_response(late(MASK, 1, 0), late(LOGPROBS, -2, 0.0)),
        moved(1, -2),
        of_response([0, 0, *MASK[2:]], [0, 0, *LOGPROBS[2:]]),
    ),
    "a certain value among nulls, which is not their fill": (
        {**AMONG_NULLS, "logprobs": [*NULLS[: FIRST.start], *late(NULLS[FIRST], -1, None), *NULLS[FIRST.stop :]]},
        moved(logprobs=-1),
        {**AMONG_NULLS, "logprobs": NULLS},
    ),
    "a mask that ran over the end": (
        slid(STOPPED, mask=3, logprobs=2, fill=None),
        moved(3, 2),
        without(STOPPED, len(STOPPED["loss_mask"]) - 2, fill=None),
    ),
    "a mask of the questions": (
        masked(CLEAN, *(4, 5, 6), *(26, 27, 28), *(46, 47, 48)),
        {("MSK401", "user")},
        CLEAN,
    ),
    "trained padding": (
        {**PADDED, "loss_mask": CLEAN["loss_mask"] + [1] * PADS},
        {("MSK401", "hidden by the attention mask")},
        PADDED,
    ),
    # The end is a warning: what is asked for beside errors keeps no error from its repair.
    "a trained question, and an end that is not": (
        masked(CLEAN, 4, 5, *SAMPLED[:-1]),
        {("MSK401", "user"), ("MSK404", "sampled, not trained")},
        masked(CLEAN, *SAMPLED[:-1]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_put_right_and_nothing_else_is_touched(fault: str, tmp_path: Path) -> None:
    broken, found, right = FAULTS[fault]
    log = written(tmp_path / "log.jsonl", [broken])
    code, listed = findings(log)
    assert (code, loud(listed)) == (1, found)
    slides = any(cause.startswith(("slid", "shifted")) for _, cause in found)
    for flags in ((), ("--fail-on", "warning"), *[("--with", "realign")] * slides):
        assert repaired(log, *flags) == [right], flags


def test_a_clean_row_is_clean_and_stays_to_the_byte(tmp_path: Path) -> None:
    clean = [[row(CUT, fill=fill), row(CUT[1:2], fill=fill, tail=False)] for fill in FILLS]
    for rows in (*clean, [certain(CLEAN, *SAMPLED[-2:])]):
        log = written(tmp_path / "log.jsonl", rows)
        assert findings(log) == (0, [])
        assert repaired(log) == rows


def test_a_row_whose_logprobs_are_all_zero_fails(tmp_path: Path) -> None:
    truth = row(CUT)
    log = written(tmp_path / "log.jsonl", [{**truth, "logprobs": [0.0] * len(truth["logprobs"])}])
    code, listed = findings(log)
    assert (code, loud(listed)) == (1, {("LPR506", "all zero")})


class TestUndecided:
    def test_a_gap_that_may_be_all_that_shows_a_shift_is_said_and_never_masked(self, tmp_path: Path) -> None:
        """One turn, null outside the loss, the row ends with the answer: the value that fell off is not missed."""
        truth = row([("the sun is red and hot", False)], fill=None, tail=False)
        truth = {name: values[:-1] for name, values in truth.items()}  # no end token was appended
        log = written(tmp_path / "log.jsonl", [slid(truth, logprobs=1, fill=None)])
        code, listed = findings(log)
        assert (code, loud(listed)) == (1, {("LPR502", "undecided")})
        asked = ((), ("--fail-on", "warning"), *(("--with", name) for name in ("mask", "realign", "mask,realign")))
        for flags in asked:
            assert repaired(log, *flags) == [slid(truth, logprobs=1, fill=None)]

    def test_without_roles_nothing_says_which_of_mask_and_logprobs_is_off(self, tmp_path: Path) -> None:
        log = written(tmp_path / "log.jsonl", [slid(row(CUT, fill=None), logprobs=1, fill=None)])
        code, out, _ = run("scan", log, "-f", "json")
        (finding,) = json.loads(out)["findings"]
        assert (code, finding["code"], finding["cause"], finding["repair"]) == (1, "LPR502", "undecided", None)
        after = tmp_path / "after.jsonl"
        run("repair", log, "-o", after)
        assert after.read_text() == log.read_text()


class TestTheLogAsWitness:
    def rows(self, places: int) -> list[Row]:
        """Rows that end with their one answer, so that none shows a shift alone; each begins with another word."""
        out = []
        for number, word in enumerate(WORDS):
            right = row([(f"{word} and so on and on and on and on and on and on", False)], seed=number, tail=False)
            out.append(slid({name: values[:-1] for name, values in right.items()}, logprobs=places))
        return out

    def test_what_no_row_shows_alone_is_counted_and_stays(self, tmp_path: Path) -> None:
        log = written(tmp_path / "log.jsonl", self.rows(1))
        for jobs in ("1", "2"):
            code, listed = findings(log, "--jobs", jobs)
            assert code == 0
            assert [
                (finding["code"], finding["cause"], finding["where"], finding["severity"]) for finding in listed
            ] == [("LPR502", "undecided", "log", "note")]
            assert "11 different first tokens of answers have the fill as their logprob" in listed[0]["message"]
        assert "14 rows could not be judged" in run("scan", log, "-t", TOY)[1]
        assert repaired(log, "--fail-on", "warning") == self.rows(1)

    def test_a_slide_that_the_run_states_is_put_right_in_all_rows_that_allow_it(self, tmp_path: Path) -> None:
        right = row(CUT)
        log, truth = written(tmp_path / "log.jsonl", [*self.rows(1), right]), self.rows(0)
        code, listed = findings(log, "--assume", "logprobs=+1")
        assert code == 1
        assert {finding["cause"] for finding in listed if finding["where"] == "row"} == {"shifted by +1"}
        assert [finding["message"] for finding in listed if finding["where"] == "log"] == [
            "row 14 contradicts --assume and is left as logged"
        ]
        *after, last = repaired(log, "--assume", "logprobs=+1")
        assert last == right
        assert all(wrong_pairs(mended, right) == 0 for mended, right in zip(after, truth, strict=True))
        assert all(
            sum(mended["loss_mask"]) == sum(right["loss_mask"]) - 1
            for mended, right in zip(after, truth, strict=True)
        )
        assert findings(written(tmp_path / "again.jsonl", after))[0] == 0

    def test_one_proven_row_changes_no_other_and_fails_the_repair(self, tmp_path: Path) -> None:
        odd = slid(row(CUT), logprobs=1)
        log = written(tmp_path / "log.jsonl", [odd, *self.rows(1)])
        _, listed = findings(log)
        assert [finding["row"] for finding in listed if finding["severity"] == "error"] == [0]
        assert [finding["cause"] for finding in listed if finding["where"] == "log"] == [
            "may have the fault of other rows"
        ]
        out = tmp_path / "out.jsonl"
        code, page, _ = run("repair", log, "-o", out, "-t", TOY, "--no-provenance")
        assert code == 1
        assert "14 rows may have the same fault; nothing in them decides it" in page
        assert "state it with --assume logprobs=+1 if it is so" in page
        after = [json.loads(line) for line in out.read_text().splitlines()]
        assert wrong_pairs(after[0], row(CUT)) == 0
        assert after[1:] == self.rows(1)

    def test_one_such_row_alone_is_clean_and_stays(self, tmp_path: Path) -> None:
        log = written(tmp_path / "log.jsonl", self.rows(1)[:1])
        assert findings(log) == (0, [])
        assert repaired(log, "--fail-on", "warning") == self.rows(1)[:1]

    def test_the_same_rows_as_they_should_be_are_clean(self, tmp_path: Path) -> None:
        assert findings(written(tmp_path / "log.jsonl", self.rows(0))) == (0, [])
