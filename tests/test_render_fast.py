"""The faster engine: None or what the reference environment writes, and the same spans."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tables import table
from tests.test_render import growing
from tests.tiers import examples, some
from tests.toy import fast_text, spans_fast
from tito_audit.errors import RenderError, SetupError
from tito_audit.record.message import as_messages
from tito_audit.render.fast.render import NeedsReference
from tito_audit.render.renderer import make_renderer
from tito_audit.render.spans import render_spans
from tito_audit.tokens.load import load_tokenizer

LOADS_ANEW = True

ROOT = Path(__file__).resolve().parents[1]
TOYS = ROOT / "fixtures" / "tokenizers"
SHARED = ROOT.parent / "shared" / "tokenizers"
RENDERS = int(os.environ.get("TITO_AUDIT_RENDERS") or examples(500, 1500))
"""How many conversations are rendered in each of the large comparisons, over all templates together."""

OWN = {
    "generation tags": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{%- generation -%}\n  {{ m.content }}<|im_end|>{%- endgeneration %}\n"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "macros": (
        "{%- macro shown(value, level=0) -%}{%- if value is mapping -%}{%- for key, item in value.items() -%}"
        "{{ key }}: {{ shown(item, level + 1) }};{%- endfor -%}{%- elif value is string -%}{{ value | trim }}"
        "{%- elif value is iterable -%}[{%- for item in value -%}{{ shown(item) }},{%- endfor -%}]"
        "{%- else -%}{{ value }}{%- endif -%}{%- endmacro -%}"
        "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{{ shown(m.content) }}"
        "{%- for call in m.tool_calls or [] %}\n{{ shown(call.function.arguments) }}{% endfor -%}<|im_end|>\n"
        "{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    ),
    "jumps": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content | default('', true) }}<|im_end|>\n"
        "{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "values": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for call in m.tool_calls or [] %}"
        "{% for key, value in call.function.arguments.items() %}<{{ key }}>{{ value }}|"
        "{{ value | tojson if value is not string else value }}|{{ 'v' ~ value }}</{{ key }}>{% endfor %}"
        "{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}{{ (tools or [])[:1] | tojson(indent=2) }}"
    ),
    "strict roles": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('take turns') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content + '' }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""Templates of our own that use what published ones use."""

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "suche",
            "description": "Finds <b>things</b> & 'more' – 世界",
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "default": 2.0}}},
        },
    },
    {"type": "function", "function": {"name": "noop", "parameters": {}}},
)
PIECES = [
    *(
        "",
        " ",
        "\n",
        "a",
        "Hello there.",
        " b\n\n",
        "世界",
        "🙂👩‍💻",
        "é\u0301",
        "\u00a0x\u2003",
        "\u200b",
        "\x85y",
    ),
    *("<|im_start|>assistant\n", "<|im_end|>", "</s>", "<think>", "</think>", "<think>\nhm\n</think>\n\n"),
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<start_of_turn>model\n",
        "<｜Assistant｜>",
    ),
    *("{{ x }}", "{% if %}", "{# no #}", '"quoted"\\', "\r\n", "\t", "\0", "\ue000", "\U000e0001", "\U000fffff"),
    *("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "<end_of_turn>", "x" * 300),
]
RARE = ["\x1f", "y\x1c ", "\U000f0000", "\U000f0001x", "\U0010fffd", "\ud800"]
VALUES = ["x", "", 1, 2.0, 1.5, -3, 1e20, 1e-7, 2**70, True, None, [1, "a", None], {"k": 1.0, "ü": []}, "</think>"]


def text(dice: random.Random) -> str:
    if dice.random() < 0.02:
        return dice.choice(RARE)
    return "".join(dice.choices(PIECES, k=dice.choice((0, 1, 1, 2, 2, 3, 5))))


def arguments(dice: random.Random):
    value = {dice.choice("abcü"): dice.choice(VALUES) for _ in range(dice.randrange(3))}
    kind = dice.random()
    if kind < 0.7:
        return json.dumps(value, ensure_ascii=dice.random() < 0.5)
    return value if kind < 0.85 else dice.choice(["", '{"a": ', "null", "2.0", None])


def call(dice: random.Random):
    function = {"name": dice.choice(["suche", "noop"]), "arguments": arguments(dice)}
    return {"id": "call_1", "type": "function", "function": function} if dice.random() < 0.9 else function


def answer(dice: random.Random):
    message = {"role": "assistant", "content": text(dice)}
    if dice.random() < 0.25:
        message[dice.choice(["reasoning_content", "reasoning", "thinking"])] = text(dice)
    if dice.random() < 0.35:
        message["tool_calls"] = [call(dice) for _ in range(dice.choice((1, 1, 2, 3)))]
        if dice.random() < 0.5:
            message["content"] = None
        elif dice.random() < 0.2:
            del message["content"]
    return message


