"""What is written with a scaffold is what the template writes, whatever the messages say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from tests import toy
from tests.test_prompt_starts import END, FAR, NEAR, OPENER, PLAIN, REAL, START, TOKENIZERS
from tests.tiers import examples, some
from tito_audit.errors import SetupError
from tito_audit.record.message import as_messages
from tito_audit.render import scaffolds as room
from tito_audit.render.renderer import ChatForms, Renderer, make_renderer
from tito_audit.render.scaffolds import MessageShapes, find_scaffolds
from tito_audit.render.template import Template
from tito_audit.tokens.load import load_tokenizer

THINKING = (
    "{% if '</think>' in m.content %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set rest = m.content.split('</think>')[-1] %}{% if loop.last %}<think>{{ thought.strip('\n') }}</think>"
    "{% endif %}{{ rest.lstrip('\n') }}{% else %}{{ m.content | trim }}{% endif %}"
)


def said_as(text: str, before: str = "") -> str:
    return START + before + "<|im_start|>{{ m.role }}\n" + text + "<|im_end|>\n" + END + OPENER


WRITTEN = {
    "trimmed": said_as("{{ m.content | trim }}"),
    "reasoning moved": said_as(THINKING),
    "reasoning of its own": said_as("{{ m.reasoning_content or 'none' }}\n{{ m.content }}"),
    "twice": said_as("{{ m.content }} {{ m.content.rstrip() }}"),
    "tool calls": said_as(
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}"
    ),
    "as JSON": said_as("{{ m.content | tojson }}"),
    "the whole message as JSON": said_as("{{ m | tojson }}"),
    "tags taken out": said_as("{{ m.content.replace('<b>', '').replace('</b>', '!') }}"),
    "special words": said_as("{% if m.content == 'Hi' %}hello{% else %}{{ m.content }}{% endif %}"),
    "special words, trimmed": said_as(
        "{% if m.content | trim == 'Hi' %}hello{% else %}{{ m.content }}{% endif %}"
    ),
}
"""Templates that have scaffolds."""
CHANGED = {
    "upper case": said_as("{{ m.content | upper }}"),
    "spaces": said_as("{{ m.content.replace(' ', '_') }}"),
    "first letter": said_as("{{ m.content[0] }}"),
    "letter by letter": said_as("{% for c in m.content %}{{ '?' if c == 'x' else c }}{% endfor %}"),
    "cut": said_as("{{ m.content[:5] }}"),
    "counted": said_as("{{ m.content | length }}"),
    "ASCII": said_as("{{ m.content | tojson(ensure_ascii=true) }}"),
    "the clock": said_as("{{ m.content }}{{ strftime_now('%H %M %S %f') }}"),
    "long ones": said_as("{% if m.content | length > 12 %}long {% endif %}{{ m.content }}"),
    "refused": said_as("{{ m.content }}", "{% if 'no' in m.content %}{{ raise_exception('no') }}{% endif %}"),
}
"""Templates of which some texts or all have none, or another one."""
WORDS = [
    "Hi",
    "x",
    "What now?",
    'a "quoted" \\ line\n\nand more',
    "caf\u00e9 \u4e2d\u6587",
    "</th",
    "ink>",
    "<",
    "no",
]
WORDS += [
    "<b>bold</b>",
    "{{ m.content }} %s {% raw %}",
    "<|im_end|>",
    "user",
    "system",
    "A " * 30,
    "it's <i>",
    "1",
    "a<b>c",
]
WORDS += ["\ud800 half", "\x1c", "z\x1d", "\u00a0", "\u00a4Zq7x0w", "<think", "\U000f0000"]
PATTERNS = [
    "{}",
    "{}",
    "{}",
    " {}\n",
    "<think>\n{}\n</think>\n\n{}",
    "{}</think>",
    "<tool_response>\n{}\n</tool_response>",
]
PATTERNS += ["", " \n", "{}<think>{}", "<think>{}</think>{}</think>{}", "\n\n{}", "</think></think>{} "]


def message(dice: random.Random, role: str) -> dict[str, Any]:
    """A message whose words are left open."""
    logged: dict[str, Any] = {"role": role, "content": dice.choice(PATTERNS)}
    kind = dice.random()
    if kind < 0.05:
        logged["content"] = None
    elif kind < 0.1:
        logged["content"] = [{"type": "text", "text": "{}"}]
    elif kind < 0.15:
        logged = dict(reversed(logged.items()))
    if role == "assistant" and dice.random() < 0.2:
        logged["reasoning_content"] = dice.choice(PATTERNS)
    if role == "assistant" and dice.random() < 0.2:
        arguments = dice.choice(({}, {"a": "{}"}, {"a": "{}", "n": dice.choice((0, 3, 3.0, True))}))
        logged["tool_calls"] = [{"type": "function", "function": {"name": "run", "arguments": arguments}}]
    if role == "tool":
        logged |= {"tool_call_id": "{}", "name": "run"}
    return logged


def filled(value: Any, dice: random.Random) -> Any:
    """A value with words in its texts."""
    if isinstance(value, str):
        return "".join(part + dice.choice(WORDS) for part in value.split("{}")[:-1]) + value.split("{}")[-1]
    if isinstance(value, dict):
        return {key: inner if key == "role" else filled(inner, dice) for key, inner in value.items()}
    return [filled(inner, dice) for inner in value] if isinstance(value, list) else value


def conversations(dice: random.Random) -> list[list[dict[str, Any]]]:
    """Conversations of which several have the same shape."""
    roles = ["user", "assistant"] * dice.randrange(1, 3)
    if dice.random() < 0.3:
        roles = ["system", *roles]
    if dice.random() < 0.3:
        roles += ["tool"]
    shape = [message(dice, role) for role in roles[: dice.randrange(1, len(roles) + 1)]]
    return [filled(shape, dice) for _ in range(6)]


def answered(renderer: Renderer, dice: random.Random, rounds: int) -> int:
    """How many texts scaffolds write; each has to be what the reference environment writes."""
    parts = find_scaffolds(renderer, False)
    if parts is None:
        return 0
    count = 0
    for _ in range(rounds):
        kwargs = dice.choice(({}, {"enable_thinking": False}))
        variables, opens = parts.inputs(renderer.variables((), kwargs)), dice.random() < 0.5
        assert variables is not None
        for logged in conversations(dice):
            messages = as_messages(logged, "messages")
            written = parts.render(messages, variables, opens, ChatForms())
            if written is None:
                continue
            text, scaffold = written
            how: dict[str, Any] = {"add_generation_prompt": opens, "template_kwargs": kwargs}
            assert toy.fast_text(renderer, messages, **how) in (text, None), (logged, opens, kwargs)
            if parts.is_exact(scaffold, messages, variables, opens, ChatForms()):
                count += 1
                assert text == renderer.render(messages, **how), (logged, opens, kwargs)
    return count


@pytest.mark.parametrize("name", [*WRITTEN, *CHANGED, *NEAR, *FAR])
@pytest.mark.parametrize("seed", range(2))
def test_a_scaffold_writes_what_the_template_writes(name: str, seed: int) -> None:
    source = (WRITTEN | CHANGED | NEAR | FAR)[name]
    count = answered(
        make_renderer(toy.toy_tokenizer(), chat_template=source), random.Random(seed), examples(25, 150)
    )
    assert count or name not in WRITTEN


@pytest.mark.skipif(not REAL, reason="no real tokenizers beside the checkout")
@pytest.mark.parametrize("name", some(REAL, 2))
def test_of_real_templates_as_well(name: str) -> None:
    try:
        renderer = make_renderer(load_tokenizer(str(TOKENIZERS / name)))
    except SetupError:
        pytest.skip("it has no template")
    assert answered(renderer, random.Random(name), examples(40, 300))


def texts(renderer: Renderer, *words: str) -> list[str | None]:
    """What scaffolds write for a question of each of these words."""
    parts = find_scaffolds(renderer, False)
    variables = parts.inputs(renderer.variables((), {})) if parts is not None else None
    assert parts is not None
    assert variables is not None
    out = []
    for word in words:
        messages = as_messages([{"role": "user", "content": word}], "messages")
        written = parts.render(messages, variables, True, ChatForms())
        out.append(None if written is None else written[0])
    return out


def test_the_second_conversation_of_a_shape_gives_the_scaffold() -> None:
    renderer = make_renderer(toy.toy_tokenizer(), chat_template=PLAIN)
    first, *rest = texts(renderer, "one", "two", "three", " four", " five")
    assert first is None
    assert rest[2] is None
    question = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert [rest[0], rest[1], rest[3]] == [question.format(word) for word in ("two", "three", " five")]


def test_a_template_that_changes_words_has_no_scaffold() -> None:
    for name in ("first letter", "letter by letter", "ASCII", "the clock"):
        renderer = make_renderer(toy.toy_tokenizer(), chat_template=CHANGED[name])
        if find_scaffolds(renderer, False) is not None:
            assert texts(renderer, "word", "wood", "wax") == [None] * 3, name


def test_one_in_many_is_rendered_and_a_difference_ends_it() -> None:
    """A template that was misread: it writes questions of more than 12 characters otherwise."""
    with patch.object(Template, "text_conditions", (("user",), (), ())), patch.object(room, "_CHECK_ONE_IN", 4):
        renderer = make_renderer(toy.toy_tokenizer(), chat_template=CHANGED["long ones"])
        shown = texts(renderer, "a long question", "another question", *["b"] * 5)
    assert [text is not None for text in shown] == [False, True, True, True, False, False, False]


def test_a_form_that_the_template_does_not_get_has_no_scaffold() -> None:
    tokenizer = toy.toy_tokenizer()
    assert find_scaffolds(make_renderer(tokenizer, chat_template=PLAIN, tool_arguments="string"), False) is None


class Forgetful(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def test_messages_are_read_alike_whether_they_are_plain_or_not() -> None:
    def read(shapes: MessageShapes, logged: Sequence[dict[str, Any]]) -> Any:
        return shapes.read(as_messages(logged, "messages"), ChatForms())

    dice = random.Random(5)
    for looked_for in ((("Hi",), ("</think>", "<think>"), ()), ((), (), (3,)), ((), (), ())):
        quick, slow = MessageShapes(looked_for), MessageShapes(looked_for)
        with patch.object(slow, "_plain_messages", Forgetful()):
            every = [list_ for _ in range(60) for list_ in conversations(dice)]
            expected = [read(slow, logged) for logged in every]
        assert [read(quick, logged) for logged in every] == expected


def test_texts_that_hold_too_much_are_left_to_the_template() -> None:
    renderer = make_renderer(toy.toy_tokenizer(), chat_template=PLAIN)
    with patch.object(room, "_MAX_CHARACTERS", 1000):
        assert texts(renderer, "a", "b", "c" * 1000, "\ud800", "d")[1:] == [
            "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n",
            None,
            None,
            "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n",
        ]
    thinking = make_renderer(toy.toy_tokenizer(), chat_template=WRITTEN["reasoning moved"])
    assert texts(thinking, *["x</think>" * 5000] * 3, *[" " * 5000 + "x"] * 3) == [None] * 6


def test_values_nested_deeply_are_left_to_the_template() -> None:
    parts = find_scaffolds(make_renderer(toy.toy_tokenizer(), chat_template=WRITTEN["tool calls"]), False)
    assert parts is not None
    inputs = parts.inputs({"tools": None})
    assert inputs is not None
    for depth in range(100, 800, 50):
        value: Any = "x"
        for _ in range(depth):
            value = {"a": value}
        call = {"type": "function", "function": {"name": "run", "arguments": value}}
        logged = [{"role": "assistant", "content": "Hi", "tool_calls": [call]}]
        for _ in range(2):
            parts.render(as_messages(logged, "messages"), inputs, False, ChatForms())
