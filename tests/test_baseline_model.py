"""The baseline against a model that is too simple to be wrong: bags of findings, one for each log."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.command import written
from tests.tiers import examples
from tests.world import CLEAN
from tito_audit import Gate, GateSettings, Settings, gate_rollouts
from tito_audit.gate.baseline import read_baseline

KINDS = "xyz"
"""Findings that look different; `.` is a row without one."""
Bag = Counter[tuple[str, str]]
"""How often each kind of finding is in each log."""


def row(kind: str) -> dict[str, Any]:
    if kind == ".":
        return CLEAN
    return {**CLEAN, "token_ids": [5, 6, 10 + KINDS.index(kind), 8], "logprobs": [0.0, 0.0, 0.5, -0.25]}


def bag(logs: Mapping[str, str]) -> Bag:
    return Counter((name, kind) for name, rows in logs.items() for kind in rows if kind != ".")


def kinds(of: Bag) -> Counter[str]:
    return Counter({kind: sum(n for (_, entry_kind), n in of.items() if entry_kind == kind) for kind in KINDS})


@dataclass
class Model:
    """What is accepted, and what a scan has to say of it."""

    accepted: Bag = field(default_factory=Counter)

    def usable(self, scanned: Mapping[str, str], there: Mapping[str, str]) -> Bag:
        """What findings of a scan may use up: all but what belongs to logs that lie there and are not scanned."""
        return Counter({key: n for key, n in self.accepted.items() if key[0] in scanned or key[0] not in there})

    def expected(self, scanned: Mapping[str, str], there: Mapping[str, str]) -> Counter[str]:
        return kinds(bag(scanned)) & kinds(self.usable(scanned, there))


names = st.sampled_from(["a", "b", "c"])
rows = st.text(KINDS + ".", max_size=6)
steps = st.lists(
    st.tuples(st.dictionaries(names, rows, min_size=1), st.sets(names, min_size=1), st.booleans(), st.booleans()),
    min_size=1,
    max_size=4,
)


def gated(folder: Path, scanned: list[str], update: bool, **more: Any) -> tuple[Counter[str], Gate]:
    """The kinds that are new, and what the gate says."""
    logs = [folder / f"{name}.jsonl" for name in scanned]
    gate = GateSettings(baseline=str(folder / "known.json"), update_baseline=update)
    scan = gate_rollouts(logs, Settings(ignore=("REC009",), **more), gate)
    new: Counter[str] = Counter()
    for result in scan:
        for finding in result.findings:
            if not finding.known:
                new[KINDS[finding.hit.recorded.ids[0] - 10]] += 1
    assert scan.summary.gate is not None
    return new, scan.summary.gate


def accepted_in(folder: Path) -> Bag:
    """What the file holds, its kinds told by their fingerprints."""
    of: Bag = Counter()
    for entry in read_baseline(folder / "known.json"):
        of[entry.file.removesuffix(".jsonl"), FINGERPRINTS[entry.fingerprint]] += entry.times
    return of


FINGERPRINTS: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def fingerprints(tmp_path_factory: pytest.TempPathFactory) -> None:
    log = written(tmp_path_factory.mktemp("kinds") / "a.jsonl", [row(kind) for kind in KINDS])
    for kind, result in zip(KINDS, gate_rollouts(log), strict=True):
        (finding,) = result.findings
        FINGERPRINTS[finding.fingerprint] = kind
    assert len(FINGERPRINTS) == len(KINDS)


@settings(
    max_examples=examples(16, 40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps)
def test_a_baseline_knows_what_a_bag_of_accepted_findings_knows(
    tmp_path: Path, steps: list[tuple[dict[str, str], set[str], bool, bool]]
) -> None:
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    model, first = Model(), True
    for logs, some, update, part in steps:
        for file in tmp_path.glob("*.jsonl"):
            file.unlink()
        for name, kinds_ in logs.items():
            written(tmp_path / f"{name}.jsonl", [row(kind) for kind in kinds_])
        scanned = {name: logs[name] for name in sorted(logs) if name in some} or dict(sorted(logs.items()))
        update, part = update or first, part and not first
        expected = model.expected(scanned, logs)
        new, gate = gated(tmp_path, list(scanned), update, **({"limit": 1000} if part else {}))
        assert new == kinds(bag(scanned)) - expected
        assert gate.known == expected.total()
        assert gate.failed == (bool(new) and not update)
        if part:
            assert gate.fixed == ()
        else:
            # What may be used up and was not is fixed; without a log, or a row of it, it is kept in silence.
            left = kinds(model.usable(scanned, logs)) - expected
            fixed = Counter(FINGERPRINTS[entry.fingerprint] for entry in gate.fixed for _ in range(entry.times))
            assert not fixed - left
            silent = Counter({key: n for key, n in model.accepted.items() if not logs.get(key[0])})
            assert not left - fixed - kinds(silent)
        if update:
            assert gate.added == new.total()
            now = accepted_in(tmp_path)
            for name in logs:
                entries = Counter({key: n for key, n in now.items() if key[0] == name})
                before = Counter({key: n for key, n in model.accepted.items() if key[0] == name})
                if name not in scanned:
                    assert entries == before
                elif not logs[name]:
                    assert not entries - before
                elif not part:
                    assert entries == bag({name: logs[name]})
                else:
                    assert not before - entries
            before_bytes = (tmp_path / "known.json").read_bytes()
            model.accepted, first = now, False
            again, gate = gated(tmp_path, list(scanned), update=not part)
            assert again == Counter()
            assert part or ((gate.fixed, gate.added) == ((), 0))
            assert (tmp_path / "known.json").read_bytes() == before_bytes
