"""What readers do with arrays and messages in few steps is what the plain way does."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, UserDict, UserList
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forms import LOGS
from tests.tiers import one_in
from tito_audit.errors import RecordError
from tito_audit.format import Format
from tito_audit.formats import _calls, _flat, all_formats, pick_format
from tito_audit.formats._columns import is_number_list
from tito_audit.record.arrays import as_ids
from tito_audit.record.build import SHOWN_BY_ROW, build_training_row
from tito_audit.record.column import ColumnRole
from tito_audit.record.message import Message, ToolCall, as_message, sampled_indices
from tito_audit.record.rollout import TrainingRow
from tito_audit.storage import open_log


class Text(str):
    __slots__ = ()


# Messages


def plain_message(value: Any, where: str) -> Message:
    """A message read with one question after the other."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise RecordError(f"{where} is not a message: an object with a `role` is expected")
    content = value.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not all(isinstance(part, Mapping) for part in content):
            raise RecordError(f"{where}.content is a list, but not of content parts (objects)")
        content = tuple(content)
    elif content is not None and not isinstance(content, str):
        raise RecordError(f"{where}.content is neither text nor a list of parts")
    keys = ("reasoning_content", "reasoning", "thinking")
    reasoning = next((value[key] for key in keys if isinstance(value.get(key), str)), None)
    calls = value.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RecordError(f"{where}.tool_calls is not a list")
    wire: Mapping[str, Any] = value
    if reasoning is not None and "reasoning_content" not in value:
        wire = {**value, "reasoning_content": reasoning}
    return Message(
        role=value["role"],
        wire=wire,
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
    )


def plain_call(value: Any, where: str) -> ToolCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RecordError(f"{where} is not a tool call: an object with a `name` is expected")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | Mapping):
        raise RecordError(f"{where}.arguments is neither a string nor an object")
    identifier = value.get("id")
    return ToolCall(function["name"], arguments, identifier if isinstance(identifier, str) else None)


