"""Columns that stand beside tokens, as each framework writes them: experts, kept sets, credit, weight versions.

A case is one row: a writer, a column in one of its conventions, and a fault or none. What is right to say of it is
known when it is drawn, by the frameworks' own words:

THUDM/slime and radixark/miles `utils/types.py` (experts of all tokens but the last; sets over the response),
volcengine/verl `agent_loop.py` (experts over the padded sequence, zeros around them), NovaSky-AI/SkyRL
`train/dataset/preprocess.py` (rows end with the last call; what was appended has none) and `generators/base.py`
(rewards by token), PrimeIntellect-ai/prime-rl `orchestrator/trajectories.py` (a row for each token, zeros behind),
PrimeIntellect-ai/verifiers `v1/graph.py` (the last row twice), NVIDIA-NeMo/RL `experience/rollouts.py` (-1, or
0..k-1, where no call ran), `utils/routed_experts_codec.py`, inclusionAI/AReaL `engine/sglang_remote.py` (a token's
layers in one list), vllm-project/vllm `outputs.py` (prompts apart), huggingface/trl `grpo_trainer.py` (one
advantage for each sample), sgl-project/sglang (base64 without a shape; spans of weight versions).
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.tables import stored

from .forms import read_rows, write_rows
from .judge import Outcome, Violation
from .source import Chat, chat_of
from .tool import Finding, repair, scan

__all__ = ["WRITERS", "Case", "cases", "run_beside"]

Json = dict[str, Any]
LONGEST = 600
"""Tokens of the longest row: experts take some dozen numbers for each."""
WIDE = "REC001,REC013,REC014,REC015"
CODES = ("REC001", "REC013", "REC014", "REC015", "REC016", "REC008")


@dataclass(frozen=True)
class Case:
    """A row with what stands beside its tokens, and what is right to say of it."""

    writer: str
    about: str
    row: Json
    code: str = ""
    """The rule that has to find the fault; nothing if the row is right, or some way to write it is."""
    severity: str = "error"
    item: int = 0
    suffix: str = ".jsonl"
    may: str = ""
    """A rule that may say something beside it."""
    again: str = ""
    """What a repair mends: a `slide` of logprobs leaves the columns as they are, after a `drift` they are gone."""
    names: tuple[str, ...] = ()
    """The columns beside."""


# How writers write rows. `more` is what stands beside: lists over all tokens, or values as they are.


@dataclass(frozen=True)
class Writer:
    """A framework's rows."""

    name: str
    write: Callable[[Chat, Json, random.Random], Json]
    experts: str = "routed_experts"
    forms: Sequence[str] = ("nested",)
    rows: Sequence[str] = ("fed",)
    """Which tokens have experts: all that were `fed`, `all` (the last has zeros, or those before it again),
    `called`: those that a call saw."""
    sets: Sequence[str] = ()
    credit: Sequence[str] = ()
    spans: Sequence[str] = ()
    many: int = 1
    """Samples of a row."""
    call: bool = False
    """Whether it writes the last call alone."""
    slides: str = ""
    """The column of logprobs that a slide moves, in a row that a repair can mend."""


def _low(chat: Chat) -> int:
    return chat.prompt


def _mask(chat: Chat) -> list[int]:
    return [int(value is not None) for value in chat.truth]


def _probs(chat: Chat, fill: float | None) -> list[float | None]:
    return [fill if value is None else value for value in chat.truth]


def _tail(more: Json, chat: Chat) -> Json:
    """What stands beside a response: of lists over all tokens their end."""
    size = len(chat.ids)
    return {
        name: value[chat.prompt :] if isinstance(value, list) and len(value) == size and _plain(value) else value
        for name, value in more.items()
    }


def _plain(value: list[Any]) -> bool:
    return not any(isinstance(entry, list | dict) for entry in value)


def _flat(chat: Chat, more: Json, dice: random.Random) -> Json:
    return {"token_ids": chat.ids, "loss_mask": _mask(chat), "logprobs": _probs(chat, None), **more}


def _sample(chat: Chat, more: Json, dice: random.Random) -> Json:
    low = _low(chat)
    columns = {"loss_mask": _mask(chat)[low:], "rollout_log_probs": _probs(chat, 0.0)[low:]}
    row = {"tokens": chat.ids, "response_length": len(chat.ids) - low, "reward": 1.0, "status": "completed"}
    return {**row, **columns, **_tail(more, chat)}


def _verl(chat: Chat, more: Json, dice: random.Random) -> Json:
    low, ahead, behind = _low(chat), dice.choice((0, 1, 5)), dice.choice((0, 1, 6))
    pad = chat.model.pad
    row: Json = {
        "prompts": [pad] * ahead + chat.ids[:low],
        "responses": chat.ids[low:] + [pad] * behind,
        "attention_mask": [0] * ahead + [1] * len(chat.ids) + [0] * behind,
        "response_mask": _mask(chat)[low:] + [0] * behind,
        "rollout_log_probs": _probs(chat, 0.0)[low:] + [0.0] * behind,
    }
    width = ahead + len(chat.ids) + behind
    for name, value in _tail(more, chat).items():
        if isinstance(value, np.ndarray):  # zeros around them, as wide as all ids
            zeros = np.zeros((width, *value.shape[1:]), value.dtype)
            zeros[ahead : ahead + len(value)] = value[: width - ahead]
            row[name] = zeros.tolist()
        else:
            row[name] = value + [0.0] * behind if isinstance(value, list) else value
    return row


