"""Models in process: what they sample and how they score, held against transformers itself."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from importlib.util import find_spec

import pytest

from tests.tables import stored, table
from tests.tiers import examples
from tito_audit.errors import ProviderError, SetupError
from tito_audit.provider import GenerationResult, ProviderOptions, SamplingParams, TokenProvider
from tito_audit.providers import all_providers
from tito_audit.providers.hf import HuggingFaceProvider
from tito_audit.tokens.load import load_tokenizer

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)


PROMPT = (2000, 101, 207, 1300, 44, 99, 540)


@pytest.fixture(scope="module")
def provider(tiny_model):
    opened = HuggingFaceProvider(tiny_model)
    yield opened
    asyncio.run(opened.close())


@pytest.fixture(scope="module")
def model(provider):
    return provider._model.model


def generate(provider, ids=PROMPT, **choices) -> tuple[GenerationResult, ...]:
    return asyncio.run(provider.generate_n(ids, SamplingParams(**choices)))


def reference(model, ids):
    """The logprobs `[T, V]` of one forward pass over all ids."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def greedy(model, ids, **choices) -> list[int]:
    """The prompt with the answer of transformers."""
    import torch

    attention = torch.ones(1, len(ids), dtype=torch.long)
    return model.generate(torch.tensor([ids]), attention_mask=attention, do_sample=False, **choices)[0].tolist()


def stated(model, result: GenerationResult) -> list[float]:
    """The reference's logprob of each sampled token."""
    whole = [*result.input_ids, *result.output_ids]
    table = reference(model, whole)
    return [float(table[at - 1, whole[at]]) for at in range(len(result.input_ids), len(whole))]


def test_it_is_a_provider_that_is_found_by_its_file(provider, tiny_model):
    assert isinstance(provider, TokenProvider)
    (kind,) = [kind for kind in all_providers() if kind.name == "hf"]
    opened = kind.open(str(tiny_model), ProviderOptions())
    assert opened.name == f"hf={tiny_model}"
    assert opened.model == tiny_model.name
    asyncio.run(opened.close())
    with pytest.raises(ProviderError, match="closed"):
        generate(opened)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_greedy_is_what_transformers_generates(provider, model, start, penalty):
    ids = PROMPT[start:]
    (ours,) = generate(provider, ids, temperature=0, max_tokens=60, extra={"repetition_penalty": penalty})
    assert [*ids, *ours.output_ids] == greedy(model, ids, max_new_tokens=60, repetition_penalty=penalty)
    assert ours.finish_reason in ("length", "stop")


def test_logprobs_are_those_of_the_whole_distribution_whatever_shapes_the_sampling(provider, model):
    shape = {"temperature": 0.6, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "extra": {"presence_penalty": 0.5}}
    results = generate(provider, n=3, seed=5, max_tokens=25, top_logprobs=4, **shape)
    assert len({result.output_ids for result in results}) == 3
    for result in results:
        assert result.input_ids == PROMPT
        assert result.logprobs == pytest.approx(stated(model, result), abs=1e-4)
        table = reference(model, [*PROMPT, *result.output_ids])[len(PROMPT) - 1 : -1]
        best = table.topk(4)
        assert [[token for token, _ in top] for top in result.top_logprobs] == best.indices.tolist()
        values = [value for top in result.top_logprobs for _, value in top]
        assert values == pytest.approx(best.values.flatten().tolist(), abs=1e-4)


def test_a_seed_gives_the_same_answers_and_no_seed_others(provider):
    first, again = (generate(provider, n=3, seed=11, max_tokens=12) for _ in range(2))
    assert first == again
    for index, answer in enumerate(first):
        (alone,) = generate(provider, seed=11 + index, max_tokens=12)
        assert alone.output_ids == answer.output_ids
    free = {result.output_ids for _ in range(4) for result in generate(provider, max_tokens=12)}
    assert len(free) == 4


def test_answers_of_one_prompt_end_each_at_its_own_place(provider, model):
    results = generate(provider, n=8, seed=3, max_tokens=30, stop_token_ids=tuple(range(0, 2000, 9)))
    assert len({len(result.output_ids) for result in results}) > 2
    for result in results:
        ended = next((at for at, token in enumerate(result.output_ids) if token % 9 == 0 and token < 2000), None)
        if result.finish_reason == "stop" and result.stop_reason is not None:
            assert ended == len(result.output_ids) - 1
            assert result.stop_reason == result.output_ids[-1]
        else:
            assert ended is None
        assert result.logprobs == pytest.approx(stated(model, result), abs=1e-4)


def test_an_end_token_of_the_model_ends_an_answer_and_stays_in_it(provider, model):
    eos = model.generation_config.eos_token_id
    only = {"allowed_token_ids": [eos]}
    (result,) = generate(provider, max_tokens=5, extra=only)
    assert (result.output_ids, result.finish_reason, result.stop_reason) == ((eos,), "stop", None)
    (result,) = generate(provider, max_tokens=5, extra={**only, "ignore_eos": True})
    assert (result.output_ids, result.finish_reason) == ((eos,) * 5, "length")
    two = {"allowed_token_ids": [eos, 44], "logit_bias": {eos: 100}, "min_tokens": 3}
    (result,) = generate(provider, max_tokens=5, extra=two)
    assert (result.output_ids, result.finish_reason) == ((44, 44, 44, eos), "stop")


