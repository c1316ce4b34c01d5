"""A verifiers episode written back: logprobs and columns compacted by the mask, prompts split into their nodes.

Its branches already are separate sequences, so nothing is ever forked. Sampled tokens never change, so only
the tokens of other messages and the columns change. The counts of a trace follow from those of its calls: what
each was given beyond the tokens of the call before it on its branch, and what it wrote
(PrimeIntellect-ai/verifiers `verifiers/v1/trace.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.prefix import common_ends
from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._boundaries import moved_boundaries
from tito_audit.formats._columns import filled, is_list
from tito_audit.formats._sources import plain_sources
from tito_audit.formats._turn_change import Change, Read, changes_of, check_written
from tito_audit.formats._update import at_most_one_each, with_values
from tito_audit.formats._values import as_logged, equal_values, same_floats, same_ids
from tito_audit.formats._verifiers_graph import (
    WRAPPER,
    Node,
    Tree,
    episode_of,
    paths_of,
    prompts_of,
    trees_of,
    wrapped_in,
)
from tito_audit.record.arrays import Ids
from tito_audit.record.edits import ABSENT, Edit, Path, with_edits
from tito_audit.record.json_text import rewritten_string
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.record.sources import CallSource, Sources

_DIGITS = 4
"""Decimals of per-token floats since release 0.4.0 (`RECORD_FLOAT_DECIMALS` in `v1/graph.py`)."""
_UNREBUILT = ("routed_experts", "sampling_mask")
_INPUT, _TOTAL = "num_input_tokens", "num_total_tokens"
_Changed = dict[tuple[Path, int], dict[Path, Any]]
"""New values by (path of the trace, number of the node), then by the key in the node."""


def updated_rows(row: Row, repaired: Sequence[RepairedRollout], read: Read) -> Sequence[Row]:
    """The row with its repaired rollouts; the same object if nothing changed."""
    if not repaired:
        return ()
    rollouts = read(row, repaired[0].rollout.place)
    if len({one.rollout.place.item for one in repaired}) < len(repaired):
        raise RecordError(
            "a trace cannot hold a fork and does not need one: its branches already are separate sequences"
        )
    ones = at_most_one_each(rollouts, repaired)
    episode = episode_of(row)
    changed: _Changed = {}
    trees = trees_of(episode) if "traces" in episode or "nodes" in episode else []
    for tree, before, one in zip(trees, rollouts, ones, strict=False):
        if len(one.turns_from) != len(before.turns):
            raise RecordError("a call of a trace cannot be left out: the messages after it build on its tokens")
        _row_stays(before.training_row, one.rollout.training_row)
        _collect(tree, before, changes_of(before, one), changed)
    if not changed:
        return (row,)
    edits = [
        Edit((*path, "nodes", number, *name), value)
        for (path, number), values in changed.items()
        for name, value in values.items()
    ]
    written = with_edits(episode, edits)
    new = _put_back(row, with_edits(written, list(_counts_after(episode, written))))
    for again, one, before in zip(read(new, rollouts[0].place), ones, rollouts, strict=True):
        check_written(again, _as_rounded(one, again), before)
    return (new,)


def node_sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    """Where nodes hold the columns of each rollout; without a training row, masks only mark what was sampled."""
    episode = episode_of(row)
    above: Path = () if episode is row else ("info", WRAPPER)
    trees = trees_of(episode) if "traces" in episode or "nodes" in episode else []
    return [_tree_sources(tree, above, rollout) for tree, rollout in zip(trees, rollouts, strict=False)]


def _tree_sources(tree: Tree, above: Path, rollout: Rollout) -> Sources:
    path = (*above, *tree.path, "nodes")
    calls = [
        CallSource(
            columns={
                column.name: plain_sources([(*path, number, *_keys(tree.nodes[number], column.name))])
                for column in turn.columns
            }
        )
        for number, turn in zip(tree.sampled, rollout.turns, strict=False)
    ]
    masks, logprobs = ([(*path, number, name) for number in tree.members] for name in ("mask", "logprobs"))
    columns = {"mask": plain_sources(masks), "logprobs": plain_sources(logprobs)}
    return Sources(columns, tuple(calls), () if rollout.training_row is not None else tuple(masks))


def _row_stays(before: TrainingRow | None, after: TrainingRow | None) -> None:
    """RecordError if the training row changed: a sampled token outside the mask has no place for its logprob."""
    same = before is after or (
        before is not None
        and after is not None
        and same_ids(before.token_ids, after.token_ids)
        and equal_values(before.loss_mask, after.loss_mask)
        and same_floats(before.logprobs, after.logprobs)
    )
    if not same:
        raise RecordError(
            "a node's mask says what was sampled, and its logprobs follow the mask, so the loss mask of a trace "
            "cannot be changed by itself"
        )


def _collect(tree: Tree, before: Rollout, changes: Mapping[int, Change], changed: _Changed) -> None:
    """Collect in `changed` the new values of a rollout's nodes."""
    prompts: dict[int, Ids] = {}
    for turn, change in changes.items():
        number = tree.sampled[turn]
        node = tree.nodes[number]
        values = changed.setdefault((tree.path, number), {})
        if change.logprobs is not None:
            values["logprobs",] = _logprobs(node, change.logprobs)
        for name, column in change.columns.items():
            keys = _keys(node, name)
            values[keys] = _column(node, keys, column, _null_value(tree))
        if change.prompt_ids is not None:
            prompts[number] = change.prompt_ids
    own = _own_tokens(tree, prompts)
    for number, ids in own.items():
        node = tree.nodes[number]
        values = changed.setdefault((tree.path, number), {})
        for keys, value in _rewritten_node(node, ids, _null_value(tree)).items():
            values.setdefault(keys, value)
    for key in [key for key, values in changed.items() if not values]:
        del changed[key]


