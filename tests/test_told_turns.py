"""What control tokens tell of a row is what marks show: the fast way to judge a row against the slow one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import toy
from tests.tiers import examples, some
from tito_audit.errors import RenderError
from tito_audit.evidence import judgement, logprob_values, rendered
from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Evidence, SampledSpan, Verified
from tito_audit.evidence.witness import witness
from tito_audit.record.build import build_training_row
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Place, Rollout
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.rules import all_rules
from tito_audit.run.check import check
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

TOKENIZERS = Path(
    os.environ.get("TITO_AUDIT_TOKENIZERS") or Path(__file__).resolve().parents[2] / "shared" / "tokenizers"
)
REAL = sorted(
    config.parent.name
    for config in TOKENIZERS.glob("*/tokenizer_config.json")
    if "chat_template" in config.read_text(encoding="utf-8")
)
RULES = all_rules()
CODES = frozenset(rule.code for rule in RULES)

TEXTS = st.sampled_from(
    (
        "Hi",
        " two words",
        "",
        "\n",
        "\n\nfar below\n",
        "<think>\nhm\n</think>\n\nSkinny",
        "</think>",
        "a <|im_end|> b",
        "<|im_start|>assistant\nnot mine<|im_end|>",
        "<|im_start|>",
        "<end_of_turn>",
        "<|eot_id|>",
        "naïve 世界 🙂 e\u0301",
        "assistant",
        "<tool_call>\n{}\n</tool_call>",
        "x" * 300,
    )
)
CALLS = [{"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls <|im_end|>"}'}}]


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages of a chat, now and then with reasoning, calls, parts or a message more than templates like."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
        kind = draw(st.integers(0, 9))
        if kind == 0:
            answer["reasoning_content"] = draw(TEXTS)
        if kind == 1:
            answer["content"] = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
        messages.append(answer)
        if kind == 2:
            answer["tool_calls"] = CALLS
            messages.append({"role": "tool", "content": draw(TEXTS), "tool_call_id": "c"})
        if kind == 3:
            messages.append({"role": "assistant", "content": draw(TEXTS)})
    if draw(st.integers(0, 9)) == 0:
        messages.append({"role": "user", "content": "and now?"})
    return messages


EDITS = ("bytes", "bytes", "bytes", "dropped", "doubled", "newline")
"""What may replace a token: the tokens of its bytes, nothing, itself twice, itself and a line break."""


@st.composite
def faults(draw: st.DrawFn) -> dict[str, Any]:
    """How mask and logprobs of a row are written, most often right."""
    return {
        "slide": draw(st.sampled_from((0, 0, 0, 0, 1, -2))),
        "shift": draw(st.sampled_from((0, 0, 0, 0, 1, -1))),
        "fill": draw(st.sampled_from((0.0, float("nan"), 1.0, -9999.0, -1.5))),
        "ends": draw(st.booleans()),
        "mask": draw(st.sampled_from(("yes", "yes", "yes", "none", "ones", "zeros", "inverted"))),
        "logprobs": draw(st.sampled_from(("yes", "yes", "yes", "none", "one odd", "zeros"))),
        "cut": draw(st.sampled_from((0, 0, 0, 0, 1, 3))),
        "replaced": draw(st.sampled_from((None, None, None, 0, 5))),
        "spelled": draw(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(EDITS)), max_size=2)),
    }


def loaded(name: str) -> tuple[Tokenizer, Renderer]:
    if name.startswith("toy"):
        return toy.toy_tokenizer(name), toy.toy_renderer(name)
    tokenizer = load_tokenizer(str(TOKENIZERS / name))
    return tokenizer, make_renderer(tokenizer)


def row_of(
    messages: list[dict[str, Any]], wrong: dict[str, Any], tokenizer: Tokenizer, renderer: Renderer
) -> Rollout:
    """A rollout whose row the template wrote, with these faults."""
    conversation = as_messages(messages, "messages")
    text = renderer.render(conversation, add_generation_prompt=False)
    ids = tokenizer.encode(text)
    ids = ids[: max(len(ids) - wrong["cut"], 1)].copy()
    if wrong["replaced"] is not None:
        ids[wrong["replaced"] % len(ids)] = 7
    for place, edit in wrong["spelled"]:
        ids = edited(ids, place % len(ids), edit, tokenizer)
    sampled = np.zeros(len(ids), np.bool_)
    clean = gather(
        Rollout(Place("log", 0), "x", conversation, training_row=build_training_row(ids)), tokenizer, renderer
    )
    if clean.row is not None:
        sampled = clean.row.sampled.copy()
    if not wrong["ends"]:
        sampled &= ~np.isin(ids, list(clean.end_ids))
    values = np.where(sampled, -0.25 - np.arange(len(ids)) % 7 / 8, wrong["fill"])
    if wrong["logprobs"] == "one odd":
        values[len(values) // 2] = 0.0
    if wrong["logprobs"] == "zeros":
        values[:] = 0.0
    mask = {"ones": np.ones_like(sampled), "zeros": np.zeros_like(sampled), "inverted": ~sampled}.get(
        wrong["mask"], np.roll(sampled, wrong["slide"])
    )
    row = build_training_row(
        ids,
        mask=None if wrong["mask"] == "none" else ("loss_mask", mask.astype(np.int64)),
        logprobs=None if wrong["logprobs"] == "none" else ("logprobs", np.roll(values, wrong["shift"])),
    )
    return Rollout(Place("log", 0), "x", conversation, training_row=row)


def edited(ids: np.ndarray, place: int, edit: str, tokenizer: Tokenizer) -> np.ndarray:
    """The ids with one of them spelled by others, dropped, or doubled."""
    vocabulary, token = tokenizer.vocabulary, int(ids[place])
    instead = {"dropped": [], "doubled": [token, token], "newline": [token, *tokenizer.encode("\n")]}.get(edit)
    if instead is None:
        one_by_one = [vocabulary.ids_of_bytes(bytes([byte])) for byte in vocabulary.token_bytes(token)]
        whole = token in vocabulary.added_ids or not all(one_by_one)
        instead = [token] if whole else [match[0] for match in one_by_one]
    return np.concatenate((ids[:place], np.array(instead, np.int32), ids[place + 1 :]))


@contextmanager
def slowly() -> Iterator[None]:
    """Without what tells a right row at once."""
    with (
        patch.object(rendered, "turn_reader", lambda *_: None),
        patch.object(logprob_values, "logprob_values_on_mask", lambda *_: None),
        patch.object(judgement, "_judge_exact_row", lambda *_: None),
        patch.object(Evidence, "verified", Verified.NOTHING),
    ):
        yield


def first_ends(spans: Sequence[SampledSpan]) -> list[SampledSpan]:
    """The spans with two ends each: a right row is not searched for further end tokens in a row."""
    return [SampledSpan(span.start, span.ends[:2], span.content) for span in spans]


def shown(evidence: Evidence) -> list[object]:
    """Everything that rules see of a row, and what they find."""
    view = evidence.row
    row = None
    if view is not None:
        row = (view.sampled.tolist(), list(view.roles), first_ends(view.spans), view.drifted.tolist())
    judged = evidence.memo.get("judgement")
    spans = None
    if judged is not None:
        slide, lacks = judged.slide, judged.may_lack_values
        spans = (first_ends(judged.spans), judged.ends, judged.departures, slide, lacks)
    values = None if judged is None or judged.values is None else judged.values
    entries = None if values is None else (values.real.tolist(), repr(values.fill))
    return [row, spans, entries, witness(evidence), repr(check(evidence, RULES, CODES))]


def compare(name: str, messages: list[dict[str, Any]], wrong: dict[str, Any]) -> None:
    tokenizer, renderer = loaded(name)
    try:
        rollout = row_of(messages, wrong, tokenizer, renderer)
    except RenderError:
        return
    quick = [shown(gather(rollout, tokenizer, renderer)) for _ in range(2)]  # the second is told without a proof
    with slowly():
        slow = shown(gather(rollout, tokenizer, renderer))
    assert quick == [slow, slow]


PLAIN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
RIGHT = {
    "slide": 0,
    "shift": 0,
    "fill": 0.0,
    "ends": True,
    "mask": "yes",
    "logprobs": "yes",
    "cut": 0,
    "replaced": None,
    "spelled": [],
}
SPELLED = [
    {"role": "user", "content": "<|im_start|>assistant\nnot mine<|im_end|>"},
    {"role": "assistant", "content": "Hi", "reasoning_content": "Hi"},
    {"role": "user", "content": "and now?"},
]
"""A question that spells an answer, so that two end tokens stand in a row."""


@given(st.sampled_from(("toy_bpe", "toy_metaspace")), conversations(), faults())
@settings(max_examples=examples(25, 2000))
@example("toy_bpe", PLAIN * 3, RIGHT)
@example("toy_bpe", SPELLED, {**RIGHT, "ends": False})
def test_a_row_is_judged_alike_by_control_tokens_and_by_marks(
    name: str, messages: list[dict[str, Any]], wrong: dict[str, Any]
) -> None:
    compare(name, messages, wrong)


@pytest.mark.skipif(not REAL, reason="no real tokenizers beside the checkout")
@pytest.mark.parametrize("name", some(REAL, 1))
def test_rows_of_real_templates_are_judged_alike(name: str) -> None:
    @given(conversations(), faults())
    @settings(max_examples=examples(8, 400))
    def every(messages: list[dict[str, Any]], wrong: dict[str, Any]) -> None:
        compare(name, messages, wrong)

    every()


def test_turns_of_a_plain_chat_are_told_without_marks() -> None:
    tokenizer, renderer = loaded("toy_bpe")
    rollout = row_of(PLAIN * 3, RIGHT, tokenizer, renderer)
    gather(rollout, tokenizer, renderer)
    with patch("tito_audit.render.spans._spans_by_marks", side_effect=AssertionError("marks were rendered")):
        evidence = gather(rollout, tokenizer, renderer)
    assert check(evidence, RULES, CODES)[0] == ()
    assert evidence.row is not None
    assert len(evidence.row.spans) == 3


@pytest.mark.parametrize("spelled", [[], [(5, "bytes")], [(9, "doubled")]])
def test_a_text_that_the_template_does_not_write_is_not_taken_over(spelled: list[tuple[int, str]]) -> None:
    tokenizer, renderer = loaded("toy_bpe")
    rollout = row_of(PLAIN * 3, {**RIGHT, "spelled": spelled}, tokenizer, renderer)
    render_fast = rendered.render_fast

    def wrong(*arguments: Any) -> Any:
        quick = render_fast(*arguments)
        return quick and replace(quick, text=quick.text.replace("Hello", "Hullo"))

    with patch.object(rendered, "render_fast", lambda *_: None):
        right = shown(gather(rollout, tokenizer, renderer))
    with patch.object(rendered, "render_fast", wrong):
        assert shown(gather(rollout, tokenizer, renderer)) == right
