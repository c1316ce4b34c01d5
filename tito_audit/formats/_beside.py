"""Experts, kept-token sets, advantages and rewards: where logs keep them, in every form that frameworks write.

Experts: THUDM/slime and radixark/miles `utils/types.py` (`rollout_routed_experts`, rows for all tokens but the
last), prime-rl `inference/vllm/routed_experts.py` and SkyRL `generate_wire.py` (an object of `data`, `shape`,
`dtype` and `start`; SkyRL names it `rollout_expert_indices`), NVIDIA-NeMo/RL `utils/routed_experts_codec.py`
(`nrlre1:<dtype>:SxLxK:<base64>`, -1 where nothing was captured), sgl-project/sglang `routed_experts_capturer.py`
(base64 of int32 without a shape, from `routed_experts_start_len` on), vllm-project/vllm (a `.npy` file in base64),
volcengine/verl `agent_loop.py` (a tensor over the padded sequence). Kept sets: slime (`rollout_top_p_token_ids`
with offsets over the response), miles `utils/sampling_mask.py` (`rollout_sampling_mask` with `ids` and `offsets`),
SGLang (`output_token_sampling_mask`, a list for each sampled token), verifiers `v1/graph.py` (`kept_tokens` with
`ids` and `counts`, 0 for no set), prime-rl (`sampling_mask`, a list for each token, padded with -1).
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.formats._columns import EXPERTS, is_given, is_list, plain
from tito_audit.record.beside import NOTHING_BESIDE, BesideTokens, KeptSets, Routing, Unfit

_START = ("routed_experts_start_len", "routed_experts_prompt_start")
_COUNT = ("num_experts", "n_routed_experts", "num_local_experts")
_RAGGED = {
    "rollout_top_p_token_ids": "rollout_top_p_token_offsets",
    "top_p_token_ids": "top_p_token_offsets",
    "top_p_kept_token_ids": "top_p_kept_token_offsets",
}
"""Columns with the ids of all sets, and those with their offsets."""
_SETS = ("rollout_sampling_mask", "sampling_mask", "output_token_sampling_mask", "kept_tokens")
PER_TOKEN = ("advantages", "token_advantages", "token_rewards", "token_level_rewards", "token_level_scores")
"""Columns with one number for each token, or one for all of them."""
REWARDS = ("advantage", "reward", "rewards", "score", "scores")
BESIDE = frozenset((*EXPERTS, *_RAGGED, *_SETS, *PER_TOKEN, *REWARDS, "response_length"))
_READ = (*EXPERTS, *_RAGGED, *_SETS, *PER_TOKEN, *REWARDS, "response_length", *_RAGGED.values(), *_START, *_COUNT)
"""What is looked for, in the order of findings."""
_WIRE = {"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"}


def beside_of(*holders: Mapping[str, Any]) -> BesideTokens:
    """What the objects of a row or a call hold beside its tokens; the first that has a value counts."""
    values: dict[str, Any] = {}
    for holder in holders:
        if not BESIDE.isdisjoint(holder):
            values = {name: holder[name] for name in _READ if name in holder and is_given(holder[name])} | values
    if not values:
        return NOTHING_BESIDE
    parts: list[Routing | KeptSets | Unfit] = []
    for name in EXPERTS:
        if values.get(name, "") != "":
            value, array = values[name], _array(values[name])
            starts, counts = (
                [values[key] for key in keys if type(values.get(key)) is int] for keys in (_START, _COUNT)
            )
            start = (
                value["start"] if isinstance(value, dict | Mapping) and type(value.get("start")) is int else None
            )
            if isinstance(array, str):
                parts.append(Unfit(name, array, experts=True, wrong=array != _UNKNOWN))
            else:
                parts.append(Routing(name, array, [*starts, 0][0] if start is None else start, [*counts, None][0]))
    parts += _kept_sets(values)
    return BesideTokens(
        tuple(part for part in parts if isinstance(part, Routing)),
        tuple(part for part in parts if isinstance(part, KeptSets)),
        tuple(part for part in parts if isinstance(part, Unfit)),
        {
            # As Python has it, so that a row is the same however it was read; in an array NaN stands for null too.
            name: [None if v != v else v for v in value.tolist()]
            if isinstance(value, np.ndarray) and value.ndim == 1
            else value.tolist()
            if isinstance(value, np.ndarray | np.generic)
            else value
            for name in (*PER_TOKEN, *REWARDS, "response_length")
            if (value := values.get(name)) is not None
        },
    )


_UNKNOWN = "in a form that is not known"


def _array(value: Any) -> NDArray[np.integer[Any]] | str:
    """Whole numbers in any of the forms; else why they are none, in words."""
    if isinstance(value, str):
        # In base64: with NeMo-RL's envelope, as a `.npy` file, or SGLang's int32 without a shape.
        parts = value.split(":", 3)
        if parts[0] == "nrlre1" and len(parts) == 4:
            sides = parts[2].split("x")
            if parts[1] not in _WIRE or not all(side.isdecimal() for side in sides):
                return _UNKNOWN
            return _shaped(parts[3], parts[1], [int(side) for side in sides])
        try:
            data = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            return _UNKNOWN
        if data[:6] == b"\x93NUMPY":
            try:
                array = np.load(io.BytesIO(data), allow_pickle=False)
            except (ValueError, EOFError, OSError):
                return "a `.npy` file that cannot be read"
            return array if array.dtype.kind in "iu" and array.ndim in (2, 3) else _UNKNOWN
        return np.frombuffer(data, "<i4") if len(data) and not len(data) % 4 else _UNKNOWN
    if isinstance(value, dict | Mapping):
        shape, wire, dtype = value.get("shape"), value.get("data"), value.get("dtype", "uint8")
        if not is_list(shape) or dtype not in _WIRE or not isinstance(wire, str | bytes):
            return _UNKNOWN
        return _shaped(wire, str(dtype), [int(side) for side in shape])
    if not is_list(value):
        return _UNKNOWN
    try:
        array = np.array(_nested(value))
    except ValueError:
        return "with rows of different sizes"
    return array if array.dtype.kind in "iu" and array.ndim in (1, 2, 3) and len(array) else _UNKNOWN


def _nested(value: Any) -> Any:
    """The same with lists in place of arrays, as tables have them inside of lists."""
    return [_nested(entry) for entry in plain(value)] if is_list(value) else value


def _shaped(data: str | bytes, dtype: str, shape: list[int]) -> NDArray[np.integer[Any]] | str:
    try:
        raw = base64.b64decode(data, validate=True) if isinstance(data, str) else data
    except (binascii.Error, ValueError):
        return _UNKNOWN
    size = math.prod(shape)
    if min(shape, default=-1) < 0 or len(raw) != size * np.dtype(dtype).itemsize:
        return f"{len(raw):,} bytes of {dtype}, and their shape {' x '.join(map(str, shape))} is not theirs"
    array: NDArray[np.integer[Any]] = np.frombuffer(raw, dtype).reshape(shape)
    return array if len(shape) in (2, 3) else _UNKNOWN


def _kept_sets(values: Mapping[str, Any]) -> Iterator[KeptSets | Unfit]:
    for name, at in _RAGGED.items():
        if name in values or at in values:
            yield _sets(name, values.get(name, ()), values.get(at))
    for name in _SETS:
        value = values.get(name)
        if isinstance(value, dict | Mapping):
            counts = _array(value.get("counts"))
            offsets = value.get("offsets") if isinstance(counts, str) else np.concatenate([[0], np.cumsum(counts)])
            yield _sets(name, value.get("ids", ()), offsets)
        elif is_list(value):
            if not all(is_list(entry) or entry is None for entry in value):
                continue  # a mask with one number for each token
            rows = [[token for token in plain(() if row is None else row) if token != -1] for row in value]
            ids = [token for row in rows for token in row]
            yield _sets(name, ids, np.concatenate([[0], np.cumsum([len(row) for row in rows])]))


def _sets(name: str, ids: Any, offsets: Any) -> KeptSets | Unfit:
    flat = np.zeros(0, np.int64) if is_list(ids) and not len(ids) else _array(ids)
    edges = _array(offsets)
    if isinstance(flat, str) or isinstance(edges, str):
        return Unfit(name, _UNKNOWN, experts=False, wrong=False)
    if edges[0] != 0 or (np.diff(edges) < 0).any() or edges[-1] != len(flat) or flat.ndim != 1:
        because = f"{len(flat):,} ids, and their offsets go from {edges[0]} to {edges[-1]}"
        return Unfit(name, because, experts=False, wrong=True)
    return KeptSets(name, flat, edges)
