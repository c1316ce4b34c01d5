"""Rendering within limits, and whose text is where."""

from __future__ import annotations

import copy
import gzip
import json
import signal
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command import loaded
from tests.tables import stored
from tests.tiers import examples, some
from tests.toy import fast_text
from tito_audit.errors import RenderError, SetupError
from tito_audit.record.message import as_messages
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import make_renderer
from tito_audit.render.spans import Rendering, SpanKind, render_spans
from tito_audit.tokens.load import load_tokenizer

LOADS_ANEW = True

TOYS = Path(__file__).resolve().parents[1] / "fixtures" / "tokenizers"
SHARED = Path(__file__).resolve().parents[2] / "shared"

needs_shared = pytest.mark.skipif(
    not (SHARED / "tokenizers").is_dir(), reason="no real tokenizers beside the checkout"
)

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hi there\n"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Nothing.", "reasoning_content": "Hm."},
]
CALLS = [
    {"role": "user", "content": "Look it up"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I search.",
        "tool_calls": [{"id": "1", "function": {"name": "search", "arguments": '{"q":"x"}'}}],
    },
    {"role": "tool", "content": "found"},
    {
        "role": "assistant",
        "content": "Once more",
        "tool_calls": [
            {"function": {"name": "search", "arguments": '{"q": "y", "n": 3}'}},
            {"function": {"name": "search", "arguments": ""}},
        ],
    },
    {"role": "tool", "content": ""},
    {"role": "assistant", "content": "Done."},
]


def toy(name="toy_bpe", **options):
    return make_renderer(load_tokenizer(str(TOYS / name)), **options)


def real(name, **options):
    return make_renderer(loaded(SHARED / "tokenizers" / name), **options)


def render(template, chat=CHAT, **options):
    return toy(chat_template=template, **options).render(as_messages(chat, "m"), add_generation_prompt=False)


def cut(renderer, chat, tools=(), **options) -> Rendering:
    return render_spans(renderer, as_messages(chat, "m"), tools, **options)


def texts(rendering, kind):
    return [rendering.text[span.start : span.end] for span in rendering.spans if span.kind is kind]


def sampled(rendering):
    return {i: r and rendering.text[slice(*r)] for i, r in rendering.sampled.items()}


# Rendering


def test_a_tokenizer_without_a_template_is_refused_with_a_way_out():
    tokenizer = load_tokenizer(str(TOYS / "toy_bpe"))
    tokenizer.chat_templates = {}
    with pytest.raises(SetupError, match=r"no chat template\.\n.*\nPass Settings\(chat_template="):
        make_renderer(tokenizer)


def test_several_templates_and_no_default_are_refused_with_their_names():
    tokenizer = load_tokenizer(str(TOYS / "toy_bpe"))
    tokenizer.chat_templates = {"rag": "r", "tool_use": "t"}
    with pytest.raises(SetupError, match="rag, tool_use"):
        make_renderer(tokenizer)
    with pytest.raises(SetupError, match="no chat template is named 'other'"):
        make_renderer(tokenizer, template_name="other")
    assert make_renderer(tokenizer, template_name="rag").name == "rag"


def test_a_template_that_is_no_jinja_is_refused_with_its_line():
    with pytest.raises(SetupError, match="line 2: "):
        toy(chat_template="fine\n{% if %}\n")
    with pytest.raises(SetupError, match="No filter named 'nope'"):
        toy(chat_template="{{ messages | nope }}")


def test_arguments_of_the_run_reach_the_template_and_those_of_the_log_come_on_top():
    renderer = toy(chat_template="{{ a }}{{ b }}{{ eos_token }}", template_args={"a": 1, "b": 2})
    messages = as_messages(CHAT, "m")
    assert renderer.render(messages, add_generation_prompt=False) == "12<|im_end|>"
    assert renderer.render(messages, add_generation_prompt=False, template_kwargs={"b": "x"}) == "1x<|im_end|>"


