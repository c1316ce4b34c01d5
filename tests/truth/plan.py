"""Which rows a run has, and in which files they stand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .decide import explained
from .forms import FORMS, Form, Sample
from .observed import Fault, clean, faulty
from .source import MODELS, Chat, chat_of

__all__ = ["Case", "File", "files"]

SLIDES = (-3, -2, -1, 1, 2, 3)
KINDS = {"clean": 6, "mask": 5, "logprobs": 5, "both": 6, "inverted": 1, "roles": 3, "fill": 4}
"""How often each kind comes."""


@dataclass(frozen=True)
class Case:
    """One sample, with all that is known of it."""

    form: Form
    fault: Fault
    sample: Sample

    @property
    def chat(self) -> Chat:
        return self.sample.chat

    @property
    def low(self) -> int:
        """Where the columns begin."""
        return self.chat.prompt if self.form.response else 0

    @cached_property
    def verdict(self) -> str:
        """What can be told from the columns alone."""
        return explained(self.chat, self.sample.seen, self.form.fill, self.low).verdict(self.fault)

    @cached_property
    def stated_verdict(self) -> str:
        """What can be told with the finish reasons that the row states, if it does."""
        if not self.sample.reasons:
            return self.verdict
        seen = explained(self.chat, self.sample.seen, self.form.fill, self.low, reasons=True)
        return seen.verdict(self.fault)

    @property
    def zeros(self) -> int:
        """Sampled tokens whose logprob the row lacks."""
        seen, truth = self.sample.seen.values, self.chat.truth
        return sum(one is not None and now is None for one, now in zip(truth, seen, strict=True))


@dataclass(frozen=True)
class File:
    """A log: rows of samples, of one model and form."""

    name: str
    model: str
    form: Form
    rows: list[list[Case]]
    same: Fault | None = None
    """The fault that all of its rows have; None where each has its own."""

    @property
    def cases(self) -> Iterator[tuple[int, int, Case]]:
        """Row, item and sample."""
        for number, row in enumerate(self.rows):
            for item, case in enumerate(row):
                yield number, item, case


def files(
    count: int, forms: list[str], seed: int, *, whole: float = 0.15, models: list[str] | None = None
) -> list[File]:
    """Files with so many samples in all; `whole`: the share in files whose rows all have the same fault."""
    dice = random.Random(seed)
    chosen = models or list(MODELS)
    each = max(1, round(count * (1 - whole) / len(forms) / len(chosen)))
    made = []
    for name in forms:
        for model in chosen:
            faults = _faults(dice, each)
            made.append(_file(f"mixed-{name}-{model}", model, FORMS[name], faults, dice))
    return made + list(_whole(round(count * whole), forms, chosen, dice))


def _whole(count: int, forms: list[str], models: list[str], dice: random.Random) -> Iterator[File]:
    """Files whose rows all have the same fault."""
    size = 12
    for number in range(count // size):
        form, model = forms[number % len(forms)], dice.choice(models)
        kind = ("logprobs", "mask", "clean", "both")[number // len(forms) % 4]
        fault = _fault(kind, dice)
        single = number % 3 == 0
        name = f"whole-{number}-{form}-{model}"
        yield _file(name, model, FORMS[form], [fault] * size, dice, same=fault, single=single)


def _faults(dice: random.Random, count: int) -> list[Fault]:
    """So many faults, of every kind as often as KINDS says."""
    bag = [kind for kind, often in KINDS.items() for _ in range(often)]
    kinds = (bag * (count // len(bag) + 1))[:count] if count >= len(bag) else dice.sample(bag, count)
    faults = [_fault(kind, dice) for kind in kinds]
    dice.shuffle(faults)
    return faults


def _fault(kind: str, dice: random.Random) -> Fault:
    one, other = dice.sample(SLIDES, 2)
    if kind == "mask":
        return Fault(kind, mask=one)
    if kind == "logprobs":
        return Fault(kind, logprobs=one)
    if kind == "both":
        return Fault(kind, one, one if dice.random() < 0.5 else other)
    if kind == "roles":
        return Fault(kind, what=dice.choice(("user", "user and assistant")))
    return Fault(kind, what=dice.choice(("head", "middle", "tail")) if kind == "fill" else "")


def _file(
    name: str,
    model: str,
    form: Form,
    faults: list[Fault],
    dice: random.Random,
    *,
    same: Fault | None = None,
    single: bool = False,
) -> File:
    """A file of these faults; `single`: each of its samples has one turn, so that few can be decided."""
    rows, left = [], list(faults)
    while left:
        size = dice.randint(1, form.group) if form.name != "packed" else dice.randint(2, form.group)
        messages = dice.random() < 0.5 and form.name != "packed"
        rows.append([_case(form, fault, model, dice, messages=messages, single=single) for fault in left[:size]])
        left = left[size:]
    suffix = ".parquet" if form.name == "nan" and model == "smollm2" else form.suffix
    return File(name + suffix, model, form, rows, same)


TURNS = (1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10)


def _case(form: Form, fault: Fault, model: str, dice: random.Random, *, messages: bool, single: bool) -> Case:
    """A sample in which the fault shows."""
    # Of a response of one turn, the complement is a few tokens of the template.
    enough = TURNS[3:] if form.response and fault.kind == "inverted" else TURNS
    while True:
        turns = 1 if single else dice.choice(enough)
        chat = chat_of(model, turns, dice, closed=dice.random() < 0.3)
        if messages and chat.tools is not None and not form.tools:
            continue
        right = clean(chat, certain=dice.random() < 0.3)
        low = chat.prompt if form.response else 0
        size, turn = _gap(chat, dice)
        seen = faulty(chat, right, fault, low, size, turn)
        if not size or not any(seen.mask) or (seen == right) != (fault.kind == "clean"):
            continue
        reasons = dice.choice(("", "", "", "list", "last")) if form.tools else ""
        return Case(form, fault, Sample(chat, seen, messages, reasons))


def _gap(chat: Chat, dice: random.Random) -> tuple[int, int]:
    """How many logprobs to lose, and of which turn; some of it are always left. 0: no turn is long enough."""
    long = [at for at, turn in enumerate(chat.turns) if turn.end - turn.start >= 6]
    if not long:
        return 0, 0
    turn = dice.choice(long)
    most = chat.turns[turn].end - chat.turns[turn].start - 2
    return min(dice.choice((3, 4, 8, 12)), most), turn
