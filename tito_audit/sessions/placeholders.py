"""Placeholders for endpoints that return no token ids: to try an environment, never to train."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.sessions.sequences import UNSAMPLED, UNTRAINED, SequenceNode

VARIABLE = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
"""The environment variable by which Atropos allows placeholders."""
_TOKENS = 128
"""The ids that Atropos writes: 0, 1, 2, …"""


def allows_placeholders() -> bool:
    """Whether the environment allows placeholders."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "yes")


class PlaceholderServer:
    """A managed server over a client of a text API; the ids of its nodes are placeholders.

    No placeholder is trained, `metadata["dummy_tokens"]` says what they are, and `scan` reports them as REC004.
    """

    def __init__(self, client: Any, track_tree: bool = False) -> None:
        """`client` is an `openai.AsyncOpenAI`, or has its `chat.completions.create` and `completions.create`."""
        self.client: Any = client
        self.track_tree = track_tree
        self._nodes: list[SequenceNode] = []

    async def chat_completion(self, **asked: Any) -> Any:
        """The client's own answer."""
        answer = await self._client().chat.completions.create(**asked)
        messages: Sequence[Mapping[str, Any]] = asked.get("messages") or ()
        for choice in answer.choices:
            told = [*messages, {"role": "assistant", "content": choice.message.content}]
            text = "\n\n".join(f"{one['role']}:{one.get('content') or ''}" for one in told)
            self._nodes.append(_node(text, choice.finish_reason))
        return answer

    async def completion(self, **asked: Any) -> Any:
        """The client's own answer."""
        answer = await self._client().completions.create(**asked)
        for choice in answer.choices:
            self._nodes.append(_node(f"{asked.get('prompt', '')}{choice.text or ''}", choice.finish_reason))
        return answer

    async def get_logprobs(self, **asked: Any) -> dict[str, Any]:
        """Raises SetupError: a text API has none."""
        raise SetupError("An endpoint that returns text gives no logprobs of a prompt.\nUse vLLM, SGLang or hf.")

    def get_state(self) -> dict[str, Any]:
        """`nodes`, a list; in a tree also `sequences` and `tree`, the same by their text."""
        if not self.track_tree:
            return {"nodes": list(self._nodes)}
        tree = {node.full_text: node for node in self._nodes}
        return {"nodes": list(self._nodes), "sequences": tree, "tree": dict(tree)}

    def reset(self) -> None:
        """Forget every node."""
        self._nodes.clear()

    def close(self) -> None:
        """Forget every node and refuse further calls. The client stays open."""
        self.reset()
        self.client = None

    def _client(self) -> Any:
        if self.client is None:
            raise SetupError("The managed server is closed.\nUse it inside its `async with` block.")
        return self.client


def _node(text: str, finish_reason: str | None) -> SequenceNode:
    return SequenceNode(
        text,
        list(range(_TOKENS)),
        [UNTRAINED] * _TOKENS,
        [UNSAMPLED] * _TOKENS,
        {"finish_reason": finish_reason, "dummy_tokens": True},
    )