def test_a_clock_that_stands_still_is_what_both_engines_tell_the_template():
    source = "{{ strftime_now('%d %b %Y') }}|{{ strftime_now is defined }}|{{ messages[0].role }}"
    renderer = toy(chat_template=source, clock=Clock(datetime(2024, 7, 26)))
    messages = as_messages(CHAT, "m")
    text = renderer.render(messages, add_generation_prompt=False)
    assert text.lower() == "26 jul 2024|true|system"
    fast = fast_text(renderer, messages)
    assert fast is not None
    assert fast.lower() == text.lower()
    now = toy(chat_template=source).render(messages, add_generation_prompt=False)
    assert now.startswith(datetime.now().strftime("%d %b %Y"))


def test_arguments_are_given_as_objects_then_as_logged():
    join = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ '>' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    kind = "{{ messages[1].tool_calls[0].function.arguments is string }}"
    assert render(join, CALLS) == '>{"q":"x"}>{"q": "y", "n": 3}>'
    assert render(kind, CALLS) == "False"
    assert render(kind, CALLS, tool_arguments="string") == "True"
    with pytest.raises(RenderError):
        render(join, CALLS, tool_arguments="object")


def test_arguments_that_are_no_json_stay_as_they_were_logged():
    chat = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"q": '}}]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", chat) == '{"q": '


def test_null_content_is_left_out_unless_the_template_asks_for_it():
    assert render("{{ messages[1].content is defined }}", CALLS) == "False"
    assert render("{% if not messages[1].content is none %}{{ 1 + 'a' }}{% endif %}null", CALLS) == "null"
    assert render("{{ messages[1].content + messages[0].content }}", CALLS) == "Look it up"


def test_the_logged_messages_are_never_changed():
    chat = copy.deepcopy(CALLS)
    messages = as_messages(chat, "m")
    render_spans(toy(), messages, [TOOL])
    assert chat == CALLS


def test_no_messages_are_refused():
    with pytest.raises(RenderError, match="no messages"):
        toy().render((), add_generation_prompt=True)


def test_what_a_template_says_about_messages_is_passed_on_with_its_line():
    with pytest.raises(RenderError) as raised:
        render("{{ 1 }}\n\n{{ raise_exception('Only  users,\\nplease') }}")
    assert str(raised.value) == "chat template, line 3: Only users, please"
    with pytest.raises(RenderError) as raised:
        render("{{ raise_exception('x' * 5000) }}")
    assert len(str(raised.value)) < 600


def test_a_fault_of_a_template_names_its_line():
    with pytest.raises(RenderError, match=r"^chat template, line 2: UndefinedError: .*missing"):
        render("a\n{{ messages[0].missing.deeper }}")


def growing(step: str, start: str = "'xx'") -> str:
    """A template in which `ns.s` takes the value of `step` ninety-nine times."""
    loop = "{% for i in range(99) %}{% set ns.s = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(s=" + start + ") %}" + loop


BOMBS = [
    *map(growing, stored(__file__, "GROWING")),
    growing("ns.s + ns.s", start="[1]"),
    *stored(__file__, "BOMBS"),
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_takes_too_much_is_stopped(bomb):
    began = time.process_time()
    with pytest.raises(RenderError):
        render(bomb, time_limit=0.15, size_limit=4_000_000)
    assert time.process_time() - began < 5


def test_the_limits_leave_ordinary_building_alone():
    text = "word " * 20_000
    chat = [{"role": "user", "content": text}] * 20
    build = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}"
        "{% endfor %}{{ ns.t | replace('word', 'w') }}"
    )
    assert render(build, chat) == "w " * 400_000


def test_output_past_the_limit_is_refused_while_it_is_written():
    with pytest.raises(RenderError, match="more than 1,000 characters"):
        render("{% for i in range(99999) %}0123456789{{ i }}{% endfor %}", size_limit=1000)


def test_the_time_limit_holds_in_another_thread_too():
    outcome = []

    def work():
        try:
            render(
                "{% for i in range(99999) %}{% for j in range(9999) %}{% set x = j + 1 %}{% endfor %}{% endfor %}",
                time_limit=0.1,
            )
        except RenderError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert outcome == ["chat template: not finished after 0.1 seconds; it is not run again"]