def _verl_batch(chat: Chat, more: Json, dice: random.Random) -> Json:
    seed = dice.random()
    right = _verl(chat, more.pop("right", {}), random.Random(seed))
    row = _verl(chat, more, random.Random(seed))
    return {name: [right.get(name, value), value] for name, value in row.items()}


def _agent(chat: Chat, more: Json, dice: random.Random) -> Json:
    low = _low(chat)
    columns = {"response_mask": _mask(chat)[low:], "response_logprobs": _probs(chat, 0.0)[low:]}
    return {"prompt_ids": chat.ids[:low], "response_ids": chat.ids[low:], **columns, **_tail(more, chat)}


def _skyrl(chat: Chat, more: Json, dice: random.Random) -> Json:
    low = _low(chat)
    row = {
        "prompt_token_ids": chat.ids[:low],
        "response_ids": chat.ids[low:],
        "loss_masks": _mask(chat)[low:],
        "rollout_logprobs": _probs(chat, 0.0)[low:],
        "stop_reasons": "stop",
        "rewards": 1.0,
    }
    right = {**row, **_tail(more.pop("right", {}), chat)}
    row = {**row, **_tail(more, chat)}
    return {**{name: [right.get(name, value), value] for name, value in row.items()}, "rollout_metrics": {}}


def _prime(chat: Chat, more: Json, dice: random.Random) -> Json:
    size = len(chat.ids)
    row = {"token_ids": chat.ids, "mask": [bool(on) for on in _mask(chat)], "logprobs": _probs(chat, 0.0)}
    return {**row, "temperatures": [1.0] * size, "env_name": "e", "advantages": [0.25] * size, **more}


def _nemo(chat: Chat, more: Json, dice: random.Random) -> Json:
    behind, size = dice.choice((0, 1, 7)), len(chat.ids)
    row: Json = {
        "content": ["a", "b"],
        "rewards": 1.0,
        "input_lengths": size,
        "token_ids": chat.ids + [chat.model.pad] * behind,
        "token_loss_mask": _mask(chat) + [0] * behind,
        "sample_loss_mask": 1.0,
        "generation_logprobs": _probs(chat, 0.0) + [0.0] * behind,
    }
    for name, value in more.items():
        if isinstance(value, np.ndarray):
            row[name] = np.pad(value, ((0, behind), (0, 0), (0, 0))).tolist()
        else:
            row[name] = value + [0.0] * behind if isinstance(value, list) and len(value) == size else value
    return {**{name: [value] for name, value in row.items()}, "idx": 0}


def _log(chat: Chat, more: Json, dice: random.Random) -> Json:
    """Messages with their slices; what was given between two calls is a message too."""
    cuts = [0, *(at for turn in chat.turns for at in (turn.start, turn.end)), len(chat.ids)]
    messages: list[Json] = []
    for start, end in pairwise(cuts):
        if start == end:
            continue
        sampled = any(turn.start == start for turn in chat.turns)
        message: Json = {
            "role": "assistant" if sampled else "user",
            "content": "",
            "token_ids": chat.ids[start:end],
            "token_loss_mask": [int(sampled)] * (end - start),
        }
        if sampled:
            message["generation_logprobs"] = _probs(chat, 0.0)[start:end]
        for name, value in more.items():
            message[name] = value[start:end].tolist() if isinstance(value, np.ndarray) else value
        messages.append(message)
    return {"message_log": messages}


def _areal(chat: Chat, more: Json, dice: random.Random) -> Json:
    behind = dice.choice((0, 1, 7))
    row: Json = {
        "input_ids": chat.ids + [0] * behind,
        "loss_mask": _mask(chat) + [0] * behind,
        "logprobs": _probs(chat, 0.0) + [0.0] * behind,
        "versions": [3 if on else -1 for on in _mask(chat)] + [0] * behind,
        "attention_mask": [1] * len(chat.ids) + [0] * behind,
        "rewards": 1.0,
    }
    for name, value in more.items():
        row[name] = value + [0.0] * behind if isinstance(value, list) and len(value) == len(chat.ids) else value
    return {name: [value] for name, value in row.items()}


def _trl(chat: Chat, more: Json, dice: random.Random) -> Json:
    low, ahead, behind = _low(chat), dice.choice((0, 3)), dice.choice((0, 4))
    row = {
        "prompt_ids": [0] * ahead + chat.ids[:low],
        "prompt_mask": [0] * ahead + [1] * low,
        "completion_ids": chat.ids[low:] + [0] * behind,
        "completion_mask": [1] * (len(chat.ids) - low) + [0] * behind,
        "tool_mask": _mask(chat)[low:] + [1] * behind,
        "sampling_per_token_logps": _probs(chat, 0.0)[low:] + [0.0] * behind,
        **more,
    }
    return {name: [value] for name, value in row.items()}


