"""The scores of a run in a file next to its output, so that a killed run can be resumed."""

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
from tito_audit.rescore.plan import Scorable, Want

_FORMAT = "tito_audit_scores"
_VERSION = 1


def _mixed(path: Path | None, whose: str) -> SetupError:
    return SetupError(
        f"{path}: these scores are of {whose}.\nScores of two models do not mix: delete the file, or name another."
    )


def key_of(want: Want) -> str:
    """A name for a sequence: equal for equal ids."""
    return hashlib.sha256(np.ascontiguousarray(want.ids, np.int64).tobytes()).hexdigest()[:40]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A model's scores of one sequence, or why there are none."""

    logprobs: Logprobs | None
    """`[T]` NaN before the wanted start."""
    because: str = ""
    weight_version: str | None = None


class ScoreJournal:
    """Scores by sequence, each written to a file as soon as it is known; without a path, kept in memory only.

    Only the file offset of each score is in memory. A last line that was cut off is written again.
    """

    def __init__(self, path: Path | None, provider: str, *, resume: bool = False) -> None:
        self.path = path
        self.model: str | None = None
        """Whose scores these are; None until the provider has said."""
        self.resumed = 0
        """How many scores an earlier run left."""
        self._at: dict[str, tuple[int, int, int]] = {}
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
                    self._read(path, header)
                self._file = path.open("a+b", buffering=0)
                self._file.truncate(self._end)
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror or error}.") from None
            if not self._end:
                self._append(header)

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
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
                    raise _mixed(path, f"the provider {record.get('provider')!r}")
                if "model" in record:
                    self.model = record["model"]
                elif number:
                    self._at[record["ids"]] = (record["start"], self._end, len(line))
                    self.resumed += 1
                self._end += len(line)

    def of_model(self, model: str | None) -> None:
        """Note whose scores come now; SetupError if earlier scores are another model's."""
        if model is None or model == self.model:
            return
        if self.model is not None:
            raise _mixed(self.path, f"the model {self.model!r}, not {model!r}")
        self.model = model
        self._append({"model": model})

    def get(self, want: Want) -> Scores | None:
        """The scores of a sequence; None if unknown."""
        start, at, size = self._at.get(key_of(want), (want.start + 1, 0, 0))
        if start > want.start:
            return None
        self._file.seek(at)
        record = orjson.loads(self._file.read(size))
        scores = np.full(len(want.ids), np.nan)
        scores[record["start"] :] = [np.nan if value is None else value for value in record["logprobs"]]
        return Scores(scores, weight_version=record["weight_version"])

    def put(self, want: Want, logprobs: tuple[float, ...], weight_version: str | None) -> None:
        key, at = key_of(want), self._end
        self._append({"ids": key, "start": want.start, "logprobs": logprobs, "weight_version": weight_version})
        self._at[key] = (want.start, at, self._end - at)

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


# Scores are asked for once for each distinct sequence, and once for sequences with a common prefix.


REFUSALS = frozenset((400, 413, 422))
"""Statuses that refuse one sequence, such as one beyond the context; others end the run."""
_IN_A_ROW = 8
"""This many failures without a status in a row, before any success, end the run."""


@dataclass(slots=True)
class Counts:
    """How much was asked of a provider."""

    requests: int = 0
    tokens: int = 0
    """Tokens of these requests."""
    saved: int = 0
    """Sequences that needed no request of their own."""
    failed: int = 0
    weight_versions: set[str] = field(default_factory=set)


