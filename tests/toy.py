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
        text           the decoded completion as logged;  prompt_text  the prompt as text
        finish         `stop`, `length`, …
        stop_string    the stop string that ended it
        message        index of its message, if not the k-th assistant message; -1 for none
        messages       what this call was sent, when it is not what stands before its message
        weights        weight versions
        columns        other per-token columns, by name
        alternatives   a list of logprobs for each of some tokens
        strings        token strings of a log without ids (then no `completion`)
    row            tokens of the training row
    mask           "0011", or a list: numbers, or token texts where the mask holds labels
    logprobs       numbers of the row
    columns        other per-token columns of the row, by name
    hidden         "0011": tokens that an attention mask hides
    prompt_length  tokens before the first sampled one, when the log says
    sentinel       what the format writes where no logprob exists
    stated         facts that the log states (`ids_wanted`, `dummy_tokens`, …)
    tokenizer      false: audit without a tokenizer;  template  false: audit without a chat template
    chat_template  a Jinja text in place of the tokenizer's own template
    clock          the date that this template is told
    tokenizer_name a folder of `fixtures/tokenizers`; `toy_bpe` (ChatML, no BOS) when not given; `toy_vision` is
                   `toy_bpe` with the image tokens of Qwen-VL

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
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson

from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Evidence
from tito_audit.formats import STALE_COLUMNS
from tito_audit.formats._extras import read_extras
from tito_audit.record.arrays import Ids
from tito_audit.record.build import build_call_columns, build_training_row
from tito_audit.record.column import MovePolicy
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout, TokenText, TrainingRow, Turn, Usage
from tito_audit.record.stated import PairSide, Stated
from tito_audit.record.trainings import TrainedAgain
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.render.spans import Rendering, render_fast
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
TOKENIZERS = ROOT / "fixtures" / "tokenizers"

Case = Mapping[str, Any]
_REFERENCE = re.compile(r"@(prompt|completion|seen)(?: (\d+))?")


@cache
def toy_tokenizer(name: str = "toy_bpe") -> Tokenizer:
    if name == "toy_vision":
        with TemporaryDirectory() as folder:
            return load_tokenizer(str(_vision(Path(folder))))
    return load_tokenizer(str(TOKENIZERS / name))


def _vision(folder: Path) -> Path:
    """`toy_bpe` with the image tokens of Qwen-VL, which its template writes for parts of messages."""
    for file in (TOKENIZERS / "toy_bpe").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model = orjson.loads((folder / "tokenizer.json").read_bytes())
    last = max(token["id"] for token in model["added_tokens"])
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    like = next(token for token in model["added_tokens"] if token["special"])
    model["added_tokens"] += [{**like, "id": last + 1 + k, "content": name} for k, name in enumerate(names)]
    (folder / "tokenizer.json").write_bytes(orjson.dumps(model))
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    user = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    assert user in text
    parts = (
        "{{- '<|im_start|>' + message.role + '\\n' }}{%- if message.content is string %}{{- message.content }}"
        "{%- else %}{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- else %}"
        "{{- '<|vision_start|><|' + ('video' if part.type == 'video' else 'image') + '_pad|><|vision_end|>' }}"
        "{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}"
    )
    template.write_text(text.replace(user, parts), encoding="utf-8")
    return folder


@cache
def toy_renderer(name: str = "toy_bpe") -> Renderer:
    return make_renderer(toy_tokenizer(name))


def tokenizer_of(case: Case) -> Tokenizer:
    """The tokenizer that a case is written in."""
    return toy_tokenizer(case.get("tokenizer_name", "toy_bpe"))


def renderer_of(case: Case) -> Renderer:
    """The renderer that a case is written for."""
    if "chat_template" in case:
        clock = Clock(datetime.fromisoformat(case["clock"])) if "clock" in case else None
        return make_renderer(tokenizer_of(case), chat_template=case["chat_template"], clock=clock)
    return toy_renderer(case.get("tokenizer_name", "toy_bpe"))


def evidence_of(case: Case) -> Evidence:
    """What the rules see of a case."""
    tokenizer = tokenizer_of(case) if case.get("tokenizer", True) else None
    renderer = renderer_of(case) if tokenizer and case.get("template", True) else None
    return gather(rollout_of(case), tokenizer, renderer, trained_again=again_of(case))


def again_of(case: Case) -> tuple[TrainedAgain, ...]:
    """What the run trains of a case before it: `again`, runs of tokens of the row, or of the call `again_turn`."""
    runs = tuple((start, end) for start, end in case.get("again", ()))
    cause, trained = case.get("again_cause", "shared prefix"), case.get("again_cause") != "never trained"
    return (TrainedAgain(case.get("again_turn"), runs, cause, "row 0 trains it first", trained),) if runs else ()


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
        stated=_stated(case.get("stated", {})),
    )
    turns: list[Turn] = []
    for number, call in enumerate(case.get("turns", ())):
        index = call.get("message", answers[number] if number < len(answers) else -1)
        turns.append(_turn(call, _Book(case, base, turns, None if index < 0 else index)))
    row = _row(_Book(case, base, turns, None)) if "row" in case else None
    return Rollout(base.place, "toy", messages, base.tools, base.template_kwargs, tuple(turns), row, base.stated)


