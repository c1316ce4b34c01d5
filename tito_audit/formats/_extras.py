"""Extras of tokens in every form that frameworks write: routed experts, sets of kept tokens, advantages and
rewards; and the versions of the weights that sampled each token.

Experts: THUDM/slime and radixark/miles `utils/types.py` (`rollout_routed_experts`, rows for all tokens but the
last), prime-rl `inference/vllm/routed_experts.py` and SkyRL `generate_wire.py` (an object of `data`, `shape`,
`dtype` and `start`; SkyRL names it `rollout_expert_indices`), NVIDIA-NeMo/RL `utils/routed_experts_codec.py`
(`nrlre1:<dtype>:SxLxK:<base64>`, -1 where nothing was captured), sgl-project/sglang `routed_experts_capturer.py`
(base64 of int32 without a shape, from `routed_experts_start_len` on), vllm-project/vllm (a `.npy` file in base64),
volcengine/verl `agent_loop.py` (a tensor over the padded sequence). Kept sets: slime (`rollout_top_p_token_ids`
with offsets over the response), miles `utils/sampling_mask.py` (`rollout_sampling_mask` with `ids` and `offsets`),
SGLang (`output_token_sampling_mask`, a list for each sampled token), verifiers `v1/graph.py` (`kept_tokens` with
`ids` and `counts`, 0 for no set), prime-rl (`sampling_mask`, a list for each token, padded with -1).

Versions: SGLang writes objects of `version`, `start` and `end` in `meta_info`, and its chat endpoints in
`metadata` (sgl-project/sglang `srt/utils/weight_versions.py`); vLLM writes the same on a choice. miles writes a
list of objects for each call, with `abs_start` and `abs_end` that count from the first token of the sample
(radixark/miles `miles/utils/types.py`, `WeightVersionsPerCall`). slime names one version for each call
(THUDM/slime `slime/utils/types.py`), AReaL one for each token, in `versions` or `output_versions`.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.formats._columns import EXPERTS, is_given, is_list, to_list
from tito_audit.record.policy_columns import WEIGHTS, WeightSpans, versions_to_column, versions_to_spans
from tito_audit.record.rollout import Padding, TrainingRow
from tito_audit.record.token_extras import NO_EXTRAS, KeptSets, Routing, TokenExtras, UnreadableExtra

_START_KEYS = ("routed_experts_start_len", "routed_experts_prompt_start")
_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
_KEPT_OFFSETS = {
    "rollout_top_p_token_ids": "rollout_top_p_token_offsets",
    "top_p_token_ids": "top_p_token_offsets",
    "top_p_kept_token_ids": "top_p_kept_token_offsets",
}
"""The column with the ids of all kept sets, and the one with the offsets of each set in it."""
_KEPT_SETS = ("rollout_sampling_mask", "sampling_mask", "output_token_sampling_mask", "kept_tokens")
PER_TOKEN = ("advantages", "token_advantages", "token_rewards", "token_level_rewards", "token_level_scores")
"""Columns with one number per token, or one for all tokens."""
REWARDS = ("advantage", "reward", "rewards", "score", "scores")
_EXTRAS = (*EXPERTS, *_KEPT_OFFSETS, *_KEPT_SETS, *PER_TOKEN, *REWARDS, "response_length")
EXTRA_COLUMNS = frozenset(_EXTRAS)
_COLUMNS_READ = (*_EXTRAS, *_KEPT_OFFSETS.values(), *_START_KEYS, *_COUNT_KEYS)
"""In the order in which findings name them."""
_INTEGER_DTYPES = {"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"}


def read_extras(*holders: Mapping[str, Any]) -> TokenExtras:
    """What these objects of a row or a call hold besides its tokens; a key counts where it comes first."""
    values: dict[str, Any] = {}
    for holder in holders:
        if not EXTRA_COLUMNS.isdisjoint(holder):
            values = {
                name: holder[name] for name in _COLUMNS_READ if name in holder and is_given(holder[name])
            } | values
    if not values:
        return NO_EXTRAS
    parts: list[Routing | KeptSets | UnreadableExtra] = []
    for name in EXPERTS:
        if values.get(name, "") != "":
            value, array = values[name], _decode_integers(values[name])
            if isinstance(array, str):
                parts.append(UnreadableExtra(name, array, is_routing=True, contradicts_itself=array != _UNKNOWN))
                continue
            own_start = [value.get("start")] if isinstance(value, dict | Mapping) else []
            start = _first_integer([*own_start, *map(values.get, _START_KEYS)])
            parts.append(Routing(name, array, start or 0, _first_integer(map(values.get, _COUNT_KEYS))))
    for name, at in _KEPT_OFFSETS.items():
        if name in values or at in values:
            parts.append(_kept_sets(name, values.get(name, ()), values.get(at)))
    for name in _KEPT_SETS:
        value = values.get(name)
        if isinstance(value, dict | Mapping):
            counts = _decode_integers(value.get("counts"))
            offsets = value.get("offsets") if isinstance(counts, str) else np.concatenate([[0], np.cumsum(counts)])
            parts.append(_kept_sets(name, value.get("ids", ()), offsets))
        elif is_list(value) and all(is_list(entry) or entry is None for entry in value):
            # Not a mask, which has one number for each token.
            rows = [[token for token in to_list(() if row is None else row) if token != -1] for row in value]
            ids = [token for row in rows for token in row]
            parts.append(_kept_sets(name, ids, np.concatenate([[0], np.cumsum([len(row) for row in rows])])))
    numbers: dict[str, Any] = {}
    for name in (*PER_TOKEN, *REWARDS, "response_length"):
        value = values.get(name)
        if isinstance(value, np.ndarray | np.generic):
            # Plain Python values, so that a row reads the same from every file; NaN in a list stands for null.
            value = value.tolist()
            if isinstance(value, list) and not (value and isinstance(value[0], list)):
                value = [None if number != number else number for number in value]
        if value is not None:
            numbers[name] = value
    return TokenExtras(
        tuple(part for part in parts if isinstance(part, Routing)),
        tuple(part for part in parts if isinstance(part, KeptSets)),
        tuple(part for part in parts if isinstance(part, UnreadableExtra)),
        numbers,
    )


_UNKNOWN = "in a form that is not known"


def _first_integer(values: Iterable[Any]) -> int | None:
    return next((value for value in values if type(value) is int), None)


def _decode_integers(value: Any) -> NDArray[np.integer[Any]] | str:
    """An array of integers from any of the forms that logs have; else, in words, why it is none."""
    if isinstance(value, str):
        # Base64: in NeMo-RL's envelope, of a `.npy` file, or of SGLang's int32 without a shape.
        parts = value.split(":", 3)
        if parts[0] == "nrlre1" and len(parts) == 4:
            sides = parts[2].split("x")
            if parts[1] not in _INTEGER_DTYPES or not all(side.isdecimal() for side in sides):
                return _UNKNOWN
            return _decode_shaped(parts[3], parts[1], [int(side) for side in sides])
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
        if not is_list(shape) or dtype not in _INTEGER_DTYPES or not isinstance(wire, str | bytes):
            return _UNKNOWN
        return _decode_shaped(wire, str(dtype), [int(side) for side in shape])
    if not is_list(value):
        return _UNKNOWN
    try:
        array = np.array(_arrays_to_lists(value))
    except ValueError:
        return "with rows of different sizes"
    return array if array.dtype.kind in "iu" and array.ndim in (1, 2, 3) and len(array) else _UNKNOWN


def _arrays_to_lists(value: Any) -> Any:
    """The value with its arrays as lists, at any depth; tables hold arrays inside of lists."""
    return [_arrays_to_lists(entry) for entry in to_list(value)] if is_list(value) else value


def _decode_shaped(data: str | bytes, dtype: str, shape: list[int]) -> NDArray[np.integer[Any]] | str:
    try:
        raw = base64.b64decode(data, validate=True) if isinstance(data, str) else data
    except (binascii.Error, ValueError):
        return _UNKNOWN
    size = math.prod(shape)
    if min(shape, default=-1) < 0 or len(raw) != size * np.dtype(dtype).itemsize:
        return f"{len(raw):,} bytes of {dtype}, and their shape {' x '.join(map(str, shape))} is not theirs"
    array: NDArray[np.integer[Any]] = np.frombuffer(raw, dtype).reshape(shape)
    return array if len(shape) in (2, 3) else _UNKNOWN


def _kept_sets(name: str, ids: Any, offsets: Any) -> KeptSets | UnreadableExtra:
    flat = np.zeros(0, np.int64) if is_list(ids) and not len(ids) else _decode_integers(ids)
    edges = _decode_integers(offsets)
    if isinstance(flat, str) or isinstance(edges, str):
        return UnreadableExtra(name, _UNKNOWN, is_routing=False, contradicts_itself=False)
    if edges[0] != 0 or (np.diff(edges) < 0).any() or edges[-1] != len(flat) or flat.ndim != 1:
        because = f"{len(flat):,} ids, and their offsets go from {edges[0]} to {edges[-1]}"
        return UnreadableExtra(name, because, is_routing=False, contradicts_itself=True)
    return KeptSets(name, flat, edges)


def weight_versions(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The weight versions that a call names, each once; () if it names none."""
    value = entry.get(WEIGHTS, entry.get("weight_version"))
    if value is None:
        return ()
    spans = version_spans(value)
    if spans:
        return tuple(dict.fromkeys(version for version, _, _ in spans))
    return tuple(str(version) for version in value) if is_list(value) else (str(value),)


