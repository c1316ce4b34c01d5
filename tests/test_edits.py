"""Edits: found between rows, made to values, and made to JSON text without touching the rest."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from tito_audit.record.edits import ABSENT, Edit, apply_edits, edits_between
from tito_audit.record.json_text import rewrite_json, rewrite_json_string

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([0, 0.0, 1, 1.0, -0.5, 1e-05, 2**70])
    | st.text(st.characters(), max_size=6)
)
KEYS = st.sampled_from(["a", "b", "é", "\ud800", 'q"', "", "\n"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(SCALARS, max_size=6) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=16,
)
STYLES = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, None, 0, 1, 2, "\t"]),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : "), (",  ", ":")]),
        "ensure_ascii": st.booleans(),
    }
)


def alike(a: Any, b: Any) -> bool:
    """Equal as JSON values, where NaN is NaN and True is not 1."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every path in a value, its own first."""
    out = [path]
    if isinstance(value, dict):
        for key in value:
            out += paths(value[key], (*path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            out += paths(entry, (*path, index))
    return out


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


@st.composite
def edited(draw: st.DrawFn) -> tuple[Any, list[Edit]]:
    """A value and edits that can be made to it one after another."""
    value = now = draw(VALUES)
    edits = []
    for _ in range(draw(st.integers(0, 4))):
        path = draw(st.sampled_from(paths(now)))
        here = at(now, path)
        if isinstance(here, dict) and draw(st.booleans()):
            path = (*path, draw(KEYS))
        new = draw(VALUES)
        if isinstance(here, list) and draw(st.booleans()):
            # Near to what was there, as repairs are.
            cut = draw(st.integers(0, len(here)))
            new = [*here[:cut], *draw(st.lists(SCALARS, max_size=2)), *here[draw(st.integers(cut, len(here))) :]]
        if path and isinstance(path[-1], str) and draw(st.integers(0, 3)) == 0:
            new = ABSENT
        edits.append(Edit(path, new))
        now = apply_edits(now, edits[-1:])
    return value, edits


@settings(max_examples=examples(60, 400), deadline=None)
@given(edited(), STYLES, st.booleans())
def test_edited_text_holds_the_edited_value(case, style, windows):
    value, edits = case
    text = json.dumps(value, **style)
    if windows:
        text = text.replace("\n", "\r\n")
    value = json.loads(text)
    rewritten = rewrite_json(text, edits)
    assert alike(json.loads(rewritten), apply_edits(value, edits))
    assert rewrite_json(text, []) is text
    if style["ensure_ascii"]:
        assert rewritten.isascii()


@settings(max_examples=examples(50, 300), deadline=None)
@given(VALUES, VALUES, STYLES)
def test_the_edits_between_two_values_lead_from_one_to_the_other(old, new, style):
    assert alike(apply_edits(old, list(edits_between(old, new))), new)
    assert alike(json.loads(rewrite_json_string(json.dumps(old, **style), old, new)), new)
    assert not list(edits_between(old, json.loads(json.dumps(old))))


@settings(max_examples=examples(50, 300), deadline=None)
@given(VALUES, STYLES, st.data())
def test_one_changed_value_leaves_all_text_around_it(value, style, data):
    text = json.dumps(value, **style)
    leaves = [path for path in paths(value) if not isinstance(at(value, path), dict | list)]
    if not leaves:
        return
    path = data.draw(st.sampled_from(leaves))
    marked = apply_edits(value, [Edit(path, "here is the mark")])
    before, after = json.dumps(marked, **style).split('"here is the mark"')
    rewritten = rewrite_json(text, [Edit(path, 123456)])
    assert rewritten == f"{before}123456{after}"


@settings(max_examples=examples(40, 200), deadline=None)
@given(edited(), STYLES)
def test_edits_share_what_they_do_not_touch(case, style):
    value, edits = case
    new = apply_edits(value, edits)
    for path in paths(value):
        touched = any(edit.path[: len(path)] == path or path[: len(edit.path)] == edit.path for edit in edits)
        if not touched:
            assert at(new, path) is at(value, path)


def test_kinds_of_values_are_told_apart():
    for old, new in ((1, 1.0), (1, True), (0, None), ([1], [1.0]), ([1], np.array([1])), ({"a": 1}, {"a": True})):
        assert list(edits_between(old, new)), (old, new)
    for same in (float("nan"), [float("nan"), None], np.array([1.0, np.nan]), np.array([1, 2])):
        copy = same.copy() if hasattr(same, "copy") else float("nan")
        assert not list(edits_between({"a": same}, {"a": copy}))


# Spelling


@pytest.mark.parametrize(
    ("text", "edits", "expected"),
    [
        # Numbers that both lists hold keep their spelling, new ones are as Python writes them.
        ("[-0.5000, 0, 1e-05,2.50]", [Edit((), [0.0, 2.5, -0.5, 0.1])], "[0, 2.50, -0.5000, 0.1]"),
        ("[1, 2, 3]", [Edit((), [1, 9, 2, 3])], "[1, 9, 2, 3]"),
        ("[1,2,3]", [Edit((), [4, 5])], "[4,5]"),
        ("[ 1,\n  2,\n  3 ]", [Edit((), [1, 2, 7, 3])], "[ 1,\n  2,\n  7,\n  3 ]"),
        ("[1, 0]", [Edit((), [True, False])], "[true, false]"),
        ("[1, 2]", [Edit((), [1.0, 2.5])], "[1.0, 2.5]"),
        ("[0.0, 0.00, 0.000]", [Edit((), [0.5, 0.0, 0.0])], "[0.5, 0.00, 0.000]"),
        # What Python writes beside JSON, and numbers that no machine word holds.
        (
            "[NaN, -Infinity, null]",
            [Edit((), [None, float("nan"), float("-inf"), 1])],
            "[null, NaN, -Infinity, 1]",
        ),
        ('{"a": NaN, "b": 1e999}', [Edit(("c",), None)], '{"a": NaN, "b": 1e999, "c": null}'),
        (f"[{2**70}, 1]", [Edit((), [2**70, 2])], f"[{2**70}, 2]"),
        (f"[{2**70}, 1]", [Edit((), [float(2**70), 2])], f"[{2**70}, 2]"),
        ("[1, 2]", [Edit((), np.array([1, 2, 3], np.int32))], "[1, 2, 3]"),
        ("[1.5]", [Edit((), np.array([1.5, 0.25], np.float32))], "[1.5, 0.25]"),
        # Keys: repeated, escaped, new, gone.
        ('{"a": 1, "a": 2}', [Edit(("a",), 3)], '{"a": 1, "a": 3}'),
        ('{"a": 1, "b": 0, "a": 2}', [Edit(("a",), ABSENT)], '{"b": 0}'),
        ('{"\\u0061" : 1}', [Edit(("a",), 2)], '{"\\u0061" : 2}'),
        ('{"a":1,"b":2}', [Edit(("a",), ABSENT)], '{"b":2}'),
        ('{"a":1 , "b":2}', [Edit(("b",), ABSENT)], '{"a":1}'),
        ('{"a": 1, "b": 2, "c": 3}', [Edit(("b",), ABSENT)], '{"a": 1, "c": 3}'),
        ('{ "a": 1 }', [Edit(("a",), ABSENT)], "{}"),
        ('{ "a": 1 }', [Edit(("a",), ABSENT), Edit(("b",), 2)], '{ "b": 2 }'),
        ('{"a": 1, "b": 2}', [Edit(("b",), ABSENT), Edit(("c",), 3)], '{"a": 1, "c": 3}'),
        ("{}", [Edit(("a",), {"b": [1, 2]})], '{"a": {"b": [1, 2]}}'),
        ('{"a":{}}', [Edit(("a", "b"), [1, 2])], '{"a":{"b":[1,2]}}'),
        ('{\n  "a": 1\n}\n', [Edit(("b",), [1])], '{\n  "a": 1,\n  "b": [\n    1\n  ]\n}\n'),
        ('{\r\n\t"a": {}\r\n}', [Edit(("a", "b"), 1)], '{\r\n\t"a": {\r\n\t\t"b": 1\r\n\t}\r\n}'),
        # Text: escaped where the rest is.
        ('{"a": "\\u00e9"}', [Edit(("b",), "é")], '{"a": "\\u00e9", "b": "\\u00e9"}'),
        ('{"a": "é"}', [Edit(("b",), "è\ud83d")], '{"a": "é", "b": "è\\ud83d"}'),
        ('{"a": "\\/\\ud83d", "b": 1}', [Edit(("b",), 2)], '{"a": "\\/\\ud83d", "b": 2}'),
        # A list of objects that grew keeps the text of those it had.
        (
            '[{"a":1.50}, {"b":2.50,"c":0}]',
            [Edit((), [{"a": 1.5}, {"b": 9, "c": 0}, {"b": 2.5, "c": 0}])],
            '[{"a":1.50}, {"b":9,"c":0}, {"b":2.50,"c":0}]',
        ),
        # Edits see what those before them left.
        ('{"a": [1]}', [Edit(("a",), [{}, 2]), Edit(("a", 0, "b"), 3)], '{"a": [{"b": 3}, 2]}'),
    ],
)
def test_text_keeps_its_spelling(text, edits, expected):
    assert rewrite_json(text, edits) == expected


def test_a_path_that_leads_to_nothing_is_refused():
    for text, path in (('{"a": 1}', ("b", "c")), ("[1]", (1,)), ('{"a": 1}', ("a", "b")), ('["a"]', ("a",))):
        with pytest.raises(ValueError, match="has"):
            rewrite_json(text, [Edit(path, 1)])


def test_deep_and_long_values_beside_an_edit_are_passed_by():
    deep = "[" * 5000 + "]" * 5000
    long = "9" * 6000
    text = f'{{"deep": {deep}, "long": {long}, "a": 1}}'
    assert rewrite_json(text, [Edit(("a",), 2)]) == text.replace('"a": 1', '"a": 2')


def test_what_orjson_and_python_read_is_rewritten_alike():
    text = '{"ids":[1,2,3],"logprobs":[-0.1,0,-1e-7],"text":"a\\"]}"}'
    row = orjson.loads(text)
    new = {**row, "ids": [1, 9, 3], "tito_audit": {"version": 1}}
    expected = text.replace("1,2,3", "1,9,3")[:-1] + ',"tito_audit":{"version":1}}'
    assert rewrite_json_string(text, row, new) == expected
    assert re.sub(r"\s", "", rewrite_json_string(json.dumps(row), json.loads(text), new)) == re.sub(
        r"\s", "", json.dumps(new)
    )
