"""TRL's vLLM server (`trl vllm-serve`), asked with token ids at its endpoint `/generate/`.

TRL 1.0 to 1.10 (huggingface/trl `trl/scripts/vllm_serve.py`: `GenerateRequest`, `GenerateResponse`, from 1.1 on
`SequenceLogprobsRequest`). Older servers take texts; TRL 1.11 and newer start vLLM's own server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tito_audit.errors import ProviderError
from tito_audit.provider import (
    GenerationChunk,
    GenerationResult,
    ProviderKind,
    ProviderOptions,
    SamplingParams,
    ScoredTokens,
    TopLogprobs,
)
from tito_audit.providers._answers import (
    check_sampling,
    join_chunks,
    likeliest,
    list_ids,
    parse_ids,
    parse_logprobs,
    stated_params,
)
from tito_audit.providers._http import ServerProvider

_GENERATE, _SCORE = "/generate/", "/get_sequence_logprobs/"
_FIXED = ("n", "logprobs", "max_tokens", "stop", "stop_token_ids", "seed")
_GATHERING_SECONDS = 0.005


@dataclass(slots=True, eq=False)
class _QueuedCall:
    ids: list[int]
    body: dict[str, Any]
    path: str = _GENERATE
    answer: asyncio.Future[tuple[Any, int]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The server's answer, and the number of this prompt in it."""

    def shares_request(self, other: _QueuedCall) -> bool:
        """Whether one request can carry both calls."""
        return self.path == other.path and (self.path == _SCORE or self.body == other.body)


class TRLProvider(ServerProvider):
    """The server that TRL 1.0 to 1.10 start. The trainer updates its weights, not this provider.

    The server answers one request after the other. So calls that wait are sent together: those with the same
    sampling parameters as one request with several prompts. It mixes up answers when it scores while it samples,
    so it is never asked to do both at once.

    Logprobs are of the distribution that was sampled from, after temperature, top_p, top_k and min_p
    (`processed_logprobs`); scores are at temperature 1. `max_tokens` None is what the server's context leaves.
    Answers come whole, cannot be stopped early, and have no weight version. The server does not say why an answer
    ended; `end_ids` decides. A prompt longer than the context kills the server's worker.
    """

    def __init__(self, base_url: str, options: ProviderOptions | None = None) -> None:
        """`base_url` with or without the path of the endpoint."""
        super().__init__("trl", base_url.rstrip("/").removesuffix(_GENERATE.rstrip("/")), options)
        self.end_ids: Collection[int] = ()
        """The ids that end an answer; whoever has the tokenizer sets them."""
        self._queue: list[_QueuedCall] = []
        self._sender: asyncio.Task[None] | None = None

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        chunks = [chunk async for chunk in self.stream(input_ids, sampling)]
        return join_chunks(chunks, tuple(int(token) for token in input_ids), sampling.n)

    async def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        """The answers, each in one piece: the server does not stream."""
        check_sampling(sampling, _FIXED)
        ids, where, n, top = list_ids(input_ids), f"{self.name}{_GENERATE}", sampling.n, sampling.top_logprobs
        # `generation_kwargs` override the other fields, which know no null.
        params = stated_params(sampling)
        kwargs: dict[str, Any] = {
            name: params.pop(name) for name in ("seed", "stop", "stop_token_ids") if name in params
        }
        kwargs |= sampling.extra
        if sampling.max_tokens is None:
            kwargs["max_tokens"] = None
        body = {**params, "n": n, "logprobs": top, "generation_kwargs": kwargs}
        answer, number = await self._enqueue(_QueuedCall(ids, body))
        prompts = _prompt_rows(answer, "prompt_ids", number, 1, where)
        if prompts != [ids]:
            raise ProviderError(f"{where}: the answer belongs to another prompt than the one that was sent")
        names = ("completion_ids", "logprobs", "logprob_token_ids")
        columns = [_prompt_rows(answer, name, number, n, where) for name in names]
        chunks = []
        for index, (sampled, logprobs, candidates) in enumerate(zip(*columns, strict=True)):
            output_ids = parse_ids(sampled, f"{where}: completion_ids")
            values, tops = _parse_columns(output_ids, logprobs, candidates, top, where)
            # Why it ended, by its last id, and the stop token that ended it.
            last = output_ids[-1] if output_ids else None
            finish_reason, stop_token = "stop", None
            if last in sampling.stop_token_ids and last not in self.end_ids:
                stop_token = last
            elif last not in self.end_ids or sampling.extra.get("ignore_eos"):
                cut = len(output_ids) == sampling.max_tokens or (self.end_ids and not sampling.stop)
                finish_reason = "length" if cut else "stop"
            chunks.append(GenerationChunk(index, output_ids, values, tops, finish_reason, stop_token))
        for chunk in chunks:
            yield chunk

    async def _score(self, ids: list[int], start: int, top: int) -> ScoredTokens:
        """ProviderError for TRL 1.0, which does not score."""
        where = f"{self.name}{_SCORE}"
        body = {"prompt_lengths": [start], "top_logprobs": top, "temperature": 1.0}
        answer, _ = await self._enqueue(_QueuedCall(ids, body, _SCORE))
        (logprobs,) = _prompt_rows(answer, "logprobs", 0, 1, where)
        (candidates,) = _prompt_rows(answer, "logprob_token_ids", 0, 1, where)
        return ScoredTokens(tuple(ids), start, *_parse_columns(ids[start:], logprobs, candidates, top, where))

    async def _enqueue(self, call: _QueuedCall) -> tuple[Any, int]:
        """Queue a call; the server's answer, and the number of its prompt in it."""
        self._queue.append(call)
        if self._sender is None:
            self._sender = asyncio.ensure_future(self._send_queue())
        return await call.answer

    async def _send_queue(self) -> None:
        try:
            await asyncio.sleep(_GATHERING_SECONDS)
            while self._queue:
                first = self._queue[0]
                together = [call for call in self._queue if call.shares_request(first)]
                self._queue = [call for call in self._queue if not call.shares_request(first)]
                wanted = [call for call in together if not call.answer.done()]  # the others were cancelled
                if first.path == _SCORE:
                    await asyncio.gather(*(self._send([call]) for call in wanted))
                elif wanted:
                    await self._send(wanted)
        finally:
            self._sender = None
            for call in self._queue:
                call.answer.cancel()
            self._queue = []

    async def _send(self, calls: Sequence[_QueuedCall]) -> None:
        """Send calls as one request, and give each the answer or the error."""
        path, ids = calls[0].path, [call.ids for call in calls]
        try:
            answer = await self._http.json(
                "POST", path, {"prompts" if path == _GENERATE else "sequences": ids, **calls[0].body}
            )
        except ProviderError as error:
            # Name the version of TRL that causes the error, if one does.
            where = f"{self.name}{path}"
            if error.status in (404, 405) and path == _SCORE:
                error = ProviderError(f"{where}: this server does not score ids (TRL 1.1 to 1.10 do)", status=404)
            elif error.status in (404, 405):
                text = f"{where} does not exist: TRL 1.11 and newer start vLLM's own server; name it "
                error = ProviderError(f"{text}vllm={self._http.base_url}", status=404)
            elif error.status == 422 and '"prompts"' in (error.body or ""):
                error = ProviderError(f"{where}: this server takes texts; ids need TRL 1.0 to 1.10", status=422)
            elif error.status == 500:
                text = f"{error}: the server's own log says why; a prompt longer than its context ends its worker"
                error = ProviderError(text, status=500, body=error.body)
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)
            return
        for number, call in enumerate(calls):
            if not call.answer.done():
                call.answer.set_result((answer, number))


