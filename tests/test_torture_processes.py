"""A share of the attacks of tests/torture/processes, the same ones each time; and what their checks notice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.tiers import DEEP, examples
from tests.torture.processes.__main__ import campaign
from tests.torture.processes.attack import KINDS, Attack, Undisturbed
from tests.torture.processes.works import PRINTING, WORKS, make_logs
from tests.torture.processes.world import Ended

QUICK = {"scan", "repair JSONL", "repair a folder, journal", "scan -f json"}
"""Commands that are attacked in `make test`."""


def test_processes_are_attacked_and_nothing_is_lost() -> None:
    works = [work for work in (*WORKS, *PRINTING) if DEEP or work.name in QUICK]
    cases = [("kill", number) for number in range(examples(2, 60))]
    cases += [("attack", number) for number in range(examples(3, 60))]
    done = list(campaign(7, cases, 2, works=works))
    assert len(done) == len(cases)
    assert [run for run in done if run["failures"]] == []
    if DEEP:
        assert {run["kind"] for run in done} == {"kill", *KINDS}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torture") / "logs"
    make_logs(folder)
    return folder


@pytest.fixture
def attack(logs: Path, tmp_path: Path) -> Attack:
    """An attack that did nothing, on a repair with the output of an undisturbed run."""
    work = next(work for work in WORKS if work.name == "repair JSONL")
    outputs = {"out.jsonl": b"whole\n", "bad.jsonl": b""}
    whole = Undisturbed(Ended(0, b"", ""), 0.1, outputs)
    harmless = Attack("none", work, whole, random.Random(1), tmp_path / "here", logs)
    harmless.set_up()
    for name, data in outputs.items():
        (harmless.box / name).write_bytes(data)
    return harmless


def test_what_an_attack_leaves_is_noticed(attack: Attack) -> None:
    def noticed(killed: bool = False) -> list[str]:
        attack.failures.clear()
        attack.check_logs()
        attack.check_outputs(complete=False)
        attack.check_left(killed=killed)
        return list(attack.failures)

    assert noticed() == []
    (attack.box / "out.jsonl").write_bytes(b"who")
    assert "not those of an undisturbed run" in noticed()[0]
    (attack.box / "out.jsonl").unlink()
    assert noticed() == []
    (attack.box / ".out.jsonl.1234.part").write_bytes(b"who")
    assert "is left" in noticed()[0]
    assert noticed(killed=True) == []
    (attack.folder / "tmp" / "tito-audit-x").touch()
    assert "temporary" in noticed()[0]
    (attack.folder / "tmp" / "tito-audit-x").unlink()
    log = attack.box / "small.jsonl"
    log.touch()
    assert noticed() == ["small.jsonl was touched"]
    log.write_bytes(log.read_bytes()[:-1])
    assert noticed() == ["small.jsonl was changed"]


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Ended(0, b"", ""), None),
        (Ended(2, b"", "tito-audit: out.jsonl: no space.\n"), None),
        (Ended(None, b"", ""), "hangs"),
        (Ended(1, b"", ""), "exit code 1"),
        (Ended(0, b"", "a warning\n"), "words without need"),
        (Ended(2, b"", ""), "0 lines"),
        (Ended(2, b"", "tito-audit: one.\ntito-audit: two.\n"), "2 lines"),
        (Ended(2, b"", "Traceback (most recent call last):\n"), "a traceback"),
    ],
)
def test_how_a_run_must_not_end_is_noticed(attack: Attack, ended: Ended, words: str | None) -> None:
    attack.check_end(ended, {2})
    assert bool(attack.failures) == (words is not None)
    assert words is None or any(words in failure for failure in attack.failures)
