"""Training variants of chat templates, and two templates side by side; what is claimed is rendered by jinja2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests import toy
from tests.command import run
from tests.tables import stored, table
from tests.template_oracle.chat import TOKENS, Refusal, Template
from tests.template_oracle.conversations import (
    STEPS,
    Chat,
    answer,
    asking,
    result,
    system,
    user,
)
from tests.template_oracle.facts import (
    append_only,
    keeps_reasoning,
    steps,
    tools_for,
    trims,
    writes_reasoning,
    written,
)
from tests.template_oracle.sources import needed, of_tokenizer, published, tokenizer_folders
from tests.tiers import DEEP, some
from tito_audit.templates.training import (
    EditKind,
    apply_edits,
    find_conditions,
    find_edits,
    plain_newlines,
    read_tags,
)

BPE = str(toy.TOKENIZERS / "toy_bpe")
BASE = stored(__file__, "BASE")


def template_source(
    *, thought: str = "m.reasoning_content", cut: str = "set x = 1", other: str = "m.content"
) -> str:
    """A template with these constructs."""
    return BASE.replace("THOUGHT", thought).replace("CUT", f"{cut}").replace("OTHER", other)


BY_PLACE = template_source(thought="m.reasoning_content and loop.index0 > ns.last")
LAST = template_source(thought="loop.last or m.reasoning_content and loop.index0 > ns.last")
CUTTING = template_source(cut="if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif")
TRIMMING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def trained(
    folder: Path, source: str, *more: str, tokenizer: str | None = None
) -> tuple[int, dict[str, Any], Path]:
    """The exit code, the report and the file of `template --training`."""
    file, out = folder / "original.jinja", folder / "variant.jinja"
    file.write_text(source, encoding="utf-8", newline="")
    named = [tokenizer] if tokenizer else []
    words = ("template", *named, "--chat-template", file, "--training", out, "-f", "json", *more)
    code, printed, _ = run(*words)
    return code, json.loads(printed), out


def check(source: str, variant: str, tokens: Mapping[str, str] = TOKENS, **arguments: Any) -> None:
    """First prompts are byte for byte what they were, by jinja2 alone."""
    old, new = Template(source, tokens), Template(variant, tokens)
    spaced = {"role": "user", "content": " \n a question\t \n"}
    for chat in ([user()], [system(), user()], [spaced], [system(), spaced, user(2)], [user(), result()]):
        for tools in (None, tools_for([asking()])):
            assert prompt(new, chat, tools, **arguments) == prompt(old, chat, tools, **arguments)


def prompt(template: Template, chat: Chat, tools: Any, **arguments: Any) -> str | None:
    try:
        return template.text(chat, tools, opened=True, **arguments)
    except Refusal:
        return None


@pytest.mark.parametrize(
    ("source", "edits"), [(BY_PLACE, 1), (LAST, 1), (CUTTING, 1)], ids=["by place", "last", "cutting"]
)
def test_reasoning_stays_where_a_template_dropped_it(tmp_path: Path, source: str, edits: int) -> None:
    code, report, out = trained(tmp_path, source)
    variant = out.read_text(encoding="utf-8")
    assert code == 0
    assert report["file"] == str(out)
    assert len(report["edits"]) <= edits + 1
    assert report["after"]["changed"] == []
    assert report["before"]["changed"]
    check(source, variant)
    before, after = steps(Template(source)), steps(Template(variant))
    assert {step.outcome for step in after.values()} == {"kept"}
    if source != CUTTING:  # which drops it in the last answer as well
        assert append_only(before, "user", reasoning=True) is False
        assert keeps_reasoning(Template(variant))
    inline = [user(), answer(inline=True), user(2)]
    assert inline[1]["content"] in Template(variant).text(inline)


def test_answers_keep_whitespace_at_their_ends_where_a_template_trims_them(tmp_path: Path) -> None:
    code, report, out = trained(tmp_path, TRIMMING)
    variant = out.read_text(encoding="utf-8")
    assert code == 0
    assert report["before"]["trimmed"]
    assert report["after"]["trimmed"] == []
    assert trims(Template(TRIMMING)) is True
    assert trims(Template(variant)) is False
    check(TRIMMING, variant)
    assert "'assistant'" in variant  # what users say is still trimmed


def test_a_template_that_keeps_history_is_written_as_it_is(tmp_path: Path) -> None:
    source = template_source()
    code, report, out = trained(tmp_path, source)
    assert (code, report["edits"], report["diff"]) == (0, [], [])
    assert out.read_text(encoding="utf-8") == source


def test_an_edit_that_would_change_first_prompts_is_not_made(tmp_path: Path) -> None:
    # One condition decides about reasoning in history and about a line in first prompts.
    late = "{%- set late = loop.index0 > ns.last %}{% if m.role == 'user' and not late %}{{- 'now ' }}{% endif %}"
    source = template_source(thought="m.reasoning_content and late").replace(
        "    {%- if m.role == 'assistant' %}", late + ("    {%- if m.role == 'assistant' %}")
    )
    code, report, out = trained(tmp_path, source)
    assert code == 0
    assert [edit["was"] for edit in report["edits"]] != ["loop.index0 > ns.last"]
    check(source, out.read_text(encoding="utf-8"))
    assert keeps_reasoning(Template(out.read_text(encoding="utf-8")))


def test_one_of_several_templates_is_to_be_named(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    shutil.copytree(BPE, folder)
    for file in folder.glob("chat_template*"):
        file.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": BY_PLACE}, {"name": "tool_use", "template": LAST}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    out = tmp_path / "variant.jinja"
    code, _, err = run("template", folder, "--training", out)
    assert code == 2
    assert "--template-name default or tool_use" in err
    assert not out.exists()
    assert run("template", folder, "--training", out, "--template-name", "tool_use")[0] == 0
    check(LAST, out.read_text())


def test_what_a_template_says_is_escaped_on_a_terminal(tmp_path: Path) -> None:
    file, out = tmp_path / "original.jinja", tmp_path / "variant.jinja"
    evil = "{% if mode == '\x1b[31m' %}{% endif %}"
    file.write_text(BY_PLACE.replace("{%- if m.role", evil + "{%- if m.role"))
    code, page, _ = run("template", "--chat-template", file, "--training", out)
    assert code == 0
    assert "\x1b" not in page


def test_windows_line_ends_are_read_as_jinja_reads_them(tmp_path: Path) -> None:
    code, _, out = trained(tmp_path, BY_PLACE.replace("\n", "\r\n"))
    assert code == 0
    assert "\r" not in out.read_bytes().decode()
    check(BY_PLACE, out.read_text(encoding="utf-8"))


def test_the_log_has_its_say(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    chats = [[user(), answer(n, reasoning=True), user(2), answer(n, reasoning=True)] for n in range(3)]
    log.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    code, report, _ = trained(tmp_path, BY_PLACE, "--log", str(log), tokenizer=BPE)
    assert code == 0
    assert report["log"]["first_prompts"] == 3
    assert report["log"]["before"]["kept"] == 0
    assert report["log"]["after"]["kept"] == 3


# What is said of places


def test_every_token_is_where_it_is_said_to_be() -> None:
    for source in (
        BY_PLACE,
        LAST,
        CUTTING,
        TRIMMING,
        "a{%- if x -%}\n b {{- c.d | trim() }}{# {{ e }} #}{% endif %}",
    ):
        for tag in read_tags(source):
            assert source[tag.start :].startswith(("{%", "{{"))
            assert source[: tag.end].endswith(("%}", "}}"))
            assert all(source[token.start : token.end] == token.text for token in tag.tokens)
            assert tag.line == source.count("\n", 0, tag.start) + 1


@pytest.mark.parametrize(*table(__file__, "the_conditions_of_a_tag_are_found"))
def test_the_conditions_of_a_tag_are_found(tag: str, found: list[str]) -> None:
    (read,) = read_tags(tag)
    runs = [tag[run[0].start : run[-1].end] for run in find_conditions(read)]
    assert [condition for condition in found if condition not in runs] == []


def test_an_edit_changes_its_place_and_nothing_else() -> None:
    for source in (BY_PLACE, CUTTING, TRIMMING):
        edits = find_edits(source)
        assert {EditKind.DROP_CUT, EditKind.BY_PLACE, EditKind.UNCUT} & {edit.kind for edit in edits}
        for edit in edits:
            assert source[edit.start : edit.end] == edit.was
            assert apply_edits(source, [edit]) == source[: edit.start] + edit.new + source[edit.end :]
        apart = [edits[0], *(edit for edit in edits[1:2] if not edit.overlaps(edits[0]))]
        assert apply_edits(source, apart) == apply_edits(source, apart[::-1])
    assert plain_newlines("a\r\nb\rc\n") == "a\nb\nc\n"


# Real templates


@pytest.mark.parametrize("folder", tokenizer_folders(), ids=lambda folder: folder.name)
def test_variants_of_real_tokenizers_keep_history(tmp_path: Path, folder: Path) -> None:
    if not DEEP and folder.name != "qwen3":
        pytest.skip("the others in `make deep`")
    out = tmp_path / "variant.jinja"
    code, printed, _ = run("template", folder, "--training", out, "-f", "json")
    assert code == 0, printed
    template = of_tokenizer(folder)
    variant = Template(out.read_text(encoding="utf-8"), template.tokens)
    for arguments in some(({}, {"enable_thinking": True}, {"enable_thinking": False}), 2):
        check(template.source, variant.source, template.tokens, **arguments)
    assert not [name for name, step in steps(variant).items() if step.outcome == "rewritten"]
    if writes_reasoning(template):
        assert keeps_reasoning(variant)


def originals() -> list[str]:
    """Published templates with a training variant by TRL."""
    return [name for name in needed() if f"{name}_training" in needed()]


@pytest.mark.parametrize("name", ["deepseek_r1_distill"])
def test_variants_keep_what_those_of_trl_keep(tmp_path: Path, name: str) -> None:
    compare_with_trl(tmp_path, name)


@pytest.mark.skipif(not DEEP, reason="every published template, in `make deep`")
def test_all_variants_keep_what_those_of_trl_keep(tmp_path: Path) -> None:
    for name in originals():
        (tmp_path / name).mkdir()
        compare_with_trl(tmp_path / name, name)


def compare_with_trl(folder: Path, name: str) -> None:
    """Where TRL's training variant keeps an answer, ours does, and first prompts are those of the original."""
    source = published(name).source
    if "Answer 1" not in written(published(name), [user(), answer()]):
        return  # it writes content in parts alone, as for images
    code, _, out = trained(folder, source)
    theirs = steps(published(f"{name}_training"))
    if code == 1:
        assert not out.exists()
        assert append_only(theirs, "user") is not True or append_only(theirs, "tool") is False, name
        return
    variant = out.read_text(encoding="utf-8")
    check(source, variant)
    ours = steps(Template(variant))
    for step in STEPS:
        if theirs[step].outcome == "kept":
            # TRL mends arguments of tools that DeepSeek's template refuses as objects.
            assert ours[step].outcome in ("kept", "spaced", "refused"), (name, step)
    reasons = [user(), answer(inline=True), user(2)]
    if "Thought 1" in published(f"{name}_training").text(reasons):
        assert "Thought 1" in Template(variant).text(reasons), name


