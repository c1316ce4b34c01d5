"""A gateway for tests: a provider that samples what it is told to, and a server in a thread of its own."""

from __future__ import annotations

import asyncio
import random
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from openai import OpenAI

from tests import scripted, toy
from tests.command import run
from tests.replay import threaded
from tests.world import TOY
from tito_audit.errors import ProviderError
from tito_audit.parser import ParseOptions, ParserRun, Reads
from tito_audit.parsers import parser_named, start_answer
from tito_audit.provider import GenerationChunk, GenerationResult, SamplingParams, ScoredTokens
from tito_audit.serve.app import HttpOptions, make_app
from tito_audit.serve.call_log import CallLog
from tito_audit.serve.gateway import Gateway
from tito_audit.sessions.engine import Conversations, Limits
from tito_audit.tokens.tokenizer import Tokenizer

_CLIENTS: dict[Any, Any] = {}

_NAMED = {"name": "weather", "description": "Look up the weather"}
_TAKES = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {**_NAMED, "parameters": _TAKES}}]
FLAT: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]
"""The tools as the Responses API has them."""
SCHEMAS: list[Any] = [{**_NAMED, "input_schema": _TAKES, "cache_control": {"type": "ephemeral"}}]
"""The tools as the Messages API has them."""
ASK: Any = {"role": "user", "content": "What is the weather in Oslo?"}
CALL = '<tool_call>\n{"name": "weather",  "arguments": {"city":   "Oslo"}}\n</tool_call><|im_end|>'
SAID = "<think>\n\n</think>\n\nIt rains in Oslo.<|im_end|>"
PLAIN = "It rains in Oslo, and it is 7 degrees.<|im_end|>"
THOUGHT = "<think>\nHm, Oslo.\n</think>\n\nLet me look. "


class Scripted(scripted.Scripted):
    """The same in tokens that no encoder would choose, and token by token where it streams."""

    model = "toy"

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[str | ProviderError], *, seed: int = 0) -> None:
        super().__init__(answers)
        self.sampled: list[tuple[int, ...]] = []
        self.pause = 0.0
        """Seconds before each piece of a stream."""
        self.closed_early = 0
        """How many calls were ended before their end, or are under way."""
        self.stays_after: int | None = None
        """A stream goes on for ever after so many pieces, without another."""
        self.fails_after: int | None = None
        """A stream fails after so many pieces."""
        self._tokenizer = tokenizer
        self._dice = random.Random(seed)

    def _ask(self, input_ids: Sequence[int], sampling: SamplingParams) -> None:
        super()._ask(tuple(input_ids), sampling)

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        self._ask(input_ids, sampling)
        self.closed_early += 1
        await asyncio.sleep(self.pause)
        self.closed_early -= 1
        return tuple(self._result(input_ids, sampling) for _ in range(sampling.n))

    async def stream(self, input_ids: Sequence[int], sampling: SamplingParams) -> AsyncIterator[GenerationChunk]:
        self._ask(input_ids, sampling)
        results = [self._result(input_ids, sampling) for _ in range(sampling.n)]
        own = [list(self._pieces(index, result)) for index, result in enumerate(results)]
        turns = [index for index, pieces in enumerate(own) for _ in pieces]
        self._dice.shuffle(turns)
        self.closed_early += 1
        for number, index in enumerate(turns):
            if number == self.fails_after:
                self.closed_early -= 1
                raise ProviderError("the server broke off", status=None)
            await asyncio.sleep(3600 if number == self.stays_after else self.pause)
            yield own[index].pop(0)
        self.closed_early -= 1

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        raise ProviderError("not here")

    def _result(self, input_ids: Sequence[int], sampling: SamplingParams) -> GenerationResult:
        answer = self.answers.pop(0)
        if isinstance(answer, ProviderError):
            raise answer
        ids = self._split(self._tokenizer.encode(answer).tolist())
        whole = sampling.max_tokens is None or len(ids) <= sampling.max_tokens
        ids = ids if whole else ids[: sampling.max_tokens]
        self.sampled.append(tuple(ids))
        logprobs = tuple(round(-self._dice.random(), 3) for _ in ids)
        each = zip(ids, logprobs, strict=True)
        top = tuple(((token, value), (0, -9.0))[: sampling.top_logprobs] for token, value in each)
        shown = top if sampling.top_logprobs else None
        return GenerationResult(tuple(input_ids), tuple(ids), logprobs, shown, "stop" if whole else "length")

    def _split(self, ids: list[int]) -> list[int]:
        """The same bytes, with some tokens sampled in two."""
        split_ids: list[int] = []
        vocabulary = self._tokenizer.vocabulary
        for token in ids:
            piece = vocabulary.token_bytes(token)
            halves = None
            if len(piece) > 1 and token not in vocabulary.added_ids and self._dice.random() < 0.3:
                cut = self._dice.randrange(1, len(piece))
                halves = [vocabulary.ids_of_bytes(part) for part in (piece[:cut], piece[cut:])]
            if halves and all(len(half) for half in halves):
                split_ids += [int(half[0]) for half in halves]
            else:
                split_ids.append(token)
        return split_ids

    def _pieces(self, index: int, result: GenerationResult) -> Iterator[GenerationChunk]:
        size = len(result.output_ids)
        for at in range(size):
            here, tops = slice(at, at + 1), result.top_logprobs
            reason = result.finish_reason if at == size - 1 else None
            shown = None if tops is None else tops[here]
            yield GenerationChunk(index, result.output_ids[here], result.logprobs[here], shown, reason)


