"""The date that templates write, and rendering without tools: what flags say about how prompts were written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests import toy
from tests.command import run, written
from tito_audit import Settings, scan_rollouts

BPE = str(toy.TOKENIZERS / "toy_bpe")
DATED = (
    "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": {}}}


def rendered(at: datetime, tools: Sequence[Mapping[str, Any]] | None, **more: Any) -> str:
    """What a sampler wrote, by Jinja alone."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = at.strftime
    return environment.from_string(DATED).render(tools=tools, **more)


def row(number: int, at: datetime, *, written_with: bool = False) -> dict[str, Any]:
    """A call whose tools the template saw only if it was `written_with` them."""
    messages = [
        {"role": "user", "content": f"Is it cold in the city today? ({number})"},
        {"role": "assistant", "content": "It is cold and it rains."},
    ]
    prompt = rendered(at, [TOOL] if written_with else None, messages=messages[:1], add_generation_prompt=True)
    encode = toy.toy_tokenizer().encode
    call = {
        "prompt_token_ids": encode(prompt).tolist(),
        "generation_token_ids": encode("It is cold and it rains.<|im_end|>").tolist(),
    }
    return {"messages": messages, "tools": [TOOL], "calls": [call]}


def log_of(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    (folder / "dated.jinja").write_text(DATED)
    return str(written(folder / "log.jsonl", rows))


def verdict(page: str) -> str:
    """The last line of a text report."""
    return page.splitlines()[-1]


def flags(folder: Path) -> tuple[str, ...]:
    return "-t", BPE, "--chat-template", str(folder / "dated.jinja")


def test_a_log_is_rendered_with_the_date_on_which_it_was_written(tmp_path: Path) -> None:
    at = datetime(2024, 7, 26, 9, 5)
    log = log_of(tmp_path, [row(number, at, written_with=True) for number in range(3)])
    code, out, _ = run("scan", log, *flags(tmp_path), "--clock", "2024-07-26")
    assert code == 0
    assert verdict(out).startswith("passed: no ")
    for other in ((), ("--clock", "2024-07-27")):
        assert verdict(run("scan", log, *flags(tmp_path), *other)[1]) != verdict(out)
    (tmp_path / "tito-audit.toml").write_text('clock = "2024-07-26T09:05"\n')
    config = "--config", str(tmp_path / "tito-audit.toml")
    assert verdict(run("scan", log, *flags(tmp_path), *config)[1]) == verdict(out)


def test_repair_and_show_take_the_date_too(tmp_path: Path) -> None:
    log = log_of(tmp_path, [row(0, datetime(2024, 7, 26), written_with=True)])
    shown = [run("show", f"{log}:0", *flags(tmp_path), *at)[1] for at in (("--clock", "2024-07-26"), ())]
    assert ["TPL" in page for page in shown] == [False, True]
    code, _, _ = run("repair", log, *flags(tmp_path), "--clock", "2024-07-26", "--dry-run", "--fail-on", "warning")
    assert code == 0


@pytest.mark.parametrize("bad", ["26.7.2024", "2024-02-30", "today", "2024-07-26T25:00", ""])
def test_what_is_no_date_is_said_in_two_lines(tmp_path: Path, bad: str) -> None:
    log = log_of(tmp_path, [row(0, datetime(2024, 7, 26))])
    code, _, err = run("scan", log, *flags(tmp_path), "--clock", bad)
    assert code == 2
    assert f"--clock {bad}: not a date" in err
    assert "Write --clock 2024-07-26, --clock 2024-07-26T14:30, or --clock recorded" in err
    assert "Traceback" not in err


def test_tools_that_no_prompt_saw_are_left_out_of_it(tmp_path: Path) -> None:
    log = log_of(tmp_path, [row(number, datetime(2024, 7, 26)) for number in range(3)])
    dated = *flags(tmp_path), "--clock", "2024-07-26"
    assert "TPL212" in run("scan", log, *dated)[1]
    code, out, _ = run("scan", log, *dated, "--tools", "none")
    assert code == 0
    assert verdict(out).startswith("passed: no ")
    (tmp_path / "tito-audit.toml").write_text('tools = "none"\n')
    assert verdict(run("scan", log, *dated, "--config", str(tmp_path / "tito-audit.toml"))[1]) == verdict(out)


def test_a_file_called_none_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(tmp_path, [row(0, datetime(2024, 7, 26))])
    (tmp_path / "none").write_text(json.dumps([TOOL]))
    monkeypatch.chdir(tmp_path)
    settings = Settings(tokenizer=BPE, chat_template="dated.jinja", tools="./none")
    scan = scan_rollouts(log, settings)
    list(scan)
    assert any("1 tool for 0 rollouts" in notice for notice in scan.summary.notices)
