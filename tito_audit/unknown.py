"""A name that does not exist: what it may have meant, and which names there are."""

from __future__ import annotations

from collections.abc import Iterable

from tito_audit.errors import SetupError

_MOST = 14
"""Names to list; where there are more, the command that lists them is named instead."""
_LIKE, _NEAR = 0.62, 0.08
"""How much a name has to be like another to be meant, from 0 to 1, and how near it has to come to the best one."""
_WIDE = 80
"""The longest name that a message repeats whole."""


def close_names(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The known names most like a misspelt one, best first."""
    import difflib  # slow to load, and needed only for a mistake

    by_key = {_key(known_name): known_name for known_name in names}
    wanted = _key(name)
    likeness = {key: difflib.SequenceMatcher(None, key, wanted).ratio() for key in by_key}
    best = max(likeness.values(), default=0.0)
    close = [key for key, like in likeness.items() if like >= max(best - _NEAR, _LIKE)]
    close = close or [key for key in by_key if len(wanted) > 1 and key.startswith(wanted)]
    return [by_key[key] for key in sorted(close, key=lambda key: -likeness[key])[:most]]


def _key(name: str) -> str:
    """A name as it is compared: case, underscores and the dashes of a flag make no difference."""
    return name.lower().replace("_", "-").lstrip("-")


def quoted(name: str) -> str:
    """The name in double quotes, on one line and without control characters, cut where it is very long."""
    return '"' + repr(name if len(name) <= _WIDE else f"{name[:_WIDE]}…")[1:-1] + '"'


def did_you_mean(name: str, names: Iterable[str], most: int = 3) -> str:
    """`did you mean json?`; empty if no name is close."""
    close = close_names(name, names, most)
    return f"did you mean {' or '.join(close)}?" if close else ""


def unknown(
    what: str,
    name: str,
    possible: Iterable[str],
    *,
    choices: Iterable[str] = (),
    flag: str | None = None,
    listed_by: str = "",
) -> SetupError:
    """The error for a name that does not exist: `Unknown report "jsn": did you mean json? (json, text)`.

    `choices` is what the message lists where that is not the names themselves, and `listed_by` the command that it
    names where there are too many. `flag` is the flag that the name was given to.
    """
    names = list(possible)
    hint = did_you_mean(name, names)
    listed = list(choices) or names
    brackets = listed_by if listed_by and len(listed) > _MOST else ", ".join(listed)
    words = [f"Unknown {what} {quoted(name)}" + (":" if hint else "."), hint, f"({brackets})" if brackets else ""]
    return SetupError(" ".join(filter(None, words)), flag=flag)
