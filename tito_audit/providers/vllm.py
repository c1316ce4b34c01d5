"""vLLM's OpenAI server, asked with token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import orjson

from tito_audit.errors import ProviderError
from tito_audit.parser import Parsed, ParsedCall
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
    check_count,
    check_indexes,
    check_sampling,
    join_chunks,
    likeliest,
    parse_finish_reason,
    parse_ids,
    parse_logprob,
    parse_logprobs,
    parse_weight_spans,
    prompt_ids,
    stated_params,
)
from tito_audit.providers._http import ECHOED, ModelServer, object_list
from tito_audit.record.prompt_ids import PromptIds

RENDER, DERENDER = "/v1/chat/completions/render", "/v1/chat/completions/derender"
COMPLETIONS, TOKENS = "/v1/completions", "/inference/v1/generate"
"""The two endpoints that take token ids."""

Object: TypeAlias = Mapping[str, Any]
_FIXED = ("model", "prompt", "n", "stream", "logprobs", "return_token_ids", "return_tokens_as_token_ids", "echo")
_TOKEN_ID = "token_id:"


def joined_versions(choice: Object) -> str | None:
    """The versions of the weights that sampled an answer, joined by commas; None if not stated."""
    spans = choice.get("weight_versions")
    if not isinstance(spans, list):
        return None
    versions = [str(span.get("version")) for span in spans if isinstance(span, dict)]
    return ",".join(dict.fromkeys(versions)) or None


def parse_prompt_logprobs(
    entries: Any, ids: Sequence[int], start: int, top: int, where: str
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...] | None]:
    """The logprobs of `ids[start:]`, and the `top` alternatives at each position; None if `top` is 0."""
    if not isinstance(entries, list):
        raise ProviderError(f"{where}: the answer has no prompt_logprobs, which were requested")
    if len(entries) != len(ids):
        raise ProviderError(f"{where}: {len(ids)} ids were sent, and prompt_logprobs hold {len(entries)}")
    logprobs, tops = [], []
    for at in range(start, len(ids)):
        entry = entries[at] if isinstance(entries[at], dict) else {}
        place = f"{where}, prompt token {at}"
        try:
            by_id = {int(token): parse_logprob(each.get("logprob"), place) for token, each in entry.items()}
        except (ValueError, AttributeError) as error:
            raise ProviderError(f"{place}: prompt_logprobs have an unknown form: {error}") from None
        if ids[at] not in by_id:
            raise ProviderError(f"{place}: prompt_logprobs do not hold id {ids[at]}, which was sent")
        logprobs.append(by_id[ids[at]])
        tops.append(likeliest(by_id, top))
    return tuple(logprobs), tuple(tops) if top else None


_LOGITS_MODES = ("raw_logits", "processed_logits")


class VLLMProvider(ModelServer):
    """A vLLM server. Prompts are sent as ids; answers hold ids and logprobs, and repeat the prompt's ids.

    The endpoint is `/v1/completions`, which returns ids since 0.10.2. An address that ends in
    `/inference/v1/generate` chooses that newer endpoint, which also states the version of the weights. Both return
    the same ids and logprobs. Logprobs follow the server's --logprobs-mode: by default they are of the full
    distribution at temperature 1, before penalties and truncation, and under `structured_outputs` of the tokens
    that the grammar allows. -9999.0 is the lowest.

    `max_tokens` None is what the server's context leaves. A text that stopped an answer stays in `output_ids`,
    whatever `include_stop_str_in_output` does to texts. `extra` passes through.
    """

    def __init__(self, base_url: str, options: ProviderOptions | None = None) -> None:
        """`base_url` with or without the path of an endpoint."""
        root = base_url.rstrip("/")
        self._path = TOKENS if root.endswith(TOKENS) else COMPLETIONS
        root = root.removesuffix(self._path)
        super().__init__("vllm", root if self._path == TOKENS else root.removesuffix("/v1"), options)
        self._where = f"{self.name}{self._path}"
        self.logprobs_mode: str | None = None
        """As the server states it, in its development mode only; None if it does not."""

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        ids = prompt_ids(input_ids)
        answer = await self._http.json("POST", self._path, await self._body(ids, sampling), sent=ids)
        choices = _choices(answer, self._where)
        check_indexes([choice.get("index") for choice in choices], sampling.n, self._where)
        chunks = []
        for choice in sorted(choices, key=lambda choice: choice["index"]):
            if not self._echoes_prompt(answer, choice, ids):
                raise self._no_echo()
            chunks.append(self._chunk(choice, sampling.top_logprobs, ends=True))
        results = join_chunks(chunks, ids.original, sampling.n)
        check_count(results, (answer.get("usage") or {}).get("completion_tokens"), self._where)
        return results

    async def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        ids = prompt_ids(input_ids)
        body = {**await self._body(ids, sampling), "stream": True}
        ended: list[int] = []
        prompt_seen = False
        async for event in self._http.events(self._path, body, sent=ids):
            for choice in _choices(event, self._where):
                prompt_seen |= self._echoes_prompt(event, choice, ids)
                chunk = self._chunk(choice, sampling.top_logprobs, ends=choice.get("finish_reason") is not None)
                if type(chunk.index) is not int or not 0 <= chunk.index < sampling.n:
                    raise ProviderError(
                        f"{self._where}: {sampling.n} answers were requested, and one has the index {chunk.index}"
                    )
                if chunk.finish_reason is not None:
                    ended.append(chunk.index)
                yield chunk
        check_indexes(ended, sampling.n, f"{self._where} (ends of answers in the stream)")
        if not prompt_seen:
            raise self._no_echo()

    async def _score(self, ids: list[int], start: int, top: int) -> ScoredTokens:
        """Scores by `prompt_logprobs`. The server samples at least one token: any one, or, if the ids fill its
        context, the last of them, which is not sent then.
        """
        served = await self.served()
        whole = served.context is None or len(ids) < served.context
        sent = PromptIds(tuple(ids if whole else ids[:-1]))
        extra = {"prompt_logprobs": top} if whole else {"prompt_logprobs": top, "allowed_token_ids": ids[-1:]}
        params = SamplingParams(temperature=0.0, max_tokens=1, top_logprobs=0 if whole else top, extra=extra)
        answer = await self._http.json("POST", self._path, await self._body(sent, params), sent=sent)
        (choice,) = _choices(answer, self._where)[:1] or [{}]
        if not self._echoes_prompt(answer, choice, sent):
            raise self._no_echo()
        entries = self._prompt_holder(answer, choice).get("prompt_logprobs")
        logprobs, tops = parse_prompt_logprobs(entries, sent.original, start, top, self._where)
        if not whole:
            # The last token of a full context, which was the only token allowed to be sampled.
            sampled, last, last_tops = self._parse_columns(choice, top)
            if sampled != (ids[-1],) or last == (0.0,):  # 0: the logprob among the allowed tokens, not among all
                raise ProviderError(
                    f"{self._where}: the ids fill the context, and the last of them cannot be scored"
                )
            logprobs, tops = logprobs + last, None if tops is None else tops + (last_tops or ())
        return ScoredTokens(tuple(ids), start, logprobs, tops, joined_versions(choice))

    async def derender(
        self, results: Sequence[GenerationResult], chat_request: Mapping[str, Any]
    ) -> tuple[Parsed, ...]:
        """The answers to one prompt as the server's own parsers read them (--tool-call-parser,
        `--reasoning-parser`); ProviderError if it has no such endpoint.

        `chat_request` is the body of the chat completion that they answer; without tools no call is parsed. The
        server rewrites arguments: `{"a":1}` comes back as `{"a": 1}`.
        """
        if not results:
            return ()
        model = await self.find_model()
        choices = [
            {
                "index": index,
                "token_ids": list(result.output_ids),
                "finish_reason": result.finish_reason,
                "stop_reason": result.stop_reason,
            }
            for index, result in enumerate(results)
        ]
        body = {
            "model": model,
            "generate_response": {"request_id": "derender", "model": model, "choices": choices},
            "chat_request": {**chat_request, "model": model, "stream": False},
            "prompt_tokens": len(results[0].input_ids),
            "prompt_token_ids": list(results[0].input_ids),
        }
        where = f"{self.name}{DERENDER}"
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
        answered = answer.get("choices") if isinstance(answer, Mapping) else None
        try:
            parsed = {}
            for choice in answered or ():
                message = choice["message"]
                calls = (call["function"] for call in message.get("tool_calls") or ())
                parsed[choice["index"]] = Parsed(
                    message.get("content") or None,
                    message.get("reasoning") or message.get("reasoning_content") or None,
                    tuple(ParsedCall(call["name"], call["arguments"]) for call in calls),
                )
            return tuple(parsed[index] for index in range(len(results)))
        except (AttributeError, KeyError, TypeError) as error:
            raise ProviderError(
                f"{where}: {len(results)} answers were sent, and not all came back parsed ({error})"
            ) from None

    async def render(self, chat_request: Mapping[str, Any]) -> Sequence[int]:
        """The ids of the prompt of a chat request; ProviderError if the server has no such endpoint or refuses."""
        where = f"{self.name}{RENDER}"
        try:
            answer = await self._http.json("POST", RENDER, {**chat_request, "model": await self.find_model()})
        except ProviderError as error:
            if error.status not in (404, 405):
                raise
            message = f"{where}: this server does not render messages (newer versions of vLLM do)"
            raise ProviderError(message, status=error.status) from None
        ids = answer.get("token_ids") if isinstance(answer, Mapping) else None
        return parse_ids(ids, f"{where}: token_ids")

    async def find_tokenizer(self) -> str:
        """Where the served model was loaded from, else its name."""
        served = await self.served()
        return served.root or served.model

    async def tokenized(self, text: str) -> list[int] | None:
        """The ids of a text by the server's own tokenizer; None if it has no such endpoint."""
        body = {"model": await self.find_model(), "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._http.json("POST", "/tokenize", body)
        except ProviderError as error:
            if error.status in (404, 405):
                return None
            raise
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        return ids if isinstance(ids, list) else None

    async def _body(self, ids: PromptIds, sampling: SamplingParams) -> dict[str, Any]:
        """The request, with the model's name and a stated `max_tokens`."""
        check_sampling(sampling, ("n", "logprobs") if self._path == TOKENS else _FIXED)
        served = await self.served()
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=served.answer_room(len(ids), self.name))
        top, prompt = sampling.top_logprobs, orjson.Fragment(ids.json)
        params = {**stated_params(sampling), **sampling.extra}
        if self._path == TOKENS:
            params["logprobs"] = top + 1 if top else 0  # the sampled token takes one of the places
            body: dict[str, Any] = {"token_ids": prompt, "sampling_params": params}
        else:
            body = {"prompt": prompt, "logprobs": top, **params}
            if top:
                body["return_tokens_as_token_ids"] = True  # else the alternatives are texts
        return {"model": served.model, "return_token_ids": True, **body}

    def _chunk(self, choice: Object, top: int, *, ends: bool) -> GenerationChunk:
        """The tokens of a choice; `ends`: they complete the answer, so a finish reason is required."""
        return GenerationChunk(
            choice.get("index"),  # type: ignore[arg-type]
            *self._parse_columns(choice, top),
            parse_finish_reason(choice.get("finish_reason"), self._where) if ends else None,
            choice.get("stop_reason"),
            joined_versions(choice),
            parse_weight_spans(choice),
        )

    def _parse_columns(
        self, choice: Object, top: int
    ) -> tuple[tuple[int, ...], tuple[float, ...], tuple[TopLogprobs, ...] | None]:
        """The ids, logprobs and alternatives of a choice; ProviderError if they are missing or do not match."""
        where = self._where
        ids = choice.get("token_ids")
        if ids is None:
            raise ProviderError(
                f"{where}: the answer has no token_ids: the server ignores return_token_ids (vLLM has it since "
                "0.10.2)"
            )
        ids = parse_ids(ids, f"{where}: token_ids")
        logged = choice.get("logprobs")
        if logged is None and ids:
            raise ProviderError(f"{where}: the answer has no logprobs, which were requested")
        logged = logged or {}
        try:
            if self._path == TOKENS:
                content = logged.get("content") or []
                values = [token.get("logprob") for token in content]
                others = [
                    [(o["token_id"], o["logprob"]) for o in token["top_logprobs"]] for token in content if top
                ]
            else:
                values = logged.get("token_logprobs") or []
                others, size = [], len(_TOKEN_ID)
                for named in (logged.get("top_logprobs") or []) if top else ():
                    for token in named or {}:
                        if not token.startswith(_TOKEN_ID) or not token[size:].isdecimal():
                            text = f"an alternative is the text {token!r}"
                            raise ProviderError(f"{text}: the server ignores return_tokens_as_token_ids")
                    others.append([(int(token[size:]), value) for token, value in (named or {}).items()])
        except (TypeError, KeyError, AttributeError) as error:
            raise ProviderError(
                f"{where}: the logprobs have an unknown form: {type(error).__name__}: {error}"
            ) from None
        logprobs = parse_logprobs(values, where, ids)
        if not top:
            return ids, logprobs, None
        if len(others) != len(ids):
            raise ProviderError(f"{where}: {len(ids)} tokens, and alternatives for {len(others)}")
        for at, each in enumerate(others):
            for _, value in each:
                parse_logprob(value, f"{where}, an alternative of token {at}")
        return ids, logprobs, tuple(likeliest(dict(each), top) for each in others)

    async def _check_server(self) -> None:
        """Read `logprobs_mode`, if the server states it; ProviderError if it returns logits."""
        try:
            info = await self._http.json("GET", "/server_info?config_format=json")
            self.logprobs_mode = str(info["vllm_config"]["model_config"]["logprobs_mode"])
        except (ProviderError, TypeError, KeyError):
            return
        if self.logprobs_mode in _LOGITS_MODES:
            raise ProviderError(
                f"{self.name} returns logits as logprobs (--logprobs-mode {self.logprobs_mode}): "
                "start it with --logprobs-mode raw_logprobs"
            )

    def _echoes_prompt(self, answer: Object, choice: Object, ids: PromptIds) -> bool:
        """Whether the answer repeats the prompt; ProviderError if it repeats another than was sent."""
        echoed = self._prompt_holder(answer, choice).get("prompt_token_ids")
        if echoed is None:
            return False
        # Not `ECHOED` if the server writes the list with other spaces: compare the numbers.
        if echoed != ECHOED and echoed != list(ids):
            size = len(echoed) if isinstance(echoed, list) else 0
            raise ProviderError(
                f"{self._where}: the answer belongs to another prompt: {len(ids)} ids were sent, "
                f"and the server used {size}, or different ones",
                prompt_seen=parse_ids(echoed, f"{self._where}: prompt_token_ids"),
            )
        return True

    def _prompt_holder(self, answer: Object, choice: Object) -> Object:
        return answer if self._path == TOKENS else choice

    def _no_echo(self) -> ProviderError:
        return ProviderError(
            f"{self._where}: the answer has no prompt_token_ids: the server ignores return_token_ids "
            "(vLLM has it since 0.10.2)"
        )


def _choices(answer: Any, where: str) -> list[Object]:
    if not isinstance(answer, dict) or "choices" not in answer:
        raise ProviderError(f"{where}: not an answer of vLLM: it has no choices")
    return list(object_list(answer, "choices"))


VLLM = ProviderKind(name="vllm", title="a vLLM server", where="URL", open=VLLMProvider)
