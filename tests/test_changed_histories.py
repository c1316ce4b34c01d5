"""What is said of a prompt whose history is not that of the call before it, with and without messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import toy
from tests.tables import stored
from tests.tiers import some
from tito_audit.evidence.gather import gather
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.render.renderer import make_renderer
from tito_audit.rules import all_rules
from tito_audit.run.check import check
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

TOKENIZERS = Path(__file__).resolve().parents[2] / "shared" / "tokenizers"
REAL = ("qwen3", "qwen2.5-coder", "smollm2", "gemma-3", "deepseek-v3", "llama-3.1")
beside = pytest.mark.skipif(not TOKENIZERS.exists(), reason="no shared/tokenizers beside the checkout")
NAMES = ["toy_bpe", *(pytest.param(name, marks=(pytest.mark.shared, beside)) for name in some(list(REAL), 2))]
ENDS = {"gemma-3": "<end_of_turn>", "llama-3.1": "<|eot_id|>", "deepseek-v3": "<｜end▁of▁sentence｜>"}
WITH_TOOLS = ("toy_bpe", "qwen3", "qwen2.5-coder")
"""Those whose template writes calls and results of tools as they are sampled here."""
FORMS = ("no messages", "messages of each call", "messages of the rollout")

Messages = list[dict[str, Any]]
Change = Callable[[Messages], Messages]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(city: str) -> dict[str, Any]:
    arguments = {"city": city, "days": 2}
    return {
        **answer(""),
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": arguments}}],
    }


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


TALK = [
    system("You are a careful helper. Answer briefly."),
    *(user("What is the capital of France?"), answer("The capital is Paris.")),
    *(user("And of Italy?"), answer("That is Rome, of course.")),
    *(user("How many people live there?"), answer("About three million people.")),
    *(user("Which one is older?"), answer("Rome is older than Paris.")),
]
TOOL_TALK = [
    system("You are a careful helper."),
    *(user("Weather in Paris?"), call("Paris"), result('{"temp": 21}'), answer("It is 21 degrees.")),
    *(user("And in Rome?"), call("Rome"), result('{"temp": 25}'), answer("It is 25 degrees.")),
    *(user("Thanks, which is warmer?"), answer("Rome is warmer.")),
]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}
]


def put(at: int, message: dict[str, Any]) -> Change:
    return lambda messages: [*messages[:at], message, *messages[at + 1 :]]


def cut(start: int, end: int, *new: dict[str, Any]) -> Change:
    return lambda messages: [*messages[:start], *new, *messages[end:]]


def swapped(first: int, second: int) -> Change:
    return lambda messages: put(first, messages[second])(put(second, messages[first])(messages))


def respelled(city: str) -> tuple[str, str]:
    return f'{{"city": "{city}", "days": 2}}', f'{{"city":"{city}","days":2}}'


REWRITTEN, TEMPLATE, BRANCH = {"SEQ303"}, {"SEQ302", "TPL203"}, {"SEQ304"}
CASES: list[tuple[str, Messages, int, Change | tuple[str, str], set[str]]] = [
    ("system prompt replaced", TALK, 2, put(0, system("You are a pirate. Speak like one.")), REWRITTEN),
    (
        "a word of the system prompt",
        TALK,
        3,
        put(0, system("You are a careful helper. Answer at length.")),
        REWRITTEN,
    ),
    ("system prompt gone", TALK, 3, cut(0, 1), REWRITTEN),
    ("summary in the system prompt", TALK, 2, cut(0, 3, system("You are a helper. So far: Paris.")), REWRITTEN),
    ("summary in place of a turn", TALK, 3, cut(1, 3, user("So far: France."), answer("Yes.")), REWRITTEN),
    ("oldest turn dropped", TALK, 3, cut(1, 3), REWRITTEN),
    ("two oldest turns dropped", TALK, 3, cut(1, 5), REWRITTEN),
    ("first question edited", TALK, 3, put(1, user("What is the capital of Spain?")), REWRITTEN),
    ("later question edited", TALK, 2, put(3, user("And of Spain?")), REWRITTEN),
    ("exchange inserted in front", TALK, 3, cut(1, 1, user("Hello"), answer("Hi there.")), REWRITTEN),
    ("exchange inserted", TALK, 3, cut(3, 3, user("Hello"), answer("Hi there.")), REWRITTEN),
    ("questions swapped", TALK, 3, swapped(1, 3), REWRITTEN),
    ("result of a tool edited", TOOL_TALK, 3, put(3, result('{"temp": 99}')), REWRITTEN),
    ("result of a tool cleared", TOOL_TALK, 4, put(3, result("[old result cleared]")), REWRITTEN),
    ("last result of a tool edited", TOOL_TALK, 4, put(7, result('{"temp": 99}')), REWRITTEN),
    ("first arguments respelled", TOOL_TALK, 3, respelled("Paris"), TEMPLATE),
    ("last arguments respelled", TOOL_TALK, 3, respelled("Rome"), TEMPLATE),
    ("arguments respelled in the last prompt", TOOL_TALK, 4, respelled("Rome"), TEMPLATE),
]
"""Name, conversation, first call with a changed prompt, change of its messages or its text, codes that tell it."""


@cache
def loaded(name: str) -> Tokenizer:
    return toy.toy_tokenizer() if name == "toy_bpe" else load_tokenizer(str(TOKENIZERS / name))


class Conversation:
    """A conversation as calls, each with the prompt that the template writes for what it was sent."""

    def __init__(self, name: str, messages: Messages) -> None:
        self.tokenizer = loaded(name)
        self.renderer = make_renderer(self.tokenizer)
        self.messages = messages
        self.end = ENDS.get(name, "<|im_end|>")
        self.tools = as_tools(TOOLS if any("tool_calls" in message for message in messages) else None, "tools")

    @property
    def answers(self) -> list[int]:
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    def text(self, sent: Messages) -> str:
        return self.renderer.render(
            as_messages(sent, "messages"), self.tools, add_generation_prompt=True, template_kwargs={}
        )

    def sampled(self, message: dict[str, Any]) -> Ids:
        text = message["content"]
        if "tool_calls" in message:
            city = message["tool_calls"][0]["function"]["arguments"]["city"]
            text = f'<tool_call>\n{{"name": "weather", "arguments": {respelled(city)[0]}}}\n</tool_call>'
        return self.tokenizer.encode(text + self.end)

    def findings(self, calls: Sequence[tuple[Messages, str, Ids]], form: str) -> list[Finding]:
        turns = tuple(
            Turn(
                self.tokenizer.encode(text),
                completion,
                prompt_messages=as_messages(sent, "messages") if form == FORMS[1] else None,
                message_index=self.answers[number] if form == FORMS[2] else None,
                finish_reason="stop",
            )
            for number, (sent, text, completion) in enumerate(calls)
        )
        messages = as_messages(None if form == FORMS[0] else self.messages, "messages")
        rules = all_rules()
        evidence = gather(
            Rollout(Place("here", 0), "toy", messages, self.tools, {}, turns), self.tokenizer, self.renderer
        )
        return list(check(evidence, rules, frozenset(rule.code for rule in rules))[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=itemgetter(0))
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_history_is_told_by_what_changed(name: str, case: Any, form: str) -> None:
    _, messages, first, change, codes = case
    if messages is TOOL_TALK and name not in WITH_TOOLS:
        pytest.skip("its template writes no tool calls")
    talk = Conversation(name, messages)
    calls = []
    for number, at in enumerate(talk.answers):
        sent, later = messages[:at], number >= first
        if later and not isinstance(change, tuple):
            sent = change(sent)
        text = talk.text(sent)
        if later and isinstance(change, tuple):
            assert change[0] in text
            text = text.replace(*change)
        calls.append((sent, text, talk.sampled(messages[at])))
    findings = talk.findings(calls, form)
    loud = {entry.code for entry in findings if entry.hit.severity is None or entry.severity.name != "NOTE"}
    assert codes <= loud
    assert {code for code in loud if code.startswith("SEQ")} == {code for code in codes if code.startswith("SEQ")}
    assert not any("same messages" in entry.hit.message for entry in findings if codes is REWRITTEN)
    assert "SEQ304" not in {entry.code for entry in findings}


BRANCHES = stored(__file__, "BRANCHES")


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("case", BRANCHES, ids=itemgetter("name"))
@pytest.mark.parametrize("name", NAMES)
def test_a_branch_is_no_broken_history(name: str, case: Any, form: str) -> None:
    talk, rendered = Conversation(name, TALK), []
    for opening, *texts, said in case["calls"]:
        sent = [system(opening), *((answer if at % 2 else user)(text) for at, text in enumerate(texts))]
        rendered.append((sent, talk.text(sent), talk.sampled(answer(said))))
    codes = [entry.code for entry in talk.findings(rendered, form)]
    assert [code for code in codes if not code.startswith("TOK")] == case["codes"]


def test_without_text_a_prompt_that_holds_another_answer_is_no_branch() -> None:
    """Ids alone: turn 2 starts with turn 1's prompt, and goes on with another answer than turn 1's."""
    spoken = [([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 7, 6, 8], [9])]
    turns = tuple(Turn(np.array(prompt, np.int32), np.array(sampled, np.int32)) for prompt, sampled in spoken)
    (_, link) = gather(Rollout(Place("here", 0), "toy", turns=turns), None, None).links
    assert (link.parent, link.kind.value, link.at) == (1, "template", 4)
