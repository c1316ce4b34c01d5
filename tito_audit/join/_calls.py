"""Rows that are one call each, gathered into the row of one rollout and chained by their tokens."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from itertools import product
from typing import Any

from tito_audit.chains.histories import History, closest
from tito_audit.chains.links import Chain
from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats import LoggedCall, build_thread, format_named
from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message
from tito_audit.record.prefix import same_ids
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Sources
from tito_audit.record.stated import NOTHING_STATED
from tito_audit.storage import RawRow

CAPTURE = "nemo_gym_tokens"
"""The format of a token capture, whose lines name their rollout."""
CALLS = "calls_of_rollout"
_TIMES = ("start_time", "started_at", "created_at", "created", "timestamp", "end_time")
"""Names for when a call was made, the most reliable first; an answer may have one too."""


class CallsOfRollout(dict[str, Any]):
    """The rows of a rollout's calls as one row, `{"calls_of_rollout": [row, …]}`, with their places and format."""

    def __init__(self, raws: Sequence[RawRow], form: str, files: Sequence[str], *, by_key: bool) -> None:
        super().__init__()
        self.raws = tuple(raws)
        self.form = form
        self.files = tuple(files)
        """The file of each row."""
        self.by_key = by_key
        """False for lines of a token capture, which are gathered by rollout id."""
        self[CALLS] = [raw.value for raw in raws]

    @property
    def format(self) -> Format:
        """The format of each row."""
        return format_named(self.form)

    @property
    def whole(self) -> Sequence[Row]:
        """The rows with complete prompts, where each holds only what its call adds to the one before."""
        steps = self.format.steps
        rows = [raw.value or {} for raw in self.raws]
        return rows if steps is None or not all(rows) else steps.whole(rows)

    @property
    def call_times(self) -> Sequence[float]:
        """When each call was made, in seconds or the log's own unit; if the log does not say, its row's index."""
        rows = [raw.value or {} for raw in self.raws]
        indices = [float(raw.index) for raw in self.raws]
        if not self.by_key:
            created = [call.get("created_at") for call in rows]
            return [
                float(time) if isinstance(time, int | float) and not isinstance(time, bool) else index
                for time, index in zip(created, indices, strict=True)
            ]
        for name, within in product(_TIMES, (None, "response")):
            times: list[float] = []
            for call in rows:
                holder = call if within is None else call.get(within)
                time = holder.get(name) if isinstance(holder, Mapping) else None
                if isinstance(time, str):
                    with suppress(ValueError):
                        times.append(datetime.fromisoformat(time).timestamp())
                elif isinstance(time, datetime):
                    times.append(time.timestamp())
                elif isinstance(time, int | float) and not isinstance(time, bool):
                    times.append(float(time))
            if len(times) == len(rows):
                return times
        return indices

    def with_calls(self, calls: Sequence[Row]) -> CallsOfRollout:
        """The row with these calls; itself if they are the same objects."""
        if all(new is old for new, old in zip(calls, self[CALLS], strict=True)):
            return self
        raws = [replace(raw, value=call) for raw, call in zip(self.raws, calls, strict=True)]
        return CallsOfRollout(raws, self.form, self.files, by_key=self.by_key)


@cache
def gathered_format(name: str) -> Format:
    """The format of gathered rows whose calls are rows of the format `name`."""

    def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
        lines = (rollout.stated.lines for rollout in rollouts)
        return [
            Sources(calls=tuple(CallSource(entry=(CALLS, line)) for line in of_rollout)) for of_rollout in lines
        ]

    def matches(row: Row) -> bool:
        return isinstance(row, CallsOfRollout)

    return Format(name, "", Signature(), 0, matches, _read_gathered, sources, _update_gathered)


def _read_gathered(row: Row, place: Place) -> Sequence[Rollout]:
    """The rollout of a gathered row: its calls in order, with the messages of the main chain."""
    if not isinstance(row, CallsOfRollout):
        raise RecordError("the rows of one conversation are read together")
    _, calls, order, chain = _read_calls_in_order(row, place)
    first = calls[order[0]].stated
    facts = {name: value for name, value in first.facts.items() if name != "id"}  # that of one call
    copies = (call.stated.copies_disagree for call in calls if call.stated.copies_disagree)
    stated = replace(
        first,
        chain=chain,
        lines=tuple(order),
        calls_at=tuple((row.files[k], row.raws[k].index) for k in order) if row.by_key else (),
        answer_ids=tuple(calls[k].stated.facts.get("id") for k in order),
        facts=facts,
        copies_disagree=next(copies, ""),
        ids_wanted=any(call.stated.ids_wanted for call in calls),
    )
    logged = []
    for call in map(calls.__getitem__, order):
        turn = replace(call.turns[0], message_index=None, prompt_messages=None)
        sent, answer = request_and_answer(call)
        logged.append(LoggedCall(turn, CallSource, sent, answer, call.tools, call.template_kwargs, call.stated))
    main = build_thread([logged[k] for k in chain], place, row.form, NOTHING_STATED).rollout
    turns_of_chain = dict(zip(chain, main.turns, strict=True))
    turns = tuple(
        turns_of_chain.get(k) or replace(each.turn, prompt_messages=each.prompt or None)
        for k, each in enumerate(logged)
    )
    return (replace(main, turns=turns, stated=stated),)


