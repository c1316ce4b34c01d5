"""The flow of `rescore`: rows are read, audited and scored, and the log is written with the scores."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from tito_audit.errors import EncodeError, ProviderError, RecordError
from tito_audit.evidence.gather import gather
from tito_audit.evidence.judgement import JUDGEMENT
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.provider import TokenProvider
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.column import Alignment, Column, ColumnRole, MovePolicy
from tito_audit.record.finding import Finding, Where
from tito_audit.record.mismatch import MISMATCH, RowMismatch
from tito_audit.record.model_scores import ModelScores
from tito_audit.record.outcome import Outcome
from tito_audit.record.policy_columns import RESCORED_LOGPROBS, TRAINER_COLUMNS
from tito_audit.record.rollout import Place, Rollout
from tito_audit.rescore.journal import ScoreJournal, Scorer
from tito_audit.rescore.model import (
    DRIFT,
    NEAR,
    TOLERANCE,
    ChangedSum,
    Price,
    RescoredLogprobs,
    RescoredRollout,
    Scorable,
    Segment,
    SequencePair,
    Sums,
    Unscored,
    drift_pairs,
    explain_disagreement,
    fit_temperature,
    is_logprob,
    pair_logprobs,
    scorable_parts,
)
from tito_audit.rescore.summary import RescoreSummary
from tito_audit.rule import Rule
from tito_audit.run.auditor import Auditor
from tito_audit.run.check import check_explained, explain_differences
from tito_audit.run.guard import LEAVE_OUT, guard_plugin
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import Progress, RowCounts
from tito_audit.run.repair import Repairs, repair_rollouts
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import dataset_metadata, find_logs, log_paths, output_path, refuse_existing, target_paths
from tito_audit.storage.row import RawRow
from tito_audit.summary import Summary
from tito_audit.terminal.words import decimal
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.version import VERSION
from tito_audit.viewer.replacements import WAS_SAMPLED, WAS_SEEN

# What each drift finding costs, by the logprobs of both sides, each in its own context.

PairScores: TypeAlias = tuple[Logprobs, Logprobs]
"""`[T]` and `[U]` the logprobs of a pair's two sequences; NaN where nothing was scored."""
_AGAINST = {WAS_SAMPLED: "training row", WAS_SEEN: "next prompt"}


@dataclass(frozen=True, slots=True)
class _PricedSpan:
    finding: Finding
    against: str
    segment: Segment
    behind: Sums
    pair: SequencePair
    total: float
    """The sum of the absolute differences of the whole pair."""


def price_findings(
    out: RescoredRollout, pairs: Iterable[tuple[SequencePair, PairScores | None]], drift: Sequence[Finding]
) -> None:
    """Add to `out` the price of every drift finding, or why it has none. A pair without scores was refused."""
    by_finding: dict[int, list[_PricedSpan]] = {}
    failed: set[int] = set()
    for pair, scores in pairs:
        if scores is None:
            failed.update(id(span.finding) for span in pair.spans)
            continue
        for priced in _priced_spans(pair, scores, out):
            by_finding.setdefault(id(priced.finding), []).append(priced)
    for finding in drift:
        spans = by_finding.get(id(finding))
        if spans is None:
            why = "could not be scored" if id(finding) in failed else "the log does not hold the other tokens"
            out.unpriced[why] += 1
            continue
        # Drift is priced in the row that trains the tokens, if there is one; what was sampled, in its call.
        row = [span for span in spans if span.pair.key[0] is Where.ROW]
        call = [span for span in spans if span.pair.key[0] is not Where.ROW]
        spans = row or call
        if len(row) == len(call) == 1:
            segment = replace(row[0].segment, sampled=call[0].segment.sampled)
            spans = [replace(row[0], segment=segment)]
        behind = sum((span.behind for span in spans), Sums())
        total = sum({id(span.pair): span.total for span in spans}.values())
        change = float(np.nansum([abs(span.segment.difference) for span in spans]))
        share = change / total if total else float("nan")
        segments = tuple(span.segment for span in spans)
        out.prices.append(Price(finding, spans[0].against, segments, behind, share))


