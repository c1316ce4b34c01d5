"""The scores of a run in a file beside its output, so that a killed run can go on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from tito_audit.errors import ProviderError, SetupError, StorageError
from tito_audit.provider import TokenProvider
from tito_audit.record.arrays import Logprobs
from tito_audit.record.prefix import starts_with
from tito_audit.rescore.model import Scorable, ScoreQuery

_FORMAT = "tito_audit_scores"
_VERSION = 1


def _mixed_scores(path: Path | None, whose: str) -> SetupError:
    return SetupError(
        f"{path}: these scores are of {whose}.\nScores of two models do not mix: delete the file, or name another."
    )


def sequence_key(query: ScoreQuery) -> str:
    """A digest of the ids, by which the journal finds a sequence."""
    return hashlib.sha256(np.ascontiguousarray(query.ids, np.int64).tobytes()).hexdigest()[:40]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A model's scores of one sequence, or why there are none."""

    logprobs: Logprobs | None
    """`[T]` NaN before the start of the query; None if the sequence was refused."""
    because: str = ""
    weight_version: str | None = None


class ScoreJournal:
    """Scores by sequence, each written as soon as it is known: to a file, or without a path to memory.

    Only the offsets of the scores are kept in memory. A torn last line is overwritten.
    """

    def __init__(self, path: Path | None, provider: str, *, resume: bool = False) -> None:
        self.path = path
        self.model: str | None = None
        """Whose scores these are; None until the provider says."""
        self.resumed = 0
        """How many scores an earlier run left."""
        self._offsets: dict[str, tuple[int, int, int]] = {}
        """By sequence: the start of its scores, and the offset and length of its line."""
        self._end = 0
        self._file: BinaryIO = BytesIO()
        if path is not None:
            header = {_FORMAT: _VERSION, "provider": provider}
            if path.exists() and not resume:
                raise SetupError(
                    f"{path}: this holds the scores of an earlier run.\n"
                    "Pass --resume to continue it, or delete the file."
                )
            try:
                if path.exists():
                    self._load(path, header)
                self._file = path.open("a+b", buffering=0)
                self._file.truncate(self._end)
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror or error}.") from None
            if not self._end:
                self._append(header)

    def _load(self, path: Path, header: Mapping[str, Any]) -> None:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # a kill cut it off
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    record = None
                if not isinstance(record, dict):
                    raise SetupError(f"{path} is not a journal of scores: name another file.")
                if not number and record != header:
                    raise _mixed_scores(path, f"the provider {record.get('provider')!r}")
                if "model" in record:
                    self.model = record["model"]
                elif number:
                    self._offsets[record["ids"]] = (record["start"], self._end, len(line))
                    self.resumed += 1
                self._end += len(line)

    def set_model(self, model: str | None) -> None:
        """Record whose scores follow; SetupError if the earlier ones are another model's."""
        if model is None or model == self.model:
            return
        if self.model is not None:
            raise _mixed_scores(self.path, f"the model {self.model!r}, not {model!r}")
        self.model = model
        self._append({"model": model})

    def get(self, query: ScoreQuery) -> Scores | None:
        """The scores of a sequence; None if it was not scored from this start on."""
        start, at, size = self._offsets.get(sequence_key(query), (query.start + 1, 0, 0))
        if start > query.start:
            return None
        self._file.seek(at)
        record = orjson.loads(self._file.read(size))
        scores = np.full(len(query.ids), np.nan)
        scores[record["start"] :] = [np.nan if value is None else value for value in record["logprobs"]]
        return Scores(scores, weight_version=record["weight_version"])

    def put(self, query: ScoreQuery, logprobs: tuple[float, ...], weight_version: str | None) -> None:
        key, at = sequence_key(query), self._end
        self._append({"ids": key, "start": query.start, "logprobs": logprobs, "weight_version": weight_version})
        self._offsets[key] = (query.start, at, self._end - at)

    def close(self, *, done: bool = False) -> None:
        """Close the file; delete it if everything made from it is written (`done`)."""
        if self.path is not None and not self._file.closed:
            self._file.close()
            if done:
                self.path.unlink(missing_ok=True)

    def _append(self, record: Mapping[str, Any]) -> None:
        line = orjson.dumps(record) + b"\n"
        try:
            self._file.seek(self._end)
            self._file.write(line)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror or error}.") from None
        self._end += len(line)


# Each distinct sequence is scored once; one that another begins with is scored with that one.


REFUSALS = frozenset((400, 413, 422))
"""HTTP statuses that refuse one sequence, such as one beyond the context; any other status ends the run."""
_MAX_FAILURES = 8
"""How many requests may fail without a status before the first that succeeds."""


