"""The contract of a log format: how its rows are recognized, read and written back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from tito_audit.errors import ODD_VALUES, RecordError, TitoAuditError, describe_error
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import Sources

Row = Mapping[str, Any]
"""One row as storage gives it: a JSON object, or a Parquet row in which lists of numbers are one-dimensional
numpy arrays and everything else is plain Python values."""
SourcesOf = Callable[[Row, Sequence[Rollout]], Sequence[Sources]]
"""Where a row holds each of its rollouts, in order."""


_KEYS = re.compile(r"(\bno )?\{([^}]+?)(\?)?\}")
_ALTERNATIVES = re.compile(r"[;,] or (?![^{]*\})")


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """One alternative of a signature: a row needs a key of each group in `required`, and none of `absent`."""

    required: tuple[tuple[str, ...], ...]
    optional: tuple[tuple[str, ...], ...]
    absent: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Signature:
    """How a format is recognized, as `{tokens} with {mask|masks}; or {text}, no {ids}; seed in {seed?}`.

    Keys are in braces, as paths (`choices[].ids`): `|` separates keys of which one is enough, an optional key ends
    in `?`, and one after "no" must not be there. A key may show its value (`label: true`).
    """

    written: str = ""

    @cached_property
    def key_patterns(self) -> tuple[KeyPattern, ...]:
        """The alternatives that require a key; those in words alone are left out."""
        patterns = []
        for alternative in _ALTERNATIVES.split(self.written):
            groups: dict[str, list[tuple[str, ...]]] = {"": [], "?": [], "no ": []}
            for no, names, optional in _KEYS.findall(alternative):
                groups[no or optional].append(tuple(name.partition(": ")[0] for name in names.split("|")))
            patterns.append(KeyPattern(*map(tuple, groups.values())))
        return tuple(pattern for pattern in patterns if pattern.required)

    @cached_property
    def text(self) -> str:
        """The sentence for people, with keys in backticks."""
        sentence = self.written
        for _, keys, optional in _KEYS.findall(self.written):
            *others, last = (f"`{name}`" for name in keys.split("|"))
            listed = f"{', '.join(others)} or {last}" if others else last
            sentence = sentence.replace(f"{{{keys}{optional}}}", listed)
        return sentence


@dataclass(frozen=True, slots=True)
class Steps:
    """How rows that are the steps of one conversation depend on each other."""

    name: Callable[[Row], str | None]
    """The conversation of a row; None if the row does not say."""
    whole: Callable[[Sequence[Row]], Sequence[Row]]
    """The steps of one conversation with complete prompts; a step may hold only what it adds to the last."""
    stored: Callable[[Sequence[Row], Sequence[Row]], Sequence[Row]]
    """The rows to write, from changed steps with complete prompts and the old rows; an old row where unchanged."""


@dataclass(frozen=True, slots=True)
class Format:
    """One log format; each file of `formats/` defines one. Its functions are pure, since storage reads the files.

    They are guarded: on a row with values that they do not expect they raise RecordError, or do not match.
    """

    name: str
    title: str
    """What writes it, in a few words for `tito-audit list formats`."""
    signature: Signature
    """The keys by which it is recognized."""
    precedence: int
    """Order of detection: formats are tried from the lowest, and the first that matches wins."""
    matches: Callable[[Row], bool]
    """Whether a row is of this format: checks keys first, then a value that confirms them. Cheap: never walks a
    token list. It is called first with a mapping of the keys alone: if it looks up no value, its answer counts for
    all rows with these keys."""
    read: Callable[[Row, Place], Sequence[Rollout]]
    """The rollouts of a row, several if it holds a group; `place.item` counts them from 0. RecordError if the row
    has the shape of the format but its values make no sense."""
    sources: SourcesOf
    """Where the row holds the arrays of its rollouts."""
    update: Callable[[Row, Sequence[RepairedRollout]], Sequence[Row]]
    """The row with the repaired rollouts in every copy; several rows if a repair forked one. Unchanged parts are
    the same objects, and so is an unchanged row. RecordError when the format cannot hold the rollouts."""
    shows: str = ""
    """What of it can be audited and what cannot, for the table of formats."""
    row_is_call: bool = False
    """Whether a row is one call of a conversation, as servers, proxies and gateways log them."""
    conversation: str = ""
    """The key that names the conversation of each call; "" if only the history shows it."""
    steps: Steps | None = None
    """How a row that is one call depends on the others of its conversation; None if it does not."""
    open_object: str = ""
    """The key of the object that takes arbitrary keys, if the row itself does not; "" if it does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "matches", partial(_matches, self.matches))
        for name in ("read", "sources", "update"):
            object.__setattr__(self, name, partial(_guarded, self, getattr(self, name)))


def _matches(matches: Callable[[Row], bool], row: Row) -> bool:
    try:
        return matches(row)
    except ODD_VALUES:
        return False


def _guarded(format: Format, work: Callable[..., Any], row: Row, rest: Any) -> Any:
    """What a function of the format returns; RecordError with the reason if it fails on the row's values."""
    try:
        return work(row, rest)
    except TitoAuditError:
        raise
    except ODD_VALUES as error:
        if not format.matches(row):
            what = f"it has no {error.args[0]!r}" if type(error) is KeyError else "its columns hold other values"
            reason = f"it is not a row of {format.name}, which was asked for: {what}"
        elif isinstance(error, RecursionError):
            reason = f"it cannot be read as {format.name}: {describe_error(error)}"
        else:
            reason = (
                f"it cannot be read as {format.name}: a part of it is missing or holds something else than it "
                f"should ({describe_error(error)})"
            )
        raise RecordError(reason) from error
