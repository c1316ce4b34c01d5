"""Chunks joined to whole answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from tito_audit.errors import ProviderError
from tito_audit.provider import (
    GenerationChunk,
    GenerationResult,
    SamplingParams,
    TokenProvider,
)


async def one_answer(
    provider: TokenProvider, input_ids: Sequence[int], sampling: SamplingParams
) -> GenerationResult:
    """The one answer to a prompt; ValueError if several are requested."""
    if sampling.n != 1:
        raise ValueError(f"generate gives one answer, and n is {sampling.n}: call generate_n")
    (answer,) = await provider.generate_n(input_ids, sampling)
    return answer


async def collect(
    chunks: AsyncIterator[GenerationChunk], input_ids: Sequence[int], sampling: SamplingParams
) -> tuple[GenerationResult, ...]:
    """The answers of a stream, in the order of their index."""
    parts: list[list[GenerationChunk]] = [[] for _ in range(sampling.n)]
    async for chunk in chunks:
        parts[chunk.index].append(chunk)
    prompt = tuple(int(token) for token in input_ids)
    return tuple(_joined(index, prompt, chunks_of_answer) for index, chunks_of_answer in enumerate(parts))


def _joined(index: int, input_ids: tuple[int, ...], chunks: Sequence[GenerationChunk]) -> GenerationResult:
    """One answer, from its chunks (at least one)."""
    if not chunks:
        raise ProviderError(f"answer {index} is missing")
    last = chunks[-1]
    tops = [chunk.top_logprobs for chunk in chunks if chunk.top_logprobs is not None]
    return GenerationResult(
        input_ids=input_ids,
        output_ids=tuple(token for chunk in chunks for token in chunk.output_ids),
        logprobs=tuple(value for chunk in chunks for value in chunk.logprobs),
        top_logprobs=tuple(top for part in tops for top in part) if tops else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        weight_version=last.weight_version,
        weight_spans=last.weight_spans,
    )
