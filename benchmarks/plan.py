"""What a run of the benchmark measures: how much text, how often, which studies."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["FULL", "NORMAL", "QUICK", "Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes and rounds of one run."""

    tokens: int
    """Tokens of the corpus on which the engines are compared."""
    rounds: int
    linear_tokens: int
    """Tokens of its first rows, for the linear engine, which would take minutes on all."""
    sizes: tuple[int, ...]
    turns: tuple[int, ...]
    turn_tokens: int
    """Tokens of each corpus of conversations of one length."""
    user_tokens: int = 2_000_000
    """Ids of each user log; recorded ones, most of whose rows have findings, have half as many."""
    ordinary_rows: int = 300
    """Rows of each ordinary log."""
    every: int = 1
    """One in this many of these logs is measured."""
    kinds: tuple[str, ...] = ("jsonl", "parquet")
    huge_gb: float = 0.0

    def up_to(self, tokens: int) -> Plan:
        """The same plan with no corpus larger than this."""
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
    ordinary_rows=80,
    every=4,
    kinds=("jsonl",),
)
