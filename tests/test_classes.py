"""Classes whose methods are made on first use: they are what `dataclasses` makes, and cost a tenth to import."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import itertools
import pickle
import re
import sys
from typing import Any

import pytest

from tests.test_house import PACKAGE, imports, name_of
from tito_audit import classes

SOURCE = '''
@dataclass({how})
class {name}({bases}):
    """A class."""

    number: int
    text: str = "a"
    many: list[int] = field(default_factory=list)
    hidden: float = field(default=0.5, repr=False, compare=False)
    made: dict[str, int] = field(init=False, default_factory=dict)
    fixed: int = field(init=False, default=3)
    last: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", {{self.text: self.number}})
'''
OWN = """
    def __repr__(self) -> str:
        return "mine"

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7
"""
MORE = '''
@dataclass({how})
class {name}({bases}):
    """A class with another field."""

    more: tuple[int, ...] = ()
'''
HOWS = [
    "",
    "frozen=True",
    "slots=True",
    "frozen=True, slots=True",
    "eq=False",
    "frozen=True, slots=True, eq=False",
    "repr=False",
]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, "b"), {"last": True}),
    ((), {"number": 2, "many": [1], "hidden": 2.0}),
    ((), {}),
    ((1, "b", [], 0.5, True), {}),
    ((1,), {"fixed": 3}),
    ((1,), {"unknown": 3}),
]


def pair(how: str, *, own: bool = False, sub: bool = False) -> tuple[type, type]:
    """The same class by our decorator and by the standard library's."""
    pairs = []
    for maker in (classes, dataclasses):
        name = f"Made{len(vars(sys.modules[__name__]))}"
        space = vars(sys.modules[__name__])
        space["dataclass"], space["field"] = maker.dataclass, maker.field
        exec(SOURCE.format(how=how, name=name, bases="") + OWN * own, space)
        if sub:
            exec(MORE.format(how=how, name=f"Sub{name}", bases=name), space)
            name = f"Sub{name}"
        pairs.append(space[name])
    return pairs[0], pairs[1]


def outcome(act: Any, *names: str) -> object:
    """What it returns, or its error in words, without the classes' names."""
    try:
        words = re.sub(r" at 0x\w+", "", repr(act()))
    except (TypeError, AttributeError) as error:
        words = f"{type(error).__name__}: {error}"
    for name in names:
        words = words.replace(name, "CLASS")
    return words


@pytest.mark.parametrize("sub", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_a_class_is_what_dataclasses_makes(how: str, own: bool, sub: bool) -> None:
    mine, theirs = pair(how, own=own, sub=sub)

    def same(act: Any) -> None:
        assert outcome(lambda: act(mine), mine.__name__) == outcome(lambda: act(theirs), theirs.__name__)

    same(lambda cls: cls(1))  # before anything else has made a method
    for args, keywords in CALLS:
        same(lambda cls, args=args, keywords=keywords: cls(*args, **keywords))
        same(lambda cls, args=args, keywords=keywords: vars_of(cls(*args, **keywords)))
    for one, other in itertools.product(CALLS[:3], repeat=2):
        same(lambda cls, one=one, other=other: cls(*one[0], **one[1]) == cls(*other[0], **other[1]))
    same(lambda cls: cls(1) == 1)
    same(lambda cls: inspect.signature(cls).replace(return_annotation=None))
    same(lambda cls: cls.__init__.__annotations__)
    same(lambda cls: cls.__match_args__)
    same(lambda cls: cls.__hash__ is None)
    same(lambda cls: isinstance(hash(cls(1, many=())), int))
    same(lambda cls: hash(cls(1, many=())) == hash(cls(1, many=())))
    same(lambda cls: setattr(cls(1), "number", 2))
    if "slots" not in how:  # the standard library trips over its own check there
        same(lambda cls: setattr(cls(1), "new", 2))
    same(lambda cls: delattr(cls(1), "number"))
    same(lambda cls: dataclasses.replace(cls(1), text="b"))
    same(lambda cls: dataclasses.asdict(cls(1, "b")))
    for copied in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        same(lambda cls, copied=copied: vars_of(copied(cls(1, "b", last=True))))
    same(lambda cls: cls.__init__.__qualname__)


def vars_of(value: Any) -> dict[str, Any]:
    return {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}


def test_a_value_comes_back_into_a_process_that_has_made_none() -> None:
    mine, _ = pair("frozen=True, slots=True")
    state = pickle.dumps(mine(1, "b"))
    again, _ = pair("frozen=True, slots=True")
    assert vars_of(pickle.loads(state.replace(mine.__name__.encode(), again.__name__.encode()))) == vars_of(
        mine(1, "b")
    )


def test_every_class_of_the_package_takes_what_dataclasses_would_take() -> None:
    compared = 0
    for path in PACKAGE.rglob("*.py"):
        name = name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if "tito_audit.classes" not in imports(path):
            continue
        for cls in vars(importlib.import_module(name)).values():
            if not (isinstance(cls, type) and cls.__module__ == name and "__dataclass_fields__" in vars(cls)):
                continue
            if not isinstance(vars(cls)["__init__"], classes._Deferred):
                continue
            specs = [
                (
                    spec.name,
                    spec.type,
                    dataclasses.field(
                        default=spec.default,
                        default_factory=spec.default_factory,
                        init=spec.init,
                        kw_only=spec.kw_only,
                    ),
                )
                for spec in dataclasses.fields(cls)
            ]
            twin = dataclasses.make_dataclass(cls.__name__, specs)
            assert str(inspect.signature(cls)) == str(inspect.signature(twin)), cls
            compared += 1
    assert compared > 100
