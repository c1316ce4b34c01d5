"""What is said of an answer is what an oracle finds that only renders: for real and published templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from tests.template_oracle.chat import Refusal, Template
from tests.template_oracle.conversations import STEPS, TOOL, forms
from tests.template_oracle.facts import step, tools_for
from tests.template_oracle.sources import TOKENS, published_files, tokenizer_folders
from tests.tiers import some
from tito_audit.record.message import as_messages
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.render.template import compile_template
from tito_audit.templates.append_only import StepOutcome, check_append_only
from tito_audit.templates.probes import Probe
from tito_audit.tokens.load import load_tokenizer


def as_rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the oracle as templates get it: with each name that they read reasoning from."""
    rendered = dict(message)
    if "reasoning_content" in rendered:
        rendered["thinking"] = rendered["reasoning_content"]
    return rendered


def as_logged(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the oracle as logs have it: with arguments as text."""
    logged = dict(message)
    if "tool_calls" in logged:
        functions = [call["function"] for call in logged["tool_calls"]]
        texts = [{**function, "arguments": json.dumps(function["arguments"])} for function in functions]
        logged["tool_calls"] = [
            {**call, "function": text} for call, text in zip(logged["tool_calls"], texts, strict=True)
        ]
    return logged


CHATS = {
    name: ([as_rendered(message) for message in before], [as_rendered(message) for message in after])
    for name, (before, after) in STEPS.items()
    if after[0]["role"] != "assistant"
}
PROBES = {
    name: Probe(
        name,
        as_messages([as_logged(message) for message in (*before, *after)], name),
        (TOOL,) if tools_for([*before, *after]) else (),
    )
    for name, (before, after) in CHATS.items()
}


@cache
def templates() -> list[tuple[str, Template, Renderer]]:
    """Some templates at hand, each as the oracle and as the tool render it."""
    pairs = []
    for folder in some(tokenizer_folders(), 2):
        renderer = make_renderer(load_tokenizer(str(folder)))
        pairs.append((folder.name, Template(renderer.template(False).source, renderer.special_tokens), renderer))
    for name, path in some(list(published_files().items()), 8):
        pairs.append((name, *of_source(path.read_text(encoding="utf-8"))))
    return pairs


def of_source(source: str) -> tuple[Template, Renderer]:
    compiled = {"default": compile_template(source, "a test")}
    return Template(source, TOKENS), Renderer(templates=compiled, special_tokens=TOKENS)


def differences(oracle: Template, renderer: Renderer) -> Iterator[str]:
    """Each outcome of the tool that the texts of the oracle contradict."""
    for name, (before, after) in CHATS.items():
        verdict = check_append_only(renderer, [PROBES[name]])
        own = next((tried for tried in verdict.steps if tried.answer == len(before) - 1), None)
        if own is None:
            continue
        seen = step(oracle, before, after)
        first, prompt, then = texts(oracle, name)
        if own.outcome is StepOutcome.REFUSED:
            wrong = then is not None and prompt is not None
        elif then is None or prompt is None:
            wrong = True
        elif own.outcome is StepOutcome.KEPT:
            wrong = not then.startswith(prompt) or seen.outcome == "rewritten"
        elif own.outcome is StepOutcome.BROKEN:
            continued = first is not None and first.startswith(prompt)
            wrong = continued and seen.outcome == "kept" and then.startswith(prompt)
        else:
            wrong = False
        if wrong:
            yield f"{name}: {own.outcome}, but {seen.outcome}"


def texts(oracle: Template, name: str) -> tuple[str | None, str | None, str | None]:
    """The conversation with the answer last, the prompt of that answer, and the next prompt."""
    before, after = CHATS[name]
    tools = tools_for([*before, *after])
    out: list[str | None] = []
    for chat, opened in (([*before], False), ([*before[:-1]], True), ([*before, *after], True)):
        text = None
        for form in forms(chat):
            try:
                text = oracle.text(form, tools, opened=opened)
            except Refusal:
                continue
            break
        out.append(text)
    return out[0], out[1], out[2]


def test_no_outcome_contradicts_the_texts() -> None:
    cases = templates()
    if not cases:
        pytest.skip("no real or published templates here")
    wrong = {name: lines for name, oracle, renderer in cases if (lines := list(differences(oracle, renderer)))}
    assert wrong == {}


def test_a_template_that_is_called_append_only_is_so_for_conversations_that_the_tool_does_not_know() -> None:
    append_only = 0
    for name, oracle, renderer in templates():
        if not check_append_only(renderer).is_append_only:
            continue
        append_only += 1
        assert not check_append_only(renderer, PROBES.values()).broken, name
        for conversation in CHATS:
            _, prompt, then = texts(oracle, conversation)
            assert prompt is None or then is None or then.startswith(prompt), f"{name}: {conversation}"
    if not append_only:
        pytest.skip("no such template here")
