"""One sample of a batch: prompt and response ids with columns over the response, as trainers keep them.

A row holds one sample, or a batch as parallel lists: every column has one list per sample.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._calls import call_turn, updated_call
from tito_audit.formats._columns import FLAT_IDS, is_list, parsed, stated_facts
from tito_audit.formats._finish import with_finishes
from tito_audit.formats._flat import flat_row, split_row, updated_flat
from tito_audit.formats._samples import (
    Samples,
)
from tito_audit.record.message import Message, as_messages, as_tools
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.record.sources import Source


def is_batch(row: Row, name: str) -> bool:
    """True if the column holds a list of lists: one per sample."""
    value: Any = row.get(name)
    return is_list(value) and len(value) > 0 and (value[0] is None or is_list(value[0]))


def batch_samples(row: Row, ids: str) -> Samples | None:
    """The samples of a batch; None if the row is one sample.

    A sample has an entry of each list that is as long as the batch, and every value that is no list. RecordError
    if a column of lists has another length.
    """
    if not is_batch(row, ids):
        return None
    size = len(row[ids])
    for name, value in row.items():
        nested = is_list(value) and len(value) > 0 and is_list(value[0])
        if nested and len(value) != size:
            raise RecordError(
                f"column {name!r} holds {len(value)} lists for {size} samples, so they cannot be matched"
            )
    columns = {name: value for name, value in row.items() if is_list(value) and len(value) == size}
    rest = {name: value for name, value in row.items() if not is_list(value)}
    samples = [{**rest, **{name: value[number] for name, value in columns.items()}} for number in range(size)]
    return Samples(tuple(samples), lambda number, name: Source((name, number)) if name in columns else None, ids)


def sample_rollout(
    row: Row, place: Place, format_name: str, names: Collection[str], *, prompt: object = None
) -> Rollout:
    """A sample in the columns that `generic` reads: a training row, or one call that is trained as a whole.

    `names` are the columns of ids; a sample with no entry in any of them needs no ids. `prompt` holds the
    prompt's messages, if the log keeps them next to the columns.
    """
    flat = any(is_list(row.get(name)) for name in FLAT_IDS)
    trained: TrainingRow | None = flat_row(row, has_calls=False) if flat else split_row(row)
    messages, asked = _messages(row, prompt)
    turns: tuple[Turn, ...] = ()
    stated = stated_facts(row)
    if not any(is_list(row.get(name)) and len(row[name]) for name in names):
        stated = stated.without_ids()
    elif trained is None:
        plain = {name: value for name, value in row.items() if name not in ("messages", *FLAT_IDS)}
        turns = (call_turn(plain, prompt_messages=asked or None),)
    if trained is not None and asked:
        messages = ()  # the row was rendered from more than the prompt
    tools = as_tools(parsed(row, "tools"), "tools")
    return Rollout(
        place, format_name, messages, tools, turns=turns, training_row=with_finishes(trained, row), stated=stated
    )


def updated_sample(row: Row, before: Rollout, one: RepairedRollout) -> Row:
    """The sample with the columns of its repaired rollout."""
    if one.turns_from != tuple(range(len(before.turns))):
        raise RecordError("the sample is a single call, which cannot be removed")
    new: Row = row
    for old_turn, turn in zip(before.turns, one.rollout.turns, strict=True):
        new = updated_call(new, old_turn, turn, skip=("messages", *FLAT_IDS))
    old, trained = before.training_row, one.rollout.training_row
    if old is None or trained is None:
        if old is not trained:
            raise RecordError("a training row can neither be added to these columns nor removed")
        return new
    return updated_flat(new, old, trained, skip=("messages", "tools"))


def _messages(row: Row, prompt: object) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """All messages of a sample, if they include its answers, and the messages of its prompt."""
    found = as_messages(parsed(row, "messages"), "messages")
    if found and any(not message.given for message in found):
        return found, ()
    asked = found or as_messages(prompt, "prompt")
    return asked, asked
