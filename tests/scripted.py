"""A token provider that says what was planned: ids by their texts, with logprobs that tell them apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from tests.toy import toy_tokenizer
from tito_audit.provider import GenerationChunk, GenerationResult, SamplingParams, ScoredTokens

__all__ = ["END", "Scripted", "ids_of", "spelled"]

END = "<|im_end|>"


def ids_of(text: str) -> list[int]:
    """The toy tokenizer's own ids of a text."""
    ids: list[int] = toy_tokenizer().encode(text).tolist()
    return ids


def spelled(text: str) -> list[int]:
    """Ids that spell a text one character at a time, so that no tokenizer would write them."""
    return [token_id for character in text for token_id in ids_of(character)]


class Scripted:
    """Gives its answers in their order, and keeps the prompts and parameters that it was sent."""

    name = "scripted"
    model: str | None = "org/toy"

    def __init__(self, answers: Iterable[Any]) -> None:
        self.answers = list(answers)
        self.prompts: list[Any] = []
        self.asked: list[SamplingParams] = []
        self.closed = False
        self._given = 0

    def _ask(self, input_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.prompts.append(input_ids)
        self.asked.append(sampling)

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams) -> GenerationResult:
        """The next answer."""
        (answer,) = await self.generate_n(input_ids, sampling)
        return answer

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        """The next answers. A text is given with its end token, ids as they are."""
        self._ask(list(input_ids), sampling)
        return tuple(self._next(input_ids) for _ in range(sampling.n))

    def _next(self, input_ids: Sequence[int]) -> GenerationResult:
        answer = self.answers.pop(0)
        if isinstance(answer, GenerationResult):
            return answer
        ids = ids_of(answer + END) if isinstance(answer, str) else list(answer)
        self._given += 1
        logprobs = tuple(
            -round(0.05 + (token_id * 37 + self._given * 11 + place * 53) % 200 / 100, 4)
            for place, token_id in enumerate(ids)
        )
        reason = "stop" if ids and ids[-1] == ids_of(END)[0] else "length"
        return GenerationResult(tuple(input_ids), tuple(ids), logprobs, finish_reason=reason, weight_version="7")

    async def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        """The next answers, each in one piece."""
        for index, result in enumerate(await self.generate_n(input_ids, sampling)):
            yield GenerationChunk(index, result.output_ids, result.logprobs, finish_reason=result.finish_reason)

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        """Every token has the logprob -1; the likeliest others are the ids after it."""
        first = max(start, 1)
        tops = tuple(tuple((token_id + k, -1.0 - k) for k in range(top)) for token_id in ids[first:])
        return ScoredTokens(tuple(ids), first, (-1.0,) * (len(ids) - first), tops if top else None)

    async def close(self) -> None:
        """Note that it was closed."""
        self.closed = True
