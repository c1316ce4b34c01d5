"""SGLang's answers, shaped as its documentation and source have them, read by its provider."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from tests.replay import in_pieces, serving, sse
from tito_audit.errors import ProviderError
from tito_audit.provider import ProviderOptions, SamplingParams, TokenProvider
from tito_audit.providers import open_provider
from tito_audit.providers.sglang import SGLangProvider

IDS = [5, 6, 7]


def meta(count=2, **changes):
    """The `meta_info` of an answer of so many tokens, with some of it changed (`...`: left out)."""
    found = {
        "id": "g0",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": count,
        "weight_version": "4",
        "output_token_logprobs": [[-0.5 * (at + 1), 30 + at, None] for at in range(count)],
        "output_top_logprobs": [[[-0.1, 40 + at, None], [-0.9, 50, None]] for at in range(count)],
    }
    return {key: value for key, value in {**found, **changes}.items() if value is not ...}


def answer(count=2, **changes):
    found = meta(count, **changes)
    return {"text": "ab", "output_ids": [30 + at for at in range(count)], "meta_info": found}


def server(body, *, status=200):
    async def handler(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 100}]})
        assert request.path == "/generate"
        sent = json.loads(await request.read())
        handler.calls.append(sent)
        if sent.get("stream"):
            return await in_pieces(request, sse([*body, "[DONE]"]), kind="text/event-stream", seed=len(body))
        return web.json_response(body, status=status)

    handler.calls = []
    return handler


async def asked(handler, work):
    async with serving(handler) as url:
        provider = open_provider(f"sglang={url}/", ProviderOptions())
        try:
            return await work(provider)
        finally:
            await provider.close()


def generated(handler, **choices):
    sampling = SamplingParams(**{"max_tokens": 9, **choices})
    return asyncio.run(asked(handler, lambda provider: provider.generate_n(IDS, sampling)))


def streamed(events, **choices):
    sampling = SamplingParams(**{"max_tokens": 9, **choices})

    async def work(provider):
        return [chunk async for chunk in provider.stream(IDS, sampling)]

    return asyncio.run(asked(server(events), work))


def scored(found, *, start=0, top=0):
    handler = server({"text": "", "meta_info": found})
    result = asyncio.run(asked(handler, lambda provider: provider.score(IDS, start=start, top=top)))
    return result, handler.calls


def test_it_is_a_provider():
    provider = SGLangProvider("http://127.0.0.1:1/generate")
    assert isinstance(provider, TokenProvider)
    assert provider.name == "sglang=http://127.0.0.1:1"


def test_ids_logprobs_and_the_version_of_the_weights_come_back():
    handler = server(answer())
    (result,) = generated(
        handler,
        temperature=0.5,
        top_k=3,
        seed=8,
        stop=("x",),
        stop_token_ids=(3,),
        top_logprobs=1,
        extra={"ignore_eos": True},
    )
    assert (result.input_ids, result.output_ids, result.logprobs) == ((5, 6, 7), (30, 31), (-0.5, -1.0))
    assert result.top_logprobs == (((40, -0.1),), ((41, -0.1),))
    assert (result.finish_reason, result.stop_reason, result.weight_version) == ("stop", 2, "4")
    parameters = {
        "temperature": 0.5,
        "top_k": 3,
        "sampling_seed": 8,
        "stop": ["x"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "max_new_tokens": 9,
    }
    assert handler.calls == [
        {"input_ids": IDS, "sampling_params": parameters, "return_logprob": True, "top_logprobs_num": 1}
    ]


def test_several_answers_come_as_a_list():
    handler = server([answer(2), answer(3, finish_reason={"type": "length", "length": 9})])
    results = generated(handler, n=2, max_tokens=None)
    assert [result.output_ids for result in results] == [(30, 31), (30, 31, 32)]
    assert [result.finish_reason for result in results] == ["stop", "length"]
    assert handler.calls[0]["sampling_params"] == {"n": 2, "max_new_tokens": 97}


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_stream_may_repeat_what_it_said_or_only_add_to_it(cumulative):
    whole = meta(5)
    events = []
    for before, after in ((0, 1), (1, 2), (2, 2), (2, 5)):
        seen = 0 if cumulative else before
        columns = {key: whole[key][seen:after] for key in ("output_token_logprobs", "output_top_logprobs")}
        reason = {"type": "length", "length": 5} if after == 5 else None
        events.append({"index": 0, **answer(after, **columns, finish_reason=reason)})
    chunks = streamed(events, top_logprobs=2)
    assert [chunk.output_ids for chunk in chunks] == [(30,), (31,), (), (32, 33, 34)]
    assert tuple(value for chunk in chunks for value in chunk.logprobs) == (-0.5, -1.0, -1.5, -2.0, -2.5)
    assert [len(chunk.top_logprobs) for chunk in chunks] == [1, 1, 0, 3]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "length"]


def test_a_stream_may_mix_several_answers():
    events = [
        {"index": 1, **answer(1, finish_reason=None)},
        {"index": 0, **answer(2)},
        {"index": 1, **answer(2)},
    ]
    chunks = streamed(events, n=2)
    assert [(chunk.index, chunk.output_ids) for chunk in chunks] == [(1, (30,)), (0, (30, 31)), (1, (31,))]


WRONG = [
    ({"text": "ab"}, "no meta_info"),
    (answer(output_token_logprobs=...), "no output_token_logprobs"),
    (answer(output_token_logprobs=[-0.5, -1.0]), "are not"),
    (answer(output_token_logprobs=[[-0.5, 30, None]]), "sampled 2 tokens and returned 1"),
    (answer(output_token_logprobs=[[-0.5, 30, None], [None, 31, None]]), "token 1: the logprob is null"),
    (answer(output_token_logprobs=[[-0.5, 30, None], [-1.0, "31", None]]), "not token ids"),
    (answer(output_token_logprobs=[[-0.5, 30, None], [-1.0, 32, None]]), "output_ids are not the ids"),
    (answer(prompt_tokens=4), "3 ids were sent, and the server used 4"),
    (answer(finish_reason=None), "no finish_reason"),
    (answer(finish_reason={"type": "abort", "message": "out of memory"}), "aborted the answer: out of memory"),
    ([answer(), answer()], "1 answers were requested, and 2 came"),
]


@pytest.mark.parametrize(("body", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_answer_is_an_error_of_one_line(body, said):
    with pytest.raises(ProviderError, match=said) as refused:
        generated(server(body))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([{"index": 0, **answer(1, finish_reason=None)}], "0 of 1 answers ended"),
        ([{"index": 1, **answer()}], "one has the index 1"),
        ([answer(), answer()], "one has the index 0"),
        ([answer(1, finish_reason=None), answer(3, output_token_logprobs=[[-1.0, 31, None]])], "sampled 3 tokens"),
        ([{"error": {"message": "engine died"}}], "engine died"),
    ],
)
def test_a_broken_stream_is_an_error(events, said):
    with pytest.raises(ProviderError, match=said):
        streamed(events)


def test_alternatives_have_to_be_there():
    with pytest.raises(ProviderError, match="no output_top_logprobs for 2 tokens"):
        generated(server(answer(output_top_logprobs=None)), top_logprobs=1)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_score_is_read_from_its_end(start):
    first = max(1, start)
    entries = [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]][first - 1 :]
    entries[0] = [None, *entries[0][1:]]  # the first has no logprob, wherever it begins
    tops = [None, *([[-0.1, 9, None], [-1.0, 6, None]] for _ in entries[1:])]
    result, calls = scored(
        meta(0, input_token_logprobs=entries, input_top_logprobs=tops, finish_reason={"type": "length"}),
        start=start,
        top=2,
    )
    assert (result.ids, result.start) == ((5, 6, 7), first)
    assert result.logprobs == (-1.0, -2.0)[first - 1 :]
    assert result.top_logprobs == (((9, -0.1), (6, -1.0)),) * (3 - first)
    assert result.weight_version == "4"
    assert calls[0]["logprob_start_len"] == first - 1
    assert calls[0]["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (..., "no input_token_logprobs"),
        ([[None, 5, None], [-1.0, 8, None], [-2.0, 7, None]], "token 1: id 6 was sent, and the score is of 8"),
        ([[None, 5, None], [None, 6, None], [-2.0, 7, None]], "the logprob is null"),
        ([[-2.0, 7, None]], "id 6 was sent"),
        ([], "2 ids were sent to be scored, and 0 were"),
    ],
)
def test_a_wrong_score_is_an_error(entries, said):
    with pytest.raises(ProviderError, match=said):
        scored(meta(0, input_token_logprobs=entries))


def test_nothing_to_score_asks_nothing():
    result, calls = scored(meta(0), start=3)
    assert (result.logprobs, calls) == ((), [])


def test_a_refusal_is_said_in_the_servers_words():
    with pytest.raises(ProviderError, match="answers 400: The input is too long") as refused:
        generated(server({"error": {"message": "The input is too long"}}, status=400))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("path", "info", "place"),
    [
        ("/model_info", {"model_path": "m", "tokenizer_path": "/models/t"}, "/models/t"),
        ("/get_model_info", {"model_path": "/models/m"}, "/models/m"),
        ("/none", {}, "m"),
    ],
)
def test_the_place_of_the_tokenizer_is_the_one_that_the_server_states(path, info, place):
    async def server(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        return web.json_response(info, status=200 if request.path == path else 404)

    assert asyncio.run(asked(server, lambda provider: provider.find_tokenizer())) == place