def hermes(options: ParseOptions) -> ParserRun:
    """Reasoning of Qwen3 and tool calls of Hermes."""
    return start_answer(parser_named("qwen3", Reads.REASONING), parser_named("hermes", Reads.TOOLS), options)


def plain(options: ParseOptions) -> ParserRun:
    """Answers that are content and nothing else."""
    return start_answer(options=options)


def make_gateway(
    log: Path,
    answers: Sequence[str | ProviderError],
    *,
    start_parser: Callable[[ParseOptions], ParserRun] = hermes,
    limits: Limits | None = None,
    name: str = "toy_bpe",
) -> tuple[Gateway, Scripted]:
    """A gateway over a scripted provider with a toy tokenizer."""
    tokenizer = toy.toy_tokenizer(name)
    provider = Scripted(tokenizer, answers)
    conversations = Conversations(tokenizer, toy.toy_renderer(name), limits=limits)
    return Gateway(provider, tokenizer, conversations, CallLog(log), "toy", start_parser), provider


@contextmanager
def served(gateway: Gateway, options: HttpOptions | None = None) -> Iterator[str]:
    """The address of a server that runs in a thread until the block ends."""
    with threaded(lambda: make_app(gateway, options)) as address:
        try:
            yield address
        finally:
            close_clients()
    gateway.log.close()


@contextmanager
def gated(
    folder: Path, answers: Sequence[str | ProviderError], *, options: HttpOptions | None = None, **choices: Any
) -> Iterator[tuple[str, Scripted, Path]]:
    """The address, provider and log of a gateway that is served until the block ends."""
    log = folder / "log.jsonl"
    gateway, provider = make_gateway(log, answers, **choices)
    with served(gateway, options) as address:
        yield address, provider, log


def client(address: str, path: str = "", key: str = "none", kind: Any = OpenAI, **more: Any) -> Any:
    """A client of a gateway, which never asks twice; those of one package share connections."""
    if kind not in _CLIENTS:
        _CLIENTS[kind] = kind(base_url=address, api_key=key, max_retries=0, timeout=20)
    base = f"{address}{path}/v1" if kind is OpenAI else f"{address}{path}"
    return _CLIENTS[kind].with_options(base_url=base, api_key=key, **more)


def close_clients() -> None:
    """Close the connections of all clients."""
    while _CLIENTS:
        _CLIENTS.popitem()[1].close()


def logged(log: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [orjson.loads(line) for line in log.read_bytes().splitlines()]


def check_chain(rows: Sequence[dict[str, Any]]) -> None:
    """Each call continues the one before it, ids and all."""
    assert [row["branch"] for row in rows] == ["start", *["continues"] * (len(rows) - 1)], [
        row["fork"] for row in rows
    ]
    for before, row in pairwise(rows):
        seen = before["prompt_token_ids"] + before["completion_token_ids"]
        assert row["prompt_token_ids"][: len(seen)] == seen
        assert row["parent"] == {"call_id": before["call_id"], "choice": 0}
        assert row["thread_id"] == before["thread_id"]


def codes_of(log: Path, *arguments: str, passes: str = "note") -> list[str]:
    """The codes of what a scan finds, but for notes or what else passes."""
    _, out, _ = run("scan", str(log), "-t", str(TOY), *arguments, "--report", "json")
    findings = orjson.loads(out)["findings"]
    return sorted({finding["code"] for finding in findings if finding["severity"] not in ("note", passes)})


def fetched(
    address: str, path: str, body: Any = None, method: str | None = None, **headers: str
) -> tuple[int, Any, bytes]:
    """Status, headers and body of an answer, without a client's package."""
    data = None if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
    request = urllib.request.Request(address + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def asked(address: str, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
    """Status and object of an answer."""
    status, _, data = fetched(address, path, body, method, **headers)
    return status, orjson.loads(data)


def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
