"""Places as printed in reports and typed by users: a row, a turn, tokens.

run.jsonl:3   run.jsonl:3[1]   run.jsonl:3:2   run.jsonl:3:2:14-16   run.jsonl:3 turn 2 completion 14:16
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tito_audit.errors import SetupError
from tito_audit.record.finding import Finding, Where
from tito_audit.settings.home import user_path

_POSITION = r"(?:(?P<where>prompt|completion|row)(?::|[ ]at[ ]|[ ]))?(?P<start>\d{1,10})(?:[-:](?P<end>\d{1,10}))?"
_REST = re.compile(
    r"(?P<row>\d{1,15})(?:\[(?P<item>\d{1,9})\])?"
    r"(?:(?::|[ ]turn[ ])(?P<turn>\d{1,9}|-|))?"
    rf"(?:(?::|[ ](?:at[ ])?)(?:{_POSITION}|-))?:?"
)
_SPOT = re.compile(_POSITION)
_CODE = re.compile(r"[A-Z]{1,3}\d{0,3}")
_FINGERPRINT = re.compile(r"[0-9a-f]{4,16}")


@dataclass(frozen=True, slots=True)
class Spot:
    """Tokens to show."""

    start: int
    end: int
    """Half-open; a position alone is one token."""
    where: Where | None = None
    """None: any sequence that is long enough."""
    turn: int | None = None

    def __str__(self) -> str:
        tokens = str(self.start) if self.end <= self.start + 1 else f"{self.start}-{self.end}"
        return (
            (f"turn {self.turn} " if self.turn is not None else "")
            + (f"{self.where}:" if self.where else "")
            + tokens
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """The part of a log to show."""

    log: str
    row: int | None
    """None: not specified."""
    item: int = 0
    turn: int | None = None
    spot: Spot | None = None


@dataclass(frozen=True, slots=True)
class Spots:
    """The part of a rollout to show: some tokens, and findings by code or fingerprint."""

    spots: tuple[Spot, ...]
    findings: tuple[Finding, ...]


def wanted_place(log: str, *, row: int | None = None, item: int | None = None, turn: int | None = None) -> Wanted:
    """The place in `log`, which may carry row, turn and tokens as reports print them, or in the options.

    An existing file is a file, colons and all. SetupError if the place and the options disagree.
    """
    file, rest = _split(log)
    if rest is None:
        return Wanted(log, row, item or 0, turn)
    placed = rest["turn"] not in (None, "", "-")
    said = {"row": int(rest["row"]), "turn": int(rest["turn"]) if placed else None}
    said["item"] = int(rest["item"]) if rest["item"] else None
    for name, given in (("row", row), ("turn", turn), ("item", item)):
        if given is not None and said[name] is not None and given != said[name]:
            raise SetupError(
                f"{log}: the place names {name} {said[name]}, but --{name} is {given}.\nLeave one out."
            )
        said[name] = given if said[name] is None else said[name]
    spot = _spot(rest, log, said["turn"]) if rest["start"] else None
    if spot is not None and rest["turn"] == "-":
        spot = replace(spot, where=Where.ROW)
    return Wanted(file, said["row"], said["item"] or 0, said["turn"], spot)


def spots_of(around: Sequence[str], findings: Sequence[Finding], turn: int | None) -> Spots:
    """What `--around` asks for: positions, and findings by code or fingerprint; SetupError for anything else."""
    spots: list[Spot] = []
    chosen: list[Finding] = []
    for text in around:
        match = _SPOT.fullmatch(text.strip())
        if match is not None:
            spots.append(_spot(match, f"--around {text}", turn))
        else:
            chosen += _chosen(text, findings, "this rollout" if turn is None else f"turn {turn}")
    return Spots(tuple(spots), tuple({id(one): one for one in chosen}.values()))


def _chosen(text: str, findings: Sequence[Finding], whose: str) -> list[Finding]:
    code, mark = text.strip().upper(), text.strip().lower()
    is_code, is_mark = _CODE.fullmatch(code) is not None, _FINGERPRINT.fullmatch(mark) is not None
    if not is_code and not is_mark:
        raise SetupError(
            f"--around {text}: not a position, a code or a fingerprint of a finding.\n"
            "Write 120, completion:12, prompt:5-9, TOK101, or 16 hexadecimal digits from a report."
        )
    found = [
        one
        for one in findings
        if (is_code and one.code.startswith(code)) or (is_mark and one.fingerprint.startswith(mark))
    ]
    if not found:
        kind = "code" if is_code else "fingerprint"
        raise SetupError(f"--around {text}: no finding of {whose} has this {kind}.\n{_there_are(findings)}")
    return found


def _there_are(findings: Iterable[Finding]) -> str:
    codes = [one.code for one in findings]
    if not codes:
        return "It has no findings."
    return "It has " + ", ".join(f"{code} ({codes.count(code)})" for code in sorted(set(codes))) + "."


def _split(log: str) -> tuple[str, re.Match[str] | None]:
    """The file, and the match of what follows it; if several files fit, the longest name that exists."""
    if _exists(log):
        return log, None
    cuts = [(log[: one.start()], _REST.fullmatch(log[one.end() :])) for one in re.finditer(":", log)]
    cuts = [(file, rest) for file, rest in cuts if rest is not None and file]
    there = [(file, rest) for file, rest in cuts if _exists(file)]
    if there:
        return there[-1]
    return cuts[0] if cuts else (log, None)


def _exists(name: str) -> bool:
    try:
        return user_path(name).exists()
    except (OSError, ValueError):  # the name is too long
        return False


def _spot(match: re.Match[str], said: str, turn: int | None) -> Spot:
    start = int(match["start"])
    end = int(match["end"]) if match["end"] else start + 1
    if end < start:
        raise SetupError(f"{said}: the range {start}-{end} ends before it begins.")
    where = Where(match["where"]) if match["where"] else None
    return Spot(start, end, where, None if where is Where.ROW else turn)
