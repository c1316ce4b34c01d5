"""tinker datums: a training row as the SDK sends it, with targets shifted by one against the inputs.

thinking-machines-lab/tinker-cookbook `tinker_cookbook/rl/data_processing.py` (`trajectory_to_data`); the SDK
`tinker` 0.38.0, `types/datum.py` and `types/tensor_data.py`. `model_input` is all tokens but the last, in chunks;
entry *i* of every column of `loss_fn_inputs` is about token *i + 1*; columns are lists or tensors
(`{"data": [...], "dtype": ..., "shape": [...]}`). The targets of images are 0, which is no token there: they are
read as hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import stated_facts, with_finish_reasons
from tito_audit.formats._columns import (
    as_logged,
    as_objects,
    first_present_name,
    is_list,
    is_number_list,
    move_policy,
    parsed_column,
)
from tito_audit.formats._kit import training_rows
from tito_audit.formats._update import changed_columns, object_at
from tito_audit.record.arrays import Ids, Mask, as_ids
from tito_audit.record.build import build_training_row
from tito_audit.record.column import Alignment, ColumnRole, MovePolicy
from tito_audit.record.edits import Edit, Path, apply_edits
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.prefix import common_ends
from tito_audit.record.rollout import Padding, Place, Rollout, TrainingRow
from tito_audit.record.sources import Source, Sources

_TARGETS = "target_tokens"
_NOT_SAMPLED = 0.0
"""What every column of numbers holds where nothing was sampled."""


def read(row: Row, place: Place) -> Rollout:
    inputs = row["loss_fn_inputs"]
    stated = stated_facts(row)
    messages = as_messages(parsed_column(row, "messages"), "messages")
    tools = as_tools(parsed_column(row, "tools"), "tools")
    if inputs[_TARGETS] is None:
        return Rollout(place, FORMAT.name, messages, tools, stated=stated.without_ids())
    targets = as_ids(_column_data(inputs[_TARGETS], _TARGETS), f"loss_fn_inputs.{_TARGETS}")
    ids, of_images = _whole_sequence(row, targets)
    if not len(ids):
        return Rollout(place, FORMAT.name, messages, tools, stated=stated)
    mask = first_present_name(inputs, ("mask", "weights"))
    other: dict[str, tuple[Any, MovePolicy]] = {}
    for name, value in inputs.items():
        if name in (_TARGETS, mask, "logprobs") or value is None or _is_table(value):
            continue
        entries = _column_data(value, name)
        if is_list(entries) and is_number_list(entries):
            other[name] = entries, move_policy(name)
    trained = build_training_row(
        ids,
        mask=None if mask is None else (mask, _column_data(inputs[mask], mask)),
        logprobs=None
        if inputs.get("logprobs") is None
        else ("logprobs", _column_data(inputs["logprobs"], "logprobs")),
        other=other,
        sentinel=_NOT_SAMPLED,
        shifts=True,
    )
    # A column has one entry per target, or does not fit.
    columns = tuple(
        replace(column, alignment=Alignment.SHIFTED if len(column.values) == len(targets) else None)
        for column in trained.columns
        if column.role is not ColumnRole.OTHER or len(column.values) in (len(targets), len(ids))
    )
    unfit = {column.role for column in columns if column.alignment is None}
    trained = replace(
        trained,
        columns=columns,
        hidden=of_images,
        loss_mask=None if ColumnRole.LOSS_MASK in unfit else trained.loss_mask,
        logprobs=None if ColumnRole.LOGPROBS in unfit else trained.logprobs,
    )
    return Rollout(
        place, FORMAT.name, messages, tools, training_row=with_finish_reasons(trained, row), stated=stated
    )


def _whole_sequence(row: Row, targets: Ids) -> tuple[Ids, Mask | None]:
    """The whole sequence `[T]`: the first input and all targets; `[T]` which of it are images, None if none are.

    RecordError if inputs and targets disagree.
    """
    chunks = _read_chunks(row["model_input"], len(targets))
    inputs = np.concatenate([chunk for chunk, _ in chunks]) if chunks else np.empty(0, np.int32)
    is_text = np.concatenate([np.full(len(chunk), text) for chunk, text in chunks]) if chunks else inputs > 0
    if len(inputs) != len(targets):
        raise _length_error(len(inputs), len(targets))
    differ = np.flatnonzero((inputs[1:] != targets[:-1]) & is_text[1:])
    if len(differ):
        at = int(differ[0])
        raise RecordError(
            f"model_input holds token {inputs[at + 1]} where {_TARGETS} holds {targets[at]} (target {at}): they "
            "are the same token of the sequence, so one of them is wrong"
        )
    of_images = None if is_text.all() else np.append(~is_text, False)
    return np.concatenate([inputs[:1], targets]), of_images


def _length_error(inputs: int, targets: int) -> RecordError:
    return RecordError(f"model_input holds {inputs} tokens, but {_TARGETS} {targets}: each input needs one target")


def _read_chunks(value: object, count: int) -> list[tuple[Ids, bool]]:
    """Each chunk as ids, zeros for an image, and whether it is text."""
    if isinstance(value, Mapping) and "chunks" in value:
        value = value["chunks"]
    if is_list(value) and is_number_list(value):
        return [(as_ids(value, "model_input"), True)]
    chunks = as_objects(value, "model_input is not a list of chunks of token ids")
    sizes: list[int | None] = []  # None for an image that does not say how many tokens it stands for
    for number, chunk in enumerate(chunks):
        where, size = f"model_input.chunks[{number}]", chunk.get("expected_tokens")
        if chunk.get("tokens") is not None:
            size = len(as_ids(chunk["tokens"], f"{where}.tokens"))
        elif not isinstance(chunk.get("type"), str) or chunk["type"] == "encoded_text":
            raise RecordError(f"{where} holds no `tokens`")
        elif size is not None and (type(size) is not int or not 0 <= size < 1 << 24):  # more than any image has
            raise RecordError(f"{where}.expected_tokens is {size!r}, not a number of tokens")
        sizes.append(size)
    if sizes.count(None) > 1:
        raise RecordError("model_input holds several images and does not say how many tokens each stands for")
    rest = max(count - sum(size for size in sizes if size is not None), 0)
    total = sum(rest if size is None else size for size in sizes)
    if total != count:  # before room is made for what an image only claims
        raise _length_error(total, count)
    return [
        (np.zeros(rest if size is None else size, np.int32), False)
        if chunk.get("tokens") is None
        else (as_ids(chunk["tokens"], f"model_input.chunks[{i}].tokens"), True)
        for i, (chunk, size) in enumerate(zip(chunks, sizes, strict=True))
    ]


def _column_data(value: Any, name: str) -> Any:
    """The numbers of a column, unwrapped if they are in a tensor of the SDK."""
    if isinstance(value, Mapping) and (value.get("sparse_crow_indices") is not None or _is_table(value)):
        raise RecordError(f"loss_fn_inputs.{name} is a table with several values per token, not one sequence")
    data = value.get("data") if isinstance(value, Mapping) else value
    if not is_list(data):
        raise RecordError(f"loss_fn_inputs.{name} is neither a list nor a tensor with a list `data`")
    return data


def _is_table(value: Any) -> bool:
    """True for a tensor of two or more dimensions, such as distillation targets."""
    shape = object_at(value).get("shape")
    return is_list(shape) and len(shape) > 1


def write(row: Row, old: TrainingRow, new: TrainingRow) -> Row:
    """The datum with its repaired columns and both copies of its ids."""
    if new.padding != Padding():
        raise RecordError("a datum has no padding: nothing in it would tell padding from tokens")
    edits: list[Edit] = []
    roles = {column.name: column.role for column in old.columns}
    for name, values in changed_columns(old, new).items():
        if values is None:
            edits.append(Edit(("loss_fn_inputs", name), None))
            continue
        if len(values) == len(new.token_ids) and roles[name] is not ColumnRole.OTHER:
            values = values[1:]  # a repair made it fit all tokens; the first one is not a target
        if len(values) != len(new.token_ids) - 1:
            raise RecordError(
                f"column {name!r} would hold {len(values)} values, which is not the number of targets"
            )
        if roles[name] is ColumnRole.OTHER:
            # 0 for untrained tokens whose value is unknown, because tensors hold no null.
            unknown = np.array([value is None or value != value for value in values.tolist()], np.bool_)
            if unknown.any():
                if new.loss_mask is None or new.loss_mask[1:][unknown].any():
                    raise RecordError(
                        f"column {name!r} would have no value for a trained token, and a tensor holds no null"
                    )
                values = np.where(unknown, _NOT_SAMPLED, values).astype(np.float64)
        edits += _tensor_edits(row["loss_fn_inputs"][name], ("loss_fn_inputs", name), values)
    before, after = old.token_ids, new.token_ids
    if not np.array_equal(before, after):
        if len(after) < 2:
            raise RecordError("a datum of one token has no target")
        # Inputs without the last token, targets without the first.
        edits += _tensor_edits(row["loss_fn_inputs"][_TARGETS], ("loss_fn_inputs", _TARGETS), after[1:])
        edits += _input_edits(row["model_input"], before[:-1], after[:-1])
        # The requests that sampled the old tokens say nothing of the new ones.
        spans = ("model_input_spans", "loss_fn_input_spans")
        edits += [Edit((name,), None) for name in spans if row.get(name) is not None]
    return apply_edits(row, edits)  # type: ignore[no-any-return]


def _tensor_edits(original: Any, path: Path, values: Any) -> Iterator[Edit]:
    """Edits to the numbers of a column, and to their count if its tensor has one."""
    if not isinstance(original, Mapping):
        yield Edit(path, as_logged(values, original))
        return
    yield Edit((*path, "data"), as_logged(values, original["data"]))
    shape = original.get("shape")
    if is_list(shape) and len(shape) == 1 and shape[0] != len(values):
        yield Edit((*path, "shape"), as_logged([len(values)], shape))


def _input_edits(value: Any, old: Ids, new: Ids) -> Iterator[Edit]:
    path: Path = ("model_input",)
    if isinstance(value, Mapping) and "chunks" in value:
        value, path = value["chunks"], (*path, "chunks")
    if is_number_list(value):
        yield Edit(path, as_logged(new, value))
        return
    sizes = [len(ids) for ids, _ in _read_chunks(value, len(old))]
    ends = np.cumsum(sizes)
    same, tail = common_ends(old, new)
    # The change is in the chunks from the one that holds its first token to the one that holds its last.
    first = min(int(np.searchsorted(ends, same, side="right")), len(sizes) - 1)
    last = max(int(np.searchsorted(ends, max(len(old) - tail - 1, 0), side="right")), first)
    if any(chunk.get("tokens") is None for chunk in value[first : last + 1]):
        raise RecordError("the tokens to change are around an image, and it is unclear where the image belongs")
    start = int(ends[first]) - sizes[first]
    stop = len(new) - (len(old) - int(ends[last]))
    for number in range(first, last + 1):
        ids = new[start:stop] if number == first else new[:0]
        yield Edit((*path, number, "tokens"), as_logged(ids, value[number]["tokens"]))


_ROWS = training_rows(read, write, "a datum")
FORMAT = Format(
    name="tinker",
    title="tinker datums",
    signature=Signature("{model_input} and {loss_fn_inputs.target_tokens}"),
    precedence=200,
    matches=lambda row: "model_input" in row and _TARGETS in object_at(row, "loss_fn_inputs"),
    read=_ROWS.read,
    sources=lambda row, rollouts: [
        Sources({name: (Source(("loss_fn_inputs", name)),) for name in row["loss_fn_inputs"]}) for _ in rollouts
    ],
    update=_ROWS.update,
    shows="The training row with its mask, logprobs and advantages, shifted by one. No calls, messages or model: "
    "a conversation that was cut into several datums cannot be put together again.",
)
