"""The page that `inspect` prints, which ends with a mapping to paste; and the same as one JSON object."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from tito_audit.errors import SetupError
from tito_audit.inspect.columns import LogColumn, Look, Relation, RelationKind
from tito_audit.inspect.inspection import Inspection, as_flags, as_toml, inspect_log, needs_no_mapping
from tito_audit.inspect.roles import Role
from tito_audit.report import ReportOptions
from tito_audit.settings.model import Settings
from tito_audit.storage import Logs, RowsInMemory, find_logs, log_names
from tito_audit.storage.in_memory import UNNAMED_ROWS
from tito_audit.terminal.escape import elided, shell_word, visible
from tito_audit.terminal.page import heading, open_table, render_text
from tito_audit.terminal.words import listed, many, percent
from tito_audit.tokens.load import load_tokenizer
from tito_audit.voice import with_python_arguments

if TYPE_CHECKING:
    from tito_audit.tokens.vocab import Vocabulary


@dataclass(frozen=True, slots=True)
class InspectedLog:
    """What the first rows of a log show: `print` it, or end a notebook's cell with it."""

    inspection: Inspection
    """All that was seen: columns, roles, formats."""
    settings: Settings
    """The settings that read the log: those passed, with the proposed mapping."""
    vocabulary: Vocabulary | None = None

    @property
    def mapping(self) -> Mapping[str, str]:
        """Our column names to the log's, for `Settings(map=…)`; {} if none is needed, or none was found."""
        return self.settings.columns

    def __repr__(self) -> str:
        formats = listed([str(rows.format or "no known format") for rows in self.inspection.formats])
        return f"<InspectedLog: {formats or 'no rows'}; mapping {dict(self.mapping)}>"

    def __str__(self) -> str:
        return f"{self._columns_page()}\n{self._next_page()}"

    def _repr_html_(self) -> str:
        """What a notebook displays: how to scan the log, then its columns."""
        pre = "color: inherit; background: none; margin: 4px 0; overflow-x: auto"
        pages = (self._next_page(), self._columns_page())
        nexts, columns = (f'<pre style="{pre}">{escape(page.strip())}</pre>' for page in pages)
        return f"<div>{nexts}<details><summary>Columns</summary>{columns}</details></div>"

    def _columns_page(self) -> str:
        return with_python_arguments(render_text(page_lines(self.inspection, self.vocabulary), ReportOptions()))

    def _next_page(self) -> str:
        flags = () if self.settings.tokenizer is None else ("-t", self.settings.tokenizer)
        lines = mapping_lines(self.inspection, flags, file=False) if self.inspection.columns else ()
        return "\n".join(with_python_arguments(line.plain) for line in lines)


def inspect_rollouts(logs: Logs, settings: Settings | None = None, *, rows: int = 100) -> InspectedLog:
    """What the first rows of a log, a file or rows in memory, show; with the mapping that a scan of them needs.

    `scan_rollouts(logs, inspect_rollouts(logs).settings)` scans with it. SetupError for several logs.
    """
    files = find_logs(log_names(logs))
    if len(files) != 1:
        raise SetupError(
            f"inspect_rollouts: {many(len(files), 'log')} instead of one.\nPass one log, or one of them."
        )
    settings, vocabulary = Settings.given(settings).at(files[0]), None
    if settings.tokenizer is not None:
        vocabulary = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code).vocabulary
    inspection = inspect_log(files[0], rows, settings, vocabulary)
    if isinstance(files[0], RowsInMemory):
        inspection.file = UNNAMED_ROWS  # what `rows` stands for in calls to paste
    mapping = {} if needs_no_mapping(inspection.mapping) and not inspection.given else inspection.mapping
    return InspectedLog(inspection, replace(settings, columns=mapping), vocabulary)


_MOST_RELATIONS = 40
_SAMPLE = 32
_FIRST, _LAST = 8, 4
"""How many tokens of a decoded column are shown."""
_MOST_KEYS = 8
_MOST_EQUAL = 12

