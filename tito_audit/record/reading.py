"""Readings of a training row: the conventions of its writer, and the slides that its columns may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tito_audit.errors import SetupError

WHOLE = -1
"""As the last answer of a slide: up to the end of the row."""


@dataclass(frozen=True, slots=True, order=True)
class Slide:
    """How far the columns of a row are off their tokens: late (+) or early (-)."""

    mask: int = 0
    logprobs: int = 0
    first: int = 0
    """The first answer that it is in."""
    last: int = WHOLE
    """The last one."""

    @property
    def of_row(self) -> bool:
        """Whether the whole row slid."""
        return self.first == 0 and self.last == WHOLE

    @property
    def where(self) -> str:
        """` from answer 2 on`, ` in answer 2`; no text for the whole row."""
        if self.of_row:
            return ""
        return f" from answer {self.first + 1} on" if self.last == WHOLE else f" in answer {self.first + 1}"


class First(StrEnum):
    """What a writer does with the first tokens of each answer."""

    WHOLE = "whole"  # all are sampled and trained
    PREFILL = "prefill"  # the harness wrote them: not sampled, not trained
    LEFT_OUT = "left-out"  # sampled, and not trained


class End(StrEnum):
    """What a writer does with a sampled end of an answer."""

    TRAINED = "trained"
    UNTRAINED = "untrained"


@dataclass(frozen=True, slots=True)
class Conventions:
    """What a run states about how its rows were written; None where it states nothing."""

    first: First | None = None
    tokens: int = 0
    """How many first tokens of each answer are prefilled or left out."""
    end: End | None = None
    slide: Slide | None = None
    """The slide that all rows have which allow it (`--assume`)."""


NOTHING_STATED = Conventions()


def conventions_of(conventions: Mapping[str, str], assume: Mapping[str, int]) -> Conventions:
    """What a run states about its training rows; SetupError for a convention that does not exist."""
    first, tokens, end = None, 0, None
    for name, value in conventions.items():
        kind, _, number = value.partition(":")
        if name == "end" and value in tuple(End):
            end = End(value)
        elif name == "first" and (value == First.WHOLE or (kind in tuple(First)[1:] and number in tuple("123"))):
            first, tokens = First(kind), int(number or 0)
        else:
            raise SetupError(
                f"--convention {name}={value}: no such convention.\n"
                "Write first=whole, first=prefill:N or first=left-out:N (N tokens of each answer, at most 3), "
                "end=trained or end=untrained."
            )
    slide = Slide(assume.get("mask", 0), assume.get("logprobs", 0)) if assume else None
    return Conventions(first, tokens, end, slide) if conventions or assume else NOTHING_STATED


def places(number: int) -> str:
    """`in place`, `1 place late`, `2 places early`."""
    if not number:
        return "in place"
    return f"{abs(number)} place{'s' * (abs(number) > 1)} {'late' if number > 0 else 'early'}"


def slides_in_words(slides: Iterable[Slide]) -> list[str]:
    """`the logprobs 1 place late`, `the loss mask 1 place early in the whole row or in answer 2`, each once."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for slide in slides:
        shapes.setdefault((slide.mask, slide.logprobs), []).append(slide.where)
    words = []
    for (mask, logprobs), wheres in shapes.items():
        columns = (("the loss mask", mask), ("the logprobs", logprobs))
        text = " and ".join(f"{column} {places(number)}" for column, number in columns if number)
        text = f"mask and logprobs {places(mask)}" if mask == logprobs else text
        several = list(dict.fromkeys(wheres))
        where = several[0] if len(several) == 1 else " or".join(part or " in the whole row" for part in several)
        words.append(text + where)
    return words


def assume_flags(slide: Slide) -> str:
    """The flags that state a slide of the whole row: `--assume logprobs=+1`."""
    columns = {"mask": slide.mask, "logprobs": slide.logprobs}
    return " ".join(f"--assume {name}={far:+d}" for name, far in columns.items() if far)
