"""Sessions of the miles session server: every call of one conversation, with the ids of prompt and completion.

`GET /sessions/ID` answers `{session_id, records, metadata}`; a record is a chat request with `input_ids` and
SGLang's answer to it. radixark/miles `miles/rollout/session/` (`types.py`, `core.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._answers import ONE_CALL_REFUSAL, choice_sources, read_choices
from tito_audit.formats._calls import errors_at, same_messages, with_ascending_messages
from tito_audit.formats._columns import as_logged, as_object, ids_or_none, is_list, same_ids
from tito_audit.formats._update import list_if_changed, object_at, sources_of_calls, with_values
from tito_audit.formats._writer import check_written, find_call_changes, read_before, update_calls
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import starts_with
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, Turn

_NAME = "miles_session"
_RECORD = partial(read_choices, name=_NAME)
_RUNNING = "accumulated_token_ids"
_VERDICT = "tito_session_mismatch"
_TRIM = "max_trim_tokens"
_INDEXER = "indexer_topk"


_CallRecord: TypeAlias = tuple[int, tuple[Rollout, ...]]
"""The number of a record that is a call, and the record read by itself; its first rollout is the session's."""


def read(row: Row, place: Place) -> Sequence[Rollout]:
    calls = _read_calls(row, place)
    last = calls[-1][1][0] if calls else Rollout(place, _NAME)
    in_place = []
    for own in (rollouts[0] for _, rollouts in calls):
        (turn,) = own.turns
        if turn.message_index is not None:
            conversation = own.messages[: turn.message_index + 1]
            if not same_messages(conversation, last.messages[: len(conversation)]):
                turn = replace(turn, message_index=None, prompt_messages=conversation[:-1])
        in_place.append(turn)
    turns = with_ascending_messages(in_place, last.messages)
    conflicts = [rollouts[0].stated.copies_disagree for _, rollouts in calls]
    running = _running_ids(row)
    if (
        running is not None
        and turns
        and turns[-1].seen_ids is not None
        and _trimmed_count(row, running, turns[-1]) is None
    ):
        conflicts.append(f"metadata.{_RUNNING} has {len(running)} ids that are not those of the last call")
    verdicts = {name: object_at(row, "metadata").get(name) for name in (_TRIM, _VERDICT)}
    stated = replace(last.stated, copies_disagree="; ".join(filter(None, conflicts)), ids_wanted=bool(turns))
    stated = stated.with_facts(session_id=row["session_id"], **verdicts)
    return (replace(last, place=place, turns=turns, stated=stated),)


def _read_calls(row: Row, place: Place) -> list[_CallRecord]:
    """The records that hold an answer; RecordError naming the record that cannot be read."""
    calls: list[_CallRecord] = []
    records = row["records"]
    if records is not None and not is_list(records):
        raise RecordError("records is not a list of requests and their answers")
    for number, record in enumerate(records if records is not None else ()):
        record = as_object(record, f"records[{number}] is not a request and its answer (an object)")
        status = record.get("status_code")
        if isinstance(status, int | float | str) and status not in (200, "200"):
            continue  # an error returned to the agent
        with errors_at(f"records[{number}]"):
            rollouts = _RECORD(record, place)
        if rollouts and rollouts[0].turns:
            calls.append((number, tuple(rollouts)))
    return calls


def _running_ids(row: Row) -> Ids | None:
    return ids_or_none(object_at(row, "metadata").get(_RUNNING), f"metadata.{_RUNNING}")


def _trimmed_count(row: Row, running: Ids, turn: Turn) -> int | None:
    """How many tokens the running sequence lacks at the end of the last call's prompt and completion.

    None if it is not their start, or lacks more than the server may trim.
    """
    seen, most = turn.seen_ids, object_at(row, "metadata").get(_TRIM)
    if seen is None:
        return None
    less = len(seen) - len(running)
    allowed = most if type(most) is int else 0
    return less if 0 <= less <= allowed and starts_with(seen, running) else None


def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    (before,) = read_before(row, repaired, read)
    rows = []
    for part in repaired:
        changes, numbers = find_call_changes(before, part), part.turns_from
        if not changes and len(numbers) == len(before.turns):
            rows.append(row)
            continue
        if not numbers:
            raise RecordError("no call would be left in the session")
        calls = _read_calls(row, before.place)
        own = {number: turn for turn, (number, _) in enumerate(calls)}
        now = dict(zip(numbers, part.rollout.turns, strict=True))
        records = [
            _updated_record(record, calls[own[number]][1], now[own[number]])
            if own.get(number) in changes
            else record
            for number, record in enumerate(row["records"])
            if number not in own or own[number] in now
        ]
        new = with_values(row, {"records": list_if_changed(row["records"], records)})
        # The running sequence is that of the last call; a verdict on another one no longer holds.
        running, metadata, seen = _running_ids(row), object_at(row, "metadata"), part.rollout.turns[-1].seen_ids
        less = None if running is None else _trimmed_count(row, running, before.turns[-1])
        if less is not None and seen is not None:
            values = {_RUNNING: as_logged(seen[: len(seen) - less], metadata[_RUNNING])}
            if values[_RUNNING] is not metadata[_RUNNING] and metadata.get(_VERDICT) is not None:
                values[_VERDICT] = None
            new = with_values(new, {"metadata": with_values(metadata, values)})
        (again,) = read(new, before.place)
        check_written(again, part, before)
        rows.append(new)
    return tuple(rows)


def _updated_record(record: Row, rollouts: Sequence[Rollout], turn: Turn) -> Row:
    first, *others = rollouts
    (own,) = first.turns
    turn = replace(turn, message_index=own.message_index, prompt_messages=own.prompt_messages)
    wanted = [
        RepairedRollout(replace(first, turns=(turn,)), (0,)),
        *(RepairedRollout(other, (0,)) for other in others),
    ]
    new = update_calls(record, wanted, _RECORD, choice_sources, drop_error=ONE_CALL_REFUSAL)
    if same_ids(own.prompt_ids, turn.prompt_ids):
        return new
    # The engine's indexer choices are for the old prompt; they are packed and cannot be cut.
    response = new["response"]
    choices = [
        with_values(choice, {"meta_info": with_values(meta, {_INDEXER: None})})
        if isinstance(meta := choice.get("meta_info"), Mapping) and meta.get(_INDEXER) is not None
        else choice
        for choice in response.get("choices", ())
    ]
    same = list_if_changed(response.get("choices", ()), choices)
    return with_values(new, {"response": with_values(response, {"choices": same})}) if choices else new


FORMAT = Format(
    name=_NAME,
    title="miles sessions",
    signature=Signature("{session_id} + {records} of requests and answers, {metadata}"),
    precedence=160,
    matches=lambda row: (
        {"session_id", "records"} <= row.keys()
        and (
            row["records"] is None
            or (is_list(row["records"]) and all("response" in object_at(record) for record in row["records"][:1]))
        )
    ),
    read=read,
    sources=lambda row, rollouts: sources_of_calls(
        [
            [
                choice_sources(row, own, ("records", number))[0].calls[0]
                for number, own in _read_calls(row, rollouts[0].place)
            ]
        ]
    ),
    update=update,
    shows="Messages, tools and every call: its prompt, what was sampled, logprobs, weight versions. The running "
    "sequence is compared with the last call; the server's own verdict is stated, not trusted.",
)
