"""The flow of `rescore`: rows are read and audited here, while the provider scores those before them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from tito_audit.errors import EncodeError, ProviderError, RecordError
from tito_audit.evidence.gather import gather
from tito_audit.evidence.judgement import JUDGEMENT
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.provider import TokenProvider
from tito_audit.record.arrays import Logprobs
from tito_audit.record.by_name import RESCORED, TRAINERS
from tito_audit.record.column import Alignment, Column, ColumnRole, MovePolicy
from tito_audit.record.finding import Finding, Where
from tito_audit.record.mismatch import MISMATCH, RowMismatch
from tito_audit.record.rollout import Place, Rollout
from tito_audit.rescore.journal import ScoreJournal, Scorer
from tito_audit.rescore.model import (
    BOUND,
    NEAR,
    ChangedSum,
    Price,
    RescoredRollout,
    ScorePair,
    Segment,
    Sums,
    compared,
    explained,
    fitted,
    used,
)
from tito_audit.rescore.plan import DRIFT, OtherTokens, Scorable, Unscored, pairs_of, parts_of
from tito_audit.rescore.summary import RescoreSummary
from tito_audit.rule import Rule
from tito_audit.run.auditor import Auditor
from tito_audit.run.check import check_explained, explain_differences
from tito_audit.run.guard import LEAVE_OUT, guard_plugin
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import Progress, RowCounts
from tito_audit.settings.model import Settings
from tito_audit.storage import find_logs, paths_of
from tito_audit.storage.row import RawRow
from tito_audit.summary import Summary
from tito_audit.terminal.words import decimal
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.viewer.replacements import SAMPLED, SEEN

# What each drift finding costs: the logprobs of both sides, each in its own context.

PairScores: TypeAlias = tuple[Logprobs, Logprobs]
"""`[T]` and `[U]` the logprobs of a pair's sequences; NaN where nothing was scored."""
_AGAINST = {SAMPLED: "training row", SEEN: "next prompt"}


@dataclass(frozen=True, slots=True)
class _Piece:
    """One cut of a pair, priced."""

    finding: Finding
    against: str
    segment: Segment
    behind: Sums
    pair: OtherTokens
    total: float
    """What the whole pair changes, in absolute differences."""


def price(
    out: RescoredRollout, pairs: Iterable[tuple[OtherTokens, PairScores | None]], drift: Sequence[Finding]
) -> None:
    """Add the price of every drift finding; those with a side that could not be scored count as unpriced."""
    by_finding: dict[int, list[_Piece]] = {}
    failed: set[int] = set()
    for pair, scores in pairs:
        if scores is None:
            failed.update(id(cut.finding) for cut in pair.cuts)
            continue
        for piece in _pieces(pair, scores, out):
            by_finding.setdefault(id(piece.finding), []).append(piece)
    for finding in drift:
        if (pieces := by_finding.get(id(finding))) is None:
            why = "could not be scored" if id(finding) in failed else "the log does not hold the other tokens"
            out.unpriced[why] += 1
            continue
        # Those of the row in which its tokens were trained, if any, with what was sampled scored in its call.
        row = [piece for piece in pieces if piece.pair.key[0] is Where.ROW]
        call = [piece for piece in pieces if piece.pair.key[0] is not Where.ROW]
        pieces = row or call
        if len(row) == len(call) == 1:
            segment = replace(row[0].segment, sampled=call[0].segment.sampled)
            pieces = [replace(row[0], segment=segment)]
        behind = sum((piece.behind for piece in pieces), Sums())
        total = sum({id(piece.pair): piece.total for piece in pieces}.values())
        change = float(np.nansum([abs(piece.segment.difference) for piece in pieces]))
        share = change / total if total else float("nan")
        segments = tuple(piece.segment for piece in pieces)
        out.prices.append(Price(finding, pieces[0].against, segments, behind, share))


