"""SGLang's own endpoint `/generate`, asked with token ids."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeAlias

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
    answered_ids,
    answered_logprob,
    answered_logprobs,
    checked_sampling,
    counted,
    finished,
    likeliest,
    plain_ids,
    weight_spans,
)
from tito_audit.providers._http import Finder, ServerProvider

_Object: TypeAlias = Mapping[str, Any]
_PATH = "/generate"
_OURS = ("n", "max_new_tokens", "stop", "stop_token_ids")


class SGLangProvider(ServerProvider):
    """An SGLang server. The prompt is sent as ids; `meta_info` holds the sampled ids with their logprobs, and the
    version of the weights.

    Logprobs of sampled tokens are those of the distribution that the temperature gave, before truncation, unless
    the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`; scores are at temperature 1. `seed` is sent as
    `sampling_seed`, which servers with --enable-deterministic-inference follow. `max_tokens` None is what the
    server's context leaves. `extra` is added to `sampling_params`.

    The shapes of requests and answers are those of SGLang's documentation and source; no server was asked.
    """

    def __init__(self, base_url: str, options: ProviderOptions | None = None) -> None:
        """`base_url` with or without the path of the endpoint."""
        super().__init__("sglang", base_url.rstrip("/").removesuffix(_PATH).removesuffix("/v1"), options)
        self._finder = Finder(self._http, self.name, self._options.model)
        self._where = f"{self.name}{_PATH}"

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        """All answers to a prompt, by one request."""
        ids = plain_ids(input_ids)
        answer = await self._http.json("POST", _PATH, await self._body(ids, sampling))
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != sampling.n:
            raise ProviderError(f"{self._where}: {sampling.n} answers were requested, and {len(answers)} came")
        results = []
        for entry in answers:
            meta = self._meta(entry, ids)
            output_ids, logprobs, tops = self._columns(meta, 0, sampling.top_logprobs)
            if isinstance(entry.get("output_ids"), list) and entry["output_ids"] != list(output_ids):
                raise ProviderError(f"{self._where}: output_ids are not the ids of output_token_logprobs")
            result = GenerationResult(
                tuple(ids),
                output_ids,
                logprobs,
                tops,
                finished(_reason(meta), self._where),
                _stop_reason(meta),
                _version(meta),
                weight_spans(meta),
            )
            counted([result], meta.get("completion_tokens"), self._where)
            results.append(result)
        return tuple(results)

    async def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        """The answers as they are sampled."""
        ids = plain_ids(input_ids)
        body = {**await self._body(ids, sampling), "stream": True}
        seen = [0] * sampling.n
        ended: set[int] = set()
        async for event in self._http.events(_PATH, body):
            index = event.get("index", 0) if isinstance(event, dict) else None
            if type(index) is not int or not 0 <= index < sampling.n or index in ended:
                raise ProviderError(
                    f"{self._where}: {sampling.n} answers were requested, and one has the index {index}"
                )
            meta = self._meta(event, ids)
            output_ids, logprobs, tops = self._columns(meta, seen[index], sampling.top_logprobs)
            seen[index] += len(output_ids)
            if (reason := _reason(meta)) is not None:
                ended.add(index)
            yield GenerationChunk(
                index=index,
                output_ids=output_ids,
                logprobs=logprobs,
                top_logprobs=tops,
                finish_reason=None if reason is None else finished(reason, self._where),
                stop_reason=_stop_reason(meta),
                weight_version=_version(meta),
                weight_spans=weight_spans(meta),
            )
        if len(ended) != sampling.n:
            raise ProviderError(f"{self._where}: {len(ended)} of {sampling.n} answers ended in the stream")

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        """The logprobs of `ids[start:]`, with nothing sampled."""
        plain, first = plain_ids(ids), max(1, start)
        if first > len(plain):
            raise ProviderError(f"there are {len(plain)} ids, and no position {start} to score from", status=400)
        if first == len(plain):
            return ScoredTokens(tuple(plain), first, (), () if top else None)
        body = {
            "input_ids": plain,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": first - 1,  # the first entry never has a logprob
            "top_logprobs_num": top,
        }
        meta = self._meta(await self._http.json("POST", _PATH, body), plain)
        # The logprobs of `ids[first:]`, each checked against the id that was sent.
        logprobs = []
        for at, entry in enumerate(self._entries(meta, "input_token_logprobs")[first - len(plain) :], first):
            where = f"{self._where}, prompt token {at}"
            if entry[1] not in (plain[at], 0):  # 0 is also written for the last id of the vocabulary
                raise ProviderError(f"{where}: id {plain[at]} was sent, and the score is of {entry[1]}")
            logprobs.append(answered_logprob(entry[0], where))
        if len(logprobs) != len(plain) - first:
            raise ProviderError(
                f"{self._where}: {len(plain) - first} ids were sent to be scored, and {len(logprobs)} were"
            )
        tops = self._list(meta, "input_top_logprobs", len(plain) - first) if top else []
        alternatives = tuple(self._likeliest(each, top) for each in tops) if top else None
        return ScoredTokens(tuple(plain), first, tuple(logprobs), alternatives, _version(meta))

    async def find_model(self) -> str:
        """The name of the served model, which is `model` from now on; ProviderError if the server does not say."""
        self.model = (await self._finder.find()).model
        return self.model

    async def find_tokenizer(self) -> str:
        """The folder or name of the tokenizer as the server states it, else the name of the model."""
        for path in ("/model_info", "/get_model_info"):  # newer servers, older servers
            try:
                info = await self._http.json("GET", path)
            except ProviderError as error:
                if error.status != 404:
                    raise
                continue
            place = info.get("tokenizer_path") or info.get("model_path") if isinstance(info, dict) else None
            if isinstance(place, str):
                return place
        return await self.find_model()

    def forcing(self, structural_tag: Mapping[str, Any]) -> dict[str, Any]:
        """The extra parameters that keep an answer to a structural tag of xgrammar."""
        return {"structural_tag": json.dumps(structural_tag)}

    async def _body(self, ids: list[int], sampling: SamplingParams) -> dict[str, Any]:
        checked_sampling(sampling, _OURS)
        served = await self._finder.find()
        self.model = served.model
        length = sampling.max_tokens or served.room(len(ids), self.name)
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "sampling_seed": sampling.seed,
            "stop": list(sampling.stop) or None,
            "stop_token_ids": [int(token) for token in sampling.stop_token_ids] or None,
            "n": sampling.n if sampling.n != 1 else None,
        }
        stated = {name: value for name, value in parameters.items() if value is not None}
        return {
            "input_ids": ids,
            "sampling_params": {**stated, **sampling.extra, "max_new_tokens": length},
            "return_logprob": True,
            "top_logprobs_num": sampling.top_logprobs,
        }

    def _meta(self, answer: Any, ids: list[int]) -> _Object:
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict):
            raise ProviderError(f"{self._where}: not an answer of SGLang: it has no meta_info")
        used = meta.get("prompt_tokens")
        if type(used) is int and used != len(ids):
            raise ProviderError(f"{self._where}: {len(ids)} ids were sent, and the server used {used}")
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            status = reason.get("status_code")
            reason_text = str(reason.get("message") or "no reason given")
            raise ProviderError(
                f"{self._where}: the server aborted the answer: {reason_text}",
                status=status if type(status) is int else None,
            )
        return meta

    def _columns(
        self, meta: _Object, seen: int, top: int
    ) -> tuple[tuple[int, ...], tuple[float, ...], tuple[TopLogprobs, ...] | None]:
        """The ids, logprobs and alternatives after the first `seen` tokens.

        Events of a stream are cumulative or incremental; the number of tokens sampled so far tells which.
        """
        entries = self._entries(meta, "output_token_logprobs")
        total = meta.get("completion_tokens")
        skipped = seen
        if seen and type(total) is int and len(entries) == total - seen:
            skipped = 0
        elif type(total) is int and len(entries) != total:
            raise ProviderError(f"{self._where}: the server sampled {total} tokens and returned {len(entries)}")
        ids = answered_ids([entry[1] for entry in entries[skipped:]], f"{self._where}: output_token_logprobs")
        logprobs = answered_logprobs([entry[0] for entry in entries[skipped:]], self._where, ids)
        if not top:
            return ids, logprobs, None
        tops = self._list(meta, "output_top_logprobs", len(ids))
        return ids, logprobs, tuple(self._likeliest(each, top) for each in tops)

    def _entries(self, meta: _Object, key: str) -> list[Any]:
        """A list of `[logprob, id, text]`."""
        entries = meta.get(key)
        if not isinstance(entries, list):
            raise ProviderError(f"{self._where}: meta_info has no {key}, although return_logprob was sent")
        if not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
            raise ProviderError(f"{self._where}: {key} are not [logprob, id, text]: {str(entries)[:100]}")
        return entries

    def _list(self, meta: _Object, key: str, size: int) -> list[Any]:
        """The last `size` entries of a list; ProviderError if it is shorter."""
        entries = meta.get(key)
        if not isinstance(entries, list) or len(entries) < size:
            raise ProviderError(f"{self._where}: meta_info has no {key} for {size} tokens")
        return entries[len(entries) - size :]

    def _likeliest(self, entries: Any, top: int) -> TopLogprobs:
        checked = self._entries({"top_logprobs": entries}, "top_logprobs")
        ids = answered_ids([entry[1] for entry in checked], f"{self._where}: alternatives")
        values = answered_logprobs([entry[0] for entry in checked], f"{self._where}: alternatives", ids)
        return likeliest(dict(zip(ids, values, strict=True)), top)


def _reason(meta: _Object) -> str | None:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    return None if kind is None else str(kind)


def _stop_reason(meta: _Object) -> str | int | None:
    reason = meta.get("finish_reason")
    matched = reason.get("matched") if isinstance(reason, dict) else None
    return matched if isinstance(matched, str | int) else None


def _version(meta: _Object) -> str | None:
    version = meta.get("weight_version")
    return None if version is None else str(version)


SGLANG = ProviderKind(name="sglang", title="an SGLang server", where="URL", open=SGLangProvider)
