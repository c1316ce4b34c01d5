"""record_of: which facts a rollout's record lacks, from the rollout as it was read and the rows that hold it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import orjson

from tito_audit.errors import ODD_VALUES
from tito_audit.formats import model_name
from tito_audit.levels.facts import (
    ASKED,
    EXPERTS_SEEN,
    NOTHING,
    FormatLevel,
    all_facts,
    has_experts,
    level_of_format,
)
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.rollout import IdsFrom, Rollout, TrainingRow, Turn

Record = Mapping[str, Any]
Holders = list[list[Record | None]]
"""For each path, the objects of all rows that may state facts; None for one that is not there."""

_SAMPLING = ("sampling", "sampling_params", "sampling_args", "sampling_parameters")
_TEMPERATURE = ("temperature", "temperatures", "gen_ai.request.temperature")
_CUTS = {"top_p": (1,), "top_k": (0, -1)}
"""Sampling parameters that cut tokens off, with the values at which they cut none."""
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_WEIGHT_COLUMNS = ("weight_versions", "versions")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_IMAGES = (
    "multi_modal_inputs",
    "multimodal_train_inputs",
    "multimodal_inputs",
    "mm_kwargs",
    "multi_modal_data",
    "images",
)


def record_of(rollout: Rollout, rows: Sequence[Record]) -> int | None:
    """The mask of the facts that a rollout lacks, and of those that are asked of it; None if a row is no rollout.

    `rows` are those that hold it, with their columns as read.
    """
    form, facts = level_of_format(rollout.format), all_facts()
    if form.others and not rollout.turns and rollout.training_row is None:
        return None  # a reward or another event
    try:
        holders = _holders(rows, form.holders)
        # Facts up to L2, and whether the record holds them.
        turns, row = rollout.turns, rollout.training_row
        real = not rollout.stated.dummy_tokens
        row = row if real and row is not None and len(row.token_ids) else None
        answers = real and bool(turns) and all(map(_answer_logged, turns))
        unmasked = row is not None and row.loss_mask is None
        scores = [
            turn.completion_logprobs
            for turn in turns
            if turn.completion_ids is not None and len(turn.completion_ids)
        ]
        prompts = real and bool(turns) and all(turn.prompt_ids is not None for turn in turns)
        tokens = {
            "text": row is not None or answers or prompts or _has_text(rollout, rows),
            "prompt_ids": row is not None or prompts,
            "completion_ids": row is not None or answers,
            "loss_mask": answers or (row is not None and row.loss_mask is not None),
            "logprobs": (answers and all(map(_all_scored, scores)))
            or (row is not None and row.logprobs is not None and unmasked)
            or (row is not None and _all_scored(row.logprobs, row.loss_mask)),
        } | _statements(rollout, rows, holders, form)
        beside, applying = _beside(rollout, rows, holders)
    except ODD_VALUES:  # of a row that states something in a form that nobody knows
        return NOTHING
    lacks = [name for name, has in (tokens | beside).items() if not has]
    seen = EXPERTS_SEEN if _experts_of(rollout) else 0
    return sum(facts[name].bit for name in lacks) | sum(facts[name].bit * ASKED for name in applying) | seen


def _statements(rollout: Rollout, rows: Sequence[Record], holders: Holders, form: FormatLevel) -> dict[str, bool]:
    """What a record states of its sampler, and whether it does."""
    turns, row, stated, facts = rollout.turns, rollout.training_row, rollout.stated, all_facts()
    weights = bool(turns) and all(turn.weight_versions for turn in turns)
    weights = weights or bool(stated.policy_versions or stated.facts.get("weight_versions"))
    weights = weights or (row is not None and any(column.name in _WEIGHT_COLUMNS for column in row.columns))
    stop = bool(turns) and all(turn.finish_reason is not None for turn in turns)
    stop = stop or (row is not None and bool(row.finish_reasons) and row.finish_reasons[-1] is not None)
    return {
        "model": _model(rollout, holders) is not None,
        "weights": weights or _states(holders, facts["weights"].names),
        "stop": stop or _states(_holders(rows, form.stops), facts["stop"].names),
        "sampling": bool(_sampling(holders)),
        **{name: _states(holders, facts[name].names) for name in ("tokenizer_digest", "template_digest")},
    }


def _beside(rollout: Rollout, rows: Sequence[Record], holders: Holders) -> tuple[dict[str, bool], list[str]]:
    """Kept sets, experts and images: whether the record holds them or has no use for them; and which are asked."""
    sampling = _sampling(holders)
    parts = [
        part
        for messages in (rollout.messages, *(turn.prompt_messages or () for turn in rollout.turns))
        for message in messages
        if isinstance(message.content, tuple)
        for part in message.content
        if part.get("type") in _IMAGE_PARTS
    ]
    cut = any(
        each.get("min_p") or not (isinstance(value := each.get(name), int | float) and value in uncut)
        for each in sampling
        for name, uncut in _CUTS.items()
    )
    applies = {
        "kept_sets": not sampling or cut,
        "experts": _experts_of(rollout)
        or _states(holders, _EXPERTS)
        or has_experts(_model(rollout, holders) or ""),
        "images": bool(parts) or any(row.get("has_images") is True for row in rows),
    }
    shown = bool(parts) and all(any(_says(part[name]) for name in part if name != "type") for part in parts)
    there = {
        "kept_sets": applies["kept_sets"] and _each(rollout, lambda part: bool(part.beside.sets)),
        "experts": applies["experts"] and _each(rollout, lambda part: bool(part.beside.routing)),
        "images": shown or (applies["images"] and any(_says(row.get(name)) for row in rows for name in _IMAGES)),
    }
    holds = {name: there[name] or not applies[name] for name in there}
    return holds, [name for name in applies if applies[name]]


def _each(rollout: Rollout, holds: Any) -> bool:
    """Whether the training row, or every call, holds something beside its tokens."""
    row = rollout.training_row
    return (row is not None and holds(row)) or (bool(rollout.turns) and all(holds(turn) for turn in rollout.turns))


def _experts_of(rollout: Rollout) -> bool:
    """Whether experts stand beside any tokens of a rollout."""
    parts: list[Turn | TrainingRow] = [*rollout.turns]
    parts += [rollout.training_row] if rollout.training_row is not None else []
    return any(part.beside.routing for part in parts)


def _answer_logged(turn: Turn) -> bool:
    """Whether the ids of an answer were logged: an empty one has no text either."""
    ids = turn.completion_ids
    if ids is None or turn.ids_from is not IdsFrom.LOGGED:
        return False
    return len(ids) > 0 or not (turn.completion_text or (turn.answer is not None and turn.answer.text))


def _all_scored(values: Logprobs | None, tokens: Mask | None = None) -> bool:
    """Whether every token, or each of these, has a logprob."""
    return values is not None and not bool(np.isnan(values if tokens is None else values[tokens]).any())


def _has_text(rollout: Rollout, rows: Sequence[Record]) -> bool:
    """Whether the record holds text: messages, or the text of calls; `text_only` is recognized by its texts."""
    answers = (turn.completion_text or turn.token_texts or turn.answer for turn in rollout.turns)
    names = all_facts()["text"].names
    values = (row.get(name) for row in rows for name in names)
    texts = (isinstance(value, str) and value for value in values)
    read = (rollout.stated.facts.get(name) for name in names)
    return bool(rollout.messages) or rollout.format == "text_only" or any(answers) or any(texts) or any(read)


# Where rows state facts


@cache
def _steps(path: str) -> tuple[tuple[str, str | None], ...]:
    """The steps of a path: a key, and None for an object, "" for each entry of a list, or a key of its entries."""
    steps = []
    for step in path.split("."):
        if (match := re.fullmatch(r"(\w+)(?:\[(\w*)\])?", step)) is not None:
            steps.append((match[1], match[2]))
    return tuple(steps)


def _holders(rows: Sequence[Record], paths: Sequence[str]) -> Holders:
    """The objects at each path of all rows, without paths that no row has."""
    holders = []
    for path in paths:
        steps = _steps(path)
        if not steps or any(steps[0][0] in row for row in rows):
            holders.append([each for row in rows for each in _objects(row, steps)])
    return holders


def _objects(row: Any, steps: tuple[tuple[str, str | None], ...]) -> Iterator[Record | None]:
    """The objects at a path of a row; None for one that is not there."""
    if isinstance(row, str) and row[:1] == "{" and len(row) < 1 << 16:
        try:
            row = orjson.loads(row)
        except orjson.JSONDecodeError:
            row = None
    if not isinstance(row, dict | Mapping):
        yield None
        return
    if not steps:
        yield row
        return
    (key, entry), *rest = steps
    value = row.get(key)
    if entry is None:
        yield from _objects(value, tuple(rest))
        return
    entries = [each for each in value if isinstance(each, dict)] if isinstance(value, list | tuple) else []
    for each in entries:
        if not entry or _says(each.get(entry)):
            yield from _objects(each, tuple(rest))


def _says(value: Any) -> bool:
    """Whether a value says something: not null, NaN or empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    return not isinstance(value, str | list | tuple | dict | np.ndarray) or len(value) > 0


def _states(holders: Holders, names: Iterable[str]) -> bool:
    """Whether every object at some path states one of these names."""
    for objects in holders:
        if objects and all(each is not None and any(_says(each.get(name)) for name in names) for each in objects):
            return True
    return False


def _model(rollout: Rollout, holders: Holders) -> str | None:
    """The name of the model, where every row states one that is no placeholder."""
    if rollout.stated.model is not None:
        return rollout.stated.model
    names = all_facts()["model"].names
    for objects in holders:
        models = [
            next(filter(None, (model_name(each.get(name)) for name in names if each)), None) for each in objects
        ]
        if models and all(models):
            return models[0]
    return None


def _sampling(holders: Holders) -> list[Record]:
    """The sampling parameters, with a temperature, that every row states; [] if one of them does not."""
    for objects in holders:
        parts: list[Record] = []
        for each in objects:
            inside = [next(_objects(each[name], ())) for name in _SAMPLING if name in each] if each else []
            named = (part for part in (each, *inside) if part and any(_says(part.get(t)) for t in _TEMPERATURE))
            parts += islice(named, 1)
        if objects and len(parts) == len(objects):
            return parts
    return []
