"""verifiers before v1: `results.jsonl`, a row a rollout, with ids where the run kept its trajectory.

A step of the trajectory is a call; its ids stand in `tokens` and, as the server gave them, once more in
`response.message.tokens`. PrimeIntellect-ai/verifiers `verifiers/legacy/types.py` (`TrajectoryStep`,
`TrajectoryStepTokens`), `legacy/utils/save_utils.py` (`state_to_output`, `save_outputs`), up to release 0.3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tito_audit.align.prefix import starts_with
from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats._calls import written_once
from tito_audit.formats._columns import ids_or_none, is_list, is_numbers, policy_of
from tito_audit.formats._copies import CountPairs, with_counts, with_list
from tito_audit.formats._finish import with_finishes
from tito_audit.formats._models import model_facts
from tito_audit.formats._turn_change import Change, changes_of, recounted, rollouts_before, same_ids, says_this
from tito_audit.formats._update import as_logged, at_most_one_each, with_values
from tito_audit.formats._values import equal_values
from tito_audit.formats._verifiers_messages import chat_messages, chat_tools
from tito_audit.record.arrays import Mask, as_floats, empty_ids
from tito_audit.record.build import call_columns, training_row
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding, MovePolicy
from tito_audit.record.message import Message
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn

__all__ = ["FORMAT"]

_IDS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")
_UNREBUILT = ("routed_experts", "prompt_attribution")
"""What is lined up with a prompt that is no longer the one it was made of."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One call: what it was sent, what it wrote, and its tokens."""

    wire: Mapping[str, Any]
    where: str
    prompt: tuple[Message, ...]
    answer: Message | None
    tokens: Mapping[str, Any]
    """{} when the step has none."""
    cut: bool
    """Whether the prompt was cut to the limit of the model, so that ids and messages differ."""


def _matches(row: Row) -> bool:
    if "example_id" not in row or "completion" not in row or "prompt" not in row:
        return False
    said = row["completion"]
    if not (said is None or isinstance(said, str | list | tuple)):
        return False
    if isinstance(row.get("is_completed"), bool | np.bool_):
        return True
    steps = row.get("trajectory")
    return (
        isinstance(steps, list | tuple) and bool(steps) and isinstance(steps[0], Mapping) and "tokens" in steps[0]
    )


def _read(row: Row, place: Place) -> Sequence[Rollout]:
    steps = _steps(row)
    messages = _messages(row, steps)
    tools = chat_tools(row.get("tool_defs", row.get("oai_tools")), "tool_defs")
    stated = _stated(row, steps)
    if not any(_has_ids(step) for step in steps):
        stated["ids_wanted"] = False
        return (Rollout(place, FORMAT.name, messages, tools, stated=stated),)
    turns = written_once([_turn(step, messages) for step in steps], messages)
    trained = with_finishes(_row_of_odd_masks(steps, turns), {}, turns)
    return (
        Rollout(
            place,
            FORMAT.name,
            messages,
            tools,
            turns=turns,
            training_row=trained,
            stated=stated,
        ),
    )


def _update(row: Row, mended: Sequence[RepairedRollout]) -> Sequence[Row]:
    if not mended:
        return ()
    (before,) = rollouts_before(row, mended, _read)
    if len(mended) > 1:
        raise RecordError(
            "a trajectory cannot hold a fork, and needs none: each step holds its own prompt and answer"
        )
    (one,) = at_most_one_each([before], mended)
    if len(one.turns_from) != len(before.turns):
        raise RecordError("a step of a trajectory cannot be left out: the steps behind it repeat what it said")
    if not _same_mask(before.training_row, one.rollout.training_row):
        raise RecordError("the masks of the steps say what was sampled, so the loss cannot be changed by itself")
    changes = changes_of(before, one)
    if not changes:
        return (row,)
    entries = [
        _step_again(step, changes[number]) if number in changes else step
        for number, step in enumerate(row["trajectory"])
    ]
    new = with_values(row, {"trajectory": with_list(row["trajectory"], entries)})
    usage = row.get("token_usage")
    if isinstance(usage, Mapping):
        new = with_values(new, {"token_usage": with_counts(usage, _usage(before.turns, one.rollout.turns))})
    (again,) = _read(new, before.place)
    says_this(again, one, before)
    return (new,)


def _steps(row: Row) -> tuple[_Step, ...]:
    steps = row.get("trajectory")
    if steps is None:
        return ()
    if not isinstance(steps, list | tuple):
        raise RecordError("trajectory is not a list of steps")
    return tuple(_step(step, f"trajectory[{number}]") for number, step in enumerate(steps))


def _step(step: object, where: str) -> _Step:
    if not isinstance(step, Mapping):
        raise RecordError(f"{where} is not a step (an object)")
    tokens = step.get("tokens")
    if tokens is not None and not isinstance(tokens, Mapping):
        raise RecordError(f"{where}.tokens is not an object with the ids of the step")
    said = step.get("completion")
    answers = chat_messages(said, f"{where}.completion")
    return _Step(
        step,
        where,
        chat_messages(step.get("prompt"), f"{where}.prompt"),
        next((message for message in answers if message.role == "assistant"), None),
        tokens or {},
        bool((tokens or {}).get("overlong_prompt")),
    )


