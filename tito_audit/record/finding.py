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
    """What it does to training, not how odd the tokens look."""

    NOTE = 0  # true, worth knowing, harmless as logged
    WARNING = 1  # the log cannot prove otherwise, or off-policy but consistent
    ERROR = 2  # the trainer would learn from wrong tokens, a wrong mask or wrong logprobs

    @property
    def word(self) -> str:
        """`note`, `warning` or `error`, as reports write it."""
        return _WORDS[self]

    @classmethod
    def bar(cls, word: str) -> Severity | None:
        """The lowest severity that counts for this `fail_on` value; None for `never`."""
        return None if word == "never" else cls[word.upper()]


_WORDS = tuple(severity.name.lower() for severity in sorted(Severity))


class Where(StrEnum):
    """The recorded sequence that a token range indexes."""

    PROMPT = "prompt"  # Turn.prompt_ids of the finding's turn
    COMPLETION = "completion"  # Turn.completion_ids of the finding's turn
    ROW = "row"  # TrainingRow.token_ids; of REC findings without tokens, the row of the file
    LOG = "log"  # no tokens: the finding is about the whole log, and its place is the first row that shows it


SAMPLED, PROMPT, NEXT_PROMPT, TRAINING_ROW = "sampled", "prompt", "next prompt", "training row"
PREVIOUS_CALL, RE_ENCODED, TEMPLATE = "previous call", "re-encoded", "template"
"""Labels of sides: what holds the tokens."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference: ids, and each token as text; bytes that are not text as \\xNN."""

    ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    label: str = ""
    """What holds these tokens: `sampled`, `next prompt`, `training row`, `re-encoded`, `template`, …; "" if the
    hit's `where` says it."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A place that a rule reports."""

    where: Where
    start: int
    end: int
    """`start` and `end` are a half-open token range of that sequence; if equal, a place between tokens."""
    message: str
    """One sentence for a researcher: what is wrong and what it does to training."""
    turn: int | None = None
    cause: str = ""
    """A few words that group findings: `tool call spacing`, `reasoning stripped`, `shifted by +1`."""
    severity: Severity | None = None
    """Overrides the rule's own severity for this hit."""
    recorded: Side = Side()
    """The tokens of the sequence that `where` names."""
    canonical: Side = Side()
    """What another source holds there."""
    before: Side = Side()
    """A few tokens before the difference, the same on both sides."""
    after: Side = Side()
    """A few tokens after it, the same on both sides."""
    later_turn: int | None = None
    """The turn whose prompt holds the other tokens or breaks its history; None if no prompt does."""
    identity: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The ids of both sides that make up the fingerprint; None: those of `recorded` and `canonical`."""
    headline: str = ""
    """The headline of its finding; "": that of its rule."""

    @property
    def labels(self) -> tuple[str, str]:
        """What holds the tokens of `recorded` and of `canonical`."""
        own = {Where.PROMPT: PROMPT, Where.COMPLETION: SAMPLED, Where.ROW: TRAINING_ROW, Where.LOG: ""}[self.where]
        other = self.canonical.label or (RE_ENCODED if self.canonical.ids or self.canonical.pieces else "")
        return self.recorded.label or own, other

    @property
    def sampled_first(self) -> tuple[Side, Side]:
        """Both sides, labelled; what was sampled comes first."""
        recorded, canonical = (
            replace(side, label=label)
            for side, label in zip((self.recorded, self.canonical), self.labels, strict=True)
        )
        swap = canonical.label in (SAMPLED, PREVIOUS_CALL) and recorded.label != SAMPLED
        return (canonical, recorded) if swap else (recorded, canonical)


_AT_ONCE = 4096
"""Places made objects at a time."""


@dataclass(frozen=True, slots=True)
class Folded:
    """What a finding stands for, if it is the first of many of one rule, severity and cause in a rollout."""

    times: int
    """How many findings there are, with the first."""
    units: int
    """In how many prompts, completions, … they are that no other finding of their headline is in."""
    tokens: int
    """Recorded tokens inside their ranges."""
    packed: bytes
    """`places` as bytes."""

    @property
    def places(self) -> NDArray[np.int64]:
        """`[times, 3]` the turn (-1: none), start and end of each."""
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
    """True when it is in the run's baseline, so it fails no gate."""
    headline: str = ""
    """What it and the findings that follow from it add up to, with `{n}` for how many of `unit`."""
    because_of: str | None = None
    """The fingerprint of the finding in its rollout that it follows from; None if it is a root."""
    folded: Folded | None = None
    """The further findings that it stands for; None: only itself."""

    @property
    def times(self) -> int:
        """How many findings it stands for."""
        return 1 if self.folded is None else self.folded.times

    @property
    def units(self) -> int:
        """How many of what its headline counts it adds."""
        return 1 if self.folded is None else self.folded.units

    @property
    def tokens(self) -> int:
        """Recorded tokens inside its ranges."""
        return self.hit.end - self.hit.start if self.folded is None else self.folded.tokens

    def spans(self) -> Iterator[tuple[int | None, int, int]]:
        """The turn, start and end of each finding that it stands for."""
        if self.folded is None:
            yield self.hit.turn, self.hit.start, self.hit.end
            return
        places = self.folded.places
        for first in range(0, len(places), _AT_ONCE):
            for turn, start, end in places[first : first + _AT_ONCE].tolist():
                yield None if turn < 0 else turn, start, end

    @property
    def unit(self) -> str:
        """What a headline counts: a prompt, completion, … with such findings counts once, however many it has."""
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
        """16 hexadecimal digits that stay the same when earlier rows are added or removed, or the log is renamed.

        Rollouts of one prompt may share it: it depends only on tokens and cause.
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
    """A rule that could not check a rollout, with the reason."""

    code: str
    because: str
    """`no messages`, `no logprobs`, `no tokenizer`, …"""
    applies: bool = True
    """False where the rollout holds nothing for the rule to check: a single call has no link to another."""


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
    unread: tuple[tuple[str, str], ...] = ()
    """Unread columns of one of a file's first rows that look like ids, masks, logprobs or messages: what each
    looks like, and its path."""
    observed: object = None
    """What a viewer shows next to the findings, if a report asked for it; only viewers read this."""
    witness: Witness | None = None
    """What the row shows about how its log was written; None when it shows nothing."""
    trainings: Trainings | None = None
    """What the rollout trains, for comparison with the other rows of the run; None if not needed."""
    misfit: Finding | None = None
    """The finding that the log was written with another tokenizer or template; rules that would only repeat it
    were not run."""
    told: tuple[Finding, ...] = ()
    """Findings about its whole log that come before its rows; the same for every result of the log."""
    partial: tuple[Skip, ...] = ()
    """Rules that ran, but could not look at some of the calls."""
    mismatches: tuple[RowMismatch, ...] = ()
    """Why the sampler's logprobs and each trainer's differ; () unless LPR509 compared them."""
    of_log: bool = False
    """True for findings about a whole log or run: the result is neither a rollout nor an unreadable row."""

    @property
    def between_rows(self) -> bool:
        """Whether its findings compare one rollout of the run, which has its own result, with others."""
        return self.of_log and any(finding.hit.where is not Where.LOG for finding in self.findings)