# Logs


def log_of(folder: Path, template: Template, encode: Callable[[str], list[int]]) -> Path:
    """Conversations with reasoning as a sampler logged them whose prompts this template wrote."""
    rows = []
    for number in range(4):
        chat: list[dict[str, Any]] = []
        calls = []
        for turn in range(3):
            chat.append(user(turn))
            prompted = template.text(chat, opened=True)
            message = {
                "role": "assistant",
                "content": f"Answer {number}.{turn}",
                "reasoning_content": f"Hm {turn}.",
            }
            sampled = template.text([*chat, message])[len(prompted) :].rstrip("\n")
            calls.append({"prompt_token_ids": encode(prompted), "generation_token_ids": encode(sampled)})
            chat.append(message)
        rows.append({"messages": chat, "calls": calls})
    file = folder / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rerendered(folder: Path, tokenizer: str, template: Template, encode: Callable[[str], list[int]]) -> set[str]:
    """What a scan finds of rewritten history in a log that a template wrote, given that template."""
    folder.mkdir()
    log, file = log_of(folder, template, encode), folder / "used.jinja"
    file.write_text(template.source, encoding="utf-8")
    printed = run("scan", log, "-t", tokenizer, "--chat-template", file, "-f", "json")[1]
    report = json.loads(printed)
    assert report["summary"]["rollouts"] == 4
    text = json.dumps(report["summary"]["findings"])
    return {code for code in ("SEQ301", "SEQ302", "SEQ303", "TPL204", "TPL205") if code in text}


