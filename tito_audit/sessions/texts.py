"""Text prompts: which answer a text or a list of ids continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from tito_audit.chains.histories import Key, Prefixes, key_of, running
from tito_audit.record.arrays import Ids, as_ids
from tito_audit.sessions.index import text_bytes
from tito_audit.sessions.model import Branch, Fork, ForkReason, Node, Prompt, Proof
from tito_audit.sessions.next_prompt import Writer

TextPrompt = str | Sequence[int] | Ids
"""What `/v1/completions` takes as a prompt."""
_TEXT, _IDS = b"t", b"i"


def prompt_data(prompt: TextPrompt) -> bytes:
    """A text prompt as bytes, for look-ups."""
    if isinstance(prompt, str):
        return _TEXT + text_bytes(prompt)
    return _IDS + as_ids(prompt, "prompt").tobytes()


@dataclass(frozen=True, slots=True)
class _Known:
    """An answer that prompts may start with."""

    node: Node
    kept: int


class Texts:
    """The answers of a session by their text and by their ids."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._known: Prefixes[_Known] = Prefixes()
        self._states: dict[int, tuple[Node, blake2b]] = {}
        """The running digest of each answer held, up to its last token: by it the next one is not read from its
        beginning."""

    def add(self, node: Node) -> list[Key]:
        """Hold an answer; the keys it was added under."""
        keys = list(self._keys(node))
        for key, length in keys:
            self._known.add(key, _Known(node, length))
        return [key for key, _ in keys]

    def _keys(self, node: Node) -> Iterator[tuple[Key, int]]:
        """The keys of what a prompt starts with that goes on from an answer, and how many ids it then keeps."""
        length, last = node.prompt.length + len(node.output_ids), node.output_ids[-1:]
        state = self._prompt_state(node.prompt)
        state.update(node.output_ids[:-1].tobytes())
        self._states[id(node)] = node, state
        yield _ids_key(length, _with(state, last)), length
        if self._writer.stop_text(node) is not None:
            yield _ids_key(length - 1, state), length - 1
        if node.prompt.text is not None:
            yield key_of(_TEXT + text_bytes(node.prompt.text + str(node.answer.get("text") or ""))), length

    def _prompt_state(self, prompt: Prompt) -> blake2b:
        """The running digest of a prompt's ids, which goes on from the answer that it continues."""
        parent = prompt.parent
        state = self._states.get(id(parent)) if parent is not None else None
        if parent is None or state is None:
            return running(_IDS + prompt.ids.tobytes())
        last = parent.output_ids[-1:]
        left_out = parent.prompt.length + len(parent.output_ids) - prompt.kept
        if left_out == 0:
            return _with(_with(state[1], last), prompt.new_ids)
        if left_out == len(last):
            return _with(state[1], prompt.new_ids)
        return running(_IDS + prompt.ids.tobytes())

    def prompt(self, prompt: TextPrompt) -> Prompt | None:
        """The prompt that continues the longest matching answer; None if there is none."""
        for _, answers in self._known.matches(prompt_data(prompt)):
            latest = answers[-1]
            same = sum(not np.array_equal(answer.node.seen_ids, latest.node.seen_ids) for answer in answers)
            if isinstance(prompt, str):
                return self._of_text(latest.node, prompt, same)
            ids = as_ids(prompt, "prompt")
            node, new = latest.node, ids[latest.kept :].copy()
            whole = latest.kept == node.prompt.length + len(node.output_ids)
            return Prompt(
                Branch.CONTINUES if whole else Branch.FORK,
                new,
                parent=node,
                kept=latest.kept,
                added=self._writer.text(new),
                proof=Proof.SAME_IDS,
                fork=None if whole else _stop_left_out(1),
                alike=same,
            )
        return None

    def whole(self, prompt: TextPrompt, branch: Branch, fork: Fork | None) -> Prompt:
        """The prompt for a text that continues nothing."""
        if isinstance(prompt, str):
            return Prompt(branch, self._writer.encode(prompt), added=prompt, fork=fork, text=prompt)
        ids = as_ids(prompt, "prompt")
        return Prompt(branch, ids.copy(), added=self._writer.text(ids), fork=fork)

    def _of_text(self, node: Node, text: str, alike: int) -> Prompt:
        assert node.prompt.text is not None
        answer = text[len(node.prompt.text) :]
        forms = self._writer.text(node.output_ids), self._writer.data(node.output_ids).decode("utf-8", "replace")
        form_sent = next((form for form in forms if answer.startswith(form)), None)
        if form_sent is not None:
            count, rest = len(node.output_ids), answer[len(form_sent) :]
        else:
            count = self._writer.said_in(node, text_bytes(answer))
            data = self._writer.data(node.output_ids[:count])
            rest = text_bytes(answer)[len(data) :].decode("utf-8", "surrogatepass")
        return self._going_on(node, count, rest, text, alike)

    def _going_on(self, node: Node, count: int, rest: str, text: str, alike: int) -> Prompt:
        """The prompt that keeps the first `kept` ids of an answer."""
        ids = node.output_ids[:count] if count else node.prompt.new_ids
        new = self._writer.encode(rest, int(ids[-1]) if len(ids) else None)
        whole = count == len(node.output_ids)
        return Prompt(
            Branch.CONTINUES if whole else Branch.FORK,
            new,
            parent=node,
            kept=node.prompt.length + count,
            added=rest,
            proof=Proof.SAME_IDS,
            fork=None if whole else _stop_left_out(len(node.output_ids) - count),
            alike=alike,
            text=text,
        )


def _with(state: blake2b, ids: Ids) -> blake2b:
    """The running digest, updated with these ids."""
    after = state.copy()
    after.update(ids.tobytes())
    return after


def _ids_key(length: int, state: blake2b) -> Key:
    """The key of `length` ids."""
    return len(_IDS) + 4 * length, state.digest()


def _stop_left_out(count: int) -> Fork:
    what = "last token" if count == 1 else f"last {count} tokens"
    return Fork(ForkReason.STOP_LEFT_OUT, f"the prompt continues an answer but leaves out its {what}")
