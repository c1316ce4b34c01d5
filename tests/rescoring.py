"""What tests of rescoring share: a model that is a formula, logs that it scores, and prices the slow way."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests import toy
from tests.command import written
from tito_audit.errors import ProviderError
from tito_audit.provider import SamplingParams, ScoredTokens
from tito_audit.rescore.journal import ScoreJournal
from tito_audit.rescore.model import RescoredRollout
from tito_audit.rescore.run import Rescoring
from tito_audit.settings.model import Settings

TOY = toy.TOKENIZERS / "toy_bpe"
OPEN = ["<|im_start|>", "us", "er", "\n", "2", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
"""The prompt of a first turn."""


def logprob(ids: Sequence[int]) -> float:
    """What the formula says of the last of these ids, given all before it: it depends on every one of them."""
    return -(zlib.crc32(repr(list(map(int, ids))).encode()) % 3000) / 1000 - 0.01


def logprobs(ids: Sequence[int], start: int) -> list[float]:
    """The formula's values of `ids[start:]`."""
    return [logprob(ids[: at + 1]) for at in range(start, len(ids))]


class Formula:
    """A provider whose model is `logprob`. It takes at most `context` ids, and dies after `dies` requests."""

    name = "formula=1"
    model = "formula"

    def __init__(self, *, context: int = 10_000, dies: int | None = None) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.at_once = self.most = 0
        self.context, self.dies = context, dies

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        if top:
            raise ProviderError("the formula has no alternatives", status=400)
        if len(ids) > self.context:
            raise ProviderError(f"{len(ids)} ids are more than {self.context}", status=400)
        if self.dies is not None and len(self.asked) >= self.dies:
            raise ProviderError("the server is gone", status=502)
        self.asked.append((tuple(ids), start))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        start = max(start, 1)
        return ScoredTokens(tuple(ids), start, tuple(logprobs(ids, start)), weight_version="7")

    async def close(self) -> None:
        pass


def token_ids(tokens: Iterable[str]) -> list[int]:
    """The ids of tokens given as text."""
    by_text = _by_text()
    return [by_text[token] for token in tokens]


@cache
def _by_text() -> dict[str, int]:
    backend = toy.toy_tokenizer().backend
    return {backend.decode([at], skip_special_tokens=False): at for at in range(backend.get_vocab_size())}


def call(
    prompt: Sequence[int], completion: Sequence[int], values: Sequence[float | None] | None = None
) -> dict[str, Any]:
    """A call as logs have it, with the formula's logprobs unless others are given."""
    scores = logprobs([*prompt, *completion], len(prompt)) if values is None else list(values)
    return {"prompt_ids": list(prompt), "completion_ids": list(completion), "completion_logprobs": scores}


def log_of(folder: Path, rows: Iterable[Any], name: str = "log.jsonl") -> Path:
    """A log with these rows."""
    return written(folder / name, rows)


def rescored(
    log: Path, provider: Any = None, journal: ScoreJournal | None = None, **choices: Any
) -> tuple[list[RescoredRollout], Rescoring]:
    """The rollouts of a log, and the run."""
    run = Rescoring([str(log)], Settings(tokenizer=str(TOY)), provider or Formula(), journal=journal, **choices)
    return list(run), run


async def sampled_rows(model: Any, rollouts: int = 6, turns: int = 3, tokens: int = 24) -> list[dict[str, Any]]:
    """Rollouts that a provider samples, each next prompt encoded from text: the log drifts by itself."""
    tokenizer = toy.toy_tokenizer()
    plain = [at for text, at in _by_text().items() if text.isascii() and text.isprintable() and at < 1990]
    rows = []
    for number in range(rollouts):
        text, calls, messages = "", list[dict[str, Any]](), list[dict[str, Any]]()
        for turn in range(turns):
            question = f"Question {number} {turn}"
            text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            prompt = tokenizer.encode(text).tolist()
            sampling = SamplingParams(
                temperature=1.0, max_tokens=tokens, seed=100 * number + turn, extra={"allowed_token_ids": plain}
            )
            generated = await model.generate(prompt, sampling)
            scored = await model.score([*prompt, *generated.output_ids], start=len(prompt))
            answer = tokenizer.backend.decode(list(generated.output_ids), skip_special_tokens=False)
            calls.append(call(prompt, generated.output_ids, scored.logprobs) | {"finish_reason": "length"})
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            text += f"{answer}<|im_end|>\n"
        rows.append({"messages": messages, "calls": calls})
    return rows
