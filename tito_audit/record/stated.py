"""What a log states about a rollout besides tokens and messages, and why parts of it were not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Unread(StrEnum):
    """The part of a rollout that was not read, or not used."""

    MESSAGES = "messages"
    PROMPTS = "prompts"
    IDS = "ids"
    CALLS = "calls"


@dataclass(frozen=True, slots=True)
class NotRead:
    """Why something that a rule may need was not read, or not used."""

    what: Unread
    because: str
    """Worded the same for all rollouts, as reports count by it."""
    used: bool = True
    """False: the log holds it, but it is compared with nothing."""

    def __str__(self) -> str:
        return f"{self.what} not {'read' if self.used else 'used'}: {self.because}"


@dataclass(frozen=True, slots=True)
class PairSide:
    """One side of a preference pair, compared with the other; or the answer of a row that has no pair."""

    name: str
    """`chosen`, `rejected` or `completion`."""
    prompts_part: int | None = None
    """The first token at which the prompts of both sides differ; None if they are equal."""
    at_seam: bool = False
    """Whether that is the last token of the prompts."""
    same_answer: bool = False
    """Whether both sides train the same tokens."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What a log states about a rollout; defaults where it states nothing."""

    model: str | None = None
    tokenizer: str | None = None
    group: int | str | None = None
    """The name or number that the samples of one group share."""
    kind: str | None = None
    """`sft` or `rl`, if the user states it; None: inferred from the columns."""
    ids_wanted: bool = True
    """False: this format or row never holds ids."""
    converted_tools: bool = False
    """Whether the tools were converted from the Responses form, which may keep or drop their `strict`."""
    dummy_tokens: bool = False
    """Whether the ids are placeholders."""
    copies_disagree: str = ""
    """How two copies of the completion ids differ; "" if they do not."""
    notice: str = ""
    """What a report should say once about rows like this."""
    side: PairSide | None = None
    """Its side of a preference pair."""
    attempt: int | str | None = None
    """Which of several attempts at the task."""
    policy_versions: tuple[int, ...] = ()
    """The weight versions at the first and the last call."""
    chain: tuple[int, ...] | None = None
    """The turns of the main conversation, if there are others too (retries, other agents)."""
    lines: tuple[int, ...] = ()
    """The line of each call, if lines were gathered into a rollout."""
    calls_at: tuple[tuple[str, int], ...] = ()
    """(file, row) of each call, if single-call rows were joined into a rollout."""
    answer_ids: tuple[object, ...] = ()
    """The id of each joined call; None if it has none."""
    joined: Mapping[str, int] = field(default_factory=dict)
    """What another file held for the rollout: see `Join.apply`."""
    reasons: tuple[NotRead, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    """Everything else that the log states, by name."""

    def with_facts(self, **facts: object) -> Stated:
        """Adds facts; None values are left out."""
        stated = {name: value for name, value in facts.items() if value is not None}
        return replace(self, facts={**self.facts, **stated}) if stated else self

    def not_read(self, what: Unread, because: str) -> Stated:
        """Adds the reason why something was not read."""
        return replace(self, reasons=(*self.reasons, NotRead(what, because)))

    def not_used(self, what: Unread, because: str) -> Stated:
        """Adds the reason why something that the log holds was not used."""
        return replace(self, reasons=(*self.reasons, NotRead(what, because, used=False)))

    def without_ids(self) -> Stated:
        """Marks a format or row that never holds ids."""
        return replace(self, ids_wanted=False)

    def overlay(self, other: Stated) -> Stated:
        """Both together; where both state something, `other` wins."""
        stated = {
            name: getattr(other, name) for name in _FIELDS if getattr(other, name) != getattr(NOTHING_STATED, name)
        }
        facts = {**self.facts, **other.facts}
        return replace(self, **stated, reasons=(*self.reasons, *other.reasons), facts=facts)


NOTHING_STATED = Stated()
_FIELDS = tuple(name for name in Stated.__dataclass_fields__ if name not in ("reasons", "facts"))


def group_key(value: object) -> int | str | None:
    """A logged group's name or number; None for any other value."""
    return value if isinstance(value, int | str) else None
