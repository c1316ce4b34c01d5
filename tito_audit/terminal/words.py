"""Numbers, shares and lists as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from itertools import groupby

from tito_audit.summary import RateCount


def many(number: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def percent(share: float) -> str:
    """`38 %`, `3.4 %`, `0.13 %`: two significant digits and no exponent; never 0 % or 100 % by rounding."""
    value = 100 * share
    if not value or value >= 100 or not math.isfinite(value):
        return f"{value:.0f} %" if math.isfinite(value) else "–"
    if value >= 99.5:
        return f"{value:.1f} %" if value < 99.95 else "over 99.9 %"
    if value < 0.0001:
        return "under 0.0001 %"
    text = f"{value:.{max(1 - math.floor(math.log10(value)), 0)}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


def share(part: float, whole: float) -> str:
    """`3.1 %`; `–` if `whole` is 0."""
    return percent(part / whole) if whole else "–"


def small(number: float) -> str:
    """`0.0588` with three digits; `less than 0.0001` for smaller numbers that are not 0."""
    return decimal(number, 3) if number >= 0.0001 or not number else "less than 0.0001"


def signed(number: float, digits: int = 2) -> str:
    """`+0.12`, `-0.000063`: the number as `decimal` writes it, with its sign."""
    return ("+" if number >= 0 else "") + decimal(number, digits)


def unsigned(number: str) -> str:
    """A formatted number; a zero loses its sign: `0.00`, not `-0.00`."""
    return number.lstrip("+-") if not float(number) else number


def listed(words: Sequence[str], conjunction: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`; empty without words."""
    return f" {conjunction} ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def code_ranges(codes: list[str]) -> str:
    """Sorted codes with three or more consecutive ones as a range: `LPR501-LPR506, TOK101`."""
    words = []
    numbers = [int("".join(filter(str.isdecimal, code)) or 0) for code in codes]
    for _, places in groupby(range(len(codes)), key=lambda at: (codes[at][:3], numbers[at] - at)):
        run = [codes[at] for at in places]
        words.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run))
    return ", ".join(words)


def rate_number(rate: RateCount) -> str:
    """`0.13 %` of the tokens or `0.21` per rollout, with enough digits to tell it from the limit.

    `–` where the log has no tokens or rollouts to divide by.
    """
    if not math.isfinite(rate.rate):
        return "–"
    by_rollout = rate.unit == "rollouts"
    try:
        limit = Decimal(rate.limit.partition("=")[2].removesuffix("/rollout"))
    except ArithmeticError:  # not one of our limits: shown, not interpreted
        return decimal(rate.rate) if by_rollout else percent(rate.rate)
    scale = 1 if by_rollout else 100
    shown = (decimal(rate.rate * scale, digits) for digits in range(2, 18))
    over = ((text, Decimal(text.replace(",", "")) > limit * scale) for text in shown)
    text = next((text for text, above in over if above == rate.failed), repr(rate.rate * scale))
    return text if by_rollout else f"{text} %"


def limit_number(limit: float, *, by_rollout: bool) -> str:
    """A limit written like the rates it bounds: `0.1 %` of the tokens, or `0.5` per rollout."""
    return decimal(limit, 12) if by_rollout else f"{decimal(limit * 100, 12)} %"


def decimal(number: float, digits: int = 2) -> str:
    """`0.000063`, `0.12`, `1,200`: `digits` significant ones or all before the point, and no exponent."""
    if not math.isfinite(number) or not number:
        return f"{number:g}"
    whole = max(digits, math.floor(math.log10(abs(number))) + 1)
    text = f"{Decimal(f'{number:.{whole}g}'):,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
