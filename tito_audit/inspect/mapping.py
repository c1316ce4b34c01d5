"""The mapping from our columns to the log's, ready to paste."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from tito_audit.formats import (
    CALL_LISTS,
    CANONICAL_COLUMNS,
    COMPLETION_IDS,
    FLAT_IDS,
    LOGPROBS,
    MASKS,
    PROMPT_IDS,
)
from tito_audit.inspect.columns import Column
from tito_audit.inspect.roles import Role, Roles
from tito_audit.terminal.shell import shell_word

_KNOWN = {Role.IDS: FLAT_IDS, Role.MASK: MASKS, Role.LOGPROBS: LOGPROBS, Role.CALLS: CALL_LISTS}


_READ = (FLAT_IDS, PROMPT_IDS, COMPLETION_IDS, MASKS, LOGPROBS, CALL_LISTS)


def proposed(
    columns: Sequence[Column],
    roles: Roles,
    rows: int,
    sampler: str | None = None,
    without: Collection[str] = (),
) -> dict[str, str]:
    """Our column names to the log's, for columns that `--map` can name: those in the row and in its objects.

    `sampler` is the chosen logprob column, if there are several; columns in `without` are left out. A row that
    lacks a mapped column cannot be read, so the ids must be in most rows, and all other columns wherever the ids
    are. {} for a log without such ids.
    """
    found: dict[str, str] = {}
    carriers = (Role.IDS, Role.COMPLETION_IDS, Role.CALLS)
    of_ids = [c.present for c in columns if c.top and roles[c.path].role in carriers and 2 * c.present > rows]
    there = [column for column in columns if of_ids and column.top and column.present >= max(of_ids)]

    def best(role: Role) -> Column | None:
        known = _KNOWN.get(role, ())
        fits = [column for column in there if roles[column.path].role is role and column.path not in without]
        # Prefer known names, then columns aligned with the tokens, then columns nearer to the top.
        fits.sort(
            key=lambda c: (
                c.path != sampler,
                known.index(c.name) if c.name in known else len(known),
                not roles[c.path].alignment,
                len(c.keys),
            )
        )
        return fits[0] if fits else None

    chosen = {role: best(role) for role in Role}
    for ours, role in (
        ("token_ids", Role.IDS),
        ("prompt_ids", Role.PROMPT_IDS),
        ("completion_ids", Role.COMPLETION_IDS),
        ("loss_mask", Role.MASK),
        ("messages", Role.MESSAGES),
        ("tools", Role.TOOLS),
        ("calls", Role.CALLS),
        ("model", Role.MODEL),
        ("finish_reason", Role.FINISH_REASON),
    ):
        column = chosen[role]
        if column is not None:
            found[ours] = column.path
    logprobs = chosen[Role.LOGPROBS]
    if logprobs is not None:
        split = "token_ids" not in found and "completion_ids" in found
        found["completion_logprobs" if split else "logprobs"] = logprobs.path
    if not {"token_ids", "completion_ids", "calls"} & found.keys():
        return {}
    return {ours: found[ours] for ours in CANONICAL_COLUMNS if ours in found}


def by_their_names(mapping: Mapping[str, str]) -> bool:
    """Whether the names in the mapping are all known, so that no mapping is needed."""
    return all(
        theirs == ours or any(ours in names and theirs in names for names in _READ)
        for ours, theirs in mapping.items()
    )


def as_flags(mapping: Mapping[str, str]) -> list[str]:
    """The mapping as flags for a shell: `--map token_ids=tokens`."""
    return [f"--map {shell_word(f'{ours}={theirs}')}" for ours, theirs in mapping.items()]


def as_toml(mapping: Mapping[str, str], table: str = "tool.tito-audit") -> list[str]:
    """The mapping as lines of a configuration file; pass `table` "" for a `tito-audit.toml`."""
    name = f"{table}.map" if table else "map"
    return [f"[{name}]", *(f"{ours} = {_quoted_for_toml(theirs)}" for ours, theirs in mapping.items())]


def _quoted_for_toml(text: str) -> str:
    def escaped(match: re.Match[str]) -> str:
        char = match[0]
        if char in '"\\':
            return f"\\{char}"
        return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"

    shown = re.sub(r'["\\]', escaped, text)
    return '"' + "".join(c if c.isprintable() else escaped(re.match(r"(?s).", c)) for c in shown) + '"'  # type: ignore[arg-type]
