"""vLLM's answers, as they were recorded and as they should not be, read by its provider."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from tests import replay
from tests.replay import Fixed, Replay, changed, recorded, sse
from tests.replay_paths import RECORDED
from tests.tables import table
from tests.tiers import examples
from tito_audit.errors import ProviderError, SetupError
from tito_audit.provider import ProviderOptions, SamplingParams, TokenProvider
from tito_audit.providers.vllm import VLLMProvider

real = [pytest.mark.shared, pytest.mark.skipif(not RECORDED.is_dir(), reason=f"no recorded answers at {RECORDED}")]
COMPLETIONS, TOKENS = "/v1/completions", "/inference/v1/generate"
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=40)


asked, generated, streamed, scored = (
    partial(helper, "vllm") for helper in (replay.asked, replay.generated, replay.streamed, replay.scored)
)


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
        endpoint = record["path"] if record["path"] == TOKENS else "/v1"
        server = Replay([record], frozenset(ignoring), seed=seed)
        results = asked(server, lambda provider: provider.generate_n(ids, sampling), endpoint=endpoint)
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
        endpoint = record["path"] if record["path"] == TOKENS else ""
        server = Replay([record], frozenset({"logprobs"}), seed=seed)
        choices = {"temperature": 1.0, "seed": 7, "max_tokens": sampling.max_tokens}
        chunks = streamed(server, ids, endpoint, **choices)
        choices = [event["choices"][0] for event in record["events"][:-1]]
        assert [(chunk.output_ids, chunk.logprobs) for chunk in chunks] == [columns(choice) for choice in choices]
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]

    def test_whole_conversations_are_asked_and_answered_as_they_were(self):
        lines = (RECORDED / "conversations-ids.jsonl").read_text(encoding="utf-8").splitlines()
        records = [{"method": "POST", "path": COMPLETIONS, "status": 200, **json.loads(line)} for line in lines]

        async def work(provider):
            names = ("temperature", "max_tokens", "seed")
            asks = [(each["request"], {name: each["request"][name] for name in names}) for each in records]
            return [await provider.generate(sent["prompt"], SamplingParams(**params)) for sent, params in asks]

        results = asked(Replay(records), work)
        assert len(results) == 36
        for record, result in zip(records, results, strict=True):
            (choice,) = record["response"]["choices"]
            assert (result.output_ids, result.logprobs) == columns(choice)
            assert result.finish_reason == choice["finish_reason"]
        assert {result.finish_reason for result in results} == {"stop", "length"}

    @pytest.mark.parametrize("start", [0, 1, 41, 80, 81])
    def test_a_score_is_that_of_the_prompt(self, start):
        (record,) = recorded("completions-score")
        ids = record["request"]["prompt"]
        score = scored(Replay([record], frozenset({"temperature", "seed", "logprobs"})), ids, start=start)
        entries = record["response"]["choices"][0]["prompt_logprobs"]
        first = max(1, start)
        assert score.start == first
        assert score.logprobs == tuple(
            entry[str(token)]["logprob"] for entry, token in zip(entries[first:], ids[first:], strict=True)
        )

    def test_a_score_is_what_was_sampled(self):
        sampled, scored = recorded("completions-ids", "completions-score")
        server = Replay([sampled, scored], frozenset({"temperature", "seed", "logprobs", "max_tokens"}))

        async def both(provider):
            result = await provider.generate(sampled["request"]["prompt"], SAMPLED)
            whole = [*result.input_ids, *result.output_ids]
            return result, await provider.score(whole, start=len(result.input_ids))

        result, score = asked(server, both)
        assert result.logprobs == pytest.approx(score.logprobs, abs=1e-4)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("completions-bad-id", "Token id 60000 is out of vocabulary"),
            ("completions-prompt-token-ids-field", "Either prompt or prompt_embeds"),
        ],
    )
    def test_what_a_server_refuses_is_said_in_its_words(self, name, message):
        (record,) = recorded(name)
        record["request"] = {**record["request"], "prompt": [1, 2, 60000]}
        record["request"].pop("prompt_token_ids", None)
        server = Replay([record], frozenset({"logprobs", "return_token_ids"}))
        with pytest.raises(ProviderError, match=message) as refused:
            generated(server, [1, 2, 60000], temperature=1.0, seed=7, max_tokens=2)
        assert refused.value.status == 400
        assert json.loads(refused.value.body)["error"]["code"] == 400

    def test_a_server_that_ignores_return_token_ids_is_refused(self):
        (record,) = recorded("completions-token-id-strings")
        ids = record["request"]["prompt"]
        ignoring = frozenset({"return_token_ids", "return_tokens_as_token_ids", "logprobs"})
        with pytest.raises(ProviderError, match=r"return_token_ids \(vLLM has it since 0\.10\.2\)"):
            generated(Replay([record], ignoring), ids, temperature=1.0, seed=7, max_tokens=4)

    def test_alternatives_are_ids_with_the_likeliest_first(self):
        (record,) = recorded("completions-token-id-strings")
        ids = record["request"]["prompt"]
        choice = record["response"]["choices"][0]  # as it is with return_token_ids too
        choice.update(token_ids=[788, 253, 905, 837], prompt_token_ids=ids)
        record["request"]["return_token_ids"] = True
        (result,) = generated(Replay([record]), ids, temperature=1.0, seed=7, max_tokens=4, top_logprobs=1)
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
    return changed({"choices": [changed(choice, changes)], "usage": {"completion_tokens": 2}}, top)


def piece(ids, *, index=0, reason=None, first=False, **changes):
    logprobs = {"token_logprobs": [-0.5] * len(ids)} if ids else None
    prompt = IDS if first else None
    return answer(
        index=index, token_ids=ids, logprobs=logprobs, finish_reason=reason, prompt_token_ids=prompt, **changes
    )


class Odd(Fixed):
    """A server that is busy at first, waits, breaks off, ends no stream or states a mode; it keeps who came."""

    def __init__(self, body=None, *, busy=(0, 429), seconds=0.0, breaks=False, endless=False, mode=None):
        super().__init__(body)
        self.busy, self.seconds, self.breaks, self.endless, self.mode = busy, seconds, breaks, endless, mode
        self.running = self.most = self.ended = 0
        self.ports, self.keys = [], set()

    async def __call__(self, request):
        self.ports.append(request.transport.get_extra_info("peername")[1])
        self.keys.add(request.headers.get("Authorization"))
        if self.mode and request.path == "/server_info":
            return web.json_response({"vllm_config": {"model_config": {"logprobs_mode": self.mode}}})
        return await super().__call__(request)

    async def answer(self, request):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.answered(request)
        finally:
            self.running -= 1
            self.ended += 1

    async def answered(self, request):
        calls, status = self.busy
        if len(self.calls) <= calls:
            return web.json_response({}, status=status, headers={"Retry-After": "0"})
        if self.breaks:
            request.transport.close()
        await asyncio.sleep(self.seconds)
        if not self.endless:
            events = [piece([1], first=True, reason="stop"), "[DONE]"]
            self.body = events if self.calls[-1].get("stream") else answer()
            return await super().answer(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(sse([piece([1], first=True)]))
            await asyncio.sleep(0.01)


async def ask(provider):
    return await provider.generate(IDS, SamplingParams(max_tokens=9))


def test_a_right_answer_is_read():
    server = Fixed(answer())
    (result,) = generated(server, temperature=0.5, stop=("x",), stop_token_ids=(3,), extra={"min_tokens": 1})
    assert (result.output_ids, result.logprobs, result.finish_reason) == ((8, 9), (-0.5, -1.25), "stop")
    asks = {"model": "m", "prompt": IDS, "logprobs": 0, "return_token_ids": True, "max_tokens": 9}
    assert server.calls == [{**asks, "temperature": 0.5, "stop": ["x"], "stop_token_ids": [3], "min_tokens": 1}]


def test_it_is_a_provider():
    provider = VLLMProvider("http://127.0.0.1:1/v1/")
    assert isinstance(provider, TokenProvider)
    assert provider.name == "vllm=http://127.0.0.1:1"


def test_without_max_tokens_the_context_is_what_an_answer_may_fill():
    server = Fixed(answer(), context=100)
    generated(server, max_tokens=None)
    assert server.calls[0]["max_tokens"] == 97
    with pytest.raises(ProviderError, match="max_tokens is needed"):
        generated(Fixed(answer(), context=None), max_tokens=None)


@pytest.mark.parametrize(*table(__file__, "wrong"))
def test_a_wrong_answer_is_an_error_of_one_line(changes, said):
    changes = json.loads(changes)
    server = Fixed(answer(**changes) if changes else changes)
    with pytest.raises(ProviderError, match=said) as refused:
        generated(server)
    assert "\n" not in str(refused.value)
    assert len(server.calls) == 1


@pytest.mark.parametrize(*table(__file__, "no_answer"))
def test_what_is_no_answer_is_an_error_of_one_line_and_asked_once(status, kind, data, said):
    server = Fixed(status=status, kind=kind, data=data.encode(), headers={"Location": "/v2"})
    with pytest.raises(ProviderError, match=said) as refused:
        generated(server)
    assert "\n" not in str(refused.value)
    assert refused.value.status in (None, status)
    assert len(server.calls) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(status):
    server = Odd(busy=(3, status))
    (result,) = generated(server)
    assert (result.output_ids, len(server.calls)) == ((8, 9), 4)


def test_a_server_that_stays_busy_is_an_error():
    server = Fixed({"error": {"message": "full"}}, status=429, headers={"Retry-After": "0"})
    with pytest.raises(ProviderError, match="answers 429: full") as refused:
        generated(server)
    assert refused.value.status == 429
    assert len(server.calls) == 5


def test_a_connection_that_breaks_is_not_tried_again():
    server = Odd(breaks=True, seconds=1)
    with pytest.raises(ProviderError, match="the connection broke"):
        generated(server)
    assert len(server.calls) == 1


def test_a_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("random.uniform", lambda *_: 0.0)

    async def work():
        provider = VLLMProvider("http://127.0.0.1:9")
        try:
            await ask(provider)
        finally:
            await provider.close()

    with pytest.raises(ProviderError, match="9/v1/models: no server answers here"):
        asyncio.run(work())


def test_a_slow_server_is_an_error_and_the_call_ends():
    async def work(provider):
        with pytest.raises(ProviderError, match=r"no complete answer within 0\.2 s"):
            await ask(provider)
        await asyncio.sleep(0.1)

    server = Odd(seconds=5)
    asked(server, work, timeout=0.2)
    assert server.ended == 1


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
    chunks = streamed(Fixed(data=data), n=2)
    pieces = [(chunk.index, chunk.output_ids) for chunk in chunks]
    assert pieces == [(1, (1,)), (0, (2, 3)), (1, ()), (0, (4,)), (1, ())]
    assert [(chunk.finish_reason, chunk.stop_reason) for chunk in chunks[-2:]] == [("stop", "x"), ("length", None)]


@pytest.mark.parametrize(*table(__file__, "broken"))
def test_a_broken_stream_is_an_error_of_one_line(events, said):
    events = [piece(**event) if "ids" in event else event for event in json.loads(events)]
    drop = events[-1] == "drop"
    with pytest.raises(ProviderError, match=said) as refused:
        streamed(Fixed(events[:-1] if drop else events, drop=drop))
    assert "\n" not in str(refused.value)


def test_a_stream_that_is_left_ends_the_servers_work():
    server = Odd(endless=True)

    async def work(provider):
        stream = provider.stream(IDS, SamplingParams(max_tokens=9))
        async for _ in stream:
            break
        await stream.aclose()
        for _ in range(200):
            if server.ended:
                break
            await asyncio.sleep(0.01)

    asked(server, work)
    assert server.ended == 1


def test_a_connection_is_used_again_after_an_answer_and_after_a_stream():
    async def work(provider):
        for _ in range(3):
            await ask(provider)
            assert [chunk async for chunk in provider.stream(IDS, SamplingParams(max_tokens=9))]

    server = Odd()
    asked(server, work)
    assert (len(server.ports), len(set(server.ports))) == (8, 1)


def test_only_so_many_calls_are_under_way_at_once():
    async def work(provider):
        return await asyncio.gather(*(ask(provider) for _ in range(12)))

    server = Odd(seconds=0.02)
    assert len(asked(server, work, connections=3)) == 12
    assert server.most == 3


def test_the_key_is_sent_and_never_shown():
    server = Odd()
    asked(server, ask, api_key="secret")
    assert server.keys == {"Bearer secret"}
    assert "secret" not in repr(ProviderOptions(api_key="secret"))


@pytest.mark.parametrize(*table(__file__, "refused"))
def test_what_no_server_can_do_is_refused_before_it_is_asked(choices, said):
    server = Fixed(answer())
    with pytest.raises(ProviderError, match=said) as refused:
        generated(server, **choices)
    assert refused.value.status == 400
    assert server.calls == []


def test_a_model_that_is_not_served_is_said_with_those_that_are():
    with pytest.raises(ProviderError, match="does not serve other; it serves m"):
        asked(Fixed(answer()), ask, model="other")


@pytest.mark.parametrize(("mode", "refused"), [("raw_logits", True), ("processed_logprobs", False)])
def test_a_server_that_states_what_its_logprobs_are_is_believed(mode, refused):
    async def work(provider):
        try:
            await ask(provider)
        except ProviderError as error:
            return provider.logprobs_mode, str(error)
        return provider.logprobs_mode, ""

    stated, refusal = asked(Odd(mode=mode), work)
    assert (stated, "--logprobs-mode raw_logits" in refusal) == (mode, refused)


def entry(values):
    """What a server says of one place: ids with their logprobs."""
    return values and {token: {"logprob": value, "rank": 1} for token, value in values.items()}


def test_a_score_holds_the_likeliest_of_each_place():
    entries = [None, entry({"6": -2.0, "3": -0.1, "4": -1.0}), entry({"7": -0.2, "1": -3.0})]
    score = scored(Fixed(answer(prompt_logprobs=entries)), top=2)
    assert score.logprobs == (-2.0, -0.2)
    assert score.top_logprobs == (((3, -0.1), (4, -1.0)), ((7, -0.2), (1, -3.0)))


def full(**changes):
    """The score of IDS by a server whose context they fill, and what it was sent."""
    scores = {"prompt_logprobs": [None, entry({"6": -2.0})], "prompt_token_ids": IDS[:-1], "token_ids": [7]}
    alternatives = {"token_id:7": -0.25, "token_id:1": -3.0}
    columns = {"logprobs": {"token_logprobs": [-0.25], "top_logprobs": [alternatives]}}
    server = Fixed(answer(**{**scores, **columns, **changes}, usage={}), context=3)
    return scored(server, top=1), server.calls


def test_ids_that_fill_the_context_are_scored_to_the_last():
    score, (sent,) = full()
    assert score.ids == tuple(IDS)
    assert score.logprobs == (-2.0, -0.25)
    assert score.top_logprobs == (((6, -2.0),), ((7, -0.25),))
    assert (sent["prompt"], sent["max_tokens"], sent["allowed_token_ids"]) == ([5, 6], 1, [7])

    for changes in ({"token_ids": [8]}, {"logprobs": {"token_logprobs": [0.0], "top_logprobs": [{}]}}):
        with pytest.raises(ProviderError, match="the last of them cannot be scored"):
            full(**changes)


@pytest.mark.parametrize(*table(__file__, "scores"))
def test_a_wrong_score_is_an_error(entries, said):
    entries = json.loads(entries)
    with pytest.raises(ProviderError, match=said):
        scored(Fixed(answer(prompt_logprobs=entries and [each and entry(each) for each in entries])))


def test_an_address_is_an_address():
    with pytest.raises(SetupError, match="not a server's address"):
        VLLMProvider("127.0.0.1:8000")


@pytest.mark.parametrize(("card", "place"), [({"root": "/models/m"}, "/models/m"), ({}, "served")])
def test_the_place_of_the_tokenizer_is_where_the_model_was_loaded_from(card, place):
    async def server(request):
        status = 200 if "models" in request.path else 404
        return web.json_response({"data": [{"id": "served", **card}]}, status=status)

    assert asked(server, lambda provider: provider.find_tokenizer()) == place
