"""A chat template and a tokenizer by `jinja2` and `tokenizers` alone, as the proof needs them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = dict[str, Any]
PROBE = "Qvx7 probe"


class Refused(Exception):
    """The template refuses these messages."""


@dataclass
class Reference:
    """What a tokenizer's folder says about texts and messages."""

    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "tokenizer_config.json").read_text(encoding="utf-8")))

    @cached_property
    def template(self) -> jinja2.Template:
        file = self.folder / "chat_template.jinja"
        text = file.read_text(encoding="utf-8") if file.exists() else self.config["chat_template"]
        return compiled(text)

    def special(self, name: str) -> str:
        """A special token of the settings, as text."""
        token = self.config.get(name)
        return token["content"] if isinstance(token, dict) else token or ""

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def render(self, call: dict[str, Any], messages: Sequence[Message], *, generation: bool) -> str:
        """The text of messages under the tools and template arguments of a call. Raises Refused."""
        try:
            return self.template.render(
                messages=[_seen(message) for message in messages],
                tools=call.get("tools") or None,
                add_generation_prompt=generation,
                bos_token=self.special("bos_token"),
                eos_token=self.special("eos_token"),
                **(call.get("chat_template_kwargs") or {}),
            )
        except jinja2.TemplateError as error:
            raise Refused(str(error)) from error

    def turn_end(self, call: dict[str, Any], history: Sequence[Message]) -> str:
        """What the template writes behind the content of an answer, found with a probe in the answer's place."""
        text = self.render(call, [*history, {"role": "assistant", "content": PROBE}], generation=False)
        return text[text.rindex(PROBE) + len(PROBE) :]

    def added(
        self, call: dict[str, Any], messages: Sequence[Message], parent: dict[str, Any], sampled: Sequence[int]
    ) -> str | None:
        """The text behind the sampled ids of the parent's answer; None where history is rewritten."""
        answered = len(parent["messages"])
        if (exactly := self._added_exactly(call, messages, parent, sampled)) is not None:
            return exactly
        try:
            prompt = self.render(parent, messages[:answered], generation=True)
            before = self.render(call, messages[: answered + 1], generation=False)
            whole = self.render(call, messages, generation=True)
            end = self.turn_end(call, messages[:answered])
        except (Refused, ValueError):
            return None
        if not whole.startswith(before) or not before.startswith(prompt):
            return None
        if any(part.strip() not in before[len(prompt) :] for part in _parts(messages[answered])):
            return None
        if (
            sampled
            and (last := self.decode(sampled[-1:]))
            and end.startswith(last)
            and self.is_control(sampled[-1])
        ):
            end = end[len(last) :]
        return end + whole[len(before) :]

    def _added_exactly(
        self, call: dict[str, Any], messages: Sequence[Message], parent: dict[str, Any], sampled: Sequence[int]
    ) -> str | None:
        """The same where the prompt spells all that the parent saw and said, and its turn ends there."""
        try:
            whole = self.render(call, messages, generation=True)
            end = self.turn_end(call, messages[: len(parent["messages"])])
        except (Refused, ValueError):
            return None
        before = self.decode([*parent["prompt_token_ids"], *sampled])
        if not whole.startswith(before) or not sampled:
            return None
        added = whole[len(before) :]
        ended = self.is_control(sampled[-1]) or (end.strip() and added.startswith(end.strip()))
        return added if ended else None

    def is_control(self, token: int) -> bool:
        return token in self.tokenizer.get_added_tokens_decoder()


@cache
def compiled(source: str) -> jinja2.Template:
    """A template of plain jinja2, with what transformers adds."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda _: "26 Jul 2024"}
    return environment.from_string(source)


def _parts(answer: Message) -> list[str]:
    """What a template may leave out of an answer."""
    reasoning = answer.get("reasoning_content") or answer.get("reasoning") or ""
    return [reasoning, *(call["function"]["name"] for call in answer.get("tool_calls") or [])]


def _seen(message: Message) -> Message:
    """A message as a template is given it: the arguments of its calls are values."""
    seen = {name: value for name, value in copy.deepcopy(message).items() if value is not None}
    seen.setdefault("content", "")
    if "reasoning" in seen:
        seen.setdefault("reasoning_content", seen["reasoning"])
    for call in seen.get("tool_calls") or []:
        try:
            value = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
        if isinstance(value, dict):
            call["function"]["arguments"] = value
    return seen


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
