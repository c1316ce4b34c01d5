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


class TestSlides:
    @pytest.mark.parametrize(("places", "fill"), crossed((-3, -1, 1, 2), FILLS))
    def test_a_mask_that_slid_is_named_and_moved_and_the_logprobs_stay(
        self, tmp_path: Path, places: int, fill: float | None
    ) -> None:
        truth = row(CUT, fill=fill)
        log = written(tmp_path / "log.jsonl", [slid(truth, mask=places, fill=fill)])
        code, listed = findings(log)
        assert code == 1
        assert {cause for _, cause in loud(listed) if _.startswith("MSK")} == {f"slid by {places:+d}"}
        assert not any(name == "LPR502" for name, _ in loud(listed))
        for flags in ((), ("--fail-on", "warning"), ("--with", "realign")):
            (after,) = repaired(log, *flags)
            assert wrong_pairs(after, truth) == 0
            assert after["logprobs"] == truth["logprobs"]
            assert sum(after["loss_mask"]) >= sum(truth["loss_mask"]) - 1

    @pytest.mark.parametrize(("places", "fill"), crossed((-2, -1, 1, 3), FILLS))
    def test_logprobs_that_slid_are_named_and_moved_and_the_mask_stays(
        self, tmp_path: Path, places: int, fill: float | None
    ) -> None:
        truth = row(CUT, fill=fill)
        log = written(tmp_path / "log.jsonl", [slid(truth, logprobs=places, fill=fill)])
        _, listed = findings(log)
        assert loud(listed) == {("LPR502", f"shifted by {places:+d}")}
        (after,) = repaired(log)
        assert wrong_pairs(after, truth) == 0
        assert sum(after["loss_mask"]) >= sum(truth["loss_mask"]) - max(places, 0)

    def test_both_are_named_and_both_go_back(self, tmp_path: Path) -> None:
        truth = row(CUT)
        log = written(tmp_path / "log.jsonl", [slid(truth, mask=1, logprobs=-2)])
        _, listed = findings(log)
        assert {("LPR502", "shifted by -2"), ("MSK401", "slid by +1")} <= loud(listed)
        (after,) = repaired(log)
        assert wrong_pairs(after, truth) == 0

    def test_a_clean_row_is_clean_and_stays_to_the_byte(self, tmp_path: Path) -> None:
        for fill in FILLS:
            log = written(tmp_path / "log.jsonl", [row(CUT, fill=fill), row(CUT[1:2], fill=fill, tail=False)])
            assert findings(log) == (0, [])
            assert repaired(log) == [json.loads(line) for line in log.read_text().splitlines()]


class TestUndecided:
    def test_a_gap_that_may_be_all_that_shows_a_shift_is_said_and_never_masked(self, tmp_path: Path) -> None:
        """One turn, null outside the loss, the row ends with the answer: the value that fell off is not missed."""
        truth = row([("the sun is red and hot", False)], fill=None, tail=False)
        truth = {name: values[:-1] for name, values in truth.items()}  # no end token was appended
        log = written(tmp_path / "log.jsonl", [slid(truth, logprobs=1, fill=None)])
        code, listed = findings(log)
        assert code == 1
        assert loud(listed) == {("LPR502", "undecided")}
        for flags in (
            (),
            ("--fail-on", "warning"),
            ("--with", "mask"),
            ("--with", "realign"),
            ("--with", "mask,realign"),
        ):
            assert repaired(log, *flags) == [slid(truth, logprobs=1, fill=None)]

    def test_without_roles_nothing_says_which_of_mask_and_logprobs_is_off(self, tmp_path: Path) -> None:
        log = written(tmp_path / "log.jsonl", [slid(row(CUT, fill=None), logprobs=1, fill=None)])
        code, out, _ = run("scan", log, "-f", "json")
        assert code == 1
        assert [
            (finding["code"], finding["cause"], finding["repair"]) for finding in json.loads(out)["findings"]
        ] == [("LPR502", "undecided", None)]
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