def _prompt_rows(answer: Any, key: str, number: int, each: int, where: str) -> list[Any]:
    """The rows of prompt `number` in an answer that has `each` of them for every prompt."""
    rows = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(rows, list):
        raise ProviderError(f"{where}: not an answer of TRL's server: it has no {key}")
    if len(rows) < (number + 1) * each:
        raise ProviderError(f"{where}: {key} has {len(rows)} rows, too few for the prompts that were sent")
    return rows[number * each : (number + 1) * each]


def _parse_columns(
    ids: Sequence[int], logprobs: Any, candidates: Any, top: int, where: str
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...] | None]:
    """The logprob of each id, and the `top` likeliest tokens at each position; None if `top` is 0."""
    try:
        places = [dict(zip(*pair, strict=True)) for pair in zip(candidates, logprobs, strict=True)]
        chosen = [place[token] for token, place in zip(ids, places, strict=True)]
    except (TypeError, ValueError, KeyError) as error:
        raise ProviderError(
            f"{where}: logprobs and logprob_token_ids do not belong to {len(ids)} tokens ({error})"
        ) from None
    values = parse_logprobs(chosen, where, ids)
    if not top:
        return values, None
    tops = []
    for place in places:
        # null: excluded by top_p, top_k or min_p
        possible = {token: value for token, value in place.items() if value is not None}
        others = parse_ids(list(possible), f"{where}: logprob_token_ids")
        parse_logprobs(list(possible.values()), where, others)
        tops.append(likeliest(possible, top))
    return values, tuple(tops)


TRL = ProviderKind(
    name="trl", title="TRL's vLLM server (trl vllm-serve of TRL 1.0 to 1.10)", where="URL", open=TRLProvider
)
