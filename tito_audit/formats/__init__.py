"""Stage 2: rows <-> rollouts."""

from __future__ import annotations

import difflib
from functools import cache

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format, Row
from tito_audit.formats._mapping import CANONICAL_COLUMNS, map_columns, unmap_columns
from tito_audit.formats._numbers import NUMBER_COLUMNS, number_columns
from tito_audit.registry import plugins

__all__ = [
    "CANONICAL_COLUMNS",
    "NUMBER_COLUMNS",
    "all_formats",
    "format_named",
    "map_columns",
    "number_columns",
    "pick_format",
    "unmap_columns",
]

_TEXT_ONLY: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"gts", "output"}),
        "a verl rollout log. It holds decoded text, special tokens removed. Save the agent loop's output "
        "instead: prompt_ids, response_ids, response_mask and response_logprobs, one object a sample",
    ),
    (
        frozenset({"step", "completion", "advantage"}),
        "a TRL completions log. It holds decoded text, special tokens removed. Save what the rollout "
        "function returns instead: prompt_ids, completion_ids, logprobs and env_mask, one object a sample",
    ),
    (
        frozenset({"input_prompt", "output_response"}),
        "a SkyRL evaluation log. It holds decoded text. Save the generator's output instead: "
        "prompt_token_ids, response_ids, loss_mask and rollout_logprobs, one object a sample",
    ),
    (
        frozenset({"head_version", "completion"}),
        "an AReaL rollout dump. It holds decoded text. Save the model response of each call instead: "
        "input_tokens, output_tokens and output_logprobs, as entries of `calls`",
    ),
)
"""Keys of logs known to hold no ids, and what to say of each."""


@cache
def all_formats() -> tuple[Format, ...]:
    """Every format, in the order in which they are tried."""
    found = plugins(__name__, Format, lambda format: format.name)
    return tuple(sorted(found, key=lambda format: (format.precedence, format.name)))


def pick_format(row: Row) -> Format:
    """The first format that matches the row; RecordError naming its columns when none does."""
    for format in all_formats():
        if format.matches(row):
            return format
    for keys, what in _TEXT_ONLY:
        if keys <= row.keys():
            raise RecordError(f"no token ids: this is {what}.")
    if not row:
        raise RecordError("the row is an empty object: nothing was recorded in it")
    raise RecordError(
        f"no known format has these columns: {', '.join(sorted(map(str, row))[:40])}. "
        "Name the columns of ids with --map (for example --map token_ids=NAME), or the format with --format."
    )


def format_named(name: str) -> Format:
    """The format of that name; SetupError, with names that are close, when there is none."""
    names = {format.name: format for format in all_formats()}
    if name in names:
        return names[name]
    close = difflib.get_close_matches(name, names, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise SetupError(
        f"--format {name}: no such format.{hint}\nFormats: {', '.join(names)} (tito-audit list formats)."
    )
