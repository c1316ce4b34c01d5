"""All facts about a template: what it does, what its arguments change, and which of them make it append-only.

A model writes an answer in the template's form, but spaces it as it likes. So spellings of an answer are parsed as
inference servers parse them and rendered again, also incomplete ones: cut by a length limit, or begun by the
caller (prefill).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations, islice, product
from typing import Any

from tito_audit.render.renderer import Renderer
from tito_audit.templates.append_only import AppendCheck, answer_tail, check_append_only, turn_ends
from tito_audit.templates.breaks import Break, BreakExplainer
from tito_audit.templates.probes import (
    ANSWER,
    CORE,
    PROBES,
    REASONING,
    TOOLS,
    USER,
    Probe,
    assistant,
    make_probe,
    tool_call,
)
from tito_audit.templates.seams import RoleContent, Seam, find_contents, find_seams
from tito_audit.tokens.encoders import ReferenceEncoder
from tito_audit.tokens.tokenizer import Tokenizer

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
        spellings: list[tuple[str, str, str]] = []  # (case, the call, its arguments)
        if quoted is not None:
            before, _, after = text.partition(quoted)
            spellings += ((case, before + spelled + after, spelled) for case, spelled in _JSON.items())
            # The JSON object around name and arguments, if the template writes one
            named = json.dumps({"city": _CITY})
            usual = f'{{"name": "get_weather", "arguments": {named}}}'
            wrapped = {
                "the call without spaces": f'{{"name":"get_weather","arguments":{named}}}',
                "arguments before the name": f'{{"arguments": {named}, "name": "get_weather"}}',
            }
            if usual in text:
                spellings += ((case, text.replace(usual, unusual), named) for case, unusual in wrapped.items())
        elif text.count(_CITY) == 1:
            for case, (written, value) in _VALUES.items():
                spellings.append((case, text.replace(_CITY, written), json.dumps({"city": value})))
        for case, sampled, spelled in spellings:
            answer = assistant(None, None, tool_call(spelled))
            yield _round_trip(other, ("tool call", case, form), prompt, sampled.rstrip(), answer)
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


_EFFECT_PROBES = (*CORE, *(probe for probe in PROBES if probe.name == "a system prompt and two answers"))


@dataclass(frozen=True, slots=True)
class Effect:
    """What one value of an argument changes in the probes."""

    name: str
    value: object
    changes: tuple[str, ...]
    """`generation prompt`, `beginning`, `messages`, `refusals`; () if it changes nothing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Arguments that were tried, and the check of usual conversations with them."""

    arguments: Mapping[str, object]
    append: AppendCheck


def find_effects(renderer: Renderer) -> tuple[Effect, ...]:
    """What each value of each argument changes, compared with the renderer's own arguments."""
    changed: list[Effect] = []
    for name, values in _untried_values(renderer).items():
        for value in values:
            changes: dict[str, None] = {}
            for probe in _EFFECT_PROBES:
                variant = _with_arguments(renderer, {name: value})
                ours, theirs = _render_both(renderer, probe), _render_both(variant, probe)
                if ours is None or theirs is None:
                    differs = {"refusals": ours is not theirs}
                else:
                    first = probe.messages[0].text
                    (head, _, rest), (other_head, _, other) = (text.partition(first) for text, _ in (ours, theirs))
                    openers = (opened.removeprefix(closed) for closed, opened in (ours, theirs))
                    differs = {"beginning": head != other_head, "messages": rest != other}
                    differs["generation prompt"] = len(set(openers)) > 1
                changes |= dict.fromkeys(what for what, differ in differs.items() if differ)
            changed.append(Effect(name, value, tuple(changes)))
    return tuple(changed)


def find_settings(renderer: Renderer, plain: AppendCheck) -> tuple[Setting, ...]:
    """Settings that break fewer steps of usual conversations than the current one, the best first.

    If the template is append-only already (`plain`): the single arguments that break it.
    """
    choices = _untried_values(renderer)
    if plain.is_append_only:
        tried = _try_settings(renderer, choices, 1)
        return tuple(setting for setting in tried if setting.append.broken)
    most = len(check_append_only(renderer, CORE).broken)
    better = [setting for setting in _try_settings(renderer, choices, 3) if len(setting.append.broken) < most]
    judged = [setting for setting in better if len(setting.append.refused) <= len(plain.refused)]
    # Drop a setting if a part of it is just as good.
    simplest = [
        setting
        for setting in judged
        if not any(
            other is not setting
            and other.arguments.items() < setting.arguments.items()
            and len(other.append.broken) <= len(setting.append.broken)
            for other in judged
        )
    ]
    return tuple(sorted(simplest, key=lambda setting: (len(setting.append.broken), len(setting.arguments))))


def _try_settings(renderer: Renderer, choices: Mapping[str, Sequence[object]], most: int) -> Iterator[Setting]:
    combined = (
        dict(zip(names, values, strict=True))
        for count in range(1, most + 1)
        for names in combinations(choices, count)
        for values in product(*(choices[name] for name in names))
    )
    for arguments in islice(combined, 64):
        yield Setting(arguments, check_append_only(_with_arguments(renderer, arguments), CORE))


