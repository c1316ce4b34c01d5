"""What an audit reports: Severity, Hit, Finding, Skip, Result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.mismatch import RowMismatch
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.testimony import Witness
from tito_audit.record.trainings import Trainings


class Severity(IntEnum):
    """How much a finding harms training, not how odd the tokens look."""

    NOTE = 0  # true, worth knowing, harmless as logged
    WARNING = 1  # the log cannot prove otherwise, or off-policy but consistent
    ERROR = 2  # the trainer would learn from wrong tokens, a wrong mask or wrong logprobs

    word: str
    """`note`, `warning` or `error`, as reports write it."""

    def __init__(self, _harm: int) -> None:
        self.word = self.name.lower()

    @classmethod
    def threshold(cls, word: str) -> Severity | None:
        """The lowest severity that counts for a value of `--fail-on`; None for `never`."""
        return None if word == "never" else cls[word.upper()]


class Where(StrEnum):
    """The recorded sequence that the token range of a hit indexes."""

    PROMPT = "prompt"  # Turn.prompt_ids of the finding's turn
    COMPLETION = "completion"  # Turn.completion_ids of the finding's turn
    ROW = "row"  # TrainingRow.token_ids; of REC findings without tokens, the row of the file
    LOG = "log"  # no tokens: the finding is about the whole log, and its place is the first row that shows it


SAMPLED, PROMPT, NEXT_PROMPT, TRAINING_ROW = "sampled", "prompt", "next prompt", "training row"
PREVIOUS_CALL, RE_ENCODED, TEMPLATE = "previous call", "re-encoded", "template"
"""Values of `Side.label`."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference: token ids, and each token as text, with other bytes as \\xNN."""

    ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    label: str = ""
    """What holds these tokens: `sampled`, `next prompt`, `training row`, …; "" if the hit's `where` tells."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A place that a rule reports."""

    where: Where
    start: int
    end: int
    """`[start, end)` in that sequence; if equal, a place between tokens."""
    message: str
    """One sentence for a researcher: what is wrong and what it does to training."""
    turn: int | None = None
    cause: str = ""
    """Groups findings: `tool call spacing`, `reasoning stripped`, `shifted by +1`."""
    severity: Severity | None = None
    """Overrides the rule's own severity for this hit."""
    recorded: Side = Side()
    """The tokens of the sequence that `where` names."""
    canonical: Side = Side()
    """What template, tokenizer or another sequence has there."""
    before: Side = Side()
    """A few tokens before the difference, equal on both sides."""
    after: Side = Side()
    """A few tokens after it, equal on both sides."""
    later_turn: int | None = None
    """The turn whose prompt holds the other tokens or breaks its history; None if no prompt does."""
    identity: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The ids of both sides that the fingerprint is made of; None: those of `recorded` and `canonical`."""
    headline: str = ""
    """The headline of its finding; "": that of its rule."""

    @property
    def labels(self) -> tuple[str, str]:
        """The labels of `recorded` and `canonical`, inferred where they have none."""
        own = {Where.PROMPT: PROMPT, Where.COMPLETION: SAMPLED, Where.ROW: TRAINING_ROW, Where.LOG: ""}[self.where]
        other = self.canonical.label or (RE_ENCODED if self.canonical.ids or self.canonical.pieces else "")
        return self.recorded.label or own, other

    @property
    def sampled_first(self) -> tuple[Side, Side]:
        """Both sides with their labels; sampled tokens come first."""
        recorded, canonical = (
            replace(side, label=label)
            for side, label in zip((self.recorded, self.canonical), self.labels, strict=True)
        )
        swap = canonical.label in (SAMPLED, PREVIOUS_CALL) and recorded.label != SAMPLED
        return (canonical, recorded) if swap else (recorded, canonical)


_AT_ONCE = 4096
"""Rows of `FoldedFindings.places` converted at a time."""


@dataclass(frozen=True, slots=True)
class FoldedFindings:
    """Many findings of one rule, severity and cause in a rollout, represented by the first."""

    times: int
    """How many findings, the first included."""
    units: int
    """Prompts, completions, … that they add to those of their headline."""
    tokens: int
    """Recorded tokens inside their ranges."""
    packed: bytes
    """`places` as bytes."""

    @property
    def places(self) -> NDArray[np.int64]:
        """`[times, 3]` int64: turn (-1: none), start, end."""
        return np.frombuffer(self.packed, np.int64).reshape(-1, 3)


@dataclass(frozen=True, slots=True)
class Finding:
    """A hit with its code, severity and place."""

    code: str
    severity: Severity
    place: Place
    hit: Hit
    repair: str | None = None
    """The name of the repair that claims it; None if none does."""
    known: bool = False
    """Whether it is in the run's baseline, so that it fails no gate."""
    headline: str = ""
    """What it and the findings that follow from it add up to; `{n}` stands for the number of `unit`s."""
    because_of: str | None = None
    """The fingerprint of the finding of its rollout that it follows from; None for a root."""
    folded: FoldedFindings | None = None
    """The findings that it represents; None: only itself."""

    @property
    def times(self) -> int:
        """How many findings it represents."""
        return 1 if self.folded is None else self.folded.times

    @property
    def units(self) -> int:
        """How many units it adds to its headline's count."""
        return 1 if self.folded is None else self.folded.units

    @property
    def tokens(self) -> int:
        """Recorded tokens inside its ranges."""
        return self.hit.end - self.hit.start if self.folded is None else self.folded.tokens

    def spans(self) -> Iterator[tuple[int | None, int, int]]:
        """(turn, start, end) of each finding that it represents."""
        if self.folded is None:
            yield self.hit.turn, self.hit.start, self.hit.end
            return
        places = self.folded.places
        for first in range(0, len(places), _AT_ONCE):
            for turn, start, end in places[first : first + _AT_ONCE].tolist():
                yield None if turn < 0 else turn, start, end

    @property
    def unit(self) -> str:
        """What its headline counts; a prompt, completion, … counts once, however many such findings it has."""
        hit = self.hit
        if hit.where is Where.LOG:
            return "log"
        if hit.later_turn is not None:
            return "prompt"
        if hit.canonical.label == TRAINING_ROW:
            return TRAINING_ROW
        return {Where.PROMPT: "prompt", Where.COMPLETION: "completion"}.get(hit.where, "rollout")

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that survive added or removed rows and a renamed log.

        They depend only on tokens and cause, so rollouts of one prompt may share them.
        """
        hit = self.hit
        parts = (self.code, self.place.item, hit.turn, hit.where, hit.start, hit.end, hit.cause)
        ids = hit.identity or (hit.recorded.ids, hit.canonical.ids)
        # Pieces need a tokenizer and add nothing to ids.
        text = repr((parts, *ids, () if ids[0] else hit.recorded.pieces))
        if self.folded is not None:
            text += hashlib.sha256(self.folded.packed).hexdigest()
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Skip:
    """A rule that could not check a rollout, and why."""

    code: str
    because: str
    """`no messages`, `no logprobs`, `no tokenizer`, …"""
    applies: bool = True
    """False: there is nothing for the rule to check, as in a single call, which has no link to another."""


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
    """The keys that the format was recognized by, on one of the first rows of each format in a file."""
    unread: tuple[tuple[str, str], ...] = ()
    """(what it looks like, path) of unread columns that look like ids, masks, logprobs or messages; on one of a
    file's first rows."""
    observed: object = None
    """What a viewer shows next to the findings, if a report asked for it; only viewers read this."""
    witness: Witness | None = None
    """What the row shows about how its log was written; None when it shows nothing."""
    trainings: Trainings | None = None
    """What the rollout trains, to be compared with other rows of the run; None if not needed."""
    misfit: Finding | None = None
    """The finding that another tokenizer or template wrote the log; rules that would repeat it were not run."""
    told: tuple[Finding, ...] = ()
    """Findings about the whole log that are known before its rows; the same in every result of the log."""
    partial: tuple[Skip, ...] = ()
    """Rules that ran, but could not look at some of the calls."""
    mismatches: tuple[RowMismatch, ...] = ()
    """Why the sampler's and each trainer's logprobs differ; () unless LPR509 compared them."""
    of_log: bool = False
    """True for findings about a whole log or run: the result is neither a rollout nor an unreadable row."""

    @property
    def between_rows(self) -> bool:
        """Whether its findings compare one rollout of the run with others; that rollout has its own result too."""
        return self.of_log and any(finding.hit.where is not Where.LOG for finding in self.findings)
