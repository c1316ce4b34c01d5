"""The forms that a log can be converted to, each with a maker of its rows.

Conventions as in the formats themselves: NousResearch/atropos `atroposlib/envs/base.py` (`ScoredDataGroup`);
THUDM/slime `slime/utils/types.py` (`Sample`); arb8020/research `rollouts/rollouts/training/types.py` (`Sample`);
NVIDIA-NeMo/RL `nemo_rl/utils/logger.py` (`log_batched_dict_as_jsonl`), `nemo_rl/environments/nemo_gym.py`, whose
message logs alternate user and assistant slices of tokens, without text; NVIDIA-NeMo/Gym
`nemo_gym/rollout_collection.py`, `openai_utils.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tito_audit.convert.rows_and_calls import REWARDS, column_over_tokens, known_logprobs, loss_weights
from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format, Row
from tito_audit.formats import all_formats
from tito_audit.record.column import ColumnRole
from tito_audit.record.message import Message
from tito_audit.record.policy_columns import WEIGHTS, versions_to_spans
from tito_audit.record.rollout import Rollout, TrainingRow, Turn
from tito_audit.record.runs import trained_runs
from tito_audit.unknown import unknown_name


class Holds(StrEnum):
    """Whether the rollouts of a log are training rows or calls."""

    ROWS = "training rows"
    CALLS = "calls"


@dataclass(frozen=True, slots=True)
class MakerInput:
    """One rollout for a maker, either with a training row or with calls."""

    rollout: Rollout
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its log says besides tokens, messages and tools, by its name in the new row."""
    of_calls: Sequence[Mapping[str, Any]] = ()
    """What its log says about each call; () unless calls were joined and the new row has a place for it."""


@dataclass(frozen=True, slots=True)
class Maker:
    """How rollouts of any log become a row of one form of `tito-audit convert`."""

    name: str
    """What `--to` takes."""
    format: str
    """The name of the format that reads the row."""
    title: str
    holds: Holds
    make: Callable[..., Row]
    """The row of one MakerInput, or of all of a group if rows hold groups; RecordError if it cannot hold them. It
    writes what it has a place for; reading the row back shows what that is."""
    own: frozenset[str]
    """Keys of the row that no fact may use."""
    slots: Mapping[str, str] = field(default_factory=dict)
    """Names of facts to their names in the row."""
    wants: tuple[str, ...] = ()
    """Facts that a trainer needs; those that the log lacks are reported, and missing or null in the row."""
    takes_facts: bool = True
    """Whether the row has a place for every fact, or only for those in `slots`."""
    own_of_calls: frozenset[str] | None = None
    """Keys of its calls that no fact of a call may use; None: calls have no place for facts."""
    grouped: bool = False
    """Whether a row holds a group."""
    tables: bool = False
    """Whether its rows can be stored as Parquet, with messages, tools and calls as JSON strings."""
    tokens_only: bool = False
    """Whether a row is only ids and loss mask, made of messages too, for a trainer to take as it is; then nothing
    counts as lost."""


def reward_slots(name: str) -> dict[str, str]:
    """Every usual name of a reward, mapped to the one of a format."""
    return dict.fromkeys(REWARDS, name)


def require_training_row(sample: MakerInput) -> TrainingRow:
    """The training row of a sample; RecordError if it has none."""
    row = sample.rollout.training_row
    if row is None:
        raise RecordError("it holds no training row")
    return row


def json_list(values: NDArray[Any]) -> list[Any]:
    """A column as a JSON list, with null for NaN."""
    entries: list[Any] = values.tolist()
    if values.dtype.kind in "iub":
        return entries
    return [None if isinstance(value, float) and value != value else value for value in entries]


def loss_mask_as(row: TrainingRow, kind: type[int] | type[float]) -> list[Any]:
    """The loss mask `[T]` as ints or floats; weights other than 0 and 1 only as floats.

    RecordError when the row has no mask, or `kind` is int and it holds other weights.
    """
    weights = loss_weights(row)
    if weights is None:
        raise RecordError("it has no loss mask that fits its tokens, and none is made up")
    if kind is float:
        return list(weights.tolist())
    if not ((weights == 0) | (weights == 1)).all():
        raise RecordError("its loss mask holds weights, but the format only has trained or not")
    return list(weights.astype(np.int64).tolist())


def logprobs_with_fill(row: TrainingRow, sentinel: float | None) -> list[Any] | None:
    """The logprobs `[T]` with `sentinel` for untrained tokens that have none; None when the row has no logprobs.

    A trained token without one gets null: a number would be read as its logprob.
    """
    values = known_logprobs(row) if sentinel is not None else row.logprobs
    if values is None:
        return None
    if sentinel is not None and row.loss_mask is not None:
        values = np.where(np.isnan(values) & ~row.loss_mask, sentinel, values)
    return json_list(values)


