"""Models in this process, run by transformers: the ground truth for logprobs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tito_audit.errors import ProviderError, SetupError
from tito_audit.provider import (
    GenerationChunk,
    GenerationResult,
    ProviderKind,
    ProviderOptions,
    SamplingParams,
    ScoredTokens,
    TokenProvider,
    TopLogprobs,
)
from tito_audit.providers._answers import check_sampling, join_chunks
from tito_audit.settings.values import expand_user
from tito_audit.tokens.load import load_tokenizer

if TYPE_CHECKING:
    import torch


# A causal language model in this process: synchronous forward passes with a KV cache.


@dataclass(frozen=True)
class CausalModel:
    """A transformers model and what has to be known to sample from it."""

    model: Any
    """`AutoModelForCausalLM`, in evaluation mode."""
    folder: str
    """Where its tokenizer is."""

    @cached_property
    def vocabulary_size(self) -> int:
        """The number of embeddings: all ids are below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @cached_property
    def context(self) -> int | None:
        """Its context length in tokens; None if its configuration does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Its end tokens, from its generation settings or else its configuration."""
        for settings in (self.model.generation_config, self.model.config):
            end_ids = getattr(settings, "eos_token_id", None)
            if end_ids is not None:
                return tuple(end_ids) if isinstance(end_ids, list | tuple) else (int(end_ids),)
        return ()

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Sampling defaults from its generation settings, as vLLM reads them."""
        wanted = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        stated = self.model.generation_config.to_diff_dict() if self.model.generation_config else {}
        return {name: stated[name] for name in wanted if stated.get(name) is not None}

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        return load_tokenizer(self.folder).vocabulary.token_bytes

    @cached_property
    def has_cache(self) -> bool:
        """Whether its KV cache can be split by answer and continued by any number of ids, as in pure attention
        models. Without (Mamba, Qwen3-Next), every pass starts at the first id.
        """
        import torch

        with torch.inference_mode():
            output = self.model(torch.zeros(1, 1, dtype=torch.long, device=self.model.device), use_cache=True)
        cache = getattr(output, "past_key_values", None)
        return all(hasattr(part, "batch_select_indices") for part in (cache, *getattr(cache, "layers", ())))

    @cached_property
    def cache_name(self) -> str:
        """The parameter of `forward` for the cache, which Transformers 5.24 renamed."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    @cached_property
    def takes_logits_to_keep(self) -> bool:
        """Whether `forward` can compute the logits of the last positions only."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def forward(self, ids_NT: Sequence[Sequence[int]], cache: Any, keep: int) -> tuple[torch.Tensor, Any]:
        """The logits `[N, keep, V]` of the last `keep` ids, float32 on the CPU, and the new cache, if any."""
        import torch

        ids = torch.tensor(ids_NT, device=self.model.device)
        kwargs = {"logits_to_keep": keep} if self.takes_logits_to_keep else {}
        if not self.has_cache:
            return self.model(ids, use_cache=False, **kwargs).logits[:, -keep:].float().cpu(), None
        output = self.model(ids, use_cache=True, **{self.cache_name: cache}, **kwargs)
        return output.logits[:, -keep:].float().cpu(), output.past_key_values

    def check_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids as plain integers; ProviderError if the model cannot take them."""
        if self.model.training:
            raise ProviderError(
                "the model is in training mode, where dropout changes its logprobs: call model.eval()"
            )
        plain = tuple(int(token) for token in ids)
        if not plain:
            raise refusal("there are no ids: a model needs at least one token to continue")
        wrong = next((at for at, token in enumerate(plain) if not 0 <= token < self.vocabulary_size), None)
        if wrong is not None:
            raise refusal(
                f"id {plain[wrong]} at position {wrong} is outside the vocabulary of {self.vocabulary_size}"
            )
        if self.context is not None and len(plain) > self.context:
            raise refusal(f"{len(plain)} tokens do not fit into the model's context of {self.context}")
        return plain


