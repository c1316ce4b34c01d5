"""The two endpoints of vLLM that take token ids: their requests, and where their answers hold the columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from tito_audit.errors import ProviderError
from tito_audit.provider import SamplingParams, TopLogprobs
from tito_audit.providers._answers import answered_ids, answered_logprob, answered_logprobs, likeliest
from tito_audit.record.prompt_ids import PromptIds

Object: TypeAlias = Mapping[str, Any]
Columns: TypeAlias = tuple[tuple[int, ...], tuple[float, ...], tuple[TopLogprobs, ...] | None]
"""The ids, logprobs and alternatives of one choice, or of one piece of it."""

_OURS = ("model", "prompt", "n", "stream", "logprobs", "return_token_ids", "return_tokens_as_token_ids", "echo")
_TOKEN_ID = "token_id:"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the endpoints."""

    path: str
    body: Callable[[str, PromptIds, SamplingParams], dict[str, Any]]
    """The request of a model's name, a prompt and how to sample (`max_tokens` given)."""
    logprobs: Callable[[Object, int], tuple[list[Any], list[dict[int, float]]]]
    """What a choice's `logprobs` hold: the logprob of each token, and the candidates at each position."""
    prompt_in_choice: bool
    """Whether `prompt_token_ids` and `prompt_logprobs` are in the choice; else they are at the top."""
    ours: tuple[str, ...] = _OURS
    """Fields that `extra` must not set."""


def _completions_body(model: str, ids: PromptIds, sampling: SamplingParams) -> dict[str, Any]:
    prompt = orjson.Fragment(ids.json)
    body = {"model": model, "prompt": prompt, "logprobs": sampling.top_logprobs, "return_token_ids": True}
    if sampling.top_logprobs:
        body["return_tokens_as_token_ids"] = True  # else the alternatives are texts
    return {**body, **_parameters(sampling)}


def _tokens_body(model: str, ids: PromptIds, sampling: SamplingParams) -> dict[str, Any]:
    # The sampled token takes one of the places.
    count = sampling.top_logprobs + 1 if sampling.top_logprobs else 0
    parameters = {**_parameters(sampling), "logprobs": count}
    return {
        "model": model,
        "token_ids": orjson.Fragment(ids.json),
        "return_token_ids": True,
        "sampling_params": parameters,
    }


def _parameters(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that are set."""
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
    given: dict[str, Any] = {
        name: getattr(sampling, name) for name in names if getattr(sampling, name) is not None
    }
    if sampling.stop:
        given["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        given["stop_token_ids"] = [int(token) for token in sampling.stop_token_ids]
    if sampling.n != 1:
        given["n"] = sampling.n
    return {**given, **sampling.extra}


def _completions_logprobs(found: Object, top: int) -> tuple[list[Any], list[dict[int, float]]]:
    values = found.get("token_logprobs") or []
    if not top:
        return values, []
    return values, [_by_id(at) for at in found.get("top_logprobs") or []]


def _by_id(candidates: Object | None) -> dict[int, float]:
    """The logprobs of candidates written `token_id:123`, by id."""
    by_id = {}
    for token, value in (candidates or {}).items():
        number = token.removeprefix(_TOKEN_ID)
        if number == token or not number.isdecimal():
            raise ProviderError(
                f"an alternative is the text {token!r}: the server ignores return_tokens_as_token_ids"
            )
        by_id[int(number)] = value
    return by_id


def _tokens_logprobs(found: Object, top: int) -> tuple[list[Any], list[dict[int, float]]]:
    content = found.get("content") or []
    values = [token.get("logprob") for token in content]
    if not top:
        return values, []
    return values, [{each["token_id"]: each["logprob"] for each in token["top_logprobs"]} for token in content]


COMPLETIONS = Endpoint("/v1/completions", _completions_body, _completions_logprobs, True)
TOKENS = Endpoint("/inference/v1/generate", _tokens_body, _tokens_logprobs, False, ("n", "logprobs"))


def columns(endpoint: Endpoint, choice: Object, top: int, where: str) -> Columns:
    """The sampled tokens, checked; ProviderError if ids or logprobs are missing or do not match."""
    ids = choice.get("token_ids")
    if ids is None:
        raise ProviderError(
            f"{where}: the answer has no token_ids: the server ignores return_token_ids (vLLM has it since 0.10.2)"
        )
    ids = answered_ids(ids, f"{where}: token_ids")
    found = choice.get("logprobs")
    if found is None and ids:
        raise ProviderError(f"{where}: the answer has no logprobs, which were requested")
    try:
        values, candidates = endpoint.logprobs(found or {}, top)
    except (TypeError, KeyError, AttributeError) as error:
        raise ProviderError(
            f"{where}: the logprobs have an unknown form: {type(error).__name__}: {error}"
        ) from None
    logprobs = answered_logprobs(values, where, ids)
    return ids, logprobs, _alternatives(candidates, top, ids, where) if top else None


def _alternatives(
    candidates: Sequence[dict[int, float]], top: int, ids: Sequence[int], where: str
) -> tuple[TopLogprobs, ...]:
    """The likeliest tokens at each position, checked."""
    if len(candidates) != len(ids):
        raise ProviderError(f"{where}: {len(ids)} tokens, and alternatives for {len(candidates)}")
    for at, each in enumerate(candidates):
        for value in each.values():
            answered_logprob(value, f"{where}, an alternative of token {at}")
    return tuple(likeliest(each, top) for each in candidates)


def weight_version(choice: Object) -> str | None:
    """The versions of the weights that sampled an answer, several joined by a comma; None if not stated."""
    spans = choice.get("weight_versions")
    if not isinstance(spans, list):
        return None
    versions = [str(span.get("version")) for span in spans if isinstance(span, dict)]
    return ",".join(dict.fromkeys(versions)) or None


def prompt_columns(
    entries: Any, ids: Sequence[int], start: int, top: int, where: str
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...] | None]:
    """The logprobs of `ids[start:]` from `prompt_logprobs`, and the alternatives if requested."""
    if not isinstance(entries, list):
        raise ProviderError(f"{where}: the answer has no prompt_logprobs, which were requested")
    if len(entries) != len(ids):
        raise ProviderError(f"{where}: {len(ids)} ids were sent, and prompt_logprobs hold {len(entries)}")
    logprobs, tops = [], []
    for at in range(start, len(ids)):
        entry = entries[at] if isinstance(entries[at], dict) else {}
        place = f"{where}, prompt token {at}"
        try:
            found = {int(token): answered_logprob(each.get("logprob"), place) for token, each in entry.items()}
        except (ValueError, AttributeError) as error:
            raise ProviderError(f"{place}: prompt_logprobs have an unknown form: {error}") from None
        if ids[at] not in found:
            raise ProviderError(f"{place}: prompt_logprobs do not hold id {ids[at]}, which was sent")
        logprobs.append(found[ids[at]])
        tops.append(likeliest(found, top))
    return tuple(logprobs), tuple(tops) if top else None
