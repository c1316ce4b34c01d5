"""Coverage: in how many rollouts the required rules ran, and why not in the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from tito_audit.errors import SetupError
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place
from tito_audit.rules import FAMILIES, all_rules
from tito_audit.settings.model import Requirement
from tito_audit.summary import CoverageCount
from tito_audit.unknown import unknown

_REASONS = 100
"""Maximum reasons counted separately; all others are counted together."""
_UNREADABLE = "the row cannot be read"
_NO_IDS = "no token ids"
_OTHER = "other reasons"


@dataclass(slots=True)
class _Reason:
    """A reason with the number of its rollouts and the first of them."""

    first: Place
    rollouts: int = 0


@dataclass(slots=True)
class _Tally:
    """Rollouts that are covered, and those that are not by reason."""

    covered: int = 0
    idle: int = 0
    of: int = 0
    asked: bool = False
    """Whether the requirement applies to any of the logs."""
    reasons: dict[str, _Reason] = field(default_factory=dict)

    def add(self, place: Place, because: str | None, idle: bool = False) -> None:
        """Count one rollout: why it is not covered, or None; `idle`: there was nothing to check."""
        self.of += 1
        if because is None:
            self.covered += 1
            self.idle += idle
            return
        named = because if because in self.reasons or len(self.reasons) < _REASONS else _OTHER
        self.reasons.setdefault(named, _Reason(place)).rollouts += 1

    def count(self, codes: str, share: float) -> CoverageCount:
        """The numbers, judged."""
        because, most = max(self.reasons.items(), key=lambda one: one[1].rollouts, default=(None, None))
        # Fractions, as 0.07 * 100 is more than 7.
        failed = self.asked and (not self.of or self.covered < Fraction(repr(share)) * self.of)
        return CoverageCount(
            codes,
            share,
            self.covered,
            self.of,
            because,
            most.rollouts if most is not None else 0,
            most.first if most is not None else None,
            self.idle,
            failed,
        )


class Coverage:
    """Counts the rollouts that required rules cover, and those that are audited at all."""

    def __init__(
        self,
        required: Sequence[Requirement],
        min_audited: float | None,
        codes: Callable[[str], frozenset[str]],
        counts: Callable[[str], bool],
    ) -> None:
        """`codes` are those selected for a log; `counts` says whether a log takes part in the gate."""
        for one in required:
            _refuse_uncountable(one)
        for share in (*(one.share for one in required), *([] if min_audited is None else [min_audited])):
            if not 0 < share <= 1:
                raise SetupError(f"A required share of {share}: not above 0 and at most 1.")
        self._required = required
        self._min_audited = min_audited
        self._tallies = [_Tally() for _ in required]
        self._audited = _Tally()
        self._codes = codes
        self._counts = counts
        self._wanted = cache(self._wanted_in)

    def begin(self, files: Iterable[str], selected: frozenset[str]) -> None:
        """Check that a log can meet the requirements; SetupError if required rules are deselected.

        `selected` are the codes that are selected where no override changes them.
        """
        if not self._required and self._min_audited is None:
            return
        logs = list(files)
        self._audited.asked = not logs or any(map(self._counts, logs))
        for number, (one, tally) in enumerate(zip(self._required, self._tallies, strict=True)):
            tally.asked = not logs or any(self._wanted(file)[number] for file in logs)
            chosen = any(_countable(one, self._codes(file)) for file in logs)
            if not chosen and not _countable(one, selected):
                raise SetupError(
                    f"--require {one}: --select and --ignore exclude every rule of it, so none can run."
                )

    def add(self, result: Result) -> None:
        """Count a result; those of whole logs are not rollouts."""
        if result.of_log:
            return
        file = result.place.file
        if self._min_audited is not None and self._counts(file):
            self._audited.add(result.place, _unaudited(result, self._codes(file)))
        if self._required:
            for wanted, tally in zip(self._wanted(file), self._tallies, strict=True):
                if wanted:
                    tally.add(result.place, *_judged(result, wanted))

    def required(self) -> tuple[CoverageCount, ...]:
        """Every requirement with its count, in the order given."""
        return tuple(
            tally.count(one.prefix or "ALL", one.share)
            for one, tally in zip(self._required, self._tallies, strict=True)
        )

    def min_audited(self) -> CoverageCount | None:
        """How many rollouts were audited; None if no share is required."""
        return None if self._min_audited is None else self._audited.count("", self._min_audited)

    def _wanted_in(self, file: str) -> tuple[frozenset[str], ...]:
        """By requirement: the rules that have to cover the rollouts of a log; none if the log is exempt."""
        codes = self._codes(file) if self._counts(file) else frozenset()
        return tuple(_countable(one, codes) for one in self._required)


_Judged = tuple[str | None, bool]
"""Why a rollout is not covered, None if it is; and whether no rule had anything to check."""


def _judged(result: Result, wanted: Collection[str]) -> _Judged:
    """Whether these rules cover a rollout: none was skipped, and there were ids to check."""
    if result.rollout is None:
        return _UNREADABLE, False
    skipped = [skip for skip in result.skips if skip.code in wanted]
    partly = (skip for skip in result.partial if skip.code in wanted)
    lacking = next((skip.because for skip in (*skipped, *partly) if skip.applies), None)
    if lacking is None and not result.counts.get("tokens") and not _of_rows() >= frozenset(wanted):
        lacking = _NO_IDS
    return lacking, len(skipped) == len(wanted)


def _unaudited(result: Result, codes: frozenset[str]) -> str | None:
    """Why nothing was audited in a rollout by these rules; None if something was."""
    if result.rollout is None:
        return _UNREADABLE
    if not result.counts.get("tokens"):
        return _NO_IDS
    if result.counts.get("uncompared"):
        return next((skip.because for skip in result.skips if skip.code in _of_tokenizer()), _OTHER)
    if codes - _of_logs() - {skip.code for skip in result.skips}:
        return None
    lacking = sorted(result.skips, key=lambda skip: not skip.applies)
    return lacking[0].because if lacking else _OTHER


@cache
def _of_rows() -> frozenset[str]:
    """Rules that check any row, with or without ids."""
    return frozenset(rule.code for rule in all_rules() if not rule.needs and not rule.of_log)


@cache
def _of_tokenizer() -> frozenset[str]:
    """Rules that need a tokenizer."""
    return frozenset(rule.code for rule in all_rules() if Needs.TOKENIZER in rule.needs)


@cache
def _of_logs() -> frozenset[str]:
    """Rules that judge whole logs."""
    return frozenset(rule.code for rule in all_rules() if rule.of_log)


def _countable(required: Requirement, codes: frozenset[str]) -> frozenset[str]:
    """Those of these rules that belong to a requirement and check single rollouts."""
    return frozenset(code for code in codes - _of_logs() if code.startswith(required.prefix))


def _refuse_uncountable(required: Requirement) -> None:
    """SetupError for a requirement that no rollout can meet: of no rule, or of rules that judge whole logs."""
    codes = frozenset(rule.code for rule in all_rules())
    if not any(code.startswith(required.prefix) for code in codes):
        known = (*FAMILIES, *sorted(codes))
        raise unknown("rule", required.prefix, known, flag="--require", listed_by="tito-audit list rules")
    if not _countable(required, codes):
        raise SetupError(
            f"--require {required}: {required.prefix} judges whole logs, so it covers no single rollout.\n"
            "Require rules that check rollouts, such as LPR or SEQ."
        )
