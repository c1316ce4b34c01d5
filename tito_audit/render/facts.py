"""What static analysis of a chat template shows, now or in an earlier run.

Analyzing a template takes longer than rendering ten rows with it. So the facts are kept in the tokenizer's store,
under a hash of everything they depend on: the template, its limits, the code of this room, the versions of Python
and jinja2.
"""

from __future__ import annotations

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
_SCALAR_TYPES = frozenset((object, str, bool, int, type(None)))
"""Types whose equal values are rendered alike."""
TextConditions = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]
"""What a template tests texts for: texts that it compares whole, markers that it searches for, and lengths; see
`render/fast/text_conditions.py`."""
_CONDITION_TYPES = (str, str, int)
_MAX_PROMPTS = 256
_MAX_STORED = 16
_MAX_STORED_LENGTH = 4_096
"""How many generation prompts a run remembers, how many of them are stored, and how long these may be."""


class Facts(NamedTuple):
    """What static analysis of a template shows."""

    minijinja_safe: bool
    """Whether minijinja may run the template."""
    longest_constant: int
    """The length of the longest text in the template itself."""
    joins_values: bool
    """Whether it joins values into texts before it writes them."""
    has_documents: bool
    """Whether it reads `documents`."""
    generation_prompt_variables: tuple[str, ...] | None
    """The variables that its generation prompt depends on; None if it may depend on the messages."""
    text_conditions: TextConditions | None = None
    """What it tests texts for; None if it may depend on texts in another way."""


def read_facts(tree: nodes.Template) -> tuple[Facts, nodes.Template | None]:
    """The facts of a parsed template, and the part that writes its generation prompt if messages do not matter."""
    from jinja2 import nodes

    from tito_audit.render.fast import static_check
    from tito_audit.render.fast.text_conditions import find_generation_prompt, find_text_conditions

    opener = find_generation_prompt(tree)
    safe = static_check.is_proven_safe(tree)
    searched = find_text_conditions(tree) if safe else None
    facts = Facts(
        minijinja_safe=safe,
        longest_constant=static_check.longest_constant(tree),
        joins_values=static_check.joins_values(tree),
        has_documents=any(name.name == "documents" for name in tree.find_all(nodes.Name)),
        generation_prompt_variables=opener[1] if opener is not None else None,
        text_conditions=searched,
    )
    return facts, opener[0] if opener is not None else None


class StoredFacts:
    """The facts and generation prompts of one template under its limits, backed by the store."""

    def __init__(self, source: str, limits: Sequence[float], store: StoredTokenizer | None) -> None:
        self._store = store
        self._name: str | None = None
        """Of the note with the facts; None if the code that they depend on cannot be read."""
        note: Mapping[str, Any] | None = None
        code = _hash_code() if store is not None else None
        if store is not None and code is not None:
            key = sha256(f"{code} {list(limits)}\n".encode())
            key.update(source.encode("utf-8", "surrogatepass"))
            self._name = f"template {key.hexdigest()}"
            note = store.note(self._name)
        self.facts = _parse_facts(note) if note is not None else None
        """None if not known yet. Facts are stored only for templates that compile."""
        openers = note.get("openers") if note is not None and self.facts is not None else None
        self._generation_prompts: dict[str, str] = {}
        if isinstance(openers, dict):
            self._generation_prompts = {key: text for key, text in openers.items() if isinstance(text, str)}
        self._stored_prompts = dict(self._generation_prompts)

    def add_facts(self, facts: Facts, *, lasting: bool) -> None:
        """Keep the facts of a template that compiles; store them if it will compile in every run (`lasting`)."""
        self.facts = facts
        if lasting:
            self._save()

    def find_generation_prompt(self, variables: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """The generation prompt for these variables, None if unknown, with its key for `add_generation_prompt`."""
        names = self.facts.generation_prompt_variables if self.facts is not None else None
        values = [variables.get(name, _ABSENT) for name in names or ()]
        if not _SCALAR_TYPES.issuperset(map(type, values)):
            return None, None
        key = repr([[] if value is _ABSENT else value for value in values])
        return key, self._generation_prompts.get(key)

    def add_generation_prompt(self, key: str, text: str, *, lasting: bool) -> None:
        """Remember a generation prompt; store it if it is the same in every run (`lasting`)."""
        if len(self._generation_prompts) >= _MAX_PROMPTS:
            return
        self._generation_prompts[key] = text
        if lasting and len(self._stored_prompts) < _MAX_STORED and len(key) + len(text) <= _MAX_STORED_LENGTH:
            self._stored_prompts[key] = text
            self._save()

    def _save(self) -> None:
        if self._store is not None and self._name is not None and self.facts is not None:
            self._store.add_note(self._name, {**self.facts._asdict(), "openers": self._stored_prompts})


def _parse_facts(note: Mapping[str, Any]) -> Facts | None:
    """The facts in a stored note; None if it is not valid."""
    minijinja_safe, longest, joins, documents, names, conditions = (note.get(name) for name in Facts._fields)
    if type(minijinja_safe) is not bool or type(longest) is not int or type(joins) is not bool:
        return None
    if type(documents) is not bool or longest < 1:
        return None
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return None
    variables = None if names is None else tuple(names)
    if conditions is None:
        return Facts(minijinja_safe, longest, joins, documents, variables)
    lists = conditions if isinstance(conditions, list) else []
    if len(lists) != len(_CONDITION_TYPES) or not all(isinstance(value, list) for value in lists):
        return None
    if any(type(item) is not kind for value, kind in zip(lists, _CONDITION_TYPES, strict=True) for item in value):
        return None
    whole, inside, sizes = map(tuple, lists)
    return Facts(minijinja_safe, longest, joins, documents, variables, (whole, inside, sizes))


@cache
def _hash_code() -> str | None:
    """A hash of what analyzes and compiles templates: this room, jinja2, Python; None if it cannot be read."""
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
