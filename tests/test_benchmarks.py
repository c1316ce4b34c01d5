"""The benchmark: the same log from the same seed, engines that find what was put into it, sums that are right.

No test says how long anything may take.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import engines, measure  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.corpus import Corpus, Factory, Shape  # noqa: E402
from benchmarks.measure import Measured  # noqa: E402
from benchmarks.plan import QUICK  # noqa: E402
from benchmarks.results import busy, comparison_section, growth_section  # noqa: E402
from benchmarks.studies import LINEAR, SCAN, Comparison, Growth, exponent  # noqa: E402
from tests.tiers import DEEP  # noqa: E402

TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
SHAPE = Shape(turns=(2, 5), words=30, faulty=0.4)
ONE = Measured(1000, 10, 1, seconds=0.5, wall=1.0, cpu=0.8, process_mb=50.0, all_mb=70.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Factory(TOY, tmp_path_factory.mktemp("corpus")).corpus(SHAPE, 12_000)


def rows_of(corpus: Corpus) -> list[dict]:
    return [orjson.loads(line) for line in Path(corpus.jsonl).read_bytes().splitlines()]


def test_a_corpus_has_the_tokens_and_the_lengths_that_were_asked_for(corpus: Corpus) -> None:
    rows = rows_of(corpus)
    assert len(rows) == corpus.rows
    assert sum(len(row["token_ids"]) for row in rows) == corpus.tokens >= 12_000
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
    found = engines.linear(Path(getattr(corpus, kind)), TOY)
    assert (found.tokens, found.rows, found.different) == (corpus.tokens, corpus.rows, len(corpus.faulty))
    assert found.seconds > 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_floor_reads_every_token(corpus: Corpus, kind: str) -> None:
    found = engines.floor(Path(getattr(corpus, kind)))
    assert (found.tokens, found.rows) == (corpus.tokens, corpus.rows)


def test_a_part_of_a_log_ends_with_a_row(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PART_BYTES", 5000)
    found = engines.linear(Path(corpus.jsonl), TOY)
    assert (found.tokens, found.different) == (corpus.tokens, len(corpus.faulty))
    first = engines.linear(Path(corpus.jsonl), TOY, tokens=4000)
    assert 4000 <= first.tokens < corpus.tokens
    assert first.different == sum(row < first.rows for row in corpus.faulty)


def test_a_scan_in_a_process_of_its_own_finds_the_rows_that_were_changed(corpus: Corpus) -> None:
    found = measure.scan(corpus.jsonl, TOY, 1, watch=True)
    assert (found.tokens, found.rows, found.different) == (corpus.tokens, corpus.rows, len(corpus.faulty))
    assert 0 < found.seconds < found.wall
    assert found.cpu > 0
    assert 20 < found.process_mb < 4000
    if Path("/proc/self/smaps_rollup").exists():
        assert found.all_mb is not None
        assert found.all_mb > 10


def test_two_processes_find_what_one_finds(corpus: Corpus) -> None:
    found, _ = measure.engine("linear", corpus.parquet, TOY, workers=2)
    assert (found.tokens, found.rows, found.different) == (corpus.tokens, corpus.rows, len(corpus.faulty))


def test_the_frameworks_way_is_sampled_for_every_length(corpus: Corpus) -> None:
    found, out = measure.engine("per-turn", corpus.jsonl, TOY, tokens=500)
    assert set(out["encoded"]) == set(out["spent"]) == {"2", "5"}
    assert all(tokens >= 250 for tokens in out["encoded"].values())
    assert 0 < found.rows < corpus.rows


def test_the_prompts_that_are_counted_are_those_that_the_frameworks_way_encodes(
    corpus: Corpus, tmp_path: Path
) -> None:
    clean = Factory(TOY, tmp_path).corpus(replace(SHAPE, turns=(2,), faulty=0.0), 1000)
    found, out = measure.engine("per-turn", clean.jsonl, TOY, tokens=10**9)
    assert out["encoded"] == clean.prompt_tokens
    assert (found.rows, found.different) == (clean.rows, 0)


def test_an_engine_that_fails_is_no_fast_engine(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code"):
        measure.run([sys.executable, "-c", "raise SystemExit(3)"])


def test_engines_take_turns_and_the_round_ahead_is_the_watched_one() -> None:
    order = []

    def runner(name: str):
        return lambda watch: order.append((name, watch)) or ONE

    found = measure.alternately({"a": runner("a"), "b": runner("b")}, 2, lambda line: None)
    assert order == [("a", True), ("b", True)] + [("a", False), ("b", False)] * 2
    assert {name: len(runs) for name, runs in found.items()} == {"a": 3, "b": 3}


def test_an_exponent_is_that_of_the_power_law() -> None:
    sizes = [1.0, 3.0, 10.0, 50.0]
    assert exponent(sizes, [0.2 * size for size in sizes]) == pytest.approx(1)
    assert exponent(sizes, [0.2 * size**2 for size in sizes]) == pytest.approx(2)


def test_ratios_are_taken_within_a_round_and_without_the_round_ahead(corpus: Corpus) -> None:
    def taking(*seconds: float) -> list[Measured]:
        return [replace(ONE, seconds=one) for one in seconds]

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
    asked = ["--quick", "--max-tokens", "4000", "--studies", "sizes", "cold", "--tokenizer", str(TOY)]
    monkeypatch.setattr(measure, "knows_jobs", lambda: DEEP)
    main([*asked, "--scratch", str(tmp_path / "scratch"), "--output", str(output)])
    text = output.read_text(encoding="utf-8")
    assert text == capsys.readouterr().out.removesuffix("\n")
    for title in ("# How fast a scan is", "## Growth with the size of the log", "## Ten rows"):
        assert title in text
    assert str(tmp_path) not in text
