"""Preference pairs and KTO rows as trainers tokenize them: two conversations with one prompt, or one with a label.

Which columns hold them depends on the trainer and its version:

- TRL 1: `prompt_ids`, `chosen_ids`, `rejected_ids`; KTO: `prompt_ids`, `completion_ids`, `label`; a reward model:
  `chosen_ids`, `rejected_ids` (huggingface/trl 1.16 `trainer/dpo_trainer.py`, `kto_trainer.py`,
  `reward_trainer.py`). The end of a prompt that the answers change is left out.
- TRL 0.12 to 0.29: `prompt_input_ids`, `chosen_input_ids`, `rejected_input_ids`, the answers alone, encoded apart
  from the prompt (0.19 `dpo_trainer.py`, `tokenize_row`). A reward model: the last two, or `input_ids_chosen`.
- With `chosen_labels` beside them, `chosen_input_ids` is prompt and answer: TRL's ORPO and CPO
  (`orpo_trainer.py`), hiyouga/LLaMA-Factory `data/processor/pairwise.py`. TRL's KTO had `completion_input_ids` and
  `completion_labels`, LLaMA-Factory has `kto_tags` (`feedback.py`).
- axolotl's ORPO: `input_ids` and `labels` of the chosen answer, `rejected_ids` or `rejected_input_ids`, and
  `rejected_labels` (axolotl-ai-cloud/axolotl 0.19 `prompt_strategies/orpo/chat_template.py`); its reward models:
  `input_ids_chosen`. For DPO and KTO its prepared folders hold text, which TRL tokenizes.

Every token of an answer is trained, so an answer that its labels train whole is read as a call, any other as a
training row. Ids are never changed: only labels can be repaired. `KL_…` columns, which pair a prompt with the
answer to another on purpose, are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import CALL_LOGPROBS, answer_indices, build_turn, stated_facts
from tito_audit.formats._columns import first_text, is_list, is_messages, parsed_column
from tito_audit.formats._flat import read_flat_row
from tito_audit.formats._kit import SampleRows, Samples, updated_sample
from tito_audit.formats._update import object_at
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.record.build import build_training_row
from tito_audit.record.message import Message, as_messages, as_tools
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.record.sources import Source
from tito_audit.record.stated import PairSide

_PROMPT, _ANSWER, _WHOLE, _LABELS, _SEEN = "prompt_ids", "completion_ids", "input_ids", "labels", "attention_mask"
"""Columns of one side, as `read` reads them."""
_PAIR = ("chosen", "rejected")
_KTO = ("completion",)


@dataclass(frozen=True, slots=True)
class _Shape:
    sides: tuple[str, ...]
    columns: Mapping[str, str]
    """Our columns and the log's, `{}` in the place of the side."""
    needs: tuple[str, ...] = ()
    """Further columns that such a row has."""
    first: Mapping[str, str] | None = None
    """The columns of the first side, if they are not named as those of the second."""

    def of(self, number: int) -> dict[str, str]:
        """Our column names and the log's, for one side."""
        columns = self.first if self.first is not None and not number else self.columns
        return {ours: theirs.format(self.sides[number]) for ours, theirs in columns.items()}


_BOTH = {_WHOLE: "{}_input_ids", _LABELS: "{}_labels", _SEEN: "{}_attention_mask"}
_ONE = {_WHOLE: "input_ids", _LABELS: "labels", _SEEN: "attention_mask"}
_SHAPES = (
    _Shape(_PAIR, _BOTH),
    _Shape(_PAIR, _BOTH, first=_ONE),
    _Shape(_PAIR, {**_BOTH, _WHOLE: "{}_ids"}, first=_ONE),
    _Shape(_PAIR, {_PROMPT: "prompt_ids", _ANSWER: "{}_ids"}),
    _Shape(_PAIR, {_PROMPT: "prompt_input_ids", _ANSWER: "{}_input_ids"}),
    _Shape(_PAIR, {_WHOLE: "{}_ids"}),
    _Shape(_PAIR, {_WHOLE: "{}_input_ids", _SEEN: "{}_attention_mask"}),
    _Shape(_PAIR, {_WHOLE: "input_ids_{}", _SEEN: "attention_mask_{}"}),
    _Shape(_KTO, {_PROMPT: "prompt_ids", _ANSWER: "completion_ids"}, ("label",)),
    _Shape(_KTO, _BOTH, ("label",)),
    _Shape(_KTO, _ONE, ("kto_tags",)),
)
"""In this order: a row with the columns of several is of the first."""