def other_columns_of_call(turn: Turn) -> Iterator[tuple[str, list[Any]]]:
    """The (name, list) of every other per-token column of a call, without those that do not fit."""
    for column in turn.columns:
        if column.role is ColumnRole.OTHER and column.alignment is not None:
            yield column.name, json_list(column.values)


def other_columns_of_row(row: TrainingRow) -> Iterator[tuple[str, list[Any]]]:
    """The (name, list over all tokens) of every other per-token column, without those that do not fit."""
    for column in row.columns:
        if column.role is ColumnRole.OTHER and len(column.values):
            whole = column_over_tokens(row, column)
            if whole is not None:
                yield column.name, spans_by_call(whole) if column.name == WEIGHTS else json_list(whole)


def spans_by_call(versions: NDArray[Any]) -> list[Any]:
    """The weight version of each token as spans, in one list per call, as miles writes them."""
    calls: list[list[Any]] = []
    for version, start, end in versions_to_spans(versions):
        if not calls or calls[-1][-1]["abs_end"] != start:
            calls.append([])
        calls[-1].append({"version": version, "abs_start": start, "abs_end": end})
    return calls


def maker(
    name: str, *, holds: Holds, own: frozenset[str], format: str | None = None, **more: Any
) -> Callable[[Callable[..., Row]], Maker]:
    """A decorator that makes a Maker of a function, whose docstring is the title."""
    return lambda make: Maker(name, format or name, inspect.getdoc(make) or "", holds, make, own, **more)


_SAMPLE_SLOTS = {**reward_slots("reward"), "group_id": "group_index", "group": "group_index"}
_SAMPLE_KEYS = frozenset(("tokens", "loss_mask", "rollout_log_probs", "messages", "tools", "response_length"))
_CALL_KEYS = frozenset(
    (
        *("messages", "prompt_ids", "completion_ids", "logprobs", "prompt_text"),
        *("text", "finish_reason", "stop_reason", "weight_versions"),
    )
)
"""Keys of a call."""
_CONVERSATION_KEYS = ("messages", "tools", "chat_template_kwargs")


@maker(
    "rows",
    format="generic",
    holds=Holds.ROWS,
    own=frozenset((*_CONVERSATION_KEYS, "prompt_length", "token_ids", "loss_mask", "logprobs")),
    tables=True,
)
def rows(sample: MakerInput) -> Row:
    """Training rows: token_ids, loss_mask, logprobs and every other column; messages and tools"""
    row = require_training_row(sample)
    new_row: dict[str, Any] = {**sample.facts, **_conversation_columns(sample.rollout)}
    if row.prompt_length is not None:
        new_row["prompt_length"] = row.prompt_length
    new_row["token_ids"] = row.token_ids.tolist()
    weights = loss_weights(row)
    if weights is not None:
        new_row["loss_mask"] = loss_mask_as(row, int if ((weights == 0) | (weights == 1)).all() else float)
    if (scores := logprobs_with_fill(row, None)) is not None:
        new_row["logprobs"] = scores
    for name, values in other_columns_of_row(row):
        new_row.setdefault(name, values)
    return new_row


@maker(
    "calls",
    format="generic",
    holds=Holds.CALLS,
    own=frozenset((*_CONVERSATION_KEYS, "calls")),
    own_of_calls=_CALL_KEYS,
    tables=True,
)
def calls(sample: MakerInput) -> Row:
    """Calls: a list of prompt_ids, completion_ids and logprobs; messages and tools"""
    rollout = sample.rollout
    if not rollout.turns:
        raise RecordError("it holds no calls")
    entries = []
    for turn in rollout.turns:
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        call: dict[str, Any] = {}
        if turn.prompt_messages is not None:
            call["messages"] = [message.wire for message in turn.prompt_messages]
        call["prompt_ids"] = turn.prompt_ids.tolist()
        call["completion_ids"] = turn.completion_ids.tolist()
        if turn.completion_logprobs is not None:
            call["logprobs"] = json_list(turn.completion_logprobs)
        for name, values in other_columns_of_call(turn):
            call.setdefault(name, values)
        stated = {
            "prompt_text": turn.prompt_text,
            "text": turn.completion_text,
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.stop_string,
        }
        call |= {name: value for name, value in stated.items() if value is not None}
        if turn.weight_versions:
            spans = [dict(zip(("version", "start", "end"), span, strict=True)) for span in turn.weight_spans]
            call["weight_versions"] = spans or list(turn.weight_versions)
        entries.append(call)
    if sample.of_calls:
        entries = [{**own, **call} for own, call in zip(sample.of_calls, entries, strict=True)]
    return {**sample.facts, **_conversation_columns(rollout), "calls": entries}


