"""Rows to rollouts and back; one file for each log format.

Here a row gets its format, by its keys, or an error that names the nearest ones. Columns are judged by their
names: a user's names are mapped to those that formats read, number columns are told from others, and columns that
look like ids, masks, logprobs or messages but were not read are named.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format, Row
from tito_audit.formats._answers import LoggedCall, build_thread
from tito_audit.formats._atropos import TOKEN_COLUMNS
from tito_audit.formats._calls import (
    CALL_LISTS,
    CALL_LOGPROBS,
    COMPLETION_IDS,
    PROMPT_IDS,
    calls_unknown_tools,
    model_name,
    with_sampling_settings,
)
from tito_audit.formats._columns import (
    FLAT_IDS,
    MASKS,
    ROW_LOGPROBS,
    SEGMENT_COLUMNS,
    STALE_COLUMNS,
    equal_values,
    is_list,
    is_messages,
    names_in,
    parsed_column,
)
from tito_audit.formats._responses import chat_tools
from tito_audit.formats._text_logs import text_log, text_log_despite_ids, text_log_notice
from tito_audit.formats._verifiers import with_trainer_updates
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Rollout
from tito_audit.registry import load_plugins, module_names
from tito_audit.unknown import did_you_mean, unknown_name

# Names of the private modules that other rooms use.
__all__ = [
    "CALL_LISTS", "COMPLETION_IDS", "FLAT_IDS", "MASKS", "PROMPT_IDS", "SEGMENT_COLUMNS", "STALE_COLUMNS",
    "LoggedCall", "build_thread", "calls_unknown_tools", "chat_tools", "model_name", "text_log_notice",
    "with_sampling_settings", "with_trainer_updates",
]  # fmt: skip

LOGPROBS = tuple(dict.fromkeys((*ROW_LOGPROBS, *CALL_LOGPROBS)))
"""Column names for the logprobs of a row or a call."""


@cache
def all_formats() -> tuple[Format, ...]:
    """Every format, in the order in which they are tried."""
    formats = load_plugins(__name__, Format, lambda format: format.name)
    return tuple(sorted(formats, key=lambda format: (format.precedence, format.name)))


def pick_format(row: Row) -> Format:
    """The first format that matches the row; RecordError naming its columns when none does."""
    for format, certain in _candidate_formats(tuple(row)):
        if certain or format.matches(row):
            return format
    if not row:
        raise RecordError("the row is an empty object: nothing was recorded in it")
    columns = f"no known format has these columns: {', '.join(sorted(map(str, row))[:40])}. "
    for path, inner in islice(_nested_objects(row), 64):
        # A message may hold ids, but then the row is the object around it.
        name = (
            None if "role" in inner else next((form.name for form in all_formats() if form.matches(inner)), None)
        )
        if name is not None:
            raise RecordError(f"{columns}The object at {path} looks like {name}: pass --rows-at {path}")
    raise RecordError(
        f"{columns}"
        "Name the columns of ids with --map (for example --map token_ids=NAME), or the format with --format; "
        "`tito-audit inspect LOG` shows what the columns hold and the mapping to paste."
    )


class _ValueNeeded(Exception):
    """A format asked for a value of a row that has only keys."""


class _KeysOnly(UserDict[str, Any]):
    """The keys of a row; `_ValueNeeded` if the value of one is asked for."""

    def __getitem__(self, key: str) -> Any:
        if key in self.data:
            raise _ValueNeeded
        raise KeyError(key)


@lru_cache(256)
def _candidate_formats(keys: tuple[str, ...]) -> tuple[tuple[Format, bool], ...]:
    """The formats that a row with these keys may match, in order, each with whether it does for all values.

    The first that does is the last of them.
    """
    row, possible = _KeysOnly(dict.fromkeys(keys)), []
    for format in all_formats():
        try:
            certain = format.matches(row)
        except _ValueNeeded:
            possible.append((format, False))
            continue
        if certain:
            possible.append((format, True))
            break
    return tuple(possible)


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
    raise unknown_name("format", name, names, flag="--format", listed_by="tito-audit list formats")


_TOKEN_COLUMNS = dict.fromkeys((*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS, *MASKS, *ROW_LOGPROBS, *CALL_LOGPROBS))


@dataclass(frozen=True, slots=True)
class NearFormat:
    """A format that a row nearly matches, or that was tried too late, and what tells them apart."""

    format: str
    has: tuple[str, ...]
    """Keys of its signature that the row has."""
    lacks: tuple[str, ...]
    """Keys of its signature that the row lacks; `a or b` if either would do."""
    excess: tuple[str, ...]
    """Keys that it has but must not have."""
    fits: bool
    """Whether the row matches it, but another format came first."""


@dataclass(slots=True)
class MatchedKeys:
    """The keys by which rows were recognized, found and reported once per file and format."""

    seen: set[tuple[str, str]] = field(default_factory=set)
    unsaid: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    def note_first_row(self, file: str, format: Format, row: Row) -> None:
        """Find the keys in the first row of a file and format."""
        if (file, format.name) not in self.seen:
            self.seen.add((file, format.name))
            self.unsaid[file, format.name] = matched_keys(format, row)

    def with_keys(self, result: Result) -> Result:
        """The result; with the keys, if it is the first of its file and format."""
        if not self.unsaid or result.rollout is None:
            return result
        keys = self.unsaid.pop((result.place.file, result.rollout.format), ())
        return replace(result, told_by=keys) if keys else result

    def without_repeats(self, results: Iterable[Result]) -> Iterator[Result]:
        """Results of several processes, with the keys only in the first of each file and format."""
        for result in results:
            if not result.told_by or result.rollout is None:
                yield result
                continue
            key = (result.place.file, result.rollout.format)
            yield replace(result, told_by=()) if key in self.seen else result
            self.seen.add(key)


def matched_keys(format: Format, row: Row) -> tuple[str, ...]:
    """The paths of the keys by which a row is recognized as the format; for `generic`, the columns it reads."""
    if format.name == "generic":
        lists = [name for name in _TOKEN_COLUMNS if is_list(row.get(name))]
        calls = [
            name
            for name in CALL_LISTS
            if isinstance(value := parsed_column(row, name), list | tuple) and len(value)
        ]
        texts = [
            name
            for name in ("messages", "prompt", "completion", "tools")
            if is_messages(value := parsed_column(row, name))
            or (isinstance(value, list) and value and isinstance(value[0], Mapping))
        ]
        return (*(calls[:1] or ()), *lists, *texts)
    paths = _key_paths(row)
    text = text_log_despite_ids(row) if format.name == "text_only" else None
    if text is not None:
        return tuple(text.keys)
    ways = format.signature.key_patterns
    for way in ways:
        required = [_first_path_named(paths, names) for names in way.required]
        if all(path is not None for path in required):
            more = [_first_path_named(paths, names) for names in way.optional]
            return tuple(dict.fromkeys(path for path in (*required, *more) if path is not None))
    every = (_first_path_named(paths, (key,)) for way in ways for names in way.required for key in names)
    return tuple(dict.fromkeys(path for path in every if path is not None))


def near_formats(row: Row, formats: Sequence[Format], read_as: str | None) -> tuple[NearFormat, ...]:
    """The three formats that the row matches most nearly, nearest first; not `read_as`, which it was read as."""
    paths = _key_paths(row)
    ranked: list[tuple[tuple[int, int], NearFormat]] = []
    for format in formats:
        if format.name in (read_as, "generic"):  # plain columns are in rows of many formats
            continue
        fits = format.matches(row)
        nears = []
        for way in format.signature.key_patterns:
            has = [path for names in way.required if (path := _first_path_named(paths, names)) is not None]
            lacks = [" or ".join(names) for names in way.required if _first_path_named(paths, names) is None]
            excess = [path for names in way.absent if (path := _first_path_named(paths, names)) is not None]
            near = NearFormat(format.name, tuple(has), tuple(lacks), tuple(excess), fits)
            nears.append(((len(lacks) + len(excess), -len(has)), near))
        # The way in which the row lacks least.
        nothing = ((0, 0), NearFormat(format.name, (), (), (), fits))
        (wrong, count), near = min(nears, key=lambda pair: pair[0], default=nothing)
        # A row that does not match is worth a mention if it has more of the keys than it lacks, some at the top.
        if fits or (-count > max(wrong, 1) and any("." not in path for path in near.has)):
            ranked.append(((0 if fits else wrong, count), near))
    ranked.sort(key=lambda pair: pair[0])
    return tuple(near for _, near in ranked[:3])


def _first_path_named(paths: Sequence[str], names: Sequence[str]) -> str | None:
    """The first path that is one of the names or ends in it; paths of outer keys come first."""
    for name in names:
        for path in paths:
            if path == name or path.endswith(f".{name}"):
                return path
    return None


def _key_paths(row: Row) -> list[str]:
    """The path of every value of a row that is not null, level by level, such as `choices[].token_ids`."""
    paths: dict[str, None] = {}
    level: list[tuple[str, Any]] = [("", row)]
    looked = 0
    for _ in range(8):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            looked += 1
            if looked > 2_000:
                return list(paths)
            if isinstance(value, Mapping):
                for key, inner in value.items():
                    if inner is None:
                        continue
                    # Some logs use whole texts as keys; a path has to stay readable.
                    short = str(key) if len(str(key)) <= 60 else f"{str(key)[:60]}…"
                    name = f"{path}.{short}" if path else short
                    paths.setdefault(name)
                    below.append((name, inner))
            else:
                below += [(f"{path}[]", entry) for entry in value[:4]]
        level = [(path, value) for path, value in below if isinstance(value, Mapping | list | tuple)]
    return list(paths)


def _nested_objects(row: Row) -> Iterator[tuple[str, Row]]:
    """The objects inside a row with their paths, outer ones first; of lists only the first entry."""
    level: list[tuple[str, Any]] = [("", row)]
    for _ in range(3):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            for key in list(value)[:64]:
                inner = value[key]
                while isinstance(inner, list | tuple) and inner:
                    inner = inner[0]
                if isinstance(inner, dict) and isinstance(key, str) and key and "." not in key:
                    below.append((f"{path}.{key}" if path else key, inner))
        yield from below
        level = below


_INTEGER_DTYPES, _NUMBER_DTYPES = "i", "ifb"
"""Kinds of numpy dtypes. Ids become an array only if all are integers, so that an error can name the first entry
that is not an id."""

_ID_COLUMN_NAMES = (*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS)
_NUMBER_COLUMN_NAMES = (
    *MASKS,
    *ROW_LOGPROBS,
    *CALL_LOGPROBS,
    *TOKEN_COLUMNS,
    *STALE_COLUMNS,
    *names_in(
        "advantages attention_mask masked_tokens position_ids rewards token_loss_mask token_mask token_rewards"
    ),
)
_DTYPES_OF_COLUMN = {
    **dict.fromkeys(_NUMBER_COLUMN_NAMES, _NUMBER_DTYPES),
    **dict.fromkeys(_ID_COLUMN_NAMES, _INTEGER_DTYPES),
}

NUMBER_COLUMNS: Mapping[str, str] = {
    **_DTYPES_OF_COLUMN,
    **{f"{calls}[].{name}": kinds for calls in CALL_LISTS for name, kinds in _DTYPES_OF_COLUMN.items()},
}
"""Columns of a row and of its listed calls that become arrays, with the dtype kinds that these may have."""


def number_columns(mapping: Mapping[str, str]) -> Mapping[str, str]:
    """`NUMBER_COLUMNS`, and the log's own names for them; `mapping` is from our names to the log's."""
    theirs = {name: _DTYPES_OF_COLUMN[ours] for ours, name in mapping.items() if ours in _DTYPES_OF_COLUMN}
    return {**NUMBER_COLUMNS, **theirs} if theirs else NUMBER_COLUMNS


PARAMETER = "a parameter by its name"
_PARAMETER_NAME = re.compile(
    r"(?:^|_)stop(?:_|$|ping)|bad_?words|(?:^|_)(?:allowed|banned|suppress|forbidden|excluded?|forced|begin)_"
    r"|^(?:eos|bos|pad|unk|sep|cls|mask)(?:_token)?(?:_ids?|s|_tokens?)*$"
    r"|(?:^|_)(?:logit_?bias|vocab|lora|adapter|grid|thw|hw|seeds?|temperatures?)(?:_|$)"
    r"|special_(?:token_)?ids|special_tokens?$|additional_special",
    re.IGNORECASE,
)
_MEASURE_NAME = re.compile(
    r"(?:^|_)(?:lens?|lengths?|sizes?|counts?|nums?|n|shapes?|dims?|offsets?|cu_seqlens|seqlens?|indexes|indices"
    r"|index|idxs?|starts?|ends?|spans?|bounds|boundaries|ranks?|versions?|timestamps?|times?|durations?"
    r"|latency|latencies|positions?|pos|bytes|widths?|heights?|epochs?|scores?|rewards?|totals?)(?:_|$)",
    re.IGNORECASE,
)
_OBJECT_ID_NAME = re.compile(
    r"(?:^|_)(?:segments?|samples?|docs?|documents?|turns?|steps?|experts?|workers?|users?|groups?|types?|rows?"
    r"|images?|pages?|sources?|questions?|problems?|tasks?|nodes?|agents?|slots?|blocks?|layers?|roles?|files?"
    r"|retrieved|episodes?|envs?|seqs?|sequences?|batch|requests?|messages?|parents?|speakers?|sentences?|words?"
    r"|tools?|models?|chunks?|evidence|citations?)_ids?$"
    r"|^(?:segments|docs|documents|turns|experts|workers|types|layers|token_types)$",
    re.IGNORECASE,
)
_OTHER_MASK_NAME = re.compile(
    r"(?:^|_)(?:prompt|user|system|special|valid|visible|image|pad|padding|padded|attention|attn|types?|causal"
    r"|eos|done|dones|terminal|ignored?|frozen|truncated?|segments?)(?:_|$)"
    r"|^is_(?!.*(?:train|loss|assist|action|respon|complet|sampl|generat))",
    re.IGNORECASE,
)


def snake_case(name: str) -> str:
    """A column's name in snake case: `stopTokenIds` as `stop_token_ids`."""
    return re.sub(r"[^0-9a-zA-Z]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).strip("_").lower()


def why_not_token_ids(name: str) -> str:
    """Why a column of integers with this name holds no token ids, in a few words; "" if it may hold them."""
    words = snake_case(name)
    if _PARAMETER_NAME.search(words):
        return PARAMETER
    if _MEASURE_NAME.search(words):
        return "sizes or places by its name"
    return "numbers of something else by its name" if _OBJECT_ID_NAME.search(words) else ""


def is_other_mask_name(name: str) -> bool:
    """Whether a mask with this name marks something other than trained tokens."""
    return bool(_OTHER_MASK_NAME.search(snake_case(name)))


CANONICAL_COLUMNS = names_in(
    """token_ids loss_mask logprobs prompt_ids completion_ids completion_logprobs messages tools calls model
    finish_reason text"""
)
"""The names that `--map` accepts, all read by the format `generic`."""


def map_columns(row: Row, mapping: Mapping[str, str]) -> Row:
    """The row with columns under our names; `mapping` is from our names to the log's.

    A dot in the log's name leads into an object (`extra.tokens`), unless a column has that very name. A mapped
    top-level column loses its old name, or it would be read twice. SetupError for a name that is not ours,
    RecordError for a column that the row does not have.
    """
    unknown = [name for name in mapping if name not in CANONICAL_COLUMNS]
    if unknown:
        raise SetupError(
            f"--map {unknown[0]}=…: no such column. The name on the left is one of "
            f"{', '.join(CANONICAL_COLUMNS)}; the log's own name goes on the right."
        )
    columns: dict[str, Any] = {}
    for ours, path in mapping.items():
        value: Any = row
        names = [path] if path in row else path.split(".")
        for depth, name in enumerate(names):
            if not isinstance(value, Mapping) or name not in value:
                place = ".".join(names[:depth])
                # The message lists the columns that there are, and the one that may be meant.
                there = sorted(map(str, value)) if isinstance(value, Mapping) else []
                close = did_you_mean(name, there[:100])
                has = f"{place!r} has" if place else "It has" if close else "it has"
                has += f": {', '.join(there)}" if there else " no columns"
                close = f": {close} " if close else "; "
                raise RecordError(f"the row has no column {path!r}, which --map refers to{close}{has}")
            value = value[name]
        columns[ours] = value
    rest = {name: value for name, value in row.items() if name not in set(mapping.values())}
    return {**rest, **columns}


def unmap_columns(original_row: Row, mapped_row: Row, mapping: Mapping[str, str]) -> Row:
    """The log's row with the changes made to its mapped form; the same object if nothing changed.

    Mapped columns get the log's names back, dotted ones inside their objects; unchanged objects are shared.
    RecordError if two of our names map to one column and now differ.
    """
    before = map_columns(original_row, mapping)
    row: Row = original_row
    for name, value in mapped_row.items():
        if name not in mapping and value is not before.get(name, mapped_row):
            row = {**row, name: value}
    written: dict[str, Any] = {}
    for ours, path in mapping.items():
        value = mapped_row.get(ours)
        if value is before[ours]:
            continue
        other = written.get(path, value)
        if other is not value and not (is_list(other) and is_list(value) and equal_values(other, value)):
            raise RecordError(f"--map maps two columns to {path!r}, and they differ after the repair")
        written[path] = value
        row = _with_value_at(row, path, value)
    return row


def _with_value_at(row: Mapping[str, Any], path: str, value: Any) -> Mapping[str, Any]:
    """The row with a value at a path that exists in it; objects off the path are shared."""
    if path in row or "." not in path:
        return {**row, path: value}
    name, rest = path.split(".", 1)
    return {**row, name: _with_value_at(row[name], rest, value)}


Unread: TypeAlias = tuple[tuple[str, str], ...]
"""Columns that were not read, as (what it looks like, path) pairs."""

_EXAMINED = 64
"""How many entries of a list are examined."""
_ID_NAME = re.compile(r"(?:^|_)(?:tok|toks|token|tokens|ids|seq|seqs|sequence)(?:_|$)")
_MASK_NAME = re.compile(r"mask|(?:^|_)(?:train|trained|trainable|loss)(?:_|$)")
_LOGPROB_NAME = re.compile(r"log_?p|(?:^|_)lps?(?:_|$)")
_EXTRA_NAME = re.compile(
    r"(?:^|_)(?:ref|reference|teacher|old|prev|prox|proximal|trainer|critic|base|top|top_?[kp]|topk|cum|cumulative"
    r"|mean|sum|prompt_log\w*|distill\w*|opd|mopd|expert\w*|routed|routing|chosen|rejected|raw|original|draft"
    r"|ratio|kl|entropy|advantages?|rewards?)(?:_|$)"
)
"""Columns that trainers and servers write beside what was sampled."""
_KNOWN_NAMES = {
    *(name.rpartition(".")[2] for name in NUMBER_COLUMNS),
    *FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS, *MASKS, *ROW_LOGPROBS, *CALL_LOGPROBS, *CALL_LISTS,
    *SEGMENT_COLUMNS, *STALE_COLUMNS, "messages", "tools", "prompt", "completion",
    # Columns that single formats read.
    "accumulated_token_ids", "input_token_logprobs", "logprob_token_ids", "loss_weights",
    "objective_partition_ids",
    "output_token_logprobs", "prompt_delta_token_ids", "sample_loss_mask", "sample_mask", "sampled_mask",
    "sampling_mask", "target_tokens", "token_logprobs", "training_target_token_ids", "trajectory_ids",
}  # fmt: skip


def unread_columns(format: Format, row: Row, rollouts: Sequence[Rollout], mapped: Collection[str] = ()) -> Unread:
    """Columns with unknown names that look like ids, masks, logprobs or messages, whose values no rollout holds.

    They are searched in the row, its objects and its first call, and judged by names and first values. `mapped`
    are columns that the user named. () for a known log of text.
    """
    if text_log(row) is not None:
        return ()
    unread: list[tuple[str, str]] = []
    keys = {
        key
        for way in format.signature.key_patterns
        for keys in (*way.required, *way.optional, *way.absent)
        for key in keys
    }
    read_names = {*_KNOWN_NAMES, *(part.removesuffix("[]") for key in keys for part in key.split("."))}
    lists: list[tuple[str, str, Any]] = []
    level: list[tuple[str, Any]] = [("", row)]
    for _ in range(2):
        below: list[tuple[str, Any]] = []
        for path_of_object, holder in level:
            for key, value in holder.items():
                name = str(key)
                path = f"{path_of_object}.{name}" if path_of_object else name
                if isinstance(value, Mapping):
                    below.append((path, value))
                elif name in CALL_LISTS and isinstance(value, list) and value and isinstance(value[0], Mapping):
                    below.append((f"{path}[]", value[0]))
                elif is_list(value):
                    lists.append((path, name, value))
        level = below
    for path, name, value in lists[:512]:
        kind = None if name in read_names or path in mapped else _kind_by_name_and_values(name, value)
        if kind is not None and not _is_in_rollouts(kind, value, rollouts):
            unread.append((kind, path))
    return tuple(unread)


def _kind_by_name_and_values(name: str, value: Any) -> str | None:
    """What a list looks like, by its name and first entries; None if it is nothing that is audited."""
    if len(value) < 4:
        return "messages" if len(value) > 1 and is_messages(value) else None
    if is_messages(value):
        return "messages"
    words = snake_case(name)
    if _EXTRA_NAME.search(words) or why_not_token_ids(name):
        return None
    first = value[:_EXAMINED].tolist() if isinstance(value, np.ndarray) else list(value[:_EXAMINED])
    kinds = set(map(type, first)) - {type(None)}
    if not kinds or not kinds <= {int, float, bool}:
        return None
    numbers = [entry for entry in first if entry is not None]
    if float in kinds:
        return "logprobs" if _LOGPROB_NAME.search(words) and max(numbers) <= 0 > min(numbers) else None
    if set(numbers) <= {0, 1}:
        return "loss masks" if _MASK_NAME.search(words) and not is_other_mask_name(name) else None
    return "token ids" if _ID_NAME.search(words) and min(numbers) >= 0 else None


def _is_in_rollouts(kind: str, value: Any, rollouts: Sequence[Rollout]) -> bool:
    """Whether a rollout holds these values, or messages at all."""
    if kind == "messages":
        return any(rollout.messages for rollout in rollouts)
    if kind == "token ids":
        try:
            part = np.array(value, dtype=np.int32)
        except (OverflowError, TypeError, ValueError):
            return True  # no ids
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        sequences = [ids for turn in turns for ids in (turn.prompt_ids, turn.completion_ids, turn.seen_ids)]
        sequences += [rollout.training_row.token_ids for rollout in rollouts if rollout.training_row is not None]
        return any(
            ids is not None
            and (part.tobytes() in ids.tobytes() or (len(part) == len(ids) and bool((part[:-1] == ids[1:]).all())))
            for ids in sequences
        )
    columns = [column for rollout in rollouts for turn in rollout.turns for column in turn.columns]
    columns += [c for r in rollouts if r.training_row is not None for c in r.training_row.columns]
    floats = np.array(value, dtype=np.float64)
    return any(
        len(column.values) == len(floats)
        and column.values.dtype.kind in "biuf"
        and column.role.value != "other"
        and np.array_equal(column.values.astype(np.float64), floats, equal_nan=True)
        for column in columns
    )
