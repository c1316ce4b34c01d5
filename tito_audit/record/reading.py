"""How a training row is read: the conventions of its writer, and how far its columns slid off their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tito_audit.errors import SetupError

TO_END = -1
"""`Slide.last` of a slide that goes on to the end of the row."""


@dataclass(frozen=True, slots=True, order=True)
class Slide:
    """How many tokens late (+) or early (-) the loss mask and the logprobs of a row are."""

    mask: int = 0
    logprobs: int = 0
    first: int = 0
    """The first answer that slid."""
    last: int = TO_END
    """The last answer that slid."""

    @property
    def whole_row(self) -> bool:
        """Whether all answers slid."""
        return self.first == 0 and self.last == TO_END

    @property
    def where(self) -> str:
        """` from answer 2 on`, ` in answer 2`; "" for the whole row."""
        if self.whole_row:
            return ""
        return f" from answer {self.first + 1} on" if self.last == TO_END else f" in answer {self.first + 1}"


class FirstConvention(StrEnum):
    """How a log treats the first tokens of each answer."""

    WHOLE = "whole"  # all are sampled and trained
    PREFILL = "prefill"  # the harness wrote them: not sampled, not trained
    LEFT_OUT = "left-out"  # sampled, and not trained


class EndConvention(StrEnum):
    """Whether a log trains the sampled end token of an answer."""

    TRAINED = "trained"
    UNTRAINED = "untrained"


@dataclass(frozen=True, slots=True)
class Conventions:
    """What the user states about how rows were written (`--convention`, `--assume`); None: nothing."""

    first: FirstConvention | None = None
    tokens: int = 0
    """First tokens of each answer that are prefilled or left out."""
    end: EndConvention | None = None
    slide: Slide | None = None
    """The slide of every row that allows it."""


NO_CONVENTIONS = Conventions()


def parse_conventions(conventions: Mapping[str, str], assume: Mapping[str, int]) -> Conventions:
    """The conventions of `--convention` and `--assume`; SetupError for one that does not exist."""
    first, tokens, end = None, 0, None
    for name, value in conventions.items():
        kind, _, number = value.partition(":")
        if name == "end" and value in tuple(EndConvention):
            end = EndConvention(value)
        elif name == "first" and (
            value == FirstConvention.WHOLE or (kind in tuple(FirstConvention)[1:] and number in tuple("123"))
        ):
            first, tokens = FirstConvention(kind), int(number or 0)
        else:
            raise SetupError(
                f"--convention {name}={value}: no such convention.\n"
                "Write first=whole, first=prefill:N or first=left-out:N (N tokens of each answer, at most 3), "
                "end=trained or end=untrained."
            )
    slide = Slide(assume.get("mask", 0), assume.get("logprobs", 0)) if assume else None
    return Conventions(first, tokens, end, slide) if conventions or assume else NO_CONVENTIONS


def shift_in_words(number: int) -> str:
    """`in place`, `1 place late`, `2 places early`."""
    if not number:
        return "in place"
    return f"{abs(number)} place{'s' * (abs(number) > 1)} {'late' if number > 0 else 'early'}"


def describe_slides(slides: Iterable[Slide]) -> list[str]:
    """`the logprobs 1 place late`, `the loss mask 1 place early in the whole row or in answer 2`, each once."""
    wheres: dict[tuple[int, int], dict[str, None]] = {}
    for slide in slides:
        wheres.setdefault((slide.mask, slide.logprobs), {})[slide.where] = None
    texts = []
    for (mask, logprobs), where in wheres.items():
        columns = (("the loss mask", mask), ("the logprobs", logprobs))
        text = " and ".join(f"{column} {shift_in_words(number)}" for column, number in columns if number)
        text = f"mask and logprobs {shift_in_words(mask)}" if mask == logprobs else text
        whole_row = " in the whole row" if len(where) > 1 else ""
        texts.append(text + " or".join(part or whole_row for part in where))
    return texts


def assume_flags(slide: Slide) -> str:
    """The flags that state a slide of the whole row: `--assume logprobs=+1`."""
    columns = {"mask": slide.mask, "logprobs": slide.logprobs}
    return " ".join(f"--assume {name}={places:+d}" for name, places in columns.items() if places)