def _conversation_columns(rollout: Rollout) -> dict[str, Any]:
    kwargs = {"chat_template_kwargs": dict(rollout.template_kwargs)} if rollout.template_kwargs else {}
    return _messages_and_tools(rollout) | kwargs


def _messages_and_tools(rollout: Rollout) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if rollout.messages:
        columns["messages"] = [message.wire for message in rollout.messages]
    if rollout.tools:
        columns["tools"] = list(rollout.tools)
    return columns


_STATUS_OF_REASON = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}
_SLIME_FIELDS = ("prompt", "response", "label", "group_index", "index", "reward", "status", "weight_versions")
"""Facts that slime has fields for; all others go into `metadata`."""


@maker(
    "atropos_group",
    holds=Holds.ROWS,
    own=frozenset(("tokens", "masks", "inference_logprobs", "messages")),
    slots=reward_slots("scores"),
    takes_facts=False,
    grouped=True,
)
def atropos_group(*samples: MakerInput) -> Row:
    """Atropos groups (ScoredDataGroup), of adjacent rows that share a group"""
    of_group = [require_training_row(sample) for sample in samples]
    new_row: dict[str, Any] = {
        "tokens": [row.token_ids.tolist() for row in of_group],
        # The token's id where it is trained, else -100.
        "masks": [
            np.where(np.array(loss_mask_as(row, int), bool), row.token_ids, -100).tolist() for row in of_group
        ],
        "scores": [sample.facts.get("scores") for sample in samples],
    }
    if any(isinstance(reward, bool) or not isinstance(reward, int | float) for reward in new_row["scores"]):
        raise RecordError(
            f"the log has no number as its reward (looked for {', '.join(REWARDS)}), and a scored group "
            "needs one for each sample; put it into the log under one of these names"
        )
    scores = [logprobs_with_fill(row, 1.0) for row in of_group]  # what Atropos writes where nothing was sampled
    if any(column is not None for column in scores):
        new_row["inference_logprobs"] = scores
    if any(sample.rollout.messages for sample in samples):
        new_row["messages"] = [[message.wire for message in sample.rollout.messages] for sample in samples]
    columns = [dict(other_columns_of_row(row)) for row in of_group]
    for name in dict.fromkeys(name for own in columns for name in own):
        new_row.setdefault(name, [own.get(name) for own in columns])
    return new_row


@maker("slime", holds=Holds.ROWS, own=_SAMPLE_KEYS, slots=_SAMPLE_SLOTS, wants=("reward",))
def slime(sample: MakerInput) -> Row:
    """slime samples as JSON"""
    row = require_training_row(sample)
    weights = loss_mask_as(row, int)
    start = row.prompt_length
    if start is None:
        if 1 not in weights:
            raise RecordError("nothing in it is trained, so where the response begins is unknown")
        start = weights.index(1)
    if 1 in weights[:start]:
        raise RecordError("tokens of its prompt are trained, but the mask of a sample covers only the response")
    facts = dict(sample.facts)
    reasons = facts.get("finish_reasons")
    last = reasons[-1] if isinstance(reasons, list) and reasons else None
    reason = facts.get("finish_reason", last)
    new_row: dict[str, Any] = {name: facts.pop(name) for name in _SLIME_FIELDS if name in facts}
    new_row["tokens"] = row.token_ids.tolist()
    new_row["response_length"] = len(weights) - start
    new_row["loss_mask"] = weights[start:]
    if (scores := logprobs_with_fill(row, 0.0)) is not None:
        if any(scores[:start]):
            raise RecordError("tokens of its prompt have logprobs, but those of a sample cover only the response")
        new_row["rollout_log_probs"] = scores[start:]
    for name, values in other_columns_of_row(row):
        outside = name != WEIGHTS and all(value is None for value in values[:start])
        new_row.setdefault(name, values[start:] if outside else values)
    if reason is not None:
        status = _STATUS_OF_REASON.get(str(reason), str(reason))  # the original reason stays in metadata
        new_row.setdefault("status", status)
    before = facts.pop("metadata", None)
    metadata = {**before, **facts} if isinstance(before, Mapping) else facts
    return {**new_row, "metadata": metadata | _messages_and_tools(sample.rollout)}


