"""Tokens of a small mixture of experts, with the experts of both sides: `python tests/mismatch/experts.py OUT
SECONDS`, with torch and transformers, adds columns to OUT.

It learns the bytes of this checkout for so many seconds. Then a token is drawn after each context in bfloat16, and
from the model with a router that is rounded to few bits; the model scores both in float32.
"""

# mypy: ignore-errors
from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LAYERS, EXPERTS, TOP, WINDOW, ROWS = 4, 16, 2, 256, 24


def windows(torch, data, rows, length):
    """Pieces of the text, drawn at random."""
    at = torch.randint(0, len(data) - length, (rows,)).tolist()
    return torch.stack([data[start : start + length] for start in at])


def trained(torch, model, data, seconds, rows, length, rate, device="cpu"):
    """A model after so many seconds of training on pieces of the text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch = windows(torch, data, rows, length)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"loss {loss.item():.3f} nats a byte", flush=True)
    return model.eval()


def learned(torch, data, seconds):
    """A mixture of experts that has learned the text."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 96, "head_dim": 32}
    sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    routing = {"num_experts": EXPERTS, "num_experts_per_tok": TOP, "norm_topk_prob": True}
    routing |= {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, **sizes, **routing))
    return trained(torch, model, data, seconds, 8, 128, 2e-3)


def forward(torch, model, ids):
    """`[R, W, V]` logprobs and `[R, W, L, K]` experts."""
    with torch.no_grad():
        out = model(input_ids=ids, output_router_logits=True)
    routers = torch.stack([logits.float().reshape(*ids.shape, EXPERTS) for logits in out.router_logits], 2)
    return torch.log_softmax(out.logits.float(), -1), routers.topk(TOP, -1).indices.sort(-1).values


def main(out, seconds):
    """Train, draw, score, add."""
    import torch

    torch.manual_seed(0)
    texts = b"\n".join(path.read_bytes() for path in sorted((ROOT / "tito_audit").rglob("*.py")))
    data = torch.tensor(list(texts), dtype=torch.long)
    model = learned(torch, data, seconds)
    ids = windows(torch, data, ROWS, WINDOW)
    trainer, experts = forward(torch, model, ids)
    coarse = copy.deepcopy(model)
    for name, weight in coarse.named_parameters():
        if name.endswith("mlp.gate.weight"):
            step = weight.abs().max() / 16
            weight.data = (weight / step).round() * step
    packed = dict(np.load(out)) if Path(out).exists() else {}
    for name, side in (("bfloat16", copy.deepcopy(model).to(torch.bfloat16)), ("coarse router", coarse)):
        logprobs, own = forward(torch, side, ids)
        drawn = torch.multinomial(logprobs.exp().flatten(0, 1), 1).reshape(ROWS, WINDOW, 1)
        pair = torch.stack([scores.gather(-1, drawn)[..., 0].flatten() for scores in (logprobs, trainer)])
        packed[f"experts {name}"] = pair.numpy()
        packed[f"lengths experts {name}"] = np.full(ROWS, WINDOW, np.int32)
        packed[f"both experts {name}"] = torch.stack((own, experts)).flatten(1, 2).numpy().astype(np.int8)
    np.savez_compressed(out, **packed)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
