"""What was tried on a log, and how well each explanation fits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tito_audit.record.rollout import Place
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.explanation import OWN_TEMPLATE, Explanation, NamedTemplate


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tokenizer with the templates to try for it."""

    tokenizer: Tokenizer
    templates: tuple[NamedTemplate, ...] = (OWN_TEMPLATE,)


@dataclass(frozen=True, slots=True)
class Share:
    """How many prompts, turns and tokens an explanation writes exactly, out of how many."""

    prompts: int = 0
    """First prompts of rollouts."""
    of_prompts: int = 0
    turns: int = 0
    """Prompts of later calls, with the answers before them; training rows without prompt boundaries count if only
    their answers differ.
    """
    of_turns: int = 0
    tokens: int = 0
    """Tokens of all these prompts."""
    of_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """What an explanation does not write exactly, by cause."""

    cause: str
    """A rule code with its cause, or why no text could be written."""
    number: int
    place: Place
    """Its first place."""
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """A token that ends sampled turns."""

    token_id: int
    piece: str
    turns: int
    followed_by: str | None = None
    """The text between it and the next message in later prompts; None if no later prompt shows it."""


@dataclass(frozen=True, slots=True)
class Found:
    """An explanation, and which of the confirming rows it explains."""

    explanation: Explanation
    share: Share
    equal: tuple[Explanation, ...] = ()
    """Other explanations that write the same in all these rows, with more flags."""
    undetermined: tuple[str, ...] = ()
    """Template arguments that change nothing in these rows; also `tool_arguments`, if no prompt has a tool call or
    the template writes every form the same.
    """


class Lack(StrEnum):
    """Why there is no explanation at all."""

    NO_IDS = "no token ids"
    NO_MESSAGES = "no messages"
    NO_TOKENIZER = "no tokenizer fits"
    NO_TEMPLATE = "no chat template"


@dataclass(frozen=True, slots=True)
class TokenizerFit:
    """How well the ids of a log fit a tokenizer."""

    tokenizer: str
    fits: bool
    because: str = ""
    """Why it cannot have written the ids."""
    same: float = 0.0
    """The share of the unsampled ids that re-encoding their text reproduces; 0 if not measured."""


@dataclass(frozen=True, slots=True)
class Identified:
    """What explains the recorded ids of a log."""

    found: tuple[Found, ...] = ()
    """Explanations with their shares, best first."""
    sure: bool = False
    """Whether the first is certain: it writes nearly all prompts of rows outside the search, and nothing else does
    as well.
    """
    unsure_because: str = ""
    left: tuple[Left, ...] = ()
    """The prompts that the first explanation does not write, by cause, most frequent first."""
    endings: tuple[Ending, ...] = ()
    tokenizers: tuple[TokenizerFit, ...] = ()
    """Every candidate, in the order given."""
    lack: Lack | None = None
    rows_searched: int = 0
    rows_confirmed: int = 0

    @property
    def best(self) -> Found | None:
        """The explanation that writes most."""
        return self.found[0] if self.found else None
