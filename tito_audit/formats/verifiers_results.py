"""verifiers before v1: `results.jsonl`, one rollout per row, with ids if the run kept its trajectory.

A step of the trajectory is a call; its ids are in `tokens` and, as the server returned them, again in
`response.message.tokens`. PrimeIntellect-ai/verifiers `verifiers/legacy/types.py` (`TrajectoryStep`,
`TrajectoryStepTokens`), `legacy/utils/save_utils.py` (`state_to_output`, `save_outputs`), up to release 0.3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._beside import read_beside
from tito_audit.formats._calls import (
    build_turn,
    errors_at,
    message_place,
    only_text,
    stated_model,
    with_ascending_messages,
    with_finish_reasons,
)
from tito_audit.formats._columns import (
    as_object,
    equal_values,
    first_text,
    is_given,
    is_list,
    is_number_list,
    move_policy,
)
from tito_audit.formats._update import object_at, sources_at, sources_of_calls, value_at, with_counts
from tito_audit.formats._verifiers import chat_messages, verifiers_tools_as_chat
from tito_audit.formats._writer import count_tokens, update_calls
from tito_audit.record.arrays import Mask, as_floats
from tito_audit.record.build import build_training_row
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding
from tito_audit.record.edits import Edit, Path
from tito_audit.record.message import Message
from tito_audit.record.prefix import starts_with
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.record.sources import CallSource, Counter, Sources
from tito_audit.record.stated import group_key

_IDS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")
_UNREBUILT = ("routed_experts", "prompt_attribution")
"""Data aligned with the prompt, which cannot be rebuilt if the prompt changes."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One call: what it was sent, what it wrote, and its tokens."""

    wire: Mapping[str, Any]
    where: str
    prompt: tuple[Message, ...]
    answer: Message | None
    tokens: Mapping[str, Any]
    """{} if the step has none."""
    cut: bool
    """True if the prompt was cut to the model's limit, so that ids and messages differ."""


def matches(row: Row) -> bool:
    if "example_id" not in row or "completion" not in row or "prompt" not in row:
        return False
    completion = row["completion"]
    if not (completion is None or isinstance(completion, str | list | tuple)):
        return False
    if isinstance(row.get("is_completed"), bool | np.bool_):
        return True
    steps = row.get("trajectory")
    return (
        isinstance(steps, list | tuple) and bool(steps) and isinstance(steps[0], Mapping) and "tokens" in steps[0]
    )


def read(row: Row, place: Place) -> Sequence[Rollout]:
    logged = row.get("trajectory")
    if logged is not None and not isinstance(logged, list | tuple):
        raise RecordError("trajectory is not a list of steps")
    steps: list[_Step] = []
    for number, step in enumerate(logged or ()):
        where = f"trajectory[{number}]"
        step = as_object(step, f"{where} is not a step (an object)")
        tokens = step.get("tokens")
        if tokens is not None:
            tokens = as_object(tokens, f"{where}.tokens is not an object with the ids of the step")
        answers = chat_messages(step.get("completion"), f"{where}.completion")
        answer = next((message for message in answers if message.role == "assistant"), None)
        prompt = chat_messages(step.get("prompt"), f"{where}.prompt")
        steps.append(_Step(step, where, prompt, answer, tokens or {}, bool((tokens or {}).get("overlong_prompt"))))
    # Without steps, the row's own copy is the conversation.
    last = steps[-1] if steps else None
    if last is not None and last.prompt and last.answer is not None:
        messages = (*last.prompt, last.answer)
    else:
        messages = chat_messages(row.get("prompt"), "prompt") + chat_messages(row.get("completion"), "completion")
    tools = verifiers_tools_as_chat(row.get("tool_defs", row.get("oai_tools")), "tool_defs")
    stated = replace(stated_model({**row, "steps": [s.wire for s in steps]}), group=group_key(row["example_id"]))
    if not any(_has_ids(step) for step in steps):
        return (Rollout(place, FORMAT.name, messages, tools, stated=stated.without_ids()),)
    turns = with_ascending_messages([_read_step(step, messages) for step in steps], messages)
    trained = with_finish_reasons(_row_if_masks_differ(steps, turns), {}, turns)
    return (Rollout(place, FORMAT.name, messages, tools, turns=turns, training_row=trained, stated=stated),)


