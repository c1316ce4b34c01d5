"""NeMo-RL `message_log`: a conversation whose messages hold their own slices of the training row.

NVIDIA-NeMo/RL `nemo_rl/data/llm_message_utils.py`. Its data processors put the *rendered* text into
`content`, and conversations from NeMo-Gym have no content; neither can be rendered with a chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import stated_model, with_finish_reasons
from tito_audit.formats._columns import as_logged, is_given, to_list
from tito_audit.formats._extras import read_extras
from tito_audit.formats._kit import training_rows
from tito_audit.formats._responses import drop_empty_fields
from tito_audit.formats._update import (
    changed_columns,
    list_if_changed,
    moved_boundaries,
    row_counts,
    with_counts,
    with_values,
)
from tito_audit.record.arrays import Ids, as_floats, as_ids, empty_ids
from tito_audit.record.build import build_training_row
from tito_audit.record.column import Column, ColumnRole, MovePolicy
from tito_audit.record.edits import Path
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Padding, Place, Rollout, TrainingRow
from tito_audit.record.sources import Source, Sources
from tito_audit.record.stated import Unread

_MASK = "token_loss_mask"
_LOGPROBS = "generation_logprobs"
_SENTINEL = 0.0
"""What NeMo-RL writes for messages that were not sampled when it flattens a conversation."""
_OTHER_POLICIES = {"prev_logprobs": MovePolicy.STALE, "routed_experts": MovePolicy.DROP}
_TOKEN_KEYS = ("token_ids", _MASK, _LOGPROBS)
_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<start_of_turn>|\[INST\]")
"""Turn markers of common templates; a prompt that holds one was rendered before it was logged."""


def matches(row: Row) -> bool:
    log = row.get("message_log")
    if not isinstance(log, Sequence) or isinstance(log, str) or not log:
        return False
    return all(isinstance(entry, Mapping) and "role" in entry for entry in _unwrap_log(log))


def read(row: Row, place: Place) -> Rollout:
    log = _unwrap_log(row["message_log"])
    tools = as_tools(row.get("tools"), "tools")
    # Further keys that hold numbers, or lists of numbers, in at least one message
    numbers = {name: None for entry in log for name, value in entry.items() if _is_nested_number_list(value)}
    other_names = [name for name in numbers if name not in _TOKEN_KEYS]
    wires = [drop_empty_fields(entry, {*_TOKEN_KEYS, *other_names}) for entry in log]
    messages = as_messages(wires, "message_log")
    emptied = any(
        not message.content and not message.tool_calls and is_given(entry.get("token_ids"))
        for message, entry in zip(messages, log, strict=True)
    )
    rendered = any(_MARKER.search(message.text) for message in messages if not message.sampled)
    stated = stated_model(row)
    if emptied or rendered:
        # No template can render them; their texts are a fact.
        texts = tuple(message.text for message in messages)
        because = "a template has rendered some already" if rendered else "some have token ids and no text"
        stated = stated.with_facts(content=texts if any(texts) else None).not_read(Unread.MESSAGES, because)
        messages = ()
    if not any(is_given(entry.get("token_ids")) for entry in log):
        return Rollout(place, FORMAT.name, messages, tools, stated=stated.without_ids())
    ids = [
        as_ids(entry["token_ids"] if is_given(entry.get("token_ids")) else [], f"message_log[{i}].token_ids")
        for i, entry in enumerate(log)
    ]
    # A column that does not fit one message fits none.
    token_ids = np.concatenate([empty_ids(), *ids])
    mask, logprobs = _join_column(log, ids, _MASK, 0), _join_column(log, ids, _LOGPROBS, _SENTINEL)
    joined = {name: _join_column(log, ids, name, None) for name in other_names}
    others = {name: column[0] for name, column in joined.items() if column is not None and column[1]}
    trained = build_training_row(
        token_ids,
        mask=(_MASK, mask[0]) if mask is not None and mask[1] else None,
        logprobs=(_LOGPROBS, logprobs[0]) if logprobs is not None and logprobs[1] else None,
        other={name: (values, _OTHER_POLICIES.get(name, MovePolicy.MOVE)) for name, values in others.items()},
        sentinel=_SENTINEL,
    )
    if mask is None:
        # NeMo-RL writes the masks late; until then what was generated is trained.
        generated = [_is_generated(entry) for entry in log]
        trained = replace(trained, loss_mask=np.repeat(generated, [len(own) for own in ids]))
    misfits = [(ColumnRole.LOSS_MASK, _MASK, mask, None), (ColumnRole.LOGPROBS, _LOGPROBS, logprobs, _SENTINEL)]
    columns = [
        Column(name, role, as_floats(column[0], name), None, sentinel=sentinel)
        for role, name, column, sentinel in misfits
        if column is not None and not column[1]
    ]
    trained = replace(trained, columns=(*trained.columns, *columns), extras=read_extras(others))
    return Rollout(
        place, FORMAT.name, messages, tools, training_row=with_finish_reasons(trained, row), stated=stated
    )


def write(row: Row, old: TrainingRow, new: TrainingRow) -> Row:
    """The row with the slice of the repaired training row in each message."""
    if new.padding != Padding():
        raise RecordError("messages have no padding: nothing in them would tell padding from tokens")
    log = _unwrap_log(row["message_log"])
    lengths = [len(entry["token_ids"]) if is_given(entry.get("token_ids")) else 0 for entry in log]
    generated = [_is_generated(entry) for entry in log]
    ends = [0, *np.cumsum(lengths).tolist()]
    cuts = moved_boundaries(old, new, ends, generated)
    if not any(column.role is ColumnRole.LOSS_MASK for column in old.columns) and new.loss_mask is not None:
        implied = np.repeat(generated, np.diff(cuts))
        if not np.array_equal(implied, new.loss_mask):
            raise RecordError(f"the messages have no {_MASK}, so what is trained cannot be written")
    changed = changed_columns(old, new)
    fills = {_MASK: 0, _LOGPROBS: _SENTINEL}
    entries = list(log)
    for number, (entry, start, end) in enumerate(zip(log, cuts[:-1], cuts[1:], strict=True)):
        values = {"token_ids": _slice_as_logged(entry, "token_ids", new.token_ids[start:end], None, number)}
        for name, column in changed.items():
            part = None if column is None else column[start:end]
            values[name] = _slice_as_logged(entry, name, part, fills.get(name), number)
        entries[number] = with_values(entry, {name: value for name, value in values.items() if name in entry})
    written = list_if_changed(log, entries)
    if written is log:
        return row
    outer = row["message_log"]
    counts = row_counts(old, new)
    return with_counts(with_values(row, {"message_log": written if outer is log else [written]}), counts)


def _slice_as_logged(entry: Mapping[str, Any], name: str, part: Any, fill: object, number: int) -> Any:
    """A message's slice of a column; RecordError if the message has no place for its values."""
    if is_given(entry.get(name)) or (
        isinstance(entry.get(name), list | np.ndarray) and part is not None and len(part)
    ):
        return as_logged(part, entry[name])
    # A message without the column has only filler in the joined one.
    if part is not None and any(not (v is None or v == fill or v != v) for v in part.tolist()):
        raise RecordError(f"message_log[{number}] has no {name}, and the repair would need it")
    return entry.get(name)


