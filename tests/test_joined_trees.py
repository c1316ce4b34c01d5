"""Conversations with retries, branches, sub-agents and edits, a row a call, are joined as they were made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.apart import Call, Placed, Wire, chat, event, generic, ids_only, report_of, spread
from tests.command import written
from tests.grown import TOY, Family, Linked, families
from tests.tiers import crossed, examples

NUMBER = re.compile(r"up to ([\d,]+)")
PLANTED = ("-t", TOY, "--select", "LPR504")
TOLD = {"toy": PLANTED, "no-tokenizer": ("--select", "LPR504")}
SEEDS = range(examples(2, 20))
FORMS = (generic, chat, ids_only)
MANY = examples(20, 50)

Form = Callable[[Call], Wire]
Group = frozenset[tuple[int, int]]
"""The calls that were read as one conversation: each with how often it was there."""


def words(value: object) -> str:
    """A case as pytest names it."""
    return getattr(value, "__name__", str(value))


@cache
def grown(seed: int, *, lost: bool = True) -> tuple[Family, ...]:
    return tuple(families(seed, MANY, lost=lost))


def rows_of(trees: Iterable[Family], form: Form, *, key: str | None) -> list[tuple[Call, Wire]]:
    return [
        (node.call, {**({key: family.name} if key else {}), **form(node.call)})
        for family in trees
        for node in family.calls
    ]


def groups(report: Wire) -> list[Group]:
    """The conversations of a report, whose first calls are turn 0, told by what was planted in each call."""
    numbers_by_conversation: list[list[int]] = []
    for finding in report["findings"]:
        if not finding["turn"]:
            numbers_by_conversation.append([])
        numbers_by_conversation[-1].append(planted_in(finding))
    return [group(numbers) for numbers in numbers_by_conversation]


def group(numbers: Iterable[int]) -> Group:
    return frozenset(Counter(numbers).items())


def together(calls: Iterable[Linked]) -> Group:
    return group(node.number for node in calls)


def whole(trees: Iterable[Family]) -> Counter[Group]:
    """Each family as one conversation."""
    return Counter(together(family.calls) for family in trees)


def shown(trees: Iterable[Family]) -> Counter[Group]:
    """What the rows of families show to belong together: each first call with all that follow it."""
    counts = Counter[Group]()
    for family in trees:
        roots: dict[int, list[Linked]] = {}
        for node in family.calls:
            roots.setdefault(id(node.root), []).append(node)
        counts.update(map(together, roots.values()))
    return counts


def plain(trees: Iterable[Family]) -> list[Family]:
    return [family for family in trees if not family.ambiguous]


def doubtful(trees: Iterable[Family]) -> set[int]:
    """The numbers of all calls in families whose first row is there twice."""
    return {node.number for family in trees if family.ambiguous for node in family.calls}


def planted_in(finding: Wire) -> int:
    """The number that was planted in a call."""
    match = NUMBER.search(finding["message"])
    assert match is not None
    return int(match[1].replace(",", ""))


def stands_at(report: Wire, placed: Placed, numbers: dict[tuple[int, int], int]) -> None:
    """Each call is reported at a row that holds it."""
    for finding in report["findings"]:
        assert numbers[placed[finding["file"], finding["row"]]] == planted_in(finding)


def numbers_of(trees: Iterable[Family]) -> dict[tuple[int, int], int]:
    return {(node.call.conversation, node.call.turn): node.number for family in trees for node in family.calls}


@pytest.mark.parametrize("told", [("--session", "session_id"), ()], ids=["told", "not told"])
@pytest.mark.parametrize(("seed", "form"), crossed(SEEDS, FORMS), ids=words)
def test_calls_that_name_their_conversation_are_joined_as_they_were_made(
    seed: int, form: Form, told: tuple[str, ...], tmp_path: Path
) -> None:
    trees = grown(seed)
    logs, placed = spread(rows_of(trees, form, key="session_id"), tmp_path, seed)
    report = report_of(*logs, *PLANTED, *told)
    assert Counter(groups(report)) == whole(trees)
    stands_at(report, placed, numbers_of(trees))
    assert report["summary"]["rollouts"] == len(trees)


# Without a name


@pytest.mark.parametrize(("seed", "form"), crossed(SEEDS, FORMS), ids=words)
def test_calls_that_name_nothing_are_joined_as_far_as_their_history_shows(
    seed: int, form: Form, tmp_path: Path
) -> None:
    trees = grown(seed)
    logs, placed = spread(rows_of(trees, form, key=None), tmp_path, seed)
    report = report_of(*logs, *PLANTED)
    unsure = doubtful(trees)
    assert unsure
    sure = [numbers for numbers in groups(report) if not {number for number, _ in numbers} & unsure]
    assert Counter(sure) == shown(plain(trees))
    stands_at(report, placed, numbers_of(trees))


@pytest.mark.parametrize(("key", "form"), crossed(list(TOLD), FORMS), ids=words)
def test_calls_of_different_conversations_are_never_joined(form: Form, key: str, tmp_path: Path) -> None:
    """Not where a row is there twice, nor where two conversations began with the same prompt."""
    trees = grown(0)
    family = {node.number: number for number, family in enumerate(trees) for node in family.calls}
    logs, _ = spread(rows_of(trees, form, key=None), tmp_path, 1)
    for numbers in groups(report_of(*logs, *TOLD[key])):
        assert len({family[number] for number, _ in numbers}) == 1


@pytest.mark.parametrize("form", [generic, ids_only], ids=lambda form: form.__name__)
def test_the_order_of_rows_their_files_and_processes_change_nothing(form: Form, tmp_path: Path) -> None:
    trees = plain(grown(1))
    expected = shown(trees)
    for seed, (files, kind, jobs) in enumerate([(1, "jsonl", 1), (5, "jsonl.gz", 2), (2, "parquet", 1)]):
        folder = tmp_path / str(seed)
        folder.mkdir()
        logs, placed = spread(rows_of(trees, form, key=None), folder, seed, files=files, kind=kind)
        report = report_of(*logs, *PLANTED, "--jobs", jobs)
        assert Counter(groups(report)) == expected
        stands_at(report, placed, numbers_of(trees))


def test_what_a_break_is_stays_the_same_where_calls_name_nothing(tmp_path: Path) -> None:
    """SEQ301 to SEQ305 of conversations whose rows show where they belong, by key and by history."""
    trees = plain(grown(0, lost=False))
    select = ("-t", TOY, "--select", "SEQ,LPR504")
    reports = []
    for key in ("session_id", None):
        folder = tmp_path / str(key)
        folder.mkdir()
        logs, placed = spread(rows_of(trees, generic, key=key), folder, 7)
        report = report_of(*logs, *select)
        planted = [finding for finding in report["findings"] if finding["code"] == "LPR504"]
        assert Counter(groups({"findings": planted})) == whole(trees)
        names = ("code", "severity", "cause", "turn", "start", "end", "message")
        reports.append(
            Counter(
                (placed[finding["file"], finding["row"]], *(finding[name] for name in names))
                for finding in report["findings"]
            )
        )
    assert reports[0] == reports[1]
    codes = {str(finding[1]) for finding in reports[0]}
    assert {"SEQ301", "SEQ303", "SEQ304"} <= codes


def test_the_notice_says_how_many_rows_became_how_many_conversations(tmp_path: Path) -> None:
    trees = grown(0)
    rows = rows_of(trees, generic, key="session_id")
    logs, _ = spread(rows, tmp_path, 1)
    (notice,) = [each for each in report_of(*logs, *PLANTED)["summary"]["notices"] if "session_id" in each]
    alone = sum(len(family.calls) == 1 for family in trees)
    assert re.search(rf"\b({len(rows)}|{len(rows) - alone}) rows\b", notice)
    assert re.search(rf"\b({len(trees)}|{len(trees) - alone}) conversations\b", notice)


def test_calls_behind_many_events_that_are_none_are_joined(tmp_path: Path) -> None:
    trees = plain(grown(0))[:10]
    other = [{"event_type": "reward", "rollout_id": "r", "attempt_id": "a", "data": {"value": 1.0}}] * 40
    rows = [event(node.call) for family in trees for node in family.calls]
    log = written(tmp_path / "events.jsonl", [*other, *rows])
    report = report_of(log, *PLANTED)
    assert Counter(groups(report)) == Counter(together(family.calls) for family in trees)


# Logs without anything to join


@pytest.mark.parametrize(("key", "form"), crossed([None, "session_id"], FORMS), ids=words)
def test_samples_of_one_prompt_are_reported_as_without_joining(
    form: Form, key: str | None, tmp_path: Path
) -> None:
    trees = [Family(family.name, family.calls[:1]) for family in grown(2)]
    prompts = Counter(tuple(family.calls[0].call.prompt) for family in trees)
    assert max(prompts.values()) > 2
    logs, _ = spread(rows_of(trees, form, key=key), tmp_path, 1)
    select = ("-t", TOY)
    assert plainly(report_of(*logs, *select)) == plainly(report_of(*logs, *select, "--no-join"))


def plainly(report: Wire) -> Wire:
    """The report without times and notices."""
    summary = {name: value for name, value in report["summary"].items() if name not in ("seconds", "notices")}
    return {"summary": summary, "findings": report["findings"]}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_call_whose_forerunner_is_not_in_the_log_is_not_joined_to_another_sample(
    form: Form, tmp_path: Path
) -> None:
    """Of two samples of a prompt one is there; the other was lost, and what followed it is there."""
    trees = grown(3)
    lost = [family for number, family in enumerate(trees) if number % 2]
    whole_families = [family for number, family in enumerate(trees) if not number % 2]
    orphans = [
        Family(family.name, [call for call in family.calls[1:] if call.parent is family.calls[0]][:1])
        for family in lost
    ]
    heads = [Family(family.name, family.calls[:1]) for family in whole_families]
    left = {tuple(family.calls[0].call.prompt) for family in heads}
    assert sum(tuple(family.calls[0].call.prompt) in left for family in lost) > 3
    logs, _ = spread(rows_of([*heads, *orphans], form, key=None), tmp_path, 1)
    assert plainly(report_of(*logs, "-t", TOY)) == plainly(report_of(*logs, "-t", TOY, "--no-join"))
