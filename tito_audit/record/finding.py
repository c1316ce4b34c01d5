"""What an audit reports: Severity, Hit, Finding, Skip, Result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.testimony import Witness
from tito_audit.record.trainings import Trainings


class Severity(IntEnum):
    """What it does to training, not how odd the tokens look."""

    NOTE = 0  # true, worth knowing, harmless as logged
    WARNING = 1  # the log cannot prove otherwise, or off-policy but consistent
    ERROR = 2  # the trainer would learn from wrong tokens, a wrong mask or wrong logprobs

    @property
    def word(self) -> str:
        """`note`, `warning` or `error`, as reports write it."""
        return self.name.lower()

    @classmethod
    def bar(cls, word: str) -> Severity | None:
        """The severity from which findings count under this word of `fail_on`; None for `never`."""
        return None if word == "never" else cls[word.upper()]


class Where(StrEnum):
    """The recorded sequence that a token range indexes."""

    PROMPT = "prompt"  # Turn.prompt_ids of the finding's turn
    COMPLETION = "completion"  # Turn.completion_ids of the finding's turn
    ROW = "row"  # TrainingRow.token_ids; of REC findings without tokens, the row of the file
    LOG = "log"  # no tokens: the finding is of the whole log, and its place is the first row that shows it


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference: ids, and each token as text; bytes that are not text as \\xNN."""

    ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hit:
    """A place that a rule reports."""

    where: Where
    start: int
    end: int
    """`start` and `end` are a half-open token range of that sequence; if equal, a place between tokens."""
    message: str
    """One sentence for a researcher: what is wrong here and what it does to training."""
    turn: int | None = None
    cause: str = ""
    """A few words that group findings: `tool call spacing`, `reasoning stripped`, `shifted by +1`."""
    severity: Severity | None = None
    """Overrides the rule's own severity for this hit."""
    recorded: Side = field(default_factory=Side)
    canonical: Side = field(default_factory=Side)


@dataclass(frozen=True, slots=True)
class Finding:
    """A hit with its code, severity and place."""

    code: str
    severity: Severity
    place: Place
    hit: Hit
    repair: str | None = None
    """Name of the repair that claims it; None if none does."""
    known: bool = False
    """True when the run's baseline holds it, so it fails no gate."""

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that stay the same when rows before it come or go or the log is renamed.

        Rollouts of one prompt may share it: it depends only on tokens and cause.
        """
        hit = self.hit
        parts = (self.code, self.place.item, hit.turn, hit.where, hit.start, hit.end, hit.cause)
        # Pieces need a tokenizer and add nothing to ids.
        text = repr((parts, hit.recorded.ids, hit.canonical.ids, () if hit.recorded.ids else hit.recorded.pieces))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Skip:
    """A rule that could not check a rollout, with the reason."""

    code: str
    because: str
    """`no messages`, `no logprobs`, `no tokenizer`, …"""


@dataclass(frozen=True, slots=True)
class Result:
    """The audit of one rollout, of one unreadable row, or of a whole log."""

    place: Place
    rollout: Rollout | None
    """None for a row that could not be read."""
    findings: tuple[Finding, ...] = ()
    skips: tuple[Skip, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """`turns`, `tokens`, `generated_tokens` of this rollout."""
    told_by: tuple[str, ...] = ()
    """The keys by which the format was recognized, on one of the first rows of each format in a file."""
    observed: object = None
    """What a viewer shows next to the findings, if a report asked for it; only viewers read it."""
    witness: Witness | None = None
    """What the row shows about how its log was written; None when it shows nothing."""
    trainings: Trainings | None = None
    """What the rollout trains, to be compared with the other rows of the run; None where nobody asks."""
    misfit: Finding | None = None
    """The finding that the log was written with another tokenizer or template; rules that would only repeat it
    were held back."""
    told: tuple[Finding, ...] = ()
    """Findings of its whole log that were made before its rows, the same for every result of the log."""
    of_log: bool = False
    """True for findings of a whole log or run: the result is neither a rollout nor an unreadable row."""

    @property
    def between_rows(self) -> bool:
        """Whether its findings compare one rollout of the run, which has a result of its own, with others."""
        return self.of_log and any(finding.hit.where is not Where.LOG for finding in self.findings)
