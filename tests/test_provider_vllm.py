"""vLLM's answers, as they were recorded and as they should not be, read by its provider."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from tests.replay import Replay, in_pieces, recorded, serving, sse
from tests.replay_paths import RECORDED
from tests.tiers import examples
from tito_audit.errors import ProviderError, SetupError
from tito_audit.provider import ProviderOptions, SamplingParams, TokenProvider
from tito_audit.providers.vllm import VLLMProvider

real = [
    pytest.mark.shared,
    pytest.mark.skipif(not RECORDED.is_dir(), reason=f"no recorded answers at {RECORDED}"),
]
COMPLETIONS, TOKENS = "/v1/completions", "/inference/v1/generate"
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=40)


async def asked(handler, work, *, endpoint="", **options):
    """What some work with a provider returns, whose server answers by `handler`."""
    async with serving(handler) as url:
        provider = VLLMProvider(url + endpoint, ProviderOptions(**options))
        try:
            return await work(provider)
        finally:
            await provider.close()


async def whole_stream(provider, ids, sampling):
    return [chunk async for chunk in provider.stream(ids, sampling)]


def columns(choice):
    """Ids and logprobs of a recorded choice."""
    logprobs = choice["logprobs"]
    values = logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs["content"]]
    return tuple(choice["token_ids"]), tuple(values)


class TestRecorded:
    pytestmark = real

    @pytest.mark.parametrize(
        ("name", "sampling", "ignoring"),
        [
            ("completions-ids", SAMPLED, {"logprobs"}),
            ("completions-ids-n3", replace(SAMPLED, n=3, max_tokens=8), set()),
            ("generate-tokens", SAMPLED, {"logprobs", "return_token_ids"}),
            ("generate-tokens-prompt-logprobs", replace(SAMPLED, max_tokens=4), {"prompt_logprobs"}),
        ],
    )
    @pytest.mark.parametrize("seed", range(examples(1, 5)))
    def test_ids_and_logprobs_come_back_exactly(self, name, sampling, ignoring, seed):
        (record,) = recorded(name)
        ids = record["request"].get("prompt") or record["request"]["token_ids"]
        if record["path"] == TOKENS:  # it was not asked for the prompt's ids
            record["response"]["prompt_token_ids"] = ids
        replay = Replay([record], frozenset(ignoring), seed=seed)
        endpoint = record["path"] if record["path"] == TOKENS else "/v1"
        results = asyncio.run(
            asked(replay, lambda provider: provider.generate_n(ids, sampling), endpoint=endpoint)
        )
        assert len(results) == sampling.n
        for result, choice in zip(results, record["response"]["choices"], strict=True):
            assert result.input_ids == tuple(ids)
            assert (result.output_ids, result.logprobs) == columns(choice)
            assert (result.finish_reason, result.stop_reason) == ("length", None)
            assert result.top_logprobs is None
            assert result.weight_version == ("default" if record["path"] == TOKENS else None)

    @pytest.mark.parametrize(
        ("name", "sampling"),
        [("completions-ids-stream", SAMPLED), ("generate-tokens-stream", replace(SAMPLED, max_tokens=12))],
    )
    @pytest.mark.parametrize("seed", range(examples(2, 20)))
    def test_a_stream_gives_the_same_piece_by_piece(self, name, sampling, seed):
        (record,) = recorded(name)
        ids = record["request"].get("prompt") or record["request"]["token_ids"]
        replay = Replay([record], frozenset({"logprobs"}), seed=seed)
        endpoint = record["path"] if record["path"] == TOKENS else ""
        work = lambda provider: whole_stream(provider, ids, sampling)  # noqa: E731
        chunks = asyncio.run(asked(replay, work, endpoint=endpoint))
        choices = [event["choices"][0] for event in record["events"][:-1]]
        assert [(chunk.output_ids, chunk.logprobs) for chunk in chunks] == [columns(choice) for choice in choices]
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]

    def test_whole_conversations_are_asked_and_answered_as_they_were(self):
        lines = (RECORDED / "conversations-ids.jsonl").read_text(encoding="utf-8").splitlines()
        records = [{"method": "POST", "path": COMPLETIONS, "status": 200, **json.loads(line)} for line in lines]

        async def work(provider):
            for record in records:
                given = record["request"]
                names = ("temperature", "max_tokens", "seed")
                sampling = SamplingParams(**{name: given[name] for name in names})
                yield record, await provider.generate(given["prompt"], sampling)

        async def all_of(provider):
            return [one async for one in work(provider)]

        results = asyncio.run(asked(Replay(records), all_of))
        assert len(results) == 36
        for record, result in results:
            (choice,) = record["response"]["choices"]
            assert (result.output_ids, result.logprobs) == columns(choice)
            assert result.finish_reason == choice["finish_reason"]
        assert {result.finish_reason for _, result in results} == {"stop", "length"}

    @pytest.mark.parametrize("start", [0, 1, 41, 80, 81])
    def test_a_score_is_that_of_the_prompt(self, start):
        (record,) = recorded("completions-score")
        ids = record["request"]["prompt"]
        replay = Replay([record], frozenset({"temperature", "seed", "logprobs"}))
        scored = asyncio.run(asked(replay, lambda provider: provider.score(ids, start=start)))
        entries = record["response"]["choices"][0]["prompt_logprobs"]
        first = max(1, start)
        assert scored.start == first
        assert scored.logprobs == tuple(
            entry[str(token)]["logprob"] for entry, token in zip(entries[first:], ids[first:], strict=True)
        )

    def test_a_score_is_what_was_sampled(self):
        sampled, scored = recorded("completions-ids", "completions-score")
        replay = Replay([sampled, scored], frozenset({"temperature", "seed", "logprobs", "max_tokens"}))

        async def both(provider):
            result = await provider.generate(sampled["request"]["prompt"], SAMPLED)
            whole = [*result.input_ids, *result.output_ids]
            return result, await provider.score(whole, start=len(result.input_ids))

        result, score = asyncio.run(asked(replay, both))
        assert result.logprobs == pytest.approx(score.logprobs, abs=1e-4)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("completions-bad-id", "Token id 60000 is out of vocabulary"),
            ("completions-prompt-token-ids-field", "Either prompt or prompt_embeds"),
        ],
    )
    def test_what_a_server_refuses_is_said_in_its_words(self, name, said):
        (record,) = recorded(name)
        record["request"] = {**record["request"], "prompt": [1, 2, 60000]}
        record["request"].pop("prompt_token_ids", None)
        replay = Replay([record], frozenset({"logprobs", "return_token_ids"}))
        work = lambda provider: provider.generate([1, 2, 60000], replace(SAMPLED, max_tokens=2))  # noqa: E731
        with pytest.raises(ProviderError, match=said) as refused:
            asyncio.run(asked(replay, work))
        assert refused.value.status == 400
        assert json.loads(refused.value.body)["error"]["code"] == 400

    def test_a_server_that_ignores_return_token_ids_is_refused(self):
        (record,) = recorded("completions-token-id-strings")
        ids = record["request"]["prompt"]
        ignoring = frozenset({"return_token_ids", "return_tokens_as_token_ids", "logprobs"})
        work = lambda provider: provider.generate(ids, replace(SAMPLED, max_tokens=4))  # noqa: E731
        with pytest.raises(ProviderError, match=r"return_token_ids \(vLLM has it since 0\.10\.2\)"):
            asyncio.run(asked(Replay([record], ignoring), work))

    def test_alternatives_are_ids_with_the_likeliest_first(self):
        (record,) = recorded("completions-token-id-strings")
        ids = record["request"]["prompt"]
        choice = record["response"]["choices"][0]  # as it is with return_token_ids too
        choice.update(token_ids=[788, 253, 905, 837], prompt_token_ids=ids)
        record["request"]["return_token_ids"] = True
        work = lambda provider: provider.generate(ids, replace(SAMPLED, max_tokens=4, top_logprobs=1))  # noqa: E731
        result = asyncio.run(asked(Replay([record]), work))
        assert result.top_logprobs == (
            ((33, -0.5589194893836975),),
            ((451, -1.4830480813980103),),
            ((905, -0.7295303344726562),),
            ((837, -0.7456791400909424),),
        )


IDS = [5, 6, 7]
"""The prompt of the answers below, which no server gave: each test breaks one thing in them."""


def answer(**changes):
    """A right answer to IDS, two tokens long, with some of its choice changed (`...`: left out)."""
    choice = {
        "index": 0,
        "text": "ab",
        "token_ids": [8, 9],
        "prompt_token_ids": IDS,
        "logprobs": {"token_logprobs": [-0.5, -1.25], "tokens": ["a", "b"], "top_logprobs": [{}, {}]},
        "finish_reason": "stop",
        "stop_reason": None,
    }
    top = {key: changes.pop(key) for key in ("usage", "choices") if key in changes}
    choice = {key: value for key, value in {**choice, **changes}.items() if value is not ...}
    return {"choices": [choice], "usage": {"completion_tokens": 2}, **top}


def server(body=None, *, status=200, data=None, kind="application/json", headers=None, context=100):
    """A handler that answers every call alike, and counts the calls at `.calls`."""

    async def handler(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": context}]})
        if request.path == "/server_info":
            return web.json_response({"detail": "Not Found"}, status=404)
        handler.calls.append(json.loads(await request.read()))
        content = data if data is not None else json.dumps(body).encode()
        return web.Response(body=content, status=status, headers={"Content-Type": kind, **(headers or {})})

    handler.calls = []
    return handler


def generated(handler, **choices):
    sampling = SamplingParams(**{"max_tokens": 9, **choices})
    return asyncio.run(asked(handler, lambda provider: provider.generate_n(IDS, sampling)))


def test_a_right_answer_is_read():
    handler = server(answer())
    (result,) = generated(handler, temperature=0.5, stop=("x",), stop_token_ids=(3,), extra={"min_tokens": 1})
    assert (result.output_ids, result.logprobs, result.finish_reason) == ((8, 9), (-0.5, -1.25), "stop")
    assert handler.calls == [
        {
            "model": "m",
            "prompt": IDS,
            "logprobs": 0,
            "return_token_ids": True,
            "temperature": 0.5,
            "max_tokens": 9,
            "stop": ["x"],
            "stop_token_ids": [3],
            "min_tokens": 1,
        }
    ]


def test_it_is_a_provider():
    provider = VLLMProvider("http://127.0.0.1:1/v1/")
    assert isinstance(provider, TokenProvider)
    assert provider.name == "vllm=http://127.0.0.1:1"


def test_without_max_tokens_the_context_is_what_an_answer_may_fill():
    handler = server(answer(), context=100)
    generated(handler, max_tokens=None)
    assert handler.calls[0]["max_tokens"] == 97
    with pytest.raises(ProviderError, match="max_tokens is needed"):
        generated(server(answer(), context=None), max_tokens=None)


def logprobs(*values):
    return {"logprobs": {"token_logprobs": list(values)}}


WRONG = [
    (answer(token_ids=...), "no token_ids.*0.10.2"),
    (answer(token_ids=None), "no token_ids"),
    (answer(token_ids=["8", 9]), "not token ids"),
    (answer(token_ids=[8, -9]), "not token ids"),
    (answer(token_ids=[8, True]), "not token ids"),
    (answer(token_ids=[8]), "1 tokens and 2 logprobs"),
    (answer(logprobs=None), "no logprobs"),
    (answer(**logprobs(-0.5)), "2 tokens and 1 logprobs"),
    (answer(**logprobs(-0.5, None)), "token 1: the logprob is null"),
    (answer(**logprobs(float("nan"), -1)), "token 0: the logprob is nan"),
    (answer(**logprobs(float("-inf"), -1)), "token 0: the logprob is -inf"),
    (answer(**logprobs("-0.5", -1)), "token 0: the logprob is -0.5, not a number"),
    (answer(**logprobs(17.5, -1)), "above 0.*raw_logprobs"),
    (answer(logprobs=[1, 2]), "unknown form"),
    (answer(prompt_token_ids=None), "no prompt_token_ids"),
    (answer(prompt_token_ids=[5, 6]), "another prompt: 3 ids were sent, and the server used 2"),
    (answer(prompt_token_ids=[5, 6, 8]), "another prompt"),
    (answer(finish_reason=None), "no finish_reason"),
    (answer(finish_reason="abort"), "aborted the answer"),
    (answer(index=1), r"1 answers were requested, and these came: \[1\]"),
    (answer(index=None), r"these came: \[None\]"),
    (answer(choices=[]), r"these came: \[\]"),
    (answer(usage={"completion_tokens": 3}), "sampled 3 tokens and returned 2"),
    ({"object": "list"}, "no choices"),
    ([], "no choices"),
]


@pytest.mark.parametrize(("body", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_answer_is_an_error_of_one_line(body, said):
    handler = server(body)
    with pytest.raises(ProviderError, match=said) as refused:
        generated(handler)
    assert "\n" not in str(refused.value)
    assert len(handler.calls) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": b"<html>hello</html>", "kind": "text/html"}, "a web page"),
        ({"data": b"<html>no</html>", "kind": "text/html", "status": 404}, "answers 404: a web page"),
        ({"data": b"hello\nthere"}, "not JSON: hello there"),
        ({"status": 307, "headers": {"Location": "/v2"}}, "redirects to /v2"),
        ({"status": 500, "data": b'{"error": {"message": "out of\\n memory"}}'}, "answers 500: out of memory$"),
        ({"status": 401, "data": b'{"error": "Unauthorized"}'}, "answers 401: Unauthorized$"),
        ({"status": 422, "data": b'{"detail": [{"loc": ["body"]}]}'}, "answers 422"),
        ({"status": 400, "data": b""}, "answers 400: nothing"),
    ],
)
def test_what_is_no_answer_is_an_error_of_one_line_and_asked_once(changes, said):
    handler = server({}, **changes)
    with pytest.raises(ProviderError, match=said) as refused:
        generated(handler)
    assert "\n" not in str(refused.value)
    assert refused.value.status in (None, changes.get("status"))
    assert len(handler.calls) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(status):
    right = server(answer())

    async def busy(request):
        if request.path != "/v1/models" and len(busy.statuses) < 3:
            busy.statuses.append(status)
            return web.json_response({}, status=status, headers={"Retry-After": "0"})
        return await right(request)

    busy.statuses = []
    (result,) = generated(busy)
    assert result.output_ids == (8, 9)
    assert len(right.calls) == 1


def test_a_server_that_stays_busy_is_an_error():
    handler = server({"error": {"message": "full"}}, status=429, headers={"Retry-After": "0"})
    with pytest.raises(ProviderError, match="answers 429: full") as refused:
        generated(handler)
    assert refused.value.status == 429
    assert len(handler.calls) == 5


def test_a_connection_that_breaks_is_not_tried_again():
    async def broken(request):
        if request.path != COMPLETIONS:
            return await server()(request)
        broken.calls += 1
        await request.read()
        request.transport.close()
        await asyncio.sleep(1)
        return web.Response()

    broken.calls = 0
    with pytest.raises(ProviderError, match="the connection broke"):
        generated(broken)
    assert broken.calls == 1


def test_a_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("random.uniform", lambda *_: 0.0)

    async def work():
        provider = VLLMProvider("http://127.0.0.1:9")
        try:
            await provider.generate(IDS, SamplingParams(max_tokens=1))
        finally:
            await provider.close()

    with pytest.raises(ProviderError, match="9/v1/models: no server answers here"):
        asyncio.run(work())


def test_a_slow_server_is_an_error_and_the_call_ends():
    ended = []

    async def slow(request):
        if request.path != COMPLETIONS:
            return await server()(request)
        try:
            await asyncio.sleep(5)
        finally:
            ended.append(True)

    async def work(provider):
        with pytest.raises(ProviderError, match=r"no complete answer within 0\.2 s"):
            await provider.generate(IDS, SamplingParams(max_tokens=1))
        await asyncio.sleep(0.1)
        return ended

    assert asyncio.run(asked(slow, work, timeout=0.2)) == [True]


def piece(ids, *, index=0, reason=None, first=False, **changes):
    values = [-0.5] * len(ids)
    return answer(
        index=index,
        token_ids=ids,
        logprobs={"token_logprobs": values} if ids else None,
        finish_reason=reason,
        prompt_token_ids=IDS if first else None,
        **changes,
    )


def streamed(data, *, drop=False, **choices):
    """The chunks of a stream of these bytes; `drop` breaks the connection in place of an end."""

    async def handler(request):
        if request.path != COMPLETIONS:
            return await server()(request)
        if not drop:
            return await in_pieces(request, data, kind="text/event-stream", seed=len(data))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(data)
        request.transport.close()
        return response

    sampling = SamplingParams(max_tokens=9, **choices)
    return asyncio.run(asked(handler, lambda provider: whole_stream(provider, IDS, sampling)))


def test_a_stream_of_several_answers_may_mix_them_and_have_empty_pieces():
    events = [
        piece([1], index=1, first=True),
        piece([2, 3], first=True),
        piece([], index=1),
        {"choices": [], "usage": {}},
        piece([4], reason="stop", stop_reason="x"),
        piece([], index=1, reason="length"),
        "[DONE]",
    ]
    data = b": a comment\nevent: x\n\n" + sse(events).replace(b"\n\n", b"\r\n\r\n")
    chunks = streamed(data, n=2)
    assert [(chunk.index, chunk.output_ids) for chunk in chunks] == [
        (1, (1,)),
        (0, (2, 3)),
        (1, ()),
        (0, (4,)),
        (1, ()),
    ]
    assert [(chunk.finish_reason, chunk.stop_reason) for chunk in chunks[-2:]] == [("stop", "x"), ("length", None)]


BROKEN = [
    ([piece([1], first=True), piece([2], reason="stop")], {}, "the stream ended before"),
    ([piece([1], first=True)], {"drop": True}, "the connection broke"),
    ([piece([1], first=True), "[DONE]"], {}, r"ends of answers in the stream.*these came: \[\]"),
    ([piece([1], first=True, reason="stop"), piece([1], reason="stop"), "[DONE]"], {}, r"these came: \[0, 0\]"),
    ([piece([1], index=1, first=True), "[DONE]"], {}, "one has the index 1"),
    ([piece([1], reason="stop"), "[DONE]"], {}, "no prompt_token_ids"),
    ([piece([1], first=True), {"error": {"message": "engine died", "code": 500}}], {}, "engine died"),
    ([{"object": "error", "message": "too long", "code": 400}, "[DONE]"], {}, "completions: too long"),
    (["{not json", "[DONE]"], {}, "not JSON"),
    ([{"choices": [{"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": []}}]}], {}, "0 logprobs"),
]


@pytest.mark.parametrize(("events", "changes", "said"), BROKEN, ids=[said for _, _, said in BROKEN])
def test_a_broken_stream_is_an_error_of_one_line(events, changes, said):
    with pytest.raises(ProviderError, match=said) as refused:
        streamed(sse(events), **changes)
    assert "\n" not in str(refused.value)


def test_a_stream_that_is_left_ends_the_servers_work():
    ended = asyncio.Event()

    async def endless(request):
        if request.path != COMPLETIONS:
            return await server()(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(sse([piece([1], first=True)]))
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    async def work(provider):
        stream = provider.stream(IDS, SamplingParams(max_tokens=9))
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.wait_for(ended.wait(), 2)

    asyncio.run(asked(endless, work))
    assert ended.is_set()


def test_a_connection_is_used_again_after_an_answer_and_after_a_stream():
    ports = []

    async def handler(request):
        ports.append(request.transport.get_extra_info("peername")[1])
        if request.path != COMPLETIONS:
            return await server()(request)
        if json.loads(await request.read()).get("stream"):
            events = [piece([1], first=True, reason="stop"), "[DONE]"]
            return await in_pieces(request, sse(events), kind="text/event-stream")
        return web.json_response(answer())

    async def work(provider):
        for _ in range(3):
            await provider.generate(IDS, SamplingParams(max_tokens=9))
            await whole_stream(provider, IDS, SamplingParams(max_tokens=9))

    asyncio.run(asked(handler, work))
    assert len(ports) == 8
    assert len(set(ports)) == 1


def test_only_so_many_calls_are_under_way_at_once():
    under_way, most = [], []

    async def handler(request):
        if request.path != COMPLETIONS:
            return await server()(request)
        under_way.append(1)
        most.append(len(under_way))
        await asyncio.sleep(0.02)
        under_way.pop()
        return web.json_response(answer())

    async def work(provider):
        return await asyncio.gather(*(provider.generate(IDS, SamplingParams(max_tokens=9)) for _ in range(12)))

    assert len(asyncio.run(asked(handler, work, connections=3))) == 12
    assert max(most) == 3


def test_the_key_is_sent_and_never_shown():
    keys = []

    async def handler(request):
        keys.append(request.headers.get("Authorization"))
        return await server(answer())(request)

    work = lambda provider: provider.generate(IDS, SamplingParams(max_tokens=9))  # noqa: E731
    asyncio.run(asked(handler, work, api_key="secret"))
    assert set(keys) == {"Bearer secret"}
    assert "secret" not in repr(ProviderOptions(api_key="secret"))


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"extra": {"echo": True, "prompt": "x"}}, "echo, prompt cannot be set"),
    ],
)
def test_what_no_server_can_do_is_refused_before_it_is_asked(choices, said):
    handler = server(answer())
    with pytest.raises(ProviderError, match=said) as refused:
        generated(handler, **choices)
    assert refused.value.status == 400
    assert handler.calls == []


def test_a_model_that_is_not_served_is_said_with_those_that_are():
    work = lambda provider: provider.generate(IDS, SamplingParams(max_tokens=9))  # noqa: E731
    with pytest.raises(ProviderError, match="does not serve other; it serves m"):
        asyncio.run(asked(server(answer()), work, model="other"))


@pytest.mark.parametrize(("mode", "refused"), [("raw_logits", True), ("processed_logprobs", False)])
def test_a_server_that_states_what_its_logprobs_are_is_believed(mode, refused):
    right = server(answer())

    async def handler(request):
        if request.path == "/server_info":
            return web.json_response({"vllm_config": {"model_config": {"logprobs_mode": mode}}})
        return await right(request)

    async def work(provider):
        if refused:
            with pytest.raises(ProviderError, match="--logprobs-mode raw_logits"):
                await provider.generate(IDS, SamplingParams(max_tokens=9))
        else:
            await provider.generate(IDS, SamplingParams(max_tokens=9))
        return provider.logprobs_mode

    assert asyncio.run(asked(handler, work)) == mode


def scored(entries, *, top=0, start=0, **changes):
    handler = server(answer(prompt_logprobs=entries, **changes))
    return asyncio.run(asked(handler, lambda provider: provider.score(IDS, start=start, top=top)))


def entry(**values):
    return {token.removeprefix("t"): {"logprob": value, "rank": 1} for token, value in values.items()}


def test_a_score_holds_the_likeliest_of_each_place():
    found = scored([None, entry(t6=-2.0, t3=-0.1, t4=-1.0), entry(t7=-0.2, t1=-3.0)], top=2)
    assert found.logprobs == (-2.0, -0.2)
    assert found.top_logprobs == (((3, -0.1), (4, -1.0)), ((7, -0.2), (1, -3.0)))


def full(**changes):
    """The score of IDS by a server whose context they fill, and what it was sent."""
    given = {"prompt_logprobs": [None, entry(t6=-2.0)], "prompt_token_ids": IDS[:-1], "token_ids": [7]}
    alternatives = {"token_id:7": -0.25, "token_id:1": -3.0}
    columns = {"logprobs": {"token_logprobs": [-0.25], "top_logprobs": [alternatives]}}
    handler = server(answer(**{**given, **columns, **changes}, usage={}), context=3)
    return asyncio.run(asked(handler, lambda provider: provider.score(IDS, top=1))), handler.calls


def test_ids_that_fill_the_context_are_scored_to_the_last():
    found, (sent,) = full()
    assert found.ids == tuple(IDS)
    assert found.logprobs == (-2.0, -0.25)
    assert found.top_logprobs == (((6, -2.0),), ((7, -0.25),))
    assert (sent["prompt"], sent["max_tokens"], sent["allowed_token_ids"]) == ([5, 6], 1, [7])


@pytest.mark.parametrize(
    "changes", [{"token_ids": [8]}, {"logprobs": {"token_logprobs": [0.0], "top_logprobs": [{}]}}]
)
def test_a_last_token_that_was_not_scored_is_an_error(changes):
    with pytest.raises(ProviderError, match="the last of them cannot be scored"):
        full(**changes)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (None, "no prompt_logprobs"),
        ([None, entry(t6=-1)], "3 ids were sent, and prompt_logprobs hold 2"),
        ([None, entry(t8=-1), entry(t7=-1)], "token 1: prompt_logprobs do not hold id 6"),
        ([None, None, entry(t7=-1)], "do not hold id 6"),
        ([None, entry(t6=None), entry(t7=-1)], "the logprob is null"),
        ([None, {"x": 1}, entry(t7=-1)], "unknown form"),
    ],
)
def test_a_wrong_score_is_an_error(entries, said):
    with pytest.raises(ProviderError, match=said):
        scored(entries)


def test_an_address_is_an_address():
    with pytest.raises(SetupError, match="not a server's address"):
        VLLMProvider("127.0.0.1:8000")


@pytest.mark.parametrize(("card", "place"), [({"root": "/models/m"}, "/models/m"), ({}, "served")])
def test_the_place_of_the_tokenizer_is_where_the_model_was_loaded_from(card, place):
    async def server(request):
        return web.json_response(
            {"data": [{"id": "served", **card}]}, status=200 if "models" in request.path else 404
        )

    assert asyncio.run(asked(server, lambda provider: provider.find_tokenizer())) == place
