"""Writes logs from real conversations, with jinja2 and `tokenizers` alone: the oracle that `identify` is held to.

A `Case` says everything that went into a log. `render` writes a prompt as a server with these settings does, so
that it judges both the logs and what is claimed of them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from tests.tables import stored

TEMPLATES = Path(__file__).parent / "templates"
FORMS = ("calls", "vllm", "labels", "binary", "trl")
"""Calls in one row, a call a row, training rows with two kinds of masks, prompt and completion."""
TOOLS, SYSTEMS, PREFILLS, BOS, STRINGS, ARGUMENTS = (
    stored("identify_logs", name) for name in ("TOOLS", "SYSTEMS", "PREFILLS", "BOS", "STRINGS", "ARGUMENTS")
)
MODELS = {
    name: (tuple(file or None for file in files), tuple(ends))
    for name, (files, ends) in stored("identify_logs", "MODELS").items()
}


@dataclass(frozen=True, slots=True)
class Case:
    """What went into a log."""

    seed: int
    tokenizer: str
    template: str | None = None
    """A file of `TEMPLATES`; None: the tokenizer's own."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    at: datetime = datetime(2025, 3, 14)
    tools: str = "as logged"
    """Or `hidden`: logged, but not given to the template."""
    as_object: bool = True
    """Whether tool-call arguments are parsed for the template."""
    system: str | None = None
    """A system prompt that was rendered, and that no logged message holds."""
    stop: str = ""
    bos: str = "once"
    """Or `doubled`, `missing`."""
    generation_prompt: bool = True
    prefill: str = ""
    """Text after the generation prompt."""
    days: int = 1
    """On how many days the rows were written, each on one of them."""
    stated: str = ""
    """Whether the log states the arguments: `used` or `unused`; "": it states none."""
    broken: int = 0
    """One row in so many has a prompt in which a token is missing; 0: none has."""
    form: str = "calls"

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.arguments.items()]
        parts += [f"{self.at:%Y-%m-%d}"] if self.reads_the_clock else []
        parts += ["tools hidden"] if self.tools == "hidden" else []
        parts += ["arguments as strings"] if not self.as_object else []
        parts += ["a system prompt"] if self.system is not None else []
        parts += [f"BOS {self.bos}"] if self.bos != "once" else []
        parts += ["no generation prompt"] if not self.generation_prompt else []
        parts += [f"prefill {self.prefill!r}"] if self.prefill else []
        parts += [f"{self.days} days"] if self.days > 1 else []
        parts += [f"arguments stated and {self.stated}"] if self.stated else []
        parts += [f"one in {self.broken} broken"] if self.broken else []
        parts += [f"stop {self.stop}", self.form]
        return f"{self.seed}: {self.tokenizer} {self.template or 'own'}: {', '.join(parts)}"

    @property
    def reads_the_clock(self) -> bool:
        """Whether the prompts hold the day of `at`."""
        source = source_of(self.tokenizer, self.template)
        return "strftime_now" in source and "date_string" not in self.arguments


def random_case(seed: int) -> Case:
    """A case with a few random departures from the defaults; each seed has its own."""
    random = Random(seed)
    tokenizer = list(MODELS)[seed % len(MODELS)]
    templates, stops = MODELS[tokenizer]
    template = random.choice(templates)
    values = ARGUMENTS.get(template or tokenizer, {})
    case = Case(
        seed,
        tokenizer,
        template,
        {name: random.choice(choices) for name, choices in values.items() if random.random() < 0.5},
        datetime(2024, 6, 1) + timedelta(days=random.randrange(700)),
        as_object=tokenizer not in STRINGS,
        stop=random.choice(stops),
        form=random.choice(FORMS),
    )
    names = [*("none",) * 3, *_DEPARTURES]
    for name in random.sample(names, 2 if random.random() < 0.3 else 1):
        case = _departing(case, name, random)
    return case


_DEPARTURES = ("tools", "string", "system", "bos", "prompt", "prefill", "days", "stated", "broken")