def _keys(node: Node, name: str) -> Path:
    """The keys of a column in its node."""
    return (name,) if name in node.wire else tuple(name.split(".", 1))


def _null_value(tree: Tree) -> object:
    """How this log writes a missing value: episodes omit the key, bare traces write null."""
    return None if any("parent" in node.wire for node in tree.nodes if node.parent is None) else ABSENT


def _logprobs(node: Node, values: NDArray[np.float64]) -> Any:
    """The logprobs of the masked-in tokens, with as many decimals as before."""
    original = node.wire.get("logprobs")
    compact = values[node.trained]
    if np.isnan(compact).any() and not _holds_null(original):
        raise RecordError(f"{node.where}.logprobs holds a number for each sampled token and cannot hold null")
    return as_logged(_rounded(compact, original), original)


def _column(node: Node, keys: Path, values: NDArray[Any] | None, null: object) -> Any:
    """Any other column at the length it has in the log; dropped as a whole if a value is unknown."""
    original: Any = node.wire
    for key in keys:
        original = original[key]
    if values is None:
        return null
    if len(original) != np.count_nonzero(node.mask):
        values = np.concatenate([np.asarray(original, values.dtype)[: node.start], values])
    else:
        values = values[node.trained]
    if any(value is None or value != value for value in values.tolist()) and not _holds_null(original):
        return null
    return as_logged(_rounded(values, original), original)


def _own_tokens(tree: Tree, prompts: Mapping[int, Ids]) -> dict[int, Ids]:
    """The new tokens of each changed node before its completion, taken from the prompts that hold it."""
    before = prompts_of(tree)
    own: dict[int, Ids] = {}
    for number, ids in prompts.items():
        old, path = before[number]
        parts = [(n, given) for n in path for given in ((True, False) if tree.nodes[n].sampled else (True,))]
        parts.append((number, True))
        lengths = [tree.nodes[n].start if given else len(tree.nodes[n].completion) for n, given in parts]
        cuts = _cuts(old, ids, [0, *np.cumsum(lengths).tolist()], [not given for _, given in parts])
        for (n, given), start, end in zip(parts, cuts[:-1], cuts[1:], strict=True):
            node, part = tree.nodes[n], ids[start:end]
            if not given:
                if not same_ids(part, node.completion):
                    raise RecordError(f"{node.where} was sampled, and no repair may change what was sampled")
            elif not same_ids(part, own.get(n, node.ids[: node.start])):
                if n in own:
                    raise RecordError(
                        f"{node.where} belongs to several branches, which would need different tokens in it"
                    )
                own[n] = part
    return own


