"""The oracle of chat templates agrees with what packages publish of them, or says why not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.template_oracle import published as others
from tests.template_oracle.chat import Refusal, Template
from tests.template_oracle.facts import (
    append_only,
    between,
    has_generation_prompt,
    keeps_reasoning,
    opens_answers,
    reads_clock,
    refuses,
    steps,
    trims,
    writes_bos,
    writes_reasoning,
)
from tests.template_oracle.sources import needed, published
from tests.tiers import DEEP

PAGE = Path(__file__).resolve().parents[1] / "docs" / "conformance.md"
START, END = "<!-- verdicts of others -->\n", "<!-- end of verdicts of others -->\n"
PLAIN = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content and REASONS %}({{ message.reasoning_content }}){% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}[{{ call.function.arguments|tojson }}]"
    "{% endfor %}END\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

deep = pytest.mark.skipif(not DEEP, reason="the oracle against other packages, without ours; in `make deep`")


def plain(*, reasons: str = "true", **replaced: str) -> Template:
    """A small template, with some of its text replaced."""
    source = PLAIN.replace("REASONS", reasons)
    for old, new in replaced.items():
        assert {"end": "END", "content": "message.content"}[old] in source
        source = source.replace({"end": "END", "content": "message.content"}[old], new)
    return Template(source)


def test_a_template_that_writes_each_message_by_itself_keeps_everything() -> None:
    template = plain()
    assert {step.outcome for step in steps(template).values()} == {"kept"}
    assert all(opens_answers(template).values())
    assert writes_reasoning(template)
    assert keeps_reasoning(template)
    assert not refuses(template)
    assert writes_bos(template)
    assert has_generation_prompt(template)
    assert between(template) == {
        "system to user": "END\n<user>",
        "user to assistant": "END\n<assistant>",
        "assistant to user": "END\n<user>",
        "tool to assistant": "END\n<assistant>",
    }
    assert trims(template) is False
    assert reads_clock(template) is False


def test_each_way_to_change_history_is_seen() -> None:
    last = steps(plain(reasons="loop.last"))
    assert append_only(last, "user", reasoning=True) is False
    assert append_only(last, "tool", reasoning=True) is False
    assert append_only(last, "user", reasoning=False) is True
    assert writes_reasoning(plain(reasons="loop.last"))
    assert not keeps_reasoning(plain(reasons="loop.last"))
    ended = steps(plain(end="{{ 'LAST' if loop.last else 'END' }}"))
    assert {step.outcome for step in ended.values()} == {"ended"}
    spaced = steps(plain(end="END{{ '\\n' if loop.last }}"))
    assert {step.outcome for step in spaced.values()} == {"spaced"}
    assert trims(plain(content="message.content|trim")) is True
    assert reads_clock(plain(end="{{ strftime_now('%Y') }}")) is True


def test_a_refusal_is_no_verdict() -> None:
    template = plain(end="{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}END")
    assert append_only(steps(template), "tool") is None
    assert append_only(steps(template), "user") is True
    assert {"a tool's result", "a tool's result without a call"} == refuses(template)
    with pytest.raises(Refusal, match="no tools"):
        template.text([{"role": "tool", "content": "x"}])


@deep
def test_the_definition_of_trl_is_what_its_function_computes() -> None:
    assert [others.as_trl_says(published(name)) for name in needed()] == others.said()["trl"]


@deep
def test_every_difference_from_a_published_verdict_is_explained() -> None:
    for verdict in others.verdicts():
        changed = any(step.outcome not in ("kept", "refused") for step in verdict.steps.values())
        agreed = (verdict.trl is not changed) and bool(verdict.failed("tool and user")) == changed
        declared = verdict.renderers is None or verdict.renderers == verdict.stable
        assert (agreed and declared) or list(others.notes(verdict)), verdict.name


@deep
def test_what_trl_and_miles_find_changed_the_oracle_finds_changed() -> None:
    # The other way round they may miss something: what they try is less.
    for verdict in others.verdicts():
        outcomes = {step.outcome for step in verdict.steps.values()}
        if verdict.trl is False:
            assert outcomes & {"ended", "rewritten"}, verdict.name
        mismatches = [why for why in verdict.failed("tool and user") if "Prefix mismatch" in why]
        if mismatches and "e" not in others.notes(verdict):
            assert outcomes & {"ended", "rewritten"}, verdict.name


def test_the_docs_name_the_versions_of_the_packages() -> None:
    folder = Path(__file__).parent / "frameworks" / "requirements"
    pinned = [
        line for name in ("templates", "shared") for line in (folder / f"{name}.txt").read_text().split("\n")
    ]
    for name, version in re.findall(r"(TRL|miles-rl|renderers) ([\d.]+\d)", PAGE.read_text(encoding="utf-8")):
        assert f"{name.lower()}=={version}" in pinned


@deep
def test_the_docs_say_why_the_verdicts_of_others_differ() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    table, after = rest.split(END)
    new = others.page(others.verdicts())
    if os.environ.get("UPDATE_GOLDENS"):
        PAGE.write_text(before + START + new + END + after, encoding="utf-8")
    else:
        assert table == new
