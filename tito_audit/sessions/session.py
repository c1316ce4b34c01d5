"""Session: a forest of sampled answers, from which the prompt of each call follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.chains.histories import Key, Prefixes, key_of_bytes
from tito_audit.provider import GenerationResult
from tito_audit.record.arrays import Ids, as_floats, as_ids, empty_ids
from tito_audit.record.message import Message, as_message
from tito_audit.sessions.index import (
    AnsweredHistories,
    Fit,
    Match,
    PrefixDigests,
    SessionIndex,
    StoredAnswer,
    TurnEnd,
    fork_after_leaving_memory,
    fork_at_departure,
    fork_to_new_conversation,
    history_keys,
    message_keys,
    text_bytes,
)
from tito_audit.sessions.model import Branch, ChatCall, Draft, Fork, ForkReason, Node, Prompt, Proof, SentPrompt
from tito_audit.sessions.next_prompt import PromptWriter

TextPrompt = str | Sequence[int] | Ids
"""What `/v1/completions` takes as a prompt."""
_TEXT, _IDS = b"t", b"i"


def lookup_bytes(prompt: TextPrompt) -> bytes:
    """A text prompt as the bytes that it is looked up by."""
    if isinstance(prompt, str):
        return _TEXT + text_bytes(prompt)
    return _IDS + as_ids(prompt, "prompt").tobytes()


class TextAnswers:
    """The answers of a session by the text and the ids that a prompt continuing them starts with."""

    def __init__(self, writer: PromptWriter) -> None:
        self._writer = writer
        self._answers: Prefixes[tuple[Node, int]] = Prefixes()
        """(answer, how many of its ids a prompt keeps that starts with it)."""

    def add(self, node: Node) -> list[Key]:
        """Hold an answer; the keys it was added under."""
        seen, length = node.seen_ids, node.length
        keys = [(key_of_bytes(_IDS + seen.tobytes()), length)]
        if self._writer.stop_text(node) is not None:
            keys.append((key_of_bytes(_IDS + seen[:-1].tobytes()), length - 1))
        if node.prompt.text is not None:
            text = node.prompt.text + str(node.answer.get("text") or "")
            keys.append((key_of_bytes(_TEXT + text_bytes(text)), length))
        for key, count in keys:
            self._answers.add(key, (node, count))
        return [key for key, _ in keys]

    def continue_answer(self, prompt: TextPrompt) -> Prompt | None:
        """The prompt that continues the longest matching answer; None if there is none."""
        answers = next((answers for _, answers in self._answers.matches(lookup_bytes(prompt))), None)
        if answers is None:
            return None
        node, count = answers[-1]
        if isinstance(prompt, str):
            assert node.prompt.text is not None
            sampled, rest = self._writer.split_after_sampled(node, prompt[len(node.prompt.text) :])
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

    def start_prompt(self, prompt: TextPrompt, branch: Branch, fork: Fork | None) -> Prompt:
        """The prompt of a text that continues nothing."""
        if isinstance(prompt, str):
            return Prompt(branch, self._writer.encode(prompt), added=prompt, fork=fork, text=prompt)
        ids = as_ids(prompt, "prompt")
        return Prompt(branch, ids.copy(), added=self._writer.text(ids), fork=fork)


class Session:
    """One conversation, or several of one client: a forest of answers."""

    def __init__(
        self,
        session_id: str,
        writer: PromptWriter,
        index: SessionIndex,
        max_nodes: int,
        *,
        left_memory: bool = False,
    ) -> None:
        self.id = session_id
        self.used = 0.0
        """When it was last used, by the caller's clock."""
        self._undated = writer
        self._index = index
        self._max_nodes = max_nodes
        self._left_memory = left_memory
        self._gone = False
        self._clear()

    def prompt(self, call: ChatCall) -> Prompt:
        """The prompt of a call: stored ids and new text with a proof, or a start, or a fork with its reason.

        Stores nothing, so calls may run concurrently. RenderError as the template raises.
        """
        return self.encode(self.draft(call))

    def encode(self, draft: Draft) -> Prompt:
        """The prompt of a draft, with its new text encoded."""
        if draft.encoded:
            return draft.prompt
        return replace(draft.prompt, new_ids=self._writer.encode(draft.prompt.added, draft.after))

    def draft(self, call: ChatCall) -> Draft:
        """The prompt of a call before its new text is encoded, which may be done elsewhere if it is long."""
        keys, places = self._index.keys(call.messages)
        matches = self._histories.matches(call.messages, places)
        first = next(matches, None)
        if first is None:
            messages = call.messages
            rendered = PrefixDigests(self._writer.write(messages, call))
            departure = self._histories.find_departure(messages, places)
            if self._is_new:
                fork = None
            elif self._left_memory and any(message.sampled for message in messages):
                fork = fork_after_leaving_memory()
            elif departure is not None and (
                departure.reasoning
                or self._histories.holds_answer(keys)
                or (messages[departure.at].sampled and departure.answer.is_answer(departure.at))
            ):
                fork = fork_at_departure(messages, keys, departure)
            else:
                fork = fork_to_new_conversation(messages)
            written = SentPrompt(messages, messages, tuple(keys), len(rendered.text), rendered.digest())
            return self._draft_whole(rendered.text, written, fork)
        if first.depth == len(call.messages) and not call.add_generation_prompt:
            return Draft(self._resume_answer(first), encoded=True)
        rest = call.messages[first.depth :]
        history, sent = first.answer.history + rest, first.answer.sent + rest
        rendered = PrefixDigests(self._writer.write(history, call))
        if first.answer.node.prompt.written is not None:  # needed soon; in this order the text is read once
            rendered.digest(first.answer.node.prompt.written.length)
        all_keys = (*first.answer.keys, *keys[first.depth :])
        written = SentPrompt(history, sent, all_keys, len(rendered.text), rendered.digest())
        # A later answer that is unknown forks too.
        fork, until = None, len(call.messages) if call.add_generation_prompt else len(call.messages) - 1
        if any(message.sampled for message in call.messages[first.depth : until]):
            departure = self._histories.find_departure(call.messages, places, first.depth)
            if departure is not None and any(message.sampled for message in call.messages[departure.at : until]):
                fork = fork_at_departure(call.messages, keys, departure)
        return self._draft_continuation(call, first, matches, written, rendered, fork)

    def best_fit(self, messages: Sequence[Message], place: bytes, depth: int) -> Fit | None:
        """How well the best answer of this session to the first `depth` messages fits; None if none does."""
        return self._histories.best_fit(messages, place, depth)

    def text_prompt(self, prompt: TextPrompt) -> Prompt:
        """The prompt of a call to `/v1/completions`; it continues the answer whose text or ids it starts with."""
        known_prompt = self._texts.continue_answer(prompt) or self._starts.get(lookup_bytes(prompt))
        if known_prompt is not None:
            return known_prompt
        if self._is_new:
            return self._texts.start_prompt(prompt, Branch.START, None)
        fork = fork_after_leaving_memory() if self._left_memory else fork_to_new_conversation(())
        return self._texts.start_prompt(prompt, Branch.FORK, fork)

    def commit(
        self,
        call_id: str,
        prompt: Prompt,
        call: ChatCall | None,
        results: Sequence[GenerationResult],
        answers: Sequence[Mapping[str, Any]],
    ) -> tuple[Node, ...]:
        """Store the answers to a prompt: a node for each result, with the message that the client gets.

        Of a text prompt there is no call, and the message is `{"text": …}`.
        """
        nodes = []
        for choice, (result, answer) in enumerate(zip(results, answers, strict=True)):
            written, own = prompt.written, ChatCall(())
            if call is None or written is None:
                message = as_message({"role": "assistant", "content": answer.get("text")}, "the answer")
            else:  # so that calls share the messages that the session holds
                own, message = replace(call, messages=written.sent), as_message(dict(answer), "the answer")
                if _is_prefilled(own):  # one message, begun by the client or an earlier call
                    begun = written.messages[-1]
                    wire = {
                        **begun.wire,
                        **{name: part for name, part in message.wire.items() if part is not None},
                    }
                    wire["content"] = (begun.text + message.text) or None
                    if begun.reasoning and message.reasoning:
                        wire["reasoning_content"] = begun.reasoning + message.reasoning
                    message = as_message(wire, "the answer")
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
                self._index_answer(node)
        if not self._gone and prompt.branch is Branch.START:
            text = prompt.text if prompt.text is not None else prompt.new_ids
            self._starts[prompt.written.digest if prompt.written is not None else lookup_bytes(text)] = prompt
        if len(self._nodes) > self._max_nodes:
            # The older half of the answers leaves.
            later, starts = self._nodes[len(self._nodes) // 2 :], dict(self._starts)
            self.reset()
            self._left_memory = True
            self._starts.update(starts)
            for node in later:
                self._index_answer(node)
        return tuple(nodes)

    def reset(self) -> None:
        """Forget all answers; the session stays."""
        self._index.forget(self.id, self._indexed, self._indexed_texts)
        self._index.bytes -= self._bytes
        self._left_memory = False
        self._clear()

    def leave(self) -> None:
        """Forget all answers, also those of calls that are still running."""
        self.reset()
        self._gone = True

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All answers, in the order of their commits."""
        return tuple(self._nodes)

    @property
    def wraps_texts(self) -> bool:
        """Whether the template is given texts as parts."""
        return self._writer.wraps_texts

    @property
    def size(self) -> int:
        """An estimate of its memory in bytes."""
        return self._bytes

    @property
    def _is_new(self) -> bool:
        return not self._nodes and not self._left_memory

    def _clear(self) -> None:
        self._writer = self._undated.with_todays_date()
        self._histories = AnsweredHistories()
        self._texts = TextAnswers(self._writer)
        self._nodes: list[Node] = []
        self._starts: dict[bytes, Prompt] = {}
        self._indexed: list[bytes] = []
        self._indexed_texts: list[Key] = []
        self._bytes = 0

    def _draft_continuation(
        self,
        call: ChatCall,
        first: Match,
        earlier: Iterable[Match],
        written: SentPrompt,
        rendered: PrefixDigests,
        fork: Fork | None,
    ) -> Draft:
        """The prompt of a history that holds answers: it keeps the ids of the last answer that is proved."""
        text = rendered.text
        added = self._writer.text_added_exactly(first.answer, rendered)
        if added is not None:
            return self._draft_after(first, added, written, fork, Proof.SAME_TEXT)
        end = self._writer.turn_end(first.answer)
        if isinstance(end, TurnEnd):
            same = rendered.digest(end.at) == end.digest
            added = self._writer.added_text(first.answer.node, end, text) if same else None
            if added is not None:
                return self._draft_after(first, added, written, fork, Proof.SAME_SUFFIX)
            end = self._writer.fork_by_rewrite(first.answer, call, text, first.depth - 1)
        fork = fork or end
        # Earlier answers are tried from the last one on, but digested in the order of the text, to read it once.
        earlier_ends = [
            (stored_end, match)
            for match in earlier
            for stored_end in (match.answer.exact, self._writer.turn_end(match.answer))
            if isinstance(stored_end, TurnEnd)
        ]
        earlier_ends.sort(key=lambda pair: pair[0].at)
        digests = [rendered.digest(stored_end.at) for stored_end, _ in earlier_ends]
        for (stored_end, match), digest in zip(reversed(earlier_ends), reversed(digests), strict=True):
            same = digest == stored_end.digest
            added = self._writer.added_text(match.answer.node, stored_end, text) if same else None
            if added is not None:
                proof = Proof.SAME_TEXT if stored_end is match.answer.exact else Proof.SAME_SUFFIX
                return self._draft_after(match, added, written, fork, proof)
        return self._draft_whole(text, written, fork)

    def _draft_after(
        self, match: Match, added: str, written: SentPrompt, fork: Fork | None, proof: Proof
    ) -> Draft:
        """The prompt that keeps all ids of an answer and adds a text."""
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

    def _draft_whole(self, text: str, written: SentPrompt, fork: Fork | None) -> Draft:
        """The prompt that keeps no ids; a new conversation with a known first prompt gets that one again."""
        start = self._starts.get(written.digest) if fork and fork.reason is ForkReason.NEW_CONVERSATION else None
        if start is not None:
            return Draft(replace(start, written=written), encoded=True)
        branch = Branch.START if fork is None else Branch.FORK
        return Draft(Prompt(branch, empty_ids(), added=text, fork=fork, written=written))

    def _resume_answer(self, match: Match) -> Prompt:
        """The prompt of a call that continues the last answer itself: its ids, without a stop token."""
        answer, node = match.answer, match.answer.node
        stopped = self._writer.stop_text(node) is not None
        written = node.prompt.written
        assert written is not None, "an answer to messages"
        what = "the answer is to go on, so the stop token that ended it is left out"
        return Prompt(
            Branch.FORK if stopped else Branch.CONTINUES,
            empty_ids(),
            parent=node,
            kept=node.length - stopped,
            proof=Proof.SAME_IDS,
            fork=Fork(ForkReason.STOP_LEFT_OUT, what, match.depth - 1) if stopped else None,
            alike=match.alike,
            written=replace(written, messages=answer.history, sent=answer.sent, keys=answer.keys),
        )

    def _index_answer(self, node: Node) -> None:
        """Add an answer to all indexes, for the calls that continue it."""
        self._nodes.append(node)
        written = node.prompt.written
        if written is not None:
            # Later histories may hold an answer that the request began as one message, or as two.
            begun = _is_prefilled(node.call)
            history = (*written.messages[: len(written.messages) - begun], node.message)
            views = [(len(written.sent) - begun, node.message)]
            if begun:
                views.append((len(written.sent), as_message(dict(node.answer), "the answer")))
            for before, answer in views:
                keys = (*written.keys[:before], *message_keys([answer]))
                places = history_keys(keys)
                self._histories.add(StoredAnswer(node, history, (*written.sent[:before], answer), keys), places)
                self._index.add_history(self.id, places[-1])
                self._indexed.append(places[-1])
        for key in self._texts.add(node):
            self._index.add_text(self.id, key)
            self._indexed_texts.append(key)
        size = 4000 + 2 * len(node.prompt.added) + 4 * len(node.prompt.new_ids) + 12 * len(node.output_ids)
        size += 2 * len(node.prompt.text or "")
        self._bytes += size
        self._index.bytes += size


def _is_prefilled(call: ChatCall) -> bool:
    """Whether the model is to continue the last message of the call."""
    return not call.add_generation_prompt and bool(call.messages) and call.messages[-1].sampled
