"""A recorded sequence that the template does not write, and other ways to write its messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tito_audit.align.blocks import BlockKind
from tito_audit.align.drift import align
from tito_audit.align.pieces import Pieces
from tito_audit.errors import RenderError
from tito_audit.evidence.model import Construction
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.prefix import same_ids
from tito_audit.record.rollout import Rollout

SAME_BYTES = frozenset((BlockKind.SAME, BlockKind.MERGE, BlockKind.SPLIT, BlockKind.RESPLIT))
_RENDERS = 16
"""How many renderings are tried for one sequence."""


_MARKER = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|<start_of_turn>|\[INST\]|<\|?turn\|?>")


def holds_marker(text: str) -> bool:
    """Whether a text holds a marker that published templates use to open or close messages."""
    return _MARKER.search(text) is not None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A text that the messages may have been rendered to, and what it would explain."""

    text: str
    construction: Construction


@dataclass
class UnmatchedSequence:
    """A sequence that the template does not write, its messages, and how many renderings are left."""

    rollout: Rollout
    reference: Reference
    recorded: Ids
    messages: tuple[Message, ...]
    opens: bool
    """True if it ends with a generation prompt (a prompt), False if it ends with an answer (a row)."""
    left: int = field(default=_RENDERS)
    """How many more renderings may be tried."""

    @cached_property
    def text(self) -> str:
        """The text of the recorded tokens."""
        return self.reference.text(self.recorded)

    @cached_property
    def held(self) -> Pieces:
        """The recorded tokens as pieces."""
        return self.reference.pieces(self.recorded)

    @cached_property
    def canonical(self) -> str | None:
        """What the template writes for the messages as they are logged."""
        return self.write(self.messages, self.rollout.tools)

    @property
    def has_role_markers(self) -> bool:
        """Whether the recorded text has any role marker; without one, no template wrote it."""
        return holds_marker(self.text.removeprefix(self.bos))

    @property
    def question(self) -> str:
        """The text of the first message that is not a system message."""
        given = (message.text.strip() for message in self.messages if message.role not in ("system", "developer"))
        return next(given, "")

    @property
    def bos(self) -> str:
        """The BOS text that the template begins with; empty if it writes none."""
        assert self.reference.renderer is not None
        literal = self.reference.renderer.special_tokens.get("bos_token", "")
        return literal if literal and (self.canonical or "").startswith(literal) else ""

    def write(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | None:
        """What the template writes for other messages or tools; None if it fails, or no renderings are left."""
        if self.left <= 0 or not messages:
            return None
        self.left -= 1
        try:
            return self.reference.render(messages, tools, self.rollout.template_kwargs, opens_answer=self.opens)
        except RenderError:
            return None

    def differing(self, text: str) -> list[tuple[int, int]]:
        """The ranges of recorded tokens whose bytes differ from a text's."""
        encoded = self.reference.encode_as(text, self.recorded)
        if same_ids(encoded, self.recorded):
            return []
        blocks = align(self.held, self.reference.pieces(encoded), open_end=not self.opens)
        return [
            (start, end)
            for kind, start, end, _, _ in blocks.differing()
            if kind not in SAME_BYTES and (self.opens or start < len(self.recorded))
        ]
