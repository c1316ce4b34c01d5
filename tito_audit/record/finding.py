"""What an audit says: Severity, Hit, Finding, Skip, Result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.testimony import Witness


class Severity(IntEnum):
    """What happened to training, not how odd the tokens look."""

    NOTE = 0  # true, worth knowing, harmless as logged
    WARNING = 1  # the log cannot prove otherwise, or off-policy but consistent
    ERROR = 2  # the trainer would learn from wrong tokens, a wrong mask or wrong logprobs

    @property
    def word(self) -> str:
        """`note`, `warning` or `error`, as reports write it."""
        return self.name.lower()

    @classmethod
    def bar(cls, word: str) -> Severity | None:
        """What a finding has to reach under that word of `fail_on`; None for `never`."""
        return None if word == "never" else cls[word.upper()]


class Where(StrEnum):
    """The recorded sequence that a token range counts in."""

    PROMPT = "prompt"  # Turn.prompt_ids of the finding's turn
    COMPLETION = "completion"  # Turn.completion_ids of the finding's turn
    ROW = "row"  # TrainingRow.token_ids; of REC findings without tokens, the row of the file
    LOG = "log"  # no tokens: the finding is of the whole log, and its place is the first row that shows it


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference: ids and how each token reads; a piece of undecodable bytes is \\xNN."""

    ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule yields."""

    where: Where
    start: int
    end: int
    """Half-open token range in that sequence; start == end marks a place between tokens."""
    message: str
    """One sentence in a researcher's words: what is wrong here and what it does to training."""
    turn: int | None = None
    cause: str = ""
    """A few words that group findings: `tool call spacing`, `reasoning stripped`, `shifted by +1`."""
    severity: Severity | None = None
    """Overrides the rule's own severity for this hit."""
    recorded: Side = field(default_factory=Side)
    canonical: Side = field(default_factory=Side)


@dataclass(frozen=True, slots=True)
class Finding:
    """A hit with its code and place."""

    code: str
    severity: Severity
    place: Place
    hit: Hit
    repair: str | None = None
    """Name of the repair that would cure it; None while none claims its code."""
    known: bool = False
    """True when the baseline of the run holds it: it fails no gate."""

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits, the same when rows before it come or go and when its log gets another name.

        Rollouts of one prompt may share it: it says nothing of a rollout that the tokens do not say.
        """
        hit = self.hit
        parts = (self.code, self.place.item, hit.turn, hit.where, hit.start, hit.end, hit.cause)
        # Pieces are known with a tokenizer only, and say what ids say.
        text = repr((parts, hit.recorded.ids, hit.canonical.ids, () if hit.recorded.ids else hit.recorded.pieces))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Skip:
    """A rule that could not look at a rollout, and what was missing."""

    code: str
    because: str
    """`no messages`, `no logprobs`, `no tokenizer`, …"""


@dataclass(frozen=True, slots=True)
class Result:
    """One rollout (or one unreadable row), done."""

    place: Place
    rollout: Rollout | None
    """None for a row that could not be read."""
    findings: tuple[Finding, ...] = ()
    skips: tuple[Skip, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """`turns`, `tokens`, `generated_tokens` of this rollout."""
    told_by: tuple[str, ...] = ()
    """The keys that showed the format, of one of the first rows of each format in a file."""
    observed: object = None
    """What a viewer shows beside the findings, where a report asked for it; only viewers look into it."""
    witness: Witness | None = None
    """What the row says of how its log was written; None when it says nothing."""
    misfit: Finding | None = None
    """What says that another tokenizer or template wrote the log than it was to be audited with; rules that would
    only repeat it were held back."""
    of_log: bool = False
    """True for findings of a whole log: the result is of no rollout and of no unreadable row."""
