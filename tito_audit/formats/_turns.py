"""The tokens of one call as a Turn: ids, logprobs and columns, whatever they are called in the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tito_audit.formats._columns import Raw, ids_or_none
from tito_audit.record.arrays import empty_ids
from tito_audit.record.build import call_columns
from tito_audit.record.column import MovePolicy
from tito_audit.record.rollout import Turn


def turn_of_tokens(
    prompt: tuple[str, object],
    completion: tuple[str, object],
    logprobs: Callable[[], tuple[str, Raw] | None],
    other: Mapping[str, tuple[Raw, MovePolicy]],
) -> Turn:
    """The turn of a prompt and a completion, each given as (name in the log, value); RecordError if not token ids.

    An empty completion with a prompt is known to have no tokens. Without ids, empty columns are ignored, and
    columns with entries show that ids are missing.
    """
    prompt_ids, ids = ids_or_none(prompt[1], prompt[0]), ids_or_none(completion[1], completion[0])
    if ids is None and prompt_ids is not None and completion[1] is not None:
        ids = empty_ids()
    values, columns = call_columns(empty_ids() if ids is None else ids, logprobs=logprobs(), other=other)
    if ids is None:
        return Turn(prompt_ids, None, columns=tuple(column for column in columns if len(column.values)))
    return Turn(prompt_ids, ids, values, columns=columns)
