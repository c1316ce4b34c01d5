"""Words for why sampler and trainer logprobs differ."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.record.mismatch import ADVICE, Interval, LogMismatch, MismatchCause, RowMismatch
from tito_audit.terminal.escape import visible
from tito_audit.terminal.words import decimal, many, percent

_MIN_SHARE = 0.005
"""Causes with a smaller share are left out."""


def cause_words(mismatch: RowMismatch | LogMismatch) -> Iterator[str]:
    """Each cause with its share of the total |difference|: `92 % of the total is temperature (…)`, `5 % drift`."""
    shares = mismatch.shares.items() if isinstance(mismatch, LogMismatch) else mismatch.shares
    total = sum(share.size for _, share in shares)
    if not total or [cause for cause, _ in shares] in ([MismatchCause.UNKNOWN], [MismatchCause.NUMERICS]):
        return
    first = True
    for cause, share in shares:
        if share.size >= _MIN_SHARE * total:
            estimate = estimate_words(mismatch, cause)
            name = "of a cause that the log does not tell" if cause == MismatchCause.UNKNOWN else cause
            words = f"{name} ({estimate})" if estimate else name
            yield f"{percent(share.size / total)} {'of the total is ' if first else ''}{words}"
            first = False


def estimate_words(mismatch: RowMismatch | LogMismatch, cause: str) -> str:
    """What is known of a cause: `the sampler's is 0.70 (0.66 to 0.74) times the trainer's; the log says …`."""
    note = ""
    if isinstance(mismatch, RowMismatch):
        note = dict(mismatch.notes).get(cause, "")
    elif counts := mismatch.notes.get(cause):  # the most common note of a log
        note, times = min(counts.items(), key=lambda item: (-item[1], item[0]))
        note += f", in {times:,} of {many(counts.total(), 'rollout')}" if len(counts) > 1 else ""
    estimate = ""
    if cause == MismatchCause.TEMPERATURE and mismatch.temperature is not None:
        estimate = f"the sampler's is {_interval_words(mismatch.temperature)} times the trainer's"
    elif cause == MismatchCause.TRUNCATED and mismatch.mass is not None:
        estimate = f"top-p {_interval_words(mismatch.mass)}"
    elif cause == MismatchCause.TRUNCATED:
        kinds = mismatch.truncations if isinstance(mismatch, LogMismatch) else {mismatch.truncation: 1}
        kind = max(kinds, key=lambda kind: kinds[kind], default="")
        ways = {"top-k": "as top-k does", "min-p": "as min-p does, or several limits"}
        estimate = ways.get(kind, "")
    return "; ".join(filter(None, (estimate, note)))


def _interval_words(interval: Interval) -> str:
    best, low, high = (decimal(value, 2) for value in (interval.best, interval.low, interval.high))
    return best if low == high else f"{best} ({low} to {high})"


def mismatch_rows(mismatch: LogMismatch) -> Iterator[tuple[float, str, str, int, str]]:
    """Each cause of at least half a percent: share, cause, estimate, number of tokens, the worst token."""
    total = sum(share.size for share in mismatch.shares.values())
    for cause, share in mismatch.shares.items():
        if share.size < _MIN_SHARE * total:
            continue
        worst = ""
        if cause in mismatch.worst and cause != MismatchCause.NUMERICS:
            place, token = mismatch.worst[cause]
            at = f"row {place.row}" + (f"[{place.item}]" if place.item else "")
            turn = "" if token.turn is None else f" turn {token.turn}"
            worst = f"{at}{turn} token {token.at} ({decimal(token.sampler, 3)} and {decimal(token.trainer, 3)})"
        part = share.size / total if total else 0.0
        yield part, cause, estimate_words(mismatch, cause), share.tokens, worst


def mismatch_lines(mismatch: LogMismatch) -> Iterator[tuple[str, str]]:
    """A share and its line for each cause: cause, number of tokens, the worst token, what to do."""
    for part, cause, estimate, tokens, worst in mismatch_rows(mismatch):
        words = f"{cause}{f' ({estimate})' if estimate else ''}: {many(tokens, 'token')}"
        words += f", the worst in {worst}" if worst else ""
        yield percent(part), visible(f"{words}; {ADVICE[MismatchCause(cause)]}")
