"""Encoders: texts to ids, each text as a whole and nothing remembered.

`tokenizers` is the reference: what it says is what a report may say. `fastokens` is many times faster and
must give the same ids; it is imported when one is built. It reads the reference's own definition rather
than a file, so tokens that were added after loading are in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tito_audit.errors import TokenizerError
from tito_audit.record.arrays import Ids, empty_ids

if TYPE_CHECKING:
    import tokenizers


class Encoder(Protocol):
    """What turns texts into ids. It adds no special tokens; those that a text spells are control tokens."""

    @property
    def name(self) -> str:
        """The library, as a report names it."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order, `[N]` int32, not to be written to."""


class ReferenceEncoder:
    """`tokenizers`, whose word is final."""

    name = "tokenizers"

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order; the library may use threads for several."""
        encoded = self._backend.encode_batch_fast([well_formed(text) for text in texts], add_special_tokens=False)
        return [_frozen(encoding.ids) for encoding in encoded]

    def encode_alone(self, texts: Sequence[str]) -> list[Ids]:
        """The same ids without the library's threads, which must not have run in a process that forks."""
        return [_frozen(self._backend.encode(well_formed(text), add_special_tokens=False).ids) for text in texts]


class FastEncoder:
    """`fastokens`, built from a tokenizer of the reference; TokenizerError says why it cannot be.

    It keeps a pool of threads for itself from its first encoding on, one for each processor that it may
    use then. A child of a process that has such a pool still encodes correctly, at half the speed, so
    the first encoding belongs `on_one_processor`.
    """

    name = "fastokens"

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        dropout = getattr(backend.model, "dropout", None)
        if dropout:
            raise TokenizerError(f"its merges are left out at random (dropout {dropout})")
        if sys.byteorder != "little":
            raise TokenizerError("fastokens writes ids in an order of bytes that is not this machine's")
        try:
            import fastokens
        except ImportError as error:
            raise TokenizerError(f"fastokens is not installed ({error})") from None
        try:
            self._tokenizer = fastokens.Tokenizer.from_json_str(backend.to_str())
        except Exception as error:  # ValueError where it refuses; what custom parts raise is any exception
            raise TokenizerError(f"fastokens refuses it ({_first_line(error)})") from None

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order."""
        try:
            data, ends = self._tokenizer.encode_batch_flat(list(texts))
        except UnicodeEncodeError:
            data, ends = self._tokenizer.encode_batch_flat([well_formed(text) for text in texts])
        offsets = (np.frombuffer(ends, np.uint64).astype(np.int64) * 4).tolist()
        # Each text gets bytes of its own: a slice of the whole would keep the whole in memory.
        return [np.frombuffer(data[start:end], np.int32) for start, end in pairwise(offsets)]


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Keep this thread on one processor for a while, where the system knows how."""
    before: set[int] | None = None
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        if before:
            with suppress(OSError):
                os.sched_setaffinity(0, before)


def well_formed(text: str) -> str:
    """The text as UTF-8 can write it: a surrogate pair as its character, half of one as U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _frozen(values: list[int]) -> Ids:
    ids: Ids = np.array(values, np.int32) if values else empty_ids()
    ids.flags.writeable = False
    return ids


def _first_line(error: Exception) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
