"""ART trajectories as Parquet rows: version 2 with the whole trajectory as a JSON string, version 1 text only.

In version 2 messages and ids are read from `trajectory_json`; other columns repeat parts of it for queries,
without ids, and `group_json` is the same in all rows of a group. A group without trajectories is one row without
a trajectory. OpenPipe/ART `src/art/utils/trajectory_logging.py` (version 1 as of 0.5.18; version 2 came later).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._answers import Thread, ThreadRows
from tito_audit.formats._art import trajectory_threads
from tito_audit.formats._columns import as_object, parsed_column
from tito_audit.formats._responses import drop_empty_fields
from tito_audit.record.json_text import rewrite_json_string
from tito_audit.record.message import as_message, as_tools
from tito_audit.record.nesting import load_json, load_python_json
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Stated, group_key

_VERSION, _TRAJECTORY = 2, "trajectory_json"
_V1 = frozenset({"group_index", "reward", "metrics", "metadata", "tools", "logs", "messages"})


def matches(row: Row) -> bool:
    if type(row.get("format_version")) is int and "trajectory_json" in row and "group_json" in row:
        text = row["trajectory_json"]
        return isinstance(text, str) or (text is None and row.get("trajectory_index") is None)
    if not row.keys() >= _V1 or "trajectory_json" in row:
        return False
    messages = row["messages"]
    if messages is None or (isinstance(messages, list | tuple) and not messages):
        return "group_metadata" in row
    return isinstance(messages, list | tuple) and isinstance(messages[0], Mapping) and "trainable" in messages[0]


def read_threads(row: Row, place: Place) -> Sequence[Thread]:
    """The rollouts of a row whose `trajectory_json` is parsed."""
    stated = Stated(group=group_key(row.get("group_index")))
    if _TRAJECTORY not in row:
        # Version 1 holds neither ids nor logprobs.
        messages = row.get("messages")
        if messages is not None and not isinstance(messages, list | tuple):
            raise RecordError("messages is not a list")
        read = []
        for number, message in enumerate(messages or ()):
            where = f"messages[{number}]"
            wire = drop_empty_fields(as_object(message, f"{where} is not a message (an object)"), ("trainable",))
            if "tool_calls" in wire:
                wire["tool_calls"] = parsed_column(wire, "tool_calls")
            read.append(as_message(wire, where))
        tools = as_tools(parsed_column(row, "tools"), "tools")
        return [Thread(Rollout(place, FORMAT.name, tuple(read), tools, stated=stated.without_ids()), ())]
    if row["format_version"] != _VERSION:
        raise RecordError(
            f"format_version is {row['format_version']}; of ART's Parquet files only version {_VERSION} can be "
            "read, and version 1, which has no such column"
        )
    if row[_TRAJECTORY] is None:
        return [Thread(Rollout(place, FORMAT.name, stated=stated.without_ids()), ())]
    return trajectory_threads(row, row[_TRAJECTORY], (_TRAJECTORY,), place, FORMAT.name, stated)


def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    if row.get(_TRAJECTORY) is None:
        if len(repaired) != 1 or repaired[0].rollout.turns or repaired[0].rollout.training_row is not None:
            raise RecordError("the row holds no tokens and has no place for any")
        return (row,)
    if len(repaired) > len({part.rollout.place.item for part in repaired}):
        raise RecordError(
            "ART numbers the trajectories of a group without gaps, so the parts of a fork have no number"
        )
    old = _with_parsed_trajectory(row)
    (new,) = _ROWS.update(old, repaired)
    return (
        row
        if new is old
        else {**row, _TRAJECTORY: rewrite_json_string(row[_TRAJECTORY], old[_TRAJECTORY], new[_TRAJECTORY])},
    )


def _with_parsed_trajectory(row: Row) -> Row:
    text = row.get(_TRAJECTORY)
    if row.get("format_version") != _VERSION or text is None:
        return row
    if not isinstance(text, str):
        raise RecordError("trajectory_json is not a JSON string")
    try:
        value = load_json(text)
    except orjson.JSONDecodeError:
        # Python writes NaN and lone surrogates, which orjson refuses.
        try:
            value = load_python_json(text)
        except ValueError:
            raise RecordError("trajectory_json is not valid JSON") from None
    return {**row, _TRAJECTORY: as_object(value, "trajectory_json is not a trajectory (an object)")}


_ROWS = ThreadRows(read_threads)
FORMAT = Format(
    name="art_parquet",
    title="ART trajectories (Parquet)",
    signature=Signature(
        "{format_version}, {group_json}, {trajectory_json}; or {group_index}, {messages[].trainable}"
    ),
    precedence=10,
    matches=matches,
    read=lambda row, place: _ROWS.read(_with_parsed_trajectory(row), place),
    sources=lambda row, rollouts: _ROWS.sources(_with_parsed_trajectory(row), rollouts),
    update=update,
    shows="Version 2: messages, tools and every call of a trajectory, its prompt, completion and logprobs when "
    "the server returned them, also of captured exchanges. Version 1 is text only: nothing to audit.",
)
