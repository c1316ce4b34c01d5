"""Parses values of flags: pairs, comma-separated lists, shares and rates."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

from tito_audit.errors import SetupError
from tito_audit.settings.model import RECORDED, MaxRate, Requirement

DATETIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2})?)?"
"""A date, or a date and a time of day, as ISO 8601 writes it."""
_RATES = (
    "Write --max-rate TOK=0.001 (per generated token), TOK=0.1% or SEQ=0.5/rollout; ALL stands for every rule."
)

_REQUIRE_ADVICE = (
    "Write --require LPR (all rollouts), --require LPR=95% or --require LPR,SEQ; a share is above 0 and at most 1."
)


def parse_pairs(texts: Sequence[str], flag: str, *, example: str) -> dict[str, str]:
    """Values by name, from texts such as the example, `token_ids=tokens`."""
    return dict(_parse_pair(text, flag, example) for text in texts)


def parse_arguments(texts: Sequence[str], flag: str) -> dict[str, object]:
    """Template arguments by name, from `enable_thinking=false`; values are JSON, else text."""
    pairs = [_parse_pair(text, flag, "enable_thinking=false") for text in texts]
    return {name: json_or_text(text) for name, text in pairs}


def parse_join_columns(texts: Sequence[str], flag: str) -> dict[str, str]:
    """The log's columns to the other file's, from `id` or `id=uid`."""
    pairs: dict[str, str] = {}
    for text in texts:
        ours, equals, theirs = (part.strip() for part in text.partition("="))
        if not ours or (equals and not theirs):
            raise SetupError(f"{flag} {text}: a column is missing.\nWrite {flag} id, or {flag} id=other_name")
        pairs[ours] = theirs or ours
    return pairs


def parse_offsets(texts: Sequence[str], flag: str) -> dict[str, int]:
    """How many places columns are late (+) or early (-), from `logprobs=+1` and `mask=-1`."""
    offsets: dict[str, int] = {}
    for text in texts:
        column, number = _parse_pair(text, flag, "logprobs=+1")
        if column not in ("mask", "logprobs") or not re.fullmatch(r"[+-]?[1-4]", number, re.ASCII):
            raise SetupError(
                f"{flag} {text}: not a column and how far it is off.\n"
                f"Write {flag} logprobs=+1 for logprobs one place late, or {flag} mask=-2 for a mask two places "
                "early; 4 places at most."
            )
        offsets[column] = int(number)
    return offsets


def parse_roles(texts: Sequence[str], flag: str) -> tuple[str, ...]:
    """Roles from comma-separated lists, without duplicates."""
    entries = [role.strip() for text in texts for role in text.split(",")]
    if not all(entries):
        raise SetupError(f"{flag} {','.join(texts)!r}: a role is missing.\nWrite {flag} assistant")
    return tuple(dict.fromkeys(entries))


def parse_codes(texts: Sequence[str], flag: str) -> tuple[str, ...]:
    """Code prefixes from comma-separated lists, in capitals."""
    return tuple(code.strip().upper() for text in texts for code in text.split(",") if code.strip())


def parse_names(texts: Sequence[str], flag: str) -> tuple[str, ...]:
    """Names from comma-separated lists, in lowercase and without duplicates."""
    entries = [name.strip().lower() for text in texts for name in text.split(",")]
    return tuple(name for name in dict.fromkeys(entries) if name)


def parse_clock(text: str, flag: str) -> datetime | Literal["recorded"]:
    """A datetime from `2024-07-26` or `2024-07-26T14:30`, or "recorded"."""
    date = RECORDED if text.strip() == RECORDED else parse_datetime(text.strip())
    if date is None:
        raise SetupError(
            f"{flag} {text}: not a date.\n"
            f"Write {flag} 2024-07-26, {flag} 2024-07-26T14:30, or {flag} {RECORDED} for the date of each prompt."
        )
    return date


def parse_datetime(text: str) -> datetime | None:
    """The datetime of an ISO date, or date and time; None for any other text."""
    if not re.fullmatch(DATETIME, text, re.ASCII):
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def parse_sentinel(text: str, flag: str) -> float | Literal["null"]:
    """A finite number, or "null"."""
    if text == "null":
        return "null"
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SetupError(f"{flag} {text}: not a finite number and not null.\nWrite {flag} 0.0 or {flag} null")
    return number


def parse_sample_share(text: str | float) -> float:
    """The share of rows to audit, from `0.1` or `10%`."""
    words = str(text).strip()
    number = _parse_number(words.removesuffix("%"))
    part = number / 100 if number is not None and words.endswith("%") else number
    if part is None or not 0 < part <= 1:
        raise SetupError(
            f"--sample {text}: not a share of the rows.\n"
            "Pass a share above 0 and at most 1: --sample 0.05, or 5%, audits about one row in twenty."
        )
    return part


def parse_rates(texts: Sequence[str], flag: str) -> tuple[MaxRate, ...]:
    """Rate limits from comma-separated lists, one per code prefix."""
    by_prefix: dict[str, MaxRate] = {}
    for text in (part for entry in texts for part in entry.split(",") if part.strip()):
        # CODES=RATE or CODES=RATE%, either with /rollout
        codes, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not codes or not value:
            raise SetupError(f"{flag} {text}: not of the form CODES=RATE.\n{_RATES}")
        number, slash, per = (part.strip() for part in value.partition("/"))
        if slash and per not in ("token", "rollout"):
            raise SetupError(f"{flag} {text}: a rate is per token or per rollout, not per {per!r}.\n{_RATES}")
        limit = _parse_number(number.removesuffix("%"))
        if limit is None:
            raise SetupError(f"{flag} {text}: {number!r} is not a number of 0 or more.\n{_RATES}")
        limit = limit / 100 if number.endswith("%") else limit
        prefix = "" if codes.upper() == "ALL" else codes.upper()
        rate = MaxRate(prefix, limit, "rollout" if per == "rollout" else "token")
        if (other := by_prefix.setdefault(rate.prefix, rate)) is not rate:
            raise SetupError(
                f"{flag} {text}: {rate.prefix or 'ALL'} already has a rate, {other}.\n"
                "Pass one rate per code or prefix."
            )
    return tuple(by_prefix.values())


def parse_requirements(texts: Sequence[str], flag: str) -> tuple[Requirement, ...]:
    """Required rules from comma-separated lists of `LPR` or `LPR=95%`, one per code prefix."""
    shares: dict[str, float] = {}
    if any(not entry.strip(", ") for entry in texts):  # an unset variable of a script must not open the gate
        raise SetupError(f'{flag} "": no rules are named.\n{_REQUIRE_ADVICE}')
    for text in (part.strip() for entry in texts for part in entry.split(",") if part.strip()):
        codes, equals, share = (part.strip() for part in text.partition("="))
        part = parse_share(share) if equals else 1.0
        if not codes or part is None:
            raise SetupError(f"{flag} {text}: not of the form CODES or CODES=SHARE.\n{_REQUIRE_ADVICE}")
        prefix = "" if codes.upper() == "ALL" else codes.upper()
        if prefix in shares:
            raise SetupError(f"{flag} {text}: {codes} is already required.\nPass one share per code or prefix.")
        shares[prefix] = part
    return tuple(Requirement(prefix, part) for prefix, part in shares.items())


def parse_min_audited(text: str | float) -> float:
    """The share of rollouts to be audited at least, from `0.95` or `95%`."""
    part = parse_share(str(text))
    if part is None:
        raise SetupError(
            f"--min-audited {text}: not a share of the rollouts.\n"
            "Pass a share above 0 and at most 1: --min-audited 0.95, or 95%."
        )
    return part


def parse_share(text: str) -> float | None:
    """A share above 0 and at most 1, from `0.95` or `95%`; None for anything else."""
    words = text.strip()
    if re.fullmatch(r"[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?%?", words) is None:
        return None
    number = Decimal(words.removesuffix("%"))
    part = float(number / 100 if words.endswith("%") else number)
    return part if 0 < part <= 1 else None


def code_prefixes(limits: Sequence[MaxRate | Requirement]) -> list[str]:
    """The code prefixes of limits, without that for all codes."""
    return [limit.prefix for limit in limits if limit.prefix]


def json_or_text(text: str) -> Any:
    """The text parsed as JSON if it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _parse_number(text: str) -> float | None:
    """A finite number of 0 or more; None for any other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _parse_pair(text: str, flag: str, example: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SetupError(f"{flag} {text}: not of the form NAME=VALUE.\nWrite {flag} {example}")
    return key.strip(), value
