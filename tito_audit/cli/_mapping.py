"""The mapping proposed by `inspect`, for its page; and all results as one object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.text import Text

from tito_audit.cli._inspected import IDS, decoded, short
from tito_audit.inspect import Column, Inspection, Role, Scanned, as_flags, as_toml, by_their_names
from tito_audit.terminal.escape import visible
from tito_audit.terminal.page import heading
from tito_audit.terminal.shell import shell_word
from tito_audit.terminal.words import listed, many

if TYPE_CHECKING:
    from tito_audit.tokens.vocab import Vocabulary

_CODES = 4
"""Maximum codes to name."""


def mapping_lines(found: Inspection, flags: Sequence[str] = ()) -> Iterator[Text]:
    """The mapping, what a scan with it finds, and last the command to run next; `flags` are those given."""
    scan = ["tito-audit", "scan", shell_word(found.file), *map(shell_word, flags)]
    formats = {taken.format for taken in found.taken}
    readable = found.rows - len(found.unreadable)
    if found.given:
        yield from heading("The mapping that was given")
        yield from _trial(found, readable)
        yield from _next(scan)
        return
    if None not in formats and formats != {"generic"}:
        yield from _next(scan, _as_it_is(sorted(map(str, formats))))
        return
    if formats == {"generic"} and by_their_names(found.mapping):
        if found.trial is None or found.trial.rows < readable:
            yield from _next(scan, "No mapping needed: each row is read by the names of its own columns.")
            return
        yield from heading("What a scan reads")
        yield from _trial(found, readable)
        yield from _next(scan, "No mapping needed: scan reads these columns by their names.")
        return
    if not found.mapping:
        yield from heading("Next step")
        yield from (Text(f"  {line}") for line in _why_none(found))
        return
    yield from _suggestion(found, readable)
    yield from _next([*scan, *as_flags(found.mapping)])


def _next(command: Sequence[str], first: str | None = None) -> Iterator[Text]:
    yield from heading("Next step")
    if first is not None:
        yield Text(f"  {first}")
    yield Text(f"  {' '.join(command)}")


def _as_it_is(formats: Sequence[str]) -> str:
    if len(formats) > 1:
        return f"No mapping needed: the rows have {len(formats)} formats, each read as its own."
    return f"No mapping needed: scan reads the log as {formats[0]}. To skip detection: --format {formats[0]}"


def _suggestion(found: Inspection, readable: int) -> Iterator[Text]:
    yield from heading("Suggested mapping")
    for path in found.left_out:
        yield Text(f"  {short(path)} is left out: it fits the tokens of too few rows.", style="yellow")
    used = found.mapping.values()
    others = [
        c.path for c in found.columns if c.top and found.roles[c.path].role is Role.IDS and c.path not in used
    ]
    if others and "token_ids" in found.mapping:
        more = f" (and {len(others) - 1:,} more)" if len(others) > 1 else ""
        flag = shell_word(f"token_ids={others[0]}")
        yield Text(
            f"  {short(others[0])}{more} holds ids too. If that is what is trained: --map {flag}", style="yellow"
        )
    yield from _trial(found, readable)
    if (packed := found.packed) is not None:
        said = f"{short(packed.path)} splits each row into samples: a scan does if it is called {packed.name}."
        yield Text(f"  {said}", style="yellow")
    yield Text("  To keep it, in pyproject.toml (in tito-audit.toml the table is [map]):", style="dim")
    for line in as_toml(found.mapping):
        yield Text(f"    {line}")


def _trial(found: Inspection, rows: int) -> Iterator[Text]:
    trial = found.trial
    if trial is None:
        return
    holds = [many(trial.training_rows, "training row")] if trial.training_rows else []
    holds += [many(trial.calls, "call")] if trial.calls else []
    holds += [f"messages in {trial.messages:,}"] if trial.messages else []
    read = f"all {rows:,} rows" if trial.rows == rows else f"{trial.rows:,} of {many(rows, 'row')}"
    yield Text(f"  Reads {read}: {listed(holds) or 'nothing in them'}.")
    if trial.without_ids:
        yield Text(f"  {many(trial.without_ids, 'row')} without ids.", style="yellow")
    for name, count in trial.unread.items():
        yield Text(f"  {name} is not a list in {many(count, 'row')} and is not read there.", style="bold yellow")
    for name, count in list(trial.misfits.items())[:4]:
        yield Text(f"  {visible(name)} fits no tokens in {many(count, 'row')}; a scan says where.", style="yellow")
    for error, count in list(trial.errors.items())[:2]:
        yield Text(f"  {many(count, 'row')} unreadable: {visible(error[:400])}", style="bold yellow")
    if trial.scan is not None:
        yield from _scan(trial.scan)


def _scan(scan: Scanned) -> Iterator[Text]:
    """What a scan of the rows found, with the codes of errors and warnings."""
    where = f" in {scan.with_errors:,} of {many(scan.rollouts, 'rollout')}" if scan.with_errors else ""
    counts = [many(scan.errors, "error") + where if scan.errors else "no errors"]
    counts += [many(scan.warnings, "warning")] if scan.warnings else []
    counts += [many(scan.notes, "note")] if scan.notes else []
    codes = ", ".join(f"{code} ({count:,})" for code, count in list(scan.codes.items())[:_CODES])
    yield Text(f"  A scan of these rows finds {listed(counts)}{f': {codes}' if codes else ''}.")
    if 2 * scan.with_errors > scan.rollouts:
        yield Text("  Most rows have errors: check the mapping before the log.", style="bold yellow")


def _why_none(found: Inspection) -> Iterator[str]:
    """Why there is no mapping, and what to do."""
    ids = [column for column in found.columns if found.roles[column.path].role in IDS]
    if not ids:
        yield from _no_ids(found)
        return
    samples = [column for column in ids if "[]" in column.keys and not column.scope.replace("[*]", "")]
    inner = next((column for column in ids if not column.top), None)
    if samples:
        yield f"{short(samples[0].path)} holds ids, one list per sample. --map needs one sample per row."
        yield "Write one sample per row, or use the names of a format that holds groups:"
        yield "tito-audit list formats"
    elif inner is not None:
        scope = visible(inner.scope.replace("[]", ""))
        yield f"{short(inner.path)} holds ids in a list of objects, where --map cannot rename."
        yield f"If each object is a row: --rows-at {scope}"
        yield "If each is a call of one rollout: name the list `calls`, and its columns prompt_token_ids,"
        yield "completion_token_ids and logprobs."
    else:
        yield f"{short(ids[0].path)} holds ids, but no single mapping reads more than half of the rows."
        yield "Split the log by the columns of its rows."


def _no_ids(found: Inspection) -> Iterator[str]:
    written = [column.path for column in found.columns if column.types["text of JSON (list)"]]
    if written:
        named = listed([short(path) for path in written[:_CODES]])
        yield f"No column holds lists of token ids. These hold lists written as text: {named}."
        yield "Parse the texts (json.loads) and write the rows as JSONL or Parquet, then look again:"
        yield f"tito-audit inspect {shell_word(found.file)}"
        return
    yield "No column looks like token ids, so a scan can audit nothing here."
    yield "Log the ids of each prompt and completion as the sampler returned them, in one of these formats:"
    yield "tito-audit list formats"


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
        "logprobs": [asdict(choice) for choice in found.logprobs],
        "mapping": {
            "given": found.given,
            "columns": found.mapping,
            "flags": " ".join(as_flags(found.mapping)),
            "toml": "\n".join(as_toml(found.mapping)) if found.mapping else "",
            "left_out": found.left_out,
            "trial": asdict(found.trial) if found.trial is not None else None,
        },
    }


def _column(column: Column, found: Inspection, vocabulary: Vocabulary | None) -> dict[str, Any]:
    facts, guess = found.facts.get(column.path), found.roles[column.path]
    lengths = column.lengths
    said: Mapping[str, Any] = {}
    if vocabulary is not None and guess.role in IDS and column.arrays:
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
