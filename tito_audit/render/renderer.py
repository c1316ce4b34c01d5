"""Renders messages as transformers' `apply_chat_template` does.

Logs and templates disagree on two points. Tool-call arguments are logged as the sampled JSON text, while most
templates expect an object. And an assistant message that only calls tools has `content: null`: transformers
removes the key, a few templates require it, and inference servers replace it with an empty text. The form of
transformers is tried first, the others if the template raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Literal, TypeAlias

import numpy as np

from tito_audit.errors import RenderError, SetupError
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.nesting import load_python_json
from tito_audit.render.globals import Clock
from tito_audit.render.template import SIZE_LIMIT, TIME_LIMIT, Template, compile_template
from tito_audit.tokens.tokenizer import Tokenizer

Chat: TypeAlias = list[dict[str, Any]]
"""Messages in the form that a template gets."""
ToolArguments: TypeAlias = Literal["auto", "object", "string"]
"""The form of tool-call arguments: parsed, as logged, or `auto`: parsed, and as logged if the template raises."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
_REASONING = ("reasoning_content", "thinking", "reasoning")
_REASONING_KEYS = frozenset(_REASONING)
_ONLY_TEXT = {str}


@dataclass(frozen=True, slots=True)
class Renderer:
    """A tokenizer's chat templates, ready to render messages."""

    templates: Mapping[str, Template]
    name: str | None = None
    """The template to use; None: `tool_use` when there are tools and it exists, else `default`."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    template_args: Mapping[str, object] = field(default_factory=dict)
    """Arguments for every rendering; those stated in a log override them."""
    tool_arguments: ToolArguments = "auto"
    clock: Clock | None = None
    """What `strftime_now` tells the template; None: the current time."""
    without_tools: bool = False
    """Whether tools stated in a log are hidden from the template."""
    without_stated: bool = False
    """Whether arguments stated in a log are ignored."""
    control_texts: tuple[str, ...] = ()
    """The tokenizer's special tokens as text, for finding the end of a turn."""
    end_texts: tuple[str, ...] = ()
    """The end tokens of the tokenizer's files."""
    wraps_texts: bool = False
    """Whether the template gets texts, except tool results, as lists of one part."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The text of these messages; RenderError if the template refuses them."""
        return self.render_chat(
            messages, tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )[1]

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[Chat, str]:
        """The first form of the messages that the template accepts, and their text; RenderError if none is."""
        template, first = self.template(bool(tools)), None
        variables = {**self.variables(tools, template_kwargs), "add_generation_prompt": add_generation_prompt}
        for chat in self._chat_forms(messages):
            try:
                return chat, template.run({**variables, "messages": chat})
            except RenderError as error:
                first = first or error
        raise first or RenderError("chat template: there are no messages to render")

    def try_render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, object] | None = None,
        forms: ChatForms | None = None,
    ) -> str | None:
        """The text of these messages, by the fast engine if possible; None if the template refuses them.

        A fast text is a guess, to be used only if something else confirms it. Pass `forms` where the same messages
        are rendered again.
        """
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        _, fast = self.render_chat_fast(messages, self.variables(tools, template_kwargs), forms=forms, **how)
        if fast is not None:
            return fast
        try:
            return self.render(messages, tools, template_kwargs=template_kwargs, **how)
        except RenderError:
            return None

    def render_chat_fast(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        forms: ChatForms | None = None,
    ) -> tuple[Chat, str | None]:
        """What `render_chat` returns, by the fast engine: a guess. The text is None if the engine cannot tell."""
        template = self.template(bool(variables["tools"])).fast
        if template is None:
            return [], None
        from tito_audit.render.fast.render import NeedsReference

        for chat in self._chat_forms(messages, forms):
            try:
                return chat, template.run(
                    {**variables, "messages": chat, "add_generation_prompt": add_generation_prompt}
                )
            except RenderError:
                continue
            except NeedsReference:
                break
        return [], None

    def variables(self, tools: Sequence[ToolSpec], template_kwargs: Mapping[str, object] | None) -> dict[str, Any]:
        """All variables of a template except the messages."""
        shown = () if self.without_tools else tools
        stated = {} if self.without_stated or template_kwargs is None else template_kwargs
        return {
            "documents": None,
            **({} if self.clock is None else {"strftime_now": self.clock}),
            **self.special_tokens,
            **_to_plain_json({**self.template_args, **stated}),
            "tools": self.template(bool(shown)).convert_tools(shown, _to_plain_json) if shown else None,
        }

    def generation_prompt(self, template_kwargs: Mapping[str, object] | None = None) -> str:
        """The generation prompt after a user message; "" if there is none or it is unknown."""
        return self.template(False).generation_prompt_after_user(self.variables((), template_kwargs))

    def load(self) -> None:
        """Compile every template now, so that processes forked later share it."""
        for template in self.templates.values():
            template.load()

    def template(self, with_tools: bool) -> Template:
        """The template for a conversation with or without tools."""
        if self.name is not None:
            return self.templates[self.name]
        by_tools = with_tools and not self.without_tools and "tool_use" in self.templates
        return self.templates["tool_use" if by_tools else "default"]

    def _chat_forms(self, messages: Sequence[Message], forms: ChatForms | None = None) -> Iterator[Chat]:
        """The messages in each distinct form that a template might accept, the usual form first."""
        if not messages:
            return
        forms = forms or ChatForms()
        seen: list[Chat] = []
        for no_content in ("absent", "null", "empty"):
            for parsed in {"auto": (True, False), "object": (True,), "string": (False,)}[self.tool_arguments]:
                chat = forms.chat(messages, parsed=parsed, no_content=no_content)
                if self.wraps_texts:
                    chat = [wrap_text_in_parts(message) for message in chat]
                if chat not in seen:
                    seen.append(chat)
                    yield chat


