"""verl's trainers with a gate: `python verl_writer.py FOLDER v0|v1` prints what the actor is trained on, as JSON.

The classes, and the batches in their own types, are verl's; the update of the actor itself needs a cluster, and is
left out. TransferQueue is asked in this process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transfer_queue
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tito_audit.integrations import BatchGate, GateError
from tito_audit.integrations.verl import install

SIZE, PROMPT, RESPONSE = 8, 6, 20


def batch(faulty: int) -> dict[str, torch.Tensor]:
    """Prompts padded on the left and responses on the right; the first rows have a logprob above zero."""
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(300, 900, (SIZE, PROMPT), generator=random)
    response = torch.randint(300, 900, (SIZE, RESPONSE), generator=random)
    seen = torch.ones(SIZE, PROMPT + RESPONSE, dtype=torch.long)
    seen[:, :2] = seen[:, -3:] = 0
    mask = seen[:, PROMPT:].clone()
    logprobs = -(0.1 - torch.rand(SIZE, RESPONSE, generator=random).log()) * mask
    logprobs[:faulty, 5] = 0.5
    columns = {"prompts": prompt, "responses": response, "attention_mask": seen, "response_mask": mask}
    return {**columns, "rollout_log_probs": logprobs, "old_log_probs": logprobs - 0.001 * mask}


def v0(gate: BatchGate, faulty: int, step: int) -> dict[str, Any]:
    trained = []

    def update(trainer: Any, data: DataProto) -> DataProto:
        trained.append(data.batch["response_mask"].any(-1).tolist())
        return DataProto.from_single_dict(data={}, meta_info={"metrics": {"actor/loss": 0.5}})

    RayPPOTrainer._update_actor = update
    install(gate)
    trainer = SimpleNamespace(global_steps=step)
    output = RayPPOTrainer._update_actor(trainer, DataProto.from_single_dict(batch(faulty)))
    return {"trained": trained[0], "metrics": output.meta_info["metrics"]}


def v1(gate: BatchGate, faulty: int, step: int) -> dict[str, Any]:
    nested = {}
    for name, values in batch(faulty).items():
        inside = slice(2, None) if name == "prompts" else slice(0, RESPONSE - 3)
        if name != "attention_mask":
            nested[name] = torch.nested.as_nested_tensor([v[inside] for v in values], layout=torch.jagged)
    stored = TensorDict(nested, batch_size=SIZE)
    meta = SimpleNamespace(keys=[str(n) for n in range(SIZE)], partition_id="train")

    def put(keys: list[str], partition_id: str, fields: TensorDict) -> Any:
        stored.update(fields)
        return meta

    transfer_queue.kv_batch_get = lambda keys, partition_id, select_fields: stored.select(*select_fields)
    transfer_queue.kv_batch_put = put
    trained = []

    def update(trainer: Any, data: Any, metrics: dict[str, Any]) -> Any:
        trained.append([bool(mask.any()) for mask in stored["response_mask"].unbind()])
        return data

    PPOTrainer._update_actor = update
    install(gate)
    metrics: dict[str, Any] = {}
    PPOTrainer._update_actor(SimpleNamespace(global_steps=step), meta, metrics=metrics)
    return {"trained": trained[0], "metrics": metrics}


if __name__ == "__main__":
    folder, which = sys.argv[1:]
    run = {"v0": v0, "v1": v1}[which]
    log = Path(folder) / f"{which}.jsonl"
    out = run(BatchGate(max_rate=0.2, quarantine=log), 1, 1)
    try:
        run(BatchGate(max_rate=0.2), SIZE, 2)
    except GateError as error:
        out["stopped"] = str(error).split(":")[0] + ":" + str(error).split(":")[1]
    print(json.dumps({**out, "log": str(log)}))
