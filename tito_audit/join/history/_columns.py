"""The record of each call: columns of hashes and of prefix numbers."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.join.history._trace import Trace, Tracer
from tito_audit.join.history._trie import Hashes, Numbers, Trie


class Columns:
    """What is kept of each call; columns about messages stay empty if no call has any."""

    def __init__(self) -> None:
        self.trie = Trie()
        self.keys = Numbers()
        self.tracer = Tracer()
        self.has = array("B")
        self.length = array("I")
        """The length of its prompt: in ids, else in bytes of text, else in messages."""
        self.prompt = array("Q")
        """The hash of its prompt, or of its messages if it has no other prompt."""
        self.body = array("I")
        """The prefix up to the last turn end of its prompt; 0 if there is none."""
        self.seen = array("I")
        """The prefix that is its prompt and completion; 0 if it has no completion."""
        self.key = array("I")
        """The number of its key and context; 0 if it has no key."""
        self.heard = array("I")
        """The prefix up to the last answer among its messages; 0 if there is none."""
        self.told = array("I")
        """The prefix that is its messages and its answer; 0 if it has none."""
        self.exact = array("I")
        """What distinguishes its answer from others with the same content."""
        self.exact_before = array("I")
        """The same for the last answer among its messages."""

    def __len__(self) -> int:
        return len(self.has)

    @property
    def nbytes(self) -> int:
        """Bytes kept for all calls."""
        columns: list[array[int]] = [self.has, self.length, self.prompt, self.body, self.seen, self.key]
        columns += [self.heard, self.told, self.exact, self.exact_before]
        return self.trie.nbytes + self.keys.nbytes + sum(len(each) * each.itemsize for each in columns)

    def add(self, call: Trace) -> int:
        """Add a call; returns its number."""
        body = self.trie.add_path(map(int, call.turns))
        seen = self.trie.add(call.seen, body) if call.seen else 0
        if call.messages is not None:
            trace = call.messages
            heard = self.trie.add_path(trace.answers)
            self._no_messages()
            self.heard.append(heard)
            self.told.append(self.trie.add(trace.told, heard) if trace.told else 0)
            self.exact.append(trace.exact)
            self.exact_before.append(trace.exact_before)
        elif self.told:
            self._no_messages()
        self.has.append(call.has)
        self.length.append(call.length)
        self.prompt.append(call.prompt)
        self.body.append(body)
        self.seen.append(seen)
        self.key.append(self.keys.add(call.key) if call.key else 0)
        return len(self) - 1

    def _no_messages(self) -> None:
        """Record that the calls before the one being added had no messages."""
        missing = bytes(4 * (len(self) - len(self.told)))
        for column in (self.heard, self.told, self.exact, self.exact_before):
            column.frombytes(missing)

    # What was kept, as arrays; the columns must not grow while one is in use.

    def array(self, name: str) -> NDArray[Any]:
        """`[N]` A column; zeros if no call has messages."""
        column = getattr(self, name)
        values = np.frombuffer(column, np.dtype(column.typecode))
        missing = len(self) - len(values)
        if not len(values):
            return np.zeros(missing, values.dtype)
        return np.concatenate((values, np.zeros(missing, values.dtype))) if missing else values

    def hashes(self, prefixes: NDArray[np.uint32]) -> Hashes:
        """`[N]` The hashes of prefixes."""
        hashes: Hashes = np.frombuffer(self.trie.numbers.hashes, np.uint64)
        return hashes[prefixes]
