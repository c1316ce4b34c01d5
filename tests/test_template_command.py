"""`tito-audit template`: its page, its object, its exit codes, and what a user may get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.test_template_facts import FAULTS, KEEPS, SWITCHED
from tests.toy import TOKENIZERS

TOKENIZER = TOKENIZERS / "toy_bpe"
DROPS = FAULTS["drops reasoning before the last user message"][0]
THINKING = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "They greet me."},
    {"role": "user", "content": "Bye."},
    {"role": "assistant", "content": "Bye."},
]


def template(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text(source, encoding="utf-8")
    return path


def report(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and object of a run that writes JSON."""
    code, out, err = run("template", *arguments, "-f", "json")
    assert err == ""
    return code, json.loads(out)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """The exit code and the object of a template that drops reasoning."""
    return report(TOKENIZER, "--chat-template", template(tmp_path_factory.mktemp("drops"), DROPS))


def test_the_object_holds_what_the_page_shows(dropping: tuple[int, dict[str, Any]]) -> None:
    code, facts = dropping
    assert code == 1
    assert facts["append_only"] is False
    assert facts["title"] == "not append-only"
    assert facts["verdict"].startswith("not append-only, except for tool results and later system messages: ")
    kinds = {(answer["answer"], answer["next"]): answer for answer in facts["answers"]}
    assert kinds["answer with reasoning", "user"]["broken"] == kinds["answer with reasoning", "user"]["tried"]
    first = facts["breaks"][0]
    assert first["change"] == "drops earlier reasoning"
    assert first["conditions"][0]["source"] == "{% if loop.index0 > ns.last %}"
    assert first["conditions"][0]["held_when_sampled"] is True
    assert first["line"] == first["conditions"][0]["line"]
    assert first["sampled"]["text"].startswith("<think>")
    assert first["rendered"]["tag"]["source"] == "{{ m.content or '' }}"
    assert facts["beginning_token"]["doubled"] is False
    assert {token["text"] for token in facts["end_tokens"] if token["written"]} == {"<|im_end|>"}
    assert all(seam["ids"] for seam in facts["between"])
    assert all(seam["seen"] >= 3 for seam in facts["between"])
    assert {content["role"]: content["writing"] for content in facts["contents"]}["user"] == "as it is"
    delimiters = {(delimiter["left"], delimiter["right"]): delimiter for delimiter in facts["delimiters"]}
    assert delimiters["user", "assistant"]["text"] == "<|im_end|>\n<|im_start|>assistant\n"
    assert all(delimiter["ids"] and delimiter["reason"] is None for delimiter in delimiters.values())
    claimed = {claim["what"]: claim["holds"] for claim in facts["rely_on"]}
    assert claimed["Sampled tokens stay where they are before tool results"] is True
    assert claimed["Sampled tokens stay where they are before user messages"] is False


def test_a_pair_of_messages_without_a_fixed_text_is_named_with_the_reason(tmp_path: Path) -> None:
    counts = "{{ loop.index if loop.index > 2 and m.role == 'user' else '' }}"
    path = template(tmp_path, KEEPS.replace("{{ '<|im_start|>'", counts + "{{ '<|im_start|>'", 1))
    delimiters = {
        (delimiter["left"], delimiter["right"]): delimiter
        for delimiter in report(TOKENIZER, "--chat-template", path)[1]["delimiters"]
    }
    assert "depends on the messages" in delimiters["assistant", "user"]["reason"]
    assert delimiters["assistant", "user"]["text"] is None
    out = run("template", "--full", TOKENIZER, "--chat-template", path)[1]
    assert "no delimiter between assistant and user: it depends on the messages" in " ".join(out.split())


def test_the_keys_of_the_object_are_documented(dropping: tuple[int, dict[str, Any]]) -> None:
    _, facts = dropping
    guide = (Path(__file__).resolve().parents[1] / "docs" / "template.md").read_text(encoding="utf-8")
    assert [key for key in facts if f"`{key}`" not in guide] == []


def test_without_a_tokenizer_texts_are_told_and_ids_are_said_to_be_unknown(tmp_path: Path) -> None:
    path = template(tmp_path, "{{ bos_token }}" + DROPS)
    code, facts = report("--chat-template", path)
    assert code == 1
    assert {seam["ids"] for seam in facts["between"]} == {None}
    assert facts["delimiters"] is None
    assert facts["beginning_token"] == {"text": "<bos>", "written": True, "added": None, "doubled": None}
    with_ids = report(TOKENIZER, "--chat-template", path)[1]
    assert {place["line"] for place in facts["breaks"]} == {place["line"] for place in with_ids["breaks"]}


def test_an_argument_that_makes_it_append_only_is_offered(tmp_path: Path) -> None:
    facts = report("--chat-template", template(tmp_path, SWITCHED))[1]
    assert [setting["flags"] for setting in facts["settings"]] == ["--template-arg preserve=true"]
    assert facts["advice"]["safe"].startswith("no: once a user message follows")


def test_the_rollouts_of_a_log_that_a_template_breaks_are_named(tmp_path: Path) -> None:
    plain = [{**message, "reasoning_content": None} for message in THINKING]
    rows = [{"messages": messages} for messages in (THINKING, plain, plain)]
    log = written(tmp_path / "log.jsonl", rows)
    facts = report("--chat-template", template(tmp_path, DROPS), "--log", log)[1]["log"]
    assert (facts["rollouts"], facts["broken_rollouts"]) == (3, [f"{log}:0"])


HOSTILE = "\x1b[31m‮::error::{{ '\x1b[2J::warning::' }}"


def test_nothing_of_a_template_acts_on_a_terminal_or_in_ci(tmp_path: Path) -> None:
    refusing = "{% if messages | length > 3 %}{{ raise_exception('\x1b[2J\n::error::') }}{% endif %}"
    source = HOSTILE + refusing + DROPS + "{% if colour == '\x1b[3m' %}{% endif %}"
    path = template(tmp_path, source)
    for arguments in ((), ("-f", "json")):
        code, out, _ = run("template", "--full", "--chat-template", path, *arguments)
        assert code == 1
        assert not set(out) & {"\x1b", "‮", "\r"}
        assert not [line for line in out.splitlines() if line.lstrip().startswith("::")]


def test_the_clock_that_a_template_reads_is_told(tmp_path: Path) -> None:
    path = template(tmp_path, "{{ strftime_now('%d %b %Y') }}" + KEEPS)
    facts = report("--chat-template", path, "--clock", "2024-07-26")[1]
    assert facts["clock"] == ["%d %b %Y"]
