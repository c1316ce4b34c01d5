"""prime-rl: the orchestrator audits samples before it sends them to the trainer.

PrimeIntellect-ai/prime-rl `src/prime_rl/orchestrator/orchestrator.py`: `Orchestrator.finalize_train_batch(batch)`
gets the `TrainBatch` of a step, filtered by the orchestrator's own filters, with its `samples`. The trainer's
logprobs are not known yet.
"""

from __future__ import annotations

from typing import Any

from tito_audit.errors import GateError
from tito_audit.integrations.batch_gate import BatchGate, require_version

__all__ = ["install"]

require_version("prime-rl")
_COLUMNS = ("token_ids", "mask", "logprobs", "temperatures", "advantages", "rl_weights", "ce_weights", "env_name")


def install(gate: BatchGate) -> None:
    """Make the orchestrator of this process audit its batches; call it before the orchestrator's `main`.

    Failing samples are not sent; their reward stays in the baseline of their group. Numbers go to the monitors.
    """
    from prime_rl.orchestrator.orchestrator import Orchestrator

    finalize = Orchestrator.finalize_train_batch

    async def finalize_train_batch(self: Any, batch: Any) -> None:
        step = self.progress.step
        if batch.samples and gate.due(step):
            rows = [
                {name: value for name in _COLUMNS if (value := getattr(sample, name, None)) is not None}
                for sample in batch.samples
            ]
            try:
                gated = gate.check(step, rows)
            except GateError as error:
                await _log_metrics(self, dict(error.metrics), step)
                raise
            batch.samples = [sample for sample, out in zip(batch.samples, gated.masked, strict=True) if not out]
            await _log_metrics(self, gated.metrics, step)
        await finalize(self, batch)

    Orchestrator.finalize_train_batch = finalize_train_batch


async def _log_metrics(orchestrator: Any, metrics: dict[str, float], step: int) -> None:
    """Log to the orchestrator's monitor, or, after 0.8.0, to the module `monitors`."""
    if hasattr(orchestrator, "monitor"):
        orchestrator.monitor.log(metrics, step=step)
    else:
        from prime_rl import monitors

        await monitors.log(metrics, step=step)