def _group(chat: Chat, more: Json, dice: random.Random) -> Json:
    masks = [token if on else -100 for token, on in zip(chat.ids, _mask(chat), strict=True)]
    row = {"tokens": chat.ids, "masks": masks, "inference_logprobs": _probs(chat, 1.0), "scores": 1.0}
    return {name: [more.get("right", {}).get(name), value] for name, value in more.items() if name != "right"} | {
        name: [value, value] for name, value in row.items()
    }


def _call(chat: Chat) -> tuple[list[int], list[int], list[float | None]]:
    turn = chat.turns[-1]
    return chat.ids[: turn.start], chat.ids[turn.start : turn.end], chat.truth[turn.start : turn.end]


def _sglang(chat: Chat, more: Json, dice: random.Random) -> Json:
    prompt, ids, values = _call(chat)
    scores = [[value, token, None] for value, token in zip(values, ids, strict=True)]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": scores, **more}
    return {"request": {"input_ids": prompt}, "response": {"text": "a", "output_ids": ids, "meta_info": meta}}


def _vllm(chat: Chat, more: Json, dice: random.Random) -> Json:
    prompt, ids, values = _call(chat)
    scores = [{"token": "a", "logprob": value, "top_logprobs": []} for value in values]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": scores}}
    choice["message"] = {"role": "assistant", "content": "a"}
    answer = {
        "object": "chat.completion",
        "model": "m",
        "prompt_token_ids": prompt,
        "choices": [{**choice, **more}],
    }
    return {"request": {"messages": [{"role": "user", "content": f"b {dice.random()}"}]}, "response": answer}


def _areal_call(chat: Chat, more: Json, dice: random.Random) -> Json:
    prompt, ids, values = _call(chat)
    row = {"input_tokens": prompt, "output_tokens": ids, "output_logprobs": values}
    return {**row, "output_versions": [3] * len(ids), "stop_reason": "stop", **more}


def _one_call(chat: Chat, more: Json, dice: random.Random) -> Json:
    prompt, ids, values = _call(chat)
    return {"calls": [{"prompt_ids": prompt, "completion_ids": ids, "logprobs": values, **more}]}


def _gym(chat: Chat, more: Json, dice: random.Random) -> Json:
    prompt, ids, values = _call(chat)
    tokens = {"prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": values}
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    request = {"input": [{"role": "user", "content": "b"}]}
    return {
        "responses_create_params": request,
        "response": {"output": [{**item, **tokens, **more}]},
        "reward": 1.0,
    }


_BY_TOKEN = ("whole", "inside", "everywhere", "number", "absent outside", "one zero outside")
_WRITES = {
    **{"flat": _flat, "slime": _sample, "verl": _verl, "verl batch": _verl_batch, "agent loop": _agent},
    **{"skyrl": _skyrl, "prime-rl": _prime, "nemo-rl": _nemo, "message log": _log, "areal": _areal, "trl": _trl},
    **{"atropos": _group, "sglang": _sglang, "vllm": _vllm, "areal call": _areal_call, "call": _one_call},
    "gym": _gym,
}
WRITERS = {name: Writer(name, _WRITES[name], **more) for name, more in stored(__file__, "WRITERS").items()}


# Experts

EXPERT_FAULTS = ("", "null", "short", "front", "other", "twice", "range", "below", "empty", "repeated", "bytes")


