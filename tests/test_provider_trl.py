"""TRL's own server: its app over a scripted engine where TRL is there, else a server of the same shapes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.tables import table

pytest.importorskip("aiohttp")

from aiohttp import web

from tests import replay
from tests.command import run
from tests.replay import threaded
from tests.serving import client, logged, make_gateway, served
from tests.trl_server.serve import CONTEXT, END, engine_answer
from tests.trl_server.serve import SamplingParams as EngineParams
from tests.world import TOY
from tito_audit import managed_server, open_provider
from tito_audit.errors import ProviderError
from tito_audit.provider import SamplingParams, TokenProvider
from tito_audit.providers.trl import TRLProvider

TRL = os.environ.get("TITO_AUDIT_TRL")
"""The Python of an environment with TRL 1.0 to 1.10 (and fastapi, uvicorn)."""
ROOT = Path(__file__).resolve().parents[1]
PARAMETERS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=3)


class Server:
    """TRL's endpoints, with the shapes of its request and response models."""

    def __init__(self, **changes: Any) -> None:
        self.bodies: list[tuple[str, Any]] = []
        self.running = self.most_running = 0
        self.changes = changes

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append((request.path, body))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.02)
        self.running -= 1
        if request.path == "/generate/":
            kwargs = {key: value for key, value in body.items() if key not in ("prompts", "generation_kwargs")}
            how = EngineParams(**{**kwargs, **body["generation_kwargs"]})
            outputs = [engine_answer({"prompt_token_ids": ids}, how) for ids in body["prompts"]]
            answer = {
                "prompt_ids": [each.prompt_token_ids for each in outputs],
                "completion_ids": [list(sample.token_ids) for each in outputs for sample in each.outputs],
                **_columns([place for each in outputs for sample in each.outputs for place in [sample.logprobs]]),
            }
        else:
            assert request.path == "/get_sequence_logprobs/"
            how = EngineParams(max_tokens=1, prompt_logprobs=body["top_logprobs"])
            (output,) = [engine_answer({"prompt_token_ids": ids}, how) for ids in body["sequences"]]
            answer = _columns([output.prompt_logprobs[body["prompt_lengths"][0] :]])
        return web.json_response({**answer, **self.changes})


def _columns(sequences: list[Any]) -> dict[str, Any]:
    """Logprobs and their ids as `extract_logprobs` of TRL writes them: NaN is null."""

    def plain(value: float) -> float | None:
        return None if value != value else value

    return {
        "logprobs": [[[plain(item.logprob) for item in at.values()] for at in each] for each in sequences],
        "logprob_token_ids": [[list(at) for at in each] for each in sequences],
    }


