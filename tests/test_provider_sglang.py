"""SGLang's answers, shaped as its documentation and source have them, read by its provider."""

from __future__ import annotations

import json
from functools import partial

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from tests import replay
from tests.replay import Fixed, changed
from tests.tables import table
from tito_audit.errors import ProviderError
from tito_audit.provider import TokenProvider
from tito_audit.providers.sglang import SGLangProvider

IDS = [5, 6, 7]
asked, generated, streamed, scored = (
    partial(helper, "sglang") for helper in (replay.asked, replay.generated, replay.streamed, replay.scored)
)


def meta(count=2, **changes):
    """The `meta_info` of an answer of so many tokens, with some of it changed (`...`: left out)."""
    info = {
        "id": "g0",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": count,
        "weight_version": "4",
        "output_token_logprobs": [[-0.5 * (at + 1), 30 + at, None] for at in range(count)],
        "output_top_logprobs": [[[-0.1, 40 + at, None], [-0.9, 50, None]] for at in range(count)],
    }
    return changed(info, changes)


def answer(count=2, **changes):
    return {"text": "ab", "output_ids": [30 + at for at in range(count)], "meta_info": meta(count, **changes)}


def test_it_is_a_provider():
    provider = SGLangProvider("http://127.0.0.1:1/generate")
    assert isinstance(provider, TokenProvider)
    assert provider.name == "sglang=http://127.0.0.1:1"


def test_ids_logprobs_and_the_version_of_the_weights_come_back():
    server = Fixed(answer())
    shape = {"temperature": 0.5, "top_k": 3, "seed": 8, "stop": ("x",), "stop_token_ids": (3,)}
    (result,) = generated(server, **shape, top_logprobs=1, extra={"ignore_eos": True})
    assert (result.input_ids, result.output_ids, result.logprobs) == ((5, 6, 7), (30, 31), (-0.5, -1.0))
    assert result.top_logprobs == (((40, -0.1),), ((41, -0.1),))
    assert (result.finish_reason, result.stop_reason, result.weight_version) == ("stop", 2, "4")
    named = {"sampling_seed": 8, "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True, "max_new_tokens": 9}
    asks = {"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 1}
    assert server.calls == [{**asks, "sampling_params": {"temperature": 0.5, "top_k": 3, **named}}]


def test_several_answers_come_as_a_list():
    server = Fixed([answer(2), answer(3, finish_reason={"type": "length", "length": 9})])
    results = generated(server, n=2, max_tokens=None)
    assert [result.output_ids for result in results] == [(30, 31), (30, 31, 32)]
    assert [result.finish_reason for result in results] == ["stop", "length"]
    assert server.calls[0]["sampling_params"] == {"n": 2, "max_new_tokens": 97}


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_stream_may_repeat_what_it_said_or_only_add_to_it(cumulative):
    whole = meta(5)
    events = []
    for before, after in ((0, 1), (1, 2), (2, 2), (2, 5)):
        seen = 0 if cumulative else before
        columns = {key: whole[key][seen:after] for key in ("output_token_logprobs", "output_top_logprobs")}
        reason = {"type": "length", "length": 5} if after == 5 else None
        events.append({"index": 0, **answer(after, **columns, finish_reason=reason)})
    chunks = streamed(Fixed([*events, "[DONE]"]), top_logprobs=2)
    assert [chunk.output_ids for chunk in chunks] == [(30,), (31,), (), (32, 33, 34)]
    assert tuple(value for chunk in chunks for value in chunk.logprobs) == (-0.5, -1.0, -1.5, -2.0, -2.5)
    assert [len(chunk.top_logprobs) for chunk in chunks] == [1, 1, 0, 3]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "length"]


def test_a_stream_may_mix_several_answers():
    events = [{"index": 1, **answer(1, finish_reason=None)}, {"index": 0, **answer(2)}, {"index": 1, **answer(2)}]
    chunks = streamed(Fixed([*events, "[DONE]"]), n=2)
    assert [(chunk.index, chunk.output_ids) for chunk in chunks] == [(1, (30,)), (0, (30, 31)), (1, (31,))]


@pytest.mark.parametrize(*table(__file__, "wrong"))
def test_a_wrong_answer_is_an_error_of_one_line(changes, said):
    with pytest.raises(ProviderError, match=said) as refused:
        generated(Fixed(answer(**json.loads(changes))))
    assert "\n" not in str(refused.value)


def test_what_is_no_answer_is_an_error():
    with pytest.raises(ProviderError, match="no meta_info"):
        generated(Fixed({"text": "ab"}))
    with pytest.raises(ProviderError, match="1 answers were requested, and 2 came"):
        generated(Fixed([answer(), answer()]))
    with pytest.raises(ProviderError, match="no output_top_logprobs for 2 tokens"):
        generated(Fixed(answer(output_top_logprobs=None)), top_logprobs=1)


@pytest.mark.parametrize(*table(__file__, "broken"))
def test_a_broken_stream_is_an_error(events, said):
    sent = []
    for event in json.loads(events):
        index = {"index": event.pop("index")} if "index" in event else {}
        sent.append({**index, **answer(**event)} if "count" in event else event)
    with pytest.raises(ProviderError, match=said):
        streamed(Fixed([*sent, "[DONE]"]))


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_score_is_read_from_its_end(start):
    first = max(1, start)
    entries = [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]][first - 1 :]
    entries[0] = [None, *entries[0][1:]]  # the first has no logprob, wherever it begins
    tops = [None, *([[-0.1, 9, None], [-1.0, 6, None]] for _ in entries[1:])]
    info = meta(0, input_token_logprobs=entries, input_top_logprobs=tops, finish_reason={"type": "length"})
    server = Fixed({"text": "", "meta_info": info})
    result = scored(server, start=start, top=2)
    assert (result.ids, result.start) == ((5, 6, 7), first)
    assert result.logprobs == (-1.0, -2.0)[first - 1 :]
    assert result.top_logprobs == (((9, -0.1), (6, -1.0)),) * (3 - first)
    assert result.weight_version == "4"
    assert server.calls[0]["logprob_start_len"] == first - 1
    assert server.calls[0]["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize(*table(__file__, "scores"))
def test_a_wrong_score_is_an_error(entries, said):
    info = meta(0, input_token_logprobs=json.loads(entries))
    with pytest.raises(ProviderError, match=said):
        scored(Fixed({"text": "", "meta_info": info}))


def test_nothing_to_score_asks_nothing():
    server = Fixed({"text": "", "meta_info": meta(0)})
    assert scored(server, start=3).logprobs == ()
    assert server.calls == []


def test_a_refusal_is_said_in_the_servers_words():
    with pytest.raises(ProviderError, match="answers 400: The input is too long") as refused:
        generated(Fixed({"error": {"message": "The input is too long"}}, status=400))
    assert refused.value.status == 400


@pytest.mark.parametrize(*table(__file__, "places"))
def test_the_place_of_the_tokenizer_is_the_one_that_the_server_states(path, info, place):
    async def server(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        return web.json_response(info, status=200 if request.path == path else 404)

    assert asked(server, lambda provider: provider.find_tokenizer()) == place
