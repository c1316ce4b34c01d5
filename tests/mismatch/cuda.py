"""What arithmetic alone makes of logprobs on a GPU: `python tests/mismatch/cuda.py SECONDS`, with torch and
transformers.

A small Llama learns the bytes of this checkout for so many seconds; then each precision samples with a cache of
keys and values, and each scores the whole sequence in one forward pass. It prints |difference| for each pair.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = ("float32", "bfloat16", "float16")
WINDOW, BATCH = 512, 48
ROWS, PROMPT, SAMPLED = 96, 64, 192


def starts(torch: Any, data: Any, rows: int, length: int) -> Any:
    """Pieces of the text, drawn at random."""
    at = torch.randint(0, len(data) - length, (rows,)).tolist()
    return torch.stack([data[start : start + length] for start in at])


def learned(torch: Any, data: Any, seconds: float) -> Any:
    """A model after so many seconds of training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=4, max_position_embeddings=1024, **shape)
    model = LlamaForCausalLM(config).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch = starts(torch, data, BATCH, WINDOW)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"loss {loss.item():.3f} nats a byte")
    return model.eval()


def sampled(torch: Any, model: Any, prompt: Any) -> tuple[Any, Any]:
    """Sequences `[R, P + S]` sampled token by token, and their logprobs `[R, S]`."""
    cache, ids, values, last = None, prompt, [], prompt
    for _ in range(SAMPLED):
        out = model(input_ids=last, past_key_values=cache, use_cache=True)
        cache, scores = out.past_key_values, torch.log_softmax(out.logits[:, -1].float(), -1)
        last = torch.multinomial(scores.exp(), 1)
        values.append(scores.gather(-1, last))
        ids = torch.cat([ids, last], 1)
    return ids, torch.cat(values, 1)


def main(seconds: float) -> None:
    """Train, sample, score, print."""
    import torch

    torch.manual_seed(0)
    texts = b"\n".join(path.read_bytes() for path in sorted((ROOT / "tito_audit").rglob("*.py")))
    data = torch.tensor(list(texts), dtype=torch.long, device="cuda")
    model, prompt = learned(torch, data, seconds), starts(torch, data, ROWS, PROMPT)
    models = {precision: copy.deepcopy(model).to(getattr(torch, precision)) for precision in PRECISIONS}
    print("| sampled in | scored in | median | 99 % below | largest |")
    with torch.no_grad():
        for by in PRECISIONS:
            ids, values = sampled(torch, models[by], prompt)
            for other in PRECISIONS:
                scores = torch.log_softmax(models[other](input_ids=ids).logits.float(), -1)[:, PROMPT - 1 : -1]
                again = scores.gather(-1, ids[:, PROMPT:, None])[..., 0]
                apart = (values - again).abs().double().flatten()
                cells = (apart.median().item(), apart.quantile(0.99).item(), apart.max().item())
                print(f"| {by} | {other} | {' | '.join(f'{cell:.2g}' for cell in cells)} |")


if __name__ == "__main__":
    main(float(sys.argv[1]))
