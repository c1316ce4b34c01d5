"""Rollouts out of tokens written as text, for the cases in `fixtures/rules/*.toml`.

A case is a table; only `name` is required.

    name           a sentence that says what is special about it
    messages       chat messages; the k-th assistant message is the answer of turn k
    tools          tool definitions in chat form
    template_args  template arguments that the log states
    turns          model calls, each with
        prompt         tokens (below); leave out when the log does not hold them
        completion     tokens; leave out when the log does not hold them
        logprobs       numbers; `nan` stands for null
        text           the decoded completion as logged
        finish         `stop`, `length`, …
        message        index of its message, if not the k-th assistant message; -1 for none
        messages       what this call was sent, when it is not what stands before its message
        weights        weight versions
        strings        token strings of a log without ids (then no `completion`)
    row            tokens of the training row
    mask           "0011", or a list: numbers, or token texts where the mask holds labels
    logprobs       numbers of the row
    prompt_length  tokens before the first sampled one, when the log says
    sentinel       what the format writes where no logprob exists
    stated         facts that the log states (`ids_wanted`, `dummy_tokens`, …)
    tokenizer      false: audit without a tokenizer;  template  false: audit without a chat template

A list of tokens holds, in any order,

    "<|im_start|>"   the one token of the vocabulary that reads exactly so
    42               a raw id
    "= some text"    what stands behind "= ", encoded as the tokenizer would, however many tokens it takes
    "@prompt"        what the template writes for the messages before this turn's answer
    "@seen"          prompt and completion of the turn before; in a row, of the last turn
    "@prompt 0"      the prompt of turn 0;  "@completion 0" its completion;  "@seen 0" both

A flag case also says what its rule has to find, and where no more may be found:

    expect         ["turn 0 completion 0:2", "turn 1 prompt 5:7", "row 3:5"]
    severity       of every hit, if it matters
    cause          of every hit, if it matters
    message        words that every message holds, if they matter
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids
from tito_audit.record.build import call_columns, training_row
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout, TokenText, TrainingRow, Turn
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "fixtures" / "tokenizers" / "toy_bpe"

Case = Mapping[str, Any]
_REFERENCE = re.compile(r"@(prompt|completion|seen)(?: (\d+))?")


@cache
def toy_tokenizer() -> Tokenizer:
    return load_tokenizer(str(TOKENIZER))


@cache
def toy_renderer() -> Renderer:
    return make_renderer(toy_tokenizer())


def evidence_of(case: Case) -> Evidence:
    """What the rules see of a case."""
    tokenizer = toy_tokenizer() if case.get("tokenizer", True) else None
    renderer = toy_renderer() if tokenizer and case.get("template", True) else None
    return gather(rollout_of(case), tokenizer, renderer)


def rollout_of(case: Case) -> Rollout:
    """The rollout that a case writes down."""
    messages = as_messages(case.get("messages"), "messages")
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    base = Rollout(
        place=Place("toy", 0),
        format="toy",
        messages=messages,
        tools=as_tools(case.get("tools"), "tools"),
        template_kwargs=case.get("template_args", {}),
        stated=case.get("stated", {}),
    )
    turns: list[Turn] = []
    for number, call in enumerate(case.get("turns", ())):
        index = call.get("message", answers[number] if number < len(answers) else -1)
        turns.append(_turn(call, base, None if index < 0 else index, turns))
    row = _row(case, base, turns) if "row" in case else None
    return Rollout(base.place, "toy", messages, base.tools, base.template_kwargs, tuple(turns), row, base.stated)


def ids_of(tokens: str | Sequence[str | int], base: Rollout, index: int | None, turns: Sequence[Turn]) -> Ids:
    """`[N]` the ids of a list of tokens; `index` is the message whose prompt `@prompt` is."""
    parts = [_part(token, base, index, turns) for token in ([tokens] if isinstance(tokens, str) else tokens)]
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)


def _part(token: str | int, base: Rollout, index: int | None, turns: Sequence[Turn]) -> Ids:
    if isinstance(token, int):
        return np.array([token], np.int32)
    reference = _REFERENCE.fullmatch(token)
    if reference:
        return _referred(reference[1], reference[2], base, index, turns)
    if token.startswith("= "):
        return toy_tokenizer().encode(token[2:])
    found = toy_tokenizer().vocabulary.ids_of_bytes(token.encode())
    if not found:
        raise ValueError(f"{token!r} is no token of the toy vocabulary; it has {_pieces(token)}")
    return np.array(found[:1], np.int32)


def _referred(what: str, number: str | None, base: Rollout, index: int | None, turns: Sequence[Turn]) -> Ids:
    """The tokens that an `@` form stands for."""
    if what == "prompt" and number is None:
        assert index is not None, "@prompt needs a turn with a message"
        text = toy_renderer().render(
            base.messages[:index],
            base.tools,
            add_generation_prompt=True,
            template_kwargs=base.template_kwargs,
        )
        return toy_tokenizer().encode(text)
    turn = turns[int(number) if number else -1]
    ids = {"prompt": turn.prompt_ids, "completion": turn.completion_ids, "seen": turn.seen_ids}[what]
    assert ids is not None
    return ids


def _turn(call: Case, base: Rollout, index: int | None, before: Sequence[Turn]) -> Turn:
    """One call of a case."""
    prompt = ids_of(call["prompt"], base, index, before) if "prompt" in call else None
    completion = ids_of(call["completion"], base, index, before) if "completion" in call else None
    values, columns = call_columns(
        np.empty(0, np.int32) if completion is None else completion,
        logprobs=("logprobs", call["logprobs"]) if "logprobs" in call else None,
    )
    strings = call.get("strings")
    return Turn(
        prompt_ids=prompt,
        completion_ids=completion,
        completion_logprobs=values,
        message_index=index,
        prompt_messages=as_messages(call["messages"], "messages") if "messages" in call else None,
        completion_text=call.get("text"),
        finish_reason=call.get("finish"),
        weight_versions=tuple(call.get("weights", ())),
        token_texts=tuple(TokenText(s, s.encode(), np.nan) for s in strings) if strings else None,
        columns=columns,
    )


def _row(case: Case, base: Rollout, turns: Sequence[Turn]) -> TrainingRow:
    """The training row of a case."""
    mask: list[int] | None = None
    if isinstance(case.get("mask"), str):
        mask = [int(digit) for digit in case["mask"]]
    elif "mask" in case:
        mask = [
            entry if isinstance(entry, int | float) else int(_part(entry, base, None, turns)[0])
            for entry in case["mask"]
        ]
    return training_row(
        ids_of(case["row"], base, None, turns),
        mask=None if mask is None else ("loss_mask", mask),
        logprobs=("logprobs", case["logprobs"]) if "logprobs" in case else None,
        prompt_length=case.get("prompt_length"),
        sentinel=case.get("sentinel"),
    )


def _pieces(text: str) -> list[str]:
    """How the toy tokenizer cuts a text, for whoever writes a case."""
    return [toy_tokenizer().vocabulary.piece(int(i)) for i in toy_tokenizer().encode(text)]