def test_a_stop_text_ends_an_answer_wherever_in_a_token_it_ends(provider, tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    (free,) = generate(provider, seed=2, max_tokens=20)
    pieces = [tokenizer.vocabulary.token_bytes(token) for token in free.output_ids]
    whole = b"".join(pieces)
    tried = 0
    for begin, end in itertools.combinations(range(len(whole) + 1), 2):
        try:
            text = whole[begin:end].decode()
        except UnicodeDecodeError:
            continue
        if end - begin > 9 or (begin * 7 + end) % examples(19, 3):
            continue
        tried += 1
        (cut,) = generate(provider, seed=2, max_tokens=20, stop=("never, never", text))
        ends = list(itertools.accumulate(map(len, pieces)))
        first = whole.index(text.encode()) + len(text.encode())
        tokens = next(count for count, place in enumerate(ends, 1) if place >= first)
        assert cut.output_ids == free.output_ids[:tokens]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", text)
    assert tried > 5


def test_a_stream_gives_the_tokens_of_the_answers_one_by_one(provider):
    sampling = SamplingParams(n=2, seed=4, max_tokens=9, top_logprobs=2)

    async def streamed():
        return [chunk async for chunk in provider.stream(PROMPT, sampling)]

    chunks = asyncio.run(streamed())
    for index, result in enumerate(asyncio.run(provider.generate_n(PROMPT, sampling))):
        parts = [chunk for chunk in chunks if chunk.index == index]
        assert tuple(token for chunk in parts for token in chunk.output_ids) == result.output_ids
        assert tuple(value for chunk in parts for value in chunk.logprobs) == result.logprobs
        assert tuple(top for chunk in parts for top in chunk.top_logprobs) == result.top_logprobs
        assert [chunk.finish_reason for chunk in parts] == [None] * (len(parts) - 1) + [result.finish_reason]


@pytest.mark.parametrize(*table(__file__, "tokens_are_drawn_as_often_as_they_are_likely"))
def test_tokens_are_drawn_as_often_as_they_are_likely(provider, model, choices):
    draws = examples(2000, 20_000)
    expected = expectation(reference(model, PROMPT)[-1].double(), **choices)
    counts = Counter(
        token
        for result in generate(provider, n=draws, seed=1, max_tokens=1, **choices)
        for token in result.output_ids
    )
    assert {token for token in counts if expected[token] == 0} == set()
    likely = [token for token in range(len(expected)) if expected[token] * draws >= 5]
    rest = 1 - sum(expected[token] for token in likely)
    pairs = [(counts[token], expected[token]) for token in likely]
    if rest > 1e-9:
        pairs.append((draws - sum(counts[token] for token in likely), rest))
    squares = sum((count - share * draws) ** 2 / (share * draws) for count, share in pairs)
    freedom = max(1, len(pairs) - 1)
    assert squares < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations of chi-squared


def expectation(logprobs, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """The distribution that is drawn from, token by token and slowly."""
    weights = [float(value) for value in (logprobs / temperature).exp()]
    most = max(weights)
    weights = [weight if weight >= min_p * most else 0.0 for weight in weights]
    ordered = sorted(range(len(weights)), key=lambda token: -weights[token])
    for token in ordered[top_k or len(ordered) :]:
        weights[token] = 0.0
    total, before = sum(weights), 0.0
    for token in ordered:
        if before >= top_p * total:
            weights[token] = 0.0
        else:
            before += weights[token]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(("start", "top"), [(0, 0), (1, 0), (7, 3), (18, 1), (41, 2), (90, 1), (99, 0), (100, 0)])
def test_a_score_is_that_of_one_whole_forward_pass(provider, model, monkeypatch, start, top):
    import torch

    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(0, 2000, (100,), generator=generator).tolist()
    monkeypatch.setattr("tito_audit.providers.hf._MAX_LOGITS", 13 * provider._model.vocabulary_size)
    monkeypatch.setattr("tito_audit.providers.hf._MAX_PASS", 17)
    scored = asyncio.run(provider.score(ids, start=start, top=top))
    first = max(1, start)
    table = reference(model, ids)
    assert (scored.ids, scored.start) == (tuple(ids), first)
    assert scored.logprobs == pytest.approx([float(table[at - 1, ids[at]]) for at in range(first, 100)], abs=1e-4)
    if not top:
        assert scored.top_logprobs is None
    else:
        best = table[first - 1 : 99].topk(top)
        assert [[token for token, _ in each] for each in scored.top_logprobs] == best.indices.tolist()


KINDS = stored(__file__, "kinds")


def sizes_of(kind):
    """The sizes of a small model of a kind."""
    usual, own = {**stored(__file__, "sizes"), "bos_token_id": None}, dict(KINDS[kind])
    left_out, only = own.pop("without", None), own.pop("only", usual)
    return {name: size for name, size in usual.items() if name in only and name != left_out} | own


@pytest.mark.parametrize("kind", list(KINDS)[: examples(2, len(KINDS))])
def test_other_kinds_of_models_sample_and_score_the_same(kind, monkeypatch):
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes_of(kind))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for weights in model.parameters():
        weights.data.mul_(2)
    monkeypatch.setattr("tito_audit.providers.hf._MAX_LOGITS", 300 * 13)
    monkeypatch.setattr("tito_audit.providers.hf._MAX_LOGITS_UNCACHED", 300 * 13)
    opened = HuggingFaceProvider(model)
    ids = torch.randint(4, 300, (40,)).tolist()
    (first,) = generate(opened, ids, temperature=0, max_tokens=20)
    assert [*ids, *first.output_ids] == greedy(model, ids, max_new_tokens=20)
    answers = generate(opened, ids, n=3, seed=3, max_tokens=15, stop_token_ids=tuple(range(0, 300, 7)))
    assert len({len(answer.output_ids) for answer in answers}) > 1
    for answer in answers:
        assert answer.logprobs == pytest.approx(stated(model, answer), abs=1e-4)
        scored = asyncio.run(opened.score([*ids, *answer.output_ids], start=40))
        assert scored.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    asyncio.run(opened.close())


def test_what_was_sampled_scores_as_it_was_sampled(provider):
    (result,) = generate(provider, temperature=0.7, seed=6, max_tokens=40)
    scored = asyncio.run(provider.score([*PROMPT, *result.output_ids], start=len(PROMPT)))
    assert scored.logprobs == pytest.approx(result.logprobs, abs=1e-4)


def test_a_call_that_is_cancelled_samples_no_more_and_the_loop_goes_on(provider, model, monkeypatch):
    passes = Counter()
    forward = model.forward

    def counted(*arguments, **named):
        passes["forward"] += 1
        return forward(*arguments, **named)

    monkeypatch.setattr(model, "forward", counted)

    async def cancelled() -> int:
        ticks = 0
        task = asyncio.create_task(
            provider.generate(PROMPT, SamplingParams(max_tokens=4000, extra={"ignore_eos": 1}))
        )
        while passes["forward"] < 5:
            await asyncio.sleep(0)
            ticks += 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ticks

    assert asyncio.run(cancelled()) > 5
    assert passes["forward"] <= 7


def test_concurrent_calls_give_what_they_give_alone(provider):
    wanted = [SamplingParams(seed=seed, max_tokens=10 + seed) for seed in range(5)]

    async def together():
        return await asyncio.gather(
            *(provider.generate(PROMPT[: seed + 1], params) for seed, params in enumerate(wanted))
        )

    alone = [asyncio.run(provider.generate(PROMPT[: seed + 1], params)) for seed, params in enumerate(wanted)]
    assert asyncio.run(together()) == alone


@pytest.mark.parametrize(*table(__file__, "refused"))
def test_what_cannot_be_sampled_is_refused_in_one_line(provider, ids, choices, said):
    if isinstance(ids, str):
        ids = PROMPT if ids == "prompt" else (1,) * int(ids.partition(" ")[0])
    with pytest.raises(ProviderError, match=said) as refused:
        generate(provider, ids, **{"max_tokens": 1, **json.loads(choices)})
    assert refused.value.status == 400
    assert "\n" not in str(refused.value)


def test_one_answer_is_not_several(provider):
    with pytest.raises(ValueError, match="n is 2"):
        asyncio.run(provider.generate(PROMPT, SamplingParams(n=2)))


def test_a_model_that_is_not_there_is_named(tmp_path):
    for place in ("/no/such/model", "./none", "a/b/c"):
        with pytest.raises(SetupError, match="no such folder"):
            HuggingFaceProvider(place)
    with pytest.raises(SetupError, match=r"no config\.json"):
        HuggingFaceProvider(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SetupError, match="cannot be loaded"):
        HuggingFaceProvider(tmp_path)


def test_a_model_that_is_loaded_already_is_taken_as_it_is(provider, model):
    opened = HuggingFaceProvider(model)
    opened.weight_version = "step 3"
    (ours,), (theirs,) = (generate(source, seed=1, max_tokens=6) for source in (opened, provider))
    assert ours.output_ids == theirs.output_ids
    assert ours.weight_version == "step 3"
    asyncio.run(opened.close())


def test_a_model_in_training_mode_is_refused(provider, model):
    model.train()
    try:
        with pytest.raises(ProviderError, match="training mode"):
            generate(provider, max_tokens=1)
        with pytest.raises(ProviderError, match="training mode"):
            asyncio.run(provider.score(PROMPT))
    finally:
        model.eval()


def test_weights_that_are_broken_are_an_error(tiny_model):
    import torch

    broken = HuggingFaceProvider(tiny_model)
    with torch.no_grad():
        broken._model.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ProviderError, match="NaN"):
        generate(broken, max_tokens=1)
    asyncio.run(broken.close())
