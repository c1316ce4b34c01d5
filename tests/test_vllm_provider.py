"""VLLMProvider against a real server: what it returns is what the server sampled, and what its weights say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.vllm.ask import asked, running, sampled, until
from tests.vllm.server import CONTEXT, OTHER_ENGINE, SAME_ENGINE, VllmServer
from tito_audit.errors import ProviderError
from tito_audit.provider import GenerationChunk, SamplingParams
from tito_audit.providers.hf import HuggingFaceProvider
from tito_audit.providers.vllm import VLLMProvider
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

T = TypeVar("T")

SAMPLED = SamplingParams(temperature=1.0, max_tokens=40, seed=7, n=3)
SEEDS = range(7, 17)
"""A seed samples the same again unless other requests share its batch: then logits differ in their last digits,
and another token is drawn once in thousands. That happens to a few seeds at most."""


def with_provider(server: VllmServer, work: Callable[[VLLMProvider], Awaitable[T]], path: str = "") -> T:
    """What some work with a provider of the server returns."""

    async def run() -> T:
        provider = VLLMProvider(server.url + path)
        try:
            return await work(provider)
        finally:
            await provider.close()

    return asyncio.run(run())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Threads that wait for one another cost a busy machine a hundred times what they save so small a model."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer(vllm_server: VllmServer) -> Tokenizer:
    return load_tokenizer(str(vllm_server.model))


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> tuple[int, ...]:
    text = "<|im_start|>user\nTell me about the weather in Paris.<|im_end|>\n<|im_start|>assistant\n"
    return tuple(tokenizer.encode(text).tolist())


def differ(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference of two columns."""
    assert len(ours) == len(theirs)
    return float(np.abs(np.subtract(ours, theirs)).max(initial=0.0))


async def generated(prompt: tuple[int, ...], sampling: SamplingParams, provider: VLLMProvider) -> Any:
    return await provider.generate_n(prompt, sampling)


def test_answers_are_those_that_the_server_gives_whoever_asks(
    vllm_server: VllmServer, prompt: tuple[int, ...]
) -> None:
    body = {"model": "tiny", "prompt": list(prompt), "temperature": 1.0, "max_tokens": 40, "n": 3}
    for seed in SEEDS:
        results = with_provider(vllm_server, partial(generated, prompt, replace(SAMPLED, seed=seed)))
        more = {"seed": seed, "logprobs": 0, "return_token_ids": True}
        raw = asyncio.run(asked(vllm_server, "/v1/completions", {**body, **more}))
        choices = sorted(raw["choices"], key=lambda choice: choice["index"])
        if [result.output_ids for result in results] == [tuple(choice["token_ids"]) for choice in choices]:
            break
    assert [result.output_ids for result in results] == [tuple(choice["token_ids"]) for choice in choices]
    assert len({result.output_ids for result in results}) == 3
    for result, choice in zip(results, choices, strict=True):
        assert differ(result.logprobs, choice["logprobs"]["token_logprobs"]) <= SAME_ENGINE
        assert result.input_ids == prompt
        assert result.finish_reason == choice["finish_reason"]


def test_the_tokens_endpoint_samples_the_same(vllm_server: VllmServer, prompt: tuple[int, ...]) -> None:
    for seed in SEEDS:
        sampling = replace(SAMPLED, seed=seed)
        results, other = (
            with_provider(vllm_server, partial(generated, prompt, sampling), path)
            for path in ("", "/inference/v1/generate")
        )
        if [result.output_ids for result in results] == [result.output_ids for result in other]:
            break
    assert [result.output_ids for result in results] == [result.output_ids for result in other]
    for ours, theirs in zip(results, other, strict=True):
        assert differ(ours.logprobs, theirs.logprobs) <= SAME_ENGINE


@pytest.mark.parametrize("path", ["", "/inference/v1/generate"])
def test_a_stream_adds_up_to_the_answers(vllm_server: VllmServer, prompt: tuple[int, ...], path: str) -> None:
    async def both(provider: VLLMProvider) -> tuple[Any, list[GenerationChunk]]:
        whole = await provider.generate_n(prompt, sampling)
        return whole, [chunk async for chunk in provider.stream(prompt, sampling)]

    def of(index: int) -> list[GenerationChunk]:
        return [chunk for chunk in chunks if chunk.index == index]

    for seed in SEEDS:  # a server that samples faster than it answers sends several tokens at once
        sampling = replace(SAMPLED, seed=seed, top_logprobs=2)
        whole, chunks = with_provider(vllm_server, both, path)
        ids = [tuple(token for chunk in of(index) for token in chunk.output_ids) for index in range(3)]
        if len(chunks) > 20 and ids == [result.output_ids for result in whole]:
            break
    assert len(chunks) > 20, "tokens come as they are sampled"
    for index, result in enumerate(whole):
        own = of(index)
        assert tuple(token for chunk in own for token in chunk.output_ids) == result.output_ids
        assert differ([value for chunk in own for value in chunk.logprobs], result.logprobs) <= SAME_ENGINE
        streamed = [top for chunk in own for top in chunk.top_logprobs or ()]
        assert [[token for token, _ in top] for top in streamed] == [
            [token for token, _ in top] for top in result.top_logprobs
        ]
        assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == [result.finish_reason]


