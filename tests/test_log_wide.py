"""A log written with other template arguments, on another date or without its tools: said once, audited by it."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests import toy
from tests.command import run
from tests.tiers import some
from tito_audit import RepairSettings, Settings, repair_rollouts, scan_rollouts
from tito_audit.run.workers import can_fork
from tito_audit.tokens.load import load_tokenizer

BPE = str(toy.TOKENIZERS / "toy_bpe")
TEMPLATE = (
    "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y') }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\nDo not think.' }}{% endif %}"
    "{% for t in tools or [] %}{{ '\n' + t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": {}}}


def today(form: str) -> str:
    """The date as a template's clock tells it; asked when a row is written, as a run may pass midnight."""
    return datetime.now().strftime(form)


THEN = datetime(2024, 7, 26)
ROWS = 20


@cache
def template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


def row(
    number: int,
    at: datetime | None = None,
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
        clock = today if at is None else at.strftime
        written = template().render(
            messages=messages[:place], tools=tools, strftime_now=clock, add_generation_prompt=True, **args
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
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in rows))
    return str(folder / name)


def flags(folder: Path) -> tuple[str, ...]:
    return "-t", BPE, "--chat-template", str(folder / "toy.jinja")


def findings(*arguments: object) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(run("scan", *arguments, "-f", "json")[1])["findings"]
    return listed


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
    reported = findings(log, *flags(tmp_path))
    severity = "note" if code == "TPL210" else "warning"
    assert [(finding["code"], finding["severity"]) for finding in reported] == [(code, severity)], reported
    assert words in reported[0]["message"]
    assert f"pass -t {BPE} --chat-template {tmp_path / 'toy.jinja'} {more}" in reported[0]["message"]
    assert findings(log, *flags(tmp_path), *more.split()) == []


def test_a_log_that_comes_out_as_given_is_none_of_it(tmp_path: Path) -> None:
    assert findings(log_of(tmp_path, [row(number, tools=WITH) for number in range(ROWS)]), *flags(tmp_path)) == []


# What is left to its rows


def test_rows_that_differ_from_most_are_told_one_by_one(tmp_path: Path) -> None:
    """The other rows of an adopted log, and the odd ones of a log that is right."""
    for usual, odd in ((WITH, None), (None, WITH)):
        rows = [row(number, THEN, odd if number in (7, 12) else usual) for number in range(ROWS)]
        reported = findings(log_of(tmp_path, rows), *flags(tmp_path))
        assert [finding["code"] for finding in reported if finding["where"] == "log"] == [
            "REC011" if usual is None else "TPL210"
        ]
        assert {finding["row"] for finding in reported if finding["where"] != "log"} == {7, 12}
        if usual is WITH:
            assert {finding["code"] for finding in reported} == {"TPL210", "TPL212"}


def test_a_row_of_another_day_in_a_right_log_is_a_date(tmp_path: Path) -> None:
    rows = [row(number, THEN if number == 3 else None, WITH) for number in range(8)]
    reported = findings(log_of(tmp_path, rows), *flags(tmp_path))
    assert {(finding["code"], finding["row"]) for finding in reported} == {("TPL210", 3)}
    assert "the prompt was written on 2024-07-26" in reported[0]["message"]


def test_few_rows_prove_nothing_of_their_log(tmp_path: Path) -> None:
    rows = [row(number, THEN, WITH) for number in range(2)]
    reported = findings(log_of(tmp_path, rows), *flags(tmp_path))
    assert {(finding["code"], finding["where"]) for finding in reported} == {("TPL210", "prompt")}


def test_prompts_that_nothing_explains_stay_as_they_are(tmp_path: Path) -> None:
    rows = [row(number, tools=WITH) for number in range(8)]
    for record in rows:
        for call in record["calls"]:
            call["prompt_token_ids"] = toy.toy_tokenizer().encode("No template wrote this.").tolist()
    reported = findings(log_of(tmp_path, rows), *flags(tmp_path))
    assert reported
    assert {finding["code"] for finding in reported}.isdisjoint(("REC011", "TPL210"))
    assert "log" not in {finding["where"] for finding in reported}


def test_who_ignores_it_has_the_log_audited_as_given(tmp_path: Path) -> None:
    rows = [row(number, tools=WITH, enable_thinking=False) for number in range(ROWS)]
    reported = findings(log_of(tmp_path, rows), *flags(tmp_path), "--ignore", "REC011")
    assert {finding["row"] for finding in reported} == set(range(ROWS))
    assert not [finding for finding in reported if finding["where"] == "log"]