_FILE_WORDS = {
    "lines": "JSON, one row per line",
    "values": "JSON documents",
    "array": "one JSON array",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "torch": "a Torch file",
}
IDS = (Role.IDS, Role.PROMPT_IDS, Role.COMPLETION_IDS)
_PLAIN = (Role.TEXT, Role.SCALAR, Role.LIST, Role.OBJECT, Role.NOTHING)
_STYLES = {
    **dict.fromkeys(IDS, "bold cyan"),
    **dict.fromkeys((Role.MASK, Role.LOGPROBS, Role.MESSAGES, Role.TOOLS, Role.CALLS), "bold"),
    **dict.fromkeys(_PLAIN, "dim"),
}
_ALIGNMENT_WORDS = {
    "full": "every token",
    "response": "the response",
    "call": "the completion",
    "sampled": "trained tokens",
    "shifted": "all but the first",
}
_RELATION_WORDS = {
    RelationKind.SUM: "{} + {} = {}",
    RelationKind.MINUS_ONE: "{} is one shorter than {}",
    RelationKind.SAMPLED: "{} has one entry for each token trained by {}",
    RelationKind.LENGTH: "{} is the length of {}",
    RelationKind.OFFSETS: "{} says where the parts of {} begin",
}
_AUTHOR_WORDS = {
    "sampler": "named like a sampler's",
    "trainer": "a trainer's by its name",
    "reference": "a reference model's by its name",
    "unknown": "unknown by its name",
}
_MASK_WORDS = {
    "binary": "0 and 1",
    "bool": "true and false",
    "float": "weights",
    "labels": "ids, or -100 where nothing is trained",
    "none": "no mask",
}


def page_lines(inspection: Inspection, vocabulary: Vocabulary | None) -> Iterator[RenderableType]:
    """The page without the mapping: the file, its format, its columns and how they relate."""
    yield Text("tito-audit inspect ", style="bold").append(visible(inspection.file))
    rows = f"the first {many(inspection.rows, 'row')}" if inspection.stopped else many(inspection.rows, "row")
    line = Text(f"{_FILE_WORDS.get(inspection.kind, inspection.kind)} · {rows}")
    if inspection.unreadable:
        row, why = next(iter(inspection.unreadable.items()))
        line.append(f" · {len(inspection.unreadable):,} unreadable; row {row}: ", style="bold yellow")
        line.append(visible(elided(why, 200)))
    yield line
    if not inspection.columns:
        nothing = "No row that could be read has a column." if inspection.rows else "The log holds no rows."
        yield Text(nothing, style="bold yellow")
        return
    yield from _reading_lines(inspection)
    yield from heading("Columns")
    yield from _column_table(inspection)
    lines = [(scope, relation) for scope, relations in inspection.relations.items() for relation in relations]
    if lines:
        yield from heading("Lengths that match")
        for scope, relation in lines[:_MOST_RELATIONS]:
            inner, per_sample = scope.removesuffix("[*]"), scope.endswith("[*]")
            where = f"{short(inner)}, each sample: " if inner else "each sample: "
            if not per_sample:
                where = f"each {short(scope)}: " if scope else ""
            yield Text(f"  {where}{_relation_words(relation)}")
        if len(lines) > _MOST_RELATIONS:
            yield Text(f"  … and {len(lines) - _MOST_RELATIONS:,} more")
    if inspection.masks:
        yield from heading("Loss masks")
        yield from mask_lines(inspection)
    if scores := list(logprob_lines(inspection)):
        yield from heading("The sampler's logprobs")
        yield from scores
    if vocabulary is not None:
        columns = [column for column in inspection.columns if inspection.roles[column.path].role in IDS]
        if columns:
            yield from heading("The first ids of each column, as tokens")
        for column in columns[:_MOST_KEYS]:
            first = decode_first_list(column, vocabulary)
            pieces = [visible(piece, edges=True) for piece in first["pieces"]]
            if first["left_out"]:
                pieces.insert(_FIRST, f"… {first['left_out']:,} more …")
            line = Text(f"  {short(column.path)}  │{'│'.join(pieces)}│")
            unknown = first["ids"] - first["known"]
            if unknown:
                line.append(f" {unknown:,} of {first['ids']:,} ids are not in the vocabulary", style="bold yellow")
            yield line


