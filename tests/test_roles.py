"""Who speaks where: aliases of roles, what headers an answer in each family, and what one run states."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.tables import table
from tests.tiers import crossed, some
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.roles import GENERATION_PROMPT, TURN_END, Headers, headers_of, token_roles
from tito_audit.record.build import build_call_columns
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Place, Rollout, Turn, with_speakers
from tito_audit.record.speakers import ASSISTANT, SAMPLED_ROLES, Speakers, speaker_of, unknown_role_name
from tito_audit.run.auditor import Loader
from tito_audit.settings.model import Settings

SHARED = Path(__file__).resolve().parents[2] / "shared"
shared = pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout")
ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "</s>", "<|end|>"),
    "<|return|>",
)


def split(text: str) -> list[str]:
    """Tokens with dots between them."""
    return text.split("·")


def is_control(token: str) -> bool:
    return len(token) > 3 and ((token[0], token[-1]) == ("<", ">") or (token[0], token[-1]) == ("[", "]"))


def pieces(tokens: Sequence[str]) -> tuple[Pieces, frozenset[int]]:
    """Tokens as written, those in angle or square brackets as control tokens; and the ids of ends."""
    data = [token.encode() for token in tokens]
    controls = np.array([is_control(token) and token not in ("<think>", "</think>") for token in tokens], np.bool_)
    ids = np.arange(len(tokens), dtype=np.int32)
    ends = frozenset(at for at, token in enumerate(tokens) if token in ENDS)
    return Pieces(ids, np.cumsum([len(spelling) for spelling in data]), b"".join(data), controls), ends


def sampled(tokens: Sequence[str], headers: Headers | None = None) -> str:
    """The tokens that count as sampled, one after the other between bars."""
    laid, ends = pieces(tokens)
    trained = token_roles(laid, ends, headers).among((ASSISTANT, TURN_END))
    return "|".join(token for token, yes in zip(tokens, trained.tolist(), strict=True) if yes)


def learned(opener: str, *controls: str, stated: tuple[str, ...] = ()) -> Headers:
    return headers_of(opener, controls, Speakers(stated))


# Names


@pytest.mark.parametrize("role", ["assistant", "model", "agent", "gpt", "ai", "bot", "Assistant", " AGENT "])
def test_a_name_that_models_are_given_was_sampled(role: str) -> None:
    (message,) = as_messages([{"role": role, "content": "x"}], "m")
    assert message.sampled
    assert not message.known_unsampled


OTHERS = {
    "tool": ("tool", "environment", "observation", "env", "function", "ipython", "tool_response"),
    "user": ("human",),
    "system": ("developer",),
}


@pytest.mark.parametrize(
    ("role", "speaker"), [(role, speaker) for speaker, roles in OTHERS.items() for role in roles]
)
def test_a_role_of_others_is_given_under_each_of_its_names(role: str, speaker: str) -> None:
    (message,) = as_messages([{"role": role, "content": "x"}], "m")
    assert (message.speaker, message.sampled, message.known_unsampled) == (speaker, False, True)


def test_a_role_that_is_not_known_is_neither_sampled_nor_given() -> None:
    (message,) = as_messages([{"role": "planner", "content": "x"}], "m")
    assert not message.sampled
    assert not message.known_unsampled
    assert unknown_role_name(message.speaker) == "planner"
    assert unknown_role_name(speaker_of("template")) == "template"  # the log's word is never taken for ours


def test_roles_that_are_stated_take_the_place_of_all_others() -> None:
    stated = Speakers(("Planner", "environment"))
    roles = {"planner": "assistant", "environment": "assistant", "agent": "given answer", "user": "user"}
    assert {role: stated.speaker(role) for role in roles} == roles


def test_stated_roles_pair_the_calls_with_their_messages() -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "planner", "content": "y"}]
    _, columns = build_call_columns(np.array([1], np.int32))
    turn = Turn(prompt_ids=np.array([0], np.int32), completion_ids=np.array([1], np.int32), columns=columns)
    rollout = Rollout(Place("x", 0), "x", messages=as_messages(chat, "m"), turns=(turn,))
    stated = with_speakers(rollout, Speakers(("planner",)))
    assert stated.turns[0].message_index == 1
    assert stated.messages == rollout.messages  # the log is what it was
    assert with_speakers(rollout, Speakers()) is rollout


# Headers


CHATML = ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]


@pytest.mark.parametrize(*table(__file__, "an_answer_begins_right_behind_the_header_of_its_family"))
def test_an_answer_begins_right_behind_the_header_of_its_family(text: str, wanted: str) -> None:
    assert sampled(split(text)) == wanted


def test_a_model_of_the_harmony_format_writes_all_behind_its_own_name() -> None:
    user = ["<|start|>", "user", "<|message|>", "Hi", "<|end|>"]
    thought = ["<|channel|>", "analysis", "<|message|>", "hm", "<|end|>"]
    tool_call = split("<|start|>·assistant· to·=functions.f·<|channel|>·commentary·<|message|>·{}·<|call|>")
    back = split("<|start|>·functions.f· to=assistant·<|channel|>·commentary·<|message|>·4·<|end|>")
    final = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "4", "<|return|>"]
    tokens = [*user, "<|start|>", "assistant", *thought, *tool_call, *back, *final]
    laid, ends = pieces(tokens)
    ends |= {at for at, token in enumerate(tokens) if token == "<|call|>"}
    trained = token_roles(laid, ends).among((ASSISTANT, TURN_END))
    # What goes on behind a thought is the same call; what follows a tool is another.
    sampled_tokens = [token for token, yes in zip(tokens, trained.tolist(), strict=True) if yes]
    assert sampled_tokens == [*thought, *tool_call, *final[2:]]


def test_no_tokens_have_no_roles() -> None:
    assert list(token_roles(*pieces(()))) == []


def test_a_token_of_header_and_answer_is_the_headers() -> None:
    laid, ends = pieces([*CHATML[:-1], "\n\n\n", "Hello", "<|im_end|>"])
    assert token_roles(laid, ends)[8] == GENERATION_PROMPT


def test_the_generation_prompt_of_a_template_says_what_a_header_is() -> None:
    """Of families that nobody wrote down, too, and only there is a prefill given."""
    granite = ["<|start_of_role|>", "assistant", "<|end_of_role|>", "A", "</s>"]
    own = ["<|who|>", "robot", "\n", "\n", "A", "</s>", "<|who|>", "user", "\n", "\n", "B", "</s>"]
    thinking = [*CHATML, "<think>", "\n", "A", "</think>", "B", "<|im_end|>"]
    emptied = [*CHATML, "<think>", "\n\n", "</think>", "\n\n", "B", "<|im_end|>"]
    assert sampled(granite, learned("<|start_of_role|>assistant<|end_of_role|>", *granite[::2])) == "A|</s>"
    assert sampled(own, learned("<|who|>robot\n\n", "<|who|>")) == "A|</s>"
    assert sampled(own) == ""
    assert (
        sampled(thinking, learned("<|im_start|>assistant\n<think>\n", "<|im_start|>")) == "A|</think>|B|<|im_end|>"
    )
    assert sampled(thinking, learned("<|im_start|>assistant\n", "<|im_start|>")).startswith("<think>|\n|A")
    off = learned("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>")
    assert sampled(emptied, off) == "B|<|im_end|>"
    # A past turn whose reasoning the template did not empty has nothing of the prefill.
    assert sampled([*CHATML, "B", "<|im_end|>"], off) == "B|<|im_end|>"
    # No newline behind the name in this template, so one that is there was sampled.
    bare = ["<|assistant|>", "\n", "<think>", "A", "</s>"]
    assert sampled(bare, learned("<|assistant|>", "<|assistant|>")) == "\n|<think>|A|</s>"
    assert sampled(bare) == "<think>|A|</s>"


def test_stated_roles_are_read_in_headers_and_the_templates_own_word_means_an_assistant() -> None:
    two = split("<|im_start|>·planner·\n·a·<|im_end|>·\n·<|im_start|>·assistant·\n·b·<|im_end|>")
    assert sampled(two, Headers(Speakers(("planner",)))) == "a|<|im_end|>"
    assert sampled(two, Headers(Speakers(("assistant", "planner")))) == "a|<|im_end|>|b|<|im_end|>"
    gemma = ["<start_of_turn>", "model", "\n", "a", "<end_of_turn>"]
    assert sampled(gemma, Headers(Speakers(("assistant",)))) == "a|<end_of_turn>"
    assert sampled(gemma, Headers(Speakers(("agent",)))) == ""


def test_every_name_of_a_model_is_one_role_in_headers() -> None:
    for role in SAMPLED_ROLES:
        assert sampled(["<|im_start|>", role, "\n", "a", "<|im_end|>"]) == "a|<|im_end|>"


# Real tokens


@shared
@pytest.mark.shared
@pytest.mark.parametrize(("model", "template"), crossed(["qwen2.5-coder", "gemma-3", "smollm2"], [True, False]))
def test_every_turn_of_every_conversation_begins_where_its_call_began(model: str, template: bool) -> None:
    engine, _ = Loader().load_auditor(Settings(tokenizer=str(SHARED / "tokenizers" / model)))
    assert engine.tokenizer is not None
    reference = Reference(engine.tokenizer, engine.renderer if template else None)
    calls = 0
    with gzip.open(SHARED / "rollouts" / model / "tito.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            seen = row["calls"][-1]["prompt_token_ids"] + row["calls"][-1]["generation_token_ids"]
            roles = token_roles(
                reference.pieces(np.array(seen, np.int32)), reference.end_ids(), reference.headers({})
            )
            trained = roles.among((ASSISTANT, TURN_END))
            for call in row["calls"]:
                start = len(call["prompt_token_ids"])
                end = start + len(call["generation_token_ids"])
                assert not trained[start - 1], row["id"]
                assert trained[start:end].all(), row["id"]
                appended = call["finish_reason"] == "length" and end < len(seen)
                assert trained[end : end + 1 + appended].tolist() in ([], [False], [True, False]), row["id"]
                calls += 1
    assert calls > 80


ASKED = ("Hi there", "1 + 1?")
ANSWERED = ("Hello!\n\nHow?", " 2")


@shared
@pytest.mark.shared
@pytest.mark.parametrize(
    "name", some(["gemma-3", "llama-3.1", "deepseek-v3", "gpt-oss", "qwen3", "qwen2.5-coder", "smollm2"], 2)
)
@pytest.mark.parametrize("lead", ["", "\n", "\n\n"])
def test_a_template_says_where_answers_begin_that_begin_with_white_space(name: str, lead: str) -> None:
    """Each answer is sampled apart, behind the very tokens of its generation prompt."""
    engine, _ = Loader().load_auditor(Settings(tokenizer=str(SHARED / "tokenizers" / name)))
    assert engine.tokenizer is not None
    reference = Reference(engine.tokenizer, engine.renderer)
    for ref in (reference, Reference(engine.tokenizer, None)):
        ids, truth = spoken(reference, lead)
        roles = token_roles(reference.pieces(np.array(ids, np.int32)), ref.end_ids(), ref.headers({}))
        assert roles.among((ASSISTANT, TURN_END)).tolist() == truth


def spoken(reference: Reference, lead: str) -> tuple[list[int], list[bool]]:
    """A conversation token by token as a server would see it, and which of them were sampled."""
    ids: list[int] = []
    truth: list[bool] = []
    first, end, later = (scaffold if reference.renderer is None else written)(reference)
    for prompt, answer in zip((first, later), ANSWERED, strict=True):
        head = "<|channel|>final<|message|>" if reference.renderer is None else ""
        for text, own in ((prompt, False), (head, True), (lead, True), (answer, True), (end, True)):
            tokens = reference.encode(text).tolist()
            ids += tokens
            truth += [own] * len(tokens)
    return ids, truth


def written(reference: Reference) -> tuple[str, str, str]:
    """The first prompt, what ends an answer, and what the next prompt adds behind that."""
    assert reference.renderer is not None
    chat = [
        {"role": "user", "content": ASKED[0]},
        {"role": "assistant", "content": "ZZ"},
        {"role": "user", "content": ASKED[1]},
    ]
    first = reference.renderer.render(as_messages(chat[:1], "m"), add_generation_prompt=True)
    closed = reference.renderer.render(as_messages(chat[:2], "m"), add_generation_prompt=False)
    whole = reference.renderer.render(as_messages(chat, "m"), add_generation_prompt=True)
    end = closed.rpartition("ZZ")[2].strip()
    return first, end, whole.partition("ZZ" + end)[2]


def scaffold(reference: Reference) -> tuple[str, str, str]:
    """The same of the harmony format, for which the tokenizer at hand has no template."""
    first, later = (f"<|start|>user<|message|>{text}<|end|><|start|>assistant" for text in ASKED)
    return first, "<|end|>", later
