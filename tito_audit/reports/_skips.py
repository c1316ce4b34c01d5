"""Skipped rules as lines; rules with the same reason share a line."""

from __future__ import annotations

from tito_audit.summary import Summary
from tito_audit.terminal.words import code_ranges, many


def skip_lines(summary: Summary) -> list[str]:
    """`no logprobs: LPR501-LPR506 (40 rollouts)`, the most common reason first; reasons may quote the log."""
    found = skips_by_reason(summary)
    return [f"{because}: {codes} ({many(number, 'rollout')})" for because, codes, number in found]


def skips_by_reason(summary: Summary) -> list[tuple[str, str, int]]:
    """`("no logprobs", "LPR501-LPR506", 40)`: reason, rules, rollouts; the most common reason first."""
    codes: dict[tuple[str, int], list[str]] = {}
    for code, skipped in sorted(summary.skipped.items()):
        for because, number in skipped.because.items():
            codes.setdefault((because, number), []).append(code)
    ranked = sorted(codes.items(), key=lambda item: (-item[0][1], item[0][0]))
    return [(because, code_ranges(those), number) for (because, number), those in ranked]
