"""The forms of training rows, ten alone and two beside their calls: how they are written and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .conventions import Observed
from .source import Chat, Turn

__all__ = ["FORMS", "Columns", "Form", "Sample", "read_rows", "write_rows"]

Json = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One sample as it is to be written."""

    chat: Chat
    seen: Observed
    right: Observed
    """The columns without their fault."""
    messages: bool
    turn: int = 0
    """The answer that slid, or the first of those."""
    reasons: str = ""
    """`list`, `last` or nothing: how the row says why turns ended."""


@dataclass(frozen=True)
class Columns:
    """One sample as it stands in a file: over all its tokens, untrained and None where columns do not reach."""

    ids: list[int]
    mask: list[bool]
    values: list[float | None]


@dataclass(frozen=True)
class Form:
    """One way to write training rows."""

    name: str
    fill: float | None
    write: Callable[[Sequence[Sample], float | None], Json]
    read: Callable[[Json], list[Columns]]
    response: bool = False
    """Whether columns begin at the first response token."""
    group: int = 1
    """The most samples of a row."""
    tools: bool = False
    """Whether a row can state its tools."""
    calls: bool = False
    """Whether the row carries its calls."""
    padded: bool = False
    suffix: str = ".jsonl"


def _values(sample: Sample, fill: float | None, low: int = 0) -> list[float | None]:
    return [fill if value is None else value for value in sample.seen.values[low:]]


def _mask(sample: Sample, low: int = 0) -> list[int]:
    return [int(on) for on in sample.seen.mask[low:]]


def _conversation(sample: Sample) -> Json:
    """Messages, tools and finish reasons."""
    chat, row = sample.chat, {}
    if sample.messages:
        row["messages"] = chat.messages
        if chat.tools is not None:
            row["tools"] = chat.tools
    if sample.reasons == "list":
        row["finish_reasons"] = [turn.reason for turn in chat.turns]
    elif sample.reasons == "last":
        row["finish_reason"] = chat.turns[-1].reason
    return row


def _padded(value: list[Any], low: int, fill: Any) -> list[Any]:
    return [fill] * low + list(value)


def _flat(samples: Sequence[Sample], fill: float | None) -> Json:
    (sample,) = samples
    columns = {"token_ids": sample.chat.ids, "loss_mask": _mask(sample), "logprobs": _values(sample, fill)}
    return {"id": sample.chat.name, **_conversation(sample), **columns}


def _read_flat(row: Json) -> list[Columns]:
    return [Columns(row["token_ids"], [bool(on) for on in row["loss_mask"]], row["logprobs"])]


def _beside_calls(samples: Sequence[Sample], fill: float | None) -> Json:
    """The row with every call: what it was given, what it sampled, and how probable that was."""
    row, (sample,) = _flat(samples, fill), samples
    return {**row, "calls": [_call(sample.chat, turn, "generation_token_ids") for turn in sample.chat.turns]}


def _beside_turns(samples: Sequence[Sample], fill: float | None) -> Json:
    row, (sample,) = _flat(samples, fill), samples
    return {**row, "turns": [_call(sample.chat, turn, "completion_ids") for turn in sample.chat.turns]}


def _call(chat: Chat, turn: Turn, name: str) -> Json:
    start = next(at for at in range(turn.start, turn.end) if chat.truth[at] is not None)
    return {
        "prompt_token_ids": chat.ids[:start],
        name: chat.ids[start : turn.end],
        "logprobs": chat.truth[start : turn.end],
        "finish_reason": turn.reason,
    }


def _labels(samples: Sequence[Sample], fill: float | None) -> Json:
    row: Json = {
        "tokens": [sample.chat.ids for sample in samples],
        "masks": [
            [token if on else -100 for token, on in zip(sample.chat.ids, sample.seen.mask, strict=True)]
            for sample in samples
        ],
        "scores": [float(number % 2) for number in range(len(samples))],
        "inference_logprobs": [_values(sample, fill) for sample in samples],
    }
    if samples[0].messages:
        row["messages"] = [sample.chat.messages for sample in samples]
    return row