# Every way to run it


def test_a_sample_a_limit_and_a_row_do_not_change_what_the_log_was_written_with(tmp_path: Path) -> None:
    log = log_of(tmp_path, [row(number, THEN, WITH) for number in range(40)])
    for more in (("--limit", "1"), ("--sample", "0.2")):
        assert [finding["code"] for finding in findings(log, *flags(tmp_path), *more)] == ["TPL210"]


def test_a_pipe_is_not_looked_at(tmp_path: Path) -> None:
    log = log_of(tmp_path, [row(number, THEN, WITH) for number in range(6)])
    lines, pipe = Path(log).read_text(), tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    feeder = threading.Thread(target=pipe.write_text, args=(lines,), daemon=True)
    feeder.start()
    settings = Settings(tokenizer=BPE, chat_template=str(tmp_path / "toy.jinja"))
    results = list(scan_rollouts(str(pipe), settings))
    feeder.join(10)
    assert not [result for result in results if result.of_log]
    assert {finding.code for result in results for finding in result.findings} == {"TPL210"}


def test_a_baseline_knows_it_by_what_the_log_was_written_with(tmp_path: Path) -> None:
    log = log_of(tmp_path, [row(number, THEN, WITH) for number in range(6)])
    gate = "--baseline", str(tmp_path / "known.json"), "--fail-on", "note"
    assert run("scan", log, *flags(tmp_path), *gate, "--update-baseline")[0] == 0
    log_of(tmp_path, [row(number, THEN, WITH) for number in range(ROWS)])
    assert run("scan", log, *flags(tmp_path), *gate)[0] == 0
    log_of(tmp_path, [row(number, datetime(2024, 7, 27), WITH) for number in range(6)])
    assert run("scan", log, *flags(tmp_path), *gate)[0] == 1


def test_a_repair_sees_what_a_scan_sees(tmp_path: Path) -> None:
    rows = [row(number, tools=WITH, enable_thinking=False) for number in range(8)]
    log, out = log_of(tmp_path, rows), tmp_path / "out.jsonl"
    settings = Settings(tokenizer=BPE, chat_template=str(tmp_path / "toy.jinja"), fail_on="warning")
    for jobs in (1, 2) if can_fork() else (1,):
        repair = repair_rollouts(log, out, replace(settings, jobs=jobs), RepairSettings(force=True))
        outcomes = list(repair)
        assert not [result for outcome in outcomes for result in outcome.before if result.findings]
        assert [json.loads(line) for line in out.read_text().splitlines()] == rows
        assert repair.failing == 1, "the written log is told the same"
        assert repair.before.findings["REC011"] == repair.after.findings["REC011"]
        dry = repair_rollouts(log, None, replace(settings, jobs=jobs))
        list(dry)
        assert (dry.failing, set(dry.before.findings)) == (1, {"REC011"})


def test_a_row_is_shown_as_it_was_written_with_that_said(tmp_path: Path) -> None:
    log = log_of(tmp_path, [row(number, datetime(2024, 7, 1 + number), WITH) for number in range(6)])
    code, page, _ = run("show", f"{log}:4", *flags(tmp_path))
    assert code == 0
    assert "note TPL210: the prompts of this log were rendered on many dates" in page
    assert "canonical" not in page


@pytest.mark.parametrize("report", ["text", "concise", "github", "jsonl", "markdown", "junit", "sarif", "html"])
def test_reports_say_it_before_what_rows_show(tmp_path: Path, report: str) -> None:
    rows = [row(number, None, None if number in (4, 9) else WITH, enable_thinking=False) for number in range(ROWS)]
    out = run("scan", log_of(tmp_path, rows), *flags(tmp_path), "-f", report, "--fail-on", "note")[1]
    place = out.find("were rendered with enable_thinking=false")
    assert place > 0
    assert place < out.find("are missing from the prompt") or report in ("html", "sarif")


# A template that rewrites history

THINKS = TEMPLATE.replace(
    "m.content",
    "(('<think>' + m.reasoning_content + '</think>') if m.reasoning_content and loop.last else '') + m.content",
)


