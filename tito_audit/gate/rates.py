"""Rates: how often findings occur, and how often they may."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tito_audit.errors import SetupError
from tito_audit.gate.known import EntryCounts
from tito_audit.settings.model import MaxRate
from tito_audit.summary import RateCount
from tito_audit.terminal.words import limit_number, many, rate_number


@dataclass(slots=True)
class PrefixCount:
    """The findings counted under one prefix: those for which it is the longest match."""

    limits: tuple[MaxRate, ...]
    """All limits of this prefix."""
    findings: int = 0
    new: EntryCounts = field(default_factory=EntryCounts)
    """The findings that a baseline may accept."""


class Rates:
    """Findings counted against limits, with the tokens and rollouts they are divided by."""

    def __init__(self, limits: Sequence[MaxRate]) -> None:
        for limit in limits:
            if not 0 <= limit.limit < math.inf:
                raise SetupError(f"--max-rate {limit}: a rate is a number, 0 or more.")
        prefixes = dict.fromkeys(limit.prefix for limit in limits)
        self._limits = limits
        self._by_prefix = {
            prefix: PrefixCount(tuple(limit for limit in limits if limit.prefix == prefix)) for prefix in prefixes
        }
        self._by_code: dict[str, PrefixCount | None] = {}
        self.tokens = 0
        """Generated tokens of the logs that count."""
        self.rollouts = 0
        """Rollouts of the logs that count; an unreadable row counts as one."""

    def of(self, code: str) -> PrefixCount | None:
        """The count that findings of a code go into; None if no limit applies."""
        if code not in self._by_code:
            fitting = [prefix for prefix in self._by_prefix if code.startswith(prefix)]
            self._by_code[code] = self._by_prefix[max(fitting, key=len)] if fitting else None
        return self._by_code[code]

    def taken(self) -> Iterator[EntryCounts]:
        """The findings above their limits that a new baseline accepts; they no longer count."""
        for rated in self._by_prefix.values():
            if any(self._count(limit, rated).failed for limit in rated.limits):
                rated.findings -= rated.new.total
                yield rated.new

    def counts(self) -> tuple[RateCount, ...]:
        """Every limit with its count, in the order given."""
        return tuple(self._count(limit, self._by_prefix[limit.prefix]) for limit in self._limits)

    def _count(self, limit: MaxRate, rated: PrefixCount) -> RateCount:
        of = self.rollouts if limit.per == "rollout" else self.tokens
        rate = rated.findings / of if of else math.inf if rated.findings else 0.0
        return RateCount(str(limit), rated.findings, of, rate, rate > limit.limit)


def limit_reason(limit: MaxRate, count: RateCount) -> str:
    """Why a limit fails: `TOK: 41 findings, 0.21 % of 20,000 generated tokens (limit 0.1 %)`."""
    by_rollout = limit.per == "rollout"
    unit = "rollout" if by_rollout else "generated token"
    name, found = limit.prefix or "all rules", many(count.findings, "finding")
    if math.isinf(count.rate):
        return f"{name}: {found}, but no {unit} to divide by"
    most, of = limit_number(limit.limit, by_rollout=by_rollout), many(count.of, unit)
    if by_rollout:
        return f"{name}: {found} in {of}, {rate_number(count)} per rollout (limit {most})"
    return f"{name}: {found}, {rate_number(count)} of {of} (limit {most})"
