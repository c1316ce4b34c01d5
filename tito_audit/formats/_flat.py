"""Flat rows and rows of prompt and response, read and written, with the padding that an attention mask shows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._calls import CALL_LOGPROBS, COMPLETION_IDS, PROMPT_IDS
from tito_audit.formats._columns import (
    ENGINE_COLUMNS,
    FLAT_IDS,
    MASKS,
    RESPONSE_MASKS,
    ROW_LOGPROBS,
    Raw,
    as_logged,
    first_filled_name,
    first_list_name,
    ids_or_none,
    is_list,
    logprob_column,
    other_columns,
    same_ids,
    to_list,
)
from tito_audit.formats._extras import EXTRA_COLUMNS, read_extras, with_token_versions
from tito_audit.formats._update import (
    RepeatedIds,
    column_as_logged,
    row_counts,
    updated_columns,
    with_counts,
    with_new_copies,
    with_values,
)
from tito_audit.record.arrays import Ids, Mask, as_floats, empty_ids
from tito_audit.record.build import SHOWN_BY_ROW, build_training_row, column_values
from tito_audit.record.column import Alignment, ColumnRole, MaskEncoding, decode_mask, detect_mask_encoding
from tito_audit.record.policy_columns import WEIGHTS
from tito_audit.record.rollout import NO_PADDING, Padding, TrainingRow
from tito_audit.record.token_extras import NO_EXTRAS

PROMPT_LENGTHS = ("prompt_length", "prompt_len")
_PROMPTS = frozenset(PROMPT_IDS)
_NOT_OTHER = frozenset((*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS, "attention_mask"))
"""Names of columns that are not other columns of a row; nor are its mask and its logprobs."""


def without_padding(row: Row, name: str | None) -> tuple[Row, Padding, Mask | None]:
    """The row with padding cut from columns as long as the ids, that padding, and `[T]` which tokens are hidden.

    The attention mask hides padding at both ends, unless the loss mask trains it; what it hides between is hidden.
    """
    mask = row.get("attention_mask")
    if name is None or mask is None or not is_list(mask) or len(mask) != len(row[name]):
        return row, NO_PADDING, None
    visible = as_floats(mask, "attention_mask") > 0
    if not visible.any() or visible.all():
        return row, NO_PADDING, None
    inside = np.flatnonzero(visible | trained_by_mask(row, len(visible)))
    start, end = int(inside[0]), int(inside[-1]) + 1
    hidden = None if visible[start:end].all() else ~visible[start:end]
    if end - start == len(visible):
        return row, NO_PADDING, hidden
    cut: Mapping[str, Any] = {
        column: value[start:end] if is_list(value) and len(value) == len(row[name]) else value
        for column, value in row.items()
    }
    # Prompt lengths that include the padding on the left do not fit the cut row.
    cut = {k: v for k, v in cut.items() if k not in PROMPT_LENGTHS} if start else cut
    return cut, Padding(start, len(visible) - end), hidden


def trained_by_mask(row: Row, width: int) -> Mask:
    """`[width]` what the row's loss mask trains, padding included; all False if the mask has another width."""
    name = first_filled_name(row, MASKS)
    if name is None or len(row[name]) != width:
        return np.zeros(width, np.bool_)
    values = column_values(row[name])
    encoding = detect_mask_encoding(values)
    return np.zeros(width, np.bool_) if encoding is None else decode_mask(values, encoding)


def hidden_by_attention_mask(row: Row, width: int) -> Mask | None:
    """`[width]` which tokens of prompt and response the attention mask hides; None if it hides none."""
    mask = row.get("attention_mask")
    if not is_list(mask) or len(mask) != width:
        return None
    hidden = ~(as_floats(mask, "attention_mask") > 0)
    return hidden if hidden.any() else None


def strip_padding(value: Any, visible: Mask) -> Any:
    """A column from its first to its last visible entry; the same object if nothing is hidden."""
    if value is None or visible.all():
        return value
    where = np.flatnonzero(visible)
    return value[int(where[0]) : int(where[-1]) + 1] if len(where) else value[:0]


