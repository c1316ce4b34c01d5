"""Asks a provider for scores: once for each distinct sequence, and once for sequences with a common prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tito_audit.errors import ProviderError
from tito_audit.provider import TokenProvider
from tito_audit.record.arrays import Logprobs
from tito_audit.record.prefix import starts_with
from tito_audit.rescore.journal import ScoreJournal, key_of
from tito_audit.rescore.model import Want
from tito_audit.rescore.plan import Scorable

REFUSALS = frozenset((400, 413, 422))
"""Statuses that refuse one sequence, such as one beyond the context; others end the run."""
_IN_A_ROW = 8
"""This many failures without a status in a row, before any success, end the run."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A model's scores of one sequence, or why there are none."""

    logprobs: Logprobs | None
    """`[T]` NaN before the wanted start."""
    because: str = ""
    weight_version: str | None = None


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
            return Scores(cached[0], weight_version=cached[1])
        key = key_of(want)
        start, task = self._asked.get(key, (want.start + 1, None))
        if task is None or start > want.start:
            task = asyncio.ensure_future(self._ask(want))
            self._asked[key] = (want.start, task)

            def forget(done: asyncio.Task[Scores]) -> None:
                if self._asked.get(key, (0, None))[1] is done:
                    del self._asked[key]

            task.add_done_callback(forget)
        else:
            self.counts.saved += 1
        return await asyncio.shield(task)

    async def _ask(self, want: Want) -> Scores:
        async with self._gate:
            try:
                answer = await self.provider.score(want.ids.tolist(), start=want.start)
            except ProviderError as error:
                # Handles a refused sequence; raises if the server refuses all.
                self.counts.failed += 1
                none_yet = not self.counts.requests and self.counts.failed >= _IN_A_ROW
                if error.status not in REFUSALS and (error.status is not None or none_yet):
                    raise error
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
