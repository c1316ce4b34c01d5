"""Conversations of the kinds that chat data has, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from tests.tables import stored

ASKED, SAID, SYSTEM = (stored("sft", name) for name in ("ASKED", "SAID", "SYSTEM"))


def conversation(random: random.Random, *, system: bool = True, turns: int = 3) -> list[dict[str, Any]]:
    """Messages that end with an answer; up to `turns` answers."""
    messages: list[dict[str, Any]] = []
    if system and random.random() < 0.5:
        messages.append({"role": "system", "content": random.choice(SYSTEM)})
    for _ in range(random.randint(1, turns)):
        question = " ".join(random.sample(ASKED, random.randint(1, 2)))
        answer = "\n\n".join(random.sample(SAID, random.randint(1, 3)))
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def conversations(count: int, seed: int, *, system: bool = True, turns: int = 3) -> Iterator[list[dict[str, Any]]]:
    """So many conversations, all different in their numbers."""
    drawn = random.Random(seed)
    for number in range(count):
        messages = conversation(drawn, system=system, turns=turns)
        messages[-1]["content"] += f" ({number})"
        yield messages
