"""What the command says of training rows whose roles have other names, or names that nobody knows.

Single rows stand in `tests/data/rows_found.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import toy
from tests.command import run, written
from tito_audit.evidence.gather import gather
from tito_audit.evidence.masks import agreed_mask
from tito_audit.record.build import build_training_row
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.speakers import Speakers

BPE = toy.TOKENIZERS / "toy_bpe"
TALK = (("user", "Go"), ("assistant", "\n\nHello there"), ("user", "Now what?"), ("assistant", "Done "))
GIVEN, EVERYTHING = "given", "everything"
Row = dict[str, Any]


def row_of(
    names: dict[str, str], *, headers: dict[str, str] | None = None, chat: bool = True, faulty: str = ""
) -> Row:
    """A row whose roles have these names, `headers` those in the ids; a faulty mask trains a given message too."""
    ids: list[int] = []
    mask: list[int] = []
    encode = toy.toy_tokenizer().encode
    for number, (role, text) in enumerate(TALK):
        name = (headers or names).get(role, role)
        trained = role == "assistant" or (faulty == GIVEN and number == 2) or faulty == EVERYTHING
        own = encode(text).tolist()
        for tokens, yes in (
            (encode(f"<|im_start|>{name}\n").tolist(), False),
            (own, trained),
            (encode("<|im_end|>").tolist(), role == "assistant"),
            (encode("\n").tolist(), False),
        ):
            ids += tokens
            mask += [int(yes)] * len(tokens)
    messages = [{"role": names.get(role, role), "content": text} for role, text in TALK]
    return {"token_ids": ids, "loss_mask": mask} | ({"messages": messages} if chat else {})


def loud_in(log: Path, *options: object) -> list[tuple[int, str, str, str]]:
    """Row, code, severity and cause of what a scan says of masks above a note."""
    code, out, _ = run("scan", log, "-t", BPE, "--report", "jsonl", *options)
    lines = [line for line in map(json.loads, out.splitlines()) if line.get("severity") in ("error", "warning")]
    assert code == any(line["severity"] == "error" for line in lines)
    masks = [line for line in lines if line["code"] == "MSK401"]
    return [(line["row"], line["code"], line["severity"], line["cause"]) for line in masks]


NAMES = (
    {},
    {"assistant": "agent", "user": "environment"},
    {"assistant": "gpt", "user": "human"},
    {"assistant": "model", "user": "observation"},
    {"assistant": "bot"},
)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("headers", [None, {}], ids=["headed so", "headed as usual"])
@pytest.mark.parametrize("chat", [True, False], ids=["messages", "ids alone"])
def test_the_same_rows_are_at_fault_whatever_the_roles_are_called(
    tmp_path: Path, names: dict[str, str], headers: dict[str, str] | None, chat: bool
) -> None:
    rows = [row_of(names, headers=headers, chat=chat, faulty=GIVEN if at % 2 else "") for at in range(4)]
    loud = loud_in(written(tmp_path / "log.jsonl", rows), "--no-config")
    assert [(row, severity) for row, _, severity, _ in loud] == [(1, "error"), (3, "error")]
    assert {cause for *_, cause in loud} <= {"user", "tool"}


@pytest.mark.parametrize("chat", [True, False], ids=["messages", "ids alone"])
def test_repair_leaves_nothing_trained_but_what_was_sampled(tmp_path: Path, chat: bool) -> None:
    names = {"assistant": "agent", "user": "environment"}
    faulty, right = (row_of(names, chat=chat, faulty=fault) for fault in (GIVEN, ""))
    log = written(tmp_path / "log.jsonl", [faulty, right])
    code, _, _ = run("repair", log, "-o", tmp_path / "out.jsonl", "-t", BPE, "--no-config", "--select", "MSK")
    assert code == 0
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        assert json.loads(line)["loss_mask"] == right["loss_mask"]


@pytest.mark.parametrize("chat", [True, False], ids=["messages", "ids alone"])
def test_a_role_that_nobody_knows_is_never_clean_and_keeps_its_tokens_in_every_repair(
    tmp_path: Path, chat: bool
) -> None:
    row = row_of({"assistant": "planner"}, chat=chat)
    log, out, toy_alone = (
        written(tmp_path / "log.jsonl", [row]),
        tmp_path / "out.jsonl",
        ("-t", BPE, "--no-config"),
    )
    assert "clean" not in run("scan", log, *toy_alone)[1]
    assert run("scan", log, *toy_alone, "--fail-on", "warning")[0] == 1
    run("repair", log, "-o", out, *toy_alone, "--fail-on", "warning", "--with", "mask")
    assert json.loads(out.read_text())["loss_mask"] == row["loss_mask"]


def test_a_role_may_be_stated_of_some_logs(tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text('[[overrides]]\npaths = "*.jsonl"\nsampled-roles = ["planner"]\n')
    log = written(
        tmp_path / "log.jsonl", [row_of({"assistant": "planner"}, faulty=fault) for fault in ("", GIVEN)]
    )
    assert loud_in(log, "--config", config) == [(1, "MSK401", "error", "user")]


def test_no_role_at_all_is_a_mistake_of_the_command(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [row_of({})])
    code, _, err = run("scan", log, "--sampled-role", "", "--no-config")
    assert code == 2
    assert "--sampled-role '': a role is missing." in err


def test_sampled_white_space_that_a_template_trims_is_the_answers(tmp_path: Path) -> None:
    """The template at hand writes the text without it, and so puts its header elsewhere."""
    template = tmp_path / "trims.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    log = written(tmp_path / "log.jsonl", [row_of({})])
    assert loud_in(log, "--no-config", "--chat-template", template) == []


# What all witnesses agree on


def evidence_of(row: Row, trained: Sequence[int], logprobs: Sequence[float] | None = None) -> Any:
    columns: dict[str, Any] = {"mask": ("loss_mask", trained)}
    if logprobs is not None:
        columns["logprobs"] = ("logprobs", np.array(logprobs))
    rollout = Rollout(
        Place("x", 0),
        "x",
        messages=as_messages(row.get("messages"), "m"),
        training_row=build_training_row(np.array(row["token_ids"], np.int32), **columns),
    )
    return gather(rollout, toy.toy_tokenizer(), toy.toy_renderer(), Speakers())


def test_messages_and_headers_prove_a_mask_together() -> None:
    row = row_of({"assistant": "agent", "user": "environment"})
    right = row["loss_mask"]
    ends = np.isin(row["token_ids"], [toy.toy_tokenizer().vocabulary.ids_of_bytes(b"<|im_end|>")[0]])
    wrong = [int(not trained and at > 8) for at, trained in enumerate(right)]
    agreed = agreed_mask(evidence_of(row, wrong))
    assert agreed.tolist() == [bool(trained) and not end for trained, end in zip(right, ends, strict=True)]
    assert agreed_mask(evidence_of(row, right)).tolist() == [bool(trained) for trained in right]


def test_witnesses_that_contradict_each_other_prove_nothing() -> None:
    row = row_of({})
    right = row["loss_mask"]
    assert agreed_mask(evidence_of(row, right, [-0.5 if trained else 0.0 for trained in right])) is None
    assert agreed_mask(evidence_of(row_of({}, chat=False), right)) is None
    other = row_of({})
    other["messages"][1]["content"] = "Another answer"
    assert agreed_mask(evidence_of(other, right)) is None
    assert agreed_mask(evidence_of(row_of({"user": "planner"}), right)) is None