def _priced_spans(pair: SequencePair, scores: PairScores, out: RescoredRollout) -> Iterator[_PricedSpan]:
    """The spans of a pair that have a finding; adds to `out` how all other tokens of the pair change."""
    recorded, other = scores
    (where, turn), positions = pair.key, pair.positions
    change = np.full(len(pair.ids), np.nan)
    same = pair.same & (positions < len(other))
    change[same] = other[positions[same]] - recorded[same]
    if pair.swapped:
        change = -change
    equal = np.isfinite(change)
    segments = []
    for span in pair.spans:
        ids = [pair.ids[span.start : span.end].tolist(), pair.other[span.other_start : span.other_end].tolist()]
        sums = [float("nan")] * 2
        if span.sampled:  # the first token of a sequence has no logprob
            values = recorded[max(span.start, 1) : span.end], other[max(span.other_start, 1) : span.other_end]
            sums = [float(side.sum()) for side in values]
        if pair.swapped:
            ids, sums = ids[::-1], sums[::-1]
        segments.append(Segment(tuple(ids[0]), tuple(ids[1]), *sums))
    total = float(np.nansum([abs(segment.difference) for segment in segments]) + np.abs(change[equal]).sum())
    if where is not Where.PROMPT:
        sides = float(recorded[equal].sum()), float(other[positions[equal]].sum())
        sampled, instead = sides[::-1] if pair.swapped else sides
        sampled += float(np.nansum([segment.sampled for segment in segments]))
        instead += float(np.nansum([segment.other for segment in segments]))
        out.changed.append(ChangedSum(where, turn, sampled, instead))
    for number, (span, segment) in enumerate(zip(pair.spans, segments, strict=True)):
        end = pair.spans[number + 1].start if number + 1 < len(pair.spans) else len(pair.ids)
        behind = change[span.end : end]
        if where is not Where.PROMPT:  # a prompt's completion comes much later, and sees all of the drift
            for at, (first, last) in enumerate(pairwise((*NEAR, max(len(behind), NEAR[-1])))):
                stretch = behind[first:last]
                out.near[at] += Sums.of(stretch[np.isfinite(stretch)])
        if span.finding is not None:
            against = _AGAINST.get(span.replaced.against, span.replaced.against)
            yield _PricedSpan(span.finding, against, segment, Sums.of(behind[np.isfinite(behind)]), pair, total)


# The rules on drifted logprobs (LPR507) and on two engines (LPR509), applied to the model's values.

CODES = frozenset(("LPR507", "LPR509"))
"""Rules that compare a second engine's logprobs with the sampler's."""


def judge_by_model(
    evidence: Evidence, scored: Sequence[tuple[Scorable, Logprobs]], rules: Sequence[Rule], codes: frozenset[str]
) -> tuple[tuple[Finding, ...], tuple[RowMismatch, ...]]:
    """What LPR507 and LPR509 find with the model as the second engine, and why it differs from the sampler.

    Columns of a trainer in the log are left out: a scan judges those.
    """
    trainer_codes = codes & CODES
    if not trainer_codes or not scored:
        return (), ()
    memo: dict[Any, Any] = {JUDGEMENT: evidence.memo[JUDGEMENT]} if JUDGEMENT in evidence.memo else {}
    seen = replace(
        evidence,
        rollout=with_model_logprobs(evidence.rollout, scored),
        present=evidence.present | Needs.TRAINER_LOGPROBS,
        memo=memo,
    )
    trainer_rules = [rule for rule in rules if rule.code in CODES]
    findings, _ = check_explained(replace(seen, explained=()), trainer_rules, trainer_codes)
    mismatches = tuple(each for each in memo.get(MISMATCH, ()) if each.trainer == RESCORED_LOGPROBS)
    return tuple(finding for finding in findings if f"`{RESCORED_LOGPROBS}`" in finding.hit.message), mismatches


