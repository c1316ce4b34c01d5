"""Harbor rollout details: the ids of every call of a trial, in `result.json` next to its ATIF trajectory.

Each conversation is three lists with one list per call, the main agent's first. harbor
`models/agent/rollout_detail.py` (`RolloutDetail`), `models/agent/context.py` (`AgentContext`), `llms/chat.py`,
which appends to the three lists independently: a call without logprobs makes one of them shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import build_turn, errors_at, model_name
from tito_audit.formats._columns import (
    Raw,
    as_object,
    first_text,
    has_entries,
    is_list,
    is_number_list,
    logprob_column,
    move_policy,
)
from tito_audit.formats._update import object_at, path_text, sources_at, sources_of_calls
from tito_audit.formats._writer import count_tokens, listed_calls
from tito_audit.record.column import MovePolicy
from tito_audit.record.edits import Edit, Path
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import CallSource, Sources
from tito_audit.record.stated import Stated

_COUNTS = ("n_input_tokens", "n_output_tokens", "rollout_details")
_PROMPTS, _COMPLETIONS, _LOGPROBS = "prompt_token_ids", "completion_token_ids", "logprobs"


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The calls of one conversation, as lists with an entry per call."""

    path: Path
    prompts: Raw
    completions: Raw
    logprobs: Sequence[int | None]
    """For each call the index of its logprobs in their list; None if it has none."""
    value: Mapping[str, Any]

    @property
    def extra(self) -> dict[str, Raw]:
        """Further lists of the provider with an entry per call, by name."""
        lists = object_at(self.value, "extra")
        size = len(self.completions)
        return {name: value for name, value in lists.items() if is_list(value) and len(value) == size}


def matches(row: Row) -> bool:
    result, steps = row.get("agent_result"), row.get("step_results")
    if isinstance(result, Mapping):
        return any(name in result for name in _COUNTS)
    if isinstance(steps, list | tuple) and any(isinstance(s, Mapping) and "agent_result" in s for s in steps):
        return True
    if "trial_name" in row and "agent_result" in row:
        return result is None  # the trial failed before its agent returned anything
    if isinstance(row.get("rollout_details"), list | tuple):
        return True
    return _is_list_of_lists(row.get(_COMPLETIONS)) and (_PROMPTS not in row or _is_list_of_lists(row[_PROMPTS]))


def read(row: Row, place: Place) -> Sequence[Rollout]:
    model = model_name(object_at(row, "agent_info", "model_info"))
    stated = Stated(model=model, group=first_text(row, ("task_name",)))
    rollouts = []
    for item, detail in enumerate(_find_conversations(row)):
        turns = []
        for number, (prompt, completion) in enumerate(zip(detail.prompts, detail.completions, strict=True)):
            at, other = detail.logprobs[number], {}
            with errors_at(f"{path_text(detail.path)}.call {number}".lstrip(".")):
                scored = {} if at is None else {_LOGPROBS: detail.value[_LOGPROBS][at]}
                for name, values in detail.extra.items():
                    entries, policy = values[number], move_policy(name)
                    if (
                        is_list(entries)
                        and len(entries) > 1
                        and (is_number_list(entries) or policy is MovePolicy.DROP)
                    ):
                        other[f"extra.{name}"] = entries, policy
                logprobs = partial(logprob_column, scored, _LOGPROBS)
                turns.append(build_turn((_PROMPTS, prompt), (_COMPLETIONS, completion), logprobs, other))
        rollouts.append(Rollout(replace(place, item=item), FORMAT.name, turns=tuple(turns), stated=stated))
    if any(turn for rollout in rollouts for turn in rollout.turns):
        return tuple(rollouts)
    return (Rollout(replace(place, item=0), FORMAT.name, stated=stated.without_ids()),)


def _find_conversations(row: Row) -> Iterator[_Conversation]:
    """Every conversation of the row, in order."""
    # Lists of conversations: of the trial, of each step, of a lone agent result.
    steps = row.get("step_results")
    paths: list[Path] = [("agent_result",)]
    paths += [
        ("step_results", n, "agent_result") for n in range(len(steps) if isinstance(steps, list | tuple) else 0)
    ]
    for above in (*paths, ()):
        path, details = (*above, "rollout_details"), object_at(row, *above).get("rollout_details")
        if details is None:
            continue
        if not isinstance(details, list | tuple):
            raise RecordError(f"{path_text(path)} is not a list of conversations")
        for number, value in enumerate(details):
            yield _pair_lists(value, (*path, number))
    if _is_list_of_lists(row.get(_COMPLETIONS)):
        yield _pair_lists(row, ())