def _read_calls_in_order(
    row: CallsOfRollout, place: Place
) -> tuple[Sequence[Row], Sequence[Rollout], Sequence[int], tuple[int, ...]]:
    """The rows with complete prompts, each read as a call, and the order and main chain of the calls.

    RecordError, with the line, for a row that cannot be read.
    """
    form, each, rows = row.format, [], row.whole
    for raw, file, value in zip(row.raws, row.files, rows, strict=True):
        where = f"line {raw.index} of the same rollout" if file == place.file else f"{file}:{raw.index}"
        if raw.value is None:
            raise RecordError(f"{where}: {raw.error}")
        try:
            (call,) = form.read(value, replace(place, file=file, row=raw.index))
        except RecordError as error:
            raise RecordError(f"{where}: {error}" if len(row.raws) > 1 else str(error)) from None
        each.append(call)
    order, chain = order_calls([call.turns[0] for call in each], row.call_times)
    return rows, each, order, chain


def request_and_answer(call: Rollout) -> tuple[tuple[Message, ...], Message | None]:
    """What the only call of a rollout was sent, () if the log does not say, and its answer."""
    (turn,) = call.turns
    index = turn.message_index
    sent = turn.prompt_messages or (call.messages[:index] if index is not None else ())
    return sent, call.messages[index] if index is not None else None


def _update_gathered(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    """The gathered row with each call updated from its turn; RecordError for a fork or a removed call."""
    if not isinstance(row, CallsOfRollout):
        raise RecordError("the rows of one conversation are written together")
    if not repaired:
        return ()
    if len(repaired) > 1:
        what = "each row is one call" if row.by_key else "a capture holds calls"
        raise RecordError(
            f"{what}, and has no place for the parts of a fork; `tito-audit convert LOG --to rows` makes a "
            "training row of each"
        )
    (repair,) = repaired
    rows, each, order, _ = _read_calls_in_order(row, repair.rollout.place)
    if repair.turns_from != tuple(range(len(order))):
        raise RecordError("each line is one call, and the call cannot be removed from it")
    form, calls = row.format, list(rows)
    for number, turn in zip(order, repair.rollout.turns, strict=True):
        alone = each[number]
        (was,) = alone.turns
        own = replace(turn, message_index=was.message_index, prompt_messages=was.prompt_messages)
        (calls[number],) = form.update(calls[number], (RepairedRollout(replace(alone, turns=(own,)), (0,)),))
    return (row.with_calls(calls if form.steps is None else form.steps.stored(calls, row[CALLS])),)


@dataclass(eq=False, slots=True)
class _CallNode:
    """A call, and the calls that continue it."""

    number: int
    prompt: Ids
    history: History
    time: float
    children: list[_CallNode] = field(default_factory=list)
    common: int = 0
    """Tokens that its prompt shares with the start of its parent's prompt + completion."""
    size: int = 1
    """Calls in its tree."""


def order_calls(turns: Sequence[Turn], times: Sequence[float]) -> tuple[tuple[int, ...], Chain]:
    """The calls in the order of their conversation, and the places of its main chain in that order.

    NVIDIA-NeMo/Gym `nemo_gym/token_id_capture/builder.py` (`prefix_merging`): calls come in the order in which
    they ended, with retries and other agents among them; a call continues the one whose prompt and completion are
    the longest prefix of its prompt.

    The main chain is the one that began first; at each fork it follows the branch that shares most with its
    parent, then the longer one. Retries come before the call that was kept, other branches and other agents after
    the main chain, calls without a prompt last.
    """
    calls = [
        _CallNode(number, prompt, History(number, prompt, seen), time)
        for number, (turn, time) in enumerate(zip(turns, times, strict=True))
        if (prompt := turn.prompt_ids) is not None and (seen := turn.seen_ids) is not None
    ]
    calls.sort(key=lambda call: (len(call.prompt), call.time, call.number))
    roots: list[_CallNode] = []
    by_turn = {call.number: call for call in calls}
    longest_first: list[History] = []
    for call in calls:
        # A call that shares less than a quarter of the other's prompt belongs to another agent.
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