@dataclass(slots=True)
class RequestCounts:
    """What a run asked of its provider."""

    requests: int = 0
    """Those that were answered."""
    tokens: int = 0
    """How many tokens they sent."""
    saved: int = 0
    """How many sequences needed no request of their own."""
    failed: int = 0
    weight_versions: set[str] = field(default_factory=set)


class Scorer:
    """Scores sequences with up to `jobs` requests at once, and writes every score to a journal."""

    def __init__(self, provider: TokenProvider, journal: ScoreJournal, jobs: int) -> None:
        self.provider = provider
        self.journal = journal
        self.counts = RequestCounts()
        self._slots = asyncio.Semaphore(jobs)
        self._pending: dict[str, tuple[int, asyncio.Task[Scores]]] = {}
        """Requests in flight: by sequence, their start and task."""

    async def scores(self, queries: Sequence[ScoreQuery]) -> list[Scores]:
        longest, holders = merge_prefixes(queries)
        of_longest = await asyncio.gather(*(self._score_once(query) for query in longest))
        out = []
        for query, holder in zip(queries, holders, strict=True):
            answer = of_longest[holder]
            if answer.logprobs is None and len(query.ids) < len(longest[holder].ids):
                answer = await self._score_once(query)  # the longer one was refused, perhaps for its length
            elif answer.logprobs is not None:
                answer = replace(answer, logprobs=answer.logprobs[: len(query.ids)])
            out.append(answer)
        self.counts.saved += len(queries) - len(longest)
        return out

    def store_parts(self, scored: Sequence[tuple[Scorable, Scores]]) -> None:
        """Write the scores of each call and row by itself, also if a longer sequence was scored for it."""
        for part, scores in scored:
            query = part.query
            if scores.logprobs is not None and query.start < len(query.ids) and self.journal.get(query) is None:
                self.journal.put(query, tuple(scores.logprobs[query.start :].tolist()), scores.weight_version)

    async def _score_once(self, query: ScoreQuery) -> Scores:
        """The scores of a sequence: from the journal, from a request in flight, or from a new one."""
        if query.start >= len(query.ids):
            return Scores(np.full(len(query.ids), np.nan))
        cached = self.journal.get(query)
        if cached is not None:
            self.counts.saved += 1
            return cached
        key = sequence_key(query)
        start, task = self._pending.get(key, (query.start + 1, None))
        if task is None or start > query.start:
            task = asyncio.ensure_future(self._request_scores(query))
            self._pending[key] = (query.start, task)

            def forget(done: asyncio.Task[Scores]) -> None:
                if self._pending.get(key, (0, None))[1] is done:
                    del self._pending[key]
                if not done.cancelled():
                    done.exception()  # marks it as retrieved: those who wait get it, if any are left

            task.add_done_callback(forget)
        else:
            self.counts.saved += 1
        return await asyncio.shield(task)

    async def _request_scores(self, query: ScoreQuery) -> Scores:
        async with self._slots:
            try:
                answer = await self.provider.score(query.ids.tolist(), start=query.start)
            except ProviderError as error:
                self.counts.failed += 1
                none_yet = not self.counts.requests and self.counts.failed >= _MAX_FAILURES
                if error.status not in REFUSALS and (error.status is not None or none_yet):
                    raise
                return Scores(None, str(error).split("\n")[0])
        if len(answer.logprobs) != len(query.ids) - query.start or answer.start != query.start:
            raise ProviderError(
                f"{self.provider.name} was asked for the logprobs of {len(query.ids) - query.start} tokens from "
                f"position {query.start} on, and returned {len(answer.logprobs)} from {answer.start} on."
            )
        self.journal.set_model(self.provider.model)
        self.counts.requests += 1
        self.counts.tokens += len(query.ids)
        if answer.weight_version is not None:
            self.counts.weight_versions.add(answer.weight_version)
        self.journal.put(query, answer.logprobs, answer.weight_version)
        scores = np.full(len(query.ids), np.nan)
        scores[query.start :] = answer.logprobs
        return Scores(scores, weight_version=answer.weight_version)


def merge_prefixes(queries: Sequence[ScoreQuery]) -> tuple[list[ScoreQuery], list[int]]:
    """The queries to send, and for each given one the index of the sent one that begins with its ids.

    A sent query starts where the first one that it answers does.
    """
    longest: list[ScoreQuery] = []
    holders = [0] * len(queries)
    for number in sorted(range(len(queries)), key=lambda k: -len(queries[k].ids)):
        query = queries[number]
        holder = next((k for k, holder in enumerate(longest) if starts_with(holder.ids, query.ids)), None)
        if holder is None:
            holder = len(longest)
            longest.append(query)
        elif query.start < longest[holder].start:
            longest[holder] = replace(longest[holder], start=query.start)
        holders[number] = holder
    return longest, holders
