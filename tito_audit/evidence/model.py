"""The evidence on one rollout: all that a rule may look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from functools import cache, cached_property, lru_cache, partial
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

from tito_audit.align.blocks import BlockKind
from tito_audit.align.pieces import Pieces
from tito_audit.chains.links import Link, LinkKind
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.unrelated import Unrelated
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.finding import Severity, Side, Where
from tito_audit.record.reading import NO_CONVENTIONS, Conventions
from tito_audit.record.rollout import Rollout
from tito_audit.record.speakers import DEFAULT_SPEAKERS, Speakers
from tito_audit.record.trainings import TrainedAgain
from tito_audit.tokens.vocab import Vocabulary


class Against(StrEnum):
    """What the recorded tokens are compared with."""

    REENCODED = "re-encoding"  # their own text, encoded again
    NEXT_PROMPT = "next prompt"  # what a later prompt holds instead
    ROW = "training row"  # what the training row holds instead
    TEMPLATE = "template"  # what the chat template writes for the messages


class Verified(Flag):
    """What is proven right in a training row, so that rules which check nothing else need not run."""

    NOTHING = 0
    IDS = auto()
    """The ids are those of the rendered conversation, and the rollout has no others."""
    MASK = auto()
    """The mask trains exactly what was sampled."""
    LOGPROBS = auto()
    """Exactly the trained tokens have logprobs, all plausible and below zero; the first two of each run differ."""


class Occasion(StrEnum):
    """What few rollouts show, so that rules that look at nothing else need not run on the others."""

    BROKEN_LINK = "a call that does more than continue the one before it"
    OTHER_ROLLOUT = "a part of another rollout"
    PAIR = "a side of a preference pair"
    TRAINED_AGAIN = "tokens that the run trains more than once"
    UNRENDERED = "messages that the template cannot write"
    NEVER = "nothing of a rollout: the finding is made where its log is read"


_OCCASIONS = (
    Occasion.BROKEN_LINK,
    Occasion.OTHER_ROLLOUT,
    Occasion.PAIR,
    Occasion.TRAINED_AGAIN,
    Occasion.UNRENDERED,
)
_CONTINUES_ONLY = {LinkKind.CONTINUES}
_KIND_OF_LINK = attrgetter("kind")
CONTEXT_TOKENS = 3
"""How many equal tokens before and after a difference a finding keeps."""


@dataclass(frozen=True, eq=False)
class TextSide:
    """One side of a difference with the text around it, from which rules name a cause."""

    pieces: Pieces
    """The whole sequence, or the part around the difference."""
    start: int
    end: int
    """The tokens of the difference, half-open."""

    @cached_property
    def ids(self) -> Ids:
        """`[N]` the tokens of the difference."""
        return self.pieces.ids[self.start : self.end]

    @cached_property
    def data(self) -> bytes:
        """The bytes of these tokens, control tokens as their literal text."""
        return self.pieces.bytes_of(self.start, self.end)

    @property
    def before(self) -> bytes:
        """The text before them, back to the nearest control token (included), up to a limit."""
        return _around(self)[0]

    @property
    def after(self) -> bytes:
        """The text after them, through the next control token, up to a limit."""
        return _around(self)[1]

    @property
    def in_context(self) -> bytes:
        """`data` with the text before and after it."""
        before, after = _around(self)
        return before + self.data + after


@lru_cache(maxsize=4)
def _around(side: TextSide) -> tuple[bytes, bytes]:
    """The text before and after a side; kept for a few sides only, since a row may have a difference a token."""
    return side.pieces.bytes_before(side.start), side.pieces.bytes_after(side.end)


@dataclass(frozen=True, slots=True)
class KnownCause:
    """Why recorded tokens differ, found by writing the messages another way, not read from the bytes."""

    code: str
    """The rule that owns the difference."""
    cause: str
    what: str
    """The cause as a clause for a message."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where recorded and canonical tokens disagree, and what that does to training."""

    against: Against
    kind: BlockKind
    where: Where
    """The sequence that `start` and `end` index."""
    turn: int | None
    start: int
    end: int
    recorded: TextSide
    canonical: TextSide
    severity: Severity
    """ERROR if a later prompt or the training row holds the other tokens, NOTE if harmless."""
    effect: str
    """Its effect, as a clause: `turn 3's prompt holds the re-encoded form`."""
    sampled: bool
    """True when the recorded tokens were sampled (a completion), not given."""
    message_index: int | None = None
    """The message it lies in, when known."""
    later_turn: int | None = None
    """The turn whose prompt holds the other tokens, for `NEXT_PROMPT`."""
    known_cause: KnownCause | None = None
    """None: rules read the cause from the bytes."""
    equal: tuple[int, int] = (0, 0)
    """How many tokens right before and right after are the same on both sides, at most `CONTEXT_TOKENS`."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for differences that replace the same tokens with the same others."""
        return self.where, self.turn, self.start, self.end, self.canonical.ids.tobytes()


