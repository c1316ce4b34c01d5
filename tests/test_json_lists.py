"""Lists that replace lists in JSON text: comparing them part by part gives what comparing them whole does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tito_audit.record import json_text
from tito_audit.record.edits import Edit
from tito_audit.record.json_text import EntrySpellings, PackedSpans, match_entries, rewrite_json

keys = st.lists(st.sampled_from(["0", "1", "0.0", "-1.5", "null", "NaN"]), max_size=12)
numbers = st.one_of(st.sampled_from([0, 1, 0.0, 1.0, -0.0, None, True, False, 10**20]), st.floats())
spelled = st.sampled_from(["0", "0.0", "0e0", "-0.0", "1", "1.0", "1.00", "null", "true", "NaN", "-1.5e-3", "12"])


def slow(was: list[str], now: list[str]) -> list[int | None]:
    """For each new key the old one that it takes the spelling of, from whole lists."""
    most = min(len(was), len(now))
    head = next((i for i in range(most) if was[i] != now[i]), most)
    tail = next((i for i in range(most - head) if was[-1 - i] != now[-1 - i]), most - head)
    middle = [
        at if at < len(was) and was[at] == now[at] else was.index(now[at]) if now[at] in was else None
        for at in range(head, len(now) - tail)
    ]
    return [*range(head), *middle, *range(len(was) - tail, len(was))]


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@given(keys, keys)
def test_every_entry_takes_the_spelling_that_whole_lists_give_it(
    at_once: int, was: list[str], now: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "PART_SIZE", at_once)
        runs = list(
            match_entries(
                EntrySpellings(len(was), lambda a, b: was[a:b]), EntrySpellings(len(now), lambda a, b: now[a:b])
            )
        )
    origins: list[int | None] = []
    for index, origin, count in runs:
        assert index == len(origins)
        origins += [None] if origin is None else range(origin, origin + count)
    assert origins == slow(was, now)


@pytest.mark.parametrize("at_once", [1, 3])
@given(st.lists(spelled, max_size=9), st.lists(numbers, max_size=9), st.sampled_from([",", ", ", " ,\n  "]))
def test_a_list_is_rewritten_alike_in_parts_and_at_once(
    at_once: int, old: list[str], new: list[Any], comma: str
) -> None:
    text = f'{{"a": "b", "list": [{comma.join(old)}], "c": [1]}}'
    whole = rewrite_json(text, [Edit(("list",), new)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "PART_SIZE", at_once)
        assert rewrite_json(text, [Edit(("list",), new)]) == whole
    # In a list that mixes them, 0 and 0.0 are equal.
    values = json.loads(whole)["list"], new
    read, wanted = (
        [number if number is None or number is True else str(float(number)) for number in part] for part in values
    )
    assert read == wanted


def test_spans_are_read_like_a_list() -> None:
    every = [(3, 4), (6, 9), (11, 12)]
    spans = PackedSpans(every)
    assert (list(spans), len(spans), spans[0], spans[-1], spans[1:]) == (every, 3, every[0], every[-1], every[1:])
    with pytest.raises(IndexError):
        spans[3]
    with pytest.raises(IndexError):
        spans[-4]