class Scorer:
    """Scores sequences, `jobs` requests at once, and keeps every score in a journal."""

    def __init__(self, provider: TokenProvider, journal: ScoreJournal, jobs: int) -> None:
        self.provider = provider
        self.journal = journal
        self.counts = Counts()
        self._gate = asyncio.Semaphore(jobs)
        self._asked: dict[str, tuple[int, asyncio.Task[Scores]]] = {}
        """Sequences that are being scored, with their start."""

    async def scores(self, wants: Sequence[Want]) -> list[Scores]:
        holders, owners = shared(wants)
        of_holders = await asyncio.gather(*(self._once(want) for want in holders))
        out = []
        for want, owner in zip(wants, owners, strict=True):
            own_scores = of_holders[owner]
            if own_scores.logprobs is None and len(want.ids) < len(holders[owner].ids):
                own_scores = await self._once(want)  # the longer one was refused, perhaps for its length
            elif own_scores.logprobs is not None:
                own_scores = replace(own_scores, logprobs=own_scores.logprobs[: len(want.ids)])
            out.append(own_scores)
        self.counts.saved += len(wants) - len(holders)
        return out

    def keep(self, scored: Sequence[tuple[Scorable, Scores]]) -> None:
        """Store the scores of each call and row separately, even if those of a longer sequence include them."""
        for part, scores in scored:
            want = part.want
            if scores.logprobs is not None and want.start < len(want.ids) and self.journal.get(want) is None:
                self.journal.put(want, tuple(scores.logprobs[want.start :].tolist()), scores.weight_version)

    async def _once(self, want: Want) -> Scores:
        """The scores of a sequence: known, being asked for, or asked for now."""
        if want.start >= len(want.ids):
            return Scores(np.full(len(want.ids), np.nan))
        cached = self.journal.get(want)
        if cached is not None:
            self.counts.saved += 1
            return cached
        key = key_of(want)
        start, task = self._asked.get(key, (want.start + 1, None))
        if task is None or start > want.start:
            task = asyncio.ensure_future(self._ask(want))
            self._asked[key] = (want.start, task)

            def forget(done: asyncio.Task[Scores]) -> None:
                if self._asked.get(key, (0, None))[1] is done:
                    del self._asked[key]
                if not done.cancelled():
                    done.exception()  # which those who wait get, if there are any left

            task.add_done_callback(forget)
        else:
            self.counts.saved += 1
        return await asyncio.shield(task)

    async def _ask(self, want: Want) -> Scores:
        async with self._gate:
            try:
                answer = await self.provider.score(want.ids.tolist(), start=want.start)
            except ProviderError as error:
                self.counts.failed += 1
                none_yet = not self.counts.requests and self.counts.failed >= _IN_A_ROW
                if error.status not in REFUSALS and (error.status is not None or none_yet):
                    raise
                return Scores(None, str(error).split("\n")[0])
        if len(answer.logprobs) != len(want.ids) - want.start or answer.start != want.start:
            raise ProviderError(
                f"{self.provider.name} was asked for the logprobs of {len(want.ids) - want.start} tokens from "
                f"position {want.start} on, and returned {len(answer.logprobs)} from {answer.start} on."
            )
        self.journal.of_model(self.provider.model)
        self.counts.requests += 1
        self.counts.tokens += len(want.ids)
        if answer.weight_version is not None:
            self.counts.weight_versions.add(answer.weight_version)
        self.journal.put(want, answer.logprobs, answer.weight_version)
        scores = np.full(len(want.ids), np.nan)
        scores[want.start :] = answer.logprobs
        return Scores(scores, weight_version=answer.weight_version)


def shared(wants: Sequence[Want]) -> tuple[list[Want], list[int]]:
    """The sequences to score, and for each wanted one which of them begins with it.

    A scored sequence starts where the first of those that it holds does.
    """
    holders: list[Want] = []
    owners = [0] * len(wants)
    for number in sorted(range(len(wants)), key=lambda k: -len(wants[k].ids)):
        want = wants[number]
        owner = next((k for k, holder in enumerate(holders) if starts_with(holder.ids, want.ids)), None)
        if owner is None:
            owner = len(holders)
            holders.append(want)
        elif want.start < holders[owner].start:
            holders[owner] = replace(holders[owner], start=want.start)
        owners[number] = owner
    return holders, owners
