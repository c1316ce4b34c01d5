"""Compares each prompt, and the last answer, with what the template writes for the messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tito_audit.align.blocks import SAME_BYTES
from tito_audit.chains.links import LinkKind
from tito_audit.errors import RenderError
from tito_audit.evidence.chains import Chains
from tito_audit.evidence.completions import ConfirmedIds
from tito_audit.evidence.differences import Stretch, difference, region_of
from tito_audit.evidence.model import Against, Construction, Difference
from tito_audit.evidence.prefix_reuse import Comparison, compare_text
from tito_audit.evidence.prompt_starts import LaterText, prompt_starts
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Severity
from tito_audit.record.message import Message
from tito_audit.record.rollout import Rollout
from tito_audit.render.renderer import Forms, Renderer
from tito_audit.render.scaffolds import scaffolds, scaffolds_of
from tito_audit.tokens.segments import Cuts, KnownText
from tito_audit.tokens.vocab import keeps_bytes
from tito_audit.ways.observed import prompt_messages

_KEPT = (
    "harmless as logged: the prompt keeps the tokens of the calls before it, where the template would write this"
)
PREFILL = Construction("TPL207", "prefilled answer", "the harness wrote the first tokens of the answer")
_PREFILLED = "right as long as the loss leaves them out: they were given, not sampled"
_FENCE = re.compile(r"```\w*")
_LATER = "harmless as logged: a later prompt would hold what the template writes"
_OFF_TEMPLATE = "the sampler was given tokens that the template does not write for these messages"
_LACKING = "the sampler was not given what the template writes for these messages"
_WORTH_KNOWING, _MANY = 8192, 5
"""From this many recorded prompt ids, or prompts, on it is cheaper to know most prompts than to render them."""


@dataclass(frozen=True)
class RenderedText:
    """A text that the template writes."""

    write: Callable[[], str] = field(repr=False)
    matches_record: bool
    """True if it is known to encode as the recorded ids."""

    @cached_property
    def text(self) -> str:
        """The text itself."""
        return self.write()


RenderedTexts = dict[int | None, RenderedText]
"""By turn, the text that its prompt should be; under None, the conversation with its last answer."""


class Renderings(NamedTuple):
    """What the template writes for a rollout."""

    texts: RenderedTexts
    errors: tuple[tuple[int | None, str], ...]
    """(turn, message) where the template refuses."""
    confirmed: tuple[ConfirmedIds, ...]
    """Recorded ids that are what rendered texts encode as."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A text to render: a prompt, or the conversation with its last answer."""

    turn: int | None
    """None: the conversation with its last answer."""
    messages: Sequence[Message]
    recorded: Ids | None
    opens: bool = True
    """Whether a generation prompt ends it."""


def render_texts(rollout: Rollout, chains: Chains, reference: Reference) -> Renderings:
    """The text of every prompt that can be rendered, and what rendering shows."""
    assert reference.renderer is not None
    prompts: list[_Prompt] = []
    for k, call in enumerate(rollout.turns):
        sent = prompt_messages(rollout, k)
        if sent and call.prompt_ids is not None:
            prompts.append(_Prompt(k, sent, call.prompt_ids))
    last = rollout.turns[-1] if rollout.turns else None
    if last is not None and last.message_index is not None and last.prompt_messages is None:
        whole = rollout.messages[: last.message_index + 1]
        prompts.append(_Prompt(None, whole, chains.seen[-1], opens=False))
    ids = sum(len(prompt.recorded) for prompt in prompts if prompt.recorded is not None)
    may_know = ids >= _WORTH_KNOWING or len(prompts) >= _MANY
    return _Writer(rollout, reference, reference.renderer, may_know=may_know).written(prompts)


