"""Whether a sampled answer survives the round trip of parsing and rendering: spacing, key order, escapes.

A model writes an answer in the template's form, but spaces it as it likes. Each case is such a text, parsed as
inference servers parse it and rendered again as the last answer. So are incomplete answers: cut by a length limit,
or begun by the caller (prefill).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tito_audit.render.renderer import Renderer
from tito_audit.templates.probes import ANSWER, REASONING, TOOLS, USER, assistant, make_probe, tool_call

_CONTENT, _REASONING = "Cqx is sunny", "Rzk thinks so"
_CITY = "Xqv"
_NAMED = '{"city": "Xqv"}'


class Fidelity(StrEnum):
    """What becomes of a sampled text."""

    KEPT = "kept"
    REWRITTEN = "rewritten"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A sampled answer, and what the template writes for it once it is parsed."""

    part: str
    """`answer`, `reasoning` or `tool call`."""
    case: str
    """What is special about the answer, in words."""
    form: str
    """How it was parsed: `as sampled`, `stripped`, `arguments as object`, `arguments as text`."""
    outcome: Fidelity
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


def answer_form(renderer: Renderer) -> WrittenAnswer | None:
    """How a template writes an answer; None if it does not continue the generation prompt."""
    prompt = _render_answers(renderer, [], opens=True)
    written = _render_answers(renderer, [assistant(_CONTENT, _REASONING)])
    if prompt is None or written is None or not written.startswith(prompt):
        return None
    before, content, ends = written[len(prompt) :].partition(_CONTENT)
    if not content:
        return None
    opens, thought, closes = before.partition(_REASONING)
    return WrittenAnswer(prompt, opens, closes, ends) if thought else WrittenAnswer(prompt, "", None, ends)


def _render_answers(
    renderer: Renderer, answers: Sequence[Mapping[str, Any]], *, opens: bool = False, tools: bool = False
) -> str | None:
    """The text of a question and these answers; None if the template refuses."""
    question = {"role": "user", "content": USER}
    return make_probe("", [question, *answers], TOOLS if tools else ()).try_render(renderer, opens=opens)


def _round_trip(
    renderer: Renderer, what: tuple[str, str, str], prompt: str, sampled: str, answer: Mapping[str, Any]
) -> RoundTrip:
    """The round trip of a sampled text that was parsed to this message; `what`: its part, case and form."""
    outcome, rendered = _compare_rendered(renderer, prompt, sampled, answer, tools=bool(answer.get("tool_calls")))
    return RoundTrip(*what, outcome, sampled, rendered)


def _compare_rendered(
    renderer: Renderer, prompt: str, sampled: str, answer: Mapping[str, Any], *, tools: bool
) -> tuple[Fidelity, str]:
    """What becomes of a sampled text, and what the template writes after the prompt; "" if it refused."""
    written = _render_answers(renderer, [answer], tools=tools)
    if written is None:
        return Fidelity.REFUSED, ""
    outcome = Fidelity.KEPT if written.startswith(prompt + sampled) else Fidelity.REWRITTEN
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
_REASONINGS: Mapping[str, tuple[str, str, str]] = {
    "as the template writes it": ("{opens}", _REASONING, "{closes}"),
    "no white space around": ("{open}", _REASONING, "{close}"),
    "one line break around": ("{open}\n", _REASONING, "\n{close}\n"),
    "empty lines around": ("{open}\n\n", _REASONING, "\n\n{close}\n\n"),
    "spaces around": ("{open} ", _REASONING, " {close} "),
    "nothing": ("{open}", "", "{close}"),
    "empty lines inside": ("{opens}", "Rzk\n\n\nthinks", "{closes}"),
}


def answer_round_trips(renderer: Renderer, form: WrittenAnswer) -> Iterator[RoundTrip]:
    """A round trip for each spacing of an answer and of its reasoning."""
    thought = _REASONING if form.closes is not None else None
    before = f"{form.opens}{thought}{form.closes}" if thought is not None else ""
    for case, text in _ANSWERS.items():
        sampled = f"{before}{text}{form.ends.rstrip()}"
        yield _round_trip(renderer, ("answer", case, "as sampled"), form.prompt, sampled, assistant(text, thought))
    if form.closes is None:
        return
    opening, closing = form.opens.strip(), form.closes.strip()
    names = {"opens": form.opens, "closes": form.closes, "open": opening, "close": closing}
    for case, (opens, text, closes) in _REASONINGS.items():
        opens, closes = opens.format(**names), closes.format(**names)
        sampled = f"{opens}{text}{closes}{_CONTENT}{form.ends.rstrip()}"
        raw = opens.removeprefix(opening) + text + closes.partition(closing)[0]
        rest = closes.partition(closing)[2] + _CONTENT
        for how, answer in (
            ("as sampled", assistant(rest, raw)),
            ("stripped", assistant(rest.strip(), raw.strip())),
        ):
            yield _round_trip(renderer, ("reasoning", case, how), form.prompt, sampled, answer)


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


