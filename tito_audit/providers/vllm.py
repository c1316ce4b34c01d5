"""vLLM's OpenAI server, asked with token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.errors import ProviderError
from tito_audit.parser import Parsed
from tito_audit.provider import (
    GenerationChunk,
    GenerationResult,
    ProviderKind,
    ProviderOptions,
    SamplingParams,
    ScoredTokens,
    TopLogprobs,
)
from tito_audit.providers._answers import checked_sampling, counted, finished, in_order, plain_ids, prompt_ids
from tito_audit.providers._collect import one_answer
from tito_audit.providers._derender import PATH as DERENDER
from tito_audit.providers._derender import derender_body, derendered
from tito_audit.providers._echo import SAME
from tito_audit.providers._http import Http
from tito_audit.providers._served import Finder, objects
from tito_audit.providers._vllm import (
    COMPLETIONS,
    TOKENS,
    Object,
    columns,
    prompt_columns,
    weight_version,
)
from tito_audit.record.prompt_ids import PromptIds

_LOGITS = ("raw_logits", "processed_logits")


class VLLMProvider:
    """A vLLM server. The prompt is sent as ids; the answer holds ids, logprobs, and the prompt's ids for
    comparison.

    By default `/v1/completions` is called, which every version that returns ids has (0.10.2 and newer). An address
    that ends in `/inference/v1/generate` chooses that newer endpoint, which also states the version of the
    weights. Both return the same ids and logprobs. Logprobs are what the server's --logprobs-mode makes of them:
    by default of the full distribution at temperature 1, before penalties and truncation; under
    `structured_outputs` of the tokens that the grammar allows. -9999.0 is the lowest.

    `max_tokens` None is what the server's context leaves. A text that stopped an answer stays in `output_ids`,
    whatever `include_stop_str_in_output` does to texts. `extra` passes through.
    """

    def __init__(self, base_url: str, options: ProviderOptions | None = None) -> None:
        """`base_url` with or without the path of an endpoint."""
        self._options = options or ProviderOptions()
        # The root of a server, and the endpoint that its address names.
        url = base_url.rstrip("/")
        if url.endswith(TOKENS.path):
            endpoint_of = (url.removesuffix(TOKENS.path), TOKENS)
        else:
            endpoint_of = (url.removesuffix(COMPLETIONS.path).removesuffix("/v1"), COMPLETIONS)
        root, self._endpoint = endpoint_of
        self._http = Http(root, self._options)
        self.name = f"vllm={self._http.base_url}"
        self.model: str | None = self._options.model
        self.logprobs_mode: str | None = None
        """As the server states it (in its development mode); None: not stated."""
        self._finder = Finder(self._http, self.name, self._options.model, self._check_mode)

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams) -> GenerationResult:
        """The one answer to a prompt."""
        return await one_answer(self, input_ids, sampling)

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        """All answers to a prompt, by one request."""
        ids = prompt_ids(input_ids)
        body = await self._body(ids, sampling)
        answer = await self._http.json("POST", self._endpoint.path, body, sent=ids)
        choices = _choices(answer, self._where)
        in_order([choice.get("index") for choice in choices], sampling.n, self._where)
        results = tuple(
            self._result(answer, choice, ids, sampling) for choice in sorted(choices, key=lambda one: one["index"])
        )
        counted(results, (answer.get("usage") or {}).get("completion_tokens"), self._where)
        return results

    async def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        """The answers as they are sampled."""
        ids = prompt_ids(input_ids)
        body = {**await self._body(ids, sampling), "stream": True}
        ended: list[int] = []
        prompt_seen = False
        async for event in self._http.events(self._endpoint.path, body, sent=ids):
            for choice in _choices(event, self._where):
                prompt_seen |= self._same_prompt(event, choice, ids)
                chunk = self._chunk(choice, sampling)
                if chunk.finish_reason is not None:
                    ended.append(chunk.index)
                yield chunk
        in_order(ended, sampling.n, f"{self._where} (ends of answers in the stream)")
        if not prompt_seen:
            raise self._no_prompt()

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        """The logprobs of `ids[start:]`, by `prompt_logprobs`."""
        plain, first = plain_ids(ids), max(1, start)
        if first > len(plain):
            raise ProviderError(f"there are {len(plain)} ids, and no position {start} to score from", status=400)
        if first == len(plain):
            return ScoredTokens(tuple(plain), first, (), () if top else None)
        served = await self._finder.find()
        whole = served.context is None or len(plain) < served.context
        sent = plain if whole else plain[:-1]
        answer, choice = await self._scored(sent, plain[len(sent) :], top)
        entries = (choice if self._endpoint.prompt_in_choice else answer).get("prompt_logprobs")
        logprobs, tops = prompt_columns(entries, sent, first, top, self._where)
        if not whole:
            last, last_tops = self._last(choice, plain[-1], top)
            logprobs, tops = logprobs + last, None if tops is None else tops + last_tops
        return ScoredTokens(tuple(plain), first, logprobs, tops, weight_version(choice))

    async def _scored(self, ids: list[int], rest: list[int], top: int) -> tuple[Object, Object]:
        """The answer to ids as a prompt, and its choice. A server samples at least one token: any, or, if the ids
        fill its context, the last of them, which then is not sent.
        """
        extra: dict[str, Any] = {"prompt_logprobs": top}
        if rest:
            extra["allowed_token_ids"] = rest
        one = SamplingParams(temperature=0.0, max_tokens=1, top_logprobs=top if rest else 0, extra=extra)
        prompt = PromptIds(tuple(ids))
        answer = await self._http.json("POST", self._endpoint.path, await self._body(prompt, one), sent=prompt)
        (choice,) = _choices(answer, self._where)[:1] or [{}]
        if not self._same_prompt(answer, choice, prompt):
            raise self._no_prompt()
        return answer, choice

    def _last(self, choice: Object, token: int, top: int) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...]]:
        """The logprob of the last token of a full context, which was the only token allowed to be sampled."""
        ids, logprobs, tops = columns(self._endpoint, choice, top, self._where)
        if ids != (token,) or logprobs == (0.0,):  # 0: the logprob among the allowed tokens, not among all
            raise ProviderError(f"{self._where}: the ids fill the context, and the last of them cannot be scored")
        return logprobs, tops or ()

    async def derender(
        self, results: Sequence[GenerationResult], chat_request: Mapping[str, Any]
    ) -> tuple[Parsed, ...]:
        """Answers to one prompt as the server's own parsers read them (--tool-call-parser,
        `--reasoning-parser`); ProviderError if it has no such endpoint.

        `chat_request`: the body of the chat completion that they answer; without tools no call is read. The server
        writes arguments anew: `{"a":1}` comes back as `{"a": 1}`.
        """
        if not results:
            return ()
        body = derender_body(await self.find_model(), results, chat_request)
        where = f"vllm={self._http.base_url}{DERENDER}"
        try:
            answer = await self._http.json("POST", DERENDER, body)
        except ProviderError as error:
            if error.status == 404:
                raise ProviderError(
                    f"{where}: this server does not parse answers; start it with --enable-scale-out, or choose a "
                    "parser by name",
                    status=404,
                ) from None
            raise
        return derendered(answer, len(results), where)

    async def find_model(self) -> str:
        """The name of the served model, which is `model` from now on; ProviderError if the server does not say."""
        self.model = (await self._finder.find()).model
        return self.model

    async def tokenized(self, text: str) -> list[int] | None:
        """The ids of a text by the server's own tokenizer; None if it has no such endpoint."""
        asked = {"model": await self.find_model(), "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._http.json("POST", "/tokenize", asked)
        except ProviderError as error:
            if error.status in (404, 405):
                return None
            raise
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        return ids if isinstance(ids, list) else None

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    @property
    def _where(self) -> str:
        return f"vllm={self._http.base_url}{self._endpoint.path}"

    async def _body(self, ids: PromptIds, sampling: SamplingParams) -> dict[str, Any]:
        """The request, with the model's name and a stated `max_tokens`."""
        checked_sampling(sampling, self._endpoint.ours)
        served = await self._finder.find()
        self.model = served.model
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=served.room(len(ids), self.name))
        return self._endpoint.body(served.model, ids, sampling)

    async def _check_mode(self) -> None:
        """Read `logprobs_mode` where the server states it; ProviderError if it returns logits."""
        try:
            info = await self._http.json("GET", "/server_info?config_format=json")
            self.logprobs_mode = str(info["vllm_config"]["model_config"]["logprobs_mode"])
        except (ProviderError, TypeError, KeyError):
            return
        if self.logprobs_mode in _LOGITS:
            raise ProviderError(
                f"{self.name} returns logits as logprobs (--logprobs-mode {self.logprobs_mode}): "
                "start it with --logprobs-mode raw_logprobs"
            )

    def _result(
        self, answer: Object, choice: Object, ids: PromptIds, sampling: SamplingParams
    ) -> GenerationResult:
        """One choice of an answer, checked."""
        if not self._same_prompt(answer, choice, ids):
            raise self._no_prompt()
        output_ids, logprobs, tops = columns(self._endpoint, choice, sampling.top_logprobs, self._where)
        return GenerationResult(
            input_ids=ids.whole,
            output_ids=output_ids,
            logprobs=logprobs,
            top_logprobs=tops,
            finish_reason=finished(choice.get("finish_reason"), self._where),
            stop_reason=choice.get("stop_reason"),
            weight_version=weight_version(choice),
        )

    def _chunk(self, choice: Object, sampling: SamplingParams) -> GenerationChunk:
        """One piece of a choice, checked."""
        output_ids, logprobs, tops = columns(self._endpoint, choice, sampling.top_logprobs, self._where)
        index, reason = choice.get("index"), choice.get("finish_reason")
        if type(index) is not int or not 0 <= index < sampling.n:
            raise ProviderError(
                f"{self._where}: {sampling.n} answers were requested, and one has the index {index}"
            )
        return GenerationChunk(
            index=index,
            output_ids=output_ids,
            logprobs=logprobs,
            top_logprobs=tops,
            finish_reason=None if reason is None else finished(reason, self._where),
            stop_reason=choice.get("stop_reason"),
            weight_version=weight_version(choice),
        )

    def _same_prompt(self, answer: Object, choice: Object, ids: PromptIds) -> bool:
        """Whether the answer repeats the prompt; ProviderError if it is not the one that was sent."""
        found = (choice if self._endpoint.prompt_in_choice else answer).get("prompt_token_ids")
        if found is None:
            return False
        # A list written differently is compared as numbers.
        if found != SAME and found != list(ids):
            size = len(found) if isinstance(found, list) else 0
            raise ProviderError(
                f"{self._where}: the answer belongs to another prompt: {len(ids)} ids were sent, "
                f"and the server used {size}, or different ones"
            )
        return True

    def _no_prompt(self) -> ProviderError:
        return ProviderError(
            f"{self._where}: the answer has no prompt_token_ids: the server ignores return_token_ids "
            "(vLLM has it since 0.10.2)"
        )


def _choices(answer: Any, where: str) -> list[Object]:
    """The choices of an answer."""
    if not isinstance(answer, dict) or "choices" not in answer:
        raise ProviderError(f"{where}: not an answer of vLLM: it has no choices")
    return list(objects(answer, "choices"))


VLLM = ProviderKind(name="vllm", title="a vLLM server", where="URL", open=VLLMProvider)
