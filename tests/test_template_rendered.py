"""What `template` says of a chat template is what rendering it by jinja2 alone shows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.template_oracle.chat import Refusal, Template
from tests.template_oracle.conversations import STEPS, SYSTEM_STEPS, answer, asking, result, system, user
from tests.template_oracle.facts import Step, between, outcomes, reads_clock, writes_bos, written
from tests.template_oracle.sources import needed, of_tokenizer, published, tokenizer_folders
from tests.tiers import some


def broken(template: Template) -> set[str]:
    """The steps after which the prompt and its answer are not there as they were, in some form of the messages."""
    tried = {**STEPS, **SYSTEM_STEPS}
    return {name for name, step in tried.items() if any(map(_is_broken, outcomes(template, *step)))}


def _is_broken(step: Step) -> bool:
    if step.outcome == "ended":  # nothing is, if only what follows the end of the turn is written otherwise
        return not step.opened or re.search(r"<[^<>\s]+>\s*<?\|?\Z", step.shared()) is None
    return step.outcome == "rewritten" or (step.outcome != "refused" and not step.opened)


def said_broken(facts: Mapping[str, Any]) -> bool:
    """Whether the command says the same of any of its conversations."""
    return any(entry.get("broken") or entry.get("unknown") for entry in facts["answers"])


def compare(facts: Mapping[str, Any], template: Template) -> None:
    """Every fact that both know is the same."""
    assert said_broken(facts) == bool(broken(template))
    assert not (facts["append_only"] and said_broken(facts))
    assert (facts["clock"] is not None) == reads_clock(template)
    assert facts["beginning_token"]["written"] == writes_bos(template)
    compare_refusals(facts, template)
    compare_seams(facts, template)
    try:
        closed, opened = (template.text([user()], opened=is_opened) for is_opened in (False, True))
    except Refusal:
        return
    if opened.startswith(closed):
        assert opened[len(closed) :] in facts["generation_prompt"]["texts"]


def compare_refusals(facts: Mapping[str, Any], template: Template) -> None:
    """What may follow an answer and a call is refused by both, or by neither."""
    refused = {refusal["conversation"] for refusal in facts["refusals"] if refusal["message"] == 1}
    for name, chat in (
        ("answer, then the user", [user(), answer(), user(2)]),
        ("tool call, then its result", [user(), asking(), result()]),
        ("a system message last", [user(), answer(), system()]),
    ):
        assert (name in refused) == (not written(template, chat)), name


def compare_seams(facts: Mapping[str, Any], template: Template) -> None:
    """The text between contents is what rendering puts there."""
    texts = {(seam["left"], seam["right"]): seam["texts"] for seam in facts["between"]}
    own = between(template)
    if own["system to user"] is not None and texts.get(("system", "user")):
        assert own["system to user"] in texts["system", "user"]
    if own["assistant to user"] is not None and texts.get(("assistant", "user")):
        assert any(own["assistant to user"].endswith(text) for text in texts["assistant", "user"])
    opened = written(template, [user()], opened=True)
    if opened and texts.get(("user", "answer")):
        question = user()["content"]
        assert opened[opened.rfind(question) + len(question) :] in texts["user", "answer"]


def test_facts_of_published_templates_are_what_rendering_shows() -> None:
    files = needed()
    for name in some(list(files), 5):
        _, printed, _ = run("template", "--chat-template", files[name], "-f", "json")
        compare(json.loads(printed), published(name))


@pytest.mark.parametrize("folder", some(tokenizer_folders(), 2), ids=lambda folder: folder.name)
def test_facts_of_real_tokenizers_are_what_rendering_shows(folder: Path) -> None:
    _, printed, _ = run("template", folder, "-f", "json")
    compare(json.loads(printed), of_tokenizer(folder))
