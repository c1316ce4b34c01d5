"""Logs in which each token's |trainer minus sampler| has a known cause; nothing here imports the package.

`smollm2.npz` holds `[2, N]` logprobs in float32 by setting, the sampler's and the trainer's, of tokens that
SmolLM2-135M-Instruct drew after 2,760 contexts of real conversations (`sample.py`). `float32` and `vllm bfloat16`
are of tokens that a vLLM server sampled with its cache, scored by transformers in float32.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = np.load(Path(__file__).with_name("smollm2.npz"))
TOKENS = 400
"""In the loss of each row."""
PROMPT = 6
NEWEST = 8
"""The version of the weights of rows that are not stale."""


@dataclass
class Planted:
    """A log and the share of each cause in its total."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    sizes: Counter[str] = field(default_factory=Counter)

    @property
    def shares(self) -> dict[str, float]:
        total = sum(self.sizes.values()) or 1.0
        return {cause: size / total for cause, size in self.sizes.items()}

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        return path


def cause_of(setting: str) -> str:
    """What a setting of the columns is a case of."""
    if "+" in setting:
        return "cannot tell"
    name = setting.split(" ")[-1].split("=")[0]
    truncated = dict.fromkeys(("top_p", "top_k", "min_p"), "truncated sampling")
    return {"temperature": "temperature", "versions": "stale weights", **truncated}.get(name, "numerics")


def log(
    settings: Sequence[tuple[str, int]],
    rng: np.random.Generator,
    *,
    drift: float = 0.0,
    fills: int = 0,
    confident: int = 0,
    shifted: int = 0,
    versions: bool = False,
) -> Planted:
    """Rows of each setting. Rows of numerics also get tokens that drifted (`drift` is their share in every second
    row), `fills` and tokens of `confident` disagreement; in the first `shifted` ones the trainer's column is late.
    """
    planted = Planted()
    for setting, count in settings:
        for number in range(count):
            cause = cause_of(setting)
            sampler, trainer = taken(setting, rng)
            causes = np.full(TOKENS, cause, object)
            own = np.zeros(TOKENS, bool)
            ids = rng.integers(100, 40_000, TOKENS + PROMPT)
            sampled = ids.copy()
            if cause == "numerics":
                places = rng.permutation(np.arange(1, TOKENS))
                if number < shifted:
                    trainer = np.concatenate((trainer[-1:], trainer[:-1]))
                    causes[:] = "shifted column"
                    places = places[:0]
                elif drift and number % 2 == 0:
                    own[places[: int(drift * TOKENS)]] = True
                    ids[PROMPT:][own] += 1
                    trainer[own] = rng.uniform(-22, -6, own.sum())
                    causes[own] = "drift"
                for kind, many, at in (("placeholder", fills, 100), ("cannot tell", confident, 200)):
                    there = places[at : at + many]
                    causes[there] = kind
                    if kind == "placeholder":
                        there = there[sampler[there] < -1.2]
                        trainer[there] = 0.0
                    else:
                        sampler[there], trainer[there] = -rng.uniform(1e-4, 0.008, len(there)), -9.3
            for name in set(causes):
                planted.sizes[name] += float(np.abs(trainer - sampler)[causes == name].sum())
            version = NEWEST - int(setting.split("=")[1]) if cause == "stale weights" else NEWEST
            planted.rows.append(row(ids, sampled, sampler, trainer, version if versions else None, own.any()))
    return planted


def taken(setting: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Consecutive tokens of a setting."""
    columns = COLUMNS[setting].astype(np.float64)
    start = rng.integers(0, columns.shape[1] - TOKENS)
    sampler, trainer = columns[:, start : start + TOKENS]
    return sampler.copy(), trainer.copy()


def row(
    ids: np.ndarray, sampled: np.ndarray, sampler: np.ndarray, trainer: np.ndarray, version: int | None, call: bool
) -> dict[str, Any]:
    """A row of the generic format; with the call where its tokens drifted."""
    nothing = [0.0] * PROMPT
    out: dict[str, Any] = {
        "token_ids": ids.tolist(),
        "loss_mask": [0] * PROMPT + [1] * TOKENS,
        "logprobs": nothing + sampler.tolist(),
        "old_log_probs": nothing + trainer.tolist(),
    }
    if version is not None:
        out["versions"] = [-1] * PROMPT + [version] * TOKENS
    if call:
        prompt, completion = sampled[:PROMPT].tolist(), sampled[PROMPT:].tolist()
        answer = {"prompt_token_ids": prompt, "completion_token_ids": completion, "logprobs": sampler.tolist()}
        out["calls"] = [answer]
    return out
