"""Tokenizes chats for SFT: ids with a loss mask of what the assistant wrote.

Chat templates for training mark with `{% generation %}` what an assistant writes (`return_assistant_tokens_mask`
of huggingface/transformers `tokenization_utils_base.py`, which TRL's `assistant_only_loss` passes). Most templates
lack the markers. Then marks in the messages, which the template passes on (`render/marks.py`), show each
answer: from after the generation prompt through the turn end.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_audit.errors import RecordError, RenderError
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids, Mask, Offsets
from tito_audit.record.prefix import common_prefix
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.render.marks import SpanKind
from tito_audit.render.spans import Rendering, render_spans


@dataclass(frozen=True, slots=True)
class TokenizedChat:
    """A conversation tokenized for a trainer."""

    rendering: Rendering
    ids: Ids
    """`[N]` int32"""
    starts: Offsets
    """`[N]` the byte of the text at which each token begins."""
    answers: tuple[tuple[int, int] | None, ...]
    """The token range `[start, end)` of each answer, its turn end included; None where nothing shows it."""
    headers: tuple[int, ...]
    """The first token of each answer's header, its generation prompt; of the answer itself if it has none."""
    written: Mask
    """`[N]` True for tokens of answers to be trained, as far as the rendering shows them."""
    marked: Mask | None
    """`[N]` True for what the template marks with `{% generation %}`; None if it has no markers."""
    split: tuple[int, ...]
    """Answers whose first token also holds the end of the prompt."""

    def mask(self) -> Mask:
        """`[N]` True for tokens to train; RecordError if nothing shows where an answer begins and ends."""
        if self.marked is not None:
            return self.marked
        if None in self.answers:
            raise RecordError(
                f"the chat template does not show where answer {self.answers.index(None)} begins and ends"
            )
        return self.written


def trained_messages(rollout: Rollout) -> list[bool]:
    """For each answer whether it is to be trained.

    It is not where `weight` (OpenAI's fine-tuning files) or `train` (axolotl's `message_field_training`) says no,
    or where it belongs to the `prompt` beside a `completion` (TRL).
    """
    first = rollout.stated.facts.get("prompt_messages", 0)
    return [
        isinstance(first, int)
        and index >= first
        and message.wire.get("weight") not in (0, False)
        and message.wire.get("train") is not False
        for index, message in enumerate(rollout.messages)
        if message.sampled
    ]


def tokenize_chat(rollout: Rollout, reference: Reference) -> TokenizedChat:
    """Render and tokenize the messages of a rollout; RecordError if that is not possible."""
    assert reference.renderer is not None
    try:
        rendering = render_spans(reference.renderer, rollout.messages, rollout.tools, rollout.template_kwargs)
    except RenderError as error:
        raise RecordError(str(error)) from None
    text = rendering.text
    ids = reference.encode(text)
    offsets = _ByteOffsets(text, None if reference.has_bytes_of(ids, text) else "NFC")
    if offsets.form is not None and offsets.data != reference.vocabulary.bytes_of(ids):
        raise RecordError("the tokenizer changes the text that it encodes, so where its answers begin is unknown")
    lengths = reference.vocabulary.byte_lengths(ids)
    ends = lengths.cumsum()
    starts = ends - lengths
    trained = trained_messages(rollout)
    answers: list[tuple[int, int] | None] = []
    written, split, headers = np.zeros(len(ids), np.bool_), list[int](), list[int]()
    for index in [index for index, message in enumerate(rollout.messages) if message.sampled]:
        span = rendering.sampled.get(index)
        if span is None:
            answers.append(None)
            headers.append(0)
            continue
        # The tokens that lie in the answer as a whole.
        begins = offsets.byte(span[0])
        start, end = int(starts.searchsorted(begins)), int(ends.searchsorted(offsets.byte(span[1]), "right"))
        if start < len(ids) and starts[start] > begins:
            split.append(len(answers))
        answers.append((start, max(start, end)))
        prompts = (each for each in rendering.spans if each.kind is SpanKind.GENERATION_PROMPT)
        header = next((prompt.start for prompt in prompts if prompt.end == span[0]), None)
        headers.append(start if header is None else int(starts.searchsorted(offsets.byte(header))))
        written[start:end] = trained[len(answers) - 1]
    template = reference.renderer.template(bool(rollout.tools))
    variables = reference.renderer.variables(rollout.tools, rollout.template_kwargs)
    variables = {**variables, "messages": rendering.chat, "add_generation_prompt": False}
    try:  # the ranges of the text that the template marks, None if it has no markers
        marked = template.generation_ranges(variables, text)
    except RenderError:
        marked = None
    mask = None
    if marked is not None:
        mask = np.zeros(len(ids), np.bool_)
        alike = len(marked) == len(answers)
        for number, (start, end) in enumerate(marked):
            if start < end and (not alike or trained[number]):
                # The tokens that hold any of it, as transformers marks them.
                first = int(starts.searchsorted(offsets.byte(start), "right")) - 1
                mask[max(first, 0) : int(starts.searchsorted(offsets.byte(end)))] = True
    return TokenizedChat(rendering, ids, starts, tuple(answers), tuple(headers), written, mask, tuple(split))


class _ByteOffsets:
    """Maps characters of a text to bytes of its Unicode normalization `form` (None: of the text itself)."""

    def __init__(self, text: str, form: str | None) -> None:
        self._text = text
        self.form = form
        self.data = self._encoded(text)

    def byte(self, place: int) -> int:
        """The byte at which a character begins; RecordError if it is composed with the one before it."""
        if len(self.data) == len(self._text):
            return place
        before = self._encoded(self._text[:place])
        if len(before) + len(self._encoded(self._text[place:])) != len(self.data):
            raise RecordError("a character of an answer is composed with text before it")
        return len(before)

    def _encoded(self, text: str) -> bytes:
        return (unicodedata.normalize(self.form, text) if self.form else text).encode("utf-8", "surrogatepass")  # type: ignore[arg-type]


def prompt_and_completion(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The prompt and the completion of a row of texts, None of any other row; a `text` is all completion."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if not isinstance(completion, str):
        prompt, completion = "", row.get("text")
    return (prompt, completion) if isinstance(prompt, str) and isinstance(completion, str) else None


def tokenize_texts(prompt: str, completion: str, reference: Reference) -> tuple[Ids, Ids, int]:
    """The ids of prompt + completion + end-of-sequence token, the ids of the prompt alone, and where they part.

    Training starts where they part, as in huggingface/trl `trl/trainer/sft_trainer.py`.
    """
    eos = reference.tokenizer.special_tokens.get("eos_token", "")
    whole = prompt + completion + ("" if completion.endswith(eos) else eos)
    ids, alone = reference.encode(whole), reference.encode(prompt)
    return ids, alone, common_prefix(alone, ids)


def as_sft_row(rollout: Rollout, reference: Reference | None, texts: tuple[str, str] | None = None) -> TrainingRow:
    """A conversation, or `texts` (prompt, completion), as ids with a mask of what to train; else RecordError."""
    if texts is not None and not rollout.messages and reference is not None:
        ids, _, start = tokenize_texts(*texts, reference)
        return TrainingRow(ids, np.arange(len(ids)) >= start, None)
    if not any(message.sampled for message in rollout.messages):
        raise RecordError("it holds neither token ids nor a conversation with an answer")
    if reference is None or reference.renderer is None:
        raise RecordError("it holds messages only; pass -t with a tokenizer that has a chat template")
    chat = tokenize_chat(rollout, reference)
    mask = chat.mask()
    if not mask.any():
        raise RecordError("nothing of it would be trained")
    return TrainingRow(chat.ids, mask, None)
