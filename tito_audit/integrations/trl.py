"""TRL: audits the batches of a GRPOTrainer when they are generated, or what a `rollout_func` returns.

huggingface/trl `trl/trainer/grpo_trainer.py`. The callback audits what `_generate_and_score_completions` returns,
before any loss is computed from it: with the sampler's logprobs, and the trainer's where TRL computes them before
the loss (with vLLM, and wherever a batch is used for more than one step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from tito_audit.errors import GateError, SetupError
from tito_audit.format import Row
from tito_audit.integrations.batch_gate import BatchGate, GatedBatch, require_version
from tito_audit.run.batch import column

__all__ = ["AuditCallback", "audited_rollouts"]

require_version("trl")
_LOGPROBS = {"sampling_per_token_logps": "logprobs", "old_per_token_logps": "trainer_logprobs"}
"""Columns of a batch, as wide as the completion, and their names in the audited rows."""
_EXTRA_COLUMNS = ("calls", "messages", "tools")
"""What a `rollout_func` may return besides, one entry for each completion, that an audit reads."""
Rollouts = Callable[[list[Any], Any], dict[str, Any]]


class AuditCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Audits the batches of a trainer: `trainer.add_callback(AuditCallback(trainer))`.

    Failing rows leave the loss by TRL's own `tool_mask`; their reward stays in the baseline of their group.
    Numbers go to TRL's metrics, and with them to each tracker. All processes stop together.
    """

    def __init__(self, trainer: Any, gate: BatchGate | None = None) -> None:
        self._trainer = trainer
        self.gate = gate or BatchGate()
        self._generate = getattr(trainer, "_generate_and_score_completions", None)
        if self._generate is None:
            raise SetupError(f"AuditCallback audits a GRPOTrainer; {type(trainer).__name__} generates no batches.")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._generate_and_score_completions = self._generate_audited

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del self._trainer._generate_and_score_completions  # the instance's; the class has its own

    def _generate_audited(self, inputs: Any) -> dict[str, Any]:
        """Generate a batch, audit it, and take its failing rows out of the loss."""
        assert self._generate is not None
        batch: dict[str, Any] = self._generate(inputs)
        gated = _gate_step(self.gate, self._trainer, lambda: _rows_of_batch(batch, inputs))
        if gated is None or not gated.metrics["tito/masked_rows"]:
            return batch
        ones = torch.ones_like(batch["completion_mask"])
        mask = batch.get("tool_mask", ones) * torch.as_tensor(~gated.masked, device=ones.device)[:, None]
        left = self._trainer.accelerator.gather((mask * batch["completion_mask"]).sum()).sum()
        return {**batch, "tool_mask": mask, "num_items_in_batch": left.clamp(min=1)}


def audited_rollouts(rollout_func: Rollouts, gate: BatchGate | None = None) -> Rollouts:
    """Make a rollout function audit its output: `GRPOTrainer(..., rollout_func=audited_rollouts(rollout_func))`.

    It sees what the callback cannot: `calls`, `messages` and `tools`, if the function returns them, one entry for
    each completion. Failing rows leave the loss by `env_mask`.
    """
    own = gate or BatchGate()

    def audited(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = rollout_func(prompts, trainer)
        gated = _gate_step(own, trainer, lambda: _rows_of_rollouts(output))
        if gated is None or not gated.masked.any():
            return output
        masks = output.get("env_mask") or [[1] * len(ids) for ids in output["completion_ids"]]
        masks = [[0] * len(mask) if out else mask for mask, out in zip(masks, gated.masked, strict=True)]
        return {**output, "env_mask": masks}

    return audited


def _gate_step(gate: BatchGate, trainer: Any, rows: Callable[[], Sequence[Row]]) -> GatedBatch | None:
    """Audit the batch of this step, and log to the trainer's metrics; None if the step is not audited."""
    step = trainer.state.global_step
    if not trainer.model.training or not gate.due(step):
        return None
    accelerator = trainer.accelerator

    def summed(counts: Sequence[int]) -> Sequence[int]:
        here = torch.tensor([counts], device=accelerator.device)
        return accelerator.gather(here).sum(0).tolist()  # type: ignore[no-any-return]

    process = accelerator.process_index if accelerator.num_processes > 1 else None
    try:
        gated = gate.check(step, rows(), process=process, summed=summed)
    except GateError as error:
        trainer.log(dict(error.metrics))
        raise
    for name, value in gated.metrics.items():
        trainer._metrics["train"][name].append(value)
    return gated


def _rows_of_batch(batch: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]) -> Sequence[Row]:
    """The training rows of a batch, with the calls that a `rollout_func` returned: TRL adds them to the inputs."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", *_LOGPROBS)
    columns = {name: column(name, batch[name]).rows for name in names if batch.get(name) is not None}
    rows: list[Row] = []
    for number, ids in enumerate(columns["completion_ids"]):
        entries = {name: values[number] for name, values in columns.items()}
        prompt = entries["prompt_ids"][entries["prompt_mask"] > 0]
        seen = entries["completion_mask"] > 0
        mask = entries["tool_mask"][seen] if "tool_mask" in entries else seen[seen]
        if not seen.any():  # `mask_truncated_completions` left it out: all but the padding at its end is the row
            seen = np.arange(len(ids)) < len(ids) - np.argmax(ids[::-1] != ids[-1])
        logprobs = {to: entries[name][seen] for name, to in _LOGPROBS.items() if name in entries}
        calls = inputs[number].get("calls") if len(inputs) == len(columns["completion_ids"]) else None
        listed = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
        rows.append(_row(prompt, ids[seen], mask, logprobs, {"calls": calls} if listed else {}))
    return rows


def _rows_of_rollouts(output: Mapping[str, Any]) -> Sequence[Row]:
    more = [name for name in _EXTRA_COLUMNS if isinstance(output.get(name), list)]
    rows: list[Row] = []
    for number, ids in enumerate(output["completion_ids"]):
        values = output["logprobs"][number] if output["logprobs"] else None
        # TRL's server returns the top k logprobs at each position, the sampled token's first.
        logprobs = {} if values is None else {"logprobs": [v[0] if isinstance(v, list) else v for v in values]}
        mask = [1] * len(ids) if output.get("env_mask") is None else output["env_mask"][number]
        rows.append(
            _row(output["prompt_ids"][number], ids, mask, logprobs, {name: output[name][number] for name in more})
        )
    return rows


def _row(prompt: Any, ids: Any, mask: Any, logprobs: Mapping[str, Any], more: Mapping[str, Any]) -> Row:
    """One training row; a mask of zeros is left out, since it says nothing about the tokens."""
    before = len(prompt)
    row: dict[str, Any] = {"token_ids": np.concatenate((prompt, ids)).astype(np.int64), **more}
    trained = np.asarray(mask, np.int64)
    if trained.any():
        row["loss_mask"] = np.concatenate((np.zeros(before, np.int64), trained))
    unknown = np.full(before, np.nan)
    return row | {
        name: np.concatenate((unknown, np.asarray(values, np.float64))) for name, values in logprobs.items()
    }
