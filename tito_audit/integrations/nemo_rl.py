"""NeMo-RL: audits batches before the policy is trained on them.

NVIDIA-NeMo/RL `nemo_rl/algorithms/grpo.py`: `grpo_train` and `async_grpo_train` call `policy.train(train_data,
loss_fn)` with the whole batch of a step, and log the `all_mb_metrics` that it returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tito_audit.integrations.batch_gate import BatchGate, require_version
from tito_audit.run.batch import column

__all__ = ["gated"]

require_version("nemo-rl")
_COLUMNS = ("input_ids", "token_mask", "generation_logprobs", "prev_logprobs", "sample_mask", "input_lengths")


def gated(policy: Any, gate: BatchGate, *, step: int = 0) -> Any:
    """Make a policy audit each batch before it trains on it: `policy = gated(policy, BatchGate())`.

    Call it between `setup(…)` and `grpo_train(policy, …)`. Failing rows leave the loss by `sample_mask`; numbers
    go to the metrics of the step. `step` is the first step of a run that resumes.
    """
    train, steps = policy.train, iter(range(step, 1 << 62))

    def audited(data: Any, *args: Any, **kwargs: Any) -> Any:
        step, metrics = next(steps), dict[str, float]()
        if gate.due(step):
            columns = {
                name: column(name, data[name]).rows if data[name].ndim > 1 else np.asarray(data[name].cpu())
                for name in _COLUMNS
                if name in data
            }
            # All zeros if the trainer did not compute them (`force_on_policy_ratio`).
            if not any(np.any(values) for values in columns.get("prev_logprobs", [])):
                columns.pop("prev_logprobs", None)
            rows = []
            for values in zip(*columns.values(), strict=True):
                row = zip(columns, values, strict=True)
                rows.append({name: value if np.ndim(value) else value.item() for name, value in row})
            checked = gate.check(step, rows)
            metrics = checked.metrics
            if checked.masked.any():
                mask = data["sample_mask"]
                data["sample_mask"] = mask * torch.as_tensor(~checked.masked, device=mask.device)
        results = train(data, *args, **kwargs)
        results["all_mb_metrics"].update({name: [value] for name, value in metrics.items()})
        return results

    policy.train = audited
    return policy
