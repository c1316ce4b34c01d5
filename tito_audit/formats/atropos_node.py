"""Atropos sequence nodes: what the managed server tracked for one text sequence, sampled ids included.

Its state comes in two modes: a list of nodes, each the latest form of one conversation, and a tree, in
which every call left a node under its full text (`sequences`, repeated as `tree`). A single node saved by
itself is read too. NousResearch/atropos `atroposlib/envs/server_handling/managed_server.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats._atropos import sample_row
from tito_audit.formats._calls import finish_reason
from tito_audit.formats._columns import other_columns, stated_facts
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout

__all__ = ["FORMAT"]

_KEYS = {"full_text", "tokens", "masked_tokens", "logprobs"}


def _matches(row: Row) -> bool:
    if _is_node(row):
        return True
    nodes = _nodes(row)
    return bool(nodes) and _is_node(nodes[0])


def _read(row: Row, place: Place) -> Sequence[Rollout]:
    nodes = [row] if _is_node(row) else _nodes(row)
    for index, node in enumerate(nodes):
        if not isinstance(node, Mapping):
            raise RecordError(f"nodes[{index}] is not a node (an object)")
    return tuple(_rollout(row, node, replace(place, item=index)) for index, node in enumerate(nodes))


def _rollout(row: Row, node: Mapping[str, Any], place: Place) -> Rollout:
    where = "" if node is row else f"nodes[{place.item}]."
    try:
        trained = sample_row(
            node.get("tokens"),
            ("masked_tokens", node.get("masked_tokens")),
            ("logprobs", node.get("logprobs")),
            other_columns(node, {"tokens", "masked_tokens", "logprobs"}),
            "tokens",
        )
    except RecordError as error:
        raise RecordError(f"{where}{error}" if not where else f"{where[:-1]}: {error}") from None
    return Rollout(
        place,
        FORMAT.name,
        messages=as_messages(row.get("messages"), "messages"),
        tools=as_tools(row.get("tools"), "tools"),
        training_row=trained,
        stated=_stated(row, node),
    )


def _stated(row: Row, node: Mapping[str, Any]) -> dict[str, object]:
    stated = {**stated_facts(row), **stated_facts(node)}
    metadata = node.get("metadata")
    if isinstance(metadata, Mapping):
        # The server had no ids to give: 0, 1, 2, … stand in their place.
        if metadata.get("dummy_tokens"):
            stated["dummy_tokens"] = True
        reason = finish_reason(metadata)
        if reason is not None:
            stated["finish_reason"] = reason
    if isinstance(node.get("full_text"), str):
        stated["full_text"] = node["full_text"]
    return stated


def _nodes(row: Row) -> Sequence[Any]:
    """The nodes of a saved state, in order; [] when it is none."""
    nodes = row.get("nodes")
    if isinstance(nodes, list | tuple):
        return nodes
    for name in ("sequences", "tree"):
        if isinstance(row.get(name), Mapping):
            return list(row[name].values())
    return []


def _is_node(value: object) -> bool:
    return isinstance(value, Mapping) and len(_KEYS & value.keys()) >= 3 and "masked_tokens" in value


FORMAT = Format(
    name="atropos_node",
    title="Atropos sequence nodes (managed server state)",
    signature="`full_text`, `tokens`, `masked_tokens`, `logprobs`; or `nodes` or `sequences` of them",
    precedence=80,
    matches=_matches,
    read=_read,
    shows="The sampled ids of each sequence with labels and logprobs. Neither messages nor tools, so no "
    "template can be applied; placeholder ids are told by `metadata.dummy_tokens`.",
)