@contextmanager
def real_server(log: Path, workers: int) -> Iterator[str]:
    """The address of TRL's own app; its engine writes its calls to a log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = ROOT / "tests" / "trl_server" / "serve.py"
    environment = {**os.environ, "TRL_ENGINE_LOG": str(log), "PYTHONPATH": ""}
    silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    command = [str(TRL), str(script), str(port), str(workers)]
    with subprocess.Popen(command, env=environment, **silent) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"{url}/health/").close()
                    break
                except OSError:
                    time.sleep(0.25)
            yield url
        finally:
            os.killpg(process.pid, 9)


asked = partial(replay.asked, "trl")


async def exercised(provider: TRLProvider) -> dict[str, Any]:
    """What a provider says to calls of every kind."""
    provider.end_ids = {END}
    several = SamplingParams(n=2, top_logprobs=2, max_tokens=2, top_k=2)
    together = await asyncio.gather(*(provider.generate([5, at], PARAMETERS) for at in range(1, 9)))
    return {
        "one": await provider.generate([1, 2, 3], PARAMETERS),
        "several": await provider.generate_n([7, 8], several),
        "ended": await provider.generate([97], SamplingParams(max_tokens=9)),
        "stopped": await provider.generate([50], SamplingParams(max_tokens=9, stop_token_ids=(52,))),
        "filled": await provider.generate([1] * 37, SamplingParams()),
        "seeded": await provider.generate([4], SamplingParams(max_tokens=1, seed=3, stop=("x",))),
        "chunks": [chunk async for chunk in provider.stream([7, 8], several)],
        "scored": await provider.score([1, 2, 3, 4], start=2, top=1),
        "whole": await provider.score([1, 2, 3]),
        "together": together,
    }


def check_exercised(answers: dict[str, Any]) -> None:
    single = answers["one"]
    assert (single.input_ids, single.output_ids, single.logprobs) == ((1, 2, 3), (4, 5, 6), (-0.04, -0.05, -0.06))
    assert (single.top_logprobs, single.finish_reason, single.weight_version) == (None, "length", None)
    first, second = answers["several"]
    assert (first.output_ids, second.output_ids) == ((9, 10), (10, 11))
    assert second.top_logprobs == (((10, -0.1), (11, -0.11)), ((11, -0.11), (12, -0.12)))
    assert (answers["ended"].output_ids, answers["ended"].finish_reason) == ((98, 99), "stop")
    stopped = answers["stopped"]
    assert (stopped.output_ids, stopped.finish_reason, stopped.stop_reason) == ((51, 52), "stop", 52)
    assert (len(answers["filled"].output_ids), answers["filled"].finish_reason) == (CONTEXT - 37, "length")
    assert answers["seeded"].output_ids == (5,)
    assert [chunk.output_ids for chunk in answers["chunks"]] == [(9, 10), (10, 11)]
    assert [chunk.finish_reason for chunk in answers["chunks"]] == ["length", "length"]
    scored = answers["scored"]
    assert (scored.start, scored.logprobs) == (2, (-0.03, -0.04))
    assert scored.top_logprobs == (((3, -0.03),), ((4, -0.04),))
    assert answers["whole"].logprobs == (-0.02, -0.03)
    assert [answer.output_ids[0] for answer in answers["together"]] == list(range(2, 10))


def test_ids_go_in_and_ids_and_logprobs_come_out() -> None:
    server = Server()
    check_exercised(asked(server, exercised))
    paths = {path for path, _ in server.bodies}
    assert paths == {"/generate/", "/get_sequence_logprobs/"}  # nothing that updates weights
    prompts = [[5, at] for at in range(1, 9)]  # eight calls at once are one request
    shape = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 3, "n": 1, "logprobs": 0, "generation_kwargs": {}}
    assert server.bodies[0][1] == {"prompts": prompts, **shape}
    kwargs = [body["generation_kwargs"] for _, body in server.bodies if body.get("generation_kwargs")]
    assert kwargs == [{"stop_token_ids": [52]}, {"max_tokens": None}, {"seed": 3, "stop": ["x"]}]


@pytest.mark.skipif(TRL is None, reason="TITO_AUDIT_TRL names no Python with TRL 1.0 to 1.10")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_app_of_trl_itself_answers_the_same(workers: int, tmp_path: Path) -> None:
    log = tmp_path / "engine.jsonl"

    async def run(provider: Any) -> Any:
        try:
            return await exercised(provider)
        finally:
            await provider.close()

    with real_server(log, workers) as url:
        check_exercised(asyncio.run(run(open_provider(f"trl={url}/"))))
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(len(prompts) for prompts, _ in calls)[-1] == 8 // workers
    assert calls[0][1]["temperature"] == 0.7


def test_requests_go_one_after_the_other_and_scores_never_beside_samples() -> None:
    server = Server()

    async def work(provider: TokenProvider) -> Any:
        other = SamplingParams(temperature=0.2, max_tokens=2)
        calls = [provider.generate([at], [PARAMETERS, other][at % 2]) for at in range(1, 7)]
        return await asyncio.gather(*calls, provider.score([1, 2, 3]))

    asked(server, work)
    assert server.most_running == 1
    assert [len(body.get("prompts", "")) for _, body in server.bodies] == [3, 3, 0]


def test_calls_that_come_while_others_are_sampled_wait_and_go_together() -> None:
    server = Server()

    async def late(provider: TokenProvider, at: int) -> Any:
        await asyncio.sleep(0.01 if at > 1 else 0)
        return await provider.generate([at], PARAMETERS)

    async def work(provider: TokenProvider) -> Any:
        return await asyncio.gather(*(late(provider, at) for at in range(1, 6)))

    assert [answer.output_ids[0] for answer in asked(server, work)] == [2, 3, 4, 5, 6]
    assert [body["prompts"] for _, body in server.bodies] == [[[1]], [[2], [3], [4], [5]]]


def test_a_cancelled_call_is_not_sent_and_leaves_the_others_alone() -> None:
    server = Server()

    async def work(provider: TokenProvider) -> Any:
        gone = asyncio.ensure_future(provider.generate([1], PARAMETERS))
        other = asyncio.ensure_future(provider.generate([2], PARAMETERS))
        await asyncio.sleep(0)
        gone.cancel()
        return await other

    assert asked(server, work).output_ids == (3, 4, 5)
    assert [body["prompts"] for _, body in server.bodies] == [[[2]]]


def test_one_provider_serves_several_event_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda *_: 0.0)  # between two tries to reach a server
    provider = open_provider("trl=http://127.0.0.1:1")

    async def fails() -> None:
        with pytest.raises(ProviderError, match="no server answers"):
            await asyncio.wait_for(provider.generate([1], PARAMETERS), 60)
        await provider.close()

    asyncio.run(fails())
    asyncio.run(fails())


@pytest.mark.parametrize(*table(__file__, "a_server_of_another_version_is_named"))
def test_a_server_of_another_version_is_named(status: int, body: Any, message: str) -> None:
    async def server(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    with pytest.raises(ProviderError, match=message) as failed:
        asked(server, lambda provider: provider.generate([1], PARAMETERS))
    if status == 404:
        with pytest.raises(ProviderError, match=r"does not score ids \(TRL 1.1 to 1.10 do\)"):
            asked(server, lambda provider: provider.score([1, 2]))
    assert failed.value.status == status
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(*table(__file__, "not_whole"))
def test_an_answer_that_is_not_whole_is_refused(changes: str, message: str) -> None:
    with pytest.raises(ProviderError, match=message):
        asked(Server(**json.loads(changes)), lambda provider: provider.generate([1, 2, 3], PARAMETERS))


@pytest.mark.parametrize("extra", [{"n": 2}, {"max_tokens": 3}, {"seed": 3}, {"logprobs": 2}])
def test_extra_cannot_change_what_the_provider_sets(extra: dict[str, Any]) -> None:
    provider = TRLProvider("http://127.0.0.1:1/generate/")
    with pytest.raises(ProviderError, match="cannot be set in extra"):
        asyncio.run(provider.generate([1], SamplingParams(extra=extra)))


def test_a_session_tells_which_ids_end_an_answer() -> None:

    async def work(provider: TRLProvider) -> Any:
        async with managed_server(provider, TOY) as managed:
            return provider.end_ids, managed.tokenizer.eos_ids

    end_ids, eos_ids = asked(Server(), work)
    assert end_ids == eos_ids
    assert end_ids


def test_the_gateway_samples_from_it_and_rescore_agrees_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    with threaded(Server) as url:
        gateway, _ = make_gateway(log, [])
        gateway = replace(gateway, provider=open_provider(f"trl={url}"))
        with served(gateway) as address:
            question = [{"role": "user", "content": "2"}]
            sampling = {"model": "toy", "messages": question, "max_tokens": 4}
            whole = client(address).chat.completions.create(**sampling, logprobs=True)
            chunks = list(client(address).chat.completions.create(**sampling, stream=True))
        code, printed, errors = run("rescore", log, "--provider", f"trl={url}", "-t", TOY, "-r", "json")
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].logprobs.content) == 4
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    lines = logged(log)
    assert [len(line["completion_token_ids"]) for line in lines] == [4, 4]
    assert [line["logprobs"][0] for line in lines] == [-line["completion_token_ids"][0] / 100 for line in lines]
    assert code == 0, errors
    summary = json.loads(printed)["summary"]
    assert (summary["scored_tokens"], summary["agreement"]["largest"]) == (8, 0.0)