def _find_shape(row: Row) -> _Shape | None:
    """The shape of the row; None if it is neither a pair nor a KTO row."""
    for shape in _SHAPES:
        names = [theirs for number in range(len(shape.sides)) for ours, theirs in shape.of(number).items()]
        required = [name for name in names if "attention_mask" not in name]
        if not all(name in row and is_list(row[name]) for name in required):
            continue
        if shape.sides is _PAIR or all(isinstance(row.get(name), bool | np.bool_) for name in shape.needs):
            return shape
    return None


def split_sides(row: Row) -> Samples | None:
    """Each side of the row as a row with our names."""
    shape = _find_shape(row)
    if shape is None:
        raise RecordError("it holds no preference pair: the ids of a chosen and of a rejected answer")
    columns = [{o: t for o, t in shape.of(n).items() if t in row} for n in range(len(shape.sides))]
    sides, prompt = [], parsed_column(row, "prompt")
    for name, own in zip(shape.sides, columns, strict=True):
        side: dict[str, Any] = {ours: row[theirs] for ours, theirs in own.items()}
        side |= {
            shared: row[shared] for shared in ("id", "model", "tools", "chat_template_kwargs") if shared in row
        }
        # The prompt and the answer, as messages or as texts.
        answer = parsed_column(row, name)
        if is_messages(answer) and is_messages(prompt):
            inside = len(answer) > len(prompt) and list(answer[: len(prompt)]) == list(prompt)
            side |= {"sent": prompt, "answer": answer[len(prompt) :] if inside else answer}
        elif is_messages(answer):
            # The prompt is part of both answers, or a text beside them.
            if answer[0].get("role") not in ("assistant", "model"):
                side |= {"sent": answer[:-1], "answer": answer[-1:]}
        elif isinstance(prompt, str):
            side |= {"prompt_text": prompt, "text": first_text(row, (name,))}
        sides.append({**side, "side": name, "names": own})
    if len(sides) == 2:
        sides = [{**side, "other": other} for side, other in zip(sides, reversed(sides), strict=True)]

    def source(number: int, name: str) -> Source | None:
        return Source((columns[number][name],)) if name in columns[number] else None

    return Samples(tuple(sides), source)


def read(row: Row, place: Place) -> Rollout:
    sent = as_messages(row.get("sent"), "prompt")
    messages = sent + as_messages(row.get("answer"), row["side"])
    try:
        trained, turn = _read_tokens(row, messages, len(sent))
    except RecordError as error:
        words = str(error)
        for ours, theirs in row["names"].items():
            words = words.replace(f"column {ours!r}", f"column {theirs!r}")
        raise RecordError(words) from None
    tools = as_tools(parsed_column(row, "tools"), "tools")
    side = PairSide(row["side"])
    if "other" in row:
        prompt, answer, whole = _prompt_and_answer(row)
        other_prompt, other_answer, other_whole = _prompt_and_answer(row["other"])
        size, longest = sorted((len(prompt), len(other_prompt)))
        differing = (prompt[:size] != other_prompt[:size]).nonzero()[0]
        part = int(differing[0]) if len(differing) else None
        if part is None and size < longest and whole and other_whole:
            part = size
        same = len(answer) > 0 and np.array_equal(answer, other_answer)
        side = PairSide(row["side"], part, part is not None and part >= longest - 1, same)
    return Rollout(
        place,
        FORMAT.name,
        messages,
        tools,
        template_kwargs=object_at(row, "chat_template_kwargs"),
        turns=() if turn is None else (turn,),
        training_row=trained,
        stated=replace(stated_facts(row), side=side),
    )