class TestMasks:
    def test_a_mask_of_the_questions_is_set_right_by_where_the_logprobs_lie(self, tmp_path: Path) -> None:
        truth = row(CUT)
        questions = [0] * len(truth["loss_mask"])
        users = [at for at, token in enumerate(truth["token_ids"]) if token == truth["token_ids"][0]][::2]
        for at in users:
            questions[at + 4 : at + 7] = [1] * 3
        log = written(tmp_path / "log.jsonl", [{**truth, "loss_mask": questions}])
        assert ("MSK401", "user") in loud(findings(log)[1])
        (after,) = repaired(log)
        assert after["loss_mask"] == truth["loss_mask"]

    def test_trained_padding_is_one_finding_and_leaves_the_loss(self, tmp_path: Path) -> None:
        truth, pads = row(CUT), 7
        padded = {
            "token_ids": truth["token_ids"] + [2002] * pads,
            "loss_mask": truth["loss_mask"] + [1] * pads,
            "logprobs": truth["logprobs"] + [0.0] * pads,
            "attention_mask": [1] * len(truth["token_ids"]) + [0] * pads,
        }
        log = written(tmp_path / "log.jsonl", [padded])
        assert loud(findings(log)[1]) == {("MSK401", "hidden by the attention mask")}
        (after,) = repaired(log)
        assert after == {**padded, "loss_mask": truth["loss_mask"] + [0] * pads}

    def test_what_is_asked_for_beside_errors_keeps_no_error_from_its_repair(self, tmp_path: Path) -> None:
        """A turn end that was left out of the loss is a warning, and its row has a trained question too."""
        truth = row(CUT)
        mask = list(truth["loss_mask"])
        mask[4:6] = [1, 1]
        mask[max(at for at, own in enumerate(truth["loss_mask"]) if own)] = 0
        log = written(tmp_path / "log.jsonl", [{**truth, "loss_mask": mask}])
        default, stricter = repaired(log), repaired(log, "--fail-on", "warning")
        assert wrong_pairs(default[0], truth) == wrong_pairs(stricter[0], truth) == 0


class TestZeros:
    def test_genuine_logprobs_that_end_in_certain_tokens_are_no_finding(self, tmp_path: Path) -> None:
        truth = row(CUT)
        own = [at for at, sampled in enumerate(truth["loss_mask"]) if sampled]
        truth["logprobs"][own[-1]] = truth["logprobs"][own[-2]] = 0.0
        assert findings(written(tmp_path / "log.jsonl", [truth])) == (0, [])

    def test_a_row_whose_logprobs_are_all_zero_fails(self, tmp_path: Path) -> None:
        truth = row(CUT)
        code, listed = findings(
            written(tmp_path / "log.jsonl", [{**truth, "logprobs": [0.0] * len(truth["logprobs"])}])
        )
        assert code == 1
        assert loud(listed) == {("LPR506", "all zero")}


def over_the_response(whole: Row) -> Row:
    """The row with columns over what follows its first prompt, as TRL logs it."""
    ids, begins = whole["token_ids"], whole["loss_mask"].index(1)
    columns = {"completion_mask": whole["loss_mask"][begins:], "logprobs": whole["logprobs"][begins:]}
    return {"prompt_ids": ids[:begins], "completion_ids": ids[begins:], **columns}


def test_logprobs_over_the_response_that_slid_early_are_moved_back(tmp_path: Path) -> None:
    """Also where tokens outside the loss have logprobs, so that the format knows of no fill."""
    right = over_the_response(row(CUT))
    slid = {"completion_mask": late(right["completion_mask"], 1, 0), "logprobs": late(right["logprobs"], -2, 0.0)}
    log = written(tmp_path / "log.jsonl", [{**right, **slid}])
    assert {("LPR502", "shifted by -2"), ("MSK401", "slid by +1")} <= loud(findings(log)[1])
    (after,) = repaired(log)
    assert after["completion_mask"] == [0, 0, *right["completion_mask"][2:]]
    assert after["logprobs"] == [0, 0, *right["logprobs"][2:]]


def test_a_certain_value_that_slid_among_nulls_is_not_their_fill(tmp_path: Path) -> None:
    right = row(CUT, fill=None)
    begins, end = (right["loss_mask"].index(on, right["loss_mask"].index(1)) for on in (1, 0))
    right["logprobs"][begins] = 0.0
    answer = slice(begins - 1, end)
    slid = [*right["logprobs"]]
    slid[answer] = late(slid[answer], -1, None)
    log = written(tmp_path / "log.jsonl", [{**right, "logprobs": slid}])
    assert ("LPR502", "shifted by -1") in loud(findings(log)[1])
    assert repaired(log) == [right]


def test_a_mask_that_ran_over_the_end_of_its_row_is_moved_back_without_the_end(tmp_path: Path) -> None:
    right = row([("the sun is red and hot", True), ("a cat and a dog", True)], fill=None)
    right["logprobs"][right["loss_mask"].index(1)] = 0.0
    log = written(
        tmp_path / "log.jsonl", [{**slid(right, mask=3, logprobs=2, fill=None), "finish_reason": "stop"}]
    )
    assert {("LPR502", "shifted by +2"), ("MSK401", "slid by +3")} <= loud(findings(log)[1])
    (after,) = repaired(log)
    assert wrong_pairs(after, right) == 0
    assert sum(after["loss_mask"]) == sum(right["loss_mask"]) - 1
