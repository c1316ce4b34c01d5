"""Compares each prompt, and the last answer, with what the template writes for the messages.

A conversation is rendered and encoded once: most of its prompts are known to start a later text.

    later    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n<|im_start|>user\\n…
    prompt   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n

A prompt starts a later text if the template writes each of its messages the same way in both. If the template is
known to look only at a message, its neighbors, and which messages come before and after it (see
`render/fast/text_conditions.py`), this depends only on their shapes: the context of the message. A rendered
prompt that starts a later text proves the contexts of all its messages; a prompt whose contexts are all proven
need not be rendered. It ends where the answer after its messages begins, found by counting generation prompts:
there must be as many as answers, so no message spells one. One prompt in 256 is rendered anyway, as a check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, count
from operator import attrgetter, is_, or_
from typing import NamedTuple

import numpy as np

from tito_audit.align.blocks import SAME_BYTES
from tito_audit.chains.links import LinkKind
from tito_audit.errors import RenderError
from tito_audit.evidence.chains import Chains
from tito_audit.evidence.completions import ConfirmedIds
from tito_audit.evidence.differences import Comparison, Stretch, compare_text, completion_at, difference
from tito_audit.evidence.model import Against, Difference, KnownCause
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Severity
from tito_audit.record.message import Message
from tito_audit.record.prefix import starts_with
from tito_audit.record.rollout import Rollout
from tito_audit.render.renderer import ChatForms, Renderer
from tito_audit.render.scaffolds import Inputs, MessageShapes, find_scaffolds, template_scaffolds
from tito_audit.render.template import Template
from tito_audit.tokens.segments import KnownText
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import keeps_bytes
from tito_audit.ways.observations import prompt_messages

_ONE_IN = 256
"""One in this many known prompts is rendered anyway."""
_MOST_KEYS = 1 << 12
_MOST = 1 << 16
"""How many contexts are remembered."""
_FAR = 3
"""At this distance from the end or more, the distance of a message no longer matters."""
_ANSWER = "assistant"
_Context = tuple[int, ...]
"""Numbers for all that decides how a message is written in a prompt and in a later text."""


class PromptOpener(NamedTuple):
    """A generation prompt that begins with a control token."""

    tail: str
    """The text after the last control token."""
    ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class LaterText:
    """A text of the template that encodes as recorded ids, and may start with earlier prompts."""

    messages: Sequence[Message]
    given: int
    """A number for everything else passed to the template."""
    shapes: Sequence[int]
    """`[messages]` a number for the shape of each."""
    around: Sequence[int]
    """`[messages]` a number for what the template sees of it while it writes another one."""
    before: Sequence[int]
    """`[messages + 1]` a bit for each number in `around` that comes before it."""
    answers: Sequence[int]
    """`[messages + 1]` how many of the first 0, 1, 2, … messages are answers."""
    opener: PromptOpener
    opener_places: Sequence[int]
    """Where in the ids generation prompts begin."""
    opens: bool
    """Whether it is a prompt; if not, it may continue after its recorded ids."""
    ids: Ids
    key: int
    """A number for all of this but the texts of messages and the ids."""

    def may_start_with(self, size: int, recorded: Ids) -> bool:
        """Whether it starts with `recorded`, which ends with the generation prompt after the first messages."""
        if len(self.opener_places) != self.answers[-1] + self.opens or self.answers[size] >= len(
            self.opener_places
        ):
            return False
        end = self.opener_places[self.answers[size]] + len(self.opener.ids)
        return len(recorded) == end and starts_with(self.ids, recorded)

    def contexts(self, size: int) -> list[_Context]:
        """The context of each of the first messages, and one for what precedes them."""
        around, before, every = self.around, self.before, len(self.messages)
        after, beyond = 0, 0
        for other in around[size:]:
            beyond |= 1 << other
        contexts: list[_Context] = []
        for i in range(size - 1, -1, -1):
            neighbors = around[i - 1] if i else -1, around[i + 1] if i + 1 < every else -1
            to_end = min(size - i, _FAR), min(every - i, _FAR)
            own = self.given, self.opens, beyond, self.shapes[i]
            contexts.append((*own, *neighbors, *to_end, before[i], after))
            after |= 1 << around[i]
        contexts.append((self.given, self.opens, beyond, around[0], around[size - 1], around[-1], after))
        return contexts

    @property
    def texts_are_distinct(self) -> bool:
        """Whether no two messages have the same text, which could hide that they are written elsewhere."""
        texts = [text for message in self.messages for text in (message.content, message.reasoning) if text]
        return all(isinstance(text, str) for text in texts) and len(set(texts)) == len(texts)


class PromptStarts:
    """What is known about the texts that one template writes, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: Template, shapes: MessageShapes) -> None:
        self._tokenizer = tokenizer
        self.cuts = tokenizer.control_tokens
        self._template = template
        self._shapes = shapes
        self._openers: dict[int, PromptOpener | None] = {}
        """By inputs, the generation prompt; None if it does not begin with a control token."""
        self._proven: set[_Context] = set()
        self._keys: dict[tuple[int, ...], int] = {}
        self._numbers = count()
        self._sure: set[tuple[int, int]] = set()
        """(key of a later text, how many of its first messages have proven contexts)."""
        self._alike: set[_Context] = set()
        """Contexts in which both engines write messages alike."""
        self._found = 0
        self._trusted = 0
        self._engines_differ = False
        self._off = False
        """Whether some prompt was not what the template writes though its contexts were proven."""

    def later(
        self, messages: Sequence[Message], inputs: Inputs | None, opens: bool, ids: Ids, forms: ChatForms
    ) -> LaterText | None:
        """A text known to encode as these ids, to find prompts in; None if it shows nothing about prompts."""
        if inputs is None or self._off:
            return None
        if inputs.number not in self._openers:
            prompt = self._template.generation_prompt_after_user(inputs.variables)
            begin, *pieces = self.cuts.split(prompt)
            self._openers[inputs.number] = None
            if not begin and pieces:
                (prompt_ids,) = self._tokenizer.encode_fast_batch([prompt])
                self._openers[inputs.number] = PromptOpener(pieces[-1], prompt_ids)
        opener = self._openers[inputs.number]
        read = self._shapes.read(messages, forms) if opener is not None else None
        if opener is None or read is None:
            return None
        around = [each.around for each in read]
        size, at = len(opener.ids), self.cuts.positions(ids)
        at = at[ids[at] == opener.ids[0]]
        at = at[at + size <= len(ids)]
        opener_places = at[(ids[at[:, None] + np.arange(size)] == opener.ids).all(axis=1)]
        return LaterText(
            messages,
            inputs.number,
            [each.shape for each in read],
            around,
            list(accumulate([1 << number for number in around], or_, initial=0)),
            list(accumulate([message.role == _ANSWER for message in messages], initial=0)),
            opener,
            opener_places.tolist(),
            opens,
            ids,
            self._number_of((inputs.number, opens, *[number for each in read for number in each[:2]])),
        )

    def start(
        self, later: LaterText, text: RenderedText, size: int, recorded: Ids
    ) -> tuple[LaterText, RenderedText]:
        """The prompt of the first messages of a later text, which is known to encode as these recorded ids."""

        def write() -> str:
            pieces = self.cuts.split(text.text)[: 2 * len(self.cuts.positions(recorded))]
            return "".join(pieces) + later.opener.tail

        begun = LaterText(
            later.messages[:size],
            later.given,
            later.shapes[:size],
            later.around[:size],
            later.before[: size + 1],
            later.answers[: size + 1],
            later.opener,
            later.opener_places[: later.answers[size] + 1],
            True,
            recorded,
            self._number_of((later.key, size)),
        )
        return begun, RenderedText(write, matches_record=True)

    def _number_of(self, parts: tuple[int, ...]) -> int:
        if len(self._keys) >= _MOST_KEYS:
            self._keys.clear()
            self._sure.clear()
        return self._keys.setdefault(parts, next(self._numbers))

    def are_first(self, messages: Sequence[Message], later: LaterText, forms: ChatForms) -> bool:
        """Whether a later text starts with these messages."""
        size = len(messages)
        first = later.messages[:size]
        if len(first) < size:
            return False
        if all(map(is_, messages, first)):
            return True
        if tuple(messages) != tuple(first):
            return False
        read = self._shapes.read(messages, forms)  # 1 and 1.0 are equal but differ in shape
        return read is not None and [each.shape for each in read] == list(later.shapes[:size])

    def is_known(self, later: LaterText, size: int, recorded: Ids) -> bool:
        """Whether the template is known to write these recorded ids for the first messages of a later text.

        False too for a prompt that is to be rendered as a check.
        """
        if self._off or self._found % _ONE_IN == _ONE_IN - 1 or not later.may_start_with(size, recorded):
            return False
        if (later.key, size) not in self._sure:
            if not self._proven.issuperset(later.contexts(size)):
                return False
            self._sure.add((later.key, size))
        self._found += 1
        return True

    def learn(self, later: LaterText, later_text: str, size: int, recorded: Ids, text: str | None) -> None:
        """Record whether a later text starts with a rendered prompt.

        `text` is the text of the prompt, None if it does not encode as the recorded ids.
        """
        if not later.may_start_with(size, recorded):
            return
        contexts = set(later.contexts(size))
        if text is None or not later_text.startswith(text):
            self._off |= self._proven.issuperset(contexts)
        elif self._proven.issuperset(contexts):
            self._found += 1
        elif later.texts_are_distinct and len(self._proven) < _MOST:
            self._proven |= contexts

    def contexts_alone(
        self, messages: Sequence[Message], inputs: Inputs | None, opens: bool, forms: ChatForms
    ) -> list[_Context] | None:
        """The context of each of these messages in their own text alone; None if unknown."""
        read = self._shapes.read(messages, forms) if inputs is not None and not self._engines_differ else None
        if inputs is None or read is None:
            return None
        around = [each.around for each in read]
        size, before, after = len(messages), 0, 0
        later: list[int] = []
        for other in reversed(around):
            later.append(after)
            after |= 1 << other
        contexts: list[_Context] = []
        for i, after in enumerate(reversed(later)):
            neighbors = around[i - 1] if i else -1, around[i + 1] if i + 1 < size else -1
            contexts.append(
                (inputs.number, opens, around[0], read[i].shape, *neighbors, min(size - i, _FAR), before, after)
            )
            before |= 1 << around[i]
        return contexts

    def writes_alike(self, contexts: Sequence[_Context]) -> bool:
        """Whether both engines are known to write messages in these contexts alike.

        False too for a text that both are to render as a check.
        """
        if self._engines_differ or not self._alike.issuperset(contexts):
            return False
        self._trusted += 1
        return self._trusted % _ONE_IN != 0

    def learn_alike(self, contexts: Sequence[_Context], alike: bool) -> None:
        """Record whether both engines wrote the messages in these contexts alike."""
        self._engines_differ |= not alike
        if alike and len(self._alike) < _MOST:
            self._alike.update(contexts)