def make_renderer(
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    template_file: str | None = None,
    template_name: str | None = None,
    template_args: Mapping[str, object] | None = None,
    tool_arguments: ToolArguments = "auto",
    clock: Clock | None = None,
    without_tools: bool = False,
    time_limit: float = TIME_LIMIT,
    size_limit: int = SIZE_LIMIT,
) -> Renderer:
    """A renderer for a tokenizer; SetupError if there is no template, or none with this name.

    `chat_template` is the source of a template in place of the tokenizer's own, and `template_file` its file.
    """
    sources = {"default": chat_template} if chat_template is not None else dict(tokenizer.chat_templates)
    if chat_template is not None or not template_name:
        template_name = None
    if not sources:
        raise SetupError(
            f"{tokenizer.name}: no chat template.\n"
            "Without one the messages cannot be re-rendered, so the TPL rules have nothing to compare.\n"
            "Pass --chat-template FILE, or leave out the rules that need one."
        )
    if (template_name or "default") not in sources:
        what = "several chat templates and none is the default"
        if template_name:
            what = f"no chat template is named {template_name!r}"
        raise SetupError(
            f"{tokenizer.name}: {what}.\nWhich one wrote the prompts decides what is compared.\n"
            f"Name one of them: {', '.join(sorted(sources))}."
        )
    wanted = {name: text for name, text in sources.items() if name in (template_name, "default", "tool_use")}
    vocabulary = tokenizer.vocabulary
    return Renderer(
        templates={
            name: compile_template(
                text,
                template_file or tokenizer.name,
                time_limit=time_limit,
                size_limit=size_limit,
                store=tokenizer.store,
            )
            for name, text in wanted.items()
        },
        name=template_name,
        special_tokens=dict(tokenizer.special_tokens),
        template_args=dict(template_args or {}),
        tool_arguments=tool_arguments,
        clock=clock,
        without_tools=without_tools,
        control_texts=tuple(vocabulary.piece(i) for i in sorted(vocabulary.special_ids)),
        end_texts=tuple(vocabulary.piece(i) for i in tokenizer.eos_ids),
    )


class ChatForms:
    """Converts messages to the forms that a template might accept, each once; made for one conversation."""

    def __init__(self) -> None:
        self._forms: dict[tuple[int, bool, str], tuple[Message, dict[str, Any]]] = {}
        self._plain: dict[int, tuple[Message, dict[str, Any]]] = {}
        """Messages with a single form, by id; the message is kept alive, so no other can get its id."""
        self.read: dict[int, Any] = {}
        """What `MessageShapes` read of each message, with the message, by id."""

    def chat(self, messages: Sequence[Message], *, parsed: bool, no_content: str) -> Chat:
        """Messages in one form for templates, not to be modified."""
        plain = self._plain
        for message in messages:
            if id(message) not in plain and has_one_form(message.wire):
                plain[id(message)] = message, dict(message.wire)
        return [
            plain[id(message)][1]
            if id(message) in plain
            else self.message_form(message, parsed=parsed, no_content=no_content)
            for message in messages
        ]

    def message_form(self, message: Message, *, parsed: bool, no_content: str) -> dict[str, Any]:
        """A message that has several forms in one of them, not to be modified."""
        key = id(message), parsed, no_content
        form = self._forms.get(key)
        if form is None:  # the message is kept alive, so no other can get its id
            plain = _to_plain_json(message.wire)
            wire = {key: value for key, value in plain.items() if value is not None}
            if no_content == "null" and "content" in plain:
                wire = {key: value for key, value in plain.items() if value is not None or key == "content"}
            elif no_content == "empty":
                wire.setdefault("content", "")
            reasoning = next((wire[key] for key in _REASONING if key in wire), None)
            if reasoning is not None:
                wire = {"thinking": reasoning, **wire, "reasoning_content": reasoning}
            if parsed and isinstance(wire.get("tool_calls"), list):
                wire["tool_calls"] = [_parse_call_arguments(call) for call in wire["tool_calls"]]
            form = self._forms[key] = message, wire
        return form[1]


def has_one_form(wire: Mapping[str, Any]) -> bool:
    """Whether all forms of a message are equal: it holds only texts, and no reasoning."""
    return (
        type(wire) is dict
        and set(map(type, wire.values())) == _ONLY_TEXT
        and "content" in wire
        and _REASONING_KEYS.isdisjoint(wire)
    )


def wrap_text_in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text as a list of one part; tool results and lists stay as they are."""
    content = message.get("content")
    if message["role"] == "tool" or (content is not None and not isinstance(content, str)):
        return dict(message)
    return {**message, "content": [] if content is None else [{"type": "text", "text": content}]}


def _parse_call_arguments(call: Any) -> Any:
    """A tool call with parsed arguments; unchanged if they are not JSON."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _parse_call_arguments(call["function"])}
    arguments = call.get("arguments", {})
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {**call, "arguments": {}}
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "arguments": load_python_json(arguments)}
    except ValueError:
        return call


def _to_plain_json(value: Any) -> Any:
    """A value in plain JSON types; the same object if it already is.

    Arrays, as Parquet rows have them, become lists. Any other object becomes the name of its type.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is dict:
        out = value
        for key, item in value.items():
            if type(item) not in _SCALARS:
                plain = _to_plain_json(item)
                if plain is not item:
                    out = dict(value) if out is value else out
                    out[key] = plain
        return out
    if kind is list:
        items = [_to_plain_json(item) for item in value]
        return value if all(map(is_, items, value)) else items
    if isinstance(value, Mapping):
        return {key: _to_plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_json(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _to_plain_json(value.tolist())
    for basic in (str, int, float):
        if isinstance(value, basic):
            return basic(value)
    return f"<{type(value).__name__}>"
