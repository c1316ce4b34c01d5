"""A prompt as an array, and the answers that repeat it: the quick ways against the plain ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from tito_audit.errors import ProviderError
from tito_audit.providers._answers import list_ids, prompt_ids
from tito_audit.providers._http import ECHOED, replace_echo
from tito_audit.record.prompt_ids import PromptIds

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
NAME = "prompt_token_ids"
TRAPS = (NAME, f'"{NAME}', f'{NAME}":[1,2]', f'\\"{NAME}"', f'x"{NAME}":[1]', "\\", '"', "ids", ECHOED[:5])


@given(IDS)
def test_an_array_and_a_tuple_are_the_same_prompt(ids):
    array, plain = PromptIds(np.array(ids, np.int32)), PromptIds(tuple(ids))
    assert array == plain == tuple(ids) == array
    assert array == ids
    assert array != [*ids, 1]
    assert hash(array) == hash(plain) == hash(tuple(ids))
    assert list(array) == ids
    assert len(array) == len(ids)
    assert (array[0], array[-1], array[1:]) == (ids[0], ids[-1], tuple(ids[1:]))
    assert json.loads(array.json) == json.loads(plain.json) == ids
    assert array.tail(3).tolist() == plain.tail(3).tolist() == ids[-3:]
    assert type(array[0]) is type(next(iter(array))) is int
    assert plain.original == tuple(ids)
    assert array.original is array


def test_a_slice_of_an_array_is_written_as_it_is_read():
    assert PromptIds(np.arange(10, dtype=np.int32)[::2]).json == b"[0,2,4,6,8]"


@pytest.mark.parametrize("ids", [np.array([3, -1], np.int32), [3, -1]])
def test_a_negative_id_is_refused_in_either_form(ids):
    with pytest.raises(ProviderError, match="id -1 at position 1 is not a token id"):
        prompt_ids(PromptIds(ids) if isinstance(ids, np.ndarray) else ids)


def test_no_ids_are_refused_in_either_form():
    for none in ((), PromptIds(np.array([], np.int32))):
        with pytest.raises(ProviderError, match="there are no ids"):
            list_ids(none)


def values(ids: list[int]) -> st.SearchStrategy[Any]:
    texts = st.sampled_from(TRAPS) | st.text(max_size=5)
    lists = st.just(ids) | st.just([*ids, 1]) | st.just(ids[:-1]) | st.lists(st.integers(0, 99), max_size=3)
    leaves = st.none() | st.booleans() | st.integers(-9, 99) | texts | lists
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just(NAME) | texts, inner, max_size=4),
        max_leaves=12,
    )


def marked(value: Any, ids: list[int]) -> Any:
    """The slow way: every list of this name that is these ids, replaced in the parsed answer."""
    if isinstance(value, dict):
        same = {key for key, entry in value.items() if key == NAME and json.dumps(entry) == json.dumps(ids)}
        return {key: ECHOED if key in same else marked(entry, ids) for key, entry in value.items()}
    return [marked(entry, ids) for entry in value] if isinstance(value, list) else value


@settings(max_examples=examples(50, 3000))
@given(st.data(), IDS, st.booleans())
def test_only_a_list_that_is_the_prompt_is_replaced(data, ids, spaced):
    answer = data.draw(values(ids))
    wire = json.dumps(answer).encode() if spaced else orjson.dumps(answer)
    assert orjson.loads(replace_echo(wire, PromptIds(tuple(ids)).json)) == marked(answer, ids)


def test_a_prompt_that_the_answer_repeats_is_not_read_again():
    ids = PromptIds(tuple(range(1000)))
    for wire in (orjson.dumps({NAME: list(ids)}), json.dumps({NAME: list(ids)}).encode()):
        assert orjson.loads(replace_echo(wire, ids.json)) == {NAME: ECHOED}
    assert replace_echo(b'{"a":1}', ids.json) == b'{"a":1}'
