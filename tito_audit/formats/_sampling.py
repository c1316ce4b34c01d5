"""How tokens were sampled, where logs say it: temperature, top-p, top-k and min-p of a row or of its calls.

Servers' requests and SGLang's `sampling_params` name them per call, tinker and SkyRL per row, verl in `meta_info`,
prime-rl a temperature per token (`temperatures`), verifiers in `sampling_args`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.format import Row
from tito_audit.formats._calls import CALL_LISTS
from tito_audit.formats._columns import is_list, plain
from tito_audit.record.by_name import SAMPLING, versions_and_trainers
from tito_audit.record.rollout import Rollout

_SETTINGS = ("temperature", "top_p", "top_k", "min_p")
_PER_TOKEN = ("temperatures", "completion_temperatures")
_HOLDERS = (
    *("sampling_params", "sampling_args", "sampling", "sampling_config", "generation_config", "generation_kwargs"),
    *("request", "response", "body", "config", "meta_info", "metadata", "extra_info", "extra_body"),
)
_MOST_CALLS = 256
_NAMED_OR_HELD = frozenset((*_SETTINGS, *_PER_TOKEN, *_HOLDERS, *CALL_LISTS))


def with_sampling(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """The rollouts of a row, those with a trainer's logprobs with what the row says about the sampling."""
    if _NAMED_OR_HELD.isdisjoint(row):
        return rollouts
    with_trainer = [versions_and_trainers(rollout)[1] for rollout in rollouts]
    if not any(with_trainer):
        return rollouts
    settings = _agreed(row)
    if not settings:
        return rollouts
    return [
        replace(rollout, stated=rollout.stated.with_facts(**{SAMPLING: settings})) if compared else rollout
        for rollout, compared in zip(rollouts, with_trainer, strict=True)
    ]


def _agreed(row: Row) -> dict[str, float]:
    """What the row says, or what all of its calls say alike."""
    settings = _in_object(row, 2)
    lists = (value for name in CALL_LISTS if isinstance(value := row.get(name), list | tuple))
    calls = [
        _in_object(call, 2) for calls in lists for call in calls[:_MOST_CALLS] if isinstance(call, dict | Mapping)
    ]
    for name in _SETTINGS:
        values = {call.get(name) for call in calls}
        if len(values) > 1:
            settings.pop(name, None)  # calls that were sampled in several ways
        elif values and (value := values.pop()) is not None:
            settings[name] = value
    return settings


def _in_object(holder: Mapping[str, Any], deep: int) -> dict[str, float]:
    settings: dict[str, float] = {}
    for name in _HOLDERS if deep else ():
        if isinstance(inner := holder.get(name), dict | Mapping):
            settings |= _in_object(inner, deep - 1)
    for name in _SETTINGS:
        value = holder.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            settings[name] = float(value)
    for name in _PER_TOKEN:
        if is_list(values := holder.get(name)) and len(values):
            # 0 where nothing was sampled.
            distinct = {value for value in plain(values) if isinstance(value, int | float) and value}
            if len(distinct) == 1:
                settings["temperature"] = float(distinct.pop())
    return settings
