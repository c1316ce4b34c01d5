"""One ART trajectory as rollouts, the same in a JSONL group and inside a Parquet row.

A trajectory holds histories (`messages_and_choices`, where a sampled turn is a choice object) or, in later
versions, `exchanges` as they were sent over the wire. OpenPipe/ART `src/art/trajectories.py`, later
`src/art/trajectories/__init__.py`; checked with openpipe-art 0.5.18.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._art_exchanges import KINDS, exchange_threads
from tito_audit.formats._call_log import FindSource, Part, part_of
from tito_audit.formats._responses_items import message_wire
from tito_audit.formats._responses_log import Exchange
from tito_audit.formats._responses_read import choice_call, choice_source
from tito_audit.formats._sources import path_text
from tito_audit.record.edits import Path
from tito_audit.record.message import Message, as_message, as_tools
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.stated import Stated


def is_trajectory(value: object) -> bool:
    """True for an object with histories or exchanges in the form ART writes."""
    if not isinstance(value, Mapping):
        return False
    exchanges = value.get("exchanges")
    return isinstance(value.get("messages_and_choices"), list | tuple) or (
        isinstance(exchanges, Mapping) and any(isinstance(exchanges.get(kind), list | tuple) for kind in KINDS)
    )


def trajectory_parts(
    root: Row, trajectory: Mapping[str, Any], path: Path, place: Place, name: str, stated: Stated
) -> list[Part]:
    """The rollouts of a trajectory at `path` of the row: its histories, then its exchanges.

    A trajectory with neither gives a rollout without messages, which needs no ids.
    """
    facts = replace(stated, policy_versions=_policies(trajectory))
    parts = [_history(root, one, at, place, name, facts) for one, at in _histories(trajectory, path)]
    exchanges = trajectory.get("exchanges")
    if exchanges is not None:
        for calls in exchange_threads(root, exchanges, (*path, "exchanges")):
            parts.append(part_of(calls, place, name, facts))
    return parts or [Part(Rollout(place, name, stated=facts.without_ids()), ())]


def _histories(trajectory: Mapping[str, Any], path: Path) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """The objects that hold messages and choices: the trajectory itself, then its additional histories."""
    if trajectory.get("messages_and_choices") is not None:
        yield trajectory, path
    more = trajectory.get("additional_histories")
    if more is None:
        return
    where = path_text((*path, "additional_histories"))
    if not isinstance(more, list | tuple):
        raise RecordError(f"{where} is not a list of histories")
    for number, history in enumerate(more):
        if not isinstance(history, Mapping):
            raise RecordError(f"{where}[{number}] is not a history (an object)")
        yield history, (*path, "additional_histories", number)


def _history(root: Row, history: Mapping[str, Any], path: Path, place: Place, name: str, stated: Stated) -> Part:
    """The rollout of one conversation; each of its choices is a call."""
    path = (*path, "messages_and_choices")
    entries = history.get("messages_and_choices", ())
    if not isinstance(entries, list | tuple):
        raise RecordError(f"{path_text(path)} is not a list of messages and choices")
    messages: list[Message] = []
    turns: list[Turn] = []
    sources: list[FindSource] = []
    copies = ""
    wanted = False
    for index, entry in enumerate(entries):
        if not _is_choice(entry):
            wire = message_wire(entry) if isinstance(entry, Mapping) else entry
            messages.append(as_message(wire, f"{path_text(path)}[{index}]"))
            continue
        found = choice_call({}, entry, entry)
        if found.message is None:
            raise RecordError(f"{path_text(path)}[{index}].message is not an assistant message")
        messages.append(found.message)
        turns.append(_turn(found.turn, index, stated))
        at = (*path, index)
        alone = Exchange({}, (entry,), (), (at,))
        sources.append(partial(choice_source, root, alone, at, at, found.turn))
        wanted |= found.wants_ids
        copies = copies or found.disagreement or ""
    facts = replace(stated, copies_disagree=copies, ids_wanted=wanted)
    tools = as_tools(history.get("tools"), path_text((*path[:-1], "tools")))
    return Part(
        Rollout(place, name, tuple(messages), tools, turns=tuple(turns if wanted else ()), stated=facts),
        tuple(sources if wanted else ()),
    )


def _turn(turn: Turn, index: int, stated: Stated) -> Turn:
    """The turn of a choice, with the trajectory's weight version if that did not change along the way."""
    versions = stated.policy_versions
    known = turn.weight_versions or ((str(versions[0]),) if len(set(versions)) == 1 else ())
    return replace(turn, message_index=index, weight_versions=known)


def _is_choice(entry: object) -> bool:
    """True for a sampled turn. A table omits null fields, so `finish_reason` may be missing."""
    return isinstance(entry, Mapping) and isinstance(entry.get("message"), Mapping) and "role" not in entry


def _policies(trajectory: Mapping[str, Any]) -> tuple[int, ...]:
    """The weight versions at the first and the last call, if the trajectory names both."""
    versions = [trajectory.get(f"{end}_policy_version") for end in ("initial", "final")]
    known = tuple(version for version in versions if type(version) is int)
    return known if len(known) == len(versions) else ()
