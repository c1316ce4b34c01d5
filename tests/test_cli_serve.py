"""`tito-audit serve` as a process: what it says, what it refuses, how it ends; and a real model behind it."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from tests.command import run
from tests.gateway.process import gateway, stub
from tests.gateway.stub_upstream import MODEL
from tests.replay import threaded
from tests.serving import check_chain, client, close_clients, codes_of, logged, until
from tests.tiers import DEEP, some
from tests.world import TOY
from tito_audit.rows import record_digest

AWAY = "vllm=http://127.0.0.1:9"
"""A server that nobody started."""
IN_PROCESS = pytest.mark.skipif(not DEEP, reason="a process that loads torch; in the deep tier")
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


@IN_PROCESS
def test_a_model_in_process_is_served_until_a_signal_and_leaves_a_clean_log(
    tiny_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    words = ("--reasoning-parser", "none", "--model-name", "my model")
    with gateway(f"hf={tiny_model}", TOY, log, *words) as server:
        until(lambda: "ANTHROPIC_MODEL='my model'" in log.with_suffix(".out").read_text())
        page = log.with_suffix(".out").read_text()
        assert page.startswith("tito-audit: serving my model at http://127.0.0.1:")
        assert "template: rewrites history" in page
        assert "tool parser: hermes" in page
        history = list(ASK)
        for turn in range(3):
            answer = client(server.address).chat.completions.create(
                model="my model", messages=history, max_tokens=12, seed=turn
            )
            message = answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content"})
            history += [message, {"role": "user", "content": "And then?"}]
        stream = client(server.address).chat.completions.create(
            model="my model", messages=history, max_tokens=3000, stream=True
        )
        next(iter(stream))
        close_clients()
        assert server.stop() == 0
    assert log.with_suffix(".out").read_text().count("ended;") == 1
    rows = logged(log)
    check_chain(rows[:3])
    assert rows[3]["branch"] == "continues"
    assert [row["status"] for row in rows][:3] == ["answered"] * 3
    assert codes_of(log, passes="warning") == []


@IN_PROCESS
def test_an_interrupt_ends_it_as_well_and_names_are_new_each_time(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for _ in range(2):
        with gateway(f"hf={tiny_model}", TOY, log) as server:
            client(server.address).chat.completions.create(model=tiny_model.name, messages=ASK, max_tokens=4)
            close_clients()
            server.running.send_signal(signal.SIGINT)
            assert server.running.wait(60) == 0
    first, second = logged(log)
    assert first["session_id"] != second["session_id"]
    assert first["prompt_token_ids"] == second["prompt_token_ids"]


def test_a_port_that_is_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda *_: 0.0)  # between two tries to reach the server
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, _, err = run("serve", "--provider", AWAY, "--log", tmp_path / "log.jsonl", "-t", TOY, "--port", port)
    assert code == 2
    assert f"127.0.0.1:{port} cannot be used" in err


def test_without_its_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tito_audit.cli import serve

    monkeypatch.setattr(serve, "_NEEDED", ("aiohttp", "prometheus_client_that_nobody_has"))
    code, _, err = run("serve", "--provider", "vllm=http://x", "--log", tmp_path / "log.jsonl", "-t", TOY)
    assert code == 2
    assert "pip install 'tito-audit[serve]'" in err


async def other_server(request: web.Request) -> web.StreamResponse:
    """Serves a model whose tokenizer is not ours."""
    models = {"data": [{"id": MODEL, "max_model_len": 100}]}
    return web.json_response(models if request.method == "GET" else {"tokens": [1, 2, 3]})


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], 1))
def test_a_server_may_come_up_later_a_key_is_asked_for_and_a_signal_ends_it(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    where, key = f"vllm=http://127.0.0.1:{port}", {"TITO_AUDIT_API_KEY": "very-secret"}
    with gateway(where, TOY, log, **key) as server:
        page, address = log.with_suffix(".out"), server.address
        until(lambda: "ANTHROPIC_MODEL" in page.read_text())
        lines = page.read_text().splitlines()
        assert any("the server's tokenizer was not compared" in line for line in lines)
        assert lines[-3:] == [
            f"tito-audit: agents: OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY=…",
            f'tito-audit: Responses API: the same; in Codex base_url = "{address}/v1", web_search = "disabled"',
            f"tito-audit: Anthropic's API: ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY=… "
            "ANTHROPIC_MODEL=default",
        ]
        with pytest.raises(openai.AuthenticationError):
            client(address).models.list()
        agent = client(address, key="very-secret")

        def ask(model: str) -> Any:
            return agent.chat.completions.create(model=model, messages=ASK)

        assert [each.id for each in agent.models.list()] == ["default"]
        assert server.get("/health")
        with (
            threaded(lambda: other_server, port),
            pytest.raises(openai.InternalServerError, match="not the tokenizer of the model"),
        ):
            ask(MODEL)
        assert log.read_bytes() == b""
        with stub(TOY, "--port", port):
            assert ask(MODEL).model == MODEL
        assert [each.id for each in agent.models.list()] == [MODEL]
        close_clients()
        server.running.send_signal(number)
        assert server.running.wait(60) == 0
    assert "very-secret" not in page.read_text()
    (line,) = logged(log)
    assert line["model"] == MODEL
    assert line["tokenizer_digest"] == record_digest(TOY / "tokenizer.json")
    assert len(line["template_digest"]) == 64
