"""Logs in which each token's |trainer minus sampler| has a known cause; nothing here imports the package.

`smollm2.npz` holds `[2, N]` logprobs in float32 by setting, the sampler's and the trainer's, of tokens that
SmolLM2-135M-Instruct drew after 2,760 contexts of real conversations (`sample.py`). `float32` and `vllm bfloat16`
are of tokens that a vLLM server sampled with its cache, scored by transformers in float32. The thresholds of the
package were chosen on these.

`heldout.npz` was measured after that, on other text and with other seeds: vLLM sampled with its own temperature,
top-p, top-k and min-p and returned processed logprobs, transformers scored (`engines.py`); in `drift`, pairs of
sampled tokens became two others with the same text, and everything after them was scored in that context;
`experts NAME` is a small mixture of experts with the experts of both sides (`experts.py`); `versions=N` are
weights of a small RL loop that are N steps older (`stale.py`). `lengths NAME` are those of its rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
COLUMNS = np.load(HERE / "smollm2.npz")
HELD_OUT = np.load(HERE / "heldout.npz")
TOKENS = 400
"""In the loss of each row of `COLUMNS`."""
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


@dataclass
class Tokens:
    """Consecutive tokens of a setting: `[2, N]` logprobs, and what else was measured of each."""

    pair: np.ndarray
    changed: np.ndarray | None = None
    """Tokens that are not those which were sampled."""
    experts: np.ndarray | None = None
    """`[2, N, layers, k]` of the sampler and of the trainer, for the token before each."""


def cause_of(setting: str) -> str:
    """What a setting of the columns is a case of."""
    if "+" in setting:
        return "cannot tell"
    if setting.startswith("experts"):
        return "routing"
    name = setting.split(" ")[-1].split("=")[0]
    truncated = dict.fromkeys(("top_p", "top_k", "min_p"), "truncated sampling")
    others = {"temperature": "temperature", "versions": "stale weights", "drift": "drift"}
    return {**others, **truncated}.get(name, "numerics")


def stated_by(setting: str) -> dict[str, float]:
    """The sampling of a setting as a log names it."""
    parts = (part.split("=") for part in setting.split(" ")[-1].split("+") if "=" in part)
    return {name: float(value) for name, value in parts}


def taken(setting: str, rng: np.random.Generator, source: Any = COLUMNS) -> Tokens:
    """Consecutive tokens of a setting; of the held-out ones, one to three rows in a row."""
    columns = source[setting].astype(np.float64)
    if source is COLUMNS:
        start = rng.integers(0, columns.shape[1] - TOKENS)
        return Tokens(columns[:, start : start + TOKENS].copy())
    ends = np.cumsum(source[f"lengths {setting}"])
    first = rng.integers(0, len(ends))
    last = min(first + rng.integers(1, 4), len(ends)) - 1
    part = slice(ends[first] - source[f"lengths {setting}"][first], ends[last])
    changed = source[f"changed {setting}"][part] if f"changed {setting}" in source else None
    experts = source[f"both {setting}"][:, part] if f"both {setting}" in source else None
    return Tokens(columns[:, part].copy(), changed, experts)


def log(
    settings: Sequence[tuple[str, int]],
    rng: np.random.Generator,
    *,
    source: Any = COLUMNS,
    drift: float = 0.0,
    fills: int = 0,
    confident: int = 0,
    shifted: int = 0,
    versions: bool = False,
    stated: bool = False,
) -> Planted:
    """Rows of each setting. Rows of numerics also get tokens that drifted (`drift` is their share in every second
    row), `fills` and tokens of `confident` disagreement; in the first `shifted` ones the trainer's column is late.
    `stated`: rows name how they were sampled.
    """
    planted = Planted()
    for setting, count in settings:
        for number in range(count):
            cause = cause_of(setting)
            tokens = taken(setting, rng, source)
            sampler, trainer = tokens.pair
            size = len(sampler)
            causes = np.full(size, cause, object)
            own = np.zeros(size, bool) if tokens.changed is None else tokens.changed
            ids = rng.integers(100, 40_000, size + PROMPT)
            sampled = ids.copy()
            if tokens.changed is not None:
                ids[PROMPT:][own] += 1
            if tokens.experts is not None:
                causes[(tokens.experts[0] == tokens.experts[1]).all(axis=(1, 2))] = "cannot tell"
            if cause == "numerics":
                places = rng.permutation(np.arange(1, size))
                if number < shifted:
                    trainer = np.concatenate((trainer[-1:], trainer[:-1]))
                    causes[:] = "shifted column"
                    places = places[:0]
                elif drift and number % 2 == 0:
                    own[places[: int(drift * size)]] = True
                    ids[PROMPT:][own] += 1
                    trainer[own] = rng.uniform(-22, -6, own.sum())
                    causes[own] = "drift"
                for kind, many, at in (("placeholder", fills, size // 4), ("cannot tell", confident, size // 2)):
                    chosen = places[at : at + many]
                    causes[chosen] = kind
                    if kind == "placeholder":
                        chosen = chosen[sampler[chosen] < -1.2]
                        trainer[chosen] = 0.0
                    else:
                        sampler[chosen], trainer[chosen] = -rng.uniform(1e-4, 0.008, len(chosen)), -9.3
            for name in set(causes):
                planted.sizes[name] += float(np.abs(trainer - sampler)[causes == name].sum())
            version = NEWEST - int(setting.split("=")[1]) if cause == "stale weights" else NEWEST
            logged = row(ids, sampled, sampler, trainer, version if versions else None, bool(own.any()))
            if stated:
                logged["sampling_params"] = stated_by(setting)
            if tokens.experts is not None:
                shape = (PROMPT - 1, *tokens.experts.shape[2:])
                before = np.broadcast_to(np.arange(shape[-1]), shape).tolist()
                for name, side in zip(("routed_experts", "trainer_routed_experts"), tokens.experts, strict=True):
                    logged[name] = before + side.tolist()
            planted.rows.append(logged)
    return planted


def row(
    ids: np.ndarray, sampled: np.ndarray, sampler: np.ndarray, trainer: np.ndarray, version: int | None, call: bool
) -> dict[str, Any]:
    """A row of the generic format; with the call where its tokens drifted."""
    nothing, size = [0.0] * PROMPT, len(sampler)
    out: dict[str, Any] = {
        "token_ids": ids.tolist(),
        "loss_mask": [0] * PROMPT + [1] * size,
        "logprobs": nothing + sampler.tolist(),
        "old_log_probs": nothing + trainer.tolist(),
    }
    if version is not None:
        out["versions"] = [-1] * PROMPT + [version] * size
    if call:
        prompt, completion = sampled[:PROMPT].tolist(), sampled[PROMPT:].tolist()
        answer = {"prompt_token_ids": prompt, "completion_token_ids": completion, "logprobs": sampler.tolist()}
        out["calls"] = [answer]
    return out