def _cuts(old: Ids, new: Ids, ends: Sequence[int], sampled: Sequence[bool]) -> list[int]:
    """Where the parts of a prompt end in the new ids."""
    try:
        return moved_boundaries(TrainingRow(old, None, None), TrainingRow(new, None, None), ends, sampled)
    except RecordError:
        raise RecordError(
            "tokens between two messages of a branch changed, and it is unclear which of the two they belong to"
        ) from None


def _rewritten_node(node: Node, ids: Ids, null: object) -> dict[Path, Any]:
    """The new values of a node whose tokens before its completion changed to `ids`."""
    wire, old = node.wire, node.ids[: node.start]
    ids_now = np.concatenate([ids, node.completion])
    values: dict[Path, Any] = {("token_ids",): as_logged(ids_now, wire["token_ids"])}
    mask, weights = wire.get("mask"), wire.get("loss_weights")
    content: Any = wire.get("is_content")
    if filled(mask):
        if node.mask[: node.start].any():
            raise RecordError(f"{node.where}.mask trains the tokens that would change")
        values["mask",] = as_logged(np.concatenate([np.zeros(len(ids), np.bool_), node.trained]), mask)
    if filled(content):
        told = _moved_values(old, ids, list(content), node.start)
        # In this log an empty list means unknown.
        values["is_content",] = [] if told is None else as_logged(told, content)
    for name, value in weights.items() if isinstance(weights, Mapping) else ():
        if filled(value):
            told = _moved_values(old, ids, list(value), node.start)
            if told is None:
                raise RecordError(f"{node.where}.loss_weights.{name} weighs the tokens that would change")
            values["loss_weights", name] = as_logged(told, value)
    values.update({(name,): null for name in _UNREBUILT if wire.get(name) is not None})
    return values


def _moved_values(old: Ids, new: Ids, values: list[Any], start: int) -> list[Any] | None:
    """A node's values with those of its first `start` tokens, `old`, moved to the tokens that replace them.

    None if the value of an inserted token is unknown.
    """
    head, tail = common_ends(old, new)
    changed, room = values[head : start - tail], len(new) - head - tail
    if room and (not changed or any(value != changed[0] for value in changed)):
        return None
    return values[:head] + changed[:1] * room + values[start - tail :]


def _rounded(values: NDArray[Any], original: Any) -> NDArray[Any]:
    """The values, rounded if the log's own values are."""
    if values.dtype.kind != "f" or not is_list(original):
        return values
    old = np.array([value for value in original if isinstance(value, float)], np.float64)
    return np.round(values, _DIGITS) if np.array_equal(old, np.round(old, _DIGITS), equal_nan=True) else values


def _as_rounded(one: RepairedRollout, again: Rollout) -> RepairedRollout:
    """The repaired rollout with logprobs rounded as in the log."""
    turns = []
    for want, got in zip(one.rollout.turns, again.turns, strict=False):
        wanted, said = want.completion_logprobs, got.completion_logprobs
        same_size = wanted is not None and said is not None and len(wanted) == len(said)
        if same_size and np.allclose(wanted, said, rtol=0, atol=10.0**-_DIGITS, equal_nan=True):  # type: ignore[arg-type]
            want = replace(want, completion_logprobs=said)
        turns.append(want)
    turns += one.rollout.turns[len(turns) :]
    return replace(one, rollout=replace(one.rollout, turns=tuple(turns)))


def _holds_null(original: Any) -> bool:
    return any(value is None or value != value for value in original)