def version_spans(value: object, tokens: int = 0) -> WeightSpans:
    """Weight versions as (version, start, end) spans of tokens; () if the value names none.

    Logs write objects or triples, in one list or in a list per call. A list of as many versions as `tokens`, some
    of them repeated, has one version per token.
    """
    if not is_list(value):
        return ()
    entries = to_list(value)
    if len(entries) == tokens > len(set(map(str, entries))) and all(isinstance(v, str | int) for v in entries):
        cuts = [0, *(at for at in range(1, tokens) if entries[at] != entries[at - 1]), tokens]
        return tuple((str(entries[a]), a, b) for a, b in pairwise(cuts) if str(entries[a]) != "-1")
    spans = tuple(_parse_spans(entries))
    return () if None in spans else tuple(span for span in spans if span is not None)


def _parse_spans(entries: list[Any]) -> Iterator[tuple[str, int, int] | None]:
    """The spans in a list or in its inner lists, one per call; None for an entry that is no span."""
    for entry in entries:
        span, inner = _parse_span(entry), entry.get("spans") if isinstance(entry, dict | Mapping) else entry
        if span is not None or not is_list(inner):
            yield span
        else:
            yield from _parse_spans(to_list(inner))


def _parse_span(entry: object) -> tuple[str, int, int] | None:
    if isinstance(entry, dict | Mapping):
        if "version" not in entry:
            return _parse_span(entry.get("spans"))
        entry = [entry["version"], *(entry.get(name, entry.get(f"abs_{name}")) for name in ("start", "end"))]
    if not isinstance(entry, list) or len(entry) != 3 or any(type(at) is not int for at in entry[1:]):
        return None
    version, start, end = entry
    return (str(version), start, end) if 0 <= start <= end else None