@dataclass(frozen=True, slots=True)
class Explained:
    """A difference and the rule that owns it."""

    difference: Difference
    code: str
    cause: str
    what: str


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """A span of the row that a model sampled."""

    start: int
    """The first token, right after the generation prompt."""
    ends: tuple[int, ...]
    """Where the span may end, in order: before the turn's end tokens, or after them if they were sampled too."""
    content: int = -1
    """Where the turn's end tokens begin; -1: at the first of `ends`. Read it as `content_end`."""

    @property
    def content_end(self) -> int:
        """Where the turn's end tokens begin."""
        return self.ends[0] if self.content < 0 else self.content


@dataclass(frozen=True, slots=True)
class RowView:
    """What is known about each token of the training row; every column is `[T]`."""

    sampled: Mask
    """True where the token was sampled, as the calls show, else the rendered messages or role markers."""
    proven: bool
    """True if calls show it, False if it is derived from the roles of the messages."""
    roles: Sequence[str]
    """`assistant`, `user`, `system`, `tool`, `template` (scaffold), `generation prompt`, `turn end`, `unknown`."""
    turn: Ids
    """The turn that sampled the token, -1 elsewhere."""
    turn_offset: Ids
    """The position in that turn's completion, -1 elsewhere."""
    expected_logprobs: Logprobs | None
    """The logprob that the call recorded; NaN elsewhere; None if no call recorded any."""
    drifted: Mask
    """True inside a difference from the calls or the rendering."""
    spans: tuple[SampledSpan, ...] = ()
    """What was sampled according to roles and messages, with open ends; () if calls show it."""
    verified: Verified = Verified.NOTHING


class RowComparison(NamedTuple):
    """What a comparison of the training row shows."""

    view: RowView | None = None
    differences: Sequence[Difference] = ()
    error: str | None = None
    """Why the template cannot write the messages."""
    unrelated: Unrelated | None = None
    """The part of the rollout that belongs to another one: the row, or the messages."""
    unused: str = ""
    """Why the messages could not be used, though they belong to this rollout."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known about one rollout. Rules read it; nothing writes to it."""

    rollout: Rollout
    vocabulary: Vocabulary | None
    """None without a tokenizer."""
    present: Needs = Needs.NOTHING
    """Which needs of rules are met."""
    bos_id: int | None = None
    end_ids: frozenset[int] = frozenset()
    """Ids that end a turn: the tokenizer's end tokens and those of published templates."""
    differences: Sequence[Difference] = ()
    explained: Sequence[Explained] = ()
    links: tuple[Link, ...] = ()
    """One for every turn after the first whose prompt is known."""
    row: RowView | None = None
    """None without a training row, or if nothing says which tokens were sampled."""
    render_errors: tuple[tuple[int | None, str], ...] = ()
    """(turn, or None for the whole conversation; message) where the template failed."""
    rendered: frozenset[int | None] = frozenset()
    """Turns whose prompt was compared with the template; with None, the whole conversation was."""
    unrelated: tuple[Unrelated, ...] = ()
    """Parts of the rollout that belong to another one."""
    date_formats: tuple[str, ...] = ()
    """The formats in which the template asks for the date."""
    recovery_problems: tuple[tuple[int, str], ...] = ()
    """(turn, what could not be recovered from its token strings)."""
    conventions: Conventions = NO_CONVENTIONS
    """What the run states about how its training rows were written."""
    trained_again: tuple[TrainedAgain, ...] = ()
    """What the run trains more than once in this rollout; () if its rows were not compared."""
    speakers: Speakers = DEFAULT_SPEAKERS
    """Which roles were sampled, as the settings say."""
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What several rules derive from the evidence, see `memoized`."""

    @property
    def generated_in_row(self) -> Mask | None:
        """`[T]` the tokens that the row's mask trains; without a mask, those sampled according to the messages.

        None for a log with calls, or if nothing says what was sampled.
        """
        row = self.rollout.training_row
        if self.rollout.turns or row is None:
            return None
        if row.loss_mask is not None:
            return row.loss_mask
        return self.row.sampled if self.row is not None else None

    @property
    def verified(self) -> Verified:
        """What is proven right in the training row."""
        return self.row.verified if self.row is not None else Verified.NOTHING

    @property
    def occasions(self) -> frozenset[Occasion]:
        """The occasions that the rollout gives to look at it more closely."""
        broken, pair = set(map(_KIND_OF_LINK, self.links)) - _CONTINUES_ONLY, self.rollout.stated.side is not None
        shown = broken, self.unrelated, pair, self.trained_again, self.render_errors
        return frozenset(compress(_OCCASIONS, shown)) if any(shown) else frozenset()

    def sequence(self, where: Where, turn: int | None) -> Ids | None:
        """`[N]` the recorded ids that token ranges of this place index; None if they were not recorded."""
        if where is Where.ROW:
            row = self.rollout.training_row
            return None if row is None else row.token_ids
        if turn is None:
            return None
        call = self.rollout.turns[turn]
        return call.prompt_ids if where is Where.PROMPT else call.completion_ids

    def side(self, ids: Ids, label: str = "") -> Side:
        """Ids with their pieces for a finding, labelled with what holds them; no pieces without a tokenizer."""
        if not len(ids):
            return _empty_side(label)
        numbers = ids.tolist()
        pieces = self.vocabulary.pieces(numbers) if self.vocabulary is not None else ()
        return Side(tuple(numbers), pieces, label)


_empty_side = cache(partial(Side, (), ()))
