"""Whether a sampled turn is rendered as sampled: which spacing, order and escapes a template changes.

A model writes an answer in the template's form, but spaces it as it likes. Each case here is such a text. It is
parsed as inference servers parse it, and rendered again as the last answer. Incomplete answers too: cut by a
length limit, or begun by the caller (prefill).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tito_audit.render.renderer import Renderer
from tito_audit.templates.probes import ANSWER, REASONING, TOOLS, USER, answering, call, probe

_CONTENT, _THOUGHT = "Cqx is sunny", "Rzk thinks so"
_CITY = "Xqv"
_NAMED = '{"city": "Xqv"}'


class Return(StrEnum):
    """What became of a sampled text."""

    KEPT = "kept"
    REWRITTEN = "rewritten"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Returned:
    """One form of a sampled answer, and what the template writes for it."""

    part: str
    """`answer`, `reasoning` or `tool call`."""
    case: str
    """What is special about it, in words."""
    form: str
    """How it was parsed: `as sampled`, `stripped`, `arguments as object`, `arguments as text`."""
    outcome: Return
    sampled: str
    rendered: str
    """What the template writes instead; "" if it refused."""


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """How a template writes an answer after its generation prompt."""

    prompt: str
    opens: str
    """Before the reasoning; "" if the generation prompt opens it, or there is none."""
    closes: str | None
    """Between reasoning and answer; None if the template writes no reasoning."""
    ends: str
    """After the answer."""

    @property
    def tags(self) -> tuple[str, str]:
        """The texts that open and close reasoning, without white space."""
        return self.opens.strip(), (self.closes or "").strip()


def answer_form(renderer: Renderer) -> WrittenAnswer | None:
    """How a template writes an answer; None if it does not continue the generation prompt."""
    prompt = _written(renderer, [], opens=True)
    written = _written(renderer, [answering(_CONTENT, _THOUGHT)])
    if prompt is None or written is None or not written.startswith(prompt):
        return None
    before, content, ends = written[len(prompt) :].partition(_CONTENT)
    if not content:
        return None
    opens, thought, closes = before.partition(_THOUGHT)
    return WrittenAnswer(prompt, opens, closes, ends) if thought else WrittenAnswer(prompt, "", None, ends)


def _written(
    renderer: Renderer, answers: Sequence[Mapping[str, Any]], *, opens: bool = False, tools: bool = False
) -> str | None:
    """What the template writes for a question and these answers; None if it refuses."""
    question = {"role": "user", "content": USER}
    return probe("", [question, *answers], TOOLS if tools else ()).text(renderer, opens=opens)


def _returned(
    renderer: Renderer, what: tuple[str, str, str], prompt: str, sampled: str, answer: Mapping[str, Any]
) -> Returned:
    """What becomes of one sampled text that was parsed to this message."""
    outcome, rendered = _outcome(renderer, prompt, sampled, answer, tools=bool(answer.get("tool_calls")))
    return Returned(*what, outcome, sampled, rendered)


def _outcome(
    renderer: Renderer, prompt: str, sampled: str, answer: Mapping[str, Any], *, tools: bool
) -> tuple[Return, str]:
    """What becomes of a sampled text, and what the template writes for it; "" if it refused."""
    written = _written(renderer, [answer], tools=tools)
    if written is None:
        return Return.REFUSED, ""
    outcome = Return.KEPT if written.startswith(prompt + sampled) else Return.REWRITTEN
    return outcome, written.removeprefix(prompt)


# Answers and reasoning

_ANSWERS: Mapping[str, str] = {
    "as the template writes it": _CONTENT,
    "a space before": f" {_CONTENT}",
    "a line break before": f"\n{_CONTENT}",
    "a space after": f"{_CONTENT} ",
    "a line break after": f"{_CONTENT}\n",
    "several spaces and empty lines inside": "Cqx  is\n\n\n sunny\t.",
    "Windows line breaks": "Cqx is\r\nsunny",
    "</think> inside": "Cqx </think> is sunny",
    "JSON": '{ "Cqx":1.0 }',
    "other scripts": "Cqx 東京 é \u0301 🌤️",
    "nothing": "",
}
_THOUGHTS: Mapping[str, tuple[str, str, str]] = {
    "as the template writes it": ("{opens}", _THOUGHT, "{closes}"),
    "no white space around": ("{open}", _THOUGHT, "{close}"),
    "one line break around": ("{open}\n", _THOUGHT, "\n{close}\n"),
    "empty lines around": ("{open}\n\n", _THOUGHT, "\n\n{close}\n\n"),
    "spaces around": ("{open} ", _THOUGHT, " {close} "),
    "nothing": ("{open}", "", "{close}"),
    "empty lines inside": ("{opens}", "Rzk\n\n\nthinks", "{closes}"),
}


def returned_answers(renderer: Renderer, form: WrittenAnswer) -> Iterator[Returned]:
    """What becomes of each form of a sampled answer and its reasoning."""
    thought = _THOUGHT if form.closes is not None else None
    before = f"{form.opens}{thought}{form.closes}" if thought is not None else ""
    for case, text in _ANSWERS.items():
        sampled = f"{before}{text}{form.ends.rstrip()}"
        yield _returned(renderer, ("answer", case, "as sampled"), form.prompt, sampled, answering(text, thought))
    if form.closes is None:
        return
    opening, closing = form.tags
    names = {"opens": form.opens, "closes": form.closes, "open": opening, "close": closing}
    for case, (opens, text, closes) in _THOUGHTS.items():
        opens, closes = opens.format(**names), closes.format(**names)
        sampled = f"{opens}{text}{closes}{_CONTENT}{form.ends.rstrip()}"
        raw = opens.removeprefix(opening) + text + closes.partition(closing)[0]
        rest = closes.partition(closing)[2] + _CONTENT
        for how, answer in (
            ("as sampled", answering(rest, raw)),
            ("stripped", answering(rest.strip(), raw.strip())),
        ):
            yield _returned(renderer, ("reasoning", case, how), form.prompt, sampled, answer)


# Tool calls

_JSON: Mapping[str, str] = {
    "JSON as the template writes it": '{"city": "Paris", "days": 3}',
    "JSON without spaces": '{"city":"Paris","days":3}',
    "JSON with more spaces": '{ "city" : "Paris" , "days" : 3 }',
    "JSON on several lines": '{\n  "city": "Paris",\n  "days": 3\n}',
    "another order of keys": '{"days": 3, "city": "Paris"}',
    "letters outside ASCII": '{"city": "Zürich"}',
    "letters outside ASCII, escaped": '{"city": "Z\\u00fcrich"}',
    "an escaped slash": '{"city": "a\\/b"}',
    "<, >, & and '": '{"city": "<b>&\'"}',
    "3.0": '{"days": 3.0}',
    "3e0": '{"days": 3e0}',
    "true and null": '{"warm": true, "days": null}',
    "a key twice": '{"city": "Paris", "city": "Rome"}',
    "no arguments": "{}",
}
_VALUES: Mapping[str, tuple[str, object]] = {
    "a text": ("Paris", "Paris"),
    "white space around a text": (" Paris ", " Paris "),
    "letters outside ASCII": ("Zürich", "Zürich"),
    "3": ("3", 3),
    "3.0": ("3.0", 3.0),
    "true": ("true", True),
    "null": ("null", None),
    "a list": ("[1, 2]", [1, 2]),
    "an object without spaces": ('{"a":1}', {"a": 1}),
}


def returned_calls(renderer: Renderer) -> Iterator[Returned]:
    """What becomes of each form of a sampled tool call."""
    prompt = _written(renderer, [], opens=True, tools=True)
    if prompt is None:
        return
    for arguments, form in (("object", "arguments as object"), ("string", "arguments as text")):
        other = replace(renderer, tool_arguments=arguments)  # type: ignore[arg-type]
        called = call_text(other, prompt)
        if called is None:
            continue
        text, quoted = called
        if quoted is not None:
            before, _, after = text.partition(quoted)
            for case, json_text in _JSON.items():
                answer = answering(None, None, call(json_text))
                sampled = f"{before}{json_text}{after}".rstrip()
                yield _returned(other, ("tool call", case, form), prompt, sampled, answer)
            # Other spacings and orders of the JSON around name and arguments, if there is any
            named = json.dumps({"city": _CITY})
            usual = f'{{"name": "get_weather", "arguments": {named}}}'
            for case, unusual in (
                ("the call without spaces", f'{{"name":"get_weather","arguments":{named}}}'),
                ("arguments before the name", f'{{"arguments": {named}, "name": "get_weather"}}'),
            ):
                if usual in text:
                    sampled = text.replace(usual, unusual).rstrip()
                    answer = answering(None, None, call(named))
                    yield _returned(other, ("tool call", case, form), prompt, sampled, answer)
        elif text.count(_CITY) == 1:
            for case, (written, value) in _VALUES.items():
                answer = answering(None, None, call(json.dumps({"city": value})))
                sampled = text.replace(_CITY, written).rstrip()
                yield _returned(other, ("tool call", case, form), prompt, sampled, answer)
    # A text before a call; servers keep the white space between them as part of the text, or strip it.
    whole = _written(renderer, [answering(_CONTENT, None, call(_NAMED))], tools=True)
    bare = _written(renderer, [answering(None, None, call(_NAMED))], tools=True)
    if whole is None or bare is None or not whole.startswith(prompt) or _CITY not in whole:
        return
    before, content, after = whole[len(prompt) :].partition(_CONTENT)
    if not content:
        return
    space = after[: len(after) - len(after.lstrip())]
    for case, between in (("text before it", space), ("text and an empty line before it", "\n\n")):
        sampled = f"{before}{_CONTENT}{between}{after.lstrip()}".rstrip()
        for form, text in (("as sampled", _CONTENT + between), ("stripped", _CONTENT)):
            answer = answering(text, None, call(_NAMED))
            yield _returned(renderer, ("tool call", case, form), prompt, sampled, answer)


def call_text(renderer: Renderer, prompt: str) -> tuple[str, str | None] | None:
    """How a template writes a call after a generation prompt, and the JSON of its arguments in it.

    None if it writes no such call; no JSON if it writes the arguments in another way.
    """
    arguments = {"city": _CITY}
    written = _written(renderer, [answering(None, None, call(json.dumps(arguments)))], tools=True)
    if written is None or not written.startswith(prompt) or _CITY not in written[len(prompt) :]:
        return None
    text = written[len(prompt) :]
    spelled = (
        json.dumps(arguments),
        json.dumps(arguments, separators=(",", ":")),
        json.dumps(arguments, indent=4),
    )
    return text, next((json_text for json_text in spelled if text.count(json_text) == 1), None)


_HALF = "It is sun"
_HALF_THOUGHT = "They ask for the"


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """One incomplete answer."""

    case: str
    outcome: Return
    added: str = ""
    """What the template writes right after what was sampled, which the model never sampled; for a prefill, between
    the generation prompt and the text that the caller gave."""


def partial_answers(renderer: Renderer, form: WrittenAnswer) -> Iterator[CutAnswer]:
    """What becomes of incomplete answers."""
    before = f"{form.opens}{REASONING}{form.closes}" if form.closes is not None else ""
    thought = REASONING if form.closes is not None else None
    yield _partial(renderer, "cut inside the answer", form.prompt, before + _HALF, answering(_HALF, thought))
    if form.closes is not None:
        case, sampled = "cut inside the reasoning", form.opens + _HALF_THOUGHT
        yield _partial(renderer, case, form.prompt, sampled, answering("", _HALF_THOUGHT))
        yield _partial(renderer, f"{case}, left in the content", form.prompt, sampled, answering(sampled))
    prompt = _written(renderer, [], opens=True, tools=True)
    called = call_text(renderer, prompt) if prompt is not None else None
    if prompt is not None and called is not None:
        half = called[0][: called[0].find(_CITY)]
        yield _partial(renderer, "cut inside a tool call", prompt, half, answering(half), tools=True)
    # An answer that the caller began, cut where it ends, as `continue_final_message` does.
    written = _written(renderer, [answering(_HALF)])
    if written is None:
        yield CutAnswer("prefill: the beginning of an answer", Return.REFUSED)
        return
    cut = written[: written.rfind(_HALF) + len(_HALF)]
    whole = _written(renderer, [answering(ANSWER)])
    unchanged = _HALF in written and whole is not None and whole.startswith(cut)
    before = cut[len(form.prompt) : len(cut) - len(_HALF)] if cut.startswith(form.prompt) else ""
    yield CutAnswer("prefill: the beginning of an answer", Return.KEPT if unchanged else Return.REWRITTEN, before)


def _partial(
    renderer: Renderer, case: str, prompt: str, sampled: str, answer: Mapping[str, Any], *, tools: bool = False
) -> CutAnswer:
    """What the template makes of a text that was sampled without an end token."""
    outcome, rendered = _outcome(renderer, prompt, sampled, answer, tools=tools)
    return CutAnswer(case, outcome, rendered[len(sampled) :] if outcome is Return.KEPT else "")
