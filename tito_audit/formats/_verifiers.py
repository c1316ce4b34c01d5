"""The records of verifiers: messages and tools in the chat form, the graph of messages, and how they are written.

Both of its record models write tool calls and tools flat (`name`, `arguments`; `name`, `description`,
`parameters`). They are converted for templates as the training client does it: PrimeIntellect-ai/verifiers
`verifiers/v1/dialects/chat.py` (`message_to_wire`) and `v1/clients/train.py` (`tool_to_wire`).

In the graph (`verifiers/v1/graph.py`, `v1/trace.py`) a node is one message with the tokens that it adds; the
nodes from a root to a leaf are a branch, and their tokens joined are one sequence. So nothing is ever forked:
logprobs and columns are compacted by the mask, and prompts split into their nodes. Sampled tokens never change,
so only the tokens of other messages and the columns do. The counts of a trace follow from those of its calls:
what each was given beyond the tokens of the call before it on its branch, and what it wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import (
    as_logged,
    as_object,
    has_entries,
    is_given,
    is_list,
    parsed_column,
    same_floats,
    same_ids,
)
from tito_audit.formats._responses import drop_empty_fields, nonempty_text
from tito_audit.formats._update import (
    moved_boundaries,
    object_at,
    one_repair_each,
    same_trained,
    sources_at,
    value_at,
    with_values,
)
from tito_audit.formats._writer import CallChange, Read, check_written, find_call_changes
from tito_audit.record.arrays import Ids, Mask, as_ids, empty_ids
from tito_audit.record.edits import ABSENT, Edit, Path, apply_edits
from tito_audit.record.json_text import rewrite_json_string
from tito_audit.record.message import Message, ToolSpec, as_message, as_tools
from tito_audit.record.nesting import load_json
from tito_audit.record.prefix import common_ends
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.record.sources import CallSource, Sources


def chat_message(value: object, where: str) -> Message:
    """A message with its tool calls in chat form; `where` names it in errors."""
    wire = drop_empty_fields(as_object(value, f"{where} is not a message: an object with a `role` is expected"))
    calls = wire.get("tool_calls")
    if isinstance(calls, list | tuple):
        wire["tool_calls"] = []
        for call in calls:
            if isinstance(call, str):
                # Before v1 the messages of a row hold each call as a string of JSON.
                with contextlib.suppress(ValueError):
                    call = load_json(call)
            if isinstance(call, Mapping) and not isinstance(call.get("function"), Mapping):
                if nonempty_text(call.get("type")) == "custom":
                    # The input of a free-form tool is in `arguments` too; templates do not support such calls.
                    call = {"id": call.get("id"), **call}
                else:
                    names = ("name", "namespace", "arguments")
                    function = {key: call[key] for key in names if call.get(key) is not None}
                    call = {"id": call.get("id"), "type": "function", "function": function}
            wire["tool_calls"].append(call)
    elif wire["content"] is None:
        wire["content"] = ""
    return as_message(wire, where)


def chat_messages(values: object, where: str) -> tuple[Message, ...]:
    """A list of messages in chat form; () for None and for a string, which is not a conversation."""
    if values is None or isinstance(values, str):
        return ()
    if not isinstance(values, Sequence):
        raise RecordError(f"{where} is not a list of messages")
    return tuple(chat_message(value, f"{where}[{i}]") for i, value in enumerate(values))


def verifiers_tools_as_chat(values: object, where: str) -> tuple[ToolSpec, ...]:
    """Tools in chat form; tools of a namespace or of a type other than `function` stay as they are."""
    tools: list[ToolSpec] = []
    for tool in as_tools(values, where):
        other = (nonempty_text(tool.get("type")) or "function") != "function" or nonempty_text(
            tool.get("namespace")
        )
        if other or isinstance(tool.get("function"), Mapping) or not isinstance(tool.get("name"), str):
            tools.append(tool)
            continue
        function = {
            "name": tool["name"],
            "description": nonempty_text(tool.get("description")) or "",
            "parameters": tool["parameters"] if tool.get("parameters") is not None else {},
        }
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        tools.append({"type": "function", "function": function})
    return tuple(tools)


_UPDATED_COLUMNS = ("advantages", "trainer_logprobs", "entropies", "is_masked")
"""What a trainer writes about the tokens of a branch."""
WRAPPER = "native_wrapper"
"""The key of the episode in the `info` of an uploaded sample."""


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One message of a trace, with the tokens that it adds to its branch."""

    wire: Mapping[str, Any]
    where: str
    parent: int | None
    ids: Ids
    """`[N]`; empty if the log has none."""
    mask: Mask
    """`[N]` True where sampled and trained."""
    sampled: bool
    """Whether a model call wrote it."""
    start: int
    """The index of the first sampled token; `N` if none was sampled."""

    @property
    def completion(self) -> Ids:
        """`[C]` the sampled tokens."""
        return self.ids[self.start :]

    @property
    def trained(self) -> Mask:
        """`[C]` the mask over the completion."""
        return self.mask[self.start :]


