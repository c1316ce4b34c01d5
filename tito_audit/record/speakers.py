"""Whose a message is: the roles that logs and templates name, and which of them were sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

ASSISTANT = "assistant"
"""Whoever was sampled, under whatever name."""
GIVEN_ANSWER = "given answer"
"""A role that models speak in, where the run states that others were sampled."""
GIVEN_SPEAKERS = frozenset(("system", "user", "tool", GIVEN_ANSWER))
"""Whoever is known not to have been sampled."""
NOT_KNOWN = "role "
"""What the speaker of a role begins with that nothing is known of; its name follows."""

SAMPLED_ROLES = ("assistant", "model", "agent", "gpt", "ai", "bot", "chatbot", "chatgpt", "function_call")
"""Roles that were sampled where nobody states which were."""
_GIVEN: Mapping[str, str] = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "tools", "function", "ipython", "environment", "env", "observation"), "tool"),
    **dict.fromkeys(("tool_response", "tool_result", "tool_results", "tool_output", "function_response"), "tool"),
}
_LONGEST = 40


def speaker_of(role: str) -> str:
    """Who speaks in a role where nobody states which were sampled: `assistant`, `user`, `system`, `tool`, or
    what `named` makes of a role that is not known."""
    return DEFAULT.speaker(role)


def named(role: str) -> str:
    """The speaker of a role that is not known."""
    short = " ".join(role.split())
    return NOT_KNOWN + (short if len(short) <= _LONGEST else short[: _LONGEST - 1] + "…")


def told_name(speaker: str) -> str | None:
    """The role, as logged, of a speaker who is not known; None of one who is."""
    return speaker.removeprefix(NOT_KNOWN) if speaker.startswith(NOT_KNOWN) else None


@dataclass(frozen=True)
class Speakers:
    """Which roles were sampled: those that are stated, else those that models are known to speak in."""

    stated: tuple[str, ...] = ()

    def speaker(self, role: str) -> str:
        """Who speaks in a role: `assistant` if it was sampled, `user`, `system`, `tool`, `given answer`, or a role
        that is not known."""
        known = self._known
        return known.get(role) or known.get(role.strip().lower()) or named(role)

    @cached_property
    def _known(self) -> dict[str, str]:
        sampled = tuple(role.strip().lower() for role in self.stated) or SAMPLED_ROLES
        others = dict.fromkeys(SAMPLED_ROLES, GIVEN_ANSWER)
        return {**others, **_GIVEN, **dict.fromkeys(sampled, ASSISTANT)}


DEFAULT = Speakers()
