"""The keys that show a log format, as data: rows are checked against it, and its text is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Presence(StrEnum):
    """Whether a row of the format has the keys."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Alternative keys, as paths (`choices[].token_ids`), and the words around them."""

    names: tuple[str, ...]
    presence: Presence = Presence.REQUIRED
    before: str | None = None
    """What joins them to the keys before; None: a comma, or nothing where they come first."""
    after: str = ""
    """A remark for people, such as what the keys hold."""
    value: str = ""
    """What the last of them holds, shown after it; "": not shown."""

    def text(self, first: bool) -> str:
        """The keys in backticks, the last two joined by `or`."""
        shown = [f"`{name}`" for name in self.names]
        if self.value:
            shown[-1] = f"`{self.names[-1]}: {self.value}`"
        listed = " or ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)
        before = self.before if self.before is not None else "" if first else ", "
        return f"{before}{listed}{self.after}"


@dataclass(frozen=True, slots=True)
class KeyWay:
    """One way to recognize a format: by all its keys together."""

    keys: tuple[KeyGroup, ...] = ()
    words: str = ""
    """The way in words, if it does not go by keys."""
    before: str = "; or "
    """What joins it to the way before."""

    @property
    def required(self) -> tuple[KeyGroup, ...]:
        return tuple(keys for keys in self.keys if keys.presence is Presence.REQUIRED)

    @property
    def optional(self) -> tuple[KeyGroup, ...]:
        return tuple(keys for keys in self.keys if keys.presence is Presence.OPTIONAL)

    @property
    def absent(self) -> tuple[KeyGroup, ...]:
        return tuple(keys for keys in self.keys if keys.presence is Presence.ABSENT)

    @property
    def text(self) -> str:
        return self.words or "".join(keys.text(first=not index) for index, keys in enumerate(self.keys))


@dataclass(frozen=True, slots=True)
class Signature:
    """Every way to recognize a format."""

    ways: tuple[KeyWay, ...] = ()

    @classmethod
    def of(cls, *ways: KeyWay) -> Signature:
        return cls(ways)

    @property
    def by_keys(self) -> tuple[KeyWay, ...]:
        """The ways that go by keys."""
        return tuple(way for way in self.ways if way.required)

    @property
    def text(self) -> str:
        """The signature for people, with keys in backticks."""
        return "".join(f"{way.before if index else ''}{way.text}" for index, way in enumerate(self.ways))


def way(*parts: str | KeyGroup, before: str = "; or ") -> KeyWay:
    """One way to recognize a format; a plain name is a required key."""
    return KeyWay(tuple(KeyGroup((part,)) if isinstance(part, str) else part for part in parts), before=before)


def one_way(*parts: str | KeyGroup) -> Signature:
    """The signature of a format that is recognized in one way."""
    return Signature.of(way(*parts))


def keys(*names: str, before: str | None = None, after: str = "", value: str = "") -> KeyGroup:
    """Alternative keys, one of which is required."""
    return KeyGroup(names, before=before, after=after, value=value)


def optional(*names: str, before: str) -> KeyGroup:
    """Alternative keys, none of which is required."""
    return KeyGroup(names, Presence.OPTIONAL, before)


def absent(name: str) -> KeyGroup:
    """A key that must not be there."""
    return KeyGroup((name,), Presence.ABSENT, ", no ")
