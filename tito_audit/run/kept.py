"""Results and outcomes as JSON values and back, for a journal: data only, read by the types of their fields."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tito_audit.record.finding import Result
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Stated
from tito_audit.run.encoders import Encoded
from tito_audit.viewer.model import Measures, Observed, observed_of

_PLAIN = (int, float, str, bool)
_SHARED = ("skips", "told", "misfit", "partial", "told_by", "unread", "witness")
"""Fields of a result that are mostly those of the result before."""
_OURS = ("rollout", "observed")
"""Fields of a result that are kept in part."""


_ROWS = 1 << 31
"""More rows than a log has."""


@dataclass(slots=True)
class Table:
    """Values that occur often, each once: the others hold its number."""

    values: list[Any] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _read: dict[tuple[_Form, int], Any] = field(default_factory=dict)

    def number(self, value: Any, form: _Form) -> int:
        """The number of a value, which is added if it is new."""
        key = form, value
        found = self._numbers.get(key)
        if found is None:
            written = form.write(value, self)
            found = self._numbers[key] = len(self.values)
            self.values.append(written)
        return found

    def value(self, number: int, form: _Form) -> Any:
        """The value with a number, read once in each form."""
        key = form, _row(number)
        if key not in self._read:
            self._read[key] = form.read(self.values[number], self)
        return self._read[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """How values of one type are written and read."""

    write: Callable[[Any, Table], Any]
    read: Callable[[Any, Table], Any]


def write_result(result: Result, table: Table) -> dict[str, Any]:
    """A result as JSON values; of its rollout only format and notice are kept, and no view."""
    said = _written(result, table, _result_fields())
    if result.rollout is not None:
        said["rollout"] = [result.rollout.format, result.rollout.stated.notice]
    observed = observed_of(result)
    if observed is not None:
        at, counts, roles = observed.measures.packed()
        said["measures"] = [b64encode(at).decode(), b64encode(counts).decode(), roles]
    return said


def read_result(said: Mapping[str, Any], table: Table) -> Result:
    """The result that was written."""
    values = {name: form.read(said[name], table) for name, form, _ in _result_fields() if name in said}
    place: Place = values["place"]
    rollout = None
    if (kept := said.get("rollout")) is not None:
        form, notice = _form(tuple[str, str]).read(kept, table)
        rollout = Rollout(place, form, stated=Stated(notice=notice))
    observed = None
    if "measures" in said:
        at, counts, roles = said["measures"]
        by_role = _form(Mapping[str, tuple[int, int]]).read(roles, table)
        observed = Observed(Measures.unpacked(b64decode(at), b64decode(counts), by_role))
    return Result(rollout=rollout, observed=observed, **values)


def read_results(said: Iterable[Mapping[str, Any]], table: Table, file: Path) -> tuple[Result, ...]:
    """The results that were written of rows of a file; ValueError for those of another file."""
    found = tuple(read_result(one, table) for one in said)
    for one in found:
        for _, row in one.trainings.calls_at if one.trainings is not None else ():
            _row(row)
    if any(one.place.file != str(file) for one in found):
        raise ValueError(f"results of another file than {file}")
    return found


def write_outcome(outcome: Outcome, table: Table) -> dict[str, Any]:
    """An outcome as JSON values; of its rollouts only format and notice are kept."""
    said = _written(outcome, table, _outcome_fields())
    said["before"] = [write_result(one, table) for one in outcome.before]
    if outcome.after is not outcome.before:
        said["after"] = [write_result(one, table) for one in outcome.after]
    return said


def read_outcome(said: Mapping[str, Any], table: Table, file: Path) -> Outcome:
    """The outcome that was written of a row of a file; ValueError for one of another file."""
    values = {name: form.read(said[name], table) for name, form, _ in _outcome_fields() if name in said}
    before = read_results(said["before"], table, file)
    after = read_results(said["after"], table, file) if "after" in said else before
    outcome = Outcome(before=before, after=after, **values)
    if outcome.place.file != str(file):
        raise ValueError(f"a row of another file than {file}")
    return outcome


def read_encoders(said: Any) -> tuple[Encoded, ...]:
    """What encoded the rows of a log, as it was written."""
    read: tuple[Encoded, ...] = _form(tuple[Encoded, ...]).read(said, Table())
    return read


_Fields = tuple[tuple[str, _Form, Any], ...]
"""Name, form and default of fields."""


def _written(value: Any, table: Table, of: _Fields) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    said = {}
    for name, form, default in of:
        one = getattr(value, name)
        if one is not default and one != default:
            said[name] = form.write(one, table)
    return said


@cache
def _result_fields() -> _Fields:
    found = ((name, form, default) for name, form, default in _fields_of(Result, _OURS))
    return tuple((name, _shared(form) if name in _SHARED else form, default) for name, form, default in found)


@cache
def _outcome_fields() -> _Fields:
    return _fields_of(Outcome, ("before", "after"))


def _fields_of(kind: Any, without: tuple[str, ...] = ()) -> _Fields:
    hints = get_type_hints(kind)
    mine = (one for one in fields(kind) if one.name not in without)
    return tuple((one.name, _form(hints[one.name]), _default(one)) for one in mine)


def _default(one: Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def _shared(form: _Form) -> _Form:
    """The number of a value in the table, instead of the value."""
    return _Form(lambda one, table: table.number(one, form), lambda one, table: table.value(one, form))


@cache
def _form(kind: Any) -> _Form:
    """The form of a type; TypeError for one that no record has."""
    if kind in _PLAIN:
        return _Form(lambda one, table: one, lambda one, table: _checked(one, kind))
    if kind is bytes:
        return _Form(lambda one, table: b64encode(one).decode(), lambda one, table: b64decode(one))
    if kind is Place:
        return _of_place()
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Form(lambda one, table: one.value, lambda one, table: kind(one))
    if is_dataclass(kind):
        return _of_dataclass(kind)
    return _of_several(kind, get_origin(kind), get_args(kind))


def _checked(value: Any, kind: type) -> Any:
    """A plain value of a type; TypeError for one of another type. A whole number may be meant as a float."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _row(value: Any) -> int:
    """The number of a row, or of a rollout in it; ValueError for what is none."""
    if type(value) is not int or not 0 <= value < _ROWS:
        raise ValueError(f"{value!r} is no number of a row")
    return value


