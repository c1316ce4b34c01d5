"""`tito-audit serve` as a process: what it says, what it refuses, how it ends; and a real model behind it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import orjson
import pytest

from tests import toy
from tests.command import run
from tests.gateway.process import gateway, stub
from tests.gateway.stub_upstream import MODEL
from tests.serving import client, close_clients, logged
from tests.tiers import DEEP, some
from tests.tiny_model import build_tiny_model
from tito_audit.rows import record_digest

AWAY = "vllm=http://127.0.0.1:9"
"""A server that nobody started."""
IN_PROCESS = pytest.mark.skipif(not DEEP, reason="a process that loads torch; in the deep tier")
ROOT = Path(__file__).resolve().parents[1]
TOY = toy.TOKENIZERS / "toy_bpe"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def serving(*words: object, **env: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its address, and what it said when it was ready."""
    said: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-m", "tito_audit", "serve", *map(str, words), "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            said.append(line.rstrip())
            if "ANTHROPIC_BASE_URL" in line:
                break
        else:
            raise AssertionError(said)
        address = next(word for word in said[0].split() if word.startswith("http")).removesuffix("/v1,")
        yield process, address, said
    finally:
        close_clients()
        if process.poll() is None:
            process.kill()
        process.wait(60)
        process.stderr.close()


@IN_PROCESS
def test_a_model_in_process_is_served_until_a_signal_and_leaves_a_clean_log(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    words = (
        "--provider",
        f"hf={model}",
        "-t",
        TOY,
        "--log",
        log,
        "--reasoning-parser",
        "none",
        "--model-name",
        "m",
    )
    with serving(*words) as (process, address, said):
        assert said[0].startswith("tito-audit: serving m at http://127.0.0.1:")
        assert any("template: rewrites history" in line for line in said)
        assert any("tool parser: hermes" in line for line in said)
        history: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
        for turn in range(3):
            answer = client(address).chat.completions.create(model="m", messages=history, max_tokens=12, seed=turn)
            message = answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content"})
            history += [message, {"role": "user", "content": "And then?"}]
        stream = client(address).chat.completions.create(model="m", messages=history, max_tokens=3000, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert process.wait(60) == 0
        assert process.stderr.read().count("ended;") == 1
    rows = logged(log)
    assert [row["branch"] for row in rows] == ["start", "continues", "continues", "continues"]
    assert [row["status"] for row in rows][:3] == ["answered"] * 3
    _, out, _ = run("scan", log, "-t", TOY, "--report", "json")
    assert not [one for one in orjson.loads(out)["findings"] if one["severity"] == "error"]


@IN_PROCESS
def test_an_interrupt_ends_it_as_well_and_names_are_new_each_time(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for _ in range(2):
        with serving("--provider", f"hf={model}", "-t", TOY, "--log", log) as (process, address, _):
            ask: Any = [{"role": "user", "content": "Hello"}]
            client(address).chat.completions.create(model=model.name, messages=ask, max_tokens=4)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    first, second = logged(log)
    assert first["session_id"] != second["session_id"]
    assert first["prompt_token_ids"] == second["prompt_token_ids"]


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], 1))
def test_a_key_of_the_environment_is_asked_for_and_a_signal_ends_it(tmp_path: Path, number: int) -> None:
    words = ("--provider", AWAY, "-t", TOY, "--log", tmp_path / "log.jsonl", "--model-name", "my model")
    with serving(*words, TITO_AUDIT_API_KEY="very-secret") as (process, address, said):
        assert said[-3:] == [
            f"tito-audit: agents: OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY=…",
            f'tito-audit: Responses API: the same; in Codex base_url = "{address}/v1", web_search = "disabled"',
            f"tito-audit: Anthropic's API: ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY=… "
            "ANTHROPIC_MODEL='my model'",
        ]
        with pytest.raises(openai.AuthenticationError):
            client(address).models.list()
        assert client(address, key="very-secret").models.list().data
        assert "very-secret" not in "".join(said)
        process.send_signal(number)
        assert process.wait(60) == 0


