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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import is_, or_
from typing import NamedTuple

from tito_audit.align.blocks import SAME_BYTES
from tito_audit.chains.links import LinkKind, parents_of
from tito_audit.errors import RenderError
from tito_audit.evidence.chains import Chains
from tito_audit.evidence.completions import CompletionInContext, ConfirmedIds
from tito_audit.evidence.differences import (
    Comparison,
    CompletionSpan,
    Stretch,
    compare_text,
    completion_at,
    difference,
)
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
from tito_audit.tokens.segments import ControlTokens, KnownText
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import keeps_bytes
from tito_audit.ways.observations import prompt_messages

_ONE_IN, _CHECKED = 256, 1024
"""One in so many known prompts is rendered anyway; one in so many segments of what a conversation begins with is
checked with the reference encoder."""
_MOST = 1 << 16
"""How many contexts are remembered, and how many messages of outlines."""
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


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text that the template writes."""

    text: str
    matches_record: bool
    """Whether it is known to encode as the recorded ids."""
    tail: str | None = None
    """For prompts that it starts with, what follows their last control token; None: it is for itself alone."""

    def text_of(self, ids: Ids, cuts: ControlTokens) -> str:
        """The text that encodes as these recorded ids."""
        if self.tail is None:
            return self.text
        return "".join(cuts.split(self.text)[: 2 * len(cuts.positions(ids))]) + self.tail


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """All that decides how a template writes a text, but for the words of its messages."""

    given: int
    """A number for everything else passed to the template."""
    opens: bool
    """Whether it is a prompt; if not, it may continue after its recorded ids."""
    shapes: Sequence[int]
    """`[messages]` a number for the shape of each."""
    around: Sequence[int]
    """`[messages]` a number for what the template sees of it while it writes another one."""
    before: Sequence[int]
    """`[messages + 1]` a bit for each number in `around` that comes before it."""
    answers: Sequence[int]
    """`[messages + 1]` how many answers come before it."""
    proven: set[tuple[int, int]]
    """(how many messages to read, how many of these are known to have proven contexts)."""

    def contexts(self, size: int, every: int) -> list[_Context]:
        """The context of each of the first messages in the text of `every` messages, and of what precedes them."""
        around, before, opens = self.around, self.before, self.opens or every < len(self.shapes)
        after, beyond = 0, 0
        for other in around[size:every]:
            beyond |= 1 << other
        contexts: list[_Context] = []
        for i in range(size - 1, -1, -1):
            neighbors = around[i - 1] if i else -1, around[i + 1] if i + 1 < every else -1
            to_end = min(size - i, _FAR), min(every - i, _FAR)
            own = self.given, opens, beyond, self.shapes[i]
            contexts.append((*own, *neighbors, *to_end, before[i], after))
            after |= 1 << around[i]
        contexts.append((self.given, opens, beyond, around[0], around[size - 1], around[every - 1], after))
        return contexts


@dataclass(frozen=True, slots=True, eq=False)
class LaterText:
    """A text of the template that encodes as `ids`, and may start with earlier prompts."""

    messages: Sequence[Message]
    outline: Outline
    ids: Ids
    prompt_ends: Sequence[int]
    """`[messages + 1]` how many of the ids are the prompt of the first 0, 1, 2, … messages; -1: none are."""
    is_shared: bool
    """Whether its messages are the first ones of the rollout."""
    prompts: RenderedText
    """Its text, for the prompts that it is known to start with."""

    def may_start_with(self, size: int, recorded: Ids) -> bool:
        """Whether it starts with `recorded`, which ends with the generation prompt after the first messages."""
        return self.prompt_ends[size] == len(recorded) and starts_with(self.ids, recorded)

    def texts_are_distinct(self, every: int) -> bool:
        """Whether no two of the first messages have one text, which could hide that it is written elsewhere."""
        texts = [
            text for message in self.messages[:every] for text in (message.content, message.reasoning) if text
        ]
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
        self._outlines: dict[tuple[object, ...], Outline] = {}
        self._outlined = 0
        """The messages of all outlines."""
        self._alike: set[_Context] = set()
        """Contexts in which both engines write messages alike."""
        self._found = 0
        self._trusted = 0
        self._engines_differ = False
        self._off = False
        """Whether some prompt was not what the template writes though its contexts were proven."""

    def later(
        self,
        text: str,
        messages: Sequence[Message],
        inputs: Inputs | None,
        opens: bool,
        ids: Ids,
        forms: ChatForms,
        *,
        is_shared: bool,
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
                if prompt_ids[0] not in prompt_ids[1:]:  # so no two of them overlap
                    self._openers[inputs.number] = PromptOpener(pieces[-1], prompt_ids)
        opener = self._openers[inputs.number]
        read = self._shapes.read(messages, forms) if opener is not None else None
        if opener is None or not read:
            return None
        shapes, around, *_ = zip(*read, strict=True)
        outline = self._outlines.get((inputs.number, opens, shapes, around))
        if outline is None:
            self._outlined += len(messages)
            if self._outlined > _MOST:
                self._outlines.clear()
                self._outlined = len(messages)
            before = [*accumulate([1 << number for number in around], or_, initial=0)]
            answers = [*accumulate([message.role == _ANSWER for message in messages], initial=0)]
            outline = Outline(inputs.number, opens, shapes, around, before, answers, set())
            self._outlines[inputs.number, opens, shapes, around] = outline
        parts = ids.tobytes().split(opener.ids.tobytes())
        if len(parts) - 1 != outline.answers[-1] + opens:  # a message may spell one
            return None
        if True in [len(part) % ids.itemsize > 0 for part in parts]:  # found across ids
            return None
        ends = list(accumulate([len(part) // ids.itemsize + len(opener.ids) for part in parts[:-1]]))
        return LaterText(
            messages,
            outline,
            ids,
            [ends[number] if number < len(ends) else -1 for number in outline.answers],
            is_shared,
            RenderedText(text, matches_record=True, tail=opener.tail),
        )

    def are_first(self, messages: Sequence[Message], later: LaterText, every: int, forms: ChatForms) -> bool:
        """Whether a later text, of which `every` messages are read, starts with these messages."""
        size = len(messages)
        first = later.messages[:size]
        if every < size:
            return False
        if all(map(is_, messages, first)):
            return True
        if tuple(messages) != tuple(first):
            return False
        read = self._shapes.read(messages, forms)  # 1 and 1.0 are equal but differ in shape
        return read is not None and [each.shape for each in read] == [*later.outline.shapes[:size]]

    def is_known(self, later: LaterText, every: int, size: int, recorded: Ids, begins: bool) -> bool:
        """Whether the template is known to write these recorded ids for the first of `every` messages of a text.

        False too for a prompt that is to be rendered as a check. With `begins`, the ids of the text are known to
        start with these.
        """
        if self._off or self._found % _ONE_IN == _ONE_IN - 1 or later.prompt_ends[size] != len(recorded):
            return False
        if not begins and not starts_with(later.ids, recorded):
            return False
        pair, outline = (every, size), later.outline
        if pair not in outline.proven:
            if not self._proven.issuperset(outline.contexts(size, every)):
                return False
            if len(outline.proven) < _MOST:
                outline.proven.add(pair)
        self._found += 1
        return True

    def learn(self, later: LaterText, every: int, size: int, recorded: Ids, text: str | None) -> None:
        """Record whether the text of `every` messages starts with a rendered prompt.

        `text` is the text of the prompt, None if it does not encode as the recorded ids.
        """
        if not later.may_start_with(size, recorded):
            return
        contexts = set(later.outline.contexts(size, every))
        if text is None or not later.prompts.text.startswith(text):
            self._off |= self._proven.issuperset(contexts)
        elif self._proven.issuperset(contexts):
            self._found += 1
        elif later.texts_are_distinct(every) and len(self._proven) < _MOST:
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


RenderedTexts = dict[int | None, RenderedText]
"""The text that the prompt of each turn should be; under None, the conversation with its last answer."""


class Renderings(NamedTuple):
    """What the template writes for a rollout."""

    texts: RenderedTexts
    errors: tuple[tuple[int | None, str], ...]
    """(turn, message) where the template refuses."""
    confirmed: tuple[ConfirmedIds, ...]


def render_texts(rollout: Rollout, chains: Chains, reference: Reference) -> Renderings:
    """Render the text of every prompt whose messages are known, and of the conversation with its last answer."""
    assert reference.renderer is not None
    sizes: dict[int | None, int] = {}
    count = 0
    for k, call in enumerate(rollout.turns):
        own, index = call.prompt_messages, call.message_index
        size = len(own) if own is not None else min(index or 0, len(rollout.messages))
        if size and call.prompt_ids is not None:
            sizes[k] = size
            count += len(call.prompt_ids)
    last = rollout.turns[-1] if rollout.turns else None
    if last is not None and last.message_index is not None and last.prompt_messages is None:
        sizes[None] = min(last.message_index + 1, len(rollout.messages))
        count += 0 if (seen := chains.seen[-1]) is None else len(seen)
    may_know = count >= _WORTH_KNOWING or len(sizes) >= _MANY
    return _PromptWriter(rollout, chains, reference, reference.renderer, may_know=may_know).write_all(sizes)


class _PromptWriter:
    """Renders the texts of one rollout, longest first: most prompts are then known to start one of them."""

    def __init__(
        self, rollout: Rollout, chains: Chains, reference: Reference, renderer: Renderer, *, may_know: bool
    ) -> None:
        """With `may_know`, prompts that are known to start a later text are not rendered."""
        self._rollout, self._chains, self._reference, self._renderer = rollout, chains, reference, renderer
        self._variables = renderer.variables(rollout.tools, rollout.template_kwargs)
        template = renderer.template(bool(rollout.tools))
        self._shapes = prompt_starts(reference.tokenizer, template)
        every = template_scaffolds(template)
        self._inputs = every.inputs(self._variables) if every is not None else None
        self._scaffolds = find_scaffolds(renderer, bool(rollout.tools))
        self._starts = self._shapes if may_know else None
        self._forms = ChatForms()

    def write_all(self, sizes: Mapping[int | None, int]) -> Renderings:
        """The texts of prompts, by how many messages each is of."""
        starts, turns = self._starts, self._rollout.turns
        ordered = list(sizes) if starts is None else sorted(sizes, key=sizes.__getitem__, reverse=True)
        parents = parents_of(self._chains.links)
        texts: RenderedTexts = {}
        refused: dict[int | None, str] = {}
        confirmed: list[ConfirmedIds] = []
        latest: list[tuple[LaterText, int]] = []
        """Texts that encode as recorded ids, of several chains, and how many of their messages to read."""
        begun_by: dict[int | None, LaterText] = {}
        """By turn, a text whose ids start with its prompt."""
        for turn in ordered:
            size, opens = sizes[turn], turn is not None
            is_shared = turn is None or turns[turn].prompt_messages is None
            recorded = self._chains.seen[-1] if turn is None else turns[turn].prompt_ids
            parent = len(turns) - 1 if turn is None else parents.get(turn)
            later, every = None, 0  # the latest known text whose messages begin with those of the prompt
            if starts is not None and turn is not None:
                for candidate, every in reversed(latest):
                    shared = is_shared and candidate.is_shared
                    if shared or starts.are_first(self._messages(turn, size), candidate, every, self._forms):
                        later = candidate
                        break
            begins = begun_by.get(turn) is later
            if later and starts and recorded is not None and starts.is_known(later, every, size, recorded, begins):
                texts[turn] = later.prompts
                latest.append((later, size))
            else:
                messages = self._messages(turn, size)
                try:
                    begun = texts.get(parent) if parent is not None else None
                    unlike = None if begun is None or begun.matches_record else begun.text
                    texts[turn] = rendering = self._write(messages, recorded, opens, unlike)
                except RenderError as error:
                    refused[turn] = str(error)
                    continue
                if recorded is None:
                    continue
                matches = rendering.matches_record
                if later is not None and starts is not None:
                    starts.learn(later, every, size, recorded, rendering.text if matches else None)
                later, ids, agreed = None, recorded, recorded if matches else None
                if not matches and turn is None and starts is not None:
                    # Where only the last answer differs, the whole conversation starts with all prompts.
                    tokenizer, prompt = self._reference.tokenizer, turns[-1].prompt_ids
                    (ids,) = tokenizer.encode_fast_batch([rendering.text])
                    if prompt is not None and starts_with(ids, prompt):
                        agreed = prompt if tokenizer.check_sample([rendering.text], [ids], _CHECKED) else None
                if agreed is not None:
                    confirmed.append(ConfirmedIds(agreed, goes_on=not opens))
                    if starts is not None:
                        how = messages, self._inputs, opens, ids, self._forms
                        later = starts.later(rendering.text, *how, is_shared=is_shared)
                        latest += [] if later is None else [(later, size)]
            if later is not None and parent is not None:
                begun_by[parent] = later
            del latest[:-4]  # calls may alternate between several chains
        errors: list[tuple[int | None, str]] = []
        for turn in sizes:
            reason = refused.get(turn)
            if reason is not None and (not errors or errors[-1][1] != reason):
                errors.append((turn, reason))
        return Renderings(texts, tuple(errors), tuple(confirmed))

    def _messages(self, turn: int | None, size: int) -> Sequence[Message]:
        """The messages of a prompt."""
        own = None if turn is None else self._rollout.turns[turn].prompt_messages
        return self._rollout.messages[:size] if own is None else own

    def _write(
        self, messages: Sequence[Message], recorded: Ids | None, opens: bool, unlike: str | None
    ) -> RenderedText:
        """The text that the template writes; RenderError where it refuses.

        If it starts with `unlike`, the recorded ids start with others, so the text is not encoded.
        """
        reference = self._reference
        if recorded is None:
            return self._write_exactly(messages, opens, None)
        if self._scaffolds is not None and self._inputs is not None:
            how = messages, self._inputs, opens, self._forms
            whole, scaffold = self._scaffolds.render(*how) or ("", None)
            if scaffold is not None:
                differs = unlike is not None and whole.startswith(unlike)
                if opens and not differs:
                    # Ids of another length in bytes are of another text, unless a normalizer changes texts.
                    data = whole.encode()
                    differs = len(data) != reference.vocabulary.byte_count(recorded)
                    differs = differs and keeps_bytes(reference.tokenizer.normal_form, data)
                matches = not differs and reference.leads_to(whole, recorded, goes_on=not opens)
                if matches or self._scaffolds.is_exact(scaffold, *how):
                    return RenderedText(whole, matches)
        _, fast = self._renderer.render_chat_fast(
            messages, self._variables, add_generation_prompt=opens, forms=self._forms
        )
        if fast is None:
            return self._write_exactly(messages, opens, None)
        if reference.leads_to(fast, recorded, goes_on=not opens):
            return RenderedText(fast, matches_record=True)
        if opens and reference.spells(recorded, fast):
            return RenderedText(fast, matches_record=False)
        return self._write_exactly(messages, opens, fast)

    def _write_exactly(self, messages: Sequence[Message], opens: bool, fast: str | None) -> RenderedText:
        """The text of the reference environment, or of the fast engine where both are known to write it alike."""
        rollout, shapes, contexts = self._rollout, self._shapes, None
        if fast is not None and shapes is not None:
            contexts = shapes.contexts_alone(messages, self._inputs, opens, self._forms)
            if contexts is not None and shapes.writes_alike(contexts):
                return RenderedText(fast, matches_record=False)
        text = self._renderer.render(
            messages,
            rollout.tools,
            add_generation_prompt=opens,
            template_kwargs=rollout.template_kwargs,
        )
        if contexts is not None and shapes is not None:
            shapes.learn_alike(contexts, text == fast)
        return RenderedText(text, matches_record=False)


def rendered_differences(
    rollout: Rollout,
    chains: Chains,
    texts: RenderedTexts,
    answers: Sequence[CompletionInContext],
    reference: Reference,
) -> Sequence[Difference]:
    """Where prompts and the last answer hold tokens that the template does not write, each difference once.

    Of `answers` the last one may show that the template writes the last answer as it was sampled.
    """
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
    if seen is None or rendered is None or rendered.matches_record:
        return out
    prompt, before, at = texts.get(last), None, None
    if prompt is not None and prompt.tail is None and answers and answers[-1].turn == last:
        at = answers[-1].written_at(prompt.text, rendered.text, reference)
    if prompt is None or prompt.text is not rendered.text:  # else the ids of the whole text are at hand
        before = _comparison(rollout, last, texts, comparisons, reference)
    if at is not None and before is not None and before.texts is not None:
        # Only tokens differ, unless a text that differs occurs once more: texts may then be paired in another way.
        rest = rendered.text[at:].encode()
        if not any(text in rest for _, *both in before.texts for text in both):
            return out
    turn = rollout.turns[last]
    assert turn.prompt_ids is not None
    own = CompletionSpan(last, len(turn.prompt_ids), len(seen), turn.message_index)
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
        cuts = reference.tokenizer.control_tokens
        compared[turn] = Comparison(KnownText(cuts, rendered.text_of(ids, cuts), ids), ids)
    return compared.get(turn)