def _reading_lines(inspection: Inspection) -> Iterator[Text]:
    """How rows are read: as which formats, and as calls of which conversations if each is one call."""
    readable = inspection.rows - len(inspection.unreadable)
    yield from heading("Read as")
    for alike in inspection.formats[:_MOST_KEYS]:
        rows = f"all {readable:,} rows" if alike.rows == readable > 1 else many(alike.rows, "row")
        rows += "" if alike.rows == readable else f", the first is row {alike.first_row}"
        if alike.format is None:
            because = alike.because.partition(" Name the columns of ids with --map")[0]  # this page proposes them
            because = because.replace("no known format has these columns:", "has")
            yield Text("  no known format", style="bold").append(f" ({rows}): {visible(elided(because, 600))}")
        else:
            line = Text("  ").append(alike.format, style="bold").append(f" ({rows})")
            if alike.told_by:
                line.append(f": has {visible(_some_of([short(key) for key in alike.told_by]))}")
            yield line
            yield from (Text(f"    {visible(notice)}") for notice in alike.notices)
        doubtful = alike.format in (None, "generic")
        for near in (near for near in alike.near if doubtful or near.fits):
            words = f"has the keys {_some_of(near.has)}, in another shape"
            if near.fits:
                words = "fits too, but comes later in the order of detection"
            elif near.lacks or near.excess:
                words = f"has {_some_of(near.has)}"
                words += f", lacks {_some_of(near.lacks)}" if near.lacks else ""
                words += f", cannot have {_some_of(near.excess)}" if near.excess else ""
            yield Text(f"    not {near.format}: {visible(words)}", style="dim")
    if len(inspection.formats) > _MOST_KEYS:
        yield Text(f"  … and {len(inspection.formats) - _MOST_KEYS:,} more kinds of rows")
    if inspection.record is not None and inspection.record.formats:
        yield Text(f"  {inspection.record.in_short}")
    calls = inspection.calls
    if calls is None:
        return
    yield from heading("Single calls")
    all_of_them = f"all {readable:,} rows" if calls.rows == readable > 1 else many(calls.rows, "row")
    yield Text(f"  {all_of_them}, one call each")
    for key in calls.keys[:_MOST_KEYS]:
        rows = f"all {key.rows:,}" if key.rows == calls.rows else f"{key.rows:,} of {calls.rows:,}"
        words = f"  {short(key.path)}: in {rows}, {many(key.values, 'value')}"
        yield Text(words + (", joins the calls" if key.used else ""), style="bold" if key.used else "")
    if len(calls.keys) > _MOST_KEYS:
        yield Text(f"  … and {len(calls.keys) - _MOST_KEYS:,} more columns that may name a conversation")
    if not calls.keys:
        yield Text("  no column names the conversation")
    if calls.joined is None:
        yield Text("  not joined: --no-join")
        return
    for sentence in calls.joined.said:
        yield Text(f"  {visible(sentence.removeprefix(f'{inspection.file}: '))}")
    yield Text("  Join by another column: --session KEY. Keep rows separate: --no-join.", style="dim")


def _column_table(inspection: Inspection) -> Iterator[RenderableType]:
    """A line for each column: its type, lengths, role and values."""
    table = open_table()
    table.add_column("column", overflow="fold", max_width=34)
    for name, wide in (("rows", True), ("type", False), ("length", True), ("role", True)):
        table.add_column(name, no_wrap=wide, overflow="fold", min_width=0 if wide else 14)
    table.add_column("values", overflow="fold", ratio=1, min_width=20)
    # At most 60 of them, in the order of the log; columns with a role go first.
    hidden = [path for path, guess in inspection.roles.items() if guess.role in (Role.MESSAGES, Role.TOOLS)]
    inside = tuple(f"{path}{joint}" for path in hidden for joint in (".", "["))
    shown = [c for c in inspection.columns if c.path in inspection.facts or not c.path.startswith(inside)]
    ranked = sorted(range(len(shown)), key=lambda i: (inspection.roles[shown[i].path].role in _PLAIN, i))
    shown = [shown[i] for i in sorted(ranked[:60])]
    for column in shown:
        guess = inspection.roles[column.path]
        lengths = sorted({min(column.lengths), max(column.lengths)}) if column.lengths else []
        role = Text(str(guess.role), style=_STYLES.get(guess.role, ""))
        if words := _ALIGNMENT_WORDS.get(guess.alignment, "") if guess.role not in IDS else "":
            role.append(f"\n{words}", style="dim")
        kinds = +column.types
        words = ", ".join(word if len(kinds) == 1 else f"{word} {count:,}" for word, count in kinds.most_common(4))
        if len(kinds) > 4:
            words += ", …"
        if column.nulls and kinds:
            words += f", null {column.nulls:,}"
        # ` (int32)`: the type of the numbers in a table, unless the other words imply it.
        stored = re.sub(r"^(?:large_)?(?:list<)?(?:element: )?(?:item: )?", "", column.storage_type or "")
        stored = stored.rstrip(">").removesuffix(" not null")
        words += f" ({stored})" if stored.isalnum() and stored not in ("string", "bool", "null") else ""
        table.add_row(
            Text(short(column.path)),
            "all" if column.rows == inspection.rows - len(inspection.unreadable) else f"{column.rows:,}",
            Text(words),
            " to ".join(f"{size:,}" for size in lengths),
            role,
            Text(visible(_values_words(column, inspection))),
        )
    yield table
    left = len(inspection.columns) - len(shown)
    if left or inspection.more_columns:
        more = f"{left:,} more columns, most of them inside messages and tools" if left else ""
        if inspection.more_columns:
            more += f"{', and ' if left else ''}columns past the first {len(inspection.columns):,}, not read"
        yield Text(f"… {more}. See all: -f json", style="dim")
    if inspection.deeper:
        yield Text("… deeper nesting is not read", style="dim")