class _Writer:
    """Renders the texts of one rollout, longest first: most prompts are then known to be the start of one."""

    def __init__(self, rollout: Rollout, reference: Reference, renderer: Renderer, *, may_know: bool) -> None:
        """With `may_know`, prompts that are known to be the start of a later text are not rendered."""
        self._rollout, self._reference, self._renderer = rollout, reference, renderer
        self._variables = renderer.variables(rollout.tools, rollout.template_kwargs)
        template = renderer.template(bool(rollout.tools))
        self._shapes = prompt_starts(reference.tokenizer, template)
        every = scaffolds(template)
        self._inputs = every.inputs(self._variables) if every is not None else None
        self._scaffolds = scaffolds_of(renderer, bool(rollout.tools))
        self._starts = self._shapes if may_know else None
        self._forms = Forms()
        self._later: list[tuple[LaterText, RenderedText]] = []
        """The latest texts that lead to recorded ids, of several chains."""

    def written(self, prompts: Sequence[_Prompt]) -> Renderings:
        """The texts of these prompts."""
        starts, ordered = self._starts, prompts
        if starts is not None:
            ordered = sorted(prompts, key=lambda prompt: -len(prompt.messages))
        texts: RenderedTexts = {}
        refused: dict[int | None, str] = {}
        confirmed: list[ConfirmedIds] = []
        for prompt in ordered:
            size, recorded = len(prompt.messages), prompt.recorded
            later = self._later_than(prompt)
            if later and starts and recorded is not None and starts.is_known(later[0], size, recorded):
                rendering = texts[prompt.turn] = _start_of(*later, starts.cuts, recorded)
                self._keep(starts.start(later[0], size, recorded), rendering)
                continue
            try:
                texts[prompt.turn] = rendering = self._rendered(prompt)
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
                    self._keep(begun, rendering)
        errors: list[tuple[int | None, str]] = []
        for prompt in prompts:
            reason = refused.get(prompt.turn)
            if reason is not None and (not errors or errors[-1][1] != reason):
                errors.append((prompt.turn, reason))
        return Renderings(texts, tuple(errors), tuple(confirmed))

    def _later_than(self, prompt: _Prompt) -> tuple[LaterText, RenderedText] | None:
        """The latest known text whose messages begin with a prompt's."""
        if self._starts is not None and prompt.opens and prompt.recorded is not None:
            for later in reversed(self._later):
                if self._starts.are_first(prompt.messages, later[0], self._forms):
                    return later
        return None

    def _keep(self, later: LaterText | None, text: RenderedText) -> None:
        if later is not None:
            self._later.append((later, text))
            del self._later[:-4]  # calls may alternate between several chains

    def _rendered(self, prompt: _Prompt) -> RenderedText:
        """The text that the template writes; RenderError where it refuses."""
        reference, recorded, opens = self._reference, prompt.recorded, prompt.opens
        if recorded is None:
            return self._exactly(prompt, None)
        if self._scaffolds is not None and self._inputs is not None:
            how = prompt.messages, self._inputs, opens, self._forms
            whole, scaffold = self._scaffolds.written(*how) or ("", None)
            if scaffold is not None:
                data = whole.encode()
                # Tokens of another length are of another text, unless a text is normalised first.
                differ = opens and len(data) != reference.vocabulary.byte_count(recorded)
                differ = differ and keeps_bytes(reference.tokenizer.normal_form, data)
                matches = not differ and reference.leads_to(whole, recorded, goes_on=not opens)
                if matches or self._scaffolds.is_exact(scaffold, *how):
                    return RenderedText(lambda: whole, matches)
        _, fast = self._renderer.accepted_fast(
            prompt.messages, self._variables, add_generation_prompt=opens, forms=self._forms
        )
        if fast is None:
            return self._exactly(prompt, None)
        if reference.leads_to(fast, recorded, goes_on=not opens):
            return RenderedText(lambda: fast, matches_record=True)
        if opens and reference.spells(recorded, fast):
            return RenderedText(lambda: fast, matches_record=False)
        return self._exactly(prompt, fast)

    def _exactly(self, prompt: _Prompt, fast: str | None) -> RenderedText:
        """The text of the reference environment, or of the fast engine where both are known to write it alike."""
        rollout, shapes, places = self._rollout, self._shapes, None
        if fast is not None and shapes is not None:
            places = shapes.places_alone(prompt.messages, self._inputs, prompt.opens, self._forms)
            if places is not None and shapes.writes_alike(places):
                return RenderedText(lambda: fast, matches_record=False)
        text = self._renderer.render(
            prompt.messages,
            rollout.tools,
            add_generation_prompt=prompt.opens,
            template_kwargs=rollout.template_kwargs,
        )
        if places is not None and shapes is not None:
            shapes.learn_alike(places, text == fast)
        return RenderedText(lambda: text, matches_record=False)


