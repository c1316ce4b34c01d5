"""Training rows whose every token is known, through the command line; the oracle is held to rows made by hand."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.tiers import DEEP, examples, some
from tests.truth.decide import explained
from tests.truth.expect import after_repair, before_repair, of_scan
from tests.truth.forms import FORMS, Columns, Sample, read_rows, write_rows
from tests.truth.judge import FLAGS, Outcome, judge_file, run
from tests.truth.observed import Fault, clean, faulty
from tests.truth.plan import Case, File, files
from tests.truth.source import SHARED, Chat, Model, Turn
from tests.truth.table import lines
from tests.truth.tokenizers import NAMES, broken, pair
from tests.truth.tool import Finding, Said

TOY = Model("toy", start=1, end=2, other_end=3, newline=4, pad=0, user=(5,))

shared = pytest.mark.shared
no_rollouts = pytest.mark.skipif(
    not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"
)
deep = pytest.mark.skipif(not DEEP, reason="`make deep` judges ten thousand rows")


def chat(*reasons: str, size: int = 8) -> Chat:
    """A conversation by hand: each turn samples so many tokens, the last of them its end where it stopped."""
    ids: list[int] = []
    truth: list[float | None] = []
    turns, users = [], []
    for number, reason in enumerate(reasons):
        asked = [TOY.start, 5, TOY.newline, *range(20, 26), TOY.end, TOY.newline, TOY.start, 6, TOY.newline]
        users.append((len(ids) + 3, len(ids) + 9))
        ids, truth = ids + asked, truth + [None] * len(asked)
        start = len(ids)
        said = [*range(30, 29 + size), TOY.end if reason == "stop" else 29]
        ids, truth = ids + said, truth + [-1.0 - at / 64 for at in range(size)]
        end, ended = len(ids), reason == "stop"
        if number < len(reasons) - 1:
            behind = [TOY.newline] if ended else [TOY.end, TOY.newline]
            ids, truth = ids + behind, truth + [None] * len(behind)
        turns.append(Turn(start, end, end - 1 if ended else end, reason))
    return Chat(TOY, ids, truth, turns, users, [], None, "toy")


def case(fault: Fault, *reasons: str, form: str = "null", turn: int = 0, size: int = 3) -> Case:
    one = chat(*reasons)
    low = one.prompt if FORMS[form].response else 0
    seen = faulty(one, clean(one), fault, low, size, turn)
    return Case(FORMS[form], fault, Sample(one, seen, messages=False))


def found(code: str, cause: str, severity: str = "error") -> Finding:
    return Finding(code, severity, cause, "", "row", 0)


LATE = Fault("logprobs", logprobs=1)
MASK_EARLY = Fault("mask", mask=-1)


@pytest.mark.parametrize(
    ("verdict", "one"),
    [
        ("clean", case(Fault("clean"), "stop", "length")),
        ("clean", case(Fault("clean"), "length", "length", form="zero")),
        ("fault", case(LATE, "stop", "length")),
        ("fault", case(LATE, "length", "length", form="zero")),
        ("fault", case(Fault("logprobs", logprobs=-1), "length", form="zero")),
        # What leaves the end of the row is lost: one turn late may be one whose first logprobs were never there.
        ("open fault", case(LATE, "length")),
        ("open", case(LATE, "length", form="zero")),
        ("fault", case(MASK_EARLY, "length")),
        # A mask that lost an end may as well leave tokens out.
        ("open fault", case(Fault("mask", mask=2), "length")),
        ("open fault", case(MASK_EARLY, "stop", form="slime")),
        ("fault", case(MASK_EARLY, "length", "stop", form="slime")),
        # The column begins where the turn does: a place early is a turn whose end was not sampled.
        ("open", case(Fault("both", -1, -1), "stop", form="slime")),
        ("fault", case(Fault("both", 2, -1), "length", "stop", form="one")),
        ("fault", case(Fault("inverted"), "stop", "stop")),
        ("fault", case(Fault("roles", what="user"), "stop", "length")),
        ("fault", case(Fault("fill", what="middle"), "stop", "length")),
        ("fault", case(Fault("fill", what="head"), "stop", "length")),
        ("clean", case(Fault("fill", what="middle"), "stop", "length", form="zero")),
        ("open fault", case(Fault("fill", what="head"), "length")),
    ],
)
def test_what_a_row_can_tell_of_itself_is_what_all_slides_say(verdict: str, one: Case) -> None:
    assert one.verdict == verdict


def test_a_stated_reason_decides_where_a_turn_was_cut() -> None:
    one = case(Fault("both", -1, -1), "stop", form="slime")
    right = clean(one.chat)
    told = explained(one.chat, one.sample.seen, 0.0, one.low, reasons=True)
    assert (0, 0) not in told.slides
    assert (-1, -1) in told.slides
    assert explained(one.chat, right, 0.0, one.low, reasons=True).slides == {(0, 0)}


RIGHT = {
    "slid": (LATE, [found("LPR502", "shifted by +1")]),
    "clean": (Fault("clean"), [found("TOK101", "merge", "note")]),
    "both": (Fault("both", 2, -1), [found("MSK401", "slid by +2"), found("LPR502", "shifted by -1")]),
    "inverted": (Fault("inverted"), [found("MSK403", "inverted")]),
    "fill": (Fault("fill", what="middle"), [found("LPR503", "not recorded")]),
}
WRONG = {
    "slid": [[], [found("LPR502", "shifted by +1", "note")], [found("LPR502", "shifted by +2")]],
    "clean": [[found("MSK404", "sampled, not trained", "warning")], [found("LPR502", "shifted by +1")]],
    "both": [RIGHT["both"][1][:1], RIGHT["both"][1][1:], [found("MSK401", "slid by +1")]],
    "inverted": [[], [found("MSK401", "template")]],
    "fill": [[], [found("LPR505", "sentinel 1")]],
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_oracle_takes_right_words_and_no_wrong_ones(name: str) -> None:
    fault, right = RIGHT[name]
    one = case(fault, "stop", "length")
    assert not list(of_scan(one, right, whole=False))
    for wrong in WRONG[name]:
        assert list(of_scan(one, wrong, whole=False)), wrong


def test_the_oracle_takes_no_loud_word_on_a_row_that_may_be_clean() -> None:
    one = case(LATE, "length", form="zero")
    right = [found("LPR502", "shifted by +1")]
    assert list(of_scan(one, right, whole=False)) == ["loud on a row that may be clean"]
    assert not list(of_scan(one, right, whole=True)), "all rows of a log can tell what one cannot"
    assert not list(of_scan(one, [], whole=False))


def test_the_oracle_tells_a_cure_from_harm() -> None:
    one = case(LATE, "stop", "length")
    right = clean(one.chat)
    cure = Columns(one.chat.ids, list(right.mask), list(right.values))
    for at, value in enumerate(one.chat.truth):
        if value == one.chat.truth[one.chat.turns[-1].end - 1] and at == len(cure.ids) - 1:
            cure.mask[at], cure.values[at] = False, None  # its logprob had left the row
    assert not list(after_repair(one, cure, "default"))
    assert list(after_repair(one, before_repair(one), "default")) == ["decidable fault not cured"]
    assert not list(after_repair(one, before_repair(one), "mask")), "not every repair can cure everything"
    nothing = Columns(cure.ids, [False] * len(cure.ids), cure.values)
    assert list(after_repair(one, nothing, "default")) == ["cured by leaving out tokens that could be kept"]
    assert list(after_repair(one, Columns(cure.ids[:-1], cure.mask[:-1], cure.values[:-1]), "mask"))
    early = Columns(one.chat.ids, one.sample.seen.mask, [*one.sample.seen.values[2:], None, None])
    assert "repair trains a wrong pair that was not there" in list(after_repair(one, early, "realign"))


def test_the_oracle_sees_one_logprob_of_another_token_in_a_clean_row() -> None:
    one = case(Fault("clean"), "stop", "length")
    there = before_repair(one)
    assert not list(after_repair(one, there, "default"))
    at = one.chat.turns[0].start
    swapped = Columns(there.ids, there.mask, [*there.values[:at], there.values[at + 1], *there.values[at + 1 :]])
    assert "repair harmed: a trained token that was right is wrong" in list(after_repair(one, swapped, "mask"))
    more = Columns(there.ids, [True, *there.mask[1:]], there.values)
    assert "repair trains a wrong pair that was not there" in list(after_repair(one, more, "mask"))


def test_a_repair_that_silences_a_fault_and_one_that_does_less_are_seen() -> None:
    one = case(LATE, "stop", "length")
    right = clean(one.chat)
    right.mask[-1] = False
    place, loud = ("log", 0, 0), [found("LPR502", "shifted by +1")]
    file = File("log", "toy", one.form, [[one]])
    said = Said(defaultdict(list, {place: loud}), defaultdict(list), 1, {})
    quiet = Said(defaultdict(list), defaultdict(list), 0, {})
    as_it_was, good = {place: before_repair(one)}, {place: Columns(one.chat.ids, right.mask, right.values)}
    outcome = Outcome()
    judge_file(file, said, {"default": as_it_was}, quiet, outcome)
    assert "repair removed the last witness of a fault" in outcome.violations
    outcome = Outcome()
    judge_file(file, said, {"default": good, "warning": as_it_was}, quiet, outcome)
    assert "--fail-on warning repaired less" in outcome.violations
    outcome = Outcome()
    judge_file(file, said, {"default": good, "warning": good}, quiet, outcome)
    assert not outcome.violations


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_back_what_it_wrote(form: str, tmp_path: Path) -> None:
    cases = [
        case(fault, *reasons, form=form)
        for fault, *reasons in ((LATE, "stop", "length"), (MASK_EARLY, "length"), (Fault("clean"), "stop"))
    ][: FORMS[form].group]
    row = FORMS[form].write([one.sample for one in cases], FORMS[form].fill)
    for name in ("log.jsonl", "log.parquet"):
        write_rows(tmp_path / name, [row])
        (again,) = read_rows(tmp_path / name)
        for one, columns in zip(cases, FORMS[form].read(again), strict=True):
            assert columns.ids == one.chat.ids
            assert not list(after_repair(one, columns, "mask"))
            assert columns.mask == one.sample.seen.mask


def held(plan: list[File], folder: Path) -> None:
    outcome = run(plan, folder, list(FLAGS))
    assert not outcome.violations, "\n".join(lines(outcome, 3))


@shared
@no_rollouts
def test_some_rows_of_every_form_are_judged_and_repaired_as_the_truth_has_it(tmp_path: Path) -> None:
    models = some(["qwen2.5-coder", "gemma-3"], 1)
    held(files(examples(40, 200), list(FORMS), seed=11, whole=0.2, models=list(models)), tmp_path)


@shared
@no_rollouts
@deep
def test_ten_thousand_rows_are_judged_and_repaired_as_the_truth_has_it(tmp_path: Path) -> None:
    held(files(10_000, list(FORMS), seed=1), tmp_path)


SOME = (("smollm2", "smollm2"), ("smollm2", "qwen3"))


@shared
@pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason="no shared/tokenizers beside the checkout")
@pytest.mark.parametrize(
    ("log", "read_with"), [(a, b) for a in NAMES for b in NAMES] if DEEP else SOME, ids="-with-".join
)
def test_a_log_read_with_another_tokenizer_says_so_first(log: str, read_with: str, tmp_path: Path) -> None:
    assert not list(broken(pair(log, read_with, tmp_path)))
