"""Random agents through HTTP: what the gateway logs is what was sampled and answered, and a scan is clean."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.command import run
from tests.gateway.proof import Proof
from tests.gateway.world import TOY, TOYS, World, proved, real
from tests.tiers import DEEP, examples

REAL = os.environ.get("TITO_AUDIT_TOKENIZERS")
WORLDS = real(Path(REAL)) if REAL else []
APIS = {"chat.completions", "messages", "responses"}
REASONS = {"template_rewrites", "edited", "new_conversation"}
"""Why calls of these agents fork in any run."""


def check_promises(proof: Proof, world: World, folder: Path) -> None:
    """Every promise, then the scan."""
    broken = list(proof.all())
    assert not broken, f"{len(broken)} of {len(proof.lines)} lines:\n" + "\n".join(broken[:12])
    code, out, err = run("scan", folder / "log.jsonl", "-t", world.folder, "--worst", "3")
    assert code == 0, out + err


def test_agents_leave_a_clean_log(tmp_path: Path) -> None:
    proof = proved(TOY, tmp_path, count=examples(7, 9), steps=examples(8, 10), seed=1)
    check_promises(proof, TOY, tmp_path)
    branches = Counter(line["branch"] for line in proof.lines)
    assert branches["continues"] > len(proof.lines) / 4, branches
    assert {line["fork"]["reason"] for line in proof.lines if line["fork"]} >= REASONS
    assert any(call.done and len(call.answers) > 1 for call in proof.calls)
    assert {call.endpoint for call in proof.calls if call.done} == {"chat", "completions", "messages", "responses"}
    # One session has all three APIs, and a call by one continues an answer by another.
    sessions: dict[str, set[str]] = {}
    for line in proof.lines:
        sessions.setdefault(line["session_id"], set()).add(line["endpoint"])
    assert sum(used >= APIS for used in sessions.values()) > 5, sessions
    endpoints = {line["call_id"]: line["endpoint"] for line in proof.lines}
    continued = [line for line in proof.lines if line["branch"] == "continues"]
    crossed = {(endpoints[line["parent"]["call_id"]], line["endpoint"]) for line in continued}
    assert {api for before, api in crossed if before != api} >= APIS


@pytest.mark.skipif(not DEEP, reason="make deep")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("world", TOYS, ids=str)
def test_many_agents_leave_a_clean_log(tmp_path: Path, world: World, seed: int) -> None:
    check_promises(proved(world, tmp_path, count=15, steps=20, seed=seed), world, tmp_path)


@pytest.mark.shared
@pytest.mark.skipif(not DEEP, reason="make deep")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_agents_leave_a_clean_log_with_real_templates(tmp_path: Path, world: World, seed: int) -> None:
    check_promises(proved(world, tmp_path, count=12, steps=15, seed=seed), world, tmp_path)