def _read_tokens(row: Row, messages: tuple[Message, ...], sent: int) -> tuple[TrainingRow | None, Turn | None]:
    """The tokens of a side: a call if all of its answer is trained, else a training row."""
    if _ANSWER in row:
        turn = build_turn((_PROMPT, row[_PROMPT]), (_ANSWER, row[_ANSWER]), None, {})
        if turn.prompt_ids is None and is_list(row[_PROMPT]):
            turn = replace(turn, prompt_ids=empty_ids())  # it is logged, and holds nothing
        ids, whole = turn.seen_ids, None
        if ids is not None and turn.prompt_ids is not None:
            mask = np.arange(len(ids)) >= len(turn.prompt_ids)
            whole = build_training_row(ids, mask=(_LABELS, mask), prompt_length=len(turn.prompt_ids))
    else:
        whole = read_flat_row(
            {name: row[name] for name in (_WHOLE, _LABELS, _SEEN) if name in row}, has_calls=False
        )
        trained = None if whole is None or whole.hidden is not None else whole.loss_mask
        start = int(trained.argmax()) if trained is not None else 0
        if whole is None or trained is None or not start or not trained[start:].all():
            return whole, None
        turn = Turn(whole.token_ids[:start], whole.token_ids[start:])
        whole = replace(whole, prompt_length=start)
    (index,) = answer_indices(messages, 1)
    if len(messages) - sent > 1:
        index = sent  # the answer goes on with messages of others
    return None, replace(
        turn,
        as_row=whole,
        message_index=index,
        prompt_messages=messages[:sent] or None,
        prompt_text=row.get("prompt_text"),
        completion_text=row.get("text"),
    )


def _prompt_and_answer(row: Row) -> tuple[Ids, Ids, bool]:
    """The prompt and the trained tokens of a side, and whether its whole answer is trained.

    If nothing says what is trained, the prompt is empty and all tokens are the answer.
    """
    trained, turn = _read_tokens(row, (), 0)
    if turn is not None and turn.prompt_ids is not None and turn.completion_ids is not None:
        return turn.prompt_ids, turn.completion_ids, True
    if trained is None or trained.loss_mask is None or not trained.loss_mask.any():
        return empty_ids(), empty_ids() if trained is None else trained.token_ids, False
    return trained.token_ids[: int(trained.loss_mask.argmax())], trained.token_ids[trained.loss_mask], False


def update_sample(row: Row, before: Rollout, after: RepairedRollout) -> Row:
    trained = after.rollout.training_row
    if _LABELS not in row and before.turns and trained is not None:
        if trained is before.turns[0].as_row:
            return row
        raise RecordError("a trainer trains every token of these answers: no column can leave some of them out")
    new = updated_sample(row, before, after)
    if any(name in row and new[name] is not row[name] for name in (_PROMPT, _ANSWER, _WHOLE)):
        raise RecordError("the ids of a pair stand in several columns, and only its labels can be changed")
    return new


_ROWS = SampleRows(read, update_sample, split_sides)

FORMAT = Format(
    name="preference_pair",
    title="Preference pairs and KTO rows",
    signature=Signature(
        "{chosen_input_ids}, {chosen_labels}, {rejected_input_ids}, {rejected_labels}; or {input_ids}, {labels}, "
        "{rejected_input_ids}, {rejected_labels}; or {input_ids}, {labels}, {rejected_ids}, {rejected_labels}; or "
        "{prompt_ids}, {chosen_ids}, {rejected_ids}; or {prompt_input_ids}, {chosen_input_ids}, "
        "{rejected_input_ids}; or {chosen_ids}, {rejected_ids}, no {prompt_ids}; or {chosen_input_ids}, "
        "{rejected_input_ids}, no {prompt_input_ids}; or {input_ids_chosen}, {input_ids_rejected}; or "
        "`prompt_ids`, `completion_ids` and a `label` that is true or false; or {completion_input_ids}, "
        "{completion_labels}, {label: true}; or {input_ids}, {labels}, {kto_tags}"
    ),
    precedence=255,
    # A row with a sampler's logprobs is a rollout.
    matches=lambda row: not any(name in row for name in CALL_LOGPROBS) and _find_shape(row) is not None,
    **_ROWS.functions,
    shows="Both sides of each pair against their one prompt, with messages where they were kept; KTO rows; for "
    "reward models the ids alone. Only labels are repaired. Pairs of text hold nothing to audit.",
)
