"""What `--max-rate`, `--baseline` and `--sample` say, as settings of a gate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tito_audit.errors import SetupError
from tito_audit.settings.model import GateSettings, MaxRate

__all__ = ["gate_settings_of", "known_prefix", "max_rate_of", "share_of"]

_HOW = "Write it as --max-rate TOK=0.001 (a generated token), TOK=0.1% or SEQ=0.5/rollout; ALL is every rule."


def gate_settings_of(
    *, max_rate: Sequence[str] | None = None, baseline: str | None = None, update_baseline: bool = False
) -> GateSettings:
    """The options of a gate as GateSettings; SetupError naming the option that cannot be."""
    rates: dict[str, MaxRate] = {}
    for text in (part for given in max_rate or () for part in given.split(",") if part.strip()):
        rate = max_rate_of(text)
        if rate.prefix in rates:
            raise SetupError(
                f"--max-rate {text}: {rate.prefix or 'ALL'} was given a rate before, {rates[rate.prefix]}.\n"
                "Pass one rate for each beginning of codes."
            )
        rates[rate.prefix] = rate
    if update_baseline and baseline is None:
        raise SetupError("--update-baseline: no file to write was named.\nPass --baseline FILE as well.")
    return GateSettings(tuple(rates.values()), baseline, update_baseline)


def max_rate_of(text: str) -> MaxRate:
    """One rate out of CODES=RATE, CODES=RATE% or either with /rollout."""
    codes, equals, rate = (part.strip() for part in text.partition("="))
    if not equals or not codes or not rate:
        raise SetupError(f"--max-rate {text}: no codes and rate were found.\n{_HOW}")
    number, slash, per = (part.strip() for part in rate.partition("/"))
    if slash and per not in ("token", "rollout"):
        raise SetupError(f"--max-rate {text}: a rate is one of each token or rollout, not {per!r}.\n{_HOW}")
    limit = _number(number.removesuffix("%"))
    if limit is None:
        raise SetupError(f"--max-rate {text}: {number!r} is no number that is 0 or above.\n{_HOW}")
    limit = limit / 100 if number.endswith("%") else limit
    prefix = "" if codes.upper() == "ALL" else known_prefix(codes.upper(), "--max-rate")
    return MaxRate(prefix, limit, "rollout" if per == "rollout" else "token")


def share_of(text: str | float) -> float:
    """The share of rows to audit out of `0.1` or `10%`; SetupError when it is none."""
    words = str(text).strip()
    number = _number(words.removesuffix("%"))
    share = number / 100 if number is not None and words.endswith("%") else number
    if share is None or not 0 < share <= 1:
        raise SetupError(
            f"--sample {text}: this is no share of the rows.\n"
            "Pass one above 0 and at most 1: --sample 0.05, or 5%, audits about one row of twenty."
        )
    return share


def known_prefix(code: str, option: str) -> str:
    """The code itself, if a rule's code begins with it; SetupError naming close ones otherwise."""
    import difflib

    from tito_audit.rules import all_rules

    known = [rule.code for rule in all_rules()]
    if any(one.startswith(code) for one in known):
        return code
    close = difflib.get_close_matches(code, known, n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(close)}?" if close else "See tito-audit list rules."
    raise SetupError(f"{option} {code}: no rule has a code that starts so.\n{hint}")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