def test_a_log_that_is_rendered_with_a_variant_has_no_rerendered_prefix(tmp_path: Path) -> None:
    _, _, out = trained(tmp_path, LAST)

    def encode(text: str) -> list[int]:
        return toy.toy_tokenizer().encode(text).tolist()

    variant = Template(out.read_text(encoding="utf-8"))
    assert {"SEQ302", "TPL204"} <= rerendered(tmp_path / "original", BPE, Template(LAST), encode)
    assert rerendered(tmp_path / "variant", BPE, variant, encode) == set()


@pytest.mark.skipif(not DEEP, reason="a real tokenizer, in `make deep`")
def test_the_same_of_a_real_tokenizer(tmp_path: Path) -> None:
    folder = next((path for path in tokenizer_folders() if path.name == "qwen3"), None)
    if folder is None:
        pytest.skip("no real tokenizers")
    out = tmp_path / "variant.jinja"
    assert run("template", folder, "--training", out)[0] == 0
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    template = of_tokenizer(folder)
    variant = Template(out.read_text(encoding="utf-8"), template.tokens)
    assert "SEQ302" in rerendered(tmp_path / "original", str(folder), template, encode)
    assert rerendered(tmp_path / "variant", str(folder), variant, encode) == set()


# Two templates side by side


def test_two_templates_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    path, other = tmp_path / "one.jinja", tmp_path / "other.jinja"
    path.write_text(LAST)
    other.write_text(LAST)
    code, printed, _ = run("template", "--chat-template", path, "--against", other, "-f", "json")
    report = json.loads(printed)
    assert (code, report["equal"], report["differences"]) == (0, report["prompts"], [])
    assert report["prompts"] > 50