def with_model_logprobs(rollout: Rollout, scored: Sequence[tuple[Scorable, Logprobs]]) -> Rollout:
    """The rollout with the model's logprobs in the place of the trainer's columns."""
    row, turns = rollout.training_row, list(rollout.turns)
    if row is not None:
        row = replace(row, columns=_without_trainers(row.columns))
    turns = [replace(turn, columns=_without_trainers(turn.columns)) for turn in turns]
    for part, scores in scored:
        values = np.where(part.sampled, scores[part.offset :], np.nan)
        if part.where is Where.ROW and row is not None:
            row = replace(row, columns=(*row.columns, _model_column(values, Alignment.FULL)))
        elif part.turn is not None:
            turn = turns[part.turn]
            turns[part.turn] = replace(turn, columns=(*turn.columns, _model_column(values, Alignment.CALL)))
    return replace(rollout, training_row=row, turns=tuple(turns))


def _model_column(values: Logprobs, alignment: Alignment) -> Column:
    return Column(RESCORED_LOGPROBS, ColumnRole.OTHER, values, alignment, MovePolicy.STALE)


def _without_trainers(columns: Sequence[Column]) -> tuple[Column, ...]:
    return tuple(c for c in columns if c.role is not ColumnRole.OTHER or c.name not in TRAINER_COLUMNS)


@dataclass(frozen=True, slots=True)
class RolloutToCompare:
    """A rollout that was audited, ready to be compared with a model, or a row that cannot be read."""

    place: Place
    evidence: Evidence | None
    findings: tuple[Finding, ...]
    auditor: Auditor
    raw: RawRow
    error: str = ""


_Result = TypeVar("_Result")


@dataclass(eq=False)
class ModelRun(Generic[_Result]):
    """Compares the rollouts of logs with a model; the results come in the order of the logs.

    The constructor opens nothing. Iterating raises SetupError or StorageError if the run is impossible, and
    ProviderError if the provider refuses everything.
    """

    logs: str | Sequence[str]
    settings: Settings
    provider: TokenProvider
    _: KW_ONLY
    jobs: int = 8
    """How many requests run at once."""
    progress: Progress | None = None
    scan: Summary = field(default_factory=Summary, init=False)
    """Files, tokenizer and notices."""
    summary: Any = field(init=False)
    """The sum of the results; complete after the last one."""
    _vocabulary: Vocabulary | None = field(default=None, init=False)

    async def results(self) -> AsyncGenerator[_Result, None]:
        started = time.perf_counter()
        waiting: deque[asyncio.Task[_Result]] = deque()

        async def result(work: RolloutToCompare) -> _Result:
            with guard_plugin(
                "the comparison", work.place, LEAVE_OUT
            ):  # turns a bug into a PluginError with the place
                return await self.compare(work)

        try:
            for work in self._audited_rollouts():
                waiting.append(asyncio.create_task(result(work)))
                await asyncio.sleep(0)
                while len(waiting) > 2 * self.jobs:
                    yield await self._next_result(waiting)
            while waiting:
                yield await self._next_result(waiting)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        self.finish(time.perf_counter() - started)

    def __iter__(self) -> Iterator[_Result]:
        """The results for a caller without an event loop; closes the provider at the end."""
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

    async def compare(self, work: RolloutToCompare) -> _Result:
        """The result of one rollout, or of a row that cannot be read."""
        raise NotImplementedError

    async def _next_result(self, waiting: deque[asyncio.Task[_Result]]) -> _Result:
        result = await waiting.popleft()
        self.summary.add(result)
        return result

    def finish(self, seconds: float) -> None:
        """Complete the summary after the last rollout; ProviderError if nothing could be asked."""
        raise NotImplementedError

    def _audited_rollouts(self) -> Iterator[RolloutToCompare]:
        """Read and audit the rollouts; PluginError if a rule fails on one by mistake."""
        flow = RowFlow(find_logs(log_paths(self.logs)), self.settings)
        flow.progress = self.progress
        flow.fill_summary(self.scan)
        self._vocabulary = next((group.auditor.vocabulary for group in flow.groups.values()), None)
        flow.choose_encoders()
        for raw, place in flow.rows(self.scan, self.progress, RowCounts()):
            group = flow.fitted_group(place.file)
            try:
                read = group.read_row(raw, place)
            except RecordError as error:
                yield RolloutToCompare(place, None, (), group.auditor, raw, str(error))
                continue
            auditor = group.auditor
            for rollout in read.rollouts:
                try:
                    with guard_plugin("the audit", rollout.place, LEAVE_OUT):
                        renderer = auditor.renderer_for(rollout)
                        evidence = gather(rollout, auditor.tokenizer, renderer, auditor.speakers)
                        evidence = explain_differences(evidence, auditor.rules)
                        findings, _ = check_explained(evidence, auditor.rules, auditor.codes, auditor.repairs)
                        work = RolloutToCompare(rollout.place, evidence, tuple(findings), auditor, raw)
                except EncodeError as error:
                    work = RolloutToCompare(rollout.place, None, (), auditor, raw, str(error))
                yield work


