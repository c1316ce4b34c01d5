"""Conversations: the sessions of a gateway or a managed server, without I/O or clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from tito_audit.render.renderer import Renderer
from tito_audit.sessions.content import renderer_as_served, with_content_form
from tito_audit.sessions.index import Fit, SessionIndex
from tito_audit.sessions.model import ChatCall
from tito_audit.sessions.next_prompt import PromptWriter
from tito_audit.sessions.session import Session as Session
from tito_audit.sessions.session import TextPrompt, prompt_key_bytes
from tito_audit.tokens.tokenizer import Tokenizer


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

    def in_form(self, call: ChatCall) -> ChatCall:
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
                fit = self._sessions[session_id].fit(call.messages, places[depth], depth)
                if fit is not None and (best is None or fit > best[0]):
                    best = fit, session_id
                    if fit == (depth, depth):
                        break
            if best is not None:
                return self.open(best[1], now=now)
        return self.open(latest, now=now)

    def find_text(self, prompt: TextPrompt, *, now: float = 0.0) -> Session:
        """The session with the longest prompt and answer that a text prompt starts with, else a new one."""
        return self.open(self._index.session_of_text(prompt_key_bytes(prompt)), now=now)

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