def _pieces(pair: OtherTokens, scores: PairScores, out: RescoredRollout) -> Iterator[_Piece]:
    recorded, other = scores
    (where, turn), moved = pair.key, pair.positions
    change = np.full(len(pair.ids), np.nan)
    same = pair.same & (moved < len(other))
    change[same] = other[moved[same]] - recorded[same]
    if pair.swapped:
        change = -change
    equal = np.isfinite(change)
    segments = []
    for cut in pair.cuts:
        # What was sampled first; NaN for tokens that were given. The first token of all has no logprob.
        ids = [pair.ids[cut.start : cut.end].tolist(), pair.other[cut.other_start : cut.other_end].tolist()]
        sums = [float("nan")] * 2
        if cut.sampled:
            values = recorded[max(cut.start, 1) : cut.end], other[max(cut.other_start, 1) : cut.other_end]
            sums = [float(side.sum()) for side in values]
        (ours, theirs), (own, instead) = (ids[::-1], sums[::-1]) if pair.swapped else (ids, sums)
        segments.append(Segment(tuple(ours), tuple(theirs), own, instead))
    total = float(np.nansum([abs(segment.difference) for segment in segments]) + np.abs(change[equal]).sum())
    if where is not Where.PROMPT:
        sides = float(recorded[equal].sum()), float(other[moved[equal]].sum())
        sampled, instead = sides[::-1] if pair.swapped else sides
        sampled += float(np.nansum([segment.sampled for segment in segments]))
        instead += float(np.nansum([segment.other for segment in segments]))
        out.changed.append(ChangedSum(where, turn, sampled, instead))
    for number, (cut, segment) in enumerate(zip(pair.cuts, segments, strict=True)):
        end = pair.cuts[number + 1].start if number + 1 < len(pair.cuts) else len(pair.ids)
        behind = change[cut.end : end]
        if where is not Where.PROMPT:  # its completion comes much later, and changes with the whole history
            for near, (first, last) in enumerate(pairwise((*NEAR, max(len(behind), NEAR[-1])))):
                stretch = behind[first:last]
                out.near[near] += Sums.of(stretch[np.isfinite(stretch)])
        if cut.finding is not None:
            against = _AGAINST.get(cut.replaced.against, cut.replaced.against)
            yield _Piece(cut.finding, against, segment, Sums.of(behind[np.isfinite(behind)]), pair, total)


# The rules on drifted logprobs (LPR507) and on two engines (LPR509), applied to the model's values.

CODES = frozenset(("LPR507", "LPR509"))
"""Rules that compare a second engine's logprobs with the sampler's."""


def judged_by_model(
    evidence: Evidence, scored: Sequence[tuple[Scorable, Logprobs]], rules: Sequence[Rule], codes: frozenset[str]
) -> tuple[tuple[Finding, ...], tuple[RowMismatch, ...]]:
    """What these rules find with the model's values as the second engine's, and why the two differ; each message
    names `rescored_logprobs`.

    Columns of a trainer in the log are left out: a scan judges those.
    """
    trainer_codes = codes & CODES
    if not trainer_codes or not scored:
        return (), ()
    memo: dict[Any, Any] = {JUDGEMENT: evidence.memo[JUDGEMENT]} if JUDGEMENT in evidence.memo else {}
    seen = replace(
        evidence,
        rollout=with_model(evidence.rollout, scored),
        present=evidence.present | Needs.TRAINER_LOGPROBS,
        memo=memo,
    )
    trainer_rules = [rule for rule in rules if rule.code in CODES]
    findings, _ = check_explained(replace(seen, explained=()), trainer_rules, trainer_codes)
    mismatches = tuple(each for each in memo.get(MISMATCH, ()) if each.trainer == RESCORED)
    return tuple(finding for finding in findings if f"`{RESCORED}`" in finding.hit.message), mismatches


def with_model(rollout: Rollout, scored: Sequence[tuple[Scorable, Logprobs]]) -> Rollout:
    """The rollout with the model's logprobs as the trainer's column."""
    row, turns = rollout.training_row, list(rollout.turns)
    if row is not None:
        row = replace(row, columns=_others(row.columns))
    turns = [replace(turn, columns=_others(turn.columns)) for turn in turns]
    for part, scores in scored:
        values = np.where(part.sampled, scores[part.offset :], np.nan)
        if part.where is Where.ROW and row is not None:
            row = replace(row, columns=(*row.columns, _column(values, Alignment.FULL)))
        elif part.turn is not None:
            turn = turns[part.turn]
            turns[part.turn] = replace(turn, columns=(*turn.columns, _column(values, Alignment.CALL)))
    return replace(rollout, training_row=row, turns=tuple(turns))


def _column(values: Logprobs, alignment: Alignment) -> Column:
    return Column(RESCORED, ColumnRole.OTHER, values, alignment, MovePolicy.STALE)