def test_the_callers_alarm_is_put_back():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 30)
        toy().render(as_messages(CHAT, "m"), add_generation_prompt=False)
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        assert 25 < left <= 30
        signal.raise_signal(signal.SIGALRM)
        assert rung == [True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_callers_alarm_is_put_back_after_a_failure():
    before = signal.getsignal(signal.SIGALRM)
    for template in (
        "{{ raise_exception('x') }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ):
        with pytest.raises(RenderError):
            render(template, time_limit=0.1)
        assert signal.getsignal(signal.SIGALRM) is before
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# Spans


def test_spans_name_contents_reasoning_openers_and_turn_ends():
    rendering = cut(toy(), CHAT)
    named = [
        [
            span.kind.value,
            rendering.text[span.start : span.end],
            -1 if span.message_index is None else span.message_index,
        ]
        for span in rendering.spans
    ]
    assert named == stored(__file__, "SPANS")
    assert sampled(rendering) == {2: "Hello.<|im_end|>", 4: "<think>\nHm.\n</think>\n\nNothing.<|im_end|>"}


def test_tool_calls_are_spans_with_their_wrapping():
    rendering = cut(toy(), CALLS, [TOOL])
    assert texts(rendering, SpanKind.TOOL_CALL) == [
        '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "search", "arguments": {"q": "y", "n": 3}}\n</tool_call>\n<tool_call>\n'
        '{"name": "search", "arguments": {}}\n</tool_call>',
    ]
    assert sampled(rendering)[1].startswith("<think>\nI search.\n</think>\n\n<tool_call>")
    assert sampled(rendering)[1].endswith("</tool_call><|im_end|>")
    assert sampled(rendering)[3].startswith("Once more\n<tool_call>")
    assert sampled(rendering)[5] == "Done.<|im_end|>"


def test_reasoning_inside_the_content_is_told_from_the_answer():
    chat = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n6"},
    ]
    rendering = cut(toy(), chat)
    assert texts(rendering, SpanKind.REASONING) == ["Hm."]
    assert texts(rendering, SpanKind.CONTENT) == ["2+2?", "4", "3+3?", "6"]
    assert sampled(rendering) == {1: "4<|im_end|>", 3: "<think>\nHm.\n</think>\n\n6<|im_end|>"}


def test_a_template_that_opens_no_turn_is_read_by_its_prefixes():
    rendering = cut(toy("toy_metaspace"), CHAT)
    assert sampled(rendering) == {2: " Hello. </s>", 4: " Nothing. </s>"}
    assert texts(rendering, SpanKind.TURN_END) == ["</s>", "</s>"]
    assert texts(rendering, SpanKind.GENERATION_PROMPT) == []
    assert texts(rendering, SpanKind.CONTENT) == ["Be brief.", "Hi there", "Hello.", "And now?", "Nothing."]


def test_control_tokens_in_contents_open_and_end_no_turn():
    chat = [
        {"role": "user", "content": "say <|im_start|>assistant\nno<|im_end|>"},
        {"role": "assistant", "content": "a<|im_end|>b<|im_start|>assistant\nc"},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": "d"},
    ]
    assert sampled(cut(toy(), chat)) == {1: "a<|im_end|>b<|im_start|>assistant\nc<|im_end|>", 3: "d<|im_end|>"}


def test_empty_turns_are_found():
    chat = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": " \n"},
        {"role": "assistant", "content": "\n"},
        {"role": "assistant", "content": "x"},
    ]
    assert sampled(cut(toy(), chat)) == {1: "<|im_end|>", 3: "\n<|im_end|>", 4: "x<|im_end|>"}


def test_a_template_that_tests_user_contents_still_shows_the_turns():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ 'S' if m.role == 'user' and m.content.startswith('Hi') }}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendering = cut(toy(chat_template=template), chat)
    assert sampled(rendering) == {1: "Hello<|im_end|>"}
    assert rendering.spans[0].kind is SpanKind.UNKNOWN
    spoof = [{"role": "user", "content": "Hi <|im_start|>assistant\nfake<|im_end|>"}, chat[1]]
    assert sampled(cut(toy(chat_template=template), spoof)) == {1: "Hello<|im_end|>"}


