"""What `levels.toml` says of the levels of a record, and which of their facts a rollout and its rows lack."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import Any

import numpy as np
import orjson

from tito_audit.errors import ODD_VALUES
from tito_audit.formats import model_name
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.rollout import IdsFrom, Rollout, TrainingRow, Turn


class RecordLevel(IntEnum):
    """How much of a rollout a record holds; each level includes those below it."""

    NONE = -1
    L0 = 0
    L1 = 1
    L2 = 2
    L3 = 3
    L4 = 4

    def __str__(self) -> str:
        return "no level" if self is RecordLevel.NONE else self.name

    @property
    def in_words(self) -> str:
        """`L2, mask and logprobs`"""
        return "no level" if self is RecordLevel.NONE else f"{self.name}, {self.words}"

    @property
    def words(self) -> str:
        """What a record of this level holds, in a few words."""
        return _read_levels().words[self]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that the record of a rollout may hold."""

    name: str
    bit: int
    """Its bit in the mask of what a rollout lacks."""
    level: RecordLevel
    """The level that asks for it."""
    words: str
    """What is lacking, read after "lacks"."""
    line: str
    """How to log it if the framework has no line of its own; an imperative."""
    names: tuple[str, ...] = ()
    """Keys that state it."""


@dataclass(frozen=True, slots=True)
class FormatLevel:
    """What a log format has a place for."""

    holds: RecordLevel
    """The highest level that its rows can have, for a dense model of text."""
    holders: tuple[str, ...] = ()
    """Paths of objects with facts: `calls[]` is each entry of a list, `steps[metrics]` each with that key."""
    stops: tuple[str, ...] = ()
    """Paths of objects that state why calls ended, if the format itself does not read that."""
    others: bool = False
    """Whether rows without tokens are other events, such as rewards, instead of rollouts."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """By fact: how to log it in the format's framework, an imperative."""

    def line(self, fact: Fact) -> str:
        """How to log a fact."""
        return self.lines.get(fact.name, fact.line)


@dataclass(frozen=True, slots=True)
class _LevelTable:
    words: Mapping[RecordLevel, str]
    facts: Mapping[str, Fact]
    formats: Mapping[str, FormatLevel]
    with_experts: re.Pattern[str]


