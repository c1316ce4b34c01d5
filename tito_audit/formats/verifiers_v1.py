"""verifiers v1: episodes of traces, each a graph of messages that hold the tokens they add.

Every message that a model call wrote is a turn: its prompt is all tokens before it on its branch, its completion
the part of its own tokens that the mask marks as sampled. A message shared by several branches is one turn. A
re-tokenized prompt starts a new branch; the rules about chains of calls see the difference. prime-rl writes the
same record, and puts it as a string into the samples that it uploads. PrimeIntellect-ai/verifiers
`verifiers/v1/graph.py`, `trace.py`, `episode.py`, `types.py`; prime-rl `monitors/file.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._beside import PER_TOKEN, read_beside
from tito_audit.formats._calls import one_model_name, with_finish_reasons
from tito_audit.formats._columns import (
    first_text,
    has_entries,
    is_given,
    is_number_list,
    move_policy,
    parsed_column,
)
from tito_audit.formats._update import object_at
from tito_audit.formats._verifiers import (
    TraceNode,
    Tree,
    chat_message,
    chat_messages,
    episode_of,
    node_sources,
    prompts_of,
    trees_of,
    updated_traces,
    verifiers_tools_as_chat,
)
from tito_audit.record.arrays import Logprobs, as_floats, empty_ids
from tito_audit.record.build import build_training_row
from tito_audit.record.column import Alignment, Column, ColumnRole
from tito_audit.record.message import Message
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.stated import Stated, group_key

_KNOWN = ("token_ids", "mask", "logprobs", "semantic_parents", "tools")
_UPLOADED = {"trajectory", "problem_id", "sample_id", "info"}


def matches(row: Row) -> bool:
    episode = episode_of(row)
    traces = episode.get("traces")
    if isinstance(traces, list | tuple):
        if not len(traces):
            return "env" in episode and "task" in episode
        return any(isinstance(trace, Mapping) and _is_graph(trace.get("nodes")) for trace in traces[:8])
    if "calls" in episode or "version" in episode:
        return _is_graph(episode.get("nodes"))
    return row.keys() >= _UPLOADED and isinstance(row["trajectory"], str)


def read(row: Row, place: Place) -> Sequence[Rollout]:
    episode = episode_of(row)
    if episode is row and "traces" not in row and "nodes" not in row:
        # The episode of this uploaded sample was too large to include: only messages are left.
        messages = chat_messages(parsed_column(row, "completion"), "completion")
        return (Rollout(place, FORMAT.name, messages, stated=Stated().without_ids()),)
    shared = Stated(group=group_key(object_at(episode, "group").get("id")))
    versions = _policy_versions(object_at(episode, "run", "work", "policy"))
    trees = trees_of(episode)
    if not trees:
        return (Rollout(place, FORMAT.name, stated=shared.without_ids()),)
    return tuple(_read_tree(tree, replace(place, item=item), shared, versions) for item, tree in enumerate(trees))


def _read_tree(tree: Tree, place: Place, shared: Stated, versions: tuple[str, ...]) -> Rollout:
    messages = tuple(
        chat_message(tree.nodes[number].wire.get("message"), f"{tree.nodes[number].where}.message")
        for number in tree.members
    )
    tools = verifiers_tools_as_chat(tree.tools, "tools")
    # By the number of the node that it wrote, the last call that did not fail.
    logged, calls = tree.trace.get("calls"), {}
    for call in logged if isinstance(logged, list | tuple) else ():
        node, error = object_at(call).get("node"), object_at(call).get("error")
        if isinstance(node, float) and node.is_integer():
            node = int(node)  # a table has floats where some are null
        if type(node) is int and (error is None or (isinstance(error, str | Mapping) and not error)):
            calls[node] = call
    named = [calls[number].get("model") for number in tree.sampled if number in calls]
    model = one_model_name(named if any(named) else [object_at(tree.trace, "agent", "config").get("model")])
    trainable = False if object_at(tree.trace, "agent").get("trainable") is False else None
    stated = replace(shared, model=model).with_facts(id=first_text(tree.trace, ("id",)), trainable=trainable)
    if not any(len(tree.nodes[number].ids) for number in tree.members):
        # The server returned only text.
        return Rollout(place, FORMAT.name, messages, tools, stated=stated.without_ids())
    turns = _read_turns(tree, messages, calls, versions)
    # The training row of a single branch, if its masks train something other than what was sampled.
    nodes = [tree.nodes[number] for number in tree.members]
    odd = [node for node in nodes if not node.sampled and node.mask.any()]
    if not odd and all(node.trained.all() for node in nodes):
        row_if_masks_differ = None
    elif not tree.is_linear:
        if odd:
            raise RecordError(
                f"{odd[0].where}.mask is true for tokens that no call sampled, in a trace with several branches"
            )
        row_if_masks_differ = None
    else:
        logprobs = [
            as_floats(node.wire["logprobs"], f"{node.where}.logprobs")
            for node in nodes
            if node.wire.get("logprobs") is not None
        ]
        row_if_masks_differ = build_training_row(
            np.concatenate([empty_ids(), *(node.ids for node in nodes)]),
            mask=("mask", np.concatenate([np.zeros(0, np.bool_), *(node.mask for node in nodes)])),
            logprobs=("logprobs", np.concatenate(logprobs)) if any(map(len, logprobs)) else None,
        )
    trained = with_finish_reasons(row_if_masks_differ, {}, turns)
    return Rollout(place, FORMAT.name, messages, tools, turns=turns, training_row=trained, stated=stated)


def _read_turns(
    tree: Tree, messages: Sequence[Message], calls: Mapping[int, Mapping[str, Any]], versions: tuple[str, ...]
) -> tuple[Turn, ...]:
    """One turn per sampled node; if there are several branches, each turn has its own prompt messages."""
    prompts, linear = prompts_of(tree), tree.is_linear
    message_of = dict(zip(tree.members, messages, strict=True))
    index = {number: i for i, number in enumerate(tree.members)}
    turns = []
    for number in tree.sampled:
        node = tree.nodes[number]
        prompt, before = prompts[number]
        turn = Turn(
            prompt_ids=None,
            completion_ids=None,
            message_index=index[number] if message_of[number].role == "assistant" else None,
            prompt_messages=None if linear else tuple(message_of[n] for n in before),
            finish_reason=first_text(calls.get(number, {}), ("finish_reason",)),
            weight_versions=_policy_versions(object_at(calls.get(number), "policy")) or versions,
        )
        if len(node.ids):
            logprobs, columns = _read_columns(node)
            turn = replace(
                turn,
                prompt_ids=prompt,
                completion_ids=node.completion,
                completion_logprobs=logprobs,
                columns=columns,
                extras=read_beside({column.name: column.values for column in columns if column.name in PER_TOKEN}),
            )
        turns.append(turn)
    return tuple(turns)


def _read_columns(node: TraceNode) -> tuple[Logprobs | None, tuple[Column, ...]]:
    """The logprobs `[C]` and every column over the completion; compact columns are spread out by the mask."""
    columns: list[Column] = []
    logprobs: Logprobs | None = None
    value: Any = node.wire.get("logprobs")
    if is_given(value):
        raw = as_floats(value, f"{node.where}.logprobs")
        if len(raw) == np.count_nonzero(node.mask):
            logprobs = raw if node.trained.all() else _spread_by_mask(raw, node)
        fit = None if logprobs is None else Alignment.CALL
        columns.append(Column("logprobs", ColumnRole.LOGPROBS, raw if logprobs is None else logprobs, fit))
    # Further lists of numbers on a node.
    lists = {
        name: value
        for name, value in node.wire.items()
        if name not in _KNOWN and has_entries(value) and is_number_list(value)
    }
    weights = object_at(node.wire, "loss_weights")
    lists |= {f"loss_weights.{name}": value for name, value in weights.items() if has_entries(value)}
    for name, entries in lists.items():
        if len(entries) not in (np.count_nonzero(node.mask), len(node.ids)):
            continue
        if isinstance(entries, np.ndarray):
            values = entries
        elif set(map(type, entries)) == {bool}:
            values = np.array(entries, np.bool_)
        else:
            values = as_floats(entries, f"{node.where}.{name}")
        if len(entries) == len(node.ids):
            values = values[node.start :]
        elif not node.trained.all():
            values = _spread_by_mask(values.astype(np.float64), node)
        columns.append(Column(name, ColumnRole.OTHER, values, Alignment.CALL, move_policy(name.split(".")[0])))
    return logprobs, tuple(columns)


def _spread_by_mask(values: Logprobs, node: TraceNode) -> Logprobs:
    out = np.full(len(node.completion), np.nan)
    out[node.trained] = values
    return out


def _policy_versions(policy: Mapping[str, Any]) -> tuple[str, ...]:
    """The weight versions at the start and end of a call; one if they are equal."""
    ends = [policy.get(name) for name in ("start", "end")]
    return tuple(dict.fromkeys(str(end) for end in ends if type(end) is int))


def _is_graph(nodes: object) -> bool:
    """True for a list of messages with their tokens; the nodes of other frameworks hold text and labels."""
    if not isinstance(nodes, list | tuple):
        return False
    return not nodes or (isinstance(nodes[0], Mapping) and isinstance(nodes[0].get("message"), Mapping))


FORMAT = Format(
    name="verifiers_v1",
    title="verifiers v1 and prime-rl traces",
    signature=Signature("{traces} of {nodes}, or {nodes} + {calls}; or {info} with a {native_wrapper}"),
    precedence=40,
    matches=matches,
    read=read,
    sources=node_sources,
    update=partial(updated_traces, read=read),
    shows="Messages, tools and every call, with what it was given on its branch, its logprobs, how it ended and "
    "the policy's version. Branches are separate sequences. Only the mask says what was sampled, so it is "
    "trusted.",
)
