"""Conversations with retries, branches, sub-agents, summaries and edits, a row a call, joined as they were made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.apart import Call, Placed, Wire, chat, generic, ids_only, report_of, spread
from tests.grown import TOY, Family, Linked, families
from tests.tiers import examples

NUMBER = re.compile(r"up to (\d+)")
PLANTED = ("-t", TOY, "--select", "LPR504")
SEEDS = range(examples(2, 20))
FORMS = (generic, chat, ids_only)
MANY = 50

Form = Callable[[Call], Wire]
Group = frozenset[tuple[int, int]]
"""The calls that were read as one conversation: each with how often it was there."""


@cache
def grown(seed: int, *, lost: bool = True) -> tuple[Family, ...]:
    return tuple(families(seed, MANY, lost=lost))


def rows_of(made: Iterable[Family], form: Form, *, key: str | None) -> list[tuple[Call, Wire]]:
    return [
        (one.call, {**({key: family.name} if key else {}), **form(one.call)})
        for family in made
        for one in family.calls
    ]


def groups(report: Wire) -> list[Group]:
    """The conversations of a report, whose first calls are turn 0, told by what was planted in each call."""
    found: list[list[int]] = []
    for one in report["findings"]:
        if not one["turn"]:
            found.append([])
        match = NUMBER.search(one["message"])
        assert match is not None
        found[-1].append(int(match[1]))
    return [group(numbers) for numbers in found]


def group(numbers: Iterable[int]) -> Group:
    return frozenset(Counter(numbers).items())


def together(calls: Iterable[Linked]) -> Group:
    return group(one.number for one in calls)


def whole(made: Iterable[Family]) -> Counter[Group]:
    """Each family as one conversation."""
    return Counter(together(family.calls) for family in made)


def shown(made: Iterable[Family]) -> Counter[Group]:
    """What the rows of families show to belong together: each first call with all that follow it."""
    found = Counter[Group]()
    for family in made:
        roots: dict[int, list[Linked]] = {}
        for one in family.calls:
            roots.setdefault(id(one.root), []).append(one)
        found.update(map(together, roots.values()))
    return found


def plain(made: Iterable[Family]) -> list[Family]:
    return [family for family in made if not family.ambiguous]


def doubtful(made: Iterable[Family]) -> set[int]:
    """The numbers of all calls in families whose first row is there twice."""
    return {one.number for family in made if family.ambiguous for one in family.calls}


def stands_at(report: Wire, placed: Placed, numbers: dict[tuple[int, int], int]) -> None:
    """Each call is reported at a row that holds it."""
    for one in report["findings"]:
        match = NUMBER.search(one["message"])
        assert match is not None
        assert numbers[placed[one["file"], one["row"]]] == int(match[1])


def numbers_of(made: Iterable[Family]) -> dict[tuple[int, int], int]:
    return {(one.call.conversation, one.call.turn): one.number for family in made for one in family.calls}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_calls_of_one_session_are_one_conversation(seed: int, form: Form, tmp_path: Path) -> None:
    made = grown(seed)
    logs, _ = spread(rows_of(made, form, key="session_id"), tmp_path, seed, files=1)
    report = report_of(*logs, *PLANTED, "--session", "session_id")
    assert Counter(groups(report)) == whole(made)
    assert report["summary"]["rollouts"] == len(made)