def _departing(case: Case, name: str, random: Random) -> Case:
    """The case with one departure more, if its template can have it."""
    if name == "tools":
        return replace(case, tools="hidden")
    if name == "string" and case.tokenizer not in STRINGS:
        return replace(case, as_object=False)
    if name == "system":
        return replace(case, system=random.choice(SYSTEMS))
    if name == "bos" and case.tokenizer in BOS:
        return replace(case, bos=random.choice(("doubled", "missing")))
    if name == "prompt" and case.form in ("calls", "vllm") and not case.prefill:
        return replace(case, generation_prompt=False)
    if name == "prefill" and case.form in ("calls", "vllm", "trl") and case.generation_prompt:
        return replace(case, prefill=random.choice(PREFILLS))
    if name == "days" and case.reads_the_clock:
        return replace(case, days=random.randrange(2, 5))
    if name == "stated" and case.arguments:
        return replace(case, stated=random.choice(("used", "unused")), form="vllm")
    if name == "broken" and case.form == "calls":
        return replace(case, broken=30)
    return case


# Tokenizers and templates


@cache
def tokenizer_of(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@cache
def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))


_FOLDER: list[Path] = []


def use(folder: Path) -> None:
    """Take tokenizers from this folder from now on."""
    _FOLDER[:] = [folder]


def folder_of(tokenizer: str) -> Path:
    return _FOLDER[0] / tokenizer