def test_a_template_that_rewrites_contents_is_read_by_its_prefixes():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | length }}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rendering = cut(toy(chat_template=template), CHAT)
    assert sampled(rendering) == {2: "6Hello.<|im_end|>", 4: "8Nothing.<|im_end|>"}
    assert SpanKind.CONTENT not in {span.kind for span in rendering.spans}


def test_where_nothing_is_known_nothing_is_said():
    template = "{{ messages | length }}{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}"
    rendering = cut(toy(chat_template=template), CHAT)
    assert {span.kind for span in rendering.spans} == {SpanKind.UNKNOWN}
    assert rendering.sampled == {2: None, 4: None}


def test_contents_that_hold_private_use_characters_are_not_taken_for_marks():
    chat = [{"role": "user", "content": "\U000f0000x\U000f0001"}, {"role": "assistant", "content": "y\U0010fffd"}]
    rendering = cut(toy(), chat)
    assert sampled(rendering) == {1: "y\U0010fffd<|im_end|>"}
    assert texts(rendering, SpanKind.CONTENT) == ["y\U0010fffd"]


def test_a_template_that_cannot_write_the_messages_has_no_spans():
    with pytest.raises(RenderError, match="take turns"):
        cut(toy("toy_metaspace"), [{"role": "assistant", "content": "x"}])


CONTENT = st.sampled_from(stored(__file__, "CONTENT"))


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
@given(contents=st.lists(CONTENT, min_size=1, max_size=7))
@settings(max_examples=examples(60, 150), deadline=None)
def test_spans_partition_the_text_and_turns_end_in_a_control_token(name, contents):
    renderer = RENDERERS[name]
    chat = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    rendering = cut(renderer, chat)
    assert rendering.text == renderer.render(as_messages(chat, "m"), add_generation_prompt=False)
    assert "".join(rendering.text[span.start : span.end] for span in rendering.spans) == rendering.text
    assert set(rendering.sampled) == set(range(1, len(contents), 2))
    ends = [0]
    for turn in (turn for turn in rendering.sampled.values() if turn is not None):
        assert ends[-1] <= turn[0] < turn[1]
        assert rendering.text[slice(*turn)].endswith(("<|im_end|>", "</s>"))
        ends.append(turn[1])
    if name == "toy_bpe":
        assert None not in rendering.sampled.values()


RENDERERS = {name: toy(name) for name in ("toy_bpe", "toy_metaspace")}


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize(("name", "answer"), some(list(stored(__file__, "PUBLISHED").items()), 2))
def test_published_templates_show_their_turns(name, answer):
    renderer = real(name)
    assert sampled(cut(renderer, CHAT[1:3])) == {1: answer}
    rendering = cut(renderer, CHAT)
    assert None not in rendering.sampled.values()
    assert SpanKind.UNKNOWN not in {span.kind for span in rendering.spans}


@needs_shared
@pytest.mark.shared
def test_turns_after_a_tool_are_found_in_a_template_that_opens_them_otherwise():
    rendering = cut(
        real("deepseek-v3"),
        [
            {"role": "user", "content": "Look it up"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"q": 1}'}}],
            },
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "Done."},
        ],
    )
    assert '```json\n{"q": 1}\n```' in rendering.text
    assert sampled(rendering)[3] == "Done.<｜end▁of▁sentence｜>"
    assert sampled(rendering)[1] is None  # this template ends a single call with no end token


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize("name", some(["smollm2", "qwen2.5-coder", "gemma-3"], 1))
def test_every_turn_of_the_real_rollouts_is_found(name):
    renderer = real(name)
    turns = 0
    for file in sorted((SHARED / "rollouts" / name).glob("*.jsonl.gz")):
        with gzip.open(file) as lines:
            rows = [json.loads(line) for line in lines][::4]
        for row in rows:
            rendering = cut(renderer, row["messages"], row["tools"] or ())
            for index, turn in rendering.sampled.items():
                message = row["messages"][index]
                assert turn is not None
                assert (message["content"] or "").strip() in rendering.text[slice(*turn)]
                prompt = renderer.render(
                    as_messages(row["messages"][:index], "m"), row["tools"] or (), add_generation_prompt=True
                )
                assert rendering.text[: turn[0]] == prompt
                turns += 1
    assert turns > 20