def outcome(read: Any, *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except RecordError as error:
        return str(error)


CONTENTS = (
    *("a", "", Text("b"), None, [], [{"type": "text", "text": "a"}], ({},), ["a"], 7, {}, b"ab", UserList([{}])),
)
CALL = {"name": "run", "arguments": "{}"}
CALLS = (
    *(None, [], (), "", 0, 7, "run", {"name": "run"}, [7], ["run"], [{}], [{"function": None}], [{"function": 7}]),
    *([CALL], (CALL, {"id": "1", "function": CALL}), [{"id": 1, "function": OrderedDict(CALL)}], [UserDict(CALL)]),
    *([{"name": 7}], [{"name": "run"}], [{"name": "run", "arguments": {}}], [{"name": "run", "arguments": [1]}]),
)
REASONS: tuple[dict[str, Any], ...] = (
    *({}, {"reasoning_content": "a"}, {"reasoning": "a"}, {"thinking": Text("a")}, {"thinking": ""}),
    *(
        {"reasoning_content": None, "thinking": "a"},
        {"reasoning_content": "a", "reasoning": "b"},
        {"reasoning": 7},
    ),
)


def test_a_message_is_read_as_by_asking_one_thing_after_the_other():
    for content, calls, reason in itertools.product(CONTENTS, CALLS, REASONS):
        value = {"role": "assistant", "content": content, "tool_calls": calls, **reason, "more": 1}
        for kind in (dict, OrderedDict, UserDict):
            fast, slow = outcome(as_message, kind(value), "m"), outcome(plain_message, kind(value), "m")
            assert fast == slow
            assert type(fast) is type(slow)
            if isinstance(fast, Message):
                assert type(fast.wire) is type(slow.wire)


@pytest.mark.parametrize(
    "value", [None, 7, "role", [], {}, {"role": None}, {"role": 7}, {"role": Text("user")}, UserDict()]
)
def test_what_is_no_message_is_refused_in_the_same_words(value: Any):
    assert outcome(as_message, value, "m") == outcome(plain_message, value, "m")


# The format of a row

OTHER_VALUES = (None, 7, "text", "[1, 2]", [], {}, [1, 2], [[1, 2]], np.arange(3), [{"role": "user"}], True)


def first_that_matches(row: Mapping[str, Any]) -> Format | None:
    return next((format for format in all_formats() if format.matches(row)), None)


def picked(row: Mapping[str, Any]) -> Format | None:
    try:
        return pick_format(row)
    except RecordError:
        return None


def changed_rows(
    row: Mapping[str, Any], other: Mapping[str, Any], dice: random.Random
) -> Iterator[dict[str, Any]]:
    """A row in another order, without a column, with another value in it, and with columns of another row."""
    yield dict(reversed(row.items()))
    for name in row:
        yield {key: value for key, value in row.items() if key != name}
        yield {**row, name: dice.choice(OTHER_VALUES)}
    for name in dice.sample(list(other), min(3, len(other))):
        yield {**row, name: other[name]}


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_the_format_told_by_the_keys_is_the_first_that_matches(log: Path):
    dice = random.Random(log.name)
    others = [next(iter(open_log(other))).value or {} for other in dice.sample(LOGS, 5)]
    for raw in itertools.islice(open_log(log), 3):
        row = raw.value or {}
        for candidate in (row, *itertools.chain(*(changed_rows(row, other, dice) for other in others))):
            assert picked(candidate) is first_that_matches(candidate), candidate


def test_any_key_that_some_format_knows_may_stand_alone_or_with_others():
    names = sorted({key for log in LOGS for raw in open_log(log) for key in raw.value or ()})
    for name, value in one_in(3, itertools.product(names, OTHER_VALUES)):
        assert picked({name: value}) is first_that_matches({name: value})
        row = {name: value, "messages": [{"role": "user"}], "tokens": [1, 2]}
        assert picked(row) is first_that_matches(row)


# Calls

CALL_VALUES = (
    *(None, 7, True, "length", "", [], [3, 4], [-0.5, -0.25], [True, None], np.array([5, 6]), {"type": "stop"}),
    *({"matched": "x"}, {"content": [{"logprob": -1.0}]}, [{"role": "user", "content": "a"}], ["a"]),
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "length"}],
)
CALL_COLUMNS = (
    *("prompt_ids", "input_ids", "completion_ids", "token_ids", "completion_logprobs", "logprobs", "", "mine"),
    *("completion_text", "text", "response", "prompt_text", "prompt", "messages", "finish_reason", "stop_reason"),
    *("is_truncated", "matched_stop", "weight_version", "weight_versions", "routed_experts", "advantages"),
)


def read_call(entry: Mapping[str, Any], sent: tuple[Message, ...] | None) -> Any:
    turn = outcome(lambda: _calls.read_turn(entry, "calls[0]", message_index=1, prompt_messages=sent))
    return repr(turn), *([] if isinstance(turn, str) else [repr(turn.extras), turn.alternatives])


@given(
    st.dictionaries(st.sampled_from(CALL_COLUMNS), st.sampled_from(CALL_VALUES), max_size=6),
    st.sampled_from([None, (), (Message("assistant", {}, "length"),)]),
    st.sampled_from([dict, UserDict]),
)
def test_a_call_is_read_as_by_asking_for_every_key(
    columns: dict[str, Any], sent: tuple[Message, ...] | None, kind: Any
):
    fast = read_call(kind(columns), sent)
    every = _calls._KnownKeys.of(frozenset(CALL_COLUMNS))._replace(ids=-1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_calls._KnownKeys, "of", lambda keys: every)
        assert read_call(kind(columns), sent) == fast


@given(st.lists(st.tuples(st.sampled_from(["user", "Assistant ", "gpt", "odd", "model"]), st.none() | st.text())))
def test_sampled_messages_are_found_in_one_loop(roles: list[tuple[str, str | None]]):
    messages = [Message(role, {}, stated_speaker=speaker) for role, speaker in roles]
    assert sampled_indices(messages) == [at for at, message in enumerate(messages) if message.sampled]


# Training rows


