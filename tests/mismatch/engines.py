"""Tokens that vLLM samples, and what transformers gives them: `python tests/mismatch/engines.py MODEL OUT SEED`,
where vllm is installed, adds columns to OUT.

Prompts are pieces of the Python documentation and of the standard library. vLLM samples with its cache and returns
processed logprobs; transformers scores each sequence in one pass and knows nothing of the sampling. Then pairs of
sampled tokens become two others with the same text, and it scores what became of the rows.
"""

# mypy: ignore-errors
from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

import numpy as np

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SETTINGS = (
    {},
    *({"temperature": value} for value in (0.6, 0.75, 0.85, 0.9, 1.1, 1.15, 1.3, 1.4)),
    *({"top_p": value} for value in (0.7, 0.75, 0.85, 0.9, 0.97, 0.99)),
    *({"top_k": value} for value in (15, 40, 100)),
    *({"min_p": value} for value in (0.03, 0.08)),
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.05},
)
IN_BFLOAT16 = ({}, {"temperature": 0.7}, {"temperature": 1.3}, {"top_p": 0.85}, {"top_k": 40})
ROWS, SHORTEST, LONGEST = 10, 30, 220


def prompts(tokenizer, rng, count, shortest=12, longest=40):
    """Ids of pieces of prose and code, in equal parts."""
    import argparse
    import asyncio.base_events
    import pydoc_data.topics
    import tarfile

    modules = (argparse, asyncio.base_events, tarfile)
    texts = (pydoc_data.topics.topics.values(), map(inspect.getsource, modules))
    prose, code = ([part for text in kind for part in text.split("\n\n") if len(part) > 200] for kind in texts)
    for number in range(count):
        parts = (prose, code)[number % 2]
        ids = tokenizer(parts[rng.integers(len(parts))])["input_ids"]
        yield ids[: rng.integers(shortest, longest)]


def scored(model, prompt, ids):
    """`[N]` the logprobs of `ids` after a prompt."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()


def other_tokens(vocabulary, first, second, rng):
    """Two other tokens with the text of two; None if there are none."""
    text = first + second
    cuts = [at for at in range(1, len(text)) if at != len(first) and {text[:at], text[at:]} <= vocabulary.keys()]
    at = cuts[rng.integers(len(cuts))] if cuts else None
    return None if at is None else (vocabulary[text[:at]], vocabulary[text[at:]])


def changed(tokenizer, ids, rng):
    """The ids with two pairs of tokens encoded otherwise, and which they are."""
    out, own = list(ids), np.zeros(len(ids), bool)
    pieces, vocabulary = tokenizer.convert_ids_to_tokens(ids), tokenizer.get_vocab()
    for k in rng.permutation(len(ids) - 1).tolist():
        pair = None if own[max(k - 2, 0) : k + 4].any() else other_tokens(vocabulary, *pieces[k : k + 2], rng)
        if pair is not None:
            out[k : k + 2], own[k : k + 2] = pair, True
        if own.sum() == 4:
            break
    return out, own


def main(folder, out, seed):
    """Sample, score, add."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    rng, tokenizer, columns = np.random.default_rng(seed), AutoTokenizer.from_pretrained(folder), {}
    for dtype, settings, scorers in (
        ("bfloat16", IN_BFLOAT16, ("float32", "bfloat16")),
        ("float32", SETTINGS, ("float32",)),
    ):
        options = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 48}
        engine = LLM(folder, dtype=dtype, seed=seed, logprobs_mode="processed_logprobs", **options)
        rows, wanted = [], []
        for setting in settings:
            for ids in prompts(tokenizer, rng, ROWS):
                size = int(rng.integers(SHORTEST, LONGEST))
                rows.append({"prompt_token_ids": ids})
                options = {"temperature": 1.0, **setting, "max_tokens": size, "logprobs": 0, "ignore_eos": True}
                wanted.append(SamplingParams(**options))
        answers = engine.generate(rows, wanted)
        del engine
        models = {
            name: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name)).eval()
            for name in scorers
        }
        for number, answer in enumerate(answers):
            words = "+".join(f"{key}={value}" for key, value in settings[number // ROWS].items())
            prompt, ids = rows[number]["prompt_token_ids"], list(answer.outputs[0].token_ids)
            sampler = [entry[i].logprob for entry, i in zip(answer.outputs[0].logprobs, ids, strict=True)]
            for scorer, model in models.items():
                name = f"{dtype}/{scorer} {words}".strip()
                columns.setdefault(name, []).append((sampler, scored(model, prompt, ids), None))
            if dtype == "float32" and not words:
                others, own = changed(tokenizer, ids, rng)
                columns.setdefault("drift", []).append((sampler, scored(models["float32"], prompt, others), own))
    packed = dict(np.load(out)) if Path(out).exists() else {}
    for name, rows in columns.items():
        packed[name] = np.array([np.concatenate([row[side] for row in rows]) for side in (0, 1)], np.float32)
        packed[f"lengths {name}"] = np.array([len(row[0]) for row in rows], np.int32)
        if rows[0][2] is not None:
            packed[f"changed {name}"] = np.concatenate([row[2] for row in rows])
        print(name, packed[name].shape[1], np.abs(np.diff(packed[name], axis=0)).mean(), flush=True)
    np.savez_compressed(out, **packed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
