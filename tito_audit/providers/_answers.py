"""What the providers share: checks of requests and of answers, and chunks joined to answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tito_audit.errors import ProviderError
from tito_audit.provider import GenerationChunk, GenerationResult, SamplingParams, TokenProvider, TopLogprobs
from tito_audit.record.policy_columns import WeightSpans
from tito_audit.record.prompt_ids import PromptIds

_ROUNDING = 1e-3
"""How far above 0 rounding may put a logprob."""


def list_ids(ids: Sequence[int]) -> list[int]:
    """The ids of a prompt as a list; ProviderError with status 400 if one is not a token id or there are none."""
    return list(prompt_ids(ids))


def prompt_ids(ids: Sequence[int]) -> PromptIds:
    """The ids of a prompt; ProviderError with status 400 if one is not a token id or there are none."""
    prompt = ids if isinstance(ids, PromptIds) else PromptIds(tuple(int(token) for token in ids))
    if (wrong := prompt.first_below(0)) is not None:
        raise ProviderError(f"id {prompt[wrong]} at position {wrong} is not a token id", status=400)
    if not len(prompt):
        raise ProviderError("there are no ids: a model needs at least one token to continue", status=400)
    return prompt


def check_sampling(sampling: SamplingParams, fixed: Iterable[str]) -> None:
    """ProviderError with status 400 if a count is below 1, or if `extra` has a field that the provider sets."""
    if sampling.n < 1:
        raise ProviderError(f"n is {sampling.n}; it has to be at least 1", status=400)
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise ProviderError(f"max_tokens is {sampling.max_tokens}; it has to be at least 1", status=400)
    reserved = sorted(sampling.extra.keys() & set(fixed))
    if reserved:
        raise ProviderError(f"{', '.join(reserved)} cannot be set in extra: the provider sets it", status=400)


def stated_params(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that are set, as a server takes them."""
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


def parse_weight_spans(answer: Mapping[str, Any]) -> WeightSpans:
    """The `weight_versions` of an answer: objects with `version` and the half-open range `start`, `end`; () if it
    has none or another form. As in sgl-project/sglang `srt/utils/weight_versions.py` and vllm-project/vllm.
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


def parse_ids(value: Any, where: str) -> tuple[int, ...]:
    """The ids of an answer; ProviderError if they are not a list of token ids."""
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise ProviderError(f"{where} are not token ids: {str(value)[:100]}")
    return tuple(value)


def parse_logprobs(values: Sequence[Any], where: str, ids: Sequence[int]) -> tuple[float, ...]:
    """A logprob for each of the ids; ProviderError if there are fewer or more, or one is not a logprob."""
    if len(values) != len(ids):
        raise ProviderError(f"{where}: {len(ids)} tokens and {len(values)} logprobs")
    return tuple(parse_logprob(value, f"{where}, token {at}") for at, value in enumerate(values))


def parse_logprob(value: Any, where: str) -> float:
    """One logprob; ProviderError for null, NaN, an infinity, or a logit above 0."""
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
    """The `count` likeliest candidates, the likeliest first; servers may return one more, the sampled token."""
    ordered = sorted(candidates.items(), key=lambda pair: -pair[1])
    return tuple(ordered[:count])


def check_indexes(indexes: Sequence[Any], n: int, where: str) -> None:
    """ProviderError unless these are the numbers from 0 to `n` - 1, each once, in any order."""
    if sorted(index for index in indexes if type(index) is int) != list(range(n)) or len(indexes) != n:
        raise ProviderError(f"{where}: {n} answers were requested, and these came: {list(indexes)}")


def parse_finish_reason(reason: Any, where: str) -> str:
    """The finish reason; ProviderError if there is none, or if the server aborted the answer."""
    if not isinstance(reason, str):
        raise ProviderError(f"{where}: the answer has no finish_reason: it is not complete")
    if reason in ("abort", "error"):
        raise ProviderError(f"{where}: the server aborted the answer (finish_reason {reason!r})")
    return reason


def check_count(results: Sequence[GenerationResult], stated: Any, where: str) -> None:
    """ProviderError if the server states another number of sampled tokens than it returned."""
    returned = sum(len(result.output_ids) for result in results)
    if type(stated) is int and stated != returned:
        raise ProviderError(f"{where}: the server sampled {stated} tokens and returned {returned}")


async def generate_one(
    provider: TokenProvider, input_ids: Sequence[int], sampling: SamplingParams
) -> GenerationResult:
    """The only answer to a prompt; ValueError if several are requested."""
    if sampling.n != 1:
        raise ValueError(f"generate gives one answer, and n is {sampling.n}: call generate_n")
    (answer,) = await provider.generate_n(input_ids, sampling)
    return answer


def join_chunks(chunks: Iterable[GenerationChunk], prompt: Sequence[int], n: int) -> tuple[GenerationResult, ...]:
    """The `n` answers that these chunks make up, by their index; ProviderError if one is missing."""
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
            input_ids=prompt,
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
