"""Evidence: everything that a rule may look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from tito_audit.align.blocks import BlockKind
from tito_audit.align.pieces import Pieces
from tito_audit.chains.links import Link
from tito_audit.evidence.belonging import Unrelated
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.finding import Severity, Side, Where
from tito_audit.record.reading import NOTHING_STATED, Conventions
from tito_audit.record.rollout import Rollout
from tito_audit.record.speakers import DEFAULT, Speakers
from tito_audit.record.trainings import TrainedAgain
from tito_audit.tokens.vocab import Vocabulary

T = TypeVar("T")


class Against(StrEnum):
    """What the recorded tokens are compared with."""

    REENCODED = "re-encoding"  # their own text, encoded again
    NEXT_PROMPT = "next prompt"  # what a later prompt holds instead
    ROW = "training row"  # what the training row holds instead
    TEMPLATE = "template"  # what the chat template writes for the messages


class Sound(Flag):
    """What is known to be right in a training row, so rules that look at nothing else need not run."""

    NOTHING = 0
    IDS = auto()
    """Its ids are those of the rendered conversation, and the rollout has no others."""
    MASK = auto()
    """Its mask trains exactly what was sampled."""
    LOGPROBS = auto()
    """Every trained token has a plausible logprob below zero, and no other token has one; the first two of each
    run differ."""


CONTEXT_TOKENS = 3
"""How many equal tokens before and after a difference a finding keeps."""


@dataclass(frozen=True, eq=False)
class TextSide:
    """One side of a difference with the text around it, to name a cause from.

    It holds only its own text: a row may have as many differences as tokens.
    """

    pieces: Pieces
    """The whole sequence."""
    start: int
    end: int
    """The tokens of the difference itself, half-open."""

    @cached_property
    def ids(self) -> Ids:
        """`[N]` the tokens of the difference itself."""
        return self.pieces.ids[self.start : self.end]

    @cached_property
    def data(self) -> bytes:
        """Their bytes, control tokens as their literal text."""
        return self.pieces.bytes_of(self.start, self.end)

    @property
    def before(self) -> bytes:
        """What precedes it on this side, back to the nearest control token (included), up to a limit."""
        return _around(self)[0]

    @property
    def after(self) -> bytes:
        """What follows it on this side, through the next control token, up to a limit."""
        return _around(self)[1]


@lru_cache(maxsize=4)
def _around(side: TextSide) -> tuple[bytes, bytes]:
    """The text before and after a side: several rules look at it, one difference after the other."""
    return side.pieces.bytes_before(side.start), side.pieces.bytes_after(side.end)


@dataclass(frozen=True, slots=True)
class Construction:
    """An explanation of a difference: messages written this way give the recorded tokens there."""

    code: str
    """The rule that owns it."""
    cause: str
    what: str
    """The cause as a clause for a message."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where recorded and canonical tokens disagree, and what that did to training."""

    against: Against
    kind: BlockKind
    where: Where
    """The sequence that start and end index."""
    turn: int | None
    start: int
    end: int
    recorded: TextSide
    canonical: TextSide
    severity: Severity
    """ERROR when a later prompt or the training row holds the other tokens, NOTE when harmless."""
    effect: str
    """Its effect, as a clause: `turn 3's prompt holds the re-encoded form`."""
    sampled: bool
    """True when the recorded tokens were sampled (a completion), not given."""
    message_index: int | None = None
    """The message it lies in, when known."""
    later_turn: int | None = None
    """The turn whose prompt holds the other tokens, for `NEXT_PROMPT`."""
    construction: Construction | None = None
    """What gave the recorded tokens; None: unknown, and the cause is read from the bytes."""
    equal: tuple[int, int] = (0, 0)
    """How many tokens right before and right after it are the same on both sides, at most `CONTEXT_TOKENS`."""


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
    """Its first token, right after the generation prompt."""
    ends: tuple[int, ...]
    """Where it may end, in order: before the turn's end tokens, or after them if they were sampled too."""
    content: int = -1
    """Where the turn's end tokens begin; -1: at the first of `ends`."""

    @property
    def shut(self) -> int:
        """Where the turn's end tokens begin."""
        return self.ends[0] if self.content < 0 else self.content