def restore_padding(row: Row, new: Mapping[str, Any], prompt: tuple[str, Mask], response: Mask) -> dict[str, Any]:
    """A sample's new columns at their old widths: the column `prompt` padded on the left, the response right.

    Columns of other widths are not padded. RecordError if a column no longer fits its width.
    """
    values: dict[str, Any] = {}
    for name, value in new.items():
        old: Any = row[name]
        if is_list(value) and name == prompt[0]:
            values[name] = _restore_column_padding(value, old, prompt[1], left=True, name=name)
        elif is_list(value) and is_list(old) and len(old) == len(response):
            values[name] = _restore_column_padding(value, old, response, left=False, name=name)
        else:
            values[name] = value
    return values


def _restore_column_padding(value: Any, original: Any, visible: Mask, *, left: bool, name: str) -> Any:
    width, size = len(visible), len(value)
    if size > width:
        raise RecordError(f"{name} would have {size} tokens, but the batch is only {width} tokens wide there")
    hidden = np.flatnonzero(~visible)
    fill: Any = original[int(hidden[0])] if len(hidden) else None
    if size < width and fill is None:
        raise RecordError(f"{name} would need padding, and nothing in it says with which value")
    padding = [fill] * (width - size)
    return as_logged([*padding, *to_list(value)] if left else [*to_list(value), *padding], original)


def read_flat_row(row: Row, *, has_calls: bool) -> TrainingRow | None:
    """The training row of a flat list of ids; None if the list is empty.

    With `has_calls` the row also holds calls, to which columns named after completions belong.
    """
    name = first_filled_name(row, FLAT_IDS)
    row, padding, hidden = without_padding(row, name) if "attention_mask" in row else (row, NO_PADDING, None)
    ids = ids_or_none(row.get(name or ""), name or "")
    if ids is None:
        return None
    names: tuple[str, ...] = ROW_LOGPROBS
    if has_calls:
        names = tuple([name for name in ROW_LOGPROBS if name not in CALL_LOGPROBS[:6]])
    logprobs, mask = first_filled_name(row, names), first_filled_name(row, MASKS)
    prompt_length, stated = _prompt_length(row, name, len(ids))
    trained = build_training_row(
        ids,
        mask=None if mask is None else (mask, row[mask]),
        logprobs=logprob_column(row, logprobs),
        other=other_columns(row, {mask or "", logprobs or "", *_NOT_OTHER}),
        prompt_length=prompt_length,
        sentinel=SHOWN_BY_ROW,
        # Only slime and miles write this length, and for them no mask means the whole response.
        absent_mask_trains_response=stated and mask is None,
        shifts=None,
        padding=padding,
        hidden=hidden,
        extras=NO_EXTRAS if EXTRA_COLUMNS.isdisjoint(row) else read_extras(row),
    )
    return with_token_versions(row, trained) if WEIGHTS in row else trained


def read_split_row(row: Row, *, of_one_call: bool = False) -> TrainingRow | None:
    """The training row of prompt and response ids whose mask leaves out tokens of the response, else None.

    A response that is trained whole was sampled by one call; with `of_one_call` the row is that of such a call. A
    mask that fits neither the response nor the whole sequence also makes a row, for a rule to report; so does a
    hidden token in the response.
    """
    prompt_name, response_name = first_filled_name(row, PROMPT_IDS), first_filled_name(row, COMPLETION_IDS)
    mask = first_list_name(row, RESPONSE_MASKS)
    if response_name is None or mask is None or not len(row[mask]):
        return None
    prompt = ids_or_none(row.get(prompt_name or ""), prompt_name or "")
    response = ids_or_none(row[response_name], response_name)
    if response is None:
        return None
    prompt = empty_ids() if prompt is None else prompt
    hidden = hidden_by_attention_mask(row, len(prompt) + len(response))
    sampled_whole = _trains_all_of_response(row[mask], prompt, response)
    if (sampled_whole and (hidden is None or not hidden[len(prompt) :].any())) is not of_one_call:
        return None
    logprobs = first_filled_name(row, CALL_LOGPROBS)
    trained = build_training_row(
        np.concatenate([prompt, response]),
        mask=(mask, row[mask]),
        logprobs=logprob_column(row, logprobs),
        other=other_columns(row, {mask or "", logprobs or "", *_NOT_OTHER}),
        prompt_length=len(prompt),
        sentinel=SHOWN_BY_ROW,
        hidden=hidden,
        extras=read_extras(row),
    )
    return with_token_versions(row, trained)