def _read_labels(row: Json) -> list[Columns]:
    read = []
    for ids, labels, values in zip(row["tokens"], row["masks"], row["inference_logprobs"], strict=True):
        assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
        read.append(Columns(ids, [label != -100 for label in labels], values))
    return read


def _nemo_rl(samples: Sequence[Sample], fill: float | None) -> Json:
    (sample,) = samples
    chat, behind = sample.chat, len(sample.chat.name) % 4
    texts = [message["content"] or "" for message in chat.messages]
    return {
        "content": [texts],
        "rewards": [1.0],
        "input_lengths": [len(chat.ids)],
        "token_ids": [chat.ids + [chat.model.pad] * behind],
        "token_loss_mask": [_mask(sample) + [0] * behind],
        "sample_loss_mask": [1.0],
        "generation_logprobs": [_values(sample, fill) + [fill] * behind],
        "idx": 0,
    }


def _read_nemo_rl(row: Json) -> list[Columns]:
    size = row["input_lengths"][0]
    mask, values = row["token_loss_mask"][0][:size], row["generation_logprobs"][0][:size]
    return [Columns(row["token_ids"][0][:size], [bool(on) for on in mask], values)]


def _slime(samples: Sequence[Sample], fill: float | None) -> Json:
    (sample,) = samples
    chat, low = sample.chat, sample.chat.prompt
    row: Json = {
        "tokens": chat.ids,
        "response_length": len(chat.ids) - low,
        "loss_mask": _mask(sample, low),
        "rollout_log_probs": _values(sample, fill, low),
        "reward": 1.0,
    }
    if sample.reasons:
        row["status"] = "truncated" if chat.turns[-1].reason == "length" else "completed"
    if sample.messages:
        row["metadata"] = {"messages": chat.messages, **({"tools": chat.tools} if chat.tools else {})}
    return row


def _read_slime(row: Json) -> list[Columns]:
    low = len(row["tokens"]) - row["response_length"]
    mask, values = row["loss_mask"], row["rollout_log_probs"]
    return [Columns(row["tokens"], _padded([bool(on) for on in mask], low, False), _padded(values, low, None))]


def _verl(samples: Sequence[Sample], fill: float | None) -> Json:
    width = max(sample.chat.prompt for sample in samples)
    long = max(len(sample.chat.ids) - sample.chat.prompt for sample in samples)
    rows = [_verl_sample(sample, fill, width, long) for sample in samples]
    if len(rows) == 1 and len(samples[0].chat.name) % 2:
        return rows[0]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _verl_sample(sample: Sample, fill: float | None, width: int, long: int) -> Json:
    chat, low = sample.chat, sample.chat.prompt
    ahead, behind = width - low, long - (len(chat.ids) - low)
    pad = chat.model.pad
    seen = [0] * ahead + [1] * len(chat.ids) + [0] * behind
    row: Json = {
        "prompts": [pad] * ahead + chat.ids[:low],
        "responses": chat.ids[low:] + [pad] * behind,
        "input_ids": [pad] * ahead + chat.ids + [pad] * behind,
        "attention_mask": seen,
        "response_mask": _mask(sample, low) + [0] * behind,
        "rollout_log_probs": _values(sample, fill, low) + [fill] * behind,
    }
    return {**row, "messages": chat.messages} if sample.messages else row


def _read_verl(row: Json) -> list[Columns]:
    if not isinstance(row["responses"][0], list):
        row = {name: [value] for name, value in row.items()}
    return [_verl_columns({name: row[name][at] for name in _VERL}) for at in range(len(row["prompts"]))]


_VERL = ("prompts", "responses", "input_ids", "attention_mask", "response_mask", "rollout_log_probs")