def _join_column(
    log: Sequence[Mapping[str, Any]], ids: Sequence[Ids], name: str, fill: object
) -> tuple[list[Any], bool] | None:
    """A column over all messages, `fill` for those without it, and whether it fits the tokens of each message.

    None if no message has it.
    """
    if not any(is_given(entry.get(name)) for entry in log):
        return None
    values: list[Any] = []
    fits = True
    for number, (entry, own) in enumerate(zip(log, ids, strict=True)):
        part = entry[name] if is_given(entry.get(name)) else [fill] * len(own)
        if not isinstance(part, list | np.ndarray):
            raise RecordError(f"message_log[{number}].{name} is not a list of one entry per token")
        fits = fits and len(part) == len(own)
        values.extend(to_list(part))
    return values, fits


def _is_nested_number_list(value: object) -> bool:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return _is_nested_number_list(value[0])
    return isinstance(value, np.ndarray) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], int | float)
    )


def _is_generated(entry: Mapping[str, Any]) -> bool:
    return is_given(entry.get(_LOGPROBS)) or str(entry.get("role")) == "assistant"


def _unwrap_log(log: Sequence[Any]) -> Sequence[Any]:
    """The conversation, taken out of the list of one in which a dump may wrap it."""
    return log[0] if len(log) == 1 and isinstance(log[0], list) else log


def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    log = row["message_log"]
    inside: Path = ("message_log",) if _unwrap_log(log) is log else ("message_log", 0)
    columns: dict[str, tuple[Source, ...]] = {}
    for number, entry in enumerate(_unwrap_log(log)):
        for name in entry:
            columns[name] = (*columns.get(name, ()), Source((*inside, number, name)))
    return [Sources(columns) for _ in rollouts]


_ROWS = training_rows(read, write, "a conversation")
FORMAT = Format(
    name="nemo_rl_message_log",
    title="NeMo-RL message logs",
    signature=Signature("{message_log}: messages with {token_ids}, {token_loss_mask}, {generation_logprobs}"),
    precedence=92,
    matches=matches,
    read=_ROWS.read,
    sources=sources,
    update=_ROWS.update,
    shows="The training row put together from its messages, with mask and logprobs. Messages are rendered "
    "only when their contents are bodies, not text that a template already wrote.",
)