def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    if not repaired:
        return ()
    if len(repaired) > 1:
        raise RecordError(
            "a trajectory cannot hold a fork and does not need one: each step holds its own prompt and answer"
        )
    stays = "a step of a trajectory cannot be left out: later steps repeat its answer"
    row_stays = "the masks of the steps say what was sampled, so the loss mask cannot be changed by itself"
    return (update_calls(row, repaired, read, sources, totals=count_edits, stays=stays, row_stays=row_stays),)


def _read_step(step: _Step, messages: Sequence[Message]) -> Turn:
    # The trainer, too, may have truncated it.
    truncated = step.wire.get("is_truncated") is True or step.tokens.get("is_truncated") is True
    text = step.wire.get("completion")
    if not isinstance(text, str) and step.answer is not None:
        text = only_text(step.answer)
    fields: dict[str, Any] = {
        "prompt_text": first_text(step.wire, ("prompt",)),
        "completion_text": text if isinstance(text, str) and not step.cut else None,
        "finish_reason": first_text(object_at(step.wire, "response", "message"), ("finish_reason",)),
        **({} if step.cut else message_place(messages, step.prompt, step.answer)),
    }
    if truncated:
        fields["finish_reason"] = "length"
    if not _has_ids(step):
        return Turn(None, None, **fields)
    with errors_at(f"{step.where}.tokens"):
        ids: Any = step.tokens.get("completion_ids")
        logprobs: Any = step.tokens.get("completion_logprobs")
        turn = build_turn(
            ("prompt_ids", step.tokens.get("prompt_ids")),
            ("completion_ids", () if ids is None else ids),
            lambda: ("completion_logprobs", logprobs) if is_given(logprobs) else None,
            {
                name: (value, move_policy(name))
                for name, value in step.tokens.items()
                if name not in (*_IDS, *_UNREBUILT) and is_list(value) and len(value) > 1 and is_number_list(value)
            },
            beside=read_beside(step.tokens, step.wire),
            **fields,
        )
        size = 0 if turn.completion_ids is None else len(turn.completion_ids)
        mask: Any = step.tokens.get("completion_mask")
        if is_given(mask):
            values = as_floats(mask, "completion_mask")
            if len(values) != size:
                raise RecordError(f"completion_mask has {len(values)} entries for {size} completion ids")
            kind, fit, encoding = ColumnRole.LOSS_MASK, Alignment.CALL, MaskEncoding.BINARY
            column = Column("completion_mask", kind, values, fit, encoding=encoding)
            turn = replace(turn, columns=(*turn.columns, column))
    return turn


