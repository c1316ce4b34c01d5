"""One session: a forest of answers, and the prompt of each call that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.chains.histories import Key, Prefixes, key_of
from tito_audit.provider import GenerationResult
from tito_audit.record.arrays import Ids, as_floats, as_ids, empty_ids
from tito_audit.record.message import Message, as_message
from tito_audit.sessions.index import (
    AnsweredHistories,
    Beginnings,
    Fit,
    Index,
    Match,
    StoredAnswer,
    TurnEnd,
    departed,
    history_keys,
    left_memory,
    message_keys,
    new_conversation,
    text_bytes,
)
from tito_audit.sessions.model import Branch, ChatCall, Draft, Fork, ForkReason, Node, Prompt, Proof, Written
from tito_audit.sessions.next_prompt import PromptWriter

TextPrompt = str | Sequence[int] | Ids
"""What `/v1/completions` takes as a prompt."""
_TEXT, _IDS = b"t", b"i"


def prompt_data(prompt: TextPrompt) -> bytes:
    """A text prompt as bytes, for look-ups."""
    if isinstance(prompt, str):
        return _TEXT + text_bytes(prompt)
    return _IDS + as_ids(prompt, "prompt").tobytes()


class Texts:
    """The answers of a session by their text and by their ids."""

    def __init__(self, writer: PromptWriter) -> None:
        self._writer = writer
        self._answers: Prefixes[tuple[Node, int]] = Prefixes()
        """Answers that prompts may start with, and how many ids such a prompt keeps."""

    def add(self, node: Node) -> list[Key]:
        """Hold an answer; the keys it was added under."""
        # What a prompt starts with that goes on from the answer, and how many ids it then keeps.
        seen, length = node.seen_ids, node.length
        keys = [(key_of(_IDS + seen.tobytes()), length)]
        if self._writer.stop_text(node) is not None:
            keys.append((key_of(_IDS + seen[:-1].tobytes()), length - 1))
        if node.prompt.text is not None:
            text = node.prompt.text + str(node.answer.get("text") or "")
            keys.append((key_of(_TEXT + text_bytes(text)), length))
        for key, count in keys:
            self._answers.add(key, (node, count))
        return [key for key, _ in keys]

    def prompt(self, prompt: TextPrompt) -> Prompt | None:
        """The prompt that continues the longest matching answer; None if there is none."""
        answers = next((answers for _, answers in self._answers.matches(prompt_data(prompt))), None)
        if answers is None:
            return None
        node, count = answers[-1]
        if isinstance(prompt, str):
            assert node.prompt.text is not None
            sampled, rest = self._writer.parted(node, prompt[len(node.prompt.text) :])
            count = node.prompt.length + sampled
            ids = node.output_ids[:sampled] if sampled else node.prompt.new_ids
            new = self._writer.encode(rest, int(ids[-1]) if len(ids) else None)
        else:
            new = as_ids(prompt, "prompt")[count:].copy()
            rest = self._writer.text(new)
        left_out = node.length - count
        what = "last token" if left_out == 1 else f"last {left_out} tokens"
        fork = Fork(ForkReason.STOP_LEFT_OUT, f"the prompt continues an answer but leaves out its {what}")
        return Prompt(
            Branch.FORK if left_out else Branch.CONTINUES,
            new,
            parent=node,
            kept=count,
            added=rest,
            proof=Proof.SAME_IDS,
            fork=fork if left_out else None,
            alike=sum(not np.array_equal(other.seen_ids, node.seen_ids) for other, _ in answers),
            text=prompt if isinstance(prompt, str) else None,
        )

    def whole(self, prompt: TextPrompt, branch: Branch, fork: Fork | None) -> Prompt:
        """The prompt for a text that continues nothing."""
        if isinstance(prompt, str):
            return Prompt(branch, self._writer.encode(prompt), added=prompt, fork=fork, text=prompt)
        ids = as_ids(prompt, "prompt")
        return Prompt(branch, ids.copy(), added=self._writer.text(ids), fork=fork)


class Session:
    """One conversation, or several of one client: a forest of answers."""

    def __init__(
        self, session_id: str, writer: PromptWriter, index: Index, max_nodes: int, *, left_memory: bool = False
    ) -> None:
        self.id = session_id
        self.used = 0.0
        """When it was last used, as the caller stated."""
        self._undated = writer
        self._index = index
        self._max_nodes = max_nodes
        self._left_memory = left_memory
        self._gone = False
        self._clear()

    def prompt(self, call: ChatCall) -> Prompt:
        """Stored ids and new text, proved, or a start or a fork with its reason. Stores nothing, so calls may run
        concurrently. RenderError as the template raises.
        """
        return self.encoded(self.draft(call))

    def encoded(self, draft: Draft) -> Prompt:
        """The prompt of a draft."""
        if draft.encoded:
            return draft.prompt
        return replace(draft.prompt, new_ids=self._writer.encode(draft.prompt.added, draft.after))

    def draft(self, call: ChatCall) -> Draft:
        """The same before its new text is encoded: the segments of a long one can be encoded elsewhere first."""
        keys, places = self._index.keys(call.messages)
        matches = self._histories.matches(call.messages, places)
        first = next(matches, None)
        if first is None:
            messages = call.messages
            text_written = Beginnings(self._writer.write(messages, call))
            departure = self._histories.departure(messages, places)
            if self._is_new:
                fork = None
            elif self._left_memory and any(message.sampled for message in messages):
                fork = left_memory()
            elif departure is not None and (
                departure.reasoning
                or self._histories.answered(keys)
                or (messages[departure.at].sampled and departure.answer.is_answer(departure.at))
            ):
                fork = departed(messages, keys, departure)
            else:
                fork = new_conversation(messages)
            return self._whole(text_written.text, _written(messages, messages, keys, text_written), fork)
        if first.depth == len(call.messages) and not call.add_generation_prompt:
            return Draft(self._resumed(first), encoded=True)
        rest = call.messages[first.depth :]
        history, sent = first.answer.history + rest, first.answer.sent + rest
        text_written = Beginnings(self._writer.write(history, call))
        if first.answer.node.prompt.written is not None:  # asked for soon; so the text is read once
            text_written.digest(first.answer.node.prompt.written.length)
        written = _written(history, sent, (*first.answer.keys, *keys[first.depth :]), text_written)
        fork = self._departed(call, keys, places, first)
        return self._going_on(call, first, matches, written, text_written, fork)

    def fit(self, messages: Sequence[Message], place: bytes, depth: int) -> Fit | None:
        """How well an answer of this session at this place of a history fits; None if none does."""
        return self._histories.fit(messages, place, depth)

    def text_prompt(self, prompt: TextPrompt) -> Prompt:
        """For `/v1/completions`: continues the answer whose text or ids the prompt starts with."""
        known_prompt = self._texts.prompt(prompt) or self._starts.get(prompt_data(prompt))
        if known_prompt is not None:
            return known_prompt
        if self._is_new:
            return self._texts.whole(prompt, Branch.START, None)
        return self._texts.whole(prompt, Branch.FORK, left_memory() if self._left_memory else new_conversation(()))

    def commit(
        self,
        call_id: str,
        prompt: Prompt,
        call: ChatCall | None,
        results: Sequence[GenerationResult],
        answers: Sequence[Mapping[str, Any]],
    ) -> tuple[Node, ...]:
        """Store the answers to a prompt: one node for each result and the message that the client gets for it
        (`{"text": …}` and no call for a text prompt).
        """
        nodes = []
        for choice, (result, answer) in enumerate(zip(results, answers, strict=True)):
            written, own = prompt.written, ChatCall(())
            if call is None or written is None:
                message = as_message({"role": "assistant", "content": answer.get("text")}, "the answer")
            else:  # the call shares the messages that the session already holds
                own, message = replace(call, messages=written.sent), as_message(dict(answer), "the answer")
                message = _merged(written.messages[-1], message) if _is_prefilled(own) else message
            output_ids = as_ids(result.output_ids, "output_ids")
            logprobs = as_floats(result.logprobs, "logprobs")
            node = Node(
                call_id,
                choice,
                prompt,
                own,
                output_ids,
                logprobs,
                answer,
                message,
                result.finish_reason,
                result.stop_reason,
                result.weight_version,
                result.weight_spans,
            )
            nodes.append(node)
            if not self._gone:
                self._keep(node)
        if not self._gone and prompt.branch is Branch.START:
            text = prompt.text if prompt.text is not None else prompt.new_ids
            self._starts[prompt.written.digest if prompt.written is not None else prompt_data(text)] = prompt
        if len(self._nodes) > self._max_nodes:
            # The older half of the answers leaves.
            later, starts = self._nodes[len(self._nodes) // 2 :], dict(self._starts)
            self.reset()
            self._left_memory = True
            self._starts.update(starts)
            for node in later:
                self._keep(node)
        return tuple(nodes)

    def reset(self) -> None:
        """Forget all answers; the session stays."""
        self._index.forget(self.id, self._indexed, self._indexed_texts)
        self._index.bytes -= self._bytes
        self._left_memory = False
        self._clear()

    def leave(self) -> None:
        """Forget all answers, and those of calls still running."""
        self.reset()
        self._gone = True

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All answers in the order in which they were committed."""
        return tuple(self._nodes)

    @property
    def wraps_texts(self) -> bool:
        """Whether the template is given texts as parts."""
        return self._writer.wraps_texts

    @property
    def size(self) -> int:
        """The bytes that it holds in memory, as an estimate."""
        return self._bytes

    @property
    def _is_new(self) -> bool:
        return not self._nodes and not self._left_memory

    def _clear(self) -> None:
        self._writer = self._undated.dated()
        self._histories = AnsweredHistories()
        self._texts = Texts(self._writer)
        self._nodes: list[Node] = []
        self._starts: dict[bytes, Prompt] = {}
        self._indexed: list[bytes] = []
        self._indexed_texts: list[Key] = []
        self._bytes = 0

    def _going_on(
        self,
        call: ChatCall,
        first: Match,
        earlier: Iterable[Match],
        written: Written,
        text_written: Beginnings,
        fork: Fork | None,
    ) -> Draft:
        """The prompt of a history that holds answers: the last one's ids where that is proved, else those of the
        last one before it, else none."""
        text = text_written.text
        added = self._writer.added_exactly(first.answer, text_written)
        if added is not None:
            return self._joined(first, added, written, fork, Proof.SAME_TEXT)
        end = self._writer.turn_end(first.answer)
        if isinstance(end, TurnEnd):
            same = text_written.digest(end.at) == end.digest
            added = self._writer.added(first.answer.node, end, text) if same else None
            if added is not None:
                return self._joined(first, added, written, fork)
            end = self._writer.rewritten(first.answer, call, text, first.depth - 1)
        fork = fork or end
        # Earlier answers that the text may continue, tried from the last one; the text is read once.
        earlier_ends = [
            (stored_end, match)
            for match in earlier
            for stored_end in (match.answer.exact, self._writer.turn_end(match.answer))
            if isinstance(stored_end, TurnEnd)
        ]
        earlier_ends.sort(key=lambda pair: pair[0].at)
        digests = [text_written.digest(stored_end.at) for stored_end, _ in earlier_ends]
        for (stored_end, match), digest in zip(reversed(earlier_ends), reversed(digests), strict=True):
            same = digest == stored_end.digest
            added = self._writer.added(match.answer.node, stored_end, text) if same else None
            if added is not None:
                proof = Proof.SAME_TEXT if stored_end is match.answer.exact else Proof.SAME_SUFFIX
                return self._joined(match, added, written, fork, proof)
        return self._whole(text, written, fork)

    def _joined(
        self, match: Match, added: str, written: Written, fork: Fork | None, proof: Proof = Proof.SAME_SUFFIX
    ) -> Draft:
        node = match.answer.node
        last = node.output_ids if len(node.output_ids) else node.prompt.new_ids
        prompt = Prompt(
            Branch.CONTINUES if fork is None else Branch.FORK,
            empty_ids(),
            parent=node,
            kept=node.length,
            added=added,
            proof=proof,
            fork=fork,
            alike=match.alike,
            written=written,
        )
        return Draft(prompt, int(last[-1]) if len(last) else None)

    def _whole(self, text: str, written: Written, fork: Fork | None) -> Draft:
        """The prompt that keeps nothing."""
        start = self._starts.get(written.digest) if fork and fork.reason is ForkReason.NEW_CONVERSATION else None
        if start is not None:
            return Draft(replace(start, written=written), encoded=True)
        branch = Branch.START if fork is None else Branch.FORK
        return Draft(Prompt(branch, empty_ids(), added=text, fork=fork, written=written))

    def _resumed(self, match: Match) -> Prompt:
        """The prompt of a call that continues an unfinished answer: its ids, without a stop token."""
        answer, node = match.answer, match.answer.node
        stopped = self._writer.stop_text(node) is not None
        text_written = node.prompt.written
        assert text_written is not None, "an answer to messages"
        what = "the answer is to go on, so the stop token that ended it is left out"
        return Prompt(
            Branch.FORK if stopped else Branch.CONTINUES,
            empty_ids(),
            parent=node,
            kept=node.length - stopped,
            proof=Proof.SAME_IDS,
            fork=Fork(ForkReason.STOP_LEFT_OUT, what, match.depth - 1) if stopped else None,
            alike=match.alike,
            written=replace(text_written, messages=answer.history, sent=answer.sent, keys=answer.keys),
        )

    def _departed(
        self, call: ChatCall, keys: Sequence[bytes], places: Sequence[bytes], match: Match
    ) -> Fork | None:
        """Why a history with an answer does not continue its last answer; None if it does."""
        messages = call.messages
        until = len(messages) if call.add_generation_prompt else len(messages) - 1
        if not any(message.sampled for message in messages[match.depth : until]):
            return None
        departure = self._histories.departure(messages, places, match.depth)
        if departure is None or not any(message.sampled for message in messages[departure.at : until]):
            return None
        return departed(messages, keys, departure)

    def _keep(self, node: Node) -> None:
        """Index an answer for the calls that continue it."""
        self._nodes.append(node)
        written = node.prompt.written
        if written is not None:
            # Later histories may hold an answer that the request began as one message or as two.
            begun = _is_prefilled(node.call)
            history = (*written.messages[: len(written.messages) - begun], node.message)
            views = [(len(written.sent) - begun, node.message)]
            if begun:
                views.append((len(written.sent), as_message(dict(node.answer), "the answer")))
            for before, answer in views:
                keys = (*written.keys[:before], *message_keys([answer]))
                places = history_keys(keys)
                self._histories.add(StoredAnswer(node, history, (*written.sent[:before], answer), keys), places)
                self._index.answered(self.id, places[-1])
                self._indexed.append(places[-1])
        for key in self._texts.add(node):
            self._index.wrote(self.id, key)
            self._indexed_texts.append(key)
        size = 4000 + 2 * len(node.prompt.added) + 4 * len(node.prompt.new_ids) + 12 * len(node.output_ids)
        size += 2 * len(node.prompt.text or "")
        self._bytes += size
        self._index.bytes += size


def _written(
    messages: tuple[Message, ...], sent: tuple[Message, ...], keys: Sequence[bytes], text_written: Beginnings
) -> Written:
    return Written(messages, sent, tuple(keys), len(text_written.text), text_written.digest())


def _is_prefilled(call: ChatCall) -> bool:
    """Whether the call has the model continue the last message."""
    return not call.add_generation_prompt and bool(call.messages) and call.messages[-1].sampled


def _merged(begun: Message, rest: Message) -> Message:
    """An answer begun by the client or an earlier call, joined with what was sampled after it."""
    wire = {**begun.wire, **{key: value for key, value in rest.wire.items() if value is not None}}
    wire["content"] = (begun.text + rest.text) or None
    if begun.reasoning and rest.reasoning:
        wire["reasoning_content"] = begun.reasoning + rest.reasoning
    return as_message(wire, "the answer")
