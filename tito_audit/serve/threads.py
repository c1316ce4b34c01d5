"""Which thread of calls an answer belongs to; each answer is in exactly one."""

from __future__ import annotations

from dataclasses import dataclass, field

from tito_audit.sessions.model import Branch, Node, Prompt

Answer = tuple[str, int]
"""A call by its id, and which of its answers."""


@dataclass(slots=True)
class Threads:
    """The threads of one session.

    The first answer to the first call that continues an answer stays in its thread; every other answer, start or
    fork begins a new one. So in a thread each prompt starts with everything before it.
    """

    _of: dict[Answer, str] = field(default_factory=dict)
    _continued: set[Answer] = field(default_factory=set)

    def begin(self, call_id: str, prompt: Prompt, answers: int) -> tuple[str, ...]:
        """The thread of each answer to a prompt."""
        names = [new_thread(call_id, choice) for choice in range(answers)]
        parent = prompt.parent if prompt.branch is Branch.CONTINUES else None
        if parent is not None:
            before = (parent.call_id, parent.choice)
            if before in self._of and before not in self._continued:
                names[0] = self._of[before]
                self._continued.add(before)
        self._of |= {(call_id, choice): name for choice, name in enumerate(names)}
        return tuple(names)

    def of(self, node: Node) -> str:
        """The thread of an answer."""
        return self._of[node.call_id, node.choice]


def new_thread(call_id: str, choice: int) -> str:
    """The name of a thread that an answer begins."""
    return f"{call_id}/{choice}"