def _messages(row: Row, steps: Sequence[_Step]) -> tuple[Message, ...]:
    """The conversation of the last step as it was sent; the row's own copy of it where there are no steps."""
    last = steps[-1] if steps else None
    if last is not None and last.prompt and last.answer is not None:
        return (*last.prompt, last.answer)
    return chat_messages(row.get("prompt"), "prompt") + chat_messages(row.get("completion"), "completion")


def _turn(step: _Step, messages: Sequence[Message]) -> Turn:
    index = len(step.prompt)
    in_place = step.answer is not None and index < len(messages) and not step.cut
    in_place = in_place and [m.wire for m in messages[: index + 1]] == [
        m.wire for m in (*step.prompt, *((step.answer,) if step.answer else ()))
    ]
    text = step.wire.get("completion")
    if not isinstance(text, str) and step.answer is not None:
        text = None if step.answer.tool_calls or step.answer.reasoning is not None else step.answer.text
    turn = Turn(
        prompt_ids=None,
        completion_ids=None,
        message_index=index if in_place else None,
        prompt_messages=None if in_place or step.cut or not step.prompt else step.prompt,
        prompt_text=step.wire["prompt"] if isinstance(step.wire.get("prompt"), str) else None,
        completion_text=text if isinstance(text, str) and not step.cut else None,
        finish_reason=_finish_reason(step),
    )
    if not _has_ids(step):
        return turn
    try:
        prompt = ids_or_none(step.tokens.get("prompt_ids"), "prompt_ids")
        completion = ids_or_none(step.tokens.get("completion_ids"), "completion_ids")
        if completion is None and prompt is not None:
            completion = empty_ids()
        logprobs: Any = step.tokens.get("completion_logprobs")
        values, columns = call_columns(
            empty_ids() if completion is None else completion,
            logprobs=("completion_logprobs", logprobs) if _filled(logprobs) else None,
            other=_other_columns(step),
        )
        mask = _mask_column(step, 0 if completion is None else len(completion))
    except RecordError as error:
        raise RecordError(f"{step.where}.tokens: {error}") from None
    return replace(
        turn,
        prompt_ids=prompt,
        completion_ids=completion,
        completion_logprobs=values,
        columns=(*columns, *(() if mask is None else (mask,))),
    )


def _other_columns(step: _Step) -> dict[str, tuple[Any, MovePolicy]]:
    """Every other list of numbers beside the ids."""
    return {
        name: (value, policy_of(name))
        for name, value in step.tokens.items()
        if name not in (*_IDS, *_UNREBUILT) and is_list(value) and len(value) > 1 and is_numbers(value)
    }


def _mask_column(step: _Step, size: int) -> Column | None:
    """The mask over the completion; RecordError when its length is another one."""
    mask: Any = step.tokens.get("completion_mask")
    if not _filled(mask):
        return None
    values = as_floats(mask, "completion_mask")
    if len(values) != size:
        raise RecordError(f"completion_mask has {len(values)} entries for {size} completion ids")
    fit, encoding = Alignment.CALL, MaskEncoding.BINARY
    return Column("completion_mask", ColumnRole.LOSS_MASK, values, fit, encoding=encoding)


def _row_of_odd_masks(steps: Sequence[_Step], turns: Sequence[Turn]) -> TrainingRow | None:
    """The row that the masks make of steps that grow, if they train something else than was sampled; else None.

    As a rule they say no more than the completions do, and a row would only repeat them.
    """
    masks = [_trained(step, turn) for step, turn in zip(steps, turns, strict=True)]
    if not any((trained != sampled).any() for trained, sampled in masks):
        return None
    seen = [turn.seen_ids for turn in turns]
    last = seen[-1]
    if last is None or any(ids is None or not starts_with(last, ids) for ids in seen):
        raise RecordError("the masks train other tokens than were sampled, and no step holds all the others")
    whole, logprobs = np.zeros(len(last), np.int64), np.full(len(last), np.nan)
    for turn, (trained, sampled) in zip(turns, masks, strict=True):
        whole[: len(trained)] |= trained
        if turn.completion_logprobs is not None:
            logprobs[: len(sampled)][sampled] = turn.completion_logprobs
    return training_row(last, mask=("completion_mask", whole), logprobs=("completion_logprobs", logprobs))


def _trained(step: _Step, turn: Turn) -> tuple[Mask, Mask]:
    """`[P + C]` what the masks of a step train, and what was sampled in it."""
    prompt = 0 if turn.prompt_ids is None else len(turn.prompt_ids)
    sampled = np.ones(prompt + (0 if turn.completion_ids is None else len(turn.completion_ids)), np.bool_)
    sampled[:prompt] = False
    trained = sampled.copy()
    given: Any = step.tokens.get("prompt_mask")
    said: Any = step.tokens.get("completion_mask")
    if _filled(given):
        values = as_floats(given, "prompt_mask")
        if len(values) != prompt:
            raise RecordError(f"{step.where}.tokens.prompt_mask has {len(values)} entries for {prompt} prompt ids")
        trained[:prompt] = values > 0
    if _filled(said):
        trained[prompt:] = as_floats(said, "completion_mask") > 0
    return trained, sampled