def _pair_lists(logged: object, path: Path) -> _Conversation:
    """The three lists of a conversation, paired call by call; RecordError if the pairing is unclear."""
    where = f"{path_text(path)}." if path else ""
    value = as_object(logged, f"{path_text(path)} is not a conversation (an object)")
    lists: list[Raw] = []
    for name in (_PROMPTS, _COMPLETIONS, _LOGPROBS):
        listed = value.get(name)
        if listed is not None and (not is_list(listed) or not all(e is None or is_list(e) for e in listed)):
            raise RecordError(f"{where}{name} is not a list with one list per call")
        lists.append(() if listed is None else listed)
    prompts, completions, logprobs = lists
    if not completions and prompts:
        raise RecordError(f"{where}{_PROMPTS} holds {len(prompts)} lists, and no call has {_COMPLETIONS}")
    if prompts and len(prompts) != len(completions):
        raise RecordError(
            f"{where}{_PROMPTS} holds {len(prompts)} lists and {_COMPLETIONS} {len(completions)}: each is "
            "appended to separately, so it is unclear which call has no prompt"
        )
    positions: list[int | None] = [None] * len(completions)
    if len(logprobs) == len(completions):
        positions = list(range(len(completions)))
    elif len(logprobs):
        # Some calls have none: matched by length, from either end, as only a single way to pair them is clear.
        sizes, scored = (
            [len(entry) if is_list(entry) else 0 for entry in column] for column in (completions, logprobs)
        )
        first, last = _match_lengths(sizes, scored), _match_lengths(sizes[::-1], scored[::-1])
        if first is None or last is None or first != [len(sizes) - 1 - call for call in reversed(last)]:
            raise RecordError(
                f"{where}{_LOGPROBS} holds {len(scored)} lists for {len(sizes)} calls: each list is appended "
                "to separately, and their lengths do not show which call has none"
            )
        for position, call in enumerate(first):
            positions[call] = position
    return _Conversation(path, prompts or [None] * len(completions), completions, positions, value)


def _match_lengths(completions: Sequence[int], logprobs: Sequence[int]) -> list[int] | None:
    """The first calls, in order, whose completions have the lengths `logprobs`; None if not all are found."""
    matched: list[int] = []
    for call, size in enumerate(completions):
        if len(matched) < len(logprobs) and size == logprobs[len(matched)]:
            matched.append(call)
    return matched if len(matched) == len(logprobs) else None


def sources(row: Row, _: Sequence[Rollout]) -> Sequence[Sources]:
    calls: list[list[CallSource]] = []
    for detail in _find_conversations(row):
        calls.append([])
        for number, at in enumerate(detail.logprobs):
            scored = sources_at([] if at is None else [(*detail.path, _LOGPROBS, at)])
            extra = {name: (*detail.path, "extra", name, number) for name in detail.extra}
            source = CallSource(
                prompts=sources_at([(*detail.path, _PROMPTS, number)]),
                logprobs=scored,
                columns={
                    _LOGPROBS: scored,
                    **{f"extra.{name}": sources_at([own]) for name, own in extra.items()},
                },
                routing=tuple(own for name, own in extra.items() if move_policy(name) is MovePolicy.DROP),
            )
            calls[-1].append(source)
    return sources_of_calls(calls)


def total_edits(row: Row, before: Sequence[Rollout], after: Sequence[Rollout]) -> Iterator[Edit]:
    """Edits to `n_input_tokens` of agents, where it counts the prompts of their conversations."""
    details = list(_find_conversations(row))
    for holder in dict.fromkeys(detail.path[:-2] for detail in details if detail.path):
        own = [number for number, detail in enumerate(details) if detail.path[:-2] == holder]
        old, new = (sum(count_tokens(rollouts[n].turns)[0] for n in own) for rollouts in (before, after))
        count = object_at(row, *holder).get("n_input_tokens")
        if type(count) is int and count == old and old != new:
            yield Edit((*holder, "n_input_tokens"), new)


def _is_list_of_lists(value: object) -> bool:
    return has_entries(value) and is_list(value[0])


FORMAT = Format(
    name="harbor",
    title="Harbor trial results (rollout details)",
    signature=Signature("{agent_result|step_results} with {rollout_details}; or lists of lists of ids"),
    precedence=220,
    matches=matches,
    **listed_calls(read, sources, totals=total_edits),
    shows="Every call of each conversation, sub-agents after the main one, with its complete prompt and "
    "logprobs. No messages or tools: they are in the trial's ATIF trajectory.",
)