def _verl_columns(row: Json) -> Columns:
    ids = row["prompts"] + row["responses"]
    assert row["input_ids"] == ids
    width, seen = len(row["prompts"]), row["attention_mask"]
    mask, values = _padded(row["response_mask"], width, 0), _padded(row["rollout_log_probs"], width, None)
    real = [at for at, on in enumerate(seen) if on]
    assert not any(on and not here for on, here in zip(mask, seen, strict=True)), "padding is trained"
    return Columns([ids[at] for at in real], [bool(mask[at]) for at in real], [values[at] for at in real])


def _trl(samples: Sequence[Sample], fill: float | None) -> Json:
    row: Json = {
        "prompt_ids": [sample.chat.ids[: sample.chat.prompt] for sample in samples],
        "completion_ids": [sample.chat.ids[sample.chat.prompt :] for sample in samples],
        "env_mask": [_mask(sample, sample.chat.prompt) for sample in samples],
        "logprobs": [_values(sample, fill, sample.chat.prompt) for sample in samples],
    }
    if samples[0].messages:
        row["messages"] = [sample.chat.messages for sample in samples]
    if len(samples) > 1 or len(samples[0].chat.name) % 2:
        return row
    row["completion_mask"] = row.pop("env_mask")
    return {name: value[0] for name, value in row.items()}


def _read_trl(row: Json) -> list[Columns]:
    name = "env_mask" if "env_mask" in row else "completion_mask"
    columns = [row["prompt_ids"], row["completion_ids"], row[name], row["logprobs"]]
    if name == "completion_mask":
        columns = [[column] for column in columns]
    read = []
    for prompt, completion, mask, values in zip(*columns, strict=True):
        low = len(prompt)
        read.append(
            Columns(
                prompt + completion, _padded([bool(on) for on in mask], low, False), _padded(values, low, None)
            )
        )
    return read


def _packed(samples: Sequence[Sample], fill: float | None) -> Json:
    return {
        "token_ids": [token for sample in samples for token in sample.chat.ids],
        "loss_mask": [on for sample in samples for on in _mask(sample)],
        "logprobs": [value for sample in samples for value in _values(sample, fill)],
        "position_ids": [at for sample in samples for at in range(len(sample.chat.ids))],
    }


def _read_packed(row: Json) -> list[Columns]:
    (whole,) = _read_flat(row)
    cuts = [at for at, position in enumerate(row["position_ids"]) if position == 0] + [len(whole.ids)]
    spans = [slice(start, end) for start, end in pairwise(cuts)]
    return [Columns(whole.ids[span], whole.mask[span], whole.values[span]) for span in spans]


FORMS = {
    form.name: form
    for form in (
        Form("zero", 0.0, _flat, _read_flat, tools=True),
        Form("null", None, _flat, _read_flat, tools=True),
        Form("nan", math.nan, _flat, _read_flat, tools=True),
        Form("one", 1.0, _flat, _read_flat, tools=True),
        Form("labels", 1.0, _labels, _read_labels, group=3),
        Form("nemo_rl", 0.0, _nemo_rl, _read_nemo_rl, padded=True),
        Form("slime", 0.0, _slime, _read_slime, response=True, tools=True),
        Form("verl", 0.0, _verl, _read_verl, response=True, group=3),
        Form("trl", 0.0, _trl, _read_trl, response=True, group=3),
        Form("packed", 0.0, _packed, _read_packed, group=4),
        Form("calls", 0.0, _beside_calls, _read_flat, tools=True, calls=True),
        Form("turns", None, _beside_turns, _read_flat, tools=True, calls=True),
    )
}


def write_rows(path: Path, rows: Sequence[Json]) -> None:
    """A file of JSON lines, or a table."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = dict.fromkeys(name for row in rows for name in row if name not in ("messages", "tools"))
        records = [{name: row.get(name) for name in names} for row in rows]
        texts = {name: [json.dumps(row.get(name)) for row in rows] for name in ("messages", "tools")}
        table = pa.Table.from_pylist(records)
        for name, column in texts.items():
            table = table.append_column(name, pa.array(column))
        pq.write_table(table, path)
        return
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Json]:
    """The rows of a file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