def updated_flat_row(
    row: Row,
    before: TrainingRow,
    after: TrainingRow,
    *,
    ids: str | None = None,
    skip: Collection[str] = (),
    has_turn: bool = False,
) -> Row:
    """A flat or split row with the columns, copies and counts of `after`.

    Columns in `skip` are not the training row's; with `has_turn`, neither are those of a prompt and a
    completion, which belong to a call. `ids` is the column of the ids, if the format knows it.
    """
    name = ids or first_filled_name(row, FLAT_IDS)
    name = name if name is not None and len(row[name]) else None
    if after.padding != NO_PADDING and (name is None or not is_list(row.get("attention_mask"))):
        raise RecordError("the row has no attention_mask over its ids: nothing would tell padding from tokens")
    values = updated_columns(row, before, after, name)
    values.update(_updated_other_masks(row, before, after))
    if name is None:
        values.update(_updated_split_ids(row, before, after))
    copies: list[RepeatedIds] = []
    if not np.array_equal(before.token_ids, after.token_ids):
        names = {*FLAT_IDS, *(() if has_turn else (*PROMPT_IDS, *COMPLETION_IDS))}
        copies.append(RepeatedIds(before.token_ids, after.token_ids, names))
        if name is not None:
            copies.append(RepeatedIds(row[name], values[name], names))
        if not has_turn:
            copies.extend(_repeated_parts(row, before, after))
        values |= {key: None for key in ENGINE_COLUMNS if row.get(key) is not None}
    skip = {*skip, *PROMPT_IDS, *COMPLETION_IDS} if has_turn else skip
    new = with_values(with_new_copies(row, copies, skip), values)
    # Prompt lengths that count the padding on the left, which `read_flat_row` does not read.
    left, lengths = before.padding.left, {}
    for name in PROMPT_LENGTHS if left else ():
        length = row.get(name)
        if type(length) is not int or not left <= length <= left + len(before.token_ids):
            continue
        to = _moved_boundary(before, after, length - left)
        if to is None:
            raise RecordError(f"{name} counts the padding, and it is unclear where the prompt ends now")
        if after.padding.left + to != length:
            lengths[name] = after.padding.left + to
    return with_counts(with_values(new, lengths), row_counts(before, after))


def _updated_split_ids(row: Row, before: TrainingRow, after: TrainingRow) -> dict[str, Any]:
    """The new prompt and response ids of a split row; RecordError if its columns cannot hold them."""
    if same_ids(before.token_ids, after.token_ids) and same_ids(before.loss_mask, after.loss_mask):
        return {}
    prompt, response = first_filled_name(row, PROMPT_IDS), first_filled_name(row, COMPLETION_IDS)
    mask = first_list_name(row, RESPONSE_MASKS)
    start = after.prompt_length or 0
    if response is None or mask is None or (prompt is None and start):
        raise RecordError("the row has no columns for the ids of a prompt and of a response")
    if start == len(after.token_ids):
        raise RecordError("nothing would be left of the response")
    if after.loss_mask is not None and not after.loss_mask[:start].any() and after.loss_mask[start:].all():
        raise RecordError(
            f"column {mask!r} would train all of the response, and a row with such a mask is read as one sampled "
            "call"
        )
    values = {response: as_logged(after.token_ids[start:], row[response])}
    return values if prompt is None else {**values, prompt: as_logged(after.token_ids[:start], row[prompt])}


