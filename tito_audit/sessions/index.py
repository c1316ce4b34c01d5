"""Which session holds an answer to a history, and how much all of them hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tito_audit.record.message import Message
from tito_audit.sessions.matching import history_keys, message_keys
from tito_audit.sessions.prefixes import Key, Prefixes


class Index:
    """The answers of all sessions, by session id."""

    def __init__(self) -> None:
        self.bytes = 0
        """What the sessions hold in memory, as an estimate."""
        self._histories: dict[bytes, dict[str, None]] = {}
        self._texts: Prefixes[str] = Prefixes()
        self._last: tuple[Sequence[Message], list[bytes], list[bytes]] | None = None

    def answered(self, session_id: str, history: bytes) -> None:
        """Note that a session holds an answer to this history (a key)."""
        held = self._histories.setdefault(history, {})
        held.pop(session_id, None)
        held[session_id] = None

    def wrote(self, session_id: str, key: Key) -> None:
        """Note that a session holds a text prompt with its answer, or their ids (a key)."""
        self._texts.add(key, session_id)

    def keys(self, messages: Sequence[Message]) -> tuple[list[bytes], list[bytes]]:
        """The key of each message, and of each beginning of the history; computed once for the look-up here and in
        the session.
        """
        if self._last is None or self._last[0] is not messages:
            keys = message_keys(messages)
            self._last = messages, keys, history_keys(keys)
        return self._last[1:]

    def forget(self, session_id: str, histories: Sequence[bytes], texts: Sequence[Key]) -> None:
        """Note that the session no longer holds these."""
        for history in histories:
            held = self._histories.get(history, {})
            if held.pop(session_id, 0) is None and not held:
                del self._histories[history]
        for key in texts:
            self._texts.remove(key, session_id)

    def at(self, history: bytes) -> Iterable[str]:
        """The sessions that hold an answer to this history, the latest first."""
        return reversed(self._histories.get(history, {}))

    def of_history(self, keys: Sequence[bytes]) -> str | None:
        """The session that answered the most of a history, the latest of several."""
        found = next((self._histories[key] for key in reversed(keys) if key in self._histories), None)
        return next(reversed(found)) if found else None

    def of_text(self, data: bytes) -> str | None:
        """The session with the longest prompt and answer that this text, or these ids, start with."""
        found = next(self._texts.matches(data), None)
        return found[1][-1] if found is not None else None