def _start_of(later: LaterText, text: RenderedText, cuts: Cuts, recorded: Ids) -> RenderedText:
    """The start of a later text, if that is known to lead to these ids."""

    def write() -> str:
        return "".join(cuts.split(text.text)[: 2 * len(cuts.positions(recorded))]) + later.opener.tail

    return RenderedText(write, matches_record=True)


def rendered_differences(
    rollout: Rollout, chains: Chains, texts: RenderedTexts, reference: Reference
) -> Sequence[Difference]:
    """Where prompts and the last answer hold tokens that the template does not write, each difference once."""
    out: list[Difference] = []
    reported: dict[int, set[tuple[int, int, bytes]]] = {}
    comparisons: dict[int, Comparison | None] = {}
    for k, turn in enumerate(rollout.turns):
        link = chains.link(k)
        parent = link.parent if link and link.kind is LinkKind.CONTINUES else None
        reported[k] = set() if parent is None else reported[parent]
        rendered = texts.get(k)
        if turn.prompt_ids is None or rendered is None or rendered.matches_record:
            continue
        old = link.at if link else 0
        regions = chains.regions[parent] if parent is not None else ()
        if regions:
            old = regions[-1].end
        # Differences in the parent's prompt were reported or skipped there.
        before = None if parent is None else _comparison(rollout, parent, texts, comparisons, reference)
        differing, comparisons[k] = compare_text(rendered.text, turn.prompt_ids, before, reference)
        for stretch in differing:
            in_answer = region_of(stretch, regions) is not None
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
            new = difference(stretch, Against.TEMPLATE, severity, effect, k, regions)
            out.append(replace(new, construction=PREFILL) if prefill else new)
    # Where the template would write the last answer differently; its missing end is not a difference.
    last = len(rollout.turns) - 1
    rendered, seen = texts.get(None), chains.seen[last] if last >= 0 else None
    if seen is not None and rendered is not None and not rendered.matches_record:
        own, before = chains.regions[last][-1], _comparison(rollout, last, texts, comparisons, reference)
        differing, _ = compare_text(rendered.text, seen, before, reference, open_end=True, after=own.start)
        out += [
            difference(stretch, Against.TEMPLATE, Severity.NOTE, _LATER, last, (own,))
            for stretch in differing
            if own.start <= stretch.start < len(seen)
            and (stretch.kind not in SAME_BYTES and stretch.key not in reported[last])
        ]
    return out


def _is_prefill(stretch: Stretch, rollout: Rollout, number: int, text: str, reference: Reference) -> bool:
    """Whether the last tokens of a prompt, of which the template writes this text, are the first of the answer."""
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
        return True  # some models write their calls in a fence, and parsers take it off
    # A model may leave out the markers that the template writes around its tool call, and space it otherwise.
    start, written = "".join(first.split()), "".join(whole[len(text) :].split())
    return whole.startswith(text) and start in written[: len(start) + 32]  # markers come before it


def _comparison(
    rollout: Rollout,
    turn: int,
    texts: RenderedTexts,
    compared: dict[int, Comparison | None],
    reference: Reference,
) -> Comparison | None:
    """How the prompt of an earlier turn compares with its text; None if that is not known."""
    ids, rendered = rollout.turns[turn].prompt_ids, texts.get(turn)
    if turn not in compared and ids is not None and rendered is not None and rendered.matches_record:
        compared[turn] = Comparison(KnownText(reference.tokenizer.cuts, rendered.text, ids), ids)
    return compared.get(turn)