def _values_words(column: LogColumn, inspection: Inspection) -> str:
    """A column's range or a sample, and why it has its role: `-9.1 to 0; by its name`."""
    facts, guess = inspection.facts.get(column.path), inspection.roles[column.path]
    if facts is None:
        sample = next((value for value in column.samples if isinstance(value, str | int | float)), None)
        if sample is None:
            return guess.because
        text = str(sample)
        return f"{guess.because}; {elided(text, _SAMPLE)}" if guess.because else elided(text, _SAMPLE)
    words = []
    if guess.role not in (Role.MASK, *IDS) and not math.isnan(facts.low):
        low, high = number_text(facts.low), number_text(facts.high)
        words.append(f"{low} to {high}" if low != high else f"always {low}")
    if facts.look in (Look.NUMBERS, Look.LOGPROBS):
        words += [f"{percent(share)} are {number_text(value)}" for value, share in facts.shares]
    if facts.nulls:
        words.append(f"{facts.nulls:,} null or not finite")
    if facts.constant and facts.low != facts.high and "one number" not in guess.because:
        words.append("one number per list")
    return "; ".join(filter(None, (", ".join(words), guess.because)))


def _relation_words(relation: Relation) -> str:
    """A relation in words: `prompt_ids + completion_ids = token_ids (all 7)`."""
    paths = [short(path) for path in relation.paths]
    if relation.kind is RelationKind.EQUAL:
        more = [f"{len(paths) - _MOST_EQUAL:,} more"] if len(paths) > _MOST_EQUAL else []
        words = " = ".join([*paths[:_MOST_EQUAL], *more])
    else:
        words = _RELATION_WORDS[relation.kind].format(*paths)
    seen = f"all {relation.of:,}" if relation.items == relation.of else f"{relation.items:,} of {relation.of:,}"
    if relation.of == 1:
        seen = "seen once"
    elif not relation.varied:
        seen += ", always the same length"
    if relation.except_row is not None:
        seen += f", not in row {relation.except_row}"
    return f"{words} ({seen})"


def decode_first_list(column: LogColumn, vocabulary: Vocabulary) -> Mapping[str, Any]:
    """The ends of a column's first list as tokens, and how many of all its ids are in the vocabulary."""
    ids = next((array for array in column.arrays if len(array)), np.empty(0, np.int64))
    shown = ids if len(ids) <= _FIRST + _LAST else np.concatenate([ids[:_FIRST], ids[-_LAST:]])
    every = np.concatenate(column.arrays) if column.arrays else ids
    in_vocabulary = int(vocabulary.known(every.astype(np.int64)).sum()) if len(every) else 0
    return {
        "pieces": [vocabulary.piece(int(token_id)) for token_id in shown],
        "left_out": len(ids) - len(shown),
        "known": in_vocabulary,
        "ids": len(every),
    }


def _some_of(words: Sequence[str]) -> str:
    more = f" and {len(words) - _MOST_KEYS} more" if len(words) > _MOST_KEYS else ""
    return ", ".join(words[:_MOST_KEYS]) + more


def mask_lines(inspection: Inspection) -> Iterator[Text]:
    """How each mask is written, and what logprobs are at untrained tokens."""
    for mask in inspection.masks:
        written = " or ".join(
            _MASK_WORDS.get(name, name) + ("" if len(mask.encodings) == 1 else f" ({count:,})")
            for name, count in mask.encodings.items()
        )
        trained = f"{mask.trained:,} of {mask.tokens:,} tokens trained" if mask.tokens else "always empty"
        if mask.trained:
            trained += f" ({percent(mask.trained / mask.tokens)})"
        yield Text(f"  {short(mask.path)}: {written or 'nothing'}; {trained}")
        for sentinel in (each for each in inspection.sentinels if each.mask == mask.path):
            words = "null" if math.isnan(sentinel.value) else f"{sentinel.value:g}"
            share = sentinel.share
            words += " at every untrained token" if share == 1 else f" at {percent(share)} of untrained tokens"
            words += f" and at {many(sentinel.inside, 'trained one')}" if sentinel.inside else ""
            words = "has values at untrained tokens too" if share < 0.5 else words
            yield Text(f"    {short(sentinel.path)}: {words}")


