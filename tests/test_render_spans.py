"""Spans by short ways are the spans by long ways: openers, marks, attributes, tools, guesses."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tests.tables import stored
from tests.test_render_fast import RENDERERS, RENDERS, cases, text
from tests.toy import fast_text
from tito_audit.errors import RenderError
from tito_audit.record.message import as_messages
from tito_audit.render.fast.render import NeedsReference
from tito_audit.render.limits import Budget
from tito_audit.render.marks import (
    MarkedText,
    Marking,
    SpanKind,
    _mark_character,
    _Marker,
    mark,
    unmark,
)
from tito_audit.render.renderer import make_renderer
from tito_audit.render.sandbox import ChatEnvironment
from tito_audit.render.spans import render_spans
from tito_audit.render.template import Template

MARKING = Marking(assistant_only=False, tool_calls=True)


# Openers


@pytest.mark.parametrize("name", RENDERERS)
def test_an_opener_that_no_message_decides_is_what_a_generation_prompt_adds_behind_any_messages(name: str) -> None:
    renderer, dice, openers = RENDERERS[name], random.Random(f"{name} openers"), 0
    for _ in range(RENDERS // len(RENDERERS) // 2):
        messages, tools, kwargs, _ = cases(dice)
        variables = renderer.variables(tools, kwargs)
        template = renderer.template(bool(tools))
        opener = template.fixed_generation_prompt(variables)
        try:
            chat, _ = renderer.render_chat(messages, tools, add_generation_prompt=False, template_kwargs=kwargs)
        except RenderError:
            continue
        for count in range(1, len(chat) + 1):
            values = {**variables, "messages": chat[:count]}
            for run in (template.run, template.fast.run if template.fast is not None else template.run):
                try:
                    closed = run({**values, "add_generation_prompt": False})
                    opened = run({**values, "add_generation_prompt": True})
                except (RenderError, NeedsReference):
                    continue
                openers += opener is not None
                assert opener is None or opened == closed + opener
    assert openers or name in ("values", "toy_metaspace", "deepseek-v3"), "no opener of this template is known"


@pytest.mark.parametrize("name", RENDERERS)
def test_spans_by_known_openers_are_those_by_renderings_of_prefixes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, dice = RENDERERS[name], random.Random(f"{name} prefixes")
    for _ in range(RENDERS // len(RENDERERS) // 2):
        messages, tools, kwargs, _ = cases(dice)
        try:
            short = render_spans(renderer, messages, tools, kwargs)
        except RenderError:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(Template, "fixed_generation_prompt", lambda *_: None)
            assert render_spans(renderer, messages, tools, kwargs) == short


LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"


OPENERS = [*stored(__file__, "KNOWN"), *([template, {}, None] for template in stored(__file__, "UNKNOWN"))]


@pytest.mark.parametrize(("template", "kwargs", "wanted"), OPENERS)
def test_an_opener_is_known_where_nothing_but_what_is_given_decides_it(
    template: str, kwargs: dict[str, Any], wanted: str | None
) -> None:
    tokenizer = toy_tokenizer()
    renderer = make_renderer(tokenizer, chat_template=template.replace("LOOP", LOOP))
    assert renderer.template(False).fixed_generation_prompt(renderer.variables((), kwargs)) == wanted


def test_openers_of_other_arguments_are_other_openers() -> None:
    template = LOOP + "{% if add_generation_prompt %}[a]{{ x }}{% endif %}"
    renderer = make_renderer(toy_tokenizer(), chat_template=template)
    for value in (1, True, 1.0, "1", None, 0, -0.0):
        for _ in range(2):
            opener = renderer.template(False).fixed_generation_prompt(renderer.variables((), {"x": value}))
            assert opener == f"[a]{value}"


# Marks


def slow_around(marker: _Marker, text: str, index: int, kind: SpanKind) -> str:
    body = text.strip()
    if not body:
        return text
    at = text.index(body)
    number = len(marker.owners)
    marker.owners.append((index, kind))
    return (
        f"{text[:at]}{_mark_character(2 * number)}{body}{_mark_character(2 * number + 1)}{text[at + len(body) :]}"
    )


def slow_unmark(text: str, owners: list[tuple[int, SpanKind]]) -> tuple[str, list[MarkedText]] | None:
    pieces: list[str] = []
    marks: list[MarkedText] = []
    at = length = 0
    opened: tuple[int, int] | None = None
    numbers = {_mark_character(number): number for number in range(2 * len(owners))}
    for position, character in enumerate(text):
        if character not in numbers:
            continue
        number = numbers[character]
        pieces.append(text[at:position])
        length += position - at
        at = position + 1
        if number % 2 == 0 and opened is None:
            opened = (number, length)
        elif opened is not None and number == opened[0] + 1:
            index, kind = owners[number // 2]
            marks.append(MarkedText(opened[1], length, kind, index))
            opened = None
        else:
            return None
    if opened is not None:
        return None
    return "".join([*pieces, text[at:]]), marks


def test_marks_are_put_inside_the_outer_white_space() -> None:
    dice = random.Random("around")
    fast, slow = _Marker(), _Marker()
    for number in range(3000):
        padded = (
            dice.choice(["", " ", "\n\t", "\x1f", "\u3000", "\x85"])
            + text(dice)
            + dice.choice(["", " \n", "\u2003"])
        )
        want = slow_around(slow, padded, number, SpanKind.CONTENT)
        assert fast.mark_text(padded, number, SpanKind.CONTENT) == want
    assert fast.owners == slow.owners


def test_what_marks_enclose_is_found_in_any_order_and_only_if_the_rest_is_what_was_wanted() -> None:
    dice = random.Random("unmark")
    answers = 0
    for _ in range(4000):
        count = dice.randrange(5)
        owners = [(i, SpanKind.CONTENT) for i in range(count)]
        parts = [
            f"{_mark_character(2 * i)}{dice.choice(['a', 'é世', ''])}{_mark_character(2 * i + 1)}"
            for i in range(count)
        ]
        change = dice.random()
        if change < 0.2:
            dice.shuffle(parts)
        elif change < 0.4 and parts:
            parts[dice.randrange(count)] = dice.choice(
                ["", _mark_character(0), _mark_character(2 * count - 1), "x"]
            )
        elif change < 0.5 and parts:
            parts.append(dice.choice(parts))
        marked = "".join(part + dice.choice(["", "b", "🙂"]) for part in ["", *parts])
        slow = slow_unmark(marked, owners)
        plain = "".join(character for character in marked if character < "\U000f0000")
        assert unmark(marked, owners, plain) == (slow[1] if slow is not None else None)
        assert unmark(marked, owners, plain + "c") is None
        answers += slow is not None
    assert 1000 < answers < 3900


# The sandbox


class Odd(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_attributes_are_those_of_the_sandbox() -> None:
    environment = ChatEnvironment(Budget(1 << 20, 10.0))
    loop = LoopContext(iter([1, 2]), Undefined, None)
    next(loop)
    things: list[Any] = [
        {"role": "x", "items": 1, "__class__": 2, "_a": 3, "pop": 4, "content": None, "ü": 5, 1: 6},
        *({}, Odd(role=1), "text", "", [1], (1,), 1, 1.5, None, True, b"x", loop, Namespace(role=1)),
        Undefined(name="u"),
        *(lambda: None, len, "x".format, type, str, dict, (i for i in ()), np.int64(1), object()),
    ]
    names = {name for thing in things for name in dir(type(thing))} | {"role", "content", "_a", "ü", "", "1"}
    names |= {"gi_frame", "func_code", "mro", "first", "last", "index0", "nextitem"}
    for thing in things:
        for name in sorted(names):
            got, wanted = (
                tried(environment, lookup, thing, name)
                for lookup in (ChatEnvironment, ImmutableSandboxedEnvironment)
            )
            assert got == wanted, (type(thing), name)


def tried(environment: ChatEnvironment, lookup: type, thing: Any, name: str) -> object:
    """What `thing.name` is in a template: shown so that two of them can be compared."""
    try:
        value = lookup.getattr(environment, thing, name)  # type: ignore[attr-defined]
    except Exception as error:
        return type(error), str(error)
    if isinstance(value, Undefined):
        return "undefined", value._undefined_name, value._undefined_hint, value._undefined_exception
    if callable(value):
        return type(value), getattr(value, "__name__", None), getattr(value, "__qualname__", None)
    return type(value), re.sub(" at 0x[0-9a-f]+", "", repr(value))  # each lookup makes an object of its own


# Tools and guesses


def test_tools_that_are_equal_and_written_otherwise_are_told_apart() -> None:
    renderer = make_renderer(toy_tokenizer(), chat_template="{{ tools | tojson }}{{ messages | length }}")
    messages = as_messages([{"role": "user", "content": "x"}], "m")
    for value in [1, True, 1.0, 0.0, -0.0, False] * 2:
        tools = ({"type": "function", "function": {"name": "f", "default": value}},)
        for write in (renderer.render, partial(fast_text, renderer)):
            written = write(messages, tools, add_generation_prompt=False)
            assert written is None or f'"default": {json.dumps(value)}' in written
    first = {"type": "function", "function": {"name": "f", "a": 1, "b": 2}}
    other = {"type": "function", "function": {"name": "f", "b": 2, "a": 1}}
    for tool in (first, other):
        assert renderer.render(messages, (tool,), add_generation_prompt=False).startswith(
            '[{"type": "function", "function": {"name": "f", ' + ('"a"' if tool is first else '"b"')
        )


def test_marked_messages_hold_the_marks_of_every_text_that_is_not_blank() -> None:
    dice = random.Random("mark")
    for _ in range(500):
        messages, *_ = cases(dice)
        chat = [dict(message.wire) for message in messages]
        answers = {i for i, message in enumerate(chat) if message["role"] == "assistant"}
        marked, owners = mark(chat, MARKING, answers)
        shown = str(marked)
        assert all(
            _mark_character(2 * i) in shown or f"\\U{ord(_mark_character(2 * i)):08x}" in shown
            for i in range(len(owners))
        )


def toy_tokenizer() -> Any:
    from tests import toy

    return toy.toy_tokenizer()
