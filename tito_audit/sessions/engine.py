"""Conversations: the sessions of a gateway or a managed server, without I/O or clock.

Content is given to a chat template as vLLM 0.32 does, `vllm/renderers/hf.py` (`_detect_content_format`) and
`vllm/renderers/chat_utils.py` (`_parse_chat_message_content`): where a template loops over content, each text is a
list of one part, and results of tools are one text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count

from jinja2 import nodes

from tito_audit.errors import RenderError
from tito_audit.record.message import as_message
from tito_audit.render.limits import Budget, TimeUp, alarm
from tito_audit.render.renderer import Renderer
from tito_audit.render.sandbox import ChatEnvironment
from tito_audit.render.template import SIZE_LIMIT, TIME_LIMIT
from tito_audit.sessions.index import Fit, SessionIndex
from tito_audit.sessions.model import ChatCall
from tito_audit.sessions.next_prompt import PromptWriter
from tito_audit.sessions.session import Session as Session
from tito_audit.sessions.session import TextPrompt, lookup_bytes
from tito_audit.templates.probes import make_probe
from tito_audit.tokens.tokenizer import Tokenizer

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
    """Whether an expression is `message.content` or `message["content"]` of one of these variables."""
    inside = _strip_filters(node)
    if isinstance(inside, nodes.Getattr):
        return inside.attr == "content" and _variable_name(inside.node) in messages
    if not isinstance(inside, nodes.Getitem):
        return False
    is_content = isinstance(inside.arg, nodes.Const) and inside.arg.value == "content"
    return is_content and _variable_name(inside.node) in messages


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory limits; beyond them, the sessions idle longest leave first."""

    sessions: int = 4096
    nodes: int = 4096
    """Answers per session; beyond this, the older half leaves."""
    bytes: int = 2 << 30
    """Of all sessions, as an estimate."""


class Conversations:
    """All sessions of a gateway or managed server. Not thread-safe: for one event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: Renderer | None,
        *,
        limits: Limits | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`renderer` None: only text prompts. `new_id` makes ids for unnamed sessions; None: numbers."""
        self.renderer = renderer_as_served(renderer)
        self._writer = PromptWriter(tokenizer, self.renderer)
        self._limits = limits or Limits()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._left: OrderedDict[str, None] = OrderedDict()
        self._index = SessionIndex()
        numbers = count(1)
        self._new_id = new_id or (lambda: f"session-{next(numbers)}")

    def open(self, session_id: str | None = None, *, now: float = 0.0) -> Session:
        """The session with this id, created if there is none; None creates one with a new id."""
        if session_id is None:
            session_id = self._new_id()
            while session_id in self._sessions:
                session_id = self._new_id()
        session = self._sessions.get(session_id)
        if session is None:
            left = session_id in self._left
            session = Session(session_id, self._writer, self._index, self._limits.nodes, left_memory=left)
            self._left.pop(session_id, None)
            self._sessions[session_id] = session
        self._sessions.move_to_end(session_id)
        session.used = max(session.used, now)
        while len(self._sessions) > 1 and (
            len(self._sessions) > self._limits.sessions or self._index.bytes > self._limits.bytes
        ):
            self._leave(next(iter(self._sessions)))
        return session

    def with_content_form(self, call: ChatCall) -> ChatCall:
        """The call with content parts as the template reads them; RenderError for parts that are not text."""
        return with_content_form(call, self.renderer)

    def find(self, call: ChatCall, *, now: float = 0.0) -> Session:
        """The session that answered the most of this history, else a new one.

        Of several, the one whose answers fit best (`Fit`), then the latest; if all were sent other reasoning, the
        latest.
        """
        places, latest = self._index.keys(call.messages)[1], None
        for depth in range(len(places) - 1, 0, -1):
            best: tuple[Fit, str] | None = None
            for session_id in self._index.sessions_at(places[depth]):
                latest = session_id if latest is None else latest
                fit = self._sessions[session_id].best_fit(call.messages, places[depth], depth)
                if fit is not None and (best is None or fit > best[0]):
                    best = fit, session_id
                    if fit == (depth, depth):
                        break
            if best is not None:
                return self.open(best[1], now=now)
        return self.open(latest, now=now)

    def find_text(self, prompt: TextPrompt, *, now: float = 0.0) -> Session:
        """The session with the longest prompt and answer that a text prompt starts with, else a new one."""
        return self.open(self._index.session_of_text(lookup_bytes(prompt)), now=now)

    def find_open(self, session_id: str) -> Session | None:
        """The session with this id, if it is in memory."""
        return self._sessions.get(session_id)

    def close(self, session_id: str) -> Session | None:
        """Forget a session; its id begins a new one."""
        session = self._sessions.pop(session_id, None)
        self._left.pop(session_id, None)
        if session is not None:
            session.leave()
        return session

    def drop_idle(self, before: float) -> tuple[str, ...]:
        """Drop the sessions unused since `before` from memory; their ids."""
        idle = tuple(session.id for session in self._sessions.values() if session.used < before)
        for session_id in idle:
            self._leave(session_id)
        return idle

    def __iter__(self) -> Iterator[Session]:
        """The sessions in memory, the one that was idle longest first."""
        return iter(tuple(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def size(self) -> int:
        """An estimate of the memory of all sessions, in bytes."""
        return self._index.bytes

    def _leave(self, session_id: str) -> None:
        self._sessions.pop(session_id).leave()
        self._left[session_id] = None
        if len(self._left) > 100_000:  # kept to tell a client that comes back
            self._left.popitem(last=False)