@dataclass(eq=False)
class Rescoring(ModelRun[RescoredRollout]):
    """Scores the rollouts of logs with a model, in order; `summary` is complete after the last one.

    What was scored before an error stays in the journal.
    """

    _: KW_ONLY
    keeps: bool = False
    """Whether the journal gets the scores of every call and row by itself, for `JournalScores`."""
    tolerance: float = TOLERANCE
    """The mean |difference| up to which recorded and rescored logprobs agree."""
    journal: ScoreJournal | None = None
    _temperatures: int = field(default=0, init=False)
    """In how many rollouts a temperature was sought."""

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

    async def compare(self, work: RolloutToCompare) -> RescoredRollout:
        result = RescoredRollout(work.place, work.error)
        if work.evidence is None:
            return result
        vocabulary = work.auditor.vocabulary
        size = None if vocabulary is None or len(vocabulary.entries.far_ids) else vocabulary.size
        drift = [finding for finding in work.findings if finding.code.startswith(DRIFT)]
        parts, result.unscored = scorable_parts(work.evidence, size)
        pairs = list(drift_pairs(work.evidence, drift, size))
        queries = [*(part.query for part in parts), *(query for pair in pairs for query in pair.queries)]
        scores = await self.scorer.scores(queries)
        of_parts = list(zip(parts, scores[: len(parts)], strict=True))
        scored = [(part, answer.logprobs) for part, answer in of_parts if answer.logprobs is not None]
        refused = [(part, answer.because) for part, answer in of_parts if answer.logprobs is None]
        result.unscored += [Unscored(part.where, part.turn, because) for part, because in refused]
        if self.keeps:
            self.scorer.store_parts(of_parts)
        priced: list[tuple[SequencePair, PairScores | None]] = []
        for pair, a, b in zip(pairs, scores[len(parts) :: 2], scores[len(parts) + 1 :: 2], strict=True):
            priced.append((pair, None if a.logprobs is None or b.logprobs is None else (a.logprobs, b.logprobs)))
        price_findings(result, priced, drift)
        result.compared = [pair_logprobs(part, values) for part, values in scored]
        if result.judged:
            differences = np.concatenate([judged.differences for judged in result.judged])
            result.agreement = Sums.of(differences).agreement(self.tolerance)
        if result.agreement is not None and result.agreement.disagrees:
            explanation = explain_disagreement(result.judged, self.tolerance)
            result.explanation = explanation or await self._find_temperature(scored, result.judged)
        result.findings, result.mismatches = judge_by_model(
            work.evidence, scored, work.auditor.rules, work.auditor.codes
        )
        for part, values in scored:
            result.scored_tokens += int(np.isfinite(values[part.offset :][part.sampled]).sum())
        result.weight_versions = sorted({s.weight_version for s in scores if s.weight_version is not None})
        return result

    async def _find_temperature(
        self, scored: Sequence[tuple[Scorable, Logprobs]], sequences: Sequence[RescoredLogprobs]
    ) -> str:
        """The temperature that explains a disagreement, in words, or "". Sought in four rollouts only."""
        if self._temperatures >= 4:
            return ""
        longest = max(sequences, key=lambda sequence: len(sequence.positions))
        part = next(part for part, _ in scored if (part.where, part.turn) == (longest.where, longest.turn))
        self._temperatures += 1
        query, answer = part.query, None
        for count in (1000, 20):  # many servers give no more than 20 alternatives
            with suppress(ProviderError):
                answer = await self.provider.score(query.ids.tolist(), start=query.start, top=count)
                break
        if answer is None or not answer.top_logprobs or not (width := max(map(len, answer.top_logprobs))):
            return ""
        before_drift = ~longest.drifted
        at = longest.positions[before_drift] + part.offset - answer.start
        top = np.full((len(at), width), -np.inf)
        for row, place in enumerate(at.tolist()):
            values = [value for _, value in answer.top_logprobs[place]]
            top[row, : len(values)] = values
        recorded, model = longest.recorded[before_drift], longest.model[before_drift]
        temperature = fit_temperature(recorded, model, top, self.tolerance)
        if temperature is None:
            return ""
        return f"the recorded logprobs are those at temperature {decimal(temperature)}"