@dataclass(frozen=True, slots=True)
class Tree:
    """The branches of a trace whose roots have the same tools; one rollout."""

    trace: Mapping[str, Any]
    path: Path
    """Where the trace is in its episode."""
    nodes: tuple[TraceNode, ...]
    """All nodes of the trace, by number."""
    members: tuple[int, ...]
    """The numbers of the nodes on these branches, ascending."""
    tools: object
    """The tools as logged."""

    @property
    def sampled(self) -> tuple[int, ...]:
        """The nodes that model calls wrote, in the order they were committed."""
        return tuple(number for number in self.members if self.nodes[number].sampled)

    @property
    def is_linear(self) -> bool:
        """Whether all nodes are on one branch."""
        return all(
            self.nodes[number].parent == before
            for before, number in zip((None, *self.members), self.members, strict=False)
        )


def uploaded_info(row: Row) -> Mapping[str, Any] | None:
    """The parsed `info` of a sample uploaded by prime-rl, if its `native_wrapper` is the episode; else None."""
    info = row.get("info")
    if isinstance(info, str):
        info = parsed_column(row, "info") if f'"{WRAPPER}"' in info else None
    if isinstance(info, Mapping) and isinstance(info.get(WRAPPER), Mapping):
        return info
    return None


def episode_of(row: Row) -> Row:
    """The episode or the bare trace of a row: the row itself, or the episode inside an uploaded sample."""
    if "traces" in row or "nodes" in row:
        return row
    info = uploaded_info(row)
    return row if info is None else info[WRAPPER]


def trees_of(episode: Row) -> list[Tree]:
    """The trees of an episode in the order of its traces; [] for an episode without traces."""
    traces = episode.get("traces")
    if traces is None:
        return list(_parse_trees(episode, (), ""))
    if not isinstance(traces, list | tuple):
        raise RecordError("traces is not a list of traces")
    trees: list[Tree] = []
    for number, trace in enumerate(traces):
        trace = as_object(trace, f"traces[{number}] is not a trace (an object)")
        trees.extend(_parse_trees(trace, ("traces", number), f"traces[{number}]."))
    return trees


def branches_of(tree: Tree) -> list[list[int]]:
    """Each branch as its node numbers from root to leaf, in the order of the leaves."""
    parents = {tree.nodes[number].parent for number in tree.members}
    paths = []
    for leaf in tree.members:
        if leaf in parents:
            continue
        path = [leaf]
        while (above := tree.nodes[path[-1]].parent) is not None:
            path.append(above)
        paths.append(path[::-1])
    return paths


def prompts_of(tree: Tree) -> dict[int, tuple[Ids, list[int]]]:
    """For each sampled node, by number: its prompt `[P]`, and the numbers of the nodes before it on its branch."""
    prompts: dict[int, tuple[Ids, list[int]]] = {}
    for path in branches_of(tree):
        whole = np.concatenate([empty_ids(), *(tree.nodes[number].ids for number in path)])
        at = 0
        for depth, number in enumerate(path):
            node = tree.nodes[number]
            if node.sampled and number not in prompts:
                prompts[number] = whole[: at + node.start], path[:depth]
            at += len(node.ids)
    return prompts


