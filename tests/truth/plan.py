"""Which rows a run has, and in which files they stand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from .conventions import CONVENTIONS, Convention, combined, written
from .decide import Decision, decide
from .forms import FORMS, Form, Sample
from .observed import Fault, faulty, is_fill
from .source import MODELS, Chat, chat_of, splits_a_character

__all__ = ["FAULTS", "Case", "File", "case_of", "fault_of", "files"]

SLIDES = (-3, -2, -1, 1, 2, 3)
FAULTS = {
    "clean": 14,
    "mask": 3,
    "logprobs": 3,
    "both": 3,
    "mask from": 1,
    "logprobs from": 2,
    "both from": 1,
    "mask only": 1,
    "logprobs only": 2,
    "both only": 1,
    "inverted": 1,
    "roles": 2,
    "fill": 3,
}
"""How often each kind of fault comes, and where it slid."""
TURNS = (1,) * 8 + (2,) * 8 + (3,) * 5 + (4,) * 3 + (5, 6, 7, 8, 9, 10)
ROWS = 12
"""Rows of a file that all have something in common."""
TRIES = 400
NEARLY_CERTAIN = 1e-5


@dataclass(frozen=True)
class Case:
    """One sample, with all that is known of it."""

    form: Form
    fault: Fault
    sample: Sample
    convention: Convention = CONVENTIONS[0]

    @property
    def chat(self) -> Chat:
        return self.sample.chat

    @property
    def low(self) -> int:
        """Where the columns begin."""
        return self.chat.prompt if self.form.response else 0

    @cached_property
    def decision(self) -> Decision:
        """What the columns allow, and the finish reasons that the row states."""
        turns = self.chat.turns
        last = range(len(turns) - 1, len(turns))
        every = last if self.form.name == "slime" else range(len(turns))  # which states how its last turn ended
        stating = {"list": every, "last": last}.get(self.sample.reasons, ())
        cut = frozenset(at for at in stating if turns[at].reason == "length")
        return decide(self.chat, self.sample.seen, self.form.fill, self.low, cut)

    @cached_property
    def verdict(self) -> str:
        """What can be told: from the columns, or from the calls beside them."""
        if not self.form.calls or self.fault.kind == "clean":
            return self.decision.verdict(self.fault)
        if self.decision.either and not self.fault.slid:
            return "open fault"
        return "fault" if self._contradicts(trained=True) else "open"

    @cached_property
    def may_be_right(self) -> bool:
        """Whether it is a fault that nothing in the row shows: neither columns nor calls nor finish reasons."""
        return self.verdict == "open" and not (self.form.calls and self._contradicts(trained=False))

    def _contradicts(self, *, trained: bool) -> bool:
        """Whether columns contradict the calls, where they are trained or anywhere that they have a logprob."""
        fill, seen = self.form.fill, self.sample.seen
        for truth, on, value in zip(self.chat.truth, seen.mask, seen.values, strict=True):
            shown = fill if value is None else value
            valued = not trained and not is_fill(value, fill)
            if (on or valued) and (truth is None or shown != truth):
                return True
        return False

    @property
    def zeros(self) -> int:
        """Trained tokens that were sampled and whose logprob the row lacks.

        0 beside a token that was nearly certain: there a sampler writes zeros too.
        """
        seen = self.sample.seen
        columns = zip(self.chat.truth, seen.mask, seen.values, strict=True)
        lost = {at for at, (truth, on, value) in enumerate(columns) if on and truth and value is None}
        around = {at + by for at in lost for by in (-1, 1)} - lost
        values = [seen.values[at] for at in around if 0 <= at < len(seen.values)]
        certain = any(value is not None and -NEARLY_CERTAIN <= value < 0 for value in values)
        return 0 if certain else len(lost)


@dataclass(frozen=True)
class File:
    """A log: rows of samples, of one model and form."""

    name: str
    model: str
    form: Form
    rows: list[list[Case]]
    convention: Convention | None = None
    """What all of its rows keep; None where each has its own, or one departs from it."""

    @property
    def cases(self) -> Iterator[tuple[int, int, Case]]:
        """Row, item and sample."""
        for number, row in enumerate(self.rows):
            for item, case in enumerate(row):
                yield number, item, case


def files(
    count: int, forms: list[str], seed: int, *, whole: float = 0.3, models: list[str] | None = None
) -> list[File]:
    """Files with so many samples in all; `whole`: the share in files of one convention.

    Of these a third has one fault throughout, a third is right, a third is right but for one odd row.
    """
    dice = random.Random(seed)
    chosen = models or list(MODELS)
    each = max(1, round(count * (1 - whole) / len(forms) / len(chosen)))
    plan = []
    for name in forms:
        for model in chosen:
            drawn = [(fault, _convention(fault, dice)) for fault in _faults(dice, each)]
            plan.append(_file(f"mixed-{name}-{model}", model, FORMS[name], drawn, dice))
    return plan + list(_whole(round(count * whole), forms, chosen, dice))


def _whole(count: int, forms: list[str], models: list[str], dice: random.Random) -> Iterator[File]:
    """Files whose rows keep one convention."""
    first = dice.randrange(len(CONVENTIONS))
    for number in range(count // ROWS):
        form, model = FORMS[dice.choice(forms)], dice.choice(models)
        what = ("right", "fault", "odd")[number % 3]
        fault = fault_of(dice.choice(("mask", "logprobs", "both")) if what == "fault" else "clean", dice)
        convention = CONVENTIONS[(first + number // 3) % len(CONVENTIONS)]
        if not _fits(convention, fault):
            convention = CONVENTIONS[0]
        drawn, common = [(fault, convention)] * ROWS, convention
        if what == "odd":
            odd = fault_of(dice.choice([kind for kind in FAULTS if kind != "clean"]), dice)
            drawn[dice.randrange(ROWS)] = odd, _convention(odd, dice)
        name = f"{what}-{number}-{form.name}-{model}"
        yield _file(
            name, model, form, drawn, dice, convention=common if what != "odd" else None, single=number % 6 < 3
        )


def _convention(fault: Fault, dice: random.Random) -> Convention:
    """A convention in which a fault can be: no slide shows where every token has a logprob."""
    while True:
        draw = dice.random()
        convention = CONVENTIONS[0] if draw < 0.15 else combined(dice) if draw < 0.3 else dice.choice(CONVENTIONS)
        if _fits(convention, fault):
            return convention


def _fits(convention: Convention, fault: Fault) -> bool:
    return not convention.recomputed or not (fault.logprobs or fault.kind == "fill")


def _faults(dice: random.Random, count: int) -> list[Fault]:
    """So many faults, of every kind as often as FAULTS says."""
    bag = [kind for kind, often in FAULTS.items() for _ in range(often)]
    kinds = (bag * (count // len(bag) + 1))[:count] if count >= len(bag) else dice.sample(bag, count)
    faults = [fault_of(kind, dice) for kind in kinds]
    dice.shuffle(faults)
    return faults


def fault_of(name: str, dice: random.Random) -> Fault:
    """A fault of one of FAULTS."""
    kind, _, shape = name.partition(" ")
    by, other = dice.sample(SLIDES, 2)
    if kind == "mask":
        return Fault(kind, mask=by, shape=shape)
    if kind == "logprobs":
        return Fault(kind, logprobs=by, shape=shape)
    if kind == "both":
        return Fault(kind, by, by if dice.random() < 0.5 else other, shape=shape)
    if kind == "roles":
        return Fault(kind, what=dice.choice(("user", "user and assistant")))
    return Fault(kind, what=dice.choice(("head", "middle", "tail")) if kind == "fill" else "")


def _file(
    name: str,
    model: str,
    form: Form,
    drawn: list[tuple[Fault, Convention]],
    dice: random.Random,
    *,
    convention: Convention | None = None,
    single: bool = False,
) -> File:
    """A file of these faults; `single`: most of its samples have one turn, so that few can be decided."""
    rows, left = [], list(drawn)
    while left:
        size = dice.randint(1, form.group) if form.name != "packed" else dice.randint(2, form.group)
        messages = dice.random() < 0.5 and form.name != "packed"
        rows.append(
            [
                case_of(form, fault, convention_of, model, dice, messages=messages, single=single)
                for fault, convention_of in left[:size]
            ]
        )
        left = left[size:]
    suffix = ".parquet" if form.name == "nan" and model == "smollm2" else form.suffix
    return File(name + suffix, model, form, rows, convention)


def case_of(
    form: Form,
    fault: Fault,
    convention: Convention,
    model: str,
    dice: random.Random,
    *,
    messages: bool,
    single: bool = False,
) -> Case:
    """A sample in which the fault shows."""
    enough: tuple[int, ...] = (1,) if single else TURNS
    if fault.shape or fault.kind == "roles" or (form.response and fault.kind == "inverted"):
        # Of a response of one turn, the complement is a few tokens of the template.
        enough = tuple(turns for turns in TURNS if turns > 1)
    for _ in range(TRIES):
        drawn = chat_of(model, dice.choice(enough), dice, closed=dice.random() < 0.3)
        if messages and drawn.tools is not None and not form.tools:
            continue
        low = drawn.prompt if form.response else 0
        chat, right = written(drawn, convention, low, dice)
        if form.calls and splits_a_character(chat):
            continue
        if not convention.recomputed and dice.random() < 0.3:
            right = replace(right, values=[0.0 if value == 0.0 else value for value in right.values])
        turn = dice.randrange(fault.shape == "from", len(chat.turns))
        size = min(dice.choice((3, 4, 8, 12)), chat.turns[turn].end - chat.turns[turn].start - 2)
        seen = faulty(chat, right, fault, low, size, turn)
        if not (any(right.mask) and any(seen.mask)) or (seen == right) != (fault.kind == "clean"):
            continue
        reasons = dice.choice(("", "", "", "list", "last")) if form.tools else ""
        return Case(form, fault, Sample(chat, seen, right, messages, turn, reasons), convention)
    raise AssertionError(f"no conversation of {model} shows {fault} by {convention}")
