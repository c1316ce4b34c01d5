"""A tokenizer's definition in the notation that loads fastest.

Loading a tokenizer is mostly reading its JSON. Written differently, the same definition loads in two thirds of the
time: without white space, each merge as one text (`"a b"`) instead of two, the vocabulary sorted. The library
itself confirms that it is the same: what it loads from either notation, it must write identically.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import tokenizers

_COMMENT = "#version"
"""A merge written as one text with this beginning is read as a comment."""
_CHANGING = ("add_", "enable_", "train")
"""Prefixes of the methods that change one of the library's tokenizers."""


class LazyBackend:
    """A tokenizer of the library, loaded on first use."""

    changed = False
    """Whether it may have been changed since then."""

    def __init__(self, load: Callable[[], tokenizers.Tokenizer]) -> None:
        self._load = load

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_CHANGING):
            self.changed = True
        return getattr(self._loaded, name)

    @property
    def is_loaded(self) -> bool:
        """Whether it was used."""
        return "_loaded" in vars(self)

    @cached_property
    def _loaded(self) -> tokenizers.Tokenizer:
        return self._load()


def definition_of(backend: object) -> bytes | None:
    """The definition of a tokenizer as loaded, to load it from next time; b"" if none loads faster, None if it is
    not known now."""
    if not isinstance(backend, LazyBackend) or not backend.is_loaded or backend.changed:
        return None
    from tokenizers import Tokenizer

    try:
        own = backend.to_str()
        found = compact(own)
        return found if found is not None and Tokenizer.from_buffer(found).to_str() == own else b""
    except Exception:  # tokenizers raises plain Exception, also for parts written in Python
        return b""


def compact(definition: str) -> bytes | None:
    """The same definition in the notation that loads fastest; None unless its model is BPE."""
    whole = orjson.loads(definition)
    model = whole["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        return None
    merges = _joined(model["merges"])
    if merges is not None:
        model["merges"] = merges
    vocabulary = model["vocab"]
    model["vocab"] = {token: vocabulary[token] for token in sorted(vocabulary)}
    return orjson.dumps(whole)


def _joined(merges: list[Any]) -> list[str] | None:
    """Each pair as one text; None if they are not pairs, or if a text would not show where its pair divides."""
    if not merges or set(map(type, merges)) != {list} or set(map(len, merges)) != {2}:
        return None
    texts = list(map(" ".join, merges))
    together = "".join(texts)
    if together.count(" ") != len(texts) or _COMMENT in together:
        return None
    return texts
