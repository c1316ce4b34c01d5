"""AReaL samples: a trajectory's tensors saved as lists, or one model response, with a weight version per token.

inclusionAI/AReaL `areal/api/io_struct.py` (`ModelResponse`), `areal/experimental/openai/types.py`
(`to_tensor_dict`): `input_ids`, `loss_mask`, `logprobs`, `versions` over the whole sequence, padded on the right,
with a batch dimension that a saved tensor keeps. `versions` is -1 where nothing was generated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._columns import is_list
from tito_audit.formats._kit import SampleRows, read_sample, split_batch, split_packed_row, updated_sample
from tito_audit.formats._update import with_values
from tito_audit.record.arrays import as_floats
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout


def _ids_column(row: Row) -> str:
    return "output_tokens" if is_list(row.get("output_tokens")) else "input_ids"


def read(row: Row, place: Place) -> Rollout:
    rollout = read_sample(row, place, FORMAT.name, (_ids_column(row), "input_tokens"))
    if not rollout.turns or row.get("output_versions") is None:
        return rollout
    versions = as_floats(row["output_versions"], "output_versions")
    named = dict.fromkeys(f"{version:g}" for version in versions.tolist() if version == version and version >= 0)
    return replace(rollout, turns=(replace(rollout.turns[0], weight_versions=tuple(named)),))


def update_sample(row: Row, before: Rollout, after: RepairedRollout) -> Row:
    """The repaired sample, with version -1, that of a token that was not generated, for inserted ones."""
    new = updated_sample(row, before, after)
    versions: Any = new.get("versions")
    if versions is row.get("versions") or not is_list(versions):
        return new
    filled = [-1 if value is None or value != value else value for value in list(versions)]
    if any(value != int(value) for value in filled):
        raise RecordError("column 'versions' holds a number that is not a version")
    old, whole = row["versions"], [int(value) for value in filled]
    return with_values(new, {"versions": np.array(whole, old.dtype) if isinstance(old, np.ndarray) else whole})


FORMAT = Format(
    name="areal",
    title="AReaL trajectories and model responses",
    signature=Signature("{input_ids} with {versions}; or {output_tokens} with {output_versions}"),
    precedence=228,
    matches=lambda row: (
        "output_versions" in row
        if is_list(row.get("output_tokens"))
        else is_list(row.get("input_ids")) and "versions" in row
    ),
    **SampleRows(
        read,
        update_sample,
        lambda row: (
            split_batch(row, _ids_column(row))
            or (split_packed_row(row) if _ids_column(row) == "input_ids" else None)
        ),
    ).functions,
    shows="The training row with its mask, logprobs and the weight version of each token, padding removed; or "
    "one call. No messages or tools; the rollout dumps that AReaL itself writes hold text only.",
)
