"""Tokens that older weights draw, and what the newest give them: `python tests/mismatch/stale.py MODEL OUT SEED`,
where torch and transformers are installed, adds `versions=1` to `versions=8` to OUT, and the same as `small steps
versions=N` at a fifth of the learning rate.

Each version draws a token after each context of pieces of the Python documentation and standard library
(`engines.py`), other ones than those on which the thresholds were chosen. Then one step of AdamW, by policy
gradient on three of the pieces, raises the odds of tokens that the text has. Version 8 scores all, in float32.
"""

# mypy: ignore-errors
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from engines import prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

RATES = {"": 2e-5, "small steps ": 4e-6}
VERSIONS, ROWS, TRAINED, PROMPT, SHORTEST, LONGEST = 8, 10, 3, 12, 42, 120


def distributions(model, ids):
    """`[N, V]` the logprobs after each context behind the prompt."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0, PROMPT - 1 : -1].float(), -1)


def main(folder, out, seed):
    """Draw and train, version by version; score; add."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for number, (name, rate) in enumerate(RATES.items()):
        torch.manual_seed(seed + number)
        rng = np.random.default_rng(seed + number)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        packed = dict(np.load(out)) if Path(out).exists() else {}
        np.savez_compressed(out, **{**packed, **measured(model, tokenizer, rng, rate, name)})


def measured(model, tokenizer, rng, rate, prefix):
    """The columns of one run with one learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    drawn, rows = [], list(prompts(tokenizer, rng, ROWS, SHORTEST, LONGEST))
    for _ in range(VERSIONS):
        drawn.append([])
        optimizer.zero_grad()
        trained = set(rng.permutation(ROWS)[:TRAINED].tolist())
        for number, ids in enumerate(rows):
            with torch.set_grad_enabled(number in trained):
                logprobs = distributions(model, ids)
            tokens = torch.multinomial(logprobs.detach().exp(), 1)
            values = logprobs.gather(1, tokens)[:, 0]
            drawn[-1].append((tokens, values.detach()))
            if number in trained:
                reward = (tokens[:, 0] == torch.tensor(ids[PROMPT:])).float()
                (-(reward - reward.mean()) * values).mean().div(TRAINED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        newest = [distributions(model, ids) for ids in rows]
    columns = {}
    for distance, pairs in enumerate(reversed(drawn), start=1):
        scored = [newer.gather(1, tokens)[:, 0] for newer, (tokens, _) in zip(newest, pairs, strict=True)]
        name = f"{prefix}versions={distance}"
        columns[name] = torch.stack((torch.cat([values for _, values in pairs]), torch.cat(scored))).numpy()
        columns[f"lengths {name}"] = np.array([len(values) for values in scored], np.int32)
        print(name, columns[name].shape[1], np.abs(np.diff(columns[name], axis=0)).mean(), flush=True)
    return columns


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