@pytest.mark.parametrize("path", ["", "/inference/v1/generate"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_tokens_score_what_they_were_sampled_with(
    vllm_server: VllmServer, prompt: tuple[int, ...], path: str, temperature: float
) -> None:
    async def both(provider: VLLMProvider) -> tuple[Any, Any]:
        result = await provider.generate(prompt, SamplingParams(temperature=temperature, max_tokens=60, seed=3))
        return result, await provider.score((*prompt, *result.output_ids), start=len(prompt))

    result, scored = with_provider(vllm_server, both, path)
    assert differ(scored.logprobs, result.logprobs) <= SAME_ENGINE
    assert scored.ids == (*prompt, *result.output_ids)
    assert scored.start == len(prompt)
    assert np.std(scored.logprobs) > 0.5, "these weights tell tokens apart"


def test_all_positions_can_be_scored_with_alternatives(vllm_server: VllmServer, prompt: tuple[int, ...]) -> None:
    scored = with_provider(vllm_server, lambda provider: provider.score(prompt, top=3))
    assert len(scored.logprobs) == len(prompt) - 1
    assert scored.top_logprobs is not None
    assert all(len(top) == 3 for top in scored.top_logprobs)
    for logprob, top in zip(scored.logprobs, scored.top_logprobs, strict=True):
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert values[0] >= logprob


@pytest.mark.parametrize("path", ["", "/inference/v1/generate"])
def test_ids_that_fill_the_context_are_scored_to_the_last(
    vllm_server: VllmServer, prompt: tuple[int, ...], path: str
) -> None:
    ids = (prompt * CONTEXT)[:CONTEXT]
    start = CONTEXT - 9
    theirs = with_provider(vllm_server, lambda provider: provider.score(ids, start=start, top=2), path)
    opened = HuggingFaceProvider(vllm_server.model)
    ours = asyncio.run(opened.score(ids, start=start, top=2))
    asyncio.run(opened.close())
    assert theirs.ids == ours.ids == ids
    assert differ(theirs.logprobs, ours.logprobs) <= OTHER_ENGINE
    assert theirs.top_logprobs is not None
    assert ours.top_logprobs is not None
    assert [[token for token, _ in top] for top in theirs.top_logprobs] == [
        [token for token, _ in top] for top in ours.top_logprobs
    ]


def test_a_model_in_process_says_the_same_of_the_same_weights(
    vllm_server: VllmServer, prompt: tuple[int, ...]
) -> None:
    async def run() -> None:
        served, local = VLLMProvider(vllm_server.url), HuggingFaceProvider(vllm_server.model)
        try:
            sampled = await served.generate_n(prompt, SamplingParams(max_tokens=200, seed=5, n=4))
            for result in sampled:
                ids = (*prompt, *result.output_ids)
                theirs, ours = await served.score(ids), await local.score(ids)
                assert differ(ours.logprobs, theirs.logprobs) <= OTHER_ENGINE
                assert differ(ours.logprobs[len(prompt) - 1 :], result.logprobs) <= OTHER_ENGINE
        finally:
            await served.close()
            await local.close()

    asyncio.run(run())


def test_greedy_answers_of_both_engines_part_only_where_two_tokens_are_as_likely(
    vllm_server: VllmServer, prompt: tuple[int, ...]
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=120, top_logprobs=5)

    async def run() -> None:
        served, local = VLLMProvider(vllm_server.url), HuggingFaceProvider(vllm_server.model)
        try:
            theirs, ours = await served.generate(prompt, greedy), await local.generate(prompt, greedy)
        finally:
            await served.close()
            await local.close()
        pairs = zip(ours.output_ids, theirs.output_ids, strict=False)
        parted = next((at for at, (left, other) in enumerate(pairs) if left != other), None)
        shared = len(ours.output_ids) if parted is None else parted
        assert differ(ours.logprobs[:shared], theirs.logprobs[:shared]) <= OTHER_ENGINE
        if parted is not None:
            for result, other in ((ours, theirs), (theirs, ours)):
                tops = dict(other.top_logprobs[parted])
                assert other.logprobs[parted] - tops[result.output_ids[parted]] <= OTHER_ENGINE
        else:
            assert ours.output_ids == theirs.output_ids

    asyncio.run(run())


@pytest.mark.parametrize("path", ["", "/inference/v1/generate"])
def test_what_ended_an_answer_is_part_of_it_and_named(
    vllm_server: VllmServer, prompt: tuple[int, ...], tokenizer: Tokenizer, path: str
) -> None:
    def generate(sampling: SamplingParams) -> Any:
        return with_provider(vllm_server, lambda provider: provider.generate(prompt, sampling), path)

    free = SamplingParams(temperature=1.0, max_tokens=30, extra={"ignore_eos": True})
    for seed in SEEDS:
        whole = generate(replace(free, seed=seed))
        stop_id = whole.output_ids[12]
        by_id = generate(replace(free, seed=seed, stop_token_ids=(stop_id,)))
        expected = whole.output_ids[: whole.output_ids.index(stop_id) + 1]
        if by_id.output_ids == expected:
            break
    assert by_id.output_ids == expected
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", stop_id)

    end = tokenizer.encode("<|im_end|>").tolist()
    ended = generate(SamplingParams(max_tokens=30, extra={"allowed_token_ids": end}))
    assert (list(ended.output_ids), ended.finish_reason) == (end, "stop")

    cut = generate(SamplingParams(max_tokens=5, seed=1, extra={"ignore_eos": True}))
    assert (len(cut.output_ids), cut.finish_reason) == (5, "length")


def test_a_stop_text_ends_an_answer_whose_ids_hold_all_of_it(
    vllm_server: VllmServer, prompt: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    constraint = {"structured_outputs": {"regex": "one, two, three, four, five"}}
    sampling = SamplingParams(max_tokens=60, seed=1, stop=("three",), extra=constraint)
    result = with_provider(vllm_server, lambda provider: provider.generate(prompt, sampling))
    text = b"".join(tokenizer.vocabulary.token_bytes(token) for token in result.output_ids)
    assert text.startswith(b"one, two, three")
    assert text.count(b"four") == 0
    assert (result.finish_reason, result.stop_reason) == ("stop", "three")
    assert len(result.logprobs) == len(result.output_ids)


@pytest.mark.parametrize("path", ["", "/inference/v1/generate"])
def test_what_the_server_refuses_is_an_error_with_its_status(
    vllm_server: VllmServer, prompt: tuple[int, ...], path: str
) -> None:
    async def refused(provider: VLLMProvider) -> None:
        with pytest.raises(ProviderError, match=str(CONTEXT)) as caught:
            await provider.generate([1] * (CONTEXT + 1), SamplingParams(max_tokens=4))
        assert caught.value.status == 400
        with pytest.raises(ProviderError) as caught:
            await provider.generate([10**6], SamplingParams(max_tokens=4))
        assert caught.value.status == 400
        with pytest.raises(ProviderError) as caught:
            await provider.generate(prompt, SamplingParams(max_tokens=4, temperature=-1.0))
        assert caught.value.status == 400
        again = await provider.generate(prompt, SamplingParams(max_tokens=4))
        assert len(again.output_ids) > 0, "an error is no end of the provider"

    with_provider(vllm_server, refused, path)


@pytest.mark.parametrize("path", ["", "/inference/v1/generate"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_cancelled_call_ends_its_generation(
    vllm_server: VllmServer, prompt: tuple[int, ...], path: str, streamed: bool
) -> None:
    endless = SamplingParams(temperature=1.0, max_tokens=3500, n=4, extra={"ignore_eos": True})

    async def cancelled(provider: VLLMProvider) -> None:
        async def call() -> None:
            if not streamed:
                await provider.generate_n(prompt, endless)
            async for _ in provider.stream(prompt, endless):
                pass

        task = asyncio.create_task(call())
        await until(lambda: sampled(vllm_server) > before or task.done())
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await until(lambda: running(vllm_server) == 0)

    cut = False
    # A server that samples faster than one looks may be done before the call is cancelled.
    for _ in range(5):
        before = sampled(vllm_server)
        with_provider(vllm_server, cancelled, path)
        cut = 0 < sampled(vllm_server) - before < 4 * 3500
        if cut:
            break
    assert cut
