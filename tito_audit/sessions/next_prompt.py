"""The next prompt: stored ids, then the template's text for the new messages, encoded alone, with a proof.

Call A what the template writes for a history up to an answer, and B what it writes for that history and what
followed it. Where A starts with the prompt that the answer was sampled for, and B is A up to the end of the
answer, the template only appends: the rest of B is what is new. It is encoded alone. Where the answer ended with a
stop token this is exact, because no token reaches across one; an answer that was cut gets the template's end of
turn first. Where a template ends no turn, the seam lies inside text that a tokenizer might join: there the sampled
ids are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from functools import cached_property

import numpy as np

from tito_audit.errors import RenderError
from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message, as_message
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import common_start
from tito_audit.sessions.index import (
    PrefixDigests,
    StoredAnswer,
    TurnEnd,
    digest_text,
    fork_by_rewrite,
    text_bytes,
)
from tito_audit.sessions.model import ChatCall, Fork, ForkReason, Node
from tito_audit.templates.append_only import missing_parts, sampled_text, turn_ends
from tito_audit.templates.probes import ANSWER, SECOND_USER, USER, assistant, make_probe
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Prefix

_STOPPED = frozenset({"stop", "tool_calls"})
_ASKED = {"role": "user", "content": USER}
_ASKED_AGAIN = {"role": "user", "content": SECOND_USER}


class PromptWriter:
    """Writes prompts with one tokenizer's template."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer | None) -> None:
        self._tokenizer = tokenizer
        self._templates = renderer

    def with_todays_date(self) -> PromptWriter:
        """A copy that keeps today's date, so that a conversation past midnight keeps its prompt."""
        renderer = self._templates
        if renderer is None or renderer.clock is not None:
            return self
        if not any("strftime_now" in template.source for template in renderer.templates.values()):
            return self
        _ = self._stop_ids  # cached for all copies
        other = copy(self)
        other._templates = replace(renderer, clock=Clock(datetime.now()))
        return other

    def write(self, messages: Sequence[Message], call: ChatCall) -> str:
        """The text of the prompt for these messages; RenderError as the template raises."""
        opens = call.add_generation_prompt
        text = self._renderer.render(
            messages, call.tools, add_generation_prompt=opens, template_kwargs=call.template_kwargs
        )
        if opens or not messages or not messages[-1].sampled:
            return text
        # As transformers does: cut where the text of the last message ends, which the model continues.
        content = messages[-1].text
        at = text.rfind(content.strip()) if content.strip() else -1
        if at < 0:
            raise RenderError("the last message is to be continued, and the template does not write its text")
        exact = content.lstrip()
        return text[: at + len(exact if text.startswith(exact, at) else exact.rstrip())]

    def encode(self, text: str, after: int | None = None) -> Ids:
        """`[N]` the ids of a text at the beginning of a prompt, or after a token of it."""
        vocabulary = self._tokenizer.vocabulary
        if after is None or vocabulary.prefix is Prefix.NEVER or not text:
            return self._tokenizer.encode(text)
        # The tokenizer begins a text with a space, but not in the middle of a prompt.
        before = vocabulary.piece(after) if after in vocabulary.added_ids else "\n"
        alone, both = self._tokenizer.encode(before), self._tokenizer.encode(before + text)
        if np.array_equal(both[: len(alone)], alone):
            return both[len(alone) :]
        return self._tokenizer.encode(text)

    def stop_text(self, node: Node) -> str | None:
        """The text of the stop token that an answer ends with; None if it ends with none."""
        if not len(node.output_ids):
            return None
        last = int(node.output_ids[-1])
        vocabulary = self._tokenizer.vocabulary
        stopped = node.finish_reason in _STOPPED and last in vocabulary.special_ids
        return vocabulary.piece(last) if last in self._stop_ids or stopped or last == node.stop_reason else None

    def turn_end(self, answer: StoredAnswer) -> TurnEnd | Fork:
        """Where the template ends the turn of an answer, or why it cannot be continued; kept in the answer."""
        if answer.end is None:
            answer.end = self._find_turn_end(answer)
        return answer.end

    def text_added_exactly(self, answer: StoredAnswer, prompt: PrefixDigests) -> str | None:
        """What a prompt adds to an answer that it holds exactly as sampled; None if it does not."""
        node, written, stop = answer.node, answer.node.prompt.written, self.stop_text(answer.node)
        text, sampled = prompt.text, self.text(node.output_ids)
        if written is None or not text.startswith(sampled, written.length):
            return None
        end = written.length + len(sampled)
        if stop is None and not text.startswith(self._turn_ends, end):
            return None
        if prompt.digest(written.length) != written.digest:
            return None
        if answer.exact is None:
            at = end - len(stop or "")
            answer.exact = TurnEnd(at, prompt.digest(at), at, ended=True)
        return text[end:]

    def added_text(self, node: Node, end: TurnEnd, text: str) -> str | None:
        """What a prompt adds after the end of an answer; None if it ends no turn there."""
        rest, stop = text[end.at :], self.stop_text(node)
        if stop is not None and rest.lstrip().startswith(stop):
            return rest.lstrip()[len(stop) :]
        if not end.ended:
            return rest if stop is not None else text[end.new_from :]
        turn_end = next((end_text for end_text in self._turn_ends if rest.startswith(end_text)), None)
        if turn_end is None and not rest.lstrip().startswith(self._renderer.control_texts):
            return None
        return rest[len(turn_end or "") :] if stop is not None else text[end.new_from :]

    def fork_by_rewrite(self, answer: StoredAnswer, call: ChatCall, text: str, message: int) -> Fork:
        """Why a prompt does not start with what the template wrote for the history up to this answer."""
        before = self._render_answered(answer)
        own = answer.node.call
        for reason, other, what in (
            (ForkReason.TOOLS_CHANGED, own.tools != call.tools, "tools"),
            (ForkReason.ARGUMENTS_CHANGED, dict(own.template_kwargs) != dict(call.template_kwargs), "arguments"),
        ):
            if other and not self._render_answered(answer, call).startswith(before):
                return replace(fork_by_rewrite(before, text, f"with the {what} of this call", None), reason=reason)
        return fork_by_rewrite(before, text, "once the new messages follow", message)

    @property
    def wraps_texts(self) -> bool:
        """Whether the template is given texts as parts."""
        return self._templates is not None and self._templates.wraps_texts

    @property
    def _renderer(self) -> Renderer:
        if self._templates is None:
            raise RenderError("there is no chat template, so only text prompts can be answered")
        return self._templates

    @cached_property
    def _turn_ends(self) -> tuple[str, ...]:
        """The texts that end a turn, and the control token that ends an answer whatever follows it.

        A question and a generation prompt after an answer share that token. They may share the start of their
        headers too, but with that a prompt begins.
        """
        ends = turn_ends(self._renderer)
        conversation = make_probe("", [_ASKED, assistant(ANSWER), _ASKED_AGAIN])
        start, question = (conversation.try_render(self._renderer, count, opens=False) for count in (1, 3))
        opened = conversation.try_render(self._renderer, 2)
        if start is not None and question is not None and opened is not None:
            after, other = (text.partition(ANSWER)[2] for text in (question, opened))
            shared = after[: common_start(after, other)].lstrip()
            tokens = sorted(filter(None, self._renderer.control_texts), key=len, reverse=True)
            end = next((token for token in tokens if shared.startswith(token)), "")
            while (token := next((token for token in tokens if start.startswith(token)), None)) is not None:
                end, start = "" if token == end else end, start[len(token) :]
            ends = (*ends, end)
        return tuple(filter(None, dict.fromkeys(ends)))

    @cached_property
    def _stop_ids(self) -> frozenset[int]:
        vocabulary = self._tokenizer.vocabulary
        stated = frozenset(self._tokenizer.eos_ids)
        ends = self._turn_ends if self._templates is not None else ()
        spelled = frozenset[int]().union(*(vocabulary.ids_of_bytes(end.encode("utf-8")) for end in ends))
        return stated | (spelled & vocabulary.added_ids)

    def _render_answered(self, answer: StoredAnswer, call: ChatCall | None = None) -> str:
        """What the template writes for the history of an answer, with the settings of its own call or another."""
        by = call or answer.node.call
        return self._renderer.render(
            answer.history, by.tools, add_generation_prompt=False, template_kwargs=by.template_kwargs
        )

    def _find_turn_end(self, answer: StoredAnswer) -> TurnEnd | Fork:
        node, written = answer.node, answer.node.prompt.written
        assert written is not None, "an answer to messages"
        index = len(answer.sent) - 1
        try:
            text = self._render_answered(answer)
        except RenderError as error:
            return Fork(ForkReason.NO_PLACE, f"the template refuses a history that ends with it: {error}", index)
        if digest_text(text[: written.length]) != written.digest:
            return fork_by_rewrite(self.write(written.messages, node.call), text, "once it is answered", index)
        missing = [part for part in missing_parts(node.message, text[written.length :]) if part != "tool calls"]
        new = text[written.length :]
        missing += [] if all(call.name in new for call in node.message.tool_calls) else ["tool calls"]
        if missing:
            what = f"the template leaves the answer's {' and '.join(missing)} out"
            return Fork(ForkReason.TEMPLATE_REWRITES, what, index)
        start, stop = written.length, self.stop_text(node)
        ends = (*self._turn_ends, *([stop] if stop is not None else []))
        calls = (f"{call.name} {call.arguments}" for call in node.message.tool_calls)
        parts = (node.message.text, node.message.reasoning or "", *calls)
        if any(end in part for end in ends for part in parts):
            return self._find_spelled_end(answer, text, start, ends)
        sampled, ended = sampled_text(text, text[:start], ends)
        if ended:
            at = start + len(sampled) - len(next(end for end in _longest_first(ends) if sampled.endswith(end)))
        else:
            # The end of an answer of a template that ends no turn.
            message = node.message
            content = message.text.rstrip()
            place = text.rfind(content, start) if content and not message.tool_calls else -1
            at = place + len(content) if place >= 0 else max(len(text.rstrip()), start)
        return TurnEnd(at, digest_text(text[:at]), self._new_from(node, text, start, at), ended)

    def _find_spelled_end(
        self, answer: StoredAnswer, text: str, start: int, ends: Sequence[str]
    ) -> TurnEnd | Fork:
        """The turn end of an answer that spells an end token in its text: found with that text replaced."""
        node = answer.node
        wire = json.dumps(answer.history[-1].wire, ensure_ascii=False)
        for end in _longest_first(ends):
            wire = wire.replace(end, "x" * len(end))
        message = as_message(json.loads(wire), "a probe")
        plain = self._render_answered(replace(answer, history=(*answer.history[:-1], message)))
        sampled, ended = sampled_text(plain, plain[:start], ends)
        end = next((end for end in _longest_first(ends) if sampled.endswith(end)), "")
        tail = plain[start + len(sampled) - len(end) :]
        if not ended or plain[:start] != text[:start] or not text.endswith(tail):
            return Fork(ForkReason.NO_PLACE, "the answer spells a token that ends turns", len(answer.sent) - 1)
        at = len(text) - len(tail)
        return TurnEnd(at, digest_text(text[:at]), self._new_from(node, text, start, at), ended=True)

    def _new_from(self, node: Node, text: str, start: int, at: int) -> int:
        """Where the template's own text after an answer begins: after what was sampled, if it is written so."""
        sampled_text = self._tokenizer.vocabulary.text(node.output_ids)
        for form in (sampled_text, sampled_text.rstrip()):
            if text.startswith(form, start) and start + len(form) <= at:
                return start + len(form)
        return at

    def text(self, ids: Ids) -> str:
        """The text of ids, control tokens included."""
        return self._tokenizer.vocabulary.text(ids)

    def split_after_sampled(self, node: Node, text: str) -> tuple[int, str]:
        """How many of an answer's tokens a text begins with, and the text after them."""
        vocabulary, ids = self._tokenizer.vocabulary, node.output_ids
        for form in (vocabulary.text(ids), vocabulary.bytes_of(ids).decode("utf-8", "replace")):
            if text.startswith(form):
                return len(ids), text[len(form) :]
        data, at, count = text_bytes(text), 0, 0
        for piece in map(vocabulary.token_bytes, ids.tolist()):
            if not data.startswith(piece, at):
                break
            at, count = at + len(piece), count + 1
        return count, data[at:].decode("utf-8", "surrogatepass")


def _longest_first(texts: Sequence[str]) -> list[str]:
    return sorted(filter(None, texts), key=len, reverse=True)
