"""Text shortened to fit, with a count of what is left out."""

from __future__ import annotations


def elided(text: str, most: int) -> str:
    """The text, or its beginning and `…`, at most `most` characters in total."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def cut(text: str, limit: int) -> str:
    """The text, or its beginning and `… (812 more characters)`, at most `limit` characters in total."""
    if len(text) <= limit:
        return text
    room = limit - len(f" … ({len(text):,} more characters)")
    return f"{text[:room]} … ({len(text) - room:,} more characters)"
