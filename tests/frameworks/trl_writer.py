"""A GRPO run of TRL on a CPU: a tiny model, two turns with a tool's text between them, a gate, and a planted
fault.

`python trl_writer.py FOLDER FAULT GATE` prints what happened as JSON. FAULT is in `FAULTS`, or `none`, planted
from the second batch on. GATE is `off`, `callback` (stops the run), `masks` (the callback, which masks and goes
on) or `rollouts` (the wrapper of the rollout function, which stops the run).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2ForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from tests.tiny_model import build_tiny_model
from tito_audit import Settings
from tito_audit.integrations import BatchGate, GateError
from tito_audit.integrations.trl import AuditCallback, audited_rollouts

STEPS, FROM = 8, 2
"""Steps of a run, two of each batch; the step from which the fault is planted."""
TOKENS = 24
"""Of each turn, at most."""
END = "<|im_end|>"
PROMPT = f"<|im_start|>user\nWhat is the weather in {{}}?{END}\n<|im_start|>assistant\n"
TOOL = f"\n<|im_start|>user\n<tool_response>\n{{}}\n</tool_response>{END}\n<|im_start|>assistant\n"
WORDS = "the weather is warm cold sunny rainy in Rome Oslo Paris Lima today again and I ask call tool now"
WORDS = WORDS.split(" ")


def pretrained(folder: Path) -> Path:
    """A tiny model that has learnt to speak in turns, made once."""
    if (folder / "learnt").exists():
        return folder
    build_tiny_model(folder, context=512)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), Qwen2ForCausalLM.from_pretrained(folder)
    draw = random.Random(0)

    def answer() -> list[int]:
        """An answer of some words, some in two tokens that encode as one."""
        words = " ".join(draw.choices(WORDS, k=draw.randint(4, 9))) + "." + END
        cut = draw.randint(1, 24)
        return [*tokenizer.encode(words[:cut]), *tokenizer.encode(words[cut:])]

    def conversation() -> list[int]:
        texts = PROMPT.format(draw.choice(WORDS)), TOOL.format(draw.randint(0, 99))
        return [token for text in texts for token in (*tokenizer.encode(text), *answer())]

    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(120):
        rows = [conversation() for _ in range(8)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        model(input_ids=ids, attention_mask=(labels >= 0).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    (folder / "learnt").touch()
    return folder


def sampled(model: Any, ids: list[int], seed: int) -> tuple[list[int], list[float]]:
    """The tokens of a turn with their logprobs, sampled one by one."""
    random = torch.Generator().manual_seed(seed)
    new: list[int] = []
    logprobs: list[float] = []
    cache, fed = None, torch.tensor([ids])
    for _ in range(TOKENS):
        out = model(fed, past_key_values=cache, use_cache=True)
        cache, scores = out.past_key_values, out.logits[0, -1].log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1, generator=random))
        new.append(token)
        logprobs.append(float(scores[token]))
        fed = torch.tensor([[token]])
        if token == model.config.eos_token_id:
            break
    return new, logprobs


def late(values: list[Any]) -> list[Any]:
    """A column that is one place late."""
    return [values[0], *values[:-1]]


class Rollouts:
    """A rollout function of two turns, with a fault."""

    def __init__(self, folder: Path, tokenizer: Any, fault: str) -> None:
        self.folder, self.tokenizer, self.fault, self.old, self.seconds = folder, tokenizer, fault, None, 0.0

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        started = time.perf_counter()
        model, step = trainer.model, trainer.state.global_step
        if self.old is None:  # not a copy of the trainer's, whose forward is bound to it
            self.old = Qwen2ForCausalLM.from_pretrained(self.folder).eval()
        fault = self.fault if step >= FROM else "none"
        sampler = self.old if fault == "old weights" else model
        training = model.training
        model.eval()
        rows = [self.row(sampler, prompt, 1000 * step + n, fault) for n, prompt in enumerate(prompts)]
        model.train(training)
        self.seconds += time.perf_counter() - started
        return {name: [row[name] for row in rows] for name in rows[0]}

    def row(self, model: Any, prompt: str, seed: int, fault: str) -> dict[str, Any]:
        ids = self.tokenizer.encode(prompt)
        first, logprobs = sampled(model, ids, seed)
        over = "" if first[-1] == self.tokenizer.eos_token_id else END
        tool = self.tokenizer.encode(over + TOOL.format(seed % 90))
        history, columns = first, logprobs
        if fault == "re-tokenized":
            history = self.tokenizer.encode(self.tokenizer.decode(first), add_special_tokens=False)
            added = len(history) - len(first)  # what such a loop does: it cuts, or fills up
            columns = logprobs[: len(history)] + [0.0] * added
        second, more = sampled(model, ids + history + tool, seed + 500)
        row = {
            "prompt_ids": ids,
            "completion_ids": history + tool + second,
            "logprobs": columns + [0.0] * len(tool) + more,
            "env_mask": [1] * len(history) + [0] * len(tool) + [1] * len(second),
            "calls": [
                {"prompt_token_ids": ids, "completion_token_ids": first, "logprobs": logprobs},
                {"prompt_token_ids": ids + history + tool, "completion_token_ids": second, "logprobs": more},
            ],
        }
        if fault == "mask off by one":
            row["env_mask"] = late(row["env_mask"])
        if fault == "logprobs rolled":
            row["logprobs"] = late(row["logprobs"])
        return row


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [len(set(ids)) / len(ids) for ids in completion_ids]


class Losses(TrainerCallback):
    """What the trainer logs."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append({**logs, "step": state.global_step})


def trained(folder: Path, fault: str, gate_kind: str) -> dict[str, Any]:
    """One run."""
    set_seed(0)
    torch.set_num_threads(1)
    model = pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    log = folder / f"{fault}-{gate_kind}.jsonl".replace(" ", "-")
    gate = BatchGate(
        Settings(fail_on="warning", tokenizer=str(model)),
        mask=True,
        max_rate=None if gate_kind == "masks" else 0.0,
        quarantine=log,
    )
    rollouts = Rollouts(model, tokenizer, fault)
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        num_generations=4,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        max_completion_length=64,
        learning_rate=3e-3,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=7,
        beta=0.0,
    )
    losses = Losses()
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(model),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT.format(city) for city in WORDS[8:12] * 2]}),
        rollout_func=audited_rollouts(rollouts, gate) if gate_kind == "rollouts" else rollouts,
        callbacks=[losses],
    )
    if gate_kind in ("callback", "masks"):
        trainer.add_callback(AuditCallback(trainer, gate))
    stopped = None
    started = time.perf_counter()
    try:
        trainer.train()
    except GateError as error:
        stopped = {"step": error.step, "message": str(error)}
    rows = log.read_text().splitlines() if log.exists() else []
    return {
        "stopped": stopped,
        "losses": [entry["loss"] for entry in losses.logged if "loss" in entry],
        "gate": [
            {k: v for k, v in entry.items() if k.startswith("tito/") or k == "step"} for entry in losses.logged
        ],
        "quarantined": [json.loads(row)["tito_gate"] for row in rows],
        "log": str(log),
        "seconds": time.perf_counter() - started,
    }


if __name__ == "__main__":
    folder, fault, how = sys.argv[1:]
    print(json.dumps(trained(Path(folder), fault, how)))
