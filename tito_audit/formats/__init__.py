"""Rows to rollouts and back; one file for each log format."""

from __future__ import annotations

from functools import cache, lru_cache

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format, Row
from tito_audit.formats._call_log import LoggedCall, part_of
from tito_audit.formats._calls import (
    CALL_LISTS,
    CALL_LOGPROBS,
    COMPLETION_IDS,
    PROMPT_IDS,
    calls_unknown_tools,
    real_name,
    with_sampling,
)
from tito_audit.formats._columns import FLAT_IDS, MASKS, ROW_LOGPROBS, SEGMENTS, STALE
from tito_audit.formats._detection import (
    CANONICAL_COLUMNS,
    NUMBER_COLUMNS,
    PARAMETER,
    Detection,
    Near,
    Unread,
    in_snake_case,
    map_columns,
    near_formats,
    no_loss_mask_by_name,
    no_tokens_by_name,
    number_columns,
    possible_formats,
    told_by,
    unmap_columns,
    unread_columns,
    wrapped_at,
)
from tito_audit.formats._responses import chat_tools
from tito_audit.formats._text_logs import notice_of_text
from tito_audit.formats._verifiers import with_updates
from tito_audit.registry import module_names, plugins
from tito_audit.unknown import unknown

__all__ = [
    "CALL_LISTS",
    "CANONICAL_COLUMNS",
    "COMPLETION_IDS",
    "FLAT_IDS",
    "LOGPROBS",
    "MASKS",
    "NUMBER_COLUMNS",
    "PARAMETER",
    "PROMPT_IDS",
    "SEGMENTS",
    "STALE",
    "Detection",
    "LoggedCall",
    "Near",
    "Unread",
    "all_formats",
    "calls_unknown_tools",
    "chat_tools",
    "format_named",
    "in_snake_case",
    "map_columns",
    "near_formats",
    "no_loss_mask_by_name",
    "no_tokens_by_name",
    "notice_of_text",
    "number_columns",
    "part_of",
    "pick_format",
    "real_name",
    "told_by",
    "unmap_columns",
    "unread_columns",
    "with_sampling",
    "with_updates",
]

LOGPROBS = tuple(dict.fromkeys((*ROW_LOGPROBS, *CALL_LOGPROBS)))
"""Column names for the logprobs of a row or a call."""


@cache
def all_formats() -> tuple[Format, ...]:
    """Every format, in the order they are tried."""
    formats = plugins(__name__, Format, lambda format: format.name)
    return tuple(sorted(formats, key=lambda format: (format.precedence, format.name)))


def pick_format(row: Row) -> Format:
    """The first format that matches the row; RecordError naming its columns when none does."""
    for format, certain in _possible(tuple(row)):
        if certain or format.matches(row):
            return format
    if not row:
        raise RecordError("the row is an empty object: nothing was recorded in it")
    columns = f"no known format has these columns: {', '.join(sorted(map(str, row))[:40])}. "
    wrapped = wrapped_at(row, all_formats())
    if wrapped is not None:
        path, name = wrapped
        raise RecordError(f"{columns}The object at {path} looks like {name}: pass --rows-at {path}")
    raise RecordError(
        f"{columns}"
        "Name the columns of ids with --map (for example --map token_ids=NAME), or the format with --format; "
        "`tito-audit inspect LOG` shows what the columns hold and the mapping to paste."
    )


@lru_cache(256)
def _possible(keys: tuple[str, ...]) -> tuple[tuple[Format, bool], ...]:
    """The formats that a row with these keys may match."""
    return possible_formats(keys, all_formats())


def format_named(name: str) -> Format:
    """The format of that name; SetupError, with names that are close, when there is none."""
    names = {format.name: format for format in all_formats()}
    if name in names:
        return names[name]
    if name in module_names("tito_audit.reports"):
        raise SetupError(
            f'Unknown format "{name}": --format is the format of the log.\nFor a report, pass -f {name}',
            flag="--format",
        )
    raise unknown("format", name, names, flag="--format", listed_by="tito-audit list formats")
