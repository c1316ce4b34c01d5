"""Atropos sequence nodes: what the managed server tracked for one text sequence, sampled ids included.

Its state has two modes: a list of nodes, each the latest form of one conversation, and a tree, in which every
call left a node under its full text (`sequences`, repeated as `tree`). A single saved node is read too.
NousResearch/atropos `atroposlib/envs/server_handling/managed_server.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats._atropos import sample_row
from tito_audit.formats._calls import finish_reason
from tito_audit.formats._columns import is_list, other_columns, stated_facts
from tito_audit.formats._finish import with_finishes
from tito_audit.formats._responses_items import text_of
from tito_audit.formats._update import at_most_one_each, updated_row, with_list, with_values
from tito_audit.formats._values import equal_values
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.record.stated import Stated
from tito_audit.signature import Signature, keys, way

_COLUMNS = ("tokens", "masked_tokens", "logprobs")
_KEYS = {"full_text", *_COLUMNS}


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
        training_row=with_finishes(trained, node),
        stated=_stated(row, node),
    )


@dataclass(frozen=True, slots=True)
class _Change:
    """What changes in one node."""

    node: Mapping[str, Any]
    key: object
    """Its key in the container that was read: an index in a list, its text in a tree."""
    before: TrainingRow
    after: TrainingRow

    def repeats(self, node: object) -> bool:
        """Whether a node of another container repeats this one."""
        return (
            isinstance(node, Mapping)
            and text_of(node.get("full_text")) == text_of(self.node.get("full_text"))
            and all(
                is_list(node.get(name)) and equal_values(node[name], self.node[name])
                for name in _COLUMNS
                if is_list(self.node.get(name))
            )
        )


def _update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    if not repaired:
        return ()
    rollouts = _read(row, repaired[0].rollout.place)
    after = [one.rollout.training_row for one in at_most_one_each(rollouts, repaired)]
    if _is_node(row):
        return (updated_row(row, rollouts[0].training_row, after[0], "tokens"),)
    source, *_ = _held(row)
    held = row[source]
    keys = range(len(held)) if source == "nodes" else list(held)
    changes: list[_Change] = []
    for key, old, new in zip(keys, rollouts, after, strict=True):
        if updated_row(held[key], old.training_row, new, "tokens") is not held[key]:
            assert old.training_row is not None
            assert new is not None
            changes.append(_Change(held[key], key, old.training_row, new))
    return (with_values(row, {name: _container(row[name], name == source, changes) for name in _held(row)}),)


def _container(held: Any, is_source: bool, changes: Sequence[_Change]) -> Any:
    """One container of nodes, with every changed node replaced."""
    if not isinstance(held, Mapping):
        return with_list(held, [_node(node, i, is_source, changes) for i, node in enumerate(held)])
    new = {key: _node(node, key, is_source, changes) for key, node in held.items()}
    return held if all(new[key] is held[key] for key in held) else new


def _node(node: Any, key: object, is_source: bool, changes: Sequence[_Change]) -> Any:
    """A node, replaced if it changed; RecordError if it repeats two equal nodes that changed differently."""
    mine = [change for change in changes if (change.key == key if is_source else change.repeats(node))]
    made = [updated_row(node, change.before, change.after, "tokens") for change in mine]
    if any(
        not equal_values(made[0][name], other[name])
        for other in made[1:]
        for name in _COLUMNS
        if is_list(node.get(name))
    ):
        raise RecordError(
            "two equal nodes were repaired differently, and it is unclear which of them the copy repeats"
        )
    return made[0] if made else node


def _stated(row: Row, node: Mapping[str, Any]) -> Stated:
    stated = stated_facts(row).overlaid(stated_facts(node))
    metadata = node.get("metadata")
    if isinstance(metadata, Mapping):
        # The server had no ids to give: 0, 1, 2, … stand in their place.
        dummy = metadata.get("dummy_tokens")
        if isinstance(dummy, int) and dummy:
            stated = replace(stated, dummy_tokens=True)
        stated = stated.with_facts(finish_reason=finish_reason(metadata))
    text = node.get("full_text")
    return stated.with_facts(full_text=text if isinstance(text, str) else None)


def _nodes(row: Row) -> Sequence[Any]:
    """The nodes of a saved state, in order; [] if the row is not one."""
    held = _held(row)
    if not held:
        return []
    first = row[held[0]]
    return list(first.values()) if isinstance(first, Mapping) else first


def _held(row: Row) -> list[str]:
    """The keys under which a state holds nodes; the first is the one that is read, others repeat it."""
    lists = ["nodes"] if isinstance(row.get("nodes"), list | tuple) else []
    return lists + [name for name in ("sequences", "tree") if isinstance(row.get(name), Mapping)]


def _is_node(value: object) -> bool:
    return isinstance(value, Mapping) and len(_KEYS & value.keys()) >= 3 and "masked_tokens" in value


FORMAT = Format(
    name="atropos_node",
    title="Atropos sequence nodes (managed server state)",
    signature=Signature.of(
        way("full_text", "tokens", "masked_tokens", "logprobs"),
        way(keys("nodes", "sequences", after=" of them")),
    ),
    precedence=80,
    matches=_matches,
    read=_read,
    update=_update,
    shows="The sampled ids of each sequence with labels and logprobs. Neither messages nor tools, so no "
    "template can be applied; placeholder ids are told by `metadata.dummy_tokens`.",
)
