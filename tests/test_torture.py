"""The torture room in short: the mutants of a fixed seed, the kept cases, and that it sees every kind of failure.

`make torture` runs as many mutants as there is time for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers import examples, one_in, some
from tests.torture.attack import Attack
from tests.torture.commands import COMMANDS, attack_of, some_attacks
from tests.torture.faulty import FAULTS
from tests.torture.judge import Failure
from tests.torture.keep import keep, kept
from tests.torture.minimise import minimised
from tests.torture.runner import Room
from tests.torture.sources import ROOT, TOY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")

SEED = 1
LOG = (ROOT / "fixtures" / "formats" / "tito_sample.jsonl").read_bytes()
KINDS = {"below python": "warning", "half": "left over"}
"""Faults whose failure has another name."""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with Room(tmp_path_factory.mktemp("room")) as room:
        yield room


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with Room(
        tmp_path_factory.mktemp("faulty"), worker="tests.torture.faulty", seconds=3, memory=150 << 20
    ) as room:
        yield room


@pytest.mark.parametrize("part", range(4))
def test_the_command_withstands_mutants_of_its_example_logs(room: Room, part: int) -> None:
    many = examples(25, 1500)
    for number in range(part * many, (part + 1) * many):
        attack = attack_of(SEED, number, with_real=False)
        if attack.process or attack.seconds:  # for `make torture`
            continue
        failures = room.attempt(attack).failures
        assert not failures, f"python -m tests.torture --without-real --case {SEED}:{number}\n{failures}"


def test_the_command_withstands_every_kept_case(room: Room) -> None:
    for name, attack in kept():
        failures = room.attempt(attack).failures
        assert not failures, f"tests/torture/cases/{name}: {failures}"


def attack_on(name: str) -> Attack:
    """A run whose log has the name of a fault."""
    if name in ("changed", "half"):
        words = ("repair", f"{{in}}/{name}.jsonl", "-t", TOY, "-q", "--no-config", "-o", "{out}/out.jsonl")
        return Attack((*words, "-r", "json={out}/report.json"), {f"{name}.jsonl": LOG})
    report = "json" if name == "report" else "text"
    return Attack(("scan", f"{{in}}/{name}.jsonl", "-t", TOY, "--no-config", "-f", report), {f"{name}.jsonl": LOG})


@pytest.mark.parametrize("name", some(list(FAULTS), 8))
def test_every_kind_of_failure_is_seen(faulty: Room, name: str) -> None:
    trial = faulty.attempt(attack_on(name))
    assert KINDS.get(name, name) in [failure.kind for failure in trial.failures], trial
    assert not faulty.attempt(attack_on("sound")).failures, "the next run has nothing of the fault"


def test_a_process_is_judged_as_a_worker_is(room: Room) -> None:
    attack = attack_on("sound")
    alone = room.attempt(Attack(attack.words, attack.files, process=True))
    here = room.attempt(attack)
    assert not alone.failures
    assert alone.outcome.code == here.outcome.code
    assert lines_of(alone.outcome.stdout) == lines_of(here.outcome.stdout)


def lines_of(printed: bytes) -> list[bytes]:
    """The lines of a report, but the one with the time."""
    return [line for line in printed.splitlines() if b"tokens/s" not in line]


def test_a_seed_and_a_number_make_the_same_attack_again() -> None:
    again = [attack_of(5, number, with_real=False) for number in range(60)]
    assert [attack for _, attack in some_attacks(5, 60, with_real=False)] == again
    assert len({(attack.words, *sorted(attack.files.items())) for attack in again}) > 55


def test_some_commands_are_attacked_alone_under_the_same_numbers() -> None:
    for name in one_in(3, COMMANDS):
        for number, attack in some_attacks(5, 2, [name], with_real=False):
            assert attack == attack_of(5, number, with_real=False)


def test_a_failing_log_is_made_small_and_kept(tmp_path: Path) -> None:
    rows = b'{"a": [1, 2, 3], "bad": {"x": 1, "worse": "yes"}, "c": "d"}\n'
    attack = Attack(
        ("scan", "{in}/log.jsonl", "--worst", "5", "-q"), {"log.jsonl": b"{}\n" * 9 + rows + b"{}\n" * 7}
    )
    small = minimised(attack, lambda smaller: b"worse" in smaller.files["log.jsonl"])
    assert small.files == {"log.jsonl": b'{"bad": {"worse": "yes"}}\n'}
    assert small.words == ("scan", "{in}/log.jsonl")
    assert keep(small, Failure("traceback", "a/b.py:c KeyError"), "5:7", tmp_path)
    assert [(stored.words, stored.files) for _, stored in kept(tmp_path)] == [(small.words, small.files)]
    assert keep(Attack(small.words, small.files, ours=False), Failure("hang", "x"), "5:8", tmp_path) is None


def test_a_log_of_bytes_and_a_table_are_made_small() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    attack = Attack(("scan", "{in}/log"), {"log": bytes(range(200)) + b"!" + bytes(range(100))})
    assert minimised(attack, lambda smaller: b"!\0\1" in smaller.files["log"]).files["log"] == b"!\0\1"
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1, 2, 3], "bad": ["x", "worse", "y"], "c": [None, 1, 2]}), out)
    table = Attack(("scan", "{in}/log.parquet"), {"log.parquet": bytes(out.getvalue())})
    small = minimised(table, lambda smaller: b"worse" in smaller.files["log.parquet"]).files["log.parquet"]
    assert pq.read_table(pa.BufferReader(small)).to_pylist() == [{"bad": "worse"}]
