"""The flow of `rescore`: rows are read and audited here, while the provider scores those before them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.errors import EncodeError, ProviderError, RecordError
from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Evidence
from tito_audit.provider import TokenProvider
from tito_audit.record.arrays import Logprobs
from tito_audit.record.rollout import Place, Rollout
from tito_audit.rescore.compare import agreement, compared, explained, is_logprob, used
from tito_audit.rescore.journal import Journal
from tito_audit.rescore.judged import judged_by_model
from tito_audit.rescore.model import BOUND, RescoredRollout, Unscored
from tito_audit.rescore.plan import Part, Plan, plan_of
from tito_audit.rescore.prices import PairScores, priced
from tito_audit.rescore.scoring import Scorer, Scores
from tito_audit.rescore.summary import RescoreSummary
from tito_audit.rescore.temperature import Temperature
from tito_audit.run.auditor import Auditor
from tito_audit.run.check import check_explained, explain
from tito_audit.run.guard import LEAVE_OUT, guarded
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import Counted, Progress
from tito_audit.settings.model import Settings
from tito_audit.storage import find_logs, paths_of
from tito_audit.tokens.vocab import Vocabulary


@dataclass(frozen=True, slots=True)
class RescoreChoices:
    """What a user can choose about a rescoring."""

    jobs: int = 8
    """Requests at once."""
    keeps: bool = False
    """Whether the journal also keeps the scores of every call and row by itself, for `ScoresOf`."""
    tolerance: float = BOUND
    """The mean |difference| up to which recorded and rescored logprobs agree."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A rollout to score, or a row that cannot be read."""

    place: Place
    evidence: Evidence | None
    plan: Plan
    auditor: Auditor
    error: str = ""