def source_of(tokenizer: str, template: str | None) -> str:
    if template is not None:
        return (TEMPLATES / template).read_text(encoding="utf-8")
    file = folder_of(tokenizer) / "chat_template.jinja"
    return (
        file.read_text(encoding="utf-8") if file.is_file() else settings_of(folder_of(tokenizer))["chat_template"]
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


@cache
def _compiled(source: str) -> tuple[jinja2.Environment, jinja2.Template]:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _raise
    return environment, environment.from_string(source)


def _special(tokenizer: str) -> dict[str, str]:
    """The special tokens that templates may write."""
    named = {name: value for name, value in settings_of(folder_of(tokenizer)).items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def render(
    tokenizer: str,
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    arguments: Mapping[str, object],
    at: datetime | None,
    as_object: bool,
    generation_prompt: bool = True,
) -> str:
    """A prompt as a server writes it; jinja2.TemplateError and others if the template refuses."""
    _, template = _compiled(source)
    context: dict[str, Any] = {
        **_special(tokenizer),
        "messages": [_for_template(message, as_object) for message in messages],
        "tools": deepcopy(tools) if tools else None,
        "add_generation_prompt": generation_prompt,
        "strftime_now": (at or datetime(1999, 12, 31)).strftime,
        **arguments,
    }
    return template.render(**context)


def _for_template(message: Mapping[str, Any], as_object: bool) -> dict[str, Any]:
    """A message as the template gets it."""
    copied = deepcopy(dict(message))
    for call in copied.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if as_object and isinstance(arguments, str):
            call["function"]["arguments"] = json.loads(arguments)
        elif not as_object and not isinstance(arguments, str):
            call["function"]["arguments"] = json.dumps(arguments)
    return copied


def encode(tokenizer: str, text: str) -> list[int]:
    return tokenizer_of(folder_of(tokenizer)).encode(text, add_special_tokens=False).ids


# Conversations and logs


def conversations(rollouts: Path, name: str) -> list[dict[str, Any]]:
    """Real conversations of a model: messages, tools, and the text of each sampled turn."""
    with gzip.open(rollouts / name / "retok.jsonl.gz", "rt", encoding="utf-8") as lines:
        read = [json.loads(line) for line in lines]
    return [
        {
            **{key: row[key] for key in ("id", "messages", "tools")},
            "texts": [call["text"] for call in row["calls"]],
        }
        for row in read
    ]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One call: what the log says of it, and the ids of its prompt."""

    row: int
    messages: list[dict[str, Any]]
    """As logged."""
    tools: list[dict[str, Any]] | None
    ids: list[int]
    completion: list[int]
    last: bool
    at: datetime
    """The time at which it was written."""
    stated: Mapping[str, object]
    """The template arguments that the log states."""
    broken: bool
    """Whether a token of the prompt is missing."""


def with_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with a reasoning in each answer, as servers with a reasoning parser return them."""
    reasoned = deepcopy(messages)
    for number, message in enumerate(reasoned):
        if message["role"] == "assistant":
            message["reasoning_content"] = f"Step {number}: what was asked, and what is known already."
    return reasoned


def prompts_of(case: Case, chat: Mapping[str, Any], row: int) -> Iterator[Prompt]:
    """The calls of a conversation; raises what the template raises."""
    source = source_of(case.tokenizer, case.template)
    reasons = case.template == "preserving.jinja"
    messages = with_reasoning(chat["messages"]) if reasons else chat["messages"]
    logged = chat["tools"]
    if case.tools == "hidden":
        logged = logged or TOOLS
    logged_messages = messages
    if case.system is not None:
        messages = [{"role": "system", "content": case.system}, *messages]
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    day = case.at + timedelta(days=row % case.days)
    for number, at in enumerate(answers):
        text = render(
            case.tokenizer,
            source,
            messages[:at],
            None if case.tools == "hidden" else logged,
            arguments={} if case.stated == "unused" else case.arguments,
            at=day,
            as_object=case.as_object,
            generation_prompt=case.generation_prompt,
        )
        ids = encode(case.tokenizer, text + case.prefill)
        ids = ids[:1] + ids if case.bos == "doubled" else ids[1:] if case.bos == "missing" else ids
        sampled = encode(case.tokenizer, chat["texts"][number] + case.stop)
        end = at + 1 - (case.system is not None)
        broken = case.broken > 0 and row % case.broken == case.broken - 1
        if broken:
            ids = ids[: len(ids) // 2] + ids[len(ids) // 2 + 1 :]
        stated = case.arguments if case.stated else {}
        last = number == len(answers) - 1
        yield Prompt(row, logged_messages[:end], logged, ids, sampled, last, day, stated, broken)


def log_of(case: Case, chats: Sequence[Mapping[str, Any]], rows: int) -> list[Prompt]:
    """The calls of a log of so many conversations: the first ones, by chance, that the template writes."""
    random = Random(case.seed)
    calls: list[Prompt] = []
    row = 0
    for chat in random.sample(list(chats), len(chats)):
        if case.system is not None and chat["messages"][0]["role"] == "system":
            continue
        try:
            prompts = list(prompts_of(case, chat, row))
        except (jinja2.TemplateError, TypeError, ValueError):
            continue
        calls += prompts
        row += 1
        if row == rows:
            break
    return calls


def rows_of(case: Case, calls: Sequence[Prompt]) -> list[dict[str, Any]]:
    """The rows of a log in the form of the case."""
    if case.form == "calls":
        byrow = [[call for call in calls if call.row == row] for row in sorted({call.row for call in calls})]
        return [_call_list(calls_of_row) for calls_of_row in byrow]
    if case.form == "vllm":
        return [_answer(call) for call in calls]
    write = {"labels": _labels, "binary": _binary, "trl": _trl}[case.form]
    return [write(call) for call in calls if call.last]


def seen_prompts(case: Case, calls: Sequence[Prompt]) -> list[Prompt]:
    """The calls whose prompts the log of the case holds."""
    return [call for call in calls if call.last] if case.form in ("labels", "binary", "trl") else list(calls)


def _call_list(calls: Sequence[Prompt]) -> dict[str, Any]:
    last = calls[-1]
    listed = [{"prompt_token_ids": call.ids, "generation_token_ids": call.completion} for call in calls]
    return {"id": f"row-{last.row}", "messages": last.messages, "tools": last.tools, "calls": listed}


def _answer(call: Prompt) -> dict[str, Any]:
    request = {"model": "policy", "messages": call.messages[:-1]} | ({"tools": call.tools} if call.tools else {})
    request |= {"chat_template_kwargs": dict(call.stated)} if call.stated else {}
    choice = {"index": 0, "finish_reason": "stop", "message": call.messages[-1], "token_ids": call.completion}
    response = {"object": "chat.completion", "choices": [choice], "prompt_token_ids": call.ids}
    return {"request": request, "response": response}


def _labels(call: Prompt) -> dict[str, Any]:
    labels = [-100] * len(call.ids) + call.completion
    chat = {"messages": call.messages, "tools": call.tools}
    return {"input_ids": call.ids + call.completion, "labels": labels} | chat


def _binary(call: Prompt) -> dict[str, Any]:
    mask = [0] * len(call.ids) + [1] * len(call.completion)
    chat = {"messages": call.messages, "tools": call.tools}
    return {"token_ids": call.ids + call.completion, "loss_mask": mask} | chat


def _trl(call: Prompt) -> dict[str, Any]:
    chat = {"prompt": call.messages[:-1], "completion": call.messages[-1:]} | (
        {"tools": call.tools} if call.tools else {}
    )
    return {"prompt_ids": call.ids, "completion_ids": call.completion} | chat