def _put_back(row: Row, episode: Row) -> Row:
    """The row with its new episode, inside the JSON string if the row is an uploaded sample."""
    if "traces" in row or "nodes" in row:
        return episode
    info = wrapped_in(row)
    assert info is not None
    new = with_values(info, {WRAPPER: episode})
    if not isinstance(row["info"], str):
        return with_values(row, {"info": new})
    return with_values(row, {"info": rewritten_string(row["info"], info, new)})


# Counts


def _counts_after(before: Row, after: Row) -> Iterator[Edit]:
    """Edits to the counts of an episode whose prompts changed; a trace whose input count was wrong keeps it."""
    more = 0
    old_trees, new_trees = trees_of(before), trees_of(after)
    for path in dict.fromkeys(tree.path for tree in old_trees):
        old = [tree for tree in old_trees if tree.path == path]
        new = [tree for tree in new_trees if tree.path == path]
        calls = _calls(old[0].trace)
        usage = _usage_after(calls, old, new)
        for number, count in usage.items():
            yield Edit((*path, "calls", number, "usage", "prompt_tokens"), count)
        was = _new_input(calls, old, {})
        grown = _new_input(calls, old, usage) - was
        if old[0].trace.get(_INPUT) == was:
            more += grown
            yield from _counted(old[0].trace, grown, path)
    if "traces" in before:
        yield from _counted(before, more, ())


def _counted(holder: Mapping[str, Any], more: int, path: Path) -> Iterator[Edit]:
    for name in (_INPUT, _TOTAL):
        if more and type(holder.get(name)) is int:
            yield Edit((*path, name), holder[name] + more)


def _calls(trace: Mapping[str, Any]) -> Sequence[Any]:
    calls = trace.get("calls")
    return calls if isinstance(calls, list | tuple) else ()


def _usage_after(calls: Sequence[Any], old: Sequence[Tree], new: Sequence[Tree]) -> dict[int, int]:
    """The new `prompt_tokens` of calls whose prompt changed its length, by the number of the call.

    `prompt_tokens` excludes cached tokens, whose number stays the same.
    """
    lengths = {n: len(ids) for tree in old for n, (ids, _) in prompts_of(tree).items()}
    now = {n: len(ids) for tree in new for n, (ids, _) in prompts_of(tree).items()}
    found = {}
    for number, call in enumerate(calls):
        usage = call.get("usage") if isinstance(call, Mapping) else None
        node = call.get("node") if isinstance(call, Mapping) else None
        if type(node) is not int or not isinstance(usage, Mapping) or node not in lengths:
            continue
        if _given(usage) == lengths[node] != now[node]:
            found[number] = usage["prompt_tokens"] + now[node] - lengths[node]
    return found


def _given(usage: Mapping[str, Any]) -> int | None:
    prompt, cached = usage.get("prompt_tokens"), usage.get("cached_input_tokens")
    if type(prompt) is not int:
        return None
    return prompt + (cached if type(cached) is int else 0)


def _new_input(calls: Sequence[Any], trees: Sequence[Tree], usage: Mapping[int, int]) -> int:
    """Input tokens of all branches of a trace, each counted once; `usage` has new counts of changed prompts."""
    by_node = {
        call["node"]: (number, call["usage"])
        for number, call in enumerate(calls)
        if isinstance(call, Mapping)
        and type(call.get("node")) is int
        and isinstance(call.get("usage"), Mapping)
        and _given(call["usage"]) is not None
    }
    counted: dict[int, int] = {}
    for tree in trees:
        for path in paths_of(tree):
            before = 0
            for number, one in (by_node[node] for node in path if node in by_node):
                given = (_given(one) or 0) + (usage.get(number, one["prompt_tokens"]) - one["prompt_tokens"])
                counted.setdefault(number, max(0, given - before))
                wrote = one.get("completion_tokens")
                before = given + (wrote if type(wrote) is int else 0)
    return sum(counted.values())
