"""Rows of every format with something in them broken: read, or refused in words, and as no other format.

`TITO_AUDIT_MUTANTS=300 pytest tests/test_format_properties.py` breaks every row 300 times.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.forms import as_table, plain
from tests.tables import stored
from tests.test_formats import check, fixture_rows
from tests.tiers import examples
from tito_audit import Settings, scan_rollouts
from tito_audit.errors import RecordError
from tito_audit.format import Format
from tito_audit.formats import COMPLETION_IDS, all_formats, matched_keys, pick_format
from tito_audit.formats.llamafactory import _without_targets
from tito_audit.record.column import Column
from tito_audit.record.repaired import unrepaired
from tito_audit.record.rollout import Place, Rollout
from tito_audit.repairs import all_repairs
from tito_audit.rules import all_rules
from tito_audit.run.auditor import Auditor, audit_rollout

PLACE = Place("log.jsonl", 0)
MUTANTS = int(os.environ.get("TITO_AUDIT_MUTANTS") or examples(2, 24))
"""How often each row is broken, as JSON or as a table gives it."""
FORMATS = {form.name: form for form in all_formats()}
ROWS = {name: [plain(row) for row in fixture_rows(name)] for name in FORMATS}
ENGINE = Auditor(None, None, all_rules(), frozenset(rule.code for rule in all_rules()), all_repairs)

Path_ = tuple[str | int, ...]

SAME_SHAPE = {**stored(__file__, "SAME_SHAPE"), "generic": [*FORMATS]}  # its columns are those of others
ALSO_TELLING = stored(__file__, "ALSO_TELLING")


# Breaking a row


def nested(depth: int, wrap: Callable[[Any], Any], inside: Any) -> Any:
    for _ in range(depth):
        inside = wrap(inside)
    return inside


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**31, 10**30, float("nan"), float("inf"), "", "12", "[1", '{"a": [1, 2]}', "\ud800",
    [], [0], [None], [None, 1], [-1], [2**31], [10**30, 1], [float("nan"), 1.0], [1, 2, 3], ["1", "2"], ["a"],
    [[]], [[1, 2], [3]], [[[1]]], [{}], {}, {"content": [1]}, {"role": "user", "content": 7},
    nested(40, lambda inner: [inner], 0), nested(40, lambda inner: {"nodes": inner}, {"token_ids": [1]}),
)  # fmt: skip


def changed_at(value: Any, path: Path_, change: Callable[[Any], Any]) -> Any:
    """A value with something else at a path; everything beside the path is shared."""
    if not path:
        return change(value)
    key, *rest = path
    inner = changed_at(value[key], tuple(rest), change)
    if isinstance(value, dict):
        return {**value, key: inner}
    return [*value[:key], inner, *value[key + 1 :]]


def without(value: Any, key: Any) -> Any:
    if isinstance(value, dict):
        return {name: entry for name, entry in value.items() if name != key}
    return [*value[:key], *value[key + 1 :]]


def as_object(value: Any) -> Any:
    return {str(i): entry for i, entry in enumerate(value)} if isinstance(value, list) else {"0": value}


def unwrapped(value: Any) -> Any:
    if isinstance(value, dict | list) and value:
        return next(iter(value.values())) if isinstance(value, dict) else value[0]
    return [value]


def as_text(value: Any) -> Any:
    return [str(entry) for entry in value] if isinstance(value, list) else json.dumps(value)


def huge(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return [value, value]
    return value * 10**18 if value == value else -value


CHANGES: tuple[Callable[[Any], Any], ...] = (lambda value: [value], as_object, unwrapped, as_text, huge)


def keys_in(value: Any) -> Iterator[str]:
    """Every key of an object and of what is in it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from keys_in(inner)
    elif isinstance(value, list):
        for inner in value[:3]:
            yield from keys_in(inner)