@maker("tito_sample", holds=Holds.ROWS, own=_SAMPLE_KEYS, slots=_SAMPLE_SLOTS, wants=("reward",), tables=True)
def tito_sample(sample: MakerInput) -> Row:
    """Samples of a token-in, token-out stack"""
    row = require_training_row(sample)
    facts = dict(sample.facts)
    new_row: dict[str, Any] = {name: facts.pop(name) for name in ("prompt", "response") if name in facts}
    new_row["tokens"] = row.token_ids.tolist()
    new_row["loss_mask"] = loss_mask_as(row, float)
    new_row["rollout_log_probs"] = logprobs_with_fill(row, 0.0)
    for name in ("group_index", "index", "reward", "status"):
        new_row[name] = facts.pop(name, None)
    new_row |= _messages_and_tools(sample.rollout)
    for name, values in other_columns_of_row(row):
        new_row.setdefault(name, values)
    before = facts.pop("metadata", None)
    new_row["metadata"] = {**before, **facts} if isinstance(before, Mapping) else facts
    return new_row


_ENTRY_KEYS = ("role", "content", "token_ids", "token_loss_mask", "generation_logprobs", "tool_calls", "name")
"""The keys of a message log's entry that are not columns."""


@maker(
    "nemo_rl",
    holds=Holds.ROWS,
    own=frozenset(("input_lengths", "token_ids", "token_loss_mask", "generation_logprobs")),
    slots=reward_slots("rewards"),
    wants=("rewards",),
)
def nemo_rl(sample: MakerInput) -> Row:
    """NeMo-RL training dumps, without padding"""
    row, facts = require_training_row(sample), dict(sample.facts)
    new_row: dict[str, Any] = {"idx": facts.pop("idx")} if "idx" in facts else {}
    values: dict[str, Any] = {
        "content": facts.pop("content", [message.text for message in sample.rollout.messages]),
        **facts,
        "input_lengths": len(row.token_ids),
        "token_ids": row.token_ids.tolist(),
        "token_loss_mask": loss_mask_as(row, int),
    }
    values.setdefault("sample_loss_mask", 1.0)
    if (scores := logprobs_with_fill(row, 0.0)) is not None:
        values["generation_logprobs"] = scores
    for name, column in other_columns_of_row(row):
        values.setdefault(name, column)
    return new_row | {name: [value] for name, value in values.items()}


@maker("nemo_rl_message_log", holds=Holds.ROWS, own=frozenset(("message_log", "tools")))
def message_log(sample: MakerInput) -> Row:
    """NeMo-RL message logs, alternating trained and other tokens"""
    row = require_training_row(sample)
    weights, scores = loss_mask_as(row, int), logprobs_with_fill(row, 0.0)
    columns = {name: values for name, values in other_columns_of_row(row) if name not in (*_ENTRY_KEYS, WEIGHTS)}
    edges = {edge for run in trained_runs(np.array(weights, np.bool_)) for edge in run}
    log = []
    for start, end in pairwise(sorted({0, len(weights), *edges})):
        entry: dict[str, Any] = {"role": "assistant" if weights[start] else "user", "content": ""}
        entry["token_ids"] = row.token_ids[start:end].tolist()
        entry["token_loss_mask"] = weights[start:end]
        if scores is not None and (weights[start] or any(scores[start:end])):
            entry["generation_logprobs"] = scores[start:end]
        entry |= {name: values[start:end] for name, values in columns.items()}
        log.append(entry)
    new_row: dict[str, Any] = {**sample.facts, "message_log": log}
    if sample.rollout.tools:
        new_row["tools"] = list(sample.rollout.tools)
    return new_row


@maker(
    "nemo_gym",
    holds=Holds.CALLS,
    own=frozenset(("responses_create_params", "response")),
    slots=reward_slots("reward"),
    wants=("reward",),
)
def nemo_gym(sample: MakerInput) -> Row:
    """NeMo-Gym rollouts"""
    rollout, facts = sample.rollout, dict(sample.facts)
    if not rollout.turns:
        raise RecordError("it holds no calls")
    # Messages before the first call's answer are the input; the rest is the output, with each call's tokens.
    turns = {turn.message_index: turn for turn in rollout.turns if turn.message_index is not None}
    if len(turns) < len(rollout.turns) or list(turns) != sorted(turns):
        raise RecordError("which messages its calls wrote is unknown, and the tokens belong on those messages")
    first = min(turns)
    before = [item for message in rollout.messages[:first] for item in _response_items(message, None)]
    output = [
        item
        for at, message in enumerate(rollout.messages[first:], first)
        for item in _response_items(message, turns.get(at))
    ]
    params: dict[str, Any] = {"input": before}
    if rollout.tools:
        functions = [tool.get("function") for tool in rollout.tools]
        params["tools"] = [
            {"type": "function", **function, "strict": None} if isinstance(function, Mapping) else tool
            for tool, function in zip(rollout.tools, functions, strict=True)
        ]
    response: dict[str, Any] = {"object": "response"}
    if isinstance(facts.get("model"), str):
        response["model"] = facts.pop("model")
    response["output"] = output
    return {"responses_create_params": params, "response": response, **facts}


