"""What rules could not look at, in lines: rules with the same reason together."""

from __future__ import annotations

from itertools import groupby

from tito_audit.summary import Summary
from tito_audit.terminal.words import many

__all__ = ["code_ranges", "skip_lines", "skips_by_reason"]


def skip_lines(summary: Summary) -> list[str]:
    """`no logprobs: LPR501-LPR506 (40 rollouts)`, the most common reason first; reasons as the log gave them."""
    found = skips_by_reason(summary)
    return [f"{because}: {codes} ({many(number, 'rollout')})" for because, codes, number in found]


def skips_by_reason(summary: Summary) -> list[tuple[str, str, int]]:
    """`("no logprobs", "LPR501-LPR506", 40)`: reason, rules, rollouts of each; the most common reason first."""
    codes: dict[tuple[str, int], list[str]] = {}
    for code, skipped in sorted(summary.skipped.items()):
        for because, number in skipped.because.items():
            codes.setdefault((because, number), []).append(code)
    ranked = sorted(codes.items(), key=lambda item: (-item[0][1], item[0][0]))
    return [(because, code_ranges(those), number) for (because, number), those in ranked]


def code_ranges(codes: list[str]) -> str:
    """Sorted codes with neighbours joined: `LPR501-LPR506, TOK101`."""
    words = []
    neighbours = groupby(enumerate(codes), key=lambda pair: (pair[1][:3], _number(pair[1]) - pair[0]))
    for _, pairs in neighbours:
        run = [code for _, code in pairs]
        words.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run))
    return ", ".join(words)


def _number(code: str) -> int:
    digits = "".join(char for char in code if char.isdecimal())
    return int(digits or 0)