@pytest.mark.parametrize(*table(__file__, "the_cause_of_a_difference_is_named"))
def test_the_cause_of_a_difference_is_named(tmp_path: Path, old: str, new: str, cause: str) -> None:
    path, other = tmp_path / "one.jinja", tmp_path / "other.jinja"
    assert old in BY_PLACE
    path.write_text(BY_PLACE)
    other.write_text(BY_PLACE.replace(old, new))
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"messages": [user(), answer(reasoning=True), user(2)]}) + "\n")
    words = ("template", BPE, "--chat-template", path, "--against", other)
    logged = json.loads(run(*words, "--log", log, "-f", "json")[1])
    assert logged["of_log"] is True
    tried = json.loads(run(*words, "-f", "json")[1])
    assert cause in [difference["cause"] for difference in (*logged["differences"], *tried["differences"])]
    code, page, _ = run(*words)
    assert code == 1
    assert cause in page


def test_templates_of_two_tokenizers_are_compared_with_their_ids() -> None:
    other = str(toy.TOKENIZERS / "toy_metaspace")
    report = json.loads(run("template", BPE, "--against", other, "-f", "json")[1])
    assert report["prompts"] == report["equal"] + sum(
        difference["prompts"] for difference in report["differences"]
    )
    assert report["equal_ids"] is not None
    assert report["equal_ids"] <= report["equal"]
