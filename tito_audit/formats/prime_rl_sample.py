"""prime-rl training samples as JSON objects: one branch of a rollout, flat, or split as in older versions.

Since June 2026 a sample is one flat sequence (`token_ids`, `mask`, …); before, it was a prompt and a completion
that also holds the environment's tokens. The framework itself sends them as msgpack without names
(`rollouts/step_N/rank_R.bin`), which is not read here. PrimeIntellect-ai/prime-rl
`src/prime_rl/transports/rollouts/types.py` (`TrainingSample`), before `src/prime_rl/transport/types.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tito_audit.format import Format, Row, Signature
from tito_audit.formats._beside import read_beside
from tito_audit.formats._calls import stated_model, with_finish_reasons
from tito_audit.formats._columns import (
    Raw,
    as_logged,
    columns_of_lengths,
    first_text,
    ids_or_none,
    is_given,
    is_list,
    names_in,
    per_token_column,
    to_list,
)
from tito_audit.formats._kit import training_rows
from tito_audit.formats._update import updated_row, with_values
from tito_audit.record.build import build_training_row
from tito_audit.record.column import MovePolicy
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.record.sources import Source, Sources

_FLAT_MARKERS = names_in("temperatures rl_weights ce_weights ref_kl_weights mm_token_type_ids mm_refs mm_kwargs")
_SPLIT_MARKERS = ("completion_temperatures", "teacher_logprobs", "advantage", "prompt_mask")
_JOINED = {"token_ids": ("prompt_ids", "completion_ids"), "mask": ("prompt_mask", "completion_mask")}
"""Columns of a flat sample, and the columns of a split one that they are joined from."""
_PARTS = tuple(name for names in _JOINED.values() for name in names)
_UNREBUILT = ("routed_experts", "mm_token_type_ids")


def read(row: Row, place: Place) -> Rollout:
    stated = stated_model(row).with_facts(env_name=first_text(row, ("env_name",)))
    # In a split sample the logprobs are those of the completion.
    flat = _is_flat(row)
    joined = row if flat else _join_parts(row)
    ids = ids_or_none(joined["token_ids"], "token_ids" if flat else "completion_ids")
    trained = None
    if ids is not None:
        start = None if flat else len(row["prompt_ids"])
        parts = (*_JOINED, "logprobs") if flat else (*_PARTS, "completion_logprobs")
        trained = build_training_row(
            ids,
            mask=_column_with_entries(row, "mask") if flat else ("mask", joined["mask"]),
            logprobs=_column_with_entries(row, parts[-1]),
            other={
                name: (value, MovePolicy.DROP if name in _UNREBUILT else policy)
                for name, (value, policy) in columns_of_lengths(
                    row, parts, (len(ids), len(ids) - (start or 0))
                ).items()
                if len(value) > 1
            },
            prompt_length=start,
            sentinel=0.0,
        )
        trained = replace(trained, extras=read_beside(row))
    else:
        stated = stated.without_ids()
    return Rollout(place, FORMAT.name, training_row=with_finish_reasons(trained, row), stated=stated)


def write(row: Row, old: TrainingRow, new: TrainingRow) -> Row:
    """The sample with its repaired row; a split sample gets its two parts."""
    if _is_flat(row):
        return updated_row(row, old, new, "token_ids")
    joined = {**row, **_join_parts(row)}
    flat = updated_row(joined, old, new, "token_ids")
    if flat is joined:
        return row
    start = new.prompt_length or 0
    values = {name: value for name, value in flat.items() if name in row}
    for name, (prompt, completion) in _JOINED.items():
        values[prompt] = as_logged(flat[name][:start], row[prompt])
        values[completion] = as_logged(flat[name][start:], row[completion])
    return with_values(row, values)


def _join_parts(row: Row) -> dict[str, Any]:
    """The ids and the mask of a split sample as one sequence."""
    return {name: [*to_list(row[first]), *to_list(row[second])] for name, (first, second) in _JOINED.items()}


def _column_with_entries(row: Row, name: str) -> tuple[str, Raw] | None:
    """A column with its name; None if the row does not have it or it is empty."""
    return per_token_column(row, name) if is_given(row.get(name)) else None


def _is_flat(row: Row) -> bool:
    return (
        "token_ids" in row
        and "mask" in row
        and "logprobs" in row
        and any(name in row for name in _FLAT_MARKERS)
        and not any(name in row for name in ("messages", "message", "loss_mask"))
    )


def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    own = _ROWS.sources(row, rollouts)
    if _is_flat(row):
        return own
    mask = tuple(Source((name,)) for name in _JOINED["mask"])
    return [replace(sources, columns={**sources.columns, "mask": mask}) for sources in own]


_ROWS = training_rows(read, write)
FORMAT = Format(
    name="prime_rl_sample",
    title="prime-rl training samples",
    signature=Signature(
        "{token_ids}, {mask}, {logprobs}, {temperatures}; or {prompt_ids}, {prompt_mask}, {completion_ids}, "
        "{completion_mask}, {completion_logprobs}"
    ),
    precedence=75,
    matches=lambda row: (
        _is_flat(row)
        or (
            all(is_list(row.get(name)) for name in _PARTS)
            and "completion_logprobs" in row
            and any(name in row for name in _SPLIT_MARKERS)
            and not any(name in row for name in ("messages", "trajectory", "calls"))
        )
    ),
    read=_ROWS.read,
    sources=sources,
    update=_ROWS.update,
    shows="The sequence with mask, logprobs and weights, where samples are saved as JSON. No text or tools. The "
    "msgpack files of the file transport (`rank_*.bin`) are not read.",
)