def with_trainer_updates(row: Row, updates_of: Callable[[str], Iterable[Row]]) -> Row:
    """The row with what a trainer wrote about its traces, as columns of the nodes over what the mask trains.

    An update has streams for branches, with an entry for each of their tokens, null where nothing is known. The
    newest wins, and a node whose trained tokens a stream does not cover stays as it is. PrimeIntellect-ai/prime-rl
    `src/prime_rl/monitors/file/traces/update.py` (`fold_trace_updates`).
    """
    episode = episode_of(row)
    columns: dict[Path, Any] = {}
    for tree in {tree.path: tree for tree in trees_of(episode)}.values():
        branches = branches_of(replace(tree, members=tuple(range(len(tree.nodes)))))
        updated = [
            (branches[index], branch)
            for update in updates_of(nonempty_text(tree.trace.get("id")) or "")
            for branch in update.get("branches") or ()
            if isinstance(branch, Mapping) and type(index := branch.get("index")) is int
            if 0 <= index < len(branches)
        ]
        for (numbers, branch), name in product(updated, _UPDATED_COLUMNS):
            stream: Any = branch.get(name)
            at = 0
            for number in numbers if is_list(stream) else ():
                node = tree.nodes[number]
                start, at = at, at + len(node.ids)
                if at > len(stream):
                    break
                own = [value for value, trained in zip(stream[start:at], node.mask, strict=True) if trained]
                unknown = own.count(None)
                if unknown < len(own) and (not unknown or name == "is_masked"):
                    columns[(*tree.path, "nodes", number, name)] = own
    return (
        _with_episode(row, apply_edits(episode, [Edit(*column) for column in columns.items()])) if columns else row
    )


def _parse_trees(trace: Mapping[str, Any], path: Path, where: str) -> Iterator[Tree]:
    """The trees of a trace, one for each set of tools that roots were given; without roots, one empty tree."""
    wires = trace.get("nodes")
    if not isinstance(wires, list | tuple):
        raise RecordError(f"{where}nodes is not a list of messages with their tokens")
    nodes = tuple(_parse_node(wire, number, f"{where}nodes[{number}]") for number, wire in enumerate(wires))
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


def _parse_node(value: object, number: int, where: str) -> TraceNode:
    """A node of a trace; RecordError if its mask does not say which tokens were sampled."""
    wire = as_object(value, f"{where} is not a node (an object)")
    parent = wire.get("parent")
    if isinstance(parent, float) and parent.is_integer():
        parent = int(parent)  # a table has floats where some are null
    if parent is not None and (type(parent) is not int or not 0 <= parent < number):
        raise RecordError(f"{where}.parent is {parent!r}, not the number of a node before it")
    token_ids = wire.get("token_ids")
    ids = empty_ids() if token_ids is None else as_ids(token_ids, f"{where}.token_ids")
    logged: Any = wire.get("mask")
    mask = np.zeros(len(ids), np.bool_)
    if is_given(logged):
        if not is_list(logged):
            raise RecordError(f"{where}.mask is not a list of true and false")
        not_flags = not isinstance(logged, np.ndarray) and not set(map(type, logged)) <= {bool, int}
        mask = np.asarray(() if not_flags else logged)
        if not_flags or mask.ndim != 1 or mask.dtype.kind not in "biu" or not ((mask == 0) | (mask == 1)).all():
            raise RecordError(f"{where}.mask holds something other than true and false")
        if len(mask) != len(ids):
            raise RecordError(
                f"{where}.mask has {len(mask)} entries for {len(ids)} tokens: it is unclear which were sampled"
            )
        mask = mask.astype(np.bool_)
    flag = wire.get("sampled")
    sampled = bool(mask.any()) if flag is None else flag is True or (isinstance(flag, np.bool_) and bool(flag))
    if sampled and len(ids) and not mask.any() and not has_entries(logged):
        # Its last tokens were sampled, as many as there are logprobs.
        logprobs = wire.get("logprobs")
        if not is_list(logprobs) or not 0 < len(logprobs) <= len(ids):
            raise RecordError(f"{where} has no mask, and nothing else says which of its tokens were sampled")
        mask[len(ids) - len(logprobs) :] = True
    start = int(mask.argmax()) if sampled and mask.any() else len(ids)
    return TraceNode(wire, where, parent, ids, mask, sampled, start)


_FLOAT_DECIMALS = 4
"""Decimals of per-token floats since release 0.4.0 (`RECORD_FLOAT_DECIMALS` in `v1/graph.py`)."""
_ENGINE_KEYS = ("routed_experts", "sampling_mask")
_INPUT, _TOTAL = "num_input_tokens", "num_total_tokens"
_Changes = dict[tuple[Path, int], dict[Path, Any]]
"""New values by (path of the trace, number of the node), then by the key in the node."""