@cache
def _read_levels() -> _LevelTable:
    text = files("tito_audit").joinpath("levels/levels.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    words = {RecordLevel[name]: words for name, words in table["levels"].items()}
    facts = {
        name: Fact(
            name, 1 << at, RecordLevel[fact["level"]], fact["lacks"], fact["line"], tuple(fact.get("names", ()))
        )
        for at, (name, fact) in enumerate(table["facts"].items())
    }
    formats = {
        name: FormatLevel(
            RecordLevel[entry["holds"]],
            (*table["holders"], *entry.get("holders", ())),
            tuple(entry.get("stops", ())),
            entry.get("others", False),
            entry.get("lines", {}),
        )
        for name, entry in table["formats"].items()
    }
    return _LevelTable(words, facts, formats, re.compile(table["with_experts"], re.IGNORECASE))


def all_facts() -> Mapping[str, Fact]:
    """Every fact by name, in the order of levels."""
    return _read_levels().facts


def level_of_format(name: str) -> FormatLevel:
    """What a format has a place for; for a format that is not listed, as `generic`."""
    formats = _read_levels().formats
    return formats.get(name, formats["generic"])


def is_mixture_of_experts(model: str) -> bool:
    """Whether a model's name tells that it is a mixture of experts, as `Qwen3-30B-A3B` does."""
    return _read_levels().with_experts.search(model) is not None


ASKED = 1 << 16
"""In a mask, `bit * ASKED` is set for a fact of L4 that applies to the rollout and is asked of it."""
EXPERTS_SEEN = 1 << 30
"""In a mask: the record holds experts, so other rows of its log should too."""
LACKS_ALL = ASKED - 1
"""The mask of a row that cannot be read."""


def level_of_mask(mask: int) -> RecordLevel:
    """The level of a record that lacks these facts."""
    missing = [fact.level for fact in all_facts().values() if fact.bit & mask]
    return RecordLevel(min(missing) - 1) if missing else RecordLevel.L4


Row = Mapping[str, Any]
Holders = list[list[Row | None]]
"""For each path, the objects at it in all rows, which may state facts; None where a row has none."""

_SAMPLING = ("sampling", "sampling_params", "sampling_args", "sampling_parameters")
_TEMPERATURE = ("temperature", "temperatures", "gen_ai.request.temperature")
_NO_CUT = {"top_p": (1,), "top_k": (0, -1)}
"""Sampling parameters that cut off tokens, with the values that cut off none."""
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


def record_mask(rollout: Rollout, rows: Sequence[Row]) -> int | None:
    """The bit mask of the facts that a rollout's record lacks (`Fact.bit`), with the flags of `levels/facts.py`.

    None if the rows are no rollout but another event. `rows` are those that hold it, as read.
    """
    format_level, facts = level_of_format(rollout.format), all_facts()
    if format_level.others and not rollout.turns and rollout.training_row is None:
        return None  # a reward or another event
    try:
        holders = _find_holders(rows, format_level.holders)
        # Facts up to L2, and whether the record holds them.
        turns, row = rollout.turns, rollout.training_row
        real = not rollout.stated.dummy_tokens
        row = row if real and row is not None and len(row.token_ids) else None
        answers = real and bool(turns)
        for turn in turns:  # empty ids count only if the answer has no text
            ids, text = turn.completion_ids, turn.completion_text or (turn.answer is not None and turn.answer.text)
            complete = ids is not None and (len(ids) > 0 or not text)
            answers = answers and complete and turn.ids_from is IdsFrom.LOGGED
        unmasked = row is not None and row.loss_mask is None
        scores = [
            turn.completion_logprobs
            for turn in turns
            if turn.completion_ids is not None and len(turn.completion_ids)
        ]
        prompts = real and bool(turns) and all(turn.prompt_ids is not None for turn in turns)
        names = facts["text"].names
        has_text = (
            (row is not None or answers or prompts or bool(rollout.messages))
            or rollout.format == "text_only"
            or any(turn.completion_text or turn.token_texts or turn.answer for turn in turns)
            or any(isinstance(value, str) and value for line in rows for value in map(line.get, names))
            or any(rollout.stated.facts.get(name) for name in names)
        )
        tokens = {
            "text": has_text,
            "prompt_ids": row is not None or prompts,
            "completion_ids": row is not None or answers,
            "loss_mask": answers or (row is not None and row.loss_mask is not None),
            "logprobs": (answers and all(map(_all_scored, scores)))
            or (row is not None and row.logprobs is not None and unmasked)
            or (row is not None and _all_scored(row.logprobs, row.loss_mask)),
        }
        beside, applying = _facts_beside_tokens(rollout, rows, holders, format_level)
    except ODD_VALUES:  # of a row that states something in an unknown form
        return LACKS_ALL
    lacks = [name for name, has in (tokens | beside).items() if not has]
    seen = EXPERTS_SEEN if _logs_experts(rollout) else 0
    return sum(facts[name].bit for name in lacks) | sum(facts[name].bit * ASKED for name in applying) | seen


def _facts_beside_tokens(
    rollout: Rollout, rows: Sequence[Row], holders: Holders, format_level: FormatLevel
) -> tuple[dict[str, bool], list[str]]:
    """Whether the record states each fact of L3 and the digests, and holds kept sets, experts and images.

    What does not apply to the record counts as held; also which of the last three apply.
    """
    turns, row, stated, facts = rollout.turns, rollout.training_row, rollout.stated, all_facts()
    weights = bool(turns) and all(turn.weight_versions for turn in turns)
    weights = weights or bool(stated.policy_versions or stated.facts.get("weight_versions"))
    weights = weights or (row is not None and any(column.name in _WEIGHT_COLUMNS for column in row.columns))
    stop = bool(turns) and all(turn.finish_reason is not None for turn in turns)
    stop = stop or (row is not None and bool(row.finish_reasons) and row.finish_reasons[-1] is not None)
    model, sampling = _model_name(rollout, holders), _sampling_params(holders)
    holds = {
        "model": model is not None,
        "weights": weights or _any_states(holders, facts["weights"].names),
        "stop": stop or _any_states(_find_holders(rows, format_level.stops), facts["stop"].names),
        "sampling": bool(sampling),
        **{name: _any_states(holders, facts[name].names) for name in ("tokenizer_digest", "template_digest")},
    }
    parts = [
        part
        for messages in (rollout.messages, *(turn.prompt_messages or () for turn in turns))
        for message in messages
        if isinstance(message.content, tuple)
        for part in message.content
        if part.get("type") in _IMAGE_PARTS
    ]
    cut = any(
        parameters.get("min_p") or not (isinstance(value := parameters.get(name), int | float) and value in uncut)
        for parameters in sampling
        for name, uncut in _NO_CUT.items()
    )
    applies = {
        "kept_sets": not sampling or cut,
        "experts": _logs_experts(rollout) or _any_states(holders, _EXPERTS) or is_mixture_of_experts(model or ""),
        "images": bool(parts) or any(row.get("has_images") is True for row in rows),
    }
    shown = bool(parts) and all(any(_has_value(part[name]) for name in part if name != "type") for part in parts)
    there = {
        "kept_sets": applies["kept_sets"] and _every_part(rollout, lambda part: bool(part.extras.kept_sets)),
        "experts": applies["experts"] and _every_part(rollout, lambda part: bool(part.extras.routing)),
        "images": shown
        or (applies["images"] and any(_has_value(row.get(name)) for row in rows for name in _IMAGES)),
    }
    holds |= {name: there[name] or not applies[name] for name in there}
    return holds, [name for name in applies if applies[name]]


def _every_part(rollout: Rollout, holds: Callable[[Turn | TrainingRow], bool]) -> bool:
    """Whether a condition holds for the training row, or for every call."""
    row = rollout.training_row
    return (row is not None and holds(row)) or (bool(rollout.turns) and all(holds(turn) for turn in rollout.turns))


def _logs_experts(rollout: Rollout) -> bool:
    parts: list[Turn | TrainingRow] = [*rollout.turns]
    parts += [rollout.training_row] if rollout.training_row is not None else []
    return any(part.extras.routing for part in parts)


def _all_scored(values: Logprobs | None, tokens: Mask | None = None) -> bool:
    """Whether every token, or every one in the mask, has a logprob."""
    return values is not None and not bool(np.isnan(values if tokens is None else values[tokens]).any())


def _find_holders(rows: Sequence[Row], paths: Sequence[str]) -> Holders:
    """The objects at each path in all rows; paths that no row has are left out."""
    holders = []
    for path in paths:
        # A key, with None, or for each entry of a list "" or a key it needs.
        matches = [re.fullmatch(r"(\w+)(?:\[(\w*)\])?", step) for step in path.split(".")]
        steps = tuple((match[1], match[2]) for match in matches if match is not None)
        if not steps or any(steps[0][0] in row for row in rows):
            holders.append([holder for row in rows for holder in _objects_at(row, steps)])
    return holders


def _objects_at(row: Any, steps: tuple[tuple[str, str | None], ...]) -> Iterator[Row | None]:
    """The objects at a path below a value, JSON texts parsed; None for one that is missing."""
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
        yield from _objects_at(value, tuple(rest))
        return
    entries = [part for part in value if isinstance(part, dict)] if isinstance(value, list | tuple) else []
    for part in entries:
        if not entry or _has_value(part.get(entry)):
            yield from _objects_at(part, tuple(rest))


def _has_value(value: Any) -> bool:
    """Whether a value is there: not None, NaN or empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    return not isinstance(value, str | list | tuple | dict | np.ndarray) or len(value) > 0


def _states(holder: Row | None, names: Sequence[str]) -> bool:
    return holder is not None and any(_has_value(holder.get(name)) for name in names)


def _any_states(holders: Holders, names: Sequence[str]) -> bool:
    """Whether at some path every object has a value under one of these names."""
    return any(bool(objects) and all(_states(holder, names) for holder in objects) for objects in holders)


def _model_name(rollout: Rollout, holders: Holders) -> str | None:
    """The model's name, if every row states one that is no placeholder."""
    if rollout.stated.model is not None:
        return rollout.stated.model
    names = all_facts()["model"].names
    for objects in holders:
        models = [
            next(filter(None, (model_name(holder.get(name)) for name in names if holder)), None)
            for holder in objects
        ]
        if models and all(models):
            return models[0]
    return None


def _sampling_params(holders: Holders) -> list[Row]:
    """The sampling parameters of every row, a temperature among them; [] if a row has none."""
    for objects in holders:
        parameters: list[Row] = []
        for holder in objects:
            inside = [next(_objects_at(holder[key], ())) for key in _SAMPLING if key in holder] if holder else []
            parameters += islice((part for part in (holder, *inside) if part and _states(part, _TEMPERATURE)), 1)
        if objects and len(parameters) == len(objects):
            return parameters
    return []
