"""Draws tokens of `smollm2.npz`: `python tests/mismatch/sample.py MODEL IDS OUT`, where torch and transformers are
installed.

IDS is JSON, a list of conversations as `[ids, number of prompt tokens]`. At each answered token, one token is
drawn from what each setting makes of the model's distribution there, in float32; the trainer's value is the plain
logprob. Weights of version k are the model's after k steps of AdamW (three conversations a step); each samples,
and those of version 8 score. In bfloat16 the model samples, and in float32 it scores.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

SETTINGS = (
    *({"temperature": value} for value in (0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.4)),
    *({"top_p": value} for value in (0.7, 0.8, 0.9, 0.95, 0.99)),
    *({"top_k": value} for value in (10, 20, 50)),
    *({"min_p": value} for value in (0.02, 0.05, 0.1)),
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.05},
)
IN_BFLOAT16 = ({}, {"temperature": 0.6}, {"temperature": 0.8}, {"temperature": 1.2}, {"top_p": 0.9})
VERSIONS = 8


@torch.no_grad()
def distributions(model, conversations):
    """`[N, V]` the logprobs after each context."""
    parts = (model(torch.tensor(ids)[None]).logits[0, start - 1 : -1].float() for ids, start in conversations)
    return torch.cat([torch.log_softmax(part, -1) for part in parts])


def draw(logprobs, setting):
    """Ids and processed logprobs of a token for each context, in blocks that fit the memory."""
    ids, values = [], []
    for block in logprobs.split(300):
        ordered, names = torch.sort(
            torch.log_softmax(block / setting.get("temperature", 1.0), -1), descending=True
        )
        shares = ordered.exp()
        keep = torch.ones_like(shares, dtype=torch.bool)
        if "top_k" in setting:
            keep[:, setting["top_k"] :] = False
        if "top_p" in setting:
            keep &= shares.cumsum(1) - shares < setting["top_p"]
        if "min_p" in setting:
            keep &= shares >= setting["min_p"] * shares[:, :1]
        ordered = torch.log_softmax(ordered.masked_fill(~keep, -math.inf), -1)
        at = torch.multinomial(ordered.exp(), 1)
        ids.append(names.gather(1, at))
        values.append(ordered.gather(1, at))
    return torch.cat(ids), torch.cat(values)[:, 0]


def columns(sampler, trainer, setting):
    """`[2, N]` the sampler's and the trainer's logprobs."""
    ids, values = draw(sampler, setting)
    return torch.stack((values, trainer.gather(1, ids)[:, 0])).numpy()


def main(folder, path, out):
    torch.manual_seed(0)
    conversations = json.loads(Path(path).read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = distributions(model, conversations)
    measured = dict(np.load(out)) if Path(out).exists() else {}
    for setting in SETTINGS:
        measured["+".join(f"{k}={v}" for k, v in setting.items())] = columns(plain, plain, setting)
    half = distributions(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), conversations)
    for setting in IN_BFLOAT16:
        name = " ".join(["bfloat16", *(f"{k}={v}" for k, v in setting.items())])
        measured[name] = columns(half, plain, setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, betas=(0.9, 0.95), weight_decay=0.0)
    rng, drawn, current = np.random.default_rng(0), [], plain
    for _ in range(VERSIONS):
        drawn.append(draw(current, {}))
        model.train()
        optimizer.zero_grad()
        for index in rng.integers(0, len(conversations), 3):
            ids = torch.tensor(conversations[index][0][:256])[None]
            (model(ids, labels=ids).loss / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        current = distributions(model.eval(), conversations)
    for version, (ids, values) in enumerate(drawn):
        trainer = current.gather(1, ids)[:, 0]
        measured[f"versions={VERSIONS - version}"] = torch.stack((values, trainer)).numpy()
    np.savez_compressed(out, **measured)


if __name__ == "__main__":
    main(*sys.argv[1:])
