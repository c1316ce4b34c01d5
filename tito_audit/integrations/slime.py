"""slime and miles: audit samples when their rollout is logged, before they become training data.

    --custom-rollout-log-function-path tito_audit.integrations.slime.log_rollout_data
    --custom-config-path gate.yaml

THUDM/slime `slime/observability/rollout_metrics.py`, radixark/miles `miles/ray/rollout/metrics.py`. The function
gets the samples with the number of the rollout, and the numbers that are logged next; `remove_sample` takes a
sample out of the loss (`slime/ray/rollout.py`, `miles/ray/rollout/train_data_conversion.py`). The configuration
has one key, `tito_audit`, with the options of a gate and of `Settings`. The trainer's logprobs are not known yet;
slime 0.3 has them where `rollout_data` below is called.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tito_audit.errors import SetupError
from tito_audit.format import Row
from tito_audit.integrations.batch_gate import BatchGate, GatedBatch, require_version
from tito_audit.run.batch import column

__all__ = ["log_rollout_data", "rollout_data"]

for _name in [name for name in ("slime", "miles") if importlib.util.find_spec(name)] or ["slime"]:
    require_version(_name)
_COLUMNS = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "index", "reward")
_gates: dict[str, BatchGate] = {}


def log_rollout_data(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """Audit the samples of a rollout: the function for `--custom-rollout-log-function-path`.

    Failing samples leave the loss by `remove_sample`; their reward stays in the baseline of their group. Numbers
    are logged with the trainer's own, or to Python's log if the rollout function returned no metrics.
    """
    gate = _gate_of(args)
    if not gate.due(rollout_id):
        return False
    flat = [part for sample in samples for part in (sample if isinstance(sample, list) else [sample])]
    rows = []
    for sample in flat:
        row: dict[str, Any] = {name: getattr(sample, name, None) for name in _COLUMNS}
        row["status"] = sample.status.value
        if sample.remove_sample:  # left out of the loss already
            row["loss_mask"] = [0] * row["response_length"]
        metadata = sample.metadata or {}
        row["metadata"] = {name: metadata[name] for name in ("messages", "tools") if name in metadata}
        rows.append(row)
    gated = gate.check(rollout_id, rows)
    for sample, out in zip(flat, gated.masked, strict=True):
        sample.remove_sample = sample.remove_sample or bool(out)
    if rollout_extra_metrics is None:
        _log_metrics(rollout_id, gated)
    else:
        rollout_extra_metrics.update(gated.metrics)
    return False  # the trainer logs its own numbers too


def rollout_data(args: Any, rollout_id: int, data: dict[str, Any]) -> None:
    """Audit what a rank of slime trains, with the trainer's logprobs: for `--rollout-data-postprocess-path`.

    Failing rows leave the loss by `loss_masks`. Ranks without logprobs, and ranks that hold a part of each
    response (context parallelism), audit nothing.
    """
    gate = _gate_of(args)
    trainer = data.get("log_probs")
    if trainer is None or not gate.due(rollout_id):
        return
    lengths = [int(length) for length in data["response_lengths"]]
    if [len(values) for values in trainer] != lengths:
        return
    names = {"tokens": "tokens", "loss_masks": "loss_mask", "rollout_log_probs": "rollout_log_probs"}
    names["log_probs"] = "trainer_logprobs"
    columns = {to: column(name, list(data[name])).rows for name, to in names.items() if data.get(name) is not None}
    rows: list[Row] = [
        {name: values[number] for name, values in columns.items()} | {"response_length": length}
        for number, length in enumerate(lengths)
    ]
    gated = gate.check(rollout_id, rows)
    _log_metrics(rollout_id, gated)
    for number in np.flatnonzero(gated.masked):
        data["loss_masks"][number] = data["loss_masks"][number] * 0


def _log_metrics(rollout_id: int, gated: GatedBatch) -> None:
    """Log to Python's log, where no tracker is at hand; a warning if rows leave the loss."""
    level = logging.WARNING if gated.masked.any() else logging.INFO
    logging.getLogger(__name__).log(level, "rollout %s: %s", rollout_id, gated.metrics)


def _gate_of(args: Any) -> BatchGate:
    """The gate that the options of a run describe, made once."""
    options = getattr(args, "tito_audit", None) or {}
    if not isinstance(options, Mapping):
        raise SetupError(f"tito_audit: {options!r} are no options by name.")
    key = repr(options)
    if key not in _gates:
        _gates[key] = BatchGate.of(options)
    return _gates[key]
