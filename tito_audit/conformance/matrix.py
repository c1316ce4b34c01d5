"""Whether sampled tokens are kept: a cell for each template, builder and conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from tito_audit.conformance.builders import BUILDERS, AnsweredTurn, Build, NewRow, NotBuilt, NotFit, PromptBuilder
from tito_audit.conformance.corpus import CORPUS, CorpusConversation, SamplingForm
from tito_audit.conformance.world import Tokens, UnknownSample, World
from tito_audit.errors import RenderError
from tito_audit.render.spans import common_start
from tito_audit.templates.append_only import Step, StepOutcome
from tito_audit.templates.breaks import starts_with_end

_AROUND = 24
"""How many tokens of each side of a break are shown."""


class TokenFate(StrEnum):
    """What became of the sampled tokens of a conversation."""

    KEPT = "kept"
    """Each prompt starts with all tokens before it, and adds what the template writes there."""
    FORKED = "forked"
    """The builder begins another training row; what was sampled stays in the row before."""
    OFF_TEMPLATE = "off template"
    """The tokens are kept, but the prompt adds other text than the template writes there."""
    BROKEN = "broken"
    """A prompt does not start with what was sampled before it."""
    RAISES = "raises"
    """The builder raises an error in place of a prompt."""
    NOT_TAKEN = "not taken"
    """The builder is not made for these messages."""
    REFUSED = "refused"
    """The template refuses the conversation."""
    UNSAMPLED = "not sampled"
    """What the model sampled is not known, so nothing is compared."""


ORDER = tuple(TokenFate)
"""The best outcome first."""


@dataclass(frozen=True, slots=True)
class DriftCell:
    """What one builder does with one conversation of one template."""

    template: str
    builder: str
    conversation: str
    outcome: TokenFate
    turn: int | None = None
    """The answer after which it happened, counted from 0."""
    at: int | None = None
    """The first token that differs, in the next prompt."""
    cause: str = ""
    detail: str = ""
    """The lines and conditions of the template that decide; "" if none do."""
    line: int | None = None
    """The line of the template."""
    sampled: str = ""
    """The text from the break on, as it was sampled or as the template writes it."""
    next: str = ""
    """The text from the break on in the next prompt."""


def drift_cells(
    world: World, builders: Sequence[PromptBuilder] = BUILDERS, corpus: Iterable[CorpusConversation] = CORPUS
) -> Iterator[DriftCell]:
    """The cells of one template, conversation by conversation."""
    ways = [(builder, builder.begin(world)) for builder in builders]
    for conversation in corpus:
        for builder, build in ways:
            yield _compare(world, builder, build, conversation)


def _compare(world: World, builder: PromptBuilder, build: Build, conversation: CorpusConversation) -> DriftCell:
    probe, prompt = conversation.probe, None
    cell = partial(DriftCell, world.name, builder.name, conversation.name)
    for number, (answer, until) in enumerate(conversation.turns):
        try:
            text = world.text(probe.messages[:until], probe.tools, opens=True)
            sample = world.sample(conversation, answer)
            if prompt is None:
                prompt = world.ids(world.text(probe.messages[:answer], probe.tools, opens=True))
        except RenderError as error:
            return cell(TokenFate.REFUSED, number, cause=str(error))
        except UnknownSample as error:
            return cell(TokenFate.UNSAMPLED, number, cause=str(error))
        turn = AnsweredTurn(probe, answer, until, prompt, sample, number)
        try:
            after = build(turn)
        except NotFit as error:
            outcome = TokenFate.KEPT if number else TokenFate.NOT_TAKEN
            return cell(outcome, number, cause=f"up to here: {error}" if number else str(error))
        except (RenderError, NotBuilt) as error:
            return cell(TokenFate.RAISES, number, cause=str(error))
        except NewRow as error:
            return cell(TokenFate.FORKED, number, cause=str(error))
        seen, prompt = turn.seen_ids, after
        if after[: len(seen)] != seen:
            at = next(
                (k for k, pair in enumerate(zip(seen, after, strict=False)) if pair[0] != pair[1]), len(after)
            )
            sides = world.decode(seen[at : at + _AROUND]), world.decode(after[at : at + _AROUND])
            return cell(TokenFate.BROKEN, number, at, *_cause(world, conversation, turn, after, text), *sides)
        # The tokens are kept. Does the prompt add what the template writes after them?
        tail, wanted = world.decode(after[len(seen) :]), _text_after_answer(text, turn, world)
        if wanted is None or not tail:
            fits = text.endswith(tail)
        else:  # the sampled end token stays, even if the template ends earlier turns with another one
            ended = sample.ended and wanted.endswith(tail) and starts_with_end(wanted[: len(wanted) - len(tail)])
            fits = tail == wanted or ended
        if not fits:
            shared = common_start(wanted or "", tail)
            return cell(
                TokenFate.OFF_TEMPLATE,
                number,
                len(seen) + len(world.ids(tail[:shared])),
                "what the prompt adds is not what the template writes there",
                sampled=(wanted or text)[shared : shared + 4 * _AROUND],
                next=tail[shared : shared + 4 * _AROUND],
            )
    return cell(TokenFate.UNSAMPLED if prompt is None else TokenFate.KEPT)


def _text_after_answer(text: str, turn: AnsweredTurn, world: World) -> str | None:
    """What the template writes from where sampling ended; None if the answer is not in its text."""
    body = turn.sample.text
    for end in sorted(filter(None, world.ends), key=len, reverse=True):
        body = body.removesuffix(end)
    # Search for a long end of the answer first: its last words may come again in the next turn.
    ends = (body.strip()[-size:] for size in (96, 48, 24, 12))
    last = next((each for each in ends if each and each in text), "")
    if not last:
        return None
    at = text.rfind(last)
    rest = text[at + len(last) :]
    ended = next((each for each in world.ends if each and rest.lstrip().startswith(each)), "")
    if turn.sample.ended and ended:  # with the white space before it, as sampled or as the template trims it
        return rest.lstrip()[len(ended) :]
    return rest.removeprefix(body[len(body.rstrip()) :])


def _cause(
    world: World, conversation: CorpusConversation, turn: AnsweredTurn, after: Tokens, text: str
) -> tuple[str, str, int | None]:
    """The cause of a break, what decides it, and its line in the template."""
    history, then = world.decode(turn.seen_ids), world.decode(after)
    if then.startswith(history):
        return "re-tokenized: the same text in other tokens", "", None
    prompt = world.text(turn.probe.messages[: turn.answer], turn.probe.tools, opens=True)
    written = world.sample(replace(conversation, sampled=SamplingForm.AS_WRITTEN), turn.answer).text
    if text.startswith(prompt + written):
        return f"the template writes it otherwise than it was sampled: {conversation.sampled}", "", None
    shared = common_start(prompt + written, text)
    step = Step(turn.probe, turn.answer, turn.until, StepOutcome.BROKEN, prompt, written, text, shared)
    explained = world.explained(step)
    tags = [decision.tag for decision in explained.conditions] or [
        tag for tag in (explained.rendered.tag, explained.sampled.tag) if tag is not None
    ]
    detail = "; ".join(f"line {tag.line}: {tag.source}" for tag in dict.fromkeys(tags))
    return str(explained.change), detail, tags[0].line if tags else None


def worsened_cells(old: Iterable[DriftCell], new: Iterable[DriftCell]) -> list[tuple[DriftCell, DriftCell]]:
    """The cells that got worse, as they were and as they are; cells that only one table has do not count."""
    before = {(each.template, each.builder, each.conversation): each for each in old}
    pairs = [(before.get((each.template, each.builder, each.conversation)), each) for each in new]
    return [
        (was, now) for was, now in pairs if was is not None and ORDER.index(now.outcome) > ORDER.index(was.outcome)
    ]