@dataclass(frozen=True)
class _Book:
    """What the tokens of one call or row may refer to."""

    case: Case
    base: Rollout
    turns: Sequence[Turn]
    index: int | None
    """The message whose prompt `@prompt` is."""

    def ids(self, tokens: str | Sequence[str | int]) -> Ids:
        """`[N]` the ids of a list of tokens."""
        parts = [self.part(token) for token in ([tokens] if isinstance(tokens, str) else tokens)]
        return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)

    def part(self, token: str | int) -> Ids:
        """The ids of one entry of a list of tokens."""
        if isinstance(token, int):
            return np.array([token], np.int32)
        reference = _REFERENCE.fullmatch(token)
        if reference:
            return self._referred(reference[1], reference[2])
        tokenizer = tokenizer_of(self.case)
        if token.startswith("= "):
            return tokenizer.encode(token[2:])
        ids = tokenizer.vocabulary.ids_of_bytes(token.encode())
        if not ids:
            raise ValueError(f"{token!r} is no token of the toy vocabulary; it has {_pieces(token, tokenizer)}")
        return np.array(ids[:1], np.int32)

    def _referred(self, what: str, number: str | None) -> Ids:
        """The tokens that an `@` form stands for."""
        if what == "prompt" and number is None:
            assert self.index is not None, "@prompt needs a turn with a message"
            text = renderer_of(self.case).render(
                self.base.messages[: self.index],
                self.base.tools,
                add_generation_prompt=True,
                template_kwargs=self.base.template_kwargs,
            )
            return tokenizer_of(self.case).encode(text)
        turn = self.turns[int(number) if number else -1]
        ids = {"prompt": turn.prompt_ids, "completion": turn.completion_ids, "seen": turn.seen_ids}[what]
        assert ids is not None
        return ids


def _stated(facts: Mapping[str, Any]) -> Stated:
    side = facts.get("side")
    return Stated(**{**facts, "side": side and PairSide(**side)})


def _turn(call: Case, book: _Book) -> Turn:
    """One call of a case."""
    prompt = book.ids(call["prompt"]) if "prompt" in call else None
    completion = book.ids(call["completion"]) if "completion" in call else None
    values, columns = build_call_columns(
        np.empty(0, np.int32) if completion is None else completion,
        logprobs=("logprobs", call["logprobs"]) if "logprobs" in call else None,
        other=_others(call),
    )
    strings = call.get("strings")
    return Turn(
        prompt_ids=prompt,
        completion_ids=completion,
        completion_logprobs=values,
        message_index=book.index,
        prompt_messages=as_messages(call["messages"], "messages") if "messages" in call else None,
        prompt_text=call.get("prompt_text"),
        completion_text=call.get("text"),
        answer=as_messages([call["answer"]], "answer")[0] if "answer" in call else None,
        usage=Usage(**{"choices": 1, "alone": True, **call["usage"]}) if "usage" in call else None,
        finish_reason=call.get("finish"),
        stop_string=call.get("stop_string"),
        weight_versions=tuple(call.get("weights", ())),
        weight_spans=tuple(map(tuple, call.get("weight_spans", ()))),
        token_texts=tuple(TokenText(s, s.encode(), np.nan) for s in strings) if strings else None,
        columns=columns,
        extras=read_extras(call.get("beside", {})),
        alternatives=tuple(map(tuple, call.get("alternatives", ()))),
    )


def _row(book: _Book) -> TrainingRow:
    """The training row of a case."""
    case = book.case
    mask: list[int] | None = None
    if isinstance(case.get("mask"), str):
        mask = [int(digit) for digit in case["mask"]]
    elif "mask" in case:
        mask = [entry if isinstance(entry, int | float) else int(book.part(entry)[0]) for entry in case["mask"]]
    row = build_training_row(
        book.ids(case["row"]),
        mask=None if mask is None else ("loss_mask", mask),
        logprobs=("logprobs", case["logprobs"]) if "logprobs" in case else None,
        other=_others(case),
        prompt_length=case.get("prompt_length"),
        sentinel=case.get("sentinel"),
        shifts=None if case.get("plain_columns") else False,
    )
    hidden = np.array([digit == "1" for digit in case["hidden"]]) if "hidden" in case else None
    return replace(row, hidden=hidden, extras=read_extras(case.get("beside", {})))


def _others(case: Case) -> dict[str, tuple[Any, MovePolicy]]:
    """The other columns of a call or a row."""
    columns: Mapping[str, Any] = case.get("columns", {})
    return {
        name: (v, MovePolicy.STALE if name in STALE_COLUMNS else MovePolicy.MOVE) for name, v in columns.items()
    }


def _pieces(text: str, tokenizer: Tokenizer) -> list[str]:
    """How a toy tokenizer cuts a text, for whoever writes a case."""
    return [tokenizer.vocabulary.piece(int(i)) for i in tokenizer.encode(text)]


def fast_text(
    renderer: Renderer,
    messages: Any,
    tools: Any = (),
    *,
    add_generation_prompt: bool = False,
    template_kwargs: Any = None,
) -> str | None:
    """What the fast engine writes for these messages; None if it cannot tell."""
    variables = renderer.variables(tools, template_kwargs)
    return renderer.render_chat_fast(messages, variables, add_generation_prompt=add_generation_prompt)[1]


def spans_fast(*arguments: Any, **options: Any) -> Rendering | None:
    """What `render_spans` returns, by the fast engine; None if it cannot tell."""
    fast = render_fast(*arguments, **options)
    return fast.find_spans() if fast is not None else None
