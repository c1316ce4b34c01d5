"""An agent guesses a number; eight rollouts become training samples and a log.

    python examples/rollout/guess.py --provider vllm=http://127.0.0.1:8000
    tito-audit scan samples.jsonl -t MODEL

Agent and environment know nothing of tokens: replace them by yours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

from tito_audit import Sample, SamplingParams, open_provider, rollout


class Guess:
    """The environment: a number from 1 to 100, and `higher` or `lower` for each guess."""

    def __init__(self, number: int) -> None:
        self.number = number

    def reset(self) -> str:
        """The first message."""
        return "I think of a number from 1 to 100. Guess it."

    def step(self, text: str) -> tuple[str, float, bool]:
        """Observation, reward of this turn, and whether that was the last one."""
        guesses = re.findall(r"\d+", text)
        if not guesses:
            return "That is no number.", -0.1, False
        if int(guesses[-1]) == self.number:
            return "Yes!", 1.0, True
        return ("Higher." if int(guesses[-1]) < self.number else "Lower."), 0.0, False


async def agent(messages: list[dict[str, Any]], client: Any) -> str:
    """The agent: messages in, text out, by the `openai` client that it is given."""
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return str(answer.choices[0].message.content)


async def sample_group(where: str, tokenizer: str | None, size: int, turns: int) -> list[Sample]:
    """A group of rollouts of one task, as GRPO needs it."""
    provider = open_provider(where)
    number = random.Random(7).randint(1, 100)
    sampling = SamplingParams(temperature=1.0, max_tokens=32)
    try:
        return await asyncio.gather(
            *(
                rollout(
                    agent,
                    Guess(number),
                    provider,
                    tokenizer=tokenizer,
                    sampling=sampling,
                    max_turns=turns,
                    max_length=4096,
                    index=index,
                    group_index=0,
                )
                for index in range(size)
            )
        )
    finally:
        await provider.close()


def main() -> None:
    """Sample, check and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", required=True, help="vllm=URL, sglang=URL, trl=URL or hf=FOLDER")
    parser.add_argument("--tokenizer", help="the model's tokenizer, if the server does not say it")
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("samples.jsonl"))
    choices = parser.parse_args()
    samples = asyncio.run(sample_group(choices.provider, choices.tokenizer, choices.size, choices.turns))
    for sample in samples:
        if sample.error is not None:
            raise sample.error
        assert sample.proven, sample.findings
        tokens = f"{len(sample.tokens)} tokens, {int(sum(sample.loss_mask))} of them trained"
        print(f"{sample.status:9}  reward {sample.reward:5.2f}  turns {len(sample.turns)}  {tokens}")
    rows = [row.to_dict() for sample in samples for row in (sample, *sample.others)]
    choices.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows in {choices.out}")


if __name__ == "__main__":
    main()
