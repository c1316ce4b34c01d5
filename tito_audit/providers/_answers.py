"""Answers of any server: ids, logprobs and the prompt that was sent are checked, and chunks are joined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tito_audit.errors import ProviderError
from tito_audit.provider import GenerationChunk, GenerationResult, SamplingParams, TokenProvider, TopLogprobs
from tito_audit.record.policy_columns import WeightSpans
from tito_audit.record.prompt_ids import PromptIds

_ROUNDING = 1e-3
"""How far rounding may put a logprob above 0."""


def plain_ids(ids: Sequence[int]) -> list[int]:
    """The ids to send as JSON integers; ProviderError with status 400 if not token ids."""
    return list(prompt_ids(ids))


def prompt_ids(ids: Sequence[int]) -> PromptIds:
    """The ids of one prompt; an array is returned as it is."""
    prompt = ids if isinstance(ids, PromptIds) else PromptIds(tuple(int(token) for token in ids))
    if (wrong := prompt.first_below(0)) is not None:
        raise ProviderError(f"id {prompt[wrong]} at position {wrong} is not a token id", status=400)
    if not len(prompt):
        raise ProviderError("there are no ids: a model needs at least one token to continue", status=400)
    return prompt


def checked_sampling(sampling: SamplingParams, ours: Iterable[str]) -> None:
    """ProviderError with status 400 if no server can do it, or if `extra` sets a field that the provider needs."""
    if sampling.n < 1:
        raise ProviderError(f"n is {sampling.n}; it has to be at least 1", status=400)
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise ProviderError(f"max_tokens is {sampling.max_tokens}; it has to be at least 1", status=400)
    reserved = sorted(sampling.extra.keys() & set(ours))
    if reserved:
        raise ProviderError(f"{', '.join(reserved)} cannot be set in extra: the provider sets it", status=400)


def stated(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that are not left to the server."""
    parameters = {
        **{
            name: getattr(sampling, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
        },
        "stop": list(sampling.stop) or None,
        "stop_token_ids": [int(token) for token in sampling.stop_token_ids] or None,
        "n": sampling.n if sampling.n != 1 else None,
    }
    return {name: value for name, value in parameters.items() if value is not None}


def weight_spans(answer: Mapping[str, Any]) -> WeightSpans:
    """The `weight_versions` of an answer, objects of `version`, `start` and `end`; () if it has none.

    sgl-project/sglang `srt/utils/weight_versions.py` and vllm-project/vllm name half-open ranges of tokens.
    """
    spans = answer.get("weight_versions")
    if not isinstance(spans, list):
        return ()
    named: list[tuple[str, int, int]] = []
    for span in spans:
        start, end = (span.get("start"), span.get("end")) if isinstance(span, dict) else (None, None)
        if type(start) is not int or type(end) is not int:
            return ()
        named.append((str(span.get("version")), start, end))
    return tuple(named)


def answered_ids(value: Any, where: str) -> tuple[int, ...]:
    """A list of token ids; ProviderError if not."""
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise ProviderError(f"{where} are not token ids: {str(value)[:100]}")
    return tuple(value)


def answered_logprobs(values: Sequence[Any], where: str, ids: Sequence[int]) -> tuple[float, ...]:
    """A logprob for each of the ids; ProviderError for fewer or more, null, NaN or logits."""
    if len(values) != len(ids):
        raise ProviderError(f"{where}: {len(ids)} tokens and {len(values)} logprobs")
    return tuple(answered_logprob(value, f"{where}, token {at}") for at, value in enumerate(values))


def answered_logprob(value: Any, where: str) -> float:
    """One logprob as a number; ProviderError if it is not a possible one."""
    if type(value) not in (float, int) or not math.isfinite(value):
        raise ProviderError(
            f"{where}: the logprob is {'null' if value is None else str(value)[:40]}, not a number"
        )
    if value > _ROUNDING:
        raise ProviderError(
            f"{where}: the logprob is {value:g}, above 0: the server returns logits "
            "(start vLLM with --logprobs-mode raw_logprobs)"
        )
    return float(value)


def likeliest(candidates: Mapping[int, float], count: int) -> TopLogprobs:
    """The `count` likeliest tokens, the likeliest first: servers add the sampled token to them."""
    ordered = sorted(candidates.items(), key=lambda pair: -pair[1])
    return tuple(ordered[:count])


def in_order(indexes: Sequence[Any], n: int, where: str) -> None:
    """ProviderError unless these are the indexes of `n` answers, each once."""
    if sorted(index for index in indexes if type(index) is int) != list(range(n)) or len(indexes) != n:
        raise ProviderError(f"{where}: {n} answers were requested, and these came: {list(indexes)}")


def finished(reason: Any, where: str) -> str:
    """Why an answer ended; ProviderError if it did not, or if the server aborted it."""
    if not isinstance(reason, str):
        raise ProviderError(f"{where}: the answer has no finish_reason: it is not complete")
    if reason in ("abort", "error"):
        raise ProviderError(f"{where}: the server aborted the answer (finish_reason {reason!r})")
    return reason


def counted(results: Sequence[GenerationResult], stated: Any, where: str) -> None:
    """ProviderError if the server states another number of sampled tokens than it returned."""
    returned = sum(len(result.output_ids) for result in results)
    if type(stated) is int and stated != returned:
        raise ProviderError(f"{where}: the server sampled {stated} tokens and returned {returned}")


async def one_answer(
    provider: TokenProvider, input_ids: Sequence[int], sampling: SamplingParams
) -> GenerationResult:
    """The one answer to a prompt; ValueError if several are requested."""
    if sampling.n != 1:
        raise ValueError(f"generate gives one answer, and n is {sampling.n}: call generate_n")
    (answer,) = await provider.generate_n(input_ids, sampling)
    return answer


def joined(chunks: Iterable[GenerationChunk], input_ids: Sequence[int], n: int) -> tuple[GenerationResult, ...]:
    """The `n` answers to a prompt that these chunks add up to, in the order of their index."""
    parts: list[list[GenerationChunk]] = [[] for _ in range(n)]
    for chunk in chunks:
        parts[chunk.index].append(chunk)
    results = []
    for index, pieces in enumerate(parts):
        if not pieces:
            raise ProviderError(f"answer {index} is missing")
        last = pieces[-1]
        tops = [piece.top_logprobs for piece in pieces if piece.top_logprobs is not None]
        result = GenerationResult(
            input_ids=input_ids,
            output_ids=tuple(token for piece in pieces for token in piece.output_ids),
            logprobs=tuple(value for piece in pieces for value in piece.logprobs),
            top_logprobs=tuple(top for part in tops for top in part) if tops else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            weight_version=last.weight_version,
            weight_spans=last.weight_spans,
        )
        results.append(result)
    return tuple(results)