def _others(columns: Sequence[Column]) -> tuple[Column, ...]:
    return tuple(c for c in columns if c.role is not ColumnRole.OTHER or c.name not in TRAINERS)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A rollout to ask a model about, or a row that cannot be read."""

    place: Place
    evidence: Evidence | None
    findings: tuple[Finding, ...]
    auditor: Auditor
    raw: RawRow
    error: str = ""


_Result = TypeVar("_Result")


@dataclass(eq=False)
class ModelRun(Generic[_Result]):
    """The rollouts of logs with what a model says of them, in order.

    The constructor opens nothing. Iterating raises SetupError or StorageError if the run is impossible, and
    ProviderError if the provider refuses everything.
    """

    logs: str | Sequence[str]
    settings: Settings
    provider: TokenProvider
    _: KW_ONLY
    jobs: int = 8
    """Requests at once."""
    progress: Progress | None = None
    scan: Summary = field(default_factory=Summary, init=False)
    """Files, tokenizer and notices."""
    summary: Any = field(init=False)
    """What the results add up to; complete after the last one."""
    _vocabulary: Vocabulary | None = field(default=None, init=False)

    async def results(self) -> AsyncGenerator[_Result, None]:
        started = time.perf_counter()
        waiting: deque[asyncio.Task[_Result]] = deque()

        async def result(work: ModelWork) -> _Result:
            with guard_plugin("the comparison", work.place, LEAVE_OUT):  # PluginError for a mistake of ours
                return await self.compare(work)

        try:
            for work in self._works():
                waiting.append(asyncio.create_task(result(work)))
                await asyncio.sleep(0)
                while len(waiting) > 2 * self.jobs:
                    yield await self._next(waiting)
            while waiting:
                yield await self._next(waiting)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        self.finish(time.perf_counter() - started)

    def __iter__(self) -> Iterator[_Result]:
        """The same for a caller without an event loop; closes the provider."""
        results = self.results()

        async def following() -> _Result:
            return await anext(results)

        async def close() -> None:
            await results.aclose()
            await self.provider.close()

        with asyncio.Runner() as runner:
            try:
                while True:
                    try:
                        yield runner.run(following())
                    except StopAsyncIteration:
                        return
            finally:
                runner.run(close())

    def pieces(self, ids: tuple[int, ...]) -> str:
        """Ids as the text of each token, `' Skin'+'ny'`, or as numbers without a tokenizer."""
        vocab = self._vocabulary
        return "+".join(str(i) if vocab is None else repr(vocab.piece(i)) for i in ids) or "nothing"

    async def compare(self, work: ModelWork) -> _Result:
        """What the model says of one rollout, or that its row cannot be read."""
        raise NotImplementedError

    async def _next(self, waiting: deque[asyncio.Task[_Result]]) -> _Result:
        result = await waiting.popleft()
        self.summary.add(result)
        return result

    def finish(self, seconds: float) -> None:
        """Complete the summary after the last rollout; ProviderError if nothing could be asked."""
        raise NotImplementedError

    def _works(self) -> Iterator[ModelWork]:
        """The rollouts to ask about, each audited; PluginError if a rule fails on one by mistake."""
        flow = RowFlow(find_logs(paths_of(self.logs)), self.settings)
        flow.progress = self.progress
        flow.fill_summary(self.scan)
        self._vocabulary = next((group.auditor.vocabulary for group in flow.groups.values()), None)
        flow.choose_encoders()
        for raw, place in flow.rows(self.scan, self.progress, RowCounts()):
            group = flow.fitted_group(place.file)
            try:
                read = group.read_row(raw, place)
            except RecordError as error:
                yield ModelWork(place, None, (), group.auditor, raw, str(error))
                continue
            auditor = group.auditor
            for rollout in read.rollouts:
                try:
                    with guard_plugin("the audit", rollout.place, LEAVE_OUT):
                        renderer = auditor.renderer_for(rollout)
                        evidence = gather(rollout, auditor.tokenizer, renderer, auditor.speakers)
                        evidence = explain_differences(evidence, auditor.rules)
                        findings, _ = check_explained(evidence, auditor.rules, auditor.codes, auditor.repairs)
                        work = ModelWork(rollout.place, evidence, tuple(findings), auditor, raw)
                except EncodeError as error:
                    work = ModelWork(rollout.place, None, (), auditor, raw, str(error))
                yield work


@dataclass(eq=False)
class Rescoring(ModelRun[RescoredRollout]):
    """The rollouts of logs with a model's scores, in order; `summary` is complete after the last one.

    What was scored before an error is in the journal.
    """

    _: KW_ONLY
    keeps: bool = False
    """Whether the journal also keeps the scores of every call and row by itself, for `ScoresOf`."""
    tolerance: float = BOUND
    """The mean |difference| up to which recorded and rescored logprobs agree."""
    journal: ScoreJournal | None = None
    _temperatures: int = field(default=0, init=False)
    """Rollouts in which a temperature was sought."""

    def __post_init__(self) -> None:
        self.summary: RescoreSummary = RescoreSummary(
            self.provider.name, self.provider.model, self.tolerance, self.scan
        )
        journal = self.journal or ScoreJournal(None, self.provider.name)
        self.scorer = Scorer(self.provider, journal, self.jobs)

    def finish(self, seconds: float) -> None:
        self.summary.seconds = seconds
        self.summary.counts = self.scorer.counts
        self.summary.model = self.scorer.journal.model or self.summary.model
        if not self.summary.scored and self.summary.unscored:
            because, (number, place) = next(iter(self.summary.unscored.items()))
            raise ProviderError(f"Nothing was scored. {place}: {because} ({number} in all).")

    async def compare(self, work: ModelWork) -> RescoredRollout:
        result = RescoredRollout(work.place, work.error)
        if work.evidence is None:
            return result
        vocabulary = work.auditor.vocabulary
        size = None if vocabulary is None or len(vocabulary.entries.far_ids) else vocabulary.size
        drift = [finding for finding in work.findings if finding.code.startswith(DRIFT)]
        parts, result.unscored = parts_of(work.evidence, size)
        pairs = list(pairs_of(work.evidence, drift, size))
        wants = [*(part.want for part in parts), *(want for pair in pairs for want in pair.wants)]
        scores = await self.scorer.scores(wants)
        of_parts = list(zip(parts, scores[: len(parts)], strict=True))
        scored = [(part, own.logprobs) for part, own in of_parts if own.logprobs is not None]
        missed = [Unscored(part.where, part.turn, own.because) for part, own in of_parts if own.logprobs is None]
        result.unscored += missed
        if self.keeps:
            self.scorer.keep(of_parts)
        sides = iter(scores[len(parts) :])
        both = [(pair, next(sides).logprobs, next(sides).logprobs) for pair in pairs]
        price(result, [(pair, None if a is None or b is None else (a, b)) for pair, a, b in both], drift)
        result.compared = [compared(part, values) for part, values in scored]
        sequences = used(result.compared)
        differences = [sequence.differences for sequence in sequences]
        if differences:
            result.agreement = Sums.of(np.concatenate(differences)).agreement(self.tolerance)
        if result.agreement is not None and result.agreement.disagrees:
            result.explanation = explained(sequences, self.tolerance) or await self._temperature(scored, sequences)
        result.findings, result.mismatches = judged_by_model(
            work.evidence, scored, work.auditor.rules, work.auditor.codes
        )
        for part, values in scored:
            result.scored_tokens += int(np.isfinite(values[part.offset :][part.sampled]).sum())
        result.weight_versions = sorted({s.weight_version for s in scores if s.weight_version is not None})
        return result

    async def _temperature(
        self, scored: Sequence[tuple[Scorable, Logprobs]], sequences: Sequence[ScorePair]
    ) -> str:
        """Whether the recorded logprobs are those at another temperature; asked of the first four rollouts."""
        if self._temperatures >= 4:
            return ""
        longest = max(sequences, key=lambda sequence: len(sequence.at))
        part = next(part for part, _ in scored if (part.where, part.turn) == (longest.where, longest.turn))
        self._temperatures += 1
        want, answer = part.want, None
        for count in (1000, 20):  # many servers give no more than 20 alternatives
            with suppress(ProviderError):
                answer = await self.provider.score(want.ids.tolist(), start=want.start, top=count)
                break
        if answer is None or not answer.top_logprobs or not (width := max(map(len, answer.top_logprobs))):
            return ""
        before_drift = ~longest.drifted
        at = longest.at[before_drift] + part.offset - answer.start
        top = np.full((len(at), width), -np.inf)
        for row, place in enumerate(at.tolist()):
            values = [value for _, value in answer.top_logprobs[place]]
            top[row, : len(values)] = values
        recorded, model = longest.recorded[before_drift], longest.model[before_drift]
        temperature = fitted(recorded, model, top, self.tolerance)
        if temperature is None:
            return ""
        return f"the recorded logprobs are those at temperature {decimal(temperature)}"