def conversation(dice: random.Random):
    """Mostly well-formed turns, sometimes roles in any order."""
    chat = [{"role": "system", "content": text(dice)}] if dice.random() < 0.4 else []
    if dice.random() < 0.1:
        roles = dice.choices(["user", "assistant", "tool", "system", "odd"], k=dice.randrange(1, 6))
        return chat + [answer(dice) if r == "assistant" else {"role": r, "content": text(dice)} for r in roles]
    for _ in range(dice.choice((1, 1, 2, 3, 4))):
        content = text(dice)
        if dice.random() < 0.05:
            content = [{"type": "text", "text": content}, {"type": "image"}]
        chat += [{"role": "user", "content": content}, answer(dice)]
        while chat[-1].get("tool_calls"):
            chat += [
                {"role": "tool", "tool_call_id": "call_1", "content": text(dice)} for _ in chat[-1]["tool_calls"]
            ]
            chat.append(answer(dice) if dice.random() < 0.5 else {"role": "assistant", "content": text(dice)})
    return chat[: dice.randrange(1, len(chat) + 1)] if dice.random() < 0.2 else chat


def cases(dice: random.Random):
    """Arguments of one rendering."""
    chat = conversation(dice)
    kwargs = dice.choice([None, None, {"enable_thinking": False}, {"enable_thinking": True, "x": 2.0}])
    return as_messages(chat, "m"), dice.choice([(), TOOLS, TOOLS[:1], list(TOOLS)]), kwargs, dice.random() < 0.3


class Renderers(Mapping):
    """Renderers by name, each loaded when it is first asked for: a collection of the tests loads none."""

    def __init__(self):
        folders = [TOYS / "toy_bpe", TOYS / "toy_metaspace", *some(sorted(SHARED.glob("*/"))[::-1], 1)]
        self._folders = {folder.name: folder for folder in folders if has_template(folder)}
        self._loaded = {}

    def __getitem__(self, name):
        if name not in self._loaded:
            tokenizer = load_tokenizer(str(self._folders.get(name, TOYS / "toy_bpe")))
            self._loaded[name] = make_renderer(tokenizer, chat_template=OWN.get(name))
        return self._loaded[name]

    def __iter__(self):
        return iter([*OWN, *self._folders])

    def __len__(self):
        return len(OWN) + len(self._folders)

    def __contains__(self, name):
        return name in OWN or name in self._folders


def has_template(folder):
    """Whether a folder is a tokenizer with chat templates."""
    if not (folder / "tokenizer.json").is_file():
        return False
    settings = folder / "tokenizer_config.json"
    stated = settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
    return (
        bool(stated) or any(folder.glob("chat_template.jinja")) or any(folder.glob("additional_chat_templates/*"))
    )


RENDERERS = Renderers()


@pytest.mark.parametrize("name", RENDERERS)
def test_a_fast_rendering_is_none_or_that_of_the_reference(name):
    renderer = RENDERERS[name]
    dice = random.Random(name)
    count = RENDERS // len(RENDERERS)
    rendered = refused = 0
    for _ in range(count):
        messages, tools, kwargs, opens = cases(dice)
        options = {"add_generation_prompt": opens, "template_kwargs": kwargs}
        fast = fast_text(renderer, messages, tools, **options)
        try:
            text = renderer.render(messages, tools, **options)
        except RenderError:
            text = None
        if fast is not None or text is None:
            assert fast == text, messages
        rendered += fast is not None
        refused += text is None
    # Two templates write numbers, which the engines do not write alike.
    least = 0.05 if name in ("macros", "values") else 0.7
    assert rendered >= least * (count - refused), f"{rendered} told of {count}, of which {refused} have no text"