def load_model(name: str, dtype: str, device: str) -> CausalModel:
    """The model of a folder or hub name; SetupError without torch, or if it cannot be loaded."""
    path = expand_user(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise SetupError(f"{name}: no config.json here.\nPass the folder of a model, with its weights.")
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise SetupError(f"{name}: no such folder.\nPass the folder of a model, or a hub name such as org/model.")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SetupError(
            f"A model in this process needs torch and transformers: pip install 'tito-audit[hf]' ({error})"
        ) from None
    where = str(path) if path.is_dir() else name
    key = "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"
    progress = transformers.utils.logging
    shown = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(where, **{key: getattr(torch, dtype)})
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise SetupError(f"{name}: the model cannot be loaded: {str(error).splitlines()[0]}") from error
    finally:
        if shown:
            progress.enable_progress_bar()
    return CausalModel(model.to(device).eval(), where)


# How a token is sampled from logits, in vLLM's order: edits, temperature, min_p, top_k, top_p.

_NO_EFFECT = {"include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "user"}
"""Fields of vLLM's requests that change no token."""


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """How logits become the distribution that a token is drawn from."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: any number of tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    """None: any token."""
    min_tokens: int = 0
    """No end token is sampled before this many tokens."""
    ignore_eos: bool = False

    def truncate(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with -inf for what min_p, top_k and then top_p exclude, never for the likeliest token."""
        import torch

        excluded = float("-inf")
        if self.min_p > 0:
            probabilities = logits.softmax(0)
            logits = logits.masked_fill(probabilities < self.min_p * probabilities.max(), excluded)
        if 0 < self.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], excluded)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            likelier = ordered.softmax(0).cumsum(0).roll(1)
            likelier[0] = 0
            tail = torch.zeros_like(logits, dtype=torch.bool).index_copy_(0, order, likelier >= self.top_p)
            logits = logits.masked_fill(tail, excluded)
        return logits


_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "logit_bias": lambda biases: {int(token): float(bias) for token, bias in biases.items()},
    "allowed_token_ids": lambda ids: tuple(int(token) for token in ids),
    "ignore_eos": bool,
    **dict.fromkeys(("top_k", "min_tokens"), lambda number: max(0, int(number))),
}
"""Converts the value of each setting; all others are floats."""


