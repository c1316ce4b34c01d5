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
    check_sampling,
    join_chunks,
    likeliest,
    list_ids,
    parse_finish_reason,
    parse_ids,
    parse_logprob,
    parse_logprobs,
    parse_weight_spans,
    stated_params,
)
from tito_audit.providers._http import ModelServer

_Object: TypeAlias = Mapping[str, Any]
_PATH = "/generate"
_FIXED = ("n", "max_new_tokens", "stop", "stop_token_ids")


class SGLangProvider(ModelServer):
    """An SGLang server. Prompts are sent as ids; `meta_info` holds the sampled ids with their logprobs, and the
    version of the weights.

    Logprobs of sampled tokens are those of the distribution that the temperature gave, before truncation, unless
    the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`; scores are at temperature 1. `seed` is sent as
    `sampling_seed`, which servers with --enable-deterministic-inference follow. `max_tokens` None is what the
    server's context leaves. `extra` is added to `sampling_params`.

    Written from SGLang's documentation and source, and not tried with a server.
    """

    def __init__(self, base_url: str, options: ProviderOptions | None = None) -> None:
        """`base_url` with or without the path of the endpoint."""
        super().__init__("sglang", base_url.rstrip("/").removesuffix(_PATH).removesuffix("/v1"), options)
        self._where = f"{self.name}{_PATH}"

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        ids = list_ids(input_ids)
        answer = await self._http.json("POST", _PATH, await self._body(ids, sampling))
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != sampling.n:
            raise ProviderError(f"{self._where}: {sampling.n} answers were requested, and {len(answers)} came")
        chunks = []
        for index, entry in enumerate(answers):
            meta = self._parse_meta(entry, ids)
            chunk = self._chunk(index, meta, 0, sampling.top_logprobs)
            if isinstance(entry.get("output_ids"), list) and entry["output_ids"] != list(chunk.output_ids):
                raise ProviderError(f"{self._where}: output_ids are not the ids of output_token_logprobs")
            parse_finish_reason(chunk.finish_reason, self._where)
            chunks.append(chunk)
        return join_chunks(chunks, tuple(ids), sampling.n)

    async def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        ids = list_ids(input_ids)
        body = {**await self._body(ids, sampling), "stream": True}
        seen = [0] * sampling.n
        ended: set[int] = set()
        async for event in self._http.events(_PATH, body):
            index = event.get("index", 0) if isinstance(event, dict) else None
            if type(index) is not int or not 0 <= index < sampling.n or index in ended:
                raise ProviderError(
                    f"{self._where}: {sampling.n} answers were requested, and one has the index {index}"
                )
            chunk = self._chunk(index, self._parse_meta(event, ids), seen[index], sampling.top_logprobs)
            seen[index] += len(chunk.output_ids)
            if chunk.finish_reason is not None:
                ended.add(index)
            yield chunk
        if len(ended) != sampling.n:
            raise ProviderError(f"{self._where}: {len(ended)} of {sampling.n} answers ended in the stream")

    async def _score(self, ids: list[int], start: int, top: int) -> ScoredTokens:
        """Samples nothing, and checks that each logprob is of the id that was sent."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the first entry never has a logprob
            "top_logprobs_num": top,
        }
        meta, size = self._parse_meta(await self._http.json("POST", _PATH, body), ids), len(ids) - start
        logprobs = []
        for at, entry in enumerate(self._entries(meta, "input_token_logprobs")[-size:], start):
            where = f"{self._where}, prompt token {at}"
            if entry[1] not in (ids[at], 0):  # 0 is also written for the last id of the vocabulary
                raise ProviderError(f"{where}: id {ids[at]} was sent, and the score is of {entry[1]}")
            logprobs.append(parse_logprob(entry[0], where))
        if len(logprobs) != size:
            raise ProviderError(f"{self._where}: {size} ids were sent to be scored, and {len(logprobs)} were")
        tops = self._parse_tops(meta, "input_top_logprobs", size, top)
        return ScoredTokens(tuple(ids), start, tuple(logprobs), tops, _weight_version(meta))

    async def find_tokenizer(self) -> str:
        """The folder or hub name of the tokenizer that the server states, else the name of the model."""
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
        return {"structural_tag": json.dumps(structural_tag)}

    async def _body(self, ids: list[int], sampling: SamplingParams) -> dict[str, Any]:
        check_sampling(sampling, _FIXED)
        served, params = await self.served(), stated_params(sampling)
        if "seed" in params:
            params["sampling_seed"] = params.pop("seed")
        length = params.pop("max_tokens", None) or served.answer_room(len(ids), self.name)
        return {
            "input_ids": ids,
            "sampling_params": {**params, **sampling.extra, "max_new_tokens": length},
            "return_logprob": True,
            "top_logprobs_num": sampling.top_logprobs,
        }

    def _parse_meta(self, answer: Any, ids: list[int]) -> _Object:
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

    def _chunk(self, index: int, meta: _Object, seen: int, top: int) -> GenerationChunk:
        """The tokens of an answer after its first `seen`.

        Streams of SGLang are cumulative or incremental; the stated number of sampled tokens tells which.
        """
        entries = self._entries(meta, "output_token_logprobs")
        total = meta.get("completion_tokens")
        if type(total) is int and len(entries) not in (total, total - seen):
            raise ProviderError(f"{self._where}: the server sampled {total} tokens and returned {len(entries)}")
        if type(total) is not int or len(entries) == total:
            entries = entries[seen:]
        ids = parse_ids([entry[1] for entry in entries], f"{self._where}: output_token_logprobs")
        reason = meta.get("finish_reason")
        kind, matched = (reason.get("type"), reason.get("matched")) if isinstance(reason, dict) else (reason, None)
        return GenerationChunk(
            index,
            ids,
            parse_logprobs([entry[0] for entry in entries], self._where, ids),
            self._parse_tops(meta, "output_top_logprobs", len(ids), top),
            None if kind is None else parse_finish_reason(str(kind), self._where),
            matched if isinstance(matched, str | int) else None,
            _weight_version(meta),
            parse_weight_spans(meta),
        )

    def _entries(self, meta: _Object, key: str) -> list[Any]:
        """A list of `[logprob, id, text]`; ProviderError if it is missing or has another form."""
        entries = meta.get(key)
        if not isinstance(entries, list):
            raise ProviderError(f"{self._where}: meta_info has no {key}, although return_logprob was sent")
        if not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
            raise ProviderError(f"{self._where}: {key} are not [logprob, id, text]: {str(entries)[:100]}")
        return entries

    def _parse_tops(self, meta: _Object, key: str, size: int, top: int) -> tuple[TopLogprobs, ...] | None:
        """The alternatives at the last `size` positions; None if none were requested."""
        if not top:
            return None
        lists = meta.get(key)
        if not isinstance(lists, list) or len(lists) < size:
            raise ProviderError(f"{self._where}: meta_info has no {key} for {size} tokens")
        tops = []
        for each in lists[len(lists) - size :]:
            entries = self._entries({"top_logprobs": each}, "top_logprobs")
            ids = parse_ids([entry[1] for entry in entries], f"{self._where}: alternatives")
            values = parse_logprobs([entry[0] for entry in entries], f"{self._where}: alternatives", ids)
            tops.append(likeliest(dict(zip(ids, values, strict=True)), top))
        return tuple(tops)


def _weight_version(meta: _Object) -> str | None:
    version = meta.get("weight_version")
    return None if version is None else str(version)


SGLANG = ProviderKind(name="sglang", title="an SGLang server", where="URL", open=SGLangProvider)