def updated_traces(row: Row, repaired: Sequence[RepairedRollout], read: Read) -> Sequence[Row]:
    """The row with its repaired rollouts, read back and compared; the same object if nothing changed."""
    if not repaired:
        return ()
    rollouts = read(row, repaired[0].rollout.place)
    if len({part.rollout.place.item for part in repaired}) < len(repaired):
        raise RecordError(
            "a trace cannot hold a fork and does not need one: its branches already are separate sequences"
        )
    ones = one_repair_each(rollouts, repaired)
    episode = episode_of(row)
    changed: _Changes = {}
    trees = trees_of(episode) if "traces" in episode or "nodes" in episode else []
    for tree, before, part in zip(trees, rollouts, ones, strict=False):
        if len(part.turns_from) != len(before.turns):
            raise RecordError("a call of a trace cannot be left out: the messages after it build on its tokens")
        # Logprobs are stored for tokens of the mask alone.
        rows = before.training_row, part.rollout.training_row
        if not same_trained(*rows) or not same_floats(*(None if own is None else own.logprobs for own in rows)):
            raise RecordError(
                "a node's mask says what was sampled, and its logprobs follow the mask, so the loss mask of a "
                "trace cannot be changed by itself"
            )
        _collect_changes(tree, before, find_call_changes(before, part), changed)
    if not changed:
        return (row,)
    edits = [
        Edit((*path, "nodes", number, *name), value)
        for (path, number), values in changed.items()
        for name, value in values.items()
    ]
    written = apply_edits(episode, edits)
    new = _with_episode(row, apply_edits(written, list(_count_edits(episode, written))))
    for again, part, before in zip(read(new, rollouts[0].place), ones, rollouts, strict=True):
        # Compare with logprobs rounded as in the log.
        turns = []
        for want, got in zip(part.rollout.turns, again.turns, strict=False):
            wanted, logprobs = want.completion_logprobs, got.completion_logprobs
            same_size = wanted is not None and logprobs is not None and len(wanted) == len(logprobs)
            if same_size and np.allclose(wanted, logprobs, rtol=0, atol=10.0**-_FLOAT_DECIMALS, equal_nan=True):  # type: ignore[arg-type]
                want = replace(want, completion_logprobs=logprobs)
            turns.append(want)
        turns += part.rollout.turns[len(turns) :]
        check_written(again, replace(part, rollout=replace(part.rollout, turns=tuple(turns))), before)
    return (new,)


def node_sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    """Where nodes hold the columns of each rollout; without a training row their masks are implied."""
    episode = episode_of(row)
    above: Path = () if episode is row else ("info", WRAPPER)
    trees = trees_of(episode) if "traces" in episode or "nodes" in episode else []
    sources = []
    for tree, rollout in zip(trees, rollouts, strict=False):
        path = (*above, *tree.path, "nodes")
        calls = []
        for number, turn in zip(tree.sampled, rollout.turns, strict=False):
            keys = {column.name: _column_path(tree.nodes[number], column.name) for column in turn.columns}
            calls.append(
                CallSource(columns={name: sources_at([(*path, number, *key)]) for name, key in keys.items()})
            )
        masks, logprobs = ([(*path, number, name) for number in tree.members] for name in ("mask", "logprobs"))
        columns = {"mask": sources_at(masks), "logprobs": sources_at(logprobs)}
        implied = () if rollout.training_row is not None else tuple(masks)
        sources.append(Sources(columns, tuple(calls), implied))
    return sources


def _collect_changes(tree: Tree, before: Rollout, changes: Mapping[int, CallChange], changed: _Changes) -> None:
    """Add to `changed` the new values of every node that the changed calls of a tree touch."""
    prompts: dict[int, Ids] = {}
    for turn, change in changes.items():
        number = tree.sampled[turn]
        node = tree.nodes[number]
        values = changed.setdefault((tree.path, number), {})
        if change.logprobs is not None:
            # Only masked-in tokens have one, with as many decimals as before.
            original = node.wire.get("logprobs")
            compact = change.logprobs[node.trained]
            if np.isnan(compact).any() and not _holds_null(original):
                raise RecordError(
                    f"{node.where}.logprobs holds a number for each sampled token and cannot hold null"
                )
            values["logprobs",] = as_logged(_rounded_as_logged(compact, original), original)
        for name, column in change.columns.items():
            # A column keeps its length in the log; it is dropped if a value is unknown.
            keys, fitted = _column_path(node, name), column
            original = value_at(node.wire, keys)
            if column is not None and len(original) != np.count_nonzero(node.mask):
                fitted = np.concatenate([np.asarray(original, column.dtype)[: node.start], column])
            elif column is not None:
                fitted = column[node.trained]
            if fitted is None or (_holds_null(fitted.tolist()) and not _holds_null(original)):
                values[keys] = _missing_value(tree)
            else:
                values[keys] = as_logged(_rounded_as_logged(fitted, original), original)
        if change.prompt_ids is not None:
            prompts[number] = change.prompt_ids
    own = _changed_scaffolds(tree, prompts)
    for number, ids in own.items():
        node = tree.nodes[number]
        values = changed.setdefault((tree.path, number), {})
        for keys, value in _node_changes(node, ids, _missing_value(tree)).items():
            values.setdefault(keys, value)
    for key in [key for key, values in changed.items() if not values]:
        del changed[key]


