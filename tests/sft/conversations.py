"""Conversations of the kinds that chat data has, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

ASKED = (
    "What is the capital of France?",
    "Summarize this in one line:\n\n- one\n- two\n",
    "Write a Python function that reverses a list.",
    "東京の天気は?",
    "How do I say “thank you” in Finnish? 🙂",
    "Compute 12 * (3 + 4) - 5 / 2.",
    "Привет! Расскажи анекдот.",
    "Explain `SELECT * FROM t WHERE a < b`.",
    "مرحبا، كيف حالك؟",
    "Is <b>this</b> HTML & is it safe?",
)
SAID = (
    "Paris.",
    "One and two.",
    "```python\ndef reverse(xs):\n    return xs[::-1]\n```",
    "東京は晴れです。気温は25°Cです。",
    "“Kiitos” 🙂",
    "12 * 7 - 2.5 = 81.5",
    "Конечно! Колобок повесился.",
    "It reads the rows of `t` in which `a` is less than `b`.\n\n1. scan\n2. filter",
    "أنا بخير، شكرا لك.",
    "Yes: <b>bold</b> &amp; safe.",
    "I am   not\tsure.",
    "naïve café, e\u0301 and 👩‍👩‍👧",
)
SYSTEM = ("You are terse.", "Answer in the language of the user.\nBe brief.", "You are a helpful assistant.")


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
