"""A token provider: ids in, ids and logprobs out; text never passes through it.

The interface follows existing token-in-token-out providers (arb8020/research, `GenerationResult`): a prompt is a
list of token ids, an answer is the sampled ids with a logprob each, and nothing is ever encoded again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from tito_audit.record.policy_columns import WeightSpans

TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their logprobs, the likeliest first."""


def logged_spans(spans: WeightSpans, tokens: int) -> list[dict[str, Any]]:
    """The weight spans clipped to a number of tokens, as SGLang logs them; [] if one version sampled all."""
    within = [(version, start, min(end, tokens)) for version, start, end in spans if 0 <= start < min(end, tokens)]
    if len({version for version, _, _ in within}) < 2 and sum(end - start for _, start, end in within) == tokens:
        return []
    return [{"version": version, "start": start, "end": end} for version, start, end in within]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. None: the server's or model's own default."""

    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    """None: as many as still fit in the model's context."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end an answer, besides the end tokens of the model."""
    seed: int | None = None
    n: int = 1
    """Answers to sample for one prompt."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to return at each position, possibly including the sampled one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields passed through to the server unchanged."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One sampled answer."""

    input_ids: Sequence[int]
    """`[P]` the prompt exactly as the sampler was given it: a tuple, or the `PromptIds` of its caller."""
    output_ids: tuple[int, ...]
    """`[C]` what was sampled, including the end token if it was sampled."""
    logprobs: tuple[float, ...]
    """`[C]` the sampler's logprob of each sampled token."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    """`[C]` alternatives at each position; None unless asked for."""
    finish_reason: str | None = None
    """`stop`, `length` or whatever else the server says; None when it says nothing."""
    stop_reason: str | int | None = None
    """The stop text or stop token that ended the answer, if the server reports it; it is part of `output_ids`."""
    weight_version: str | None = None
    """The version of the weights; None when the server does not say."""
    weight_spans: WeightSpans = ()
    """Which version sampled which tokens; () when the server does not say."""


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """The next tokens of one answer while it is being sampled."""

    index: int
    """Which of the `n` answers, from 0."""
    output_ids: tuple[int, ...]
    """`[c]` the new tokens; may be () in the last chunk."""
    logprobs: tuple[float, ...]
    """`[c]`"""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    finish_reason: str | None = None
    """Set in the last chunk of the answer."""
    stop_reason: str | int | None = None
    weight_version: str | None = None
    weight_spans: WeightSpans = ()
    """Those of the whole answer so far."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """A model's logprobs for given ids."""

    ids: tuple[int, ...]
    """`[T]` all ids that were scored, context included."""
    start: int
    """The first position with a logprob; at least 1, as nothing comes before the first token."""
    logprobs: tuple[float, ...]
    """`[T - start]` the logprob of `ids[start:]`, each given all ids before it."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    """`[T - start]` None unless asked for."""
    weight_version: str | None = None


@runtime_checkable
class TokenProvider(Protocol):
    """Samples and scores token ids. Every method raises ProviderError when the server or model refuses or fails;
    cancelling a call stops its generation."""

    name: str
    """What it is and where, for messages and logs: `vllm=http://127.0.0.1:8000`."""
    model: str | None
    """The name of the served model; None when it is not known."""

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams) -> GenerationResult:
        """The answer to a prompt; ValueError if `sampling.n` is not 1."""
        ...

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        """All `sampling.n` answers, in the order of their index."""
        ...

    def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        """The answers, token by token as they are sampled; closing the iterator stops generation."""
        ...

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        """The logprobs of `ids[start:]` at temperature 1 (`start` 0 counts as 1), with `top` alternatives each."""
        ...

    async def close(self) -> None:
        """Release connections and memory."""
        ...


@dataclass(slots=True)
class ServerWaits:
    """How long a request has waited for servers; the rest of its time is the gateway's own."""

    seconds: float = 0.0


_WAITS: ContextVar[ServerWaits | None] = ContextVar("waits", default=None)


def count_waits() -> ServerWaits:
    """Start to measure how long the current task waits for servers."""
    waits = ServerWaits()
    _WAITS.set(waits)
    return waits


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time of this block as waiting for a server."""
    waits, began = _WAITS.get(), time.perf_counter()
    try:
        yield
    finally:
        if waits is not None:
            waits.seconds += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class ProviderOptions:
    """What a user can choose about a provider."""

    model: str | None = None
    """The model to use where a server has several; None: its first."""
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    """Timeout of one request in seconds."""
    connections: int = 256
    """How many requests may run at once."""


@dataclass(frozen=True, slots=True)
class ProviderKind:
    """One kind of provider; each file of `providers/` defines one."""

    name: str
    """As in `--provider NAME=WHERE`."""
    title: str
    where: str
    """What follows the `=`: `PATH`, `URL`."""
    open: Callable[[str, ProviderOptions], TokenProvider]
    """The provider for a model or an address; imports what it needs. SetupError when that is missing or wrong."""
