"""What a row that is one call says about itself, and the keys under which logs name conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats import CALL_LISTS, format_named, pick_format
from tito_audit.join._calls import CAPTURE, request_and_answer
from tito_audit.join._keys import id_text, value_at
from tito_audit.join.traces import CallTraits, hash_text
from tito_audit.record.rollout import Place, Rollout

SEEN = 16
"""How many rows are read to find out whether a log holds calls, and which key names their conversations."""
_NOWHERE = Place("", 0)
NAMES = (
    "session_id",
    "conversation_id",
    "trajectory_id",
    "traj_id",
    "rollout_id",
    "episode_id",
    "thread_id",
    "trace_id",
)
"""Keys under which logs name conversations, the most reliable first."""
_HOLDERS = ("", "metadata.", "meta.", "extra.", "extra_info.", "info.", "request.", "request.metadata.")
_CUT = frozenset(("length", "max_tokens", "max_output_tokens"))
"""Finish reasons of answers that the model did not end itself."""


@dataclass(frozen=True, slots=True)
class CallOfRow:
    """What a row says about its conversation."""

    named: bool
    """Whether it has the key that reliably names one."""
    form: str = ""
    """The name of its format if it is a single call; "" for a row that is left as it is."""
    key: int | None = None
    """A digest of the name at a key that reliably names its conversation; None: joined by history."""
    name: int = 0
    """A digest of everything that reliably names its conversation, if there is such a key."""
    traits: CallTraits | None = None
    """What its history says; None if it is named."""
    several: bool = False
    """Whether it holds several calls or choices, as rows of calls may."""


NO_CALL = CallOfRow(named=False)


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """Names each line of a token capture after its rollout."""

    by_key: bool = False
    """Its lines are gathered even if a rollout has only one."""

    def __call__(self, row: Row) -> CallOfRow:
        """The rollout of a line."""
        name = _rollout_id(row)
        if name is None or not is_capture(row):
            return CallOfRow(name is not None)
        return CallOfRow(True, CAPTURE, hash_text(name), hash_text(name))


def is_capture(row: Row) -> bool:
    """Whether a row is a line of a token capture that names its rollout."""
    try:
        return pick_format(row).name == CAPTURE and _rollout_id(row) is not None
    except RecordError:
        return False


def _rollout_id(row: Mapping[str, Any]) -> str | None:
    name = row.get("rollout_id")
    return name if isinstance(name, str) and name else None


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads rows that are one call each."""

    named: str | None
    """The format of all rows; None: detected row by row."""
    stated: str | None = None
    """Where rows name their conversation according to the user; None: the user does not say."""
    found_key: str | None = None
    """Where rows may name it according to the log itself; None: nowhere."""
    by_key: bool = True

    def __call__(self, row: Row) -> CallOfRow:
        """What a row says."""
        name = conversation_name(value_at(row, self.stated)) if self.stated is not None else None
        form, rollouts = _read_row(row, self.named)
        if self.stated is None and form is not None and form.steps is not None:
            name = form.steps.name(row)
        elif self.stated is None and form is not None and form.conversation:
            name = conversation_name(row.get(form.conversation))
        if form is None or (name is None and not is_row_of_call(row, form)):
            return CallOfRow(name is not None)
        if not _are_calls(rollouts) or len(rollouts) > 1:
            return CallOfRow(name is not None, several=_are_calls(rollouts))
        (rollout,) = rollouts
        # A number that differs for calls of another format or model, or with other tools or template arguments.
        stated = rollout.stated
        text = repr(
            (form.name, stated.model, stated.attempt, rollout.tools, sorted(rollout.template_kwargs.items()))
        )
        context = hash_text(text)
        if name is not None:
            return CallOfRow(True, form.name, hash_text(name), hash_text(f"{context} {name}"))
        key = conversation_name(value_at(row, self.found_key)) if self.found_key is not None else None
        (turn,) = rollout.turns
        request, answer = request_and_answer(rollout)
        traits = CallTraits(
            context=context,
            prompt=turn.prompt_ids,
            completion=turn.completion_ids,
            ended=turn.finish_reason not in _CUT,
            request=request or None,
            answer=answer,
            prompt_text=turn.prompt_text,
            completion_text=turn.completion_text,
            key=None if key is None else hash_text(key).to_bytes(8, "little"),
        )
        return CallOfRow(False, form.name, traits=traits)


ReadCall: TypeAlias = CaptureKey | CallReader
"""Says whether a row is a call, and of which conversation; it keeps no state, so any process may use it."""


def _read_row(row: Row, named: str | None) -> tuple[Format | None, Sequence[Rollout]]:
    """The format and the rollouts of a row; None and () if it cannot be read, or must not hold foreign keys."""
    try:
        form = pick_format(row) if named is None else format_named(named)
        return (None, ()) if form.open_object else (form, form.read(row, _NOWHERE))
    except (RecordError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None, ()  # The audit says why.


def _are_calls(rollouts: Sequence[Rollout]) -> bool:
    """Whether each of these rollouts is one call and nothing else."""
    return bool(rollouts) and all(len(rollout.turns) == 1 and rollout.training_row is None for rollout in rollouts)


def is_row_of_call(row: Row, form: Format) -> bool:
    """Whether a row of this format is one call of a conversation; a row that lists its calls is a conversation."""
    return form.row_is_call and not any(name in row for name in CALL_LISTS)


def is_joinable(row: Row, named: str | None, *, stated: bool) -> bool | None:
    """Whether a row is a call as in logs of calls; with a `stated` key, any single call.

    None for a row that is not one but may occur among such rows: of a format of calls, or of no format.
    """
    form, rollouts = _read_row(row, named)
    if form is not None and len(rollouts) == 1 and _are_calls(rollouts):
        return stated or is_row_of_call(row, form)
    try:
        form = pick_format(row) if named is None else format_named(named)
    except RecordError:
        return None
    # Plain columns without a call are something else, such as training rows.
    return None if form.row_is_call and form.name != "generic" else False


def find_conversation_key(rows: Sequence[Row]) -> str | None:
    """The most reliable key under which all of these rows name a conversation; None if there is none."""
    paths = [f"{holder}{name}" for name in NAMES for holder in _HOLDERS]
    return next((path for path in paths if all(conversation_name(value_at(row, path)) for row in rows)), None)


def conversation_name(value: object) -> str | None:
    """A text or a whole number as JSON; None if it names nothing."""
    text = id_text(value)
    return json.dumps(text) if isinstance(value, str) and text is not None else text


def possible_key_paths(row: Mapping[str, Any], above: str = "", depth: int = 4) -> Iterator[str]:
    """The paths of everything in a row that could name a conversation."""
    for key, value in list(row.items())[:64]:
        where = f"{above}{key}"
        if conversation_name(value) is not None:
            yield where
        elif isinstance(value, Mapping) and depth:
            yield from possible_key_paths(value, f"{where}.", depth - 1)