def test_a_template_that_strips_reasoning_is_one_note_for_the_log(tmp_path: Path) -> None:
    rows = [row(number, tools=WITH) for number in range(ROWS)]
    for number, record in enumerate(rows):
        record["messages"][1]["reasoning_content"] = "It rains." if number % 2 else None
    log = log_of(tmp_path, rows)
    (tmp_path / "toy.jinja").write_text(THINKS)
    notes = [finding for finding in findings(log, *flags(tmp_path)) if finding["code"] == "TPL213"]
    assert [(note["severity"], note["where"], note["row"]) for note in notes] == [("note", "log", 1)]
    words = "for 4 of the first 8 conversations: rendered up to the answer in message 1 of row 1 it writes"
    assert words in notes[0]["message"]
    named = f"`tito-audit template {BPE} --chat-template {tmp_path / 'toy.jinja'}` shows"
    assert named in notes[0]["message"]
    assert "TPL213" not in {each["code"] for each in findings(log, *flags(tmp_path), "--ignore", "TPL213")}


# Real logs, where they are at hand

SHARED = toy.ROOT.parent / "shared"
TODAYS = (
    "{{- bos_token }}{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' }}"
    "{%- if date_string is defined %}{{- date_string }}{%- else %}{{- strftime_now('%d %b %Y') }}{%- endif %}"
    "{{- '<|eot_id|>' }}{%- for m in messages %}{{- '<|start_header_id|>' + m.role }}"
    "{{- '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
REAL: dict[str, tuple[str, str | None, Mapping[str, Any], tuple[str, ...]]] = {
    "qwen3 without thinking": ("qwen3", None, {"enable_thinking": False}, ("REC011",)),
    "qwen3 as it is": ("qwen3", None, {}, ()),
    "llama on a date": ("llama-3.1", TODAYS, {"strftime_now": THEN.strftime}, ("TPL210",)),
    "llama with a date as text": ("llama-3.1", TODAYS, {"date_string": "26 July 2019"}, ("REC011",)),
    "llama today": ("llama-3.1", TODAYS, {"strftime_now": today}, ()),
    "deepseek as it is": ("deepseek-v3", None, {}, ()),
}


def first_calls(folder: Path, template: str | None, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first calls of real conversations, their prompts rendered by Jinja alone."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    source = environment.from_string(template or config["chat_template"])
    encode = load_tokenizer(str(folder)).encode
    bos = config.get("bos_token")
    special = {"bos_token": bos["content"] if isinstance(bos, dict) else bos or ""}
    rows = []
    with gzip.open(SHARED / "rollouts" / "smollm2" / "tito.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in islice(lines, 8):
            messages = json.loads(line)["messages"]
            at = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
            text = source.render(
                messages=messages[:at], add_generation_prompt=True, tools=None, **special, **arguments
            )
            ids = {"prompt_token_ids": encode(text).tolist(), "generation_token_ids": encode("Yes.").tolist()}
            rows.append({"messages": [*messages[:at], {"role": "assistant", "content": "Yes."}], "calls": [ids]})
    return rows


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout")
@pytest.mark.parametrize("case", some(sorted(REAL), 3))
def test_real_conversations_are_told_how_they_were_rendered(tmp_path: Path, case: str) -> None:
    name, template, arguments, wanted = REAL[case]
    folder = SHARED / "tokenizers" / name
    log, more = tmp_path / "log.jsonl", list[str]()
    log.write_text("".join(json.dumps(record) + "\n" for record in first_calls(folder, template, arguments)))
    if template is not None:
        (tmp_path / "its.jinja").write_text(template)
        more = ["--chat-template", str(tmp_path / "its.jinja")]
    reported = findings(log, "-t", str(folder), *more)
    codes = [
        finding["code"] for finding in reported if finding["severity"] != "note" or finding["code"] == "TPL210"
    ]
    assert tuple(codes) == wanted
    if wanted:
        words = shlex.split(reported[0]["message"].rpartition("; pass ")[2])
        assert not [finding for finding in findings(log, *words) if finding["severity"] != "note"]


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout")
def test_a_llama_log_scanned_with_the_qwen_tokenizer_says_so_first(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = first_calls(SHARED / "tokenizers" / "llama-3.1", None, {})
    log.write_text("".join(json.dumps(record) + "\n" for record in rows))
    reported = findings(log, "-t", str(SHARED / "tokenizers" / "qwen3"))
    assert (reported[0]["code"], reported[0]["where"]) == ("REC007", "log")
    assert f"`tito-audit identify {log}` tries those on this machine" in reported[0]["message"]
    assert not [finding for finding in reported[1:] if finding["severity"] == "error"]
