"""Sessions as JSON: a summary of each, and the training rows of its threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tito_audit.serve.gateway import Gateway
from tito_audit.sessions.model import Node
from tito_audit.sessions.session import Session


def session_line(gateway: Gateway, session: Session) -> dict[str, Any]:
    """The summary of a session."""
    kept = gateway.kept(session)
    return {
        "session_id": session.id,
        "answers": len(session.nodes),
        "used": session.used,
        "closed": kept.closed,
        "reward": kept.reward,
    }


def rollout_of(gateway: Gateway, session: Session) -> dict[str, Any]:
    """A session with a training row for each of its threads; each answer is trained in one of them."""
    threads: dict[str, list[Node]] = {}
    of = gateway.kept(session).threads
    for node in session.nodes:
        threads.setdefault(of.of(node), []).append(node)
    rows = [_row(thread, nodes) for thread, nodes in threads.items()]
    return {**session_line(gateway, session), "rollouts": rows}


def _row(thread: str, nodes: Sequence[Node]) -> dict[str, Any]:
    """The last call holds the whole thread, since each prompt starts with the call before it."""
    last = nodes[-1]
    ids = last.seen_ids
    mask, logprobs = np.zeros(len(ids), np.int8), np.zeros(len(ids))
    for node in nodes:
        start = node.prompt.length
        mask[start : start + len(node.output_ids)] = 1
        logprobs[start : start + len(node.output_ids)] = node.logprobs
    given = () if last.prompt.written is None else last.prompt.written.messages
    return {
        "thread_id": thread,
        "call_ids": [node.call_id for node in nodes],
        "token_ids": ids,
        "loss_mask": mask,
        "logprobs": logprobs,
        "messages": [*(message.wire for message in given), last.message.wire] if given else None,
        "finish_reason": last.finish_reason,
    }
