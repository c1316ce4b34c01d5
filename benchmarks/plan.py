"""What a run of the benchmark measures: how much text, how often, which questions."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["FULL", "NORMAL", "QUICK", "Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes and rounds of one run."""

    tokens: int
    """Of the corpus that the engines are compared on."""
    rounds: int
    linear_tokens: int
    """Of its first rows, for the linear engine, which would take minutes on all."""
    sizes: tuple[int, ...]
    turns: tuple[int, ...]
    turn_tokens: int
    """Of each corpus of conversations of one length."""
    user_tokens: int = 2_000_000
    """Of each log of users; recorded ones, most of whose rows have findings, hold half of it."""
    every: int = 1
    """One in so many of these logs is tried."""
    kinds: tuple[str, ...] = ("jsonl", "parquet")
    huge_gb: float = 0.0

    def up_to(self, tokens: int) -> Plan:
        """The same with no corpus larger than this."""
        sizes = tuple(size for size in self.sizes if size < tokens)
        return replace(
            self,
            tokens=tokens,
            linear_tokens=min(self.linear_tokens, tokens),
            sizes=(*(sizes or (tokens // 4,)), tokens),
            turn_tokens=min(self.turn_tokens, tokens),
            user_tokens=min(self.user_tokens, tokens),
        )


NORMAL = Plan(
    tokens=10_000_000,
    rounds=5,
    linear_tokens=1_000_000,
    sizes=(1_000_000, 3_000_000, 10_000_000),
    turns=(2, 10, 40, 128),
    turn_tokens=1_000_000,
)
FULL = replace(NORMAL, sizes=(1_000_000, 3_000_000, 10_000_000, 25_000_000, 50_000_000))
QUICK = Plan(
    tokens=1_000_000,
    rounds=1,
    linear_tokens=300_000,
    sizes=(250_000, 1_000_000),
    turns=(2, 40),
    turn_tokens=500_000,
    user_tokens=250_000,
    every=4,
    kinds=("jsonl",),
)