def _step_again(step: Mapping[str, Any], change: Change) -> Mapping[str, Any]:
    """A step with its tokens as they are from now on, in both places."""
    tokens = _tokens_again(step["tokens"], change)
    new: Mapping[str, Any] = with_values(step, {"tokens": tokens})
    response = step.get("response")
    message = response.get("message") if isinstance(response, Mapping) else None
    copy = message.get("tokens") if isinstance(message, Mapping) else None
    if isinstance(response, Mapping) and isinstance(message, Mapping):
        if isinstance(copy, Mapping):
            again = with_values(message, {"tokens": _tokens_again(copy, change)})
            response = with_values(response, {"message": again})
        usage = response.get("usage")
        if isinstance(usage, Mapping):
            counts = recounted(usage, [_counts([change.before])], [_counts([change.after])])
            response = with_values(response, {"usage": with_values(usage, counts)})
        new = with_values(new, {"response": response})
    return new


def _tokens_again(tokens: Mapping[str, Any], change: Change) -> Mapping[str, Any]:
    """The ids of a call in one of their places; a place that says something else stays as it is."""
    values: dict[str, Any] = {}
    if change.prompt_ids is not None and _is_copy(tokens.get("prompt_ids"), change.before.prompt_ids):
        values["prompt_ids"] = as_logged(change.prompt_ids, tokens["prompt_ids"])
        mask = tokens.get("prompt_mask")
        if _filled(mask):
            if np.asarray(mask).any():
                raise RecordError("prompt_mask trains tokens of a prompt that would change")
            values["prompt_mask"] = as_logged(np.zeros(len(change.prompt_ids), np.int64), mask)
        values.update({name: None for name in _UNREBUILT if tokens.get(name) is not None})
    columns: dict[str, Any] = dict(change.columns)
    if change.logprobs is not None:
        columns["completion_logprobs"] = change.logprobs
    was = {column.name: column.values for column in change.before.columns}
    for name, column in columns.items():
        if _is_copy(tokens.get(name), was.get(name)):
            values[name] = None if column is None else as_logged(column, tokens[name])
    return with_values(tokens, values)


def _is_copy(value: Any, of: Any) -> bool:
    return is_list(value) and of is not None and equal_values(of, value)


def _usage(before: Sequence[Turn], after: Sequence[Turn]) -> CountPairs:
    """What a row counts, before and after: all prompts, and what the last call saw that no call had said.

    `legacy/utils/usage_utils.py` (`compute_context_token_metrics`).
    """
    (old, completions), (new, _) = _counts(before), _counts(after)
    (old_last, said), (new_last, _) = _counts(before[-1:]), _counts(after[-1:])
    given = [(old_last + said - completions, new_last + said - completions)]
    return {"input_tokens": [(old, new)], "final_input_tokens": given}


def _counts(turns: Sequence[Turn]) -> tuple[int, int]:
    """The tokens of all prompts and of all completions."""
    prompts, completions = [t.prompt_ids for t in turns], [t.completion_ids for t in turns]
    return sum(len(ids) for ids in prompts if ids is not None), sum(
        len(ids) for ids in completions if ids is not None
    )


def _same_mask(before: TrainingRow | None, after: TrainingRow | None) -> bool:
    if before is None or after is None:
        return before is after
    return same_ids(before.token_ids, after.token_ids) and equal_values(before.loss_mask, after.loss_mask)


def _has_ids(step: _Step) -> bool:
    return any(_filled(step.tokens.get(name)) for name in ("prompt_ids", "completion_ids"))


def _filled(value: Any) -> bool:
    return value is not None and not (is_list(value) and not len(value))


def _finish_reason(step: _Step) -> str | None:
    """Why the call ended; what the trainer cut afterwards counts as cut."""
    if step.wire.get("is_truncated") is True or step.tokens.get("is_truncated") is True:
        return "length"
    response = step.wire.get("response")
    message = response.get("message") if isinstance(response, Mapping) else None
    reason = message.get("finish_reason") if isinstance(message, Mapping) else None
    return reason if isinstance(reason, str) else None


def _stated(row: Row, steps: Sequence[_Step]) -> dict[str, object]:
    stated = model_facts({**row, "steps": [step.wire for step in steps]})
    if isinstance(row["example_id"], int | str):
        stated["group"] = row["example_id"]
    return stated


FORMAT = Format(
    name="verifiers_results",
    title="verifiers results (before v1)",
    signature="`example_id`, `prompt`, `completion`, `is_completed`; ids in `trajectory[].tokens`",
    precedence=170,
    matches=_matches,
    read=_read,
    update=_update,
    shows="Messages, tools and, where the run kept its trajectory, every call with its prompt, its logprobs and "
    "its end. By default no trajectory is kept and there are no ids.",
)