def _experts(writer: Writer, chat: Chat, dice: random.Random, fault: str) -> Iterator[Case]:
    form, rows = dice.choice(writer.forms), dice.choice(writer.rows)
    if not writer.experts or (rows == "holes" and writer.name != "nemo-rl" and form != "array"):
        return
    start, end = (0, len(chat.ids)) if not writer.call else (0, chat.turns[-1].end)
    ids = chat.ids[:end]
    count, layers, k = dice.choice((8, 64, 200)), dice.choice((1, 3, 8)), dice.choice((1, 2, 4))
    if form == "table":
        layers = dice.choice((1, 3))
    values = _routes(ids, count, layers, k, dice)
    dense = dice.random() < 0.3 and layers > 1 and fault not in ("empty", "repeated")
    if dense:
        values[:, 0] = 0  # a layer without experts
    fed, first, last = len(ids) - 1, chat.turns[-1].start if writer.call else chat.prompt, chat.turns[-1].end - 1
    more: Json = {}
    routes = values[:fed]
    if rows == "all":
        behind = dice.choice((np.zeros_like(values[:1]), values[fed - 1 : fed]))
        routes = np.concatenate([routes, behind])
    elif rows == "called":  # what was appended to the last answer was in no call
        routes = values[:last]
    elif rows == "response":
        routes = values[first:fed]
    elif rows == "from":
        start = dice.randrange(1, first)
        routes = values[start:fed]
        if form != "packed":
            more["routed_experts_start_len"] = start
    elif rows == "holes":  # tokens of environments ran in no call
        hole = np.full_like(values[:1], -1) if dice.random() < 0.5 else _default(values[:1])
        unsampled = np.array([value is None for value in chat.truth[: len(ids)]])
        unsampled[:first] = False
        routes = np.where(unsampled[:, None, None], hole, values)
        routes[-1] = hole
    allowed = {fed, fed + 1} if rows == "from" else {len(ids), fed, len(ids) - first, fed - first}
    columns: Json
    if fault == "null":
        nothing = dice.choice((None, [], ""))
        yield Case(writer.name, f"{nothing!r}; null", writer.write(chat, {writer.experts: nothing}, dice))
        return
    size, severity, about, wrong = len(routes), "error", fault, True
    # Only its sampled tokens need experts: what stands behind the last of them may have none.
    allowed = {count - start for count in allowed} if rows == "from" else allowed | set(range(last, len(ids)))
    if fault in ("short", "front", "other"):
        if writer.name in ("verl", "verl batch", "nemo-rl", "message log"):  # the tensor is as wide as the row
            return
        by = dice.choice((1, 2, 3, 7)) if fault != "other" else -dice.choice((1, 2, 5, 30))
        routes = (
            routes[by:]
            if fault == "front"
            else routes[: size - by]
            if by > 0
            else np.concatenate([routes, routes[by:]])
        )
        flat = form == "bare" and any(len(routes) * layers * k % rows == 0 for rows in allowed if rows)
        if not len(routes):
            return
        wrong = len(routes) not in allowed and not flat
        if not (routes[0].any() and routes[-1].any()):  # a row may be no more than padding
            return
    elif fault == "twice":
        if k == 1 or form in ("layers", "bare"):
            return
        routes = routes.copy()
        at = dice.randrange(len(routes))
        routes[at, -1, 0] = routes[at, -1, 1] = max(1, int(routes[at, -1, 1]))
        if (routes[at, -1] < 0).any():
            return
    elif fault in ("range", "below"):
        if fault == "range" and writer.name == "message log":  # a message does not state how many there are
            return
        routes = routes.astype(np.int32)
        routes[dice.randrange(len(routes)), -1, 0] = count if fault == "range" else -2
        if fault == "range":
            more["num_experts"] = count
    elif fault in ("empty", "repeated"):
        severity = "warning"
        place = _sampled_run(chat, start, 10)
        if place is None or k == 1 or layers * k < 8 or form in ("layers", "bare") or rows == "response":
            return
        if dice.random() < 0.5 and fault == "empty":
            place = place[:1]
        routes = routes.copy()
        at = np.array(place) - start
        if at[0] < 0 or at[-1] >= len(values[:fed]) - start or at[-1] >= len(routes):
            return
        routes[at] = 0 if fault == "empty" else _routes([1], count, layers, k, dice)
        if fault == "repeated" and len({ids[i] for i in place}) < 8:
            return
    value, more2 = _form(routes, form, start if rows == "from" else 0, dice)
    if fault == "bytes":
        if form != "packed":
            return
        value["shape"][0] += dice.choice((-1, 1, 3))
    suffix = ".parquet" if form == "table" else ".jsonl"
    if fault in ("range", "below") and form in ("packed", "envelope"):
        value, more2 = _form(routes.astype(np.int32), form, start if rows == "from" else 0, dice, "int32")
    code = "REC013" if fault and wrong else ""
    if fault == "range":
        wrong = True
    name = f"{form}, {rows}, {layers} x {k} of {count}{', dense' if dense else ''}; {about or 'right'}"
    if fault in ("short", "front", "other"):
        name += f" {len(routes)} for {len(ids)}"
    columns = {writer.experts: value, **more, **more2}
    if writer.many > 1:
        right, _ = _form(values[:fed], form, 0, dice)
        columns["right"] = {writer.experts: right}
    yield Case(
        writer.name,
        name,
        writer.write(chat, columns, dice),
        code,
        severity,
        writer.many - 1,
        suffix,
        names=(writer.experts,),
    )


