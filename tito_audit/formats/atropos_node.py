"""Atropos sequence nodes: what the managed server tracked for one text sequence, sampled ids included.

Its state has two modes: a list of nodes, each the latest form of one conversation, and a tree, in which every
call left a node under its full text (`sequences`, repeated as `tree`). A single saved node is read too.
NousResearch/atropos `atroposlib/envs/server_handling/managed_server.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._atropos import read_sample_row
from tito_audit.formats._calls import errors_at, finish_reason, stated_facts, with_finish_reasons
from tito_audit.formats._columns import as_object, equal_values, is_list, other_columns, same_ids
from tito_audit.formats._extras import version_spans
from tito_audit.formats._responses import nonempty_text
from tito_audit.formats._update import object_at, one_repair_each, sources_at, updated_row, value_at
from tito_audit.record.edits import Edit, Path, apply_edits
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.policy_columns import WEIGHTS, versions_to_column, versions_to_spans
from tito_audit.record.prefix import common_ends
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import Sources

_COLUMNS = ("tokens", "masked_tokens", "logprobs")
_KEYS = {"full_text", *_COLUMNS}


def read(row: Row, place: Place) -> Sequence[Rollout]:
    nodes = [row] if _is_node(row) else _saved_nodes(row)
    for index, node in enumerate(nodes):
        as_object(node, f"nodes[{index}] is not a node (an object)")
    rollouts = []
    for index, node in enumerate(nodes):
        with errors_at("" if node is row else f"nodes[{index}]"):
            trained = read_sample_row(
                node.get("tokens"),
                ("masked_tokens", node.get("masked_tokens")),
                ("logprobs", node.get("logprobs")),
                other_columns(node, _COLUMNS),
                "tokens",
            )
        stated, metadata = stated_facts(row).overlay(stated_facts(node)), node.get("metadata")
        if isinstance(metadata, Mapping):
            # The server had no ids: 0, 1, 2, … are placeholders.
            dummy = metadata.get("dummy_tokens")
            if isinstance(dummy, int) and dummy:
                stated = replace(stated, dummy_tokens=True)
            # `tito_audit.sessions` states spans of `tokens` where several versions sampled them.
            spans = version_spans(metadata.get("weight_versions"))
            stated = stated.with_facts(finish_reason=finish_reason(metadata), weight_spans=spans or None)
        text = node.get("full_text")
        rollout = Rollout(
            replace(place, item=index),
            FORMAT.name,
            messages=as_messages(row.get("messages"), "messages"),
            tools=as_tools(row.get("tools"), "tools"),
            training_row=with_finish_reasons(trained, node),
            stated=stated.with_facts(full_text=text if isinstance(text, str) else None),
        )
        rollouts.append(rollout)
    return rollouts


def _paths_of_nodes(row: Row) -> list[list[Path]]:
    """The paths of each node that is read: its own first, then those of nodes that repeat it."""
    if _is_node(row):
        return [[()]]
    keys = {key: row[key] if isinstance(row[key], Mapping) else range(len(row[key])) for key in _node_keys(row)}
    first, *others = [[(name, key) for key in keys[name]] for name in keys]
    copies: dict[str | None, list[Path]] = {}
    for path in [path for paths in others for path in paths if isinstance(value_at(row, path), Mapping)]:
        copies.setdefault(nonempty_text(value_at(row, path).get("full_text")), []).append(path)
    places: list[list[Path]] = []
    for own in first:
        node = value_at(row, own)
        alike = copies.get(nonempty_text(node.get("full_text")), ())
        lists = {name: node[name] for name in _COLUMNS if is_list(node.get(name))}
        repeats = (
            path
            for path in alike
            if all(
                is_list(copy := value_at(row, path).get(name)) and equal_values(copy, lists[name])
                for name in lists
            )
        )
        places.append([own, *repeats])
    return places


def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    columns = [rollout.training_row.columns if rollout.training_row is not None else () for rollout in rollouts]
    return [
        Sources({column.name: sources_at((*path, column.name) for path in places) for column in own})
        for own, places in zip(columns, _paths_of_nodes(row), strict=True)
    ]


def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    if not repaired:
        return ()
    before = read(row, repaired[0].rollout.place)
    edits: dict[Path, Row] = {}
    for old, part, places in zip(before, one_repair_each(before, repaired), _paths_of_nodes(row), strict=True):
        was, now = old.training_row, part.rollout.training_row
        if updated_row(value_at(row, places[0]), was, now, "tokens") is value_at(row, places[0]):
            continue
        for path in places:
            new = updated_row(value_at(row, path), was, now, "tokens")
            spans = version_spans(object_at(new, "metadata").get(WEIGHTS))
            if spans and was is not None and now is not None and not same_ids(was.token_ids, now.token_ids):
                # The version spans at their new tokens, without tokens that changed.
                head, tail = common_ends(was.token_ids, now.token_ids)
                versions = versions_to_column(spans, len(was.token_ids)).values
                moved = np.full(len(now.token_ids), None, object)
                moved[:head] = versions[:head]
                moved[len(moved) - tail :] = versions[len(versions) - tail :]
                span_keys = ("version", "start", "end")
                logged = [dict(zip(span_keys, span, strict=True)) for span in versions_to_spans(moved)]
                new = {**new, "metadata": {**new["metadata"], WEIGHTS: logged}}
            other = edits.setdefault(path, new)
            lists = [name for name in _COLUMNS if is_list(value_at(row, path).get(name))]
            if not all(equal_values(other[name], new[name]) for name in lists):
                raise RecordError(
                    "two equal nodes were repaired differently, and it is unclear which of them the copy repeats"
                )
    return (apply_edits(row, [Edit(path, new) for path, new in edits.items()]),)


def _saved_nodes(row: Row) -> Sequence[Any]:
    """The nodes of a saved state, in order; [] if the row is not one."""
    names = _node_keys(row)
    if not names:
        return []
    first = row[names[0]]
    return list(first.values()) if isinstance(first, Mapping) else first


def _node_keys(row: Row) -> list[str]:
    """The keys under which a state holds nodes: the first is read, the others repeat it."""
    lists = ["nodes"] if isinstance(row.get("nodes"), list | tuple) else []
    return lists + [name for name in ("sequences", "tree") if isinstance(row.get(name), Mapping)]


def _is_node(value: object) -> bool:
    return isinstance(value, Mapping) and len(_KEYS & value.keys()) >= 3 and "masked_tokens" in value


FORMAT = Format(
    name="atropos_node",
    title="Atropos sequence nodes (managed server state)",
    signature=Signature("{full_text}, {tokens}, {masked_tokens}, {logprobs}; or {nodes|sequences} of them"),
    precedence=80,
    matches=lambda row: _is_node(row) or any(map(_is_node, _saved_nodes(row)[:1])),
    read=read,
    sources=sources,
    update=update,
    shows="The sampled ids of each sequence with labels and logprobs. No messages or tools, so no template can "
    "be applied; placeholder ids are recognized by `metadata.dummy_tokens`.",
)
