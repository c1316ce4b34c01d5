"""rescore with a real vLLM server: its log is its own, and drift costs what it does with the same weights here."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.vllm.agent import FREE, Agent
from tests.vllm.claims import direct_log
from tests.vllm.server import VllmServer

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)


def report_of(log: Path, server: VllmServer, provider: str) -> dict[str, Any]:
    code, out, err = run("rescore", log, "--provider", provider, "-t", server.model, "-r", "json")
    assert code == 0, err
    return json.loads(out)


def test_a_server_and_the_same_weights_in_process_say_the_same(vllm_server: VllmServer, tmp_path: Path) -> None:
    log = direct_log(vllm_server, tmp_path, [Agent(FREE, max_tokens=24, seed=number) for number in (1, 2)])
    server = report_of(log, vllm_server, f"vllm={vllm_server.url}")
    alone = report_of(log, vllm_server, f"hf={vllm_server.model}")
    assert server["summary"]["agreement"]["tokens"] > 100
    assert server["summary"]["agreement"]["largest"] < 0.01
    assert server["summary"]["model"] is not None
    prices = [[price for rollout in each["rollouts"] for price in rollout["prices"]] for each in (server, alone)]
    assert len(prices[0]) > 0
    for price, other in zip(*prices, strict=True):
        assert price["finding"] == other["finding"]
        assert [price["sampled"], price["other"]] == pytest.approx([other["sampled"], other["other"]], abs=0.02)
