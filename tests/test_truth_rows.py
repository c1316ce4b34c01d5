"""Training rows whose every token is known, through the command line; the oracle is held to rows made by hand."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.tables import stored
from tests.tiers import DEEP, examples, one_in, some
from tests.truth import judge
from tests.truth.beside import WRITERS, cases, run_beside
from tests.truth.conventions import CONVENTIONS, Convention, Observed, written
from tests.truth.decide import Slide, decide
from tests.truth.expect import after_repair, before_repair, of_log, of_scan
from tests.truth.forms import FORMS, Columns, Sample, read_rows, write_rows
from tests.truth.judge import FLAGS, Outcome, Written, judge_file, run
from tests.truth.observed import REACH, Fault, faulty, region
from tests.truth.odd import KINDS, Ran, differing, logs_beside, run_odd
from tests.truth.plan import Case, File, files
from tests.truth.source import MODELS, SHARED, Chat, Model, Turn
from tests.truth.table import lines
from tests.truth.tokenizers import NAMES, broken, pair
from tests.truth.tool import Finding, Said

TOY = Model("toy", start=1, end=2, other_end=3, newline=4, pad=0, user=(5,))

shared = pytest.mark.shared
no_rollouts = pytest.mark.skipif(
    not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"
)
deep = pytest.mark.skipif(not DEEP, reason="`make deep` judges fifty thousand rows")


def chat(*reasons: str, size: int = 8) -> Chat:
    """A conversation by hand: each turn samples so many tokens, the last of them its end where it stopped."""
    ids: list[int] = []
    truth: list[float | None] = []
    turns, users = [], []
    for number, reason in enumerate(reasons):
        question = [TOY.start, 5, TOY.newline, *range(20, 26), TOY.end, TOY.newline, TOY.start, 6, TOY.newline]
        users.append((len(ids) + 3, len(ids) + 9))
        ids, truth = ids + question, truth + [None] * len(question)
        start = len(ids)
        answer = [*range(30, 29 + size), TOY.end if reason == "stop" else 29]
        ids, truth = ids + answer, truth + [-1.0 - at / 64 for at in range(size)]
        end, ended = len(ids), reason == "stop"
        if number < len(reasons) - 1:
            behind = [TOY.newline] if ended else [TOY.end, TOY.newline]
            ids, truth = ids + behind, truth + [None] * len(behind)
        turns.append(Turn(start, end, end - 1 if ended else end, reason))
    return Chat(TOY, ids, truth, turns, users, [], None, "toy")


def case(
    fault: Fault,
    *reasons: str,
    form: str = "null",
    turn: int = 0,
    size: int = 3,
    convention: Convention = CONVENTIONS[0],
) -> Case:
    drawn = chat(*reasons)
    low = drawn.prompt if FORMS[form].response else 0
    truth, right = written(drawn, convention, low, random.Random(1))
    seen = faulty(truth, right, fault, low, size, turn)
    return Case(FORMS[form], fault, Sample(truth, seen, right, False, turn), convention)


def finding(code: str, cause: str, severity: str = "error", start: int = 0) -> Finding:
    return Finding(code, severity, cause, "", "row", start, ((0, 10_000),))


def named(name: str) -> Convention:
    return next(convention for convention in CONVENTIONS if convention.name == name)


LATE = Fault("logprobs", logprobs=1)
MASK_EARLY = Fault("mask", mask=-1)


@pytest.mark.parametrize("row", stored(__file__, "VERDICTS"), ids=str)
def test_what_a_row_can_tell_of_itself_is_what_all_slides_say(row: dict[str, Any]) -> None:
    how = {"form": row.get("form", "null"), "convention": named(row.get("convention", CONVENTIONS[0].name))}
    example = case(Fault(**row["fault"]), *row["reasons"].split(), **how)
    assert example.verdict == row["verdict"], example.decision


CROSSED = [
    (convention, form, reasons)
    for convention, form, reasons in product(CONVENTIONS, FORMS, (("stop", "length"), ("length", "stop", "stop")))
]


def test_a_right_row_may_be_right_by_every_convention() -> None:
    for convention, form, reasons in CROSSED:
        assert case(Fault("clean"), *reasons, form=form, convention=convention).decision.stands


def test_the_slide_that_was_planted_is_among_those_that_explain() -> None:
    tried = 0
    every = product(CROSSED, some((-3, 0, 2), 2), (-2, 0, 1), ("", "from", "only"))
    for (convention, form, reasons), by, to, shape in one_in(2, every):
        if (convention.recomputed and to) or not (by or to):
            continue
        example = case(Fault("both", by, to, shape=shape), *reasons, form=form, convention=convention, turn=1)
        decision = example.decision
        if decision.stands or not any(example.sample.right.mask):
            continue
        tried += 1
        if len(decision.slides) == 1:
            (slide,) = decision.slides
            assert (slide.mask, slide.logprobs) in {(by, to), (0, to)}, (example.decision, convention, form)
        assert decision.slides, (convention, form, reasons, by, to, shape)
    assert tried > examples(500, 1000)


def right_answers(talk: Chat, turn: Turn, first: int, out: int) -> Iterator[tuple[range, range]]:
    """What may be trained of an answer and have a logprob, by all that right writers do with its end."""
    ended = turn.last < len(talk.ids)
    ends = range(turn.last, turn.last + 1 + ended)
    for end, valued in product(ends, ends):
        if valued >= end:
            yield range(turn.start + first, end), range(turn.start + out, valued)
            yield range(0), range(turn.start + out, valued)
    yield range(0), range(0)


def slid_places(places: frozenset[int], by: int, within: range) -> frozenset[int]:
    """The places once those within a range have moved; what leaves the range is lost."""
    return frozenset(
        {at for at in places if at not in within} | {at + by for at in places if at in within} & {*within}
    )


@pytest.mark.parametrize("reasons", [("stop", "length"), ("length", "stop")])
def test_the_slides_that_explain_are_those_that_make_the_row_out_of_a_right_one(reasons: tuple[str, ...]) -> None:
    """Every right row of two answers, slid in every way: what it shows, and the slides that lead there."""
    talk = chat(*reasons)
    size, slides = len(talk.ids), range(-REACH, REACH + 1)
    windows = [{*range(turn.start - REACH, turn.last + 1 + REACH)} for turn in talk.turns]
    leading: dict[tuple[frozenset[int], frozenset[int]], set[tuple[tuple[int, int], ...]]] = defaultdict(set)
    for first, prefill in product(range(4), (0, 1)):
        for pairs in product(*(right_answers(talk, turn, first, first * prefill) for turn in talk.turns)):
            trained, valued = (frozenset(at for pair in pairs for at in pair[column]) for column in (0, 1))
            for (shape, turn), by, to in product((("", 0), ("only", 0), ("only", 1)), slides, slides):
                places = region(talk, Fault("both", shape=shape), 0, turn)
                shown = slid_places(trained, by, places), slid_places(valued, to, places)
                moved = [(by, to) if shape == "" or at == turn else (0, 0) for at in range(2)]
                outcome = tuple(pair for pair, here in zip(moved, windows, strict=True) if here & shown[0])
                leading[shown].add(outcome)
    decided = 0
    for shown, outcomes in random.Random(7).sample(sorted(leading.items(), key=repr), 400):
        mask = [at in shown[0] for at in range(size)]
        values = [-1.0 if at in shown[1] else None for at in range(size)]
        decision = decide(talk, Observed(mask, values), None, 0)
        if any(mask) and not decision.stands:
            decided += 1
            assert decision.outcomes == len(outcomes), (shown, outcomes, decision)
    assert decided > 100


def test_a_slide_of_some_answers_is_told_from_one_of_all() -> None:
    assert case(LATE, "stop", "stop", "stop").decision.slides == {Slide(0, 1)}
    for shape in ("from", "only"):
        slid = case(Fault("logprobs", logprobs=-1, shape=shape), "stop", "stop", "stop", turn=1)
        assert slid.decision.slides == {Slide(0, -1, shape, 1)}


def test_prefilled_tokens_were_not_sampled_and_those_left_out_were() -> None:
    start = chat("stop").turns[0].start
    for name, sampled in (("prefill:2", False), ("left-out:2", True)):
        example = case(Fault("clean"), "stop", convention=named(name))
        assert [value is not None for value in example.chat.truth[start : start + 3]] == [sampled, sampled, True]
        assert example.sample.seen.mask[start : start + 3] == [False, False, True]
        assert (example.sample.seen.values[start] is not None) == sampled


def test_a_stated_reason_decides_where_a_turn_was_cut() -> None:
    ended = case(Fault("both", 1, 1), "length", "length")
    assert ended.decision.stands, "the template's end token may have been sampled"
    assert ended.may_be_right
    sample = Sample(ended.chat, ended.sample.seen, ended.sample.right, False, 0, "list")
    assert not Case(ended.form, ended.fault, sample).may_be_right


def test_what_stands_beside_its_calls_is_compared_with_them() -> None:
    hidden = Fault("fill", what="middle")
    assert case(hidden, "stop", "length", form="zero").verdict == "open"
    assert case(hidden, "stop", "length", form="calls").verdict == "fault"
    assert case(Fault("clean"), "stop", form="calls", convention=named("left-out:3")).verdict == "clean"
    out = case(Fault("mask", mask=1), "stop", form="calls", convention=named("end kept"))
    assert out.verdict == "open"
    assert out.may_be_right, "one token fewer is trained, and an end token that was sampled"


RIGHT = {
    "slid": (LATE, [finding("LPR502", "shifted by +1")]),
    "clean": (Fault("clean"), [finding("TOK101", "merge", "note")]),
    "both": (Fault("both", 2, -1), [finding("MSK401", "slid by +2"), finding("LPR502", "shifted by -1")]),
    "inverted": (Fault("inverted"), [finding("MSK403", "inverted")]),
    "fill": (Fault("fill", what="middle"), [finding("LPR503", "not recorded")]),
}
WRONG = {
    "slid": [[], [finding("LPR502", "shifted by +1", "note")], [finding("LPR502", "shifted by +2")]],
    "clean": [[finding("MSK404", "sampled, not trained", "warning")], [finding("LPR502", "shifted by +1")]],
    "both": [RIGHT["both"][1][:1], RIGHT["both"][1][1:], [finding("MSK401", "slid by +1")]],
    "inverted": [[], [finding("MSK401", "template")]],
    "fill": [[], [finding("LPR505", "sentinel 1")]],
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_oracle_takes_right_words_and_no_wrong_ones(name: str) -> None:
    fault, right = RIGHT[name]
    example = case(fault, "stop", "stop", "length")
    assert example.verdict in ("fault", "clean")
    assert not list(of_scan(example, right))
    for wrong in WRONG[name]:
        assert list(of_scan(example, wrong)), wrong


def test_the_oracle_takes_a_slide_only_where_it_is() -> None:
    example = case(Fault("logprobs", logprobs=-1, shape="only"), "stop", "stop", "stop", turn=1)
    where = example.chat.turns[1].start
    assert not list(of_scan(example, [finding("LPR502", "shifted by -1", start=where)]))
    elsewhere = finding("LPR502", "shifted by -1", start=example.chat.turns[2].start)
    assert list(of_scan(example, [elsewhere])) == ["another slide named"]


def test_the_oracle_takes_no_loud_word_on_a_row_that_may_be_right() -> None:
    example = case(LATE, "length", form="zero")
    assert list(of_scan(example, [finding("LPR502", "shifted by +1")])) == ["loud on a row that may be right"]
    assert not list(of_scan(example, [finding("LPR502", "shifted by +1", "note")]))
    assert not list(of_scan(example, []))


def test_a_log_of_one_convention_takes_notes_alone() -> None:
    right, slid = case(Fault("clean"), "stop"), case(LATE, "stop", "stop")
    warning, error = (finding("MSK402", "left out", severity) for severity in ("warning", "error"))
    assert list(of_log([warning], [right], convention=True)) == ["loud on a log of one convention"]
    assert not list(of_log([warning], [right, slid], convention=False))
    assert list(of_log([error], [right, slid], convention=False)) == ["error on a log with right rows"]


def test_of_a_log_that_slid_no_other_slide_is_said() -> None:
    slid = [case(LATE, "stop", "stop"), case(LATE, "length")]
    assert not list(of_log([finding("LPR502", "shifted by +1")], slid, convention=True))
    for other in (finding("LPR502", "shifted by +2"), finding("MSK401", "slid by +1")):
        assert list(of_log([other], slid, convention=True)) == ["another slide named of a log"]


def test_the_oracle_tells_a_cure_from_harm() -> None:
    example = case(LATE, "stop", "stop", "length")
    ids = example.chat.ids
    cure = Columns(ids, list(example.sample.right.mask), list(example.sample.right.values))
    cure.mask[-1], cure.values[-1] = False, None  # its logprob had left the row
    assert not list(after_repair(example, cure, "default"))
    assert list(after_repair(example, before_repair(example), "default")) == ["decidable fault not cured"]
    assert not list(after_repair(example, before_repair(example), "mask")), "not every repair can cure everything"
    nothing = Columns(ids, [False] * len(ids), cure.values)
    assert list(after_repair(example, nothing, "default")) == ["cured by leaving out tokens that could be kept"]
    assert list(after_repair(example, Columns(ids[:-1], cure.mask[:-1], cure.values[:-1]), "mask"))
    early = Columns(ids, example.sample.seen.mask, [*example.sample.seen.values[2:], None, None])
    assert "repair trains a wrong pair that was not there" in list(after_repair(example, early, "realign"))


@pytest.mark.parametrize("convention", CONVENTIONS, ids=str)
def test_the_oracle_sees_every_change_of_a_right_row(convention: Convention) -> None:
    example = case(Fault("clean"), "stop", "stop", convention=convention)
    there = before_repair(example)
    assert not list(after_repair(example, there, "default"))
    at = there.mask.index(True)
    swapped = Columns(there.ids, there.mask, [*there.values[:at], there.values[at + 1], *there.values[at + 1 :]])
    assert "repair harmed: a trained token that was right is wrong" in list(after_repair(example, swapped, "mask"))
    more = Columns(there.ids, [True, *there.mask[1:]], there.values)
    assert "repair trains a wrong pair that was not there" in list(after_repair(example, more, "mask"))
    fewer = Columns(there.ids, [on and place != at for place, on in enumerate(there.mask)], there.values)
    assert list(after_repair(example, fewer, "mask")) == ["repair touched a right row"]
    slid = faulty(example.chat, example.sample.seen, Fault("both", 1, 1), 0, 3, 0)
    assert list(after_repair(example, Columns(there.ids, slid.mask, slid.values), "default"))


def test_no_repair_may_choose_between_slides_nor_touch_what_may_be_right() -> None:
    several = case(Fault("logprobs", logprobs=2), "stop", "length", form="zero", convention=named("end filled"))
    assert several.verdict == "open fault"
    assert several.decision.outcomes > 1
    right = Columns(several.chat.ids, several.sample.right.mask, several.sample.right.values)
    assert list(after_repair(several, right, "default")) == ["repair touched a fault that several slides explain"]
    hidden = case(LATE, "length", form="zero")
    moved = Columns(hidden.chat.ids, hidden.sample.right.mask, hidden.sample.right.values)
    moved.mask[-1] = False
    assert "repair touched a row that may be right" in list(after_repair(hidden, moved, "default"))


def wrote(*rows: Columns, touched: bool = False) -> Written:
    samples = {("log", number, 0): columns for number, columns in enumerate(rows)}
    return Written(samples, {("log", 0)} if touched else set(), {"log"})


def judged(example: Case, findings: list[Finding], written: dict[str, Written], again: Said | None) -> Outcome:
    outcome, report = Outcome(), Said(defaultdict(list), defaultdict(list), 1, {})
    report.samples["log", 0, 0] = findings
    judge_file(File("log", "toy", example.form, [[example]]), report, written, again, outcome)
    return outcome


def test_a_repair_that_silences_a_fault_and_one_that_does_less_are_seen() -> None:
    example = case(LATE, "stop", "stop", "length")
    loud = [finding("LPR502", "shifted by +1")]
    right = example.sample.right
    right.mask[-1] = False
    good, as_it_was = wrote(Columns(example.chat.ids, right.mask, right.values)), wrote(before_repair(example))
    fewer = Columns(example.chat.ids, list(example.sample.seen.mask), before_repair(example).values)
    fewer.mask[example.chat.turns[0].start] = False
    quiet = Said(defaultdict(list), defaultdict(list), 0, {})
    outcome = judged(example, loud, {"default": wrote(fewer)}, quiet)
    assert "repair removed the last witness of a fault" in outcome.violations
    outcome = judged(example, loud, {"default": good, "warning": as_it_was}, quiet)
    assert "--fail-on warning repaired less" in outcome.violations
    assert not judged(example, loud, {"default": good, "warning": good}, quiet).violations


def test_a_byte_that_changes_in_a_right_row_is_seen_and_a_row_that_is_lost() -> None:
    example = case(Fault("clean"), "stop")
    there = before_repair(example)
    assert not judged(example, [], {"default": wrote(there)}, None).violations
    for repaired, what in (
        (wrote(there, touched=True), "repair changed a byte of a right row (default)"),
        (wrote(), "repair lost the row (default)"),
    ):
        assert list(judged(example, [], {"default": repaired}, None).violations) == [what]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_back_what_it_wrote(form: str, tmp_path: Path) -> None:
    cases = [
        case(fault, *reasons, form=form)
        for fault, *reasons in ((LATE, "stop", "length"), (MASK_EARLY, "length"), (Fault("clean"), "stop"))
    ][: FORMS[form].group]
    row = FORMS[form].write([example.sample for example in cases], FORMS[form].fill)
    for name in ("log.jsonl", "log.parquet"):
        write_rows(tmp_path / name, [row])
        (again,) = read_rows(tmp_path / name)
        for example, columns in zip(cases, FORMS[form].read(again), strict=True):
            assert columns.ids == example.chat.ids
            assert not list(after_repair(example, columns, "mask"))
            assert columns.mask == example.sample.seen.mask


def test_calls_beside_a_row_hold_what_was_sampled() -> None:
    example = case(Fault("clean"), "stop", "length", form="calls", convention=named("prefill:2"))
    row = FORMS["calls"].write([example.sample], 0.0)
    for call, turn in zip(row["calls"], example.chat.turns, strict=True):
        assert len(call["prompt_token_ids"]) == turn.start + 2
        assert call["prompt_token_ids"] + call["generation_token_ids"] == example.chat.ids[: turn.end]
        assert call["logprobs"] == example.chat.truth[turn.start + 2 : turn.end]


def check_plan(plan: list[File], folder: Path) -> None:
    outcome = run(plan, folder, list(FLAGS))
    assert not outcome.violations, "\n".join(lines(outcome, 3))


@shared
@no_rollouts
def test_a_plan_has_every_convention_and_fault_and_every_row_is_decided() -> None:
    judged_cases = [
        example for file in files(examples(500, 9000), list(FORMS), seed=3) for _, _, example in file.cases
    ]
    assert {example.convention.name for example in judged_cases} >= {convention.name for convention in CONVENTIONS}
    assert {example.form.name for example in judged_cases} == set(FORMS)
    assert {example.verdict for example in judged_cases} == {"clean", "open", "fault", "open fault"}
    slid = {(example.fault.kind, example.fault.shape) for example in judged_cases if example.fault.slid}
    assert slid == set(product(("mask", "logprobs", "both"), ("", "from", "only")))
    assert {len(example.chat.turns) for example in judged_cases} == set(range(1, 11))
    for example in judged_cases:
        fault, slides = example.fault, example.decision.slides
        if fault.slid and not example.form.calls and example.verdict == "fault":
            (slide,) = slides
            assert slide.logprobs == fault.logprobs
            assert slide.mask in (fault.mask, 0)


@shared
@no_rollouts
def test_some_rows_of_every_form_are_judged_and_repaired_as_the_truth_has_it(tmp_path: Path) -> None:
    models = some(["qwen2.5-coder", "gemma-3"], 1)
    check_plan(files(examples(120, 600), list(FORMS), seed=11, models=list(models)), tmp_path)


@shared
@no_rollouts
@deep
@pytest.mark.parametrize("part", range(20))
def test_fifty_thousand_rows_are_judged_and_repaired_as_the_truth_has_it(part: int, tmp_path: Path) -> None:
    # Other rows each day; `TITO_AUDIT_TRUTH_SEED` draws those of another one again.
    seed = int(os.environ.get("TITO_AUDIT_TRUTH_SEED") or date.today().toordinal())
    print(f"TITO_AUDIT_TRUTH_SEED={seed}")
    check_plan(files(2500, list(FORMS), seed=100 * seed + part), tmp_path)


class Perfect:
    """A tool that knows the truth: the judge in place of the judged."""

    def __init__(self, plan: list[File]) -> None:
        self.files = {file.name: file for file in plan}

    def scan(self, logs: list[Path], tokenizer: str, out: Path) -> Said:
        samples: dict[tuple[str, int, int], list[Finding]] = defaultdict(list)
        for log in logs:
            for row, item, example in self.files[log.name].cases:
                samples[log.name, row, item] = self.findings(example)
        return Said(samples, defaultdict(list), 0, {"findings": []})

    def findings(self, example: Case) -> list[Finding]:
        fault, start = example.fault, example.chat.turns[example.sample.turn].start
        if example.verdict == "open" and fault.kind == "fill":
            return [finding("LPR505", "run of zeros", "warning")]
        if example.verdict not in ("fault", "open fault"):
            return [finding("MSK402", "undecided", "note")]
        if fault.slid and example.verdict == "fault":
            named = [("MSK401", f"slid by {fault.mask:+d}", fault.mask)]
            named += [("LPR502", f"shifted by {fault.logprobs:+d}", fault.logprobs)]
            return [finding(code, cause, start=start) for code, cause, by in named if by]
        codes = {"inverted": ("MSK403", "inverted"), "roles": ("MSK401", "user")}
        return [
            finding(*codes.get(fault.kind, ("LPR505" if example.form.fill == 1.0 else "LPR503", "not recorded")))
        ]

    def repair(self, logs: list[Path], tokenizer: str, out: Path, *flags: str) -> None:
        out.mkdir(parents=True)
        for log in logs:
            form = self.files[log.name].form
            rows = [
                form.write([self.repaired(each) for each in row], form.fill) for row in self.files[log.name].rows
            ]
            write_rows(out / log.name, rows)

    def repaired(self, example: Case) -> Sample:
        return replace(example.sample, seen=example.sample.right) if example.verdict == "fault" else example.sample


class Silent(Perfect):
    """A tool that finds nothing and repairs nothing."""

    def findings(self, example: Case) -> list[Finding]:
        return []

    def repaired(self, example: Case) -> Sample:
        return example.sample


class Eager(Perfect):
    """A tool that takes whatever may be a fault for one, and every row for slid."""

    def findings(self, example: Case) -> list[Finding]:
        return [finding("LPR502", "shifted by +1")]

    def repaired(self, example: Case) -> Sample:
        moved = faulty(example.chat, example.sample.seen, Fault("logprobs", logprobs=-1), example.low, 3, 0)
        return replace(example.sample, seen=moved)


MISSED = {"decidable fault passed as clean", "a fault, if not which, passed as clean", "decidable fault not cured"}
ACCUSED = {
    "another slide named",
    "decidable fault not named",
    "loud on a right row",
    "loud on a row that may be right",
    "repair changed a byte of a right row",
    "repair touched a right row",
    "repair touched a row that may be right",
    "repair touched a fault that several slides explain",
    "repair harmed: a trained token that was right is wrong",
    "decidable fault not cured",
}


@cache
def judged_plan() -> list[File]:
    return files(examples(250, 3000), list(FORMS), seed=2)


@shared
@no_rollouts
@pytest.mark.parametrize(("tool", "wrong"), [(Perfect, set()), (Silent, MISSED), (Eager, ACCUSED)])
def test_the_judge_tells_a_perfect_tool_from_one_that_misses_or_accuses(
    tool: type[Perfect], wrong: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = judged_plan()
    monkeypatch.setattr(judge, "scan", tool(plan).scan)
    monkeypatch.setattr(judge, "repair", tool(plan).repair)
    outcome = run(plan, tmp_path, list(FLAGS))
    violations = {what.split(" (")[0] for what in outcome.violations}
    if tool is Perfect:
        assert not violations, "\n".join(lines(outcome, 3))
    else:
        assert violations >= wrong
    if tool is Silent:
        assert violations <= {*wrong, "8 zeros or more inside and nothing said"}


@shared
@no_rollouts
def test_rows_change_nothing_of_one_another(tmp_path: Path) -> None:
    models = some(["smollm2", "qwen2.5-coder", "gemma-3"], 1)
    flags = some(list(FLAGS), 1)
    forms = list(FORMS) if DEEP else ["zero", "verl"]
    logs = list(logs_beside(len(KINDS) * examples(1, 8), forms, seed=2, models=models))
    outcome = run_odd(logs, tmp_path, flags)
    assert not outcome.violations, "\n".join(lines(outcome, 3))


@shared
@no_rollouts
def test_what_one_row_changes_of_another_is_seen() -> None:
    (log,) = logs_beside(1, ["null"], seed=5, models=["smollm2"])
    place = {"file": log.name, "where": "row", "item": 0}
    accused = {**place, "code": "MSK402", "severity": "warning", "cause": "left out", "row": (log.at + 1) % 7}

    def ran(rows: int, *findings: dict[str, object], line: str = "") -> Ran:
        report = Said(defaultdict(list), defaultdict(list), 0, {"findings": findings})
        return Ran(report, {(log.name, "default"): [line] * rows})

    assert not list(differing(log, "without", ran(6), ran(7)))
    (violation,) = differing(log, "without", ran(6), ran(7, accused))
    assert violation.what == "an odd row changes what is said of a right one"
    assert not list(differing(log, "only", ran(1), ran(7, accused))), "it is another row"
    assert len(list(differing(log, "without", ran(6), ran(7, line="{}")))) == 6
    (violation,) = differing(log, "only", ran(1), ran(7, {**accused, "row": log.at}))
    assert violation.what == "right rows change what is said of an odd one"


SOME = (("smollm2", "smollm2"), ("smollm2", "qwen2.5-coder"))


@shared
@pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason="no shared/tokenizers beside the checkout")
@pytest.mark.parametrize(
    ("log", "read_with"), [(a, b) for a in NAMES for b in NAMES] if DEEP else SOME, ids="-with-".join
)
def test_a_log_read_with_another_tokenizer_says_so_first(log: str, read_with: str, tmp_path: Path) -> None:
    assert not list(broken(pair(log, read_with, tmp_path)))


# What stands beside tokens, in every form of the frameworks


@shared
@no_rollouts
@pytest.mark.parametrize("seed", some((11, 12, 13, 14), 1))
def test_right_columns_are_clean_and_faults_are_found(tmp_path: Path, seed: int) -> None:
    outcome = run_beside(examples(150, 2500), tmp_path, seed, MODELS[0])
    assert {what: [str(each) for each in many[:3]] for what, many in outcome.violations.items()} == {}


@shared
@no_rollouts
def test_every_writer_has_right_rows_and_faults() -> None:
    drawn = {(case.writer, bool(case.code)) for case in cases(examples(300, 600), 1, MODELS[0])}
    assert drawn == {(name, fault) for name in (*WRITERS, "pairs") for fault in (False, True)}