def _column_path(node: TraceNode, name: str) -> Path:
    return (name,) if name in node.wire else tuple(name.split(".", 1))


def _missing_value(tree: Tree) -> object:
    """What stands for a missing value: bare traces write null, episodes omit the key."""
    return None if any("parent" in node.wire for node in tree.nodes if node.parent is None) else ABSENT


def _changed_scaffolds(tree: Tree, prompts: Mapping[int, Ids]) -> dict[int, Ids]:
    """The new tokens before the completion of each node that changes, by number, cut out of the new prompts."""
    before = prompts_of(tree)
    own: dict[int, Ids] = {}
    for number, ids in prompts.items():
        old, path = before[number]
        parts = [(n, scaffold) for n in path for scaffold in ((True, False) if tree.nodes[n].sampled else (True,))]
        parts.append((number, True))
        lengths = [tree.nodes[n].start if scaffold else len(tree.nodes[n].completion) for n, scaffold in parts]
        ends, sampled = [0, *np.cumsum(lengths).tolist()], [not scaffold for _, scaffold in parts]
        try:
            cuts = moved_boundaries(TrainingRow(old, None, None), TrainingRow(ids, None, None), ends, sampled)
        except RecordError:
            raise RecordError(
                "tokens between two messages of a branch changed, and it is unclear which of the two they belong "
                "to"
            ) from None
        for (n, scaffold), start, end in zip(parts, cuts[:-1], cuts[1:], strict=True):
            node, part = tree.nodes[n], ids[start:end]
            if not scaffold:
                if not same_ids(part, node.completion):
                    raise RecordError(f"{node.where} was sampled, and no repair may change what was sampled")
            elif not same_ids(part, own.get(n, node.ids[: node.start])):
                if n in own:
                    raise RecordError(
                        f"{node.where} belongs to several branches, which would need different tokens in it"
                    )
                own[n] = part
    return own


def _node_changes(node: TraceNode, ids: Ids, null: object) -> dict[Path, Any]:
    """The new values of a node whose tokens before its completion become `ids`; `null` marks a missing value."""
    wire, old = node.wire, node.ids[: node.start]
    ids_now = np.concatenate([ids, node.completion])
    values: dict[Path, Any] = {("token_ids",): as_logged(ids_now, wire["token_ids"])}
    mask, weights = wire.get("mask"), wire.get("loss_weights")
    content: Any = wire.get("is_content")
    if has_entries(mask):
        if node.mask[: node.start].any():
            raise RecordError(f"{node.where}.mask trains the tokens that would change")
        values["mask",] = as_logged(np.concatenate([np.zeros(len(ids), np.bool_), node.trained]), mask)
    if has_entries(content):
        moved = _moved_values(old, ids, list(content), node.start)
        # An empty list means unknown here.
        values["is_content",] = [] if moved is None else as_logged(moved, content)
    for name, value in weights.items() if isinstance(weights, Mapping) else ():
        if has_entries(value):
            moved = _moved_values(old, ids, list(value), node.start)
            if moved is None:
                raise RecordError(f"{node.where}.loss_weights.{name} weighs the tokens that would change")
            values["loss_weights", name] = as_logged(moved, value)
    values.update({(name,): null for name in _ENGINE_KEYS if wire.get(name) is not None})
    return values


def _moved_values(old: Ids, new: Ids, values: list[Any], start: int) -> list[Any] | None:
    """A node's values after its first `start` tokens change from `old` to `new`.

    None if an inserted token replaces none, or tokens of several values: then its value is unknown.
    """
    head, tail = common_ends(old, new)
    changed, room = values[head : start - tail], len(new) - head - tail
    if room and (not changed or any(value != changed[0] for value in changed)):
        return None
    return values[:head] + changed[:1] * room + values[start - tail :]


