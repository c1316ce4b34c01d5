"""The Python API: every public name of `tito_audit` with its signature and its docstrings."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import tito_audit
from pages.words import Pages

__all__ = ["api"]

_GROUPS = (
    ("Functions", lambda value: inspect.isfunction(value)),
    ("Errors", lambda value: isinstance(value, type) and issubclass(value, Exception)),
    ("Types", lambda value: isinstance(value, type)),
)


def api(intro: str) -> Pages:
    """One page: functions, then types, then errors, each by name."""
    left = {name: getattr(tito_audit, name) for name in tito_audit.__all__ if name != "__version__"}
    sections: dict[str, list[str]] = {}
    for title, fits in _GROUPS:
        mine = [name for name, value in left.items() if fits(value)]
        sections[title] = [_documented(name, left.pop(name)) for name in mine]
    assert not left, f"neither functions nor types: {', '.join(left)}"
    parts = [intro, "```{py:module} tito_audit\n```\n"]
    for title in ("Functions", "Types", "Errors"):
        parts += [f"## {title}\n", *sections[title]]
    version = "The version of the package, as text."
    parts += ["## Version\n", _directive("py:data", "__version__", version, {"type": "str"}, 3)]
    return {"api.md": "\n".join(parts)}


def _documented(name: str, value: Any) -> str:
    doc = _doc(value)
    if inspect.isfunction(value):
        return _directive("py:function", f"{name}{_signature(value)}", doc, {}, 3)
    if issubclass(value, Exception):
        doc += f"\n\nA kind of {{py:class}}`{value.__base__.__name__}`." if name != "TitoAuditError" else ""
        return _directive("py:exception", name, doc, {}, 3)
    members = "\n".join(_members(value))
    shown = name if dataclasses.is_dataclass(value) or issubclass(value, enum.Enum) else f"{name}{_init(value)}"
    return _directive("py:class", shown, f"{doc}\n\n{members}", {}, 4)


def _members(value: type) -> Iterator[str]:
    """Fields and values in the order of the source, then properties and methods."""
    said = _said_below(value)
    if issubclass(value, enum.Enum):
        for member in value:
            yield _directive(
                "py:attribute", member.name, said.get(member.name, ""), {"value": repr(member.value)}, 3
            )
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            facts = {"type": _annotation(field.type)}
            default = _default(field)
            facts |= {"value": default} if default else {}
            yield _directive("py:attribute", field.name, said.get(field.name, ""), facts, 3)
    for name, member in _own(value):
        if name.startswith("_") or (dataclasses.is_dataclass(value) and name in said and not callable(member)):
            continue
        if isinstance(member, property):
            facts = {"type": _annotation(inspect.signature(member.fget).return_annotation)}
            yield _directive("py:property", name, _doc(member), facts, 3)
        elif isinstance(member, staticmethod | classmethod):
            yield _directive("py:method", f"{name}{_signature(member.__func__)}", _doc(member.__func__), {}, 3)
        elif inspect.isfunction(member) and _doc(member):
            yield _directive("py:method", f"{name}{_signature(member, bound=True)}", _doc(member), {}, 3)


def _own(value: type) -> Iterator[tuple[str, Any]]:
    """The members of a class, then those of the classes of this package that it extends, each once."""
    seen: set[str] = set()
    for one in value.__mro__:
        if one.__module__.partition(".")[0] == "tito_audit":
            yield from ((name, member) for name, member in vars(one).items() if name not in seen)
            seen |= vars(one).keys()


def _doc(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return str(field.default) if isinstance(field.default, enum.Enum) else repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return repr(made) if isinstance(made, list | dict | tuple | set) else f"{type(made).__name__}()"
    return ""


def _init(value: type) -> str:
    return _signature(value.__init__, bound=True).partition(" -> ")[0]  # type: ignore[misc]


def _signature(function: Any, *, bound: bool = False) -> str:
    """The signature as the source has it: annotations are text."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    text = str(signature.replace(parameters=parameters))
    return re.sub(r"'([^']*)'", r"\1", text) if "'" in text else text


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def _said_below(value: type) -> dict[str, str]:
    """The text that stands below each field or member in the class's source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    said: dict[str, str] = {}
    name = ""
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            said[name] = ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            said[name] = ""
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            said[name] = inspect.cleandoc(str(node.value.value))
        else:
            name = ""
    return said


def _directive(kind: str, name: str, content: str, facts: dict[str, str], colons: int) -> str:
    fence = ":" * colons
    options = [f":{key}: {said}" for key, said in facts.items()]
    return "\n".join([f"{fence}{{{kind}}} {name}", *options, "", content.strip(), fence, ""])