def logprob_lines(inspection: Inspection) -> Iterator[Text]:
    """Which of several columns is read as the sampler's logprobs, why, and how to choose another."""
    formats = sorted(str(rows.format) for rows in inspection.formats if rows.format not in (None, "generic"))
    for choice in inspection.logprobs:
        sampler, *others = choice.columns
        if formats and all(other.difference == 0 for other in others):
            continue  # copies that the format keeps
        line = Text(f"  {short(sampler.path)}: taken", style="" if choice.sure else "yellow")
        because = visible(choice.because)
        yield line.append(f"; {because}" if choice.sure else f". Unclear: {because}")
        for other in others:
            words = _AUTHOR_WORDS[other.author]
            if other.difference is not None:
                apart = f"{other.difference:.2g} on average from" if other.difference else "the same values as"
                words += f"; {apart} {short(sampler.path)}"
            words += "; has values at untrained tokens too" if other.everywhere else ""
            yield Text(f"  {short(other.path)}: {words}")
        named = [other for other in others if other.author != "reference"] or others
        if choice.scope or formats:
            reads = f"{formats[0]} reads" if formats else "calls are read"
            yield Text(f"  To read another, rename the columns: {reads} by name.", style="dim")
        else:
            trial = inspection.trial
            only_calls = trial is not None and not trial.training_rows and trial.calls > 0
            calls = "completion_logprobs" in inspection.mapping or only_calls
            flag = shell_word(f"{'completion_logprobs' if calls else 'logprobs'}={named[0].path}")
            yield Text(f"  To read another: --map {flag}", style="dim" if choice.sure else "")


def short(path: str) -> str:
    """A path, cut to fit into a line of the page."""
    return visible(elided(path, 48))


def number_text(value: float) -> str:
    """`151643`, `-0.39`: whole numbers in full, others with four digits; zero without a sign."""
    if value == int(value) and abs(value) < 1e15:
        return f"{value:.0f}" if value else "0"
    return f"{value:.4g}"


_MOST_CODES = 4
"""Codes or columns that are named at most."""


def mapping_lines(inspection: Inspection, flags: Sequence[str] = (), *, file: bool = True) -> Iterator[Text]:
    """The mapping, what a scan with it finds, and last the command to run next, with these flags.

    If not `file`, nothing for a configuration file.
    """
    scan = ["tito-audit", "scan", shell_word(inspection.file), *map(shell_word, flags)]
    formats = {rows.format for rows in inspection.formats}
    readable = inspection.rows - len(inspection.unreadable)
    if inspection.given:
        yield from heading("The mapping that was given")
        yield from _trial_lines(inspection, readable)
        yield from _next_step(scan)
        return
    if None not in formats and formats != {"generic"}:
        first, *more = sorted(map(str, formats))
        words = f"scan reads the log as {first}. To skip detection: --format {first}"
        if more:
            words = f"the rows have {len(formats)} formats, each read as its own."
        yield from _next_step(scan, f"No mapping needed: {words}")
        return
    if formats == {"generic"} and needs_no_mapping(inspection.mapping):
        if inspection.trial is None or inspection.trial.rows < readable:
            yield from _next_step(scan, "No mapping needed: each row is read by the names of its own columns.")
            return
        yield from heading("What a scan reads")
        yield from _trial_lines(inspection, readable)
        yield from _next_step(scan, "No mapping needed: scan reads these columns by their names.")
        return
    if not inspection.mapping:
        yield from heading("Next step")
        yield from (Text(f"  {line}") for line in _no_mapping_lines(inspection))
        return
    yield from heading("Suggested mapping")
    for path in inspection.left_out:
        yield Text(f"  {short(path)} is left out: it fits the tokens of too few rows.", style="yellow")
    used = inspection.mapping.values()
    others = [
        c.path
        for c in inspection.columns
        if c.is_mappable and inspection.roles[c.path].role is Role.IDS and c.path not in used
    ]
    if others and "token_ids" in inspection.mapping:
        more_ids = f" (and {len(others) - 1:,} more)" if len(others) > 1 else ""
        flag = shell_word(f"token_ids={others[0]}")
        words = f"{short(others[0])}{more_ids} holds ids too. If that is what is trained: --map {flag}"
        yield Text(f"  {words}", style="yellow")
    yield from _trial_lines(inspection, readable)
    if inspection.packed is not None:
        path, name = inspection.packed
        words = f"{short(path)} splits each row into samples: a scan does if it is called {name}."
        yield Text(f"  {words}", style="yellow")
    if file:
        yield Text("  To keep it, in pyproject.toml (in tito-audit.toml the table is [map]):", style="dim")
        for line in as_toml(inspection.mapping):
            yield Text(f"    {line}")
    yield from _next_step([*scan, *as_flags(inspection.mapping)])


