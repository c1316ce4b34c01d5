"""What the texts of flags mean: fields of settings out of pairs, lists with commas, shares and rates."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from tito_audit.errors import SetupError
from tito_audit.settings.model import MaxRate

__all__ = [
    "arguments",
    "codes",
    "columns",
    "join_columns",
    "json_or_text",
    "names",
    "prefixes",
    "rates",
    "roles",
    "sentinel",
    "share",
]

_HOW = "Write it as --max-rate TOK=0.001 (a generated token), TOK=0.1% or SEQ=0.5/rollout; ALL is every rule."


def columns(given: Sequence[str], flag: str) -> dict[str, str]:
    """Our columns to the log's, out of `token_ids=tokens`."""
    return dict(_pair(text, flag, "token_ids=tokens") for text in given)


def arguments(given: Sequence[str], flag: str) -> dict[str, object]:
    """Arguments by name, out of `enable_thinking=false`; a value is JSON, else text."""
    pairs = [_pair(text, flag, "enable_thinking=false") for text in given]
    return {name: json_or_text(text) for name, text in pairs}


def join_columns(given: Sequence[str], flag: str) -> dict[str, str]:
    """Columns of the log to those of the other file, out of `id` or `id=uid`."""
    return dict(_columns_pair(text, flag) for text in given)


def roles(given: Sequence[str], flag: str) -> tuple[str, ...]:
    """Roles out of comma lists, each once."""
    found = [role.strip() for part in given for role in part.split(",")]
    if not all(found):
        raise SetupError(f"{flag} {','.join(given)!r}: no role was found.\nWrite it as {flag} assistant")
    return tuple(dict.fromkeys(found))


def codes(given: Sequence[str], flag: str) -> tuple[str, ...]:
    """Code prefixes out of comma lists."""
    return tuple(code.strip().upper() for part in given for code in part.split(",") if code.strip())


def names(given: Sequence[str], flag: str) -> tuple[str, ...]:
    """Names out of comma lists, each once."""
    found = [name.strip().lower() for part in given for name in part.split(",")]
    return tuple(name for name in dict.fromkeys(found) if name)


def sentinel(given: str, flag: str) -> float | Literal["null"]:
    """A finite number, or "null"."""
    if given == "null":
        return "null"
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SetupError(
            f"{flag} {given}: this is neither a finite number nor null.\nWrite it as {flag} 0.0 or null"
        )
    return number


def share(given: str | float) -> float:
    """The share of rows to audit, out of `0.1` or `10%`."""
    words = str(given).strip()
    number = _number(words.removesuffix("%"))
    part = number / 100 if number is not None and words.endswith("%") else number
    if part is None or not 0 < part <= 1:
        raise SetupError(
            f"--sample {given}: this is no share of the rows.\n"
            "Pass one above 0 and at most 1: --sample 0.05, or 5%, audits about one row of twenty."
        )
    return part


def rates(given: Sequence[str], flag: str) -> tuple[MaxRate, ...]:
    """Rates out of comma lists, one for each beginning of codes."""
    found: dict[str, MaxRate] = {}
    for text in (part for one in given for part in one.split(",") if part.strip()):
        rate = _rate(text, flag)
        if rate.prefix in found:
            raise SetupError(
                f"{flag} {text}: {rate.prefix or 'ALL'} was given a rate before, {found[rate.prefix]}.\n"
                "Pass one rate for each beginning of codes."
            )
        found[rate.prefix] = rate
    return tuple(found.values())


def prefixes(given: Sequence[MaxRate]) -> list[str]:
    """The beginnings of codes that rates are of."""
    return [rate.prefix for rate in given if rate.prefix]


def json_or_text(text: str) -> Any:
    """The value that a text is as JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _rate(text: str, flag: str) -> MaxRate:
    """One rate out of CODES=RATE, CODES=RATE% or either with /rollout."""
    codes, equals, rate = (part.strip() for part in text.partition("="))
    if not equals or not codes or not rate:
        raise SetupError(f"{flag} {text}: no codes and rate were found.\n{_HOW}")
    number, slash, per = (part.strip() for part in rate.partition("/"))
    if slash and per not in ("token", "rollout"):
        raise SetupError(f"{flag} {text}: a rate is one of each token or rollout, not {per!r}.\n{_HOW}")
    limit = _number(number.removesuffix("%"))
    if limit is None:
        raise SetupError(f"{flag} {text}: {number!r} is no number that is 0 or above.\n{_HOW}")
    limit = limit / 100 if number.endswith("%") else limit
    prefix = "" if codes.upper() == "ALL" else codes.upper()
    return MaxRate(prefix, limit, "rollout" if per == "rollout" else "token")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _pair(text: str, flag: str, example: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SetupError(f"{flag} {text}: no name and value were found.\nWrite it as {flag} {example}")
    return key.strip(), value


def _columns_pair(text: str, flag: str) -> tuple[str, str]:
    ours, equals, theirs = (part.strip() for part in text.partition("="))
    if not ours or (equals and not theirs):
        raise SetupError(f"{flag} {text}: no column was found.\nWrite it as {flag} id, or as {flag} id=other_name")
    return ours, theirs or ours
