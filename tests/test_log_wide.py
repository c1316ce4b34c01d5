"""A log written with other template arguments, on another date or without its tools: said once, audited by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests import toy
from tests.command import run

pytestmark = pytest.mark.usefixtures("loaded_once")

BPE = str(toy.TOKENIZERS / "toy_bpe")
TEMPLATE = (
    "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y') }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\nDo not think.' }}{% endif %}"
    "{% for t in tools or [] %}{{ '\n' + t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": {}}}
NOW = datetime.now()
THEN = datetime(2024, 7, 26)
ROWS = 20


@cache
def template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


def row(
    number: int,
    at: datetime = NOW,
    tools: Sequence[Mapping[str, Any]] | None = None,
    stated: Mapping[str, Any] | None = None,
    **args: Any,
) -> dict[str, Any]:
    """Two calls, their prompts written by Jinja alone; the row states a tool, whatever they were written with."""
    words = ("Is it cold in the city today?", "It is cold and it rains.", "And tomorrow?", "The sun will be out.")
    messages = [
        {"role": role, "content": f"{text} ({number})"}
        for role, text in zip(("user", "assistant") * 2, words, strict=True)
    ]
    calls = []
    for place in (1, 3):
        written = template().render(
            messages=messages[:place], tools=tools, strftime_now=at.strftime, add_generation_prompt=True, **args
        )
        answer = messages[place]["content"] + "<|im_end|>"
        encode = toy.toy_tokenizer().encode
        calls.append(
            {"prompt_token_ids": encode(written).tolist(), "generation_token_ids": encode(answer).tolist()}
        )
    more = {} if stated is None else {"chat_template_kwargs": dict(stated)}
    return {"messages": messages, "tools": [TOOL], "calls": calls, **more}


def log_of(folder: Path, rows: Sequence[Any], name: str = "log.jsonl") -> str:
    (folder / "toy.jinja").write_text(TEMPLATE)
    (folder / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(folder / name)


def flags(folder: Path) -> tuple[str, ...]:
    return "-t", BPE, "--chat-template", str(folder / "toy.jinja")


def findings(*arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("scan", *arguments, "-f", "json")[1])["findings"]
    return found


WITH = [TOOL]
CAUSES: dict[str, tuple[str, Callable[[int], dict[str, Any]], str, str]] = {
    "argument": (
        "REC011",
        lambda number: row(number, tools=WITH, enable_thinking=False),
        "with enable_thinking=false",
        "--template-arg enable_thinking=false",
    ),
    "date": ("TPL210", lambda number: row(number, THEN, WITH), "on 2024-07-26", "--clock 2024-07-26"),
    "dates": (
        "TPL210",
        lambda number: row(number, datetime(2024, 7, 1 + number), WITH),
        "on many dates, 2024-07-01, 2024-07-02 and 2024-07-03 among them",
        "--clock recorded",
    ),
    "tools": ("TPL212", row, "without the tools that the rows state", "--tools none"),
    "several": (
        "REC011",
        lambda number: row(number, THEN, None, enable_thinking=False),
        "with enable_thinking=false, on 2024-07-26",
        "--template-arg enable_thinking=false --clock 2024-07-26 --tools none",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_differs_in_every_prompt_is_said_once_with_the_flags_to_pass(tmp_path: Path, cause: str) -> None:
    code, written, words, more = CAUSES[cause]
    log = log_of(tmp_path, [written(number) for number in range(ROWS)])
    found = findings(log, *flags(tmp_path))
    assert [(one["code"], one["severity"]) for one in found] == [(code, "error")], found
    assert words in found[0]["message"]
    assert f"pass -t {BPE} --chat-template {tmp_path / 'toy.jinja'} {more}" in found[0]["message"]
    assert findings(log, *flags(tmp_path), *more.split()) == []


def test_a_log_that_comes_out_as_given_is_none_of_it(tmp_path: Path) -> None:
    assert findings(log_of(tmp_path, [row(number, tools=WITH) for number in range(ROWS)]), *flags(tmp_path)) == []