def test_what_cannot_be_served_is_refused_in_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    known = ("--provider", AWAY, "--log", log, "-t", TOY)
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--provider", AWAY, "--log", log), "no tokenizer is given"),
        (("--provider", "vlm=http://x", "--log", log, "-t", TOY), "did you mean vllm?"),
        ((*known, "--tool-parser", "hermess"), "did you mean hermes?"),
        ((*known[:2], "--log", tmp_path / "no" / "log.jsonl", "-t", TOY), "cannot be written"),
        ((*known, "--chat-template", tmp_path / "none.jinja"), "none.jinja"),
    ]
    for words, says in cases:
        code, out, err = run("serve", *words)
        assert (code, out) == (2, ""), words
        assert says in err, words


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = (
            "--provider",
            AWAY,
            "--log",
            tmp_path / "log.jsonl",
            "-t",
            TOY,
            "--port",
            port,
        )
        code, _, err = run("serve", *words)
    assert code == 2
    assert f"127.0.0.1:{port} cannot be used" in err


def test_without_its_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tito_audit.cli import serve

    monkeypatch.setattr(serve, "_NEEDED", ("aiohttp", "prometheus_client_that_nobody_has"))
    code, _, err = run("serve", "--provider", "vllm=http://x", "--log", tmp_path / "log.jsonl", "-t", TOY)
    assert code == 2
    assert "pip install 'tito-audit[serve]'" in err


def test_a_server_that_is_not_there_yet_is_no_reason_not_to_start(tmp_path: Path) -> None:
    words = ("--provider", AWAY, "-t", TOY, "--log", tmp_path / "log.jsonl")
    with serving(*words) as (_, address, said):
        assert any("the server's tokenizer was not compared" in line for line in said)
        ask: Any = [{"role": "user", "content": "Hello"}]
        with pytest.raises(openai.InternalServerError) as raised:
            client(address).chat.completions.create(model="default", messages=ask)
        assert raised.value.status_code == 502
        with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
            assert answer.status == 200
    assert (tmp_path / "log.jsonl").read_bytes() == b""


class LateServer(BaseHTTPRequestHandler):
    """Serves a model whose tokenizer is not ours."""

    def do_GET(self) -> None:
        self._say({"data": [{"id": "real", "max_model_len": 100}]})

    def do_POST(self) -> None:
        self._say({"tokens": [1, 2, 3]})

    def log_message(self, format: str, *args: object) -> None:
        return None

    def _say(self, value: object) -> None:
        data = orjson.dumps(value)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_a_server_that_comes_up_later_is_asked_for_its_model_and_its_tokenizer(tmp_path: Path) -> None:
    late = HTTPServer(("127.0.0.1", 0), LateServer, bind_and_activate=False)
    late.server_bind()  # Nobody listens yet.
    where = f"vllm=http://127.0.0.1:{late.server_address[1]}"
    ask: Any = [{"role": "user", "content": "Hello"}]
    try:
        with serving("--provider", where, "-t", TOY, "--log", tmp_path / "log.jsonl") as (_, address, _said):
            late.server_activate()
            Thread(target=late.serve_forever).start()
            with pytest.raises(openai.InternalServerError, match="not the tokenizer of the model"):
                client(address).chat.completions.create(model="real", messages=ask)
            late.shutdown()
    finally:
        late.server_close()


def test_a_server_that_comes_up_later_gives_its_name_to_the_first_call(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    with gateway(f"vllm=http://127.0.0.1:{port}", TOY, log) as server:
        assert server.get("/v1/models")["data"][0]["id"] == "default"
        with stub(Path(TOY), "--port", port):
            ask: Any = [{"role": "user", "content": "Hello"}]
            answer = client(server.address).chat.completions.create(model=MODEL, messages=ask)
            assert server.get("/v1/models")["data"][0]["id"] == answer.model == MODEL
        close_clients()
        assert server.stop() == 0
    (line,) = logged(log)
    assert line["model"] == MODEL
    assert line["tokenizer_digest"] == record_digest(Path(TOY) / "tokenizer.json")
    assert len(line["template_digest"]) == 64