def sampler_settings(sampling: SamplingParams, defaults: Mapping[str, Any]) -> SamplerSettings:
    """The settings of `sampling`, its `extra` included; `defaults` fill what it leaves unset.

    ProviderError with status 400 for an invalid value or an unknown field.
    """
    values = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    values |= {name: value for name, value in sampling.extra.items() if name not in _NO_EFFECT}
    values = {name: value for name, value in values.items() if value is not None}
    fields = SamplerSettings.__dataclass_fields__
    unknown = sorted(values.keys() - fields.keys())
    if unknown:
        raise refusal(f"an in-process model does not support {', '.join(unknown)}; it knows {', '.join(fields)}")
    values = {name: value for name, value in defaults.items() if name in fields} | values
    try:
        settings = SamplerSettings(**{name: _CONVERTERS.get(name, float)(value) for name, value in values.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise refusal(f"a sampling parameter has the wrong type: {error}") from None
    ranges = {
        "temperature": (0 <= settings.temperature < float("inf"), "at least 0"),
        "top_p": (0 < settings.top_p <= 1, "above 0 and at most 1"),
        "min_p": (0 <= settings.min_p <= 1, "between 0 and 1"),
        "repetition_penalty": (0 < settings.repetition_penalty < float("inf"), "above 0"),
        "allowed_token_ids": (settings.allowed_token_ids != (), "at least one id"),
    }
    for name, (fits, range_) in ranges.items():
        if not fits:
            raise refusal(f"{name} is {getattr(settings, name)}; it has to be {range_}")
    return settings


def refusal(message: str) -> ProviderError:
    """The error for a bad request, with status 400."""
    return ProviderError(message, status=400)


def sample_token(
    logits_V: torch.Tensor,
    settings: SamplerSettings,
    generator: torch.Generator | None,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    end_ids: Collection[int],
) -> int:
    """The id of the next token; `logits_V`, `[V]` float32, is not changed."""
    import torch

    logits = logits_V
    if settings.allowed_token_ids is not None:
        allowed = torch.tensor(settings.allowed_token_ids)
        logits = torch.full_like(logits_V, float("-inf")).index_copy_(0, allowed, logits_V[allowed])
    if settings.logit_bias:
        logits = logits.clone()
        for token, bias in settings.logit_bias.items():
            logits[token] += bias
    if len(output_ids) < settings.min_tokens and end_ids:
        logits = logits.index_fill(0, torch.tensor(sorted(end_ids)), float("-inf"))
    if settings.repetition_penalty != 1:
        occurred, factor = torch.tensor([*{*prompt_ids, *output_ids}]), settings.repetition_penalty
        values = logits[occurred]
        values = values.where(values < 0, values / factor).where(values > 0, values * factor)
        logits = logits.index_copy(0, occurred, values)
    if output_ids and (settings.presence_penalty or settings.frequency_penalty):
        seen, counts = torch.tensor(output_ids).unique(return_counts=True)
        penalty = settings.presence_penalty + settings.frequency_penalty * counts.float()
        logits = logits.index_add(0, seen, -penalty)
    if settings.temperature == 0:
        return int(logits.argmax())
    probabilities = settings.truncate(logits / settings.temperature).double().softmax(0)
    # The token in which a random point of the cumulative distribution lies; never one of probability 0.
    bounds = probabilities.cumsum(0)
    point = torch.rand((), dtype=torch.float64, generator=generator) * bounds[-1]
    token = int(torch.searchsorted(bounds, point, right=True))
    return min(token, int(probabilities.nonzero()[-1]))


_MAX_LOGITS = 1 << 24
"""How many logits one pass of scoring computes: 64 MiB of float32."""
_MAX_LOGITS_UNCACHED = 1 << 28
"""The same without a cache, where every pass computes all ids again: 1 GiB."""
_MAX_PASS = 2048
"""How many ids one forward pass with a cache takes."""


@dataclass(slots=True)
class _UnfinishedAnswer:
    index: int
    generator: torch.Generator
    output_ids: list[int] = field(default_factory=list)
    tail: bytes = b""
    """The end of its text, as long as the longest stop text."""


def sample_steps(
    model: CausalModel, input_ids: Sequence[int], sampling: SamplingParams, weight_version: str | None
) -> Iterator[list[GenerationChunk]]:
    """The next token of each unfinished answer, a list for each forward pass.

    Answer k with seed s is the first answer with seed s + k. Answers end as in vLLM: `stop_reason` is None for an
    end token of the model.
    """
    import torch

    prompt, settings = model.check_ids(input_ids), sampler_settings(sampling, model.defaults)
    check_sampling(sampling, ())
    room = sampling.max_tokens
    if model.context is not None:
        left = model.context - len(prompt)
        if left < (room or 1):
            raise refusal(
                f"{len(prompt)} tokens of prompt and {room or 1} to sample do not fit into the "
                f"model's context of {model.context}"
            )
        room = left if room is None else room
    if room is None:
        raise refusal("max_tokens is needed: the model does not say how long its context is")
    size = model.vocabulary_size
    named = [*(settings.allowed_token_ids or ()), *settings.logit_bias, *sampling.stop_token_ids]
    wrong = next((token for token in named if not 0 <= token < size), None)
    if wrong is not None:
        raise refusal(f"a sampling parameter names id {wrong}, which is outside the model's vocabulary of {size}")
    eos: tuple[int, ...] = () if settings.ignore_eos else model.eos_ids
    ends = {*eos, *sampling.stop_token_ids}
    longest = max((len(text.encode()) for text in sampling.stop), default=0)
    answers = [_UnfinishedAnswer(index, torch.Generator()) for index in range(sampling.n)]
    for answer in answers:
        if sampling.seed is None:
            answer.generator.seed()
        else:
            answer.generator.manual_seed(sampling.seed + answer.index)
    cache: Any = None
    while answers:
        chunks = []
        with torch.inference_mode():
            if not model.has_cache:
                whole = [[*prompt, *answer.output_ids] for answer in answers]
                logits_NKV = torch.cat([model.forward([ids], None, 1)[0] for ids in whole])
            elif cache is None:
                logits_NKV, cache = model.forward([prompt], None, 1)
                logits_NKV = logits_NKV.expand(len(answers), -1, -1)
                if len(answers) > 1:
                    cache.batch_repeat_interleave(len(answers))
            else:
                logits_NKV, cache = model.forward([answer.output_ids[-1:] for answer in answers], cache, 1)
            for answer, logits_V in zip(answers, logits_NKV[:, -1], strict=True):
                if not bool(logits_V.isfinite().any()) or bool(logits_V.isnan().any()):
                    raise ProviderError("the model's logits are not numbers (NaN): its weights are broken")
                token = sample_token(logits_V, settings, answer.generator, prompt, answer.output_ids, ends)
                answer.output_ids.append(token)
                stop: str | int | None = None
                if sampling.stop:  # a stop text may end inside the token
                    answer.tail = answer.tail[-longest:] + model.token_bytes(token)
                    stop = next((text for text in sampling.stop if text.encode() in answer.tail), None)
                if token in ends:
                    stop = None if token in eos else token
                reason = "length" if len(answer.output_ids) >= room else None
                logprobs_V = logits_V.log_softmax(-1)
                chunk = GenerationChunk(
                    index=answer.index,
                    output_ids=(token,),
                    logprobs=(float(logprobs_V[token]),),
                    top_logprobs=_top_logprobs(logprobs_V[None], sampling.top_logprobs),
                    finish_reason="stop" if token in ends or stop is not None else reason,
                    stop_reason=stop,
                    weight_version=weight_version,
                )
                chunks.append(chunk)
            going = [place for place, chunk in enumerate(chunks) if chunk.finish_reason is None]
            if cache is not None and 0 < len(going) < len(chunks):
                cache.batch_select_indices(torch.tensor(going))
            answers = [answers[place] for place in going]
        yield chunks


def _top_logprobs(logprobs_TV: torch.Tensor, count: int) -> tuple[TopLogprobs, ...] | None:
    """The `count` likeliest tokens at each position; None if `count` is 0."""
    if count < 1:
        return None
    best = logprobs_TV.topk(min(count, logprobs_TV.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(tuple(zip(ids, values, strict=True)) for ids, values in pairs)


def score_steps(
    model: CausalModel, ids: Sequence[int], start: int, top: int, weight_version: str | None
) -> Iterator[list[ScoredTokens]]:
    """[] after each forward pass, and at the end the scores; the logits of a long text are never all in memory."""
    import torch

    plain, first = model.check_ids(ids), max(1, start)
    if first > len(plain):
        raise refusal(f"there are {len(plain)} ids, and no position {start} to score from")
    size = max(1, (_MAX_LOGITS if model.has_cache else _MAX_LOGITS_UNCACHED) // model.vocabulary_size)
    pieces, last = [], len(plain) - 1
    if model.has_cache:
        size = min(size, _MAX_PASS)
        # What is before the start only fills the cache.
        step = _MAX_PASS if model.takes_logits_to_keep else size
        pieces += [(at, min(at + step, first - 1)) for at in range(0, first - 1, step)]
    pieces += [(at, min(at + size, last)) for at in range(first - 1, last, size)]
    logprobs: list[float] = []
    tops: list[TopLogprobs] = []
    cache: Any = None
    for begin, end in pieces:
        wanted = end >= first
        with torch.inference_mode():
            seen = plain[begin if model.has_cache else 0 : end]
            logits_TV, cache = model.forward([seen], cache, end - begin if wanted else 1)
            if wanted:
                logits_TV = logits_TV[0].log_softmax(-1)
                targets_T = torch.tensor(plain[begin + 1 : end + 1])
                logprobs += logits_TV.gather(1, targets_T[:, None])[:, 0].tolist()
                tops += _top_logprobs(logits_TV, top) or ()
        del logits_TV  # free them before the next pass
        yield []
    yield [ScoredTokens(plain, first, tuple(logprobs), tuple(tops) if top > 0 else None, weight_version)]


T = TypeVar("T")


class HuggingFaceProvider(TokenProvider):
    """A causal language model of transformers, in this process, by default in float32.

    Logprobs are those of the full distribution at temperature 1, before penalties and truncation, as vLLM gives
    them by default (`logprobs_mode` "raw_logprobs"). Temperature 0 samples what `model.generate` samples greedily.
    With a seed s, answer k is drawn with the random numbers of seed s + k.

    An answer ends with an end token of the model (`generation_config.json`), with one of `stop_token_ids`, or
    where its text, special tokens included, contains one of `stop`; what ended it stays in `output_ids`. For a
    parameter that is None the generation settings decide. `extra` may hold `repetition_penalty`,
    `presence_penalty`, `frequency_penalty`, `logit_bias`, `allowed_token_ids`, `min_tokens` and `ignore_eos`.

    Forward passes run in a thread of their own, one at a time; concurrent calls take turns after each pass.
    """

    logprobs_mode = "raw_logprobs"

    def __init__(self, model: str | Path | Any, *, dtype: str = "float32", device: str = "cpu") -> None:
        """`model` is a folder, a hub name, or a model that is already loaded (which stays as it is)."""
        if isinstance(model, str | Path):
            self._model: CausalModel | None = load_model(str(model), dtype, device)
            where = str(model)
        else:
            where = str(getattr(model, "name_or_path", "") or "model")
            self._model = CausalModel(model, where)
        self.name = f"hf={where}"
        self.model: str | None = Path(where).name
        self.weight_version: str | None = None
        """Stated in every answer; set it when the weights change."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tito-audit-model")

    async def find_tokenizer(self) -> str:
        return self.name.removeprefix("hf=")

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        chunks = [chunk async for chunk in self.stream(input_ids, sampling)]
        return join_chunks(chunks, tuple(int(token) for token in input_ids), sampling.n)

    def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        return self._in_thread(sample_steps, input_ids, sampling, self.weight_version)

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        (scores,) = [each async for each in self._in_thread(score_steps, ids, start, top, self.weight_version)]
        return scores

    async def close(self) -> None:
        """Release the model after a running forward pass."""
        self._model = None
        await asyncio.to_thread(self._thread.shutdown)

    async def _in_thread(self, run: Callable[..., Iterator[list[T]]], *arguments: Any) -> AsyncIterator[T]:
        """What `run(model, …)` yields, each step in the provider's thread, taking turns with other calls."""
        steps: Iterator[list[T]] | None = None
        while True:
            if self._model is None:
                raise ProviderError(f"{self.name} is closed")
            steps = steps or run(self._model, *arguments)
            step = await asyncio.get_running_loop().run_in_executor(self._thread, next, steps, None)
            if step is None:
                return
            for each in step:
                yield each


def _open(where: str, options: ProviderOptions) -> HuggingFaceProvider:
    provider = HuggingFaceProvider(where)
    provider.model = options.model or provider.model
    return provider


HF = ProviderKind(name="hf", title="a model in this process, by transformers", where="PATH", open=_open)
