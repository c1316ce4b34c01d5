"""A model's scores for the repair `rescore`, from the journal of a rescoring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.finding import Where
from tito_audit.record.model_scores import ModelScores
from tito_audit.rescore.compare import is_logprob
from tito_audit.rescore.journal import ScoreJournal
from tito_audit.rescore.plan import parts_of


@dataclass(frozen=True, slots=True)
class ScoresOf:
    """A model's scores of a rollout, from the journal; no provider is called."""

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
        for part in parts_of(evidence, None)[0]:
            scored = self.journal.get(part.want)
            if scored is None:
                continue
            scores, version = scored
            values = np.where(part.sampled, scores[part.offset :], np.nan)
            versions.update(() if version is None else (version,))
            # True where the log has a logprob, not a gap or a placeholder.
            if part.recorded is None:
                stated = np.zeros(len(values), np.bool_)
            else:
                stated = is_logprob(part.recorded, values, part.sentinel)
            recorded[part.turn] = stated
            if part.where is Where.ROW:
                row = values
            elif part.turn is not None:
                calls[part.turn] = values
        if not recorded:
            return None
        weights = f", weights {', '.join(sorted(versions))}" if versions else ""
        return ModelScores(self.source + weights, calls, row, recorded, self.replaces, self.adds)