@st.composite
def paths(draw: st.DrawFn, row: Any) -> Path_:
    """A place in a row, any key as likely as its neighbours."""
    path: list[str | int] = []
    value = row
    while True:
        keys = list(value) if isinstance(value, dict) else sorted({0, len(value) // 2, len(value) - 1})
        path.append(draw(st.sampled_from(keys)))
        value = value[path[-1]]
        if not isinstance(value, dict | list) or not value or not draw(st.integers(0, 2)):
            return tuple(path)


@st.composite
def broken(draw: st.DrawFn, row: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A row with one to three things broken, and the keys that stand over, at or in what was broken."""
    touched: set[str] = set()
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        if not row:
            break
        path = draw(paths(row))
        above, key = path[:-1], path[-1]
        value = row
        for step in path:
            value = value[step]  # type: ignore[index]
        touched |= {str(step) for step in path} | set(keys_in(value))
        how = draw(st.sampled_from(("drop", "value", "value", "value", "change", "change", "twice", "beside")))
        if how == "drop":
            row = changed_at(row, above, lambda outer, key=key: without(outer, key))
        elif how == "value":
            other = draw(st.sampled_from(VALUES))
            row = changed_at(row, path, lambda _, other=other: other)
        elif how == "change":
            row = changed_at(row, path, draw(st.sampled_from(CHANGES)))
        elif how == "twice" and isinstance(value, list):
            # One entry more that says what another says: its id, its number, its place.
            at = draw(st.integers(0, max(len(value) - 1, 0)))
            row = changed_at(row, path, lambda old, at=at: [*old[: at + 1], *old[at:]])
        elif isinstance(key, str):
            size = len(value) if isinstance(value, list) else 2
            extra = [draw(st.sampled_from((0, 0.5, None, "x")))] * size
            row = changed_at(row, above, lambda outer, extra=extra: {**outer, "one_more_column": extra})
    return row, touched


def in_table(value: Any) -> Any:
    """The row as a table gives it, as far as a table could hold it."""
    if isinstance(value, dict):
        return {name: in_table(inner) for name, inner in value.items()}
    if isinstance(value, list):
        if all(type(entry) is not int or abs(entry) < 2**63 for entry in value):
            return as_table(value) if value and not isinstance(value[0], dict | list) else [*map(in_table, value)]
        return list(value)
    return value


# What holds for every broken row


def says_something(error: RecordError) -> None:
    """A message is a sentence about the log, not about the program."""
    text = str(error)
    assert len(text.split()) > 3, text
    assert not re.search(r"0x[0-9a-f]{6}|np\.|NoneType|ndarray|Traceback|not subscriptable", text), text


def told_from(row: dict[str, Any]) -> Format | None:
    try:
        return pick_format(row)
    except RecordError as error:
        says_something(error)
        return None


def telling_keys(form: Format) -> set[str]:
    """The keys that tell a format, as its signature names them."""
    named = re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`([^`]+)`", form.signature.text)))
    return {*named, *ALSO_TELLING.get(form.name, ()), *(COMPLETION_IDS if form.name == "generic" else ())}


def holds_ids(form: Format, row: dict[str, Any]) -> bool:
    return any(
        rollout.training_row is not None or any(turn.completion_ids is not None for turn in rollout.turns)
        for rollout in form.read(row, PLACE)
    )


def is_read_or_refused(form: Format, row: dict[str, Any]) -> None:
    """The row is read, audited and written again as it is, or refused in words."""
    try:
        rollouts = form.read(row, PLACE)
    except RecordError as error:
        says_something(error)
        return
    matched_keys(form, row)
    for rollout in rollouts:
        check(rollout)
        assert rollout.format == form.name
        audit_rollout(rollout, ENGINE)
    says_where_its_columns_are(form, row, rollouts)
    if rollouts:
        (new,) = form.update(row, [unrepaired(rollout) for rollout in form.read(row, PLACE)])
        assert new is row


def says_where_its_columns_are(form: Format, row: dict[str, Any], rollouts: Sequence[Rollout]) -> None:
    """At the place of each column there are its numbers, with what pads them; in order, where it has several."""
    # Its labels of tokens that the row does not hold are no part of the mask.
    row = _without_targets(row) if form.name == "llamafactory" else row
    for own, rollout in zip(form.sources(row, rollouts), rollouts, strict=False):
        # A row that is made of the masks of its calls has no place of its own.
        if rollout.training_row is not None and (own.columns or not own.calls):
            for column in rollout.training_row.columns:
                assert_among(column, [at(row, source.path) for source in own.columns.get(column.name, ())])
        for call, turn in zip(own.calls, rollout.turns, strict=False):
            for source in (*call.prompts, *call.logprobs):
                assert at(row, source.path) is not None, source
            for column in turn.columns:
                places = [source.path for source in call.columns.get(column.name, ())]
                places += [] if call.entry is None else [(*call.entry, column.name)]
                for place in places:
                    assert_among(column, [at(row, place)])


def at(value: Any, path: Path_) -> Any:
    """The value at a path, also inside of text that is JSON."""
    for step in path:
        value = json.loads(value) if isinstance(value, str) else value
        value = value[step]
    return value


def assert_among(column: Column, places: Sequence[Any]) -> None:
    """A column of numbers is in the list at its place; of several, in each, or their lists are in it in order."""
    if column.values.dtype.kind not in "iufb" or column.name == "action_ranges":
        return  # no numbers, or the ends of what the mask trains
    parts = [plain_numbers(value) for value in places]
    if None in parts:
        return  # logprobs with more beside them
    wanted = column.values.astype(np.float64).tolist()
    if parts and all(starts_at(wanted, part or []) is not None for part in parts):
        return  # padded, or whole, at each place
    done = 0
    for part in parts:
        start = starts_at(part or [], wanted[done:])
        assert start is not None, (column.name, wanted, parts)
        done += start + len(part or ())
    assert any(parts) or not wanted, column.name


def plain_numbers(value: Any) -> list[float] | None:
    """The numbers of a list, NaN for what is none, out of a tensor or a list of one; None when it holds more."""
    value = value["data"] if isinstance(value, dict) and "data" in value else () if value is None else value
    lists = list | np.ndarray
    while isinstance(value, lists) and len(value) == 1 and isinstance(value[0], lists) and len(value[0]):
        value = value[0]
    if isinstance(value, dict) or any(isinstance(entry, list | dict | np.ndarray) for entry in value):
        return None
    return [float(entry) if isinstance(entry, int | float | np.generic) else float("nan") for entry in value]


def starts_at(part: Sequence[float], whole: Sequence[float]) -> int | None:
    """Where a part begins in a whole; None when it is not in it."""
    size = len(part)
    starts = (at for at in range(len(whole) - size + 1) if repr(whole[at : at + size]) == repr(part))
    return next(starts, None)


def lists_of_ids(value: Any) -> bool:
    """Whether a list of several whole numbers is anywhere in a value."""
    if isinstance(value, dict):
        return any(map(lists_of_ids, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iu" and len(value) > 1
    if not isinstance(value, list) or not value:
        return False
    return (all(type(entry) is int for entry in value[:4]) and len(value) > 1) or any(map(lists_of_ids, value))


def mutants(name: str) -> settings:
    return settings(
        max_examples=MUTANTS * len(ROWS[name]),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_row_is_read_or_refused_and_never_taken_for_another_format(name: str) -> None:
    form = FORMATS[name]

    @mutants(name)
    @given(st.data(), st.sampled_from(ROWS[name]), st.booleans())
    def holds(data: st.DataObject, row: dict[str, Any], table: bool) -> None:
        mutant, touched = data.draw(broken(row))
        if table:
            mutant = in_table(mutant)
        for other in FORMATS.values():
            assert other.matches(mutant) in (True, False)
        reader = told_from(mutant)
        if reader is None:
            # Rows without ids are told by more keys than those that hold what is to be audited.
            assert touched & telling_keys(form) or not holds_ids(form, row)
        elif reader is not form:
            only_text = reader.name == "text_only" and not holds_ids(form, row)
            assert only_text or touched & telling_keys(form), f"{reader.name}, though no telling key is broken"
            last = LAST if not lists_of_ids(mutant) else {"generic"}
            assert reader.name in {*last, *SAME_SHAPE.get(name, ())}, reader.name
        if reader is not None:
            is_read_or_refused(reader, mutant)

    holds()


# Rows as they are


LAST = {"generic", "text_only"}
"""Asked behind all others: any columns, and text in rows without a list of ids."""
OVERLAPS = stored(__file__, "OVERLAPS")


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_taken_by_its_own_format_first_and_by_no_other_but_those_known(name: str) -> None:
    others: set[str] = set()
    for row in ROWS[name]:
        takers = [form.name for form in all_formats() if form.matches(row)]
        assert takers[0] == name, row.get("id")
        others |= set(takers[1:])
    assert others - LAST == set(OVERLAPS.get(name, ()))


class Tokens(list[Any]):
    """A list with an entry a token, of which a look at the first few is all that anybody takes."""

    def walked(self, *_: Any) -> Any:
        raise AssertionError("a list of tokens was walked")

    __iter__ = __contains__ = __reversed__ = __eq__ = count = index = walked

    def __getitem__(self, key: Any) -> Any:
        assert isinstance(key, int) or len(range(*key.indices(len(self)))) <= 8, "a list of tokens was copied"
        return list.__getitem__(self, key)


def guarded(value: Any) -> Any:
    """The row with its long lists of numbers, and of lists or facts a token, guarded."""
    if isinstance(value, dict):
        return {name: guarded(inner) for name, inner in value.items()}
    if not isinstance(value, list):
        return value
    entries = [guarded(entry) for entry in value]
    of_tokens = len(value) > 8 and not any(isinstance(entry, dict) and "logprob" not in entry for entry in value)
    return Tokens(entries) if of_tokens else entries


def test_the_guard_sees_a_list_that_is_walked() -> None:
    row = guarded({"token_ids": list(range(9)), "short": [1], "messages": [{"role": "user"}] * 9})
    assert (type(row["token_ids"]), type(row["short"]), type(row["messages"])) == (Tokens, list, list)
    assert row["token_ids"][:4] == [0, 1, 2, 3]
    for walk in (sum, list, set, lambda ids: 1 in ids, lambda ids: ids == [1], lambda ids: ids[:]):
        with pytest.raises(AssertionError, match="a list of tokens was"):
            walk(row["token_ids"])


@pytest.mark.parametrize("name", FORMATS)
def test_telling_a_row_never_walks_its_tokens(name: str) -> None:
    for row in ROWS[name]:
        watched = guarded(row)
        for form in FORMATS.values():
            assert form.matches(watched) == form.matches(row)


def test_a_file_of_all_formats_is_read_row_by_row_and_counted_by_format(tmp_path: Path) -> None:
    log = tmp_path / "mixed.jsonl"
    log.write_text("".join(json.dumps(rows[0]) + "\n" for rows in ROWS.values()), encoding="utf-8")
    scan = scan_rollouts(log, Settings())
    results = list(scan)
    assert all(result.rollout is not None or result.of_log for result in results)
    rollouts = {name: len(form.read(ROWS[name][0], PLACE)) for name, form in FORMATS.items()}
    assert scan.summary.formats == rollouts
    counts = scan.summary.taken[str(log)]
    assert {name: (seen.first_row, seen.rows) for name, seen in counts.items()} == {
        name: (number, 1) for number, name in enumerate(ROWS)
    }
    assert all(seen.told_by for seen in counts.values())
    (notice,) = [line for line in scan.summary.notices if f"{log} holds rows" in line]
    assert f"{log} holds rows of {len(FORMATS)} formats, each read as its own" in notice


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("miles_session", ("records",)),
        ("nemo_gym", ("response", "output")),
        ("verifiers_results", ("trajectory",)),
    ],
)
def test_of_two_calls_with_one_message_the_later_wrote_it(name: str, path: Path_) -> None:
    form, seen = FORMATS[name], 0
    for row in ROWS[name]:
        rollout, calls = form.read(row, PLACE)[0], row
        for step in path:
            calls = calls.get(step, {})  # type: ignore[arg-type]
        indices = [turn.message_index for turn in rollout.turns]
        if not len(indices) == len(calls or ()) > 1 or None in indices:
            continue
        seen += 1
        (again,) = form.read(changed_at(row, path, lambda old: [old[0], *old]), PLACE)
        check(again)
        first, *others = again.turns
        assert first.message_index is None
        assert first.prompt_messages == rollout.messages[: indices[0]]
        assert [turn.message_index for turn in others] == indices
    assert seen
