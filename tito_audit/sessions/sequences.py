"""Answers of a session as training sequences: ids, labels and logprobs of equal length, nothing padded or cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from tito_audit.record.arrays import Ids
from tito_audit.sessions.model import Node
from tito_audit.tokens.vocab import Vocabulary

UNTRAINED = -100
"""The label of a token that is not trained."""
UNSAMPLED = 1.0
"""The logprob of a token that is not trained; real logprobs are never above zero."""


@dataclass(slots=True)
class SequenceNode:
    """One sequence of a managed server, with the fields that Atropos gives it."""

    full_text: str
    """What the ids spell, special tokens included."""
    tokens: list[int]
    """`[T]` every id as the sampler was given or returned it."""
    masked_tokens: list[int]
    """`[T]` the id of a trained token, else -100."""
    logprobs: list[float]
    """`[T]` the sampler's logprob of a trained token, else 1.0."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`finish_reason`, `stop_reason`, `weight_version`, `call_id` and `choice`, as far as they are known; how the
    prompt was made: `branch` (`start`, `continues`, `fork`), `kept` (how many ids are an earlier answer's),
    `proof`, `fork` and `fork_detail` (why it does not continue); and in a tree `key` and `parent`.
    """
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as the chat template was given it, the answer last; [] for a text prompt, and where the
    template was given tools or arguments, which a group has no place for."""

    def model_dump(self) -> dict[str, Any]:
        """The node as plain values, for JSON."""
        return asdict(self)


def chain_of(node: Node) -> Iterator[tuple[Node, int]]:
    """An answer and those that its prompt continues, each with how many of its leading ids are kept; the last
    first."""
    count = node.prompt.length + len(node.output_ids)
    while True:
        yield node, count
        if node.parent is None:
            return
        node, count = node.parent, min(count, node.prompt.kept)


def sequence(node: Node, vocabulary: Vocabulary, trains: set[int] | None = None, **more: Any) -> SequenceNode:
    """The sequence that ends with an answer.

    `trains` holds the answers (by `id`) that another sequence trains already: they are masked here, and the others
    are added to it. None: only this answer is trained.
    """
    tokens = node.seen_ids
    trained = np.zeros(len(tokens), np.bool_)
    logprobs = np.full(len(tokens), UNSAMPLED)
    for link, count in chain_of(node):
        start = link.prompt.length
        if (link is not node and trains is None) or id(link) in (trains or ()):
            continue
        trained[start:count] = True
        logprobs[start:count] = link.logprobs[: max(count - start, 0)]
        if trains is not None:
            trains.add(id(link))
    return SequenceNode(
        vocabulary.text(tokens),
        tokens.tolist(),
        np.where(trained, tokens, UNTRAINED).tolist(),
        logprobs.tolist(),
        {**_metadata(node), **more},
        _messages(node),
    )


def _messages(node: Node) -> list[dict[str, Any]]:
    """The conversation that renders to the sequence, if messages alone are enough."""
    written = node.prompt.written
    if written is None or node.call.tools or node.call.template_kwargs or not node.call.add_generation_prompt:
        return []
    return [dict(message.wire) for message in (*written.messages, node.message)]


def _metadata(node: Node) -> dict[str, Any]:
    prompt = node.prompt
    metadata = {
        "finish_reason": node.finish_reason,
        "call_id": node.call_id,
        "choice": node.choice,
        "branch": str(prompt.branch),
        "kept": prompt.kept,
        "stop_reason": node.stop_reason,
        "weight_version": node.weight_version,
        "proof": str(prompt.proof) if prompt.proof is not None else None,
        "fork": str(prompt.fork.reason) if prompt.fork is not None else None,
        "fork_detail": prompt.fork.detail if prompt.fork is not None else None,
    }
    return {name: value for name, value in metadata.items() if value is not None}


def digest(ids: Ids) -> str:
    """A short name of a sequence of ids."""
    return sha256(ids.tobytes()).hexdigest()[:12]


def as_group(
    nodes: Sequence[SequenceNode],
    scores: Sequence[float],
    *,
    messages: bool = True,
) -> dict[str, Any]:
    """Sequences with their scores as an Atropos group, the row that `scan` reads as `atropos_group`.

    With `messages` it holds the conversations too, if messages alone are enough for all of them; a scan then
    renders them. ValueError if there are not as many scores as nodes.
    """
    if len(scores) != len(nodes):
        raise ValueError(f"{len(nodes)} nodes and {len(scores)} scores: they cannot be matched")
    group: dict[str, Any] = {
        "tokens": [node.tokens for node in nodes],
        "masks": [node.masked_tokens for node in nodes],
        "scores": [float(score) for score in scores],
        "inference_logprobs": [node.logprobs for node in nodes],
    }
    if messages and nodes and all(node.messages for node in nodes):
        group["messages"] = [node.messages for node in nodes]
    if any(node.metadata.get("dummy_tokens") for node in nodes):
        group["dummy_tokens"] = True
    return group