def plain_sentinel(row: TrainingRow) -> float | None:
    if row.logprobs is None or row.loss_mask is None:
        return None
    outside = np.unique(row.logprobs[~row.loss_mask & ~np.isnan(row.logprobs)])
    return None if len(outside) != 1 or -100 < outside[0] < 0 else float(outside[0])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [0.0, 0.0, 0.0, 1.0, -0.5, -100.0, -9999.0, float("nan"), float("inf"), float("-inf")]
            ),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_the_value_of_untrained_tokens_is_the_only_one_they_have(tokens: list[tuple[float, bool]]):
    ids = np.arange(len(tokens), dtype=np.int32)
    mask = "mask", np.array([trained for _, trained in tokens], np.bool_)
    logprobs = "logprobs", np.array([value for value, _ in tokens])
    row = build_training_row(ids, mask=mask, logprobs=logprobs)
    sentinel = plain_sentinel(row)
    built = build_training_row(ids, mask=mask, logprobs=logprobs, sentinel=SHOWN_BY_ROW)
    assert built.sentinel == sentinel
    for column in built.columns:
        assert column.sentinel == (sentinel if column.role is ColumnRole.LOGPROBS else None)
    assert np.array_equal(built.token_ids, row.token_ids)


def plainly_trains_all(mask: Any, prompt: Any, response: Any) -> bool:
    entries = list(mask)
    if len(entries) == len(prompt) + len(response) != len(response):
        if any(entries[: len(prompt)]):
            return False
        entries = entries[len(prompt) :]
    return len(entries) == len(response) and all(entry == 1 for entry in entries)


@given(
    st.lists(st.sampled_from([0, 1, 1, 1]), max_size=7)
    | st.lists(st.sampled_from([0.0, 1.0, 0.5, -100.0]), max_size=7),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from([list, np.array, lambda values: np.array(values, np.bool_), lambda values: [*values, None]]),
)
def test_a_mask_that_trains_all_of_a_response_is_seen(values: list[Any], prompt: int, response: int, kind: Any):
    mask, ids = kind(values), np.zeros(9, np.int32)
    assert _flat._trains_all_of_response(mask, ids[:prompt], ids[:response]) is bool(
        plainly_trains_all(mask, ids[:prompt], ids[:response])
    )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), max_size=4))
def test_a_prompt_is_found_in_front_whether_columns_are_lists_or_arrays(ids: list[int], prompt: list[int]):
    prompts, full = _flat.PROMPT_IDS[0], len(ids)
    length = len(prompt) if prompt and ids[: len(prompt)] == prompt else None
    for ids_kind, prompt_kind in itertools.product((list, np.array), repeat=2):
        row = {"token_ids": ids_kind(ids), prompts: prompt_kind(prompt)}
        assert _flat._prompt_length(row, "token_ids", full) == (length, False)
    for ids_column, nested in ((np.array(ids), [np.array(ids)]), (ids, ["a", None][:full])):
        row = {"token_ids": ids_column, prompts: nested}
        assert _flat._prompt_length(row, "token_ids", full) == (None, False)


@given(
    st.lists(
        st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3) | st.sampled_from([2**31, 2**31 - 1]), max_size=5
    )
)
def test_ids_that_fit_no_vocabulary_are_named_in_lists_and_arrays_alike(ids: list[int]):
    wrong = [(i, value) for i, value in enumerate(ids) if not -(2**31) <= value < 2**31]
    for values in (ids, np.array(ids, np.int64)):
        result = outcome(as_ids, values, "ids")
        if wrong:
            position, value = wrong[0]
            assert result.startswith(f"column 'ids' holds id {value} at position {position}, ")
        else:
            assert result.dtype == np.int32
            assert result.tolist() == ids


@given(st.lists(st.sampled_from([None, 1, 0.5, True, np.float64(2), np.int32(3), "a", {}, [1]]), max_size=6))
def test_a_list_of_numbers_starts_with_four_numbers_or_nulls(values: list[Any]):
    plain = all(value is None or isinstance(value, int | float) for value in values[:4])
    assert is_number_list(values) is is_number_list(tuple(values)) is plain


def test_keys_of_calls_that_no_reader_knows_are_not_remembered() -> None:
    calls = [{"prompt_token_ids": [5], "token_ids": [6], f"note {number}": "x"} for number in range(3)]
    _calls.read_turn(calls[0])
    remembered = _calls._KnownKeys.of.cache_info().currsize
    for call in calls:
        _calls.read_turn(call)
    assert _calls._KnownKeys.of.cache_info().currsize == remembered
