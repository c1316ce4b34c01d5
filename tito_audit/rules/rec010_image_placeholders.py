"""REC010: image placeholders miscounted or expanded twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from tito_audit.evidence.images import (
    ImageSpan,
    ImageTokens,
    StatedImages,
    image_tokens,
    images_in_ids,
    images_in_messages,
)
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.message import Message
from tito_audit.rule import rule
from tito_audit.rules._words import counted, head

_MERGED = (1, 4, 9, 16)
"""How many patches one token may stand for: Qwen-VL and GLM-V merge 2 x 2."""


@dataclass(frozen=True, slots=True)
class _ImageSequence:
    """The images in one sequence of ids, and what its messages state about them."""

    where: Where
    turn: int | None
    ids: Ids
    spans: tuple[ImageSpan, ...]
    stated: StatedImages | None
    """None where the messages do not tell."""
    tokens: ImageTokens

    @property
    def images(self) -> list[ImageSpan]:
        """The spans of images, without those of videos."""
        return [span for span in self.spans if not span.video]

    def hit(self, evidence: Evidence, place: tuple[int, int], message: str, cause: str, severity: Severity) -> Hit:
        """A hit on a range of the ids."""
        side = head(evidence, self.ids[place[0] : place[1]])
        return Hit(self.where, *place, message, self.turn, cause, severity, side)


@rule(
    "REC010",
    Severity.WARNING,
    headline="{n} with miscounted image placeholders",
    needs=(Needs.TOKENIZER, Needs.IMAGE_TOKENS),
)
def image_placeholders(evidence: Evidence) -> Iterator[Hit]:
    """Image placeholders are miscounted or expanded twice.

    ## What it finds
    - An image whose tokens were opened twice before they were closed twice (`<|vision_start|>` inside
      `<|vision_start|>`): template and processor both wrote it. An error.
    - More or fewer images in a prompt or row than its messages state. Families that cut an image into parts
      (Gemma) are only checked for too few, and so are prompts with videos.
    - One placeholder where other images of the prompt have a run of them, and a run twice or more as long as that
      of the same image elsewhere.
    - Images whose number, or whose tokens, are not those of the row's `image_grid_thw`.

    Known are the image tokens of Qwen-VL, Gemma 3 and 4, GLM-V, InternVL, Kimi-VL, Llama 3.2 Vision, Llama 4 and
    Pixtral. With another vocabulary the rule is skipped, unless messages show that there are no images. Rollouts
    whose text spells image tokens are not judged. Each kind of mistake is one finding for a rollout, at the first
    prompt that has it.

    ## Why it matters
    Image features replace placeholders one by one. One too few or too many moves all features after it, or the
    trainer fails; a row without them trains answers about an image that the policy never saw.

    ## Example
    The second image is missing:

    ```text
    warning REC010 turn 0 prompt at 8
      the messages hold 2 images, the ids 1; the answer is about an image that its prompt lacks
           0 │<|im_start|>│us │er │⏎  │<|vision_start|>│<|image_pad|>│<|image_pad|>│<|vision_end|>│
          id  2001         314 257 198 2007             2009          2009          2008
           8 │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │
              ^
          id  17 2002       198 2001         1620      198
    ```

    ## Repair
    None: the log does not hold the missing image. Log the ids that the server was given, after its processor.
    """
    tokens = image_tokens(evidence.vocabulary) if evidence.vocabulary is not None else None
    if tokens is None:
        return
    if Needs.IMAGES not in evidence.present:
        # The row, or else the last prompt, may hold a token that opens an image.
        row, turns = evidence.rollout.training_row, evidence.rollout.turns
        ids = row.token_ids if row is not None else turns[-1].prompt_ids if turns else None
        if ids is None or (tokens.start if tokens.start >= 0 else tokens.pad) not in ids:
            return
    reported: set[str] = set()
    for sequence in _sequences(evidence, tokens):
        for hit in _check_sequence(evidence, sequence):
            if hit.cause not in reported:
                reported.add(hit.cause)
                yield hit


def _sequences(evidence: Evidence, tokens: ImageTokens) -> Iterator[_ImageSequence]:
    """Every prompt and the row; without images in the messages only the longest, to find any written twice."""
    rollout, row = evidence.rollout, evidence.rollout.training_row
    prompts = [(k, turn.prompt_ids) for k, turn in enumerate(rollout.turns) if turn.prompt_ids is not None]
    stated = bool(evidence.present & Needs.IMAGES)
    if not stated:
        prompts = [] if row is not None else prompts[-1:]
    # A text, a thought or a call that spells a placeholder may be read as an image.
    names = [name for name in (tokens.family.pad, tokens.family.start, tokens.family.end) if name is not None]
    for message in chain(rollout.messages, *(turn.prompt_messages or () for turn in rollout.turns)):
        texts = message.text, message.reasoning or "", *(str(call.arguments) for call in message.tool_calls)
        if any(name in text for text in texts for name in names):
            return
    generated = False
    for number, ids in prompts:
        generated |= number > 0 and _holds_image_tokens(rollout.turns[number - 1].completion_ids, tokens)
        if generated:
            break
        turn = rollout.turns[number]
        messages = turn.prompt_messages  # None if the log does not tell
        if messages is None and turn.message_index is not None:
            messages = rollout.messages[: turn.message_index]
        yield _image_sequence(Where.PROMPT, number, ids, messages if stated else None, tokens)
    if row is not None:
        generated |= row.loss_mask is not None and _holds_image_tokens(row.token_ids[row.loss_mask], tokens)
        if not generated:
            yield _image_sequence(Where.ROW, None, row.token_ids, rollout.messages if stated else None, tokens)


def _image_sequence(
    where: Where, turn: int | None, ids: Ids, messages: Sequence[Message] | None, tokens: ImageTokens
) -> _ImageSequence:
    spans = tuple(images_in_ids(ids, tokens))
    stated = images_in_messages(messages) if messages else None
    return _ImageSequence(where, turn, ids, spans, stated, tokens)


def _holds_image_tokens(ids: Ids | None, tokens: ImageTokens) -> bool:
    """Whether these generated ids hold image tokens, after which nothing can be counted."""
    return ids is not None and bool(images_in_ids(ids, tokens) or (ids == tokens.pad).any())


def _check_sequence(evidence: Evidence, sequence: _ImageSequence) -> Iterator[Hit]:
    cut = any(span.depth and not span.whole for span in sequence.spans)
    if cut and sequence.tokens.start >= 0 <= sequence.tokens.end:
        return
    twice = next((span for span in sequence.spans if span.depth > 1), None)
    if twice is not None:
        message = (
            f"an image is opened {twice.depth} times before it is closed: template and processor both wrote the "
            "tokens around it"
        )
        yield sequence.hit(evidence, (twice.start, twice.stop), message, "expanded twice", Severity.ERROR)
        return
    images, stated, miscounted = sequence.images, sequence.stated, None
    count = 0 if stated is None else len(stated.images)
    if len(images) < count:
        end = images[-1].stop if images else 0
        message = (
            f"the messages hold {counted(count, 'image')}, the ids {len(images) or 'none'}; the answer is about "
            "an image that its prompt lacks"
        )
        miscounted = sequence.hit(evidence, (end, end), message, "images missing", Severity.WARNING)
    elif stated is not None and sequence.tokens.family.one_each and not stated.videos and 0 < count < len(images):
        more = images[count]
        message = f"the messages hold {counted(count, 'image')}, the ids {len(images)}"
        miscounted = sequence.hit(evidence, (more.start, more.stop), message, "images added", Severity.WARNING)
    if miscounted is not None:
        yield miscounted
    longest = max((span.pads for span in images), default=0)
    short = [span for span in images if span.pads <= 1]
    if longest > 1 and short:
        message = (
            f"{counted(len(short), 'image')} of {len(images)} has no more than one placeholder where another has "
            f"{longest}: the processor did not expand it"
        )
        place = short[0].start, short[0].stop
        yield sequence.hit(evidence, place, message, "not expanded", Severity.WARNING)
    first: dict[str, ImageSpan] = {}
    in_messages = stated.images if stated is not None and miscounted is None else ()
    for image, span in zip(in_messages, images, strict=True) if len(in_messages) == len(images) else ():
        other = first.setdefault(image, span)
        low, high = sorted((other.pads, span.pads))
        if image and low > 1 and high > low and high % low == 0:
            longer = span if span.pads == high else other
            message = f"one image has {low} placeholders in one place and {high} in another: it was expanded again"
            place = longer.start, longer.stop
            yield sequence.hit(evidence, place, message, "placeholders multiplied", Severity.WARNING)
            break
    yield from _check_grids(evidence, sequence)


def _check_grids(evidence: Evidence, sequence: _ImageSequence) -> Iterator[Hit]:
    """A hit if the images of a row, or of a single prompt, do not fit the logged grids of their patches."""
    grids = evidence.rollout.stated.facts.get("image_grid_thw")
    alone = sequence.where is Where.ROW or (
        len(evidence.rollout.turns) == 1 and evidence.rollout.training_row is None
    )
    if not alone or not isinstance(grids, list | tuple):
        return
    images = sequence.images
    if len(images) != len(grids):
        message = f"`image_grid_thw` has {counted(len(grids), 'image')}, the ids {len(images)}"
        yield sequence.hit(evidence, (0, 0), message, "grids and images differ", Severity.WARNING)
        return
    if all(span.pads <= 1 for span in images):
        return  # ids as they were before the processor expanded them
    patches = [time * height * width for time, height, width in grids]
    pairs = list(zip(images, patches, strict=True))
    if not pairs or any(all(span.pads * merged == size for span, size in pairs) for merged in _MERGED):
        return
    span, size = next((pair for pair in pairs if pair[0].pads * 4 != pair[1]), pairs[0])
    message = (
        f"an image of {counted(size, 'patch', 'patches')} by `image_grid_thw` has "
        f"{counted(span.pads, 'placeholder')} instead of {size // 4}"
    )
    yield sequence.hit(evidence, (span.start, span.stop), message, "grids and images differ", Severity.WARNING)
