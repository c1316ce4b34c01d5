"""Writes a rescored log: the repair `rescore` on every row, proved like any other repair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.finding import Where
from tito_audit.record.model_scores import ModelScores
from tito_audit.record.outcome import Outcome
from tito_audit.rescore.journal import ScoreJournal
from tito_audit.rescore.model import is_logprob
from tito_audit.rescore.plan import scorable_parts
from tito_audit.run.progress import Progress
from tito_audit.run.repair import Repairs, repair_rollouts
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import dataset_metadata, find_logs, output_path, refuse_existing, target_paths
from tito_audit.version import VERSION


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
        how = RepairSettings(("rescore",), unsafe=scores.replaces, force=force)
        how = replace(how, choices=replace(how.choices, rescored=scores))
        # Threads that a provider left running must not be forked.
        self.run: Repairs = repair_rollouts(list(logs), out, replace(settings, jobs=1), how, progress)
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
