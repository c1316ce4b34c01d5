"""Calls captured in any order, as one conversation with its retries and branches.

NVIDIA-NeMo/Gym `nemo_gym/token_id_capture/builder.py` (`prefix_merging`): calls come in the order in which they
ended, with retries and other agents among them; a call continues the one whose prompt and completion are the
longest prefix of its prompt.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from tito_audit.chains.histories import History, closest
from tito_audit.chains.links import Chain
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import same_ids
from tito_audit.record.rollout import Turn


@dataclass(eq=False, slots=True)
class _Call:
    number: int
    prompt: Ids
    history: History
    time: float
    children: list[_Call] = field(default_factory=list)
    common: int = 0
    """How many tokens its prompt shares with the start of its parent's prompt + completion."""
    size: int = 1
    """How many calls continue it, counting itself."""


def order_calls(turns: Sequence[Turn], times: Sequence[float]) -> tuple[tuple[int, ...], Chain]:
    """Calls in the order of their conversation, and the places in that order of its main chain.

    The main chain is the one that began first; at each fork it follows the branch that shares most with its
    parent, then the longer one. Retries come before the call that was kept, other branches and other agents after
    the main chain, calls without a prompt last.
    """
    calls = [
        _Call(number, prompt, History(number, prompt, seen), time)
        for number, (turn, time) in enumerate(zip(turns, times, strict=True))
        if (prompt := turn.prompt_ids) is not None and (seen := turn.seen_ids) is not None
    ]
    calls.sort(key=lambda call: (len(call.prompt), call.time, call.number))
    # The calls that continue no other call, with the calls that continue them; `calls` starts with the shortest
    # prompt.
    roots: list[_Call] = []
    by_turn = {call.number: call for call in calls}
    longest_first: list[History] = []
    for call in calls:
        # The call whose prompt and answer this prompt shares the most with; one that shares less is another agent.
        shorter = (history for history in longest_first if len(history.prompt) < len(call.prompt))
        best, call.common = closest(call.prompt, shorter, longest_first=True)
        parent = best if best is not None and 0 < call.common >= len(best.prompt) // 4 else None
        (by_turn[parent.turn].children if parent is not None else roots).append(call)
        insort(longest_first, call.history, key=lambda history: -len(history.seen))
    for call in reversed(calls):
        call.size += sum(child.size for child in call.children)
    # Not by recursion: a rollout may have more calls than Python has frames.
    order: list[int] = []
    main: list[int] = []
    first = min(roots, key=lambda call: (call.time, call.number), default=None)
    alike = [call for call in roots if first is not None and same_ids(call.prompt, first.prompt)]
    waiting = [([call], False) for call in reversed(roots) if call not in alike]
    waiting.append((alike, True))
    while waiting:
        siblings, on_main = waiting.pop()
        if not siblings:
            continue
        main_call = max(siblings, key=lambda call: (call.common, call.size, call.time, call.number))
        others = [call for call in siblings if call is not main_call]
        retries = [call for call in others if not call.children and same_ids(call.prompt, main_call.prompt)]
        order += [call.number for call in (*retries, main_call)]
        main += [main_call.number] if on_main else []
        waiting += [([call], False) for call in reversed(others) if call not in retries]
        waiting.append((main_call.children, on_main))
    placed = set(order)
    rest = [number for number in range(len(turns)) if number not in placed]
    order += sorted(rest, key=lambda number: (times[number], number))
    main = main or order
    places = {number: place for place, number in enumerate(order)}
    return tuple(order), tuple(places[number] for number in main)
