"""Speakers: which role of a message the model under training sampled, and which are user, system or tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

ASSISTANT = "assistant"
"""The speaker of every sampled message, whatever its role is called."""
GIVEN_ANSWER = "given answer"
"""The speaker of a usual model role, if the user states other sampled roles."""
UNSAMPLED_SPEAKERS = frozenset(("system", "user", "tool", GIVEN_ANSWER))
"""Speakers whose messages were certainly not sampled."""
_UNKNOWN_ROLE = "role "
"""Prefix of the speaker of an unknown role; the role's name follows."""

SAMPLED_ROLES = ("assistant", "model", "agent", "gpt", "ai", "bot", "chatbot", "chatgpt", "function_call")
"""Roles that count as sampled unless the user states which were."""
_UNSAMPLED_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "tools", "function", "ipython", "environment", "env", "observation"), "tool"),
    **dict.fromkeys(("tool_response", "tool_result", "tool_results", "tool_output", "function_response"), "tool"),
}
_MAX_ROLE_LENGTH = 40


def speaker_of(role: str) -> str:
    """Who speaks in a role, if sampled roles are not stated: `assistant`, `user`, `system`, `tool`, or an unknown
    role's name with a prefix."""
    return USUAL_SPEAKERS.get(role) or DEFAULT_SPEAKERS.speaker(role)


def unknown_role_name(speaker: str) -> str | None:
    """The name, as logged, of a speaker whose role is unknown; None for a known one."""
    return speaker.removeprefix(_UNKNOWN_ROLE) if speaker.startswith(_UNKNOWN_ROLE) else None


@dataclass(frozen=True)
class Speakers:
    """The speaker of each role; the stated roles were sampled, else SAMPLED_ROLES."""

    stated: tuple[str, ...] = ()

    def speaker(self, role: str) -> str:
        """Who speaks in a role: `assistant` if it was sampled, `user`, `system`, `tool`, `given answer`, or an
        unknown role."""
        speakers = self._by_role
        if speaker := speakers.get(role) or speakers.get(role.strip().lower()):
            return speaker
        short = " ".join(role.split())
        return _UNKNOWN_ROLE + (short if len(short) <= _MAX_ROLE_LENGTH else short[: _MAX_ROLE_LENGTH - 1] + "…")

    @cached_property
    def _by_role(self) -> dict[str, str]:
        sampled = tuple(role.strip().lower() for role in self.stated) or SAMPLED_ROLES
        others = dict.fromkeys(SAMPLED_ROLES, GIVEN_ANSWER)
        return {**others, **_UNSAMPLED_ROLES, **dict.fromkeys(sampled, ASSISTANT)}


DEFAULT_SPEAKERS = Speakers()
USUAL_SPEAKERS = DEFAULT_SPEAKERS._by_role
"""By role, who speaks in it if sampled roles are not stated."""
