"""Prompts that are known without being rendered are what rendering all of them says."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reference import nothing_fast
from tests import toy
from tests.test_logs_of_calls import said
from tests.tiers import examples, some
from tito_audit.errors import RenderError
from tito_audit.evidence import prompts
from tito_audit.evidence.chains import chain_turns
from tito_audit.evidence.completions import CompletionInContext, ConfirmedIds
from tito_audit.evidence.gather import gather
from tito_audit.evidence.prompts import PromptStarts
from tito_audit.evidence.reference import Reference
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.render.renderer import ChatForms, Renderer, make_renderer
from tito_audit.render.scaffolds import MessageShapes, template_scaffolds
from tito_audit.render.template import Template
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

TOKENIZERS = Path(
    os.environ.get("TITO_AUDIT_TOKENIZERS") or Path(__file__).resolve().parents[2] / "shared" / "tokenizers"
)
REAL = sorted(path.name for path in TOKENIZERS.iterdir() if path.is_dir()) if TOKENIZERS.is_dir() else []
START, END = "{% for m in messages %}", "{% endfor %}"
SAID = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
OPENER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = START + SAID + END + OPENER
LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
BARE = "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"


@pytest.fixture(autouse=True, scope="module")
def also_short() -> Iterator[None]:
    """Short conversations are looked at too, which are cheaper to render."""
    with patch.object(prompts, "_WORTH_KNOWING", 0):
        yield


NEAR = {
    "plain": PLAIN,
    "reasoning stripped before the last question": LAST_USER
    + START
    + "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    + BARE
    + "{% else %}"
    + SAID
    + "{% endif %}"
    + END
    + OPENER,
    "reasoning stripped everywhere": START
    + "{% if m.role == 'assistant' %}"
    + BARE
    + "{% else %}"
    + SAID
    + "{% endif %}"
    + END
    + OPENER,
    "last message marked": START + "{% if loop.last %}!{% endif %}" + SAID + END + OPENER,
    "last answer thinks": START
    + "{% if loop.last and m.role == 'assistant' %}<|im_start|>assistant\n<think>\n\n</think>\n\n{{ m.content }}"
    + "<|im_end|>\n{% else %}"
    + SAID
    + "{% endif %}"
    + END
    + OPENER,
    "tools together": START
    + "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    + "{% endif %}\n{{ m.content }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n"
    + "{% endif %}{% else %}"
    + SAID
    + "{% endif %}"
    + END
    + OPENER,
    "last question in front": "{% set ns = namespace(asked='') %}{% for m in messages %}{% if m.role == 'user' %}"
    + "{% set ns.asked = m.content %}{% endif %}{% endfor %}<|im_start|>system\nAsked: {{ ns.asked }}<|im_end|>\n"
    + PLAIN,
    "whether tools were used": "{% set ns = namespace(used=false) %}{% for m in messages %}"
    + "{% if m.role == 'tool' %}{% set ns.used = true %}{% endif %}{% endfor %}"
    + "{% if ns.used %}<|im_start|>system\nused<|im_end|>\n{% endif %}"
    + PLAIN,
    "numbered": START + SAID.replace("<|im_end|>", " ({{ loop.index }})<|im_end|>") + END + OPENER,
    "third message marked": START + "{% if loop.index0 == 2 %}#{% endif %}" + SAID + END + OPENER,
    "date": "<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n" + PLAIN,
    "tools in front": "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + PLAIN,
    "thinking if asked": PLAIN.replace(
        "assistant\n{% endif", "assistant\n{% if think %}<think>\n{% endif %}{% endif"
    ),
    "last message, twice": PLAIN.replace(OPENER, "")
    + "{% if messages[-1].role == 'tool' %}{{ messages[-1].content }}{% endif %}"
    + OPENER,
    "opener after a question only": PLAIN.replace(
        "add_generation_prompt", "add_generation_prompt and messages[-1].role == 'user'"
    ),
}
"""Templates that look no further than prompts are told apart by."""
FAR = {
    "counted": PLAIN + "{{ messages | length }}",
    "counted in front": "{{ messages | length }}" + PLAIN,
    "long conversations": "{% if messages | length > 4 %}long {% endif %}" + PLAIN,
    "from the end": START + "{% if loop.revindex == 4 %}!{% endif %}" + SAID + END + OPENER,
    "last four": "{% for m in messages[-4:] %}" + SAID + END + OPENER,
    "all but a few": START + "{% if loop.index0 + 4 > messages | length %}" + SAID + "{% endif %}" + END + OPENER,
    "counter": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    + "{% if ns.n > 3 %}more {% endif %}"
    + PLAIN,
    "counter, twice": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    + "{% set few = ns.n % 2 %}{% if few %}odd {% endif %}"
    + PLAIN,
    "long texts": START + "{% if m.content | length > 6 %}long {% endif %}" + SAID + END + OPENER,
    "equal texts": START + "{% if m.content == messages[0].content %}again {% endif %}" + SAID + END + OPENER,
    "first letters": START + "{% if m.content[:2] == 'Hi' %}Hi {% endif %}" + SAID + END + OPENER,
    "small letters": START + "{% if m.content.lower() == 'hi' %}Hi {% endif %}" + SAID + END + OPENER,
    "where": START + "{% if m.content.find('i') > 1 %}i {% endif %}" + SAID + END + OPENER,
    "characters": START
    + "{% for c in m.content %}{% if loop.index0 == 5 %}long {% endif %}{% endfor %}"
    + SAID
    + END
    + OPENER,
    "second after": START + "{% if messages[loop.index0 + 2].role == 'tool' %}!{% endif %}" + SAID + END + OPENER,
    "second to last": "{% if messages[-2].role == 'tool' %}!{% endif %}" + PLAIN,
}
"""Templates that may look further."""

WORDS = (
    "Hi",
    "How now?",
    " ",
    "",
    "naïve 世界",
    "tool",
    "x" * 40,
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "Hi there",
)
THOUGHTS = ("<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n", "</think>", "")


def conversation(dice: random.Random) -> list[dict[str, Any]]:
    """Messages with tools, reasoning and texts that look like what the template writes."""
    few = dice.random() < 0.3

    def text() -> str:
        word = dice.choice(WORDS[:2] if few else WORDS) if dice.random() < 0.3 else "said"
        return word if few and dice.random() < 0.3 else f"{word} {dice.randrange(1000)}"

    messages: list[dict[str, Any]] = []
    if dice.random() < 0.5:
        messages.append({"role": "system", "content": text()})
    for _ in range(dice.randrange(1, 4)):
        messages.append({"role": "user", "content": text()})
        for _ in range(dice.choice((0, 0, 1, 2))):
            function = {"name": "run", "arguments": {"command": text(), "times": dice.randrange(3)}}
            called: dict[str, Any] = {"role": "assistant", "content": dice.choice(THOUGHTS) + text()}
            if dice.random() < 0.5:
                called["tool_calls"] = [{"type": "function", "function": function}]
            messages.append(called)
            messages += [{"role": "tool", "content": text()} for _ in range(dice.choice((1, 1, 2)))]
        messages.append({"role": "assistant", "content": dice.choice(THOUGHTS) + text()})
        if dice.random() < 0.2:
            messages[-1]["reasoning_content"] = text()
    return messages


@dataclass(frozen=True)
class Writer:
    """Writes the prompts of rollouts, some as another template would write them."""

    tokenizer: Tokenizer
    renderer: Renderer
    others: Sequence[Renderer]

    def rollout(self, messages: list[dict[str, Any]], dice: random.Random, **options: Any) -> Rollout:
        """A rollout with a call for each answer."""
        renderer = self.renderer if dice.random() < 0.6 else dice.choice(self.others)
        own = dice.random() < 0.3
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        logged = as_messages(messages, "messages")
        tools = as_tools(options.get("tools"), "tools")
        turns: list[Turn] = []
        for at in answers:
            sent = as_messages(copy.deepcopy(messages[:at]), "messages") if own else logged[:at]
            if own and dice.random() < 0.1:
                sent = as_messages([*messages[: at - 1], {"role": "user", "content": "Sum up."}], "messages")
            writer = renderer if dice.random() < 0.9 else dice.choice(self.others)
            kwargs = options.get("kwargs", {})
            try:
                text = writer.render(sent, tools, add_generation_prompt=True, template_kwargs=kwargs)
            except RenderError:
                text = "<|im_start|>assistant\n"
            ids = self.tokenizer.encode(text)
            if dice.random() < 0.05:
                ids = np.delete(ids, dice.randrange(len(ids)))
            end = self.tokenizer.vocabulary.piece(self.tokenizer.eos_ids[0]) if self.tokenizer.eos_ids else ""
            answer = self.tokenizer.encode(messages[at]["content"] + (end if dice.random() < 0.95 else ""))
            turn = Turn(prompt_ids=ids, completion_ids=answer, message_index=None if own else at)
            turns.append(replace(turn, prompt_messages=sent) if own else turn)
            if dice.random() < 0.1:
                turns.append(turns[-1])
        if dice.random() < 0.1:
            dice.shuffle(turns)
        kwargs = options.get("kwargs", {})
        return Rollout(Place("toy", 0), "toy", logged, tools, kwargs, tuple(turns))


@contextmanager
def everything_rendered() -> Iterator[None]:
    with (
        patch.object(prompts, "prompt_starts", lambda *_: None),
        patch.object(prompts, "find_scaffolds", lambda *_: None),
        patch.object(ConfirmedIds, "cover", lambda *_: False),
    ):
        yield


def written(rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> Any:
    """All that rendering says of a rollout, and what the rules see of it."""
    return *texts_of(rollout, Reference(tokenizer, renderer)), said(gather(rollout, tokenizer, renderer))


def forget(renderer: Renderer) -> None:
    """Nothing is known of its templates any more."""
    for with_tools in (False, True):
        renderer.template(with_tools).memo.clear()


def agree(writer: Writer, rollouts: Sequence[Rollout]) -> int:
    """How many prompts were known without being rendered; all that is said has to be the same."""
    forget(writer.renderer)
    count = 0
    is_known = PromptStarts.is_known

    def counted(self: PromptStarts, *arguments: Any) -> bool:
        nonlocal count
        answer = is_known(self, *arguments)
        count += answer
        return answer

    with patch.object(PromptStarts, "is_known", counted):
        outputs = [written(rollout, writer.tokenizer, writer.renderer) for rollout in rollouts]
    with everything_rendered():
        for rollout, output in zip(rollouts, outputs, strict=True):
            assert output == written(rollout, writer.tokenizer, writer.renderer)
    with nothing_fast():
        for rollout, output in list(zip(rollouts, outputs, strict=True))[:: examples(5, 1)]:
            assert output[-1] == said(gather(rollout, writer.tokenizer, writer.renderer))
    return count


def log_of(writer: Writer, dice: random.Random) -> list[Rollout]:
    """Rollouts of which some have the same messages, written otherwise."""
    rollouts = []
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    for _ in range(dice.randrange(1, 5)):
        messages = conversation(dice)
        options = {
            "tools": dice.choice(([], [], tools, tools * 2)),
            "kwargs": dice.choice(({}, {}, {"think": True})),
        }
        rollouts += [writer.rollout(messages, dice, **options) for _ in range(dice.choice((1, 2, 3)))]
    dice.shuffle(rollouts)
    return rollouts


@cache
def toy_writer(name: str) -> Writer:
    tokenizer = toy.toy_tokenizer()

    def renderer(source: str) -> Renderer:
        return make_renderer(tokenizer, chat_template=source)

    others = [renderer(NEAR[other]) for other in NEAR if "last" in other or other == "plain"]
    return Writer(tokenizer, renderer((NEAR | FAR)[name]), others)


@pytest.mark.parametrize("name", [*NEAR, *FAR])
@settings(max_examples=examples(1, 150), deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_what_is_known_of_prompts_is_what_rendering_them_says(name: str, seed: int) -> None:
    dice = random.Random(seed)
    writer = toy_writer(name)
    agree(writer, log_of(writer, dice))


@pytest.mark.parametrize("name", some(REAL, 2))
@settings(max_examples=examples(1, 60), deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_of_real_templates_as_well(name: str, seed: int) -> None:
    writer = real_writer(name)
    if writer is None:
        pytest.skip("it has no chat template")
    agree(writer, log_of(writer, random.Random(seed)))


@cache
def real_writer(name: str) -> Writer | None:
    tokenizer = load_tokenizer(str(TOKENIZERS / name))
    if not tokenizer.chat_templates:
        return None
    renderer = make_renderer(tokenizer)
    source = next(iter(tokenizer.chat_templates.values()))
    changes = [
        ("loop.last", "false"),
        ("loop.last", "true"),
        ("</think>", "</thought>"),
        ("last_query_index", "last"),
    ]
    others = [make_renderer(tokenizer, chat_template=source.replace(*change)) for change in changes]
    return Writer(tokenizer, renderer, [renderer, *others])


def short_conversation(dice: random.Random) -> list[dict[str, Any]]:
    """Messages of few kinds, each with a text of its own."""
    texts = (f"said {number}" for number in range(1_000_000, 0, -dice.randrange(1, 99)))
    messages = []
    for _ in range(dice.randrange(1, 4)):
        messages.append({"role": "user", "content": next(texts)})
        for _ in range(dice.randrange(3)):
            messages.append({"role": "assistant", "content": "<think>\nhm\n</think>\n\n" + next(texts)})
            messages += [{"role": "tool", "content": next(texts)} for _ in range(dice.randrange(1, 4))]
        messages.append({"role": "assistant", "content": "<think>\nhm\n</think>\n\n" + next(texts)})
    return messages


TRAPS = {
    "reasoning stripped before the last question": NEAR["reasoning stripped everywhere"],
    "whether tools were used": NEAR["whether tools were used"].replace(
        "namespace(used=false)", "namespace(used=true)"
    ),
    "last message marked": NEAR["last message marked"].replace("loop.last", "loop.last or m.role == 'user'"),
    "tools together": NEAR["tools together"].replace("loop.last or", "").replace("messages[loop.index0 + 1]", "m"),
    "last question in front": NEAR["last question in front"].replace("ns.asked = m", "ns.asked = messages[0]"),
    "last answer thinks": NEAR["last answer thinks"].replace("loop.last and m", "m"),
}
"""Templates, and others whose prompts are the start of what they write later, but not what they write first."""


@pytest.mark.parametrize("name", TRAPS)
@settings(max_examples=examples(1, 60), deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_a_prompt_of_another_template_is_not_taken_for_its_own(name: str, seed: int) -> None:
    dice = random.Random(seed)
    right = toy_writer(name)
    wrong = make_renderer(right.tokenizer, chat_template=TRAPS[name])
    forget(right.renderer)
    reference = Reference(right.tokenizer, right.renderer)
    with patch.object(dice, "random", lambda: 0.5):
        for _ in range(examples(10, 25)):
            messages = short_conversation(dice)
            rollout = Writer(right.tokenizer, right.renderer, ()).rollout(messages, dice)
            other = Writer(right.tokenizer, wrong, ()).rollout(messages, dice)
            swapped = sorted(dice.sample(range(len(other.turns)), dice.randrange(len(other.turns) + 1)))
            turns = tuple(other.turns[k] if k in swapped else turn for k, turn in enumerate(rollout.turns))
            some_calls = sorted(dice.sample(range(len(turns)), dice.randrange(1, len(turns) + 1)))
            for calls in (rollout.turns, turns, [turns[k] for k in some_calls]):
                tried = replace(rollout, turns=tuple(calls))
                assert texts_of(tried, reference) == rendered_texts_of(tried, reference)


@pytest.mark.parametrize(
    ("seen", "trap"),
    [
        pytest.param(("uAtttuAuA", "uAutttAuA"), "uAtttAuA", id="a question came after the answer in the prompt"),
        pytest.param(("uAtttAttA",), "uAtttAutA", id="no question came after the prompt"),
    ],
)
def test_a_message_is_proven_only_for_what_comes_after_it(seen: Sequence[str], trap: str) -> None:
    """Each message of the trap was seen, but with other messages after it, and these decide about reasoning."""
    right = toy_writer("reasoning stripped before the last question")
    wrong = Writer(right.tokenizer, toy_writer("reasoning stripped everywhere").renderer, ())
    own = replace(right, others=())
    forget(right.renderer)
    reference, dice = Reference(right.tokenizer, right.renderer), random.Random(1)
    with patch.object(dice, "random", lambda: 0.5):
        for number, kinds in enumerate(seen):
            texts_of(own.rollout(of_kinds(kinds, number), dice), reference)
        messages = of_kinds(trap, 9)
        rollout, other = own.rollout(messages, dice), wrong.rollout(messages, dice)
    at = next(k for k, turn in enumerate(rollout.turns) if turn.message_index == 5)
    turns = [other.turns[k] if k == at else turn for k, turn in enumerate(rollout.turns)]
    misled = replace(rollout, turns=tuple(turns))
    texts = texts_of(misled, reference)
    assert texts == rendered_texts_of(misled, reference)
    assert not texts[0][at][1]


def of_kinds(kinds: str, number: int) -> list[dict[str, Any]]:
    """Messages of these kinds: a question, an answer with reasoning (A) or without, an output of a tool."""
    roles = {"u": "user", "a": "assistant", "A": "assistant", "t": "tool"}
    thought = "<think>\nhm\n</think>\n\n"
    return [
        {"role": roles[kind], "content": f"{thought if kind == 'A' else ''}said {100 * number + place}"}
        for place, kind in enumerate(kinds)
    ]


def texts_of(rollout: Rollout, reference: Reference) -> Any:
    rendered = prompts.render_texts(rollout, chain_turns(rollout, reference), reference)
    cuts, texts = reference.tokenizer.control_tokens, {}
    for turn, text in rendered.texts.items():
        ids = None if turn is None else rollout.turns[turn].prompt_ids
        texts[turn] = text.text if ids is None else text.text_of(ids, cuts), text.matches_record
    return texts, rendered.errors


def rendered_texts_of(rollout: Rollout, reference: Reference) -> Any:
    with everything_rendered():
        return texts_of(rollout, reference)


@pytest.mark.parametrize("name", NEAR)
def test_most_prompts_of_like_conversations_are_known(name: str) -> None:
    dice = random.Random(7)
    writer = replace(toy_writer(name), others=[toy_writer(name).renderer])
    rollouts = []
    size = examples(6, 12)
    for number in range(size):
        messages = [{"role": "system", "content": "Be kind."}]
        for turn in range(4):
            messages.append({"role": "user", "content": f"Question {turn} of {number}"})
            messages.append(
                {"role": "assistant", "content": f"<think>\nhm {turn}\n</think>\n\nAnswer {turn} of {number}"}
            )
        with patch.object(dice, "random", lambda: 0.5):
            rollouts.append(writer.rollout(messages, dice))
    count = agree(writer, rollouts)
    if name == "last message marked":
        assert count == 0
    elif name == "last question in front":
        assert 0 < count < 2 * size, "the last prompt is the start of the whole"
    elif name == "last answer thinks":
        assert count > size * 6, "all of them, though the whole is not as recorded"
    else:
        assert count > size * 4


def growing_calls(tokenizer: Tokenizer, dice: random.Random) -> Rollout:
    """Calls whose prompts keep the text that was sampled, its reasoning included, in the same tokens or others."""
    messages: list[dict[str, Any]] = []
    turns: list[Turn] = []
    seen, text = np.empty(0, np.int32), ""
    for _ in range(dice.randrange(1, 5)):
        thought = dice.choice(("", "", "<think>\nhm\n</think>\n\n", "<think>\nHi\n</think>\n\n"))
        question, answer = dice.choice(WORDS), thought + dice.choice(WORDS)
        rest = f"{dice.choice(chr(10) * 5 + ' ')}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        rest = rest if turns else rest[1:]
        text += rest
        prompt = np.concatenate([seen, tokenizer.encode(rest)]) if dice.random() < 0.6 else tokenizer.encode(text)
        sampled = answer + dice.choice(("<|im_end|>",) * 5 + ("",))
        cut = dice.randrange(len(sampled) + 1) if dice.random() < 0.4 else 0
        ids = np.concatenate([tokenizer.encode(sampled[:cut]), tokenizer.encode(sampled[cut:])])
        turns.append(Turn(prompt_ids=prompt, completion_ids=ids, message_index=len(messages) + 1))
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        seen, text = np.concatenate([prompt, ids]), text + sampled
    return Rollout(Place("toy", 0), "toy", as_messages(messages, "messages"), (), {}, tuple(turns))


def test_a_last_answer_of_the_text_that_was_sampled_differs_nowhere_else() -> None:
    """It is not compared once more, and nothing is missed."""
    written_at = CompletionInContext.written_at
    count = 0

    def counted(*arguments: Any) -> int | None:
        nonlocal count
        place = written_at(*arguments)
        count += place is not None
        return place

    for name in ("plain", "last answer thinks", *(name for name in NEAR if "stripped" in name)):
        writer, dice = toy_writer(name), random.Random(name)
        for _ in range(examples(40, 800)):
            rollout = growing_calls(writer.tokenizer, dice)
            with patch.object(CompletionInContext, "written_at", counted):
                fast = said(gather(rollout, writer.tokenizer, writer.renderer))
            with patch.object(CompletionInContext, "written_at", lambda *_: None):
                assert fast == said(gather(rollout, writer.tokenizer, writer.renderer))
    assert count > examples(2, 50)


def test_templates_that_may_look_further_are_told() -> None:
    tokenizer = toy.toy_tokenizer()

    def looked_for(source: str) -> Any:
        return make_renderer(tokenizer, chat_template=source).template(False).text_conditions

    assert [name for name, source in FAR.items() if looked_for(source) is not None] == []
    assert [name for name, source in NEAR.items() if looked_for(source) is None] == []
    assert looked_for(NEAR["reasoning stripped everywhere"]) == (("assistant",), ("</think>",), ())


def test_a_template_that_was_misread_is_always_rendered() -> None:
    """If a prompt is not what all of its messages were proven to be, nothing is relied on any more."""
    dice = random.Random(3)
    source = (
        "{% set ns = namespace(long='') %}" + START + "{% if m.content | length > 6 %}{% set ns.long = 'long ' %}"
    )
    source += "{% endif %}" + END + "{{ ns.long }}" + PLAIN
    tokenizer = toy.toy_tokenizer()
    renderer, wrong = (make_renderer(tokenizer, chat_template=template) for template in (source, "long " + PLAIN))
    short, long = (
        [
            {"role": role, "content": f"{text}{number}"}
            for text in texts
            for number, role in enumerate(("user", "assistant"))
        ]
        for texts in (("a", "b"), ("c", "a long question"))
    )
    with patch.object(dice, "random", lambda: 0.5), patch.object(Template, "text_conditions", (("user",), (), ())):
        rollouts = [Writer(tokenizer, renderer, ()).rollout(messages, dice) for messages in (short, long)]
        first = Writer(tokenizer, wrong, ()).rollout(long, dice).turns[0]
        misread = replace(rollouts[1], turns=(first, *rollouts[1].turns[1:]))
        starts = prompts.prompt_starts(tokenizer, renderer.template(False))
        assert starts is not None
        written(rollouts[0], tokenizer, renderer)
        assert starts._found == 2
        with everything_rendered():
            right = written(misread, tokenizer, renderer)
        assert written(misread, tokenizer, renderer) != right, "the template was misread on purpose"
        starts._found = 254  # the first prompt is now rendered as a sample
        assert written(misread, tokenizer, renderer) == right
        assert written(misread, tokenizer, renderer) == right
        assert starts._off


def test_texts_that_both_engines_write_alike_are_proven_by_shape() -> None:
    tokenizer, renderer = toy.toy_tokenizer(), make_renderer(toy.toy_tokenizer(), chat_template=PLAIN)
    starts = prompts.prompt_starts(tokenizer, renderer.template(False))
    assert starts is not None
    scaffolds = template_scaffolds(renderer.template(False))
    inputs = scaffolds.inputs(renderer.variables((), {})) if scaffolds is not None else None

    def places(*texts: str, opens: bool = True) -> Any:
        roles = ("user", "assistant") * len(texts)
        logged = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return starts.contexts_alone(as_messages(logged, "messages"), inputs, opens, ChatForms())

    first = places("a", "b")
    assert not starts.writes_alike(first)
    starts.learn_alike(first, True)
    assert starts.writes_alike(places("other", "texts"))
    for unproven in (places("a", "b", "c"), places("", "b"), places("a"), places("a", "b", opens=False)):
        assert not starts.writes_alike(unproven)
    assert [starts.writes_alike(first) for _ in range(prompts._ONE_IN)].count(False) == 1, "one is checked"
    starts.learn_alike(first, False)
    assert places("a", "b") is None
    assert not starts.writes_alike(first)


def test_a_differing_prompt_of_a_known_shape_is_not_rendered_by_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, renderer = toy.toy_tokenizer(), toy.toy_renderer()
    forget(renderer)
    compared: list[int] = []
    learn = PromptStarts.learn_alike

    def counted(self: PromptStarts, places: Any, alike: bool) -> None:
        compared.append(len(places))
        learn(self, places, alike)

    def differing(word: str) -> Rollout:
        messages = as_messages(
            [{"role": "user", "content": f"{word}?"}, {"role": "assistant", "content": word}], "m"
        )
        text = renderer.render(messages[:1], add_generation_prompt=True)
        turn = Turn(
            tokenizer.encode(text.replace("?", " !")), tokenizer.encode(f"{word}<|im_end|>"), message_index=1
        )
        return Rollout(Place("toy", 0), "toy", messages, turns=(turn,))

    monkeypatch.setattr(PromptStarts, "learn_alike", counted)
    every = [differing(word) for word in ("one", "two", "three")]
    shown = [written(rollout, tokenizer, renderer) for rollout in every]
    assert sorted(compared) == [1, 2], "by both engines: one prompt and one conversation"
    with everything_rendered():
        assert shown == [written(rollout, tokenizer, renderer) for rollout in every]


def test_shapes_tell_values_apart_that_templates_tell_apart() -> None:
    shapes = MessageShapes((("user",), ("</think>", "<think>"), (3,)))
    same = [("Hi there", "Hello you"), (17, 18), ({"a": "Hi there"}, {"a": "Good day"})]
    for left, other in same:
        assert shapes.shape_of(left) == shapes.shape_of(other)
    different: list[Any] = [
        "",
        " ",
        "\n",
        "Hi",
        "Hi!",
        "Hi there",
        "user",
        " user ",
        "a<think>b",
        "<think>ab",
        "ab<think>",
    ]
    different += ["<think></think>", "<think> </think>", "<think>a</think>", "<think>a</think>user", "</think>"]
    different += [
        0,
        1,
        3,
        17,
        True,
        False,
        1.0,
        0.0,
        2.5,
        None,
        [],
        {},
        ["Hi"],
        {"a": "Hi!"},
        {"b": "Hi!"},
        {"a": 1},
    ]
    kinds = [shapes.shape_of(value) for value in different]
    assert len(set(kinds)) == len(kinds)
    with pytest.raises(TypeError):
        shapes.shape_of((1, 2))