@dataclass(frozen=True, slots=True)
class JournalScores:
    """Looks up a model's scores of a rollout in the journal; calls no provider."""

    journal: ScoreJournal
    source: str
    """Who scored: model, provider and date."""
    replaces: bool = False
    """Whether logprobs in the log are replaced too."""
    adds: bool = True
    """Whether columns may be added."""

    def __call__(self, evidence: Evidence) -> ModelScores | None:
        """The scores of a rollout; None if nothing in it was scored."""
        calls: dict[int, Logprobs] = {}
        recorded: dict[int | None, Mask] = {}
        versions: set[str] = set()
        row: Logprobs | None = None
        for part in scorable_parts(evidence, None)[0]:
            scores = self.journal.get(part.query)
            if scores is None or scores.logprobs is None:
                continue
            values = np.where(part.sampled, scores.logprobs[part.offset :], np.nan)
            versions.update(() if scores.weight_version is None else (scores.weight_version,))
            if part.recorded is None:
                recorded[part.turn] = np.zeros(len(values), np.bool_)
            else:
                recorded[part.turn] = is_logprob(part.recorded, values, part.sentinel)
            if part.where is Where.ROW:
                row = values
            elif part.turn is not None:
                calls[part.turn] = values
        if not recorded:
            return None
        weights = f", weights {', '.join(sorted(versions))}" if versions else ""
        return ModelScores(self.source + weights, calls, row, recorded, self.replaces, self.adds)


_TABLES = (".parquet", ".arrow", ".arrows", ".feather")
"""File types with fixed columns."""


def check_target(logs: Sequence[str], out: str, *, force: bool) -> None:
    """StorageError if a file to write is one of the logs, or exists and `force` is not set."""
    files = find_logs(list(logs))
    targets = target_paths(list(logs), files, output_path(out))
    refuse_existing({**targets, **dataset_metadata(list(logs), targets)}, overwrite=force)


def scores_of(logs: Sequence[str], journal: ScoreJournal, model: str, *, replaces: bool = False) -> JournalScores:
    """The scores for the repair; their source names the model, the date and our version."""
    today = datetime.now(UTC).date().isoformat()
    tables = any(file.name.endswith(_TABLES) for file in find_logs(list(logs)))
    return JournalScores(journal, f"{model} on {today} (tito-audit {VERSION})", replaces, not tables)


class RescoredLog:
    """Writes a rescored log row by row; its counts are complete after the last one."""

    def __init__(
        self,
        logs: Sequence[str],
        out: str,
        settings: Settings,
        scores: JournalScores,
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> None:
        repair = RepairSettings(("rescore",), unsafe=scores.replaces, force=force)
        repair = replace(repair, choices=replace(repair.choices, rescored=scores))
        # Threads that a provider left running must not be forked.
        self.run: Repairs = repair_rollouts(list(logs), out, replace(settings, jobs=1), repair, progress)
        self.rows = self.changed = 0
        self.refused = Counter[str]()
        """How many rows stay as they were although the model has logprobs for them, by reason."""

    def __iter__(self) -> Iterator[Outcome]:
        for outcome in self.run:
            self.rows += 1
            self.changed += outcome.repaired
            if not outcome.repaired and "rescore" in outcome.declined:
                self.refused[outcome.declined["rescore"]] += 1
            yield outcome

    @property
    def files(self) -> Sequence[tuple[Path, Path]]:
        """Each log and the file that was written for it."""
        return self.run.written