class Rescoring:
    """The rollouts of logs with a model's scores, in order; `summary` is complete after the last one.

    The constructor opens nothing. Iterating raises SetupError or StorageError if the run is impossible, and
    ProviderError if the provider refuses everything. What was scored by then is in the journal.
    """

    def __init__(
        self,
        logs: str | Sequence[str],
        settings: Settings,
        provider: TokenProvider,
        choices: RescoreChoices | None = None,
        *,
        journal: Journal | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.logs = paths_of(logs)
        self.settings = settings
        self.choices = choices or RescoreChoices()
        self.progress = progress
        self.summary = RescoreSummary(provider.name, provider.model, self.choices.tolerance)
        journal = journal or Journal(None, provider.name)
        self.scorer = Scorer(provider, journal, self.choices.jobs)
        self.temperature = Temperature(provider, self.choices.tolerance)
        self._vocabulary: Vocabulary | None = None

    async def results(self) -> AsyncGenerator[RescoredRollout, None]:
        """The rollouts of the logs, in order."""
        started = time.perf_counter()
        waiting: deque[asyncio.Task[RescoredRollout]] = deque()
        try:
            for work in self._works():
                waiting.append(asyncio.create_task(self._rescored(work)))
                await asyncio.sleep(0)
                while len(waiting) > 2 * self.choices.jobs:
                    yield self._noted(await waiting.popleft())
            while waiting:
                yield self._noted(await waiting.popleft())
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        self.summary.seconds = time.perf_counter() - started
        self.summary.counts = self.scorer.counts
        self.summary.model = self.scorer.journal.model or self.summary.model
        if not self.summary.scored and self.summary.unscored:
            because, (number, place) = next(iter(self.summary.unscored.items()))
            raise ProviderError(f"Nothing was scored. {place}: {because} ({number} in all).")

    def __iter__(self) -> Iterator[RescoredRollout]:
        """The same for a caller without an event loop; closes the provider."""
        results = self.results()
        with asyncio.Runner() as runner:
            try:
                while True:
                    try:
                        yield runner.run(_next(results))
                    except StopAsyncIteration:
                        return
            finally:
                runner.run(self._close(results))

    def pieces(self, ids: tuple[int, ...]) -> str:
        """Ids as the text of each token, `' Skin'+'ny'`, or as numbers without a tokenizer."""
        known = self._vocabulary
        return "+".join(str(one) if known is None else repr(known.piece(one)) for one in ids) or "nothing"

    async def _close(self, results: AsyncGenerator[RescoredRollout, None]) -> None:
        await results.aclose()
        await self.scorer.provider.close()

    def _noted(self, result: RescoredRollout) -> RescoredRollout:
        self.summary.add(result)
        return result

    def _works(self) -> Iterator[_Work]:
        """The rollouts to score, each audited."""
        flow = RowFlow(find_logs(self.logs), self.settings)
        flow.progress = self.progress
        flow.begin(self.summary.scan)
        self._vocabulary = next((group.auditor.vocabulary for group in flow.groups.values()), None)
        flow.choose_encoders()
        for raw, place in flow.rows(self.summary.scan, self.progress, Counted()):
            group = flow.group(place.file)
            try:
                read = group.read(raw, place)
            except RecordError as error:
                yield _Work(place, None, Plan((), (), ()), group.auditor, str(error))
                continue
            for rollout in read.rollouts:
                yield self._work(rollout, group.auditor)

    def _work(self, rollout: Rollout, auditor: Auditor) -> _Work:
        """What to score of a rollout; PluginError if a rule fails on it by mistake."""
        place = rollout.place
        try:
            with guarded("the audit", place, LEAVE_OUT):
                renderer = auditor.renderer_for(rollout)
                evidence = explain(gather(rollout, auditor.tokenizer, renderer, auditor.speakers), auditor.rules)
                findings, _ = check_explained(evidence, auditor.rules, auditor.codes, auditor.repairs)
                return _Work(place, evidence, plan_of(evidence, findings, _vocabulary(auditor)), auditor)
        except EncodeError as error:
            return _Work(place, None, Plan((), (), ()), auditor, str(error))

    async def _rescored(self, work: _Work) -> RescoredRollout:
        """The scores of a rollout; PluginError if they cannot be compared by mistake."""
        with guarded("the comparison", work.place, LEAVE_OUT):
            return await self._compared(work)

    async def _compared(self, work: _Work) -> RescoredRollout:
        if work.evidence is None:
            return RescoredRollout(work.place, error=work.error)
        plan = work.plan
        scores = await self.scorer.scores(plan.wants)
        of_parts = list(zip(plan.parts, scores[: len(plan.parts)], strict=True))
        scored = [(part, said.logprobs) for part, said in of_parts if said.logprobs is not None]
        missed = [
            Unscored(part.where, part.turn, said.because) for part, said in of_parts if said.logprobs is None
        ]
        if self.choices.keeps:
            self.scorer.keep(of_parts)
        sides = iter(scores[len(plan.parts) :])
        prices = priced([(pair, _both(next(sides), next(sides))) for pair in plan.pairs], plan.findings)
        found = tuple(compared(part, values) for part, values in scored)
        agreed = agreement(used(found), self.choices.tolerance)
        because = ""
        if agreed is not None and agreed.disagrees:
            because = explained(used(found), self.choices.tolerance)
            because = because or await self.temperature.explained(scored, used(found))
        return RescoredRollout(
            work.place,
            found,
            agreed,
            tuple(prices.prices),
            prices.unpriced,
            tuple(prices.changed),
            tuple(prices.near),
            (*plan.unscored, *missed),
            judged_by_model(work.evidence, scored, work.auditor.rules, work.auditor.codes),
            because,
            sum(int(np.isfinite(values[part.offset :][part.sampled]).sum()) for part, values in scored),
            sum(_missing(part, values) for part, values in scored),
            tuple(sorted({one.weight_version for one in scores if one.weight_version is not None})),
        )


async def _next(results: AsyncGenerator[RescoredRollout, None]) -> RescoredRollout:
    return await anext(results)


def _vocabulary(auditor: Auditor) -> int | None:
    vocabulary = auditor.vocabulary
    return None if vocabulary is None or len(vocabulary.entries.far_ids) else vocabulary.size


def _both(one: Scores, other: Scores) -> PairScores | None:
    if one.logprobs is None or other.logprobs is None:
        return None
    return one.logprobs, other.logprobs


def _missing(part: Part, scores: Logprobs) -> int:
    """Sampled tokens that the model scored and for which the log has no logprob."""
    model = scores[part.offset :]
    recorded = part.recorded if part.recorded is not None else np.full(len(model), np.nan)
    return int((part.sampled & np.isfinite(model) & ~is_logprob(recorded, model, part.sentinel)).sum())
