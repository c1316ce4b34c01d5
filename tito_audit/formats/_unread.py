"""Columns that look like ids, masks, logprobs or messages but were not read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tito_audit.format import Format, Row
from tito_audit.formats._calls import CALL_LISTS, CALL_LOGPROBS, COMPLETION_IDS, PROMPT_IDS
from tito_audit.formats._columns import (
    FLAT_IDS,
    MASKS,
    ROW_LOGPROBS,
    SEGMENTS,
    STALE,
    is_list,
    is_messages,
)
from tito_audit.formats._numbers import NUMBER_COLUMNS
from tito_audit.formats._own_names import in_snake_case, no_loss_mask_by_name, no_tokens_by_name
from tito_audit.record.arrays import Ids
from tito_audit.record.rollout import Rollout

Unread: TypeAlias = tuple[tuple[str, str], ...]
"""Columns that were not read, each as (what it looks like, path)."""

_SHORTEST = 4
_FIRST = 64
"""How many entries of a list are examined."""
_DEEP = 2
_MOST = 512
"""How many values of a row are examined."""
_IDS = re.compile(r"(?:^|_)(?:tok|toks|token|tokens|ids|seq|seqs|sequence)(?:_|$)")
_MASK = re.compile(r"mask|(?:^|_)(?:train|trained|trainable|loss)(?:_|$)")
_LOGPROBS = re.compile(r"log_?p|(?:^|_)lps?(?:_|$)")
_OTHERS = re.compile(
    r"(?:^|_)(?:ref|reference|teacher|old|prev|prox|proximal|trainer|critic|base|top|top_?[kp]|topk|cum|cumulative"
    r"|mean|sum|prompt_log\w*|distill\w*|opd|mopd|expert\w*|routed|routing|chosen|rejected|raw|original|draft"
    r"|ratio|kl|entropy|advantages?|rewards?)(?:_|$)"
)
"""Extras that trainers and servers write next to what they sampled."""
_KNOWN = {
    *(name.rpartition(".")[2] for name in NUMBER_COLUMNS),
    *FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS, *MASKS, *ROW_LOGPROBS, *CALL_LOGPROBS, *SEGMENTS, *STALE, *CALL_LISTS,
    "messages", "tools", "prompt", "completion",
    # What individual formats keep next to their samples.
    "accumulated_token_ids", "input_token_logprobs", "logprob_token_ids", "loss_weights",
    "objective_partition_ids",
    "output_token_logprobs", "prompt_delta_token_ids", "sample_loss_mask", "sample_mask", "sampled_mask",
    "sampling_mask", "target_tokens", "token_logprobs", "trajectory_ids",
}  # fmt: skip


def unread_columns(format: Format, row: Row, rollouts: Sequence[Rollout], mapped: Collection[str] = ()) -> Unread:
    """Columns that look like ids, masks, logprobs or messages, with unknown names and values in no rollout.

    Judged by names and first values; `mapped` are columns that the user named. Searches objects in the row and its
    first call.
    """
    found: list[tuple[str, str]] = []
    signature = {key for one in format.signature.by_keys for group in one.keys for key in group.names}
    known = {*_KNOWN, *(part.removesuffix("[]") for key in signature for part in key.split("."))}
    for (path, name, value), _ in zip(_columns(row), range(_MOST), strict=False):
        kind = None if name in known or path in mapped else _looks_like(name, value)
        if kind is not None and not _is_read(kind, value, rollouts):
            found.append((kind, path))
    return tuple(found)


def _columns(row: Row) -> Iterator[tuple[str, str, Any]]:
    level: list[tuple[str, Any]] = [("", row)]
    for _ in range(_DEEP):
        below: list[tuple[str, Any]] = []
        for outer, value in level:
            for key, inner in value.items():
                name = str(key)
                path = f"{outer}.{name}" if outer else name
                if isinstance(inner, Mapping):
                    below.append((path, inner))
                elif name in CALL_LISTS and isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
                    below.append((f"{path}[]", inner[0]))
                elif is_list(inner):
                    yield path, name, inner
        level = below


def _looks_like(name: str, value: Any) -> str | None:
    """What a list looks like by its name and first entries; None if nothing that is audited."""
    if len(value) < _SHORTEST:
        return "messages" if len(value) > 1 and is_messages(value) else None
    if is_messages(value):
        return "messages"
    words = in_snake_case(name)
    if _OTHERS.search(words) or no_tokens_by_name(name):
        return None
    first = value[:_FIRST].tolist() if isinstance(value, np.ndarray) else list(value[:_FIRST])
    kinds = set(map(type, first)) - {type(None)}
    if not kinds or not kinds <= {int, float, bool}:
        return None
    numbers = [one for one in first if one is not None]
    if float in kinds:
        return "logprobs" if _LOGPROBS.search(words) and max(numbers) <= 0 > min(numbers) else None
    if set(numbers) <= {0, 1}:
        return "loss masks" if _MASK.search(words) and not no_loss_mask_by_name(name) else None
    return "token ids" if _IDS.search(words) and min(numbers) >= 0 else None


def _is_read(kind: str, value: Any, rollouts: Sequence[Rollout]) -> bool:
    """Whether a rollout holds these values under another name."""
    if kind == "messages":
        return any(rollout.messages for rollout in rollouts)
    if kind == "token ids":
        return _is_part(value, rollouts)
    columns = [column for rollout in rollouts for turn in rollout.turns for column in turn.columns]
    columns += [c for one in rollouts if one.training_row is not None for c in one.training_row.columns]
    given = np.array(value, dtype=np.float64)
    return any(
        len(column.values) == len(given)
        and column.values.dtype.kind in "biuf"
        and column.role.value != "other"
        and np.array_equal(column.values.astype(np.float64), given, equal_nan=True)
        for column in columns
    )


def _is_part(value: Any, rollouts: Sequence[Rollout]) -> bool:
    """Whether ids are part of a sequence that was read."""
    try:
        part = np.array(value, dtype=np.int32)
    except (OverflowError, TypeError, ValueError):
        return True  # no ids
    sequences = [turn.prompt_ids for one in rollouts for turn in one.turns]
    sequences += [turn.completion_ids for one in rollouts for turn in one.turns]
    sequences += [turn.seen_ids for one in rollouts for turn in one.turns]
    sequences += [one.training_row.token_ids for one in rollouts if one.training_row is not None]
    return any(ids is not None and (part.tobytes() in ids.tobytes() or _is_next(part, ids)) for ids in sequences)


def _is_next(part: Ids, ids: Ids) -> bool:
    """Whether these are loss targets: the sequence shifted by one token."""
    return len(part) == len(ids) and bool((part[:-1] == ids[1:]).all())
