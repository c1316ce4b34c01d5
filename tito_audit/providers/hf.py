"""Models in this process, with transformers: the ground truth for logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tito_audit.errors import ProviderError
from tito_audit.provider import (
    GenerationChunk,
    GenerationResult,
    ProviderKind,
    ProviderOptions,
    SamplingParams,
    ScoredTokens,
)
from tito_audit.providers._collect import collect, one_answer
from tito_audit.providers._model import CausalModel, load_model
from tito_audit.providers._passes import Sampling, Scoring

T = TypeVar("T")


class HuggingFaceProvider:
    """A causal language model of transformers, in this process, by default in float32.

    Logprobs are those of the model's full distribution at temperature 1, before penalties and truncation, as vLLM
    gives them by default (`logprobs_mode` "raw_logprobs"). Temperature 0 samples what `model.generate` gives
    greedily. With a seed s, answer k is drawn with the random numbers of seed s + k.

    An answer ends with an end token of the model (`generation_config.json`), with one of `stop_token_ids`, or
    where its text, special tokens included, contains one of `stop`; what ended it stays in `output_ids`. A
    parameter that is None is what the generation settings state. `extra` may hold `repetition_penalty`,
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

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams) -> GenerationResult:
        """The one answer to a prompt."""
        return await one_answer(self, input_ids, sampling)

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        """All answers to a prompt, sampled in one batch."""
        return await collect(self.stream(input_ids, sampling), input_ids, sampling)

    async def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        """The answers token by token."""
        run = await self._in_thread(lambda model: Sampling(model, input_ids, sampling, self.weight_version))
        while not run.done:
            for chunk in await self._in_thread(lambda _: run.step()):
                yield chunk

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        """The logprobs of `ids[start:]`."""
        version = self.weight_version
        run = await self._in_thread(lambda model: Scoring(model, ids, start, top))
        while await self._in_thread(lambda _: run.step()):
            pass
        return run.scored(version)

    async def close(self) -> None:
        """Release the model after a running forward pass."""
        self._model = None
        await asyncio.to_thread(self._thread.shutdown)

    async def _in_thread(self, work: Callable[[CausalModel], T]) -> T:
        """Runs work with the model in the provider's thread; its result."""
        model = self._model
        if model is None:
            raise ProviderError(f"{self.name} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, model)


def _open(where: str, options: ProviderOptions) -> HuggingFaceProvider:
    provider = HuggingFaceProvider(where)
    provider.model = options.model or provider.model
    return provider


HF = ProviderKind(name="hf", title="a model in this process, by transformers", where="PATH", open=_open)
