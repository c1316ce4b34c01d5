"""The mapping that `inspect` proposes, for its page; and everything that it found, as one object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.text import Text

from tito_audit.cli._inspected import decoded, short
from tito_audit.inspect import Column, Inspection, Role, Trial, as_flags, as_toml, by_their_names
from tito_audit.terminal.escape import visible

if TYPE_CHECKING:
    from tito_audit.tokens.vocab import Vocabulary

_IDS = (Role.IDS, Role.PROMPT_IDS, Role.COMPLETION_IDS)


def mapping_lines(found: Inspection) -> Iterator[Text]:
    """What to paste so that the log is read as shown."""
    yield Text()
    yield Text("The mapping that was given" if found.given else "To paste", style="bold")
    formats = {taken.format for taken in found.taken}
    if not found.given and None not in formats and formats != {"generic"}:
        yield from _no_mapping(sorted(str(name) for name in formats))
        return
    readable = found.rows - len(found.unreadable)
    if formats == {"generic"} and not found.given and by_their_names(found.mapping):
        if found.trial is None or found.trial.rows < readable:
            yield from _no_mapping(["generic"])
            yield Text("  No single mapping reads all rows: each row is read by its own column names.")
            return
        yield Text("  The columns are already read by their names. To leave nothing to guessing:")
    if not found.mapping:
        yield Text("  " + _why_none(found))
        return
    if not found.given:
        yield Text("  as flags", style="dim")
        yield Text("    " + " ".join(as_flags(found.mapping)))
        yield Text("  in pyproject.toml; in tito-audit.toml the table is called [map]", style="dim")
        for line in as_toml(found.mapping):
            yield Text(f"    {line}")
    others = [
        short(column.path)
        for column in found.columns
        if column.top and found.roles[column.path].role is Role.IDS and column.path not in found.mapping.values()
    ]
    if others and not found.given:
        named = ", ".join(others[:4]) + (f" and {len(others) - 4:,} more" if len(others) > 4 else "")
        yield Text(f"  {named} looked like ids too: check that token_ids is what is trained.", style="yellow")
    if found.trial is not None:
        yield from _trial(found.trial, readable)


def _no_mapping(formats: list[str]) -> Iterator[Text]:
    if len(formats) > 1:
        yield Text(f"  no mapping: the rows are of {len(formats)} formats, and each is read as its own")
        return
    yield Text(f"  no mapping is needed. To skip detection: --format {formats[0]}, or in pyproject.toml")
    yield Text("    [tool.tito-audit]")
    yield Text(f'    format = "{formats[0]}"')


def _trial(trial: Trial, rows: int) -> Iterator[Text]:
    ids = f"{trial.training_rows:,} with a training row, {trial.calls:,} calls, {trial.messages:,} with messages"
    yield Text(f"  With it {trial.rows:,} of {rows:,} rows are read: {ids}.")
    if trial.without_ids:
        yield Text(f"  {trial.without_ids:,} of them hold no ids.", style="yellow")
    for name, count in trial.unread.items():
        yield Text(f"  {name} is not a list in {count:,} of them and is not read there.", style="bold yellow")
    for name, count in list(trial.misfits.items())[:4]:
        yield Text(f"  {visible(name)} fits no tokens in {count:,} of them; a scan says where.", style="yellow")
    for error, count in list(trial.errors.items())[:2]:
        yield Text(f"  {count:,} cannot be read: {visible(error[:400])}", style="bold yellow")


def _why_none(found: Inspection) -> str:
    """Why there is no mapping, and what to do."""
    ids = [column for column in found.columns if found.roles[column.path].role in _IDS]
    if not ids:
        return "nothing: no list here looks like token ids, so there is nothing to map."
    samples = [column for column in ids if "[]" in column.keys and not column.scope.replace("[*]", "")]
    if samples:
        return (
            f"nothing: {short(samples[0].path)} looks like ids, one list per sample, and a mapping needs one "
            "sample per row. Write one sample per row, or use the names of a format that holds groups "
            "(tito-audit list formats)."
        )
    inner = next((column for column in ids if not column.top), None)
    if inner is not None:
        return (
            f"nothing: {short(inner.path)} looks like ids, inside a list of objects, where --map cannot rename. "
            f"If each object is a row, pass --rows-at {visible(inner.scope.replace('[]', ''))}; if each is a call "
            "of one rollout, call the list `calls` and its columns prompt_token_ids, completion_token_ids and "
            "logprobs."
        )
    return (
        f"nothing for all rows: {short(ids[0].path)} looks like ids, but no single mapping reads more than half "
        "of the rows. Split the log by the columns of its rows."
    )


def as_object(found: Inspection, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Everything that `inspect` found, as one object."""
    return {
        "file": found.file,
        "kind": found.kind,
        "rows": found.rows,
        "more_rows": found.stopped,
        "unreadable": [{"row": row, "because": because} for row, because in found.unreadable.items()],
        "taken_for": [asdict(taken) for taken in found.taken],
        "columns": [_column(column, found, vocabulary) for column in found.columns],
        "more_columns": found.more_columns > 0,
        "relations": [
            {"scope": scope, **asdict(relation)}
            for scope, relations in found.relations.items()
            for relation in relations
        ],
        "calls": asdict(found.calls) if found.calls is not None else None,
        "masks": [asdict(mask) for mask in found.masks],
        "sentinels": [asdict(sentinel) for sentinel in found.sentinels],
        "mapping": {
            "given": found.given,
            "columns": found.mapping,
            "flags": " ".join(as_flags(found.mapping)),
            "toml": "\n".join(as_toml(found.mapping)) if found.mapping else "",
            "trial": asdict(found.trial) if found.trial is not None else None,
        },
    }


def _column(column: Column, found: Inspection, vocabulary: Vocabulary | None) -> dict[str, Any]:
    facts, guess = found.facts.get(column.path), found.roles[column.path]
    lengths = column.lengths
    said: Mapping[str, Any] = {}
    if vocabulary is not None and guess.role in _IDS and column.arrays:
        said = {"decoded": decoded(column, vocabulary)}
    return {
        "path": column.path,
        "rows": column.rows,
        "nulls": column.nulls,
        "types": dict(+column.types),
        "storage_type": column.storage_type,
        "lengths": {"min": min(lengths), "median": median(lengths), "max": max(lengths)} if lengths else None,
        "role": guess.role,
        "because": guess.because,
        "alignment": guess.alignment or None,
        "numbers": asdict(facts) if facts is not None else None,
        **said,
    }