def _of_several(kind: Any, origin: Any, given: tuple[Any, ...]) -> _Form:
    """The form of an optional value, a tuple, a set or a mapping."""
    if origin in (Union, UnionType):
        (inner,) = (_form(one) for one in given if one is not NoneType)
        return _Form(
            lambda one, table: None if one is None else inner.write(one, table),
            lambda one, table: None if one is None else inner.read(one, table),
        )
    if origin is tuple and given[-1] is not Ellipsis:
        inners = [_form(one) for one in given]
        return _Form(
            lambda one, table: [form.write(each, table) for form, each in zip(inners, one, strict=True)],
            lambda one, table: tuple(form.read(each, table) for form, each in zip(inners, one, strict=True)),
        )
    if origin in (tuple, frozenset):
        inner = _form(given[0])
        order = sorted if origin is frozenset else list
        return _Form(
            lambda one, table: [inner.write(each, table) for each in order(one)],
            lambda one, table: origin(inner.read(each, table) for each in one),
        )
    if origin is Mapping:
        inner = _form(given[1])
        return _Form(
            lambda one, table: {name: inner.write(each, table) for name, each in one.items()},
            lambda one, table: {name: inner.read(each, table) for name, each in one.items()},
        )
    raise TypeError(f"no form for {kind}")


def _of_dataclass(kind: Any) -> _Form:
    of = _fields_of(kind)

    def read(said: Mapping[str, Any], table: Table) -> Any:
        return kind(**{name: form.read(said[name], table) for name, form, _ in of if name in said})

    return _Form(lambda one, table: _written(one, table, of), read)


def _of_place() -> _Form:
    """A place, with its file in the table."""
    file = _shared(_form(str))
    return _Form(
        lambda one, table: [file.write(one.file, table), one.row, one.item],
        lambda one, table: Place(file.read(one[0], table), _row(one[1]), _row(one[2])),
    )
