"""The token counts of a verifiers episode: for each call, for each trace, and in total.

The counts of a trace follow from those of its calls: what each was given beyond the tokens of the call before
it on its branch, and what it wrote. PrimeIntellect-ai/verifiers `verifiers/v1/trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tito_audit.format import Row
from tito_audit.formats._verifiers_graph import Tree, paths_of, prompts_of, trees_of
from tito_audit.record.edits import Edit, Path

_INPUT, _TOTAL = "num_input_tokens", "num_total_tokens"


def counts_after(before: Row, after: Row) -> Iterator[Edit]:
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
