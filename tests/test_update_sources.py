"""The writer by itself: what a source says is where a call's changed arrays go, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_update import fixture_rows
from tests.tiers import examples
from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats import format_named
from tito_audit.formats._columns import with_logprobs
from tito_audit.formats._kit import Samples, with_changed_samples
from tito_audit.formats._update import sources_of_calls
from tito_audit.formats._writer import update_calls
from tito_audit.record.arrays import as_floats, as_ids
from tito_audit.record.column import Alignment, Column, ColumnRole
from tito_audit.record.edits import ABSENT
from tito_audit.record.repaired import RepairedRollout, unrepaired
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Counter, Layout, Source, Sources

PLACE = Place("log.jsonl", 0)
ROW = {
    "ids": [1, 2],
    "again": {"ids": "[1, 2]"},
    "sampled": [3, 4, 5],
    "first": [{"token": "a", "logprob": -0.5}],
    "rest": [{"token": "b", "logprob": -0.25}, {"token": "c", "logprob": None}],
    "usage": {"n.prompt_tokens": 2, "n.completion_tokens": 3, "n.total_tokens": 5, "prompt_tokens": 2},
    "routing": [7],
    "beside": [2],
}
SOURCE = CallSource(
    prompts=(Source(("ids",)), Source(("again", "ids"))),
    logprobs=(Source(("first",), Layout.ENTRIES, (0, 1)), Source(("rest",), Layout.ENTRIES, (1, 3))),
    routing=(("routing",),),
    counters=(Counter(("usage",), "n."),),
    whole="{name} cannot go",
)


def read(row: Row, place: Place) -> Sequence[Rollout]:
    """The one call of a row like `ROW`."""
    entries = [entry.get("logprob") for entry in (*row["first"], *row["rest"])]
    logprobs = as_floats(entries, "logprob")
    column = Column("logprobs", ColumnRole.LOGPROBS, logprobs, Alignment.CALL)
    turn = Turn(as_ids(row["ids"], "ids"), as_ids(row["sampled"], "sampled"), logprobs, columns=(column,))
    return (Rollout(place, "made", turns=(turn,)),)


def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    return sources_of_calls([[SOURCE]])


def changed(**changes: Any) -> RepairedRollout:
    (rollout,) = read(ROW, PLACE)
    (turn,) = rollout.turns
    if "logprobs" in changes:
        values = as_floats(changes.pop("logprobs"), "logprobs")
        changes |= {"completion_logprobs": values, "columns": (replace(turn.columns[0], values=values),)}
    return RepairedRollout(replace(rollout, turns=(replace(turn, **changes),)), (0,))


def written(repaired: RepairedRollout, **how: Any) -> Row:
    return update_calls(ROW, [repaired], read, sources, **how)


def test_a_call_that_did_not_change_leaves_the_row_as_it_is() -> None:
    assert written(unrepaired(read(ROW, PLACE)[0])) is ROW


@pytest.mark.parametrize(("gone", "left"), [(None, {"routing": None}), (ABSENT, {})])
def test_a_prompt_is_written_in_every_copy_and_counted_and_its_routing_goes(gone: Any, left: Any) -> None:
    new = written(changed(prompt_ids=as_ids([1, 9, 2], "")), dropped_as=gone)
    assert new == {
        **{name: value for name, value in ROW.items() if name != "routing"},
        **left,
        "ids": [1, 9, 2],
        "again": {"ids": "[1, 9, 2]"},
        "usage": {"n.prompt_tokens": 3, "n.completion_tokens": 3, "n.total_tokens": 6, "prompt_tokens": 2},
    }
    assert all(new[name] is ROW[name] for name in ("sampled", "first", "rest", "beside"))


def test_logprobs_go_to_the_places_that_hold_their_part() -> None:
    new = written(changed(logprobs=[-0.5, -0.25, -1.0]))
    assert new["first"] is ROW["first"]
    assert new["rest"] == [{"token": "b", "logprob": -0.25}, {"token": "c", "logprob": -1.0}]
    assert new["rest"][0] is ROW["rest"][0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "source", "says"),
    [
        ({"columns": (), "completion_logprobs": None}, SOURCE, "logprobs cannot go"),
        ({"prompt_ids": as_ids([1], "")}, replace(SOURCE, scored=True), "no scores for the new one"),
        ({"prompt_ids": as_ids([1], "")}, CallSource(), "no separate place for the new prompt"),
        ({"logprobs": [-0.5, -0.25, -1.0]}, CallSource(), "in a form that cannot be written"),
    ],
)
def test_what_a_row_has_no_place_for_is_refused(changes: dict[str, Any], source: CallSource, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        update_calls(ROW, [changed(**changes)], read, lambda *_: sources_of_calls([[source]]))


def test_a_call_that_asked_the_same_before_asks_what_this_one_does() -> None:
    row = {**ROW, "earlier": {"ids": [1, 2], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}}
    earlier = Turn(as_ids([1, 2], ""), as_ids([8], ""))
    there = CallSource(prompts=(Source(("earlier", "ids")),), counters=(Counter(("earlier", "usage")),))
    source = replace(SOURCE, retries=((earlier, there),))
    wanted = changed(prompt_ids=as_ids([1], ""))
    new = update_calls(row, [wanted], read, lambda *_: sources_of_calls([[source]]))
    assert new["earlier"] == {"ids": [1], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


NUMBERS = st.lists(st.floats(-9, 0), min_size=1, max_size=6)


@settings(max_examples=examples(40, 200), deadline=None)
@given(NUMBERS, st.data())
def test_every_layout_says_the_new_logprobs_and_keeps_what_is_beside_them(old: list[float], data: Any) -> None:
    new = data.draw(st.lists(st.floats(-9, 0), min_size=len(old), max_size=len(old)))
    tokens = [f"t{number}" for number in range(len(old))]
    lists: dict[Layout, Any] = {
        Layout.PLAIN: list(old),
        Layout.ENTRIES: [{"token": token, "logprob": value} for token, value in zip(tokens, old, strict=True)],
        Layout.TRIPLES: [[value, number, None] for number, value in enumerate(old)],
        Layout.PARALLEL: {"tokens": tokens, "token_logprobs": list(old)},
    }
    wanted: dict[Layout, Any] = {
        Layout.PLAIN: new,
        Layout.ENTRIES: [{"token": token, "logprob": value} for token, value in zip(tokens, new, strict=True)],
        Layout.TRIPLES: [[value, number, None] for number, value in enumerate(new)],
        Layout.PARALLEL: {"tokens": tokens, "token_logprobs": new},
    }
    for layout, value in lists.items():
        new_row = with_logprobs(value, layout=layout, old=np.array(old), new=np.array(new), ids=None)
        assert new_row == wanted[layout], layout


def test_columns_of_samples_go_back_to_their_ranges_and_their_entries() -> None:
    row = {"tokens": [1, 2, 3, 4], "mask": np.array([0, 1, 0, 1], np.int8), "scores": [5, 6], "note": "x"}
    ranges = ((0, 2), (2, 4))
    places = {
        "tokens": lambda number: Source(("tokens",), part=ranges[number]),
        "mask": lambda number: Source(("mask",), part=ranges[number]),
        "scores": lambda number: Source(("scores", number)),
    }
    old = tuple({"tokens": [1, 2], "mask": [0, 1], "scores": 5 + number, "note": "x"} for number in range(2))
    samples = Samples(old, lambda number, name: places[name](number) if name in places else None, "tokens")
    new = [{**old[0], "tokens": [1, 8, 2], "mask": [0, 0, 1]}, {**old[1], "scores": 7, "mask": None}]
    new_row = with_changed_samples(row, samples, new)
    assert new_row["tokens"] == [1, 8, 2, 3, 4]
    assert list(new_row["mask"]) == [0, 0, 1, None, None]
    assert new_row["scores"] == [5, 7]
    assert new_row["note"] is row["note"]
    assert with_changed_samples(row, samples, old) is row
    with pytest.raises(RecordError, match="shared by all samples"):
        with_changed_samples(row, samples, [old[0], {**old[1], "note": "y"}])


# What was read


@pytest.mark.parametrize("name", ["text_only", "miles_trajectory"])
def test_a_row_without_arrays_has_no_sources(name: str) -> None:
    form = format_named(name)
    for row in fixture_rows(name):
        assert form.sources(row, form.read(row, PLACE)) == [Sources()]
