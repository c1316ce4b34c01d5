"""verl: audits batches before the actor is updated, in both of its trainers.

verl-project/verl: `RayPPOTrainer._update_actor(batch: DataProto)` of `verl/trainer/ppo/ray_trainer.py`, and from
0.9 on `PPOTrainer._update_actor(batch: KVBatchMeta, metrics)` of `verl/trainer/ppo/v1/trainer_base.py`, whose
batch is in TransferQueue. By then it has the sampler's logprobs, if `rollout.calculate_log_probs` asks for them,
and the trainer's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from tito_audit.format import Row
from tito_audit.integrations.batch_gate import BatchGate, require_version
from tito_audit.run.batch import column

__all__ = ["audit", "install"]

require_version("verl")
_COLUMNS = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs", "old_log_probs")


def install(gate: BatchGate) -> None:
    """Make every trainer of this process audit its batches.

    Trainers run in a Ray worker: call it in a module that `VERL_USE_EXTERNAL_MODULES` names, which verl imports
    in every process. Numbers go to the metrics of the step, and with them to each tracker.
    """
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    update = RayPPOTrainer._update_actor

    def update_actor(trainer: Any, batch: Any) -> Any:
        metrics = audit(gate, batch, trainer.global_steps)
        output = update(trainer, batch)
        output.meta_info["metrics"].update(metrics)
        return output

    RayPPOTrainer._update_actor = update_actor
    if importlib.util.find_spec("verl.trainer.ppo.v1") is not None:
        _install_v1(gate)


def audit(gate: BatchGate, batch: Any, step: int) -> dict[str, float]:
    """Audit a `DataProto` in a training loop of your own; failing rows leave the loss by its `response_mask`.

    Returns the metrics; {} if the step is not audited.
    """
    if not gate.due(step):
        return {}
    gated = gate.check(step, _rows(batch.batch))
    if gated.masked.any():
        mask = batch.batch["response_mask"]
        batch.batch["response_mask"] = mask * torch.as_tensor(~gated.masked, device=mask.device)[:, None]
    return gated.metrics


def _install_v1(gate: BatchGate) -> None:
    """Make the trainer of verl 0.9 audit its batches: nested tensors without padding, in TransferQueue."""
    import transfer_queue
    from tensordict import TensorDict
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    update = PPOTrainer._update_actor

    def update_actor(trainer: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        step = trainer.global_steps
        if gate.due(step):
            place = {"keys": batch.keys, "partition_id": batch.partition_id}
            names = [name for name in _COLUMNS if name != "attention_mask"]
            data = transfer_queue.kv_batch_get(**place, select_fields=names)
            gated = gate.check(step, _rows(data))
            metrics.update(gated.metrics)
            if gated.masked.any():
                masks = [
                    mask * (not out)
                    for mask, out in zip(data["response_mask"].unbind(), gated.masked, strict=True)
                ]
                new = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
                fields = TensorDict({"response_mask": new}, batch_size=len(masks))
                batch = transfer_queue.kv_batch_put(**place, fields=fields)
        return update(trainer, batch, metrics=metrics)

    PPOTrainer._update_actor = update_actor


def _rows(batch: Any) -> Sequence[Row]:
    """The samples of a batch; a mask of zeros is left out, since it says nothing about the tokens."""
    present = set(batch.keys())
    columns = {name: column(name, batch[name]).rows for name in _COLUMNS if name in present}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for row in rows:
        if not row["response_mask"].any():
            del row["response_mask"]
    return rows