def call_round_trips(renderer: Renderer) -> Iterator[RoundTrip]:
    """A round trip for each spelling of a tool call."""
    prompt = _render_answers(renderer, [], opens=True, tools=True)
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
                answer = assistant(None, None, tool_call(json_text))
                sampled = f"{before}{json_text}{after}".rstrip()
                yield _round_trip(other, ("tool call", case, form), prompt, sampled, answer)
            # The JSON object around name and arguments, if the template writes one
            named = json.dumps({"city": _CITY})
            usual = f'{{"name": "get_weather", "arguments": {named}}}'
            for case, unusual in (
                ("the call without spaces", f'{{"name":"get_weather","arguments":{named}}}'),
                ("arguments before the name", f'{{"arguments": {named}, "name": "get_weather"}}'),
            ):
                if usual in text:
                    sampled = text.replace(usual, unusual).rstrip()
                    answer = assistant(None, None, tool_call(named))
                    yield _round_trip(other, ("tool call", case, form), prompt, sampled, answer)
        elif text.count(_CITY) == 1:
            for case, (written, value) in _VALUES.items():
                answer = assistant(None, None, tool_call(json.dumps({"city": value})))
                sampled = text.replace(_CITY, written).rstrip()
                yield _round_trip(other, ("tool call", case, form), prompt, sampled, answer)
    # Text before a call: servers keep the white space between them as part of the text, or strip it.
    whole = _render_answers(renderer, [assistant(_CONTENT, None, tool_call(_NAMED))], tools=True)
    bare = _render_answers(renderer, [assistant(None, None, tool_call(_NAMED))], tools=True)
    if whole is None or bare is None or not whole.startswith(prompt) or _CITY not in whole:
        return
    before, content, after = whole[len(prompt) :].partition(_CONTENT)
    if not content:
        return
    space = after[: len(after) - len(after.lstrip())]
    for case, between in (("text before it", space), ("text and an empty line before it", "\n\n")):
        sampled = f"{before}{_CONTENT}{between}{after.lstrip()}".rstrip()
        for form, text in (("as sampled", _CONTENT + between), ("stripped", _CONTENT)):
            answer = assistant(text, None, tool_call(_NAMED))
            yield _round_trip(renderer, ("tool call", case, form), prompt, sampled, answer)


def call_text(renderer: Renderer, prompt: str) -> tuple[str, str | None] | None:
    """How a template writes a call after a generation prompt, and the JSON of its arguments within that text.

    None if the template writes no call; the JSON is None if it writes arguments in another syntax.
    """
    arguments = {"city": _CITY}
    written = _render_answers(renderer, [assistant(None, None, tool_call(json.dumps(arguments)))], tools=True)
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
_HALF_REASONING = "They ask for the"


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """One incomplete answer."""

    case: str
    outcome: Fidelity
    added: str = ""
    """What the template writes right after the sampled text; for a prefill, between the generation prompt and the
    text that the caller gave."""


def cut_answers(renderer: Renderer, form: WrittenAnswer) -> Iterator[CutAnswer]:
    """What becomes of answers that were cut, and of a prefill."""
    before = f"{form.opens}{REASONING}{form.closes}" if form.closes is not None else ""
    thought = REASONING if form.closes is not None else None
    yield _cut_answer(renderer, "cut inside the answer", form.prompt, before + _HALF, assistant(_HALF, thought))
    if form.closes is not None:
        case, sampled = "cut inside the reasoning", form.opens + _HALF_REASONING
        yield _cut_answer(renderer, case, form.prompt, sampled, assistant("", _HALF_REASONING))
        yield _cut_answer(renderer, f"{case}, left in the content", form.prompt, sampled, assistant(sampled))
    prompt = _render_answers(renderer, [], opens=True, tools=True)
    called = call_text(renderer, prompt) if prompt is not None else None
    if prompt is not None and called is not None:
        half = called[0][: called[0].find(_CITY)]
        yield _cut_answer(renderer, "cut inside a tool call", prompt, half, assistant(half), tools=True)
    # A prefill: the text is cut where the answer ends, as `continue_final_message` does.
    written = _render_answers(renderer, [assistant(_HALF)])
    if written is None:
        yield CutAnswer("prefill: the beginning of an answer", Fidelity.REFUSED)
        return
    cut = written[: written.rfind(_HALF) + len(_HALF)]
    whole = _render_answers(renderer, [assistant(ANSWER)])
    unchanged = _HALF in written and whole is not None and whole.startswith(cut)
    before = cut[len(form.prompt) : len(cut) - len(_HALF)] if cut.startswith(form.prompt) else ""
    outcome = Fidelity.KEPT if unchanged else Fidelity.REWRITTEN
    yield CutAnswer("prefill: the beginning of an answer", outcome, before)


def _cut_answer(
    renderer: Renderer, case: str, prompt: str, sampled: str, answer: Mapping[str, Any], *, tools: bool = False
) -> CutAnswer:
    """What becomes of a text that was sampled without an end token."""
    outcome, rendered = _compare_rendered(renderer, prompt, sampled, answer, tools=tools)
    return CutAnswer(case, outcome, rendered[len(sampled) :] if outcome is Fidelity.KEPT else "")