def _routes(ids: Sequence[int], count: int, layers: int, k: int, dice: random.Random) -> np.ndarray:
    """`[N, layers, k]`; a token often has the experts that it had before."""
    draw = np.random.default_rng(dice.randrange(1 << 30))
    # Steps around the circle of experts, in all less than once around it: no expert is drawn twice.
    steps = draw.integers(1, count // k + 1, (len(ids), layers, k))
    fresh = draw.permuted((draw.integers(count, size=(len(ids), layers, 1)) + steps.cumsum(-1)) % count, axis=-1)
    anew, seen = draw.random(len(ids)) < 0.5, {}
    for at, token in enumerate(ids):
        if token not in seen or anew[at]:
            seen[token] = at
        fresh[at] = fresh[seen[token]]
    return fresh.astype(np.int16)


def _default(like: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(like.shape[2], dtype=like.dtype), like.shape)


def _sampled_run(chat: Chat, start: int, size: int) -> list[int] | None:
    """So many tokens of the last answer that are in a row."""
    turn = chat.turns[-1]
    at = max(turn.start, start) + 2
    return list(range(at, at + size)) if at + size < turn.end - 1 else None


def _form(
    values: np.ndarray, form: str, start: int, dice: random.Random, dtype: str = "int16"
) -> tuple[Any, Json]:
    """The experts as they are written, and what else the row says of them."""
    if form in ("nested", "table"):
        return values.tolist(), {}
    if form == "array":
        return values, {}
    if form == "layers":
        return values.reshape(len(values), -1).tolist(), {}
    if form == "bare":
        return base64.b64encode(values.astype("<i4").tobytes()).decode(), {}
    if form == "npy":
        file = io.BytesIO()
        np.save(file, values.astype(dice.choice(("int16", "int32", "uint16" if values.min() >= 0 else "int32"))))
        return base64.b64encode(file.getvalue()).decode(), {}
    if dtype == "int16" and values.min() >= 0 and values.max() < 128:
        dtype = dice.choice(("int16", "int8" if form == "envelope" else "uint8"))
    data = base64.b64encode(values.astype(dtype).tobytes()).decode()
    if form == "envelope":
        return f"nrlre1:{dtype}:{'x'.join(map(str, values.shape))}:{data}", {}
    return {"data": data, "shape": list(values.shape), "dtype": dtype, **({"start": start} if start else {})}, {}


# Kept sets

SET_FAULTS = ("", "without", "late", "early", "count", "offsets", "negative")


def _sets(writer: Writer, chat: Chat, dice: random.Random, fault: str) -> Iterator[Case]:
    if not writer.sets:
        return
    how = dice.choice(writer.sets)
    turn = chat.turns[-1]
    low = turn.start if writer.call else 0 if how in ("padded lists", "a mask") else chat.prompt
    end = turn.end if writer.call else len(chat.ids)
    if how in ("lists", "counts", "counts base64") and not writer.call and dice.random() < 0.5:
        places = [at for at in range(end) if chat.truth[at] is not None]
    else:
        places = list(range(low, end))
    sets = [_set(chat.ids[at], dice) if chat.truth[at] is not None else [] for at in places]
    for at in range(len(sets)):  # greedy tokens have none
        if sets[at] and dice.random() < 0.1:
            sets[at] = []
    filled = [at for at, tokens in enumerate(sets) if tokens]
    if not filled or (how == "a mask" and fault):
        return
    if fault == "without":
        at = dice.choice(filled)
        sets[at] = [token for token in sets[at] if token != chat.ids[places[at]]] or [chat.ids[places[at]] + 1]
    elif fault in ("late", "early"):
        sets = [[], *sets[:-1]] if fault == "late" else [*sets[1:], []]
        if not any(
            sets[at] and chat.truth[places[at]] is not None and chat.ids[places[at]] not in sets[at]
            for at in range(len(sets))
        ):
            return
    elif fault == "count":
        by = dice.choice((1, 2, 5))
        sets = sets[:-by] if dice.random() < 0.5 else [*sets, *sets[:by]]
        sampled = [at for at in range(end) if chat.truth[at] is not None]
        start = chat.turns[-1].start if writer.call else chat.prompt
        own = len([at for at in sampled if at >= start])
        if len(sets) in (end, end - start, own, end - sampled[0]) or not any(sets):
            return
    elif fault == "negative":
        sets[dice.choice(filled)].append(-5)
    counts = [len(tokens) for tokens in sets]
    flat, edges = [token for tokens in sets for token in tokens], [0, *np.cumsum(counts).tolist()]
    if fault == "offsets":
        if how not in ("ragged", "miles", "counts", "ragged base64", "counts base64"):
            return
        edges[-1] += 2
        counts[-1] += 2
    columns: Json
    if how == "ragged":
        columns = {"rollout_top_p_token_ids": flat, "rollout_top_p_token_offsets": edges}
    elif how == "ragged base64":
        columns = {"top_p_token_ids": _packed(flat), "top_p_token_offsets": _packed(edges)}
    elif how == "miles":
        columns = {"rollout_sampling_mask": {"ids": flat, "offsets": edges}}
    elif how == "counts":
        columns = {"kept_tokens": {"ids": flat, "counts": counts}}
    elif how == "counts base64":
        columns = {"kept_tokens": {"ids": _packed(flat), "counts": _packed(counts)}}
    elif how == "padded lists":
        wide = max(map(len, sets))
        columns = {"sampling_mask": [tokens + [-1] * (wide - len(tokens)) for tokens in sets]}
    elif how == "a mask":
        columns = {"sampling_mask": [int(bool(tokens)) for tokens in sets]}
    elif how == "output":
        columns = {"output_token_sampling_mask": sets}
    else:
        columns = {"sampling_mask": [tokens or dice.choice((None, [])) for tokens in sets]}
    code = "REC014" if fault else ""
    about = f"{how}, {len(sets)} for {end}; {fault or 'right'}"
    names = tuple(columns)
    yield Case(writer.name, about, writer.write(chat, columns, dice), code, names=names)


def _packed(values: list[int]) -> str:
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


def _set(token: int, dice: random.Random) -> list[int]:
    tokens = {token, *(dice.randrange(2000) for _ in range(dice.choice((0, 0, 1, 3, 20))))}
    return dice.sample(sorted(tokens), len(tokens))


# Advantages and rewards

CREDIT_FAULTS = ("", "zeros", "length", "nan", "infinite")


def _credit(writer: Writer, chat: Chat, dice: random.Random, fault: str) -> Iterator[Case]:
    if not writer.credit:
        return
    how, mask, size = dice.choice(writer.credit), _mask(chat), len(chat.ids)
    sampled = [at for at, on in enumerate(mask) if on]
    each = [dice.choice((-1.5, 0.5, 0.25, 0.0)) for _ in range(size)]
    name, values = "advantages", list[Any]()
    if how in ("whole", "everywhere"):
        values = [0.75] * size if dice.random() < 0.5 else each
    elif how == "inside":
        values = [value if on else 0.0 for value, on in zip(each, mask, strict=True)]
    elif how == "absent outside":
        values = [value if on else None for value, on in zip(each, mask, strict=True)]
    elif how == "one zero outside":
        values = [value if on else math.nan for value, on in zip(each, mask, strict=True)]
    elif how == "shifted":
        values = each[1:]
    elif how == "trained":
        values = [each[at] for at in sampled]
    elif how in ("turns", "answers"):
        values = [0.5] * len(chat.turns)
    elif how == "answer":
        values = each[chat.turns[-1].start : chat.turns[-1].end]
    elif how == "rewards":
        name, values = "rewards", [0.0] * (size - chat.prompt - 1) + [1.0]
    scalar = how in ("number", "components")
    if scalar:
        name = dice.choice(("reward", "score", "advantage"))
        name = "advantages" if writer.name in ("trl", "atropos") else name
        name = "rewards" if writer.name == "skyrl" else name
        if writer.name == "areal":
            name = "rewards"
    if writer.name.startswith("verl") and fault != "zeros":
        name = dice.choice(("advantages", "token_level_rewards", "token_level_scores"))
    suffix = ".parquet" if writer.name == "flat" and not fault and how in _BY_TOKEN[:5] else ".jsonl"
    low = chat.turns[-1].start if writer.call else 0
    end = chat.turns[-1].end if writer.call else size
    own = [at for at in range(len(values)) if _trained(how, at, mask, sampled, low)]
    severity = "error"
    if fault == "length":
        if scalar or how in ("rewards",) or writer.name in ("trl", "verl batch", "atropos"):
            return
        by = dice.choice((1, 2, 3))
        values = values[:-by] if dice.random() < 0.5 else [*values, *([0.5] * by)]
        runs = sum(on and not before for on, before in zip(mask, [0, *mask], strict=False))
        start = chat.turns[-1].start if writer.call else chat.prompt
        first, whole = sampled[0], end
        allowed = {1, whole, whole - 1, whole - start, whole - start - 1, len(chat.turns), runs}
        allowed |= {whole - first, whole - first - 1, len([at for at in sampled if at >= start])}
        if (
            writer.name in ("slime", "verl", "nemo-rl", "skyrl", "areal")
            or len(values) in allowed
            or len(values) < 1
        ):
            return
    elif fault in ("nan", "infinite"):
        bad = math.nan if fault == "nan" else -math.inf
        if scalar and writer.name == "atropos":  # a number for each sample of the group: not read
            return
        if scalar:
            values = [bad]
        elif how in ("turns", "answers") or not own:
            return
        else:
            values[dice.choice(own)] = bad
    elif fault == "zeros":
        severity = "note"
        if how not in ("whole", "everywhere", "inside") or writer.call:
            return
        values = [0.0] * len(values)
    value: Any = values
    if scalar:
        value = values[0] if values else dice.choice((1.0, 0, -0.5))
        if how == "components":
            value = {"right": value, "format": 0.5}
            if fault:
                return
    elif writer.name == "skyrl":
        value = values
    columns: Json = {name: value}
    about = f"{name} {how}, {len(values)} for {size}; {fault or 'right'}"
    code = "REC015" if fault else ""
    if writer.many > 1:
        columns["right"] = {name: [0.5] * len(each) if isinstance(value, list) else 0.5}
    may = "REC015" if not fault and not any(values[at] for at in own if values[at] is not None) else ""
    yield Case(
        writer.name,
        about,
        writer.write(chat, columns, dice),
        code,
        severity,
        writer.many - 1,
        suffix,
        may,
    )


def _trained(how: str, at: int, mask: list[int], sampled: list[int], low: int) -> bool:
    if how in ("trained", "rewards", "answer"):
        return True
    if how == "shifted":
        return bool(mask[at + 1])
    return at < len(mask) and bool(mask[at])


# Versions of weights


def _versions(writer: Writer, chat: Chat, dice: random.Random, fault: str) -> Iterator[Case]:
    if not writer.spans:
        return
    how = dice.choice(writer.spans)
    turn = chat.turns[-1]
    change = dice.randrange(turn.start + 1, turn.end) if fault else turn.end
    low = turn.start if writer.call else 0
    end = turn.end if writer.call else len(chat.ids)
    spans = [(5, low, min(change, end)), *([(6, change, end)] if change < end else [])]
    if how == "by token":
        by = [next(version for version, a, b in spans if a <= at < b) for at in range(low, end)]
        column: Any = [version if on else -1 for version, on in zip(by, _mask(chat)[low:end], strict=True)]
        name = "versions" if writer.name == "flat" else "weight_versions"
    elif how in ("objects", "spans"):
        column = [{"version": str(version), "start": a - low, "end": b - low} for version, a, b in spans]
        name = "weight_versions"
    elif how == "triples":
        column, name = [[str(version), a - low, b - low] for version, a, b in spans], "weight_versions"
    elif how == "calls":
        column, name = [{"spans": [_absolute(span) for span in spans if span[1] < span[2]]}], "weight_versions"
    else:
        column, name = [str(version) for version, _, _ in spans], "weight_versions"
    severity = "warning" if how == "names" and len(chat.turns) != 2 else "note"
    may = "REC008" if how == "names" else ""
    row = writer.write(chat, {name: column}, dice)
    code = "REC008" if fault else ""
    yield Case(writer.name, f"versions {how}; {fault or 'one'}", row, code, severity, may=may, names=(name,))


def _absolute(span: tuple[int, int, int]) -> Json:
    return {"version": str(span[0]), "abs_start": span[1], "abs_end": span[2]}


# Preference pairs and KTO rows

PAIR_FAULTS = ("", "prompt", "same", "cut")
LABELLED = {
    "orpo": ("chosen_input_ids", "chosen_labels", "chosen_attention_mask"),
    "axolotl": ("input_ids", "labels", "attention_mask"),
}
"""The columns of a chosen side that is prompt and answer; those of the other side say `rejected`."""


def _pairs(writer: Writer, chat: Chat, dice: random.Random, fault: str) -> Iterator[Case]:
    """Two answers to one prompt, or one with its label, by TRL, LLaMA-Factory and axolotl."""
    if writer.name != "flat":
        return
    how = dice.choice(("trl 1", "trl 0", *LABELLED, "reward", "kto", "kto tags"))
    other = chat_of(chat.model.name, 1, dice)
    prompt, answers = chat.ids[: chat.prompt], [_ended(chat), _ended(other)]
    if answers[0] == answers[1]:
        return
    prompts, side = [prompt, list(prompt)], 1
    if fault == "prompt":
        if how not in LABELLED:
            return
        at = dice.randrange(1, len(prompt) - 2)
        prompts[1][at] = prompts[1][at] + 1 if prompts[1][at] < 100 else prompts[1][at] - 1
    elif fault == "same":
        if how.startswith("kto"):
            return
        answers[1] = list(answers[0])
    elif fault == "cut":
        side = 0 if how.startswith("kto") else dice.randrange(2)
        answers[side] = answers[side][: max(1, len(answers[side]) // 2)]
        if how == "reward" or set(answers[side]) & set(chat.model.ends):
            return
    row: Json
    if how in ("trl 1", "trl 0"):
        more = "_input_ids" if how == "trl 0" else "_ids"
        row = {f"prompt{more}": prompt, f"chosen{more}": answers[0], f"rejected{more}": answers[1]}
    elif how == "reward":
        row = {"chosen_ids": prompt + answers[0], "rejected_ids": prompt + answers[1]}
    elif how in LABELLED:
        row = {}
        for own, answer, chosen in zip(prompts, answers, (True, False), strict=True):
            ids, labels, seen = (
                LABELLED[how]
                if chosen or how == "orpo"
                else ("rejected_input_ids", "rejected_labels", "rejected_attention_mask")
            )
            ids, labels, seen = (
                name.replace("chosen", "chosen" if chosen else "rejected") for name in (ids, labels, seen)
            )
            behind = dice.choice((0, 0, 5))
            row[ids] = own + answer + [chat.model.pad] * behind
            row[labels] = [-100] * len(own) + answer + [-100] * behind
            row[seen] = [1] * (len(own) + len(answer)) + [0] * behind
    elif how == "kto":
        row = {"prompt_ids": prompt, "completion_ids": answers[0], "label": dice.random() < 0.5}
    else:
        labels = [-100] * len(prompt) + answers[0]
        row = {"input_ids": prompt + answers[0], "labels": labels, "kto_tags": dice.random() < 0.5}
        row["attention_mask"] = [1] * len(labels)
    severity = "error" if fault == "prompt" else "warning"
    yield Case("pairs", f"{how}; {fault or 'right'}", row, "REC016" if fault else "", severity, side)


def _ended(chat: Chat) -> list[int]:
    turn = chat.turns[0]
    ids = chat.ids[turn.start : turn.end]
    return ids if ids[-1] in chat.model.ends else [*ids, chat.model.end]


# Rows that a repair mends


def _mended(writer: Writer, chat: Chat, dice: random.Random, fault: str) -> Iterator[Case]:
    """A row whose logprobs slid, or whose last answer is not what its call sampled, with right columns beside."""
    if not writer.slides or (fault == "drift" and writer.name != "flat"):
        return
    kind, *_ = dice.choice(KINDS[:3])
    drawn: list[Case] = []
    if fault == "slide":
        drawn = list(kind(writer, chat, dice, ""))
    else:
        turn = chat.turns[-1]
        if turn.end - turn.start < 6:
            return
        at = dice.randrange(turn.start + 2, turn.end - 2)
        last = replace(turn, end=turn.end - 1, last=turn.last - 1)
        ids, truth = chat.ids[:at] + chat.ids[at + 1 :], chat.truth[:at] + chat.truth[at + 1 :]
        drawn = list(kind(writer, replace(chat, ids=ids, truth=truth, turns=[*chat.turns[:-1], last]), dice, ""))
    for case in drawn:
        row, name = dict(case.row), writer.slides
        if fault == "slide":
            by = dice.choice((1, 2))
            row[name] = row[name][by:] + row[name][-1:] * by
        else:
            row["calls"] = [
                {
                    "prompt_token_ids": chat.ids[: turn.start],
                    "completion_token_ids": chat.ids[turn.start : turn.end],
                    "logprobs": chat.truth[turn.start : turn.end],
                }
                for turn in chat.turns
            ]
        yield replace(case, row=row, about=case.about.replace("right", fault), again=fault)


KINDS: tuple[tuple[Callable[..., Iterator[Case]], tuple[str, ...]], ...] = (
    (_experts, EXPERT_FAULTS),
    (_sets, SET_FAULTS),
    (_credit, CREDIT_FAULTS),
    (_versions, ("", "change")),
    (_mended, ("slide", "drift")),
    (_pairs, PAIR_FAULTS * 3),
)


def cases(count: int, seed: int, model: str) -> Iterator[Case]:
    """So many cases: of each writer, column and fault in turn."""
    dice = random.Random(seed)
    plan = [(writer, kind, fault) for writer in WRITERS.values() for kind, faults in KINDS for fault in faults]
    drawn = 0
    while drawn < count:
        dice.shuffle(plan)
        for writer, kind, fault in plan:
            chat = chat_of(model, dice.choice((1, 1, 2, 3)), dice, closed=dice.random() < 0.4)
            if len(chat.ids) > LONGEST:
                continue
            # No two prompts are the same: calls of one conversation are read together.
            chat = replace(chat, ids=[dice.randrange(1000, 60000), *chat.ids[1:]])
            for case in kind(writer, chat, dice, fault):
                drawn += 1
                yield case
                if drawn == count:
                    return


def run_beside(count: int, folder: Path, seed: int, model: str) -> Outcome:
    """Write all cases, scan and repair them, and compare with what is right."""
    drawn, outcome = list(cases(count, seed, model)), Outcome()
    files: dict[str, list[Case]] = {}
    for case in drawn:
        name = f"{case.again or 'as'}-{case.writer.replace(' ', '-')}{case.suffix}"
        files.setdefault(name, []).append(case)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        _write(folder / name, rows)
    # Not the rest of the rules: a row may well be cut, repeated and drawn of several conversations.
    scanned = scan([folder / name for name in files], model, folder / "scan.json", "--select", ",".join(CODES))
    for name, rows in files.items():
        for number, case in enumerate(rows):
            findings = {item: scanned.samples[name, number, item] for item in range(case.item + 1)}
            for what in _judged(case, findings):
                words = "; ".join(f"{finding}: {finding.message}" for finding in findings[case.item]) or "nothing"
                about = f"{case.writer}, {case.about}"
                outcome.add(Violation(what, f"{name}:{number}", about, words))
            cell = outcome.cells[case.writer, "beside", case.about.rpartition("; ")[2].split(" ")[0]]
            cell["rows"] += 1
            cell["clean" if not case.code else "fault"] += 1
            cell["named"] += any(finding.code == case.code for finding in findings[case.item])
    _repaired({name: rows for name, rows in files.items() if rows[0].again}, folder, model, outcome)
    return outcome


def _repaired(files: dict[str, list[Case]], folder: Path, model: str, outcome: Outcome) -> None:
    """Repair these rows: what stands beside tokens that stayed is as it was, else gone, and fits again."""
    if not files:
        return
    repair([folder / name for name in files], model, folder / "repaired")
    scanned = scan([folder / "repaired" / name for name in files], model, folder / "again.json", "--select", WIDE)
    for name, rows in files.items():
        new = read_rows(folder / "repaired" / name)
        for number, (case, row) in enumerate(zip(rows, new, strict=True)):
            findings = scanned.samples[name, number, 0]
            changed = {key for key in case.row if key in row and json.dumps(row[key]) != json.dumps(case.row[key])}
            what = ""
            if any(finding.code != "REC008" and finding.severity != "note" for finding in findings):
                what = "a repaired row whose columns do not fit"
            elif case.again == "slide" and changed & set(case.names):
                what = "a column that a repair has no reason to change"
            elif (
                case.again == "drift"
                and changed
                and case.names
                and not all(row[key] is None for key in case.names)
            ):
                what = "a column of other tokens that a repair left"
            cell = outcome.cells[case.writer, "beside", case.again]
            cell["cured"] += bool(changed)
            if what:
                words = "; ".join(f"{finding}: {finding.message}" for finding in findings) or "nothing"
                outcome.add(Violation(what, f"{name}:{number}", f"{case.writer}, {case.about}", words))


def _write(path: Path, rows: Sequence[Case]) -> None:
    if path.suffix == ".parquet":
        write_rows(path, [case.row for case in rows])
    else:
        path.write_text("".join(json.dumps(case.row) + "\n" for case in rows), encoding="utf-8")


def _judged(case: Case, findings: dict[int, list[Finding]]) -> Iterator[str]:
    own = [finding for finding in findings[case.item] if finding.code != "REC008" or case.code == "REC008"]
    if any(findings[item] for item in range(case.item)):
        yield "something said of the right sample of a batch"
    if any(finding.code == "REC001" for finding in own):
        yield "a row that cannot be read"
    elif not case.code:
        if any(finding.code != case.may for finding in own) or any(finding.loud for finding in own):
            yield "something said of right columns"
    elif not any((finding.code, finding.severity) == (case.code, case.severity) for finding in own):
        yield f"{case.code} not found"
    elif any(finding.code not in (case.code, case.may) for finding in own):
        yield "another rule says something too"
