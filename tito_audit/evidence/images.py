"""Images in a conversation: the image parts of messages, and the placeholder tokens of images in ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_audit.evidence.model import Against, Difference
from tito_audit.record.arrays import Ids
from tito_audit.record.memo import memoized
from tito_audit.record.message import Message
from tito_audit.record.rollout import Rollout
from tito_audit.tokens.vocab import Vocabulary

_IMAGES = frozenset(("image", "image_url", "input_image", "image_file"))
_VIDEOS = frozenset(("video", "video_url", "input_video", "video_file"))


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """How one family of tokenizers writes an image: as placeholders between two tokens, or as a single token."""

    name: str
    pad: str
    """The placeholder for a piece of an image."""
    start: str | None = None
    end: str | None = None
    one_each: bool = True
    """False if an image may be cut into several parts, each written like an image."""
    video: str | None = None
    """The placeholder for a piece of a video, between the same two tokens."""
    beside: str | None = None
    """Another token of the vocabulary that identifies the family."""


FAMILIES = (
    ImageFamily("Qwen-VL", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", video="<|video_pad|>"),
    ImageFamily("Gemma 3", "<image_soft_token>", "<start_of_image>", "<end_of_image>", one_each=False),
    ImageFamily("GLM-V", "<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    ImageFamily("InternVL", "<IMG_CONTEXT>", "<img>", "</img>"),
    ImageFamily("Kimi-VL", "<|media_pad|>", "<|media_content|>", "<|media_end|>"),
    ImageFamily("Gemma 4", "<|image|>", "<|image>", "<image|>", one_each=False),
    ImageFamily("Pixtral", "[IMG]", None, "[IMG_END]"),
    # Llama 4 writes the placeholder once for each image, before the patches.
    ImageFamily("Llama Vision", "<|image|>", beside="<|begin_of_text|>"),
)
"""Known families; the first whose tokens are all in the vocabulary is used."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The ids of a family in a vocabulary; -1 for a token that the family does not have."""

    family: ImageFamily
    pad: int
    start: int
    end: int
    video: int


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """One image in ids: its placeholders and the tokens around them."""

    start: int
    stop: int
    pads: int
    """How many placeholders."""
    depth: int
    """How often it was opened before it was closed: 1 normally, 2 if its start was written twice."""
    video: bool = False

    @property
    def whole(self) -> bool:
        """Whether the span holds image tokens only; a text that merely spells them holds other text too."""
        return self.stop - self.start in (1, self.pads + 2 * self.depth)


@dataclass(frozen=True, slots=True)
class StatedImages:
    """The images and videos in messages."""

    images: tuple[str, ...]
    """The URL or data of each image; "" where the message has none."""
    videos: int


_NOTHING = StatedImages((), 0)


@memoized
def image_tokens(vocabulary: Vocabulary) -> ImageTokens | None:
    """The image tokens of a vocabulary; None if it is of no known family."""
    added = {vocabulary.token_bytes(added_id): added_id for added_id in vocabulary.added_ids}
    for family in FAMILIES:
        names = (family.pad, family.start, family.end)
        if all(name is None or name.encode() in added for name in (*names, family.beside)):
            ids = [-1 if name is None else added.get(name.encode(), -1) for name in (*names, family.video)]
            return ImageTokens(family, *ids)
    return None


def images_in_messages(messages: Iterable[Message]) -> StatedImages:
    """The images and videos of messages, in order."""
    images: list[str] = []
    videos = 0
    for message in messages:
        if not isinstance(message.content, tuple):
            continue
        for part in message.content:
            kind = part.get("type")
            if kind is not None and not isinstance(kind, str):
                continue
            if kind in _IMAGES or (kind is None and _has(part, _IMAGES)):
                value = next(
                    (part[name] for name in (*_IMAGES, "url", "source") if part.get(name) is not None), None
                )
                if isinstance(value, Mapping):
                    value = value.get("url", value.get("data"))
                images.append(value if isinstance(value, str) else "")
            elif kind in _VIDEOS or (kind is None and _has(part, _VIDEOS)):
                videos += 1
    return StatedImages(tuple(images), videos)


def _has(part: Mapping[str, Any], names: frozenset[str]) -> bool:
    return any(part.get(name) is not None for name in names)


def has_images(rollout: Rollout) -> bool:
    """Whether a rollout states images or videos: in its messages, in those of a call, or by their grids."""
    if rollout.stated.facts.get("image_grid_thw"):
        return True
    mixed: list[Message] = []  # called for every rollout: plain loops
    for message in rollout.messages:
        if type(message.content) is tuple:
            mixed.append(message)
    for turn in rollout.turns:
        if turn.prompt_messages:
            mixed += [message for message in turn.prompt_messages if type(message.content) is tuple]
    return bool(mixed) and images_in_messages(mixed) != _NOTHING


def images_in_ids(ids: Ids, tokens: ImageTokens) -> list[ImageSpan]:
    """The images in ids, in order, without one that is cut off.

    In some families an image that no processor has expanded yet is one token without an end.
    """
    if tokens.end >= 0 and not (ids == tokens.end).any():
        lone = np.isin(ids, [token for token in (tokens.pad, tokens.start) if token >= 0])
        lone[1:] &= ~lone[:-1]
        return [ImageSpan(at, at + 1, int(ids[at] == tokens.pad), 1) for at in lone.nonzero()[0].tolist()]
    marks = [token for token in (tokens.pad, tokens.start, tokens.end, tokens.video) if token >= 0]
    at = np.isin(ids, marks).nonzero()[0]
    frames: list[ImageSpan] = []
    opened = depth = deepest = pads = 0
    video = False
    for place, token in zip(at.tolist(), ids[at].tolist(), strict=True):
        if token == tokens.start or (tokens.start < 0 and not depth):
            if not depth:
                opened, deepest, pads, video = place, 0, 0, False
            depth += 1
            deepest = max(deepest, depth)
        if token in (tokens.pad, tokens.video) and depth:
            pads += 1
            video |= token == tokens.video
        if depth and (token == tokens.end or tokens.end < 0):
            depth -= 1
            if not depth:
                frames.append(ImageSpan(opened, place + 1, pads, deepest, video))
    return frames


def is_expansion(difference: Difference, tokens: ImageTokens) -> bool:
    """Whether a difference is only an expanded image: several placeholders where the template writes one."""
    own, ids = difference.recorded, difference.recorded.ids
    pad = int(ids[0]) if len(ids) else -1
    if pad < 0 or pad not in (tokens.pad, tokens.video) or (ids != pad).any():
        return False
    if difference.against is not Against.TEMPLATE or len(difference.canonical.ids):
        return False
    piece = own.data[: len(own.data) // len(ids)]
    return own.before.endswith(piece) or own.after.startswith(piece)
