"""Content in the form that a chat template reads, as vLLM finds it: a list of parts, or one text.

vLLM 0.32, `vllm/renderers/hf.py` (`_detect_content_format`) and `vllm/renderers/chat_utils.py`
(`_parse_chat_message_content`): where a template loops over content, each text is given as a list of one part, and
results of tools as one text.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from jinja2 import nodes

from tito_audit.errors import RenderError
from tito_audit.record.message import as_message
from tito_audit.render.limits import Budget, TimeUp, alarm
from tito_audit.render.renderer import Renderer
from tito_audit.render.sandbox import ChatEnvironment
from tito_audit.render.template import SIZE_LIMIT, TIME_LIMIT
from tito_audit.sessions.model import ChatCall
from tito_audit.templates.probes import make_probe

_TEXTS = {"text": "text", "refusal": "refusal"}
"""Kinds of parts that are text, and where it is."""
_ASKED = [
    {"role": role, "content": content}
    for role, content in (("user", " One\n\n two\n"), ("assistant", " Three\n\n four\n"), ("user", "Five"))
]


def with_content_form(call: ChatCall, renderer: Renderer | None) -> ChatCall:
    """The call with its text parts as the template reads them; itself without any. RenderError for other parts."""
    if renderer is None or not any(isinstance(message.content, tuple) for message in call.messages):
        return call
    as_parts = takes_parts(renderer.template(bool(call.tools)).source)
    messages = list(call.messages)
    for index, message in enumerate(messages):
        texts: list[str] = []
        for part in message.content if isinstance(message.content, tuple) else ():
            kind = part.get("type")
            text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
            if not isinstance(text, str):
                raise RenderError(
                    f"message {index} has a part of type {kind!r} without text: only text parts are supported"
                )
            texts.append(text)
        if isinstance(message.content, tuple):
            # The parts of an answer are pieces of one text; vLLM joins those of other messages by line breaks.
            content: object = ("" if message.sampled else "\n").join(texts)
            if as_parts and message.role != "tool":
                content = [{"type": "text", "text": text} for text in texts]
            messages[index] = as_message({**message.wire, "content": content}, f"message {index}")
    return replace(call, messages=tuple(messages))


def renderer_as_served(renderer: Renderer | None) -> Renderer | None:
    """The renderer, with `wraps_texts` if its template loops over content and so writes one text differently.

    Not if the template prints lists of parts as they are.
    """
    if renderer is None or not any(takes_parts(template.source) for template in renderer.templates.values()):
        return renderer
    served = replace(renderer, wraps_texts=True)
    system = {"role": "system", "content": "Be\n\n brief.\n"}
    probes = [make_probe("", chat) for chat in (_ASKED, [system, *_ASKED])]
    texts = [(each.try_render(renderer, opens=False), each.try_render(served, opens=False)) for each in probes]
    differs = any(parts not in (None, text) for text, parts in texts)
    return served if differs and not any("'type'" in (parts or "") for _, parts in texts) else renderer


@lru_cache(maxsize=32)
def takes_parts(source: str) -> bool:
    """Whether a template loops over the content of messages; if not, it reads content as one text."""
    try:
        with alarm(TIME_LIMIT):
            tree = ChatEnvironment(Budget(SIZE_LIMIT, TIME_LIMIT)).parse(source)
    except (Exception, TimeUp):  # too deep or too large to parse again
        return False
    lists: set[str | None] = {"messages"}
    loops = list(tree.find_all(nodes.For))
    assigned = [(_variable_name(node.target), node.node) for node in tree.find_all(nodes.Assign)]
    for _ in assigned:  # until no name is new
        lists |= {name for name, value in assigned if name is not None and _variable_name(value) in lists}
    messages = {_variable_name(loop.target) for loop in loops if _variable_name(loop.iter) in lists}
    if any(_variable_name(loop.iter) == "content" or _is_content(loop.iter, messages) for loop in loops):
        return True
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for called in tree.find_all(nodes.Call):
        macro = macros.get(_variable_name(called.node) or "")
        if macro is None:
            continue
        passed = {name.name for name, value in zip(macro.args, called.args) if _is_content(value, messages)}  # noqa: B905 - a call may leave arguments out
        passed |= {pair.key for pair in called.kwargs if _is_content(pair.value, messages)}
        if any(_variable_name(loop.iter) in passed for loop in macro.find_all(nodes.For)):
            return True
    return False


def _strip_filters(node: nodes.Node | None) -> nodes.Node | None:
    """The expression under filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test | nodes.Getitem):
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            break
        node = node.node
    return node


def _variable_name(node: nodes.Node | None) -> str | None:
    """The variable that an expression is, filters aside; None if it is none."""
    inside = _strip_filters(node)
    return inside.name if isinstance(inside, nodes.Name) else None


def _is_content(node: nodes.Node, messages: Collection[str | None]) -> bool:
    inside = _strip_filters(node)
    if isinstance(inside, nodes.Getattr):
        return inside.attr == "content" and _variable_name(inside.node) in messages
    if not isinstance(inside, nodes.Getitem):
        return False
    is_content = isinstance(inside.arg, nodes.Const) and inside.arg.value == "content"
    return is_content and _variable_name(inside.node) in messages
