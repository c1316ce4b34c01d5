"""Generic columns: a flat training row, a split row, or a list of calls, under any of the names in use.

Tried last in detection, and the target of `--map`. What a column describes is decided by its length.
Fields of verl, TRL, SkyRL and AReaL saved as one sample per row are all read by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import (
    CALL_LISTS,
    COMPLETION_IDS,
    LISTS_OF_CALLS,
    PROMPT_IDS,
    answer_indices,
    read_turn,
    stated_facts,
    updated_call,
    with_finish_reasons,
)
from tito_audit.formats._columns import (
    FLAT_IDS,
    first_filled_name,
    first_list_name,
    is_list,
    is_messages,
    may_hold_ids,
    parsed_column,
)
from tito_audit.formats._flat import read_flat_row, read_split_row
from tito_audit.formats._kit import (
    RANGE_COLUMNS,
    SampleRows,
    split_packed_row,
    updated_sample,
    with_updated_training_row,
)
from tito_audit.formats._text_logs import text_log
from tito_audit.formats._update import list_if_changed, object_at, with_counts, with_values
from tito_audit.record.json_text import rewrite_json_string
from tito_audit.record.message import Message, as_messages, as_tools
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.record.sources import CallSource, Sources

_CALL_COUNTS = ("num_calls", "num_turns")
_CALL_KEYS = {*PROMPT_IDS, *COMPLETION_IDS}


def matches(row: Row) -> bool:
    for name in (*FLAT_IDS, *COMPLETION_IDS):
        if name in row and (row[name] is None or is_list(row[name])):
            return True
    if _calls_column(row) is not None:
        return True
    # Next to messages, lists of whole numbers may be ids under an unknown name.
    unknown = (value for name, value in row.items() if name not in ("messages", "tools"))
    if not is_messages(parsed_column(row, "messages")) or any(map(may_hold_ids, unknown)):
        return False
    return text_log(row) is None


def read(row: Row, place: Place) -> Rollout:
    messages, prompt_only = _read_messages(row)
    turns: tuple[Turn, ...] = ()
    trained: TrainingRow | None = None
    calls, flat = _calls_column(row), first_list_name(row, FLAT_IDS) is not None
    if calls is not None:
        entries = parsed_column(row, calls)
        for i, entry in enumerate(entries):
            if not isinstance(entry, dict | Mapping):
                raise RecordError(f"{calls}[{i}] is not a call (an object)")
        answers = answer_indices(messages, len(entries))
        turns = tuple(
            [read_turn(entries[i], f"{calls}[{i}]", message_index=index) for i, index in enumerate(answers)]
        )
    # Null columns do not count beside a training row: in a table every row has the columns of all others.
    elif not _COMPLETION.isdisjoint(row) and any(
        name in row and (not flat or row[name] is not None) for name in COMPLETION_IDS
    ):
        trained = read_split_row(row)
        turns = () if trained is not None else (_read_one_turn(row, messages, prompt_only),)
    if flat:
        trained = read_flat_row(row, has_calls=bool(turns)) or trained
    elif turns and calls is None:
        whole = with_finish_reasons(read_split_row(row, of_one_call=True), row)
        turns = (replace(turns[0], as_row=whole),) if whole is not None else turns
    stated = stated_facts(row)
    if not turns and trained is None and not any(name in row for name in FLAT_IDS):
        stated = stated.without_ids()
    return Rollout(
        place,
        FORMAT.name,
        messages,
        as_tools(parsed_column(row, "tools"), "tools") if "tools" in row else (),
        template_kwargs=object_at(row, "chat_template_kwargs"),
        turns=turns,
        training_row=with_finish_reasons(trained, row, turns),
        stated=stated,
    )


def update_sample(row: Row, before: Rollout, after: RepairedRollout) -> Row:
    """The row with its repaired rollout, or with one part of a fork."""
    name = _calls_column(row)
    if name is None:
        return updated_sample(row, before, after)
    entries, numbers = parsed_column(row, name), after.turns_from
    if not numbers:
        raise RecordError("no call would be left in the row")
    calls = [
        updated_call(entries[number], before.turns[number], turn)
        for number, turn in zip(numbers, after.rollout.turns, strict=True)
    ]
    new = list_if_changed(entries, calls)
    if new is not entries:
        counts = {count: [(len(entries), len(numbers))] for count in _CALL_COUNTS}
        row = with_counts(with_values(row, {name: _replaced(row[name], entries, new)}), counts)
    if len(numbers) == len(entries):
        return with_updated_training_row(row, before, after)
    wanted = [before.turns[number].message_index for number in numbers]
    last = wanted[-1]
    if last is not None and numbers[-1] != len(before.turns) - 1:
        # Messages after the answer of the last call are cut; they may be split into a prompt and a completion.
        ahead = 0
        for name in ("messages",) if parsed_column(row, "messages") is not None else ("prompt", "completion"):
            messages = parsed_column(row, name)
            left = max(last + 1 - ahead, 0)
            ahead += len(messages)
            if left < len(messages):
                row = with_values(row, {name: _replaced(row[name], messages, messages[:left])})
    if answer_indices(_read_messages(row)[0], len(numbers)) != wanted:
        raise RecordError(
            "it would be unclear which messages the remaining calls belong to: calls are paired with answers "
            "from the last one back"
        )
    return with_updated_training_row(row, before, after)


def _replaced(original: Any, old: Any, new: Any) -> Any:
    """The value `new`, written in place of `old` if the table holds it as a JSON string."""
    return rewrite_json_string(original, old, new) if isinstance(original, str) else new


_COMPLETION = frozenset(COMPLETION_IDS)


def _read_messages(row: Row) -> tuple[tuple[Message, ...], bool]:
    """The messages of a row, and whether they are only the prompt of its call."""
    messages = parsed_column(row, "messages")
    if messages is not None:
        read = as_messages(messages, "messages")
        return read, bool(read) and read[-1].role in ("user", "system")
    prompt, completion = parsed_column(row, "prompt"), parsed_column(row, "completion")
    if not is_messages(prompt):
        return (), False
    sent = as_messages(prompt, "prompt")
    return (sent + as_messages(completion, "completion"), False) if is_messages(completion) else (sent, True)


def _read_one_turn(row: Row, messages: tuple[Message, ...], prompt_only: bool) -> Turn:
    """The call of a row that is one call; it wrote the last answer, unless the messages are only its prompt."""
    whole, answer = first_filled_name(row, FLAT_IDS), first_filled_name(row, COMPLETION_IDS)
    # Next to a training row, columns of its length belong to the row and not to the call.
    long = len(row[whole]) if whole is not None and (answer is None or len(row[whole]) != len(row[answer])) else -1
    plain = {
        name: value
        for name, value in row.items()
        if name not in ("messages", *FLAT_IDS) and not (is_list(value) and len(value) == long > 0)
    }
    if prompt_only:
        return read_turn(plain, prompt_messages=messages)
    (index,) = answer_indices(messages, 1)
    return read_turn(plain, message_index=index)


def _calls_column(row: Row) -> str | None:
    """The column that lists the calls of a row: objects, of which one of the first has ids; None without one."""
    if LISTS_OF_CALLS.isdisjoint(row):
        return None
    for name in CALL_LISTS:
        entries = parsed_column(row, name)
        for entry in entries[:8] if isinstance(entries, list | tuple) else ():
            if isinstance(entry, dict | Mapping) and not _CALL_KEYS.isdisjoint(entry):
                return name
    return None


_ROWS = SampleRows(
    read,
    update_sample,
    lambda row: None if RANGE_COLUMNS.isdisjoint(row) or _calls_column(row) else split_packed_row(row),
    forks=True,
)


def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    sources_of_rollouts, calls = _ROWS.sources(row, rollouts), _calls_column(row)
    if calls is None:
        return sources_of_rollouts
    return [
        replace(sources, calls=tuple(CallSource(entry=(calls, number)) for number, _ in enumerate(sources.calls)))
        for sources in sources_of_rollouts
    ]


FORMAT = Format(
    name="generic",
    title="Generic columns",
    signature=Signature("{token_ids|tokens|input_ids}; or prompt and completion ids; or {calls} of them"),
    precedence=270,
    matches=matches,
    read=_ROWS.read,
    sources=sources,
    update=_ROWS.update,
    row_is_call=True,
    shows="Whatever columns there are: training row, mask, logprobs, calls, messages, tools; each sample of a "
    "packed row. Pass other names with `--map OURS=THEIRS`.",
)
