"""The tables of `rescore` as text cells, for the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.record.mismatch import MismatchCause
from tito_audit.rescore.compare import Sums
from tito_audit.rescore.model import EDGES, NEAR
from tito_audit.rescore.summary import CausePrice, RescoreSummary
from tito_audit.terminal.escape import visible
from tito_audit.terminal.mismatch import mismatch_rows
from tito_audit.terminal.words import percent, unsigned

_EDGES = tuple(f"> {edge:g}" for edge in EDGES)
Row = tuple[str, ...]

AGREEMENT_HEADS: Row = ("", "tokens", "mean", "max", "k1", "k3", *_EDGES)
AGREEMENT_LEGEND = (
    "mean, max: of the absolute difference; k1, k3: estimates of the KL divergence; "
    f"{', '.join(_EDGES)}: tokens that differ by more."
)
DRIFTED_HEADS: Row = ("rule, cause", "findings", "tokens", "sampled", "instead", "change", "likelier")
DRIFTED_LEGEND = (
    "sampled, instead: mean logprob per token of what was sampled, and of what replaced it; change: of the summed "
    "logprob, per span of drifted tokens; likelier: spans whose replacement is more likely."
)
AFTER_HEADS: Row = ("rule, cause", "tokens", "mean change", "largest")
AFTER_LEGEND = "The same tokens in another context, up to the next drift; changes are absolute."

MISMATCH_HEADS: Row = ("cause", "share", "tokens", "the worst")


def mismatch_cells(summary: RescoreSummary) -> Iterator[Row]:
    """Why the recorded logprobs differ from the model's, which stands where a trainer's would."""
    fine = {MismatchCause.NUMERICS, MismatchCause.COPIED}
    if summary.mismatch is not None and not fine.issuperset(summary.mismatch.shares):
        for part, cause, estimate, tokens, worst in mismatch_rows(summary.mismatch):
            estimate = estimate.replace("the trainer's", "the model's")
            words = f"{cause} ({estimate})" if estimate else cause
            yield visible(words), percent(part), f"{tokens:,}", worst


def agreement_rows(summary: RescoreSummary, turns: int) -> Iterator[Row]:
    """How recorded logprobs agree with the model's: in all, then turn by turn; from `turns` on, together."""
    by_turn = sorted(summary.by_turn.items())
    named = [("no turn" if turn < 0 else f"turn {turn}", sums) for turn, sums in by_turn[:turns]]
    later = [sums for _, sums in by_turn[turns:]]
    if later:
        out = Sums()
        for sums_of_turn in later:
            out.tokens += sums_of_turn.tokens
            out.total += sums_of_turn.total
            out.size += sums_of_turn.size
            out.squares += sums_of_turn.squares
            out.k3 += sums_of_turn.k3
            out.largest = max(out.largest, sums_of_turn.largest)
            out.above = [a + b for a, b in zip(out.above, sums_of_turn.above, strict=True)]
        named.append((f"later {len(later)}", out))
    for name, sums in [("all", summary.sums), *(named if len(by_turn) > 1 else ())]:
        agreement = sums.agreement(summary.tolerance)
        if agreement is not None:
            estimates = (unsigned(f"{value:.4f}") for value in (agreement.k1, agreement.k3))
            sizes = f"{agreement.size:.4f}", f"{agreement.largest:.3f}"
            yield name, f"{agreement.tokens:,}", *sizes, *estimates, *map(percent, agreement.above)


def drifted_rows(summary: RescoreSummary) -> Iterator[Row]:
    """How the logprobs of the drifted tokens themselves change, by rule and cause."""
    for cause in _causes(summary):
        cells: Row = ("–",) * 5
        if cause.segments:
            cells = (
                f"{cause.sampled_tokens:,} → {cause.other_tokens:,}",
                _per(cause.sampled, cause.sampled_tokens),
                _per(cause.other, cause.other_tokens),
                f"{(cause.other - cause.sampled) / cause.segments:+.2f}",
                percent(cause.likelier / cause.segments),
            )
        yield _name(cause), f"{cause.findings:,}", *cells


def after_rows(summary: RescoreSummary) -> Iterator[Row]:
    """How the logprobs of equal sampled tokens after the drift change, by rule and cause."""
    for cause in _causes(summary):
        after = cause.behind
        if after.tokens:
            yield _name(cause), f"{after.tokens:,}", f"{after.size / after.tokens:.3f}", f"{after.largest:.2f}"


def around(summary: RescoreSummary) -> Iterator[str]:
    """How far the change reaches, and how whole turns change."""
    near = [
        f"{reach.size / reach.tokens:.3f} from the {first + 1}{_ordinal(first + 1)} token on"
        for first, reach in zip(NEAR, summary.near, strict=True)
        if reach.tokens
    ]
    if near:
        yield f"By distance from the drift: {', '.join(near)}."
    if summary.changes:
        mean = sum(summary.changes) / len(summary.changes)
        yield (
            f"The summed logprob of a whole turn or row with drift ({summary.changed:,}) changes by {mean:+.2f} "
            f"on average, from {min(summary.changes):+.1f} to {max(summary.changes):+.1f}."
        )


def _causes(summary: RescoreSummary) -> list[CausePrice]:
    return sorted(summary.causes.values(), key=lambda cause: (cause.code, -cause.findings))


def _name(cause: CausePrice) -> str:
    return visible(f"{cause.code} {cause.cause}".rstrip())


def _per(total: float, tokens: int) -> str:
    return f"{total / tokens:.2f}" if tokens else "–"


def _ordinal(number: int) -> str:
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