def _rounded_as_logged(values: NDArray[Any], original: Any) -> NDArray[Any]:
    """The values, rounded if those of the log are."""
    if values.dtype.kind != "f" or not is_list(original):
        return values
    old = np.array([value for value in original if isinstance(value, float)], np.float64)
    return (
        np.round(values, _FLOAT_DECIMALS)
        if np.array_equal(old, np.round(old, _FLOAT_DECIMALS), equal_nan=True)
        else values
    )


def _holds_null(original: Any) -> bool:
    return any(value is None or value != value for value in original)


def _with_episode(row: Row, episode: Row) -> Row:
    """The row with its new episode; in an uploaded sample it is in the JSON string of `info`."""
    if "traces" in row or "nodes" in row:
        return episode
    info = uploaded_info(row)
    assert info is not None
    new = with_values(info, {WRAPPER: episode})
    if not isinstance(row["info"], str):
        return with_values(row, {"info": new})
    return with_values(row, {"info": rewrite_json_string(row["info"], info, new)})


def _count_edits(before: Row, after: Row) -> Iterator[Edit]:
    """Edits to the counts of an episode whose prompts changed; an input count that was wrong stays."""
    more = 0
    old_trees, new_trees = trees_of(before), trees_of(after)
    for path in dict.fromkeys(tree.path for tree in old_trees):
        old = [tree for tree in old_trees if tree.path == path]
        new = [tree for tree in new_trees if tree.path == path]
        logged = old[0].trace.get("calls")
        calls: Sequence[Any] = logged if isinstance(logged, list | tuple) else ()
        # By the number of the call, its new `prompt_tokens` if the length of its prompt changed.
        lengths = {n: len(ids) for tree in old for n, (ids, _) in prompts_of(tree).items()}
        now = {n: len(ids) for tree in new for n, (ids, _) in prompts_of(tree).items()}
        counts: dict[int, int] = {}
        for number, call in enumerate(calls):
            usage, node = object_at(call, "usage"), object_at(call).get("node")
            if type(node) is not int or node not in lengths:
                continue
            if _prompt_tokens(usage) == lengths[node] != now[node]:
                counts[number] = usage["prompt_tokens"] + now[node] - lengths[node]
                yield Edit((*path, "calls", number, "usage", "prompt_tokens"), counts[number])
        was = _input_tokens(calls, old, {})
        grown = _input_tokens(calls, old, counts) - was
        if old[0].trace.get(_INPUT) == was:
            more += grown
            yield from _grown_counts(old[0].trace, grown, path)
    if "traces" in before:
        yield from _grown_counts(before, more, ())


def _grown_counts(holder: Mapping[str, Any], more: int, path: Path) -> Iterator[Edit]:
    for name in (_INPUT, _TOTAL):
        if more and type(holder.get(name)) is int:
            yield Edit((*path, name), holder[name] + more)


def _prompt_tokens(usage: Mapping[str, Any]) -> int | None:
    prompt, cached = usage.get("prompt_tokens"), usage.get("cached_input_tokens")
    if type(prompt) is not int:
        return None
    return prompt + (cached if type(cached) is int else 0)


def _input_tokens(calls: Sequence[Any], trees: Sequence[Tree], usage: Mapping[int, int]) -> int:
    """The input tokens of a trace, each counted once; `usage` has the new counts of changed prompts by call."""
    by_node = {
        call["node"]: (number, call["usage"])
        for number, call in enumerate(calls)
        if isinstance(call, Mapping)
        and type(call.get("node")) is int
        and isinstance(call.get("usage"), Mapping)
        and _prompt_tokens(call["usage"]) is not None
    }
    counted: dict[int, int] = {}
    for tree in trees:
        for path in branches_of(tree):
            before = 0
            for number, counts in (by_node[node] for node in path if node in by_node):
                size = (_prompt_tokens(counts) or 0) + (
                    usage.get(number, counts["prompt_tokens"]) - counts["prompt_tokens"]
                )
                counted.setdefault(number, max(0, size - before))
                wrote = counts.get("completion_tokens")
                before = size + (wrote if type(wrote) is int else 0)
    return sum(counted.values())