def _repeated_parts(row: Row, before: TrainingRow, after: TrainingRow) -> Iterator[RepeatedIds]:
    """Prompt and response, as other columns repeat them; RecordError if it is unclear where they now end."""
    full = len(before.token_ids)
    ends = [] if before.prompt_length is None else [(before.prompt_length, "")]
    for name in (*PROMPT_IDS, *COMPLETION_IDS):
        value = row.get(name)
        if is_list(value) and 0 < len(value) < full:
            at = len(value) if name in PROMPT_IDS else full - len(value)
            part = before.token_ids[:at] if name in PROMPT_IDS else before.token_ids[at:]
            if np.array_equal(part, value):
                ends.append((at, name))
    for at, name in ends:
        to = _moved_boundary(before, after, at)
        if to is None:
            raise RecordError(
                f"column {name!r} repeats a part of the ids, and it is unclear where that part ends now"
            )
        yield RepeatedIds(before.token_ids[:at], after.token_ids[:to], PROMPT_IDS)
        yield RepeatedIds(before.token_ids[at:], after.token_ids[to:], COMPLETION_IDS)


def _moved_boundary(before: TrainingRow, after: TrainingRow, at: int) -> int | None:
    """The new position of a boundary: that of the prompt's end, or next to an unchanged side; None if unclear."""
    if at == before.prompt_length and after.prompt_length is not None:
        return after.prompt_length
    if np.array_equal(before.token_ids[:at], after.token_ids[:at]):
        return at
    rest = len(before.token_ids) - at
    to = len(after.token_ids) - rest
    return to if to >= 0 and np.array_equal(before.token_ids[at:], after.token_ids[to:]) else None


def _updated_other_masks(row: Row, before: TrainingRow, after: TrainingRow) -> dict[str, Any]:
    """The new values of columns that repeat the loss mask, such as `labels` beside `loss_mask`."""
    if before.loss_mask is None or after.loss_mask is None:
        return {}
    values: dict[str, Any] = {}
    for old in before.columns:
        if old.role is not ColumnRole.OTHER or old.name not in MASKS or old.alignment is not Alignment.FULL:
            continue
        encoding = detect_mask_encoding(old.values, before.token_ids)
        if encoding is None or not np.array_equal(decode_mask(old.values, encoding), before.loss_mask):
            continue
        mask = after.loss_mask
        assert mask is not None
        if encoding is MaskEncoding.LABELS:
            mask_values = np.where(mask, after.token_ids, -100)
        else:
            mask_values = mask.astype(
                {MaskEncoding.BOOL: np.bool_, MaskEncoding.FLOAT: np.float64}.get(encoding, np.int64)
            )
        new = replace(old, role=ColumnRole.LOSS_MASK, values=mask_values, encoding=encoding)
        same = replace(old, role=ColumnRole.LOSS_MASK, encoding=encoding)
        values[old.name] = column_as_logged(row[old.name], same, new, before, after)
    return values


def _trains_all_of_response(mask: Raw, prompt: Ids, response: Ids) -> bool:
    """Whether a mask trains the whole response and nothing else."""
    if len(mask) == len(prompt) + len(response) != len(response):
        if mask[: len(prompt)].any() if isinstance(mask, np.ndarray) else any(mask[: len(prompt)]):
            return False
        mask = mask[len(prompt) :]
    if len(mask) != len(response):
        return False
    if isinstance(mask, np.ndarray):
        return bool((mask == 1).all())
    return all(isinstance(entry, int | float) and entry == 1 for entry in mask)


def _prompt_length(row: Row, ids: str | None, full: int) -> tuple[int | None, bool]:
    """The number of tokens before the response, None if unknown; and whether `response_length` gave it."""
    response = row.get("response_length")
    if type(response) is int and 0 <= response <= full:
        return full - response, True
    for name in PROMPT_LENGTHS:
        length = row.get(name)
        if type(length) is int and 0 <= length <= full:
            return length, False
    prompt_name = None if _PROMPTS.isdisjoint(row) else first_filled_name(row, PROMPT_IDS)
    prompt: Raw = () if prompt_name is None else row[prompt_name]
    # An inner list is not an id; compared with one it may give an array, which has no truth value.
    comparable = ids is not None and 0 < len(prompt) <= full and not is_list(prompt[0])
    starts = comparable and to_list(row[ids or ""][: len(prompt)]) == to_list(prompt)
    return len(prompt) if starts else None, False