def prompt_starts(tokenizer: Tokenizer, template: Template) -> PromptStarts | None:
    """What is known about the texts of a template; None if more than shapes may decide, or if no control token
    shows its turns."""
    every = template_scaffolds(template)
    if every is None or not tokenizer.control_tokens.tokens:
        return None
    key = PromptStarts, tokenizer.vocabulary
    if key not in template.memo:
        template.memo[key] = PromptStarts(tokenizer, template, every.shapes)
    starts: PromptStarts = template.memo[key]
    return starts


_KEPT = (
    "harmless as logged: the prompt keeps the tokens of the calls before it, where the template would write this"
)
PREFILL = KnownCause("TPL207", "prefilled answer", "the harness wrote the first tokens of the answer")
_PREFILLED = "right as long as the loss leaves them out: they were given, not sampled"
_FENCE = re.compile(r"```\w*")
_LATER = "harmless as logged: a later prompt would hold what the template writes"
_OFF_TEMPLATE = "the sampler was given tokens that the template does not write for these messages"
_LACKING = "the sampler was not given what the template writes for these messages"
_WORTH_KNOWING, _MANY = 8192, 5
"""With this many recorded prompt ids, or prompts, it is cheaper to know most prompts than to render them."""


@dataclass(frozen=True)
class RenderedText:
    """A text that the template writes."""

    write: Callable[[], str] = field(repr=False)
    matches_record: bool
    """Whether it is known to encode as the recorded ids."""

    @cached_property
    def text(self) -> str:
        """The text, written when it is first needed."""
        return self.write()