def with_token_versions(row: Mapping[str, Any], trained: TrainingRow | None) -> TrainingRow | None:
    """The training row with a column of weight versions, if `weight_versions` of its row are spans of tokens."""
    spans = version_spans(row.get(WEIGHTS)) if WEIGHTS in row and trained is not None else ()
    if trained is None or not spans or trained.padding != Padding():
        return trained
    size, by = len(trained.token_ids), _spans_start(spans, trained)
    inside = ((version, start + by, min(end + by, size)) for version, start, end in spans if start + by < size)
    return replace(trained, columns=(*trained.columns, versions_to_column(inside, size)))


def spans_as_logged(original: Any, before: TrainingRow, after: TrainingRow) -> Any:
    """The version spans of a repaired row in the form of the log; None if no version is known any more.

    In a list per call, adjacent spans belong to one call.
    """
    column = next(column for column in after.columns if column.name == WEIGHTS)
    relative = _spans_start(version_spans(original), before) > 0
    by = _response_start(after) if relative else 0
    first = leaf = to_list(original)[0]
    while not isinstance(leaf, dict | Mapping) or "version" not in leaf:
        inner = leaf.get("spans") if isinstance(leaf, dict | Mapping) else leaf
        if _parse_span(inner) is not None or not is_list(inner) or not len(inner):
            break
        leaf = to_list(inner)[0]
    objects = isinstance(leaf, dict | Mapping) and "version" in leaf
    ends = ("start", "end") if "start" in leaf else ("abs_start", "abs_end")
    calls: list[list[Any]] = []
    last = -1
    for version, start, end in versions_to_spans(column.values):
        if start != last:
            calls.append([])
        last = end
        span = [version, start - by, end - by]
        calls[-1].append(dict(zip(("version", *ends), span, strict=True)) if objects else span)
    if not calls:
        return None
    if isinstance(first, dict | Mapping) and "version" not in first:
        return [{"spans": call} for call in calls]
    return [span for call in calls for span in call] if _parse_span(first) is not None else calls


def _spans_start(spans: WeightSpans, row: TrainingRow) -> int:
    """The token from which spans count: the row's or its response's first, whichever covers more trained ones."""
    trained = np.ones(len(row.token_ids), np.bool_) if row.loss_mask is None else row.loss_mask
    start = _response_start(row)
    covered = [sum(int(trained[a + by : b + by].sum()) for _, a, b in spans) for by in (0, start)]
    return start if covered[1] > covered[0] else 0


def _response_start(row: TrainingRow) -> int:
    """The index of the first token of the response: after the prompt, else the first trained token."""
    if row.prompt_length is not None:
        return row.prompt_length
    return 0 if row.loss_mask is None else int(row.loss_mask.argmax())
