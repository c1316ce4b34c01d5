"""The benchmark: the same log from the same seed, engines that find what was put into it, sums that are right.

No test says how long anything may take.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from pyarrow import parquet

from benchmarks import batch, engines, floors, joining, logs, measure, ordinary, planted, stages, studies
from benchmarks.__main__ import main
from benchmarks.budget import Budget, budget_section
from benchmarks.call_logs import call_log
from benchmarks.calls import recorded_ids
from benchmarks.corpus import Corpus, Factory, Shape
from benchmarks.faults import CATALOGUE
from benchmarks.goals import Reached, goals_section
from benchmarks.measure import Measured
from benchmarks.plan import QUICK
from benchmarks.planter import planted_log
from benchmarks.reference import said
from benchmarks.results import busy, comparison_section, growth_section
from benchmarks.stages import ROW_STAGES
from benchmarks.studies import LINEAR, SCAN, Comparison, Growth, exponent
from benchmarks.users import UserRuns, users_section
from tests import toy
from tests.ready import program
from tests.tiers import DEEP, crossed, examples, some
from tests.world import TOY
from tito_audit.rules import all_rules
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings

SHAPE = Shape(turns=(2, 5), words=30, faulty=0.4)
TOKENS = examples(6_000, 12_000)
ONE = Measured(1000, 10, 1, seconds=0.5, wall=1.0, cpu=0.8, process_mb=50.0, all_mb=70.0)


deep = pytest.mark.skipif(not DEEP, reason="a process of a benchmark; in `make deep`")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Factory(TOY, tmp_path_factory.mktemp("corpus")).corpus(SHAPE, TOKENS)


def agrees(measured: Measured, corpus: Corpus) -> bool:
    """Whether an engine read every token and row, and found those rows that were changed."""
    read = (measured.tokens, measured.rows, measured.different)
    return read == (corpus.tokens, corpus.rows, len(corpus.faulty))


def rows_of(corpus: Corpus) -> list[dict]:
    return [orjson.loads(line) for line in Path(corpus.jsonl).read_bytes().splitlines()]


def test_a_corpus_has_the_tokens_and_the_lengths_that_were_asked_for(corpus: Corpus) -> None:
    rows = rows_of(corpus)
    assert len(rows) == corpus.rows
    assert sum(len(row["token_ids"]) for row in rows) == corpus.tokens >= TOKENS
    lengths = {sum(message["role"] == "assistant" for message in row["messages"]) for row in rows}
    assert lengths == {2, 5} == set(map(int, corpus.prompt_tokens))
    assert 0 < len(corpus.faulty) < corpus.rows


def test_the_parquet_file_holds_the_same_rows(corpus: Corpus) -> None:
    table = parquet.read_table(corpus.parquet).to_pylist()
    for row, other in zip(rows_of(corpus), table, strict=True):
        assert row["token_ids"] == other["token_ids"]
        assert row["loss_mask"] == other["loss_mask"]
        assert np.allclose(row["logprobs"], other["logprobs"])
        assert row["messages"] == orjson.loads(other["messages"])


def test_the_same_seed_gives_the_same_corpus_and_another_seed_another(corpus: Corpus, tmp_path: Path) -> None:
    factory = Factory(TOY, tmp_path)
    shorter = factory.corpus(SHAPE, 3000)
    assert Path(corpus.jsonl).read_bytes().startswith(Path(shorter.jsonl).read_bytes())
    other = factory.corpus(replace(SHAPE, seed=1), 3000)
    assert rows_of(other)[0]["messages"] != rows_of(shorter)[0]["messages"]
    assert factory.corpus(SHAPE, 3000) == shorter, "a corpus that is there is taken as it is"


def test_each_length_of_conversation_gets_its_share_of_the_turns() -> None:
    shape = Shape(turns=(2, 10, 40, 128))
    turns = [shape.turns_of(number) for number in range(81)]
    sums = {length: length * turns.count(length) for length in shape.turns}
    assert set(sums) == set(turns)
    assert max(sums.values()) - min(sums.values()) <= 10


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_linear_engine_finds_the_rows_that_were_changed(corpus: Corpus, kind: str) -> None:
    measured = engines.linear(Path(getattr(corpus, kind)), TOY)
    assert agrees(measured, corpus), measured
    assert measured.seconds > 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_floor_reads_every_token(corpus: Corpus, kind: str) -> None:
    measured = engines.floor(Path(getattr(corpus, kind)))
    assert (measured.tokens, measured.rows) == (corpus.tokens, corpus.rows)


def test_a_part_of_a_log_ends_with_a_row(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PART_BYTES", 5000)
    measured = engines.linear(Path(corpus.jsonl), TOY)
    assert (measured.tokens, measured.different) == (corpus.tokens, len(corpus.faulty))
    first = engines.linear(Path(corpus.jsonl), TOY, tokens=4000)
    assert 4000 <= first.tokens < corpus.tokens
    assert first.different == sum(row < first.rows for row in corpus.faulty)


def test_a_scan_in_a_process_of_its_own_finds_the_rows_that_were_changed(corpus: Corpus) -> None:
    measured = measure.scan(corpus.jsonl, TOY, 1, watch=True)
    assert agrees(measured, corpus), measured
    assert 0 < measured.seconds < measured.wall
    assert measured.cpu > 0
    assert 20 < measured.process_mb < 4000
    if Path("/proc/self/smaps_rollup").exists():
        assert measured.all_mb is not None
        assert measured.all_mb > 10


@deep
def test_two_processes_find_what_one_finds(corpus: Corpus) -> None:
    measured, _ = measure.engine("linear", corpus.parquet, TOY, workers=2)
    assert agrees(measured, corpus), measured


@deep
def test_the_frameworks_way_is_sampled_for_every_length(corpus: Corpus) -> None:
    for workers in some((2, 1), 1):
        measured, out = measure.engine("per-turn", corpus.jsonl, TOY, workers=workers, tokens=500)
        assert set(out["encoded"]) == set(out["spent"]) == {"2", "5"}
        assert all(tokens >= 250 * workers for tokens in out["encoded"].values()), "as much for each process"
        assert 0 < measured.rows < corpus.rows


@deep
def test_the_prompts_that_are_counted_are_those_that_the_frameworks_way_encodes(
    corpus: Corpus, tmp_path: Path
) -> None:
    clean = Factory(TOY, tmp_path).corpus(replace(SHAPE, turns=(2,), faulty=0.0), 1000)
    measured, out = measure.engine("per-turn", clean.jsonl, TOY, tokens=10**9)
    assert out["encoded"] == clean.prompt_tokens
    assert (measured.rows, measured.different) == (clean.rows, 0)


def test_what_is_measured_keeps_its_byte_code_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    printed, *_ = measure.run([sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"])
    assert printed.split() == [b"False"]


def test_an_engine_that_fails_is_no_fast_engine(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code"):
        measure.run([sys.executable, "-c", "raise SystemExit(3)"])


def test_engines_take_turns_and_the_round_ahead_is_the_watched_one() -> None:
    order = []

    def runner(name: str):
        return lambda watch: order.append((name, watch)) or ONE

    measured = measure.alternately({"a": runner("a"), "b": runner("b")}, 2, lambda line: None)
    assert order == [("a", True), ("b", True)] + [("a", False), ("b", False)] * 2
    assert {name: len(runs) for name, runs in measured.items()} == {"a": 3, "b": 3}


def test_an_exponent_is_that_of_the_power_law() -> None:
    sizes = [1.0, 3.0, 10.0, 50.0]
    assert exponent(sizes, [0.2 * size for size in sizes]) == pytest.approx(1)
    assert exponent(sizes, [0.2 * size**2 for size in sizes]) == pytest.approx(2)


def test_ratios_are_taken_within_a_round_and_without_the_round_ahead(corpus: Corpus) -> None:
    def taking(*seconds: float) -> list[Measured]:
        return [replace(ONE, seconds=value) for value in seconds]

    runs = {(SCAN, 1): taking(9.0, 1.0, 2.0, 4.0), (LINEAR, 1): taking(1.0, 10.0, 30.0, 80.0)}
    compared = Comparison("jsonl", corpus, runs, ())
    assert compared.ratios((LINEAR, 1)) == pytest.approx([10, 15, 20])
    text = comparison_section(compared)
    assert "x15.00 [10.00 to 20.00]" in text
    assert "50 / 70" in text
    assert "Disagreement" not in text
    assert "Disagreement: b says 3." in comparison_section(replace(compared, disagreements=("b says 3",)))


def test_growth_is_written_with_its_exponent() -> None:
    scans = tuple([replace(ONE, tokens=size, seconds=size / 1000)] for size in (1000, 2000, 8000))
    assert "Seconds grow as tokens^1.00." in growth_section(Growth("tokens", (1000, 2000, 8000), 1, scans))
    same = tuple([replace(ONE, seconds=seconds)] for seconds in (1.0, 1.0))
    slow = tuple([replace(ONE, seconds=seconds)] for seconds in (1.0, 10.0))
    text = growth_section(Growth("turns", (2, 20), 1, same, slow))
    assert "Seconds a token grow as turns^0.00; the frameworks' way as turns^1.00." in text


def test_a_busy_machine_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert busy() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    assert "busy" in str(busy())


def test_a_plan_can_be_made_smaller() -> None:
    plan = QUICK.up_to(300_000)
    assert plan.sizes == (250_000, 300_000)
    assert plan.tokens == plan.linear_tokens == plan.turn_tokens == 300_000


def test_a_run_writes_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out" / "RESULTS.md"
    wanted = ["sizes", "cold", *(["ordinary", "compare", "budget", "users", "lengths"] if DEEP else [])]
    arguments = ["--quick", "--max-tokens", "4000", "--studies", *wanted, "--tokenizer", str(TOY)]
    monkeypatch.setattr(measure, "knows_jobs", lambda: DEEP)
    if not DEEP:  # each of these starts a process
        first, start, words = studies.Studies._first, measure.run, [sys.executable, "-m", "tito_audit"]
        monkeypatch.setattr(
            measure,
            "run",
            lambda command, *how, **more: start(
                [*program(), *command[3:]] if list(command[:3]) == words else command, *how, **more
            ),
        )
        built = studies.built
        monkeypatch.setattr(studies, "built", lambda *values, jobs: built(*values, jobs=1))
        monkeypatch.setattr(studies, "_STARTS", {studies.LOADING: studies._STARTS[studies.LOADING]})
        monkeypatch.setattr(studies.Studies, "_first", lambda *values: {"JSONL": first(*values)["JSONL"]})
    main([*arguments, "--scratch", str(tmp_path / "scratch"), "--output", str(output)])
    text = output.read_text(encoding="utf-8")
    assert text == capsys.readouterr().out.removesuffix("\n")
    more = ("## Where the time goes", "## Logs as users have them", "## JSONL: ") if DEEP else ()
    titles = ("# How fast a scan is", "## Goals", "## Growth with the size of the log", "## Ten rows", *more)
    for title in titles:
        assert title in text
    assert str(tmp_path) not in text


# Ordinary logs


@pytest.mark.parametrize("log", ["clean", "drift", "rows", "bare rows", "rows of 300 ids"])
def test_an_ordinary_log_costs_what_its_rows_cost(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordinary, "_SCANS", examples(1, 3))
    rows = examples(8, 16)
    cost = ordinary.cost_of(log, str(TOY), rows, tmp_path)
    assert cost.log == log
    assert cost.ids > 100
    assert cost.calls > 100
    assert cost.encode > 0
    assert (cost.findings > 0) is (log == "drift")
    lines = (tmp_path / f"{log}-{rows}.jsonl").read_text().splitlines()
    assert len(lines) == rows
    assert ('"messages"' in lines[0]) is (log != "bare rows")


def test_the_table_of_ordinary_logs_compares_each_with_one_encode() -> None:
    stages = {stage: 0.0001 * (1 + place) for place, stage in enumerate(ROW_STAGES)}
    costs = [ordinary.Cost("drift", 1_071, s, 0.002, 2_479.4, 5.0, stages, 0.0003) for s in (0.001, 0.002, 0.004)]
    text = ordinary.ordinary_section({"drift": costs})
    assert (
        "| drift | 1,071 | 5.0 | 2.00 [1.00 to 4.00] | 2.00 [2.00 to 2.00] | 1.00 [0.50 to 2.00] | 2,479 |" in text
    )
    assert "| drift | 100 | 200 | 300 | 400 | 500 | 600 | 700 | 300 |" in text
    assert "No real tokenizer" in ordinary.ordinary_section({})


# Where the time goes


def test_every_function_that_is_timed_is_there() -> None:
    for names in stages.STAGES.values():
        for name in names:
            owner, last, function = stages.named(name)
            assert callable(function), name
            assert vars(owner)[last] is function


@pytest.mark.parametrize("name", ["tito_audit.run.rows:LogGroup.gone", "tito_audit.run.gone:read", "gone:read"])
def test_a_function_that_is_gone_is_named(name: str) -> None:
    with pytest.raises(stages.MissingName, match=f"{name} is timed by benchmarks/stages.py but does not exist"):
        stages.named(name)


def test_a_stage_does_not_count_what_it_calls_of_other_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(stages, "process_time", lambda: float(next(now)))
    clock = stages.Clock()  # at 0
    inner = clock.around("encoding", lambda: None)
    clock.around("comparing", lambda: [inner(), inner()])()  # 1, (2, 3), (4, 5), 6
    rows = clock.around_rows("reading", lambda: iter("ab"))()  # the third step ends it
    assert list(rows) == ["a", "b"]
    clock.switch(stages.REST)
    assert clock.spent["encoding"] == 2
    assert clock.spent["comparing"] == 3
    assert clock.spent["reading"] == 3
    assert sum(clock.spent.values()) == next(now) - 1


@deep
def test_the_stages_of_a_scan_add_up(corpus: Corpus, tmp_path: Path) -> None:
    cache = {"TITO_AUDIT_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.stages", corpus.jsonl, str(TOY)]
    marks = stages.Marks(**orjson.loads(measure.run([*command, "--clocks"], variables=cache)[0]))
    assert 0 < marks.tokens < corpus.tokens
    assert marks.rows == corpus.rows - 1
    assert set(marks.stages) == set(stages.ROW_STAGES)
    assert sum(marks.stages.values()) + marks.faulty == pytest.approx(marks.scan, rel=0.2, abs=0.05)
    assert marks.stages["encoding"] > 0
    begun = stages.Marks(**orjson.loads(measure.run([*command, "--start"], variables=cache)[0]))
    assert begun.start > 0
    assert begun.scan == begun.rows == 0


def test_a_floor_is_what_a_library_takes_for_the_same_work(corpus: Corpus) -> None:
    rows = list(floors._rows(Path(corpus.jsonl)))
    render, encode = floors._renderer(TOY), floors._encoder(TOY)
    assert render is not None
    assert encode is not None
    different = [n for n, row in enumerate(rows) if encode(render(row)).tolist() != row["token_ids"].tolist()]
    assert different == corpus.faulty
    assert set(floors.floors(Path(corpus.jsonl), TOY)) == {"reading", "rendering", "encoding", "comparing"}
    assert set(floors.floors(Path(corpus.parquet), TOY)) == {"reading"}


def test_a_budget_shows_each_stage_beside_the_least_it_could_take() -> None:
    spent = dict.fromkeys(stages.ROW_STAGES, 1.0)
    marks = stages.Marks(tokens=10**9, rows=5, start=0.4, scan=8.0, stages=spent, faulty=2.0)
    budget = Budget("training rows, JSONL", (marks,), (replace(marks, start=1.5),), (marks,), ({"reading": 0.5},))
    text = budget_section([budget])
    assert "| reading | 1.0 | 0.5 |" in text
    assert "| faulty rows | 2.0 |  |" in text
    assert "| a scan without clocks | 8.0 |  |" in text
    assert (budget.rate, budget.start_up, budget.times_reading) == (10**9 / 8, (0.4, 1.5), 16)
    goals = goals_section(Reached(budgets=[budget]))
    assert "| training rows, JSONL, one process | at least 6 M tokens a CPU second | 125 M tokens" in goals
    assert "| start-up with a full cache | at most 0.5 CPU s | 0.4 CPU s | yes |" in goals
    assert "| start-up with an empty cache | at most 1.2 CPU s | 1.5 CPU s | **no** |" in goals
    assert goals_section(Reached()) == ""


# Logs as users have them


def test_logs_of_users_hold_the_rows_of_the_corpus(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    user_logs = list(logs._of_corpus("rows", Path(corpus.jsonl), Path(corpus.parquet), str(TOY)))
    assert len(user_logs) == 6
    expected = findings_of(corpus.jsonl)
    assert expected
    for log in user_logs:
        assert findings_of(log.path) == expected, log.name
        assert engines.floor(Path(log.path)).rows == log.rows == corpus.rows


def findings_of(log: str, tokenizer: Path = TOY) -> list[tuple[int, str, int]]:
    results = scan_rollouts(log, Settings(tokenizer=str(tokenizer), jobs=1))
    return [(finding.place.row, finding.code, finding.hit.start) for row in results for finding in row.findings]


def test_a_copy_of_a_recorded_row_is_right_where_the_row_was(tmp_path: Path) -> None:
    """Digits and the first question differ; what a scan says of a copy does not."""
    tokenizer = toy.toy_tokenizer()
    question, answer = "What is 17 and 23 ?", "17 and 23 is 40"

    def text(opened: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(opened)]

    head = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    call = {"prompt_token_ids": text(head), "generation_token_ids": text(f"{answer}<|im_end|>"), "text": answer}
    row = {"id": "r", "messages": messages, "calls": [call]}
    varied = logs.Varied(str(TOY))
    copies = [varied.copy(row, number) for number in range(4)]
    assert len({copy["messages"][0]["content"] for copy in copies}) == 4
    assert all(copy["messages"][0]["content"].endswith(f" [{n}]") for n, copy in enumerate(copies))
    path = tmp_path / "copies.jsonl"
    path.write_bytes(b"".join(orjson.dumps(copy) + b"\n" for copy in copies))
    assert findings_of(str(path)) == []


@pytest.mark.skipif(not list(logs.real_logs()), reason="no recorded rollouts are beside this checkout")
def test_copies_of_real_rollouts_have_the_findings_of_the_originals(tmp_path: Path) -> None:
    name, model, files = next(logs.real_logs())
    few, lines = tmp_path / "few.jsonl", [line for file in files for line in logs._lines(file)]
    few.write_bytes(b"".join(some(lines, 12)))
    once = sum(recorded_ids(orjson.loads(line)["calls"]) for line in few.read_bytes().splitlines())
    log = logs._repeated(name, model, [few], tmp_path, examples(2 * once, 600_000))
    rows = [orjson.loads(line)["id"].rpartition("-")[2] for line in Path(log.path).read_bytes().splitlines()]
    findings = findings_of(log.path, Path(log.tokenizer))
    codes = [Counter(code for row, code, _ in findings if rows[row] == copy) for copy in dict.fromkeys(rows)]
    assert len(codes) > 1
    assert codes[0]
    assert all(counted == codes[0] for counted in codes)


def test_users_are_told_what_was_not_measured_and_what_repeats() -> None:
    log = logs.UserLog("rollouts", "log.jsonl", "toy", 10, note="3 copies of 4 rows")
    runs = {("scan", 1): [ONE], ("scan, empty cache", 1): [replace(ONE, wall=2.5)], ("reading", 1): [ONE]}
    runs["linear", 1] = [replace(ONE, seconds=10.0)]
    text = users_section([UserRuns(log, runs)], "nothing recorded")
    assert "| rollouts | 1,000 | 1 | 1.00 | 2.50 | 0.50 | 2,000 | 800.00 | 100% | x20.0 |  |" in text
    assert "- rollouts: 3 copies of 4 rows." in text
    assert "- nothing recorded" in text


# Planted faults


def test_every_rule_has_a_fault_that_is_planted() -> None:
    planted = {code for fault in CATALOGUE.values() for code in fault.codes}
    of_a_log = {"REC007", "REC011", "TPL213"}
    assert {rule.code for rule in all_rules()} - planted - of_a_log == {
        "REC009",
        "REC012",
        "REC016",
        "LPR507",
        "TPL210",
    }, (
        "REC009 compares rows with each other, REC012 and LPR507 a row with its calls, REC016 sides of a pair, "
        "TPL210 dates that no template writes"
    )


@pytest.mark.parametrize(("what", "kind"), crossed(["rows", "calls"], ["jsonl", "parquet"]))
def test_every_fault_can_be_planted_and_is_told(what: str, kind: str, tmp_path: Path) -> None:
    form = f"{what}.{kind}"
    log = tmp_path / form
    truth = planted_log(
        log,
        str(TOY),
        tokens=examples(150_000 if what == "rows" else 200_000, 300_000),
        rate=1.0,
        seed=(1, 2),
        jobs=1,
    )
    piece = planted.Piece(0, form)
    fast = list(said(scan_rollouts(log, Settings(tokenizer=str(TOY), jobs=1))))
    planted._judge(fast, truth, piece)
    possible = {fault.name for fault in CATALOGUE.values() if (fault.calls if "calls" in form else fault.rows)}
    refused = {"a token that is two today", "an image opened twice"}  # no such tokens
    refused |= {"reasoning that is inserted"}  # no such template
    assert possible - set(piece.planted) <= refused
    assert piece.false == []
    assert piece.told == piece.planted
    named = sum(piece.named.values()) / sum(piece.planted.values())
    assert named > 0.9


def test_a_log_of_another_vocabulary_is_said_to_be_one(tmp_path: Path) -> None:
    order = planted.Order(str(TOY), str(tmp_path), 600_000, 0.5, 0, 1)
    piece = planted.piece(order, planted.FORMS.index("foreign.jsonl"))
    assert piece.tokens < 100_000
    assert piece.told == piece.planted == {planted.FOREIGN: 1}
    assert not piece.bad


def test_a_run_goes_on_where_it_was_and_leaves_no_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not DEEP:  # each piece starts a process
        monkeypatch.setattr(planted, "ProcessPoolExecutor", lambda number, _: ThreadPoolExecutor(number))
    arguments = ["--tokens", "60000", "--rate", "0.5", "--jobs", "1", "--tokenizer", str(TOY)]
    arguments += ["--scratch", str(tmp_path)]
    assert planted.main(arguments) == 0
    first = capsys.readouterr().out
    assert "0 pieces differ, 0 planted faults were missed, 0 findings on rows that are right" in first
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}
    assert planted.main(arguments) == 0
    again = capsys.readouterr().out
    assert again.count(", done before") == first.count("piece ") >= 2
    assert again.splitlines()[-1] == first.splitlines()[-1]


def test_a_difference_between_the_engines_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.reference.by_reference", lambda *_: iter([("another",)]))
    order = planted.Order(str(TOY), str(tmp_path), 3000, 0.5, 0, 1)
    piece = planted.piece(order, 0)
    assert piece.bad
    assert "result 0" in str(piece.difference)
    assert "another" in str(piece.difference)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("kind", joining.KINDS)
def test_logs_of_calls_hold_the_calls_that_were_asked_for(kind: str, keyed: bool, tmp_path: Path) -> None:
    log = call_log(joining.SHORT, 40, kind, tmp_path, keyed=keyed)
    (plain,) = tmp_path.glob("*.jsonl")
    rows = [orjson.loads(line) for line in plain.read_bytes().splitlines()]
    assert len(rows) == log.rows == 40
    assert sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows) == log.ids
    assert all(("session_id" in row) == keyed for row in rows)
    settings = Settings(join=False)
    assert sum(result.rollout is not None for result in scan_rollouts(log.path, settings)) == 40


@deep
def test_what_joining_took_is_on_its_page(tmp_path: Path) -> None:
    many, few = (call_log(joining.SHORT, rows, "jsonl", tmp_path, keyed=True) for rows in (120, 20))
    results = [joining.study(log, few, TOY, whole=False) for log in (few, many)]
    assert all(result.seconds > 0 for result in results)
    assert results[1].held > 0  # the small log was joined before, and may need no more memory
    text = joining.page([replace(results[0], scans=(ONE, replace(ONE, cpu=0.6))), results[1]], TOY, None)
    assert text.startswith("# How fast calls are joined\n")
    assert "## Short calls joined by their key, jsonl\n" in text
    assert "| 120 | " in text
    assert " | 25% |\n" in text
    assert " rows were read as the calls of " in text


@pytest.mark.parametrize("kind", batch.KINDS)
def test_timed_batches_hold_the_faults_that_they_say(kind: str) -> None:
    run = batch.timed(batch.Batches(2, 256, kind, faults=True), 2)
    assert run.failing == 2 * batch.ROWS // 4
    assert batch.timed(batch.Batches(2, 64, kind), 1).failing == 0
    assert len(run.whole) == len(run.single) == 2


def test_batches_with_a_tokenizer_hold_its_own_tokens() -> None:
    run = batch.timed(batch.Batches(1, 64, tokenizer=TOY), 1)
    assert run.failing == 0
    assert "| 1 | 64 | arrays | with a tokenizer |" in batch.page([run], TOY, None)
