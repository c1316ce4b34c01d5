"""Cases of formats as data: what a row says, the sentence that refuses it, and what a repair changes in it.

A file of `tests/data/formats` holds the cases of a format; each is an object of

- `case`: what is true, in a sentence;
- `row`, or `fixture` (the id or number of a row of its fixture), changed at the JSON pointers of `set` and `drop`;
- `format`: what the row is recognized as, if not as the format of the file; `as`: what it is read as, if that is
  another;
- `read`: its rollouts as `view` shows them; or `error`: the sentence that refuses it;
- instead of `read`, `write`: changes of its rollouts (`mended`), and `gives`: what differs in each new row;
- `only`: "json" or "table", if the row is no case in the other shape;
- `but`: the same row with something else. Each entry has the keys of a case but `row` and `fixture`: its `set` and
  `drop` change the row of the case further, its `read` may be what differs from that of the case, and without
  `read`, `error` and `gives` it reads the same.

`python -m tests.format_cases` writes what is expected anew: read the difference before you commit it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tests.forms import as_table, plain, spliced
from tests.world import FORMATS, ROOT
from tito_audit.errors import TitoAuditError
from tito_audit.format import Format, Row
from tito_audit.formats import all_formats, format_named, pick_format
from tito_audit.record.build import column_values
from tito_audit.record.column import Column, ColumnRole
from tito_audit.record.edits import ABSENT, Edit, apply_edits, edits_between
from tito_audit.record.message import Message
from tito_audit.record.repaired import RepairedRollout, unrepaired
from tito_audit.record.rollout import Padding, Place, Rollout, TrainingRow, Turn
from tito_audit.record.stated import NOTHING_STATED, Stated
from tito_audit.storage import open_log

__all__ = [
    "CASES",
    "FILES",
    "Case",
    "cases_of",
    "changed_at",
    "differences",
    "fixture_of",
    "fixture_rows",
    "label_of",
    "shown",
    "text_of",
]

FOLDER = ROOT / "tests" / "data" / "formats"
PLACE = Place("log.jsonl", 4)
WIDTH = 115
RUN = 4
LONG = 16
"""Lists of more numbers are shown by their ends and a checksum."""

Json = dict[str, Any]


# What a rollout says


def view(rollout: Rollout) -> Json:
    """Everything that a rollout says and that is not its default, in plain values; null for NaN."""
    return without_empty(
        item=rollout.place.item or None,
        messages=[message_view(message) for message in rollout.messages],
        tools=shortened(rollout.tools),
        template_kwargs=dict(rollout.template_kwargs),
        turns=[turn_view(turn, rollout.messages) for turn in rollout.turns],
        row=None if rollout.training_row is None else row_view(rollout.training_row),
        stated=stated_view(rollout.stated),
    )


def without_empty(**values: Any) -> Json:
    """The values without those that say nothing."""
    return {name: value for name, value in values.items() if value is not None and value != [] and value != {}}


def message_view(message: Message) -> Json:
    return {**shortened(message.wire), **without_empty(reasoning=message.reasoning)}


def turn_view(turn: Turn, messages: Sequence[Message]) -> Json:
    sent = turn.prompt_messages
    answer = None if turn.answer is None else message_view(turn.answer)
    in_place = [message_view(messages[number]) for number in (turn.message_index,) if number is not None]
    return {
        "prompt": numbers(turn.prompt_ids),
        "completion": numbers(turn.completion_ids),
        **without_empty(
            logprobs=numbers(turn.completion_logprobs),
            message=turn.message_index,
            sent=None if sent is None else [message_view(message) for message in sent] or "nothing",
            prompt_text=turn.prompt_text,
            text=turn.completion_text,
            answer="the message" if answer in in_place else answer,
            usage=None
            if turn.usage is None
            else {f.name: shortened(getattr(turn.usage, f.name)) for f in fields(turn.usage)},
            finish=turn.finish_reason,
            stop=turn.stop_string,
            weights=list(turn.weight_versions),
            weight_spans=[list(span) for span in turn.weight_spans],
            ids_from=None if turn.ids_from == "logged" else str(turn.ids_from),
            tokens=[
                [token.text, None if token.data is None else token.data.hex(), shortened(token.logprob)]
                for token in turn.token_texts or ()
            ],
            columns=[column_view(column, turn.completion_logprobs) for column in turn.columns],
            as_row=None if turn.as_row is None else row_view(turn.as_row),
            alternatives=[list(ids) for ids in turn.alternatives],
        ),
    }


def row_view(row: TrainingRow) -> Json:
    return {
        "ids": numbers(row.token_ids),
        "mask": flags(row.loss_mask),
        **without_empty(
            logprobs=numbers(row.logprobs),
            prompt_length=row.prompt_length,
            sentinel=row.sentinel,
            columns=[column_view(column, *parts_of(row)) for column in row.columns],
            finish=list(row.finish_reasons),
            padding=None if row.padding == Padding() else [row.padding.left, row.padding.right],
            hidden=flags(row.hidden),
        ),
    }


def parts_of(row: TrainingRow) -> Iterator[Any]:
    """The mask and the logprobs of a row, and of its response alone."""
    for values in (row.loss_mask, row.logprobs):
        yield values
        yield None if values is None else values[row.prompt_length or 0 :]


def column_view(column: Column, *read: Any) -> list[Any]:
    """Name, what it is, and what it holds, unless that is just what was `read`."""
    kinds = (column.role, column.alignment or "fits nothing", column.policy, column.encoding)
    what = [str(kind) for kind in kinds if kind and kind != ColumnRole.OTHER]
    sentinel = [] if column.sentinel is None else [f"sentinel {column.sentinel}"]
    values = numbers(column.values)
    repeated = column.role != ColumnRole.OTHER and values in [numbers(array) for array in read]
    return [column.name, ", ".join(what + sentinel), *([] if repeated else [values])]


def stated_view(stated: Stated) -> Json:
    values = {f.name: getattr(stated, f.name) for f in fields(stated)}
    values = {name: value for name, value in values.items() if value != getattr(NOTHING_STATED, name)}
    if stated.reasons:
        values["reasons"] = [str(reason) for reason in stated.reasons]
    if stated.side is not None:
        values["side"] = without_empty(
            **{f.name: getattr(stated.side, f.name) or None for f in fields(stated.side)}
        )
    return {name: shortened(value) for name, value in values.items()}


def flags(mask: Any) -> str | None:
    """A mask in zeros and ones."""
    if mask is None:
        return None
    text = "".join(map(str, mask.astype(int)))
    return text if len(text) <= 6 * LONG else f"{len(text)}: {text[:8]} … {text[-8:]} #{checksum(text)}"


def checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def numbers(values: Any) -> Any:
    return None if values is None else shortened(np.asarray(values))


def shortened(value: Any) -> Any:
    """The value with null for NaN, a run of equal entries as `4 x 0`, and of many numbers the ends."""
    if isinstance(value, Mapping):
        return {name: shortened(inner) for name, inner in value.items()}
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return value
    entries = [shortened(entry) for entry in value]
    if len(entries) <= LONG or not all(isinstance(entry, int | float | None) for entry in entries):
        runs = [(text, len(list(same))) for text, same in groupby(map(dumped, entries))]
        return [
            entry
            for text, size in runs
            for entry in ([f"{size} x {text}"] if size >= RUN else [json.loads(text)] * size)
        ]
    ends = f"{dumped(entries[:4])[1:-1]} … {dumped(entries[-4:])[1:-1]}"
    return f"{len(entries)}: {ends} #{checksum(dumped(entries))}"


# What a repair changes


def mended(rollouts: Sequence[Rollout], changes: Sequence[Json]) -> list[RepairedRollout]:
    """The rollouts of a row with these changes, each of the rollout of its `item`; two of one item are a fork.

    `calls` are the calls that stay; `turns` changes calls by number: `prompt` and `completion` by
    `[start, end, ids]`, `columns` by name, null to drop one. `row` changes the training row: `splice`, `mask`,
    `logprobs`, `padding`; `add` makes one of ids, and null takes it away. `left_out` leaves the rollout out.
    """
    new: list[RepairedRollout] = []
    for item, rollout in enumerate(rollouts):
        own = [change for change in changes if change.get("item", 0) == item]
        new += [changed(rollout, change) for change in own if not change.get("left_out")]
        if not own:
            new.append(unrepaired(rollout))
    return new


def changed(rollout: Rollout, change: Json) -> RepairedRollout:
    turns = list(rollout.turns)
    for name, values in change.get("turns", {}).items():
        turns[int(name)] = changed_turn(turns[int(name)], values)
    if "row" in change:
        rollout = replace(rollout, training_row=changed_row(rollout.training_row, change["row"]))
    calls = tuple(change.get("calls", range(len(turns))))
    return RepairedRollout(replace(rollout, turns=tuple(turns[number] for number in calls)), calls)


def changed_turn(turn: Turn, change: Json) -> Turn:
    for name, field in (("prompt", "prompt_ids"), ("completion", "completion_ids")):
        if name in change:
            start, end, ids = change[name]
            old = getattr(turn, field)
            old = np.empty(0, np.int32) if old is None else old
            turn = replace(turn, **{field: np.array([*old[:start], *ids, *old[end:]], np.int32)})
    columns = []
    for column in turn.columns:
        values = change.get("columns", {}).get(column.name, column.values)
        if values is not column.values and column.role is ColumnRole.LOGPROBS:
            turn = replace(turn, completion_logprobs=None if values is None else np.array(values, np.float64))
        if values is not None:
            columns.append(column if values is column.values else replace(column, values=column_values(values)))
    return replace(turn, columns=tuple(columns))


def changed_row(row: TrainingRow | None, change: Json | None) -> TrainingRow | None:
    if change is None:
        return None
    if row is None or "add" in change:
        return TrainingRow(np.array(change["add"], np.int32), None, None)
    start, end, ids = change.get("splice", (0, 0, []))
    arrays: Json = {}
    if "mask" in change:
        arrays["loss_mask"] = np.array(change["mask"], np.bool_)
    if "logprobs" in change:
        arrays["logprobs"] = np.array(change["logprobs"], np.float64)
    new = spliced(row, start, end, ids, **arrays) if change.keys() - {"padding"} else row
    return replace(new, padding=Padding(*change["padding"])) if "padding" in change else new


# Cases

ROW_FROM = ("row", "fixture")
CHANGED_BY = ("set", "drop", "as", "only", "write")
EXPECTED = ("format", "read", "gives", "error")


@dataclass(frozen=True)
class Case:
    """A case of a file, or one of what it says under `but`."""

    path: Path
    name: str
    entry: Json
    of: Case | None = None
    """The case that it is a change of."""

    def row(self) -> Json:
        """The row, as JSON."""
        if self.of is not None:
            row = self.of.row()
        else:
            row = self.entry["row"] if "row" in self.entry else fixture_of(self.path.stem, self.entry["fixture"])
        return changed_at(row, self.entry)

    def shapes(self) -> Iterator[Row]:
        """The row as JSON gives it and as a table gives it, where it is a case in both."""
        if self.entry.get("only") != "table":
            yield self.row()
        if self.entry.get("only") != "json":
            yield as_table(self.row())

    def expected(self) -> Json:
        """What should come out of the row, as the file has it."""
        recognized = {"format": self.path.stem if self.path.stem in FORMAT_NAMES else None}
        if self.of is not None:
            recognized = {"format": self.of.expected()["format"]}
        return recognized | {name: self.entry[name] for name in EXPECTED if name in self.entry}

    def outcome(self, row: Row) -> Json:
        """What comes out of a row in this form of it, under the keys that expect it."""
        result = outcome(self.entry, row)
        same = self.of is not None and "read" in result and not isinstance(self.entry.get("read"), list)
        if self.of is None or not same or "read" not in self.of.entry:
            return result
        differs = differences(self.of.entry["read"], result.pop("read"))
        return {**result, "read": differs} if differs else result


def cases_of(path: Path) -> list[Json]:
    """The cases of a file, as it has them."""
    listed: list[Json] = json.loads(path.read_text(encoding="utf-8"))
    for case in listed:
        assert case.keys() <= {"case", "but", *ROW_FROM, *CHANGED_BY, *EXPECTED}, f"{path.name}: {case['case']}"
        assert len(case.keys() & set(ROW_FROM)) == 1, f"{path.name}: {case['case']}: no row, or two"
        for change in case.get("but", ()):
            assert change.keys() <= {"case", *CHANGED_BY, *EXPECTED}, f"{path.name}: {case['case']}: {change}"
    return listed


def every_case(path: Path) -> Iterator[Case]:
    """The cases of a file, each with those under its `but`."""
    for entry in cases_of(path):
        case = Case(path, entry["case"], entry)
        yield case
        for number, change in enumerate(entry.get("but", ()), 1):
            yield Case(path, change.get("case", f"{case.name}, but {number}"), change, case)


def changed_at(value: Json, change: Json) -> Json:
    """A value with what a change sets and drops."""
    edits = [Edit(pointed(at), entry) for at, entry in change.get("set", {}).items()]
    new: Json = apply_edits(value, edits + [Edit(pointed(at), ABSENT) for at in change.get("drop", ())])
    return new


def pointed(pointer: str) -> tuple[str | int, ...]:
    """The path that a JSON pointer names; numbers are positions in lists."""
    keys = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
    return tuple(int(key) if key.isdigit() else key for key in keys)


def pointer_to(path: Sequence[str | int]) -> str:
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)


@cache
def fixture_rows(name: str) -> tuple[Json, ...]:
    (path,) = (path for path in FORMATS.glob(f"{name}.*") if path.suffix != ".py")
    return tuple(plain(dict(raw.value or {})) for raw in open_log(path))


FORMAT_NAMES = frozenset(form.name for form in all_formats())
LABELS = ("id", "example_id", "session_id", "trial_name", "trace_id", "name", "rollout_id")


def fixture_of(name: str, label: str | int) -> Json:
    rows = fixture_rows(name)
    if isinstance(label, int):
        return rows[label]
    return next(row for row in rows if label in [row.get(key) for key in LABELS])


def label_of(name: str, number: int) -> str | int:
    """What a row of a fixture is called: its id if no row before it has that, else its number."""
    rows = fixture_rows(name)
    labels = [rows[number].get(key) for key in LABELS]
    return next(
        (label for label in labels if isinstance(label, str) and fixture_of(name, label) is rows[number]), number
    )


def outcome(case: Json, row: Row) -> Json:
    """What comes out of a row, under the keys of a case that expect it."""
    result: Json = {"format": None}
    try:
        form = pick_format(row)
        result["format"] = form.name
        form = format_named(case.get("as", form.name))
        rollouts = form.read(row, PLACE)
        if "write" not in case:
            return {**result, "read": [view(rollout) for rollout in rollouts]}
        return {**result, "gives": [differences(row, new) for new in written(form, row, rollouts, case["write"])]}
    except TitoAuditError as error:
        return {**result, "error": str(error)}


def differences(old: Row, new: Row) -> Json:
    """What differs in a new row, by JSON pointer."""
    edits = list(edits_between(old, new))
    put = {pointer_to(edit.path): shortened(edit.value) for edit in edits if edit.value is not ABSENT}
    return without_empty(set=put, drop=[pointer_to(edit.path) for edit in edits if edit.value is ABSENT])


def written(form: Format, row: Row, rollouts: Sequence[Rollout], changes: Sequence[Json]) -> Sequence[Row]:
    """The new rows, which share with the old one what did not change and say what was asked for."""
    before = json.dumps(plain(row))
    wanted = mended(rollouts, changes)
    rows = form.update(row, wanted)
    assert json.dumps(plain(row)) == before, "the old row stays as it was"
    for new in rows:
        assert_shared(row, new)
        again = form.read(new, PLACE)
        (same,) = form.update(new, [unrepaired(rollout) for rollout in again])
        assert same is new, "a new row in which nothing changes stays as it is"
        if len(rows) == 1:
            for repaired, reread in zip(wanted, again, strict=True):
                assert_says(repaired.rollout, reread)
    return rows


def assert_shared(old: Any, new: Any, path: tuple[str | int, ...] = ()) -> None:
    """What did not change is the same object, objects keep their order, and arrays stay arrays."""
    if isinstance(old, np.ndarray) and new is not None and new is not ABSENT:
        assert isinstance(new, np.ndarray), pointer_to(path)
    if old is new or not isinstance(old, Mapping | list) or type(old) is not type(new):
        return
    assert next(edits_between(old, new), None), f"{pointer_to(path)} was copied and says the same"
    if isinstance(old, Mapping):
        assert [key for key in new if key in old] == [key for key in old if key in new]
        for key in old.keys() & new.keys():
            assert_shared(old[key], new[key], (*path, key))
    elif len(old) == len(new):
        for number, (was, now) in enumerate(zip(old, new, strict=True)):
            assert_shared(was, now, (*path, number))


def assert_says(wanted: Rollout, read: Rollout) -> None:
    """A rollout says the ids and the mask that were asked for."""
    for turn, again in zip(wanted.turns, read.turns, strict=True):
        np.testing.assert_array_equal(again.prompt_ids, turn.prompt_ids)
        np.testing.assert_array_equal(again.completion_ids, turn.completion_ids)
    if wanted.training_row is not None:
        np.testing.assert_array_equal(read.training_row.token_ids, wanted.training_row.token_ids)
        np.testing.assert_array_equal(read.training_row.loss_mask, wanted.training_row.loss_mask)
        np.testing.assert_array_equal(read.training_row.hidden, wanted.training_row.hidden)
        assert read.training_row.padding == wanted.training_row.padding


# Their text


def shown(case: Json) -> str:
    """A case as the files hold it: on as few lines as hold it, and of `but` an entry a line."""
    text = filled({name: value for name, value in case.items() if name != "but"})
    if "but" in case:
        others = ",\n".join(filled(other) for other in case["but"]).replace("\n", "\n  ")
        text = f'{text[:-1]},\n "but": [{others}]}}'
    return text


def filled(value: Any, before: int = 0) -> str:
    """A value on one line, or its parts on as few lines as hold them."""
    text = dumped(value)
    if len(text) + before <= WIDTH or not isinstance(value, dict | list):
        return text
    if isinstance(value, dict):
        parts = [f"{dumped(name)}: {filled(inner, len(name))}" for name, inner in value.items()]
    else:
        parts = [filled(inner) for inner in value]
    rows: list[str] = []
    for part in parts:
        if rows and "\n" not in rows[-1] + part and len(rows[-1]) + len(part) <= WIDTH:
            rows[-1] += f", {part}"
        else:
            rows.append(part)
    ends = "{}" if isinstance(value, dict) else "[]"
    return ends[0] + ",\n".join(rows).replace("\n", "\n ") + ends[1]


def dumped(value: Any) -> str:
    """JSON with its letters as they are, but for half characters, which no file holds."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def text_of(cases: Sequence[Json]) -> str:
    return "[\n" + ",\n\n".join(map(shown, cases)) + "\n]\n"


def refresh(case: Case) -> None:
    """Put what comes out of its row now into the entry of a case."""
    result = case.outcome(next(case.shapes()))
    if shown(result) == shown(case.expected()):
        return
    if result["format"] == replace(case, entry={}).expected()["format"]:
        del result["format"]
    others = {"but": case.entry.pop("but")} if "but" in case.entry else {}
    for name in EXPECTED:
        case.entry.pop(name, None)
    case.entry.update(**result, **others)


FILES = sorted(FOLDER.glob("*.json"))
CASES = [case for file in FILES for case in every_case(file)]


if __name__ == "__main__":
    for file in FILES:
        cases = []
        for each in every_case(file):
            refresh(each)
            cases += [each.entry] if each.of is None else []
        file.write_text(text_of(cases), encoding="utf-8")