def _next_step(command: Sequence[str], first: str | None = None) -> Iterator[Text]:
    yield from heading("Next step")
    yield from (Text(f"  {line}") for line in (first, " ".join(command)) if line is not None)


def _trial_lines(inspection: Inspection, rows: int) -> Iterator[Text]:
    """What was read of `rows` rows with the mapping, and what a scan of them finds."""
    trial = inspection.trial
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
        scan = trial.scan
        where = f" in {scan.with_errors:,} of {many(scan.rollouts, 'rollout')}" if scan.with_errors else ""
        counts = [many(scan.errors, "error") + where if scan.errors else "no errors"]
        counts += [many(scan.warnings, "warning")] if scan.warnings else []
        counts += [many(scan.notes, "note")] if scan.notes else []
        codes = ", ".join(f"{code} ({count:,})" for code, count in list(scan.codes.items())[:_MOST_CODES])
        yield Text(f"  A scan of these rows finds {listed(counts)}{f': {codes}' if codes else ''}.")
        if 2 * scan.with_errors > scan.rollouts:
            yield Text("  Most rows have errors: check the mapping before the log.", style="bold yellow")


def _no_mapping_lines(inspection: Inspection) -> Iterator[str]:
    ids = [column for column in inspection.columns if inspection.roles[column.path].role in IDS]
    samples = [column for column in ids if "[]" in column.keys and not column.scope.replace("[*]", "")]
    inner = next((column for column in ids if not column.is_mappable), None)
    written = [column.path for column in inspection.columns if column.types["text of JSON (list)"]]
    if not ids and written:
        named = listed([short(path) for path in written[:_MOST_CODES]])
        yield f"No column holds lists of token ids. These hold lists written as text: {named}."
        yield "Parse the texts (json.loads) and write the rows as JSONL or Parquet, then look again:"
        yield f"tito-audit inspect {shell_word(inspection.file)}"
    elif not ids:
        yield "No column looks like token ids, so a scan can audit nothing here."
        yield "Log the ids of each prompt and completion as the sampler returned them, in one of these formats:"
        yield "tito-audit list formats"
    elif samples:
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


def as_object(inspection: Inspection, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """All that `inspect` shows, as one JSON object."""
    columns: list[dict[str, Any]] = []
    for column in inspection.columns:
        facts, guess, lengths = inspection.facts.get(column.path), inspection.roles[column.path], column.lengths
        about = {
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
        }
        if vocabulary is not None and guess.role in IDS and column.arrays:
            about["decoded"] = decode_first_list(column, vocabulary)
        columns.append(about)
    return {
        "file": inspection.file,
        "kind": inspection.kind,
        "rows": inspection.rows,
        "more_rows": inspection.stopped,
        "unreadable": [{"row": row, "because": because} for row, because in inspection.unreadable.items()],
        "taken_for": [asdict(rows) for rows in inspection.formats],
        "columns": columns,
        "more_columns": inspection.more_columns > 0,
        "relations": [
            {"scope": scope, **asdict(relation)}
            for scope, relations in inspection.relations.items()
            for relation in relations
        ],
        "record": inspection.record.as_object() if inspection.record is not None else None,
        "calls": asdict(inspection.calls) if inspection.calls is not None else None,
        "masks": [asdict(mask) for mask in inspection.masks],
        "sentinels": [asdict(sentinel) for sentinel in inspection.sentinels],
        "logprobs": [asdict(choice) for choice in inspection.logprobs],
        "mapping": {
            "given": inspection.given,
            "columns": inspection.mapping,
            "flags": " ".join(as_flags(inspection.mapping)),
            "toml": "\n".join(as_toml(inspection.mapping)) if inspection.mapping else "",
            "left_out": inspection.left_out,
            "trial": asdict(inspection.trial) if inspection.trial is not None else None,
        },
    }