def _row_if_masks_differ(steps: Sequence[_Step], turns: Sequence[Turn]) -> TrainingRow | None:
    """The training row of steps whose masks train something other than what was sampled; else None.

    Normally the masks match the completions, and a row would only repeat them. RecordError if no step holds the
    tokens of all others.
    """
    # `[P + C]` what the masks of each step train, and what was sampled in it.
    masks: list[tuple[Mask, Mask]] = []
    for step, turn in zip(steps, turns, strict=True):
        prompt, completion = (0 if ids is None else len(ids) for ids in (turn.prompt_ids, turn.completion_ids))
        sampled = np.arange(prompt + completion) >= prompt
        trained = sampled.copy()
        prompt_mask: Any = step.tokens.get("prompt_mask")
        completion_mask: Any = step.tokens.get("completion_mask")
        if is_given(prompt_mask):
            values = as_floats(prompt_mask, "prompt_mask")
            if len(values) != prompt:
                raise RecordError(
                    f"{step.where}.tokens.prompt_mask has {len(values)} entries for {prompt} prompt ids"
                )
            trained[:prompt] = values > 0
        if is_given(completion_mask):
            trained[prompt:] = as_floats(completion_mask, "completion_mask") > 0
        masks.append((trained, sampled))
    if not any((trained != sampled).any() for trained, sampled in masks):
        return None
    seen = [turn.seen_ids for turn in turns]
    last = seen[-1]
    if last is None or any(ids is None or not starts_with(last, ids) for ids in seen):
        raise RecordError(
            "the masks train other tokens than were sampled, and no step holds the tokens of all other steps"
        )
    whole, logprobs = np.zeros(len(last), np.int64), np.full(len(last), np.nan)
    for turn, (trained, sampled) in zip(turns, masks, strict=True):
        whole[: len(trained)] |= trained
        if turn.completion_logprobs is not None:
            logprobs[: len(sampled)][sampled] = turn.completion_logprobs
    return build_training_row(last, mask=("completion_mask", whole), logprobs=("completion_logprobs", logprobs))


def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    (rollout,) = rollouts
    calls = []
    for number, turn in enumerate(rollout.turns):
        # A step stores its call twice; a copy with other values is left alone.
        path: Path = ("trajectory", number)
        response = (*path, "response")
        places = [p for p in ((*path, "tokens"), (*response, "message", "tokens")) if object_at(row, *p)]
        prompted = [p for p in places if _is_copy(value_at(row, p).get("prompt_ids"), turn.prompt_ids)]
        columns = {
            column.name: sources_at(
                (*p, column.name) for p in places if _is_copy(value_at(row, p).get(column.name), column.values)
            )
            for column in turn.columns
        }
        source = CallSource(
            prompts=sources_at((*p, "prompt_ids") for p in prompted),
            logprobs=columns.get("completion_logprobs", ()),
            columns=columns,
            blank=tuple((*p, "prompt_mask") for p in prompted if is_given(value_at(row, p).get("prompt_mask"))),
            routing=tuple((*p, name) for p in prompted for name in _UNREBUILT if name in value_at(row, p)),
            counters=(Counter((*response, "usage")),) if object_at(row, *response, "usage") else (),
        )
        calls.append(source)
    return sources_of_calls([calls])


def _is_copy(value: Any, of: Any) -> bool:
    return is_list(value) and of is not None and equal_values(of, value)


def count_edits(row: Row, before: Sequence[Rollout], after: Sequence[Rollout]) -> Iterator[Edit]:
    """Edits to the row's counts: the tokens of all prompts, and those the last call saw but no call sampled.

    `legacy/utils/usage_utils.py` (`compute_context_token_metrics`).
    """
    usage = row.get("token_usage")
    if isinstance(usage, Mapping):
        was, now = before[0].turns, after[0].turns
        (old, completions), (new, _) = count_tokens(was), count_tokens(now)
        (old_last, last_completion), (new_last, _) = count_tokens(was[-1:]), count_tokens(now[-1:])
        last_inputs = [(old_last + last_completion - completions, new_last + last_completion - completions)]
        counts = {"input_tokens": [(old, new)], "final_input_tokens": last_inputs}
        yield Edit(("token_usage",), with_counts(usage, counts))


def _has_ids(step: _Step) -> bool:
    return any(is_given(step.tokens.get(name)) for name in ("prompt_ids", "completion_ids"))


FORMAT = Format(
    name="verifiers_results",
    title="verifiers results (before v1)",
    signature=Signature("{example_id}, {prompt}, {completion}, {is_completed}; ids in {trajectory[].tokens?}"),
    precedence=170,
    matches=matches,
    read=read,
    sources=sources,
    update=update,
    shows="Messages, tools and, where the run kept its trajectory, every call with its prompt, its logprobs and "
    "how it ended. By default no trajectory is kept and there are no ids.",
)