def _response_items(message: Message, turn: Turn | None) -> Iterator[Mapping[str, Any]]:
    if message.role == "tool":
        yield {
            "type": "function_call_output",
            "call_id": message.wire.get("tool_call_id"),
            "output": message.wire.get("content"),
        }
        return
    if message.role != "assistant":
        yield {"type": "message", "role": message.role, "content": message.wire.get("content")}
        return
    items: list[dict[str, Any]] = []
    if message.reasoning is not None:
        items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": message.reasoning}]})
    if message.text or not (message.tool_calls or message.reasoning):
        part = {"type": "output_text", "text": message.text, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in message.tool_calls:
        arguments = call.arguments
        if not isinstance(arguments, str | None):
            arguments = orjson.dumps(arguments).decode()
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments})
    if turn is not None:
        # The token fields that NeMo-Gym puts on the last item of a call; all three or none.
        if turn.completion_logprobs is None:
            raise RecordError(
                "a call has no logprobs, and the token fields of an item come together or not at all"
            )
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        fields: dict[str, Any] = {
            "prompt_token_ids": turn.prompt_ids.tolist(),
            "generation_token_ids": turn.completion_ids.tolist(),
            "generation_log_probs": json_list(turn.completion_logprobs),
        }
        for name, values in other_columns_of_call(turn):
            fields.setdefault(name, values)
        items[-1] |= fields
    yield from items


def _sft_row(mask: str, sample: MakerInput) -> Row:
    row = require_training_row(sample)
    weights = loss_mask_as(row, int)
    ids = row.token_ids.tolist()
    if mask == "labels":
        weights = [token_id if weight else -100 for token_id, weight in zip(ids, weights, strict=True)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), mask: weights}


_SFT = [
    Maker(
        name=name,
        format="generic",
        title=f"A set for SFT as trainers load it: input_ids, attention_mask, {mask}; from messages too",
        holds=Holds.ROWS,
        make=partial(_sft_row, mask),
        own=frozenset(("input_ids", "attention_mask", mask)),
        takes_facts=False,
        tables=True,
        tokens_only=True,
    )
    for name, mask in (
        ("sft", "labels"),
        ("sft_assistant_masks", "assistant_masks"),
        ("sft_completion_mask", "completion_mask"),
    )
]
"""Columns as trainers read them: huggingface/trl `trl/trainer/sft_trainer.py` (`_prepare_dataset` uses `labels` as
they are and folds masks into them), axolotl-ai-cloud/axolotl `src/axolotl/utils/data/wrappers.py`
(`_is_dataset_already_tokenized` asks for these three), hiyouga/LLaMA-Factory `src/llamafactory/data/loader.py`
(`tokenized_path`).
"""


MAKERS: tuple[Maker, ...] = (
    *(calls, rows, tito_sample, slime, atropos_group, nemo_rl, message_log, nemo_gym),
    *_SFT,
)
"""Every form, in the order in which they are listed."""


def all_makers() -> dict[str, tuple[Format, Maker]]:
    """Every maker by its name for `--to`, with the format that reads its rows."""
    return {maker.name: (form, maker) for form in all_formats() for maker in makers_of(form)}


def makers_of(form: Format) -> tuple[Maker, ...]:
    """The makers of a format's rows; () when they cannot be made."""
    return tuple(maker for maker in MAKERS if maker.format == form.name)


def maker_named(name: str) -> tuple[Format, Maker]:
    """The format and the maker of that name; SetupError with the known names when there is none."""
    makers = all_makers()
    if name in makers:
        return makers[name]
    form = next((form for form in all_formats() if form.name == name), None)
    if form is None:
        raise unknown_name("form", name, makers, flag="--to")
    if makers_of(form):
        why = f"choose one of its forms: {' or '.join(maker.name for maker in makers_of(form))}."
    else:
        why = f"{form.title} can be read and repaired, but not made: they hold what only their own writer knows."
    raise SetupError(f"--to {name}: {why}\nForms that can be made: {', '.join(makers)}.")