def _untried_values(renderer: Renderer) -> dict[str, list[object]]:
    """For each argument that the templates read, the values worth trying that the renderer does not pass."""
    choices: dict[str, list[object]] = {}
    for template in (renderer.template(False), renderer.template(True)):
        for argument in template.arguments.arguments:
            passed = renderer.template_args.get(argument.name, argument)
            values: list[object] = [
                value
                for value in argument.values
                if value is not passed and (value is None or isinstance(value, str | int | float))
            ]
            if values:
                choices.setdefault(argument.name, values)
    return choices


def _with_arguments(renderer: Renderer, arguments: Mapping[str, object]) -> Renderer:
    return replace(renderer, template_args={**renderer.template_args, **arguments})


def _render_both(renderer: Renderer, probe: Probe, count: int | None = None) -> tuple[str, str] | None:
    """The first messages without and with a generation prompt; None if the template refuses them."""
    closed, opened = (probe.try_render(renderer, count, opens=on) for on in (False, True))
    return None if closed is None or opened is None else (closed, opened)


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    """What the template writes to open an answer."""

    texts: tuple[str, ...]
    """Every text that was seen; just one if it is the same after any message."""
    continued: bool
    """Whether a rendered answer begins with the generation prompt that it was sampled after."""


@dataclass(frozen=True, slots=True)
class Bos:
    """The token that begins a prompt."""

    text: str
    """"" if the tokenizer has none."""
    written: bool
    """Whether the template writes it."""
    added: bool | None
    """Whether the tokenizer adds it with `add_special_tokens`; None if unknown."""

    @property
    def doubled(self) -> bool | None:
        """Whether a prompt encoded with special tokens has it twice; None if unknown."""
        return None if self.added is None else self.written and self.added


@dataclass(frozen=True, slots=True)
class Stop:
    """A token that may end a turn."""

    text: str
    id: int | None
    """None if unknown, or if the text is several tokens."""
    of_tokenizer: bool
    """Whether the tokenizer's files name it as an end token."""
    written: bool
    """Whether the template ends an answer with it."""


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """The facts about one template with one set of arguments."""

    append: AppendCheck
    breaks: tuple[Break, ...]
    """An explanation of each broken step."""
    returned: tuple[RoundTrip, ...]
    partial: tuple[CutAnswer, ...]
    seams: tuple[Seam, ...]
    contents: tuple[RoleContent, ...]
    """How the contents of each role are written."""
    generation_prompt: GenerationPrompt
    stops: tuple[Stop, ...]
    bos: Bos
    clock_formats: tuple[str, ...] | None
    """The formats that it passes to `strftime_now`; () if they are unknown, None if it does not read the clock."""
    effects: tuple[Effect, ...]
    settings: tuple[Setting, ...]
    """Arguments that make it append-only; if it is already, those that break it."""


def template_facts(renderer: Renderer, tokenizer: Tokenizer | None = None) -> TemplateFacts:
    """Run all probes through a template; without a tokenizer, the facts about ids are missing."""
    append = check_append_only(renderer, PROBES)
    explainer = BreakExplainer(renderer)
    openers: dict[str, None] = {}
    for probe in PROBES:
        for count, message in enumerate(probe.messages):
            if message.sampled and count:
                texts = _render_both(renderer, probe, count)
                if texts is not None and texts[1].startswith(texts[0]):
                    openers.setdefault(texts[1].removeprefix(texts[0]))
    bos = renderer.special_tokens.get("bos_token", "")
    begins = ((probe.try_render(renderer) or "").startswith(bos) for probe in PROBES)
    added = None
    if tokenizer is not None:
        plain, ids = (ReferenceEncoder(tokenizer.backend).encode_one("x", special=on) for on in (False, True))
        added = ids[: len(ids) - len(plain)] == [tokenizer.bos_id] if len(ids) > len(plain) else False
    stops: list[Stop] = []
    tail, form = answer_tail(renderer), answer_form(renderer)
    for end in turn_ends(renderer):
        ids = tokenizer.encode(end).tolist() if tokenizer is not None else []
        stops.append(Stop(end, ids[0] if len(ids) == 1 else None, end in renderer.end_texts, end in tail))
    read = [renderer.template(with_tools).arguments for with_tools in (False, True)]
    reads_clock = any(arguments.reads_clock for arguments in read)
    return TemplateFacts(
        append,
        tuple(explainer.explain(step) for step in append.broken),
        () if form is None else (*answer_round_trips(renderer, form), *call_round_trips(renderer)),
        () if form is None else tuple(cut_answers(renderer, form)),
        find_seams(renderer, tokenizer),
        find_contents(renderer),
        GenerationPrompt(tuple(openers), form is not None),
        tuple(stops),
        Bos(bos, bool(bos) and any(begins), added),
        tuple(dict.fromkeys(text for arguments in read for text in arguments.clock_formats))
        if reads_clock
        else None,
        find_effects(renderer),
        find_settings(renderer, append),
    )