RenderedTexts = dict[int | None, RenderedText]
"""The text that the prompt of each turn should be; under None, the conversation with its last answer."""


class Renderings(NamedTuple):
    """What the template writes for a rollout."""

    texts: RenderedTexts
    errors: tuple[tuple[int | None, str], ...]
    """(turn, message) where the template refuses."""
    confirmed: tuple[ConfirmedIds, ...]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A text to render: a prompt, or the conversation with its last answer."""

    turn: int | None
    """None: the conversation with its last answer."""
    messages: Sequence[Message]
    recorded: Ids | None
    size: int
    """How many messages."""
    opens: bool = True
    """Whether a generation prompt ends it."""


def render_texts(rollout: Rollout, chains: Chains, reference: Reference) -> Renderings:
    """Render the text of every prompt whose messages are known, and of the conversation with its last answer."""
    assert reference.renderer is not None
    prompts: list[_Prompt] = []
    for k, call in enumerate(rollout.turns):
        sent = prompt_messages(rollout, k)
        if sent and call.prompt_ids is not None:
            prompts.append(_Prompt(k, sent, call.prompt_ids, len(sent)))
    last = rollout.turns[-1] if rollout.turns else None
    if last is not None and last.message_index is not None and last.prompt_messages is None:
        whole = rollout.messages[: last.message_index + 1]
        prompts.append(_Prompt(None, whole, chains.seen[-1], len(whole), opens=False))
    ids = sum([len(prompt.recorded) for prompt in prompts if prompt.recorded is not None])
    may_know = ids >= _WORTH_KNOWING or len(prompts) >= _MANY
    return _PromptWriter(rollout, reference, reference.renderer, may_know=may_know).write_all(prompts)


class _PromptWriter:
    """Renders the texts of one rollout, longest first: most prompts are then known to start one of them."""

    def __init__(self, rollout: Rollout, reference: Reference, renderer: Renderer, *, may_know: bool) -> None:
        """With `may_know`, prompts that are known to start a later text are not rendered."""
        self._rollout, self._reference, self._renderer = rollout, reference, renderer
        self._variables = renderer.variables(rollout.tools, rollout.template_kwargs)
        template = renderer.template(bool(rollout.tools))
        self._shapes = prompt_starts(reference.tokenizer, template)
        every = template_scaffolds(template)
        self._inputs = every.inputs(self._variables) if every is not None else None
        self._scaffolds = find_scaffolds(renderer, bool(rollout.tools))
        self._starts = self._shapes if may_know else None
        self._forms = ChatForms()

    def write_all(self, prompts: Sequence[_Prompt]) -> Renderings:
        """The texts of these prompts."""
        starts, ordered = self._starts, prompts
        if starts is not None:
            ordered = sorted(prompts, key=attrgetter("size"), reverse=True)
        texts: RenderedTexts = {}
        refused: dict[int | None, str] = {}
        confirmed: list[ConfirmedIds] = []
        latest: list[tuple[LaterText, RenderedText]] = []  # texts that encode as recorded ids, of several chains
        for prompt in ordered:
            size, recorded = prompt.size, prompt.recorded
            later = None  # the latest known text whose messages begin with those of the prompt
            if starts is not None and prompt.opens and recorded is not None:
                for candidate in reversed(latest):
                    if starts.are_first(prompt.messages, candidate[0], self._forms):
                        later = candidate
                        break
            if later and starts and recorded is not None and starts.is_known(later[0], size, recorded):
                latest.append(starts.start(*later, size, recorded))
                texts[prompt.turn] = latest[-1][1]
            else:
                try:
                    texts[prompt.turn] = rendering = self._write(prompt)
                except RenderError as error:
                    refused[prompt.turn] = str(error)
                    continue
                if recorded is None:
                    continue
                matches = rendering.matches_record
                if later is not None and starts is not None:
                    starts.learn(later[0], later[1].text, size, recorded, rendering.text if matches else None)
                if matches:
                    confirmed.append(ConfirmedIds(recorded, goes_on=not prompt.opens))
                    if starts is not None:
                        begun = starts.later(prompt.messages, self._inputs, prompt.opens, recorded, self._forms)
                        latest += [] if begun is None else [(begun, rendering)]
            del latest[:-4]  # calls may alternate between several chains
        errors: list[tuple[int | None, str]] = []
        for prompt in prompts:
            reason = refused.get(prompt.turn)
            if reason is not None and (not errors or errors[-1][1] != reason):
                errors.append((prompt.turn, reason))
        return Renderings(texts, tuple(errors), tuple(confirmed))

    def _write(self, prompt: _Prompt) -> RenderedText:
        """The text that the template writes; RenderError where it refuses."""
        reference, recorded, opens = self._reference, prompt.recorded, prompt.opens
        if recorded is None:
            return self._write_exactly(prompt, None)
        if self._scaffolds is not None and self._inputs is not None:
            how = prompt.messages, self._inputs, opens, self._forms
            whole, scaffold = self._scaffolds.render(*how) or ("", None)
            if scaffold is not None:
                data = whole.encode()
                # Ids of another length in bytes are of another text, unless a normalizer changes texts.
                differ = opens and len(data) != reference.vocabulary.byte_count(recorded)
                differ = differ and keeps_bytes(reference.tokenizer.normal_form, data)
                matches = not differ and reference.leads_to(whole, recorded, goes_on=not opens)
                if matches or self._scaffolds.is_exact(scaffold, *how):
                    return RenderedText(lambda: whole, matches)
        _, fast = self._renderer.render_chat_fast(
            prompt.messages, self._variables, add_generation_prompt=opens, forms=self._forms
        )
        if fast is None:
            return self._write_exactly(prompt, None)
        if reference.leads_to(fast, recorded, goes_on=not opens):
            return RenderedText(lambda: fast, matches_record=True)
        if opens and reference.spells(recorded, fast):
            return RenderedText(lambda: fast, matches_record=False)
        return self._write_exactly(prompt, fast)

    def _write_exactly(self, prompt: _Prompt, fast: str | None) -> RenderedText:
        """The text of the reference environment, or of the fast engine where both are known to write it alike."""
        rollout, shapes, contexts = self._rollout, self._shapes, None
        if fast is not None and shapes is not None:
            contexts = shapes.contexts_alone(prompt.messages, self._inputs, prompt.opens, self._forms)
            if contexts is not None and shapes.writes_alike(contexts):
                return RenderedText(lambda: fast, matches_record=False)
        text = self._renderer.render(
            prompt.messages,
            rollout.tools,
            add_generation_prompt=prompt.opens,
            template_kwargs=rollout.template_kwargs,
        )
        if contexts is not None and shapes is not None:
            shapes.learn_alike(contexts, text == fast)
        return RenderedText(lambda: text, matches_record=False)


def rendered_differences(
    rollout: Rollout, chains: Chains, texts: RenderedTexts, reference: Reference
) -> Sequence[Difference]:
    """Where prompts and the last answer hold tokens that the template does not write, each difference once."""
    out: list[Difference] = []
    reported: dict[int, set[tuple[int, int, bytes]]] = {}
    comparisons: dict[int, Comparison | None] = {}
    links = {link.turn: link for link in chains.links}
    for k, turn in enumerate(rollout.turns):
        link = links.get(k)
        parent = link.parent if link and link.kind is LinkKind.CONTINUES else None
        reported[k] = set() if parent is None else reported[parent]
        rendered = texts.get(k)
        if turn.prompt_ids is None or rendered is None or rendered.matches_record:
            continue
        old = link.at if link else 0
        completions = chains.completions[parent] if parent is not None else ()
        if completions:
            old = completions[-1].end
        # Differences in the prompt of the parent were reported or skipped there.
        before = None if parent is None else _comparison(rollout, parent, texts, comparisons, reference)
        differing, comparisons[k] = compare_text(rendered.text, turn.prompt_ids, before, reference)
        for stretch in differing:
            in_answer = completion_at(stretch, completions) is not None
            if stretch.key in reported[k] or (in_answer and stretch.kind in SAME_BYTES):
                continue
            reported[k].add(stretch.key)
            prefill = stretch.end == len(turn.prompt_ids) and _is_prefill(
                stretch, rollout, k, rendered.text, reference
            )
            harmless = stretch.start < old or (in_answer and stretch.start == stretch.end)
            effect = _LACKING if stretch.start == stretch.end else _OFF_TEMPLATE
            severity = Severity.NOTE if harmless or prefill else Severity.WARNING
            effect = _PREFILLED if prefill else _KEPT if harmless else effect
            new = difference(stretch, Against.TEMPLATE, severity, effect, k, completions)
            out.append(replace(new, known_cause=PREFILL) if prefill else new)
    # The last answer, where the template would write it differently; a missing turn end is no difference.
    last = len(rollout.turns) - 1
    rendered, seen = texts.get(None), chains.seen[last] if last >= 0 else None
    if seen is not None and rendered is not None and not rendered.matches_record:
        own, before = chains.completions[last][-1], _comparison(rollout, last, texts, comparisons, reference)
        differing, _ = compare_text(rendered.text, seen, before, reference, open_end=True, after=own.start)
        out += [
            difference(stretch, Against.TEMPLATE, Severity.NOTE, _LATER, last, (own,))
            for stretch in differing
            if own.start <= stretch.start < len(seen)
            and (stretch.kind not in SAME_BYTES and stretch.key not in reported[last])
        ]
    return out


def _is_prefill(stretch: Stretch, rollout: Rollout, number: int, text: str, reference: Reference) -> bool:
    """Whether the last tokens of a prompt, which the template writes as `text`, are the first of its answer."""
    turn, renderer = rollout.turns[number], reference.renderer
    index, messages = turn.message_index, prompt_messages(rollout, number)
    own = stretch.recorded
    if stretch.canonical_start < stretch.canonical_end or own.pieces.control[own.start : own.end].any():
        return False
    answer = rollout.messages[index] if index is not None and index < len(rollout.messages) else turn.answer
    opening = own.data.decode("utf-8", "replace")
    first = opening.strip()
    if answer is None or not opening or renderer is None or messages is None:
        return False
    try:
        whole = renderer.render(
            (*messages, answer),
            rollout.tools,
            add_generation_prompt=False,
            template_kwargs=rollout.template_kwargs,
        )
    except RenderError:
        return False
    if not first:
        return whole.startswith(text + opening)
    if answer.tool_calls and _FENCE.fullmatch(first):
        return True  # some models write their tool calls in a fence, which parsers take off
    # A model may leave out the markers that the template writes before its tool call, and space it otherwise.
    start, written = "".join(first.split()), "".join(whole[len(text) :].split())
    return whole.startswith(text) and start in written[: len(start) + 32]


def _comparison(
    rollout: Rollout,
    turn: int,
    texts: RenderedTexts,
    compared: dict[int, Comparison | None],
    reference: Reference,
) -> Comparison | None:
    """The comparison of the prompt of an earlier turn with its text; None if that is not known."""
    ids, rendered = rollout.turns[turn].prompt_ids, texts.get(turn)
    if turn not in compared and ids is not None and rendered is not None and rendered.matches_record:
        compared[turn] = Comparison(KnownText(reference.tokenizer.control_tokens, rendered.text, ids), ids)
    return compared.get(turn)
