"""A name that does not exist: what it may have meant, and which names there are."""

from __future__ import annotations

from collections.abc import Iterable

from tito_audit.errors import SetupError

_MAX_LISTED = 14
"""Maximum names listed; for more, the command that lists them is named instead."""
_MIN_LIKENESS, _MAX_GAP = 0.62, 0.08
"""To be suggested, a name needs this likeness, from 0 to 1, and may be this much less alike than the best one."""
_MAX_QUOTED = 80
"""Maximum characters of a name that a message quotes."""


def close_names(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The known names that are most like a misspelt one, the closest first."""
    import difflib  # slow to load, and needed only for a mistake

    by_form = {_compared_form(other): other for other in names}
    wanted = _compared_form(name)
    likeness = {key: difflib.SequenceMatcher(None, key, wanted).ratio() for key in by_form}
    best = max(likeness.values(), default=0.0)
    close = [key for key, like in likeness.items() if like >= max(best - _MAX_GAP, _MIN_LIKENESS)]
    close = close or [key for key in by_form if len(wanted) > 1 and key.startswith(wanted)]
    return [by_form[key] for key in sorted(close, key=lambda key: -likeness[key])[:most]]


def _compared_form(name: str) -> str:
    """The name as compared: case, underscores and a flag's dashes make no difference."""
    return name.lower().replace("_", "-").lstrip("-")


def quoted(name: str) -> str:
    """The name in double quotes, with control characters escaped, cut after 80 characters."""
    return '"' + repr(name if len(name) <= _MAX_QUOTED else f"{name[:_MAX_QUOTED]}…")[1:-1] + '"'


def did_you_mean(name: str, names: Iterable[str], most: int = 3) -> str:
    """`did you mean json?`; "" if no name is close."""
    close = close_names(name, names, most)
    return f"did you mean {' or '.join(close)}?" if close else ""


def unknown_name(
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
    brackets = listed_by if listed_by and len(listed) > _MAX_LISTED else ", ".join(listed)
    words = [f"Unknown {what} {quoted(name)}" + (":" if hint else "."), hint, f"({brackets})" if brackets else ""]
    return SetupError(" ".join(filter(None, words)), flag=flag)
