"""What arithmetic alone makes of logprobs on a GPU: `python tests/mismatch/cuda.py SECONDS`, with torch and
transformers.

A small Llama learns the bytes of this checkout for so many seconds; then each precision samples with a cache of
keys and values, and each scores the whole sequence in one forward pass. It prints |difference| for each pair.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

from experts import trained, windows

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = ("float32", "bfloat16", "float16")
WINDOW, BATCH = 512, 48
ROWS, PROMPT, SAMPLED = 96, 64, 192


def learned(torch: Any, data: Any, seconds: float) -> Any:
    """A small Llama that has learned the text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=4, max_position_embeddings=1024, **shape)
    return trained(torch, LlamaForCausalLM(config).to("cuda"), data, seconds, BATCH, WINDOW, 6e-4, "cuda")


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
    model, prompt = learned(torch, data, seconds), windows(torch, data, ROWS, PROMPT)
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
