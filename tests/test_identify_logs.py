"""`identify` on logs of which everything is known: it finds what wrote them, and is sure of nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from os import environ
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.identified import writer
from tests.identified.judge import says_the_case, writes_all
from tests.identified.writer import MODELS, TEMPLATES, Case, Prompt, log_of, random_case, rows_of, seen_prompts
from tests.tiers import examples, some

SHARED = Path(__file__).resolve().parents[2] / "shared"
TOKENIZERS = Path(environ.get("TITO_AUDIT_TOKENIZERS") or SHARED / "tokenizers")
ROLLOUTS = SHARED / "rollouts"
LOGS = examples(3, 350)
FOUND = 0.95
"""The share of the logs whose settings must be found."""

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(
        not (ROLLOUTS.is_dir() and TOKENIZERS.is_dir()), reason="no shared data beside the checkout"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _tokenizers() -> None:
    writer.use(TOKENIZERS)


@cache
def chats() -> list[dict[str, Any]]:
    return [
        conversation
        for name in ("qwen2.5-coder", "gemma-3", "smollm2")
        for conversation in writer.conversations(ROLLOUTS, name)
    ]


def offered(tokenizers: Sequence[str]) -> Iterator[object]:
    """The flags that offer these tokenizers, each with the templates that may write its logs."""
    for name in tokenizers:
        yield from ("-t", TOKENIZERS / name)
    for file in dict.fromkeys(file for name in tokenizers for file in MODELS[name][0] if file is not None):
        yield from ("--chat-template", TEMPLATES / file)


def identified(log: Path, tokenizers: Sequence[str], *more: object) -> dict[str, Any]:
    """What the command says of a log, as JSON; its exit code says whether it is sure."""
    code, out, error = run("identify", log, *offered(tokenizers), "-f", "json", "--no-config", *more)
    page: dict[str, Any] = json.loads(out)
    assert code == (0 if page["sure"] else 1), error
    return page


def log_with(case: Case, path: Path, rows: int = 12) -> tuple[Path, list[Prompt]]:
    """The log of a case, and the prompts that it holds."""
    rows = 40 if case.broken else rows
    calls = log_of(case, chats(), rows)
    assert len({call.row for call in calls}) == rows, f"{case}: too few conversations for its template"
    return written(path / f"{case.seed}.jsonl", rows_of(case, calls)), seen_prompts(case, calls)


def test_what_wrote_a_log_is_found_and_nothing_else_is_sure(tmp_path: Path) -> None:
    missed = []
    for case in map(random_case, range(LOGS)):
        log, prompts = log_with(case, tmp_path)
        page = identified(log, [case.tokenizer])
        best = page["explanations"][0] if page["explanations"] else None
        right = best is not None and writes_all(best, prompts)
        assert right or not page["sure"], f"{case}: sure of {best}"
        if not (right and page["sure"]):
            missed.append(f"{case}: {page['because']}: {best}")
    assert len(missed) <= (1 - FOUND) * LOGS, "\n".join(missed)


def plain(tokenizer: str) -> Case:
    """A case of a tokenizer without any departure."""
    number = list(MODELS).index(tokenizer)
    case = random_case(number)
    changed = replace(case, arguments={}, tools="as logged", system=None, bos="once", generation_prompt=True)
    return replace(
        changed, as_object=tokenizer not in writer.STRINGS, form="calls", template=MODELS[tokenizer][0][-1]
    )


@pytest.mark.parametrize("tokenizer", some(list(MODELS), 2))
def test_the_right_one_of_seven_tokenizers_is_named(tokenizer: str, tmp_path: Path) -> None:
    case = plain(tokenizer)
    log, prompts = log_with(case, tmp_path, 6)
    others = [name for name in MODELS if name != tokenizer][: examples(1, 6)]
    page = identified(log, [*others, tokenizer])
    best = page["explanations"][0]
    assert page["sure"], page["because"]
    assert writes_all(best, prompts)
    # Where these rows cannot tell two of them apart, both are named.
    assert any(says_the_case(explanation, case) for explanation in (best, *best["equal"]))


@pytest.mark.parametrize("tokenizer", some(list(MODELS)[1:], 2))
def test_of_the_wrong_tokenizers_none_is_sure(tokenizer: str, tmp_path: Path) -> None:
    case = plain(tokenizer)
    log, prompts = log_with(case, tmp_path, 6)
    others = [name for name in MODELS if name != tokenizer][: examples(1, 6)]
    page = identified(log, others)
    # Qwen2.5 and Qwen3 share their merges, so that the one may write what the other wrote.
    assert not page["sure"] or writes_all(page["explanations"][0], prompts)


def test_of_the_wrong_templates_none_is_sure(tmp_path: Path) -> None:
    cases = [case for case in map(random_case, range(LOGS * 2)) if len(MODELS[case.tokenizer][0]) > 1]
    assert len(cases) > LOGS / 2
    for case in cases[: examples(2, 200)]:
        log, prompts = log_with(case, tmp_path)
        others = [file for file in MODELS[case.tokenizer][0] if file not in (case.template, None)]
        flags = [word for file in others for word in ("--chat-template", TEMPLATES / file)]
        # The tokenizer's own template is always tried, and it wrote some of these logs.
        code, out, _ = run("identify", log, "-t", TOKENIZERS / case.tokenizer, *flags, "-f", "json", "--no-config")
        page = json.loads(out)
        assert code == (0 if page["sure"] else 1)
        assert not page["sure"] or writes_all(page["explanations"][0], prompts), f"{case}: {page['command']}"