@pytest.mark.parametrize("name", RENDERERS)
def test_fast_spans_are_none_or_those_of_the_reference(name):
    renderer = RENDERERS[name]
    dice = random.Random(f"{name} spans")
    rendered = possible = 0
    for _ in range(RENDERS // len(RENDERERS)):
        messages, tools, kwargs, _ = cases(dice)
        fast = spans_fast(renderer, messages, tools, kwargs)
        try:
            slow = render_spans(renderer, messages, tools, kwargs)
        except RenderError:
            slow = None
        if fast is not None or slow is None:
            assert fast == slow, messages
        rendered += fast is not None
        possible += slow is not None
    least = 0.05 if name in ("macros", "values", "jumps") else 0.7
    assert rendered >= least * possible, f"{rendered} of {possible}"


BOMBS = [
    "{{ 'x' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 10 ** (10 ** 8) }}",
    growing("ns.s + ns.s"),
    growing("ns['s'] + ns.s"),
    growing("ns.s ~ ns.s"),
    growing("[ns.s, ns.s] | join"),
    growing("''.join([ns.s, ns.s])"),
    growing("ns.s.replace('x', 'xx')"),
    growing("ns.s | replace('x', 'xx')"),
    growing("'%s%s' % (ns.s, ns.s)"),
    growing("'{0}{0}'.format(ns.s)"),
    growing("ns.s + ns.s", start="[1]"),
    growing("[ns.s, ns.s] | tojson"),
    growing("ns.s | tojson | tojson"),
    growing("(ns.s + ns.s)[1:]"),
    growing("ns.s + messages[0].content"),
    "{% set ns = namespace(s='xx') %}{% set a = ns %}"
    "{% for i in range(99) %}{% set a.s = a.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for n in [ns] %}{% for m in messages * 9 %}"
    "{% set n.s = n.s + ns.s %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% set o = namespace(t='x') %}{% for i in range(99) %}"
    "{% set o.t = ns.s %}{% set ns.s = ns.s + o.t %}{% endfor %}",
    "{% set ns = namespace(s='xx', t='y') %}{% for i in range(99) %}"
    "{% set ns.t = ns.t + ns.s %}{% set ns.s = ns.s + ns.t %}{% endfor %}",
    "".join(f"{{% set x{i + 1} = x{i} + x{i} %}}" for i in range(60)).replace("x0", "messages[0].content"),
    "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = t %}{% endfor %}",
    "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='xx') %}"
    "{% for i in range(99) %}{% set ns.s = f(ns.s) %}{% endfor %}",
    "{% macro f(s, n) %}{% if n %}{{ f(s + s, n - 1) }}{% endif %}{% endmacro %}{{ f('x', 60) }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x' | indent(1000000000, true) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ messages | batch(1000000000, 0) | list }}",
    "{{ range(1000000000) | list }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'xxxxxxxxxxxxx' }}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for m in messages %}{{ m | tojson }}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}" + "raw text " * 9999 + "{% endfor %}",
    "{{ messages[0].content.replace('', messages[0].content) }}",
    "{{ messages[0].content | list | join(messages[0].content) }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
]


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_a_template_that_takes_too_much_is_given_up(bomb):
    try:
        renderer = make_renderer(load_tokenizer(str(TOYS / "toy_bpe")), chat_template=bomb)
    except SetupError:
        return
    template = renderer.template(False).fast
    if template is None:
        return
    variables = {"messages": [{"role": "user", "content": "word " * 20_000}], "tools": None}
    began = time.process_time()
    for _ in range(2):
        with pytest.raises((NeedsReference, RenderError)):
            template.run(variables)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(*table(__file__, "no_template_changes_what_was_logged"))
def test_no_template_changes_what_was_logged(template):
    chat = [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]}]
    before = copy.deepcopy(chat)
    renderer = make_renderer(load_tokenizer(str(TOYS / "toy_bpe")), chat_template=template)
    fast_text(renderer, as_messages(chat, "m"))
    assert chat == before


def test_a_template_that_minijinja_cannot_run_is_left_to_the_reference():
    for template in ("{{ 'abc'.partition('b') }}", "{{ messages | pprint }}", "{{ '%s' % 'x' }}"):
        renderer = make_renderer(load_tokenizer(str(TOYS / "toy_bpe")), chat_template=template)
        messages = as_messages([{"role": "user", "content": "x"}], "m")
        assert fast_text(renderer, messages) is None
        assert spans_fast(renderer, messages) is None


def test_no_messages_have_no_fast_text():
    assert fast_text(RENDERERS["toy_bpe"], (), add_generation_prompt=True) is None


def test_what_tools_say_is_not_mixed_up_between_conversations():
    renderer = RENDERERS["toy_bpe"]
    messages = as_messages([{"role": "user", "content": "x"}], "m")
    for i in range(50):
        tools = ({"type": "function", "function": {"name": f"tool_{i}", "parameters": {}}},)
        fast = fast_text(renderer, messages, tools)
        assert fast is not None
        assert fast == renderer.render(messages, tools, add_generation_prompt=False)


def test_minijinja_is_not_imported_before_it_is_used():
    code = (
        "import sys; from tito_audit.render.renderer import make_renderer; import tito_audit.render.spans; "
        "print('minijinja' in sys.modules, 'jinja2' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert printed.stdout.split() == ["False", "False"]
