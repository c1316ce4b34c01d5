"""The message graph of a verifiers trace: nodes, branches, and the episode that holds the trace.

A node is one message with the tokens that it adds; the nodes from a root to a leaf are a branch, and their tokens
joined are one sequence. PrimeIntellect-ai/verifiers `verifiers/v1/graph.py`, `v1/trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import filled, is_given, is_list, parsed
from tito_audit.record.arrays import Ids, Mask, as_ids, empty_ids
from tito_audit.record.edits import Path

WRAPPER = "native_wrapper"
"""The key of the episode in the `info` of an uploaded sample."""


@dataclass(frozen=True, slots=True)
class Node:
    """One message of the graph."""

    wire: Mapping[str, Any]
    where: str
    parent: int | None
    ids: Ids
    """`[N]` the tokens that it adds; empty if the log has none."""
    mask: Mask
    """`[N]` True where sampled and trained."""
    sampled: bool
    """True if a model call wrote it."""
    start: int
    """Where in its tokens the completion starts; `N` if nothing in it was sampled."""

    @property
    def completion(self) -> Ids:
        """`[C]` what was sampled."""
        return self.ids[self.start :]

    @property
    def trained(self) -> Mask:
        """`[C]` the mask over the completion."""
        return self.mask[self.start :]


@dataclass(frozen=True, slots=True)
class Tree:
    """The branches of a trace whose roots were given the same tools, read as one rollout."""

    trace: Mapping[str, Any]
    path: Path
    """Where the trace is in its episode."""
    nodes: tuple[Node, ...]
    """All nodes of the trace, by number."""
    members: tuple[int, ...]
    """The numbers of the nodes on these branches, in order."""
    tools: object
    """The tools as logged."""

    @property
    def sampled(self) -> tuple[int, ...]:
        """The nodes that model calls wrote, in the order they were committed."""
        return tuple(number for number in self.members if self.nodes[number].sampled)

    @property
    def linear(self) -> bool:
        """True if all nodes are on one branch."""
        return all(
            self.nodes[number].parent == before
            for before, number in zip((None, *self.members), self.members, strict=False)
        )


def wrapped_in(row: Row) -> Mapping[str, Any] | None:
    """The `info` of an uploaded sample, parsed, if it holds the whole episode; else None.

    prime-rl uploads samples whose columns are JSON strings; `native_wrapper` inside `info` is the episode.
    """
    info = row.get("info")
    if isinstance(info, str):
        info = parsed(row, "info") if f'"{WRAPPER}"' in info else None
    if isinstance(info, Mapping) and isinstance(info.get(WRAPPER), Mapping):
        return info
    return None


def episode_of(row: Row) -> Row:
    """The episode or bare trace of a row: the row itself, or the one inside an uploaded sample."""
    if "traces" in row or "nodes" in row:
        return row
    info = wrapped_in(row)
    return row if info is None else info[WRAPPER]


def trees_of(episode: Row) -> list[Tree]:
    """The trees of an episode, one rollout each, in the order of the traces; [] for an episode without traces."""
    traces = episode.get("traces")
    if traces is None:
        return list(_trees(episode, (), ""))
    if not isinstance(traces, list | tuple):
        raise RecordError("traces is not a list of traces")
    found: list[Tree] = []
    for number, trace in enumerate(traces):
        if not isinstance(trace, Mapping):
            raise RecordError(f"traces[{number}] is not a trace (an object)")
        found.extend(_trees(trace, ("traces", number), f"traces[{number}]."))
    return found


def paths_of(tree: Tree) -> list[list[int]]:
    """The branches as node numbers from the root to a leaf, in the order of the leaves."""
    parents = {tree.nodes[number].parent for number in tree.members}
    found = []
    for leaf in tree.members:
        if leaf in parents:
            continue
        path = [leaf]
        while (above := tree.nodes[path[-1]].parent) is not None:
            path.append(above)
        found.append(path[::-1])
    return found


def prompts_of(tree: Tree) -> dict[int, tuple[Ids, list[int]]]:
    """For each sampled node its prompt `[P]` and the numbers of the nodes before it."""
    found: dict[int, tuple[Ids, list[int]]] = {}
    for path in paths_of(tree):
        whole = np.concatenate([empty_ids(), *(tree.nodes[number].ids for number in path)])
        at = 0
        for depth, number in enumerate(path):
            node = tree.nodes[number]
            if node.sampled and number not in found:
                found[number] = whole[: at + node.start], path[:depth]
            at += len(node.ids)
    return found


def _trees(trace: Mapping[str, Any], path: Path, where: str) -> Iterator[Tree]:
    """The branches of a trace, grouped by the tools their roots were given; at least one tree, possibly empty."""
    nodes = _nodes(trace, where)
    roots = [number for number, node in enumerate(nodes) if node.parent is None]
    # Writers that record a root's tools omit the key if there are none.
    by_root = any(nodes[root].wire.get("tools") is not None for root in roots)
    tools = {root: nodes[root].wire.get("tools") if by_root else trace.get("tools") for root in roots}
    groups: dict[str, list[int]] = {} if roots else {"": []}
    for root in roots:
        groups.setdefault(repr(tools[root]), []).append(root)
    root_of: list[int] = []
    for number, node in enumerate(nodes):
        root_of.append(number if node.parent is None else root_of[node.parent])
    for group in groups.values():
        own = set(group)
        members = tuple(number for number, root in enumerate(root_of) if root in own)
        yield Tree(trace, path, nodes, members, tools[group[0]] if group else trace.get("tools"))


def _nodes(trace: Mapping[str, Any], where: str) -> tuple[Node, ...]:
    wires = trace.get("nodes")
    if not isinstance(wires, list | tuple):
        raise RecordError(f"{where}nodes is not a list of messages with their tokens")
    return tuple(_node(wire, number, f"{where}nodes[{number}]") for number, wire in enumerate(wires))


def _node(wire: object, number: int, where: str) -> Node:
    if not isinstance(wire, Mapping):
        raise RecordError(f"{where} is not a node (an object)")
    parent = wire.get("parent")
    if isinstance(parent, float) and parent.is_integer():
        parent = int(parent)  # a table has floats where some are null
    if parent is not None and (type(parent) is not int or not 0 <= parent < number):
        raise RecordError(f"{where}.parent is {parent!r}, not the number of a node before it")
    token_ids = wire.get("token_ids")
    ids = empty_ids() if token_ids is None else as_ids(token_ids, f"{where}.token_ids")
    mask = _mask(wire, ids, where)
    said = wire.get("sampled")
    sampled = bool(mask.any()) if said is None else said is True or (isinstance(said, np.bool_) and bool(said))
    if sampled and len(ids) and not mask.any():
        mask = _mask_from_logprobs(wire, ids, where)
    start = int(mask.argmax()) if sampled and mask.any() else len(ids)
    return Node(wire, where, parent, ids, mask, sampled, start)


def _mask(wire: Mapping[str, Any], ids: Ids, where: str) -> Mask:
    """The mask as booleans; all False where the node has none."""
    value: Any = wire.get("mask")
    if not is_given(value):
        return np.zeros(len(ids), np.bool_)
    if not is_list(value):
        raise RecordError(f"{where}.mask is not a list of true and false")
    if not isinstance(value, np.ndarray) and not set(map(type, value)) <= {bool, int}:
        raise RecordError(f"{where}.mask holds something other than true and false")
    mask = np.asarray(value)
    if mask.ndim != 1 or mask.dtype.kind not in "biu" or not ((mask == 0) | (mask == 1)).all():
        raise RecordError(f"{where}.mask holds something other than true and false")
    if len(mask) != len(ids):
        raise RecordError(
            f"{where}.mask has {len(mask)} entries for {len(ids)} tokens: it is unclear which were sampled"
        )
    return mask.astype(np.bool_)


def _mask_from_logprobs(wire: Mapping[str, Any], ids: Ids, where: str) -> Mask:
    """The mask of a node without one: its last tokens were sampled, as many as have logprobs."""
    mask = np.zeros(len(ids), np.bool_)
    logprobs, held = wire.get("logprobs"), wire.get("mask")
    if filled(held):
        return mask
    if not is_list(logprobs) or not 0 < len(logprobs) <= len(ids):
        raise RecordError(f"{where} has no mask, and nothing else says which of its tokens were sampled")
    mask[len(ids) - len(logprobs) :] = True
    return mask