@dataclass(frozen=True, slots=True)
class RowView:
    """What is known about each token of the training row. All columns are `[T]`, aligned to its ids."""

    sampled: Mask
    """True where the token was sampled, by the calls if there are any, else by the rendered messages."""
    proven: bool
    """True when calls prove it, False when it is derived from the roles of the messages."""
    roles: Sequence[str]
    """The role of each token: `assistant`, `user`, `system`, `tool`, `template` (scaffold), `generation prompt`,
    `turn end`, or `unknown`."""
    turn: Ids
    """`[T]` the turn that sampled it, -1 elsewhere."""
    turn_offset: Ids
    """`[T]` its position in that turn's completion, -1 elsewhere."""
    expected_logprobs: Logprobs | None
    """`[T]` the logprob that its call recorded; NaN elsewhere; None when no call recorded any."""
    drifted: Mask
    """True where the row's token is in a difference from the calls or the rendering."""
    spans: tuple[SampledSpan, ...] = ()
    """What was sampled according to roles and messages, with the ends left open; () where calls prove it."""
    sound: Sound = Sound.NOTHING


class RowFound(NamedTuple):
    """What the training row was compared with, and what that shows."""

    view: RowView | None = None
    differences: Sequence[Difference] = ()
    error: str | None = None
    """Why the template cannot write the messages."""
    unrelated: Unrelated | None = None
    """What beside the row, or the row itself, is of another rollout."""
    unused: str = ""
    """Why the messages were used for nothing, if they are of this rollout."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known about one rollout. Rules read it; nothing writes to it."""

    rollout: Rollout
    vocabulary: Vocabulary | None
    """To show pieces and look up ids; None without a tokenizer."""
    present: Needs = Needs.NOTHING
    """Which of the needs of rules are met."""
    bos_id: int | None = None
    end_ids: frozenset[int] = frozenset()
    """Ids that end a turn: the tokenizer's end tokens and the control tokens that the template closes
    a turn with."""
    differences: Sequence[Difference] = ()
    explained: Sequence[Explained] = ()
    links: tuple[Link, ...] = ()
    """One for every turn after the first whose prompt is known."""
    row: RowView | None = None
    """None without a training row, or when nothing says which tokens were sampled."""
    render_errors: tuple[tuple[int | None, str], ...] = ()
    """(turn or None for the whole conversation, message) where the template failed."""
    rendered: frozenset[int | None] = frozenset()
    """Turns whose prompt was compared with what the template writes; None: the whole conversation was."""
    unrelated: tuple[Unrelated, ...] = ()
    """Parts of the rollout that are of another one."""
    date_formats: tuple[str, ...] = ()
    """The formats in which the template asks for the date."""
    recovery_problems: tuple[tuple[int, str], ...] = ()
    """(turn, what could not be recovered from its token strings)."""
    conventions: Conventions = NOTHING_STATED
    """What the run states about how its training rows were written."""
    trained_again: tuple[TrainedAgain, ...] = ()
    """What the run trains more than once in this rollout; () if its rows were not compared."""
    speakers: Speakers = DEFAULT
    """Which roles were sampled, as the settings say."""
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What several rules compute from this evidence, by name; not evidence itself."""

    @property
    def generated_in_row(self) -> Mask | None:
        """`[T]` the generated tokens of the training row of a log without calls.

        The tokens that its mask trains; without a mask, those that were sampled according to the messages. None if
        there are calls, or nothing says what was sampled.
        """
        row = self.rollout.training_row
        if self.rollout.turns or row is None:
            return None
        if row.loss_mask is not None:
            return row.loss_mask
        return self.row.sampled if self.row is not None else None

    @property
    def sound(self) -> Sound:
        """What is known to be right in the training row."""
        return self.row.sound if self.row is not None else Sound.NOTHING

    def once(self, name: str, work: Callable[[Evidence], T]) -> T:
        """What `work` returns for this evidence, computed once."""
        if name not in self.memo:
            self.memo[name] = work(self)
        value: T = self.memo[name]
        return value

    def sequence(self, where: Where, turn: int | None) -> Ids | None:
        """`[N]` the recorded sequence that token ranges of that place index; None if it was not recorded."""
        if where is Where.ROW:
            row = self.rollout.training_row
            return None if row is None else row.token_ids
        if turn is None:
            return None
        call = self.rollout.turns[turn]
        return call.prompt_ids if where is Where.PROMPT else call.completion_ids

    def side(self, ids: Ids, label: str = "") -> Side:
        """Ids and their pieces, for a finding, and what holds them; pieces are empty without a tokenizer."""
        numbers = ids.tolist()
        pieces = () if self.vocabulary is None else self.vocabulary.pieces(numbers)
        return Side(tuple(numbers), pieces, label)
