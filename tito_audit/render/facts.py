"""What reading a chat template shows about it, now or in an earlier run.

Reading a template takes longer than rendering ten rows with it. So the result is kept in the tokenizer's store,
under a hash of everything it depends on: the template, its limits, the code of this room, the versions of Python
and jinja2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tito_audit.tokens.cache import StoredTokenizer

if TYPE_CHECKING:
    from jinja2 import nodes

_ABSENT = object()
_PLAIN = frozenset((object, str, bool, int, type(None)))
"""Types whose equal values are written the same way."""
LookedFor = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]
"""What a template looks for in texts: whole texts, markers inside texts, and numbers; see
`render/fast/looked_for.py`."""
_SOUGHT = (str, str, int)
_MOST_OPENERS = 256
_MOST_KEPT = 16
_LONGEST_KEPT = 4_096
"""How many generation prompts a run remembers, how many of them are stored, and how long stored ones may be."""


class Facts(NamedTuple):
    """What reading a template shows, without running it."""

    minijinja_safe: bool
    """Whether minijinja may run it."""
    longest_constant: int
    """The length of the longest text in the template itself."""
    joins_values: bool
    """Whether it joins values into texts before it writes them."""
    has_documents: bool
    """Whether it reads `documents`."""
    opener_names: tuple[str, ...] | None
    """The variables that its generation prompt depends on; None if it may depend on the messages too."""
    looked_for: LookedFor | None = None
    """What it looks for in texts; None if it may decide by something else."""


def read_facts(tree: nodes.Template) -> tuple[Facts, nodes.Template | None]:
    """The facts of a parsed template, and the part that writes the generation prompt after any messages."""
    from jinja2 import nodes

    from tito_audit.render.fast import static_check
    from tito_audit.render.fast.looked_for import looked_for, opener_of

    opener = opener_of(tree)
    safe = static_check.is_proven_safe(tree)
    searched = looked_for(tree) if safe else None
    facts = Facts(
        minijinja_safe=safe,
        longest_constant=static_check.longest_constant(tree),
        joins_values=static_check.joins_values(tree),
        has_documents=any(name.name == "documents" for name in tree.find_all(nodes.Name)),
        opener_names=opener[1] if opener is not None else None,
        looked_for=searched,
    )
    return facts, opener[0] if opener is not None else None


class Known:
    """What is known about one template under its limits."""

    def __init__(self, source: str, limits: Sequence[float], store: StoredTokenizer | None) -> None:
        self._store = store
        self._name = _name(source, limits) if store is not None else None
        note = store.note(self._name) if store is not None and self._name is not None else None
        self.facts = _facts(note) if note is not None else None
        """None if nothing is stored; otherwise the template is also known to compile."""
        openers = note.get("openers") if note is not None and self.facts is not None else None
        self._openers: dict[str, str] = {}
        if isinstance(openers, dict):
            self._openers = {key: text for key, text in openers.items() if isinstance(text, str)}
        self._kept = dict(self._openers)

    def note(self, facts: Facts, *, lasting: bool) -> None:
        """Store the facts of a template that compiles; `lasting`: it will compile in every run."""
        self.facts = facts
        if lasting:
            self._keep()

    def opener(self, variables: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """The key of the values that the generation prompt depends on, and that prompt; None if unknown."""
        names = self.facts.opener_names if self.facts is not None else None
        values = [variables.get(name, _ABSENT) for name in names or ()]
        if not _PLAIN.issuperset(map(type, values)):
            return None, None
        key = json.dumps([[] if value is _ABSENT else value for value in values])
        return key, self._openers.get(key)

    def add_opener(self, key: str, text: str, *, lasting: bool) -> None:
        """Remember a generation prompt; `lasting`: it is the same in every run."""
        if len(self._openers) >= _MOST_OPENERS:
            return
        self._openers[key] = text
        if lasting and len(self._kept) < _MOST_KEPT and len(key) + len(text) <= _LONGEST_KEPT:
            self._kept[key] = text
            self._keep()

    def _keep(self) -> None:
        if self._store is not None and self._name is not None and self.facts is not None:
            self._store.add_note(self._name, {**self.facts._asdict(), "openers": self._kept})


def _facts(note: Mapping[str, Any]) -> Facts | None:
    """The facts in a note; None if it holds none."""
    minijinja_safe, longest, joins, documents, names, sought = (note.get(name) for name in Facts._fields)
    if type(minijinja_safe) is not bool or type(longest) is not int or type(joins) is not bool:
        return None
    if type(documents) is not bool or longest < 1:
        return None
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return None
    opener_names = None if names is None else tuple(names)
    if sought is None:
        return Facts(minijinja_safe, longest, joins, documents, opener_names)
    lists = sought if isinstance(sought, list) else []
    if len(lists) != len(_SOUGHT) or not all(isinstance(value, list) for value in lists):
        return None
    if any(type(item) is not kind for value, kind in zip(lists, _SOUGHT, strict=True) for item in value):
        return None
    whole, inside, sizes = map(tuple, lists)
    return Facts(minijinja_safe, longest, joins, documents, opener_names, (whole, inside, sizes))


def _name(source: str, limits: Sequence[float]) -> str | None:
    """The name under which the facts of a template are stored; None if what they depend on is unknown."""
    around = _around()
    if around is None:
        return None
    key = sha256(f"{around} {list(limits)}\n".encode())
    key.update(source.encode("utf-8", "surrogatepass"))
    return f"template {key.hexdigest()}"


@cache
def _around() -> str | None:
    """A hash of what reads and compiles templates: this room's code, jinja2, Python; None if it cannot be read."""
    spec = find_spec("jinja2")
    if spec is None or spec.origin is None:
        return None
    key = sha256(sys.version.encode())
    try:
        for file in sorted(Path(__file__).parent.rglob("*.py")):
            key.update(file.read_bytes())
        main = Path(spec.origin)
        key.update(main.read_bytes())  # contains the version
        with os.scandir(main.parent) as entries:
            files = [(entry.name, entry.stat()) for entry in entries if entry.name.endswith(".py")]
    except OSError:
        return None
    for name, there in sorted(files, key=lambda file: file[0]):
        key.update(f"{name} {there.st_size} {there.st_mtime_ns}\n".encode())
    return key.hexdigest()
